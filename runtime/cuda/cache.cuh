// Rows of the paged latent cache.
#pragma once
#include "runtime/cuda/matrix.cuh"

namespace k3 {

__device__ inline uint8_t *cache_row(const k3_cuda_cache &cache, uint64_t slot) {
  return static_cast<uint8_t *>(cache.base) + slot / cache.block_size * cache.block_nbytes + slot % cache.block_size * cache.row_nbytes;
}

__device__ inline float cache_load(const k3_cuda_cache &cache, const uint8_t *row, uint32_t i) {
  switch (cache.dtype) {
    case K3_CUDA_FLOAT_BF16: return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(row)[i]);
    case K3_CUDA_FLOAT_F32: return reinterpret_cast<const float *>(row)[i];
    case K3_CUDA_FLOAT_E4M3: return from_fp8(row[i], __NV_E4M3) * cache.scale;
    default: return from_fp8(row[i], __NV_E5M2) * cache.scale;
  }
}

__device__ inline void cache_store(const k3_cuda_cache &cache, uint8_t *row, uint32_t i, float value) {
  switch (cache.dtype) {
    case K3_CUDA_FLOAT_BF16: reinterpret_cast<__nv_bfloat16 *>(row)[i] = __float2bfloat16_rn(value); break;
    case K3_CUDA_FLOAT_F32: reinterpret_cast<float *>(row)[i] = value; break;
    case K3_CUDA_FLOAT_E4M3: row[i] = __nv_cvt_float_to_fp8(value / cache.scale, __NV_SATFINITE, __NV_E4M3); break;
    default: row[i] = __nv_cvt_float_to_fp8(value / cache.scale, __NV_SATFINITE, __NV_E5M2); break;
  }
}

// cos and sin of pair i at a position. The angle is a product of floats; its cosine is taken in double, since angles reach a million.
__device__ inline float2 rope_factors(const k3_cuda_rope &rope, int64_t position, uint32_t i) {
  const float angle = static_cast<float>(position) * rope.inv_freq[i];
  return make_float2(static_cast<float>(cos(static_cast<double>(angle))) * rope.amplitude,
                     static_cast<float>(sin(static_cast<double>(angle))) * rope.amplitude);
}

}  // namespace k3
