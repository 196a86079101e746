// The CUDA backend's own structs. A call of the session (append or draft) is recorded as a list of launches with all their arguments; `end` replays
// the graph that was captured from an equal list, or captures one. Nothing of a step is decided on the device's results, so the list is all there is.
#ifndef K3_RUNTIME_CUDA_CUDA_H
#define K3_RUNTIME_CUDA_CUDA_H

#include "base/progress.h"
#include "runtime/backend.h"
#include "runtime/cuda/gemm.h"
#include "runtime/cuda/kernels.h"
#include "runtime/cuda/peers.h"
#include "runtime/cuda_loader.h"
#include "runtime/weights.h"

enum {
  K3_CUDA_MAX_GRAPHS = 16,              // kept per session; the one that was not used for longest goes first
  K3_CUDA_MAX_GRAPH_ROWS = 64,          // an append of more rows is launched as it is: its shapes do not come back
  K3_CUDA_MAX_PANEL_NBYTES = 64 << 20,  // of dequantised rows at a time
};

struct k3_cuda_backend {
  struct k3_backend base;
  int device, n_processors, tp_rank, tp_size;
  struct k3_comm *comm;
  cudaStream_t stream;  // of uploads and loading
  void **arenas;        // weights
  size_t n_arenas, arenas_capacity;
  struct k3_cuda_gemm_library *gemm;
};

// How sums over the ranks are completed: by their size, or as the variable K3PACK_SUMS says.
enum k3_cuda_sums { K3_CUDA_SUMS_AUTO, K3_CUDA_SUMS_ONE_SHOT, K3_CUDA_SUMS_TWO_SHOT, K3_CUDA_SUMS_EXPLICIT };

struct k3_cuda_graph {
  unsigned char *launches;  // the recorded list
  size_t nbytes;
  cudaGraphExec_t exec;
  uint64_t last_use;
};

struct k3_exec {
  struct k3_cuda_backend *backend;
  struct k3_exec_options options;
  cudaStream_t stream;  // where the caller names none, and for capturing
  // The list of this call: per launch a header and its params, all padding zero, so that equal lists are equal bytes.
  unsigned char *launches;
  size_t nbytes, capacity;
  size_t last_launch;  // where the params of the newest launch begin
  uint64_t max_rows;   // of its context steps
  struct k3_cuda_graph graphs[K3_CUDA_MAX_GRAPHS];
  uint64_t n_calls;
  uint64_t *refused;  // pinned host memory: what a kernel found wrong (enum k3_cuda_refusal)
  // Device scratch.
  struct k3_cuda_maximum *maxima;  // [max_requests, vocabulary chunks]
  uint32_t *tickets;               // [max_requests]
  float *partial_latents, *partial_sums;
  size_t partial_latents_nbytes, partial_sums_nbytes;
  void *panel;  // dequantised rows for the library's product
  size_t panel_nbytes;
  struct k3_cuda_peers *peers;  // NULL with one rank
  enum k3_cuda_sums sums;       // as asked for
  float *gathered;              // every rank's part of the logits, when the library brings them
  size_t gathered_nbytes;
  uint64_t half_nbytes;  // the window: two halves that sums take in turns, then the rank's logits
  unsigned n_sums;       // which half is next: its last bit
  // Measurements.
  cudaEvent_t *marks;
  size_t n_marks, marks_capacity;
  void *chilled;  // what takes the place of everything in the device's cache
  size_t chilled_nbytes;
};

// Says which device call failed; memory failures with what was needed and what is free. Returns K3_OK for cudaSuccess.
enum k3_status k3_cuda_check(cudaError_t error, const char *what, struct k3_error *err);
// cudaMalloc with the sizes in the error.
enum k3_status k3_cuda_alloc(size_t nbytes, void **memory, struct k3_error *err);
// Makes the backend's device the calling thread's.
enum k3_status k3_cuda_use(const struct k3_cuda_backend *backend, struct k3_error *err);

// place.c
enum k3_status k3_cuda_place(struct k3_backend *backend, struct k3_weights *weights, struct k3_progress *progress, struct k3_load *load,
                             struct k3_error *err);

// exec.c
enum k3_status k3_cuda_exec_create(struct k3_backend *backend, const struct k3_exec_options *options, struct k3_exec **exec, struct k3_error *err);
void k3_cuda_exec_destroy(struct k3_exec *exec);
enum k3_status k3_cuda_begin(struct k3_exec *exec, void *stream, struct k3_error *err);
enum k3_status k3_cuda_end(struct k3_exec *exec, void *stream, struct k3_error *err);
void k3_cuda_exec_sums(const struct k3_exec *exec, const char **how, const char **why);
// Device scratch of at least nbytes; growing waits for what is running. Launches of the current list may not refer to what it replaces.
enum k3_status k3_cuda_grow(void *memory_ptr, size_t *capacity, size_t nbytes, struct k3_error *err);

// X(name): one kind of launch, struct k3_cuda_<name> and k3_cuda_launch_<name>.
#define K3_CUDA_LAUNCHES(X) \
  X(linear)                 \
  X(dequantise)             \
  X(gemm)                   \
  X(join) X(add_norm) X(insert) X(begin) X(gate) X(export) X(absorb) X(attention) X(markov) X(reduce) X(gather) X(all_reduce) X(all_gather) X(mark)
enum k3_cuda_launch_kind {
#define K3_CUDA_LAUNCH_ENUM(name) K3_CUDA_LAUNCH_##name,
  K3_CUDA_LAUNCHES(K3_CUDA_LAUNCH_ENUM)
#undef K3_CUDA_LAUNCH_ENUM
};
// Appends a launch with zeroed params, to be filled field by field (a struct's copy would bring its padding); NULL and *err when memory fails. The
// address is good until the next call.
void *k3_cuda_record(struct k3_exec *exec, enum k3_cuda_launch_kind kind, size_t nbytes, struct k3_error *err);

// measure.c
struct k3_cuda_mark {
  cudaEvent_t event;
};
cudaError_t k3_cuda_launch_mark(const struct k3_cuda_mark *p, cudaStream_t stream);
enum k3_status k3_cuda_mark_step(struct k3_exec *exec, size_t index, struct k3_error *err);
enum k3_status k3_cuda_elapsed(struct k3_exec *exec, size_t first, size_t last, double *seconds, struct k3_error *err);
enum k3_status k3_cuda_chill(struct k3_exec *exec, void *stream, struct k3_error *err);
enum k3_status k3_cuda_bandwidth(struct k3_exec *exec, double *bytes_per_second, struct k3_error *err);

// steps.c
#define K3_CUDA_STEP(step) enum k3_status k3_cuda_##step(struct k3_exec *exec, const struct k3_##step *p, struct k3_error *err);
K3_BACKEND_STEPS(K3_CUDA_STEP)
#undef K3_CUDA_STEP

// describe.c: host descriptions to those of kernels, into zeroed memory. K3_UNSUPPORTED for a scheme that no kernel reads.
enum k3_status k3_cuda_describe_matrix(const struct k3_matrix *matrix, unsigned first_shard, struct k3_cuda_matrix *dst, struct k3_error *err);
void k3_cuda_describe_vector(const struct k3_vector *vector, struct k3_cuda_vector *dst);
void k3_cuda_describe_cache(const struct k3_cache *cache, uint64_t layer, struct k3_cuda_cache *dst);
void k3_cuda_describe_rope(const struct k3_rope_table *rope, struct k3_cuda_rope *dst);
enum k3_cuda_float k3_cuda_float_of(enum k3_dtype dtype);

#endif
