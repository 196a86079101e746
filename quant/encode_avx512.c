// The encoders for AVX-512 (F, BW, DQ, VL). Bit for bit the results of kernels_scalar.c. The arguments that make BF16 sources fast stand at the head
// of encode_avx2.c, what F32 and F16 sources take beside quotient(); whatever they do not cover, and what is left over behind whole vectors, is done
// by the functions of that file.
#if defined(__x86_64__)
#include <immintrin.h>

#include "quant/encode_math.h"
#include "quant/kernels.h"
#include "quant/kernels_simd.h"

// As in encode_avx2.c.
static const float FAST_SCALE_MIN = 0x1p-90f, FAST_SCALE_MAX = 0x1p10f;

static __m512i load(const void *src) {
  return _mm512_loadu_si512(src);
}

static __m512 as_float(__m512i bits) {
  return _mm512_castsi512_ps(bits);
}

static __m512i as_int(__m512 value) {
  return _mm512_castps_si512(value);
}

// ---- E4M3

enum { E4M3_OFFSET = 121 << 3 };

// Codes, without sign and with E4M3_OFFSET added, of 16 magnitudes up to 448.
static __m512i e4m3_codes(__m512 magnitude, __m512 *rounded) {
  __m512i exponent = _mm512_and_si512(as_int(magnitude), _mm512_set1_epi32(0x7F800000));
  exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(121 << 23));
  __m512i adder = _mm512_add_epi32(exponent, _mm512_set1_epi32(20 << 23));
  __m512 sum = _mm512_add_ps(magnitude, as_float(adder));
  if (rounded)
    *rounded = _mm512_sub_ps(sum, as_float(adder));
  return _mm512_add_epi32(_mm512_srli_epi32(exponent, 20), _mm512_sub_epi32(as_int(sum), adder));
}

static __m512i e4m3_of_bf16(__m512i magnitude, __m512 scale, __m512 inverse) {
  __m512 value = as_float(magnitude), quotient = _mm512_mul_ps(value, inverse);
  quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, scale, value), inverse, quotient);
  return e4m3_codes(_mm512_min_ps(quotient, _mm512_set1_ps(448.0f)), NULL);
}

static __m512i e4m3_words_of_bf16(__m512i weights, __m512 scale, __m512 inverse) {
  const __m512i zero = _mm512_setzero_si512();
  __m512i magnitude = _mm512_and_si512(weights, _mm512_set1_epi16(0x7FFF));
  __m512i low = e4m3_of_bf16(_mm512_unpacklo_epi16(zero, magnitude), scale, inverse);
  __m512i high = e4m3_of_bf16(_mm512_unpackhi_epi16(zero, magnitude), scale, inverse);
  __m512i codes = _mm512_sub_epi16(_mm512_packs_epi32(low, high), _mm512_set1_epi16(E4M3_OFFSET));
  return _mm512_or_si512(codes, _mm512_and_si512(_mm512_srli_epi16(weights, 8), _mm512_set1_epi16(0x80)));
}

// Packing works within quarters: this puts the bytes of two vectors of words in order.
static __m512i pack_in_order(__m512i first, __m512i second) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(first, second));
}

// 64 finite BF16 weights; false, and nothing written, if one of them is not finite.
static bool e4m3_of_bf16_64(const uint8_t *src, __m512 divisor, __m512 inverse, uint8_t *dst) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __m512i first = load(src), second = load(src + 64);
  if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(first, exponent), exponent) | _mm512_cmpeq_epi16_mask(_mm512_and_si512(second, exponent), exponent))
    return false;
  _mm512_storeu_si512(dst, pack_in_order(e4m3_words_of_bf16(first, divisor, inverse), e4m3_words_of_bf16(second, divisor, inverse)));
  return true;
}

// The table of encode_avx2.c, its 16 entries four times.
struct e4m3_table {
  __m512i first, last;
};

static void make_e4m3_table(float scale, struct e4m3_table *table) {
  const __m512 divisor = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  const __m512i starts = _mm512_set4_epi32(0x08080808, 0x08080808, 0, 0),
                numbers = _mm512_set_epi8(63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37,
                                          36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10,
                                          9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  uint32_t exponent = k3_f32_bits(scale) >> 23;
  uint8_t first[16], last[16];
  for (int half = 0; half < 2; half++) {
    __m512i base = _mm512_set1_epi16((short)(exponent << 7 | (uint32_t)half << 6));
    __m512i low = _mm512_add_epi16(base, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(numbers)));
    __m512i high = _mm512_add_epi16(base, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(numbers, 1)));
    __m512i codes = pack_in_order(e4m3_words_of_bf16(low, divisor, inverse), e4m3_words_of_bf16(high, divisor, inverse));
    __m512i of_slot = _mm512_shuffle_epi8(codes, starts);
    uint64_t is_first = _mm512_cmpeq_epi8_mask(codes, of_slot), slot_codes[8];
    _mm512_storeu_si512(slot_codes, of_slot);
    for (int slot = 0; slot < 8; slot++) {
      first[8 * half + slot] = (uint8_t)((slot_codes[slot] & 0xFF) - 48 + 8);
      last[8 * half + slot] = (uint8_t)(__builtin_popcount(is_first >> 8 * slot & 0xFF) - 1);
    }
  }
  table->first = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)first));
  table->last = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)last));
}

static int e4m3_least(uint32_t scale_exponent) {
  return (int)scale_exponent - 5;
}

static bool e4m3_by_table_64(const uint8_t *src, const struct e4m3_table *table, __m512i least, uint8_t *dst) {
  const __m512i low_byte = _mm512_set1_epi16(0xFF);
  __m512i first = load(src), second = load(src + 64);
  __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
  __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, low_byte), _mm512_and_si512(second, low_byte));
  __m512i twice = _mm512_add_epi8(high, high);
  __m512i exponent = _mm512_mask_add_epi8(twice, _mm512_movepi8_mask(low), twice, _mm512_set1_epi8(1));
  __m512i binade = _mm512_sub_epi8(exponent, least);
  if (_mm512_cmpgt_epu8_mask(binade, _mm512_set1_epi8(28)))
    return false;
  __m512i slot = _mm512_and_si512(_mm512_srli_epi16(low, 3), _mm512_set1_epi8(15)), place = _mm512_and_si512(low, _mm512_set1_epi8(7));
  __m512i codes = _mm512_add_epi8(_mm512_slli_epi16(binade, 3), _mm512_shuffle_epi8(table->first, slot));
  __mmask64 is_behind = _mm512_cmpgt_epi8_mask(place, _mm512_shuffle_epi8(table->last, slot));
  codes = _mm512_min_epu8(_mm512_mask_add_epi8(codes, is_behind, codes, _mm512_set1_epi8(1)), _mm512_set1_epi8(0x7E));
  codes = _mm512_or_si512(codes, _mm512_and_si512(high, _mm512_set1_epi8((char)0x80)));
  _mm512_storeu_si512(dst, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes));
  return true;
}

struct e4m3_region {
  float scale;
  bool is_fast, has_table;
  int least;
  struct e4m3_table table;
};

static void prepare_region(float scale, size_t n_weights, struct e4m3_region *region) {
  region->scale = scale;
  region->is_fast = scale >= FAST_SCALE_MIN && scale <= FAST_SCALE_MAX;
  region->has_table = region->is_fast && n_weights >= 512;
  region->least = e4m3_least(k3_f32_bits(scale) >> 23);
  if (region->has_table)
    make_e4m3_table(scale, &region->table);
}

static void encode_bf16_run(const uint8_t *src, size_t n, const struct e4m3_region *region, uint8_t *dst) {
  const __m512 divisor = _mm512_set1_ps(region->scale), inverse = _mm512_set1_ps(1.0f / region->scale);
  const __m512i least = _mm512_set1_epi8((char)region->least);
  size_t i = 0;
  for (; region->is_fast && i + 64 <= n; i += 64) {
    if (!(region->has_table && e4m3_by_table_64(src + 2 * i, &region->table, least, dst + i)) &&
        !e4m3_of_bf16_64(src + 2 * i, divisor, inverse, dst + i))
      k3_encode_e4m3_avx2(K3_DTYPE_BF16, src + 2 * i, 1, 0, 64, 64, &region->scale, dst + i);
  }
  if (i < n)
    k3_encode_e4m3_avx2(K3_DTYPE_BF16, src + 2 * i, 1, 0, n - i, n - i, &region->scale, dst + i);
}

// ---- weights of F32 and F16

static __m512 wide_16(enum k3_dtype dtype, const uint8_t *src) {
  return dtype == K3_DTYPE_F32 ? _mm512_loadu_ps(src) : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src));
}

static __m512 magnitude_of(__m512 value) {
  return as_float(_mm512_and_si512(as_int(value), _mm512_set1_epi32(0x7FFFFFFF)));
}

// The quotient of a 24-bit weight, as far as codes tell. It lies within 2^-46 of w/s before it is rounded, so it could only be wrong where w/s is
// that close to the middle between a boundary of codes and the F32 number beside it. All boundaries have at most five significant bits; for these 16
// mantissas, all 2^23 mantissas of s and every w beside the boundary the result is RN(w/s) (test_quotients_beside_boundaries goes through them).
static __m512 quotient(__m512 magnitude, __m512 scale, __m512 inverse) {
  __m512 q = _mm512_mul_ps(magnitude, inverse);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(q, scale, magnitude), inverse, q);
}

// Codes of 16 quotients with the signs of their weights, in dwords.
static __m512i e4m3_signed(__m512 magnitude, __m512 weights) {
  __m512i codes = _mm512_sub_epi32(e4m3_codes(_mm512_min_ps(magnitude, _mm512_set1_ps(448.0f)), NULL), _mm512_set1_epi32(E4M3_OFFSET));
  return _mm512_or_si512(codes, _mm512_and_si512(_mm512_srli_epi32(as_int(weights), 24), _mm512_set1_epi32(0x80)));
}

// Low bytes of the dwords of four vectors, in order.
static __m512i bytes_of_4(const __m512i dwords[4]) {
  __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(dwords[0], dwords[1]), _mm512_packs_epi32(dwords[2], dwords[3]));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

enum { NAN_OR_INF = 0x99 };  // classes of vfpclassps

// 64 weights; false, and nothing written, if one of them is not finite.
static bool e4m3_of_wide_64(enum k3_dtype dtype, const uint8_t *src, __m512 divisor, __m512 inverse, uint8_t *dst) {
  __m512i codes[4];
  unsigned not_finite = 0;
  for (int i = 0; i < 4; i++) {
    __m512 weights = wide_16(dtype, src + (dtype == K3_DTYPE_F32 ? 64 : 32) * i);
    not_finite |= _mm512_fpclass_ps_mask(weights, NAN_OR_INF);
    codes[i] = e4m3_signed(quotient(magnitude_of(weights), divisor, inverse), weights);
  }
  if (not_finite)
    return false;
  _mm512_storeu_si512(dst, bytes_of_4(codes));
  return true;
}

static void encode_wide_run(enum k3_dtype dtype, const uint8_t *src, size_t n, float scale, uint8_t *dst) {
  const __m512 divisor = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  size_t i = 0, elem_nbytes = k3_dtype_bits(dtype) / 8;
  for (; scale >= FAST_SCALE_MIN && scale <= FAST_SCALE_MAX && i + 64 <= n; i += 64) {
    const uint8_t *from = src + elem_nbytes * i;
    if (!(dtype == K3_DTYPE_F32 ? e4m3_of_wide_64(K3_DTYPE_F32, from, divisor, inverse, dst + i)
                                : e4m3_of_wide_64(K3_DTYPE_F16, from, divisor, inverse, dst + i)))
      k3_encode_e4m3_avx2(dtype, from, 1, 0, 64, 64, &scale, dst + i);
  }
  if (i < n)
    k3_encode_e4m3_avx2(dtype, src + elem_nbytes * i, 1, 0, n - i, n - i, &scale, dst + i);
}

void k3_encode_e4m3_avx512(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                           uint8_t *dst) {
  if (dtype != K3_DTYPE_BF16) {
    for (size_t row = 0; row < n_rows; row++) {
      for (size_t col = 0; col < n_cols; col += region_cols) {
        size_t at = row * stride + col, n_run = n_cols - col < region_cols ? n_cols - col : region_cols;
        encode_wide_run(dtype, (const uint8_t *)src + at * (k3_dtype_bits(dtype) / 8), n_run, scales[col / region_cols], dst + at);
      }
    }
    return;
  }
  struct e4m3_region regions[K3_MAX_REGIONS];
  for (size_t col = 0; col < n_cols; col += region_cols)
    prepare_region(scales[col / region_cols], n_rows * region_cols, &regions[col / region_cols]);
  for (size_t row = 0; row < n_rows; row++) {
    for (size_t col = 0; col < n_cols; col += region_cols) {
      size_t at = row * stride + col, n_run = n_cols - col < region_cols ? n_cols - col : region_cols;
      encode_bf16_run((const uint8_t *)src + 2 * at, n_run, &regions[col / region_cols], dst + at);
    }
  }
}

// ---- FP4

// Thresholds of 16 blocks, as in encode_avx2.c.
struct fp4_thresholds {
  uint32_t bits[7][16];
};

static void store_thresholds(struct fp4_thresholds *thresholds, int i, __m512i words) {
  _mm512_storeu_si512(thresholds->bits[i], _mm512_or_si512(words, _mm512_slli_epi32(words, 16)));
}

static __m512i threshold(float boundary, bool is_inclusive, __m512 scale, __m512 inverse) {
  __m512 limit = _mm512_set1_ps(boundary);
  __m512i cut = _mm512_and_si512(as_int(_mm512_mul_ps(limit, scale)), _mm512_set1_epi32((int)0xFFFF0000));
  __m512 quotient = _mm512_mul_ps(as_float(cut), inverse);
  quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, scale, as_float(cut)), inverse, quotient);
  __mmask16 passes = is_inclusive ? _mm512_cmp_ps_mask(quotient, limit, _CMP_GE_OQ) : _mm512_cmp_ps_mask(quotient, limit, _CMP_GT_OQ);
  __m512i words = _mm512_srli_epi32(cut, 16);
  return _mm512_mask_sub_epi32(words, passes, words, _mm512_set1_epi32(1));
}

static void nvfp4_thresholds(__m512 scale, struct fp4_thresholds *thresholds) {
  __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), scale);
  const __m512i binade = _mm512_set1_epi32(1 << 7);
  store_thresholds(thresholds, 0, threshold(0.25f, false, scale, inverse));
  store_thresholds(thresholds, 1, threshold(0.75f, true, scale, inverse));
  __m512i above_1_25 = threshold(1.25f, false, scale, inverse), from_1_75 = threshold(1.75f, true, scale, inverse);
  store_thresholds(thresholds, 2, above_1_25);
  store_thresholds(thresholds, 3, from_1_75);
  store_thresholds(thresholds, 4, _mm512_add_epi32(above_1_25, binade));
  store_thresholds(thresholds, 5, _mm512_add_epi32(from_1_75, binade));
  store_thresholds(thresholds, 6, _mm512_add_epi32(above_1_25, _mm512_add_epi32(binade, binade)));
}

// 32 BF16 weights, half of them of block `first`, half of block `second`, to 16 dwords below 256: two codes each.
static __m512i fp4_of_bf16(__m512i weights, const struct fp4_thresholds *thresholds, int first, int second, bool zero_is_negative) {
  __m512i magnitude = _mm512_and_si512(weights, _mm512_set1_epi16(0x7FFF)), codes = _mm512_setzero_si512();
  const __m512i one = _mm512_set1_epi16(1);
  for (int i = 0; i < 7; i++) {
    __m512i limit = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)thresholds->bits[i][first]), 0xFF00, (int)thresholds->bits[i][second]);
    codes = _mm512_mask_add_epi16(codes, _mm512_cmpgt_epi16_mask(magnitude, limit), codes, one);
  }
  __mmask32 is_negative = zero_is_negative ? ~_mm512_cmpgt_epi16_mask(weights, _mm512_setzero_si512())
                                           : _mm512_movepi16_mask(weights) & _mm512_test_epi16_mask(magnitude, magnitude);
  codes = _mm512_mask_add_epi16(codes, is_negative, codes, _mm512_set1_epi16(8));
  return _mm512_madd_epi16(codes, _mm512_set1_epi32(16 << 16 | 1));
}

// Low bytes of 16 dwords.
static void store_bytes_16(__m512i dwords, uint8_t *dst) {
  _mm_storeu_si128((__m128i *)dst, _mm512_cvtepi32_epi8(dwords));
}

// Largest word of each 256-bit half of eight vectors, in order, as 16 dwords. `rows` hold blocks 2i and 2i + 1.
static __m512i horizontal_max_16(const __m512i rows[8]) {
  __m512i pairs[4], fours[2];
  for (int i = 0; i < 4; i++)
    pairs[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]), _mm512_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    fours[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]), _mm512_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]));
  __m512i eights = _mm512_max_epu16(_mm512_unpacklo_epi64(fours[0], fours[1]), _mm512_unpackhi_epi64(fours[0], fours[1]));
  // Quarters 0 and 1 hold the two halves of the even blocks, 2 and 3 those of the odd ones.
  __m128i even = _mm_max_epu16(_mm512_castsi512_si128(eights), _mm512_extracti32x4_epi32(eights, 1));
  __m128i odd = _mm_max_epu16(_mm512_extracti32x4_epi32(eights, 2), _mm512_extracti32x4_epi32(eights, 3));
  return _mm512_cvtepu16_epi32(_mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd)));
}

static __m512i magnitudes_32(const uint8_t *src) {
  return _mm512_and_si512(load(src), _mm512_set1_epi16(0x7FFF));
}

// As nvfp4_scales of encode_avx2.c.
static __m512i nvfp4_scales(enum k3_nvfp4_mode mode, float second, __m512 amax, __m512 *effective) {
  __m512 factor = _mm512_set1_ps(second), value;
  if (mode == K3_NVFP4_COMPRESSED_TENSORS) {
    __m512 wanted = _mm512_mul_ps(factor, _mm512_div_ps(amax, _mm512_set1_ps(6.0f)));
    __m512i codes = _mm512_sub_epi32(e4m3_codes(_mm512_min_ps(wanted, _mm512_set1_ps(448.0f)), &value), _mm512_set1_epi32(E4M3_OFFSET));
    __mmask16 is_zero = _mm512_testn_epi32_mask(codes, codes);
    value = _mm512_mask_mov_ps(value, is_zero, _mm512_set1_ps(0.125f));
    *effective = _mm512_div_ps(value, factor);
    return _mm512_mask_mov_epi32(codes, is_zero, _mm512_set1_epi32(0x20));
  }
  __m512 wanted = _mm512_div_ps(amax, _mm512_set1_ps(6.0f * second));
  wanted = _mm512_mask_mov_ps(wanted, _mm512_cmp_ps_mask(wanted, _mm512_setzero_ps(), _CMP_EQ_OQ), _mm512_set1_ps(1.0f));
  wanted = _mm512_min_ps(_mm512_max_ps(wanted, _mm512_set1_ps(0x1p-9f)), _mm512_set1_ps(448.0f));
  __m512i codes = _mm512_sub_epi32(e4m3_codes(wanted, &value), _mm512_set1_epi32(E4M3_OFFSET));
  *effective = _mm512_mul_ps(value, factor);
  return codes;
}

static bool all_within(__m512 values, float low, float high) {
  return (_mm512_cmp_ps_mask(values, _mm512_set1_ps(low), _CMP_GE_OQ) & _mm512_cmp_ps_mask(values, _mm512_set1_ps(high), _CMP_LE_OQ)) == 0xFFFF;
}

static bool any_not_finite(__m512i amax_words) {
  return _mm512_cmpgt_epi32_mask(amax_words, _mm512_set1_epi32(0x7F7F)) != 0;
}

// Codes without sign of 16 quotients, by rounding to one bit as e4m3_codes does to three; 254 is added.
enum { E2M1_OFFSET = 127 << 1 };
static __m512i e2m1_codes(__m512 magnitude) {
  magnitude = _mm512_min_ps(magnitude, _mm512_set1_ps(6.0f));
  __m512i exponent = _mm512_and_si512(as_int(magnitude), _mm512_set1_epi32(0x7F800000));
  exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(127 << 23));
  __m512i adder = _mm512_add_epi32(exponent, _mm512_set1_epi32(22 << 23));
  __m512i sum = as_int(_mm512_add_ps(magnitude, as_float(adder)));
  return _mm512_add_epi32(_mm512_srli_epi32(exponent, 22), _mm512_sub_epi32(sum, adder));
}

// Codes of 16 quotients in dwords. The weights must be finite; one that is not zero has a quotient that is not zero.
static __m512i e2m1_signed(__m512 magnitude, __m512 weights) {
  __m512i codes = _mm512_sub_epi32(e2m1_codes(magnitude), _mm512_set1_epi32(E2M1_OFFSET));
  __mmask16 is_negative = _mm512_cmp_ps_mask(weights, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_or_epi32(codes, is_negative, codes, _mm512_set1_epi32(8));
}

// 64 codes in dwords to 32 bytes.
static void store_pairs_64(const __m512i codes[4], uint8_t *dst) {
  __m512i pairs = _mm512_maddubs_epi16(bytes_of_4(codes), _mm512_set1_epi16(16 << 8 | 1));
  _mm256_storeu_si256((__m256i *)dst, _mm512_cvtepi16_epi8(pairs));
}

// Bits of the largest magnitudes of 16 blocks of 16 * n_vectors weights, in order; NaN is above everything.
static __m512i wide_amax_16(enum k3_dtype dtype, const uint8_t *blocks, int n_vectors) {
  const size_t vector_nbytes = dtype == K3_DTYPE_F32 ? 64 : 32;
  __m512i rows[16], pairs[8], fours[4], eights[2];
  for (int i = 0; i < 16; i++) {
    const uint8_t *row = blocks + vector_nbytes * (size_t)(n_vectors * i);
    rows[i] = as_int(magnitude_of(wide_16(dtype, row)));
    if (n_vectors == 2) {
      // Read in bursts too long for the processor's own prefetching, so the next 16 blocks are asked for here. Blocks of 16 gain nothing by that.
      const char *next = (const char *)row + vector_nbytes * 32;
      _mm_prefetch(next, _MM_HINT_T0);
      _mm_prefetch(next + vector_nbytes, _MM_HINT_T0);
      rows[i] = _mm512_max_epu32(rows[i], as_int(magnitude_of(wide_16(dtype, row + vector_nbytes))));
    }
  }
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_max_epu32(_mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]), _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    fours[i] = _mm512_max_epu32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    eights[i] =
        _mm512_max_epu32(_mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0x44), _mm512_shuffle_i64x2(fours[2 * i], fours[2 * i + 1], 0xEE));
  return _mm512_max_epu32(_mm512_shuffle_i64x2(eights[0], eights[1], 0x88), _mm512_shuffle_i64x2(eights[0], eights[1], 0xDD));
}

static bool all_finite(__m512i amax_bits) {
  return _mm512_cmpgt_epu32_mask(amax_bits, _mm512_set1_epi32(0x7F7FFFFF)) == 0;
}

// The largest scale by which no weight of F32 that is not zero is divided to zero.
static const float FAST_WIDE_SCALE_MAX = 1.0f;

// 16 blocks; false, and nothing written, if the arguments do not hold for one of them.
static bool nvfp4_of_wide_16(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const uint8_t *blocks, uint8_t *scales, uint8_t *codes) {
  const size_t block_nbytes = dtype == K3_DTYPE_F32 ? 64 : 32;
  __m512i amax = wide_amax_16(dtype, blocks, 1);
  __m512 effective;
  __m512i scale_codes = nvfp4_scales(mode, second, as_float(amax), &effective);
  if (!all_finite(amax) || !all_within(effective, FAST_SCALE_MIN, FAST_WIDE_SCALE_MAX))
    return false;
  float divisors[16], inverses[16];
  _mm512_storeu_ps(divisors, effective);
  _mm512_storeu_ps(inverses, _mm512_div_ps(_mm512_set1_ps(1.0f), effective));
  store_bytes_16(scale_codes, scales);
  for (int i = 0; i < 16; i += 4) {
    __m512i four[4];
    for (int k = 0; k < 4; k++) {
      __m512 weights = wide_16(dtype, blocks + block_nbytes * (size_t)(i + k));
      four[k] = e2m1_signed(quotient(magnitude_of(weights), _mm512_set1_ps(divisors[i + k]), _mm512_set1_ps(inverses[i + k])), weights);
    }
    store_pairs_64(four, codes + 8 * i);
  }
  return true;
}

void k3_encode_nvfp4_avx512(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales,
                            uint8_t *codes) {
  const uint8_t *from = src;
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && isnormal(second) && second > 0 && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 32 * b;
    __m512i rows[8];
    for (int i = 0; i < 8; i++)
      rows[i] = magnitudes_32(blocks + 64 * i);
    __m512i amax = horizontal_max_16(rows);
    __m512 effective;
    __m512i scale_codes = nvfp4_scales(mode, second, as_float(_mm512_slli_epi32(amax, 16)), &effective);
    if (any_not_finite(amax) || !all_within(effective, FAST_SCALE_MIN, FAST_SCALE_MAX)) {
      k3_encode_nvfp4_avx2(mode, second, dtype, blocks, 16, scales + b, codes + 8 * b);
      continue;
    }
    store_bytes_16(scale_codes, scales + b);
    struct fp4_thresholds thresholds;
    nvfp4_thresholds(effective, &thresholds);
    for (int i = 0; i < 16; i += 2)
      store_bytes_16(fp4_of_bf16(load(blocks + 32 * i), &thresholds, i, i + 1, false), codes + 8 * (b + (size_t)i));
  }
  for (; dtype != K3_DTYPE_BF16 && isnormal(second) && second > 0 && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 16 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? nvfp4_of_wide_16(mode, second, K3_DTYPE_F32, blocks, scales + b, codes + 8 * b)
                                : nvfp4_of_wide_16(mode, second, K3_DTYPE_F16, blocks, scales + b, codes + 8 * b)))
      k3_encode_nvfp4_avx2(mode, second, dtype, blocks, 16, scales + b, codes + 8 * b);
  }
  k3_encode_nvfp4_avx2(mode, second, dtype, from + 16 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 8 * b);
}

// ---- MX

static __m512i mx_scales(enum k3_mx_mode mode, struct k3_mx_element element, __m512i amax_bits) {
  uint32_t carry = mode == K3_MX_OCP ? 0 : mode == K3_MX_CEIL || mode == K3_MX_MODELOPT ? 0x007FFFFFu - element.top_mantissa : 0x00200000u;
  __m512i bytes = _mm512_srli_epi32(_mm512_add_epi32(amax_bits, _mm512_set1_epi32((int)carry)), 23);
  bytes = _mm512_sub_epi32(bytes, _mm512_set1_epi32((int)element.top_exponent));
  bytes = _mm512_min_epi32(_mm512_max_epi32(bytes, _mm512_setzero_si512()), _mm512_set1_epi32(254));
  __mmask16 is_zero = _mm512_testn_epi32_mask(amax_bits, amax_bits);
  return _mm512_mask_mov_epi32(bytes, is_zero, _mm512_set1_epi32(k3_mx_scale_byte(mode, element, 0)));
}

// Largest magnitudes of 16 blocks of 32: 16 vectors, folded to half a vector each.
static __m512i mx_amax_16(const uint8_t *blocks) {
  __m512i rows[8];
  for (int i = 0; i < 8; i++) {
    __m512i even = magnitudes_32(blocks + 128 * i), odd = magnitudes_32(blocks + 128 * i + 64);
    rows[i] = _mm512_max_epu16(_mm512_shuffle_i64x2(even, odd, 0x44), _mm512_shuffle_i64x2(even, odd, 0xEE));
  }
  return horizontal_max_16(rows);
}

static bool mx_bytes_are_fast(__m512i bytes, int largest) {
  return (_mm512_cmplt_epi32_mask(bytes, _mm512_set1_epi32(37)) | _mm512_cmpgt_epi32_mask(bytes, _mm512_set1_epi32(largest))) == 0;
}

// 16 blocks of 32 weights, MXFP4 or MXFP8. Dividing by a power of two is multiplying with its reciprocal. As nvfp4_of_wide_16.
static bool mx_of_wide_16(enum k3_mx_mode mode, bool is_fp4, enum k3_dtype dtype, const uint8_t *blocks, uint8_t *scales, uint8_t *codes) {
  const size_t vector_nbytes = dtype == K3_DTYPE_F32 ? 64 : 32;
  __m512i amax = wide_amax_16(dtype, blocks, 2), bytes = mx_scales(mode, is_fp4 ? K3_MX_E2M1 : K3_MX_E4M3, amax);
  if (!all_finite(amax) || !mx_bytes_are_fast(bytes, is_fp4 ? 127 : 127 + 10))
    return false;
  float inverses[16];
  _mm512_storeu_si512(inverses, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), bytes), 23));
  store_bytes_16(bytes, scales);
  for (int i = 0; i < 16; i += 2) {
    __m512i four[4];
    for (int k = 0; k < 4; k++) {
      __m512 weights = wide_16(dtype, blocks + vector_nbytes * (size_t)(2 * i + k));
      __m512 magnitude = _mm512_mul_ps(magnitude_of(weights), _mm512_set1_ps(inverses[i + k / 2]));
      four[k] = is_fp4 ? e2m1_signed(magnitude, weights) : e4m3_signed(magnitude, weights);
    }
    if (is_fp4)
      store_pairs_64(four, codes + 16 * i);
    else
      _mm512_storeu_si512(codes + 32 * i, bytes_of_4(four));
  }
  return true;
}

void k3_encode_mxfp4_avx512(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  static const float boundaries[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const uint8_t *from = src;
  const bool is_modelopt = mode == K3_MX_MODELOPT;
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 64 * b;
    __m512i amax = mx_amax_16(blocks), bytes = mx_scales(mode, K3_MX_E2M1, _mm512_slli_epi32(amax, 16));
    if (any_not_finite(amax) || !mx_bytes_are_fast(bytes, 127 + 10)) {
      k3_encode_mxfp4_avx2(mode, dtype, blocks, 16, scales + b, codes + 16 * b);
      continue;
    }
    store_bytes_16(bytes, scales + b);
    struct fp4_thresholds thresholds;
    for (int i = 0; i < 7; i++) {
      int bits = (int)(k3_f32_bits(boundaries[i]) >> 16) - (i % 2 == 1 && !is_modelopt) - (127 << 7);
      store_thresholds(&thresholds, i, _mm512_add_epi32(_mm512_slli_epi32(bytes, 7), _mm512_set1_epi32(bits)));
    }
    for (int i = 0; i < 16; i++)
      store_bytes_16(fp4_of_bf16(load(blocks + 64 * i), &thresholds, i, i, is_modelopt), codes + 16 * (b + (size_t)i));
  }
  for (; dtype != K3_DTYPE_BF16 && !is_modelopt && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 32 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? mx_of_wide_16(mode, true, K3_DTYPE_F32, blocks, scales + b, codes + 16 * b)
                                : mx_of_wide_16(mode, true, K3_DTYPE_F16, blocks, scales + b, codes + 16 * b)))
      k3_encode_mxfp4_avx2(mode, dtype, blocks, 16, scales + b, codes + 16 * b);
  }
  k3_encode_mxfp4_avx2(mode, dtype, from + 32 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 16 * b);
}

void k3_encode_mxfp8_avx512(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  const uint8_t *from = src;
  struct e4m3_table table;
  make_e4m3_table(1.0f, &table);
  const __mmask64 of_second = 0xFF00FF00FF00FF00u;
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 64 * b;
    __m512i amax = mx_amax_16(blocks), bytes = mx_scales(mode, K3_MX_E4M3, _mm512_slli_epi32(amax, 16));
    if (any_not_finite(amax) || !mx_bytes_are_fast(bytes, 127 + 10)) {
      k3_encode_mxfp8_avx2(mode, dtype, blocks, 16, scales + b, codes + 32 * b);
      continue;
    }
    store_bytes_16(bytes, scales + b);
    for (size_t i = b; i < b + 16; i += 2) {
      // Packing leaves 8 weights of the first and 8 of the second vector in every quarter.
      __m512i least = _mm512_mask_set1_epi8(_mm512_set1_epi8((char)e4m3_least(scales[i])), of_second, (char)e4m3_least(scales[i + 1]));
      if (e4m3_by_table_64(from + 64 * i, &table, least, codes + 32 * i))
        continue;
      const float pair[2] = {k3_f32_from_e8m0(scales[i]), k3_f32_from_e8m0(scales[i + 1])};
      k3_encode_e4m3_avx2(dtype, from + 64 * i, 1, 0, 64, 32, pair, codes + 32 * i);
    }
  }
  for (; dtype != K3_DTYPE_BF16 && b + 16 <= n_blocks; b += 16) {
    const uint8_t *blocks = from + 32 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? mx_of_wide_16(mode, false, K3_DTYPE_F32, blocks, scales + b, codes + 32 * b)
                                : mx_of_wide_16(mode, false, K3_DTYPE_F16, blocks, scales + b, codes + 32 * b)))
      k3_encode_mxfp8_avx2(mode, dtype, blocks, 16, scales + b, codes + 32 * b);
  }
  k3_encode_mxfp8_avx2(mode, dtype, from + 32 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 32 * b);
}
#endif
