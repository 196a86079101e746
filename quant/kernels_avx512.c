// AVX-512 (F, BW, DQ, VL): widening, decoding, amax and sums, bit for bit as kernels_scalar.c; the encoders are in encode_avx512.c.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant/dot.h"
#include "quant/kernels.h"
#include "quant/kernels_simd.h"
#include "quant/number.h"

#define SCALAR K3_QUANT_KERNELS_SCALAR

static __m512i load(const void *src) {
  return _mm512_loadu_si512(src);
}

static __m512 widen_bf16_16(const void *src) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)src)), 16));
}

static void widen(enum k3_dtype dtype, const void *src, size_t n, float *dst) {
  const uint8_t *from = src;
  size_t i = 0;
  if (dtype == K3_DTYPE_BF16) {
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(dst + i, widen_bf16_16(from + 2 * i));
  } else if (dtype == K3_DTYPE_F16) {
    const __m256i exponent = _mm256_set1_epi16(0x7C00);
    for (; i + 16 <= n; i += 16) {
      __m256i half = _mm256_loadu_si256((const __m256i *)(from + 2 * i));
      if (_mm256_cmpeq_epi16_mask(_mm256_and_si256(half, exponent), exponent))
        SCALAR.widen(dtype, from + 2 * i, 16, dst + i);  // the instruction would quieten NaNs
      else
        _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(half));
    }
  }
  SCALAR.widen(dtype, from + i * (k3_dtype_bits(dtype) / 8), n - i, dst + i);
}

// E4M3 bits moved up by 7 are an F16 number 2^-8 times as large, subnormals included; NaN codes are left to the scalar code.
static void decode_e4m3(const uint8_t *src, size_t n, float scale, float *dst) {
  const float scale_256 = scale * 256.0f;
  if (isfinite(scale) && !isfinite(scale_256)) {
    SCALAR.decode_e4m3(src, n, scale, dst);
    return;
  }
  const __m512 factor = _mm512_set1_ps(scale_256);
  const __m512i keep = _mm512_set1_epi16((short)0xBF80);
  const __m256i magnitude = _mm256_set1_epi8(0x7F);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)(src + i));
    if (_mm256_cmpeq_epi8_mask(_mm256_and_si256(codes, magnitude), magnitude)) {
      SCALAR.decode_e4m3(src + i, 32, scale, dst + i);
      continue;
    }
    __m512i halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7), keep);
    _mm512_storeu_ps(dst + i, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor));
    _mm512_storeu_ps(dst + i + 16, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor));
  }
  SCALAR.decode_e4m3(src + i, n - i, scale, dst + i);
}

static void decode_e2m1(const uint8_t *src, size_t n_blocks, size_t block_elems, const float *scales, float *dst) {
  const __m512 values = _mm512_loadu_ps(K3_E2M1_VALUES);
  const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i right = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  for (size_t b = 0; b < n_blocks; b++) {
    const __m512 scale = _mm512_set1_ps(scales[b]);
    for (size_t i = 0; i < block_elems; i += 16) {
      __m512i sixteen = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)src));
      src += 8;
      __m512i codes = _mm512_srlv_epi32(_mm512_permutexvar_epi32(which, sixteen), right);  // in the low four bits, all that the permutation takes
      _mm512_storeu_ps(dst, _mm512_mul_ps(_mm512_permutexvar_ps(codes, values), scale));
      dst += 16;
    }
  }
}

static uint32_t amax_bits(enum k3_dtype dtype, const void *src, size_t n) {
  const uint8_t *from = src;
  size_t i = 0;
  uint32_t largest = 0;
  if (dtype == K3_DTYPE_F32) {
    __m512i most = _mm512_setzero_si512();
    for (; i + 16 <= n; i += 16)
      most = _mm512_max_epu32(most, _mm512_and_si512(load(from + 4 * i), _mm512_set1_epi32(0x7FFFFFFF)));
    largest = _mm512_reduce_max_epu32(most);
  } else {  // F16 and BF16 magnitudes are in the order of their bits, and so are their F32 values'
    __m512i most = _mm512_setzero_si512();
    for (; i + 32 <= n; i += 32)
      most = _mm512_max_epu16(most, _mm512_and_si512(load(from + 2 * i), _mm512_set1_epi16(0x7FFF)));
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    uint16_t largest_half = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
    largest = k3_f32_bits(k3_load_float(dtype, &largest_half, 0));
  }
  if (i == n)
    return largest;
  uint32_t rest = SCALAR.amax_bits(dtype, from + i * (k3_dtype_bits(dtype) / 8), n - i);
  return rest > largest ? rest : largest;
}

static float fold(__m512 low, __m512 high) {
  __m512 sixteen = _mm512_add_ps(low, high);
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps(sixteen, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static __mmask16 first_lanes(size_t n) {
  return n >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << n) - 1);
}

static float dot_f32(const float *weight, const float *x, size_t n) {
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    low = _mm512_fmadd_ps(_mm512_loadu_ps(weight + i), _mm512_loadu_ps(x + i), low);
    high = _mm512_fmadd_ps(_mm512_loadu_ps(weight + i + 16), _mm512_loadu_ps(x + i + 16), high);
  }
  if (i < n) {
    __mmask16 in_low = first_lanes(n - i), in_high = first_lanes(n - i > 16 ? n - i - 16 : 0);
    low = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(in_low, weight + i), _mm512_maskz_loadu_ps(in_low, x + i), low);
    high = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(in_high, weight + i + 16), _mm512_maskz_loadu_ps(in_high, x + i + 16), high);
  }
  return fold(low, high);
}

static float dot_bf16(const void *weight, const float *x, size_t n) {
  const uint8_t *from = weight;
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    low = _mm512_fmadd_ps(widen_bf16_16(from + 2 * i), _mm512_loadu_ps(x + i), low);
    high = _mm512_fmadd_ps(widen_bf16_16(from + 2 * i + 32), _mm512_loadu_ps(x + i + 16), high);
  }
  if (i < n) {
    uint16_t last[32] = {0};
    memcpy(last, from + 2 * i, 2 * (n - i));
    __mmask16 in_low = first_lanes(n - i), in_high = first_lanes(n - i > 16 ? n - i - 16 : 0);
    low = _mm512_fmadd_ps(widen_bf16_16(last), _mm512_maskz_loadu_ps(in_low, x + i), low);
    high = _mm512_fmadd_ps(widen_bf16_16(last + 16), _mm512_maskz_loadu_ps(in_high, x + i + 16), high);
  }
  return fold(low, high);
}

const struct k3_quant_kernels K3_QUANT_KERNELS_AVX512 = {
    .widen = widen,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .amax_bits = amax_bits,
    .encode_e4m3 = k3_encode_e4m3_avx512,
    .encode_nvfp4 = k3_encode_nvfp4_avx512,
    .encode_mxfp4 = k3_encode_mxfp4_avx512,
    .encode_mxfp8 = k3_encode_mxfp8_avx512,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
};
#endif
