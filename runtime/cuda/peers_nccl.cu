// Symmetric windows by NCCL. Built without it, a backend of one rank remains.
#include "runtime/cuda/peers.cuh"

// In C++ a function of the name of its struct, as these headers have one, is said to hide the constructor.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
extern "C" {
#include "base/alloc.h"
#include "runtime/comm.h"
}
#pragma GCC diagnostic pop

#if defined(K3_CUDA_NCCL)

static bool succeeded(ncclResult_t result, const char *what, struct k3_error *err) {
  if (result != ncclSuccess)
    k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr, "GPUs of one machine that reach one another (NVLink or PCIe peer access)",
            "NCCL: %s: %s", what, ncclGetErrorString(result));
  return result == ncclSuccess;
}

static bool set_up(struct k3_cuda_peers *peers, struct k3_comm *comm, size_t nbytes, struct k3_error *err) {
  ncclUniqueId id = {}, ids[K3_CUDA_MAX_RANKS];
  if (comm->rank == 0 && !succeeded(ncclGetUniqueId(&id), "making an id", err))
    return false;
  if (comm->ops->all_gather(comm, "NCCL's id", &id, sizeof id, ids, nullptr, err) != K3_OK)
    return false;
  ncclDevCommRequirements requirements = {};
  requirements.lsaBarrierCount = K3_CUDA_PEER_BLOCKS;
  return succeeded(ncclCommInitRank(&peers->communicator, comm->size, ids[0], comm->rank), "joining the ranks", err) &&
         succeeded(ncclMemAlloc(&peers->window, nbytes), "taking memory for the ranks", err) &&
         succeeded(ncclCommWindowRegister(peers->communicator, peers->window, nbytes, &peers->device.window, NCCL_WIN_COLL_SYMMETRIC),
                   "making the ranks' window", err) &&
         succeeded(ncclDevCommCreate(peers->communicator, &requirements, &peers->device.communicator), "making the device's communicator", err);
}

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, struct k3_error *err) {
  if (!comm || comm->size > K3_CUDA_MAX_RANKS) {
    k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr, "a communicator of at most 16 ranks", "%d ranks", comm ? comm->size : 0);
    return nullptr;
  }
  struct k3_cuda_peers *peers = static_cast<struct k3_cuda_peers *>(k3_calloc(1, sizeof *peers, err));
  if (!peers)
    return nullptr;
  peers->device.rank = comm->rank;
  peers->device.size = comm->size;
  if (set_up(peers, comm, nbytes, err))
    return peers;
  k3_cuda_peers_destroy(peers);
  return nullptr;
}

extern "C" void k3_cuda_peers_destroy(struct k3_cuda_peers *peers) {
  if (!peers)
    return;
  if (peers->device.window)
    ncclCommWindowDeregister(peers->communicator, peers->device.window);
  if (peers->window)
    ncclMemFree(peers->window);
  if (peers->communicator)
    ncclCommDestroy(peers->communicator);
  k3_free(peers);
}

#else

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *, size_t, struct k3_error *err) {
  k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr, "NCCL 2.28 or later when the plug-in is built, or one rank",
          "the CUDA plug-in was built without NCCL");
  return nullptr;
}

extern "C" void k3_cuda_peers_destroy(struct k3_cuda_peers *) {
}

extern "C" void *k3_cuda_peers_window(const struct k3_cuda_peers *) {
  return nullptr;
}

extern "C" cudaError_t k3_cuda_launch_reduce(const struct k3_cuda_reduce *, cudaStream_t) {
  return cudaErrorNotSupported;
}

extern "C" cudaError_t k3_cuda_launch_gather(const struct k3_cuda_gather *, cudaStream_t) {
  return cudaErrorNotSupported;
}

#endif
