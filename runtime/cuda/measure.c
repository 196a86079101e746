// Marks among the launches of a list, and what the device's memory gives.
#include "base/alloc.h"
#include "runtime/cuda/cuda.h"

enum { CHILL_CACHES = 4, COPY_CACHES = 8, COPY_RUNS = 10 };  // sizes in caches of the device, of which neither may hold a good part

enum k3_status k3_cuda_mark_step(struct k3_exec *exec, size_t index, struct k3_error *err) {
  K3_TRY(k3_grow(&exec->marks, &exec->marks_capacity, index + 1, sizeof *exec->marks, err));
  while (exec->n_marks <= index) {
    K3_TRY(k3_cuda_check(cudaEventCreateWithFlags(&exec->marks[exec->n_marks], cudaEventDefault), "creating an event", err));
    exec->n_marks++;
  }
  struct k3_cuda_mark *mark = k3_cuda_record(exec, K3_CUDA_LAUNCH_mark, sizeof *mark, err);
  if (!mark)
    return K3_NO_MEMORY;
  mark->event = exec->marks[index];
  return K3_OK;
}

// In a capture the event becomes a node that is recorded whenever the graph runs; it is an error to ask for that elsewhere.
cudaError_t k3_cuda_launch_mark(const struct k3_cuda_mark *p, cudaStream_t stream) {
  enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capturing);
  if (error != cudaSuccess)
    return error;
  return cudaEventRecordWithFlags(p->event, stream, capturing == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal);
}

static enum k3_status elapsed(cudaEvent_t first, cudaEvent_t last, double *seconds, struct k3_error *err) {
  float milliseconds;
  K3_TRY(k3_cuda_check(cudaEventElapsedTime(&milliseconds, first, last), "reading a time", err));
  *seconds = 1e-3 * milliseconds;
  return K3_OK;
}

enum k3_status k3_cuda_elapsed(struct k3_exec *exec, size_t first, size_t last, double *seconds, struct k3_error *err) {
  K3_TRY(k3_cuda_use(exec->backend, err));
  K3_TRY(k3_cuda_check(cudaDeviceSynchronize(), "waiting for the steps", err));
  return elapsed(exec->marks[first], exec->marks[last], seconds, err);
}

static enum k3_status cache_nbytes(const struct k3_exec *exec, size_t *nbytes, struct k3_error *err) {
  int value = 0;
  K3_TRY(k3_cuda_use(exec->backend, err));
  K3_TRY(k3_cuda_check(cudaDeviceGetAttribute(&value, cudaDevAttrL2CacheSize, exec->backend->device), "asking for the size of its cache", err));
  *nbytes = (size_t)value;
  return K3_OK;
}

enum k3_status k3_cuda_chill(struct k3_exec *exec, void *stream, struct k3_error *err) {
  if (!exec->chilled) {
    size_t nbytes;
    K3_TRY(cache_nbytes(exec, &nbytes, err));
    K3_TRY(k3_cuda_alloc(CHILL_CACHES * nbytes, &exec->chilled, err));
    exec->chilled_nbytes = CHILL_CACHES * nbytes;
  }
  return k3_cuda_check(cudaMemsetAsync(exec->chilled, 0, exec->chilled_nbytes, stream ? (cudaStream_t)stream : exec->stream), "overwriting the cache",
                       err);
}

static enum k3_status time_copies(struct k3_exec *exec, void *memory, size_t nbytes, cudaEvent_t *events, double *best, struct k3_error *err) {
  for (int i = 0; i < 2; i++)
    K3_TRY(k3_cuda_check(cudaEventCreateWithFlags(&events[i], cudaEventDefault), "creating an event", err));
  for (int run = 0; run < COPY_RUNS; run++) {
    double seconds;
    K3_TRY(k3_cuda_check(cudaEventRecord(events[0], exec->stream), "recording an event", err));
    K3_TRY(k3_cuda_check(cudaMemcpyAsync((char *)memory + nbytes, memory, nbytes, cudaMemcpyDeviceToDevice, exec->stream), "copying", err));
    K3_TRY(k3_cuda_check(cudaEventRecord(events[1], exec->stream), "recording an event", err));
    K3_TRY(k3_cuda_check(cudaStreamSynchronize(exec->stream), "copying", err));
    K3_TRY(elapsed(events[0], events[1], &seconds, err));
    *best = run == 0 || seconds < *best ? seconds : *best;
  }
  return K3_OK;
}

enum k3_status k3_cuda_bandwidth(struct k3_exec *exec, double *bytes_per_second, struct k3_error *err) {
  size_t nbytes;
  void *memory;
  cudaEvent_t events[2] = {NULL, NULL};
  double best = 0;
  K3_TRY(cache_nbytes(exec, &nbytes, err));
  nbytes *= COPY_CACHES;
  K3_TRY(exec->backend->base.ops->alloc(&exec->backend->base, 2 * nbytes, &memory, err));
  const enum k3_status status = time_copies(exec, memory, nbytes, events, &best, err);
  for (int i = 0; i < 2; i++)
    if (events[i])
      cudaEventDestroy(events[i]);
  cudaFree(memory);
  *bytes_per_second = best > 0 ? 2 * (double)nbytes / best : 0;
  return status;
}
