// Slices of tensor parallelism: which rows or columns of a weight a rank holds. An extent is cut into equal parts, in order of the ranks, and no part
// may cut an attention head or a block of weights that share a scale: NVFP4 16, MX 32 and FP8 128 columns, FP8 also 128 rows.
#ifndef K3_QUANT_SLICE_H
#define K3_QUANT_SLICE_H

#include <stdint.h>

#include "base/error.h"
#include "quant/scheme.h"

struct k3_slice {
  uint64_t first, n;
};

// Part `rank` of `tp` of `extent` rows or columns.
//   n_units  parts that stay whole (heads); 0: none
//   block    rows or columns that share a scale; 0 or 1: none
//   tensor, what  for the message ("rows" or "columns")
// PCK05 with K3_UNSUPPORTED, naming the ranks that would work, when a part would cut a unit or a block.
enum k3_status k3_slice_of(uint64_t extent, uint64_t n_units, uint64_t block, uint32_t tp, uint32_t rank, const char *tensor, const char *what,
                           struct k3_slice *slice, struct k3_error *err);

// With more ranks than key heads, neighbouring ranks hold the same one: turns tp and rank into those of the n_units slices that there are, when tp is
// a multiple of n_units (not 0), else leaves them.
static inline void k3_slice_repeat(uint64_t n_units, uint32_t *tp, uint32_t *rank) {
  if (n_units > 0 && *tp > n_units && *tp % n_units == 0) {
    *rank /= *tp / (uint32_t)n_units;
    *tp = (uint32_t)n_units;
  }
}

// The rows of a slice as a matrix of their own, in place: weight and scale move to its first row, which begins at a block's edge. (A slice of columns
// keeps its rows as far apart as they are; decoders take a first column.) int-packed: rows with zero points are not supported.
void k3_slice_rows(struct k3_quant_matrix *matrix, const struct k3_slice *slice);

#endif
