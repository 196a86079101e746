#include "base/alloc.h"
#include "base/arith.h"
#include "runtime/cpu/cpu.h"
#include "runtime/moe_steps.h"

static void destroy(struct k3_backend *backend) {
  k3_free(backend);
}

static enum k3_status alloc(struct k3_backend *backend, size_t nbytes, void **memory, struct k3_error *err) {
  (void)backend;
  *memory = k3_calloc(nbytes, 1, err);
  return *memory ? K3_OK : K3_NO_MEMORY;
}

static void release(struct k3_backend *backend, void *memory) {
  (void)backend;
  k3_free(memory);
}

static enum k3_status upload(struct k3_backend *backend, void *dst, const void *src, size_t nbytes, struct k3_error *err) {
  (void)backend, (void)err;
  memcpy(dst, src, nbytes);
  return K3_OK;
}

static void exec_destroy(struct k3_exec *exec) {
  if (!exec)
    return;
  k3_pool_free(exec->pool);
  k3_free(exec->row_scratch);
  k3_free(exec->score_scratch);
  k3_free(exec->maxima);
  k3_free(exec->previous);
  k3_free(exec->embeddings);
  k3_free(exec->marks);
  k3_free(exec);
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

static enum k3_status exec_create(struct k3_backend *backend, const struct k3_exec_options *options, struct k3_exec **result, struct k3_error *err) {
  struct k3_exec *exec = k3_calloc(1, sizeof *exec, err);
  enum k3_status status = K3_NO_MEMORY;
  if (!exec)
    return status;
  exec->bf16 = backend->bf16;
  exec->options = *options;
  exec->pool = k3_pool_create(options->n_threads, err);
  if (!exec->pool)
    goto failed;
  size_t n_threads = (size_t)k3_pool_n_threads(exec->pool);
  uint64_t score_elems;
  // A product needs a tile and its partial sums, everything else one decoded row.
  exec->scratch_elems = max_u64(K3_DOT_TILE + options->max_rows, max_u64(options->max_cols, options->row_width));
  if (!k3_mul_u64(options->block_width, options->max_keys, &score_elems) || score_elems > SIZE_MAX / sizeof(float) / n_threads) {
    status = k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a smaller max_keys", "%llu keys are too many",
                     (unsigned long long)options->max_keys);
    goto failed;
  }
  exec->score_elems = score_elems;
  exec->row_scratch = k3_calloc(n_threads * exec->scratch_elems, sizeof(float), err);
  exec->score_scratch = k3_calloc(n_threads * exec->score_elems, sizeof(float), err);
  uint64_t n_chunks = (options->vocab_size + K3_CPU_VOCAB_CHUNK - 1) / K3_CPU_VOCAB_CHUNK;
  exec->maxima = k3_calloc(n_chunks * options->max_requests, sizeof *exec->maxima, err);
  exec->previous = k3_calloc(options->max_requests, sizeof *exec->previous, err);
  exec->embeddings = k3_calloc(options->max_requests * options->markov_rank, sizeof(float), err);
  if (exec->row_scratch && exec->score_scratch && exec->maxima && exec->previous && exec->embeddings) {
    *result = exec;
    return K3_OK;
  }
failed:
  exec_destroy(exec);
  return status;
}

static const struct k3_backend_ops OPS = {
    .destroy = destroy,
    .alloc = alloc,
    .release = release,
    .upload = upload,
    .download = upload,  // one memory: both are a copy
    .exec_create = exec_create,
    .exec_destroy = exec_destroy,
#define K3_CPU_ENTRY(step) .step = k3_cpu_##step,
    K3_BACKEND_STEPS(K3_CPU_ENTRY)
#undef K3_CPU_ENTRY
        .mark = k3_cpu_mark,
    .elapsed = k3_cpu_elapsed,
    .bandwidth = k3_cpu_bandwidth,
    .moe = &k3_cpu_moe_ops,
};

struct k3_backend *k3_cpu_backend_create(bool bf16, struct k3_error *err) {
  struct k3_backend *backend = k3_calloc(1, sizeof *backend, err);
  if (backend)
    *backend = (struct k3_backend){"cpu", K3_MEMORY_HOST, sizeof(float), bf16, &OPS};
  return backend;
}
