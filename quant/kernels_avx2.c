// AVX2 + FMA + F16C: widening, decoding, amax and sums, bit for bit as kernels_scalar.c; the encoders are in encode_avx2.c.
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant/dot.h"
#include "quant/kernels.h"
#include "quant/kernels_simd.h"
#include "quant/number.h"

#define SCALAR K3_QUANT_KERNELS_SCALAR

static __m256i load(const void *src) {
  return _mm256_loadu_si256((const __m256i *)src);
}

static __m256 as_float(__m256i bits) {
  return _mm256_castsi256_ps(bits);
}

static __m256 widen_bf16_8(const void *src) {
  return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)src)), 16));
}

static void widen(enum k3_dtype dtype, const void *src, size_t n, float *dst) {
  const uint8_t *from = src;
  size_t i = 0;
  if (dtype == K3_DTYPE_BF16) {
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(dst + i, widen_bf16_8(from + 2 * i));
  } else if (dtype == K3_DTYPE_F16) {
    const __m128i exponent = _mm_set1_epi16(0x7C00);
    for (; i + 8 <= n; i += 8) {
      __m128i half = _mm_loadu_si128((const __m128i *)(from + 2 * i));
      if (_mm_movemask_epi8(_mm_cmpeq_epi16(_mm_and_si128(half, exponent), exponent)))
        SCALAR.widen(dtype, from + 2 * i, 8, dst + i);  // the instruction would quieten NaNs
      else
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
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
  const __m256 factor = _mm256_set1_ps(scale_256);
  const __m256i keep = _mm256_set1_epi16((short)0xBF80);
  const __m128i magnitude = _mm_set1_epi8(0x7F);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m128i codes = _mm_loadu_si128((const __m128i *)(src + i));
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(codes, magnitude), magnitude))) {
      SCALAR.decode_e4m3(src + i, 16, scale, dst + i);
      continue;
    }
    __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), keep);
    _mm256_storeu_ps(dst + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor));
    _mm256_storeu_ps(dst + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor));
  }
  SCALAR.decode_e4m3(src + i, n - i, scale, dst + i);
}

static void decode_e2m1(const uint8_t *src, size_t n_blocks, size_t block_elems, const float *scales, float *dst) {
  const __m256 values = _mm256_loadu_ps(K3_E2M1_VALUES);
  const __m256i right = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), left = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  const __m256i sign = _mm256_set1_epi32((int)0x80000000);
  for (size_t b = 0; b < n_blocks; b++) {
    const __m256 scale = _mm256_set1_ps(scales[b]);
    for (size_t i = 0; i < block_elems; i += 8) {
      int32_t eight;
      memcpy(&eight, src, 4);
      src += 4;
      __m256i codes = _mm256_set1_epi32(eight);
      __m256 magnitude = _mm256_permutevar8x32_ps(values, _mm256_srlv_epi32(codes, right));  // takes the low three bits
      __m256i signs = _mm256_and_si256(_mm256_sllv_epi32(codes, left), sign);
      _mm256_storeu_ps(dst, _mm256_mul_ps(_mm256_or_ps(magnitude, as_float(signs)), scale));
      dst += 8;
    }
  }
}

static uint32_t amax_bits(enum k3_dtype dtype, const void *src, size_t n) {
  const uint8_t *from = src;
  size_t i = 0;
  uint32_t largest = 0;
  if (dtype == K3_DTYPE_F32) {
    __m256i most = _mm256_setzero_si256();
    for (; i + 8 <= n; i += 8)
      most = _mm256_max_epu32(most, _mm256_and_si256(load(from + 4 * i), _mm256_set1_epi32(0x7FFFFFFF)));
    uint32_t lanes[8];
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int lane = 0; lane < 8; lane++)
      largest = lanes[lane] > largest ? lanes[lane] : largest;
  } else {  // F16 and BF16 magnitudes are in the order of their bits, and so are their F32 values'
    __m256i most = _mm256_setzero_si256();
    for (; i + 16 <= n; i += 16)
      most = _mm256_max_epu16(most, _mm256_and_si256(load(from + 2 * i), _mm256_set1_epi16(0x7FFF)));
    __m128i ones = _mm_set1_epi16(-1), half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    uint16_t largest_half = (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, ones)), 0);
    largest = k3_f32_bits(k3_load_float(dtype, &largest_half, 0));
  }
  if (i == n)
    return largest;
  uint32_t rest = SCALAR.amax_bits(dtype, from + i * (k3_dtype_bits(dtype) / 8), n - i);
  return rest > largest ? rest : largest;
}

static float fold(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 eight = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static float dot_f32(const float *weight, const float *x, size_t n) {
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int s = 0; s < 4; s++)
      sums[s] = _mm256_fmadd_ps(_mm256_loadu_ps(weight + i + 8 * s), _mm256_loadu_ps(x + i + 8 * s), sums[s]);
  }
  if (i < n) {
    float last[2][32] = {{0}};
    memcpy(last[0], weight + i, 4 * (n - i));
    memcpy(last[1], x + i, 4 * (n - i));
    for (int s = 0; s < 4; s++)
      sums[s] = _mm256_fmadd_ps(_mm256_loadu_ps(last[0] + 8 * s), _mm256_loadu_ps(last[1] + 8 * s), sums[s]);
  }
  return fold(sums[0], sums[1], sums[2], sums[3]);
}

static float dot_bf16(const void *weight, const float *x, size_t n) {
  const uint8_t *from = weight;
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int s = 0; s < 4; s++)
      sums[s] = _mm256_fmadd_ps(widen_bf16_8(from + 2 * i + 16 * s), _mm256_loadu_ps(x + i + 8 * s), sums[s]);
  }
  if (i < n) {
    float last[32] = {0};
    uint16_t last_weight[32] = {0};
    memcpy(last_weight, from + 2 * i, 2 * (n - i));
    memcpy(last, x + i, 4 * (n - i));
    for (int s = 0; s < 4; s++)
      sums[s] = _mm256_fmadd_ps(widen_bf16_8(last_weight + 8 * s), _mm256_loadu_ps(last + 8 * s), sums[s]);
  }
  return fold(sums[0], sums[1], sums[2], sums[3]);
}

const struct k3_quant_kernels K3_QUANT_KERNELS_AVX2 = {
    .widen = widen,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .amax_bits = amax_bits,
    .encode_e4m3 = k3_encode_e4m3_avx2,
    .encode_nvfp4 = k3_encode_nvfp4_avx2,
    .encode_mxfp4 = k3_encode_mxfp4_avx2,
    .encode_mxfp8 = k3_encode_mxfp8_avx2,
    .dot_f32 = dot_f32,
    .dot_bf16 = dot_bf16,
};
#endif
