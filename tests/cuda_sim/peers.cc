// The ranks' windows as plain memory: threads of one process tell one another their addresses.
#include "cuda_sim_internal.h"

#define cudaLaunchKernelEx cuda_sim::launch_kernel
#include "runtime/cuda/peers.cuh"

extern "C" {
#include "base/alloc.h"
#include "base/error.h"
#include "runtime/comm.h"
}

constexpr size_t kArrivalsNbytes = sizeof(uint32_t) * K3_CUDA_PEER_BLOCKS * (K3_CUDA_MAX_RANKS + 1);

// Everybody's address, by rank.
static bool tell(struct k3_comm *comm, const char *what, void *mine, void **all, struct k3_error *err) {
  return comm->ops->all_gather(comm, what, &mine, sizeof mine, all, nullptr, err) == K3_OK;
}

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, struct k3_error *err) {
  k3_cuda_peers *peers = static_cast<k3_cuda_peers *>(k3_calloc(1, sizeof *peers, err));
  if (!peers)
    return nullptr;
  void *arrivals = nullptr, *all[2][K3_CUDA_MAX_RANKS];
  peers->device.rank = comm->rank;
  peers->device.size = comm->size;
  peers->comm = comm;
  if (cudaMalloc(&peers->window, nbytes) != cudaSuccess || cudaMalloc(&arrivals, kArrivalsNbytes) != cudaSuccess)
    return nullptr;
  peers->arrivals = static_cast<uint32_t *>(arrivals);
  memset(arrivals, 0, kArrivalsNbytes);
  if (!tell(comm, "windows", peers->window, all[0], err) || !tell(comm, "arrivals", arrivals, all[1], err)) {
    k3_cuda_peers_destroy(peers);
    return nullptr;
  }
  for (int r = 0; r < comm->size; r++) {
    peers->device.windows[r] = static_cast<unsigned char *>(all[0][r]);
    peers->device.arrivals[r] = static_cast<uint32_t *>(all[1][r]);
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
