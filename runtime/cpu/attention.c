// Attention in latent space: queries absorbed through W_UK, values expanded through W_UV after the sum.
#include <math.h>

#include "runtime/cpu/cpu.h"

struct query {
  struct k3_exec *exec;
  const struct k3_query *p;
};

// One head for all rows, so that every row of W_UK is decoded once.
static enum k3_status absorb_head(void *ctx, int worker, uint64_t head, struct k3_error *err) {
  (void)err;
  const struct query *c = ctx;
  const struct k3_query *p = c->p;
  const uint64_t D = p->nope_width + p->rope_width, E = p->latent_rank + p->rope_width;
  float *key_row = k3_cpu_scratch(c->exec, worker);
  for (uint64_t row = 0; row < p->n_rows; row++)
    memset((float *)p->out + (row * p->n_heads + head) * E, 0, p->latent_rank * sizeof(float));
  for (uint64_t i = 0; i < p->nope_width; i++) {
    k3_cpu_decode_row(p->kv_b, head * (p->nope_width + p->v_width) + i, key_row);
    for (uint64_t row = 0; row < p->n_rows; row++) {
      float q = ((const float *)p->q)[(row * p->n_heads + head) * D + i];
      float *restrict out = (float *)p->out + (row * p->n_heads + head) * E;
      for (uint64_t e = 0; e < p->latent_rank; e++)
        out[e] += q * key_row[e];
    }
  }
  for (uint64_t row = 0; row < p->n_rows; row++) {
    float *out = (float *)p->out + (row * p->n_heads + head) * E;
    if (c->exec->bf16)
      k3_cpu_round_bf16(out, p->latent_rank);
    memcpy(out + p->latent_rank, (const float *)p->q + (row * p->n_heads + head) * D + p->nope_width, p->rope_width * sizeof *out);
    k3_cpu_rope(c->exec, p->rope, p->positions[row], out + p->latent_rank);
  }
  k3_progress_add(c->exec->options.progress, p->nope_width * k3_matrix_row_nbytes(p->kv_b, p->kv_b->shards));
  return K3_OK;
}

enum k3_status k3_cpu_query(struct k3_exec *exec, const struct k3_query *p, struct k3_error *err) {
  struct query ctx = {exec, p};
  K3_TRY(k3_cpu_matmul(exec, p->q_b, p->q_a, p->n_rows, p->q, exec->bf16, err));
  return p->n_rows == 0 ? K3_OK : k3_pool_run(exec->pool, p->n_heads, absorb_head, &ctx, err);
}

struct attend {
  struct k3_exec *exec;
  const struct k3_attend *p;
};

// Turns scores [n] into probabilities; -inf scores become exactly 0. No key at all, or none visible: all zero.
static void softmax(float *scores, uint64_t n) {
  float highest = -INFINITY;
  for (uint64_t j = 0; j < n; j++)
    highest = fmaxf(highest, scores[j]);
  if (highest == -INFINITY) {
    for (uint64_t j = 0; j < n; j++)
      if (scores[j] == -INFINITY)  // NaN stays
        scores[j] = 0;
    return;
  }
  double sum = 0;
  for (uint64_t j = 0; j < n; j++) {
    scores[j] = expf(scores[j] - highest);
    sum += (double)scores[j];
  }
  float inverse = (float)(1 / sum);
  for (uint64_t j = 0; j < n; j++)
    scores[j] *= inverse;
}

static uint64_t slot_of_key(const struct k3_attend *p, uint64_t request, uint64_t key) {
  uint64_t block_size = p->cache->block_size;
  return (uint64_t)p->block_tables[request * p->max_blocks + key / block_size] * block_size + key % block_size;
}

// One head of one request: all T rows share every cache row that is read.
static enum k3_status attend_head(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct attend *c = ctx;
  const struct k3_attend *p = c->p;
  const uint64_t request = item / p->n_heads, head = item % p->n_heads, T = p->block_width, E = p->latent_rank + p->rope_width;
  const uint64_t n_keys = (uint64_t)p->n_keys[request], anchor = (uint64_t)p->anchor_positions[request];
  float *key_row = k3_cpu_scratch(c->exec, worker), *scores = c->exec->score_scratch + (size_t)worker * c->exec->score_elems;
  for (uint64_t key = 0; key < n_keys; key++) {
    k3_cpu_cache_read(p->cache, p->layer, slot_of_key(p, request, key), E, key_row);
    for (uint64_t t = 0; t < T; t++) {
      const float *query = (const float *)p->query + ((request * T + t) * p->n_heads + head) * E;
      bool visible = !p->causal || key <= anchor + t;
      scores[t * n_keys + key] = visible ? p->scale * k3_dot_f32(query, key_row, E) : -INFINITY;
    }
  }
  for (uint64_t t = 0; t < T; t++) {
    softmax(scores + t * n_keys, n_keys);
    memset((float *)p->latent + ((request * T + t) * p->n_heads + head) * p->latent_rank, 0, p->latent_rank * sizeof(float));
  }
  if (c->exec->bf16)
    k3_cpu_round_bf16(scores, T * n_keys);
  for (uint64_t key = 0; key < n_keys; key++) {
    k3_cpu_cache_read(p->cache, p->layer, slot_of_key(p, request, key), p->latent_rank, key_row);
    for (uint64_t t = 0; t < T; t++) {
      float *restrict latent = (float *)p->latent + ((request * T + t) * p->n_heads + head) * p->latent_rank;
      float weight = scores[t * n_keys + key];
      if (weight == 0)  // masked: whatever lies there must not get in, NaN times 0 least of all
        continue;
      for (uint64_t e = 0; e < p->latent_rank; e++)
        latent[e] += weight * key_row[e];
    }
  }
  if (c->exec->bf16)
    for (uint64_t t = 0; t < T; t++)
      k3_cpu_round_bf16((float *)p->latent + ((request * T + t) * p->n_heads + head) * p->latent_rank, p->latent_rank);
  return K3_OK;
}

static enum k3_status expand_head(void *ctx, int worker, uint64_t head, struct k3_error *err) {
  (void)err;
  const struct attend *c = ctx;
  const struct k3_attend *p = c->p;
  float *value_row = k3_cpu_scratch(c->exec, worker);
  for (uint64_t v = 0; v < p->v_width; v++) {
    k3_cpu_decode_row(p->kv_b, head * (p->nope_width + p->v_width) + p->nope_width + v, value_row);
    for (uint64_t row = 0; row < p->n_requests * p->block_width; row++) {
      float sum = k3_dot_f32((const float *)p->latent + (row * p->n_heads + head) * p->latent_rank, value_row, p->latent_rank);
      if (c->exec->bf16)
        k3_cpu_round_bf16(&sum, 1);
      ((float *)p->out)[(row * p->n_heads + head) * p->v_width + v] = sum;
    }
  }
  k3_progress_add(c->exec->options.progress, p->v_width * k3_matrix_row_nbytes(p->kv_b, p->kv_b->shards));
  return K3_OK;
}

enum k3_status k3_cpu_attend(struct k3_exec *exec, const struct k3_attend *p, struct k3_error *err) {
  struct attend ctx = {exec, p};
  if (p->n_requests == 0)
    return K3_OK;
  K3_TRY(k3_pool_run(exec->pool, p->n_requests * p->n_heads, attend_head, &ctx, err));
  return k3_pool_run(exec->pool, p->n_heads, expand_head, &ctx, err);
}
