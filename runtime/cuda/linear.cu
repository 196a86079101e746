// Products of a few rows with a weight matrix: bound by reading the weights, which are read once for up to eight rows and decoded in registers.
#include "runtime/cuda/matrix.cuh"

namespace k3 {

// One result: the shard's second scale, the caller's scale, and the place, in one matrix or in one per shard.
template <class Y>
__device__ void store_output(const k3_cuda_linear &p, uint32_t input, uint32_t output, float total) {
  uint32_t i_shard = 0;
  while (i_shard + 1 < p.w.n_shards && output >= p.w.shards[i_shard + 1].row)
    i_shard++;
  const k3_cuda_shard &shard = p.w.shards[i_shard];
  const uint64_t at = p.shard_stride ? (p.first_shard + i_shard) * p.shard_stride + output - shard.row : output;
  static_cast<Y *>(p.y)[input * p.y_stride + at] = from_float<Y>(total * shard.factor * p.scale);
}

constexpr int kOutputs = 4, kInputs = 8;  // rows of W and rows of x of one block

// The threads of a block share out the columns, eight at a time; every thread keeps all kOutputs x kInputs partial sums.
template <class A, class Y, int kKind>
__global__ void linear_kernel(const __grid_constant__ k3_cuda_linear p) {
  K3_DYNAMIC_SHARED(float, warp_parts);  // [warps][kInputs * kOutputs]
  const k3_cuda_matrix &w = p.w;
  const uint32_t first_output = blockIdx.x * kOutputs, first_input = blockIdx.y * kInputs;
  const k3_cuda_shard *shards[kOutputs];
#pragma unroll
  for (uint32_t o = 0; o < kOutputs; o++)
    shards[o] = &shard_of(w, first_output + o);
  float sums[kInputs * kOutputs] = {};
  for (uint32_t col = threadIdx.x * 8; col < w.n_cols; col += blockDim.x * 8) {
    float weights[kOutputs][8];
#pragma unroll
    for (uint32_t o = 0; o < kOutputs; o++) {
      if (first_output + o < w.n_rows)
        decode8<kKind>(w, *shards[o], first_output + o - shards[o]->row, col, weights[o]);
    }
#pragma unroll
    for (uint32_t r = 0; r < kInputs; r++) {
      if (first_input + r < p.n_rows) {
        const A *x = static_cast<const A *>(p.x) + (first_input + r) * p.x_stride + col;
        float inputs[8];
        if (w.aligned) {
          load8(x, inputs);
        } else {
          for (uint32_t i = 0; i < 8; i++)
            inputs[i] = col + i < w.n_cols ? to_float(x[i]) : 0;
        }
#pragma unroll
        for (uint32_t o = 0; o < kOutputs; o++) {
          if (first_output + o < w.n_rows) {
#pragma unroll
            for (int i = 0; i < 8; i++)
              sums[r * kOutputs + o] = fmaf(weights[o][i], inputs[i], sums[r * kOutputs + o]);
          }
        }
      }
    }
  }
  const float sum = warp_sums(sums);
  warp_parts[threadIdx.x] = sum;  // lane l of a warp holds the warp's part of sum l
  __syncthreads();
  if (threadIdx.x >= kInputs * kOutputs)
    return;
  const uint32_t input = first_input + threadIdx.x / kOutputs, output = first_output + threadIdx.x % kOutputs;
  if (input >= p.n_rows || output >= w.n_rows)
    return;
  float total = 0;
  for (uint32_t i = threadIdx.x; i < blockDim.x; i += 32)
    total += warp_parts[i];
  store_output<Y>(p, input, output, total);
}

// --- tensor cores ----------------------------------------------------------------------------------------------------------------------------------
// BF16 activations: sixteen rows of W are one operand of the tensor cores and eight rows of x the other, so a warp reads W straight into registers,
// with no shared memory between. Columns are taken in an order of our own, the same for both: lane (g, t) reads columns 8t .. 8t + 7 of a run of 32
// with one load, and its four pairs are the two products' pairs. The warps of a block share out the runs.

constexpr uint32_t kTileOutputs = 16, kTileInputs = 8, kRun = 32;

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}

// Eight weights as pairs, exactly: codes of FP8 without their scale, FP4 with theirs.
template <int kKind>
__device__ void load_pairs(const k3_cuda_matrix &m, const k3_cuda_shard &shard, uint32_t row, uint32_t col, uint32_t (&pairs)[4]) {
  const uint8_t *bytes = matrix_row(m, shard, row);
  const uint32_t at = m.first_col + col;
  if (kKind == K3_CUDA_BF16) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4 *>(bytes + 2 * static_cast<uint64_t>(at)));
    pairs[0] = raw.x;
    pairs[1] = raw.y;
    pairs[2] = raw.z;
    pairs[3] = raw.w;
  } else if (kKind == K3_CUDA_FP8) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2 *>(bytes + at));
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 values = from_e4m3x2(words[i / 2] >> (i % 2 * 16));
      pairs[i] = pack_bf16(values.x, values.y);
    }
  } else {
    const float scale = block_scale(m, shard, row, at);
    const uint32_t codes = __ldg(reinterpret_cast<const unsigned *>(bytes + at / 2));
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = pack_bf16(from_e2m1(codes >> (8 * i)) * scale, from_e2m1(codes >> (8 * i + 4)) * scale);
  }
}

// Block (rows of W, rows of x). kTiles tiles of x use each read of W. kScaled: FP8 with scales by columns; others have one for the row, or none left.
template <class Y, int kKind, bool kScaled, uint32_t kTiles>
__global__ void tile_kernel(const __grid_constant__ k3_cuda_linear p) {
  K3_DYNAMIC_SHARED(float, warp_parts);  // [warps][kTiles][kTileInputs][kTileOutputs]
  const k3_cuda_matrix &w = p.w;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t first_output = blockIdx.x * kTileOutputs, first_input = blockIdx.y * kTiles * kTileInputs;
  const bool has_row[2] = {first_output + g < w.n_rows, first_output + g + 8 < w.n_rows};
  const k3_cuda_shard *shards[2] = {&shard_of(w, first_output + g), &shard_of(w, first_output + g + 8)};
  const uint32_t rows[2] = {first_output + g - shards[0]->row, first_output + g + 8 - shards[1]->row};
  float sums[kTiles][4] = {};
#pragma unroll 4
  for (uint32_t run = warp * kRun; run < w.n_cols; run += n_warps * kRun) {
    uint32_t pairs[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (has_row[i])
        load_pairs<kKind>(w, *shards[i], rows[i], run + 8 * t, pairs[i]);
    float scales[2] = {0, 0};
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (has_row[i])
          scales[i] = block_scale(w, *shards[i], rows[i], w.first_col + run);
    }
    const uint32_t a[2][4] = {{pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]}, {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]}};
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; tile++) {
      const uint32_t input = first_input + tile * kTileInputs + g;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (input < p.n_rows)
        x = __ldg(reinterpret_cast<const uint4 *>(static_cast<const __nv_bfloat16 *>(p.x) + input * p.x_stride + run + 8 * t));
      const uint32_t b[2][2] = {{x.x, x.y}, {x.z, x.w}};
      if constexpr (kScaled) {
        float part[4] = {};
        multiply_tiles(part, a[0], b[0]);
        multiply_tiles(part, a[1], b[1]);
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[tile][i] = fmaf(scales[i / 2], part[i], sums[tile][i]);
      } else {
        multiply_tiles(sums[tile], a[0], b[0]);
        multiply_tiles(sums[tile], a[1], b[1]);
      }
    }
  }
#pragma unroll
  for (uint32_t tile = 0; tile < kTiles; tile++)
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
      warp_parts[((warp * kTiles + tile) * kTileInputs + 2 * t + i % 2) * kTileOutputs + g + i / 2 * 8] = sums[tile][i];
  __syncthreads();
  constexpr uint32_t n_parts = kTiles * kTileInputs * kTileOutputs;
  for (uint32_t k = threadIdx.x; k < n_parts; k += blockDim.x) {
    const uint32_t input = first_input + k / kTileOutputs, output = first_output + k % kTileOutputs;
    if (input >= p.n_rows || output >= w.n_rows)
      continue;
    float total = 0;
    for (uint32_t i = 0; i < n_warps; i++)
      total += warp_parts[i * n_parts + k];
    if (kKind == K3_CUDA_FP8 && !kScaled) {
      const k3_cuda_shard &shard = shard_of(w, output);
      total *= block_scale(w, shard, output - shard.row, 0);
    }
    store_output<Y>(p, input, output, total);
  }
}

// Whether the tensor cores' kernel reads this matrix: whole runs, each inside one block of scales.
static bool has_tiles(const k3_cuda_linear &p) {
  const bool kind = p.w.kind == K3_CUDA_BF16 || p.w.kind == K3_CUDA_FP8 || p.w.kind == K3_CUDA_FP4;
  return p.bf16 && kind && p.w.aligned && p.w.n_cols % kRun == 0 && (p.w.kind != K3_CUDA_FP8 || p.w.block_cols % kRun == 0);
}

template <class Y, int kKind, bool kScaled>
static cudaError_t launch_tiles(const k3_cuda_linear &p, cudaStream_t stream) {
  // A warp for every run, up to twice the usual block: what is in flight between memory and registers is what counts.
  const uint32_t n_runs = p.w.n_cols / kRun, most = 2 * kBlockThreads / 32, n_warps = n_runs < most ? n_runs : most;
  const uint32_t n_tiles = ceil_div(p.n_rows, kTileInputs), per_block = n_tiles >= 4 ? 4 : n_tiles >= 2 ? 2 : 1;
  const dim3 grid(ceil_div(p.w.n_rows, kTileOutputs), ceil_div(n_tiles, per_block));
  const size_t shared_nbytes = n_warps * per_block * kTileInputs * kTileOutputs * sizeof(float);
  switch (per_block) {
    case 4: return launch(grid, n_warps * 32, shared_nbytes, stream, tile_kernel<Y, kKind, kScaled, 4>, p);
    case 2: return launch(grid, n_warps * 32, shared_nbytes, stream, tile_kernel<Y, kKind, kScaled, 2>, p);
    default: return launch(grid, n_warps * 32, shared_nbytes, stream, tile_kernel<Y, kKind, kScaled, 1>, p);
  }
}

template <class Y>
static cudaError_t launch_tiles(const k3_cuda_linear &p, cudaStream_t stream) {
  switch (p.w.kind) {
    case K3_CUDA_BF16: return launch_tiles<Y, K3_CUDA_BF16, false>(p, stream);
    case K3_CUDA_FP8: return p.w.block_cols ? launch_tiles<Y, K3_CUDA_FP8, true>(p, stream) : launch_tiles<Y, K3_CUDA_FP8, false>(p, stream);
    default: return launch_tiles<Y, K3_CUDA_FP4, false>(p, stream);
  }
}

template <class A, class Y>
static cudaError_t launch_linear(const k3_cuda_linear &p, cudaStream_t stream) {
  static_assert(kInputs * kOutputs == 32, "one sum per lane");
  const dim3 grid(ceil_div(p.w.n_rows, kOutputs), ceil_div(p.n_rows, kInputs));
  const unsigned n_threads = block_threads(ceil_div(p.w.n_cols, 8));
  const size_t shared_nbytes = n_threads * sizeof(float);
  switch (p.w.kind) {
    case K3_CUDA_BF16: return launch(grid, n_threads, shared_nbytes, stream, linear_kernel<A, Y, K3_CUDA_BF16>, p);
    case K3_CUDA_F16: return launch(grid, n_threads, shared_nbytes, stream, linear_kernel<A, Y, K3_CUDA_F16>, p);
    case K3_CUDA_F32: return launch(grid, n_threads, shared_nbytes, stream, linear_kernel<A, Y, K3_CUDA_F32>, p);
    case K3_CUDA_FP8: return launch(grid, n_threads, shared_nbytes, stream, linear_kernel<A, Y, K3_CUDA_FP8>, p);
    default: return launch(grid, n_threads, shared_nbytes, stream, linear_kernel<A, Y, K3_CUDA_FP4>, p);
  }
}

template <int kKind>
__global__ void dequantise_kernel(const __grid_constant__ k3_cuda_dequantise p) {
  const uint32_t row = p.first_row + blockIdx.x;
  const k3_cuda_shard &shard = shard_of(p.w, row);
  __nv_bfloat16 *dst = static_cast<__nv_bfloat16 *>(p.dst) + static_cast<uint64_t>(blockIdx.x) * p.w.n_cols;
  for (uint32_t col = threadIdx.x * 8; col < p.w.n_cols; col += blockDim.x * 8) {
    float values[8];
    decode8<kKind>(p.w, shard, row - shard.row, col, values);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      if (col + i < p.w.n_cols)
        dst[col + i] = __float2bfloat16_rn(values[i]);
  }
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_linear(const struct k3_cuda_linear *p, cudaStream_t stream) {
  if (!p->bf16)
    return k3::launch_linear<float, float>(*p, stream);
  if (k3::has_tiles(*p))
    return p->y_is_f32 ? k3::launch_tiles<float>(*p, stream) : k3::launch_tiles<__nv_bfloat16>(*p, stream);
  return p->y_is_f32 ? k3::launch_linear<__nv_bfloat16, float>(*p, stream) : k3::launch_linear<__nv_bfloat16, __nv_bfloat16>(*p, stream);
}

extern "C" cudaError_t k3_cuda_launch_dequantise(const struct k3_cuda_dequantise *p, cudaStream_t stream) {
  switch (p->w.kind) {
    case K3_CUDA_BF16: return k3::launch(p->n_rows, k3::kBlockThreads, 0, stream, k3::dequantise_kernel<K3_CUDA_BF16>, *p);
    case K3_CUDA_F16: return k3::launch(p->n_rows, k3::kBlockThreads, 0, stream, k3::dequantise_kernel<K3_CUDA_F16>, *p);
    case K3_CUDA_F32: return k3::launch(p->n_rows, k3::kBlockThreads, 0, stream, k3::dequantise_kernel<K3_CUDA_F32>, *p);
    case K3_CUDA_FP8: return k3::launch(p->n_rows, k3::kBlockThreads, 0, stream, k3::dequantise_kernel<K3_CUDA_FP8>, *p);
    default: return k3::launch(p->n_rows, k3::kBlockThreads, 0, stream, k3::dequantise_kernel<K3_CUDA_FP4>, *p);
  }
}
