// The layers as the reduction plan lists them: norms, branches, taps, in order, each with the sum that the plan orders for it and no other. Where the
// plan shares rows out to the ranks, buffers keep their shape and a rank works on its own rows in them.
#include "runtime/moe_parts.h"

#define STEP(pass, step, ...) K3_TRY((pass)->moe->backend->ops->moe->step((pass)->exec, &(struct k3_##step){__VA_ARGS__}, err))

// A buffer of [n, H] from this rank's own rows on, when it has nothing else.
static void *rows_of(const struct k3_moe_pass *pass, void *buffer, bool on_rows) {
  const uint64_t row_nbytes = pass->moe->model.hidden_size * pass->moe->backend->act_nbytes;
  return (unsigned char *)buffer + (on_rows ? pass->own_first * row_nbytes : 0);
}

static enum k3_status gather(struct k3_moe_pass *pass, void *buffer, const char *name, struct k3_error *err) {
  STEP(pass, gather_rows, .n_each = pass->n_each, .width = pass->moe->model.hidden_size, .values = buffer, .name = name, .own = pass->copy);
  return K3_OK;
}

// Stream and branch whole again.
static enum k3_status gather_stream(struct k3_moe_pass *pass, const struct k3_flow *flow, const char *name, struct k3_error *err) {
  if (flow->gather != K3_GATHER_INPUT)
    return K3_OK;
  K3_TRY(gather(pass, pass->residual, name, err));
  return pass->has_branch ? gather(pass, pass->branch, name, err) : K3_OK;
}

static enum k3_status store(struct k3_moe_pass *pass, const void *in, const void *also, const struct k3_flow *flow, float *out,
                            struct k3_error *err) {
  bool reduce = flow && flow->reduce == K3_REDUCE_ALL;
  if (!out && !reduce)
    return K3_OK;
  STEP(pass, store_rows, .n_rows = pass->n_rows, .width = pass->moe->model.hidden_size, .in = in, .also = also, .reduce = reduce, .name = "a tap",
       .order = pass->order, .copy = pass->copy, .out = out);
  return K3_OK;
}

// The stream after `n_layers` layers of the range, for every tap that asks for it.
static enum k3_status tap(struct k3_moe_pass *pass, uint64_t n_layers, const struct k3_flow *flow, struct k3_error *err) {
  const struct k3_moe_options *o = &pass->moe->options;
  for (size_t t = 0; t < o->n_taps; t++) {
    if (o->taps[t] == o->first_layer + n_layers)
      K3_TRY(store(pass, pass->residual, pass->has_branch ? pass->branch : NULL, flow, pass->rows->out_taps ? pass->rows->out_taps[t] : NULL, err));
  }
  return K3_OK;
}

static enum k3_status begin(struct k3_moe_pass *pass, struct k3_error *err) {
  const struct k3_moe_rows *rows = pass->rows;
  const uint64_t H = pass->moe->model.hidden_size;
  pass->has_branch = rows->residual.data != NULL;
  STEP(pass, load_rows, .n_rows = pass->n_rows, .width = H, .in = &rows->hidden, .order = pass->order,
       .out = pass->has_branch ? pass->branch : pass->residual);
  if (pass->has_branch)
    STEP(pass, load_rows, .n_rows = pass->n_rows, .width = H, .in = &rows->residual, .order = pass->order, .out = pass->residual);
  return tap(pass, 0, NULL, err);
}

// residual += branch, completed here when the plan says so; normed = the norm behind `last` (NULL: that of the range's first layer).
static enum k3_status norm(struct k3_moe_pass *pass, const struct k3_flow *flow, const struct k3_flow *last, struct k3_error *err) {
  const struct k3_moe *moe = pass->moe;
  const bool is_final = last && last->sum != K3_SUM_ATTENTION && last->layer + 1 == moe->options.n_layers;
  const struct k3_vector *weight = !last                           ? &moe->layers[0].input_norm
                                   : last->sum == K3_SUM_ATTENTION ? &moe->layers[last->layer].post_norm
                                   : is_final                      ? &moe->final_norm
                                                                   : &moe->layers[last->layer + 1].input_norm;
  K3_TRY(gather_stream(pass, flow, flow->name, err));
  const bool on_rows = flow->gather != K3_GATHER_INPUT && (pass->stream_on_rows || pass->branch_on_rows);
  if (is_final)
    K3_TRY(store(pass, pass->residual, NULL, NULL, pass->rows->out_residual, err));
  STEP(pass, moe_norm, .n_rows = on_rows ? pass->n_own : pass->n_rows, .width = moe->model.hidden_size,
       .branch = pass->has_branch ? rows_of(pass, pass->branch, on_rows) : NULL, .residual = rows_of(pass, pass->residual, on_rows),
       .reduce = flow->reduce == K3_REDUCE_ALL, .gemma = moe->model.gemma_norm, .name = flow->name, .weight = weight,
       .eps = (float)moe->model.rms_norm_eps, .out = rows_of(pass, pass->normed, on_rows));
  if (flow->gather == K3_GATHER_OUTPUT)
    K3_TRY(gather(pass, pass->normed, flow->name, err));
  pass->stream_on_rows = on_rows;
  pass->has_branch = pass->branch_on_rows = false;
  if (!is_final)
    return K3_OK;
  K3_TRY(store(pass, pass->branch, NULL, NULL, pass->rows->out_hidden, err));
  return store(pass, pass->normed, NULL, NULL, pass->rows->out_final, err);
}

// Whether a branch is summed where it is produced: the plan orders it, or the kernel is one that returns whole sums of cut weights.
static bool sums_at_once(const struct k3_moe_pass *pass, const struct k3_flow *flow) {
  return flow->reduce == K3_REDUCE_ALL || (pass->moe->options.tp_size > 1 && !flow->partial && !flow->on_rows);
}
#define PRODUCES(pass, flow) .reduce = sums_at_once(pass, flow), .partial = (flow)->partial && (flow)->reduce != K3_REDUCE_ALL, .name = (flow)->name

static enum k3_status attention(struct k3_moe_pass *pass, const struct k3_flow *flow, struct k3_error *err) {
  const struct k3_moe *moe = pass->moe;
  const struct k3_moe_model *m = &moe->model;
  const struct k3_moe_layer *w = &moe->layers[flow->layer];
  const uint64_t P = m->qk_nope_head_dim, R = m->qk_rope_head_dim;
  const bool is_gqa = m->family == K3_MOE_MINIMAX_M3;
  if (is_gqa)
    STEP(pass, gqa, .n_rows = pass->n_rows, .n_heads = moe->n_heads, .n_kv_heads = moe->n_kv_heads, .head_dim = m->head_dim, .in = pass->normed,
         .q_proj = &w->q_proj, .k_proj = &w->k_proj, .v_proj = &w->v_proj, .q_norm = &w->q_norm, .k_norm = &w->k_norm, .eps = (float)m->rms_norm_eps,
         .gemma = m->gemma_norm, .rope = &moe->rope, .positions = pass->positions, .q = pass->q, .k = pass->k, .v = pass->v);
  else
    STEP(pass, mla, .n_rows = pass->n_rows, .n_heads = moe->n_heads, .nope_width = P, .rope_width = R, .v_width = m->v_head_dim,
         .q_rank = m->q_lora_rank, .latent_rank = m->kv_lora_rank, .in = pass->normed, .qkv_a = &w->qkv_a, .q_b = &w->q_b, .kv_b = &w->kv_b,
         .q_norm = &w->q_a_norm, .kv_norm = &w->kv_a_norm, .eps = (float)m->rms_norm_eps, .rope = &moe->rope, .positions = pass->positions,
         .projected = pass->projected, .q_a = pass->q_a, .latent = pass->latent, .expanded = pass->expanded, .q = pass->q, .k = pass->k,
         .v = pass->v);
  STEP(pass, attend_rows, .n_rows = pass->n_rows, .n_heads = moe->n_heads, .n_kv_heads = moe->n_kv_heads, .key_width = is_gqa ? m->head_dim : P + R,
       .v_width = is_gqa ? m->head_dim : m->v_head_dim, .q = pass->q, .k = pass->k, .v = pass->v, .first_keys = pass->first_keys,
       .scale = moe->softmax_scale, .out = pass->heads);
  K3_TRY(moe->backend->ops->project(
      pass->exec, &(struct k3_project){.n_rows = pass->n_rows, .in = pass->heads, .proj = &w->o_proj, PRODUCES(pass, flow), .out = pass->branch},
      err));
  pass->branch_on_rows = flow->reduce == K3_REDUCE_SCATTER;
  if (pass->branch_on_rows)
    STEP(pass, scatter_rows, .n_each = pass->n_each, .width = m->hidden_size, .values = pass->branch, .name = flow->name);
  return K3_OK;
}

static enum k3_status feed_forward(struct k3_moe_pass *pass, const struct k3_flow *flow, struct k3_error *err) {
  const struct k3_moe_model *m = &pass->moe->model;
  const struct k3_moe_layer *w = &pass->moe->layers[flow->layer];
  const struct k3_gate gate = {m->activation, (float)m->alpha, (float)m->limit};
  const uint64_t n_rows = flow->on_rows ? pass->n_own : pass->n_rows;
  void *in = rows_of(pass, pass->normed, flow->on_rows), *out = rows_of(pass, pass->branch, flow->on_rows);
  pass->branch_on_rows = flow->on_rows;
  if (w->router.n_shards == 0) {
    STEP(pass, gated_mlp, .n_rows = n_rows, .in = in, .gate_up = &w->gate_up, .down = &w->down, .gate = gate, PRODUCES(pass, flow),
         .gate_up_rows = pass->gate_up_rows, .gated = pass->gated, .out = out);
    return K3_OK;
  }
  STEP(pass, route, .n_rows = n_rows, .n_active = m->n_active, .n_groups = m->n_groups, .n_active_groups = m->n_active_groups, .in = in,
       .gate = &w->router, .bias = &w->bias, .scale = (float)m->routed_scale, .renormalise = m->renormalise, .name = flow->name,
       .logits = pass->logits, .experts = pass->experts, .weights = pass->weights);
  STEP(pass, experts, .n_rows = n_rows, .n_experts = m->n_experts, .n_active = m->n_active, .in = in, .gate_up = w->expert_gate_up,
       .down = w->expert_down, .shared_gate_up = &w->gate_up, .shared_down = &w->down, .gate = gate, .experts = pass->experts,
       .weights = pass->weights, PRODUCES(pass, flow), .gathered = pass->gathered, .gate_up_rows = pass->gate_up_rows, .gated = pass->gated,
       .contribution = pass->contribution, .out = out);
  return K3_OK;
}

enum k3_status k3_moe_forward(struct k3_moe_pass *pass, struct k3_error *err) {
  const struct k3_reduction_plan *plan = &pass->moe->plan;
  const struct k3_flow *last = NULL;
  for (size_t i = 0; i < plan->n_steps; i++) {
    const struct k3_flow *flow = &plan->steps[i];
    switch (flow->kind) {
      case K3_FLOW_START: K3_TRY(begin(pass, err)); break;
      case K3_FLOW_NORM: K3_TRY(norm(pass, flow, last, err)); break;
      case K3_FLOW_PRODUCE:
        K3_TRY(flow->sum == K3_SUM_ATTENTION ? attention(pass, flow, err) : feed_forward(pass, flow, err));
        pass->has_branch = true;
        last = flow;
        break;
      case K3_FLOW_TAP:
        K3_TRY(gather_stream(pass, flow, "a tap", err));
        K3_TRY(tap(pass, flow->layer + 1, flow, err));
        break;
      case K3_FLOW_BORDER: break;  // both stages are this process; rank r hands its part to itself
      case K3_FLOW_OUTPUT:
        K3_TRY(gather_stream(pass, flow, "the output", err));
        K3_TRY(tap(pass, flow->layer + 1, NULL, err));
        K3_TRY(store(pass, pass->residual, NULL, NULL, pass->rows->out_residual, err));
        K3_TRY(store(pass, pass->branch, NULL, NULL, pass->rows->out_hidden, err));
        break;
    }
  }
  return K3_OK;
}
