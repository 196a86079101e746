#include "quant/encode.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "quant/encode_math.h"
#include "quant/kernels.h"

static const float NVFP4_SPAN = 2688.0f;  // 448 * 6: the largest block scale times the largest code

static float one_unless_normal(float value) {
  return isnormal(value) ? value : 1.0f;
}

float k3_nvfp4_divisor(float amax) {
  return one_unless_normal(1.0f / (amax < 0x1p-126f ? 0x1p-126f : amax) * NVFP4_SPAN);
}

float k3_nvfp4_multiplier(float amax) {
  return one_unless_normal(amax / NVFP4_SPAN);
}

float k3_nvfp4_pow2_multiplier(float amax) {
  if (!isnormal(amax))
    return 1.0f;
  // 2688 = 1.3125 * 2^11: a mantissa above 1.3125 needs the next power of two.
  int exponent = (int)((k3_f32_bits(amax) + (0x007FFFFFu - 0x00280000u)) >> 23) - 11;
  return exponent < 1 || exponent > 253 ? 1.0f : k3_f32_from_bits((uint32_t)exponent << 23);  // 254 would have a subnormal reciprocal
}

float k3_fp8_scale(float amax, enum k3_dtype scale_dtype) {
  float scale = amax / 448.0f, epsilon = 0x1p-23f;
  if (scale_dtype == K3_DTYPE_BF16) {
    scale = k3_f32_from_bf16(k3_bf16_from_f32(scale));
    epsilon = 0x1p-7f;
  } else if (scale_dtype == K3_DTYPE_F16) {
    scale = k3_f32_from_f16(k3_f16_from_f32(scale));
    epsilon = 0x1p-10f;
  }
  return scale == 0.0f ? epsilon : scale;
}

void k3_quant_store_float(enum k3_dtype dtype, void *dst, uint64_t i, float value) {
  if (dtype == K3_DTYPE_F32) {
    uint32_t bits = k3_f32_bits(value);
    unsigned char *p = (unsigned char *)dst + 4 * i;
    for (int b = 0; b < 4; b++)
      p[b] = (unsigned char)(bits >> 8 * b);
    return;
  }
  assert(dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16);
  uint16_t bits = dtype == K3_DTYPE_BF16 ? k3_bf16_from_f32(value) : k3_f16_from_f32(value);
  unsigned char *p = (unsigned char *)dst + 2 * i;
  p[0] = (unsigned char)bits;
  p[1] = (unsigned char)(bits >> 8);
}

void k3_quant_encode_e4m3(enum k3_dtype src_dtype, const void *src, size_t n, float scale, uint8_t *dst) {
  k3_quant_kernels()->encode_e4m3(src_dtype, src, 1, 0, n, n, &scale, dst);
}

void k3_quant_encode_nvfp4(enum k3_nvfp4_mode mode, float second, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales,
                           uint8_t *codes) {
  k3_quant_kernels()->encode_nvfp4(mode, second, src_dtype, src, n_blocks, scales, codes);
}

void k3_quant_encode_mxfp4(enum k3_mx_mode mode, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  k3_quant_kernels()->encode_mxfp4(mode, src_dtype, src, n_blocks, scales, codes);
}

void k3_quant_encode_mxfp8(enum k3_mx_mode mode, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  k3_quant_kernels()->encode_mxfp8(mode, src_dtype, src, n_blocks, scales, codes);
}

static uint64_t least_u64(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// FP8 with a scale per region of band_rows x block_cols. A panel of regions side by side is read twice, row by row both times, so that the readings
// are sequential: for the amax, and for the codes, then from the cache if the panel fits it.
struct fp8_panel {
  const uint8_t *src;  // first element
  uint8_t *weight;
  size_t n_rows, stride, n_cols, block_cols, n_regions;
};

static void encode_fp8_panel(const struct k3_quant_encoder *encoder, const struct fp8_panel *panel, float scales[K3_MAX_REGIONS]) {
  const struct k3_quant_kernels *kernels = k3_quant_kernels();
  size_t elem_nbytes = k3_dtype_bits(encoder->src_dtype) / 8;
  uint32_t amax_bits[K3_MAX_REGIONS];
  memset(amax_bits, 0, panel->n_regions * sizeof amax_bits[0]);
  for (size_t row = 0; row < panel->n_rows; row++) {
    for (size_t r = 0; r < panel->n_regions; r++) {
      size_t col = r * panel->block_cols, n_run = panel->n_cols - col < panel->block_cols ? panel->n_cols - col : panel->block_cols;
      uint32_t bits = kernels->amax_bits(encoder->src_dtype, panel->src + (row * panel->stride + col) * elem_nbytes, n_run);
      amax_bits[r] = bits > amax_bits[r] ? bits : amax_bits[r];
    }
  }
  for (size_t r = 0; r < panel->n_regions; r++)
    scales[r] = k3_fp8_scale(k3_f32_from_bits(amax_bits[r]), encoder->scheme.scale_dtype);
  kernels->encode_e4m3(encoder->src_dtype, panel->src, panel->n_rows, panel->stride, panel->n_cols, panel->block_cols, scales, panel->weight);
}

static void encode_fp8_bands(const struct k3_quant_encoder *encoder, const uint8_t *src, uint64_t n_rows, uint64_t n_cols, uint8_t *weight,
                             void *scale) {
  const struct k3_quant_scheme *scheme = &encoder->scheme;
  uint64_t elem_nbytes = k3_dtype_bits(encoder->src_dtype) / 8, scale_index = 0;
  uint64_t band_rows = scheme->block_rows ? scheme->block_rows : n_rows, block_cols = scheme->block_cols ? scheme->block_cols : n_cols;
  for (uint64_t row = 0; row < n_rows; row += band_rows) {
    for (uint64_t col = 0; col < n_cols; col += K3_MAX_REGIONS * block_cols) {
      uint64_t at = row * n_cols + col;
      struct fp8_panel panel = {.src = src + at * elem_nbytes,
                                .weight = weight + at,
                                .n_rows = (size_t)least_u64(band_rows, n_rows - row),
                                .stride = (size_t)n_cols,
                                .n_cols = (size_t)least_u64(K3_MAX_REGIONS * block_cols, n_cols - col),
                                .block_cols = (size_t)block_cols};
      panel.n_regions = (size_t)k3_ceil_div_u64(panel.n_cols, block_cols);
      float scales[K3_MAX_REGIONS];
      encode_fp8_panel(encoder, &panel, scales);
      for (size_t r = 0; r < panel.n_regions; r++)
        k3_quant_store_float(scheme->scale_dtype, scale, scale_index++, scales[r]);
    }
  }
}

void k3_quant_encode_rows(const struct k3_quant_encoder *encoder, const void *src, uint64_t n_rows, uint64_t n_cols, void *weight, void *scale) {
  const struct k3_quant_scheme *scheme = &encoder->scheme;
  size_t n_elems = (size_t)(n_rows * n_cols), block = scheme->block_cols;
  switch (scheme->scheme) {
    case K3_SCHEME_FP8_TENSOR: k3_quant_encode_e4m3(encoder->src_dtype, src, n_elems, encoder->scale, weight); break;
    case K3_SCHEME_FP8_CHANNEL:
    case K3_SCHEME_FP8_GROUP:
    case K3_SCHEME_FP8_BLOCK: encode_fp8_bands(encoder, src, n_rows, n_cols, weight, scale); break;
    case K3_SCHEME_NVFP4:
      assert(block == 16 && n_cols % block == 0);
      k3_quant_encode_nvfp4(encoder->nvfp4_mode, encoder->scale, encoder->src_dtype, src, n_elems / 16, scale, weight);
      break;
    case K3_SCHEME_MXFP4:
      assert(block == 32 && n_cols % block == 0);
      k3_quant_encode_mxfp4(encoder->mx_mode, encoder->src_dtype, src, n_elems / 32, scale, weight);
      break;
    case K3_SCHEME_MXFP8:
      assert(block == 32 && n_cols % block == 0);
      k3_quant_encode_mxfp8(encoder->mx_mode, encoder->src_dtype, src, n_elems / 32, scale, weight);
      break;
    default: assert(!"k3_quant_encode_rows: not a scheme that is written"); break;
  }
}
