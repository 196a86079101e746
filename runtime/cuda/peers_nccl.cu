// The ranks' windows by NCCL: symmetric ones that kernels reach, or plain memory that the library adds up. Built without NCCL, a backend of one rank
// remains.
#include <stdio.h>

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
    k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr, "a GPU for each rank (LOCAL_RANK) that the others reach, by NVLink, PCIe or network",
            "NCCL: %s: %s", what, ncclGetErrorString(result));
  return result == ncclSuccess;
}

// Notes why kernels will not reach the other ranks; the first reason stays.
static bool cannot(struct k3_cuda_peers *peers, const char *what, ncclResult_t result) {
  if (!peers->why_not[0])
    snprintf(peers->why_not, sizeof peers->why_not, "%s%s%s", what, result == ncclSuccess ? "" : ": ",
             result == ncclSuccess ? "" : ncclGetErrorString(result));
  return false;
}

#if defined(K3_CUDA_HAS_PEERS)

// Each step is taken by all ranks, so that nobody waits in one for a rank that has given up: `all` is asked between them.
static bool everybody(struct k3_cuda_peers *peers, struct k3_comm *comm, bool mine, bool *told, struct k3_error *err) {
  unsigned char flag = mine, flags[K3_CUDA_MAX_RANKS];
  *told = comm->ops->all_gather(comm, "which ranks have symmetric windows", &flag, sizeof flag, flags, nullptr, err) == K3_OK;
  for (int r = 0; *told && r < comm->size; r++) {
    if (flags[r])
      continue;
    char text[64];
    snprintf(text, sizeof text, "rank %d has no symmetric window", r);
    return cannot(peers, text, ncclSuccess);
  }
  return *told;
}

// False with *err when a rank is gone, false without when kernels cannot reach.
static bool make_symmetric(struct k3_cuda_peers *peers, struct k3_comm *comm, size_t nbytes, struct k3_error *err) {
  bool told;
  ncclResult_t result = ncclMemAlloc(&peers->window, nbytes);
  if (!everybody(peers, comm, result == ncclSuccess || cannot(peers, "memory for symmetric windows", result), &told, err))
    return false;
  peers->symmetric = true;
  result = ncclCommWindowRegister(peers->communicator, peers->window, nbytes, &peers->device.window, NCCL_WIN_COLL_SYMMETRIC);
  const bool registered = result == ncclSuccess && peers->device.window;
  if (!everybody(peers, comm, registered || cannot(peers, "no symmetric window (peer access between all GPUs, NCCL_CUMEM_ENABLE)", result), &told,
                 err))
    return false;
  const bool near = ncclTeamLsa(peers->communicator).nRanks == comm->size;
  if (!everybody(peers, comm, near || cannot(peers, "the ranks are on several machines, or without peer access", ncclSuccess), &told, err))
    return false;
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)  // from 2.29 on; an empty one is refused there
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
  ncclDevCommRequirements requirements = {};
#endif
  requirements.lsaBarrierCount = K3_CUDA_PEER_BLOCKS;
  result = ncclDevCommCreate(peers->communicator, &requirements, &peers->device.communicator);
  return everybody(peers, comm, result == ncclSuccess || cannot(peers, "no communicator for kernels", result), &told, err);
}

#endif

static bool set_up(struct k3_cuda_peers *peers, struct k3_comm *comm, size_t nbytes, bool reach, struct k3_error *err) {
  struct k3_error own = {};
  ncclUniqueId id = {};
  err = err ? err : &own;
  ncclUniqueId *ids = static_cast<ncclUniqueId *>(k3_calloc(static_cast<size_t>(comm->size), sizeof id, err));
  bool ok = ids && (comm->rank != 0 || succeeded(ncclGetUniqueId(&id), "making an id", err)) &&
            comm->ops->all_gather(comm, "NCCL's id", &id, sizeof id, ids, nullptr, err) == K3_OK &&
            succeeded(ncclCommInitRank(&peers->communicator, comm->size, ids[0], comm->rank), "joining the ranks", err);
  k3_free(ids);
  if (!ok)
    return false;
  if (!reach)
    cannot(peers, "asked for by K3PACK_SUMS", ncclSuccess);
  else if (comm->size > K3_CUDA_MAX_RANKS)
    cannot(peers, "more than 16 ranks", ncclSuccess);
#if defined(K3_CUDA_HAS_PEERS)
  else if (make_symmetric(peers, comm, nbytes, err))
    peers->reach = true;
#else
  else
    cannot(peers, "built with an NCCL before 2.28", ncclSuccess);
#endif
  if (err->status != K3_OK)
    return false;
  if (peers->window)
    return true;
  if (cudaMalloc(&peers->window, nbytes) == cudaSuccess)
    return true;
  cudaGetLastError();
  k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr, "a GPU with more free memory", "%zu bytes of GPU memory for the ranks' sums", nbytes);
  return false;
}

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *comm, size_t nbytes, bool reach, struct k3_error *err) {
  struct k3_cuda_peers *peers = static_cast<struct k3_cuda_peers *>(k3_calloc(1, sizeof *peers, err));
  if (!peers)
    return nullptr;
  peers->device.rank = comm->rank;
  peers->device.size = comm->size;
  if (set_up(peers, comm, nbytes, reach, err))
    return peers;
  k3_cuda_peers_destroy(peers);
  return nullptr;
}

extern "C" void k3_cuda_peers_destroy(struct k3_cuda_peers *peers) {
  if (!peers)
    return;
#if defined(K3_CUDA_HAS_PEERS)
  if (peers->reach)
    ncclDevCommDestroy(peers->communicator, &peers->device.communicator);
  if (peers->device.window)
    ncclCommWindowDeregister(peers->communicator, peers->device.window);
#endif
  if (peers->window && peers->symmetric)
    ncclMemFree(peers->window);
  else
    cudaFree(peers->window);
  if (peers->communicator)
    ncclCommDestroy(peers->communicator);
  k3_free(peers);
}

static cudaError_t queued(ncclResult_t result) {
  return result == ncclSuccess ? cudaSuccess : cudaErrorUnknown;
}

extern "C" cudaError_t k3_cuda_launch_all_reduce(const struct k3_cuda_all_reduce *p, cudaStream_t stream) {
  void *values = static_cast<unsigned char *>(p->peers->window) + p->window_offset;
  return queued(ncclAllReduce(values, values, p->n, ncclFloat, ncclSum, p->peers->communicator, stream));
}

extern "C" cudaError_t k3_cuda_launch_all_gather(const struct k3_cuda_all_gather *p, cudaStream_t stream) {
  const void *values = static_cast<unsigned char *>(p->peers->window) + p->window_offset;
  return queued(ncclAllGather(values, p->dst, p->n, ncclFloat, p->peers->communicator, stream));
}

#else

extern "C" struct k3_cuda_peers *k3_cuda_peers_create(struct k3_comm *, size_t, bool, struct k3_error *err) {
  k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, nullptr, nullptr,
          "NCCL 2.28 or later (or the Python package nvidia-nccl-cu13) when the plug-in is built, `make cuda`; or one rank",
          "the CUDA plug-in was built without NCCL");
  return nullptr;
}

extern "C" void k3_cuda_peers_destroy(struct k3_cuda_peers *) {
}

extern "C" cudaError_t k3_cuda_launch_all_reduce(const struct k3_cuda_all_reduce *, cudaStream_t) {
  return cudaErrorNotSupported;
}

extern "C" cudaError_t k3_cuda_launch_all_gather(const struct k3_cuda_all_gather *, cudaStream_t) {
  return cudaErrorNotSupported;
}

#endif
