// Weights as the backends see them: a matrix is a list of row shards, each with its own address and its own scales, so that stacked siblings,
// views over other tensors and slices of a rank are all the same thing.
#ifndef K3_RUNTIME_MATRIX_H
#define K3_RUNTIME_MATRIX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "quant/scheme.h"

// Rows row .. row + n_rows - 1 of the matrix, in one format.
struct k3_matrix_shard {
  uint64_t row, n_rows;
  struct k3_quant_matrix codes;  // [n_rows, stored columns], addresses in backend memory. Plain weights are schemes without scales
  uint64_t first_col;            // of the stored columns, where the matrix begins: 0 unless a rank holds a slice
  float second;                  // second scale of this shard, acting as codes.scheme.second says
};

struct k3_matrix {
  uint64_t n_rows, n_cols;         // [out, in]; y = x * W^T
  struct k3_matrix_shard *shards;  // [n_shards], in order of rows, no gap
  unsigned n_shards;               // 0: the matrix is absent
};

struct k3_vector {
  const void *data;     // backend memory; NULL: absent
  enum k3_dtype dtype;  // BF16, F16 or F32
  uint64_t n;
};

// Shard that holds row `row` (< n_rows).
static inline const struct k3_matrix_shard *k3_matrix_shard_of(const struct k3_matrix *matrix, uint64_t row) {
  const struct k3_matrix_shard *shard = matrix->shards;
  while (row - shard->row >= shard->n_rows)
    shard++;
  return shard;
}

// Bytes of one row of a shard that a product reads, codes only; and of the whole matrix with its block scales.
uint64_t k3_matrix_row_nbytes(const struct k3_matrix *matrix, const struct k3_matrix_shard *shard);
uint64_t k3_matrix_nbytes(const struct k3_matrix *matrix);

#endif
