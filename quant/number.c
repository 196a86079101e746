#include "quant/number.h"

#include <math.h>

const float K3_E2M1_VALUES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// The eight mantissas of a binade whose first value is `x`, and of the subnormals in steps of `step`.
#define BINADE(x)              x, 1.125f * (x), 1.25f * (x), 1.375f * (x), 1.5f * (x), 1.625f * (x), 1.75f * (x), 1.875f * (x)
#define SUBNORMALS(zero, step) zero, step, 2 * (step), 3 * (step), 4 * (step), 5 * (step), 6 * (step), 7 * (step)
#define LAST_BINADE(x, nan)    x, 1.125f * (x), 1.25f * (x), 1.375f * (x), 1.5f * (x), 1.625f * (x), 1.75f * (x), nan
#define LOW_HALF(sign)                                                                                                                               \
  SUBNORMALS(sign 0.0f, sign 0x1p-9f), BINADE(sign 0x1p-6f), BINADE(sign 0x1p-5f), BINADE(sign 0x1p-4f), BINADE(sign 0x1p-3f), BINADE(sign 0x1p-2f), \
      BINADE(sign 0x1p-1f), BINADE(sign 0x1p0f)
#define HIGH_HALF(sign)                                                                                                                              \
  BINADE(sign 0x1p1f), BINADE(sign 0x1p2f), BINADE(sign 0x1p3f), BINADE(sign 0x1p4f), BINADE(sign 0x1p5f), BINADE(sign 0x1p6f), BINADE(sign 0x1p7f), \
      LAST_BINADE(sign 0x1p8f, sign NAN)

const float K3_E4M3_VALUES[256] = {LOW_HALF(+), HIGH_HALF(+), LOW_HALF(-), HIGH_HALF(-)};

float k3_f32_from_e5m2(uint8_t code) {
  uint32_t sign = (uint32_t)(code & 0x80) << 24, exponent = code >> 2 & 31, mantissa = code & 3;
  if (exponent == 31)
    return k3_f32_from_bits(sign | 0x7F800000u | (mantissa ? 0x00400000u | mantissa << 21 : 0));
  if (exponent == 0) {
    float magnitude = (float)mantissa * 0x1p-16f;
    return sign ? -magnitude : magnitude;
  }
  return k3_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 21);
}

uint8_t k3_e4m3_from_f32(float value) {
  if (isnan(value))
    return 0x7F;
  uint8_t sign = signbit(value) ? 0x80 : 0;
  float magnitude = fabsf(value);
  return (uint8_t)(sign | (magnitude >= 448.0f ? 0x7E : k3_round_minifloat(magnitude, 3, -6)));
}

uint8_t k3_e5m2_from_f32(float value) {
  if (isnan(value))
    return 0x7F;
  uint8_t sign = signbit(value) ? 0x80 : 0;
  float magnitude = fabsf(value);
  return (uint8_t)(sign | (magnitude >= 57344.0f ? 0x7B : k3_round_minifloat(magnitude, 2, -14)));
}

uint8_t k3_e2m1_from_f32(float value) {
  if (isnan(value))
    return 7;
  uint8_t sign = signbit(value) ? 8 : 0;
  float magnitude = fabsf(value);
  return (uint8_t)(sign | (magnitude >= 6.0f ? 7 : k3_round_minifloat(magnitude, 1, 0)));
}

uint8_t k3_e8m0_floor_from_f32(float value) {
  uint32_t bits = k3_f32_bits(value) & 0x7FFFFFFFu;
  if (bits >= 0x7F800000u)
    return bits > 0x7F800000u ? 0xFF : 254;
  return (uint8_t)(bits >> 23);  // below 2^-126 that is 0, which is right down to 2^-127 and saturates below
}

uint8_t k3_e8m0_ceil_from_f32(float value) {
  uint32_t bits = k3_f32_bits(value) & 0x7FFFFFFFu;
  if (bits >= 0x7F800000u)
    return bits > 0x7F800000u ? 0xFF : 254;
  if (bits <= 0x00400000u)
    return 0;
  uint32_t code = (bits + 0x007FFFFFu) >> 23;
  return (uint8_t)(code > 254 ? 254 : code);
}
