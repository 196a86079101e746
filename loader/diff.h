// What differs between two checkpoints, two images, or a checkpoint and an image.
//
// Two checkpoints and two images are compared tensor by tensor under their own names. A checkpoint and an image are compared under the checkpoint's
// names: the image's manifest says which rows of which stacked tensor each of them became. Tensors whose names begin with "__" (manifest, digests,
// pads, sources) are not compared.
#ifndef K3_LOADER_DIFF_H
#define K3_LOADER_DIFF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/progress.h"
#include "loader/ckpt.h"

enum k3_diff_kind {
  K3_DIFF_ONLY_A,
  K3_DIFF_ONLY_B,
  K3_DIFF_SHAPE,   // nothing else is known then
  K3_DIFF_DTYPE,   // other types, and values that differ as the rest of the struct says
  K3_DIFF_VALUES,  // same type, other bits
  K3_DIFF_MODEL,   // of two images: the geometry in the manifests; no tensor
};

struct k3_diff_item {
  enum k3_diff_kind kind;
  const char *name;                  // lives as long as the checkpoints
  const struct k3_st_tensor *a, *b;  // the tensors they are in, NULL when absent
  const uint64_t *shape;             // [rank] of what was compared
  unsigned rank;
  bool numeric;                   // the members below are filled
  bool exceeds;                   // more than the tolerance, or not comparable: this item makes the answer "no"
  uint64_t n_elems, n_different;  // elements whose bits (for other types: values) differ
  uint64_t first;                 // number of the first of them, row-major
  uint64_t first_bits_a, first_bits_b;
  double first_a, first_b;
  double max_error;  // largest |a - b| over elements that are numbers on both sides
  uint64_t max_at;
  uint64_t n_not_number;  // elements that are NaN on one side, or Inf on one
  double cosine, snr_db;  // of b against a; Inf where the error is 0, NaN where a is 0
};

struct k3_diff_options {
  bool has_tolerance;  // false: bits count
  double tolerance;    // differences of at most this are within it
  int n_threads;
  struct k3_progress *progress;
};

struct k3_diff_result {
  bool by_source_name;         // a checkpoint against an image
  uint64_t n_a, n_b;           // tensors on each side
  uint64_t n_equal;            // to the bit
  uint64_t n_within;           // items that differ, but do not exceed
  struct k3_diff_item *items;  // [n_items], by name
  size_t n_items, capacity;
  struct k3_arena arena;  // shapes of rows
};

// Compares. K3_OK also when they differ: the items tell. Reads both sides whole in pieces; memory: 8 MiB a thread and about 150 bytes a tensor. The
// result does not depend on the number of threads. On failure *result is empty; free it with k3_diff_free otherwise.
enum k3_status k3_diff(const struct k3_ckpt *a, const struct k3_ckpt *b, const struct k3_diff_options *options, struct k3_diff_result *result,
                       struct k3_error *err);
void k3_diff_free(struct k3_diff_result *result);

#endif
