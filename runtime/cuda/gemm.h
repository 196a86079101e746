// The library's matrix product, for many rows. Behind it stands cuBLASLt; the tests' simulator has plain loops in its place.
#ifndef K3_RUNTIME_CUDA_GEMM_H
#define K3_RUNTIME_CUDA_GEMM_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct k3_cuda_gemm_library;

// y[b][r, o] = scale * sum_c x[r, c] * w[b][o, c] for n_batches matrices of one stride; BF16 in, FP32 sums, BF16 or F32 out. Strides in elements.
// Addresses and row strides are multiples of 16 bytes.
struct k3_cuda_gemm {
  struct k3_cuda_gemm_library *library;
  const void *w, *x;
  void *y;
  uint64_t w_stride, x_stride, y_stride, w_batch, y_batch;
  uint32_t n_rows, n_outputs, n_cols, n_batches;
  float scale;
  bool y_is_f32;
};

// The library's handle and its workspace on the current device. NULL and *err on failure.
struct k3_cuda_gemm_library *k3_cuda_gemm_create(struct k3_error *err);
void k3_cuda_gemm_destroy(struct k3_cuda_gemm_library *library);
cudaError_t k3_cuda_launch_gemm(const struct k3_cuda_gemm *p, cudaStream_t stream);

#endif
