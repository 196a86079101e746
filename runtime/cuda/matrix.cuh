// Weights as a kernel reads them: codes and block scales of every scheme to floats, without the second scale, which is a factor of the whole shard.
#pragma once
#include "runtime/cuda/device.cuh"

namespace k3 {

// E2M1 by its bits: the code's exponent and mantissa at the bottom of a float's exponent field are the value times 2^-126, subnormals included.
__device__ inline float from_e2m1(uint32_t code) {
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 8.5070592e+37f;
}

// Two FP8 codes, exactly; NaN stays NaN.
__device__ inline float2 from_fp8x2(uint32_t codes, uint32_t dtype) {
  const __nv_fp8_interpretation_t format = dtype == K3_CUDA_FLOAT_E5M2 ? __NV_E5M2 : __NV_E4M3;
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffff), format);
  return __half22float2(__half2(raw));
}
__device__ inline float2 from_e4m3x2(uint32_t codes) {
  return from_fp8x2(codes, K3_CUDA_FLOAT_E4M3);
}

__device__ inline float from_fp8(uint8_t code, __nv_fp8_interpretation_t format) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, format)));
}

// 2^(code - 127); code 0 is a subnormal, 255 is NaN.
__device__ inline float from_e8m0(uint32_t code) {
  return __uint_as_float(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
}

__device__ inline float load_scale(const k3_cuda_matrix &m, const void *scales, uint32_t i) {
  switch (m.scale_dtype) {
    case K3_CUDA_FLOAT_E4M3: return from_fp8(static_cast<const uint8_t *>(scales)[i], __NV_E4M3);
    case K3_CUDA_FLOAT_E8M0: return from_e8m0(static_cast<const uint8_t *>(scales)[i]);
    default: return load_float({scales, m.scale_dtype}, i);
  }
}

// `row` counts in the shard, `col` in the stored columns.
__device__ inline float block_scale(const k3_cuda_matrix &m, const k3_cuda_shard &shard, uint32_t row, uint32_t col) {
  const uint32_t scale_row = m.block_rows ? row / m.block_rows : 0, scale_col = m.block_cols ? col / m.block_cols : 0;
  return load_scale(m, shard.scale, scale_row * m.scale_cols + scale_col);
}

__device__ inline const uint8_t *matrix_row(const k3_cuda_matrix &m, const k3_cuda_shard &shard, uint32_t row) {
  return static_cast<const uint8_t *>(shard.weight) + static_cast<uint64_t>(row) * m.row_nbytes;
}

__device__ inline const k3_cuda_shard &shard_of(const k3_cuda_matrix &m, uint32_t row) {
  uint32_t i = 0;
  while (i + 1 < m.n_shards && row >= m.shards[i + 1].row)
    i++;
  return m.shards[i];
}

template <int kKind>
__device__ float decode1(const k3_cuda_matrix &m, const k3_cuda_shard &shard, uint32_t row, uint32_t col) {
  const uint8_t *bytes = matrix_row(m, shard, row);
  if (kKind == K3_CUDA_BF16)
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(bytes)[col]);
  if (kKind == K3_CUDA_F16)
    return __half2float(reinterpret_cast<const __half *>(bytes)[col]);
  if (kKind == K3_CUDA_F32)
    return reinterpret_cast<const float *>(bytes)[col];
  if (kKind == K3_CUDA_FP8)
    return from_fp8(bytes[col], __NV_E4M3) * block_scale(m, shard, row, col);
  return from_e2m1(static_cast<uint32_t>(bytes[col / 2]) >> (col % 2 * 4)) * block_scale(m, shard, row, col);
}

// Columns col .. col + 7 of the matrix, zero beyond its end. With an aligned matrix and col % 8 == 0 one vector load and one scale.
template <int kKind>
__device__ void decode8(const k3_cuda_matrix &m, const k3_cuda_shard &shard, uint32_t row, uint32_t col, float (&w)[8]) {
  if (!m.aligned) {
    for (uint32_t i = 0; i < 8; i++)
      w[i] = col + i < m.n_cols ? decode1<kKind>(m, shard, row, m.first_col + col + i) : 0;
    return;
  }
  const uint8_t *bytes = matrix_row(m, shard, row);
  const uint32_t at = m.first_col + col;
  if (kKind == K3_CUDA_BF16) {
    load8(reinterpret_cast<const __nv_bfloat16 *>(bytes) + at, w);
  } else if (kKind == K3_CUDA_F32) {
    load8(reinterpret_cast<const float *>(bytes) + at, w);
  } else if (kKind == K3_CUDA_F16) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4 *>(bytes + 2 * at));
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __half2_raw pair;
      pair.x = static_cast<unsigned short>(words[i] & 0xffff);
      pair.y = static_cast<unsigned short>(words[i] >> 16);
      const float2 values = __half22float2(__half2(pair));
      w[2 * i] = values.x;
      w[2 * i + 1] = values.y;
    }
  } else if (kKind == K3_CUDA_FP8) {
    const float scale = block_scale(m, shard, row, at);
    const uint2 raw = __ldg(reinterpret_cast<const uint2 *>(bytes + at));
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 values = from_e4m3x2(words[i / 2] >> (i % 2 * 16));
      w[2 * i] = values.x * scale;
      w[2 * i + 1] = values.y * scale;
    }
  } else {
    const float scale = block_scale(m, shard, row, at);
    const uint32_t codes = __ldg(reinterpret_cast<const unsigned *>(bytes + at / 2));
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      w[i] = from_e2m1(codes >> (4 * i)) * scale;
  }
}

// For kernels that read few rows: the kind as a value, `row` counted in the matrix, the second scale applied. One element, and eight.
__device__ inline float decode_row1(const k3_cuda_matrix &m, uint32_t row, uint32_t col) {
  const k3_cuda_shard &shard = shard_of(m, row);
  const uint32_t at = m.first_col + col;
  switch (m.kind) {
    case K3_CUDA_BF16: return decode1<K3_CUDA_BF16>(m, shard, row - shard.row, at) * shard.factor;
    case K3_CUDA_F16: return decode1<K3_CUDA_F16>(m, shard, row - shard.row, at) * shard.factor;
    case K3_CUDA_F32: return decode1<K3_CUDA_F32>(m, shard, row - shard.row, at) * shard.factor;
    case K3_CUDA_FP8: return decode1<K3_CUDA_FP8>(m, shard, row - shard.row, at) * shard.factor;
    default: return decode1<K3_CUDA_FP4>(m, shard, row - shard.row, at) * shard.factor;
  }
}

__device__ inline void decode_row8(const k3_cuda_matrix &m, uint32_t row, uint32_t col, float (&w)[8]) {
  const k3_cuda_shard &shard = shard_of(m, row);
  switch (m.kind) {
    case K3_CUDA_BF16: decode8<K3_CUDA_BF16>(m, shard, row - shard.row, col, w); break;
    case K3_CUDA_F16: decode8<K3_CUDA_F16>(m, shard, row - shard.row, col, w); break;
    case K3_CUDA_F32: decode8<K3_CUDA_F32>(m, shard, row - shard.row, col, w); break;
    case K3_CUDA_FP8: decode8<K3_CUDA_FP8>(m, shard, row - shard.row, col, w); break;
    default: decode8<K3_CUDA_FP4>(m, shard, row - shard.row, col, w); break;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    w[i] *= shard.factor;
}

}  // namespace k3
