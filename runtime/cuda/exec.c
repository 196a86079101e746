// A session's launches: recorded, compared with what was captured before, replayed.
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "runtime/cuda/cuda.h"

// Before each launch's params in a list; a multiple of 16 bytes.
struct header {
  uint32_t kind, reserved;
  uint64_t nbytes;  // of the params, padded
};

void *k3_cuda_record(struct k3_exec *exec, enum k3_cuda_launch_kind kind, size_t nbytes, struct k3_error *err) {
  const size_t padded = (nbytes + 15) & ~(size_t)15;
  if (k3_grow(&exec->launches, &exec->capacity, exec->nbytes + sizeof(struct header) + padded, 1, err) != K3_OK)
    return NULL;
  struct header *header = (struct header *)(exec->launches + exec->nbytes);
  memset(header, 0, sizeof *header + padded);
  header->kind = (uint32_t)kind;
  header->nbytes = padded;
  exec->last_launch = exec->nbytes + sizeof *header;
  exec->nbytes += sizeof *header + padded;
  return header + 1;
}

static enum k3_status launch_all(const struct k3_exec *exec, cudaStream_t stream, struct k3_error *err) {
  static const char *const names[] = {
#define K3_CUDA_LAUNCH_NAME(name) #name,
      K3_CUDA_LAUNCHES(K3_CUDA_LAUNCH_NAME)
#undef K3_CUDA_LAUNCH_NAME
  };
  for (size_t at = 0; at < exec->nbytes;) {
    const struct header *header = (const struct header *)(exec->launches + at);
    cudaError_t error = cudaErrorInvalidValue;
    switch ((enum k3_cuda_launch_kind)header->kind) {
#define K3_CUDA_LAUNCH_CASE(name) \
  case K3_CUDA_LAUNCH_##name: error = k3_cuda_launch_##name((const struct k3_cuda_##name *)(header + 1), stream); break;
      K3_CUDA_LAUNCHES(K3_CUDA_LAUNCH_CASE)
#undef K3_CUDA_LAUNCH_CASE
    }
    K3_TRY(k3_cuda_check(error, names[header->kind], err));
    at += sizeof *header + header->nbytes;
  }
  return K3_OK;
}

static void drop_graph(struct k3_cuda_graph *graph) {
  if (graph->exec)
    cudaGraphExecDestroy(graph->exec);
  k3_free(graph->launches);
  *graph = (struct k3_cuda_graph){0};
}

static struct k3_cuda_graph *find_graph(struct k3_exec *exec) {
  for (int i = 0; i < K3_CUDA_MAX_GRAPHS; i++) {
    struct k3_cuda_graph *graph = &exec->graphs[i];
    if (graph->exec && graph->nbytes == exec->nbytes && memcmp(graph->launches, exec->launches, exec->nbytes) == 0)
      return graph;
  }
  return NULL;
}

// Captures the list as a graph, in the place of the one that was not used for longest.
static enum k3_status capture(struct k3_exec *exec, struct k3_cuda_graph **result, struct k3_error *err) {
  struct k3_cuda_graph *graph = &exec->graphs[0];
  for (int i = 1; i < K3_CUDA_MAX_GRAPHS; i++)
    if (exec->graphs[i].last_use < graph->last_use)
      graph = &exec->graphs[i];
  drop_graph(graph);
  K3_TRY(k3_cuda_check(cudaStreamBeginCapture(exec->stream, cudaStreamCaptureModeThreadLocal), "beginning a capture", err));
  cudaGraph_t captured = NULL;
  enum k3_status status = launch_all(exec, exec->stream, err);
  cudaError_t error = cudaStreamEndCapture(exec->stream, &captured);  // also after a failure, or the stream stays in it
  if (status == K3_OK)
    status = k3_cuda_check(error, "capturing the step", err);
  if (status == K3_OK)
    status = k3_cuda_check(cudaGraphInstantiate(&graph->exec, captured, 0), "making a graph of the step", err);
  if (captured)
    cudaGraphDestroy(captured);
  K3_TRY(status);
  graph->launches = k3_calloc(exec->nbytes, 1, err);
  if (!graph->launches) {
    drop_graph(graph);
    return K3_NO_MEMORY;
  }
  memcpy(graph->launches, exec->launches, exec->nbytes);
  graph->nbytes = exec->nbytes;
  *result = graph;
  return K3_OK;
}

// What a kernel found wrong, once.
static enum k3_status check_refused(struct k3_exec *exec, struct k3_error *err) {
  const uint64_t word = __atomic_exchange_n(exec->refused, 0, __ATOMIC_RELAXED);
  const unsigned which = (unsigned)(word & UINT32_MAX);
  switch ((enum k3_cuda_refusal)(word >> 32)) {
    case K3_CUDA_BAD_POSITION:
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "positions", "0 or more", "row %u has a position below 0", which);
    case K3_CUDA_BAD_SLOT:
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "slots", "-1, or a slot of the cache", "row %u has a slot beyond the cache", which);
    case K3_CUDA_BAD_ANCHOR:
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "anchor_positions", "0 up to the model's limit", "request %u has its anchor elsewhere",
                     which);
    case K3_CUDA_TOO_MANY_KEYS:
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "anchor_positions", "a session with larger max_keys",
                     "request %u needs more keys than the session has room for, %llu", which, (unsigned long long)exec->options.max_keys);
    case K3_CUDA_BAD_TABLE:
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "block_tables", "a block of the cache for every position below m + T",
                     "request %u has none for some position", which);
  }
  return K3_OK;
}

enum k3_status k3_cuda_begin(struct k3_exec *exec, void *stream, struct k3_error *err) {
  (void)stream;
  K3_TRY(k3_cuda_use(exec->backend, err));
  K3_TRY(check_refused(exec, err));  // of an earlier call in the caller's stream, if it is done
  exec->nbytes = 0;
  exec->max_rows = 0;
  exec->n_sums %= 2;  // goes on where the last call stopped: the other ranks may still read its last half
  return K3_OK;
}

enum k3_status k3_cuda_end(struct k3_exec *exec, void *caller_stream, struct k3_error *err) {
  cudaStream_t stream = caller_stream ? (cudaStream_t)caller_stream : exec->stream;
  enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (exec->nbytes == 0)
    return K3_OK;
  K3_TRY(k3_cuda_check(cudaStreamIsCapturing(stream, &capturing), "asking for the stream's state", err));
  exec->n_calls++;
  if (capturing != cudaStreamCaptureStatusNone || exec->max_rows > K3_CUDA_MAX_GRAPH_ROWS) {  // the caller's own graph, or a long append
    K3_TRY(launch_all(exec, stream, err));
  } else {
    struct k3_cuda_graph *graph = find_graph(exec);
    if (!graph)
      K3_TRY(capture(exec, &graph, err));
    graph->last_use = exec->n_calls;
    K3_TRY(k3_cuda_check(cudaGraphLaunch(graph->exec, stream), "replaying the step", err));
  }
  if (caller_stream)
    return K3_OK;
  K3_TRY(k3_cuda_check(cudaStreamSynchronize(exec->stream), "running the step", err));
  return check_refused(exec, err);
}

enum k3_status k3_cuda_grow(void *memory_ptr, size_t *capacity, size_t nbytes, struct k3_error *err) {
  void *memory;
  if (nbytes <= *capacity)
    return K3_OK;
  memcpy(&memory, memory_ptr, sizeof memory);
  K3_TRY(k3_cuda_check(cudaDeviceSynchronize(), "waiting for the steps", err));
  cudaFree(memory);  // graphs that used it name another address and are never equal to a list again
  *capacity = 0;
  enum k3_status status = k3_cuda_alloc(nbytes, &memory, err);
  memcpy(memory_ptr, &memory, sizeof memory);
  if (status == K3_OK)
    *capacity = nbytes;
  return status;
}

void k3_cuda_exec_destroy(struct k3_exec *exec) {
  if (!exec)
    return;
  k3_cuda_use(exec->backend, NULL);
  cudaDeviceSynchronize();
  for (int i = 0; i < K3_CUDA_MAX_GRAPHS; i++)
    drop_graph(&exec->graphs[i]);
  void *const scratch[] = {exec->maxima, exec->tickets, exec->partial_latents, exec->partial_sums, exec->panel, exec->chilled, exec->gathered};
  for (size_t i = 0; i < sizeof scratch / sizeof scratch[0]; i++)
    cudaFree(scratch[i]);
  for (size_t i = 0; i < exec->n_marks; i++)
    cudaEventDestroy(exec->marks[i]);
  k3_free(exec->marks);
  cudaFreeHost(exec->refused);
  k3_cuda_peers_destroy(exec->peers);
  if (exec->stream)
    cudaStreamDestroy(exec->stream);
  k3_free(exec->launches);
  k3_free(exec);
}

static const char *const SUMS_NAMES[] = {"auto", "one-shot", "two-shot", "explicit"};

static enum k3_status read_sums(enum k3_cuda_sums *sums, struct k3_error *err) {
  const char *text = getenv("K3PACK_SUMS");
  *sums = K3_CUDA_SUMS_AUTO;
  if (!text || !*text)
    return K3_OK;
  for (int i = 0; i < 4; i++) {
    if (strcmp(text, SUMS_NAMES[i]) == 0) {
      *sums = (enum k3_cuda_sums)i;
      return K3_OK;
    }
  }
  return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "auto, one-shot, two-shot or explicit", "K3PACK_SUMS is \"%s\"", text);
}

void k3_cuda_exec_sums(const struct k3_exec *exec, const char **how, const char **why) {
  const char *why_not = exec->peers ? k3_cuda_peers_why_not(exec->peers) : NULL;
  *how = !exec->peers ? "none" : why_not ? "explicit" : exec->sums == K3_CUDA_SUMS_AUTO ? "fused" : SUMS_NAMES[exec->sums];
  *why = !exec->peers                      ? "one rank"
         : why_not                         ? why_not
         : exec->sums == K3_CUDA_SUMS_AUTO ? "kernels reach every rank's window: one shot up to a size, two above"
                                           : "asked for by K3PACK_SUMS";
}

static enum k3_status create(struct k3_exec *exec, struct k3_error *err) {
  const struct k3_exec_options *options = &exec->options;
  struct k3_cuda_backend *backend = exec->backend;
  void *memory;
  uint64_t n_chunks = k3_ceil_div_u64(options->vocab_size, K3_CUDA_VOCAB_CHUNK), n_maxima, n_rows = 0, n_part = 0, window = 0;
  if (!k3_mul_u64(n_chunks, options->max_requests, &n_maxima) || n_maxima > SIZE_MAX / sizeof *exec->maxima || options->max_rows > UINT32_MAX / 2)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a smaller session", "%llu requests are too many",
                   (unsigned long long)options->max_requests);
  K3_TRY(k3_cuda_check(cudaStreamCreateWithFlags(&exec->stream, cudaStreamNonBlocking), "creating a stream", err));
  K3_TRY(k3_cuda_check(cudaMallocHost((void **)&exec->refused, sizeof *exec->refused), "taking pinned memory", err));
  *exec->refused = 0;
  K3_TRY(backend->base.ops->alloc(&backend->base, n_maxima * sizeof *exec->maxima, &memory, err));
  exec->maxima = memory;
  K3_TRY(backend->base.ops->alloc(&backend->base, options->max_requests * sizeof *exec->tickets, &memory, err));
  exec->tickets = memory;
  if (backend->tp_size == 1)
    return K3_OK;
  // Two halves for sums of [rows, widest], and this rank's part of the logits.
  n_rows = options->max_requests * options->block_width;
  n_part = n_rows * k3_ceil_div_u64(options->vocab_size, (uint64_t)backend->tp_size);
  exec->half_nbytes = (n_rows * options->max_cols * sizeof(float) + 255) / 256 * 256;
  window = 2 * exec->half_nbytes + n_part * sizeof(float);
  K3_TRY(read_sums(&exec->sums, err));
  struct k3_error own = {0};
  err = err ? err : &own;
  exec->peers = k3_cuda_peers_create(backend->comm, window, exec->sums != K3_CUDA_SUMS_EXPLICIT, err);
  if (!exec->peers)
    return err->status;
  const bool shots = exec->sums == K3_CUDA_SUMS_ONE_SHOT || exec->sums == K3_CUDA_SUMS_TWO_SHOT;
  if (shots && k3_cuda_peers_why_not(exec->peers))
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "K3PACK_SUMS=auto or explicit", "kernels do not reach the other ranks: %s",
                   k3_cuda_peers_why_not(exec->peers));
  return K3_OK;
}

enum k3_status k3_cuda_exec_create(struct k3_backend *base, const struct k3_exec_options *options, struct k3_exec **result, struct k3_error *err) {
  K3_TRY(k3_cuda_use((struct k3_cuda_backend *)base, err));
  struct k3_exec *exec = k3_calloc(1, sizeof *exec, err);
  if (!exec)
    return K3_NO_MEMORY;
  exec->backend = (struct k3_cuda_backend *)base;
  exec->options = *options;
  enum k3_status status = create(exec, err);
  if (status == K3_OK)
    *result = exec;
  else
    k3_cuda_exec_destroy(exec);
  return status;
}
