#include <cublasLt.h>

#include "base/alloc.h"
#include "runtime/cuda/cuda.h"

enum { WORKSPACE_NBYTES = 32 << 20 };

struct k3_cuda_gemm_library {
  cublasLtHandle_t handle;
  void *workspace;
};

struct k3_cuda_gemm_library *k3_cuda_gemm_create(struct k3_error *err) {
  struct k3_cuda_gemm_library *library = k3_calloc(1, sizeof *library, err);
  if (!library)
    return NULL;
  if (k3_cuda_alloc(WORKSPACE_NBYTES, &library->workspace, err) != K3_OK) {
    k3_cuda_gemm_destroy(library);
    return NULL;
  }
  if (cublasLtCreate(&library->handle) != CUBLAS_STATUS_SUCCESS) {
    library->handle = NULL;
    k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "the cuBLASLt of CUDA 13", "cuBLASLt does not start");
    k3_cuda_gemm_destroy(library);
    return NULL;
  }
  return library;
}

void k3_cuda_gemm_destroy(struct k3_cuda_gemm_library *library) {
  if (!library)
    return;
  if (library->handle)
    cublasLtDestroy(library->handle);
  cudaFree(library->workspace);
  k3_free(library);
}

// A matrix whose rows (cuBLAS: columns) of n_cols elements stand at `stride`, n_batches of them.
static cublasStatus_t make_layout(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t n_cols, uint64_t n_rows, uint64_t stride,
                                  int32_t n_batches, int64_t batch) {
  cublasStatus_t status = cublasLtMatrixLayoutCreate(layout, type, n_cols, n_rows, (int64_t)stride);
  if (status == CUBLAS_STATUS_SUCCESS && n_batches > 1)
    status = cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n_batches, sizeof n_batches);
  if (status == CUBLAS_STATUS_SUCCESS && n_batches > 1)
    status = cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch, sizeof batch);
  return status;
}

// Row-major y = x * w^T is, in the library's column-major order, y = op(w) * x with w transposed.
static cublasStatus_t multiply(const struct k3_cuda_gemm *p, cudaStream_t stream, cublasLtMatmulDesc_t operation,
                               cublasLtMatmulPreference_t preference, cublasLtMatrixLayout_t *layouts) {
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const uint64_t workspace_nbytes = WORKSPACE_NBYTES;
  const int32_t n_batches = (int32_t)p->n_batches;
  const cudaDataType_t out_type = p->y_is_f32 ? CUDA_R_32F : CUDA_R_16BF;
  const float zero = 0;
  cublasLtMatmulHeuristicResult_t choice;
  int n_choices = 0;
  cublasStatus_t status = cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_nbytes, sizeof workspace_nbytes);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = make_layout(&layouts[0], CUDA_R_16BF, p->n_cols, p->n_outputs, p->w_stride, n_batches, (int64_t)p->w_batch);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = make_layout(&layouts[1], CUDA_R_16BF, p->n_cols, p->n_rows, p->x_stride, n_batches, 0);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = make_layout(&layouts[2], out_type, p->n_outputs, p->n_rows, p->y_stride, n_batches, (int64_t)p->y_batch);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulAlgoGetHeuristic(p->library->handle, operation, layouts[0], layouts[1], layouts[2], layouts[2], preference, 1, &choice,
                                            &n_choices);
  if (status == CUBLAS_STATUS_SUCCESS && n_choices == 0)
    status = CUBLAS_STATUS_NOT_SUPPORTED;
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmul(p->library->handle, operation, &p->scale, p->w, layouts[0], p->x, layouts[1], &zero, p->y, layouts[2], p->y, layouts[2],
                            &choice.algo, p->library->workspace, WORKSPACE_NBYTES, stream);
  return status;
}

cudaError_t k3_cuda_launch_gemm(const struct k3_cuda_gemm *p, cudaStream_t stream) {
  cublasLtMatmulDesc_t operation = NULL;
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatrixLayout_t layouts[3] = {NULL, NULL, NULL};
  cublasStatus_t status = cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulPreferenceCreate(&preference);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = multiply(p, stream, operation, preference, layouts);
  for (int i = 0; i < 3; i++)
    if (layouts[i])
      cublasLtMatrixLayoutDestroy(layouts[i]);
  if (preference)
    cublasLtMatmulPreferenceDestroy(preference);
  if (operation)
    cublasLtMatmulDescDestroy(operation);
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : status == CUBLAS_STATUS_NOT_SUPPORTED ? cudaErrorNotSupported : cudaErrorLaunchFailure;
}
