#include "base/dtype.h"

#include <assert.h>
#include <string.h>

static const struct {
  const char *name;
  uint8_t bits, floating;
} DTYPES[K3_DTYPE_COUNT] = {
#define K3_DTYPE_ROW(id, name, bits, floating) {name, bits, floating},
    K3_DTYPE_MAP(K3_DTYPE_ROW)
#undef K3_DTYPE_ROW
};

const char *k3_dtype_name(enum k3_dtype dtype) {
  return dtype < K3_DTYPE_COUNT ? DTYPES[dtype].name : "?";
}

unsigned k3_dtype_bits(enum k3_dtype dtype) {
  return dtype < K3_DTYPE_COUNT ? DTYPES[dtype].bits : 0;
}

bool k3_dtype_is_float(enum k3_dtype dtype) {
  return dtype < K3_DTYPE_COUNT && DTYPES[dtype].floating;
}

bool k3_dtype_from_name(const char *name, size_t nbytes, enum k3_dtype *dtype) {
  for (int i = 0; i < K3_DTYPE_COUNT; i++) {
    if (strlen(DTYPES[i].name) == nbytes && memcmp(DTYPES[i].name, name, nbytes) == 0) {
      *dtype = (enum k3_dtype)i;
      return true;
    }
  }
  return false;
}

static float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static uint16_t load_u16(const void *src, size_t i) {
  const unsigned char *p = (const unsigned char *)src + 2 * i;
  return (uint16_t)(p[0] | p[1] << 8);
}

float k3_load_f32(const void *src, size_t i) {
  const unsigned char *p = (const unsigned char *)src + 4 * i;
  return float_from_bits((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

float k3_load_bf16(const void *src, size_t i) {
  return k3_f32_from_bf16(load_u16(src, i));
}

float k3_load_f16(const void *src, size_t i) {
  return k3_f32_from_f16(load_u16(src, i));
}

float k3_load_float(enum k3_dtype dtype, const void *src, size_t i) {
  switch (dtype) {
    case K3_DTYPE_F32: return k3_load_f32(src, i);
    case K3_DTYPE_BF16: return k3_load_bf16(src, i);
    case K3_DTYPE_F16: return k3_load_f16(src, i);
    default: assert(!"k3_load_float: not a plain floating dtype"); return 0.0f;
  }
}

uint16_t k3_bf16_from_f32(float value) {
  uint32_t bits = bits_from_float(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)  // NaN first: the rounding below could carry it into Inf
    return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

float k3_f32_from_bf16(uint16_t bits) {
  return float_from_bits((uint32_t)bits << 16);
}

float k3_f32_from_f16(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
  if (exponent == 31)
    return float_from_bits(sign | 0x7F800000u | mantissa << 13);
  if (exponent == 0) {  // subnormal: mantissa * 2^-24, exact in F32
    float magnitude = (float)mantissa * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t k3_f16_from_f32(float value) {
  uint32_t bits = bits_from_float(value), magnitude = bits & 0x7FFFFFFFu;
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (magnitude > 0x7F800000u)
    return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= 0x477FF000u)  // 65520 and above round to Inf
    return (uint16_t)(sign | 0x7C00);
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24; adding 0.5 = 2^-1 leaves exactly that many bits
    float shifted = float_from_bits(magnitude) + 0.5f;
    return (uint16_t)(sign | (bits_from_float(shifted) - 0x3F000000u));
  }
  return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}
