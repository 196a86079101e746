// Single values: the 4- and 8-bit floating types. All exact one way and round-to-nearest-even the other; the saturating conversions agree with the
// host functions of CUDA's cuda_fp8.h and cuda_fp4.h on every input.
//
//   type   sign exponent mantissa  bias  largest  Inf  NaN                  smallest step
//   E2M1   1    2        1         1     6        no   none                 0.5
//   E4M3   1    4        3         7     448      no   0x7F, 0xFF           2^-9
//   E5M2   1    5        2         15    57344    yes  0x7D-0x7F and minus  2^-16
//   E8M0   0    8        0         127   2^127    no   0xFF                 no zero: code 0 is 2^-127
#ifndef K3_QUANT_NUMBER_H
#define K3_QUANT_NUMBER_H

#include <stdint.h>
#include <string.h>

static inline uint32_t k3_f32_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float k3_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Tables of exact values: one entry per code. NaN entries are quiet, with the code's sign.
extern const float K3_E2M1_VALUES[16];
extern const float K3_E4M3_VALUES[256];

static inline float k3_f32_from_e2m1(uint8_t code) {
  return K3_E2M1_VALUES[code & 15];
}

static inline float k3_f32_from_e4m3(uint8_t code) {
  return K3_E4M3_VALUES[code];
}

float k3_f32_from_e5m2(uint8_t code);

// 2^(code-127); 0xFF is NaN. Code 0 is 2^-127, a subnormal of F32: shifting the code into the exponent field would give 0.
static inline float k3_f32_from_e8m0(uint8_t code) {
  if (code == 0xFF)
    return k3_f32_from_bits(0x7FC00000u);
  return k3_f32_from_bits(code ? (uint32_t)code << 23 : 0x00400000u);
}

// Saturating: above 448 and Inf give +-448 (57344 for E5M2), NaN gives 0x7F whatever its sign; -0 stays -0.
uint8_t k3_e4m3_from_f32(float value);
uint8_t k3_e5m2_from_f32(float value);
// Saturating to +-6; NaN gives +6 (code 7); the sign survives rounding to zero (code 8).
uint8_t k3_e2m1_from_f32(float value);
// The power of two at or below (floor) and at or above (ceil) |value|. 0 gives code 0, NaN 0xFF, Inf and what lies beyond 2^127 code 254.
uint8_t k3_e8m0_floor_from_f32(float value);
uint8_t k3_e8m0_ceil_from_f32(float value);

// |value| rounded to a grid with n_mantissa bits whose subnormals begin below 2^min_exponent, as a code without sign: nearest, ties to even. Not
// saturating; |value| must be finite and below the largest power of two that the code can hold. The addition of a power of two 23 - n_mantissa
// binades up leaves exactly the bits wanted, correctly rounded by the adder.
static inline uint32_t k3_round_minifloat(float magnitude, unsigned n_mantissa, int min_exponent) {
  uint32_t floor_bits = (uint32_t)(min_exponent + 127) << 23, exponent_bits = k3_f32_bits(magnitude) & 0x7F800000u;
  if (exponent_bits < floor_bits)
    exponent_bits = floor_bits;
  uint32_t adder_bits = exponent_bits + ((23u - n_mantissa) << 23);
  uint32_t n_steps = k3_f32_bits(magnitude + k3_f32_from_bits(adder_bits)) - adder_bits;
  return ((exponent_bits - floor_bits) >> (23u - n_mantissa)) + n_steps;
}

#endif
