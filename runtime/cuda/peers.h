// What the ranks share: a window of device memory that every rank has at the same offsets, and the sums over it. Where kernels can read the other
// ranks' windows (NCCL's symmetric windows and its device API), a sum is one kernel with the norm that it was deferred to; where they cannot, the
// library's all-reduce comes before that kernel. The tests' simulator exchanges plain addresses, or lets the communicator add.
#ifndef K3_RUNTIME_CUDA_PEERS_H
#define K3_RUNTIME_CUDA_PEERS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "runtime/cuda/kernels.h"

struct k3_comm;
struct k3_error;
struct k3_cuda_peers;  // of one rank

#ifdef __cplusplus
extern "C" {
#endif

// Collective: a window of nbytes on every rank. `comm` carries what has to be told to the other ranks once. K3_UNSUPPORTED when this build has no
// NCCL; NULL and *err on failure.
//   reach  whether kernels are to reach the windows of the others; when that cannot be, on any rank, it is so on none, and why_not says the reason
struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, bool reach, struct k3_error *err);
void k3_cuda_peers_destroy(struct k3_cuda_peers *peers);
void *k3_cuda_peers_window(const struct k3_cuda_peers *peers);  // this rank's own part
// NULL when kernels reach the windows of the others. The text lives as long as the peers.
const char *k3_cuda_peers_why_not(const struct k3_cuda_peers *peers);

enum { K3_CUDA_MAX_RANKS = 16, K3_CUDA_PEER_BLOCKS = 32 };  // whom kernels reach; blocks of a kernel that waits for its like on the other ranks

// How kernels complete a sum. ONE_SHOT: every rank reads every rank's part. TWO_SHOT: a row's owner (row % ranks) reads all parts of it, the others
// read what it made of them: less to read, one more wait. DONE: the window holds the sum already.
enum k3_cuda_shots { K3_CUDA_ONE_SHOT, K3_CUDA_TWO_SHOT, K3_CUDA_DONE };

// reduce.cu: the ranks' F32 parts [n, width] at window_offset (a multiple of 16), summed in rank order and rounded; then residual += sum and out =
// rms(residual) * gain, or, without residual, out = sum. Two calls in a row must use different offsets: the ranks wait for one another before they
// read, not afterwards. In two shots the parts do not outlast the call.
struct k3_cuda_reduce {
  const struct k3_cuda_peers *peers;
  enum k3_cuda_shots shots;
  uint64_t window_offset;
  void *residual, *out;
  struct k3_cuda_vector gain;
  uint32_t n_rows, width;
  float eps;
  bool bf16;
};
cudaError_t k3_cuda_launch_reduce(const struct k3_cuda_reduce *p, cudaStream_t stream);

// The ranks' F32 parts [n, part_width] at window_offset side by side: out [n, ranks * part_width], times scale.
struct k3_cuda_gather {
  const struct k3_cuda_peers *peers;
  const float *parts;  // [ranks, n, part_width] when they have been brought here; NULL: they are read from the windows
  uint64_t window_offset;
  float *out;
  uint32_t n_rows, part_width;
  float scale;
};
cudaError_t k3_cuda_launch_gather(const struct k3_cuda_gather *p, cudaStream_t stream);

// The library's own, for windows that kernels do not reach. values [n] of the window at window_offset: the F32 sum over the ranks, in place.
struct k3_cuda_all_reduce {
  const struct k3_cuda_peers *peers;
  uint64_t window_offset, n;
};
cudaError_t k3_cuda_launch_all_reduce(const struct k3_cuda_all_reduce *p, cudaStream_t stream);

// dst [ranks, n]: every rank's n floats of its window at window_offset.
struct k3_cuda_all_gather {
  const struct k3_cuda_peers *peers;
  uint64_t window_offset, n;
  float *dst;
};
cudaError_t k3_cuda_launch_all_gather(const struct k3_cuda_all_gather *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
