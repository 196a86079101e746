// Every SIMD table gives the bits of the scalar one: all element types, lengths and alignments, random bits, and values chosen to sit on or beside
// the boundaries where the fast arguments could fail.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/decode.h"
#include "quant/dot.h"
#include "quant/encode_math.h"
#include "quant/kernels.h"
#include "unit.h"

static const struct k3_quant_kernels *const TABLES[] = {
    NULL,
#if defined(__x86_64__)
    &K3_QUANT_KERNELS_AVX2,
    &K3_QUANT_KERNELS_AVX512,
#endif
};
static const struct k3_quant_kernels *const SCALAR = &K3_QUANT_KERNELS_SCALAR;

#define FOR_EVERY_TABLE                                                    \
  for (enum k3_simd level = K3_SIMD_AVX2; level <= k3_cpu_simd(); level++) \
    for (const struct k3_quant_kernels *table = TABLES[level]; table != NULL; table = NULL)

static uint64_t random_u64(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 2685821657736338717u;
}

static const enum k3_dtype DTYPES[3] = {K3_DTYPE_BF16, K3_DTYPE_F16, K3_DTYPE_F32};

enum fill { FILL_BITS, FILL_FINITE, FILL_WEIGHTS, FILL_SPARSE, N_FILLS };

// Random bits of any kind; random finite numbers of a few binades; weights; weights with zeros, NaN, Inf and subnormals among them.
static void fill(void *dst, enum k3_dtype dtype, size_t n, enum fill kind) {
  for (size_t i = 0; i < n; i++) {
    uint64_t bits = random_u64();
    float value = (float)((int)(bits & 0xFFFF) + (int)(bits >> 16 & 0xFFFF) - 65535) * 0x1p-20f;
    if (kind == FILL_FINITE)
      value = ldexpf(value, (int)(bits >> 40) % 30 - 15);
    uint32_t special = (uint32_t)(bits >> 32);
    if (kind == FILL_SPARSE && special % 16 == 0) {
      static const uint32_t specials[8] = {0, 0x80000000u, 0x7FC01234u, 0xFF800001u, 0x7F800000u, 0xFF800000u, 0x00010000u, 0x80000001u};
      value = k3_f32_from_bits(specials[special / 16 % 8]);
    }
    if (kind == FILL_BITS)
      memcpy((char *)dst + i * (k3_dtype_bits(dtype) / 8), &bits, k3_dtype_bits(dtype) / 8);
    else if (dtype == K3_DTYPE_F32)
      memcpy((char *)dst + 4 * i, &value, 4);
    else
      k3_quant_store_float(dtype, dst, i, value);
  }
}

static void assert_same(const char *what, enum k3_simd level, const void *ours, const void *scalar, size_t nbytes) {
  if (memcmp(ours, scalar, nbytes) == 0)
    return;
  const uint8_t *a = ours, *b = scalar;
  for (size_t i = 0; i < nbytes; i++) {
    if (a[i] != b[i])
      fail_msg("%s, %s: byte %zu of %zu is %02X, scalar %02X", what, k3_simd_name(level), i, nbytes, a[i], b[i]);
  }
}

static void encode_run(const struct k3_quant_kernels *table, enum k3_dtype dtype, const void *src, size_t n, float scale, uint8_t *dst) {
  table->encode_e4m3(dtype, src, 1, 0, n, n, &scale, dst);
}

enum { MAX = 700 };
static uint8_t src_buffer[4 * MAX + 64], out[2][4 * MAX + 64], scale_out[2][MAX];

static void reset_outputs(void) {
  memset(out, 0xA5, sizeof out);
  memset(scale_out, 0xA5, sizeof scale_out);
}

// Lengths around every unrolling, and unaligned by up to 7 bytes. Whole buffers are compared, so a byte written beyond the end shows.
static void test_lengths_and_alignments(void **state) {
  (void)state;
  for (size_t n = 0; n < 300; n += n < 140 ? 1 : 13) {
    uint8_t *src = src_buffer + n % 8;
    FOR_EVERY_TABLE {
      for (int d = 0; d < 3; d++) {
        fill(src, DTYPES[d], n, n % N_FILLS);
        reset_outputs();
        table->widen(DTYPES[d], src, n, (float *)(void *)out[0]);
        SCALAR->widen(DTYPES[d], src, n, (float *)(void *)out[1]);
        assert_same("widen", level, out[0], out[1], sizeof out[0]);
        assert_int_equal(table->amax_bits(DTYPES[d], src, n), SCALAR->amax_bits(DTYPES[d], src, n));
        reset_outputs();
        encode_run(table, DTYPES[d], src, n, 0.00037f, out[0] + n % 5);
        encode_run(SCALAR, DTYPES[d], src, n, 0.00037f, out[1] + n % 5);
        assert_same("encode_e4m3", level, out[0], out[1], sizeof out[0]);
        size_t n_blocks = n % 40;
        fill(src, DTYPES[d], 16 * n_blocks, n % N_FILLS);
        for (int mode = 0; mode < 2; mode++) {
          reset_outputs();
          table->encode_nvfp4((enum k3_nvfp4_mode)mode, mode ? 0.0003f : 3000.0f, DTYPES[d], src, n_blocks, scale_out[0], out[0] + n % 5);
          SCALAR->encode_nvfp4((enum k3_nvfp4_mode)mode, mode ? 0.0003f : 3000.0f, DTYPES[d], src, n_blocks, scale_out[1], out[1] + n % 5);
          assert_same("encode_nvfp4", level, out[0], out[1], sizeof out[0]);
          assert_same("encode_nvfp4 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
        }
        for (enum k3_mx_mode mode = K3_MX_DEFAULT; mode <= K3_MX_MODELOPT; mode++) {
          reset_outputs();
          table->encode_mxfp4(mode, DTYPES[d], src, n_blocks / 2, scale_out[0], out[0] + n % 5);
          SCALAR->encode_mxfp4(mode, DTYPES[d], src, n_blocks / 2, scale_out[1], out[1] + n % 5);
          assert_same("encode_mxfp4", level, out[0], out[1], sizeof out[0]);
          assert_same("encode_mxfp4 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
          reset_outputs();
          table->encode_mxfp8(mode, DTYPES[d], src, n_blocks / 2, scale_out[0], out[0] + n % 5);
          SCALAR->encode_mxfp8(mode, DTYPES[d], src, n_blocks / 2, scale_out[1], out[1] + n % 5);
          assert_same("encode_mxfp8", level, out[0], out[1], sizeof out[0]);
          assert_same("encode_mxfp8 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
        }
      }
      fill(src, K3_DTYPE_BF16, n, FILL_BITS);  // as codes
      reset_outputs();
      table->decode_e4m3(src, n, 0.37f, (float *)(void *)out[0]);
      SCALAR->decode_e4m3(src, n, 0.37f, (float *)(void *)out[1]);
      assert_same("decode_e4m3", level, out[0], out[1], sizeof out[0]);
    }
  }
}

static const uint32_t ODD_SCALES[] = {0,           0x80000000u, 1,          0x007FFFFF, 0x00800000, 0x3F800000,  0xBF800000u,
                                      0x3FFFFFFF,  0x40000000,  0x7F7FFFFF, 0x7B800001, 0x7F800000, 0xFF800000u, 0x7FC00001,
                                      0xFFC12345u, 0x12800000,  0x127FFFFF, 0x44800000, 0x44800001, 0x3F800001};
enum { N_ODD_SCALES = sizeof ODD_SCALES / sizeof ODD_SCALES[0] };

// All 256 codes of E4M3 and all pairs of E2M1 codes, with scales of every kind: signs of zeros, NaNs and their bits, subnormal products, overflow.
static void test_decode_all_codes(void **state) {
  (void)state;
  uint8_t codes[512];
  for (int i = 0; i < 512; i++)
    codes[i] = (uint8_t)(i < 256 ? i : i * 37);
  for (int s = 0; s < N_ODD_SCALES + 200; s++) {
    float scales[32];
    for (int b = 0; b < 32; b++)
      scales[b] = k3_f32_from_bits(s < N_ODD_SCALES ? ODD_SCALES[(s + b) % N_ODD_SCALES] : (uint32_t)random_u64());
    FOR_EVERY_TABLE {
      reset_outputs();
      table->decode_e4m3(codes, 512, scales[0], (float *)(void *)out[0]);
      SCALAR->decode_e4m3(codes, 512, scales[0], (float *)(void *)out[1]);
      assert_same("decode_e4m3", level, out[0], out[1], sizeof out[0]);
      for (size_t block = 16; block <= 32; block *= 2) {
        reset_outputs();
        table->decode_e2m1(codes, 512 / block, block, scales, (float *)(void *)out[0]);
        SCALAR->decode_e2m1(codes, 512 / block, block, scales, (float *)(void *)out[1]);
        assert_same("decode_e2m1", level, out[0], out[1], sizeof out[0]);
      }
    }
  }
}

// All 65,536 BF16 inputs against many scales: every kind of scale, random ones, and those a few units beside a multiple of 1/8, where the fast
// quotient and the rounded one come closest to disagreeing.
static void test_e4m3_all_bf16(void **state) {
  (void)state;
  static uint16_t inputs[65536];
  static uint8_t ours[65536], scalar[65536];
  for (uint32_t i = 0; i < 65536; i++)
    inputs[i] = (uint16_t)(i * 40503u);  // odd, so a permutation: neighbours in memory are far apart in value and most groups hold a NaN
  for (int s = 0; s < 260; s++) {
    uint32_t bits;
    if (s < N_ODD_SCALES)
      bits = ODD_SCALES[s];
    else if (s < 140)
      bits = 0x3F800000u + (uint32_t)(s % 8) * 0x100000u + (uint32_t)(s / 8) - 8u;
    else
      bits = (uint32_t)(10 + random_u64() % 180) << 23 | (uint32_t)(random_u64() & 0x7FFFFF);
    float scale = k3_f32_from_bits(bits);
    encode_run(SCALAR, K3_DTYPE_BF16, inputs, 65536, scale, scalar);
    FOR_EVERY_TABLE {
      encode_run(table, K3_DTYPE_BF16, inputs, 65536, scale, ours);
      assert_same("encode_e4m3 of all BF16", level, ours, scalar, sizeof ours);
    }
  }
}

// Finite inputs of the normal binades in order, so that the table path is taken, for many scales; with and without the table (short runs).
static void test_e4m3_table(void **state) {
  (void)state;
  enum { N = 48 * 128 };
  static uint16_t inputs[N];
  static uint8_t ours[N], scalar[N];
  for (int s = 0; s < 4000; s++) {
    uint32_t mantissa = s < 1024 ? (uint32_t)(s / 8) << 16 | (uint32_t)(s % 8 - 4) : (uint32_t)random_u64();
    float scale = k3_f32_from_bits((100u + (uint32_t)s % 30) << 23 | (mantissa & 0x7FFFFF));
    uint32_t exponent = (k3_f32_bits(scale) >> 23) - 9;  // from deep in the subnormal codes to saturation
    for (uint32_t i = 0; i < N; i++)
      inputs[i] = (uint16_t)(((exponent << 7) + i) | (i * 2654435761u & 0x8000));
    encode_run(SCALAR, K3_DTYPE_BF16, inputs, N, scale, scalar);
    FOR_EVERY_TABLE {
      encode_run(table, K3_DTYPE_BF16, inputs, N, scale, ours);
      assert_same("encode_e4m3 by table", level, ours, scalar, N);
      for (int i = 0; i < N; i += 128)
        encode_run(table, K3_DTYPE_BF16, inputs + i, 128, scale, ours + i);
      assert_same("encode_e4m3 without table", level, ours, scalar, N);
    }
  }
}

// Panels: rows apart, regions of columns with scales of their own, the last one short. What lies between the rows is not touched.
static void test_e4m3_panels(void **state) {
  (void)state;
  static uint16_t src[40 * 300];
  static uint8_t ours[40 * 300], scalar[40 * 300];
  fill(src, K3_DTYPE_BF16, 40 * 300, FILL_WEIGHTS);
  static const float scales[5] = {0.0001f, 0.00037f, 1e-30f, 0.02f, 0.0003f};
  for (size_t n_cols = 1; n_cols <= 260; n_cols += 37) {
    for (size_t region_cols = 64; region_cols <= 200; region_cols += 61) {
      memset(scalar, 0xA5, sizeof scalar);
      SCALAR->encode_e4m3(K3_DTYPE_BF16, src, 40, 300, n_cols, region_cols, scales, scalar);
      FOR_EVERY_TABLE {
        memset(ours, 0xA5, sizeof ours);
        table->encode_e4m3(K3_DTYPE_BF16, src, 40, 300, n_cols, region_cols, scales, ours);
        assert_same("encode_e4m3 of a panel", level, ours, scalar, sizeof ours);
      }
    }
  }
}

static const float BOUNDARIES[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

// BF16 blocks made of values on and beside the seven boundaries of their own scale, for many scales; then random blocks of every kind, with second
// scales that leave the fast range on both sides.
static void test_nvfp4(void **state) {
  (void)state;
  enum { BLOCKS = 40 };
  static uint16_t src[16 * BLOCKS];
  for (int round = 0; round < 12000; round++) {
    enum k3_nvfp4_mode mode = (enum k3_nvfp4_mode)(round % 2);
    uint32_t exponent = round % 10 == 9 ? (uint32_t)(random_u64() % 256) : (uint32_t)(mode ? 105 : 135) + (uint32_t)(random_u64() % 8);
    float second = k3_f32_from_bits(exponent << 23 | (uint32_t)(random_u64() & 0x7FFFFF));
    if (round % 97 == 96)
      second = k3_f32_from_bits(ODD_SCALES[round / 97 % N_ODD_SCALES]);
    for (int b = 0; b < BLOCKS; b++) {
      uint16_t *block = src + 16 * b;
      if (round % 5 == 4) {
        fill(block, K3_DTYPE_BF16, 16, (enum fill)(random_u64() % N_FILLS));
        continue;
      }
      uint64_t bits = random_u64();
      block[0] = (uint16_t)(bits >> 5 & 0x8000) | (uint16_t)((108 + bits % 16) << 7) | (bits >> 20 & 0x7F);
      float effective;
      k3_nvfp4_block(mode, second, fabsf(k3_f32_from_bf16(block[0])), &effective);
      for (int i = 1; i < 16; i++) {
        uint16_t near = (uint16_t)(k3_f32_bits(BOUNDARIES[(i + b) % 7] * fabsf(effective)) >> 16);
        near = (uint16_t)(near + (bits >> (20 + 2 * i)) % 4 - 1);
        if ((near & 0x7FFF) > (block[0] & 0x7FFF))  // amax stays what it was
          near = block[0] & 0x7FFF;
        block[i] = near | (uint16_t)((bits >> i & 1) << 15);
      }
    }
    FOR_EVERY_TABLE {
      reset_outputs();
      table->encode_nvfp4(mode, second, K3_DTYPE_BF16, src, BLOCKS, scale_out[0], out[0]);
      SCALAR->encode_nvfp4(mode, second, K3_DTYPE_BF16, src, BLOCKS, scale_out[1], out[1]);
      assert_same("encode_nvfp4 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
      assert_same("encode_nvfp4", level, out[0], out[1], sizeof out[0]);
    }
  }
}

// MX blocks of every magnitude a BF16 number can have, ties included, all modes.
static void test_mx(void **state) {
  (void)state;
  enum { BLOCKS = 20 };
  static uint16_t src[32 * BLOCKS];
  for (int round = 0; round < 4000; round++) {
    for (int b = 0; b < BLOCKS; b++) {
      uint16_t *block = src + 32 * b;
      if (round % 5 == 4) {
        fill(block, K3_DTYPE_BF16, 32, (enum fill)(random_u64() % N_FILLS));
        continue;
      }
      uint64_t bits = random_u64();
      uint32_t exponent = round % 3 == 0 ? (uint32_t)((round / 3 + b) % 255) : (uint32_t)(110 + bits % 16);
      for (int i = 0; i < 32; i++) {  // the top binades, on a grid with all ties on it
        uint32_t down = (uint32_t)(random_u64() % 6);
        block[i] = (uint16_t)((exponent > down ? exponent - down : 0) << 7 | (uint32_t)(random_u64() % 16) << 3 | (random_u64() & 0x8000));
        if (bits >> i & 1)
          block[i] ^= (uint16_t)(random_u64() & 7);
      }
    }
    for (enum k3_mx_mode mode = K3_MX_DEFAULT; mode <= K3_MX_MODELOPT; mode++) {
      FOR_EVERY_TABLE {
        reset_outputs();
        table->encode_mxfp4(mode, K3_DTYPE_BF16, src, BLOCKS, scale_out[0], out[0]);
        SCALAR->encode_mxfp4(mode, K3_DTYPE_BF16, src, BLOCKS, scale_out[1], out[1]);
        assert_same("encode_mxfp4 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
        assert_same("encode_mxfp4", level, out[0], out[1], sizeof out[0]);
        reset_outputs();
        table->encode_mxfp8(mode, K3_DTYPE_BF16, src, BLOCKS, scale_out[0], out[0]);
        SCALAR->encode_mxfp8(mode, K3_DTYPE_BF16, src, BLOCKS, scale_out[1], out[1]);
        assert_same("encode_mxfp8 scales", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
        assert_same("encode_mxfp8", level, out[0], out[1], sizeof out[0]);
      }
    }
  }
}

// `value` moved by up to four F32 numbers and given a sign, as a weight.
static void store_near(enum k3_dtype dtype, void *dst, size_t i, float value) {
  uint64_t random = random_u64();
  float near = k3_f32_from_bits((k3_f32_bits(value) + (uint32_t)(random % 9) - 4) ^ (uint32_t)(random >> 32 & 0x80000000u));
  k3_quant_store_float(dtype, dst, i, near);
}

// F32 and F16 weights on and beside the boundaries between two E4M3 codes times the scale, subnormal codes and saturation included: there a quotient
// that is off by its last bit gives another code.
static void test_e4m3_wide(void **state) {
  (void)state;
  enum { N = 127 * 10 };
  static uint8_t src[4 * N], ours[N], scalar[N];
  for (int s = 0; s < 3000; s++) {
    enum k3_dtype dtype = s % 4 == 3 ? K3_DTYPE_F16 : K3_DTYPE_F32;
    uint32_t exponent = dtype == K3_DTYPE_F16 ? 105 + (uint32_t)s % 30 : s % 3 ? 100 + (uint32_t)s % 30 : (uint32_t)(random_u64() % 256);
    float scale = k3_f32_from_bits(exponent << 23 | (uint32_t)(random_u64() & 0x7FFFFF));
    if (s % 50 == 49)
      scale = k3_f32_from_bits(ODD_SCALES[s / 50 % N_ODD_SCALES]);
    for (size_t i = 0; i < N; i++) {
      uint8_t code = (uint8_t)(i % 127);
      float boundary = code == 126 ? 464.0f : 0.5f * (k3_f32_from_e4m3(code) + k3_f32_from_e4m3((uint8_t)(code + 1)));
      store_near(dtype, src, i, boundary * scale);
    }
    encode_run(SCALAR, dtype, src, N, scale, scalar);
    FOR_EVERY_TABLE {
      encode_run(table, dtype, src, N, scale, ours);
      assert_same("encode_e4m3 of F32 and F16 near boundaries", level, ours, scalar, N);
    }
  }
}

// F32 weights beside every boundary that E4M3 and E2M1 have, for many of the 2^23 mantissas of a scale: the quotients on which a division without
// division could fail. K3PACK_EXHAUSTIVE=1 takes all of them, in a minute.
static void test_quotients_beside_boundaries(void **state) {
  (void)state;
  enum { N = 16 * 8 };
  float weights[N];
  uint8_t ours[N], scalar[N];
  uint32_t step = getenv("K3PACK_EXHAUSTIVE") ? 1 : 97;
  for (uint32_t mantissa = 0; mantissa < 0x800000; mantissa += step) {
    float scale = k3_f32_from_bits(115u << 23 | mantissa);
    for (uint32_t i = 0; i < N; i++) {
      float boundary = ldexpf((float)(16 + i / 8), (int)(mantissa + i) % 8 - 8) * scale;
      weights[i] = k3_f32_from_bits(k3_f32_bits(boundary) + i % 8 - 3);
    }
    encode_run(SCALAR, K3_DTYPE_F32, weights, N, scale, scalar);
    FOR_EVERY_TABLE {
      encode_run(table, K3_DTYPE_F32, weights, N, scale, ours);
      assert_same("encode_e4m3 beside a boundary", level, ours, scalar, N);
    }
  }
}

// F32 and F16 blocks on and beside the boundaries of their own scale, for second scales and magnitudes inside and outside of the fast range.
static void test_fp4_wide(void **state) {
  (void)state;
  enum { BLOCKS = 40 };
  static uint8_t src[4 * 32 * BLOCKS];
  for (int round = 0; round < 6000; round++) {
    enum k3_dtype dtype = round % 4 == 3 ? K3_DTYPE_F16 : K3_DTYPE_F32;
    enum k3_nvfp4_mode mode = (enum k3_nvfp4_mode)(round / 2 % 2);
    uint32_t exponent = round % 10 == 9 ? (uint32_t)(random_u64() % 256) : (uint32_t)(mode ? 105 : 135) + (uint32_t)(random_u64() % 8);
    float second = k3_f32_from_bits(exponent << 23 | (uint32_t)(random_u64() & 0x7FFFFF));
    for (size_t b = 0; b < BLOCKS; b++) {
      uint32_t top = round % 7 == 6 ? (uint32_t)(random_u64() % 255) : 108 + (uint32_t)(random_u64() % 16);
      float amax = k3_f32_from_bits(top << 23 | (uint32_t)(random_u64() & 0x7FFFFF)), effective;
      k3_nvfp4_block(mode, second, amax, &effective);
      for (size_t i = 0; i < 16; i++) {
        float value = BOUNDARIES[(i + b) % 7] * fabsf(effective);
        if (i == b % 16)
          k3_quant_store_float(dtype, src, 16 * b + i, amax);
        else if (round % 11 == 10 && i % 4 == 0)
          k3_quant_store_float(dtype, src, 16 * b + i, i % 8 ? -0x1p-149f : -0.0f);  // the smallest weight there is, and none
        else
          store_near(dtype, src, 16 * b + i, value > amax ? amax : value);
      }
    }
    FOR_EVERY_TABLE {
      reset_outputs();
      table->encode_nvfp4(mode, second, dtype, src, BLOCKS, scale_out[0], out[0]);
      SCALAR->encode_nvfp4(mode, second, dtype, src, BLOCKS, scale_out[1], out[1]);
      assert_same("encode_nvfp4 scales of F32 and F16", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
      assert_same("encode_nvfp4 of F32 and F16", level, out[0], out[1], sizeof out[0]);
    }
  }
}

// The same for MX, whose scales are powers of two, in all modes.
static void test_mx_wide(void **state) {
  (void)state;
  enum { BLOCKS = 20 };
  static uint8_t src[4 * 32 * BLOCKS];
  for (int round = 0; round < 2000; round++) {
    enum k3_dtype dtype = round % 4 == 3 ? K3_DTYPE_F16 : K3_DTYPE_F32;
    for (size_t b = 0; b < BLOCKS; b++) {
      uint32_t top = round % 3 == 0 ? (uint32_t)(random_u64() % 255) : 108 + (uint32_t)(random_u64() % 16);
      float amax = k3_f32_from_bits(top << 23 | (uint32_t)(random_u64() & 0x7FFFFF)), scale = k3_f32_from_bits((top > 2 ? top - 2 : 1) << 23);
      for (size_t i = 0; i < 32; i++) {
        uint8_t code = (uint8_t)(random_u64() % 126);
        float eighth = 0.5f * (k3_f32_from_e4m3(code) + k3_f32_from_e4m3((uint8_t)(code + 1))) * 0x1p-6f;
        float value = (round % 2 ? BOUNDARIES[(i + b) % 7] : eighth) * scale;
        if (i == b)
          k3_quant_store_float(dtype, src, 32 * b + i, amax);
        else if (round % 11 == 10 && i % 4 == 0)
          k3_quant_store_float(dtype, src, 32 * b + i, i % 8 ? -0x1p-149f : -0.0f);
        else
          store_near(dtype, src, 32 * b + i, value > amax ? amax : value);
      }
    }
    for (enum k3_mx_mode mode = K3_MX_DEFAULT; mode <= K3_MX_MODELOPT; mode++) {
      FOR_EVERY_TABLE {
        reset_outputs();
        table->encode_mxfp4(mode, dtype, src, BLOCKS, scale_out[0], out[0]);
        SCALAR->encode_mxfp4(mode, dtype, src, BLOCKS, scale_out[1], out[1]);
        assert_same("encode_mxfp4 scales of F32 and F16", level, scale_out[0], scale_out[1], sizeof scale_out[0]);
        assert_same("encode_mxfp4 of F32 and F16", level, out[0], out[1], sizeof out[0]);
        reset_outputs();
        table->encode_mxfp8(mode, dtype, src, BLOCKS, scale_out[0], out[0]);
        SCALAR->encode_mxfp8(mode, dtype, src, BLOCKS, scale_out[1], out[1]);
        assert_same("encode_mxfp8 of F32 and F16", level, out[0], out[1], sizeof out[0]);
      }
    }
  }
}

// Products: the same sum in every instruction set; and the sum is the one that quant/dot.h defines, written out here.
static void test_dot(void **state) {
  (void)state;
  static float weight[1500], x[1500];
  static uint16_t weight_bf16[1500];
  for (size_t n = 0; n <= 1500; n += n < 70 ? 1 : 143) {
    fill(weight, K3_DTYPE_F32, n, FILL_FINITE);
    fill(x, K3_DTYPE_F32, n, FILL_WEIGHTS);
    for (size_t i = 0; i < n; i++) {
      weight_bf16[i] = k3_bf16_from_f32(weight[i]);
      weight[i] = k3_f32_from_bf16(weight_bf16[i]);
    }
    float expected = 0;
    double exact = 0, magnitude = 0;
    for (size_t first = 0; first < n; first += K3_DOT_TILE) {
      float sums[32] = {0};
      for (size_t i = first; i < n && i < first + K3_DOT_TILE; i++) {
        sums[i % 32] = fmaf(weight[i], x[i], sums[i % 32]);
        exact += (double)weight[i] * x[i];
        magnitude += fabs((double)weight[i] * x[i]);
      }
      for (int half = 16; half > 0; half /= 2) {
        for (int lane = 0; lane < half; lane++)
          sums[lane] += sums[lane + half];
      }
      expected += sums[0];
    }
    assert_true(fabs((double)expected - exact) <= magnitude * 1e-6);
    struct k3_quant_matrix matrix = {.scheme = k3_quant_scheme_default(K3_SCHEME_BF16), .n_rows = 1, .n_cols = n, .weight = weight_bf16};
    for (enum k3_simd level = K3_SIMD_SCALAR; level <= k3_cpu_simd(); level++) {
      k3_quant_set_simd(level);
      assert_true(k3_dot_f32(weight, x, n) == expected);
      float y[2] = {-1, -1};
      k3_quant_dot_row(&matrix, 0, x, 0, 1, y, 1);
      assert_true(y[0] == expected && y[1] == -1);
      k3_quant_dot_row(&matrix, 0, x, 0, 2, y, 1);  // two vectors, here the same one twice
      assert_true(y[0] == expected && y[1] == expected);
    }
  }
}

// A product with stored codes is the sum over the decoded row, whatever the scheme.
static void test_dot_of_schemes(void **state) {
  (void)state;
  enum { ROWS = 3, COLS = 1184 };
  static float src[ROWS * COLS], x[2 * COLS], row[COLS];
  static uint8_t weight[ROWS * COLS], scale[ROWS * COLS];
  fill(src, K3_DTYPE_F32, ROWS * COLS, FILL_WEIGHTS);
  fill(x, K3_DTYPE_F32, 2 * COLS, FILL_WEIGHTS);
  static const enum k3_scheme schemes[] = {K3_SCHEME_FP8_CHANNEL, K3_SCHEME_FP8_GROUP, K3_SCHEME_FP8_BLOCK,
                                           K3_SCHEME_MXFP8,       K3_SCHEME_NVFP4,     K3_SCHEME_MXFP4};
  for (enum k3_simd level = K3_SIMD_SCALAR; level <= k3_cpu_simd(); level++) {
    k3_quant_set_simd(level);
    for (unsigned s = 0; s < sizeof schemes / sizeof schemes[0]; s++) {
      struct k3_quant_encoder encoder = {.scheme = k3_quant_scheme_default(schemes[s]), .src_dtype = K3_DTYPE_F32, .scale = 20000};
      k3_quant_encode_rows(&encoder, src, ROWS, COLS, weight, scale);
      struct k3_quant_matrix matrix = {.scheme = encoder.scheme, .n_rows = ROWS, .n_cols = COLS, .weight = weight, .scale = scale};
      for (uint64_t r = 0; r < ROWS; r++) {
        float y[2];
        k3_quant_dot_row(&matrix, r, x, COLS, 2, y, 1);
        k3_quant_decode_row(&matrix, r, 0, COLS, NULL, row);
        assert_true(y[0] == k3_dot_f32(row, x, COLS) && y[1] == k3_dot_f32(row, x + COLS, COLS));
        for (uint64_t cut = 1; cut < 40; cut += 7) {  // any range of columns decodes to the same values
          static float part[COLS];
          k3_quant_decode_row(&matrix, r, cut, COLS - 2 * cut, NULL, part);
          assert_memory_equal(part, row + cut, 4 * (COLS - 2 * cut));
        }
      }
    }
  }
}

int main(void) {
  if (k3_cpu_simd() == K3_SIMD_SCALAR)
    printf("this machine has no AVX2: only the scalar code is tested\n");
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lengths_and_alignments),
      cmocka_unit_test(test_decode_all_codes),
      cmocka_unit_test(test_e4m3_all_bf16),
      cmocka_unit_test(test_e4m3_table),
      cmocka_unit_test(test_e4m3_panels),
      cmocka_unit_test(test_nvfp4),
      cmocka_unit_test(test_mx),
      cmocka_unit_test(test_e4m3_wide),
      cmocka_unit_test(test_quotients_beside_boundaries),
      cmocka_unit_test(test_fp4_wide),
      cmocka_unit_test(test_mx_wide),
      cmocka_unit_test(test_dot),
      cmocka_unit_test(test_dot_of_schemes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
