#include "loader/element.h"

#include <assert.h>
#include <string.h>

#include "quant/number.h"

bool k3_element_is_number(enum k3_dtype dtype) {
  switch (dtype) {
    case K3_DTYPE_C64:
    case K3_DTYPE_F6_E2M3:
    case K3_DTYPE_F6_E3M2:
    case K3_DTYPE_F8_E4M3FNUZ:
    case K3_DTYPE_F8_E5M2FNUZ:
    case K3_DTYPE_COUNT: return false;
    default: return true;
  }
}

uint64_t k3_element_bits(enum k3_dtype dtype, const void *src, uint64_t i) {
  const unsigned char *bytes = src;
  if (dtype == K3_DTYPE_F4)
    return i % 2 == 0 ? bytes[i / 2] & 15u : bytes[i / 2] >> 4;
  unsigned n = k3_dtype_bits(dtype) / 8;
  uint64_t bits = 0;
  for (unsigned k = 0; k < n; k++)
    bits |= (uint64_t)bytes[i * n + k] << 8 * k;
  return bits;
}

static double number(enum k3_dtype dtype, uint64_t bits) {
  switch (dtype) {
    case K3_DTYPE_F4: return (double)k3_f32_from_e2m1((uint8_t)bits);
    case K3_DTYPE_F8_E4M3: return (double)k3_f32_from_e4m3((uint8_t)bits);
    case K3_DTYPE_F8_E5M2: return (double)k3_f32_from_e5m2((uint8_t)bits);
    case K3_DTYPE_F8_E8M0: return (double)k3_f32_from_e8m0((uint8_t)bits);
    case K3_DTYPE_F16: return (double)k3_f32_from_f16((uint16_t)bits);
    case K3_DTYPE_BF16: return (double)k3_f32_from_bf16((uint16_t)bits);
    case K3_DTYPE_F32: return (double)k3_f32_from_bits((uint32_t)bits);
    case K3_DTYPE_I8: return (int8_t)bits;
    case K3_DTYPE_I16: return (int16_t)bits;
    case K3_DTYPE_I32: return (int32_t)bits;
    case K3_DTYPE_I64: return (double)(int64_t)bits;
    case K3_DTYPE_F64: {
      double value;
      memcpy(&value, &bits, sizeof value);
      return value;
    }
    default: return (double)bits;  // BOOL and the unsigned types
  }
}

void k3_elements_widen(enum k3_dtype dtype, const void *src, size_t n, double *dst) {
  assert(k3_element_is_number(dtype));
  if (dtype == K3_DTYPE_BF16) {  // nearly every weight: without the detour
    for (size_t i = 0; i < n; i++)
      dst[i] = (double)k3_load_bf16(src, i);
    return;
  }
  for (size_t i = 0; i < n; i++)
    dst[i] = number(dtype, k3_element_bits(dtype, src, i));
}
