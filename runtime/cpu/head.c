// Logits, the Markov loop with its arg-max, the confidence head, and results for the caller.
#include <math.h>

#include "runtime/cpu/cpu.h"

enum { CHUNK = K3_CPU_VOCAB_CHUNK };

// The ranks' logits, each for its part of the vocabulary, side by side.
static enum k3_status gather_logits(struct k3_exec *exec, const struct k3_logits *p, struct k3_error *err) {
  struct k3_comm *comm = exec->options.comm;
  const uint64_t width = p->head->n_rows;
  K3_TRY(k3_cpu_matmul(exec, p->head, p->hidden, p->n_rows, p->part, false, err));
  K3_TRY(comm->ops->all_gather(comm, p->name, p->part, p->n_rows * width * sizeof(float), p->parts, NULL, err));
  for (uint64_t r = 0; r < p->vocab_size / width; r++)
    for (uint64_t row = 0; row < p->n_rows; row++)
      memcpy(p->out + row * p->vocab_size + r * width, p->parts + (r * p->n_rows + row) * width, width * sizeof(float));
  return K3_OK;
}

enum k3_status k3_cpu_logits(struct k3_exec *exec, const struct k3_logits *p, struct k3_error *err) {
  if (p->head->n_rows < p->vocab_size)
    K3_TRY(gather_logits(exec, p, err));
  else
    K3_TRY(k3_cpu_matmul(exec, p->head, p->hidden, p->n_rows, p->out, false, err));
  if (p->scale != 1)
    for (uint64_t i = 0; i < p->n_rows * p->vocab_size; i++)
      p->out[i] *= p->scale;
  return K3_OK;
}

struct markov {
  struct k3_exec *exec;
  const struct k3_markov *p;
  uint64_t k;               // the slot
  const float *embeddings;  // [B, r] w1 rows of the previous tokens
};

// One chunk of the vocabulary for all requests.
static enum k3_status bias_chunk(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct markov *c = ctx;
  const struct k3_markov *p = c->p;
  float *w2_row = k3_cpu_scratch(c->exec, worker);
  struct k3_cpu_maximum *maxima = c->exec->maxima + item * c->exec->options.max_requests;
  for (uint64_t b = 0; b < p->n_requests; b++)
    maxima[b] = (struct k3_cpu_maximum){-INFINITY, -1};
  uint64_t end = (item + 1) * CHUNK < p->vocab_size ? (item + 1) * CHUNK : p->vocab_size;
  for (uint64_t id = item * CHUNK; id < end; id++) {
    k3_cpu_decode_row(p->w2, id, w2_row);
    for (uint64_t b = 0; b < p->n_requests; b++) {
      uint64_t row = b * p->block_width + c->k;
      float logit = p->base_logits[row * p->vocab_size + id] + p->scale * k3_dot_f32(c->embeddings + b * p->rank, w2_row, p->rank);
      if (p->out_logits)
        *(float *)((unsigned char *)p->out_logits + row * p->out_row_nbytes + id * sizeof(float)) = logit;
      if (logit > maxima[b].value || maxima[b].id < 0)
        maxima[b] = (struct k3_cpu_maximum){logit, (int64_t)id};
    }
  }
  k3_progress_add(c->exec->options.progress, (end - item * CHUNK) * k3_matrix_row_nbytes(p->w2, p->w2->shards));
  return K3_OK;
}

// sigmoid(w * [hidden ; w1 row] + b)
static float confidence_of(const struct markov *c, uint64_t b, float *weights) {
  const struct k3_markov *p = c->p;
  k3_cpu_decode_row(p->confidence, 0, weights);
  float logit = k3_dot_f32(weights, (const float *)p->hidden + (b * p->block_width + c->k) * p->hidden_size, p->hidden_size);
  if (p->confidence_with_markov)
    logit += k3_dot_f32(weights + p->hidden_size, c->embeddings + b * p->rank, p->rank);
  logit += k3_load_float(p->confidence_bias->dtype, p->confidence_bias->data, 0);
  return 1 / (1 + expf(-logit));
}

static int64_t clamp_id(int64_t id, uint64_t vocab_size) {
  return id < 0 ? 0 : (uint64_t)id >= vocab_size ? (int64_t)vocab_size - 1 : id;
}

enum k3_status k3_cpu_markov(struct k3_exec *exec, const struct k3_markov *p, struct k3_error *err) {
  const uint64_t n_chunks = (p->vocab_size + CHUNK - 1) / CHUNK;
  float *embeddings = exec->embeddings;
  struct markov ctx = {exec, p, 0, embeddings};
  for (uint64_t b = 0; b < p->n_requests; b++)
    exec->previous[b] = p->anchor_ids[b];
  for (uint64_t k = 0; k < p->block_width && p->n_requests > 0; k++) {
    ctx.k = k;
    for (uint64_t b = 0; b < p->n_requests; b++)
      k3_cpu_decode_row(p->w1, (uint64_t)clamp_id(exec->previous[b], p->vocab_size), embeddings + b * p->rank);
    K3_TRY(k3_pool_run(exec->pool, n_chunks, bias_chunk, &ctx, err));
    for (uint64_t b = 0; b < p->n_requests; b++) {
      struct k3_cpu_maximum best = exec->maxima[b];
      for (uint64_t chunk = 1; chunk < n_chunks; chunk++) {
        struct k3_cpu_maximum other = exec->maxima[chunk * exec->options.max_requests + b];
        if (other.value > best.value)
          best = other;
      }
      p->out_ids[b * p->block_width + k] = best.id;
      if (p->out_confidence)
        p->out_confidence[b * p->block_width + k] = confidence_of(&ctx, b, exec->row_scratch);
      exec->previous[b] = p->previous_ids ? p->previous_ids[b * p->block_width + k] : best.id;
    }
  }
  return K3_OK;
}

enum k3_status k3_cpu_export(struct k3_exec *exec, const struct k3_export *p, struct k3_error *err) {
  (void)exec, (void)err;
  for (uint64_t row = 0; row < p->n_rows; row++)
    memcpy((unsigned char *)p->out + row * p->out_row_nbytes, (const float *)p->in + row * p->width, p->width * sizeof(float));
  return K3_OK;
}
