// Encoding: BF16, F16 or F32 rows to the quantised schemes. Pure functions on the caller's memory: no allocation, no I/O, thread-safe, nothing needs
// to be aligned. SIMD variants are chosen at run time and give the same bytes as the scalar code. All arithmetic is F32, each operation rounded
// once, in the order that the reference implementations use; so the result depends on no compiler, machine or thread count.
//
// NaN and Inf in a weight are not refused here (whoever streams the bytes counts them): the block or region that holds one gets a NaN or saturated
// scale, and its codes are defined but meaningless.
#ifndef K3_QUANT_ENCODE_H
#define K3_QUANT_ENCODE_H

#include "quant/scheme.h"

// NVFP4 after one of its two producers. They differ in the second scale's direction, in the scale byte of a block whose scale rounds to zero
// (an all-zero block among them) and in nothing else on F32 input. Ties go to even; -0 becomes code 0, a tiny negative value code 8.
enum k3_nvfp4_mode {
  K3_NVFP4_COMPRESSED_TENSORS,  // s = E4M3(gs * (amax_b / 6)), 0 -> 0.125 (byte 0x20); code = E2M1(w / (s / gs))
  K3_NVFP4_MODELOPT,            // s = amax_b / (6 * ws2), 0 -> 1 (byte 0x38), then at least 2^-9; code = E2M1(w / (s * ws2))
};

// MXFP4 and MXFP8. With amax_b = man * 2^e, 1 <= man < 2, and `top` the exponent of the element type's largest value (2 for E2M1, 8 for E4M3):
enum k3_mx_mode {
  K3_MX_DEFAULT,             // 2^(e - top), doubled from man = 1.75 on (compressed-tensors); an all-zero block gets byte 127
  K3_MX_COMPRESSED_TENSORS,  // the same, an all-zero block gets byte 0, as the library's CPU arithmetic leaves it
  K3_MX_OCP,                 // 2^(e - top), the floor rule of the OCP MX specification; byte 127
  K3_MX_CEIL,                // the smallest power of two that saturates nothing; byte 127
  K3_MX_MODELOPT,            // the same; byte 0; FP4 ties go toward zero and an exact zero becomes code 8
};

// Second scales from the largest magnitude of all weights that share them. amax 0, NaN or so small or large that the result is no finite normal
// number gives 1. divisor: 2688 / amax, which compressed-tensors computes as (1 / amax) * 2688, each step rounded (PyTorch divides a plain number by a
// tensor so), in a quarter of all cases one unit in the last place beside the rounded quotient; multiplier: amax / 2688 (ModelOpt, which itself writes 0
// for a dead tensor).
float k3_nvfp4_divisor(float amax);
float k3_nvfp4_multiplier(float amax);
// The smallest power of two >= amax / 2688: its reciprocal is exact, so both directions hold the same value. Same exceptions.
float k3_nvfp4_pow2_multiplier(float amax);

// FP8 scale of a region: amax / 448 rounded to scale_dtype (F32, BF16, F16); 0 becomes the dtype's epsilon (2^-23, 2^-7, 2^-10).
float k3_fp8_scale(float amax, enum k3_dtype scale_dtype);

// What to encode with.
struct k3_quant_encoder {
  struct k3_quant_scheme scheme;  // target: fp8-*, mxfp8, nvfp4 or mxfp4
  enum k3_dtype src_dtype;        // BF16, F16 or F32
  enum k3_nvfp4_mode nvfp4_mode;
  enum k3_mx_mode mx_mode;
  float scale;  // nvfp4: the second scale, divisor or multiplier after nvfp4_mode; fp8-tensor: the one scale; others compute theirs
};

// Encodes n_rows whole rows. src [n_rows, n_cols]; weight [n_rows, k3_quant_row_nbytes()]; scale: those rows of the block-scale tensor, in
// scheme.scale_dtype (fp8-tensor: not written, may be NULL). fp8-block: the rows must begin at a block edge of the tensor, and end at one or at the
// tensor's end; partial blocks are scaled by what they hold. n_cols must suit the scheme as for decoding (asserted).
void k3_quant_encode_rows(const struct k3_quant_encoder *encoder, const void *src, uint64_t n_rows, uint64_t n_cols, void *weight, void *scale);

// The pieces, for callers that lay out their own work.
// n weights to dst [n] with a given scale: E4M3(clamp(w / scale, -448, 448)); the sign of zero is kept.
void k3_quant_encode_e4m3(enum k3_dtype src_dtype, const void *src, size_t n, float scale, uint8_t *dst);
// n_blocks blocks of 16: scales [n_blocks] E4M3, codes [8 * n_blocks].
void k3_quant_encode_nvfp4(enum k3_nvfp4_mode mode, float second, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales,
                           uint8_t *codes);
// n_blocks blocks of 32: scales [n_blocks] E8M0, codes [16 * n_blocks] (MXFP4) or [32 * n_blocks] (MXFP8).
void k3_quant_encode_mxfp4(enum k3_mx_mode mode, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
void k3_quant_encode_mxfp8(enum k3_mx_mode mode, enum k3_dtype src_dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);

// value to element i of a buffer of F32, BF16 or F16, little-endian, rounded to nearest even.
void k3_quant_store_float(enum k3_dtype dtype, void *dst, uint64_t i, float value);

#endif
