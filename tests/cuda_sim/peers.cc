// The ranks' windows as plain memory: threads of one process tell one another their addresses. Ranks that are processes share no memory, nor do
// kernels reach it where a test asks for that; the ranks' communicator then adds up, as the library would.
#include <stdio.h>
#include <unistd.h>

#include "cuda_sim_internal.h"

#define cudaLaunchKernelEx cuda_sim::launch_kernel
#include "runtime/cuda/peers.cuh"

extern "C" {
#include "base/alloc.h"
#include "base/error.h"
#include "runtime/comm.h"
}

constexpr size_t kArrivalsNbytes = sizeof(uint32_t) * K3_CUDA_PEER_BLOCKS * (K3_CUDA_MAX_RANKS + 1);

// Everybody's address (or number), by rank.
static bool tell(struct k3_comm *comm, const char *what, void *mine, void **all, struct k3_error *err) {
  return comm->ops->all_gather(comm, what, &mine, sizeof mine, all, nullptr, err) == K3_OK;
}

static bool of_one_process(struct k3_cuda_peers *peers, struct k3_error *err) {
  void *all[K3_CUDA_MAX_RANKS], *mine = reinterpret_cast<void *>(static_cast<uintptr_t>(getpid()));
  if (!tell(peers->comm, "processes", mine, all, err))
    return false;
  bool one = true;
  for (int r = 0; r < peers->device.size; r++)
    one &= all[r] == mine;
  if (peers->reach && !one)
    snprintf(peers->why_not, sizeof peers->why_not, "the simulator's ranks are processes, which share no memory");
  peers->reach &= one;
  return true;
}

static bool exchange(struct k3_cuda_peers *peers, struct k3_error *err) {
  void *all[2][K3_CUDA_MAX_RANKS];
  if (!tell(peers->comm, "windows", peers->window, all[0], err) || !tell(peers->comm, "arrivals", peers->arrivals, all[1], err))
    return false;
  for (int r = 0; r < peers->device.size; r++) {
    peers->device.windows[r] = static_cast<unsigned char *>(all[0][r]);
    peers->device.arrivals[r] = static_cast<uint32_t *>(all[1][r]);
  }
  return true;
}

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, bool reach, struct k3_error *err) {
  k3_cuda_peers *peers = static_cast<k3_cuda_peers *>(k3_calloc(1, sizeof *peers, err));
  if (!peers)
    return nullptr;
  void *arrivals = nullptr;
  peers->device.rank = comm->rank;
  peers->device.size = comm->size;
  peers->comm = comm;
  peers->reach = reach;
  if (!reach)
    snprintf(peers->why_not, sizeof peers->why_not, "asked for by K3PACK_SUMS");
  if (cudaMalloc(&peers->window, nbytes) != cudaSuccess || cudaMalloc(&arrivals, kArrivalsNbytes) != cudaSuccess)
    return nullptr;
  peers->arrivals = static_cast<uint32_t *>(arrivals);
  memset(arrivals, 0, kArrivalsNbytes);
  if (!of_one_process(peers, err) || (peers->reach && !exchange(peers, err))) {
    k3_cuda_peers_destroy(peers);
    return nullptr;
  }
  return peers;
}

// Nobody lets go of a window that another rank may still read.
extern "C" void k3_cuda_peers_destroy(struct k3_cuda_peers *peers) {
  if (!peers)
    return;
  void *all[K3_CUDA_MAX_RANKS];
  tell(peers->comm, "windows closed", peers->window, all, nullptr);
  cudaFree(peers->window);
  cudaFree(peers->arrivals);
  k3_free(peers);
}

static cudaError_t collect(k3_status status, const k3_error &error) {
  if (status != K3_OK)
    fprintf(stderr, "cuda_sim: %s\n", error.found);
  return status == K3_OK ? cudaSuccess : cudaErrorLaunchFailure;
}

extern "C" cudaError_t k3_cuda_launch_all_reduce(const struct k3_cuda_all_reduce *p, cudaStream_t stream) {
  const k3_cuda_all_reduce copy = *p;
  return cuda_sim::queue(stream, [copy] {
    k3_error error = {};
    float *values = reinterpret_cast<float *>(static_cast<unsigned char *>(copy.peers->window) + copy.window_offset);
    return collect(copy.peers->comm->ops->all_reduce(copy.peers->comm, "the library's all-reduce", values, copy.n, nullptr, &error), error);
  });
}

extern "C" cudaError_t k3_cuda_launch_all_gather(const struct k3_cuda_all_gather *p, cudaStream_t stream) {
  const k3_cuda_all_gather copy = *p;
  return cuda_sim::queue(stream, [copy] {
    k3_error error = {};
    const void *values = static_cast<unsigned char *>(copy.peers->window) + copy.window_offset;
    return collect(
        copy.peers->comm->ops->all_gather(copy.peers->comm, "the library's all-gather", values, copy.n * sizeof(float), copy.dst, nullptr, &error),
        error);
  });
}
