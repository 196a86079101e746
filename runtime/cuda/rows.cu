// Everything that works row by row: taps joined, residual and norms, rotation and insert, the block's beginning, the gate, results for the caller.
#include "runtime/cuda/cache.cuh"

namespace k3 {

// dst[i] = rms(src)[i] * gain[i], rounded where an activation is rounded. All threads of the block; `slots` as in block_sum. src may be dst.
template <class A>
__device__ void norm_row(const A *src, uint32_t width, const k3_cuda_vector &gain, float eps, float *slots, A *dst, float *dst_f32) {
  float squares = 0;
  for (uint32_t i = threadIdx.x; i < width; i += blockDim.x)
    squares = fmaf(to_float(src[i]), to_float(src[i]), squares);
  const float inverse = 1 / sqrtf(block_sum(squares, slots) / static_cast<float>(width) + eps);
  for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
    const float value = rounded<A>(rounded<A>(to_float(src[i]) * inverse) * load_float(gain, i));
    dst[i] = from_float<A>(value);
    if (dst_f32)
      dst_f32[i] = value;
  }
}

template <class A>
__global__ void join_kernel(const __grid_constant__ k3_cuda_join p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  const uint32_t row = blockIdx.x, tap = blockIdx.y;
  A *out = static_cast<A *>(p.out) + static_cast<uint64_t>(row) * p.width + static_cast<uint64_t>(p.first_tap + tap) * p.tap_width;
  const void *src = static_cast<const uint8_t *>(p.taps[tap]) + (p.first_row + row) * p.row_nbytes[tap];
  const k3_cuda_vector values = {src, p.dtypes[tap]};
  for (uint32_t i = threadIdx.x; i < p.tap_width; i += blockDim.x)
    out[i] = from_float<A>(load_float(values, i));
  if (p.gains[tap].data)
    norm_row(out, p.tap_width, p.gains[tap], p.eps, slots, out, static_cast<float *>(nullptr));  // each thread meets its own elements again
}

template <class A>
__global__ void add_norm_kernel(const __grid_constant__ k3_cuda_add_norm p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  const uint64_t begin = static_cast<uint64_t>(blockIdx.x) * p.width;
  A *residual = static_cast<A *>(p.residual) + begin;
  if (p.partial) {
    const A *partial = static_cast<const A *>(p.partial) + begin;
    for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x)
      residual[i] = from_float<A>(to_float(residual[i]) + to_float(partial[i]));
  }
  float *out_f32 = p.out_f32 ? reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(p.out_f32) + blockIdx.x * p.out_row_nbytes) : nullptr;
  norm_row(residual, p.width, p.gain, p.eps, slots, static_cast<A *>(p.out) + begin, out_f32);
}

// Any refusal of a call will do, so it needs no order; it is one store, so that it is whole.
__device__ static void refuse(uint64_t *refused, k3_cuda_refusal why, uint32_t which) {
  const uint64_t word = static_cast<uint64_t>(why) << 32 | which;
#if defined(K3_CUDA_SIM)
  __atomic_store_n(refused, word, __ATOMIC_RELAXED);
#else
  *static_cast<volatile uint64_t *>(refused) = word;
#endif
}

// Block (row, layer).
template <class A>
__global__ void insert_kernel(const __grid_constant__ k3_cuda_insert p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, slots);
  const uint32_t row = blockIdx.x, layer = blockIdx.y, rope_begin = p.latent_rank;
  A *kv = static_cast<A *>(p.kv) + row * p.kv_stride + layer * p.layer_stride;
  if (p.q_a)
    norm_row(kv, p.q_rank, p.q_gain, p.eps, slots, static_cast<A *>(p.q_a) + static_cast<uint64_t>(row) * p.q_rank, static_cast<float *>(nullptr));
  kv += p.q_rank;
  float *out_f32 = nullptr;
  if (p.out_f32)
    out_f32 = reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(p.out_f32) + row * p.out_row_nbytes + layer * p.out_layer_nbytes);
  norm_row(kv, p.latent_rank, p.gains[layer], p.eps, slots, kv, out_f32);
  int64_t position = p.positions[row];
  if (position < 0 && p.refused) {
    refuse(p.refused, K3_CUDA_BAD_POSITION, row);
    return;
  }
  if (position >= static_cast<int64_t>(p.max_positions))
    position = static_cast<int64_t>(p.max_positions) - 1;
  for (uint32_t i = threadIdx.x; i < p.rope.n_pairs; i += blockDim.x) {
    const float2 factors = rope_factors(p.rope, position, i);
    const float a = to_float(kv[rope_begin + 2 * i]), b = to_float(kv[rope_begin + 2 * i + 1]);
    const float turned[2] = {rounded<A>(a * factors.x - b * factors.y), rounded<A>(b * factors.x + a * factors.y)};
    for (uint32_t j = 0; j < 2; j++) {
      kv[rope_begin + 2 * i + j] = from_float<A>(turned[j]);
      if (out_f32)
        out_f32[rope_begin + 2 * i + j] = turned[j];
    }
  }
  const int64_t slot = p.slots[layer * p.slots_layer_stride + row];
  const k3_cuda_cache &cache = p.caches[layer];
  if (slot >= 0 && static_cast<uint64_t>(slot) >= cache.n_slots && p.refused)
    refuse(p.refused, K3_CUDA_BAD_SLOT, row);
  if (slot < 0 || static_cast<uint64_t>(slot) >= cache.n_slots)
    return;
  __syncthreads();
  uint8_t *dst = cache_row(cache, static_cast<uint64_t>(slot));
  for (uint32_t i = threadIdx.x; i < p.latent_rank + 2 * p.rope.n_pairs; i += blockDim.x)
    cache_store(cache, dst, i, to_float(kv[i]));
}

// Slot of a position by a request's block table; -1 when the table is too short or names a block that the cache has not.
__device__ static int64_t slot_of(const k3_cuda_begin &p, const int32_t *table, uint64_t position) {
  const uint64_t block = position / p.cache.block_size;
  if (block >= p.max_blocks || table[block] < 0 || static_cast<uint64_t>(table[block]) >= p.n_blocks)
    return -1;
  return static_cast<int64_t>(static_cast<uint64_t>(table[block]) * p.cache.block_size + position % p.cache.block_size);
}

// What the CPU backend refuses too: the anchor, the number of keys, a position below it without a block.
__device__ static void check_request(const k3_cuda_begin &p, uint32_t request) {
  const int64_t anchor = p.anchor_positions[request];
  if (anchor < 0 || static_cast<uint64_t>(anchor) >= p.max_positions) {
    refuse(p.refused, K3_CUDA_BAD_ANCHOR, request);
    return;
  }
  const uint64_t end = static_cast<uint64_t>(anchor) + p.block_width, n_keys = end < p.max_positions ? end : p.max_positions;
  if (n_keys > p.max_keys) {
    refuse(p.refused, K3_CUDA_TOO_MANY_KEYS, request);
    return;
  }
  for (uint64_t position = threadIdx.x * static_cast<uint64_t>(p.cache.block_size); position < n_keys; position += blockDim.x * p.cache.block_size)
    if (slot_of(p, p.block_tables + request * p.max_blocks, position) < 0)
      refuse(p.refused, K3_CUDA_BAD_TABLE, request);
}

// Block: one row of the block forward.
template <class A>
__global__ void begin_kernel(const __grid_constant__ k3_cuda_begin p) {
  wait_for_kernels();
  const uint32_t row = blockIdx.x, request = row / p.block_width, j = row % p.block_width;
  int64_t anchor = p.anchor_positions[request];
  if (j == 0)
    check_request(p, request);
  if (anchor < 0)
    anchor = 0;
  const uint64_t position = static_cast<uint64_t>(anchor) + j;
  if (threadIdx.x == 0) {
    const bool inside = position < p.max_positions;
    p.positions[row] = static_cast<int64_t>(inside ? position : p.max_positions - 1);
    p.slots[row] = inside ? slot_of(p, p.block_tables + request * p.max_blocks, position) : -1;
    if (j == 0) {
      uint64_t n_keys = static_cast<uint64_t>(anchor) + p.block_width;
      n_keys = n_keys < p.max_positions ? n_keys : p.max_positions;
      p.n_keys[request] = static_cast<int64_t>(n_keys < p.max_keys ? n_keys : p.max_keys);
    }
  }
  int64_t id = j == 0 ? p.anchor_ids[request] : static_cast<int64_t>(p.mask_token_id);
  id = id < 0 ? 0 : static_cast<uint64_t>(id) >= p.vocab_size ? static_cast<int64_t>(p.vocab_size) - 1 : id;
  const int64_t at = id - p.first_id;
  const bool mine = at >= 0 && at < p.embedding.n_rows;
  A *out = static_cast<A *>(p.residual) + static_cast<uint64_t>(row) * p.embedding.n_cols;
  for (uint32_t col = threadIdx.x * 8; col < p.embedding.n_cols; col += blockDim.x * 8) {
    float values[8] = {};
    if (mine)
      decode_row8(p.embedding, static_cast<uint32_t>(at), col, values);
    for (uint32_t i = 0; i < 8 && col + i < p.embedding.n_cols; i++)
      out[col + i] = from_float<A>(values[i]);
  }
}

template <class A>
__global__ void gate_kernel(const __grid_constant__ k3_cuda_gate p) {
  wait_for_kernels();
  const A *gate = static_cast<const A *>(p.gate_up) + static_cast<uint64_t>(blockIdx.y) * 2 * p.width, *up = gate + p.width;
  A *out = static_cast<A *>(p.out) + static_cast<uint64_t>(blockIdx.y) * p.width;
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.width)
    return;
  out[i] = from_float<A>(gated<A>(to_float(gate[i]), to_float(up[i])));
}

template <class A>
__global__ void export_kernel(const __grid_constant__ k3_cuda_export p) {
  wait_for_kernels();
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.width)
    return;
  float *out = reinterpret_cast<float *>(reinterpret_cast<uint8_t *>(p.out) + blockIdx.y * p.out_row_nbytes);
  out[i] = to_float(static_cast<const A *>(p.in)[static_cast<uint64_t>(blockIdx.y) * p.width + i]);
}

constexpr size_t kSlotNbytes = kBlockThreads / 32 * sizeof(float);

}  // namespace k3

using k3::kBlockThreads;
using k3::kSlotNbytes;
using k3::launch;

extern "C" cudaError_t k3_cuda_launch_join(const struct k3_cuda_join *p, cudaStream_t stream) {
  const dim3 grid(p->n_rows, p->n_taps);
  return p->bf16 ? launch(grid, kBlockThreads, kSlotNbytes, stream, k3::join_kernel<__nv_bfloat16>, *p)
                 : launch(grid, kBlockThreads, kSlotNbytes, stream, k3::join_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_add_norm(const struct k3_cuda_add_norm *p, cudaStream_t stream) {
  return p->bf16 ? launch(p->n_rows, kBlockThreads, kSlotNbytes, stream, k3::add_norm_kernel<__nv_bfloat16>, *p)
                 : launch(p->n_rows, kBlockThreads, kSlotNbytes, stream, k3::add_norm_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_insert(const struct k3_cuda_insert *p, cudaStream_t stream) {
  const dim3 grid(p->n_rows, p->n_layers);
  return p->bf16 ? launch(grid, kBlockThreads, kSlotNbytes, stream, k3::insert_kernel<__nv_bfloat16>, *p)
                 : launch(grid, kBlockThreads, kSlotNbytes, stream, k3::insert_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_begin(const struct k3_cuda_begin *p, cudaStream_t stream) {
  const uint32_t n_rows = p->n_requests * p->block_width;
  return p->bf16 ? launch(n_rows, kBlockThreads, 0, stream, k3::begin_kernel<__nv_bfloat16>, *p)
                 : launch(n_rows, kBlockThreads, 0, stream, k3::begin_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_gate(const struct k3_cuda_gate *p, cudaStream_t stream) {
  const dim3 grid(k3::ceil_div(p->width, kBlockThreads), p->n_rows);
  return p->bf16 ? launch(grid, kBlockThreads, 0, stream, k3::gate_kernel<__nv_bfloat16>, *p)
                 : launch(grid, kBlockThreads, 0, stream, k3::gate_kernel<float>, *p);
}

extern "C" cudaError_t k3_cuda_launch_export(const struct k3_cuda_export *p, cudaStream_t stream) {
  const dim3 grid(k3::ceil_div(p->width, kBlockThreads), p->n_rows);
  return p->in_is_bf16 ? launch(grid, kBlockThreads, 0, stream, k3::export_kernel<__nv_bfloat16>, *p)
                       : launch(grid, kBlockThreads, 0, stream, k3::export_kernel<float>, *p);
}
