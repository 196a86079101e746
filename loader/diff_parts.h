// Between the two files of the comparison: under which names the tensors of each side are compared.
#ifndef K3_LOADER_DIFF_PARTS_H
#define K3_LOADER_DIFF_PARTS_H

#include "loader/diff.h"

// A tensor, or rows of one, under the name by which it is compared.
struct k3_diff_entry {
  const char *name;
  uint64_t tensor;
  uint64_t first_elem, n_elems;  // within it
  const uint64_t *shape;
  uint8_t rank;
};

struct k3_diff_side {
  const struct k3_ckpt *ckpt;
  struct k3_diff_entry *entries;  // sorted by name
  size_t n_entries, capacity;
  struct k3_arena *arena;  // for shapes of rows
};

// Every tensor under its own name; of an image not those that begin with "__". entries is to be empty before and freed with k3_free.
enum k3_status k3_diff_own_names(struct k3_diff_side *side, struct k3_error *err);
// The tensors of an image under the names that a checkpoint has for them: rows of stacked tensors under their source's name, copied tensors under the
// checkpoint's name for them, others under their own. What came from a target is left out.
enum k3_status k3_diff_source_names(struct k3_diff_side *image, const struct k3_ckpt *checkpoint, struct k3_error *err);

#endif
