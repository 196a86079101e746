// Products of a few rows with a weight matrix: bound by reading the weights, which are read once for up to sixty-four rows and decoded in registers.
// n outputs, K columns, M rows: the weights' bytes from memory, 2 M n K FLOPs; M K activations from the L2 for every block, from the L1 where they
// fit (M up to 16 at K3's widths), which is why weights are read past it.
//   tile_kernel    BF16 activations, on the tensor cores: grid (groups of 16 or 32 outputs, groups of up to 64 rows, batches), up to 8 warps that
//   share
//                  out the columns
//   linear_kernel  everything else, plain FP32: grid (groups of 4 outputs, groups of 8 rows, batches)
#include "runtime/cuda/matrix.cuh"

namespace k3 {

// One result: the shard's second scale, the caller's scale, and the place, in one matrix, in one per shard or in one per batch. `output` counts in W.
template <class Y>
__device__ void store_output(const k3_cuda_linear &p, uint32_t input, uint32_t output, float total) {
  uint32_t i_shard = 0;
  while (i_shard + 1 < p.w.n_shards && output >= p.w.shards[i_shard + 1].row)
    i_shard++;
  const k3_cuda_shard &shard = p.w.shards[i_shard];
  const uint32_t of_batch = output - p.first_row - blockIdx.z * p.batch_rows;
  const uint64_t at = p.shard_stride ? (p.first_shard + i_shard) * p.shard_stride + output - shard.row : of_batch;
  static_cast<Y *>(p.y)[blockIdx.z * p.y_batch + input * p.y_stride + at] = from_float<Y>(total * shard.factor * p.scale);
}

constexpr int kOutputs = 4, kInputs = 8;  // rows of W and rows of x of one block

// The threads of a block share out the columns, eight at a time; every thread keeps all kOutputs x kInputs partial sums.
template <class A, class Y, int kKind>
__global__ void linear_kernel(const __grid_constant__ k3_cuda_linear p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, warp_parts);  // [warps][kInputs * kOutputs]
  const k3_cuda_matrix &w = p.w;
  const uint32_t begin = p.first_row + blockIdx.z * p.batch_rows, end = begin + p.n_outputs;
  const uint32_t first_output = begin + blockIdx.x * kOutputs, first_input = blockIdx.y * kInputs;
  const k3_cuda_shard *shards[kOutputs];
#pragma unroll
  for (uint32_t o = 0; o < kOutputs; o++)
    shards[o] = &shard_of(w, first_output + o);
  float sums[kInputs * kOutputs] = {};
  for (uint32_t col = threadIdx.x * 8; col < w.n_cols; col += blockDim.x * 8) {
    float weights[kOutputs][8];
#pragma unroll
    for (uint32_t o = 0; o < kOutputs; o++) {
      if (first_output + o < end)
        decode8<kKind>(w, *shards[o], first_output + o - shards[o]->row, col, weights[o]);
    }
#pragma unroll
    for (uint32_t r = 0; r < kInputs; r++) {
      if (first_input + r < p.n_rows) {
        const A *x = static_cast<const A *>(p.x) + blockIdx.z * p.x_batch + (first_input + r) * p.x_stride + col;
        float inputs[8];
        if (w.aligned) {
          load8(x, inputs);
        } else {
          for (uint32_t i = 0; i < 8; i++)
            inputs[i] = col + i < w.n_cols ? to_float(x[i]) : 0;
        }
#pragma unroll
        for (uint32_t o = 0; o < kOutputs; o++) {
          if (first_output + o < end) {
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
  if (input >= p.n_rows || output >= end)
    return;
  float total = 0;
  for (uint32_t i = threadIdx.x; i < blockDim.x; i += 32)
    total += warp_parts[i];
  store_output<Y>(p, input, output, total);
}

// --- tensor cores ----------------------------------------------------------------------------------------------------------------------------------
// Sixteen rows of W are one operand of the tensor cores and eight rows of x the other, so a warp reads W straight into registers, with no shared
// memory between. Columns are taken in an order of our own, the same for both: lane (g, t) reads kLane columns of rows g and g + 8 with one load of
// sixteen bytes, the four lanes of a row together a run; its pairs are the products' pairs. FP4 codes j and j + 4 of a word are a pair, so that one
// shift and two masks widen two codes.

constexpr uint32_t kTileOutputs = 16, kTileInputs = 8;
constexpr float kFp4Shift = 6.7108864e+07f;  // 2^26: what is left of an FP4 code's 2^-126 after a factor of 2^100

// kLane codes of one row, as words.
template <int kKind, uint32_t kLane, int kWords>
__device__ void load_codes(const uint8_t *row, uint32_t col, uint32_t (&words)[kWords]) {
  const uint8_t *at = row + (kKind == K3_CUDA_BF16 ? 2 * static_cast<uint64_t>(col) : kKind == K3_CUDA_FP8 ? col : col / 2);
  if constexpr (kWords == 4) {
    const uint4 raw = load_stream(reinterpret_cast<const uint4 *>(at));
    words[0] = raw.x;
    words[1] = raw.y;
    words[2] = raw.z;
    words[3] = raw.w;
  } else if constexpr (kWords == 2) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2 *>(at));
    words[0] = raw.x;
    words[1] = raw.y;
  } else {
    words[0] = __ldg(reinterpret_cast<const unsigned *>(at));
  }
}

// Codes j and j + 4 of a word of FP4 as a pair, times 2^-126: exponent and mantissa bits of a code at the bottom of a BF16's exponent field.
__device__ inline uint32_t fp4_pair(uint32_t word, int j) {
  const uint32_t codes = word >> (4 * j);
  return (codes & 0x00080008u) << 12 | (codes & 0x00070007u) << 6;
}

// Both halves times a factor; exact where BF16 holds the product, subnormal factors included.
__device__ inline uint32_t scale_pair(uint32_t pair, uint32_t factors) {
  const __nv_bfloat162 product = __hmul2(bf16_pair(pair), bf16_pair(factors));
  return static_cast<uint32_t>(__bfloat16_as_ushort(product.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(product.y)) << 16;
}

// Eight weights as pairs, exactly: codes of FP8 without their scale, FP4 times `factors`.
template <int kKind, int kWords>
__device__ void decode_pairs(const uint32_t (&words)[kWords], uint32_t group, const uint32_t (&factors)[2], uint32_t (&pairs)[4]) {
  if constexpr (kKind == K3_CUDA_BF16) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = words[i];
  } else if constexpr (kKind == K3_CUDA_FP8) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const float2 values = from_e4m3x2(words[2 * group + i / 2] >> (i % 2 * 16));
      pairs[i] = pack_bf16(values.x, values.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      pairs[i] = scale_pair(fp4_pair(words[group], i), factors[0]);
      if (factors[1] != 0)
        pairs[i] = scale_pair(pairs[i], factors[1]);
    }
  }
}

// What scales FP4 codes of 2^-126 at stored column `col`. E4M3: one factor, times 2^100, of which kFp4Shift is left to do; E8M0 spans all of BF16's
// range and takes two.
__device__ inline void fp4_factors(const k3_cuda_matrix &m, const void *scales, uint32_t first, uint32_t col, uint32_t (&factors)[2]) {
  const float scale = load_scale(m, scales, first + (m.block_cols == 16 ? col / 16 : col / 32));
  const bool is_e4m3 = m.scale_dtype == K3_CUDA_FLOAT_E4M3;
  factors[0] = is_e4m3 ? pack_bf16(scale * 1.2676506e+30f, scale * 1.2676506e+30f) : 0x7e807e80u;  // 2^100 scale, or 2^126
  factors[1] = is_e4m3 ? 0 : pack_bf16(scale, scale);
}

// Block (rows of W, rows of x, batch). kTiles tiles of x use each read of W, kOuts tiles of W each read of x. kScaled: FP8 with scales by columns;
// others have one for the row, or none left.
template <int kKind, uint32_t kLane, bool kScaled, uint32_t kTiles, uint32_t kOuts>
__global__ void tile_kernel(const __grid_constant__ k3_cuda_linear p) {
  K3_DYNAMIC_SHARED(float, warp_parts);  // [warps][kTiles][kTileInputs][kOuts][kTileOutputs]
  constexpr uint32_t kCodeBits = kKind == K3_CUDA_BF16 ? 16 : kKind == K3_CUDA_FP8 ? 8 : 4;
  constexpr uint32_t kRun = 4 * kLane, kGroups = kLane / 8, kBlockOutputs = kOuts * kTileOutputs;
  constexpr int kWords = static_cast<int>(kLane * kCodeBits / 32);
  constexpr int kUnroll = kTiles * kOuts > 4 ? 1 : kTiles * kOuts > 2 ? 2 : 4;
  const k3_cuda_matrix &w = p.w;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t first_input = blockIdx.y * kTiles * kTileInputs, begin = p.first_row + blockIdx.z * p.batch_rows;
  // Output i of a tile is row i of W; of a gate, i < 8: row i of the first half, else row i - 8 of the second.
  const uint32_t per_tile = p.gated ? kTileOutputs / 2 : kTileOutputs, second = p.gated ? p.n_outputs : 8;
  const uint32_t first_output = blockIdx.x * kOuts * per_tile;
  const uint8_t *rows[kOuts][2];
  const void *scales[kOuts][2];
  uint32_t first_scale[kOuts][2];
#pragma unroll
  for (uint32_t o = 0; o < kOuts; o++) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t output = first_output + o * per_tile + g + (p.gated ? 0 : i * 8), row = begin + output + (p.gated ? i * second : 0);
      const bool exists = output < p.n_outputs;
      const k3_cuda_shard &shard = shard_of(w, row);
      rows[o][i] = exists ? matrix_row(w, shard, row - shard.row) : nullptr;
      scales[o][i] = shard.scale;
      first_scale[o][i] = (w.block_rows ? (row - shard.row) / w.block_rows : 0) * w.scale_cols;
    }
  }
#pragma unroll
  for (uint32_t o = 0; o < kOuts; o++)  // weights are nobody's result: their way from memory begins while the kernel before still runs
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
      if (rows[o][i] && (warp * 4 + t) * kLane < w.n_cols)
        prefetch(rows[o][i] + kCodeBits * (w.first_col + (warp * 4 + t) * kLane) / 8);
  wait_for_kernels();
  const __nv_bfloat16 *x = static_cast<const __nv_bfloat16 *>(p.x) + blockIdx.z * p.x_batch;
  float sums[kOuts][kTiles][4] = {};
#pragma unroll kUnroll
  for (uint32_t run = warp * kRun; run < w.n_cols; run += n_warps * kRun) {
    const uint32_t col = run + kLane * t, at = w.first_col + col;
    const bool has_cols = col < w.n_cols;
    uint32_t words[kOuts][2][kWords] = {};
#pragma unroll
    for (uint32_t o = 0; o < kOuts; o++)
#pragma unroll
      for (uint32_t i = 0; i < 2; i++)
        if (has_cols && rows[o][i])
          load_codes<kKind, kLane>(rows[o][i], at, words[o][i]);
    float run_scales[kOuts][2] = {};
    if constexpr (kScaled) {
#pragma unroll
      for (uint32_t o = 0; o < kOuts; o++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
          if (rows[o][i])
            run_scales[o][i] = load_scale(w, scales[o][i], first_scale[o][i] + (w.first_col + run) / w.block_cols);
    }
    float parts[kScaled ? kOuts : 1][kScaled ? kTiles : 1][4] = {};
    uint32_t factors[kOuts][2][2] = {};
#pragma unroll
    for (uint32_t group = 0; group < kGroups; group++) {
      uint32_t pairs[kOuts][2][4];
#pragma unroll
      for (uint32_t o = 0; o < kOuts; o++) {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
          if (kKind == K3_CUDA_FP4 && group % 2 == 0 && has_cols && rows[o][i])
            fp4_factors(w, scales[o][i], first_scale[o][i], at + 8 * group, factors[o][i]);
          decode_pairs<kKind>(words[o][i], group, factors[o][i], pairs[o][i]);
        }
      }
#pragma unroll
      for (uint32_t tile = 0; tile < kTiles; tile++) {
        const uint32_t input = first_input + tile * kTileInputs + g;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (has_cols && input < p.n_rows)
          raw = load16(x + input * p.x_stride + col + 8 * group);
        uint32_t b[2][2] = {{raw.x, raw.y}, {raw.z, raw.w}};
        if constexpr (kKind == K3_CUDA_FP4) {
          b[0][0] = pair_low(raw.x, raw.z);
          b[0][1] = pair_high(raw.x, raw.z);
          b[1][0] = pair_low(raw.y, raw.w);
          b[1][1] = pair_high(raw.y, raw.w);
        }
#pragma unroll
        for (uint32_t o = 0; o < kOuts; o++) {
          float(&d)[4] = kScaled ? parts[kScaled ? o : 0][kScaled ? tile : 0] : sums[o][tile];
          multiply_tiles(d, {pairs[o][0][0], pairs[o][1][0], pairs[o][0][1], pairs[o][1][1]}, b[0]);
          multiply_tiles(d, {pairs[o][0][2], pairs[o][1][2], pairs[o][0][3], pairs[o][1][3]}, b[1]);
        }
      }
    }
    if constexpr (kScaled) {
#pragma unroll
      for (uint32_t o = 0; o < kOuts; o++)
#pragma unroll
        for (uint32_t tile = 0; tile < kTiles; tile++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            sums[o][tile][i] = fmaf(run_scales[o][i / 2], parts[o][tile][i], sums[o][tile][i]);
    }
  }
#pragma unroll
  for (uint32_t o = 0; o < kOuts; o++)
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; tile++)
#pragma unroll
      for (uint32_t i = 0; i < 4; i++)
        warp_parts[((warp * kTiles + tile) * kTileInputs + 2 * t + i % 2) * kBlockOutputs + o * kTileOutputs + g + i / 2 * 8] = sums[o][tile][i];
  __syncthreads();
  constexpr uint32_t n_parts = kTiles * kTileInputs * kBlockOutputs;
  const auto total_of = [&](uint32_t k, uint32_t output) {  // all warps' parts, and what of the scales no product has seen
    float total = 0;
    for (uint32_t i = 0; i < n_warps; i++)
      total += warp_parts[i * n_parts + k];
    if (kKind == K3_CUDA_FP8 && !kScaled) {
      const k3_cuda_shard &shard = shard_of(w, output);
      total *= block_scale(w, shard, output - shard.row, 0);
    }
    return kKind == K3_CUDA_FP4 && w.scale_dtype == K3_CUDA_FLOAT_E4M3 ? total * kFp4Shift : total;
  };
  const uint32_t n_results = kTiles * kTileInputs * kOuts * per_tile;
  for (uint32_t i = threadIdx.x; i < n_results; i += blockDim.x) {
    const uint32_t input = i / (kOuts * per_tile), o = i % (kOuts * per_tile) / per_tile, of_tile = i % per_tile;
    const uint32_t output = first_output + o * per_tile + of_tile, k = input * kBlockOutputs + o * kTileOutputs + of_tile;
    if (first_input + input >= p.n_rows || output >= p.n_outputs)
      continue;
    if (p.gated) {
      const uint32_t gate_row = begin + output, up_row = gate_row + second;
      const float gate = rounded<__nv_bfloat16>(total_of(k, gate_row) * shard_of(w, gate_row).factor);
      const float up = rounded<__nv_bfloat16>(total_of(k + 8, up_row) * shard_of(w, up_row).factor);
      static_cast<__nv_bfloat16 *>(p.y)[(first_input + input) * p.y_stride + output] = from_float<__nv_bfloat16>(gated<__nv_bfloat16>(gate, up));
    } else if (p.y_is_f32) {
      store_output<float>(p, first_input + input, begin + output, total_of(k, begin + output));
    } else {
      store_output<__nv_bfloat16>(p, first_input + input, begin + output, total_of(k, begin + output));
    }
  }
}

// Whether the tensor cores' kernel reads this matrix.
static bool has_tiles(const k3_cuda_linear &p) {
  if (!p.bf16 || !p.w.aligned)
    return false;
  switch (p.w.kind) {
    case K3_CUDA_BF16: return true;
    case K3_CUDA_FP8: return p.w.block_cols % 32 == 0;
    case K3_CUDA_FP4:
      return (p.w.block_cols == 16 || p.w.block_cols == 32) && p.w.first_col % 16 == 0 &&
             (p.w.scale_dtype == K3_CUDA_FLOAT_E4M3 || p.w.scale_dtype == K3_CUDA_FLOAT_E8M0);
    default: return false;
  }
}

// Whether sixteen bytes of a row can be read at a time, each inside one block of scales as far as a product spans.
static bool reads_wide(const k3_cuda_linear &p, uint32_t n_lane_cols) {
  bool wide = p.w.row_nbytes % 16 == 0 && p.w.n_cols % n_lane_cols == 0 && p.w.first_col % n_lane_cols == 0;
  if (p.w.kind == K3_CUDA_FP8)
    wide &= p.w.block_cols % 64 == 0;
  for (uint32_t i = 0; i < p.w.n_shards; i++)
    wide &= reinterpret_cast<uintptr_t>(p.w.shards[i].weight) % 16 == 0;
  return wide;
}

template <int kKind, uint32_t kLane, bool kScaled, uint32_t kTiles, uint32_t kOuts>
static cudaError_t launch_tiles(const k3_cuda_linear &p, cudaStream_t stream) {
  // A warp for every run, up to twice the usual block: what is in flight between memory and registers is what counts.
  const uint32_t n_runs = ceil_div(p.w.n_cols, 4 * kLane), n_warps = min(n_runs, 2 * kBlockThreads / 32);
  const uint32_t per_block = kOuts * (p.gated ? kTileOutputs / 2 : kTileOutputs);
  const dim3 grid(ceil_div(p.n_outputs, per_block), ceil_div(p.n_rows, kTiles * kTileInputs), p.n_batches);
  const size_t shared_nbytes = n_warps * kTiles * kTileInputs * kOuts * kTileOutputs * sizeof(float);
  const cudaError_t error = allow_shared(tile_kernel<kKind, kLane, kScaled, kTiles, kOuts>, shared_nbytes);
  return error == cudaSuccess ? launch(grid, n_warps * 32, shared_nbytes, stream, tile_kernel<kKind, kLane, kScaled, kTiles, kOuts>, p) : error;
}

// Tiles of x per block: one for up to eight rows, four for up to thirty-two, then eight, which only FP4 has: other kinds read W again, which costs
// them less than a panel would. Tiles of W: two where that leaves every processor a few blocks, since x is read once per block.
template <int kKind, uint32_t kLane, bool kScaled, bool kWide>
static cudaError_t launch_tiles(const k3_cuda_linear &p, cudaStream_t stream) {
  const uint32_t n_tiles = ceil_div(p.n_rows, kTileInputs);
  const bool many_outputs = p.n_outputs * (p.gated ? 2 : 1) >= K3_CUDA_WIDE_OUTPUTS;
  if constexpr (kKind == K3_CUDA_FP4 && kWide) {
    if (n_tiles > 4)
      return many_outputs ? launch_tiles<kKind, kLane, kScaled, 8, 2>(p, stream) : launch_tiles<kKind, kLane, kScaled, 8, 1>(p, stream);
  }
  if constexpr (kWide) {
    if (many_outputs)
      return n_tiles > 1 ? launch_tiles<kKind, kLane, kScaled, 4, 2>(p, stream) : launch_tiles<kKind, kLane, kScaled, 1, 2>(p, stream);
  }
  return n_tiles > 1 ? launch_tiles<kKind, kLane, kScaled, 4, 1>(p, stream) : launch_tiles<kKind, kLane, kScaled, 1, 1>(p, stream);
}

static cudaError_t launch_tiles(const k3_cuda_linear &p, cudaStream_t stream) {
  switch (p.w.kind) {
    case K3_CUDA_BF16: return launch_tiles<K3_CUDA_BF16, 8, false, true>(p, stream);
    case K3_CUDA_FP8:
      if (reads_wide(p, 16))
        return p.w.block_cols ? launch_tiles<K3_CUDA_FP8, 16, true, true>(p, stream) : launch_tiles<K3_CUDA_FP8, 16, false, true>(p, stream);
      return p.w.block_cols ? launch_tiles<K3_CUDA_FP8, 8, true, false>(p, stream) : launch_tiles<K3_CUDA_FP8, 8, false, false>(p, stream);
    default: return reads_wide(p, 32) ? launch_tiles<K3_CUDA_FP4, 32, false, true>(p, stream) : launch_tiles<K3_CUDA_FP4, 8, false, false>(p, stream);
  }
}

template <class A, class Y>
static cudaError_t launch_linear(const k3_cuda_linear &p, cudaStream_t stream) {
  static_assert(kInputs * kOutputs == 32, "one sum per lane");
  const dim3 grid(ceil_div(p.n_outputs, kOutputs), ceil_div(p.n_rows, kInputs), p.n_batches);
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
  wait_for_kernels();
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

extern "C" bool k3_cuda_linear_can_gate(const struct k3_cuda_linear *p) {
  return k3::has_tiles(*p);
}

extern "C" cudaError_t k3_cuda_launch_linear(const struct k3_cuda_linear *p, cudaStream_t stream) {
  if (!p->bf16)
    return k3::launch_linear<float, float>(*p, stream);
  if (k3::has_tiles(*p))
    return k3::launch_tiles(*p, stream);
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
