// Rates of the encoders, decoders and products on one core, as ratios to memcpy of the same source bytes in the same run.
//
// Every figure is the minimum of 15 runs; the runs of all candidates and of memcpy are interleaved, so that a slow phase of the machine meets all of
// them. ratio = (time of memcpy of the source bytes) / (time of the operation): 1 means that the operation takes as long as copying its input.
// Buffers are larger than the last-level cache (argument 1: MiB of source, default 64).
// To reach, "BF16 -> FP8 / NVFP4, one core": at least 0.75 / 0.4 of memcpy's rate with AVX-512, 0.6 / 0.3 with AVX2.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "quant/decode.h"
#include "quant/dot.h"
#include "quant/encode.h"
#include "quant/kernels.h"
#include "quant/number.h"
#include "quant/stats.h"

enum { N_RUNS = 15, COLS = 7168 };

static uint8_t *src, *copy, *codes, *scales, *plain_fp8, *plain_scales;
static uint64_t n_rows;
static float sink, *row_f32;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void run_encode(enum k3_scheme scheme) {
  struct k3_quant_encoder encoder = {.scheme = k3_quant_scheme_default(scheme), .src_dtype = K3_DTYPE_BF16};
  encoder.scale = scheme == K3_SCHEME_NVFP4 ? 20000.0f : 0.0003f;
  k3_quant_encode_rows(&encoder, src, n_rows, COLS, codes, scales);
}

// The source rows are decoded or multiplied one by one, as the runtime does.
static void run_rows(enum k3_scheme scheme, const void *weight, const void *scale, int multiply) {
  struct k3_quant_matrix matrix = {.scheme = k3_quant_scheme_default(scheme), .n_rows = n_rows, .n_cols = COLS, .weight = weight, .scale = scale};
  static float x[COLS], decoded[COLS];
  for (uint64_t row = 0; row < n_rows; row++) {
    float y = 0;
    if (multiply)
      k3_quant_dot_row(&matrix, row, x, COLS, 1, &y, 1);
    else
      k3_quant_decode_row(&matrix, row, 0, COLS, NULL, decoded);
    sink += y + decoded[row % COLS];
  }
}

static void op_memcpy(void) {
  memcpy(copy, src, n_rows * COLS * 2);
}
static void op_amax(void) {
  sink += k3_quant_amax(K3_DTYPE_BF16, src, n_rows * COLS);
}
static void op_fp8_tensor(void) {
  run_encode(K3_SCHEME_FP8_TENSOR);
}
static void op_fp8_channel(void) {
  run_encode(K3_SCHEME_FP8_CHANNEL);
}
static void op_fp8_block(void) {
  run_encode(K3_SCHEME_FP8_BLOCK);
}
static void op_mxfp8(void) {
  run_encode(K3_SCHEME_MXFP8);
}
static void op_nvfp4(void) {
  run_encode(K3_SCHEME_NVFP4);
}
static void op_mxfp4(void) {
  run_encode(K3_SCHEME_MXFP4);
}
static void op_dot_bf16(void) {
  run_rows(K3_SCHEME_BF16, src, NULL, 1);
}
static void op_decode_fp8(void) {
  run_rows(K3_SCHEME_FP8_CHANNEL, plain_fp8, plain_scales, 0);
}
static void op_dot_fp8(void) {
  run_rows(K3_SCHEME_FP8_CHANNEL, plain_fp8, plain_scales, 1);
}
static void op_decode_nvfp4(void) {
  run_rows(K3_SCHEME_NVFP4, plain_fp8, plain_fp8, 0);
}
static void op_dot_nvfp4(void) {
  run_rows(K3_SCHEME_NVFP4, plain_fp8, plain_fp8, 1);
}
static void op_dot_mxfp4(void) {
  run_rows(K3_SCHEME_MXFP4, plain_fp8, plain_scales, 1);
}

static const struct {
  const char *name;
  void (*run)(void);
} OPS[] = {
    {"memcpy", op_memcpy},
    {"amax of BF16", op_amax},
    {"BF16 -> FP8 per tensor", op_fp8_tensor},
    {"BF16 -> FP8 per channel", op_fp8_channel},
    {"BF16 -> FP8 128x128", op_fp8_block},
    {"BF16 -> MXFP8", op_mxfp8},
    {"BF16 -> NVFP4", op_nvfp4},
    {"BF16 -> MXFP4", op_mxfp4},
    {"BF16 row times F32", op_dot_bf16},
    {"FP8 row -> F32", op_decode_fp8},
    {"FP8 row times F32", op_dot_fp8},
    {"NVFP4 row -> F32", op_decode_nvfp4},
    {"NVFP4 row times F32", op_dot_nvfp4},
    {"MXFP4 row times F32", op_dot_mxfp4},
};
enum { N_OPS = sizeof OPS / sizeof OPS[0] };

int main(int argc, char **argv) {
  uint64_t src_mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 64;
  n_rows = (src_mib << 20) / (2 * COLS);
  uint64_t n_elems = n_rows * COLS;
  src = malloc(2 * n_elems), copy = malloc(2 * n_elems), codes = malloc(n_elems), scales = malloc(n_elems), plain_fp8 = malloc(n_elems);
  plain_scales = malloc(n_elems), row_f32 = malloc(4 * n_elems / COLS);
  if (!src || !copy || !codes || !scales || !plain_fp8 || !plain_scales || !row_f32)
    return 4;
  uint64_t seed = 1;
  for (uint64_t i = 0; i < n_elems; i++) {  // a sum of four uniforms: close to Gaussian
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    float value = (float)((int)(seed >> 48 & 0xFFF) + (int)(seed >> 36 & 0xFFF) + (int)(seed >> 24 & 0xFFF) + (int)(seed >> 52) - 8190);
    k3_quant_store_float(K3_DTYPE_BF16, src, i, value * 1e-5f);
    plain_fp8[i] = (uint8_t)(seed >> 40) & 0xF7;  // no NaN
    plain_scales[i] = 120;
  }
  printf("%llu MiB of source, one core, minimum of %d interleaved runs\n", (unsigned long long)src_mib, N_RUNS);
  for (enum k3_simd level = K3_SIMD_SCALAR; level <= k3_cpu_simd(); level++) {
    double best[N_OPS];
    int n_runs = level == K3_SIMD_SCALAR ? 3 : N_RUNS;
    k3_quant_set_simd(level);
    for (int run = 0; run < n_runs; run++) {
      for (int op = 0; op < N_OPS; op++) {
        double start = seconds();
        OPS[op].run();
        double time = seconds() - start;
        best[op] = run == 0 || time < best[op] ? time : best[op];
      }
    }
    printf("\n%-8s %-26s %10s %14s %10s\n", k3_simd_name(level), "operation", "ms", "Gelements/s", "ratio");
    for (int op = 0; op < N_OPS; op++)
      printf("%-8s %-26s %10.2f %14.2f %10.2f\n", "", OPS[op].name, best[op] * 1e3, (double)n_elems / best[op] * 1e-9, best[0] / best[op]);
  }
  return sink == 0.12345f;  // keeps the compiler from dropping results
}
