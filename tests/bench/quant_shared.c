// The encoders behind two plain C functions, for a benchmark that calls them in the process of their peers (bench_quant_peers.py). Built as a shared
// library; a weight is shared out in bands of 128 rows, as `convert` does with its segments.
#include <stdint.h>
#include <string.h>

#include "base/api.h"
#include "base/arith.h"
#include "base/pool.h"
#include "quant/encode.h"
#include "quant/kernels.h"
#include "quant/stats.h"

enum { BAND_ROWS = 128, MAX_THREADS = 64 };

static struct k3_pool *pools[MAX_THREADS + 1];  // by number of threads; kept, as the peers keep theirs

struct job {
  struct k3_quant_encoder encoder;
  const uint8_t *src;
  uint64_t n_rows, n_cols;
  uint8_t *weight, *scale;
  float amax[MAX_THREADS];  // by worker
};

static uint64_t band_rows(const struct job *job, uint64_t band) {
  uint64_t left = job->n_rows - band * BAND_ROWS;
  return left < BAND_ROWS ? left : BAND_ROWS;
}

static const uint8_t *band_src(const struct job *job, uint64_t band) {
  return job->src + band * BAND_ROWS * job->n_cols * (k3_dtype_bits(job->encoder.src_dtype) / 8);
}

static enum k3_status find_amax(void *ctx, int worker, uint64_t band, struct k3_error *err) {
  (void)err;
  struct job *job = ctx;
  float amax = k3_quant_amax(job->encoder.src_dtype, band_src(job, band), (size_t)(band_rows(job, band) * job->n_cols));
  job->amax[worker] = k3_amax_merge(job->amax[worker], amax);
  return K3_OK;
}

static enum k3_status encode(void *ctx, int worker, uint64_t band, struct k3_error *err) {
  (void)worker;
  (void)err;
  struct job *job = ctx;
  const struct k3_quant_scheme *scheme = &job->encoder.scheme;
  uint64_t scale_rows, scale_cols;
  k3_quant_scale_shape(scheme, band * BAND_ROWS, job->n_cols, &scale_rows, &scale_cols);
  k3_quant_encode_rows(&job->encoder, band_src(job, band), band_rows(job, band), job->n_cols,
                       job->weight + band * BAND_ROWS * k3_quant_row_nbytes(scheme, job->n_cols),
                       job->scale + scale_rows * scale_cols * (k3_dtype_bits(scheme->scale_dtype) / 8));
  return K3_OK;
}

// Encodes src [n_rows, n_cols] of dtype "BF16" or "F32" with the default mode of a scheme, a name of quant/scheme.h, in n_threads threads. weight and
// scale: the tensors of that scheme. second: the one second scale of NVFP4, computed from the weight as part of the work. 0 on success.
K3_API int bench_encode(const char *scheme, const char *dtype, const void *src, uint64_t n_rows, uint64_t n_cols, int n_threads, void *weight,
                        void *scale, float *second);
int bench_encode(const char *scheme, const char *dtype, const void *src, uint64_t n_rows, uint64_t n_cols, int n_threads, void *weight, void *scale,
                 float *second) {
  struct job job = {.src = src, .n_rows = n_rows, .n_cols = n_cols, .weight = weight, .scale = scale};
  enum k3_scheme id;
  if (n_threads < 1 || n_threads > MAX_THREADS || !k3_scheme_from_name(scheme, &id) ||
      !k3_dtype_from_name(dtype, strlen(dtype), &job.encoder.src_dtype))
    return 2;
  job.encoder.scheme = k3_quant_scheme_default(id);
  struct k3_error err = {0};
  if (!pools[n_threads] && !(pools[n_threads] = k3_pool_create(n_threads, &err)))
    return 4;
  uint64_t n_bands = k3_ceil_div_u64(n_rows, BAND_ROWS);
  if (id == K3_SCHEME_NVFP4) {
    if (k3_pool_run(pools[n_threads], n_bands, find_amax, &job, &err) != K3_OK)
      return 4;
    float amax = 0;
    for (int i = 0; i < n_threads; i++)
      amax = k3_amax_merge(amax, job.amax[i]);
    *second = job.encoder.scale = k3_nvfp4_divisor(amax);
  }
  return k3_pool_run(pools[n_threads], n_bands, encode, &job, &err) == K3_OK ? 0 : 4;
}

// The instruction set in use.
K3_API const char *bench_simd(void);
const char *bench_simd(void) {
  return k3_simd_name(k3_cpu_simd());
}
