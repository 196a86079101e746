// Products of a few rows with a weight matrix: bound by reading the weights, which are read once for up to eight rows and decoded in registers.
#include "runtime/cuda/matrix.cuh"

namespace k3 {

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
  uint32_t i_shard = 0;
  while (i_shard + 1 < w.n_shards && output >= w.shards[i_shard + 1].row)
    i_shard++;
  const k3_cuda_shard &shard = w.shards[i_shard];
  const uint64_t at = p.shard_stride ? (p.first_shard + i_shard) * p.shard_stride + output - shard.row : output;
  static_cast<Y *>(p.y)[input * p.y_stride + at] = from_float<Y>(total * shard.factor * p.scale);
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
