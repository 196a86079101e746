// Memory of the other ranks, as a kernel sees it: addresses in their windows, and a barrier of the blocks of one index on all ranks. The only device
// header that knows NCCL.
#pragma once
#include "runtime/cuda/device.cuh"
#include "runtime/cuda/peers.h"

#if defined(K3_CUDA_SIM)
#define K3_CUDA_HAS_PEERS 1
#elif defined(K3_CUDA_NCCL)
#define K3_CUDA_HAS_PEERS 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nccl.h>
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0) && __has_include(<nccl_device.h>)
#include <nccl_device.h>
#else
#undef K3_CUDA_HAS_PEERS  // the library's own sums remain
#endif
#pragma GCC diagnostic pop
#endif

namespace k3 {

struct Peers {  // passed to kernels by value
  int rank, size;
#if defined(K3_CUDA_SIM)
  unsigned char *windows[K3_CUDA_MAX_RANKS];
  uint32_t *arrivals[K3_CUDA_MAX_RANKS];  // [blocks][ranks + 1]: the newest epoch that each rank has reached; last, the owner's own count
#elif defined(K3_CUDA_HAS_PEERS)
  ncclWindow_t window;
  ncclDevComm communicator;
#endif
};

#if defined(K3_CUDA_HAS_PEERS)

template <class T>
__device__ T *peer_address(const Peers &peers, int rank, uint64_t offset) {
#if defined(K3_CUDA_SIM)
  return reinterpret_cast<T *>(peers.windows[rank] + offset);
#else
  return static_cast<T *>(ncclGetLsaPointer(peers.window, offset, rank));
#endif
}

// All threads of the block; what any rank wrote before its barrier is seen after it. Block i waits for block i of the other ranks alone.
__device__ inline void peer_barrier(const Peers &peers, uint32_t index) {
#if defined(K3_CUDA_SIM)
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t base = index * (K3_CUDA_MAX_RANKS + 1);
    const uint32_t epoch = ++peers.arrivals[peers.rank][base + K3_CUDA_MAX_RANKS];
    for (int r = 0; r < peers.size; r++)
      __atomic_store_n(&peers.arrivals[r][base + static_cast<uint32_t>(peers.rank)], epoch, __ATOMIC_RELEASE);
    for (int r = 0; r < peers.size; r++)
      while (static_cast<int32_t>(__atomic_load_n(&peers.arrivals[peers.rank][base + static_cast<uint32_t>(r)], __ATOMIC_ACQUIRE) - epoch) < 0)
        cuda_sim::poll("another rank's arrival");
  }
  __syncthreads();
#else
  ncclLsaBarrierSession<ncclCoopCta> session(ncclCoopCta(), peers.communicator, ncclTeamTagLsa(), index);
  session.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
#endif
}

#endif

}  // namespace k3

struct k3_cuda_peers {
  k3::Peers device;
  void *window;
  bool reach;
  char why_not[256];
#if defined(K3_CUDA_SIM)
  uint32_t *arrivals;
  struct k3_comm *comm;
#elif defined(K3_CUDA_NCCL)
  ncclComm_t communicator;
  bool symmetric;  // the window is of the library's memory and was made known to it
#endif
};
