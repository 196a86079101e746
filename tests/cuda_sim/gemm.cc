// The library's product as plain loops, behind the same functions (runtime/cuda/gemm.h).
#include <cuda_bf16.h>

#include "cuda_sim_internal.h"

extern "C" {
#include "runtime/cuda/gemm.h"
}

struct k3_cuda_gemm_library {
  int unused;
};

static float bf16(const void *base, uint64_t i) {
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t *>(base)[i]) << 16);
}

static cudaError_t multiply(const k3_cuda_gemm &p) {
  for (uint64_t b = 0; b < p.n_batches; b++) {
    for (uint64_t row = 0; row < p.n_rows; row++) {
      for (uint64_t o = 0; o < p.n_outputs; o++) {
        double sum = 0;
        for (uint64_t c = 0; c < p.n_cols; c++)
          sum += static_cast<double>(bf16(p.x, row * p.x_stride + c)) * static_cast<double>(bf16(p.w, b * p.w_batch + o * p.w_stride + c));
        const float value = p.scale * static_cast<float>(sum);
        const uint64_t at = b * p.y_batch + row * p.y_stride + o;
        if (p.y_is_f32)
          static_cast<float *>(p.y)[at] = value;
        else
          static_cast<__nv_bfloat16 *>(p.y)[at] = __float2bfloat16_rn(value);
      }
    }
  }
  return cudaSuccess;
}

extern "C" {

struct k3_cuda_gemm_library *k3_cuda_gemm_create(struct k3_error *) {
  return new k3_cuda_gemm_library();
}

void k3_cuda_gemm_destroy(struct k3_cuda_gemm_library *library) {
  delete library;
}

cudaError_t k3_cuda_launch_gemm(const struct k3_cuda_gemm *p, cudaStream_t stream) {
  const auto aligned = [](const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (!p->library || !aligned(p->w) || !aligned(p->x) || !aligned(p->y) || p->w_stride % 8 != 0 || p->x_stride % 8 != 0)
    return cudaErrorInvalidValue;  // what the library would refuse
  const k3_cuda_gemm copy = *p;
  return cuda_sim::queue(stream, [copy] { return multiply(copy); });
}

}  // extern "C"
