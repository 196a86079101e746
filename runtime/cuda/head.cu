// One slot of the Markov loop: bias of the previous token over the whole vocabulary, its sum with the base logits, and the first maximum, in one
// launch. Blocks leave the best of their chunk; the last one to finish picks the request's winner. Nobody waits for anybody.
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

__device__ inline Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.value, offset), __shfl_xor_sync(kAllLanes, best.id, offset)};
    best = better(best, other);
  }
  return best;
}

// The best over the block, for every thread. `slots`: shared memory, one per warp; free again when the call returns.
__device__ inline Best block_best(Best best, Best *slots) {
  best = warp_best(best);
  if (threadIdx.x % 32 == 0)
    slots[threadIdx.x / 32] = best;
  __syncthreads();
  best = slots[0];
  for (unsigned i = 1; i < blockDim.x / 32; i++)
    best = better(best, slots[i]);
  __syncthreads();
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

// Block (chunk of the vocabulary, request).
template <class A, int kKind>
__global__ void markov_kernel(const __grid_constant__ k3_cuda_markov p) {
  K3_DYNAMIC_SHARED(float, embedding);  // [r] the w1 row of the previous token
  K3_SHARED(Best, best_slots, 32);
  K3_SHARED(float, sum_slots, 32);
  K3_SHARED(uint32_t, n_before, 1);
  const uint32_t chunk = blockIdx.x, request = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const uint64_t row = static_cast<uint64_t>(request) * p.block_width + p.slot;
  const uint32_t previous = previous_id(p, request);
  for (uint32_t col = threadIdx.x; col < p.rank; col += blockDim.x)
    embedding[col] = decode_row1(p.w1, previous, col);
  __syncthreads();
  const uint32_t begin = chunk * K3_CUDA_VOCAB_CHUNK, end = min(begin + K3_CUDA_VOCAB_CHUNK, p.vocab_size);
  Best best = {-INFINITY, 0xffffffffu};
  for (uint32_t first = begin + warp * kIdsPerTurn; first < end; first += n_warps * kIdsPerTurn) {
    float sums[kIdsPerTurn] = {};
    for (uint32_t col = lane * 8; col < p.rank; col += 32 * 8) {
#pragma unroll
      for (uint32_t i = 0; i < kIdsPerTurn; i++) {
        if (first + i < end) {
          float values[8];
          const k3_cuda_shard &shard = shard_of(p.w2, first + i);
          decode8<kKind>(p.w2, shard, first + i - shard.row, col, values);
#pragma unroll
          for (uint32_t j = 0; j < 8; j++)
            if (col + j < p.rank)
              sums[i] = fmaf(embedding[col + j], values[j] * shard.factor, sums[i]);
        }
      }
    }
    const float sum = warp_sums(sums);
    const uint32_t id = first + lane;
    if (lane < kIdsPerTurn && id < end) {
      const float logit = p.base_logits[row * p.vocab_size + id] + p.scale * sum;
      if (p.out_logits)
        *reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(p.out_logits) + row * p.out_row_nbytes + id * sizeof(float)) = logit;
      best = better(best, Best{logit, id});
    }
  }
  best = block_best(best, best_slots);
  k3_cuda_maximum *maxima = p.maxima + static_cast<uint64_t>(request) * gridDim.x;
  if (threadIdx.x == 0) {
    maxima[chunk] = {best.value, best.id};
    __threadfence();  // the maximum before the ticket
    n_before[0] = atomicAdd(&p.tickets[request], 1u);
    __threadfence();  // the ticket before the others' maxima
  }
  __syncthreads();
  if (n_before[0] + 1 < gridDim.x)
    return;
  best = {-INFINITY, 0xffffffffu};
  for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x)
    best = better(best, Best{maxima[i].value, maxima[i].id});
  best = block_best(best, best_slots);
  if (threadIdx.x == 0) {
    p.out_ids[row] = best.id < p.vocab_size ? best.id : 0;  // a row of NaN has no maximum
    atomicExch(&p.tickets[request], 0u);
  }
  if (p.out_confidence)
    confidence<A>(p, row, embedding, sum_slots);
}

template <class A>
static cudaError_t launch_markov(const k3_cuda_markov &p, cudaStream_t stream) {
  const dim3 grid(ceil_div(p.vocab_size, K3_CUDA_VOCAB_CHUNK), p.n_requests);
  const size_t nbytes = p.rank * sizeof(float);
  switch (p.w2.kind) {
    case K3_CUDA_BF16: return launch(grid, kBlockThreads, nbytes, stream, markov_kernel<A, K3_CUDA_BF16>, p);
    case K3_CUDA_F16: return launch(grid, kBlockThreads, nbytes, stream, markov_kernel<A, K3_CUDA_F16>, p);
    case K3_CUDA_F32: return launch(grid, kBlockThreads, nbytes, stream, markov_kernel<A, K3_CUDA_F32>, p);
    case K3_CUDA_FP8: return launch(grid, kBlockThreads, nbytes, stream, markov_kernel<A, K3_CUDA_FP8>, p);
    default: return launch(grid, kBlockThreads, nbytes, stream, markov_kernel<A, K3_CUDA_FP4>, p);
  }
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_markov(const struct k3_cuda_markov *p, cudaStream_t stream) {
  return p->bf16 ? k3::launch_markov<__nv_bfloat16>(*p, stream) : k3::launch_markov<float>(*p, stream);
}
