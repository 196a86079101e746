// What a kernel needs from its platform: shared memory, launches, vector access, warp and block sums. The simulator's build has a twin of each
// (K3_CUDA_SIM), so that kernels themselves hold no conditional code.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "runtime/cuda/kernels.h"

#if defined(K3_CUDA_SIM)
#define K3_SHARED(type, name, count) \
  static const char name##_tag = 0;  \
  type *const name = static_cast<type *>(cuda_sim::shared_memory(&name##_tag, sizeof(type) * (count)))
#define K3_DYNAMIC_SHARED(type, name) type *const name = static_cast<type *>(cuda_sim::dynamic_shared_memory())
#else
#define K3_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define K3_DYNAMIC_SHARED(type, name)                               \
  extern __shared__ __align__(16) unsigned char k3_dynamic_bytes[]; \
  type *const name = reinterpret_cast<type *>(k3_dynamic_bytes)
#endif

namespace k3 {

constexpr unsigned kAllLanes = 0xffffffffu;
// Threads of a block where there is enough to do. No kernel relies on the number; the simulator takes fewer.
#if !defined(K3_CUDA_BLOCK_THREADS)
#define K3_CUDA_BLOCK_THREADS 128
#endif
constexpr unsigned kBlockThreads = K3_CUDA_BLOCK_THREADS;
// From so many outputs on a product takes thirty-two at a time: two blocks for each of some 132 processors. The simulator takes fewer here too.
#if !defined(K3_CUDA_WIDE_OUTPUTS)
#define K3_CUDA_WIDE_OUTPUTS 8448
#endif

__host__ __device__ inline uint32_t ceil_div(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}

// A kernel may be placed while the one before it still runs, so that no processor waits for a launch. Every kernel calls this before it reads or
// writes anything that another writes or reads, and all threads do: then all kernels before are done, what they wrote is there, and the next may be
// placed. What came from other kernels is therefore not read as "non-coherent", which would be for data that is constant while the kernel runs.
__device__ inline void wait_for_kernels() {
#if defined(K3_CUDA_SIM)
  cuda_sim::wait_for_kernels();
#elif defined(__CUDA_ARCH__)
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Queues kernel(arguments...). Every kernel takes its block size from the launch.
template <class... Parameters, class... Arguments>
inline cudaError_t launch(dim3 grid, unsigned n_threads, size_t shared_nbytes, cudaStream_t stream, void (*kernel)(Parameters...),
                          Arguments &&...arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0)
    return cudaSuccess;  // nothing to do
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(n_threads);
  config.dynamicSmemBytes = shared_nbytes;
  config.stream = stream;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// Threads for n_items pieces of work that a block shares out: whole warps, no more than there is work for.
__host__ __device__ inline unsigned block_threads(uint32_t n_items) {
  const unsigned wanted = ceil_div(n_items, 32) * 32;
  return wanted < 32 ? 32 : wanted < kBlockThreads ? wanted : kBlockThreads;
}

// Dynamic shared memory above 48 KiB has to be asked for.
template <class Kernel>
inline cudaError_t allow_shared(Kernel *kernel, size_t nbytes) {
  if (nbytes <= 48 << 10)
    return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(nbytes));
}

// d[16 x 8] += a[16 x 16] * b[16 x 8] of a warp, BF16 with FP32 sums. Lane (g, t) = (lane / 4, lane % 4) holds pairs of neighbours: a[0] row g,
// columns 2t; a[1] row g + 8; a[2], a[3] the same eight columns on; b[0] rows 2t of column g, b[1] eight rows on; d[0..1] row g, columns 2t; d[2..3]
// row g + 8.
__device__ inline void multiply_tiles(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(K3_CUDA_SIM)
  cuda_sim::MmaPayload payload;
  for (int i = 0; i < 4; i++) {
    payload.d[i] = d[i];
    payload.a[i] = a[i];
  }
  payload.b[0] = b[0];
  payload.b[1] = b[1];
  cuda_sim::warp_op(kAllLanes, cuda_sim::WarpOp::mma, &payload);
  for (int i = 0; i < 4; i++)
    d[i] = payload.d[i];
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 matrices of 16-bit elements out of shared memory, every row of sixteen bytes: lane l names row l % 8 of matrix l / 8. Lane (g, t) gets
// elements 2t, 2t + 1 of row g of each; transposed, elements g of rows 2t and 2t + 1.
template <bool kTransposed>
__device__ inline void load_tiles(uint32_t (&r)[4], const void *row) {
#if defined(K3_CUDA_SIM)
  cuda_sim::GatherPayload rows = {};
  rows.in = reinterpret_cast<uintptr_t>(cuda_sim::aligned(static_cast<const uint4 *>(row)));
  cuda_sim::warp_op(kAllLanes, cuda_sim::WarpOp::gather, &rows);
  const unsigned g = cuda_sim::lane() / 4, t = cuda_sim::lane() % 4;
  for (unsigned i = 0; i < 4; i++) {
    const uint16_t *const first = reinterpret_cast<const uint16_t *>(rows.out[i * 8 + (kTransposed ? 2 * t : g)]);
    const uint16_t *const second = kTransposed ? reinterpret_cast<const uint16_t *>(rows.out[i * 8 + 2 * t + 1]) : first;
    r[i] = first[kTransposed ? g : 2 * t] | static_cast<uint32_t>(second[kTransposed ? g : 2 * t + 1]) << 16;
  }
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// Sixteen bytes from global to shared memory, past the registers: there when the thread has waited for its copies; for other threads, at the next
// barrier.
__device__ inline void copy_async(void *shared, const void *global) {
#if defined(K3_CUDA_SIM)
  *cuda_sim::aligned(static_cast<uint4 *>(shared)) = make_uint4(~0u, ~0u, ~0u, ~0u);
  cuda_sim::queue_copy(shared, cuda_sim::aligned(static_cast<const uint4 *>(global)));
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
#endif
}
__device__ inline void wait_copies() {
#if defined(K3_CUDA_SIM)
  void *shared;
  const void *global;
  while (cuda_sim::next_copy(&shared, &global))
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}
// The low, or the high, halves of two words as a pair.
__device__ inline uint32_t pair_low(uint32_t a, uint32_t b) {
  return (a & 0xffff) | b << 16;
}
__device__ inline uint32_t pair_high(uint32_t a, uint32_t b) {
  return a >> 16 | (b & 0xffff0000u);
}

// --- activations -----------------------------------------------------------------------------------------------------------------------------------

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <class A>
__device__ A from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
// The value as an activation holds it.
template <class A>
__device__ float rounded(float value) {
  return to_float(from_float<A>(value));
}

// silu(gate) * up, rounded between.
template <class A>
__device__ float gated(float gate, float up) {
  return rounded<A>(gate / (1 + expf(-gate))) * up;
}

__device__ inline __nv_bfloat162 bf16_pair(uint32_t pair) {
  return __halves2bfloat162(__ushort_as_bfloat16(static_cast<unsigned short>(pair & 0xffff)),
                            __ushort_as_bfloat16(static_cast<unsigned short>(pair >> 16)));
}
__device__ inline float bf16_low(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Sixteen bytes that a kernel before may have written.
__device__ inline uint4 load16(const void *address) {
#if defined(K3_CUDA_SIM)
  return *cuda_sim::aligned(static_cast<const uint4 *>(address));
#else
  return *static_cast<const uint4 *>(address);
#endif
}

// Asks for a line of weights to be brought into the L2.
__device__ inline void prefetch(const void *address) {
#if defined(K3_CUDA_SIM)
  (void)address;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Sixteen bytes that no other block reads: they leave the L1 to what is shared.
__device__ inline uint4 load_stream(const uint4 *address) {
#if defined(K3_CUDA_SIM)
  return __ldg(address);
#else
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
#endif
}

// Eight neighbours; the address must be aligned to 16 bytes.
__device__ inline void load8(const __nv_bfloat16 *src, float (&dst)[8]) {
  const uint4 raw = load16(src);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    dst[2 * i] = bf16_low(words[i]);
    dst[2 * i + 1] = bf16_high(words[i]);
  }
}
__device__ inline void load8(const float *src, float (&dst)[8]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 raw = load16(src + 4 * i);
    dst[4 * i] = __uint_as_float(raw.x);
    dst[4 * i + 1] = __uint_as_float(raw.y);
    dst[4 * i + 2] = __uint_as_float(raw.z);
    dst[4 * i + 3] = __uint_as_float(raw.w);
  }
}

__device__ inline float load_float(const k3_cuda_vector &vector, uint32_t i) {
  switch (vector.dtype) {
    case K3_CUDA_FLOAT_BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(vector.data)[i]);
    case K3_CUDA_FLOAT_F16: return __half2float(static_cast<const __half *>(vector.data)[i]);
    default: return static_cast<const float *>(vector.data)[i];
  }
}

// --- sums ------------------------------------------------------------------------------------------------------------------------------------------

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Sums of N values over a warp at once, N - 1 + log2(32 / N) exchanges: lane l ends with the sum of values[l % N]. N is a power of two up to 32. Half
// of what is left changes hands at each step; recursion, because every index must be known to the compiler.
template <int N, int kLeft = N>
__device__ float warp_sums(float (&values)[N]) {
  if constexpr (kLeft > 1) {
    constexpr int half = kLeft / 2;
    const bool upper = (threadIdx.x & static_cast<unsigned>(half)) != 0;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float kept = upper ? values[i + half] : values[i], sent = upper ? values[i] : values[i + half];
      values[i] = kept + __shfl_xor_sync(kAllLanes, sent, half);
    }
    return warp_sums<N, half>(values);
  } else {
    float sum = values[0];
#pragma unroll
    for (int offset = N; offset < 32; offset *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    return sum;
  }
}

// The sum over all threads of the block, for every thread. `slots`: shared memory, one float per warp; free again when the call returns.
__device__ inline float block_sum(float value, float *slots) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0)
    slots[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; i++)
    sum += slots[i];
  __syncthreads();
  return sum;
}

}  // namespace k3
