// The device, its memory, and the one symbol that the plug-in exports.
#include <string.h>

#include "base/alloc.h"
#include "runtime/cuda/cuda.h"

enum { MIN_MAJOR = 9, MIN_DRIVER = 13000 };

enum k3_status k3_cuda_check(cudaError_t error, const char *what, struct k3_error *err) {
  if (error == cudaSuccess)
    return K3_OK;
  cudaGetLastError();  // what is not sticky is over
  return k3_fail(err, K3_IO, K3_RULE_NONE, NULL, NULL, NULL, "the GPU: %s: %s", what, cudaGetErrorString(error));
}

enum k3_status k3_cuda_alloc(size_t nbytes, void **memory, struct k3_error *err) {
  size_t n_free = 0, total = 0;
  *memory = NULL;
  K3_TRY(k3_cuda_check(cudaMemGetInfo(&n_free, &total), "asking for its memory", err));
  if (nbytes <= n_free && cudaMalloc(memory, nbytes) == cudaSuccess)
    return K3_OK;
  cudaGetLastError();
  return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "a GPU with more free memory, or more ranks (--tp)",
                 "%zu bytes of GPU memory are needed, %zu of %zu are free", nbytes, n_free, total);
}

enum k3_status k3_cuda_use(const struct k3_cuda_backend *backend, struct k3_error *err) {
  return k3_cuda_check(cudaSetDevice(backend->device), "choosing the device", err);
}

static enum k3_status finish(const struct k3_cuda_backend *backend, cudaError_t queued, const char *what, struct k3_error *err) {
  K3_TRY(k3_cuda_check(queued, what, err));
  return k3_cuda_check(cudaStreamSynchronize(backend->stream), what, err);
}

static enum k3_status alloc(struct k3_backend *base, size_t nbytes, void **memory, struct k3_error *err) {
  struct k3_cuda_backend *backend = (struct k3_cuda_backend *)base;
  K3_TRY(k3_cuda_use(backend, err));
  K3_TRY(k3_cuda_alloc(nbytes, memory, err));
  enum k3_status status = finish(backend, cudaMemsetAsync(*memory, 0, nbytes, backend->stream), "clearing memory", err);
  if (status != K3_OK) {
    cudaFree(*memory);
    *memory = NULL;
  }
  return status;
}

static void release(struct k3_backend *base, void *memory) {
  k3_cuda_use((struct k3_cuda_backend *)base, NULL);
  cudaFree(memory);
}

static enum k3_status upload(struct k3_backend *base, void *dst, const void *src, size_t nbytes, struct k3_error *err) {
  struct k3_cuda_backend *backend = (struct k3_cuda_backend *)base;
  K3_TRY(k3_cuda_use(backend, err));
  return finish(backend, cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyHostToDevice, backend->stream), "copying to the device", err);
}

static enum k3_status download(struct k3_backend *base, void *dst, const void *src, size_t nbytes, struct k3_error *err) {
  struct k3_cuda_backend *backend = (struct k3_cuda_backend *)base;
  K3_TRY(k3_cuda_use(backend, err));
  K3_TRY(k3_cuda_check(cudaDeviceSynchronize(), "waiting for the steps", err));
  return finish(backend, cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToHost, backend->stream), "copying from the device", err);
}

static void destroy(struct k3_backend *base) {
  struct k3_cuda_backend *backend = (struct k3_cuda_backend *)base;
  k3_cuda_use(backend, NULL);
  for (size_t i = 0; i < backend->n_arenas; i++)
    cudaFree(backend->arenas[i]);
  k3_free(backend->arenas);
  k3_cuda_gemm_destroy(backend->gemm);
  if (backend->stream)
    cudaStreamDestroy(backend->stream);
  k3_free(backend);
}

static const struct k3_backend_ops OPS = {
    .destroy = destroy,
    .alloc = alloc,
    .release = release,
    .upload = upload,
    .download = download,
    .place = k3_cuda_place,
    .exec_create = k3_cuda_exec_create,
    .exec_destroy = k3_cuda_exec_destroy,
    .begin = k3_cuda_begin,
    .end = k3_cuda_end,
#define K3_CUDA_ENTRY(step) .step = k3_cuda_##step,
    K3_BACKEND_STEPS(K3_CUDA_ENTRY)
#undef K3_CUDA_ENTRY
        .mark = k3_cuda_mark_step,
    .elapsed = k3_cuda_elapsed,
    .chill = k3_cuda_chill,
    .bandwidth = k3_cuda_bandwidth,
    .sums = k3_cuda_exec_sums,
};

// A driver, the device, and a device that the kernels were compiled for.
static enum k3_status check_device(int device, int *n_processors, struct k3_error *err) {
  static const char remedy[] = "an NVIDIA GPU of compute capability 9.0 or later, with a driver for CUDA 13; or --backend cpu";
  int driver = 0, n_devices = 0, major = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, remedy, "there is no NVIDIA driver");
  if (driver < MIN_DRIVER)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, remedy, "the NVIDIA driver is for CUDA %d.%d, CUDA %d.%d is needed", driver / 1000,
                   driver % 1000 / 10, MIN_DRIVER / 1000, MIN_DRIVER % 1000 / 10);
  cudaError_t error = cudaGetDeviceCount(&n_devices);
  if (error != cudaSuccess || n_devices == 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, remedy, "there is no GPU: %s", cudaGetErrorString(error));
  if (device < 0 || device >= n_devices)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "one GPU per rank", "GPU %d is asked for, there are %d", device, n_devices);
  error = cudaSetDevice(device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(n_processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, remedy, "GPU %d cannot be used: %s", device, cudaGetErrorString(error));
  if (major < MIN_MAJOR)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, remedy, "GPU %d has compute capability %d.x", device, major);
  return K3_OK;
}

static struct k3_backend *create(const struct k3_cuda_options *options, struct k3_error *err) {
  struct k3_error own = {0};  // a caller without *err still gets the status
  struct k3_cuda_backend *backend = k3_calloc(1, sizeof *backend, err);
  if (!backend)
    return NULL;
  err = err ? err : &own;
  k3_progress_start(options->progress, "starting CUDA", 1);  // the context comes with the first allocation, and takes longer than a small image
  backend->base = (struct k3_backend){"cuda", K3_MEMORY_DEVICE, options->bf16 ? 2 : sizeof(float), options->bf16, &OPS};
  backend->device = options->device;
  backend->tp_rank = options->tp_rank;
  backend->tp_size = options->tp_size > 1 ? options->tp_size : 1;
  backend->comm = options->comm;
  enum k3_status status = check_device(options->device, &backend->n_processors, err);
  if (status == K3_OK)
    status = k3_cuda_check(cudaStreamCreateWithFlags(&backend->stream, cudaStreamNonBlocking), "creating a stream", err);
  if (status == K3_OK && options->bf16 && !(backend->gemm = k3_cuda_gemm_create(err)))
    status = err->status;
  if (status != K3_OK) {
    destroy(&backend->base);
    return NULL;
  }
  k3_progress_add(options->progress, 1);
  k3_progress_finish(options->progress);
  return &backend->base;
}

// The layout is a constant of the build, which C cannot compute in an initialiser; it is filled in when the library is opened.
__attribute__((visibility("default"))) struct k3_cuda_plugin k3_cuda_plugin = {.create = create};

__attribute__((constructor)) static void fill_layout(void) {
  k3_cuda_plugin.layout = k3_cuda_layout();
}
