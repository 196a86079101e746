// Sums over the ranks: the reduction that was deferred to a norm, fused with it. One shot: every rank reads every rank's part, in rank order, so all
// get the same bits. The ranks' blocks wait for one another once, before they read; the windows' halves take turns, so that nothing has to be waited
// for afterwards: a half is written again only after the barrier of the next sum, and by then everybody has read it.
#include "runtime/cuda/peers.cuh"

#if defined(K3_CUDA_HAS_PEERS)

namespace k3 {

template <class A>
__global__ void reduce_kernel(const __grid_constant__ k3_cuda_reduce p, const __grid_constant__ Peers peers) {
  K3_DYNAMIC_SHARED(float, slots);
  peer_barrier(peers, blockIdx.x);
  for (uint32_t row = blockIdx.x; row < p.n_rows; row += gridDim.x) {
    const uint64_t begin = static_cast<uint64_t>(row) * p.width;
    A *residual = p.residual ? static_cast<A *>(p.residual) + begin : nullptr, *out = static_cast<A *>(p.out) + begin;
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x) {
      float sum = 0;
      for (int r = 0; r < peers.size; r++)
        sum += peer_address<const float>(peers, r, p.window_offset)[begin + i];
      sum = rounded<A>(sum);
      if (!residual) {
        out[i] = from_float<A>(sum);
        continue;
      }
      residual[i] = from_float<A>(to_float(residual[i]) + sum);
      squares = fmaf(to_float(residual[i]), to_float(residual[i]), squares);
    }
    if (!residual)
      continue;
    const float inverse = 1 / sqrtf(block_sum(squares, slots) / static_cast<float>(p.width) + p.eps);
    for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x)
      out[i] = from_float<A>(rounded<A>(to_float(residual[i]) * inverse) * load_float(p.gain, i));
  }
}

__global__ void gather_kernel(const __grid_constant__ k3_cuda_gather p, const __grid_constant__ Peers peers) {
  peer_barrier(peers, blockIdx.x);
  const uint64_t width = static_cast<uint64_t>(peers.size) * p.part_width, n = p.n_rows * width;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
    const uint64_t row = i / width, col = i % width;
    const int rank = static_cast<int>(col / p.part_width);
    p.out[i] = p.scale * peer_address<const float>(peers, rank, p.window_offset)[row * p.part_width + col % p.part_width];
  }
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_reduce(const struct k3_cuda_reduce *p, cudaStream_t stream) {
  const uint32_t most = K3_CUDA_PEER_BLOCKS, n_blocks = p->n_rows < most ? p->n_rows : most;
  const size_t nbytes = k3::kBlockThreads / 32 * sizeof(float);
  return p->bf16 ? k3::launch(n_blocks, k3::kBlockThreads, nbytes, stream, k3::reduce_kernel<__nv_bfloat16>, *p, p->peers->device)
                 : k3::launch(n_blocks, k3::kBlockThreads, nbytes, stream, k3::reduce_kernel<float>, *p, p->peers->device);
}

extern "C" cudaError_t k3_cuda_launch_gather(const struct k3_cuda_gather *p, cudaStream_t stream) {
  return k3::launch(K3_CUDA_PEER_BLOCKS, k3::kBlockThreads, 0, stream, k3::gather_kernel, *p, p->peers->device);
}

extern "C" void *k3_cuda_peers_window(const struct k3_cuda_peers *peers) {
  return peers->window;
}

#endif
