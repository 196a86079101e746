// What the files of the decoder layers share.
#ifndef K3_RUNTIME_MOE_PARTS_H
#define K3_RUNTIME_MOE_PARTS_H

#include "runtime/moe.h"
#include "runtime/moe_steps.h"

#define K3_MOE_FINAL_NORM "model.norm"

// moe_weights.c: layers, norms, head counts and bf16 of *moe, whose plan says which experts a rank holds whole.
enum k3_status k3_moe_bind(struct k3_moe *moe, const struct k3_weights_source *source, struct k3_error *err);
// "model.layers.3", or the name of a prediction block.
void k3_moe_layer_name(const struct k3_moe_model *model, uint64_t layer, char *dst, size_t capacity);

// One run: rows sorted by request and position, and what the steps leave behind.
struct k3_moe_pass {
  struct k3_moe *moe;
  const struct k3_moe_rows *rows;
  struct k3_exec *exec;
  uint64_t n_rows, longest;         // longest: keys that the last row of the longest request sees
  uint64_t *order;                  // [n] host: place of row i in the input
  int64_t *positions, *first_keys;  // [n]
  bool has_branch;                  // `branch` waits to be added to the stream
  // Of rows that are shared out, this rank has [own_first, own_first + n_own): n_each of them, or fewer where the rows do not divide. Buffers hold
  // size * n_each rows, the padding zero.
  uint64_t n_each, own_first, n_own;
  bool stream_on_rows, branch_on_rows;  // only the own rows of `residual`, `branch` are what they say
  // Backend memory, [n and padding, width].
  void *residual, *normed, *branch, *copy;    // H
  void *q, *k, *v, *heads;                    // of this rank's heads
  void *projected, *q_a, *latent, *expanded;  // latent attention
  void *gate_up_rows, *gated, *gathered, *contribution;
  void *logits, *weights, *experts;  // F32 [n, X], F32 [n, K], I32 [n, K]
};

// moe_forward.c: executes the plan. The pass is set up and its arguments are checked.
enum k3_status k3_moe_forward(struct k3_moe_pass *pass, struct k3_error *err);

#endif
