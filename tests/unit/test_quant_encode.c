// Encoders: worked vectors, corner rules, scales, statistics. Every test runs in every instruction set that this machine has.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/decode.h"
#include "quant/encode.h"
#include "quant/kernels.h"
#include "quant/number.h"
#include "quant/stats.h"
#include "unit.h"

static enum k3_simd level;

#define FOR_EVERY_LEVEL for (level = K3_SIMD_SCALAR; level <= k3_cpu_simd() && k3_quant_set_simd(level) == level; level++)

static const float T1_BLOCK[16] = {0, .5f, -1, 1.5f, 2, -3, 4, 6, .25f, .75f, 1.25f, -1.75f, 2.5f, 3.5f, 5, -.25f};
static const uint8_t T1_CODES[8] = {0x10, 0x3A, 0xD4, 0x76, 0x20, 0xC2, 0x64, 0x86};

static void assert_bytes(const char *what, const uint8_t *ours, const uint8_t *expected, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (ours[i] != expected[i])
      fail_msg("%s, %s: byte %zu is 0x%02X, expected 0x%02X", what, k3_simd_name(level), i, ours[i], expected[i]);
  }
}

// T1, both dialects: three blocks, the second 64 times smaller, the third zero. Encoded and decoded exactly.
static void test_vector_t1(void **state) {
  (void)state;
  float src[48] = {0};
  uint16_t src_bf16[48];
  for (int i = 0; i < 16; i++) {
    src[i] = T1_BLOCK[i];
    src[16 + i] = T1_BLOCK[i] / 64;
  }
  for (int i = 0; i < 48; i++)
    src_bf16[i] = k3_bf16_from_f32(src[i]);
  assert_int_equal(k3_f32_bits(k3_nvfp4_divisor(6)), 0x43E00000);
  assert_int_equal(k3_f32_bits(k3_nvfp4_multiplier(6)), 0x3B124925);
  static const uint8_t scales[2][3] = {{0x7E, 0x4E, 0x20}, {0x7E, 0x4E, 0x38}};
  FOR_EVERY_LEVEL {
    for (int mode = 0; mode < 2; mode++) {
      float second = mode ? k3_nvfp4_multiplier(6) : k3_nvfp4_divisor(6);
      for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        uint8_t our_scales[3], codes[24], zeros[8] = {0};
        k3_quant_encode_nvfp4((enum k3_nvfp4_mode)mode, second, is_bf16 ? K3_DTYPE_BF16 : K3_DTYPE_F32, is_bf16 ? (void *)src_bf16 : (void *)src, 3,
                              our_scales, codes);
        assert_bytes("T1 scales", our_scales, scales[mode], 3);
        assert_bytes("T1 block 0", codes, T1_CODES, 8);
        assert_bytes("T1 block 1", codes + 8, T1_CODES, 8);
        assert_bytes("T1 block 2", codes + 16, zeros, 8);
        struct k3_quant_matrix matrix = {
            .scheme = k3_quant_scheme_default(K3_SCHEME_NVFP4), .n_rows = 1, .n_cols = 48, .weight = codes, .scale = our_scales};
        matrix.scheme.second = mode ? K3_SECOND_MULTIPLY : K3_SECOND_DIVIDE;
        float decoded[48];
        k3_quant_decode_row(&matrix, 0, 0, 48, &second, decoded);
        for (int i = 0; i < 48; i++) {  // block 0 has scale 448 * (6 / 2688) = 1 up to one rounding of ws2
          double code_value = (double)k3_f32_from_e2m1((uint8_t)(codes[i / 2] >> (i % 2 * 4)));
          double expected = code_value * (i < 16 ? 1.0 : i < 32 ? 1.0 / 64 : 0);
          assert_true(fabs((double)decoded[i] - expected) <= fabs(expected) * 1.2e-7);
        }
      }
    }
  }
}

// T2, both dialects, from BF16.
static void test_vector_t2(void **state) {
  (void)state;
  static const uint16_t src[48] = {0x3CCF, 0x3CDF, 0x3B8B, 0xBCBA, 0xBCEC, 0xBC09, 0x3CA1, 0x3CF3, 0x3C4B, 0xBC86, 0xBCF6, 0xBC84,
                                   0x3C4F, 0x3CF3, 0x3CA0, 0xBC0E, 0xBD6C, 0xBD39, 0x3C13, 0x3D60, 0x3D4E, 0xBA0B, 0xBD50, 0xBD5F,
                                   0xBC02, 0x3D3B, 0x3D6B, 0x3C85, 0xBD23, 0xBD73, 0xBCC7, 0x3D08, 0x3DB8, 0x3D43, 0xBD1E, 0xBDB7,
                                   0xBD6D, 0x3CDB, 0x3DB2, 0x3D89, 0xBC6A, 0xBDA9, 0xBD99, 0x3AD1, 0x3D9D, 0x3DA6, 0x3C36, 0xBD8E};
  static const uint8_t scales[3] = {0x71, 0x79, 0x7E};
  static const uint8_t codes[24] = {0x77, 0xE2, 0xBF, 0x76, 0xD5, 0xDF, 0x75, 0xC6, 0xEF, 0x72, 0x87, 0xFF,
                                    0x6A, 0x37, 0xFE, 0x5D, 0x57, 0xFD, 0x4E, 0x67, 0xFA, 0x0E, 0x77, 0xE1};
  FOR_EVERY_LEVEL {
    float amax = k3_quant_amax(K3_DTYPE_BF16, src, 48);
    assert_int_equal(k3_f32_bits(k3_nvfp4_divisor(amax)), 0x46E9BD38);
    assert_int_equal(k3_f32_bits(k3_nvfp4_multiplier(amax)), 0x380C30C3);
    for (int mode = 0; mode < 2; mode++) {
      uint8_t our_scales[3], our_codes[24];
      k3_quant_encode_nvfp4((enum k3_nvfp4_mode)mode, mode ? k3_nvfp4_multiplier(amax) : k3_nvfp4_divisor(amax), K3_DTYPE_BF16, src, 3, our_scales,
                            our_codes);
      assert_bytes("T2 scales", our_scales, scales, 3);
      assert_bytes("T2 codes", our_codes, codes, 24);
    }
  }
}

// T3: the three MXFP4 scale rules.
static void test_vector_t3(void **state) {
  (void)state;
  static const struct {
    double factor;
    uint8_t byte[3];  // compressed-tensors, OCP floor, ceil
    uint8_t codes[3][8];
  } rows[] = {
      {1,
       {127, 127, 127},
       {{0x10, 0x3A, 0xD4, 0x76, 0x20, 0xC2, 0x64, 0x86},
        {0x10, 0x3A, 0xD4, 0x76, 0x20, 0xC2, 0x64, 0x86},
        {0x10, 0x3A, 0xD4, 0x76, 0x20, 0xC2, 0x64, 0x86}}},
      {7.0 / 6,
       {128, 127, 128},
       {{0x10, 0x29, 0xC2, 0x64, 0x10, 0xA1, 0x43, 0x85},
        {0x10, 0x4A, 0xE4, 0x76, 0x21, 0xC3, 0x65, 0x97},
        {0x10, 0x29, 0xC2, 0x64, 0x10, 0xA1, 0x43, 0x85}}},
      {1.25,
       {128, 127, 128},
       {{0x10, 0x29, 0xC2, 0x64, 0x10, 0xA2, 0x43, 0x85},
        {0x10, 0x4A, 0xE4, 0x76, 0x21, 0xC3, 0x65, 0x97},
        {0x10, 0x29, 0xC2, 0x64, 0x10, 0xA2, 0x43, 0x85}}},
      {0.75,
       {127, 127, 127},
       {{0x10, 0x2A, 0xC3, 0x65, 0x10, 0xB2, 0x54, 0x86},
        {0x10, 0x2A, 0xC3, 0x65, 0x10, 0xB2, 0x54, 0x86},
        {0x10, 0x2A, 0xC3, 0x65, 0x10, 0xB2, 0x54, 0x86}}},
  };
  static const enum k3_mx_mode modes[3] = {K3_MX_DEFAULT, K3_MX_OCP, K3_MX_CEIL};
  FOR_EVERY_LEVEL {
    for (unsigned r = 0; r < 4; r++) {
      float src[32];
      for (int i = 0; i < 32; i++)
        src[i] = (float)(T1_BLOCK[i % 16] * rows[r].factor);
      for (int m = 0; m < 3; m++) {
        uint8_t scale, codes[16];
        k3_quant_encode_mxfp4(modes[m], K3_DTYPE_F32, src, 1, &scale, codes);
        assert_bytes("T3 scale", &scale, &rows[r].byte[m], 1);
        assert_bytes("T3 codes, first half", codes, rows[r].codes[m], 8);
        assert_bytes("T3 codes, second half", codes + 8, rows[r].codes[m], 8);
      }
    }
  }
}

// q = -8 .. 7 in order is the words 0x76543210, 0xFEDCBA98.
static void test_int4_vector(void **state) {
  (void)state;
  static const uint8_t words[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
  static const uint16_t scale_bf16 = 0x3F00;
  struct k3_quant_matrix matrix = {
      .scheme = k3_quant_scheme_default(K3_SCHEME_INT_PACKED), .n_rows = 1, .n_cols = 16, .weight = words, .scale = &scale_bf16};
  float decoded[16];
  k3_quant_decode_row(&matrix, 0, 0, 16, NULL, decoded);
  for (int i = 0; i < 16; i++) {
    assert_int_equal(k3_quant_int_code(&matrix, 0, (uint64_t)i), i - 8);
    assert_true(decoded[i] == 0.5f * (float)(i - 8));
  }
  // Reordered columns take the scale that the index names; a zero point shifts, and stands in the second row's bits of its word.
  static const uint16_t scales[4] = {0x3F80, 0x4000, 0x4040, 0x4080};  // rows x groups: 1 2 / 3 4
  static const uint32_t zero_points[2] = {0x00000098, 0x0000007B};     // group 0: rows 8, 9 -> 0, 1; group 1: 11, 7 -> 3, -1
  static const uint32_t index[8] = {1, 0, 1, 0, 1, 0, 1, 0};
  matrix = (struct k3_quant_matrix){
      .scheme = matrix.scheme, .n_rows = 2, .n_cols = 8, .weight = words, .scale = scales, .zero_point = zero_points, .group_index = index};
  matrix.scheme.block_cols = 4;
  static const float expected[2][8] = {{-22, -7, -18, -5, -14, -3, -10, -1}, {4, 0, 12, 6, 20, 12, 28, 18}};
  for (uint64_t row = 0; row < 2; row++) {
    k3_quant_decode_row(&matrix, row, 0, 8, NULL, decoded);
    for (int i = 0; i < 8; i++)
      assert_true(decoded[i] == expected[row][i]);
  }
}

// 3-bit codes: dense across words, and floor(32 / 3) whole ones to a word as older files have them.
static void test_int3_packings(void **state) {
  (void)state;
  uint32_t dense[2] = {0}, whole[2] = {0};
  for (unsigned i = 0; i < 20; i++) {
    uint64_t code = i * 5 % 8;
    unsigned bit = 3 * i;
    dense[bit / 32] |= (uint32_t)(code << bit % 32);
    if (bit % 32 > 29)
      dense[bit / 32 + 1] |= (uint32_t)(code >> (32 - bit % 32));
    whole[i / 10] |= (uint32_t)(code << 3 * (i % 10));
  }
  static const float scale = 1;
  struct k3_quant_matrix matrix = {
      .scheme = k3_quant_scheme_default(K3_SCHEME_INT_PACKED), .n_rows = 1, .n_cols = 20, .weight = dense, .scale = &scale};
  matrix.scheme.n_bits = 3;
  matrix.scheme.block_cols = 0;
  matrix.scheme.scale_dtype = K3_DTYPE_F32;
  assert_int_equal(k3_quant_row_nbytes(&matrix.scheme, 20), 8);
  assert_int_equal(k3_quant_row_nbytes(&matrix.scheme, 22), 12);
  for (unsigned i = 0; i < 20; i++)
    assert_int_equal(k3_quant_int_code(&matrix, 0, i), (int)(i * 5 % 8) - 4);
  matrix.scheme.words_hold_whole = true;
  matrix.weight = whole;
  assert_int_equal(k3_quant_row_nbytes(&matrix.scheme, 20), 8);
  assert_int_equal(k3_quant_row_nbytes(&matrix.scheme, 21), 12);
  for (unsigned i = 0; i < 20; i++)
    assert_int_equal(k3_quant_int_code(&matrix, 0, i), (int)(i * 5 % 8) - 4);
}

// Named corner modes: zero blocks, zero bytes, ties, sign of zero.
static void test_corners(void **state) {
  (void)state;
  FOR_EVERY_LEVEL {
    // One block holds every tie and both zeros; amax 4 makes the MX scale 2^0 in every rule.
    float block[32] = {4, 0.75f, -0.75f, 1.75f, -1.75f, 3.5f, -3.5f, 0.25f, -0.25f, 1.25f, -1.25f, 2.5f, 0.0f, -0.0f, 1e-20f, -1e-20f};
    static const uint8_t ties_even[8] = {0x26, 0x4A, 0x6C, 0x0E, 0x28, 0x4A, 0x00, 0x80};
    static const uint8_t ties_to_zero[8] = {0x16, 0x39, 0x5B, 0x0D, 0x28, 0x4A, 0x88, 0x80};
    uint8_t scale, codes[32], zero_scale, zero_codes[16], expected_zero[16];
    float zeros[32] = {0};
    static const uint8_t zero_bytes[] = {
        [K3_MX_DEFAULT] = 127, [K3_MX_COMPRESSED_TENSORS] = 0, [K3_MX_OCP] = 127, [K3_MX_CEIL] = 127, [K3_MX_MODELOPT] = 0};
    for (enum k3_mx_mode mode = K3_MX_DEFAULT; mode <= K3_MX_MODELOPT; mode++) {
      k3_quant_encode_mxfp4(mode, K3_DTYPE_F32, block, 1, &scale, codes);
      assert_int_equal(scale, 127);
      assert_bytes("MXFP4 corners", codes, mode == K3_MX_MODELOPT ? ties_to_zero : ties_even, 8);
      k3_quant_encode_mxfp4(mode, K3_DTYPE_F32, zeros, 1, &zero_scale, zero_codes);
      assert_int_equal(zero_scale, zero_bytes[mode]);
      memset(expected_zero, mode == K3_MX_MODELOPT ? 0x88 : 0, sizeof expected_zero);
      assert_bytes("MXFP4 zero block", zero_codes, expected_zero, 16);
      k3_quant_encode_mxfp8(mode, K3_DTYPE_F32, zeros, 1, &zero_scale, codes);
      assert_int_equal(zero_scale, zero_bytes[mode]);
      assert_int_equal(codes[0], 0);
    }
    // NVFP4 of both dialects: ties to even, -0 is 0. A block whose scale underflows gets the zero rule's byte.
    block[0] = 6;
    float tiny[16] = {1e-9f};
    for (int mode = 0; mode < 2; mode++) {
      float second = mode ? 1.0f / 448 : 448;
      k3_quant_encode_nvfp4((enum k3_nvfp4_mode)mode, second, K3_DTYPE_F32, block, 1, &scale, codes);
      assert_int_equal(scale, 0x7E);
      assert_int_equal(codes[0], 0x27);
      assert_bytes("NVFP4 corners", codes + 1, ties_even + 1, 7);
      k3_quant_encode_nvfp4((enum k3_nvfp4_mode)mode, second, K3_DTYPE_F32, tiny, 1, &scale, codes);
      assert_int_equal(scale, mode ? 0x01 : 0x20);  // ModelOpt clamps to 2^-9, compressed-tensors replaces
      k3_quant_encode_nvfp4((enum k3_nvfp4_mode)mode, second, K3_DTYPE_F32, zeros, 1, &scale, codes);
      assert_int_equal(scale, mode ? 0x38 : 0x20);
      assert_bytes("NVFP4 zero block", codes, (const uint8_t[8]){0}, 8);
    }
    // FP8 keeps the sign of zero, saturates and keeps NaN.
    float fp8[8] = {-0.0f, 0.0f, 1e30f, -1e30f, NAN, INFINITY, 448, -463};
    k3_quant_encode_e4m3(K3_DTYPE_F32, fp8, 8, 1.0f, codes);
    assert_bytes("E4M3 corners", codes, (const uint8_t[8]){0x80, 0x00, 0x7E, 0xFE, 0x7F, 0x7E, 0x7E, 0xFE}, 8);
  }
}

// Second scales: dead tensors and tensors without a finite amax get 1; powers of two have exact reciprocals and waste less than a binade.
static void test_second_scales(void **state) {
  (void)state;
  static const float odd[] = {0, NAN, INFINITY};
  for (int i = 0; i < 3; i++) {
    assert_true(k3_nvfp4_divisor(odd[i]) == 1);
    assert_true(k3_nvfp4_multiplier(odd[i]) == 1);
    assert_true(k3_nvfp4_pow2_multiplier(odd[i]) == 1);
  }
  for (uint32_t bits = 0x20000000; bits < 0x60000000; bits += 0x00010001) {
    float amax = k3_f32_from_bits(bits), pow2 = k3_nvfp4_pow2_multiplier(amax);
    int exponent;
    assert_true(frexpf(pow2, &exponent) == 0.5f);
    assert_true(2688.0 * pow2 >= amax && 1344.0 * pow2 < amax);
    assert_true(1.0f / (1.0f / pow2) == pow2);
  }
  assert_true(k3_nvfp4_pow2_multiplier(2688) == 1 && k3_nvfp4_pow2_multiplier(2689) == 2 && k3_nvfp4_pow2_multiplier(1344) == 0.5f);
  assert_true(k3_fp8_scale(448, K3_DTYPE_F32) == 1);
  assert_true(k3_fp8_scale(0, K3_DTYPE_F32) == 0x1p-23f && k3_fp8_scale(0, K3_DTYPE_BF16) == 0x1p-7f && k3_fp8_scale(0, K3_DTYPE_F16) == 0x1p-10f);
  assert_true(k3_fp8_scale(3, K3_DTYPE_BF16) == k3_f32_from_bf16(k3_bf16_from_f32(3.0f / 448)));
}

// With a power-of-two second scale both dialects write the same bytes, and moving to another such scale only shifts exponents of block scales.
static void test_pow2_dialects_agree(void **state) {
  (void)state;
  float src[256];
  for (int i = 0; i < 256; i++)
    src[i] = (float)((i * 7919 + 13) % 4093 - 2046) * 0x1p-12f * (float)(1 << i / 16 % 4);
  FOR_EVERY_LEVEL {
    float multiplier = k3_nvfp4_pow2_multiplier(k3_quant_amax(K3_DTYPE_F32, src, 256));
    uint8_t scales[3][16], codes[3][128];
    k3_quant_encode_nvfp4(K3_NVFP4_COMPRESSED_TENSORS, 1 / multiplier, K3_DTYPE_F32, src, 16, scales[0], codes[0]);
    k3_quant_encode_nvfp4(K3_NVFP4_MODELOPT, multiplier, K3_DTYPE_F32, src, 16, scales[1], codes[1]);
    k3_quant_encode_nvfp4(K3_NVFP4_MODELOPT, 4 * multiplier, K3_DTYPE_F32, src, 16, scales[2], codes[2]);
    assert_memory_equal(scales[0], scales[1], 16);
    assert_memory_equal(codes[0], codes[1], 128);
    assert_memory_equal(codes[0], codes[2], 128);
    for (int b = 0; b < 16; b++)
      assert_int_equal(scales[2][b], scales[0][b] - 16);
  }
}

static double gaussian(uint64_t *seed) {  // Box-Muller on a 64-bit linear congruential generator
  double u[2];
  for (int i = 0; i < 2; i++) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    u[i] = ((double)(*seed >> 11) + 0.5) * 0x1p-53;
  }
  return sqrt(-2 * log(u[0])) * cos(6.283185307179586 * u[1]);
}

// Relative RMSE on Gaussian weights: NVFP4 0.095, MXFP4 0.112 / 0.114 / 0.118, FP8 per channel and MXFP8 0.027; pow2 0.095. (MX errors depend
// on where sigma lies between two powers of two: 0.02 here.)
static void test_gaussian_error(void **state) {
  (void)state;
  enum { ROWS = 256, COLS = 2048 };
  float *src = malloc(sizeof(float) * ROWS * COLS), *decoded = malloc(sizeof(float) * ROWS * COLS);
  uint8_t *weight = malloc(ROWS * COLS), *scale = malloc(4 * ROWS * COLS / 16);
  uint64_t seed = 2024;
  for (int i = 0; i < ROWS * COLS; i++)
    src[i] = (float)(0.02 * gaussian(&seed));
  k3_quant_set_simd(K3_SIMD_AVX512);
  float amax = k3_quant_amax(K3_DTYPE_F32, src, ROWS * COLS);
  static const struct {
    enum k3_scheme scheme;
    int mode;
    double expected, tolerance;
  } cases[] = {
      {K3_SCHEME_NVFP4, 0, 0.095, 0.0006},
      {K3_SCHEME_NVFP4, 1, 0.095, 0.0006},
      {K3_SCHEME_MXFP4, K3_MX_DEFAULT, 0.112, 0.0007},
      {K3_SCHEME_MXFP4, K3_MX_OCP, 0.114, 0.0007},
      {K3_SCHEME_MXFP4, K3_MX_CEIL, 0.1184, 0.0007},
      {K3_SCHEME_FP8_CHANNEL, 0, 0.027, 0.0006},
      {K3_SCHEME_MXFP8, K3_MX_DEFAULT, 0.027, 0.0006},
      {K3_SCHEME_FP8_BLOCK, 0, 0.027, 0.0006},
  };
  for (unsigned c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    struct k3_quant_encoder encoder = {.scheme = k3_quant_scheme_default(cases[c].scheme), .src_dtype = K3_DTYPE_F32};
    encoder.mx_mode = cases[c].scheme == K3_SCHEME_NVFP4 ? K3_MX_DEFAULT : (enum k3_mx_mode)cases[c].mode;
    float second = cases[c].mode ? 1 / k3_nvfp4_pow2_multiplier(amax) : k3_nvfp4_divisor(amax);
    encoder.scale = second;
    k3_quant_encode_rows(&encoder, src, ROWS, COLS, weight, scale);
    struct k3_quant_matrix matrix = {.scheme = encoder.scheme, .n_rows = ROWS, .n_cols = COLS, .weight = weight, .scale = scale};
    struct k3_snr snr = {0};
    for (uint64_t row = 0; row < ROWS; row++) {
      k3_quant_decode_row(&matrix, row, 0, COLS, cases[c].scheme == K3_SCHEME_NVFP4 ? &second : NULL, decoded);
      k3_snr_add(&snr, K3_DTYPE_F32, src + row * COLS, decoded, COLS);
    }
    assert_int_equal(snr.n_elems, ROWS * COLS);
    double rmse = k3_snr_relative_rmse(&snr);
    if (fabs(rmse - cases[c].expected) > cases[c].tolerance)
      fail_msg("%s mode %d: relative RMSE %.5f, expected %.3f", k3_scheme_name(cases[c].scheme), cases[c].mode, rmse, cases[c].expected);
    assert_true(fabs(k3_snr_decibel(&snr) + 20 * log10(rmse)) < 1e-9);
  }
  free(src);
  free(decoded);
  free(weight);
  free(scale);
}

// FP8 blocks with ceil edges, written band by band, equal the whole; a scale comes from its own tile alone.
static void test_fp8_block_bands(void **state) {
  (void)state;
  enum { ROWS = 300, COLS = 200 };
  static uint16_t src[ROWS * COLS];
  static uint8_t whole[ROWS * COLS], banded[ROWS * COLS];
  float scales[3 * 2], band_scales[3 * 2];
  for (int i = 0; i < ROWS * COLS; i++)
    src[i] = k3_bf16_from_f32((float)((i * 7919) % 997 - 498) * (1 + (float)(i / COLS / 128)) * (i % COLS < 128 ? 1 : 0.25f));
  FOR_EVERY_LEVEL {
    struct k3_quant_encoder encoder = {.scheme = k3_quant_scheme_default(K3_SCHEME_FP8_BLOCK), .src_dtype = K3_DTYPE_BF16};
    k3_quant_encode_rows(&encoder, src, ROWS, COLS, whole, scales);
    for (int tile = 0; tile < 6; tile++) {
      float amax = 0;
      for (int row = tile / 2 * 128; row < ROWS && row < tile / 2 * 128 + 128; row++) {
        for (int col = tile % 2 * 128; col < COLS && col < tile % 2 * 128 + 128; col++)
          amax = fmaxf(amax, fabsf(k3_f32_from_bf16(src[row * COLS + col])));
      }
      assert_true(scales[tile] == amax / 448);
    }
    for (int band = 0; band < 3; band++)
      k3_quant_encode_rows(&encoder, src + band * 128 * COLS, band == 2 ? 44 : 128, COLS, banded + band * 128 * COLS, band_scales + band * 2);
    assert_memory_equal(whole, banded, sizeof whole);
    assert_memory_equal(scales, band_scales, sizeof scales);
    struct k3_quant_matrix matrix = {.scheme = encoder.scheme, .n_rows = ROWS, .n_cols = COLS, .weight = whole, .scale = scales};
    float row[COLS];
    for (uint64_t r = 0; r < ROWS; r += 37) {
      k3_quant_decode_row(&matrix, r, 3, COLS - 3, NULL, row);
      for (int c = 3; c < COLS; c++)
        assert_true(row[c - 3] == k3_f32_from_e4m3(whole[r * COLS + (uint64_t)c]) * scales[r / 128 * 2 + (uint64_t)c / 128]);
    }
  }
}

// The dynamic-range window of NVFP4: block scales stay normal down to amax / 28672, and a block at amax / 458752 is lost.
static void test_window(void **state) {
  (void)state;
  static const double ratios[] = {1, 28672, 28673, 229376, 229377, 458751, 458752, 1e9};
  static const int classes[] = {0, 0, 1, 1, 2, 2, 3, 3};
  const float amax = 2688;  // divisor 1, so the block scale is amax_b / 6
  FOR_EVERY_LEVEL {
    struct k3_nvfp4_window total = {0};
    for (int i = 0; i < 8; i++) {
      float block[16] = {0};
      block[i] = (float)-(amax / ratios[i]);
      struct k3_nvfp4_window window = {0};
      k3_nvfp4_window_add(&window, amax, K3_DTYPE_F32, block, 1);
      const uint64_t counts[4] = {window.n_full, window.n_subnormal, window.n_lowest, window.n_lost};
      for (int k = 0; k < 4; k++)
        assert_int_equal(counts[k], k == classes[i]);
      k3_nvfp4_window_merge(&total, &window);
      uint8_t scale, codes[8];
      k3_quant_encode_nvfp4(K3_NVFP4_COMPRESSED_TENSORS, k3_nvfp4_divisor(amax), K3_DTYPE_F32, block, 1, &scale, codes);
      static const uint8_t lowest[4] = {0x08, 0x01, 0x01, 0x20}, highest[4] = {0x7E, 0x08, 0x01, 0x20};
      assert_in_range(scale, lowest[classes[i]], highest[classes[i]]);
    }
    float zeros[32] = {0};
    k3_nvfp4_window_add(&total, amax, K3_DTYPE_F32, zeros, 2);
    assert_int_equal(total.n_blocks, 10);
    assert_int_equal(total.n_zero, 2);
    assert_true(total.smallest_amax == (float)(amax / 1e9));
  }
}

static void test_amax(void **state) {
  (void)state;
  FOR_EVERY_LEVEL {
    for (size_t n = 0; n < 150; n++) {
      float wide[150];
      uint16_t bf16[150], f16[150];
      float largest = 0;
      for (size_t i = 0; i < n; i++) {
        wide[i] = (float)((int)(i * 7919 % 1009) - 504) * 0x1p-6f;
        bf16[i] = k3_bf16_from_f32(wide[i]);
        f16[i] = k3_f16_from_f32(wide[i]);
        largest = fmaxf(largest, fabsf(wide[i]));
      }
      assert_true(k3_quant_amax(K3_DTYPE_F32, wide, n) == largest);
      assert_true(k3_quant_amax(K3_DTYPE_BF16, bf16, n) == k3_f32_from_bf16(k3_bf16_from_f32(largest)));
      assert_true(k3_quant_amax(K3_DTYPE_F16, f16, n) == k3_f32_from_f16(k3_f16_from_f32(largest)));
      if (n > 0) {
        wide[n / 2] = -INFINITY;
        bf16[n - 1] = 0xFFC0;
        f16[0] = 0xFE01;
        assert_true(k3_quant_amax(K3_DTYPE_F32, wide, n) == INFINITY);
        assert_true(isnan(k3_quant_amax(K3_DTYPE_BF16, bf16, n)));
        assert_true(isnan(k3_quant_amax(K3_DTYPE_F16, f16, n)));
      }
    }
  }
  assert_true(k3_amax_merge(-3, 2) == 3 && isnan(k3_amax_merge(1, NAN)) && isnan(k3_amax_merge(NAN, INFINITY)));
}

static void test_schemes(void **state) {
  (void)state;
  for (enum k3_scheme scheme = 0; scheme < K3_SCHEME_COUNT; scheme++) {
    enum k3_scheme back = K3_SCHEME_COUNT;
    assert_true(k3_scheme_from_name(k3_scheme_name(scheme), &back));
    assert_int_equal(back, scheme);
  }
  enum k3_scheme untouched = K3_SCHEME_NVFP4;
  assert_false(k3_scheme_from_name("NVFP4", &untouched));
  assert_int_equal(untouched, K3_SCHEME_NVFP4);
  uint64_t rows, cols;
  struct k3_quant_scheme block = k3_quant_scheme_default(K3_SCHEME_FP8_BLOCK);
  k3_quant_scale_shape(&block, 576, 7168, &rows, &cols);
  assert_true(rows == 5 && cols == 56);
  struct k3_quant_scheme nvfp4 = k3_quant_scheme_default(K3_SCHEME_NVFP4);
  k3_quant_scale_shape(&nvfp4, 1536, 7168, &rows, &cols);
  assert_true(rows == 1536 && cols == 448 && k3_quant_row_nbytes(&nvfp4, 7168) == 3584);
  struct k3_error err = {0};
  struct k3_quant_matrix matrix = {.scheme = nvfp4, .n_rows = 1, .n_cols = 24, .weight = "", .scale = ""};
  assert_int_equal(k3_quant_matrix_check(&matrix, "w", &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_TEN07);
  matrix.n_cols = 32;
  matrix.scheme.scale_dtype = K3_DTYPE_F32;
  err = (struct k3_error){0};
  assert_int_equal(k3_quant_matrix_check(&matrix, "w", &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_TEN04);
  matrix.scheme = nvfp4;
  matrix.scale = NULL;
  err = (struct k3_error){0};
  assert_int_equal(k3_quant_matrix_check(&matrix, "w", &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_TEN01);
  static const uint32_t index[32] = {[31] = 2};
  matrix = (struct k3_quant_matrix){
      .scheme = k3_quant_scheme_default(K3_SCHEME_INT_PACKED), .n_rows = 1, .n_cols = 32, .weight = "", .scale = "", .group_index = index};
  matrix.scheme.block_cols = 16;
  err = (struct k3_error){0};
  assert_int_equal(k3_quant_matrix_check(&matrix, "w", &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_TEN10);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_vector_t1),      cmocka_unit_test(test_vector_t2),
      cmocka_unit_test(test_vector_t3),      cmocka_unit_test(test_int4_vector),
      cmocka_unit_test(test_int3_packings),  cmocka_unit_test(test_corners),
      cmocka_unit_test(test_second_scales),  cmocka_unit_test(test_pow2_dialects_agree),
      cmocka_unit_test(test_gaussian_error), cmocka_unit_test(test_fp8_block_bands),
      cmocka_unit_test(test_window),         cmocka_unit_test(test_amax),
      cmocka_unit_test(test_schemes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
