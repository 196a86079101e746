// The reference: every SIMD table must give these bits.
#include <string.h>

#include "quant/kernels.h"
#include "quant/number.h"

static void widen(enum k3_dtype dtype, const void *src, size_t n, float *dst) {
  if (dtype == K3_DTYPE_F32) {
    memcpy(dst, src, 4 * n);
    return;
  }
  for (size_t i = 0; i < n; i++)
    dst[i] = k3_load_float(dtype, src, i);
}

// A NaN code decides alone: which of two NaNs a multiplication passes on depends on the order in which the compiler puts its operands.
static void decode_e4m3(const uint8_t *src, size_t n, float scale, float *dst) {
  for (size_t i = 0; i < n; i++)
    dst[i] = (src[i] & 0x7F) == 0x7F ? K3_E4M3_VALUES[src[i]] : K3_E4M3_VALUES[src[i]] * scale;
}

static void decode_e2m1(const uint8_t *src, size_t n_blocks, size_t block_elems, const float *scales, float *dst) {
  for (size_t b = 0; b < n_blocks; b++) {
    for (size_t i = 0; i < block_elems / 2; i++) {
      *dst++ = k3_f32_from_e2m1(src[i]) * scales[b];
      *dst++ = k3_f32_from_e2m1(src[i] >> 4) * scales[b];
    }
    src += block_elems / 2;
  }
}

const struct k3_quant_kernels K3_QUANT_KERNELS_SCALAR = {
    .widen = widen,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
};
