#include "runtime/cpu/cpu.h"

// Values are loaded with memcpy, which compilers turn into plain (vector) loads: an image's small tensors promise no more than element alignment.

static void decode_bf16(const unsigned char *src, uint64_t n, float *dst) {
  for (uint64_t i = 0; i < n; i++) {
    uint16_t half;
    memcpy(&half, src + 2 * i, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&dst[i], &bits, sizeof bits);
  }
}

void k3_cpu_decode_plain(enum k3_dtype dtype, const void *src, uint64_t n, float *dst) {
  if (dtype == K3_DTYPE_F32)
    memcpy(dst, src, n * sizeof *dst);
  else if (dtype == K3_DTYPE_BF16)
    decode_bf16(src, n, dst);
  else
    for (uint64_t i = 0; i < n; i++)
      dst[i] = k3_load_f16(src, i);
}

void k3_cpu_decode(const struct k3_matrix_shard *shard, uint64_t row_in_shard, uint64_t col, uint64_t n, float *dst) {
  const unsigned char *row = (const unsigned char *)shard->data + row_in_shard * shard->row_nbytes;
  k3_cpu_decode_plain(shard->dtype, row + col * k3_dtype_bits(shard->dtype) / 8, n, dst);
}

void k3_cpu_decode_row(const struct k3_matrix *matrix, uint64_t row, float *dst) {
  const struct k3_matrix_shard *shard = k3_matrix_shard_of(matrix, row);
  k3_cpu_decode(shard, row - shard->row, 0, matrix->n_cols, dst);
}

void k3_cpu_round_bf16(float *values, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    // A NaN would carry into the exponent; it becomes the quiet NaN of its sign.
    bits = (bits & 0x7fffffff) > 0x7f800000 ? (bits & 0xffff0000) | 0x00400000 : rounded;
    memcpy(&values[i], &bits, sizeof bits);
  }
}

// FP8 codes: sign, exponent, mantissa. E4M3 has bias 7, no infinity, NaN 0x7f; E5M2 has bias 15 and IEEE specials.
struct fp8 {
  int mantissa_bits, bias;
  unsigned max_code, nan_code;
};
static const struct fp8 E4M3 = {3, 7, 0x7e, 0x7f}, E5M2 = {2, 15, 0x7b, 0x7f};

static float fp8_decode(struct fp8 format, unsigned char code) {
  int exponent = (code & 0x7f) >> format.mantissa_bits, mantissa = code & ((1 << format.mantissa_bits) - 1);
  float magnitude;
  if ((code & 0x7fu) > format.max_code)
    magnitude = (code & 0x7fu) == format.max_code + 1 && format.bias == 15 ? __builtin_inff() : __builtin_nanf("");
  else if (exponent == 0)
    magnitude = __builtin_ldexpf((float)mantissa, 1 - format.bias - format.mantissa_bits);
  else
    magnitude = __builtin_ldexpf((float)(mantissa + (1 << format.mantissa_bits)), exponent - format.bias - format.mantissa_bits);
  return code & 0x80 ? -magnitude : magnitude;
}

// Nearest code, ties to even, beyond the largest finite value that value. Works on the bits: round the float's mantissa to the format's.
static unsigned char fp8_encode(struct fp8 format, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  unsigned sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000)
    return (unsigned char)(sign | format.nan_code);
  int exponent = (int)(bits >> 23) - 127;
  int drop = 23 - format.mantissa_bits;            // mantissa bits that go
  int below = (1 - format.bias) - exponent;        // how far under the smallest normal
  uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
  if (exponent == -127 || below > format.mantissa_bits + 1)
    return (unsigned char)sign;
  if (below > 0)
    drop += below;
  uint32_t kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1), half = 1u << (drop - 1);
  kept += rest > half || (rest == half && (kept & 1));
  // The hidden bit adds one to the exponent field by itself; a subnormal has none and counts from field 0.
  uint32_t code = below > 0 ? kept : kept + ((uint32_t)(exponent + format.bias - 1) << format.mantissa_bits);
  return (unsigned char)(sign | (code > format.max_code ? format.max_code : code));
}

static unsigned char *cache_row(const struct k3_cache *cache, uint64_t layer, uint64_t slot) {
  return (unsigned char *)cache->layers[layer] + slot / cache->block_size * cache->block_nbytes + slot % cache->block_size * cache->row_nbytes;
}

void k3_cpu_cache_read(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, float *dst) {
  const unsigned char *row = cache_row(cache, layer, slot);
  if (cache->dtype == K3_DTYPE_F32 || cache->dtype == K3_DTYPE_BF16) {
    k3_cpu_decode_plain(cache->dtype, row, n, dst);
    return;
  }
  struct fp8 format = cache->dtype == K3_DTYPE_F8_E4M3 ? E4M3 : E5M2;
  float scale = cache->scales ? cache->scales[layer] : 1;
  for (uint64_t i = 0; i < n; i++)
    dst[i] = fp8_decode(format, row[i]) * scale;
}

void k3_cpu_cache_write(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, const float *src) {
  unsigned char *row = cache_row(cache, layer, slot);
  if (cache->dtype == K3_DTYPE_F32) {
    memcpy(row, src, n * sizeof *src);
  } else if (cache->dtype == K3_DTYPE_BF16) {
    for (uint64_t i = 0; i < n; i++) {
      uint16_t bits = k3_bf16_from_f32(src[i]);
      memcpy(row + 2 * i, &bits, sizeof bits);
    }
  } else {
    struct fp8 format = cache->dtype == K3_DTYPE_F8_E4M3 ? E4M3 : E5M2;
    float scale = cache->scales ? cache->scales[layer] : 1;
    for (uint64_t i = 0; i < n; i++)
      row[i] = fp8_encode(format, src[i] / scale);
  }
}
