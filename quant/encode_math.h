// The arithmetic of one block or value, shared by the scalar reference and by what the SIMD files leave to scalar code. Internal to quant/.
#ifndef K3_QUANT_ENCODE_MATH_H
#define K3_QUANT_ENCODE_MATH_H

#include <math.h>
#include <stdbool.h>

#include "quant/encode.h"
#include "quant/number.h"

// An element type as the MX scale rules see it.
struct k3_mx_element {
  uint32_t top_exponent;  // of its largest value
  uint32_t top_mantissa;  // of its largest value, as F32 mantissa bits
};

static const struct k3_mx_element K3_MX_E2M1 = {2, 0x00400000u}, K3_MX_E4M3 = {8, 0x00600000u};

// E8M0 byte of a block from the F32 bits of its amax. NaN gives 0xFF; every other result is clamped to 0 .. 254. The rules only differ in what is
// added before the exponent field is cut off: the carry from mantissa to exponent is the rounding.
static inline uint8_t k3_mx_scale_byte(enum k3_mx_mode mode, struct k3_mx_element element, uint32_t amax_bits) {
  if (amax_bits > 0x7F800000u)
    return 0xFF;
  if (amax_bits == 0)
    return mode == K3_MX_COMPRESSED_TENSORS || mode == K3_MX_MODELOPT ? 0 : 127;
  uint32_t carry;
  switch (mode) {
    case K3_MX_OCP: carry = 0; break;
    case K3_MX_CEIL:
    case K3_MX_MODELOPT: carry = 0x007FFFFFu - element.top_mantissa; break;
    default: carry = 0x00200000u; break;  // 2^21: a mantissa of 1.75 and more overflows
  }
  int byte = (int)((amax_bits + carry) >> 23) - (int)element.top_exponent;
  return (uint8_t)(byte < 0 ? 0 : byte > 254 ? 254 : byte);
}

// Scale byte of an NVFP4 block and the value each weight of the block is divided by.
static inline uint8_t k3_nvfp4_block(enum k3_nvfp4_mode mode, float second, float amax, float *effective) {
  uint8_t byte;
  if (mode == K3_NVFP4_COMPRESSED_TENSORS) {
    byte = k3_e4m3_from_f32(second * (amax / 6.0f));
    if ((byte & 0x7F) == 0)
      byte = 0x20;
    *effective = k3_f32_from_e4m3(byte) / second;
  } else {
    float wanted = amax / (6.0f * second);
    if (wanted == 0.0f)
      wanted = 1.0f;
    byte = k3_e4m3_from_f32(wanted < 0x1p-9f ? 0x1p-9f : wanted);
    *effective = k3_f32_from_e4m3(byte) * second;
  }
  return byte;
}

// E2M1 code of a quotient. Ties to even, or toward zero; exact zeros of either sign give 0, or 8.
static inline uint8_t k3_fp4_code(float quotient, bool ties_toward_zero, bool zero_is_negative) {
  if (isnan(quotient))
    return 7;
  float magnitude = fabsf(quotient);
  uint8_t code = k3_e2m1_from_f32(magnitude);
  if (ties_toward_zero && (magnitude == 0.75f || magnitude == 1.75f || magnitude == 3.5f))
    code--;
  if (quotient < 0.0f || (quotient == 0.0f && zero_is_negative))
    code |= 8;
  return code;
}

#endif
