#include <math.h>

#include "runtime/cpu/cpu.h"

enum { ROWS_PER_ITEM = 16 };  // weight rows of one work item

struct matmul {
  struct k3_exec *exec;
  const struct k3_matrix *w;
  const float *x;  // [n, n_cols]
  uint64_t n;
  float *y;  // [n, n_rows]
  bool round;
};

static enum k3_status matmul_item(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct matmul *m = ctx;
  const struct k3_matrix *w = m->w;
  float *tile = k3_cpu_scratch(m->exec, worker), *sums = tile + K3_DOT_TILE;
  uint64_t end = (item + 1) * ROWS_PER_ITEM < w->n_rows ? (item + 1) * ROWS_PER_ITEM : w->n_rows;
  for (uint64_t row = item * ROWS_PER_ITEM; row < end; row++) {
    const struct k3_matrix_shard *shard = k3_matrix_shard_of(w, row);
    memset(sums, 0, m->n * sizeof *sums);
    for (uint64_t col = 0; col < w->n_cols; col += K3_DOT_TILE) {
      uint64_t n_cols = w->n_cols - col < K3_DOT_TILE ? w->n_cols - col : K3_DOT_TILE;
      k3_cpu_decode(shard, row - shard->row, col, n_cols, tile);
      for (uint64_t r = 0; r < m->n; r++)
        sums[r] += k3_dot_f32(tile, m->x + r * w->n_cols + col, n_cols);
    }
    if (m->round)
      k3_cpu_round_bf16(sums, m->n);
    for (uint64_t r = 0; r < m->n; r++)
      m->y[r * w->n_rows + row] = sums[r];
    k3_progress_add(m->exec->options.progress, k3_matrix_row_nbytes(w, shard));
  }
  return K3_OK;
}

enum k3_status k3_cpu_matmul(struct k3_exec *exec, const struct k3_matrix *w, const float *x, uint64_t n, float *y, bool round,
                             struct k3_error *err) {
  struct matmul m = {exec, w, x, n, y, round};
  return n == 0 ? K3_OK : k3_pool_run(exec->pool, (w->n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, matmul_item, &m, err);
}

static float gain_of(const struct k3_vector *gain, uint64_t i) {
  return k3_load_float(gain->dtype, gain->data, i);
}

void k3_cpu_rms_norm(const struct k3_exec *exec, const float *src, const struct k3_vector *gain, float eps, float *dst) {
  float inverse = 1 / sqrtf(k3_dot_f32(src, src, gain->n) / (float)gain->n + eps);
  for (uint64_t i = 0; i < gain->n; i++)
    dst[i] = src[i] * inverse;
  if (exec->bf16)
    k3_cpu_round_bf16(dst, gain->n);
  for (uint64_t i = 0; i < gain->n; i++)
    dst[i] *= gain_of(gain, i);
  if (exec->bf16)
    k3_cpu_round_bf16(dst, gain->n);
}

void k3_cpu_rope(const struct k3_exec *exec, const struct k3_rope_table *rope, int64_t position, float *x) {
  for (uint64_t i = 0; i < rope->n_pairs; i++) {
    float angle = (float)position * rope->inv_freq[i];
    float c = (float)cos((double)angle) * rope->amplitude, s = (float)sin((double)angle) * rope->amplitude;
    float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
  if (exec->bf16)
    k3_cpu_round_bf16(x, 2 * rope->n_pairs);
}
