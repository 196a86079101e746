// The steps that are linear layers with norms around them: taps, context rows, block rows, MLP.
#include <math.h>

#include "quant/decode.h"
#include "runtime/cpu/cpu.h"

// Row i of a caller's array.
static const void *array_row(const struct k3_array *array, uint64_t i, uint64_t n_cols) {
  uint64_t row_nbytes = array->row_nbytes ? array->row_nbytes : n_cols * k3_dtype_bits(array->dtype) / 8;
  return (const unsigned char *)array->data + i * row_nbytes;
}

struct combine {
  struct k3_exec *exec;
  const struct k3_combine *p;
};

static enum k3_status join_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct combine *c = ctx;
  const struct k3_combine *p = c->p;
  uint64_t width = p->n_taps * p->tap_width, part = p->n_tap_arrays == 1 ? width : p->tap_width;
  float *joined = (float *)p->joined + row * width;
  for (uint64_t a = 0; a < p->n_tap_arrays; a++)
    k3_quant_widen(p->taps[a].dtype, array_row(&p->taps[a], p->first_row + row, part), part, joined + a * part);
  if (c->exec->bf16)
    k3_cpu_round_bf16(joined, width);
  for (uint64_t t = 0; p->tap_norms && t < p->n_taps; t++)
    k3_cpu_rms_norm(c->exec, joined + t * p->tap_width, &p->tap_norms[t], p->eps, joined + t * p->tap_width);
  return K3_OK;
}

static enum k3_status norm_context_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct combine *c = ctx;
  const struct k3_combine *p = c->p;
  uint64_t width = p->proj->n_rows;
  float *out = (float *)p->out + row * width;
  k3_cpu_rms_norm(c->exec, (const float *)p->projected + row * width, p->norm, p->eps, out);
  if (p->out_f32)
    memcpy((unsigned char *)p->out_f32 + row * p->out_row_nbytes, out, width * sizeof *out);
  return K3_OK;
}

enum k3_status k3_cpu_combine(struct k3_exec *exec, const struct k3_combine *p, struct k3_error *err) {
  struct combine ctx = {exec, p};
  K3_TRY(k3_pool_run(exec->pool, p->n_rows, join_row, &ctx, err));
  K3_TRY(k3_cpu_matmul(exec, p->proj, p->joined, p->n_rows, p->projected, exec->bf16, err));
  return k3_pool_run(exec->pool, p->n_rows, norm_context_row, &ctx, err);
}

struct context_insert {
  struct k3_exec *exec;
  const struct k3_context_insert *p;
};

static enum k3_status insert_context_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker;
  const struct context_insert *c = ctx;
  const struct k3_context_insert *p = c->p;
  const uint64_t width = p->latent_rank + p->rope_width;
  int64_t position = p->positions[row];
  if (position < 0)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "positions", "0 or more", "row %llu has position %lld", (unsigned long long)row,
                   (long long)position);
  if ((uint64_t)position >= p->max_positions)
    position = (int64_t)p->max_positions - 1;
  for (uint64_t i = 0; i < p->n_layers; i++) {
    float *kv = (float *)p->kv_rows + (row * p->n_layers + i) * width;
    k3_cpu_rms_norm(c->exec, kv, p->norms[i], p->eps, kv);
    k3_cpu_rope(c->exec, p->rope, position, kv + p->latent_rank);
    if (p->out_f32)
      memcpy((unsigned char *)p->out_f32 + (i * p->out_layer_rows + row) * p->out_row_nbytes, kv, width * sizeof *kv);
    int64_t slot = p->slots[i * p->slots_layer_stride + row];
    if (slot >= 0 && (uint64_t)slot >= p->cache->n_blocks * p->cache->block_size)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "slots", "-1, or a slot of the cache", "row %llu has slot %lld of %llu",
                     (unsigned long long)row, (long long)slot, (unsigned long long)(p->cache->n_blocks * p->cache->block_size));
    if (slot >= 0)
      k3_cpu_cache_write(p->cache, i, (uint64_t)slot, width, kv);
  }
  return K3_OK;
}

enum k3_status k3_cpu_context_insert(struct k3_exec *exec, const struct k3_context_insert *p, struct k3_error *err) {
  struct context_insert ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->kv, p->context, p->n_rows, p->kv_rows, exec->bf16, err));
  return k3_pool_run(exec->pool, p->n_rows, insert_context_row, &ctx, err);
}

// Slot of a position by a request's block table; false when the table is too short or names a block that the cache has not.
static bool slot_of(const struct k3_cache *cache, const int32_t *table, uint64_t max_blocks, uint64_t position, int64_t *slot) {
  uint64_t block = position / cache->block_size;
  if (block >= max_blocks || table[block] < 0 || (uint64_t)table[block] >= cache->n_blocks)
    return false;
  *slot = (int64_t)((uint64_t)table[block] * cache->block_size + position % cache->block_size);
  return true;
}

enum k3_status k3_cpu_block_begin(struct k3_exec *exec, const struct k3_block_begin *p, struct k3_error *err) {
  const uint64_t H = p->embedding->n_cols;
  for (uint64_t b = 0; b < p->n_requests; b++) {
    const int32_t *table = p->block_tables + b * p->max_blocks;
    int64_t m = p->anchor_positions[b], unused;
    if (m < 0 || (uint64_t)m >= p->max_positions)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "anchor_positions", "0 up to the model's limit", "request %llu has its anchor at %lld",
                     (unsigned long long)b, (long long)m);
    uint64_t n_keys = (uint64_t)m + p->block_width;
    p->n_keys[b] = (int64_t)(n_keys < p->max_positions ? n_keys : p->max_positions);
    if ((uint64_t)p->n_keys[b] > exec->options.max_keys)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "anchor_positions", "a session with larger max_keys",
                     "request %llu needs %lld keys, the session has room for %llu", (unsigned long long)b, (long long)p->n_keys[b],
                     (unsigned long long)exec->options.max_keys);
    for (int64_t position = 0; position < p->n_keys[b]; position += (int64_t)p->cache->block_size)
      if (!slot_of(p->cache, table, p->max_blocks, (uint64_t)position, &unused))
        return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "block_tables", "a block of the cache for every position below m + T",
                       "request %llu has none for position %lld", (unsigned long long)b, (long long)position);
    for (uint64_t j = 0; j < p->block_width; j++) {
      uint64_t row = b * p->block_width + j, position = (uint64_t)m + j;
      bool inside = position < p->max_positions;
      p->positions[row] = (int64_t)(inside ? position : p->max_positions - 1);
      p->slots[row] = -1;
      if (inside)
        slot_of(p->cache, table, p->max_blocks, position, &p->slots[row]);
      int64_t id = j == 0 ? p->anchor_ids[b] : (int64_t)p->mask_token_id;
      id = id < 0 ? 0 : (uint64_t)id >= p->vocab_size ? (int64_t)p->vocab_size - 1 : id;
      k3_cpu_decode_row(p->embedding, (uint64_t)id, (float *)p->residual + row * H);
    }
  }
  if (p->reduce)
    K3_TRY(k3_cpu_all_reduce(exec, p->name, p->residual, p->n_requests * p->block_width * H, err));
  if (exec->bf16)
    k3_cpu_round_bf16(p->residual, p->n_requests * p->block_width * H);
  return K3_OK;
}

enum k3_status k3_cpu_all_reduce(struct k3_exec *exec, const char *name, float *values, uint64_t n, struct k3_error *err) {
  struct k3_comm *comm = exec->options.comm;
  return comm ? comm->ops->all_reduce(comm, name, values, n, NULL, err) : K3_OK;
}

struct reduce_add_norm {
  struct k3_exec *exec;
  const struct k3_reduce_add_norm *p;
};

static enum k3_status add_norm_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct reduce_add_norm *c = ctx;
  const struct k3_reduce_add_norm *p = c->p;
  float *residual = (float *)p->residual + row * p->width;
  if (p->partial) {
    float *partial = (float *)p->partial + row * p->width;
    if (c->exec->bf16)
      k3_cpu_round_bf16(partial, p->width);  // the whole sum, as one rank would have stored it
    for (uint64_t i = 0; i < p->width; i++)
      residual[i] += partial[i];
    if (c->exec->bf16)
      k3_cpu_round_bf16(residual, p->width);
  }
  k3_cpu_rms_norm(c->exec, residual, p->norm, p->eps, (float *)p->out + row * p->width);
  return K3_OK;
}

enum k3_status k3_cpu_reduce_add_norm(struct k3_exec *exec, const struct k3_reduce_add_norm *p, struct k3_error *err) {
  struct reduce_add_norm ctx = {exec, p};
  if (p->reduce)
    K3_TRY(k3_cpu_all_reduce(exec, p->name, p->partial ? p->partial : p->residual, p->n_rows * p->width, err));
  return k3_pool_run(exec->pool, p->n_rows, add_norm_row, &ctx, err);
}

struct latents {
  struct k3_exec *exec;
  const struct k3_latents *p;
};

static enum k3_status latents_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct latents *c = ctx;
  const struct k3_latents *p = c->p;
  float *projected = (float *)p->projected + row * (p->q_rank + p->latent_rank + p->rope_width), *kv = projected + p->q_rank;
  k3_cpu_rms_norm(c->exec, projected, p->q_norm, p->eps, (float *)p->q_a + row * p->q_rank);
  k3_cpu_rms_norm(c->exec, kv, p->kv_norm, p->eps, kv);
  k3_cpu_rope(c->exec, p->rope, p->positions[row], kv + p->latent_rank);
  if (p->slots[row] >= 0)
    k3_cpu_cache_write(p->cache, p->layer, (uint64_t)p->slots[row], p->latent_rank + p->rope_width, kv);
  return K3_OK;
}

enum k3_status k3_cpu_latents(struct k3_exec *exec, const struct k3_latents *p, struct k3_error *err) {
  struct latents ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->proj, p->in, p->n_rows, p->projected, exec->bf16, err));
  return k3_pool_run(exec->pool, p->n_rows, latents_row, &ctx, err);
}

// A product that is a part of a sum: summed at once, or left as it is.
static enum k3_status multiply(struct k3_exec *exec, const struct k3_matrix *w, const float *in, uint64_t n, float *out, bool reduce, bool partial,
                               const char *name, struct k3_error *err) {
  K3_TRY(k3_cpu_matmul(exec, w, in, n, out, exec->bf16 && !reduce && !partial, err));
  if (!reduce)
    return K3_OK;
  K3_TRY(k3_cpu_all_reduce(exec, name, out, n * w->n_rows, err));
  if (exec->bf16)
    k3_cpu_round_bf16(out, n * w->n_rows);
  return K3_OK;
}

enum k3_status k3_cpu_project(struct k3_exec *exec, const struct k3_project *p, struct k3_error *err) {
  return multiply(exec, p->proj, p->in, p->n_rows, p->out, p->reduce, p->partial, p->name, err);
}

struct mlp {
  struct k3_exec *exec;
  const struct k3_mlp *p;
};

static enum k3_status gate_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct mlp *c = ctx;
  const float *gate = (const float *)c->p->gate_up_rows + row * 2 * c->p->width, *up = gate + c->p->width;
  float *gated = (float *)c->p->gated + row * c->p->width;
  for (uint64_t i = 0; i < c->p->width; i++)
    gated[i] = gate[i] / (1 + expf(-gate[i]));
  if (c->exec->bf16)
    k3_cpu_round_bf16(gated, c->p->width);
  for (uint64_t i = 0; i < c->p->width; i++)
    gated[i] *= up[i];
  if (c->exec->bf16)
    k3_cpu_round_bf16(gated, c->p->width);
  return K3_OK;
}

enum k3_status k3_cpu_mlp(struct k3_exec *exec, const struct k3_mlp *p, struct k3_error *err) {
  struct mlp ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->gate_up, p->in, p->n_rows, p->gate_up_rows, exec->bf16, err));
  K3_TRY(k3_pool_run(exec->pool, p->n_rows, gate_row, &ctx, err));
  return multiply(exec, p->down, p->gated, p->n_rows, p->out, p->reduce, p->partial, p->name, err);
}
