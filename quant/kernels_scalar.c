// The reference: every SIMD table must give these bits.
#include <string.h>

#include "quant/dot.h"
#include "quant/encode_math.h"
#include "quant/kernels.h"

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

static uint32_t amax_bits(enum k3_dtype dtype, const void *src, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t bits = k3_f32_bits(k3_load_float(dtype, src, i)) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

static void encode_e4m3(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                        uint8_t *dst) {
  for (size_t row = 0; row < n_rows; row++) {
    for (size_t col = 0; col < n_cols; col++)
      dst[row * stride + col] = k3_e4m3_from_f32(k3_load_float(dtype, src, row * stride + col) / scales[col / region_cols]);
  }
}

static const void *element(enum k3_dtype dtype, const void *src, size_t i) {
  return (const char *)src + i * (k3_dtype_bits(dtype) / 8);
}

static void encode_nvfp4(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales,
                         uint8_t *codes) {
  for (size_t b = 0; b < n_blocks; b++) {
    const void *block = element(dtype, src, 16 * b);
    float effective;
    scales[b] = k3_nvfp4_block(mode, second, k3_f32_from_bits(amax_bits(dtype, block, 16)), &effective);
    for (size_t i = 0; i < 16; i += 2) {
      uint8_t low = k3_fp4_code(k3_load_float(dtype, block, i) / effective, false, false);
      uint8_t high = k3_fp4_code(k3_load_float(dtype, block, i + 1) / effective, false, false);
      *codes++ = (uint8_t)(low | high << 4);
    }
  }
}

static void encode_mxfp4(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  bool is_modelopt = mode == K3_MX_MODELOPT;
  for (size_t b = 0; b < n_blocks; b++) {
    const void *block = element(dtype, src, 32 * b);
    scales[b] = k3_mx_scale_byte(mode, K3_MX_E2M1, amax_bits(dtype, block, 32));
    float scale = k3_f32_from_e8m0(scales[b]);
    for (size_t i = 0; i < 32; i += 2) {
      uint8_t low = k3_fp4_code(k3_load_float(dtype, block, i) / scale, is_modelopt, is_modelopt);
      uint8_t high = k3_fp4_code(k3_load_float(dtype, block, i + 1) / scale, is_modelopt, is_modelopt);
      *codes++ = (uint8_t)(low | high << 4);
    }
  }
}

static void encode_mxfp8(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  for (size_t b = 0; b < n_blocks; b++) {
    const void *block = element(dtype, src, 32 * b);
    scales[b] = k3_mx_scale_byte(mode, K3_MX_E4M3, amax_bits(dtype, block, 32));
    float scale = k3_f32_from_e8m0(scales[b]);
    encode_e4m3(dtype, block, 1, 0, 32, 32, &scale, codes + 32 * b);
  }
}

// The last, short group of 32 is filled with zeros, here as in the SIMD tables, so that all see the same additions.
static float fold(float *sums) {
  for (size_t half = 16; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; lane++)
      sums[lane] += sums[lane + half];
  }
  return sums[0];
}

static float dot_f32(const float *weight, const float *x, size_t n) {
  float sums[32] = {0};
  for (size_t i = 0; i < n; i++)
    sums[i % 32] = fmaf(weight[i], x[i], sums[i % 32]);
  for (size_t i = n; i % 32; i++)
    sums[i % 32] = fmaf(0.0f, 0.0f, sums[i % 32]);
  return fold(sums);
}

static float dot_bf16(const void *weight, const float *x, size_t n) {
  float wide[K3_DOT_TILE];
  widen(K3_DTYPE_BF16, weight, n, wide);
  return dot_f32(wide, x, n);
}

const struct k3_quant_kernels K3_QUANT_KERNELS_SCALAR = {
    .widen = widen,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .amax_bits = amax_bits,
    .encode_e4m3 = encode_e4m3,
    .encode_nvfp4 = encode_nvfp4,
    .encode_mxfp4 = encode_mxfp4,
    .encode_mxfp8 = encode_mxfp8,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
};
