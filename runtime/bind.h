// From the tensors of an image to vectors and matrices: presence, shapes, schemes, and the part that a rank takes. Shared by the models of this
// folder.
#ifndef K3_RUNTIME_BIND_H
#define K3_RUNTIME_BIND_H

#include "runtime/weights.h"

struct k3_binder {
  const struct k3_weights_source *source;
  struct k3_arena *arena;  // of the shard lists
  bool all_f32;            // so far every floating tensor that is neither scale nor quantised code was F32
  struct k3_error *err;
  bool repeat_units;  // with more ranks than units (heads) neighbouring ranks take the same one, instead of PCK05
};

// A vector of n plain floats, never cut. IMG01 naming the tensor when it is absent or different.
enum k3_status k3_bind_vector(struct k3_binder *binder, struct k3_vector *vector, uint64_t n, const char *name);
// A module whose rows are those of n_shards siblings one after another, each with scales of its own; this rank's part of it. PCK05 when the part
// would cut a unit or a block of scales, IMG01 when the manifest cuts it in another way than the forward takes it for: the products' widths follow
// from it.
//   whole_rows, whole_cols  of the module, whatever part of it this rank takes
//   n_units                 heads, of which a rank takes whole ones; 0: no such unit
//   tp                      how several ranks share it; what is cut by vocabulary may be whole instead
enum k3_status k3_bind_matrix(struct k3_binder *binder, struct k3_matrix *matrix, const uint64_t *whole_rows, unsigned n_shards, uint64_t whole_cols,
                              uint64_t n_units, enum k3_tp_rule tp, const char *module);

#endif
