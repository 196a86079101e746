// Element types and the conversions of F16 and BF16, exhaustively. The oracle is arithmetic in double: sign * mantissa * 2^exponent.
#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "unit.h"

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Value of a 16-bit IEEE-like number with that many mantissa bits.
static double decode16(uint16_t bits, int n_mantissa) {
  int n_exponent = 15 - n_mantissa, bias = (1 << (n_exponent - 1)) - 1;
  int exponent = bits >> n_mantissa & ((1 << n_exponent) - 1), mantissa = bits & ((1 << n_mantissa) - 1);
  double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << n_exponent) - 1)
    return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0)
    return sign * ldexp(mantissa, 1 - bias - n_mantissa);
  return sign * ldexp((1 << n_mantissa) + mantissa, exponent - bias - n_mantissa);
}

typedef float (*decode_fn)(uint16_t);
typedef uint16_t (*encode_fn)(float);

static void check_decode(decode_fn decode, int n_mantissa) {
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    float got = decode((uint16_t)bits);
    double want = decode16((uint16_t)bits, n_mantissa);
    if (isnan(want)) {
      assert_true(isnan(got));
      continue;
    }
    assert_true((double)got == want);
    assert_int_equal(signbit(got) != 0, bits >> 15);
  }
}

// Between each two neighbours a < b of the format: everything below the middle gives a, the middle the even one, everything above b.
static void check_encode(encode_fn encode, int n_mantissa, uint16_t infinity) {
  for (uint32_t magnitude = 0; magnitude < infinity; magnitude++) {
    uint16_t a = (uint16_t)magnitude, b = (uint16_t)(magnitude + 1);
    double low = decode16(a, n_mantissa);
    // Infinity counts as one step above the largest number.
    double high = b == infinity ? low + (low - decode16((uint16_t)(a - 1), n_mantissa)) : decode16(b, n_mantissa);
    double middle = (low + high) / 2;
    assert_int_equal(encode((float)low), a);
    assert_int_equal(encode(-(float)low), a | 0x8000);
    float tie = (float)middle;
    if ((double)tie != middle)
      continue;  // not an F32: then no F32 is exactly between
    assert_int_equal(encode(tie), a & 1 ? b : a);
    assert_int_equal(encode(-tie), (a & 1 ? b : a) | 0x8000);
    assert_int_equal(encode(nextafterf(tie, 0)), a);
    assert_int_equal(encode(nextafterf(tie, INFINITY)), b);
    assert_int_equal(encode(-nextafterf(tie, INFINITY)), b | 0x8000);
  }
  assert_int_equal(encode(INFINITY), infinity);
  assert_int_equal(encode(-INFINITY), infinity | 0x8000);
  assert_int_equal(encode(3.4028235e38f), infinity);
  assert_int_equal(encode(float_of(1)), 0);
  assert_int_equal(encode(float_of(0x80000001)), 0x8000);
  // NaN stays NaN and keeps its sign, whichever mantissa bits carry it.
  for (int bit = 0; bit < 23; bit++) {
    for (uint32_t sign = 0; sign < 2; sign++) {
      uint16_t got = encode(float_of(sign << 31 | 0x7F800000u | 1u << bit));
      assert_true((got & 0x7FFF) > infinity);
      assert_int_equal(got >> 15, sign);
    }
  }
}

static void f16_is_exact(void **state) {
  (void)state;
  check_decode(k3_f32_from_f16, 10);
  check_encode(k3_f16_from_f32, 10, 0x7C00);
  assert_int_equal(k3_f16_from_f32(65504.0f), 0x7BFF);
  assert_int_equal(k3_f16_from_f32(65519.996f), 0x7BFF);
  assert_int_equal(k3_f16_from_f32(65520.0f), 0x7C00);
}

static void bf16_is_exact(void **state) {
  (void)state;
  check_decode(k3_f32_from_bf16, 7);
  check_encode(k3_bf16_from_f32, 7, 0x7F80);
  assert_int_equal(k3_bf16_from_f32(1.0f), 0x3F80);
  assert_int_equal(k3_bf16_from_f32(float_of(0x3F808000)), 0x3F80);
  assert_int_equal(k3_bf16_from_f32(float_of(0x3F818000)), 0x3F82);
}

static void every_f16_and_bf16_survives_the_round_trip(void **state) {
  (void)state;
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    if ((bits & 0x7FFF) <= 0x7C00)
      assert_int_equal(k3_f16_from_f32(k3_f32_from_f16((uint16_t)bits)), bits);
    if ((bits & 0x7FFF) <= 0x7F80)
      assert_int_equal(k3_bf16_from_f32(k3_f32_from_bf16((uint16_t)bits)), bits);
  }
}

// Payloads are little-endian, always, and need no alignment: BF16 80 3F 00 C0 is 1.0 and -2.0, F32 00 00 80 3F is 1.0.
static void loads_are_little_endian_and_unaligned(void **state) {
  (void)state;
  static const unsigned char bytes[] = {0xAA, 0x80, 0x3F, 0x00, 0xC0, 0x00, 0x00, 0x80, 0x3F, 0x00, 0x3C};
  assert_true(k3_load_bf16(bytes + 1, 0) == 1.0f);
  assert_true(k3_load_bf16(bytes + 1, 1) == -2.0f);
  assert_true(k3_load_f32(bytes + 5, 0) == 1.0f);
  assert_true(k3_load_f16(bytes + 9, 0) == 1.0f);
  assert_true(k3_load_float(K3_DTYPE_BF16, bytes + 1, 1) == -2.0f);
  assert_true(k3_load_float(K3_DTYPE_F32, bytes + 5, 0) == 1.0f);
  assert_true(k3_load_float(K3_DTYPE_F16, bytes + 9, 0) == 1.0f);
  assert_int_equal(bits_of(k3_load_f32("\x01\x02\x03\x04", 0)), 0x04030201);
}

static void dtype_names(void **state) {
  (void)state;
  static const struct {
    const char *name;
    unsigned bits;
  } cases[] = {{"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
               {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},
               {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},    {"I64", 64}, {"U64", 64}};
  assert_int_equal(sizeof cases / sizeof cases[0], K3_DTYPE_COUNT);
  for (size_t i = 0; i < K3_DTYPE_COUNT; i++) {
    enum k3_dtype dtype = K3_DTYPE_COUNT;
    assert_true(k3_dtype_from_name(cases[i].name, strlen(cases[i].name), &dtype));
    assert_string_equal(k3_dtype_name(dtype), cases[i].name);
    assert_int_equal(k3_dtype_bits(dtype), cases[i].bits);
  }
  enum k3_dtype dtype = K3_DTYPE_U8;
  assert_false(k3_dtype_from_name("f32", 3, &dtype));
  assert_false(k3_dtype_from_name("F9", 2, &dtype));
  assert_false(k3_dtype_from_name("F32", 2, &dtype));
  assert_false(k3_dtype_from_name("", 0, &dtype));
  assert_int_equal(dtype, K3_DTYPE_U8);
  assert_true(k3_dtype_is_float(K3_DTYPE_BF16));
  assert_false(k3_dtype_is_float(K3_DTYPE_I8));
  assert_string_equal(k3_dtype_name(K3_DTYPE_COUNT), "?");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(f16_is_exact),
      cmocka_unit_test(bf16_is_exact),
      cmocka_unit_test(every_f16_and_bf16_survives_the_round_trip),
      cmocka_unit_test(loads_are_little_endian_and_unaligned),
      cmocka_unit_test(dtype_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
