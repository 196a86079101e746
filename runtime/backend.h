// What a backend is: memory, weights brought to it, and the fused steps of the forward (runtime/steps.h). The forward (runtime/forward.c) is written
// once over this table.
#ifndef K3_RUNTIME_BACKEND_H
#define K3_RUNTIME_BACKEND_H

#include "runtime/comm.h"
#include "runtime/steps.h"

struct k3_exec;  // one session's threads and scratch, or its stream state and graphs; each backend defines its own

struct k3_exec_options {
  uint64_t max_rows, max_requests, max_keys;                           // of one step
  uint64_t block_width, row_width, max_cols, vocab_size, markov_rank;  // T, E, the widest matrix row, V, r
  int n_threads;
  struct k3_comm *comm;          // of the rank; NULL with one rank
  struct k3_progress *progress;  // bytes of weights are added as they are read; may be NULL
};

struct k3_load {
  uint64_t nbytes;      // of weights
  unsigned most_reads;  // that were under way at a time
};

struct k3_backend;
struct k3_moe_ops;
struct k3_weights;
struct k3_backend_ops {
  void (*destroy)(struct k3_backend *backend);
  enum k3_status (*alloc)(struct k3_backend *backend, size_t nbytes, void **memory, struct k3_error *err);  // zeroed
  void (*release)(struct k3_backend *backend, void *memory);
  // Host bytes to backend memory (setting up, not in a step).
  enum k3_status (*upload)(struct k3_backend *backend, void *dst, const void *src, size_t nbytes, struct k3_error *err);
  // Backend memory to host bytes, when every step that was begun before is done.
  enum k3_status (*download)(struct k3_backend *backend, void *dst, const void *src, size_t nbytes, struct k3_error *err);
  // (optional) Brings the weights to the device and says in *load what that took: replaces every address of shards and vectors. NULL: they are used
  // where they lie.
  enum k3_status (*place)(struct k3_backend *backend, struct k3_weights *weights, struct k3_progress *progress, struct k3_load *load,
                          struct k3_error *err);
  enum k3_status (*exec_create)(struct k3_backend *backend, const struct k3_exec_options *options, struct k3_exec **exec, struct k3_error *err);
  void (*exec_destroy)(struct k3_exec *exec);
  // (optional) Around the steps of one append or draft, for a backend that records them once and replays them. Both may fail with what a step found
  // wrong in its inputs (positions, slots, anchors, block tables: K3_BAD_ARGUMENT as from the step of a backend that sees them, see
  // k3_session_append).
  enum k3_status (*begin)(struct k3_exec *exec, void *stream, struct k3_error *err);
  enum k3_status (*end)(struct k3_exec *exec, void *stream, struct k3_error *err);
#define K3_BACKEND_STEPS(X) \
  X(combine) X(context_insert) X(block_begin) X(reduce_add_norm) X(latents) X(query) X(attend) X(project) X(mlp) X(logits) X(markov) X(export)
#define K3_BACKEND_STEP(step) enum k3_status (*step)(struct k3_exec * exec, const struct k3_##step *params, struct k3_error *err);
  K3_BACKEND_STEPS(K3_BACKEND_STEP)
#undef K3_BACKEND_STEP
  // For measurements (k3_measure). `mark` stands among the steps of one append or draft: when they are carried out, the time is noted as number
  // `index`.
  enum k3_status (*mark)(struct k3_exec *exec, size_t index, struct k3_error *err);
  // Seconds between two marks, when everything that was begun is done.
  enum k3_status (*elapsed)(struct k3_exec *exec, size_t first, size_t last, double *seconds, struct k3_error *err);
  // (optional) Overwrites the device's caches, in the stream of the next call.
  enum k3_status (*chill)(struct k3_exec *exec, void *stream, struct k3_error *err);
  // As k3_session_bandwidth.
  enum k3_status (*bandwidth)(struct k3_exec *exec, double *bytes_per_second, struct k3_error *err);
  // (optional) As k3_session_sums. NULL: by the ranks' communicator.
  void (*sums)(const struct k3_exec *exec, const char **how, const char **why);
  const struct k3_moe_ops *moe;  // (optional) steps of the decoder layers (runtime/moe_steps.h); NULL: the backend has none
};

struct k3_backend {
  const char *name;
  enum k3_memory memory;
  size_t act_nbytes;  // of one activation
  bool bf16;          // activations are rounded to BF16
  const struct k3_backend_ops *ops;
};

// The CPU backend. NULL and *err on failure; ends with ops->destroy.
struct k3_backend *k3_cpu_backend_create(bool bf16, struct k3_error *err);

#endif
