// Between the files of loader/requantise.h; nobody else includes this.
#ifndef K3_LOADER_REQUANTISE_PARTS_H
#define K3_LOADER_REQUANTISE_PARTS_H

#include "loader/requantise.h"

enum { K3_REQUANT_CHUNK_ELEMS = 256 << 10 };  // a multiple of every group

// Statistics of the elements of an item from first_elem on that one call of k3_requant_encode made.
struct k3_requant_part {
  size_t item;
  uint64_t first_elem;
  struct k3_snr snr;
  struct k3_nvfp4_window window, own_window;
};

// Elements from `elem` on that lie in one row and have one FP8 scale, whose number is *region. Other schemes: all that follow, region 0.
static inline uint64_t k3_requant_run(const struct k3_requant *requant, const struct k3_requant_item *item, uint64_t elem, uint64_t *region) {
  uint64_t row = elem / item->n_cols, col = elem % item->n_cols;
  *region = row;
  if (requant->scheme.scheme == K3_SCHEME_FP8_CHANNEL)
    return item->n_cols - col;
  *region = 0;
  if (requant->scheme.scheme != K3_SCHEME_FP8_BLOCK)
    return UINT64_MAX;
  uint64_t rows = requant->scheme.block_rows, cols = requant->scheme.block_cols, left = item->n_cols - col, in_block = cols - col % cols;
  *region = row / rows * ((item->n_cols + cols - 1) / cols) + col / cols;
  return in_block < left ? in_block : left;
}

static inline const struct k3_ckpt *k3_requant_ckpt(const struct k3_plan *plan, const struct k3_requant_item *item) {
  return item->of_target ? plan->target : plan->ckpt;
}

#endif
