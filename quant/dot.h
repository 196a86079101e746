// Products of a stored weight's rows with F32 vectors, decoding in tiles that stay in the first-level cache: no decoded copy of a row exists.
//
// The sum has one definition for every scheme and instruction set, so a result depends on neither: a row is cut into tiles of K3_DOT_TILE columns;
// inside a tile column c is added by a fused multiply-add to partial sum c % 32; the 32 partial sums are folded in halves (0 + 16, 1 + 17, ...,
// then 0 + 8, ...); the tiles' sums are added in order. All in F32.
#ifndef K3_QUANT_DOT_H
#define K3_QUANT_DOT_H

#include "quant/scheme.h"

enum { K3_DOT_TILE = 512 };

// y[v * y_stride] = row `row` of the matrix times x[v * x_stride .. + n_cols - 1], for v = 0 .. n_vectors-1. Block scales are applied, the second
// scale is not (k3_quant_second_factor gives what to multiply y by). Each tile is decoded once for all vectors.
void k3_quant_dot_row(const struct k3_quant_matrix *matrix, uint64_t row, const float *x, size_t x_stride, size_t n_vectors, float *y,
                      size_t y_stride);

// The sum as defined above, over n F32 weights.
float k3_dot_f32(const float *weight, const float *x, size_t n);

#endif
