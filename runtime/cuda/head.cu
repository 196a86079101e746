// One slot of the Markov loop: bias of the previous token over the whole vocabulary, its sum with the base logits, and the first maximum, in one
// launch. Blocks leave the best of their chunk; the last one to finish picks the requests' winners. Nobody waits for anybody.
// Grid (chunks of 256 ids, groups of four requests): w2 is read once for up to four requests, V r weights (84 MB at K3's size in BF16, 24 MB in
// NVFP4) and V base logits each; 2 V r FLOPs a request.
#include "runtime/cuda/matrix.cuh"

namespace k3 {

struct Best {
  float value;
  uint32_t id;
};

// Ties go to the lower id; NaN never wins.
__device__ inline Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

// The best of the lanes whose numbers are equal modulo kStep, for each of them.
template <int kStep>
__device__ Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset >= kStep; offset /= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.value, offset), __shfl_xor_sync(kAllLanes, best.id, offset)};
    best = better(best, other);
  }
  return best;
}

__device__ static uint32_t previous_id(const k3_cuda_markov &p, uint32_t request) {
  const uint64_t before = static_cast<uint64_t>(request) * p.block_width + p.slot - 1;
  const int64_t id = p.slot == 0 ? p.anchor_ids[request] : p.previous_ids ? p.previous_ids[before] : p.out_ids[before];
  return id < 0 ? 0 : static_cast<uint64_t>(id) >= p.vocab_size ? p.vocab_size - 1 : static_cast<uint32_t>(id);
}

// sigmoid(w * [hidden ; w1 row] + b), by the whole block.
template <class A>
__device__ void confidence(const k3_cuda_markov &p, uint64_t row, const float *embedding, float *slots) {
  const A *hidden = static_cast<const A *>(p.hidden) + row * p.hidden_size;
  const uint32_t width = p.hidden_size + (p.confidence_with_markov ? p.rank : 0);
  float sum = 0;
  for (uint32_t col = threadIdx.x; col < width; col += blockDim.x)
    sum = fmaf(decode_row1(p.confidence, 0, col), col < p.hidden_size ? to_float(hidden[col]) : embedding[col - p.hidden_size], sum);
  sum = block_sum(sum, slots) + load_float(p.confidence_bias, 0);
  if (threadIdx.x == 0)
    p.out_confidence[row] = 1 / (1 + expf(-sum));
}

constexpr uint32_t kIdsPerTurn = 8;  // ids that one warp works on at a time

// Block (chunk of the vocabulary, group of requests). Lane l of a warp ends a turn with the logit of id l / kRequests for request l % kRequests.
template <class A, int kKind, uint32_t kRequests>
__global__ void markov_kernel(const __grid_constant__ k3_cuda_markov p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, embeddings);  // [kRequests][r] the w1 rows of the previous tokens
  K3_SHARED(Best, slots, 32 * kRequests);
  K3_SHARED(float, sum_slots, 32);
  K3_SHARED(uint32_t, n_before, 1);
  const uint32_t chunk = blockIdx.x, first_request = blockIdx.y * kRequests, n_requests = min(kRequests, p.n_requests - first_request);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const auto row_of = [&](uint32_t i) { return static_cast<uint64_t>(first_request + i) * p.block_width + p.slot; };
  for (uint32_t i = threadIdx.x; i < kRequests * p.rank; i += blockDim.x) {
    const uint32_t request = i / p.rank;
    embeddings[i] = request < n_requests ? decode_row1(p.w1, previous_id(p, first_request + request), i % p.rank) : 0;
  }
  __syncthreads();
  const uint32_t begin = chunk * K3_CUDA_VOCAB_CHUNK, end = min(begin + K3_CUDA_VOCAB_CHUNK, p.vocab_size), mine = lane % kRequests;
  Best best = {-INFINITY, 0xffffffffu};
  for (uint32_t first = begin + warp * kIdsPerTurn; first < end; first += n_warps * kIdsPerTurn) {
    float sums[kIdsPerTurn * kRequests] = {};
    for (uint32_t col = lane * 8; col < p.rank; col += 32 * 8) {
#pragma unroll
      for (uint32_t i = 0; i < kIdsPerTurn; i++) {
        if (first + i < end) {
          float values[8];
          const k3_cuda_shard &shard = shard_of(p.w2, first + i);
          decode8<kKind>(p.w2, shard, first + i - shard.row, col, values);
#pragma unroll
          for (uint32_t j = 0; j < 8; j++) {
            if (col + j < p.rank) {
#pragma unroll
              for (uint32_t r = 0; r < kRequests; r++)
                sums[i * kRequests + r] = fmaf(embeddings[r * p.rank + col + j], values[j] * shard.factor, sums[i * kRequests + r]);
            }
          }
        }
      }
    }
    const float sum = warp_sums(sums);
    const uint32_t id = first + lane / kRequests;
    if (lane < kIdsPerTurn * kRequests && id < end && mine < n_requests) {
      const uint64_t row = row_of(mine);
      const float logit = p.base_logits[row * p.vocab_size + id] + p.scale * sum;
      if (p.out_logits)
        *reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(p.out_logits) + row * p.out_row_nbytes + id * sizeof(float)) = logit;
      best = better(best, Best{logit, id});
    }
  }
  best = warp_best<kRequests>(best);
  if (lane < kRequests)
    slots[warp * kRequests + lane] = best;
  __syncthreads();
  if (threadIdx.x < n_requests) {
    best = slots[threadIdx.x];
    for (uint32_t i = 1; i < n_warps; i++)
      best = better(best, slots[i * kRequests + threadIdx.x]);
    p.maxima[static_cast<uint64_t>(first_request + threadIdx.x) * gridDim.x + chunk] = {best.value, best.id};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // the maxima, this thread's and those that the barrier has shown it, before the ticket
    n_before[0] = atomicAdd(&p.tickets[blockIdx.y], 1u);
    __threadfence();  // the ticket before the others' maxima
  }
  __syncthreads();
  if (n_before[0] + 1 < gridDim.x)
    return;
  for (uint32_t request = warp; request < n_requests; request += n_warps) {
    const k3_cuda_maximum *maxima = p.maxima + static_cast<uint64_t>(first_request + request) * gridDim.x;
    best = {-INFINITY, 0xffffffffu};
    for (uint32_t i = lane; i < gridDim.x; i += 32)
      best = better(best, Best{maxima[i].value, maxima[i].id});
    best = warp_best<1>(best);
    if (lane == 0)
      p.out_ids[row_of(request)] = best.id < p.vocab_size ? best.id : 0;  // a row of NaN has no maximum
  }
  if (threadIdx.x == 0)
    atomicExch(&p.tickets[blockIdx.y], 0u);
  if (p.out_confidence)
    for (uint32_t request = 0; request < n_requests; request++)
      confidence<A>(p, row_of(request), embeddings + request * p.rank, sum_slots);
}

// Four requests share a read of w2.
template <class A, int kKind>
static cudaError_t launch_markov(const k3_cuda_markov &p, cudaStream_t stream) {
  const uint32_t n_chunks = ceil_div(p.vocab_size, K3_CUDA_VOCAB_CHUNK);
  if (p.n_requests == 1)
    return launch(n_chunks, kBlockThreads, p.rank * sizeof(float), stream, markov_kernel<A, kKind, 1>, p);
  return launch(dim3(n_chunks, ceil_div(p.n_requests, 4)), kBlockThreads, 4 * p.rank * sizeof(float), stream, markov_kernel<A, kKind, 4>, p);
}

template <class A>
static cudaError_t launch_markov(const k3_cuda_markov &p, cudaStream_t stream) {
  switch (p.w2.kind) {
    case K3_CUDA_BF16: return launch_markov<A, K3_CUDA_BF16>(p, stream);
    case K3_CUDA_F16: return launch_markov<A, K3_CUDA_F16>(p, stream);
    case K3_CUDA_F32: return launch_markov<A, K3_CUDA_F32>(p, stream);
    case K3_CUDA_FP8: return launch_markov<A, K3_CUDA_FP8>(p, stream);
    default: return launch_markov<A, K3_CUDA_FP4>(p, stream);
  }
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_markov(const struct k3_cuda_markov *p, cudaStream_t stream) {
  return p->bf16 ? k3::launch_markov<__nv_bfloat16>(*p, stream) : k3::launch_markov<float>(*p, stream);
}
