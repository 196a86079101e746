// Binding of the decoder layers' weights: names of both families as their images have them.
#include <stdio.h>
#include <string.h>

#include "runtime/bind.h"
#include "runtime/moe_parts.h"

struct layer_binder {
  struct k3_binder *binder;
  const struct k3_moe_model *m;
  char base[96];   // "model.layers.3"
  char name[192];  // of the tensor or module at hand
};

static const char *name_of(struct layer_binder *b, const char *suffix) {
  snprintf(b->name, sizeof b->name, "%s.%s", b->base, suffix);
  return b->name;
}

static enum k3_status vector(struct layer_binder *b, struct k3_vector *v, uint64_t n, const char *suffix) {
  return k3_bind_vector(b->binder, v, n, name_of(b, suffix));
}

static enum k3_status matrix(struct layer_binder *b, struct k3_matrix *w, uint64_t n_rows, uint64_t n_cols, uint64_t n_units, enum k3_tp_rule tp,
                             const char *suffix) {
  return k3_bind_matrix(b->binder, w, &n_rows, 1, n_cols, n_units, tp, name_of(b, suffix));
}

static enum k3_status pair(struct layer_binder *b, struct k3_matrix *w, uint64_t n_first, uint64_t n_second, enum k3_tp_rule tp, const char *suffix) {
  const uint64_t rows[2] = {n_first, n_second};
  return k3_bind_matrix(b->binder, w, rows, 2, b->m->hidden_size, 0, tp, name_of(b, suffix));
}

static enum k3_status bind_gqa(struct layer_binder *b, struct k3_moe_layer *layer) {
  const struct k3_moe_model *m = b->m;
  const uint64_t H = m->hidden_size, D = m->head_dim;
  K3_TRY(matrix(b, &layer->q_proj, m->n_heads * D, H, m->n_heads, K3_TP_COLUMN, "self_attn.q_proj"));
  b->binder->repeat_units = true;  // more ranks than key heads: neighbours hold the same head
  K3_TRY(matrix(b, &layer->k_proj, m->n_kv_heads * D, H, m->n_kv_heads, K3_TP_COLUMN, "self_attn.k_proj"));
  K3_TRY(matrix(b, &layer->v_proj, m->n_kv_heads * D, H, m->n_kv_heads, K3_TP_COLUMN, "self_attn.v_proj"));
  b->binder->repeat_units = false;
  K3_TRY(vector(b, &layer->q_norm, D, "self_attn.q_norm.weight"));
  K3_TRY(vector(b, &layer->k_norm, D, "self_attn.k_norm.weight"));
  return matrix(b, &layer->o_proj, H, m->n_heads * D, m->n_heads, K3_TP_ROW, "self_attn.o_proj");
}

static enum k3_status bind_mla(struct layer_binder *b, struct k3_moe_layer *layer) {
  const struct k3_moe_model *m = b->m;
  const uint64_t P = m->qk_nope_head_dim, R = m->qk_rope_head_dim, Vd = m->v_head_dim, N = m->n_heads;
  K3_TRY(pair(b, &layer->qkv_a, m->q_lora_rank, m->kv_lora_rank + R, K3_TP_REPLICATE, "self_attn.fused_qkv_a_proj"));
  K3_TRY(vector(b, &layer->q_a_norm, m->q_lora_rank, "self_attn.q_a_layernorm.weight"));
  K3_TRY(vector(b, &layer->kv_a_norm, m->kv_lora_rank, "self_attn.kv_a_layernorm.weight"));
  K3_TRY(matrix(b, &layer->q_b, N * (P + R), m->q_lora_rank, N, K3_TP_COLUMN, "self_attn.q_b_proj"));
  K3_TRY(matrix(b, &layer->kv_b, N * (P + Vd), m->kv_lora_rank, N, K3_TP_COLUMN, "self_attn.kv_b_proj"));
  return matrix(b, &layer->o_proj, m->hidden_size, N * Vd, N, K3_TP_ROW, "self_attn.o_proj");
}

// A stack of n_each * X siblings as one matrix for each expert.
static enum k3_status share_out(struct layer_binder *b, const struct k3_matrix *stack, unsigned n_each, struct k3_matrix **experts) {
  *experts = k3_arena_alloc(b->binder->arena, b->m->n_experts * sizeof **experts, b->binder->err);
  if (!*experts)
    return K3_NO_MEMORY;
  for (uint64_t e = 0; e < b->m->n_experts; e++) {
    struct k3_matrix *expert = &(*experts)[e];
    *expert = (struct k3_matrix){.n_cols = stack->n_cols, .shards = stack->shards + e * n_each, .n_shards = n_each};
    for (unsigned i = 0; i < n_each; i++) {
      expert->shards[i].row = expert->n_rows;
      expert->n_rows += expert->shards[i].n_rows;
    }
  }
  return K3_OK;
}

static enum k3_status bind_stack(struct layer_binder *b, unsigned n_each, uint64_t n_rows, uint64_t n_cols, enum k3_tp_rule tp, const char *suffix,
                                 struct k3_matrix **experts) {
  const unsigned n_shards = n_each * (unsigned)b->m->n_experts;
  struct k3_matrix stack = {0};
  uint64_t *rows = k3_arena_alloc(b->binder->arena, n_shards * sizeof *rows, b->binder->err);
  if (!rows)
    return K3_NO_MEMORY;
  for (unsigned i = 0; i < n_shards; i++)
    rows[i] = n_rows;
  K3_TRY(k3_bind_matrix(b->binder, &stack, rows, n_shards, n_cols, 0, tp, name_of(b, suffix)));
  return share_out(b, &stack, n_each, experts);
}

static enum k3_status bind_moe(struct layer_binder *b, struct k3_moe_layer *layer) {
  const struct k3_moe_model *m = b->m;
  const bool is_m3 = m->family == K3_MOE_MINIMAX_M3;
  const uint64_t H = m->hidden_size;
  K3_TRY(matrix(b, &layer->router, m->n_experts, H, 0, K3_TP_REPLICATE, is_m3 ? "block_sparse_moe.gate" : "mlp.gate"));
  K3_TRY(vector(b, &layer->bias, m->n_experts, is_m3 ? "block_sparse_moe.e_score_correction_bias" : "mlp.gate.e_score_correction_bias"));
  K3_TRY(bind_stack(b, 2, m->expert_size, H, K3_TP_COLUMN, is_m3 ? "block_sparse_moe.experts.w13" : "mlp.experts.w13", &layer->expert_gate_up));
  K3_TRY(bind_stack(b, 1, H, m->expert_size, K3_TP_ROW, is_m3 ? "block_sparse_moe.experts.w2" : "mlp.experts.w2", &layer->expert_down));
  K3_TRY(pair(b, &layer->gate_up, m->shared_size, m->shared_size, K3_TP_COLUMN,
              is_m3 ? "block_sparse_moe.shared_experts.gate_up_proj" : "mlp.shared_experts.gate_up_proj"));
  return matrix(b, &layer->down, H, m->shared_size, 0, K3_TP_ROW,
                is_m3 ? "block_sparse_moe.shared_experts.down_proj" : "mlp.shared_experts.down_proj");
}

void k3_moe_layer_name(const struct k3_moe_model *m, uint64_t layer, char *dst, size_t capacity) {
  if (m->family == K3_MOE_MINIMAX_M3 && layer >= m->n_layers)
    snprintf(dst, capacity, "model.mtp.layers.%llu.transformer_layer", (unsigned long long)(layer - m->n_layers));
  else
    snprintf(dst, capacity, "model.layers.%llu", (unsigned long long)layer);
}

// Experts that work on a rank's own rows are whole on every rank.
static enum k3_status bind_whole_moe(struct layer_binder *b, struct k3_moe_layer *layer) {
  const struct k3_weights_source *source = b->binder->source, whole = {.image = source->image, .tp_size = 1};
  if (source->slices)
    return k3_fail(b->binder->err, K3_UNSUPPORTED, K3_PCK05, NULL, b->base, "the whole image, or no sequence parallelism",
                   "its experts are cut for %u ranks; experts that work on a rank's own rows are needed whole", source->tp_size);
  b->binder->source = &whole;
  enum k3_status status = bind_moe(b, layer);
  b->binder->source = source;
  return status;
}

// What the plan came to, not what was asked for.
static bool works_on_rows(const struct k3_reduction_plan *plan, uint64_t layer_in_range) {
  for (size_t i = 0; i < plan->n_steps; i++) {
    if (plan->steps[i].kind == K3_FLOW_PRODUCE && plan->steps[i].layer == layer_in_range && plan->steps[i].on_rows)
      return true;
  }
  return false;
}

static enum k3_status bind_layer(struct layer_binder *b, struct k3_moe_layer *layer, uint64_t i, bool on_rows) {
  const struct k3_moe_model *m = b->m;
  k3_moe_layer_name(m, i, b->base, sizeof b->base);
  K3_TRY(vector(b, &layer->input_norm, m->hidden_size, "input_layernorm.weight"));
  K3_TRY(vector(b, &layer->post_norm, m->hidden_size, "post_attention_layernorm.weight"));
  K3_TRY(m->family == K3_MOE_MINIMAX_M3 ? bind_gqa(b, layer) : bind_mla(b, layer));
  if (i >= m->n_layers || m->is_moe[i])
    return on_rows ? bind_whole_moe(b, layer) : bind_moe(b, layer);
  K3_TRY(pair(b, &layer->gate_up, m->dense_size, m->dense_size, K3_TP_COLUMN, "mlp.gate_up_proj"));
  return matrix(b, &layer->down, m->hidden_size, m->dense_size, 0, K3_TP_ROW, "mlp.down_proj");
}

enum k3_status k3_moe_bind(struct k3_moe *moe, const struct k3_weights_source *source, struct k3_error *err) {
  const struct k3_moe_model *m = &moe->model;
  struct k3_binder binder = {.source = source, .arena = &moe->arena, .all_f32 = true, .err = err};
  struct layer_binder b = {.binder = &binder, .m = m};
  const uint64_t first = moe->options.first_layer, n = moe->options.n_layers;
  moe->layers = k3_arena_alloc(&moe->arena, n * sizeof *moe->layers, err);
  if (!moe->layers)
    return K3_NO_MEMORY;
  memset(moe->layers, 0, n * sizeof *moe->layers);
  for (uint64_t i = 0; i < n; i++)
    K3_TRY(bind_layer(&b, &moe->layers[i], first + i, works_on_rows(&moe->plan, i)));
  if (first + n == m->n_layers)
    K3_TRY(k3_bind_vector(&binder, &moe->final_norm, m->hidden_size, K3_MOE_FINAL_NORM ".weight"));
  if (first >= m->n_layers && m->family == K3_MOE_DEEPSEEK_V32)
    K3_TRY(vector(&b, &moe->final_norm, m->hidden_size, "shared_head.norm.weight"));
  moe->bf16 = !binder.all_f32;
  const struct k3_moe_layer *layer = &moe->layers[0];
  if (m->family == K3_MOE_MINIMAX_M3) {
    moe->n_heads = layer->q_proj.n_rows / m->head_dim;
    moe->n_kv_heads = layer->k_proj.n_rows / m->head_dim;
  } else {
    moe->n_heads = moe->n_kv_heads = layer->q_b.n_rows / (m->qk_nope_head_dim + m->qk_rope_head_dim);
  }
  return K3_OK;
}
