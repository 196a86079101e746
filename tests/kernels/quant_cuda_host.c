// Compares our single-value conversions with the host functions of CUDA's cuda_fp8.h and cuda_fp4.h, on all 65,536 BF16 and F16 inputs and on a
// dense set of F32, and prints the digests that tests/unit/test_quant_number.c holds. Built and run by tests/cli/test_quant_cuda.sh where the CUDA
// headers are found; nothing of it runs on a GPU. Exit 0: no difference.
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <stdint.h>
#include <stdio.h>

#include "base/dtype.h"
#include "base/hash.h"
#include "quant/number.h"

enum { N_KINDS = 5 };
static const char *const KIND_NAMES[N_KINDS] = {"e4m3", "e5m2", "e2m1", "e8m0 down", "e8m0 up"};

static void convert_ours(float value, uint8_t codes[N_KINDS]) {
  codes[0] = k3_e4m3_from_f32(value);
  codes[1] = k3_e5m2_from_f32(value);
  codes[2] = k3_e2m1_from_f32(value);
  codes[3] = k3_e8m0_floor_from_f32(value);
  codes[4] = k3_e8m0_ceil_from_f32(value);
}

static void convert_cuda(float value, uint8_t codes[N_KINDS]) {
  codes[0] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  codes[1] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
  codes[2] = __nv_cvt_float_to_fp4(value, __NV_E2M1, cudaRoundNearest) & 15;
  codes[3] = __nv_cvt_float_to_e8m0(value, __NV_SATFINITE, cudaRoundZero);
  codes[4] = __nv_cvt_float_to_e8m0(value, __NV_SATFINITE, cudaRoundPosInf);
}

static unsigned long n_different;

static void compare(float value, uint8_t cuda[N_KINDS]) {
  uint8_t ours[N_KINDS];
  convert_ours(value, ours);
  convert_cuda(value, cuda);
  for (int k = 0; k < N_KINDS; k++) {
    if (ours[k] != cuda[k] && n_different++ < 20)
      printf("DIFFERENT %s of 0x%08X (%g): ours 0x%02X, CUDA 0x%02X\n", KIND_NAMES[k], k3_f32_bits(value), (double)value, ours[k], cuda[k]);
  }
}

static void compare_and_digest(const char *source, float (*widen)(uint16_t)) {
  static uint8_t tables[N_KINDS][65536];
  for (uint32_t input = 0; input < 65536; input++) {
    uint8_t cuda[N_KINDS];
    compare(widen((uint16_t)input), cuda);
    for (int k = 0; k < N_KINDS; k++)
      tables[k][input] = cuda[k];
  }
  for (int k = 0; k < N_KINDS; k++) {
    uint8_t digest[K3_SHA256_NBYTES];
    if (k3_sha256(tables[k], sizeof tables[k], digest, NULL) != K3_OK)
      return;
    printf("digest %s %s: ", source, KIND_NAMES[k]);
    for (int i = 0; i < 8; i++)
      printf("%02x", digest[i]);
    printf("\n");
  }
}

// A code's value as CUDA decodes it, through its F16 (FP8, FP4) or BF16 (E8M0) raw conversions.
static void compare_decoding(void) {
  for (unsigned code = 0; code < 256; code++) {
    float cuda[4] = {
        k3_f32_from_f16(__nv_cvt_fp8_to_halfraw((uint8_t)code, __NV_E4M3).x), k3_f32_from_f16(__nv_cvt_fp8_to_halfraw((uint8_t)code, __NV_E5M2).x),
        k3_f32_from_f16(__nv_cvt_fp4_to_halfraw((uint8_t)(code & 15), __NV_E2M1).x), k3_f32_from_bf16(__nv_cvt_e8m0_to_bf16raw((uint8_t)code).x)};
    float ours[4] = {k3_f32_from_e4m3((uint8_t)code), k3_f32_from_e5m2((uint8_t)code), k3_f32_from_e2m1((uint8_t)(code & 15)),
                     k3_f32_from_e8m0((uint8_t)code)};
    for (int k = 0; k < 4; k++) {
      int both_nan = ours[k] != ours[k] && cuda[k] != cuda[k];
      if (!both_nan && k3_f32_bits(ours[k]) != k3_f32_bits(cuda[k]) && n_different++ < 20)
        printf("DIFFERENT decoding of %s code 0x%02X: ours %g, CUDA %g\n", KIND_NAMES[k], code, (double)ours[k], (double)cuda[k]);
    }
  }
}

int main(void) {
  compare_and_digest("bf16", k3_f32_from_bf16);
  compare_and_digest("f16", k3_f32_from_f16);
  unsigned long n_dense = 0;
  uint8_t cuda[N_KINDS];
  for (uint64_t bits = 0; bits < (UINT64_C(1) << 32); bits += 509, n_dense++)  // a prime: every pattern of low bits occurs in every binade
    compare(k3_f32_from_bits((uint32_t)bits), cuda);
  for (uint64_t high = 0; high < 65536; high++) {  // and the two neighbours of every BF16 value and of every midpoint between two
    for (int offset = -1; offset <= 1; offset++) {
      compare(k3_f32_from_bits((uint32_t)((high << 16) + (uint64_t)(int64_t)offset)), cuda);
      compare(k3_f32_from_bits((uint32_t)((high << 16) + 0x8000u + (uint64_t)(int64_t)offset)), cuda);
      n_dense += 2;
    }
  }
  compare_decoding();
  printf("%lu F32 inputs, all BF16 and F16 inputs, all codes: %lu different\n", n_dense, n_different);
  return n_different != 0;
}
