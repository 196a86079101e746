// The 4- and 8-bit number types, exhaustively.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/hash.h"
#include "quant/number.h"
#include "unit.h"

// A type as its definition has it, in double arithmetic and by search: nothing of the code under test is used.
struct type {
  const char *name;
  int n_mantissa, bias, n_codes;  // codes without sign
  int largest;                    // code of the largest finite value
  int nan, inf;                   // first NaN code and the Inf code; -1: none
};
static const struct type E2M1 = {"e2m1", 1, 1, 8, 7, -1, -1}, E4M3 = {"e4m3", 3, 7, 128, 0x7E, 0x7F, -1},
                         E5M2 = {"e5m2", 2, 15, 128, 0x7B, 0x7D, 0x7C};

static double type_value(const struct type *type, int code) {
  int exponent = code >> type->n_mantissa, mantissa = code & ((1 << type->n_mantissa) - 1);
  double fraction = mantissa / (double)(1 << type->n_mantissa);
  return exponent == 0 ? ldexp(fraction, 1 - type->bias) : ldexp(1 + fraction, exponent - type->bias);
}

// Nearest code to a magnitude; of two equally near ones the even one; saturating.
static int nearest_code(const struct type *type, double magnitude) {
  if (magnitude >= type_value(type, type->largest))
    return type->largest;
  int low = 0, high = type->largest;  // value(low) <= magnitude < value(high)
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (type_value(type, middle) <= magnitude)
      low = middle;
    else
      high = middle;
  }
  double below = magnitude - type_value(type, low), above = type_value(type, high) - magnitude;
  return below < above || (below == above && low % 2 == 0) ? low : high;
}

static void check_value(const struct type *type, const char *what, float ours, int code, int sign_bit) {
  int magnitude = code & (sign_bit - 1);
  if (type->nan >= 0 && magnitude >= type->nan) {
    assert_true(isnan(ours));
    assert_int_equal(signbit(ours) != 0, (code & sign_bit) != 0);
    return;
  }
  double expected = magnitude == type->inf ? INFINITY : type_value(type, magnitude);
  if (fabs((double)ours) != expected || (signbit(ours) != 0) != ((code & sign_bit) != 0))
    fail_msg("%s code 0x%02X decodes to %g", what, code, (double)ours);
}

// B70: all 256 codes of each 8-bit type decode right, and all 16 of E2M1.
static void test_all_codes(void **state) {
  (void)state;
  for (int code = 0; code < 256; code++) {
    check_value(&E4M3, "e4m3", k3_f32_from_e4m3((uint8_t)code), code, 128);
    check_value(&E5M2, "e5m2", k3_f32_from_e5m2((uint8_t)code), code, 128);
    if (code < 16)
      check_value(&E2M1, "e2m1", k3_f32_from_e2m1((uint8_t)code), code, 8);
    float e8m0 = k3_f32_from_e8m0((uint8_t)code);
    assert_true(code == 255 ? isnan(e8m0) : (double)e8m0 == ldexp(1, code - 127));
  }
  assert_int_equal(k3_f32_bits(k3_f32_from_e8m0(0)), 0x00400000);  // not 0: shifting the code into the exponent field is wrong at both ends
}

static void check_rounding(float value) {
  int e4m3 = k3_e4m3_from_f32(value), e5m2 = k3_e5m2_from_f32(value), e2m1 = k3_e2m1_from_f32(value);
  if (isnan(value)) {
    assert_int_equal(e4m3, 0x7F);
    assert_int_equal(e5m2, 0x7F);
    assert_int_equal(e2m1, 7);
    return;
  }
  double magnitude = fabs((double)value);
  int sign = signbit(value) ? 1 : 0;
  if (e4m3 != (sign << 7 | nearest_code(&E4M3, magnitude)) || e5m2 != (sign << 7 | nearest_code(&E5M2, magnitude)) ||
      e2m1 != (sign << 3 | nearest_code(&E2M1, magnitude)))
    fail_msg("%a rounds to e4m3 0x%02X, e5m2 0x%02X, e2m1 0x%X", (double)value, e4m3, e5m2, e2m1);
}

// All BF16 and F16 inputs, the neighbours of every BF16 value and midpoint, and a dense set of F32: nearest, ties to even, saturating, NaN, -0.
static void test_rounding_is_nearest(void **state) {
  (void)state;
  for (uint32_t input = 0; input < 65536; input++) {
    check_rounding(k3_f32_from_f16((uint16_t)input));
    for (uint32_t offset = 0; offset < 6; offset++)  // value and midpoint, each -1, 0, +1
      check_rounding(k3_f32_from_bits((input << 16) + (offset < 3 ? 0 : 0x8000u) + offset % 3 - 1));
  }
  for (uint64_t bits = 0; bits < UINT64_C(1) << 32; bits += 16381)
    check_rounding(k3_f32_from_bits((uint32_t)bits));
}

static void check_e8m0(float value) {
  int floor_code = k3_e8m0_floor_from_f32(value), ceil_code = k3_e8m0_ceil_from_f32(value);
  double magnitude = fabs((double)value);
  if (isnan(value)) {
    assert_int_equal(floor_code, 255);
    assert_int_equal(ceil_code, 255);
    return;
  }
  int below = 0, above = 0;
  while (below < 254 && ldexp(1, below + 1 - 127) <= magnitude)
    below++;
  while (above < 254 && ldexp(1, above - 127) < magnitude)
    above++;
  assert_int_equal(floor_code, below);
  assert_int_equal(ceil_code, above);
}

static void test_e8m0(void **state) {
  (void)state;
  for (uint32_t input = 0; input < 65536; input++) {
    check_e8m0(k3_f32_from_bits(input << 16));
    check_e8m0(k3_f32_from_bits((input << 16) + 1));
    check_e8m0(k3_f32_from_bits((input << 16) - 1));
  }
}

// Every code is its own rounding, so decoding and encoding are inverse.
static void test_round_trip(void **state) {
  (void)state;
  for (int code = 0; code < 256; code++) {
    if ((code & 0x7F) != 0x7F)
      assert_int_equal(k3_e4m3_from_f32(k3_f32_from_e4m3((uint8_t)code)), code);
    if ((code & 0x7F) < 0x7C)
      assert_int_equal(k3_e5m2_from_f32(k3_f32_from_e5m2((uint8_t)code)), code);
    assert_int_equal(k3_e8m0_floor_from_f32(k3_f32_from_e8m0((uint8_t)code)), code);
    assert_int_equal(k3_e8m0_ceil_from_f32(k3_f32_from_e8m0((uint8_t)code)), code);
    assert_int_equal(k3_e2m1_from_f32(k3_f32_from_e2m1((uint8_t)(code & 15))), code & 15);
  }
}

// Every E4M3 value, every E2M1 value and every product of the two is exact in BF16 and F16, in both directions.
static void test_exact_in_bf16_and_f16(void **state) {
  (void)state;
  for (int code = 0; code < 256; code++) {
    float scale = k3_f32_from_e4m3((uint8_t)code);
    if (isnan(scale))
      continue;
    for (uint8_t nibble = 0; nibble < 16; nibble++) {
      float product = k3_f32_from_e2m1(nibble) * scale;
      assert_true(k3_f32_from_bf16(k3_bf16_from_f32(product)) == product);
      assert_true(k3_f32_from_f16(k3_f16_from_f32(product)) == product);
    }
    assert_int_equal(k3_e4m3_from_f32(k3_f32_from_bf16(k3_bf16_from_f32(scale))), code);
  }
}

// All 65,536 BF16 inputs (and all F16 inputs) round as CUDA's host conversion functions do: SHA-256 (first 8 bytes) of the 65,536 codes that those
// functions gave, printed by tests/kernels/quant_cuda_host.c with CUDA 13.0.
static void test_cuda_digests(void **state) {
  (void)state;
  static const struct {
    const char *name, *bf16, *f16;
    uint8_t (*convert)(float);
  } digests[] = {
      {"e4m3", "2f8096b3b00699a8", "0212e2599adcd330", k3_e4m3_from_f32},
      {"e5m2", "69d1394f72425f9b", "8bcb4600760a2748", k3_e5m2_from_f32},
      {"e2m1", "8692da74cf3cf29c", "686fd2c53e50c7e0", k3_e2m1_from_f32},
      {"e8m0 down", "31275856a8aaec04", "dfb96ff70f94ec30", k3_e8m0_floor_from_f32},
      {"e8m0 up", "071ed5f46e6976a0", "e1e9812763d49778", k3_e8m0_ceil_from_f32},
  };
  static uint8_t codes[65536];
  for (unsigned k = 0; k < sizeof digests / sizeof digests[0]; k++) {
    for (int source = 0; source < 2; source++) {
      for (uint32_t input = 0; input < 65536; input++)
        codes[input] = digests[k].convert(source ? k3_f32_from_f16((uint16_t)input) : k3_f32_from_bf16((uint16_t)input));
      uint8_t digest[K3_SHA256_NBYTES];
      char text[17];
      assert_int_equal(k3_sha256(codes, sizeof codes, digest, NULL), K3_OK);
      for (int i = 0; i < 8; i++)
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
      assert_string_equal(text, source ? digests[k].f16 : digests[k].bf16);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all_codes),  cmocka_unit_test(test_rounding_is_nearest),   cmocka_unit_test(test_e8m0),
      cmocka_unit_test(test_round_trip), cmocka_unit_test(test_exact_in_bf16_and_f16), cmocka_unit_test(test_cuda_digests),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
