#include "quant/dot.h"

#include "quant/decode.h"
#include "quant/kernels.h"

float k3_dot_f32(const float *weight, const float *x, size_t n) {
  const struct k3_quant_kernels *kernels = k3_quant_kernels();
  float sum = 0;
  for (size_t done = 0; done < n; done += K3_DOT_TILE) {
    size_t n_tile = n - done < K3_DOT_TILE ? n - done : K3_DOT_TILE;
    sum += kernels->dot_f32(weight + done, x + done, n_tile);
  }
  return sum;
}

void k3_quant_dot_row(const struct k3_quant_matrix *matrix, uint64_t row, const float *x, size_t x_stride, size_t n_vectors, float *y,
                      size_t y_stride) {
  const struct k3_quant_kernels *kernels = k3_quant_kernels();
  const uint8_t *plain = (const uint8_t *)matrix->weight + row * k3_quant_row_nbytes(&matrix->scheme, matrix->n_cols);
  // One vector alone does not repay the tile's way through memory.
  bool is_direct = matrix->scheme.scheme == K3_SCHEME_BF16 && n_vectors == 1;
  float tile[K3_DOT_TILE];
  for (size_t v = 0; v < n_vectors; v++)
    y[v * y_stride] = 0;
  for (uint64_t col = 0; col < matrix->n_cols; col += K3_DOT_TILE) {
    size_t n_tile = matrix->n_cols - col < K3_DOT_TILE ? (size_t)(matrix->n_cols - col) : K3_DOT_TILE;
    if (is_direct) {
      y[0] += kernels->dot_bf16(plain + 2 * col, x + col, n_tile);
      continue;
    }
    k3_quant_decode_row(matrix, row, col, n_tile, NULL, tile);
    for (size_t v = 0; v < n_vectors; v++)
      y[v * y_stride] += kernels->dot_f32(tile, x + v * x_stride + col, n_tile);
  }
}
