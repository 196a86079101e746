// The CPU backend: plain loops over rows, shared out to a pool. No sum is ever split between threads, so results do not depend on their number.
// Activations are floats; in BF16 mode they are rounded where they are stored.
#ifndef K3_RUNTIME_CPU_CPU_H
#define K3_RUNTIME_CPU_CPU_H

#include <string.h>

#include "base/pool.h"
#include "quant/dot.h"
#include "runtime/backend.h"

enum { K3_CPU_VOCAB_CHUNK = 256 };  // ids of one work item of the Markov loop

struct k3_exec {
  struct k3_pool *pool;
  bool bf16;
  struct k3_exec_options options;
  // Scratch of each worker, one after another.
  float *row_scratch;  // [n_threads][scratch_elems]: decoded rows and partial sums
  size_t scratch_elems;
  float *score_scratch;  // [n_threads][T * max_keys]
  size_t score_elems;
  float *embeddings;              // [max_requests, r]
  struct k3_cpu_maximum *maxima;  // [vocabulary chunks][max_requests]
  int64_t *previous;              // [max_requests]
  double *marks;
  size_t marks_capacity;
};

struct k3_cpu_maximum {
  float value;
  int64_t id;  // -1: none yet
};

// decode.c: weights and cache rows to floats and back.
// Columns col .. col + n - 1 of one row of a shard.
void k3_cpu_decode(const struct k3_matrix_shard *shard, uint64_t row_in_shard, uint64_t col, uint64_t n, float *dst);
// A whole row of a matrix.
void k3_cpu_decode_row(const struct k3_matrix *matrix, uint64_t row, float *dst);
// The first n elements of a cache row, scaled; and a whole row stored.
void k3_cpu_cache_read(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, float *dst);
void k3_cpu_cache_write(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, const float *src);
// In place: to the nearest BF16, ties to even.
void k3_cpu_round_bf16(float *values, uint64_t n);

// linear.c. Every dot product is k3_dot_f32's sum, whose order is fixed.
// The FP32 sum over the ranks, in place; nothing with one rank (block.c).
enum k3_status k3_cpu_all_reduce(struct k3_exec *exec, const char *name, float *values, uint64_t n, struct k3_error *err);

// y[r, o] = sum_c x[r, c] * W[o, c], each row of W read and decoded once for all n rows of x. y is rounded to BF16 when `round` is set.
enum k3_status k3_cpu_matmul(struct k3_exec *exec, const struct k3_matrix *w, const float *x, uint64_t n, float *y, bool round, struct k3_error *err);
// dst = rms(src) * gain: x / sqrt(mean(x^2) + eps), rounded, times gain, rounded. dst may be src.
void k3_cpu_rms_norm(const struct k3_exec *exec, const float *src, const struct k3_vector *gain, float eps, float *dst);
// Turns the interleaved pairs of x [2 * n_pairs] in place.
void k3_cpu_rope(const struct k3_exec *exec, const struct k3_rope_table *rope, int64_t position, float *x);
// The worker's own scratch row.
static inline float *k3_cpu_scratch(const struct k3_exec *exec, int worker) {
  return exec->row_scratch + (size_t)worker * exec->scratch_elems;
}

// measure.c
enum k3_status k3_cpu_mark(struct k3_exec *exec, size_t index, struct k3_error *err);
enum k3_status k3_cpu_elapsed(struct k3_exec *exec, size_t first, size_t last, double *seconds, struct k3_error *err);
enum k3_status k3_cpu_bandwidth(struct k3_exec *exec, double *bytes_per_second, struct k3_error *err);

// The steps, by file.
#define K3_CPU_STEP(step) enum k3_status k3_cpu_##step(struct k3_exec *exec, const struct k3_##step *p, struct k3_error *err);
K3_BACKEND_STEPS(K3_CPU_STEP)
#undef K3_CPU_STEP

#endif
