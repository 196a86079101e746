// Decoder layers of MiniMax-M3 and DeepSeek-V3.2 on given hidden states: whole requests at once, without a cache. Attention is dense, which is exact
// as long as no query sees more keys than the sparse attention would select; longer requests are refused.
//
// Partial sums of tensor parallelism are completed where the verified reduction plan says: a run executes the plan's steps in order and knows of no
// other reduction. The request of a plan (stages, taps, kernels that return whole sums) and what it comes to are told apart: what counts is the
// plan's own step.
#ifndef K3_RUNTIME_MOE_H
#define K3_RUNTIME_MOE_H

#include "base/progress.h"
#include "formats/image.h"
#include "formats/moe_model.h"
#include "formats/reduction_plan.h"
#include "runtime/backend.h"
#include "runtime/weights.h"

struct k3_moe_options {
  uint64_t first_layer, n_layers;  // the range; layers from the model's n_layers on are prediction blocks, alone
  uint32_t tp_rank, tp_size;       // size 0 means 1
  struct k3_comm *comm;            // of the rank, outlives the layers; NULL with one rank
  uint32_t pp;                     // stages that the range's layers are shared out to; 0 means 1. One process runs all of them
  enum k3_border_rule border;
  enum k3_tap_rule tap;
  const uint64_t *taps;  // [n_taps] tap k: the residual stream after k layers of the model, first_layer .. first_layer + n_layers
  size_t n_taps;
  // Experts work on a rank's own rows, if the plan allows it (several ranks, one stage): the attention's sum is scattered by rows, norms and experts
  // take their share of them, and what the next attention reads is gathered. Every rank then holds the experts whole, of a whole image.
  bool sequence_parallel;
  bool whole_moe;                // the experts' kernel returns whole sums, as one with all-to-all does
  int n_threads;                 // 0: one per CPU. Results do not depend on it
  struct k3_progress *progress;  // weight bytes read; may be NULL
};

struct k3_moe_layer {
  struct k3_vector input_norm, post_norm;  // [H]
  struct k3_vector q_norm, k_norm;         // grouped-query: [D]
  struct k3_matrix q_proj, k_proj, v_proj;
  struct k3_vector q_a_norm, kv_a_norm;  // latent: [Rq], [Rk]
  struct k3_matrix qkv_a, q_b, kv_b;
  struct k3_matrix o_proj;
  struct k3_matrix gate_up, down;                  // dense, or the shared experts
  struct k3_matrix router;                         // [X, H]; absent in a dense layer
  struct k3_vector bias;                           // [X]
  struct k3_matrix *expert_gate_up, *expert_down;  // [X]
};

struct k3_moe {
  struct k3_moe_model model;
  struct k3_moe_options options;  // defaults filled in; taps are the layers' own copy
  struct k3_moe_layer *layers;    // [n_layers of the range]
  struct k3_vector final_norm;    // when the range ends with the model's last layer (or a prediction block that has one), else absent
  uint64_t n_heads, n_kv_heads;   // of this rank
  bool bf16;                      // activations
  float *inv_freq;
  struct k3_rope_table rope;
  float softmax_scale;
  struct k3_stack stack;
  struct k3_reduction_plan plan;  // layers counted from the range's first
  struct k3_backend *backend;
  struct k3_arena arena;
};

// Derives and verifies the plan and binds the range's layers from an image (IMG01, PCK05). The images outlive the layers. K3_BAD_ARGUMENT: a range or
// a tap outside the model. K3_UNSUPPORTED: sequence parallel experts of a folder that has them cut. NULL and *err on failure.
struct k3_moe *k3_moe_open(const struct k3_weights_source *source, const struct k3_moe_options *options, struct k3_error *err);
void k3_moe_free(struct k3_moe *moe);  // NULL is a no-op

// Whether the input norm of a layer of the model completes its predecessor's sum, as the plan has it ("fuse_input_allreduce").
bool k3_moe_fuses_input(const struct k3_moe *moe, uint64_t layer);

// Rows in any order, each request's positions 0, 1, .. without a gap.
struct k3_moe_rows {
  uint64_t n_rows;
  struct k3_array hidden;                  // [n, H] F32 or BF16, host
  struct k3_array residual;                // optional (data NULL): [n, H]; the stream that `hidden` is yet to be added to
  const int64_t *positions, *request_ids;  // [n]
  // Out, host F32, rows in the input's order; each may be NULL.
  float *out_hidden;       // [n, H] what the last layer adds, complete
  float *out_residual;     // [n, H] the stream before it is added
  float *out_final;        // [n, H] the final norm's output; only where final_norm is there
  float *const *out_taps;  // [n_taps] of [n, H]; ranks other than 0 may pass NULL buffers inside too
};
// K3_BAD_INPUT naming request and row: a position that is missing, doubled or beyond the limit. K3_UNSUPPORTED: a query sees more keys than dense
// attention is exact for. All ranks make the same call. On failure the outputs are unspecified.
enum k3_status k3_moe_run(struct k3_moe *moe, const struct k3_moe_rows *rows, struct k3_error *err);

#endif
