// The encoders for AVX2 + FMA + F16C. Bit for bit the results of kernels_scalar.c.
//
// Three arguments make BF16 sources fast (what F32 and F16 sources take stands beside quotient() of encode_avx512.c); ranges in which the arguments
// do not hold take a division per weight.
// 1. The E4M3 or E2M1 code of w / s without a division. With y = RN(1/s), q0 = RN(w*y) and q1 = RN(q0 + y*(w - q0*s)) by fused operations, q1 lies
//    within 2^-46 of w/s, relatively. It can differ from RN(w/s) only if w/s is that close to the middle m + u/2 between two F32 numbers, and the
//    code can differ only if m or m + u is a boundary between two codes. Such a boundary has at most 5 significant bits, so w = m*s + (s*u/2)(1 + d),
//    |d| < 2^-21, would make an 8-bit number the sum of a 29-bit product and a term 2^24 times smaller: the bits below the last one of w cannot
//    cancel. So the code is that of the rounded quotient. (11-bit F16 numbers would do as well; 24-bit ones would not.)
// 2. E4M3 codes by table. As long as codes are normal numbers, doubling w adds 8 to the code, so one table of the 128 mantissas of BF16 serves all
//    binades. Codes change at least 8 mantissas apart (the boundaries of w are spaced s/8 or s/16 of a binade, s the scale's mantissa): within 8
//    neighbours there is at most one step, and 16 entries of "code of the first" and "place of the step" fit a byte shuffle.
// 3. E2M1 codes by comparison. Within a block the code only depends on which of seven thresholds |w| has passed, and for 16-bit w a threshold is the
//    smallest BF16 number whose rounded quotient passes it: computed once per block, then 16 weights are compared per instruction.
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "quant/encode_math.h"
#include "quant/kernels.h"
#include "quant/kernels_simd.h"

#define SCALAR K3_QUANT_KERNELS_SCALAR
#define SIMD   K3_QUANT_KERNELS_AVX2

// In this range of scales neither 1/s nor a remainder that matters is subnormal, and no quotient of a weight that is not zero vanishes.
static const float FAST_SCALE_MIN = 0x1p-90f, FAST_SCALE_MAX = 0x1p10f;

static __m256i load(const void *src) {
  return _mm256_loadu_si256((const __m256i *)src);
}

static __m256 as_float(__m256i bits) {
  return _mm256_castsi256_ps(bits);
}

static __m256i as_int(__m256 value) {
  return _mm256_castps_si256(value);
}

// ---- E4M3

// Codes, without sign and with 121 << 3 added, of eight magnitudes up to 448: k3_round_minifloat in eight lanes.
enum { E4M3_OFFSET = 121 << 3 };
static __m256i e4m3_codes(__m256 magnitude, __m256 *rounded) {
  __m256i exponent = _mm256_and_si256(as_int(magnitude), _mm256_set1_epi32(0x7F800000));
  exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(121 << 23));
  __m256i adder = _mm256_add_epi32(exponent, _mm256_set1_epi32(20 << 23));
  __m256 sum = _mm256_add_ps(magnitude, as_float(adder));
  if (rounded)
    *rounded = _mm256_sub_ps(sum, as_float(adder));
  return _mm256_add_epi32(_mm256_srli_epi32(exponent, 20), _mm256_sub_epi32(as_int(sum), adder));
}

// Eight quotients of any kind to codes in the low bytes.
static __m256i e4m3_quotients(__m256 value, __m256 scale) {
  __m256 quotient = _mm256_div_ps(value, scale);
  __m256i sign = _mm256_and_si256(_mm256_srli_epi32(as_int(quotient), 24), _mm256_set1_epi32(0x80));
  __m256 magnitude = _mm256_and_ps(quotient, as_float(_mm256_set1_epi32(0x7FFFFFFF)));
  __m256i codes = _mm256_sub_epi32(e4m3_codes(_mm256_min_ps(magnitude, _mm256_set1_ps(448.0f)), NULL), _mm256_set1_epi32(E4M3_OFFSET));
  __m256i is_nan = as_int(_mm256_cmp_ps(quotient, quotient, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_or_si256(codes, sign), _mm256_set1_epi32(0x7F), is_nan);
}

// 32 codes from four vectors of dwords, in order, to dst.
static void store_codes_32(__m256i a, __m256i b, __m256i c, __m256i d, uint8_t *dst) {
  __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  _mm256_storeu_si256((__m256i *)dst, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

static void encode_e4m3_plain(enum k3_dtype dtype, const uint8_t *src, size_t n, float scale, uint8_t *dst) {
  const __m256 divisor = _mm256_set1_ps(scale);
  size_t i = 0, elem_nbytes = k3_dtype_bits(dtype) / 8;
  for (; i + 32 <= n; i += 32) {
    float wide[32];
    SIMD.widen(dtype, src + i * elem_nbytes, 32, wide);
    store_codes_32(e4m3_quotients(_mm256_loadu_ps(wide), divisor), e4m3_quotients(_mm256_loadu_ps(wide + 8), divisor),
                   e4m3_quotients(_mm256_loadu_ps(wide + 16), divisor), e4m3_quotients(_mm256_loadu_ps(wide + 24), divisor), dst + i);
  }
  SCALAR.encode_e4m3(dtype, src + i * elem_nbytes, 1, 0, n - i, n, &scale, dst + i);
}

// Eight BF16 magnitudes divided by the scale (argument 1 at the head of this file), as far as E4M3 tells. An overflow gives Inf or NaN, and minps
// returns its second operand for a NaN.
static __m256i e4m3_of_bf16(__m256i magnitude, __m256 scale, __m256 inverse) {
  __m256 value = as_float(magnitude), quotient = _mm256_mul_ps(value, inverse);
  quotient = _mm256_fmadd_ps(_mm256_fnmadd_ps(quotient, scale, value), inverse, quotient);
  return e4m3_codes(_mm256_min_ps(quotient, _mm256_set1_ps(448.0f)), NULL);
}

// 16 BF16 weights to 16 codes in words. Unpacking with zeros widens and packing restores the order.
static __m256i e4m3_words_of_bf16(__m256i weights, __m256 scale, __m256 inverse) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i magnitude = _mm256_and_si256(weights, _mm256_set1_epi16(0x7FFF));
  __m256i low = e4m3_of_bf16(_mm256_unpacklo_epi16(zero, magnitude), scale, inverse);
  __m256i high = e4m3_of_bf16(_mm256_unpackhi_epi16(zero, magnitude), scale, inverse);
  __m256i codes = _mm256_sub_epi16(_mm256_packs_epi32(low, high), _mm256_set1_epi16(E4M3_OFFSET));
  return _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(weights, 8), _mm256_set1_epi16(0x80)));
}

// 32 BF16 weights by argument 1, or by division if one of them is not finite.
static void e4m3_of_bf16_32(const uint8_t *src, float scale, __m256 divisor, __m256 inverse, uint8_t *dst) {
  const __m256i exponent = _mm256_set1_epi16(0x7F80);
  __m256i first = load(src), second = load(src + 32);
  __m256i not_finite = _mm256_or_si256(_mm256_cmpeq_epi16(_mm256_and_si256(first, exponent), exponent),
                                       _mm256_cmpeq_epi16(_mm256_and_si256(second, exponent), exponent));
  if (!_mm256_testz_si256(not_finite, not_finite)) {
    encode_e4m3_plain(K3_DTYPE_BF16, src, 32, scale, dst);
    return;
  }
  __m256i bytes = _mm256_packus_epi16(e4m3_words_of_bf16(first, divisor, inverse), e4m3_words_of_bf16(second, divisor, inverse));
  _mm256_storeu_si256((__m256i *)dst, _mm256_permute4x64_epi64(bytes, 0xD8));
}

// Argument 2. For mantissa 8 * slot + place and exponent field e of the weight, the code is
//   8 * (e - least) + first[slot] + (place > last[slot])     while 0 <= e - least <= 28 (the result fits a byte), then saturated.
struct e4m3_table {
  __m256i first, last;  // 16 entries, twice
};

// `least` for a scale with that exponent field: one binade above the smallest normal code whatever the mantissas.
static int e4m3_least(uint32_t scale_exponent) {
  return (int)scale_exponent - 5;
}

static void make_e4m3_table(float scale, struct e4m3_table *table) {
  const __m256 divisor = _mm256_set1_ps(scale), inverse = _mm256_set1_ps(1.0f / scale);
  const __m256i starts = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
  const __m256i iota = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  uint32_t exponent = k3_f32_bits(scale) >> 23;  // weights of the scale's own binade: quotients between 0.5 and 2, codes from 48 to 64
  uint8_t first[16], last[16];
  for (int quarter = 0; quarter < 4; quarter++) {
    __m256i weights = _mm256_add_epi16(iota, _mm256_set1_epi16((short)(exponent << 7 | (uint32_t)quarter << 5)));
    __m256i words[2] = {e4m3_words_of_bf16(weights, divisor, inverse),
                        e4m3_words_of_bf16(_mm256_add_epi16(weights, _mm256_set1_epi16(16)), divisor, inverse)};
    __m256i codes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words[0], words[1]), 0xD8), of_slot = _mm256_shuffle_epi8(codes, starts);
    uint32_t is_first = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(codes, of_slot));
    uint64_t slot_codes[4];
    _mm256_storeu_si256((__m256i *)slot_codes, of_slot);
    for (int slot = 0; slot < 4; slot++) {
      first[4 * quarter + slot] = (uint8_t)((slot_codes[slot] & 0xFF) - 48 + 8);
      last[4 * quarter + slot] = (uint8_t)(__builtin_popcount(is_first >> 8 * slot & 0xFF) - 1);
    }
  }
  table->first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)first));
  table->last = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)last));
}

// 32 BF16 weights through the table; false, and nothing written, if one of them is outside its binades (or not finite).
static bool e4m3_by_table_32(const uint8_t *src, const struct e4m3_table *table, __m256i least, uint8_t *dst) {
  const __m256i low_byte = _mm256_set1_epi16(0xFF), zero = _mm256_setzero_si256();
  __m256i first = load(src), second = load(src + 32);
  __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));             // sign, exponent / 2
  __m256i low = _mm256_packus_epi16(_mm256_and_si256(first, low_byte), _mm256_and_si256(second, low_byte));  // exponent % 2, mantissa
  __m256i exponent = _mm256_sub_epi8(_mm256_add_epi8(high, high), _mm256_cmpgt_epi8(zero, low));
  __m256i binade = _mm256_sub_epi8(exponent, least);
  __m256i is_inside = _mm256_cmpeq_epi8(_mm256_min_epu8(binade, _mm256_set1_epi8(28)), binade);
  if (_mm256_movemask_epi8(is_inside) != -1)
    return false;
  __m256i slot = _mm256_and_si256(_mm256_srli_epi16(low, 3), _mm256_set1_epi8(15)), place = _mm256_and_si256(low, _mm256_set1_epi8(7));
  __m256i codes = _mm256_add_epi8(_mm256_slli_epi16(binade, 3), _mm256_shuffle_epi8(table->first, slot));
  codes = _mm256_sub_epi8(codes, _mm256_cmpgt_epi8(place, _mm256_shuffle_epi8(table->last, slot)));
  codes = _mm256_min_epu8(codes, _mm256_set1_epi8(0x7E));
  codes = _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8((char)0x80)));
  _mm256_storeu_si256((__m256i *)dst, _mm256_permute4x64_epi64(codes, 0xD8));
  return true;
}

// A run of weights that share a scale, and what is known about it.
struct e4m3_region {
  float scale;
  bool is_fast, has_table;
  int least;
  struct e4m3_table table;
};

static void prepare_region(enum k3_dtype dtype, float scale, size_t n_weights, struct e4m3_region *region) {
  region->scale = scale;
  region->is_fast = dtype == K3_DTYPE_BF16 && scale >= FAST_SCALE_MIN && scale <= FAST_SCALE_MAX;
  region->has_table = region->is_fast && n_weights >= 512;  // the table costs as much as 128 weights
  region->least = e4m3_least(k3_f32_bits(scale) >> 23);
  if (region->has_table)
    make_e4m3_table(scale, &region->table);
}

static void encode_run(enum k3_dtype dtype, const uint8_t *src, size_t n, const struct e4m3_region *region, uint8_t *dst) {
  const __m256 divisor = _mm256_set1_ps(region->scale), inverse = _mm256_set1_ps(1.0f / region->scale);
  const __m256i least = _mm256_set1_epi8((char)region->least);
  size_t i = 0;
  for (; region->is_fast && i + 32 <= n; i += 32) {
    if (!region->has_table || !e4m3_by_table_32(src + 2 * i, &region->table, least, dst + i))
      e4m3_of_bf16_32(src + 2 * i, region->scale, divisor, inverse, dst + i);
  }
  if (i < n)
    encode_e4m3_plain(dtype, src + i * (k3_dtype_bits(dtype) / 8), n - i, region->scale, dst + i);
}

void k3_encode_e4m3_avx2(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                         uint8_t *dst) {
  struct e4m3_region regions[K3_MAX_REGIONS];
  for (size_t col = 0; col < n_cols; col += region_cols)
    prepare_region(dtype, scales[col / region_cols], n_rows * region_cols, &regions[col / region_cols]);
  for (size_t row = 0; row < n_rows; row++) {
    for (size_t col = 0; col < n_cols; col += region_cols) {
      size_t at = row * stride + col, n_run = n_cols - col < region_cols ? n_cols - col : region_cols;
      encode_run(dtype, (const uint8_t *)src + at * (k3_dtype_bits(dtype) / 8), n_run, &regions[col / region_cols], dst + at);
    }
  }
}

// ---- FP4

// How codes are decided at ties and for zeros: NVFP4 and most MX modes, or ModelOpt's MXFP4.
struct fp4_rule {
  bool ties_toward_zero, zero_is_negative;
};

// Eight quotients of any kind to codes in the low nibbles: k3_fp4_code in eight lanes.
static __m256i fp4_quotients(__m256 value, __m256 scale, struct fp4_rule rule) {
  __m256 quotient = _mm256_div_ps(value, scale);
  __m256 magnitude = _mm256_and_ps(quotient, as_float(_mm256_set1_epi32(0x7FFFFFFF)));
  __m256 clamped = _mm256_min_ps(magnitude, _mm256_set1_ps(6.0f));
  __m256i exponent = _mm256_and_si256(as_int(clamped), _mm256_set1_epi32(0x7F800000));
  exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(127 << 23));
  __m256i adder = _mm256_add_epi32(exponent, _mm256_set1_epi32(22 << 23));
  __m256i codes = _mm256_sub_epi32(as_int(_mm256_add_ps(clamped, as_float(adder))), adder);
  codes = _mm256_sub_epi32(_mm256_add_epi32(codes, _mm256_srli_epi32(exponent, 22)), _mm256_set1_epi32(127 << 1));
  if (rule.ties_toward_zero) {
    __m256 is_tie = _mm256_or_ps(
        _mm256_cmp_ps(clamped, _mm256_set1_ps(0.75f), _CMP_EQ_OQ),
        _mm256_or_ps(_mm256_cmp_ps(clamped, _mm256_set1_ps(1.75f), _CMP_EQ_OQ), _mm256_cmp_ps(clamped, _mm256_set1_ps(3.5f), _CMP_EQ_OQ)));
    codes = _mm256_add_epi32(codes, as_int(is_tie));
  }
  __m256 zero = _mm256_setzero_ps(), is_negative = _mm256_cmp_ps(quotient, zero, _CMP_LT_OQ);
  if (rule.zero_is_negative)
    is_negative = _mm256_cmp_ps(quotient, zero, _CMP_LE_OQ);
  codes = _mm256_or_si256(codes, _mm256_and_si256(as_int(is_negative), _mm256_set1_epi32(8)));
  return _mm256_blendv_epi8(codes, _mm256_set1_epi32(7), as_int(_mm256_cmp_ps(quotient, quotient, _CMP_UNORD_Q)));
}

static void fp4_block_plain(const float *wide, size_t n, float scale, struct fp4_rule rule, uint8_t *codes) {
  const __m256 divisor = _mm256_set1_ps(scale);
  for (size_t i = 0; i < n; i += 16) {
    __m256i words =
        _mm256_packs_epi32(fp4_quotients(_mm256_loadu_ps(wide + i), divisor, rule), fp4_quotients(_mm256_loadu_ps(wide + i + 8), divisor, rule));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi32(16 << 16 | 1));
    __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(pairs, pairs), _mm256_setzero_si256());
    int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
    memcpy(codes + i / 2, halves, 8);
  }
}

static void encode_nvfp4_plain(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const uint8_t *src, size_t n_blocks, uint8_t *scales,
                               uint8_t *codes) {
  for (size_t b = 0; b < n_blocks; b++) {
    float wide[16], effective;
    SIMD.widen(dtype, src + 16 * b * (k3_dtype_bits(dtype) / 8), 16, wide);
    scales[b] = k3_nvfp4_block(mode, second, k3_f32_from_bits(SIMD.amax_bits(K3_DTYPE_F32, wide, 16)), &effective);
    fp4_block_plain(wide, 16, effective, (struct fp4_rule){0}, codes + 8 * b);
  }
}

static struct fp4_rule mx_rule(enum k3_mx_mode mode) {
  return (struct fp4_rule){mode == K3_MX_MODELOPT, mode == K3_MX_MODELOPT};
}

static void encode_mxfp4_plain(enum k3_mx_mode mode, enum k3_dtype dtype, const uint8_t *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  for (size_t b = 0; b < n_blocks; b++) {
    float wide[32];
    SIMD.widen(dtype, src + 32 * b * (k3_dtype_bits(dtype) / 8), 32, wide);
    scales[b] = k3_mx_scale_byte(mode, K3_MX_E2M1, SIMD.amax_bits(K3_DTYPE_F32, wide, 32));
    fp4_block_plain(wide, 32, k3_f32_from_e8m0(scales[b]), mx_rule(mode), codes + 16 * b);
  }
}

// Thresholds of eight blocks: |w| has code at least i + 1 if its BF16 bits are above bits[i][block]. The bits stand in both halves of the dword, so
// that a broadcast fills 16 lanes.
struct fp4_thresholds {
  uint32_t bits[7][8];
};

static __m256i both_halves(__m256i words) {
  return _mm256_or_si256(words, _mm256_slli_epi32(words, 16));
}

static void store_thresholds(struct fp4_thresholds *thresholds, int i, __m256i bits) {
  _mm256_storeu_si256((__m256i *)thresholds->bits[i], both_halves(bits));
}

// The largest BF16 number whose quotient by `scale` does not pass `boundary`. The product is within an ulp of the boundary's place, so it is the
// product cut to BF16 or the number before that.
static __m256i threshold(float boundary, bool is_inclusive, __m256 scale, __m256 inverse) {
  __m256 limit = _mm256_set1_ps(boundary);
  __m256i cut = _mm256_and_si256(as_int(_mm256_mul_ps(limit, scale)), _mm256_set1_epi32((int)0xFFFF0000));
  __m256 quotient = _mm256_mul_ps(as_float(cut), inverse);
  quotient = _mm256_fmadd_ps(_mm256_fnmadd_ps(quotient, scale, as_float(cut)), inverse, quotient);
  __m256 passes = is_inclusive ? _mm256_cmp_ps(quotient, limit, _CMP_GE_OQ) : _mm256_cmp_ps(quotient, limit, _CMP_GT_OQ);
  return _mm256_add_epi32(_mm256_srli_epi32(cut, 16), as_int(passes));
}

static void nvfp4_thresholds(__m256 scale, struct fp4_thresholds *thresholds) {
  __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1.0f), scale);
  const __m256i binade = _mm256_set1_epi32(1 << 7);  // doubling a BF16 number
  store_thresholds(thresholds, 0, threshold(0.25f, false, scale, inverse));
  store_thresholds(thresholds, 1, threshold(0.75f, true, scale, inverse));
  __m256i above_1_25 = threshold(1.25f, false, scale, inverse), from_1_75 = threshold(1.75f, true, scale, inverse);
  store_thresholds(thresholds, 2, above_1_25);
  store_thresholds(thresholds, 3, from_1_75);
  store_thresholds(thresholds, 4, _mm256_add_epi32(above_1_25, binade));
  store_thresholds(thresholds, 5, _mm256_add_epi32(from_1_75, binade));
  store_thresholds(thresholds, 6, _mm256_add_epi32(above_1_25, _mm256_add_epi32(binade, binade)));
}

// 16 BF16 weights of block `block` to codes in words, two of a byte combined: eight dwords below 256.
static __m256i fp4_of_bf16(__m256i weights, const struct fp4_thresholds *thresholds, int block, struct fp4_rule rule) {
  __m256i magnitude = _mm256_and_si256(weights, _mm256_set1_epi16(0x7FFF)), codes = _mm256_setzero_si256();
  for (int i = 0; i < 7; i++)
    codes = _mm256_sub_epi16(codes, _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi32((int)thresholds->bits[i][block])));
  const __m256i zero = _mm256_setzero_si256(), eight = _mm256_set1_epi16(8);
  __m256i sign = rule.zero_is_negative
                     ? _mm256_andnot_si256(_mm256_cmpgt_epi16(weights, zero), eight)
                     : _mm256_and_si256(_mm256_and_si256(_mm256_srli_epi16(weights, 12), eight), _mm256_cmpgt_epi16(magnitude, zero));
  return _mm256_madd_epi16(_mm256_or_si256(codes, sign), _mm256_set1_epi32(16 << 16 | 1));
}

// Largest word of each of eight vectors, in order, as eight dwords.
static __m256i horizontal_max_8(const __m256i rows[8]) {
  __m256i pairs[4], fours[2];
  for (int i = 0; i < 4; i++)
    pairs[i] = _mm256_max_epu16(_mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]), _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    fours[i] = _mm256_max_epu16(_mm256_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]), _mm256_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]));
  __m256i eights = _mm256_max_epu16(_mm256_unpacklo_epi64(fours[0], fours[1]), _mm256_unpackhi_epi64(fours[0], fours[1]));
  return _mm256_cvtepu16_epi32(_mm_max_epu16(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1)));
}

// Low byte of each of eight dwords.
static void store_bytes_8(__m256i dwords, uint8_t *dst) {
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(dwords), _mm256_extracti128_si256(dwords, 1));
  _mm_storel_epi64((__m128i *)dst, _mm_packus_epi16(words, words));
}

static __m256i magnitudes_16(const uint8_t *src) {
  return _mm256_and_si256(load(src), _mm256_set1_epi16(0x7FFF));
}

// Block scales of eight NVFP4 blocks: k3_nvfp4_block in eight lanes, for finite amax and a positive normal second scale.
static __m256i nvfp4_scales(enum k3_nvfp4_mode mode, float second, __m256 amax, __m256 *effective) {
  __m256 factor = _mm256_set1_ps(second), value;
  if (mode == K3_NVFP4_COMPRESSED_TENSORS) {
    __m256 wanted = _mm256_mul_ps(factor, _mm256_div_ps(amax, _mm256_set1_ps(6.0f)));
    __m256i codes = e4m3_codes(_mm256_min_ps(wanted, _mm256_set1_ps(448.0f)), &value);
    codes = _mm256_sub_epi32(codes, _mm256_set1_epi32(E4M3_OFFSET));
    __m256i is_zero = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
    value = _mm256_blendv_ps(value, _mm256_set1_ps(0.125f), as_float(is_zero));
    *effective = _mm256_div_ps(value, factor);
    return _mm256_blendv_epi8(codes, _mm256_set1_epi32(0x20), is_zero);
  }
  __m256 wanted = _mm256_div_ps(amax, _mm256_set1_ps(6.0f * second));
  wanted = _mm256_blendv_ps(wanted, _mm256_set1_ps(1.0f), _mm256_cmp_ps(wanted, _mm256_setzero_ps(), _CMP_EQ_OQ));
  wanted = _mm256_min_ps(_mm256_max_ps(wanted, _mm256_set1_ps(0x1p-9f)), _mm256_set1_ps(448.0f));
  __m256i codes = _mm256_sub_epi32(e4m3_codes(wanted, &value), _mm256_set1_epi32(E4M3_OFFSET));
  *effective = _mm256_mul_ps(value, factor);
  return codes;
}

static bool all_within(__m256 values, float low, float high) {
  __m256 fits = _mm256_and_ps(_mm256_cmp_ps(values, _mm256_set1_ps(low), _CMP_GE_OQ), _mm256_cmp_ps(values, _mm256_set1_ps(high), _CMP_LE_OQ));
  return _mm256_movemask_ps(fits) == 0xFF;
}

static bool any_not_finite(__m256i amax_words) {
  return _mm256_movemask_ps(as_float(_mm256_cmpgt_epi32(amax_words, _mm256_set1_epi32(0x7F7F)))) != 0;
}

// ---- weights of F32 and F16: see encode_avx512.c

static __m256 wide_8(enum k3_dtype dtype, const uint8_t *src) {
  return dtype == K3_DTYPE_F32 ? _mm256_loadu_ps((const float *)(const void *)src) : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src));
}

static __m256 magnitude_of(__m256 value) {
  return _mm256_and_ps(value, as_float(_mm256_set1_epi32(0x7FFFFFFF)));
}

static __m256 quotient(__m256 magnitude, __m256 scale, __m256 inverse) {
  __m256 q = _mm256_mul_ps(magnitude, inverse);
  return _mm256_fmadd_ps(_mm256_fnmadd_ps(q, scale, magnitude), inverse, q);
}

static __m256i e2m1_signed(__m256 magnitude, __m256 weights) {
  magnitude = _mm256_min_ps(magnitude, _mm256_set1_ps(6.0f));
  __m256i exponent = _mm256_and_si256(as_int(magnitude), _mm256_set1_epi32(0x7F800000));
  exponent = _mm256_max_epi32(exponent, _mm256_set1_epi32(127 << 23));
  __m256i adder = _mm256_add_epi32(exponent, _mm256_set1_epi32(22 << 23));
  __m256i codes = _mm256_sub_epi32(as_int(_mm256_add_ps(magnitude, as_float(adder))), adder);
  codes = _mm256_sub_epi32(_mm256_add_epi32(codes, _mm256_srli_epi32(exponent, 22)), _mm256_set1_epi32(127 << 1));
  __m256i is_negative = as_int(_mm256_cmp_ps(weights, _mm256_setzero_ps(), _CMP_LT_OQ));
  return _mm256_or_si256(codes, _mm256_and_si256(is_negative, _mm256_set1_epi32(8)));
}

static __m256i e4m3_signed(__m256 magnitude, __m256 weights) {
  __m256i codes = _mm256_sub_epi32(e4m3_codes(_mm256_min_ps(magnitude, _mm256_set1_ps(448.0f)), NULL), _mm256_set1_epi32(E4M3_OFFSET));
  return _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi32(as_int(weights), 24), _mm256_set1_epi32(0x80)));
}

// 32 codes in dwords to 16 bytes.
static void store_pairs_32(const __m256i codes[4], uint8_t *dst) {
  uint8_t bytes[32];
  store_codes_32(codes[0], codes[1], codes[2], codes[3], bytes);
  __m256i pairs = _mm256_maddubs_epi16(load(bytes), _mm256_set1_epi16(16 << 8 | 1));
  _mm_storeu_si128((__m128i *)dst, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}

// Bits of the largest magnitudes of eight blocks of 8 * n_vectors weights, in order; NaN is above everything.
static __m256i wide_amax_8(enum k3_dtype dtype, const uint8_t *blocks, size_t n_vectors) {
  const size_t vector_nbytes = dtype == K3_DTYPE_F32 ? 32 : 16;
  __m256i rows[8], pairs[4], fours[2];
  for (size_t i = 0; i < 8; i++) {
    rows[i] = _mm256_setzero_si256();
    for (size_t k = 0; k < n_vectors; k++)
      rows[i] = _mm256_max_epu32(rows[i], as_int(magnitude_of(wide_8(dtype, blocks + vector_nbytes * (n_vectors * i + k)))));
  }
  for (int i = 0; i < 4; i++)
    pairs[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]), _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    fours[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]), _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  return _mm256_max_epu32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20), _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

static bool all_finite(__m256i amax_bits) {
  return _mm256_movemask_ps(as_float(_mm256_cmpgt_epi32(amax_bits, _mm256_set1_epi32(0x7F7FFFFF)))) == 0;
}

static const float FAST_WIDE_SCALE_MAX = 1.0f;

// Eight blocks; false, and nothing written, if the arguments do not hold for one of them.
static bool nvfp4_of_wide_8(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const uint8_t *blocks, uint8_t *scales, uint8_t *codes) {
  const size_t vector_nbytes = dtype == K3_DTYPE_F32 ? 32 : 16;
  __m256i amax = wide_amax_8(dtype, blocks, 2);
  __m256 effective;
  __m256i scale_codes = nvfp4_scales(mode, second, as_float(amax), &effective);
  if (!all_finite(amax) || !all_within(effective, FAST_SCALE_MIN, FAST_WIDE_SCALE_MAX))
    return false;
  float divisors[8], inverses[8];
  _mm256_storeu_ps(divisors, effective);
  _mm256_storeu_ps(inverses, _mm256_div_ps(_mm256_set1_ps(1.0f), effective));
  store_bytes_8(scale_codes, scales);
  for (size_t i = 0; i < 8; i += 2) {
    __m256i four[4];
    for (size_t k = 0; k < 4; k++) {
      __m256 weights = wide_8(dtype, blocks + vector_nbytes * (2 * i + k));
      four[k] = e2m1_signed(quotient(magnitude_of(weights), _mm256_set1_ps(divisors[i + k / 2]), _mm256_set1_ps(inverses[i + k / 2])), weights);
    }
    store_pairs_32(four, codes + 8 * i);
  }
  return true;
}

void k3_encode_nvfp4_avx2(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales,
                          uint8_t *codes) {
  const uint8_t *from = src;
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && isnormal(second) && second > 0 && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 32 * b;
    __m256i rows[8];
    for (int i = 0; i < 8; i++)
      rows[i] = magnitudes_16(blocks + 32 * i);
    __m256i amax = horizontal_max_8(rows);
    __m256 effective;
    __m256i scale_codes = nvfp4_scales(mode, second, as_float(_mm256_slli_epi32(amax, 16)), &effective);
    if (any_not_finite(amax) || !all_within(effective, FAST_SCALE_MIN, FAST_SCALE_MAX)) {
      encode_nvfp4_plain(mode, second, dtype, blocks, 8, scales + b, codes + 8 * b);
      continue;
    }
    store_bytes_8(scale_codes, scales + b);
    struct fp4_thresholds thresholds;
    nvfp4_thresholds(effective, &thresholds);
    const struct fp4_rule rule = {0};
    for (int i = 0; i < 8; i += 4)
      store_codes_32(fp4_of_bf16(load(blocks + 32 * i), &thresholds, i, rule), fp4_of_bf16(load(blocks + 32 * i + 32), &thresholds, i + 1, rule),
                     fp4_of_bf16(load(blocks + 32 * i + 64), &thresholds, i + 2, rule),
                     fp4_of_bf16(load(blocks + 32 * i + 96), &thresholds, i + 3, rule), codes + 8 * (b + (size_t)i));
  }
  for (; dtype != K3_DTYPE_BF16 && isnormal(second) && second > 0 && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 16 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? nvfp4_of_wide_8(mode, second, K3_DTYPE_F32, blocks, scales + b, codes + 8 * b)
                                : nvfp4_of_wide_8(mode, second, K3_DTYPE_F16, blocks, scales + b, codes + 8 * b)))
      encode_nvfp4_plain(mode, second, dtype, blocks, 8, scales + b, codes + 8 * b);
  }
  encode_nvfp4_plain(mode, second, dtype, from + 16 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 8 * b);
}

// ---- MX

// E8M0 bytes of eight blocks: k3_mx_scale_byte in eight lanes, for finite amax.
static __m256i mx_scales(enum k3_mx_mode mode, struct k3_mx_element element, __m256i amax_bits) {
  uint32_t carry = mode == K3_MX_OCP ? 0 : mode == K3_MX_CEIL || mode == K3_MX_MODELOPT ? 0x007FFFFFu - element.top_mantissa : 0x00200000u;
  __m256i bytes = _mm256_srli_epi32(_mm256_add_epi32(amax_bits, _mm256_set1_epi32((int)carry)), 23);
  bytes = _mm256_sub_epi32(bytes, _mm256_set1_epi32((int)element.top_exponent));
  bytes = _mm256_min_epi32(_mm256_max_epi32(bytes, _mm256_setzero_si256()), _mm256_set1_epi32(254));
  __m256i is_zero = _mm256_cmpeq_epi32(amax_bits, _mm256_setzero_si256());
  return _mm256_blendv_epi8(bytes, _mm256_set1_epi32(k3_mx_scale_byte(mode, element, 0)), is_zero);
}

static __m256i mx_amax_8(const uint8_t *blocks) {
  __m256i rows[8];
  for (int i = 0; i < 8; i++)
    rows[i] = _mm256_max_epu16(magnitudes_16(blocks + 64 * i), magnitudes_16(blocks + 64 * i + 32));
  return horizontal_max_8(rows);
}

// The range of FAST_SCALE_MIN and _MAX in E8M0 bytes: boundaries are normal BF16 numbers.
static bool mx_bytes_are_fast(__m256i bytes, int largest) {
  __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(37), bytes), _mm256_cmpgt_epi32(bytes, _mm256_set1_epi32(largest)));
  return _mm256_testz_si256(outside, outside);
}

// Eight blocks of 32 weights of F32 or F16, MXFP4 or MXFP8. As nvfp4_of_wide_8.
static bool mx_of_wide_8(enum k3_mx_mode mode, bool is_fp4, enum k3_dtype dtype, const uint8_t *blocks, uint8_t *scales, uint8_t *codes) {
  const size_t vector_nbytes = dtype == K3_DTYPE_F32 ? 32 : 16;
  __m256i amax = wide_amax_8(dtype, blocks, 4), bytes = mx_scales(mode, is_fp4 ? K3_MX_E2M1 : K3_MX_E4M3, amax);
  if (!all_finite(amax) || !mx_bytes_are_fast(bytes, is_fp4 ? 127 : 127 + 10))
    return false;
  float inverses[8];
  _mm256_storeu_si256((__m256i *)(void *)inverses, _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(254), bytes), 23));
  store_bytes_8(bytes, scales);
  for (size_t i = 0; i < 8; i++) {
    __m256i four[4];
    for (size_t k = 0; k < 4; k++) {
      __m256 weights = wide_8(dtype, blocks + vector_nbytes * (4 * i + k));
      __m256 magnitude = _mm256_mul_ps(magnitude_of(weights), _mm256_set1_ps(inverses[i]));
      four[k] = is_fp4 ? e2m1_signed(magnitude, weights) : e4m3_signed(magnitude, weights);
    }
    if (is_fp4)
      store_pairs_32(four, codes + 16 * i);
    else
      store_codes_32(four[0], four[1], four[2], four[3], codes + 32 * i);
  }
  return true;
}

void k3_encode_mxfp4_avx2(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  static const float boundaries[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const uint8_t *from = src;
  const struct fp4_rule rule = mx_rule(mode);
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 64 * b;
    __m256i amax = mx_amax_8(blocks), bytes = mx_scales(mode, K3_MX_E2M1, _mm256_slli_epi32(amax, 16));
    if (any_not_finite(amax) || !mx_bytes_are_fast(bytes, 127 + 10)) {
      encode_mxfp4_plain(mode, dtype, blocks, 8, scales + b, codes + 16 * b);
      continue;
    }
    store_bytes_8(bytes, scales + b);
    struct fp4_thresholds thresholds;
    for (int i = 0; i < 7; i++) {  // ties to even include every second boundary
      int bits = (int)(k3_f32_bits(boundaries[i]) >> 16) - (i % 2 == 1 && !rule.ties_toward_zero) - (127 << 7);
      store_thresholds(&thresholds, i, _mm256_add_epi32(_mm256_slli_epi32(bytes, 7), _mm256_set1_epi32(bits)));
    }
    for (int i = 0; i < 8; i += 2)
      store_codes_32(fp4_of_bf16(load(blocks + 64 * i), &thresholds, i, rule), fp4_of_bf16(load(blocks + 64 * i + 32), &thresholds, i, rule),
                     fp4_of_bf16(load(blocks + 64 * i + 64), &thresholds, i + 1, rule),
                     fp4_of_bf16(load(blocks + 64 * i + 96), &thresholds, i + 1, rule), codes + 16 * (b + (size_t)i));
  }
  for (; dtype != K3_DTYPE_BF16 && !rule.ties_toward_zero && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 32 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? mx_of_wide_8(mode, true, K3_DTYPE_F32, blocks, scales + b, codes + 16 * b)
                                : mx_of_wide_8(mode, true, K3_DTYPE_F16, blocks, scales + b, codes + 16 * b)))
      encode_mxfp4_plain(mode, dtype, blocks, 8, scales + b, codes + 16 * b);
  }
  encode_mxfp4_plain(mode, dtype, from + 32 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 16 * b);
}

static void encode_mxfp8_plain(enum k3_mx_mode mode, enum k3_dtype dtype, const uint8_t *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  for (size_t b = 0; b < n_blocks; b++) {
    const uint8_t *block = src + 32 * b * (k3_dtype_bits(dtype) / 8);
    scales[b] = k3_mx_scale_byte(mode, K3_MX_E4M3, SIMD.amax_bits(dtype, block, 32));
    encode_e4m3_plain(dtype, block, 32, k3_f32_from_e8m0(scales[b]), codes + 32 * b);
  }
}

void k3_encode_mxfp8_avx2(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes) {
  const uint8_t *from = src;
  struct e4m3_table table;
  make_e4m3_table(1.0f, &table);  // every power of two has the same one
  size_t b = 0;
  for (; dtype == K3_DTYPE_BF16 && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 64 * b;
    __m256i amax = mx_amax_8(blocks), bytes = mx_scales(mode, K3_MX_E4M3, _mm256_slli_epi32(amax, 16));
    if (any_not_finite(amax) || !mx_bytes_are_fast(bytes, 127 + 10)) {
      encode_mxfp8_plain(mode, dtype, blocks, 8, scales + b, codes + 32 * b);
      continue;
    }
    store_bytes_8(bytes, scales + b);
    for (size_t i = b; i < b + 8; i++) {
      if (e4m3_by_table_32(from + 64 * i, &table, _mm256_set1_epi8((char)e4m3_least(scales[i])), codes + 32 * i))
        continue;
      float scale = k3_f32_from_e8m0(scales[i]);
      e4m3_of_bf16_32(from + 64 * i, scale, _mm256_set1_ps(scale), _mm256_set1_ps(1.0f / scale), codes + 32 * i);
    }
  }
  for (; dtype != K3_DTYPE_BF16 && b + 8 <= n_blocks; b += 8) {
    const uint8_t *blocks = from + 32 * b * (k3_dtype_bits(dtype) / 8);
    if (!(dtype == K3_DTYPE_F32 ? mx_of_wide_8(mode, false, K3_DTYPE_F32, blocks, scales + b, codes + 32 * b)
                                : mx_of_wide_8(mode, false, K3_DTYPE_F16, blocks, scales + b, codes + 32 * b)))
      encode_mxfp8_plain(mode, dtype, blocks, 8, scales + b, codes + 32 * b);
  }
  encode_mxfp8_plain(mode, dtype, from + 32 * b * (k3_dtype_bits(dtype) / 8), n_blocks - b, scales + b, codes + 32 * b);
}
#endif
