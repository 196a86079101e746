// Every step of the CUDA backend alone against the CPU backend's, on equal random inputs: a table of steps, schemes, numbers of rows and tolerances.
// Prints a line per step and scheme; exit 1 when one differs.
//   test_steps [NAME...]   only the lines whose name contains one of the words
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/model.h"

enum { MAX_BUFFERS = 64, N_REQUESTS = 2, BLOCK_SIZE = 4, N_BLOCKS = 50, MAX_BLOCKS = 24, MAX_KEYS = 96 };

// One backend with what a step works on. The same code runs on both: inputs of one number are equal, outputs are compared in the order they were
// asked for.
struct side {
  struct k3_engine *engine;
  struct k3_exec *exec;
  const struct k3_dspark_model *m;
  const struct k3_weights *w;
  void *buffers[MAX_BUFFERS];
  unsigned n_buffers;
  struct {
    void *memory;
    uint64_t n;
    enum k3_dtype dtype;
  } outputs[8];
  unsigned n_outputs;
  struct k3_cache cache;
  uint64_t seed;
  struct k3_error err;
};

static enum k3_dtype act_dtype(const struct side *s) {
  const struct k3_backend *backend = s->engine->backend;
  return backend->memory == K3_MEMORY_DEVICE && backend->bf16 ? K3_DTYPE_BF16 : K3_DTYPE_F32;
}

static void must(struct side *s, enum k3_status status) {
  char text[1024];
  if (status == K3_OK)
    return;
  printf("FAILED: %s\n", k3_error_text(&s->err, text, sizeof text));
  exit(1);
}

static void *buffer(struct side *s, uint64_t nbytes) {
  void *memory = NULL;
  must(s, k3_memory_create(s->engine, nbytes, &memory, &s->err));
  if (s->n_buffers == MAX_BUFFERS)
    abort();
  return s->buffers[s->n_buffers++] = memory;
}

static void *input(struct side *s, const void *host, uint64_t nbytes) {
  void *memory = buffer(s, nbytes);
  must(s, k3_memory_write(s->engine, memory, host, nbytes, &s->err));
  return memory;
}

// Random activations number `i`: BF16 values in a BF16 model, whatever they are stored as.
static void *activations(struct side *s, unsigned i, uint64_t n) {
  uint64_t seed = s->seed + 1000 * i;
  float *values = malloc(n * sizeof *values);
  uint16_t *halves = malloc(n * sizeof *halves);
  for (uint64_t k = 0; k < n; k++) {
    values[k] = test_normal(&seed);
    uint32_t bits;
    memcpy(&bits, &values[k], sizeof bits);
    halves[k] = (uint16_t)(bits >> 16);
    bits &= s->engine->backend->bf16 ? 0xffff0000u : 0xffffffffu;
    memcpy(&values[k], &bits, sizeof bits);
  }
  void *memory = act_dtype(s) == K3_DTYPE_BF16 ? input(s, halves, n * sizeof *halves) : input(s, values, n * sizeof *values);
  free(values);
  free(halves);
  return memory;
}

static void *scratch(struct side *s, uint64_t n) {
  return buffer(s, n * sizeof(float));
}

static void *watch(struct side *s, void *memory, uint64_t n, enum k3_dtype dtype) {
  s->outputs[s->n_outputs].memory = memory;
  s->outputs[s->n_outputs].n = n;
  s->outputs[s->n_outputs++].dtype = dtype;
  return memory;
}

static void *output(struct side *s, uint64_t n) {  // activations
  return watch(s, scratch(s, n), n, act_dtype(s));
}

static void *output_f32(struct side *s, uint64_t n) {
  return watch(s, scratch(s, n), n, K3_DTYPE_F32);
}

// Keys before a request's block: one request ends in its first tile of keys, the other in its third, in the second split.
static int64_t anchor_of(uint64_t b) {
  return (int64_t)(b * 70 + 5);
}

static int32_t table_entry(uint64_t b, uint64_t i) {
  return (int32_t)((b * MAX_BLOCKS + i) * 7 % N_BLOCKS);
}

static void *tables(struct side *s) {
  int32_t host[N_REQUESTS * MAX_BLOCKS];
  for (uint64_t i = 0; i < N_REQUESTS * MAX_BLOCKS; i++)
    host[i] = table_entry(i / MAX_BLOCKS, i % MAX_BLOCKS);
  return input(s, host, sizeof host);
}

static void *integers(struct side *s, uint64_t n, int64_t first, int64_t step) {
  int64_t host[256];
  for (uint64_t i = 0; i < n; i++)
    host[i] = first + step * (int64_t)i;
  return input(s, host, n * sizeof *host);
}

// A cache of random rows: BF16, or FP8 codes below 2.
static void fill_cache_as(struct side *s, enum k3_dtype dtype) {
  static const float scales[] = {0.5f, 0.75f};
  const uint64_t E = s->engine->info.row_width, L = s->m->n_layers, n = L * N_BLOCKS * BLOCK_SIZE * E;
  uint64_t seed = s->seed + 77;
  uint16_t *rows = malloc(n * sizeof *rows);
  for (uint64_t i = 0; i < n; i++) {
    const float value = test_normal(&seed);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == K3_DTYPE_BF16)
      rows[i] = (uint16_t)(bits >> 16);
    else
      ((uint8_t *)rows)[i] = (uint8_t)(test_random(&seed) & 0xbf);
  }
  must(s, k3_cache_create(s->engine, dtype, N_BLOCKS, BLOCK_SIZE, dtype == K3_DTYPE_BF16 ? NULL : scales, &s->cache, &s->err));
  must(s, k3_memory_write(s->engine, s->cache.layers[0], rows, n * k3_dtype_bits(dtype) / 8, &s->err));
  free(rows);
}

static void fill_cache(struct side *s) {
  fill_cache_as(s, K3_DTYPE_BF16);
}

static void watch_cache(struct side *s) {
  watch(s, s->cache.layers[0], s->m->n_layers * N_BLOCKS * BLOCK_SIZE * s->engine->info.row_width, K3_DTYPE_BF16);
}

// --- the steps -------------------------------------------------------------------------------------------------------------------------------------

#define RUN(s, step, ...) must(s, (s)->engine->backend->ops->step((s)->exec, &(struct k3_##step){__VA_ARGS__}, &(s)->err))

static void run_combine(struct side *s, uint64_t n) {
  const uint64_t width = s->m->n_taps * s->m->target_hidden_size, H = s->m->hidden_size;
  const struct k3_array taps = {activations(s, 1, n * width), s->engine->info.memory, act_dtype(s), 0};
  RUN(s, combine, .n_rows = n, .n_taps = s->m->n_taps, .tap_width = s->m->target_hidden_size, .taps = &taps, .n_tap_arrays = 1,
      .tap_norms = s->w->tap_norms, .proj = &s->w->context_proj, .norm = &s->w->context_norm, .eps = 1e-5f, .joined = scratch(s, n * width),
      .projected = scratch(s, n * H), .out = output(s, n * H), .out_f32 = output_f32(s, n * H), .out_row_nbytes = H * sizeof(float));
}

static void run_context_insert(struct side *s, uint64_t n) {
  const uint64_t E = s->engine->info.row_width, L = s->m->n_layers;
  fill_cache(s);
  RUN(s, context_insert, .n_rows = n, .n_layers = L, .latent_rank = s->m->kv_lora_rank, .rope_width = s->m->qk_rope_head_dim,
      .context = activations(s, 1, n * s->m->hidden_size), .kv = &s->w->context_kv, .norms = s->w->kv_norms, .eps = 1e-5f, .rope = &s->engine->rope,
      .positions = integers(s, n, 3, 27001), .slots = integers(s, n, 1, 2), .max_positions = 1 << 20, .cache = &s->cache,
      .kv_rows = scratch(s, n * L * E), .out_f32 = output_f32(s, L * n * E), .out_row_nbytes = E * sizeof(float), .out_layer_rows = n);
  watch_cache(s);
}

static void run_block_begin(struct side *s, uint64_t n) {
  const uint64_t T = s->m->block_width, q = N_REQUESTS * T;
  (void)n;
  fill_cache(s);
  int64_t ids[N_REQUESTS] = {-5, 571}, anchors[N_REQUESTS] = {5, 14};
  RUN(s, block_begin, .n_requests = N_REQUESTS, .block_width = T, .max_positions = 17, .vocab_size = s->m->vocab_size, .max_blocks = MAX_BLOCKS,
      .mask_token_id = s->m->mask_token_id, .anchor_ids = input(s, ids, sizeof ids), .anchor_positions = input(s, anchors, sizeof anchors),
      .block_tables = tables(s), .cache = &s->cache, .embedding = &s->w->embedding, .positions = watch(s, buffer(s, q * 8), q, K3_DTYPE_I64),
      .slots = watch(s, buffer(s, q * 8), q, K3_DTYPE_I64), .n_keys = watch(s, buffer(s, N_REQUESTS * 8), N_REQUESTS, K3_DTYPE_I64),
      .residual = output(s, q * s->m->hidden_size));
}

static void run_reduce_add_norm(struct side *s, uint64_t n) {
  const uint64_t H = s->m->hidden_size;
  void *residual = watch(s, activations(s, 1, n * H), n * H, act_dtype(s));
  RUN(s, reduce_add_norm, .n_rows = n, .width = H, .partial = activations(s, 2, n * H), .residual = residual, .norm = &s->w->final_norm, .eps = 1e-5f,
      .out = output(s, n * H));
}

static void run_latents(struct side *s, uint64_t n) {
  const uint64_t E = s->engine->info.row_width, Rq = s->m->q_lora_rank;
  fill_cache(s);
  RUN(s, latents, .n_rows = n, .q_rank = Rq, .latent_rank = s->m->kv_lora_rank, .rope_width = s->m->qk_rope_head_dim, .layer = 1,
      .in = activations(s, 1, n * s->m->hidden_size), .proj = &s->w->layers[1].qkv_a, .q_norm = &s->w->layers[1].q_a_norm,
      .kv_norm = &s->w->layers[1].kv_a_norm, .eps = 1e-5f, .rope = &s->engine->rope, .positions = integers(s, n, 2, 5),
      .slots = integers(s, n, -1, 2), .cache = &s->cache, .projected = scratch(s, n * (Rq + E)), .q_a = output(s, n * Rq));
  watch_cache(s);
}

static void run_query(struct side *s, uint64_t n) {
  const struct k3_dspark_model *m = s->m;
  const uint64_t D = m->qk_nope_head_dim + m->qk_rope_head_dim, E = s->engine->info.row_width;
  RUN(s, query, .n_rows = n, .q_rank = m->q_lora_rank, .n_heads = m->n_heads, .nope_width = m->qk_nope_head_dim, .rope_width = m->qk_rope_head_dim,
      .v_width = m->v_head_dim, .latent_rank = m->kv_lora_rank, .q_a = activations(s, 1, n * m->q_lora_rank), .q_b = &s->w->layers[0].q_b,
      .kv_b = &s->w->layers[0].kv_b, .rope = &s->engine->rope, .positions = integers(s, n, 0, 9), .q = scratch(s, n * m->n_heads * D),
      .out = output(s, n * m->n_heads * E));
}

static void run_attend(struct side *s, uint64_t n) {
  const struct k3_dspark_model *m = s->m;
  const uint64_t T = m->block_width, q = N_REQUESTS * T, E = s->engine->info.row_width;
  fill_cache_as(s, n < 20 ? K3_DTYPE_BF16 : n < 40 ? K3_DTYPE_F8_E4M3 : K3_DTYPE_F8_E5M2);
  int64_t n_keys[N_REQUESTS], anchors[N_REQUESTS];
  for (uint64_t b = 0; b < N_REQUESTS; b++) {
    anchors[b] = anchor_of(b);
    n_keys[b] = anchors[b] + (int64_t)T;
  }
  RUN(s, attend, .n_requests = N_REQUESTS, .block_width = T, .n_heads = m->n_heads, .nope_width = m->qk_nope_head_dim,
      .rope_width = m->qk_rope_head_dim, .v_width = m->v_head_dim, .latent_rank = m->kv_lora_rank, .layer = 1, .max_blocks = MAX_BLOCKS,
      .query = activations(s, 1, q * m->n_heads * E), .kv_b = &s->w->layers[1].kv_b, .cache = &s->cache, .block_tables = tables(s),
      .n_keys = input(s, n_keys, sizeof n_keys), .anchor_positions = input(s, anchors, sizeof anchors), .scale = s->engine->softmax_scale,
      .causal = m->causal, .latent = scratch(s, q * m->n_heads * m->kv_lora_rank), .out = output(s, q * m->n_heads * m->v_head_dim));
}

static void run_project(struct side *s, uint64_t n) {
  RUN(s, project, .n_rows = n, .in = activations(s, 1, n * s->w->layers[0].o_proj.n_cols), .proj = &s->w->layers[0].o_proj,
      .out = output(s, n * s->m->hidden_size));
}

static void run_mlp(struct side *s, uint64_t n) {
  const uint64_t I = s->m->intermediate_size, H = s->m->hidden_size;
  RUN(s, mlp, .n_rows = n, .width = I, .in = activations(s, 1, n * H), .gate_up = &s->w->layers[0].gate_up, .down = &s->w->layers[0].down,
      .gate_up_rows = scratch(s, n * 2 * I), .gated = scratch(s, n * I), .out = output(s, n * H));
}

static void run_logits(struct side *s, uint64_t n) {
  RUN(s, logits, .n_rows = n, .vocab_size = s->m->vocab_size, .hidden = activations(s, 1, n * s->m->hidden_size), .head = &s->w->head, .scale = 0.5f,
      .out = output_f32(s, n * s->m->vocab_size));
}

static void run_markov(struct side *s, uint64_t n) {
  const struct k3_dspark_model *m = s->m;
  const uint64_t T = m->block_width, q = N_REQUESTS * T, V = m->vocab_size;
  (void)n;
  int64_t anchors[N_REQUESTS] = {1 << 20, 3}, previous[N_REQUESTS * 16];
  uint64_t seed = s->seed;
  float *logits = malloc(q * V * sizeof *logits);
  for (uint64_t i = 0; i < q * V; i++)  // many ties, which go to the lowest id
    logits[i] = (float)(test_random(&seed) % 5);
  for (uint64_t i = 0; i < q; i++)
    previous[i] = (int64_t)(test_random(&seed) % V);
  RUN(s, markov, .n_requests = N_REQUESTS, .block_width = T, .vocab_size = V, .rank = m->markov_rank, .hidden_size = m->hidden_size,
      .base_logits = input(s, logits, q * V * sizeof *logits), .w1 = &s->w->markov_w1, .w2 = &s->w->markov_w2, .scale = 0,
      .confidence = &s->w->confidence, .confidence_bias = &s->w->confidence_bias, .confidence_with_markov = m->confidence_with_markov,
      .anchor_ids = input(s, anchors, sizeof anchors), .previous_ids = input(s, previous, q * 8), .hidden = activations(s, 2, q * m->hidden_size),
      .out_ids = watch(s, buffer(s, q * 8), q, K3_DTYPE_I64), .out_confidence = output_f32(s, q), .out_logits = output_f32(s, q * V),
      .out_row_nbytes = V * sizeof(float));
  free(logits);
}

static void run_export(struct side *s, uint64_t n) {
  const uint64_t H = s->m->hidden_size;
  RUN(s, export, .n_rows = n, .width = H, .in = activations(s, 1, n * H), .out = output_f32(s, n * H), .out_row_nbytes = H * sizeof(float));
}

struct step {
  const char *name;
  void (*run)(struct side *s, uint64_t n);
  float f32[2], bf16[2];  // {pass, warn}: root mean square of the difference as a share of the output's
};

// With BF16 a value may fall to the other side of a rounding, 2^-8 of itself; F16 and FP8 weights are rounded to BF16 on their way into the library's
// product, 2^-9 of themselves.
static const struct step STEPS[] = {
    {"combine", run_combine, {2e-6f, 1e-6f}, {5e-3f, 4e-3f}},
    {"context_insert", run_context_insert, {2e-4f, 1e-4f}, {5e-3f, 4e-3f}},  // F32 rows in a BF16 cache
    {"block_begin", run_block_begin, {0, 0}, {0, 0}},
    {"reduce_add_norm", run_reduce_add_norm, {2e-6f, 1e-6f}, {1e-3f, 6e-4f}},
    {"latents", run_latents, {2e-4f, 1e-4f}, {5e-3f, 4e-3f}},
    {"query", run_query, {2e-6f, 1e-6f}, {5e-3f, 4e-3f}},
    {"attend", run_attend, {2e-6f, 1e-6f}, {5e-3f, 4.5e-3f}},  // shares are rounded on either side of their division
    {"project", run_project, {2e-6f, 1e-6f}, {4e-3f, 3e-3f}},
    {"mlp", run_mlp, {2e-6f, 1e-6f}, {8e-3f, 6e-3f}},
    {"logits", run_logits, {2e-6f, 1e-6f}, {3e-3f, 2e-3f}},
    {"markov", run_markov, {2e-6f, 1e-6f}, {2e-5f, 1e-5f}},
    {"export", run_export, {0, 0}, {0, 0}},
};

static const struct {
  struct test_scheme scheme;
  unsigned variant;
} MODELS[] = {
    {{"f32", K3_SCHEME_F32, K3_SECOND_NONE}, 2},
    {{"f32 odd widths", K3_SCHEME_F32, K3_SECOND_NONE}, 1 | 4 | 8},
    {{"bf16", K3_SCHEME_BF16, K3_SECOND_NONE}, 1},
    {{"bf16 full latents", K3_SCHEME_BF16, K3_SECOND_NONE}, 32},
    {{"bf16 full latents, causal", K3_SCHEME_BF16, K3_SECOND_NONE}, 32 | 1},
    {{"f16", K3_SCHEME_F16, K3_SECOND_NONE}, 0},
    {{"fp8-channel", K3_SCHEME_FP8_CHANNEL, K3_SECOND_NONE}, 0},
    {{"fp8-block", K3_SCHEME_FP8_BLOCK, K3_SECOND_NONE}, 0},
    {{"fp8-block, f32 activations", K3_SCHEME_FP8_BLOCK, K3_SECOND_NONE}, 16},
    {{"nvfp4", K3_SCHEME_NVFP4, K3_SECOND_DIVIDE}, 0},
    {{"nvfp4, f32 activations", K3_SCHEME_NVFP4, K3_SECOND_MULTIPLY}, 16},
    {{"mxfp4, f32 activations", K3_SCHEME_MXFP4, K3_SECOND_NONE}, 16},
};

static const uint64_t ROWS[] = {1, 7, 20, 40, 72};  // one, a block, four and eight tiles, and enough for the library's product in every scheme

static void open_side(struct side *s, const struct test_model *model, const char *backend) {
  *s = (struct side){.m = &model->dims, .seed = 4242};
  s->engine = test_engine_create(model, backend, NULL, 0, 1, &s->err);
  must(s, s->engine ? K3_OK : s->err.status);
  s->w = &s->engine->weights;
  const struct k3_exec_options options = {.max_rows = 80,
                                          .max_requests = N_REQUESTS,
                                          .max_keys = MAX_KEYS,
                                          .block_width = model->dims.block_width,
                                          .row_width = s->engine->info.row_width,
                                          .max_cols = 512,
                                          .vocab_size = model->dims.vocab_size,
                                          .markov_rank = model->dims.markov_rank,
                                          .n_threads = 1};
  must(s, s->engine->backend->ops->exec_create(s->engine->backend, &options, &s->exec, &s->err));
}

static void forget(struct side *s) {
  for (unsigned i = 0; i < s->n_buffers; i++)
    k3_memory_free(s->engine, s->buffers[i]);
  k3_cache_free(s->engine, &s->cache);
  s->n_buffers = s->n_outputs = 0;
}

static void close_side(struct side *s) {
  s->engine->backend->ops->exec_destroy(s->exec);
  test_engine_free(s->engine);
}

// One step between two marks, with cold caches; a time that is none is a failure.
static void run_side(struct side *s, const struct step *step, uint64_t n) {
  const struct k3_backend_ops *ops = s->engine->backend->ops;
  double seconds;
  if (ops->chill)
    must(s, ops->chill(s->exec, NULL, &s->err));
  if (ops->begin)
    must(s, ops->begin(s->exec, NULL, &s->err));
  must(s, ops->mark(s->exec, 0, &s->err));
  step->run(s, n);
  must(s, ops->mark(s->exec, 1, &s->err));
  if (ops->end)
    must(s, ops->end(s->exec, NULL, &s->err));
  must(s, ops->elapsed(s->exec, 0, 1, &seconds, &s->err));
  if (!(seconds > 0 && seconds < 600)) {
    printf("FAILED: %s is said to take %g s\n", step->name, seconds);
    exit(1);
  }
}

static void read_output(struct side *s, unsigned i, double *values) {
  const uint64_t n = s->outputs[i].n;
  const enum k3_dtype dtype = s->outputs[i].dtype;
  unsigned char *raw = malloc(n * 8);
  must(s, k3_memory_read(s->engine, raw, s->outputs[i].memory, n * k3_dtype_bits(dtype) / 8, &s->err));
  for (uint64_t k = 0; k < n; k++) {
    uint32_t bits = 0;
    float value;
    int64_t integer;
    if (dtype == K3_DTYPE_I64) {
      memcpy(&integer, raw + 8 * k, 8);
      values[k] = (double)integer;
      continue;
    }
    memcpy(dtype == K3_DTYPE_BF16 ? (unsigned char *)&bits + 2 : (unsigned char *)&bits, raw + k * (dtype == K3_DTYPE_BF16 ? 2 : 4),
           dtype == K3_DTYPE_BF16 ? 2 : 4);
    memcpy(&value, &bits, sizeof value);
    values[k] = (double)value;
  }
  free(raw);
}

// The worst output; infinity when an integer differs.
static double difference(struct side *cpu, struct side *cuda) {
  double worst = 0;
  for (unsigned i = 0; i < cpu->n_outputs; i++) {
    const uint64_t n = cpu->outputs[i].n;
    double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), error = 0, size = 0;
    read_output(cpu, i, a);
    read_output(cuda, i, b);
    for (uint64_t k = 0; k < n; k++) {
      error += (a[k] - b[k]) * (a[k] - b[k]);
      size += a[k] * a[k];
    }
    const double d = cpu->outputs[i].dtype == K3_DTYPE_I64 ? (error == 0 ? 0 : INFINITY) : sqrt(error / (size + 1e-30));
    worst = d <= worst ? worst : d;
    free(a);
    free(b);
  }
  return worst;
}

static bool wanted(const char *name, int argc, char **argv) {
  bool any = argc < 2;
  for (int i = 1; i < argc; i++)
    any |= strstr(name, argv[i]) != NULL;
  return any;
}

int main(int argc, char **argv) {
  int n_failed = 0, n_run = 0;
  for (size_t k = 0; k < sizeof MODELS / sizeof MODELS[0]; k++) {
    struct test_model model;
    struct side cpu, cuda;
    if (!wanted(MODELS[k].scheme.name, argc, argv))
      continue;
    test_model_create(&model, &MODELS[k].scheme, MODELS[k].variant, 9 + k);
    open_side(&cpu, &model, "cpu");
    open_side(&cuda, &model, "cuda");
    double bandwidth;
    must(&cuda, cuda.engine->backend->ops->bandwidth(cuda.exec, &bandwidth, &cuda.err));
    if (!(bandwidth > 1e6)) {
      printf("FAILED: a copy within the device is said to move %g bytes a second\n", bandwidth);
      return 1;
    }
    for (size_t i = 0; i < sizeof STEPS / sizeof STEPS[0]; i++) {
      const float *tolerance = model.weights.all_f32 ? STEPS[i].f32 : STEPS[i].bf16;
      double worst = 0;
      for (size_t r = 0; r < sizeof ROWS / sizeof ROWS[0]; r++) {
        run_side(&cpu, &STEPS[i], ROWS[r]);
        run_side(&cuda, &STEPS[i], ROWS[r]);
        const double d = difference(&cpu, &cuda);
        worst = d <= worst ? worst : d;
        forget(&cpu);
        forget(&cuda);
      }
      const bool ok = worst <= (double)tolerance[0];
      printf("%-7s %s, %s: within %.2g\n",
             !ok                            ? "FAILED"
             : worst > (double)tolerance[1] ? "warn"
                                            : "ok",
             STEPS[i].name, MODELS[k].scheme.name, worst);
      n_failed += !ok;
      n_run++;
    }
    close_side(&cpu);
    close_side(&cuda);
    test_model_free(&model);
    fflush(stdout);
  }
  printf("%d steps, %d failed\n", n_run, n_failed);
  return n_failed > 0 || n_run == 0;
}
