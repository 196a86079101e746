// Values of synthetic tensors: a counter-based generator (SplitMix64's finaliser over key + counter), so that any part of a tensor can be made on its
// own, and a table of the normal distribution's quantiles.
#include <math.h>
#include <string.h>

#include "loader/synth_parts.h"
#include "quant/number.h"

enum { BLOCK_ELEMS = 1024 };

static uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static uint64_t draw(uint64_t key, uint64_t counter) {
  return mix(key + counter * UINT64_C(0x9E3779B97F4A7C15));
}

static uint64_t key_of(const char *name, uint64_t seed) {
  uint64_t key = mix(seed + UINT64_C(0x9E3779B97F4A7C15));
  for (; *name; name++)
    key = mix(key ^ (unsigned char)*name);
  return key;
}

// The quantile function x(p) solves x' = 1 / f, and the density along it f' = -x, from x(1/2) = 0 and f(1/2) = 1 / sqrt(2 pi): two equations without
// a transcendental function. Classic Runge-Kutta steps of 1/131072.
static void quantile_step(double *x, double *f, double h) {
  double x1 = 1 / *f, f1 = -*x;
  double x2 = 1 / (*f + h / 2 * f1), f2 = -(*x + h / 2 * x1);
  double x3 = 1 / (*f + h / 2 * f2), f3 = -(*x + h / 2 * x2);
  double x4 = 1 / (*f + h * f3), f4 = -(*x + h * x3);
  *x += h / 6 * (x1 + 2 * x2 + 2 * x3 + x4);
  *f += h / 6 * (f1 + 2 * f2 + 2 * f3 + f4);
}

void k3_synth_normal_make(struct k3_synth_normal *normal) {
  double x = 0, f = 0.39894228040143267794;
  const double h = 1.0 / 131072;
  for (int k = 0; k < 32768; k++) {
    quantile_step(&x, &f, h);  // to the middle of the step ...
    normal->value[32768 + k] = (float)x;
    normal->value[32767 - k] = (float)-x;
    if (k < 32767)
      quantile_step(&x, &f, h);  // ... and to its end; behind the last one lies infinity
  }
  normal->value[65536] = normal->value[65535];
}

// Elements [block * BLOCK_ELEMS ...) of a tensor as floats: 16 random bits choose the quantile, for F32 16 more interpolate to the next one.
static void make_block(const struct k3_synth_normal *normal, uint64_t key, uint64_t block, bool fine, float center, float scale, float *dst) {
  if (fine) {
    for (unsigned i = 0; i < BLOCK_ELEMS / 2; i++) {
      uint64_t bits = draw(key, block * (BLOCK_ELEMS / 2) + i);
      for (unsigned half = 0; half < 2; half++, bits >>= 32) {
        const float *at = &normal->value[bits & 0xFFFF];
        float part = (float)((bits >> 16) & 0xFFFF) * (1.0f / 65536);
        dst[2 * i + half] = center + scale * (at[0] + part * (at[1] - at[0]));
      }
    }
    return;
  }
  for (unsigned i = 0; i < BLOCK_ELEMS / 4; i++) {
    uint64_t bits = draw(key, block * (BLOCK_ELEMS / 4) + i);
    for (unsigned quarter = 0; quarter < 4; quarter++, bits >>= 16)
      dst[4 * i + quarter] = center + scale * normal->value[bits & 0xFFFF];
  }
}

// k3_bf16_from_f32 for values that are finite, which the compiler can vectorise: this loop writes gigabytes.
static uint16_t round_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// 2^exponent, for exponents of normal floats.
static float power_of_two(int exponent) {
  uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Half the binary logarithm of a number of columns, rounded down: codes of size about 1 times its inverse power of two keep a product's variance.
static int half_log2(uint64_t n_cols) {
  int log2 = 0;
  while (n_cols >> (log2 + 1))
    log2++;
  return (log2 + 1) / 2;
}

enum { FP8_CODE_BITS = 6 };  // E4M3 codes are drawn with a standard deviation of 2^6: their tail stays below 448

static unsigned char e2m1_of(float value) {
  static const float middles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};  // between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6
  float size = value < 0 ? -value : value;
  unsigned char code = 0;
  while (code < 7 && size > middles[code])
    code++;
  return (unsigned char)(code | (value < 0 ? 8 : 0));
}

// Element number `at` of a part of a quantised matrix from a standard normal deviate; two codes for K3_SYNTH_FP4_CODES.
static void put_part(const struct k3_synth_tensor *tensor, int half_log, const float *value, uint64_t at, unsigned char *dst) {
  float f32 = 0;
  int wobble = value[0] < -0.5f ? -1 : value[0] > 0.5f ? 1 : 0, exponent = -half_log - FP8_CODE_BITS + wobble;
  switch ((enum k3_synth_fill)tensor->fill) {
    case K3_SYNTH_FP8_CODES: dst[0] = k3_e4m3_from_f32(value[0] * 64); return;
    case K3_SYNTH_FP4_CODES: dst[0] = (unsigned char)(e2m1_of(value[0] * 2) | e2m1_of(value[1] * 2) << 4); return;
    case K3_SYNTH_FP4_SCALES: dst[0] = (unsigned char)(127 - half_log - 1 + wobble); return;
    case K3_SYNTH_NVFP4_SCALES: dst[0] = (unsigned char)(0x78 + wobble * 4); return;  // 256, 192 or 384
    case K3_SYNTH_FP8_SCALES: f32 = power_of_two(exponent); break;
    case K3_SYNTH_NVFP4_SECOND: f32 = power_of_two(-half_log - 9); break;  // 2 * 256
    case K3_SYNTH_ONES: f32 = 1; break;
    default: f32 = at < tensor->n_cols ? value[0] : 0; break;  // K3_SYNTH_HEADS
  }
  if (tensor->dtype == K3_DTYPE_U8)
    dst[0] = (unsigned char)(127 + exponent);
  else
    memcpy(dst, &f32, sizeof f32);
}

static void put_parts(const struct k3_synth_normal *normal, const struct k3_synth_tensor *tensor, uint64_t key, uint64_t offset, unsigned char *dst,
                      size_t nbytes) {
  unsigned elem_nbytes = k3_dtype_bits(tensor->dtype) / 8;
  bool pairs = tensor->fill == K3_SYNTH_FP4_CODES;
  int half_log = half_log2(tensor->n_cols ? tensor->n_cols : tensor->shape[tensor->rank ? tensor->rank - 1 : 0]);
  for (uint64_t at = offset / elem_nbytes; nbytes > 0; at++) {
    uint64_t bits = draw(key, at);
    float value[2] = {normal->value[bits & 0xFFFF], pairs ? normal->value[bits >> 16 & 0xFFFF] : 0};
    unsigned char bytes[4];
    put_part(tensor, half_log, value, at, bytes);
    size_t skip = offset % elem_nbytes, n = elem_nbytes - skip;
    n = n < nbytes ? n : nbytes;
    memcpy(dst, bytes + skip, n);
    dst += n;
    offset += n;
    nbytes -= n;
  }
}

void k3_synth_values(const struct k3_synth_normal *normal, const struct k3_synth_tensor *tensor, uint64_t seed, uint64_t offset, void *dst,
                     size_t nbytes) {
  float center = tensor->fill == K3_SYNTH_NORM ? 1.0f : 0.0f;
  float scale = tensor->fill == K3_SYNTH_MATRIX ? (float)(1 / sqrt((double)tensor->shape[tensor->rank ? tensor->rank - 1 : 0])) : 1.0f / 16;
  if (tensor->gain > 0)
    scale *= tensor->gain;
  uint64_t key = key_of(tensor->key, seed);
  if (tensor->fill >= K3_SYNTH_FP8_CODES) {
    put_parts(normal, tensor, key, offset, dst, nbytes);
    return;
  }
  unsigned elem_nbytes = k3_dtype_bits(tensor->dtype) / 8;
  unsigned block_nbytes = BLOCK_ELEMS * elem_nbytes;
  float values[BLOCK_ELEMS];
  uint16_t halves[BLOCK_ELEMS];
  for (unsigned char *out = dst; nbytes > 0;) {
    make_block(normal, key, offset / block_nbytes, tensor->dtype == K3_DTYPE_F32, center, scale, values);
    const void *bytes = values;
    if (tensor->dtype == K3_DTYPE_BF16) {
      for (unsigned i = 0; i < BLOCK_ELEMS; i++)
        halves[i] = round_to_bf16(values[i]);
      bytes = halves;
    } else if (tensor->dtype == K3_DTYPE_F16) {
      for (unsigned i = 0; i < BLOCK_ELEMS; i++)
        halves[i] = k3_f16_from_f32(values[i]);
      bytes = halves;
    }
    size_t skip = offset % block_nbytes, n = block_nbytes - skip;
    n = n < nbytes ? n : nbytes;
    memcpy(out, (const char *)bytes + skip, n);
    out += n;
    offset += n;
    nbytes -= n;
  }
}
