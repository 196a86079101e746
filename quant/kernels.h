// The inner loops of quant/, one table per instruction set. Only quant/ and its tests and benchmarks use this; every table gives the same bits.
#ifndef K3_QUANT_KERNELS_H
#define K3_QUANT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/dtype.h"
#include "quant/encode.h"

enum { K3_MAX_REGIONS = 64 };

struct k3_quant_kernels {
  // n elements of BF16, F16 or F32, widened.
  void (*widen)(enum k3_dtype dtype, const void *src, size_t n, float *dst);
  // n E4M3 codes times one scale.
  void (*decode_e4m3)(const uint8_t *src, size_t n, float scale, float *dst);
  // n_blocks blocks of block_elems (a multiple of 16) E2M1 codes, two a byte, times scales[n_blocks].
  void (*decode_e2m1)(const uint8_t *src, size_t n_blocks, size_t block_elems, const float *scales, float *dst);
  // F32 bits of the largest magnitude; NaN is above everything.
  uint32_t (*amax_bits)(enum k3_dtype dtype, const void *src, size_t n);
  // A panel [n_rows, n_cols]; row r begins at element r * stride of src and of dst. Columns r * region_cols and on have scales[r]; at most
  // K3_MAX_REGIONS regions.
  void (*encode_e4m3)(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                      uint8_t *dst);
  // As the functions of quant/encode.h.
  void (*encode_nvfp4)(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
  void (*encode_mxfp4)(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
  void (*encode_mxfp8)(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
  // One tile of quant/dot.h: n <= K3_DOT_TILE.
  float (*dot_f32)(const float *weight, const float *x, size_t n);
  float (*dot_bf16)(const void *weight, const float *x, size_t n);
};

extern const struct k3_quant_kernels K3_QUANT_KERNELS_SCALAR, K3_QUANT_KERNELS_AVX2, K3_QUANT_KERNELS_AVX512;  // the last two: x86-64

// The table in use: the best this machine has (base/cpu.h), or what k3_quant_set_simd asked for.
const struct k3_quant_kernels *k3_quant_kernels(void);
// Test and benchmark hook: lowers the instruction set for the whole process. A level above the machine's is cut to it. Returns the level in force.
enum k3_simd k3_quant_set_simd(enum k3_simd level);

#endif
