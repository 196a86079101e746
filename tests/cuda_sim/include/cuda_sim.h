// What CUDA C++ has and a host compiler has not: the built-in variables, barriers, warp operations, fences, atomics and a few functions, with their
// real meaning, for kernels that run as fibres of a CPU (tests/cuda_sim/engine.cc). Only what the kernels use is here; the rest fails to compile.
#pragma once
#include <math.h>
#include <string.h>

#include <functional>
#include <tuple>
#include <utility>

// Variables and not macros: cudaLaunchConfig_t has fields of the same names.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;
#define warpSize 32

namespace cuda_sim {

// Queues a kernel on its stream. Arguments have been converted and copied, as at a real launch.
cudaError_t submit(const cudaLaunchConfig_t &config, const void *kernel, std::function<void()> body);

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...), Arguments &&...arguments) {
  std::tuple<Parameters...> copies{static_cast<Parameters>(std::forward<Arguments>(arguments))...};
  return submit(*config, reinterpret_cast<const void *>(kernel), [kernel, copies] { std::apply(kernel, copies); });
}

void *shared_memory(const void *tag, size_t nbytes);  // of this block, one piece per declaration
void *dynamic_shared_memory();
void block_barrier();
enum class WarpOp { sync, shuffle, ballot, mma, gather };
// Every lane of the mask waits here until all of them have come with this mask and operation; the last one computes for all.
void warp_op(uint32_t mask, WarpOp op, void *payload);
void poll(const char *what);  // one turn of a wait loop; ends the launch when the wait has lasted too long
// A copy of sixteen bytes that happens when its thread waits for it: the caller takes what is under way, oldest first.
void queue_copy(void *shared, const void *global);
bool next_copy(void **shared, const void **global);
void wait_for_kernels();  // every thread of a kernel that may overlap with the one before must have called it when it ends
void fence();
void before_atomic(const void *address);
void after_atomic(const void *address);
[[noreturn]] void trap(const char *what);
void check_initialised(const void *bytes, size_t nbytes);  // reports under MSan only

inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

struct ShufflePayload {
  unsigned char in[16], out[16];
  unsigned source, nbytes;
};

struct MmaPayload {  // one lane's part of d[16x8] += a[16x16] * b[16x8]
  float d[4];
  uint32_t a[4], b[2];
};

struct GatherPayload {  // every lane's word for every lane
  uintptr_t in, out[32];
};

template <class T>
T exchange(uint32_t mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
  ShufflePayload payload = {};
  memcpy(payload.in, &value, sizeof value);
  payload.source = source;
  payload.nbytes = sizeof value;
  warp_op(mask, WarpOp::shuffle, &payload);
  memcpy(&value, payload.out, sizeof value);
  return value;
}

template <class T>
T *aligned(T *address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0)
    trap("misaligned vector access");
  return address;
}

template <class T, class F>
T read_modify_write(T *address, F change) {
  before_atomic(address);
  T old, desired;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    desired = change(old);
  } while (!__atomic_compare_exchange(address, &old, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(address);
  return old;
}

}  // namespace cuda_sim

// Shared memory cannot be redirected behind the language's own keyword, so kernels declare it through device.cuh.
#undef __shared__
#define __shared__         static_assert(false, "shared memory is declared with K3_SHARED");
#define cudaLaunchKernelEx cuda_sim::launch_kernel
#if !defined(__launch_bounds__)
#define __launch_bounds__(...)
#endif

inline void __syncthreads() {
  cuda_sim::block_barrier();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_sim::warp_op(mask, cuda_sim::WarpOp::sync, nullptr);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return cuda_sim::exchange(mask, value, static_cast<unsigned>(source) % 32);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return cuda_sim::exchange(mask, value, cuda_sim::lane() ^ static_cast<unsigned>(lane_mask));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  uint32_t value = predicate != 0;
  cuda_sim::warp_op(mask, cuda_sim::WarpOp::ballot, &value);
  return value;
}
inline void __threadfence() {
  cuda_sim::fence();
}
inline void __threadfence_system() {
  cuda_sim::fence();
}
template <class T>
T atomicAdd(T *address, T value) {
  return cuda_sim::read_modify_write(address, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicExch(T *address, T value) {
  return cuda_sim::read_modify_write(address, [value](T) { return value; });
}
template <class T>
T __ldg(const T *address) {
  return *cuda_sim::aligned(address);
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline int min(int a, int b) {
  return a < b ? a : b;
}
inline unsigned min(unsigned a, unsigned b) {
  return a < b ? a : b;
}
inline unsigned max(unsigned a, unsigned b) {
  return a < b ? b : a;
}
