// Sums over the ranks: the reduction that was deferred to a norm, fused with it. Parts are added in rank order wherever it is done, so all ranks get
// the same bits. The ranks' blocks wait for one another before they read; the windows' halves take turns, so that nothing has to be waited for
// afterwards: a half is written again only after the first wait of the next sum, and by then everybody has read it.
#include "runtime/cuda/peers.cuh"

namespace k3 {

// Reading a neighbour takes long, so a block has many threads and each has four values on their way from every rank.
#if defined(K3_CUDA_SIM)
constexpr unsigned kReduceThreads = kBlockThreads;
#else
constexpr unsigned kReduceThreads = 512;
#endif

// residual[i .. i + kWidth) += sums, or out = sums; what is kept is returned, as an activation holds it.
template <class A, int kWidth>
__device__ void keep(const k3_cuda_reduce &p, uint64_t at, float (&values)[kWidth]) {
  A *dst = static_cast<A *>(p.residual ? p.residual : p.out) + at;
#pragma unroll
  for (int k = 0; k < kWidth; k++) {
    const float sum = rounded<A>(values[k]);
    dst[k] = from_float<A>(p.residual ? to_float(dst[k]) + sum : sum);
    values[k] = to_float(dst[k]);
  }
}

// out = rms(residual) * gain of a row whose squares add up to `squares` over the block, whose threads have kept it by the time that they add up.
template <class A>
__device__ void norm_kept(const k3_cuda_reduce &p, uint64_t begin, float squares, float *slots) {
  const A *residual = static_cast<const A *>(p.residual) + begin;
  A *out = static_cast<A *>(p.out) + begin;
  const float inverse = 1 / sqrtf(block_sum(squares, slots) / static_cast<float>(p.width) + p.eps);
  for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x)
    out[i] = from_float<A>(rounded<A>(to_float(residual[i]) * inverse) * load_float(p.gain, i));
}

// One row whose sums load(i, values) gives: kept, and normed when there is a residual.
template <class A, int kWidth, class Load>
__device__ void finish_row(const k3_cuda_reduce &p, uint64_t begin, float *slots, const Load &load) {
  float squares = 0;
  for (uint32_t i = threadIdx.x * kWidth; i < p.width; i += blockDim.x * kWidth) {
    float values[kWidth];
    load(i, values);
    keep<A>(p, begin + i, values);
#pragma unroll
    for (int k = 0; k < kWidth; k++)
      squares = fmaf(values[k], values[k], squares);
  }
  if (p.residual)
    norm_kept<A>(p, begin, squares, slots);
}

template <int kWidth>
__device__ void load_floats(const float *src, float (&values)[kWidth]) {
  if constexpr (kWidth == 4) {
    const float4 raw = *reinterpret_cast<const float4 *>(src);
    values[0] = raw.x, values[1] = raw.y, values[2] = raw.z, values[3] = raw.w;
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; k++)
      values[k] = src[k];
  }
}

// The sum is there: an all-reduce went before.
template <class A, int kWidth>
__global__ void sum_is_done_kernel(const __grid_constant__ k3_cuda_reduce p, const float *sums) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  for (uint32_t row = blockIdx.x; row < p.n_rows; row += gridDim.x) {
    const uint64_t begin = static_cast<uint64_t>(row) * p.width;
    finish_row<A, kWidth>(p, begin, slots, [=](uint32_t i, float(&values)[kWidth]) { load_floats(sums + begin + i, values); });
  }
}

__device__ static void place_part(const k3_cuda_gather &p, uint32_t n_ranks, uint64_t i, const float *parts_of_rank) {
  const uint64_t width = static_cast<uint64_t>(n_ranks) * p.part_width;
  p.out[i] = p.scale * parts_of_rank[i / width * p.part_width + i % width % p.part_width];
}

__global__ void place_parts_kernel(const __grid_constant__ k3_cuda_gather p, uint32_t n_ranks) {
  wait_for_kernels();
  const uint64_t width = static_cast<uint64_t>(n_ranks) * p.part_width, n = p.n_rows * width, part = static_cast<uint64_t>(p.n_rows) * p.part_width;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<uint64_t>(gridDim.x) * blockDim.x)
    place_part(p, n_ranks, i, p.parts + i % width / p.part_width * part);
}

#if defined(K3_CUDA_HAS_PEERS)

// Values i .. i + kWidth of the ranks' parts that begin at `offset`, added in rank order.
template <int kWidth>
__device__ void add_parts(const Peers &peers, uint64_t offset, uint64_t i, float (&sums)[kWidth]) {
  load_floats(peer_address<const float>(peers, 0, offset) + i, sums);
#pragma unroll 4
  for (int r = 1; r < peers.size; r++) {
    float values[kWidth];
    load_floats(peer_address<const float>(peers, r, offset) + i, values);
#pragma unroll
    for (int k = 0; k < kWidth; k++)
      sums[k] += values[k];
  }
}

template <class A, int kWidth>
__global__ void one_shot_kernel(const __grid_constant__ k3_cuda_reduce p, const __grid_constant__ Peers peers) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  peer_barrier(peers, blockIdx.x);
  for (uint32_t row = blockIdx.x; row < p.n_rows; row += gridDim.x) {
    const uint64_t begin = static_cast<uint64_t>(row) * p.width;
    finish_row<A, kWidth>(p, begin, slots, [&](uint32_t i, float(&values)[kWidth]) { add_parts(peers, p.window_offset, begin + i, values); });
  }
}

// A block has rows j * ranks + r of some j: it makes the one that its rank owns, leaves it in the window in place of its part, which nobody else
// reads, and takes the others from their owners. Each rank norms all rows itself: that reads nothing from afar.
template <class A, int kWidth>
__global__ void two_shot_kernel(const __grid_constant__ k3_cuda_reduce p, const __grid_constant__ Peers peers) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  const uint32_t n_ranks = static_cast<uint32_t>(peers.size), own = static_cast<uint32_t>(peers.rank);
  const uint32_t n_groups = ceil_div(p.n_rows, n_ranks);
  peer_barrier(peers, blockIdx.x);
  for (uint32_t j = blockIdx.x; j < n_groups; j += gridDim.x) {
    const uint32_t row = j * n_ranks + own;
    if (row >= p.n_rows)
      continue;
    const uint64_t begin = static_cast<uint64_t>(row) * p.width;
    for (uint32_t i = threadIdx.x * kWidth; i < p.width; i += blockDim.x * kWidth) {
      float values[kWidth];
      add_parts(peers, p.window_offset, begin + i, values);
      keep<A>(p, begin + i, values);
    }
    __syncthreads();  // an activation is shorter than a part's value: it may lie over one that another thread had still to add
    const A *kept = static_cast<const A *>(p.residual ? p.residual : p.out) + begin;
    A *shared = peer_address<A>(peers, peers.rank, p.window_offset + begin * sizeof(float));
    for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x)
      shared[i] = kept[i];
  }
  peer_barrier(peers, blockIdx.x);
  for (uint32_t j = blockIdx.x; j < n_groups; j += gridDim.x) {
    for (uint32_t r = 0; r < n_ranks && j * n_ranks + r < p.n_rows; r++) {
      const uint64_t begin = static_cast<uint64_t>(j * n_ranks + r) * p.width;
      const A *shared = peer_address<const A>(peers, static_cast<int>(r), p.window_offset + begin * sizeof(float));
      A *dst = static_cast<A *>(p.residual ? p.residual : p.out) + begin;
      float squares = 0;
      for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x) {
        dst[i] = shared[i];
        squares = fmaf(to_float(dst[i]), to_float(dst[i]), squares);
      }
      if (p.residual)
        norm_kept<A>(p, begin, squares, slots);
    }
  }
}

__global__ void gather_kernel(const __grid_constant__ k3_cuda_gather p, const __grid_constant__ Peers peers) {
  wait_for_kernels();
  peer_barrier(peers, blockIdx.x);
  const uint32_t n_ranks = static_cast<uint32_t>(peers.size);
  const uint64_t width = static_cast<uint64_t>(n_ranks) * p.part_width, n = p.n_rows * width;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<uint64_t>(gridDim.x) * blockDim.x)
    place_part(p, n_ranks, i, peer_address<const float>(peers, static_cast<int>(i % width / p.part_width), p.window_offset));
}

#endif

template <class A, int kWidth>
static cudaError_t launch_reduce(const k3_cuda_reduce &p, cudaStream_t stream) {
  const size_t nbytes = kReduceThreads / 32 * sizeof(float);
  if (p.shots == K3_CUDA_DONE) {
    const float *sums = reinterpret_cast<const float *>(static_cast<const unsigned char *>(p.peers->window) + p.window_offset);
    return launch(p.n_rows, kReduceThreads, nbytes, stream, sum_is_done_kernel<A, kWidth>, p, sums);
  }
#if defined(K3_CUDA_HAS_PEERS)
  const uint32_t most = K3_CUDA_PEER_BLOCKS, n_ranks = static_cast<uint32_t>(p.peers->device.size);
  const uint32_t n = p.shots == K3_CUDA_ONE_SHOT ? p.n_rows : ceil_div(p.n_rows, n_ranks);
  return launch(n < most ? n : most, kReduceThreads, nbytes, stream,
                p.shots == K3_CUDA_ONE_SHOT ? one_shot_kernel<A, kWidth> : two_shot_kernel<A, kWidth>, p, p.peers->device);
#else
  return cudaErrorNotSupported;
#endif
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_reduce(const struct k3_cuda_reduce *p, cudaStream_t stream) {
  if (p->width % 4 == 0)
    return p->bf16 ? k3::launch_reduce<__nv_bfloat16, 4>(*p, stream) : k3::launch_reduce<float, 4>(*p, stream);
  return p->bf16 ? k3::launch_reduce<__nv_bfloat16, 1>(*p, stream) : k3::launch_reduce<float, 1>(*p, stream);
}

extern "C" cudaError_t k3_cuda_launch_gather(const struct k3_cuda_gather *p, cudaStream_t stream) {
  const uint32_t n_ranks = static_cast<uint32_t>(p->peers->device.size);
  if (p->parts)
    return k3::launch(K3_CUDA_PEER_BLOCKS, k3::kBlockThreads, 0, stream, k3::place_parts_kernel, *p, n_ranks);
#if defined(K3_CUDA_HAS_PEERS)
  return k3::launch(K3_CUDA_PEER_BLOCKS, k3::kBlockThreads, 0, stream, k3::gather_kernel, *p, p->peers->device);
#else
  return cudaErrorNotSupported;
#endif
}

extern "C" void *k3_cuda_peers_window(const struct k3_cuda_peers *peers) {
  return peers->window;
}

extern "C" const char *k3_cuda_peers_why_not(const struct k3_cuda_peers *peers) {
  return peers->reach ? nullptr : peers->why_not;
}
