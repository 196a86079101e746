// What engine, session and forward share; embedders see runtime.h only.
#ifndef K3_RUNTIME_ENGINE_H
#define K3_RUNTIME_ENGINE_H

#include "base/file.h"
#include "formats/reduction_plan.h"
#include "runtime/backend.h"
#include "runtime/weights.h"

// Where sums over the ranks are completed: the verified plan, and its steps by their places in the forward. A forward asks here and nowhere else.
struct k3_reductions {
  struct k3_stack stack;
  struct k3_reduction_plan plan;
  const struct k3_flow *embedding, *final_norm;
  const struct k3_flow **input_norm, **post_norm, **o_proj, **down;  // [L]
};

struct k3_engine {
  struct k3_mapping mapping;         // empty when the image is the caller's
  struct k3_image opened;            // likewise
  struct k3_mapping slices_mapping;  // of a folder: the rank's own file
  struct k3_image slices;
  const struct k3_image *image;  // whole, or a folder's shared file
  uint32_t tp_rank, tp_size;
  uint64_t n_heads;              // of this rank
  struct k3_comm *comm;          // NULL with one rank
  struct k3_dspark_model model;  // block_width as asked for
  struct k3_weights weights;
  struct k3_backend *backend;
  struct k3_engine_info info;
  float *inv_freq;  // backend memory [R/2]
  struct k3_rope_table rope;
  float softmax_scale;
  struct k3_reductions reductions;
  struct k3_arena arena;
};

// As k3_engine_open for a whole image that is open already and outlives the engine.
struct k3_engine *k3_engine_open_image(const struct k3_image *image, const struct k3_engine_options *options, struct k3_error *err);

enum { K3_MAX_STEP_NAMES = 16 };
struct k3_session {
  struct k3_engine *engine;
  struct k3_exec *exec;
  struct k3_session_options options;  // defaults filled in
  // Backend memory, in activations unless typed. Rows: n = max_context_rows, q = max_requests * T.
  void *joined, *projected, *context, *kv_rows;      // [n, A*Ht], [n, H], [n, H], [n, L*E]
  void *residual, *normed, *branch;                  // [q, H]
  void *latents, *q_a, *q, *query, *latent, *heads;  // [q, Rq+E], [q, Rq], [q, N*D], [q, N*E], [q, N*Rk], [q, N*Vd]
  void *gate_up, *gated;                             // [q, 2I], [q, I]
  float *base_logits;                                // [q, V]
  float *logits_part, *logits_parts;                 // [q, V / ranks], [q, V]; with one rank NULL
  int64_t *positions, *slots, *n_keys, *ids;         // [q], [q], [max_requests], [q]
  // Of the newest call: mark 0 at its beginning, then one after each step when steps are measured, one at its end.
  struct k3_measure measure;
  struct k3_step_time steps[K3_MAX_STEP_NAMES];
  size_t n_steps;
  unsigned char *mark_steps;  // which of `steps` each mark ends
  size_t mark_steps_capacity, n_marks;
  bool measured;
};

// measure.c: around a call, and after each of its steps.
enum k3_status k3_measure_begin(struct k3_session *session, struct k3_error *err);
enum k3_status k3_measure_end(struct k3_session *session, struct k3_error *err);
bool k3_measure_takes(const struct k3_session *session, const char *step);
enum k3_status k3_measure_step(struct k3_session *session, const char *step, uint64_t weight_nbytes, uint64_t activation_nbytes,
                               struct k3_error *err);

// forward.c: the two passes as lists of steps. Arguments have been checked.
enum k3_status k3_forward_context(struct k3_session *session, const struct k3_cache *cache, const struct k3_context *context, uint64_t first_row,
                                  uint64_t n_rows, struct k3_error *err);
enum k3_status k3_forward_block(struct k3_session *session, const struct k3_cache *cache, const struct k3_draft *draft, struct k3_error *err);

#endif
