// The CUDA runtime's C functions that the backend uses, by their own names, instead of libcudart. One that is missing here is a link error, which is
// what is wanted. "Device" memory is host memory with undefined content; a stream is a list of closures.
//   SIM_DEVICES   how many devices there are (default 16); SIM_FREE_MIB their free memory (default 4096); SIM_DRIVER the driver's version (13000)
//   SIM_COUNTERS  a file of 4096 bytes, into which what has happened is counted (struct Counters), for a test that maps it too
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda_sim_internal.h"

using Work = std::function<cudaError_t()>;

struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};
struct CUstream_st {
  std::deque<Work> queue;
  size_t n_done = 0;
  CUgraph_st *capture = nullptr;
  int device = 0;
};
struct CUevent_st {
  CUstream_st *stream = nullptr;
  size_t position = 0;  // in the stream's whole history
  double seconds = -1;  // when it was reached; below 0: never
};

namespace cuda_sim {

static thread_local CUstream_st default_stream;
static thread_local cudaError_t sticky_error = cudaSuccess;
static thread_local int current_device = 0;
static std::mutex allocations_mutex, streams_mutex;
static std::vector<CUstream_st *> streams;  // of all devices: a thread may destroy what another has created
// Lists, not maps: the balancing of a map is in the C++ library, which MSan does not see.
struct Allocation {
  char *memory;
  size_t nbytes;
};
using Allocations = std::vector<Allocation>;
static Allocations device_allocations, pinned_allocations;

static int setting(const char *name, int fallback) {
  const char *text = getenv(name);
  return text ? atoi(text) : fallback;
}

// Of all ranks. Tests know the layout (tests/kernels/test_forward.c).
struct Counters {
  uint64_t is_simulated;            // 1
  uint64_t captures, replays;       // graphs begun, graphs launched
  uint64_t kernels, in_no_capture;  // launches asked for; those of them that no graph keeps
  uint64_t overlapped;              // waits for an event behind which work of its stream was still to do
};

static Counters *counters() {
  static Counters own = {};
  static Counters *const shared = [] {
    const char *path = getenv("SIM_COUNTERS");
    const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *memory = file < 0 ? MAP_FAILED : mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
      close(file);
    Counters *all = memory == MAP_FAILED ? &own : static_cast<Counters *>(memory);
    all->is_simulated = 1;
    return all;
  }();
  return shared;
}

static void count(uint64_t Counters::*what) {
  __atomic_fetch_add(&(counters()->*what), 1, __ATOMIC_RELAXED);
}

static CUstream_st *stream_of(cudaStream_t stream) {
  return stream && stream != cudaStreamLegacy ? stream : &default_stream;
}

static cudaError_t run_until(CUstream_st *stream, size_t position) {
  while (stream->n_done < position && !stream->queue.empty()) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->n_done++;
    const cudaError_t error = work();
    if (error != cudaSuccess)
      sticky_error = error;
  }
  return sticky_error;
}

static cudaError_t run_all(CUstream_st *stream) {
  return run_until(stream, stream->n_done + stream->queue.size());
}

static cudaError_t add(cudaStream_t handle, Work work) {
  CUstream_st *stream = stream_of(handle);
  if (stream->capture) {
    stream->capture->work.push_back(std::move(work));
    return cudaSuccess;
  }
  stream->queue.push_back(std::move(work));
  return settings().lazy ? sticky_error : run_all(stream);
}

cudaError_t queue(cudaStream_t stream, std::function<cudaError_t()> work) {
  return add(stream, std::move(work));
}

cudaError_t submit(const cudaLaunchConfig_t &config, const void *kernel, std::function<void()> body) {
  const size_t n_threads = static_cast<size_t>(config.blockDim.x) * config.blockDim.y * config.blockDim.z;
  const dim3 &grid = config.gridDim;
  if (n_threads == 0 || n_threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
      config.dynamicSmemBytes > (227 << 10)) {
    fprintf(stderr, "cuda_sim: a launch of %zu threads, grid (%u,%u,%u), %zu bytes of shared memory\n", n_threads, grid.x, grid.y, grid.z,
            config.dynamicSmemBytes);
    return sticky_error = cudaErrorInvalidConfiguration;
  }
  count(&Counters::kernels);
  if (!stream_of(config.stream)->capture)
    count(&Counters::in_no_capture);
  bool overlaps = false;
  for (unsigned i = 0; i < config.numAttrs; i++)
    overlaps |=
        config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization && config.attrs[i].val.programmaticStreamSerializationAllowed;
  cudaLaunchConfig_t copy = config;
  copy.attrs = nullptr;  // the caller's
  copy.numAttrs = 0;
  return add(config.stream, [copy, overlaps, kernel, body] { return run_grid(copy, overlaps, kernel, body); });
}

static cudaError_t allocate(Allocations *list, void **memory, size_t nbytes) {
  if (posix_memalign(memory, 256, nbytes ? nbytes : 1) != 0)
    return cudaErrorMemoryAllocation;
  make_undefined(*memory, nbytes);
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  list->push_back({static_cast<char *>(*memory), nbytes});
  return cudaSuccess;
}

static cudaError_t deallocate(Allocations *list, void *memory) {
  if (!memory)
    return cudaSuccess;
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  for (Allocation &allocation : *list) {
    if (allocation.memory == memory) {
      allocation = list->back();
      list->pop_back();
      free(memory);
      return cudaSuccess;
    }
  }
  fprintf(stderr, "cuda_sim: %p is freed as what it is not\n", memory);
  return sticky_error = cudaErrorInvalidValue;
}

static bool lies_in(const Allocations &list, const void *bytes, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  const char *begin = static_cast<const char *>(bytes);
  for (const Allocation &allocation : list)
    if (begin >= allocation.memory && begin + nbytes <= allocation.memory + allocation.nbytes)
      return true;
  return false;
}

static cudaError_t copy(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const bool to_device = kind != cudaMemcpyDeviceToHost, from_device = kind != cudaMemcpyHostToDevice;
  if (lies_in(device_allocations, dst, nbytes) != to_device || lies_in(device_allocations, src, nbytes) != from_device) {
    fprintf(stderr, "cuda_sim: a copy of %zu bytes of kind %d names other memory\n", nbytes, static_cast<int>(kind));
    return sticky_error = cudaErrorInvalidValue;
  }
  if (!from_device && !lies_in(pinned_allocations, src, nbytes)) {  // pageable bytes are taken at the call
    std::vector<char> taken(static_cast<const char *>(src), static_cast<const char *>(src) + nbytes);
    return add(stream, [dst, taken = std::move(taken)] {
      memcpy(dst, taken.data(), taken.size());
      return cudaSuccess;
    });
  }
  return add(stream, [=] {
    if (!to_device)
      check_initialised(src, nbytes);
    memcpy(dst, src, nbytes);
    return cudaSuccess;
  });
}

}  // namespace cuda_sim

using namespace cuda_sim;

extern "C" {

cudaError_t cudaDriverGetVersion(int *version) {
  *version = setting("SIM_DRIVER", 13000);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = setting("SIM_DEVICES", 16);
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= setting("SIM_DEVICES", 16))
    return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = setting("SIM_PROCESSORS", 4); return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t cudaMemGetInfo(size_t *n_free, size_t *total) {
  *n_free = static_cast<size_t>(setting("SIM_FREE_MIB", 4096)) << 20;
  *total = *n_free;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t nbytes) {
  return allocate(&device_allocations, memory, nbytes);
}

cudaError_t cudaFree(void *memory) {
  return deallocate(&device_allocations, memory);
}

cudaError_t cudaMallocHost(void **memory, size_t nbytes) {
  return allocate(&pinned_allocations, memory, nbytes);
}

cudaError_t cudaFreeHost(void *memory) {
  return deallocate(&pinned_allocations, memory);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(dst, src, nbytes, kind, stream);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t nbytes, cudaStream_t stream) {
  return add(stream, [=] {
    memset(dst, value, nbytes);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = new CUstream_st;
  (*stream)->device = current_device;
  const std::lock_guard<std::mutex> lock(streams_mutex);
  streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  cudaError_t error = run_all(&default_stream);
  std::vector<CUstream_st *> mine;
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    for (CUstream_st *stream : streams)
      if (stream->device == current_device)
        mine.push_back(stream);
  }
  for (CUstream_st *stream : mine)
    error = run_all(stream);
  return error;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  *attributes = {};
  attributes->type = lies_in(device_allocations, address, 1) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = run_all(stream);
  const std::lock_guard<std::mutex> lock(streams_mutex);
  for (CUstream_st *&other : streams)
    if (other == stream)
      other = streams.back();
  streams.pop_back();
  delete stream;
  return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stream_of(stream)->capture ? cudaErrorStreamCaptureUnsupported : run_all(stream_of(stream));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event->stream)  // what still waits in it would note the time
    run_until(event->stream, event->position);
  delete event;
  return cudaSuccess;
}

static Work note_time(cudaEvent_t event) {
  return [event] {
    event->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return cudaSuccess;
  };
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  CUstream_st *stream = stream_of(handle);
  event->stream = stream;
  event->position = stream->n_done + stream->queue.size() + 1;
  return add(stream, note_time(event));
}

// With the flag the event is a node of the graph that is being captured, and without a capture an error, as on a device.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  if ((stream_of(handle)->capture != nullptr) != (flags == cudaEventRecordExternal))
    return sticky_error = cudaErrorInvalidValue;
  return flags == cudaEventRecordExternal ? add(handle, note_time(event)) : cudaEventRecord(event, handle);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  if (first->seconds < 0 || last->seconds < 0)
    return sticky_error = cudaErrorInvalidResourceHandle;
  *milliseconds = static_cast<float>(1e3 * (last->seconds - first->seconds));
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!event->stream)
    return cudaSuccess;
  const cudaError_t error = run_until(event->stream, event->position);
  if (!event->stream->queue.empty())
    count(&Counters::overlapped);
  return error;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CUstream_st *from = event->stream;
  const size_t position = event->position;
  return from ? add(stream, [=] { return run_until(from, position); }) : cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  count(&Counters::captures);
  stream_of(stream)->capture = new CUgraph_st;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  *graph = stream_of(stream)->capture;
  stream_of(stream)->capture = nullptr;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  count(&Counters::replays);
  for (const Work &work : exec->work) {
    const cudaError_t error = add(stream, work);
    if (error != cudaSuccess)
      return error;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = sticky_error;
  sticky_error = cudaSuccess;
  return error;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    default: return "an error";
  }
}

}  // extern "C"
