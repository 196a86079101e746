// The forward of the drafter, twice a list of steps: context rows from target states, and a block of drafts from anchors.
#include "runtime/engine.h"

// One step of the backend with the fields of its params, and for whoever measures the bytes of weights it reads and the activations (with logits)
// that go in and come out. Returns on failure.
#define STEP(session, step, weight_nbytes, n_activations, ...)                                                             \
  do {                                                                                                                     \
    if (!k3_measure_takes(session, #step))                                                                                 \
      break;                                                                                                               \
    K3_TRY((session)->engine->backend->ops->step((session)->exec, &(struct k3_##step){__VA_ARGS__}, err));                 \
    K3_TRY(k3_measure_step(session, #step, weight_nbytes, (n_activations) * (session)->engine->backend->act_nbytes, err)); \
  } while (0)

enum k3_status k3_forward_context(struct k3_session *session, const struct k3_cache *cache, const struct k3_context *context, uint64_t first_row,
                                  uint64_t n_rows, struct k3_error *err) {
  const struct k3_engine *engine = session->engine;
  const struct k3_dspark_model *m = &engine->model;
  const struct k3_weights *w = &engine->weights;
  const uint64_t row_width = m->kv_lora_rank + m->qk_rope_head_dim;
  struct k3_array states = context->states, rows = context->rows;
  states.row_nbytes = states.row_nbytes ? states.row_nbytes : m->hidden_size * sizeof(float);
  rows.row_nbytes = rows.row_nbytes ? rows.row_nbytes : row_width * sizeof(float);

  STEP(session, combine, k3_matrix_nbytes(&w->context_proj), n_rows * (m->n_taps * m->target_hidden_size + m->hidden_size), .n_rows = n_rows,
       .n_taps = m->n_taps, .tap_width = m->target_hidden_size, .taps = context->taps, .n_tap_arrays = context->n_tap_arrays, .first_row = first_row,
       .tap_norms = w->tap_norms, .proj = &w->context_proj, .norm = &w->context_norm, .eps = (float)m->rms_norm_eps, .joined = session->joined,
       .projected = session->projected, .out = session->context,
       .out_f32 = states.data ? (float *)((unsigned char *)states.data + first_row * states.row_nbytes) : NULL, .out_row_nbytes = states.row_nbytes);
  STEP(session, context_insert, k3_matrix_nbytes(&w->context_kv), n_rows * (m->hidden_size + m->n_layers * row_width), .n_rows = n_rows,
       .n_layers = m->n_layers, .latent_rank = m->kv_lora_rank, .rope_width = m->qk_rope_head_dim, .context = session->context, .kv = &w->context_kv,
       .norms = w->kv_norms, .eps = (float)m->rms_norm_eps, .rope = &engine->rope, .positions = context->positions + first_row,
       .slots = context->slots + first_row, .slots_layer_stride = context->slots_layer_stride, .max_positions = m->max_position_embeddings,
       .cache = cache, .kv_rows = session->kv_rows, .out_f32 = rows.data ? (float *)((unsigned char *)rows.data + first_row * rows.row_nbytes) : NULL,
       .out_row_nbytes = rows.row_nbytes, .out_layer_rows = context->n_rows);
  return K3_OK;
}

// A plan's step as the fields of a params struct: whether to sum over the ranks here, and whether what comes out is left as a part of a sum.
#define REDUCES(flow)  .reduce = (flow)->reduce == K3_REDUCE_ALL, .name = (flow)->name
#define PRODUCES(flow) REDUCES(flow), .partial = (flow)->partial && (flow)->reduce == K3_REDUCE_NONE

// residual += branch (completed over the ranks when the plan says so); normed = norm(residual).
static enum k3_status add_norm(struct k3_session *session, uint64_t n_rows, bool has_branch, const struct k3_flow *flow, const struct k3_vector *norm,
                               struct k3_error *err) {
  const struct k3_dspark_model *m = &session->engine->model;
  STEP(session, reduce_add_norm, 0, n_rows * m->hidden_size * (has_branch ? 4 : 2), .n_rows = n_rows, .width = m->hidden_size,
       .partial = has_branch ? session->branch : NULL, REDUCES(flow), .residual = session->residual, .norm = norm, .eps = (float)m->rms_norm_eps,
       .out = session->normed);
  return K3_OK;
}

// From `normed` to `branch`, which is a partial sum over the ranks.
static enum k3_status attention(struct k3_session *session, const struct k3_cache *cache, const struct k3_draft *draft, uint64_t layer,
                                struct k3_error *err) {
  const struct k3_engine *engine = session->engine;
  const struct k3_dspark_model *m = &engine->model;
  const struct k3_layer_weights *w = &engine->weights.layers[layer];
  const uint64_t n_rows = draft->n_requests * m->block_width, row_width = m->kv_lora_rank + m->qk_rope_head_dim;
  STEP(session, latents, k3_matrix_nbytes(&w->qkv_a), n_rows * (m->hidden_size + m->q_lora_rank + row_width), .n_rows = n_rows,
       .q_rank = m->q_lora_rank, .latent_rank = m->kv_lora_rank, .rope_width = m->qk_rope_head_dim, .layer = layer, .in = session->normed,
       .proj = &w->qkv_a, .q_norm = &w->q_a_norm, .kv_norm = &w->kv_a_norm, .eps = (float)m->rms_norm_eps, .rope = &engine->rope,
       .positions = session->positions, .slots = session->slots, .cache = cache, .projected = session->latents, .q_a = session->q_a);
  STEP(session, query, k3_matrix_nbytes(&w->q_b) + k3_matrix_nbytes(&w->kv_b) / 2, n_rows * (m->q_lora_rank + engine->n_heads * row_width),
       .n_rows = n_rows, .q_rank = m->q_lora_rank, .n_heads = engine->n_heads, .nope_width = m->qk_nope_head_dim, .rope_width = m->qk_rope_head_dim,
       .v_width = m->v_head_dim, .latent_rank = m->kv_lora_rank, .q_a = session->q_a, .q_b = &w->q_b, .kv_b = &w->kv_b, .rope = &engine->rope,
       .positions = session->positions, .q = session->q, .out = session->query);
  STEP(session, attend, k3_matrix_nbytes(&w->kv_b) / 2, n_rows * engine->n_heads * (row_width + m->v_head_dim), .n_requests = draft->n_requests,
       .block_width = m->block_width, .n_heads = engine->n_heads, .nope_width = m->qk_nope_head_dim, .rope_width = m->qk_rope_head_dim,
       .v_width = m->v_head_dim, .latent_rank = m->kv_lora_rank, .layer = layer, .max_blocks = draft->max_blocks, .query = session->query,
       .kv_b = &w->kv_b, .cache = cache, .block_tables = draft->block_tables, .n_keys = session->n_keys, .anchor_positions = draft->anchor_positions,
       .scale = engine->softmax_scale, .causal = m->causal, .latent = session->latent, .out = session->heads);
  STEP(session, project, k3_matrix_nbytes(&w->o_proj), n_rows * (w->o_proj.n_cols + m->hidden_size), .n_rows = n_rows, .in = session->heads,
       .proj = &w->o_proj, PRODUCES(engine->reductions.o_proj[layer]), .out = session->branch);
  return K3_OK;
}

static enum k3_status mlp(struct k3_session *session, uint64_t n_rows, uint64_t layer, struct k3_error *err) {
  const struct k3_engine *engine = session->engine;
  const struct k3_layer_weights *w = &engine->weights.layers[layer];
  STEP(session, mlp, k3_matrix_nbytes(&w->gate_up) + k3_matrix_nbytes(&w->down), n_rows * 2 * w->gate_up.n_cols, .n_rows = n_rows,
       .width = w->down.n_cols, .in = session->normed, .gate_up = &w->gate_up, .down = &w->down, PRODUCES(engine->reductions.down[layer]),
       .gate_up_rows = session->gate_up, .gated = session->gated, .out = session->branch);
  return K3_OK;
}

static enum k3_status export_rows(struct k3_session *session, uint64_t n_rows, uint64_t width, const void *in, bool in_is_f32,
                                  const struct k3_array *out, struct k3_error *err) {
  if (!out->data)
    return K3_OK;
  const uint64_t row_nbytes = out->row_nbytes ? out->row_nbytes : width * sizeof(float);
  STEP(session, export, 0, n_rows * width, .n_rows = n_rows, .width = width, .in = in, .in_is_f32 = in_is_f32, .out = out->data,
       .out_row_nbytes = row_nbytes);
  return K3_OK;
}

// Logits of `normed`, then the Markov loop.
static enum k3_status heads(struct k3_session *session, const struct k3_draft *draft, struct k3_error *err) {
  const struct k3_engine *engine = session->engine;
  const struct k3_dspark_model *m = &engine->model;
  const struct k3_weights *w = &engine->weights;
  const uint64_t n_rows = draft->n_requests * m->block_width;
  K3_TRY(export_rows(session, n_rows, m->hidden_size, session->normed, false, &draft->hidden, err));
  if (!draft->draft_ids.data && !draft->confidence.data && !draft->base_logits.data && !draft->logits.data)
    return K3_OK;
  STEP(session, logits, k3_matrix_nbytes(&w->head), n_rows * (m->hidden_size + m->vocab_size * sizeof(float) / session->engine->backend->act_nbytes),
       .n_rows = n_rows, .vocab_size = m->vocab_size, .hidden = session->normed, .head = &w->head, .part = session->logits_part,
       .parts = session->logits_parts, .name = "lm_head", .scale = (float)m->logit_scale, .out = session->base_logits);
  K3_TRY(export_rows(session, n_rows, m->vocab_size, session->base_logits, true, &draft->base_logits, err));
  STEP(session, markov, m->block_width * k3_matrix_nbytes(&w->markov_w2),
       n_rows * m->vocab_size * sizeof(float) / session->engine->backend->act_nbytes, .n_requests = draft->n_requests, .block_width = m->block_width,
       .vocab_size = m->vocab_size, .rank = m->markov_rank, .hidden_size = m->hidden_size, .base_logits = session->base_logits, .w1 = &w->markov_w1,
       .w2 = &w->markov_w2, .scale = (float)m->logit_scale, .anchor_ids = draft->anchor_ids, .previous_ids = draft->previous_ids,
       .hidden = session->normed, .confidence = m->confidence_head ? &w->confidence : NULL, .confidence_bias = &w->confidence_bias,
       .confidence_with_markov = m->confidence_with_markov, .out_ids = draft->draft_ids.data ? draft->draft_ids.data : session->ids,
       .out_confidence = draft->confidence.data, .out_logits = draft->logits.data,
       .out_row_nbytes = draft->logits.row_nbytes ? draft->logits.row_nbytes : m->vocab_size * sizeof(float));
  return K3_OK;
}

enum k3_status k3_forward_block(struct k3_session *session, const struct k3_cache *cache, const struct k3_draft *draft, struct k3_error *err) {
  const struct k3_engine *engine = session->engine;
  const struct k3_dspark_model *m = &engine->model;
  const struct k3_weights *w = &engine->weights;
  const struct k3_reductions *reductions = &engine->reductions;
  const uint64_t n_rows = draft->n_requests * m->block_width;

  STEP(session, block_begin, 0, 2 * n_rows * m->hidden_size, .n_requests = draft->n_requests, .block_width = m->block_width,
       .max_positions = m->max_position_embeddings, .vocab_size = m->vocab_size, .max_blocks = draft->max_blocks, .mask_token_id = m->mask_token_id,
       .anchor_ids = draft->anchor_ids, .anchor_positions = draft->anchor_positions, .block_tables = draft->block_tables, .cache = cache,
       .embedding = &w->embedding, REDUCES(reductions->embedding), .positions = session->positions, .slots = session->slots,
       .n_keys = session->n_keys, .residual = session->residual);
  for (uint64_t i = 0; i < m->n_layers; i++) {
    const struct k3_layer_weights *layer = &w->layers[i];
    K3_TRY(add_norm(session, n_rows, i > 0, reductions->input_norm[i], &layer->input_norm, err));
    K3_TRY(attention(session, cache, draft, i, err));
    K3_TRY(add_norm(session, n_rows, true, reductions->post_norm[i], &layer->post_norm, err));
    K3_TRY(mlp(session, n_rows, i, err));
  }
  K3_TRY(add_norm(session, n_rows, true, reductions->final_norm, &w->final_norm, err));
  return heads(session, draft, err);
}
