// Attention in latent space. A block forward of T rows per request is folded: whatever is read of the cache serves all T rows. The keys of a request
// are split over blocks; a second kernel combines the splits and expands the sums through W_UV.
#include "runtime/cuda/cache.cuh"

namespace k3 {

constexpr uint32_t kRowTile = 8;  // rows that share a read of W_UK

// Block (head, tile of rows): threads share out the latent columns.
template <class A>
__global__ void absorb_kernel(const __grid_constant__ k3_cuda_absorb p) {
  K3_DYNAMIC_SHARED(float, nope);  // [kRowTile][P]
  const uint32_t head = blockIdx.x, first_row = blockIdx.y * kRowTile, n_rows = min(kRowTile, p.n_rows - first_row);
  const uint32_t query_width = p.nope_width + 2 * p.rope.n_pairs, out_width = p.latent_rank + 2 * p.rope.n_pairs;
  const A *q = static_cast<const A *>(p.q) + (static_cast<uint64_t>(first_row) * p.n_heads + head) * query_width;
  A *out = static_cast<A *>(p.out) + (static_cast<uint64_t>(first_row) * p.n_heads + head) * out_width;
  const uint64_t q_stride = static_cast<uint64_t>(p.n_heads) * query_width, out_stride = static_cast<uint64_t>(p.n_heads) * out_width;
  for (uint32_t i = threadIdx.x; i < n_rows * p.nope_width; i += blockDim.x)
    nope[i] = to_float(q[i / p.nope_width * q_stride + i % p.nope_width]);
  __syncthreads();
  for (uint32_t col = threadIdx.x * 8; col < p.latent_rank; col += blockDim.x * 8) {
    float sums[kRowTile][8] = {};
    for (uint32_t i = 0; i < p.nope_width; i++) {
      float weights[8];
      decode_row8(p.kv_b, head * (p.nope_width + p.v_width) + i, col, weights);
#pragma unroll
      for (uint32_t r = 0; r < kRowTile; r++) {
        if (r < n_rows) {
          const float factor = nope[r * p.nope_width + i];
#pragma unroll
          for (int j = 0; j < 8; j++)
            sums[r][j] = fmaf(factor, weights[j], sums[r][j]);
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < kRowTile; r++) {
      if (r < n_rows) {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
          if (col + j < p.latent_rank)
            out[r * out_stride + col + j] = from_float<A>(sums[r][j]);
      }
    }
  }
  for (uint32_t i = threadIdx.x; i < n_rows * p.rope.n_pairs; i += blockDim.x) {
    const uint32_t r = i / p.rope.n_pairs, pair = i % p.rope.n_pairs;
    const A *from = q + r * q_stride + p.nope_width + 2 * pair;
    A *to = out + r * out_stride + p.latent_rank + 2 * pair;
    const float2 factors = rope_factors(p.rope, p.positions[first_row + r], pair);
    const float a = to_float(from[0]), b = to_float(from[1]);
    to[0] = from_float<A>(a * factors.x - b * factors.y);
    to[1] = from_float<A>(b * factors.x + a * factors.y);
  }
}

// Slot of a key, or -1 where the block table has none.
__device__ static int64_t slot_of_key(const k3_cuda_attention &p, uint32_t request, uint64_t key) {
  const uint64_t block = key / p.cache.block_size;
  const int32_t id = block < p.max_blocks ? p.block_tables[request * p.max_blocks + block] : -1;
  const uint64_t slot = static_cast<uint64_t>(id) * p.cache.block_size + key % p.cache.block_size;
  return id < 0 || slot >= p.cache.n_slots ? -1 : static_cast<int64_t>(slot);
}

// Shared memory of one block, floats.
struct SplitShared {
  uint32_t queries, keys, scores, sums, highest, total, rescale, n;  // offsets
};
__host__ __device__ static SplitShared split_shared(const k3_cuda_attention &p) {
  const uint32_t width = p.latent_rank + p.rope_width, T = p.block_width;
  SplitShared s;
  s.queries = 0;
  s.keys = s.queries + T * width;
  s.scores = s.keys + K3_CUDA_KEY_TILE * width;
  s.sums = s.scores + T * K3_CUDA_KEY_TILE;
  s.highest = s.sums + T * p.latent_rank;
  s.total = s.highest + T;
  s.rescale = s.total + T;
  s.n = s.rescale + T;
  return s;
}

// Block (split, head, request): softmax of all T rows over the split's keys, tile by tile, with the running maximum.
template <class A>
__global__ void split_kernel(const __grid_constant__ k3_cuda_attention p) {
  K3_DYNAMIC_SHARED(float, shared);
  const SplitShared s = split_shared(p);
  float *queries = shared + s.queries, *keys = shared + s.keys, *scores = shared + s.scores, *sums = shared + s.sums;
  float *highest = shared + s.highest, *total = shared + s.total, *rescale = shared + s.rescale;
  const uint32_t split = blockIdx.x, head = blockIdx.y, request = blockIdx.z, T = p.block_width, width = p.latent_rank + p.rope_width;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const uint64_t n_keys = static_cast<uint64_t>(p.n_keys[request]), anchor = static_cast<uint64_t>(p.anchor_positions[request]);
  const uint64_t n_tiles = (n_keys + K3_CUDA_KEY_TILE - 1) / K3_CUDA_KEY_TILE, tiles_per_split = (n_tiles + p.n_splits - 1) / p.n_splits;
  const uint64_t begin = split * tiles_per_split * K3_CUDA_KEY_TILE;
  const uint64_t stop = begin + tiles_per_split * K3_CUDA_KEY_TILE, end = stop < n_keys ? stop : n_keys;

  const A *query = static_cast<const A *>(p.query) + (static_cast<uint64_t>(request) * T * p.n_heads + head) * width;
  for (uint32_t i = threadIdx.x; i < T * width; i += blockDim.x)
    queries[i] = to_float(query[static_cast<uint64_t>(i / width) * p.n_heads * width + i % width]);
  for (uint32_t i = threadIdx.x; i < T * p.latent_rank; i += blockDim.x)
    sums[i] = 0;
  for (uint32_t t = threadIdx.x; t < T; t += blockDim.x) {
    highest[t] = -INFINITY;
    total[t] = 0;
  }
  for (uint64_t first = begin; first < end; first += K3_CUDA_KEY_TILE) {
    const uint32_t n = static_cast<uint32_t>(end - first < K3_CUDA_KEY_TILE ? end - first : K3_CUDA_KEY_TILE);
    __syncthreads();  // the tile before has been used
    for (uint32_t i = threadIdx.x; i < n * width; i += blockDim.x) {
      const int64_t slot = slot_of_key(p, request, first + i / width);
      keys[i] = slot < 0 ? 0 : cache_load(p.cache, cache_row(p.cache, static_cast<uint64_t>(slot)), i % width);
    }
    __syncthreads();
    for (uint32_t i = warp; i < T * n; i += n_warps) {  // one warp per score
      const uint32_t t = i / n, key = i % n;
      float sum = 0;
      for (uint32_t e = lane; e < width; e += 32)
        sum = fmaf(queries[t * width + e], keys[key * width + e], sum);
      sum = warp_sum(sum);
      const bool visible = (!p.causal || first + key <= anchor + t) && slot_of_key(p, request, first + key) >= 0;
      if (lane == 0)
        scores[t * K3_CUDA_KEY_TILE + key] = visible ? p.scale * sum : -INFINITY;
    }
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < T; t += blockDim.x) {
      float top = highest[t];
      for (uint32_t key = 0; key < n; key++)
        top = fmaxf(top, scores[t * K3_CUDA_KEY_TILE + key]);
      const float factor = top == -INFINITY ? 1 : expf(highest[t] - top);
      float sum = total[t] * factor;
      for (uint32_t key = 0; key < n; key++) {
        float &score = scores[t * K3_CUDA_KEY_TILE + key];
        score = score == -INFINITY ? 0 : expf(score - top);
        sum += score;
      }
      highest[t] = top;
      total[t] = sum;
      rescale[t] = factor;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < T * p.latent_rank; i += blockDim.x) {
      const uint32_t t = i / p.latent_rank, e = i % p.latent_rank;
      float sum = sums[i] * rescale[t];
      for (uint32_t key = 0; key < n; key++) {
        const float weight = scores[t * K3_CUDA_KEY_TILE + key];
        if (weight != 0)  // a masked row may hold anything, NaN too
          sum = fmaf(weight, keys[key * width + e], sum);
      }
      sums[i] = sum;
    }
  }
  __syncthreads();
  const uint64_t part = (static_cast<uint64_t>(request) * p.n_heads + head) * p.n_splits + split;
  for (uint32_t i = threadIdx.x; i < T * p.latent_rank; i += blockDim.x)
    p.partial_latents[part * T * p.latent_rank + i] = sums[i];
  for (uint32_t t = threadIdx.x; t < T; t += blockDim.x) {
    p.partial_sums[(part * T + t) * 2] = highest[t];
    p.partial_sums[(part * T + t) * 2 + 1] = total[t];
  }
}

// Block (head, request): the splits of all T rows combined, then one warp per value row.
template <class A>
__global__ void combine_kernel(const __grid_constant__ k3_cuda_attention p) {
  K3_DYNAMIC_SHARED(float, latents);  // [T][Rk], then [splits][T] weights
  const uint32_t head = blockIdx.x, request = blockIdx.y, T = p.block_width, Rk = p.latent_rank;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const uint64_t first_part = (static_cast<uint64_t>(request) * p.n_heads + head) * p.n_splits;
  float *weights = latents + T * Rk;
  for (uint32_t t = threadIdx.x; t < T; t += blockDim.x) {
    float top = -INFINITY, total = 0;
    for (uint32_t split = 0; split < p.n_splits; split++)
      top = fmaxf(top, p.partial_sums[((first_part + split) * T + t) * 2]);
    for (uint32_t split = 0; split < p.n_splits; split++) {
      const float *part = p.partial_sums + ((first_part + split) * T + t) * 2;
      const float weight = part[0] == -INFINITY ? 0 : expf(part[0] - top);
      weights[split * T + t] = weight;
      total += weight * part[1];
    }
    for (uint32_t split = 0; split < p.n_splits; split++)  // no key visible: all zero
      weights[split * T + t] = total > 0 ? weights[split * T + t] / total : 0;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < T * Rk; i += blockDim.x) {
    float sum = 0;
    for (uint32_t split = 0; split < p.n_splits; split++)
      sum = fmaf(weights[split * T + i / Rk], p.partial_latents[(first_part + split) * T * Rk + i], sum);
    latents[i] = rounded<A>(sum);
  }
  __syncthreads();
  A *out = static_cast<A *>(p.out) + (static_cast<uint64_t>(request) * T * p.n_heads + head) * p.v_width;
  for (uint32_t v = warp; v < p.v_width; v += n_warps) {
    for (uint32_t first = 0; first < T; first += kRowTile) {
      float sums[kRowTile] = {};
      for (uint32_t col = lane * 8; col < Rk; col += 32 * 8) {
        float values[8];
        decode_row8(p.kv_b, head * (p.nope_width + p.v_width) + p.nope_width + v, col, values);
#pragma unroll
        for (uint32_t r = 0; r < kRowTile; r++) {
          if (first + r < T) {
            for (uint32_t j = 0; j < 8 && col + j < Rk; j++)
              sums[r] = fmaf(latents[(first + r) * Rk + col + j], values[j], sums[r]);
          }
        }
      }
      const float sum = warp_sums(sums);
      if (lane < kRowTile && first + lane < T)
        out[static_cast<uint64_t>(first + lane) * p.n_heads * p.v_width + v] = from_float<A>(sum);
    }
  }
}

template <class A>
static cudaError_t launch_attention(const k3_cuda_attention &p, cudaStream_t stream) {
  const size_t split_nbytes = split_shared(p).n * sizeof(float);
  const size_t combine_nbytes = static_cast<size_t>(p.block_width) * (p.latent_rank + p.n_splits) * sizeof(float);
  const dim3 split_grid(p.n_splits, p.n_heads, p.n_requests), combine_grid(p.n_heads, p.n_requests);
  cudaError_t error = allow_shared(split_kernel<A>, split_nbytes);
  if (error == cudaSuccess)
    error = allow_shared(combine_kernel<A>, combine_nbytes);
  if (error == cudaSuccess)
    error = launch(split_grid, kBlockThreads, split_nbytes, stream, split_kernel<A>, p);
  return error == cudaSuccess ? launch(combine_grid, kBlockThreads, combine_nbytes, stream, combine_kernel<A>, p) : error;
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_absorb(const struct k3_cuda_absorb *p, cudaStream_t stream) {
  const dim3 grid(p->n_heads, k3::ceil_div(p->n_rows, k3::kRowTile));
  const size_t nbytes = k3::kRowTile * p->nope_width * sizeof(float);
  return p->bf16 ? k3::launch(grid, k3::kBlockThreads, nbytes, stream, k3::absorb_kernel<__nv_bfloat16>, *p)
                 : k3::launch(grid, k3::kBlockThreads, nbytes, stream, k3::absorb_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_attention(const struct k3_cuda_attention *p, cudaStream_t stream) {
  return p->bf16 ? k3::launch_attention<__nv_bfloat16>(*p, stream) : k3::launch_attention<float>(*p, stream);
}
