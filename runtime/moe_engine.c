#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "runtime/moe_parts.h"

typedef unsigned long long ull;  // for %llu

// ---- the plan ----

struct images {
  const struct k3_weights_source *source;
  uint64_t n_layers;
};

// Whether an image has a module of the model's own layers; prediction blocks are no part of the stream.
static bool module_exists(void *ctx, const char *module) {
  const struct images *images = ctx;
  static const char prefix[] = "model.layers.";
  if (strncmp(module, prefix, sizeof prefix - 1) == 0 && strtoull(module + sizeof prefix - 1, NULL, 10) >= images->n_layers)
    return false;
  static const char *const params[] = {"weight", "weight_packed"};
  char name[1100];
  for (unsigned p = 0; p < 2; p++) {
    int n = snprintf(name, sizeof name, "%s.%s", module, params[p]);
    if (n < 0 || (size_t)n >= sizeof name)
      continue;
    if (k3_image_data(images->source->image, name, NULL) || (images->source->slices && k3_image_data(images->source->slices, name, NULL)))
      return true;
  }
  return false;
}

static const char *keep(struct k3_moe *moe, const char *layer, const char *suffix, struct k3_error *err) {
  char name[192];
  int n = snprintf(name, sizeof name, "%s.%s", layer, suffix);
  return k3_arena_strndup(&moe->stack.arena, name, (size_t)n, err);
}

// A prediction block: its output is read by something else than a norm, but for DeepSeek-V3.2, where the norm of the shared head takes it.
static enum k3_status stack_of_block(struct k3_moe *moe, struct k3_error *err) {
  const bool is_m3 = moe->model.family == K3_MOE_MINIMAX_M3;
  char layer[96];
  k3_moe_layer_name(&moe->model, moe->options.first_layer, layer, sizeof layer);
  struct k3_sum *sums = k3_calloc(2, sizeof *sums, err);
  if (!sums)
    return K3_NO_MEMORY;
  moe->stack.sums = sums;
  moe->stack.n_sums = 2;
  moe->stack.n_layers = 1;
  sums[0] = (struct k3_sum){.producer = keep(moe, layer, "self_attn.o_proj", err),
                            .norm = keep(moe, layer, "post_attention_layernorm", err),
                            .starts = keep(moe, layer, "input_layernorm", err),
                            .kind = K3_SUM_ATTENTION};
  sums[1] = (struct k3_sum){.producer = keep(moe, layer, is_m3 ? "block_sparse_moe.experts.w2" : "mlp.experts.w2", err),
                            .norm = is_m3 ? NULL : keep(moe, layer, "shared_head.norm", err),
                            .kind = K3_SUM_MOE};
  return sums[0].producer && sums[0].norm && sums[0].starts && sums[1].producer && (is_m3 || sums[1].norm) ? K3_OK : K3_NO_MEMORY;
}

// The range's part of the model's stack. What the range's last layer adds is the output, unless the final norm stands behind it.
static enum k3_status stack_of_range(struct k3_moe *moe, const struct k3_weights_source *source, struct k3_error *err) {
  const struct k3_moe_options *o = &moe->options;
  const struct k3_manifest *manifest = &source->image->manifest;
  struct images images = {source, moe->model.n_layers};
  struct k3_stack *stack = &moe->stack;
  size_t n = 0;
  K3_TRY(k3_stack_from_map(manifest->reductions, manifest->n_reductions, moe->model.n_layers, module_exists, &images, stack, err));
  for (size_t s = 0; s < stack->n_sums; s++) {
    if (stack->sums[s].layer < o->first_layer || stack->sums[s].layer >= o->first_layer + o->n_layers)
      continue;
    stack->sums[n] = stack->sums[s];
    stack->sums[n].starts = NULL;
    stack->sums[n++].layer -= o->first_layer;
  }
  stack->n_sums = n;
  stack->n_layers = o->n_layers;
  bool complete = n == 2 * o->n_layers;
  for (size_t s = 0; complete && s < n; s++)
    complete = stack->sums[s].layer == s / 2 && (stack->sums[s].kind == K3_SUM_ATTENTION) == (s % 2 == 0);
  if (!complete)
    return k3_fail(err, K3_BAD_INPUT, K3_RED01, NULL, NULL, "an image whose manifest says which norm completes which sum",
                   "its map of reductions has %llu sums for %llu layers", (ull)n, (ull)o->n_layers);
  char layer[96];
  k3_moe_layer_name(&moe->model, o->first_layer, layer, sizeof layer);
  stack->sums[0].starts = keep(moe, layer, "input_layernorm", err);
  if (o->first_layer + o->n_layers < moe->model.n_layers)
    stack->sums[n - 1].norm = NULL;
  return stack->sums[0].starts ? K3_OK : K3_NO_MEMORY;
}

static enum k3_status make_plan(struct k3_moe *moe, const struct k3_weights_source *source, struct k3_error *err) {
  const struct k3_moe_options *o = &moe->options;
  K3_TRY(o->first_layer >= moe->model.n_layers ? stack_of_block(moe, err) : stack_of_range(moe, source, err));
  for (size_t s = 0; s < moe->stack.n_sums; s++) {
    if (moe->stack.sums[s].kind == K3_SUM_MOE) {
      moe->stack.sums[s].returns_whole = o->whole_moe;
      moe->stack.sums[s].sequence_parallel = o->sequence_parallel;
    }
  }
  uint64_t *layers = k3_arena_alloc(&moe->arena, (o->n_taps + 1) * sizeof *layers, err);
  if (!layers)
    return K3_NO_MEMORY;
  struct k3_parallel parallel = {.tp = o->tp_size, .pp = o->pp, .border = o->border, .tap = o->tap, .taps = layers};
  for (size_t t = 0; t < o->n_taps; t++) {
    if (o->taps[t] > o->first_layer)  // the stream before the first layer is the input
      layers[parallel.n_taps++] = o->taps[t] - o->first_layer - 1;
  }
  return k3_reduction_plan_make(&moe->stack, &parallel, &moe->plan, err);
}

bool k3_moe_fuses_input(const struct k3_moe *moe, uint64_t layer) {
  char name[96], norm[128];
  k3_moe_layer_name(&moe->model, layer, name, sizeof name);
  snprintf(norm, sizeof norm, "%s.input_layernorm", name);
  const struct k3_flow *step = k3_reduction_plan_step(&moe->plan, K3_FLOW_NORM, norm);
  return step && step->reduce == K3_REDUCE_ALL;
}

// ---- opening ----

static enum k3_status check_options(const struct k3_moe *moe, struct k3_error *err) {
  const struct k3_moe_options *o = &moe->options;
  const uint64_t L = moe->model.n_layers;
  const uint32_t comm_size = o->comm ? (uint32_t)o->comm->size : 1, comm_rank = o->comm ? (uint32_t)o->comm->rank : 0;
  if (o->tp_rank >= o->tp_size || comm_size != o->tp_size || comm_rank != o->tp_rank)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a rank below the size, and a communicator of the same",
                   "rank %u of %u with a communicator for rank %u of %u", o->tp_rank, o->tp_size, comm_rank, comm_size);
  if (o->n_layers == 0 || o->n_layers > K3_MOE_MAX_LAYERS || (o->first_layer < L && o->n_layers > L - o->first_layer) ||
      (o->first_layer >= L && o->n_layers != 1))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "layers of the model, or one prediction block behind them",
                   "%llu layers from layer %llu on, the model has %llu", (ull)o->n_layers, (ull)o->first_layer, (ull)L);
  for (size_t t = 0; t < o->n_taps; t++) {
    if (o->taps[t] < o->first_layer || o->taps[t] > o->first_layer + o->n_layers)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a tap within the range of layers", "a tap after %llu layers", (ull)o->taps[t]);
  }
  return K3_OK;
}

static enum k3_status copy_taps(struct k3_moe *moe, struct k3_error *err) {
  struct k3_moe_options *o = &moe->options;
  uint64_t *taps = k3_arena_alloc(&moe->arena, (o->n_taps + 1) * sizeof *taps, err);
  if (!taps)
    return K3_NO_MEMORY;
  if (o->n_taps > 0)
    memcpy(taps, o->taps, o->n_taps * sizeof *taps);
  o->taps = taps;
  return K3_OK;
}

static enum k3_status prepare_rope(struct k3_moe *moe, struct k3_error *err) {
  const struct k3_moe_model *m = &moe->model;
  const bool is_gqa = m->family == K3_MOE_MINIMAX_M3;
  const uint64_t width = is_gqa ? m->rotary_dim : m->qk_rope_head_dim;
  const struct k3_backend_ops *ops = moe->backend->ops;
  float *host = k3_calloc(width / 2, sizeof *host, err);
  void *memory = NULL;
  enum k3_status status = host ? ops->alloc(moe->backend, width / 2 * sizeof *host, &memory, err) : K3_NO_MEMORY;
  if (status == K3_OK) {
    moe->inv_freq = memory;
    for (uint64_t i = 0; i < width / 2; i++)
      host[i] = (float)k3_rope_inv_freq(&m->rope, width, i);
    status = ops->upload(moe->backend, memory, host, width / 2 * sizeof *host, err);
  }
  k3_free(host);
  moe->rope = (struct k3_rope_table){moe->inv_freq, width / 2, (float)k3_rope_amplitude(&m->rope)};
  moe->softmax_scale =
      is_gqa ? (float)(1 / sqrt((double)m->head_dim)) : (float)k3_rope_softmax_scale(&m->rope, m->qk_nope_head_dim + m->qk_rope_head_dim);
  return status;
}

static enum k3_status open_layers(struct k3_moe *moe, const struct k3_weights_source *source, struct k3_error *err) {
  struct k3_moe_options *o = &moe->options;
  const struct k3_manifest *manifest = &source->image->manifest;
  o->tp_size = o->tp_size > 1 ? o->tp_size : 1;
  o->pp = o->pp > 1 ? o->pp : 1;
  const char *json = manifest->model_json ? manifest->model_json : "{}";
  K3_TRY(k3_moe_model_from_json(json, strlen(json), NULL, &moe->model, err));
  K3_TRY(check_options(moe, err));
  K3_TRY(copy_taps(moe, err));
  K3_TRY(make_plan(moe, source, err));
  K3_TRY(k3_moe_bind(moe, source, err));
  moe->backend = k3_cpu_backend_create(moe->bf16, err);
  return moe->backend ? prepare_rope(moe, err) : K3_NO_MEMORY;
}

struct k3_moe *k3_moe_open(const struct k3_weights_source *source, const struct k3_moe_options *options, struct k3_error *err) {
  struct k3_moe *moe = k3_calloc(1, sizeof *moe, err);
  if (!moe)
    return NULL;
  moe->options = *options;
  // The source's rank and size are those of the options.
  const struct k3_weights_source own = {source->image, source->slices, options->tp_rank, options->tp_size > 1 ? options->tp_size : 1};
  if (open_layers(moe, &own, err) == K3_OK)
    return moe;
  k3_moe_free(moe);
  return NULL;
}

void k3_moe_free(struct k3_moe *moe) {
  if (!moe)
    return;
  if (moe->backend) {
    if (moe->inv_freq)
      moe->backend->ops->release(moe->backend, moe->inv_freq);
    moe->backend->ops->destroy(moe->backend);
  }
  k3_reduction_plan_free(&moe->plan);
  k3_stack_free(&moe->stack);
  k3_arena_free(&moe->arena);
  k3_free(moe);
}

// ---- a run ----

struct key {
  int64_t request, position;
  uint64_t row;
};

static int compare_keys(const void *a, const void *b) {
  const struct key *x = a, *y = b;
  if (x->request != y->request)
    return x->request < y->request ? -1 : 1;
  return x->position != y->position ? (x->position < y->position ? -1 : 1) : 0;
}

// Sorted rows: each request's positions are 0, 1, .., so that the rows before a row are what it sees.
static enum k3_status check_positions(struct k3_moe_pass *pass, const struct key *keys, struct k3_error *err) {
  const struct k3_moe_model *m = &pass->moe->model;
  int64_t first = 0;
  for (uint64_t i = 0; i < pass->n_rows; i++) {
    if (i > 0 && keys[i].request != keys[i - 1].request)
      first = (int64_t)i;
    const int64_t expected = (int64_t)i - first;
    if (keys[i].request < 0)
      return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "request_ids", "0 or more", "row %llu belongs to request %lld", (ull)keys[i].row,
                     (long long)keys[i].request);
    if (keys[i].position < expected)
      return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "positions", "every position once, from 0 on",
                     "request %lld: row %llu has position %lld, which is below 0 or occurs twice", (long long)keys[i].request, (ull)keys[i].row,
                     (long long)keys[i].position);
    if (keys[i].position > expected)
      return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "positions", "every position once, from 0 on",
                     "request %lld: the row of position %lld is missing", (long long)keys[i].request, (long long)expected);
    if ((uint64_t)expected >= m->max_position_embeddings)
      return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "positions", "positions below max_position_embeddings",
                     "request %lld: row %llu has position %lld", (long long)keys[i].request, (ull)keys[i].row, (long long)keys[i].position);
    pass->order[i] = keys[i].row;
    pass->positions[i] = expected;
    pass->first_keys[i] = first;
    pass->longest = (uint64_t)expected + 1 > pass->longest ? (uint64_t)expected + 1 : pass->longest;
    for (uint64_t l = 0; (uint64_t)expected + 1 > m->max_dense_keys && l < pass->moe->options.n_layers; l++) {
      const uint64_t layer = pass->moe->options.first_layer + l;
      if (layer >= m->n_layers || m->is_sparse[layer])
        return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, NULL, "positions", "shorter requests: beyond that the layer attends to selected keys only",
                       "request %lld: position %lld of layer %llu sees %lld keys, dense attention is exact up to %llu", (long long)keys[i].request,
                       (long long)keys[i].position, (ull)layer, (long long)expected + 1, (ull)m->max_dense_keys);
    }
  }
  return K3_OK;
}

static enum k3_status sort_rows(struct k3_moe_pass *pass, struct k3_error *err) {
  const struct k3_moe_rows *rows = pass->rows;
  pass->order = k3_calloc(pass->n_rows, sizeof *pass->order, err);
  pass->positions = k3_calloc(pass->n_rows, sizeof *pass->positions, err);
  pass->first_keys = k3_calloc(pass->n_rows, sizeof *pass->first_keys, err);
  struct key *keys = k3_calloc(pass->n_rows, sizeof *keys, err);
  if (!pass->order || !pass->positions || !pass->first_keys || !keys) {
    k3_free(keys);
    return K3_NO_MEMORY;
  }
  for (uint64_t i = 0; i < pass->n_rows; i++)
    keys[i] = (struct key){rows->request_ids[i], rows->positions[i], i};
  qsort(keys, pass->n_rows, sizeof *keys, compare_keys);
  enum k3_status status = check_positions(pass, keys, err);
  k3_free(keys);
  return status;
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

struct buffer {
  void **field;
  uint64_t width, elem_nbytes;
};
enum { N_BUFFERS = 19 };

// The only place that knows the sizes.
static void list_buffers(struct k3_moe_pass *pass, struct buffer buffers[N_BUFFERS]) {
  const struct k3_moe_model *m = &pass->moe->model;
  const uint64_t act = pass->moe->backend->act_nbytes, H = m->hidden_size, N = pass->moe->n_heads, G = pass->moe->n_kv_heads;
  const bool is_gqa = m->family == K3_MOE_MINIMAX_M3;
  const uint64_t Dk = is_gqa ? m->head_dim : m->qk_nope_head_dim + m->qk_rope_head_dim, Dv = is_gqa ? m->head_dim : m->v_head_dim;
  const uint64_t I = max_u64(m->dense_size, max_u64(m->expert_size, m->shared_size));
  const struct buffer list[N_BUFFERS] = {
      {&pass->residual, H, act},
      {&pass->normed, H, act},
      {&pass->branch, H, act},
      {&pass->copy, H, act},
      {&pass->q, N * Dk, act},
      {&pass->k, G * Dk, act},
      {&pass->v, G * Dv, act},
      {&pass->heads, N * Dv, act},
      {&pass->projected, m->q_lora_rank + m->kv_lora_rank + m->qk_rope_head_dim, act},
      {&pass->q_a, m->q_lora_rank, act},
      {&pass->latent, m->kv_lora_rank, act},
      {&pass->expanded, N * (m->qk_nope_head_dim + m->v_head_dim), act},
      {&pass->gate_up_rows, 2 * I, act},
      {&pass->gated, I, act},
      {&pass->gathered, H, act},
      {&pass->contribution, H, act},
      {&pass->logits, m->n_experts, sizeof(float)},
      {&pass->weights, m->n_active, sizeof(float)},
      {&pass->experts, m->n_active, sizeof(int32_t)},
  };
  memcpy(buffers, list, sizeof list);
}

static enum k3_status prepare(struct k3_moe_pass *pass, struct k3_error *err) {
  struct k3_backend *backend = pass->moe->backend;
  const struct k3_moe_options *o = &pass->moe->options;
  struct buffer buffers[N_BUFFERS];
  K3_TRY(sort_rows(pass, err));
  pass->n_each = pass->n_rows / o->tp_size + (pass->n_rows % o->tp_size != 0);
  pass->own_first = o->tp_rank * pass->n_each;
  if (pass->own_first < pass->n_rows)
    pass->n_own = pass->n_rows - pass->own_first < pass->n_each ? pass->n_rows - pass->own_first : pass->n_each;
  uint64_t n_padded;
  if (!k3_mul_u64(o->tp_size, pass->n_each, &n_padded))
    return k3_fail_memory(err, SIZE_MAX);
  const struct k3_exec_options options = {.max_rows = pass->n_rows,
                                          .max_requests = 1,
                                          .max_keys = pass->longest,
                                          .block_width = 1,
                                          .max_cols = pass->moe->model.n_experts,
                                          .n_threads = o->n_threads,
                                          .comm = o->comm,
                                          .progress = o->progress};
  K3_TRY(backend->ops->exec_create(backend, &options, &pass->exec, err));
  list_buffers(pass, buffers);
  for (int i = 0; i < N_BUFFERS; i++) {
    uint64_t nbytes;
    if (!k3_mul_u64(n_padded, buffers[i].width * buffers[i].elem_nbytes, &nbytes) || nbytes > SIZE_MAX)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "fewer rows", "%llu rows are too many", (ull)pass->n_rows);
    K3_TRY(backend->ops->alloc(backend, nbytes, buffers[i].field, err));
  }
  return K3_OK;
}

static void clean_up(struct k3_moe_pass *pass) {
  struct k3_backend *backend = pass->moe->backend;
  struct buffer buffers[N_BUFFERS];
  list_buffers(pass, buffers);
  for (int i = 0; i < N_BUFFERS; i++) {
    if (*buffers[i].field)
      backend->ops->release(backend, *buffers[i].field);
  }
  if (pass->exec)
    backend->ops->exec_destroy(pass->exec);
  k3_free(pass->order);
  k3_free(pass->positions);
  k3_free(pass->first_keys);
}

enum k3_status k3_moe_run(struct k3_moe *moe, const struct k3_moe_rows *rows, struct k3_error *err) {
  struct k3_moe_pass pass = {.moe = moe, .rows = rows, .n_rows = rows->n_rows};
  if (rows->n_rows == 0)
    return K3_OK;
  enum k3_status status = prepare(&pass, err);
  if (status == K3_OK)
    status = k3_moe_forward(&pass, err);
  // A rank that fails tells the others, who would wait for it.
  if (status != K3_OK && moe->options.comm)
    moe->options.comm->ops->abort(moe->options.comm, err);
  clean_up(&pass);
  return status;
}
