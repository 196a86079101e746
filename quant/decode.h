// Decoding: rows of a weight to F32, whole or in tiles, in every scheme. Pure functions on the caller's memory: no allocation, no I/O, thread-safe,
// nothing needs to be aligned. SIMD variants are chosen at run time and give the same bits as the scalar code.
#ifndef K3_QUANT_DECODE_H
#define K3_QUANT_DECODE_H

#include "quant/scheme.h"

// Columns col .. col + n_cols - 1 of row `row` to dst [n_cols].
//   second  the F32 second scale of the matrix's direction, combined with each block scale as the library of that convention does:
//           code * (block / second) or code * (block * second), each operation rounded to F32. NULL leaves it out: the values are then code * block
//           (exact for FP4), and the caller applies the second scale to the product, per shard; see k3_quant_second_factor.
// The matrix must have passed k3_quant_matrix_check and the range must lie in it (asserted). Any col and n_cols are allowed; whole blocks are fast.
// NaN codes and NaN scales give NaN. INT4/INT8: (q - zero point) * scale, exact in F32 for BF16 and F16 scales.
void k3_quant_decode_row(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col, size_t n_cols, const float *second, float *dst);

// The factor by which a product with weights decoded without their second scale is to be multiplied: 1 / second or second.
float k3_quant_second_factor(enum k3_second_scale direction, float second);

// The block scale of (row, col) as F32, second scale not included; 1 for plain weights.
float k3_quant_block_scale(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col);

// Element i of a scale buffer of F32, BF16, F16, F8_E4M3, F8_E8M0 or U8 (standing for F8_E8M0), widened exactly.
float k3_quant_load_scale(enum k3_dtype dtype, const void *scales, uint64_t i);

// n elements of BF16, F16 or F32 to F32, exactly. NaNs keep their bits.
void k3_quant_widen(enum k3_dtype dtype, const void *src, size_t n, float *dst);

// The code (not offset: q in -2^(b-1) .. 2^(b-1)-1) of one int-packed weight.
int k3_quant_int_code(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col);

#endif
