// What the ranks share: a window of device memory that every rank has at the same offsets and that all can read, and the kernels over it. Behind it
// stands NCCL (symmetric windows and its device API); the tests' simulator exchanges plain addresses.
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
// NCCL or the devices cannot reach one another; NULL and *err on failure.
struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, struct k3_error *err);
void k3_cuda_peers_destroy(struct k3_cuda_peers *peers);
void *k3_cuda_peers_window(const struct k3_cuda_peers *peers);  // this rank's own part

enum { K3_CUDA_MAX_RANKS = 16, K3_CUDA_PEER_BLOCKS = 32 };  // blocks of a kernel that waits for its like on the other ranks

// reduce.cu: the ranks' F32 parts [n, width] at window_offset, summed in rank order and rounded; then residual += sum and out = rms(residual) * gain,
// or, without residual, out = sum. Two calls in a row must use different offsets: the ranks wait for one another once per call, before they read.
struct k3_cuda_reduce {
  const struct k3_cuda_peers *peers;
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
  uint64_t window_offset;
  float *out;
  uint32_t n_rows, part_width;
  float scale;
};
cudaError_t k3_cuda_launch_gather(const struct k3_cuda_gather *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
