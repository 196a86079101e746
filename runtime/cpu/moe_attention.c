// Rows in and out, norms, and the two kinds of attention of the decoder layers.
#include <math.h>

#include "quant/decode.h"
#include "runtime/cpu/moe.h"

const struct k3_moe_ops k3_cpu_moe_ops = {
#define ENTRY(step) .step = k3_cpu_##step,
    K3_MOE_STEPS(ENTRY)
#undef ENTRY
};

enum k3_status k3_cpu_load_rows(struct k3_exec *exec, const struct k3_load_rows *p, struct k3_error *err) {
  (void)err;
  const uint64_t row_nbytes = p->in->row_nbytes ? p->in->row_nbytes : p->width * k3_dtype_bits(p->in->dtype) / 8;
  for (uint64_t i = 0; i < p->n_rows; i++) {
    float *out = (float *)p->out + i * p->width;
    k3_quant_widen(p->in->dtype, (const unsigned char *)p->in->data + p->order[i] * row_nbytes, p->width, out);
    if (exec->bf16)
      k3_cpu_round_bf16(out, p->width);
  }
  return K3_OK;
}

enum k3_status k3_cpu_store_rows(struct k3_exec *exec, const struct k3_store_rows *p, struct k3_error *err) {
  const float *also = p->also;
  if (p->reduce) {
    memcpy(p->copy, p->also, p->n_rows * p->width * sizeof(float));
    K3_TRY(k3_cpu_all_reduce(exec, p->name, p->copy, p->n_rows * p->width, err));
    if (exec->bf16)
      k3_cpu_round_bf16(p->copy, p->n_rows * p->width);
    also = p->copy;
  }
  for (uint64_t i = 0; p->out && i < p->n_rows; i++) {
    const float *in = (const float *)p->in + i * p->width;
    float *out = p->out + p->order[i] * p->width;
    memcpy(out, in, p->width * sizeof *out);
    for (uint64_t c = 0; also && c < p->width; c++)
      out[c] += also[i * p->width + c];
    if (also && exec->bf16)
      k3_cpu_round_bf16(out, p->width);
  }
  return K3_OK;
}

enum k3_status k3_cpu_scatter_rows(struct k3_exec *exec, const struct k3_scatter_rows *p, struct k3_error *err) {
  struct k3_comm *comm = exec->options.comm;
  const uint64_t n = p->n_each * p->width;
  float *own = (float *)p->values + (uint64_t)comm->rank * n;
  K3_TRY(comm->ops->reduce_scatter(comm, p->name, p->values, n, own, NULL, err));
  if (exec->bf16)
    k3_cpu_round_bf16(own, n);
  return K3_OK;
}

enum k3_status k3_cpu_gather_rows(struct k3_exec *exec, const struct k3_gather_rows *p, struct k3_error *err) {
  struct k3_comm *comm = exec->options.comm;
  const uint64_t n = p->n_each * p->width;
  memcpy(p->own, (const float *)p->values + (uint64_t)comm->rank * n, n * sizeof(float));
  return comm->ops->all_gather(comm, p->name, p->own, n * sizeof(float), p->values, NULL, err);
}

void k3_cpu_gemma_norm(const struct k3_exec *exec, const float *src, const struct k3_vector *weight, float eps, float *dst) {
  float inverse = 1 / sqrtf(k3_dot_f32(src, src, weight->n) / (float)weight->n + eps);
  for (uint64_t i = 0; i < weight->n; i++)
    dst[i] = src[i] * inverse * (1 + k3_load_float(weight->dtype, weight->data, i));
  if (exec->bf16)
    k3_cpu_round_bf16(dst, weight->n);
}

static void norm(const struct k3_exec *exec, bool gemma, const float *src, const struct k3_vector *weight, float eps, float *dst) {
  if (gemma)
    k3_cpu_gemma_norm(exec, src, weight, eps, dst);
  else
    k3_cpu_rms_norm(exec, src, weight, eps, dst);
}

struct add_norm {
  struct k3_exec *exec;
  const struct k3_moe_norm *p;
};

static enum k3_status add_norm_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct add_norm *c = ctx;
  const struct k3_moe_norm *p = c->p;
  float *residual = (float *)p->residual + row * p->width;
  if (p->branch) {
    float *branch = (float *)p->branch + row * p->width;
    if (c->exec->bf16)
      k3_cpu_round_bf16(branch, p->width);  // the whole sum, as one rank would have stored it
    for (uint64_t i = 0; i < p->width; i++)
      residual[i] += branch[i];
    if (c->exec->bf16)
      k3_cpu_round_bf16(residual, p->width);
  }
  norm(c->exec, p->gemma, residual, p->weight, p->eps, (float *)p->out + row * p->width);
  return K3_OK;
}

enum k3_status k3_cpu_moe_norm(struct k3_exec *exec, const struct k3_moe_norm *p, struct k3_error *err) {
  struct add_norm ctx = {exec, p};
  if (p->reduce)
    K3_TRY(k3_cpu_all_reduce(exec, p->name, p->branch ? p->branch : p->residual, p->n_rows * p->width, err));
  return k3_pool_run(exec->pool, p->n_rows, add_norm_row, &ctx, err);
}

// ---- grouped-query heads ----

// Turns the pairs (i, i + n_pairs).
static void rotate_halves(const struct k3_exec *exec, const struct k3_rope_table *rope, int64_t position, float *x) {
  for (uint64_t i = 0; i < rope->n_pairs; i++) {
    float angle = (float)position * rope->inv_freq[i];
    float c = (float)cos((double)angle) * rope->amplitude, s = (float)sin((double)angle) * rope->amplitude;
    float a = x[i], b = x[i + rope->n_pairs];
    x[i] = a * c - b * s;
    x[i + rope->n_pairs] = b * c + a * s;
  }
  if (exec->bf16)
    k3_cpu_round_bf16(x, 2 * rope->n_pairs);
}

struct gqa {
  struct k3_exec *exec;
  const struct k3_gqa *p;
};

static enum k3_status turn_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct gqa *c = ctx;
  const struct k3_gqa *p = c->p;
  for (uint64_t h = 0; h < p->n_heads + p->n_kv_heads; h++) {
    const bool is_query = h < p->n_heads;
    float *head =
        is_query ? (float *)p->q + (row * p->n_heads + h) * p->head_dim : (float *)p->k + (row * p->n_kv_heads + h - p->n_heads) * p->head_dim;
    norm(c->exec, p->gemma, head, is_query ? p->q_norm : p->k_norm, p->eps, head);
    rotate_halves(c->exec, p->rope, p->positions[row], head);
  }
  return K3_OK;
}

enum k3_status k3_cpu_gqa(struct k3_exec *exec, const struct k3_gqa *p, struct k3_error *err) {
  struct gqa ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->q_proj, p->in, p->n_rows, p->q, exec->bf16, err));
  K3_TRY(k3_cpu_matmul(exec, p->k_proj, p->in, p->n_rows, p->k, exec->bf16, err));
  K3_TRY(k3_cpu_matmul(exec, p->v_proj, p->in, p->n_rows, p->v, exec->bf16, err));
  return k3_pool_run(exec->pool, p->n_rows, turn_row, &ctx, err);
}

// ---- latent heads ----

struct mla {
  struct k3_exec *exec;
  const struct k3_mla *p;
};

static enum k3_status latent_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct mla *c = ctx;
  const struct k3_mla *p = c->p;
  float *projected = (float *)p->projected + row * (p->q_rank + p->latent_rank + p->rope_width);
  k3_cpu_rms_norm(c->exec, projected, p->q_norm, p->eps, (float *)p->q_a + row * p->q_rank);
  k3_cpu_rms_norm(c->exec, projected + p->q_rank, p->kv_norm, p->eps, (float *)p->latent + row * p->latent_rank);
  k3_cpu_rope(c->exec, p->rope, p->positions[row], projected + p->q_rank + p->latent_rank);
  return K3_OK;
}

// Keys and values of all heads of a row, side by side as the attention takes them; the queries turned.
static enum k3_status expand_row(void *ctx, int worker, uint64_t row, struct k3_error *err) {
  (void)worker, (void)err;
  const struct mla *c = ctx;
  const struct k3_mla *p = c->p;
  const uint64_t P = p->nope_width, R = p->rope_width, D = P + R;
  const float *key_rope = (const float *)p->projected + row * (p->q_rank + p->latent_rank + R) + p->q_rank + p->latent_rank;
  for (uint64_t h = 0; h < p->n_heads; h++) {
    const float *expanded = (const float *)p->expanded + (row * p->n_heads + h) * (P + p->v_width);
    float *key = (float *)p->k + (row * p->n_heads + h) * D;
    memcpy(key, expanded, P * sizeof *key);
    memcpy(key + P, key_rope, R * sizeof *key);
    memcpy((float *)p->v + (row * p->n_heads + h) * p->v_width, expanded + P, p->v_width * sizeof(float));
    k3_cpu_rope(c->exec, p->rope, p->positions[row], (float *)p->q + (row * p->n_heads + h) * D + P);
  }
  return K3_OK;
}

enum k3_status k3_cpu_mla(struct k3_exec *exec, const struct k3_mla *p, struct k3_error *err) {
  struct mla ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->qkv_a, p->in, p->n_rows, p->projected, exec->bf16, err));
  K3_TRY(k3_pool_run(exec->pool, p->n_rows, latent_row, &ctx, err));
  K3_TRY(k3_cpu_matmul(exec, p->q_b, p->q_a, p->n_rows, p->q, exec->bf16, err));
  K3_TRY(k3_cpu_matmul(exec, p->kv_b, p->latent, p->n_rows, p->expanded, exec->bf16, err));
  return k3_pool_run(exec->pool, p->n_rows, expand_row, &ctx, err);
}

// ---- attention ----

struct attend_rows {
  struct k3_exec *exec;
  const struct k3_attend_rows *p;
};

// One head of one row.
static enum k3_status attend_one(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct attend_rows *c = ctx;
  const struct k3_attend_rows *p = c->p;
  const uint64_t row = item / p->n_heads, head = item % p->n_heads, kv_head = head / (p->n_heads / p->n_kv_heads);
  const uint64_t first = (uint64_t)p->first_keys[row], n_keys = row - first + 1;
  float *scores = c->exec->score_scratch + (size_t)worker * c->exec->score_elems, highest = -INFINITY;
  const float *query = (const float *)p->q + (row * p->n_heads + head) * p->key_width;
  for (uint64_t j = 0; j < n_keys; j++) {
    scores[j] = p->scale * k3_dot_f32(query, (const float *)p->k + ((first + j) * p->n_kv_heads + kv_head) * p->key_width, p->key_width);
    highest = fmaxf(highest, scores[j]);
  }
  double sum = 0;
  for (uint64_t j = 0; j < n_keys; j++) {
    scores[j] = expf(scores[j] - highest);
    sum += (double)scores[j];
  }
  const float inverse = (float)(1 / sum);
  for (uint64_t j = 0; j < n_keys; j++)
    scores[j] *= inverse;
  if (c->exec->bf16)
    k3_cpu_round_bf16(scores, n_keys);
  float *restrict out = (float *)p->out + (row * p->n_heads + head) * p->v_width;
  memset(out, 0, p->v_width * sizeof *out);
  for (uint64_t j = 0; j < n_keys; j++) {
    const float *value = (const float *)p->v + ((first + j) * p->n_kv_heads + kv_head) * p->v_width;
    for (uint64_t e = 0; e < p->v_width; e++)
      out[e] += scores[j] * value[e];
  }
  if (c->exec->bf16)
    k3_cpu_round_bf16(out, p->v_width);
  return K3_OK;
}

enum k3_status k3_cpu_attend_rows(struct k3_exec *exec, const struct k3_attend_rows *p, struct k3_error *err) {
  struct attend_rows ctx = {exec, p};
  return k3_pool_run(exec->pool, p->n_rows * p->n_heads, attend_one, &ctx, err);
}
