// Marks and bandwidth of the CPU backend.
#include "base/alloc.h"
#include "base/clock.h"
#include "runtime/cpu/cpu.h"

enum { BANDWIDTH_NBYTES = 256 << 20, PIECE_NBYTES = 1 << 20, BANDWIDTH_RUNS = 5 };

enum k3_status k3_cpu_mark(struct k3_exec *exec, size_t index, struct k3_error *err) {
  K3_TRY(k3_grow(&exec->marks, &exec->marks_capacity, index + 1, sizeof *exec->marks, err));
  exec->marks[index] = k3_clock();
  return K3_OK;
}

enum k3_status k3_cpu_elapsed(struct k3_exec *exec, size_t first, size_t last, double *seconds, struct k3_error *err) {
  (void)err;
  *seconds = exec->marks[last] - exec->marks[first];
  return K3_OK;
}

// A plain read: sums of 64-bit words, piece by piece.
struct read_ctx {
  const uint64_t *words;
  uint64_t *sums;
};

static enum k3_status read_piece(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct read_ctx *r = ctx;
  const uint64_t *words = r->words + item * (PIECE_NBYTES / sizeof(uint64_t));
  uint64_t sums[8] = {0};
  for (size_t i = 0; i < PIECE_NBYTES / sizeof(uint64_t); i += 8)
    for (int k = 0; k < 8; k++)
      sums[k] += words[i + (size_t)k];
  for (int k = 0; k < 8; k++)
    r->sums[worker * 8] += sums[k];
  return K3_OK;
}

enum k3_status k3_cpu_bandwidth(struct k3_exec *exec, double *bytes_per_second, struct k3_error *err) {
  uint64_t *words = k3_alloc_aligned(BANDWIDTH_NBYTES, 4096, err);
  uint64_t *sums = words ? k3_calloc((size_t)k3_pool_n_threads(exec->pool), 64, err) : NULL;
  enum k3_status status = sums ? K3_OK : K3_NO_MEMORY;
  double best = 1e300;
  if (sums)
    memset(words, 1, BANDWIDTH_NBYTES);
  for (int run = 0; run < BANDWIDTH_RUNS && status == K3_OK; run++) {
    struct read_ctx ctx = {words, sums};
    const double start = k3_clock();
    status = k3_pool_run(exec->pool, BANDWIDTH_NBYTES / PIECE_NBYTES, read_piece, &ctx, err);
    const double seconds = k3_clock() - start;
    best = seconds < best ? seconds : best;
  }
  *bytes_per_second = BANDWIDTH_NBYTES / best;
  k3_free(sums);
  k3_free(words);
  return status;
}
