#include "tests/kernels/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/slice.h"
#include "runtime/cuda_loader.h"

uint64_t test_random(uint64_t *seed) {
  uint64_t x = *seed += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

float test_normal(uint64_t *seed) {
  float sum = 0;  // of four uniforms
  for (int i = 0; i < 4; i++)
    sum += (float)(test_random(seed) >> 40) / 16777216.0f - 0.5f;
  return sum * 1.7320508f;
}

static void *take(struct test_model *model, size_t nbytes) {
  if (model->n_blocks == model->blocks_capacity) {
    model->blocks_capacity = 2 * model->blocks_capacity + 64;
    model->blocks = realloc(model->blocks, model->blocks_capacity * sizeof *model->blocks);
  }
  void *block = NULL;
  if (!model->blocks || posix_memalign(&block, 256, nbytes ? nbytes : 1) != 0)
    abort();
  model->blocks[model->n_blocks++] = block;
  memset(block, 0, nbytes);
  return block;
}

static void store_plain(enum k3_dtype dtype, void *dst, uint64_t i, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (dtype == K3_DTYPE_F32)
    memcpy((float *)dst + i, &value, sizeof value);
  else if (dtype == K3_DTYPE_BF16)
    ((uint16_t *)dst)[i] = (uint16_t)((bits + 0x8000) >> 16);
  else  // F16 of a value between 2^-14 and 2, rounded down; smaller ones become zero
    ((uint16_t *)dst)[i] = (uint16_t)(bits >> 31 << 15 | ((bits & 0x7fffffff) < 0x38800000 ? 0 : ((bits & 0x7fffffff) - 0x38000000) >> 13));
}

static struct k3_vector make_vector(struct test_model *model, uint64_t n, enum k3_dtype dtype, float mean, float deviation) {
  struct k3_vector vector = {take(model, n * k3_dtype_bits(dtype) / 8), dtype, n};
  for (uint64_t i = 0; i < n; i++)
    store_plain(dtype, (void *)vector.data, i, mean + deviation * test_normal(&model->seed));
  return vector;
}

// Block scales around `size`; E8M0 to the next power of two.
static void fill_scales(struct test_model *model, const struct k3_quant_scheme *scheme, void *dst, uint64_t n, float size) {
  for (uint64_t i = 0; i < n; i++) {
    const float value = size * (0.5f + (float)(test_random(&model->seed) >> 40) / 16777216.0f);
    if (scheme->scale_dtype == K3_DTYPE_F8_E4M3)
      ((uint8_t *)dst)[i] = (uint8_t)(0x30 + test_random(&model->seed) % 0x18);
    else if (scheme->scale_dtype == K3_DTYPE_F8_E8M0)
      ((uint8_t *)dst)[i] = (uint8_t)(127 + (int)floorf(log2f(value)));
    else
      ((float *)dst)[i] = value;
  }
}

// A matrix of n_shards siblings with rows[i] rows each, in one allocation as a stacked tensor is, scales likewise; each sibling has a second scale of
// its own.
static struct k3_matrix make_matrix(struct test_model *model, const struct test_scheme *kind, const uint64_t *rows, unsigned n_shards,
                                    uint64_t n_cols) {
  struct k3_matrix matrix = {.n_cols = n_cols, .n_shards = n_shards};
  struct k3_quant_scheme scheme = k3_quant_scheme_default(kind->scheme);
  scheme.second = kind->second;
  if (scheme.scheme == K3_SCHEME_FP8_BLOCK)
    scheme.block_rows = scheme.block_cols = 32;  // so that a small matrix has several
  matrix.shards = take(model, n_shards * sizeof *matrix.shards);
  uint64_t scale_nbytes = 0, scale_rows, scale_cols;
  for (unsigned i = 0; i < n_shards; i++) {
    k3_quant_scale_shape(&scheme, rows[i], n_cols, &scale_rows, &scale_cols);
    scale_nbytes += scale_rows * scale_cols * k3_dtype_bits(scheme.scale_dtype) / 8;
    matrix.n_rows += rows[i];
  }
  const uint64_t row_nbytes = k3_quant_row_nbytes(&scheme, n_cols);
  unsigned char *codes = take(model, matrix.n_rows * row_nbytes);
  unsigned char *scale = k3_scheme_is_plain(kind->scheme) ? NULL : take(model, scale_nbytes);
  const float deviation = 1 / sqrtf((float)n_cols);
  if (k3_scheme_is_plain(kind->scheme)) {
    for (uint64_t i = 0; i < matrix.n_rows * n_cols; i++)
      store_plain(scheme.scale_dtype, codes, i, deviation * test_normal(&model->seed));
  } else {
    for (uint64_t i = 0; i < matrix.n_rows * row_nbytes; i++) {
      codes[i] = (unsigned char)test_random(&model->seed);
      if (kind->scheme != K3_SCHEME_NVFP4 && kind->scheme != K3_SCHEME_MXFP4 && (codes[i] & 0x40))
        codes[i] &= 0xbf;  // E4M3 below 2: no NaN, and no few giants that hide the rest
    }
  }
  uint64_t row = 0;
  for (unsigned i = 0; i < n_shards; i++) {
    struct k3_matrix_shard *shard = &matrix.shards[i];
    *shard = (struct k3_matrix_shard){.row = row, .n_rows = rows[i], .second = 1};
    shard->codes =
        (struct k3_quant_matrix){.scheme = scheme, .n_rows = rows[i], .n_cols = n_cols, .weight = codes + row * row_nbytes, .scale = scale};
    if (scale) {
      k3_quant_scale_shape(&scheme, rows[i], n_cols, &scale_rows, &scale_cols);
      fill_scales(model, &scheme, scale, scale_rows * scale_cols, kind->scheme == K3_SCHEME_MXFP4 ? deviation / 3 : deviation);
      scale += scale_rows * scale_cols * k3_dtype_bits(scheme.scale_dtype) / 8;
    }
    if (kind->second != K3_SECOND_NONE) {  // the block scales are about 2: what is left
      const float factor = deviation / 6 * (1 + 0.37f * (float)i);
      shard->second = kind->second == K3_SECOND_DIVIDE ? 1 / factor : factor;
    }
    row += rows[i];
  }
  return matrix;
}

static struct k3_matrix make_one(struct test_model *model, const struct test_scheme *kind, uint64_t n_rows, uint64_t n_cols) {
  return make_matrix(model, kind, &n_rows, 1, n_cols);
}

static struct k3_dspark_model make_dims(unsigned variant) {
  const bool odd = variant & 4, full = variant & 32;
  struct k3_dspark_model m = {
      .hidden_size = odd ? 68 : 64,
      .target_hidden_size = odd ? 36 : 64,
      .n_taps = 3,
      .n_layers = 2,
      .n_heads = 8,
      .qk_nope_head_dim = 16,
      .qk_rope_head_dim = odd    ? 8
                          : full ? 64
                                 : 16,
      .v_head_dim = 16,
      .q_lora_rank = odd ? 44 : 64,
      .kv_lora_rank = odd    ? 28
                      : full ? 512
                             : 32,
      .intermediate_size = 256,
      .vocab_size = 576,  // two whole chunks of the Markov loop and a part
      .markov_rank = odd ? 20 : 32,
      .block_width = odd || full ? 9 : 5,  // above and below the rows that one kernel works on
      .mask_token_id = 571,
      .max_position_embeddings = 512,
      .rms_norm_eps = 1e-5,
      .logit_scale = odd ? 0.75 : 1,
      .rope = {.yarn = true,
               .theta = 10000,
               .factor = 4,
               .original_max_position = 128,
               .beta_fast = 32,
               .beta_slow = 1,
               .mscale = 1,
               .mscale_all_dim = 1},
      .causal = variant & 1,
      .fc_norm = variant & 2,
      .confidence_head = true,
      .confidence_with_markov = !(variant & 8),
  };
  return m;
}

void test_model_create(struct test_model *model, const struct test_scheme *scheme, unsigned variant, uint64_t seed) {
  *model = (struct test_model){.dims = make_dims(variant), .seed = seed};
  const struct k3_dspark_model *m = &model->dims;
  struct k3_weights *w = &model->weights;
  const bool f32 = scheme->scheme == K3_SCHEME_F32 || (variant & 16);
  const enum k3_dtype norm_dtype = f32 ? K3_DTYPE_F32 : K3_DTYPE_BF16;
  const struct test_scheme plain = {"", f32 ? K3_SCHEME_F32 : K3_SCHEME_BF16, K3_SECOND_NONE};
  const uint64_t D = m->qk_nope_head_dim + m->qk_rope_head_dim, E = m->kv_lora_rank + m->qk_rope_head_dim, N = m->n_heads;
  w->all_f32 = f32;
  w->embedding = make_one(model, &plain, m->vocab_size, m->hidden_size);
  w->context_proj = make_one(model, scheme, m->hidden_size, m->n_taps * m->target_hidden_size);
  w->context_norm = make_vector(model, m->hidden_size, norm_dtype, 1, 0.1f);
  w->final_norm = make_vector(model, m->hidden_size, norm_dtype, 1, 0.1f);
  if (m->fc_norm) {
    w->tap_norms = take(model, m->n_taps * sizeof *w->tap_norms);
    for (uint64_t t = 0; t < m->n_taps; t++)
      w->tap_norms[t] = make_vector(model, m->target_hidden_size, norm_dtype, 1, 0.1f);
  }
  w->layers = take(model, m->n_layers * sizeof *w->layers);
  w->kv_norms = take(model, m->n_layers * sizeof *w->kv_norms);
  w->context_kv.shards = take(model, m->n_layers * sizeof *w->context_kv.shards);
  for (uint64_t i = 0; i < m->n_layers; i++) {
    struct k3_layer_weights *layer = &w->layers[i];
    const uint64_t latents[2] = {m->q_lora_rank, E}, mlp[2] = {m->intermediate_size, m->intermediate_size};
    layer->input_norm = make_vector(model, m->hidden_size, norm_dtype, 1, 0.1f);
    layer->q_a_norm = make_vector(model, m->q_lora_rank, norm_dtype, 1, 0.1f);
    layer->kv_a_norm = make_vector(model, m->kv_lora_rank, norm_dtype, 1, 0.1f);
    layer->post_norm = make_vector(model, m->hidden_size, norm_dtype, 1, 0.1f);
    layer->qkv_a = make_matrix(model, scheme, latents, 2, m->hidden_size);
    layer->q_b = make_one(model, scheme, N * D, m->q_lora_rank);
    layer->kv_b = make_one(model, scheme, N * (m->qk_nope_head_dim + m->v_head_dim), m->kv_lora_rank);
    layer->o_proj = make_one(model, scheme, m->hidden_size, N * m->v_head_dim);
    layer->gate_up = make_matrix(model, scheme, mlp, 2, m->hidden_size);
    layer->down = make_one(model, scheme, m->hidden_size, m->intermediate_size);
    w->kv_norms[i] = &layer->kv_a_norm;
  }
  k3_weights_link_context(w, m);
  w->markov_w1 = make_one(model, scheme, m->vocab_size, m->markov_rank);
  w->markov_w2 = make_one(model, scheme, m->vocab_size, m->markov_rank);
  w->confidence = make_one(model, &plain, 1, m->hidden_size + (m->confidence_with_markov ? m->markov_rank : 0));
  w->confidence_bias = make_vector(model, 1, norm_dtype, 0, 0.5f);
  w->head = make_one(model, scheme, m->vocab_size, m->hidden_size);
}

void test_model_free(struct test_model *model) {
  for (size_t i = 0; i < model->n_blocks; i++)
    free(model->blocks[i]);
  free(model->blocks);
  *model = (struct test_model){0};
}

// --- an engine over it -----------------------------------------------------------------------------------------------------------------------------

static struct k3_matrix copy_matrix(struct k3_arena *arena, const struct k3_matrix *matrix) {
  struct k3_matrix copy = *matrix;
  copy.shards = k3_arena_alloc(arena, matrix->n_shards * sizeof *copy.shards, NULL);
  memcpy(copy.shards, matrix->shards, matrix->n_shards * sizeof *copy.shards);
  return copy;
}

// The rank's rows of each sibling.
static enum k3_status cut_rows(struct k3_matrix *matrix, uint64_t n_units, int rank, int size, struct k3_error *err) {
  uint64_t row = 0;
  for (unsigned i = 0; i < matrix->n_shards; i++) {
    struct k3_matrix_shard *shard = &matrix->shards[i];
    struct k3_slice slice;
    K3_TRY(k3_slice_of(shard->n_rows, n_units, shard->codes.scheme.block_rows, (uint32_t)size, (uint32_t)rank, "", "rows", &slice, err));
    k3_slice_rows(&shard->codes, &slice);
    shard->row = row;
    shard->n_rows = slice.n;
    row += slice.n;
  }
  matrix->n_rows = row;
  return K3_OK;
}

static enum k3_status cut_cols(struct k3_matrix *matrix, int rank, int size, struct k3_error *err) {
  struct k3_slice slice;
  K3_TRY(k3_slice_of(matrix->n_cols, 0, matrix->shards[0].codes.scheme.block_cols, (uint32_t)size, (uint32_t)rank, "", "columns", &slice, err));
  for (unsigned i = 0; i < matrix->n_shards; i++)
    matrix->shards[i].first_col = slice.first;
  matrix->n_cols = slice.n;
  return K3_OK;
}

static enum k3_status take_weights(struct k3_engine *engine, const struct test_model *model, int rank, int size, struct k3_error *err) {
  struct k3_weights *w = &engine->weights;
  struct k3_arena *arena = &w->arena;
  const uint64_t L = model->dims.n_layers;
  *w = model->weights;
  w->embedding = copy_matrix(arena, &w->embedding);
  w->context_proj = copy_matrix(arena, &w->context_proj);
  w->context_kv = copy_matrix(arena, &w->context_kv);
  w->markov_w1 = copy_matrix(arena, &w->markov_w1);
  w->markov_w2 = copy_matrix(arena, &w->markov_w2);
  w->confidence = copy_matrix(arena, &w->confidence);
  w->head = copy_matrix(arena, &w->head);
  if (w->tap_norms)
    w->tap_norms =
        memcpy(k3_arena_alloc(arena, model->dims.n_taps * sizeof *w->tap_norms, NULL), w->tap_norms, model->dims.n_taps * sizeof *w->tap_norms);
  w->layers = memcpy(k3_arena_alloc(arena, L * sizeof *w->layers, NULL), model->weights.layers, L * sizeof *w->layers);
  w->kv_norms = k3_arena_alloc(arena, L * sizeof *w->kv_norms, NULL);
  for (uint64_t i = 0; i < L; i++) {
    struct k3_layer_weights *layer = &w->layers[i];
    struct k3_matrix *const matrices[] = {&layer->qkv_a, &layer->q_b, &layer->kv_b, &layer->o_proj, &layer->gate_up, &layer->down};
    for (size_t k = 0; k < sizeof matrices / sizeof matrices[0]; k++)
      *matrices[k] = copy_matrix(arena, matrices[k]);
    K3_TRY(cut_rows(&layer->q_b, model->dims.n_heads, rank, size, err));
    K3_TRY(cut_rows(&layer->kv_b, model->dims.n_heads, rank, size, err));
    K3_TRY(cut_cols(&layer->o_proj, rank, size, err));
    K3_TRY(cut_rows(&layer->gate_up, 0, rank, size, err));
    K3_TRY(cut_cols(&layer->down, rank, size, err));
    w->kv_norms[i] = &layer->kv_a_norm;
  }
  return cut_rows(&w->head, 0, rank, size, err);
}

static enum k3_status prepare(struct k3_engine *engine, const struct test_model *model, const char *backend, struct k3_comm *comm, int rank, int size,
                              struct k3_error *err) {
  const struct k3_dspark_model *m = &model->dims;
  const bool cuda = strcmp(backend, "cuda") == 0;
  engine->model = *m;
  engine->comm = comm;
  engine->tp_rank = (uint32_t)rank;
  engine->tp_size = (uint32_t)size;
  K3_TRY(take_weights(engine, model, rank, size, err));
  engine->n_heads = engine->weights.layers[0].q_b.n_rows / (m->qk_nope_head_dim + m->qk_rope_head_dim);
  if (cuda) {
    const struct k3_cuda_options options = {.device = rank, .bf16 = !model->weights.all_f32, .tp_rank = rank, .tp_size = size, .comm = comm};
    struct k3_load load;
    K3_TRY(k3_cuda_backend_open(&options, &engine->backend, err));
    K3_TRY(engine->backend->ops->place(engine->backend, &engine->weights, NULL, &load, err));
    k3_weights_link_context(&engine->weights, m);
  } else if (!(engine->backend = k3_cpu_backend_create(!model->weights.all_f32, err))) {
    return K3_NO_MEMORY;
  }
  const uint64_t n_pairs = m->qk_rope_head_dim / 2;
  float inv_freq[64];
  void *memory;
  for (uint64_t i = 0; i < n_pairs; i++)
    inv_freq[i] = (float)k3_rope_inv_freq(&m->rope, m->qk_rope_head_dim, i);
  K3_TRY(engine->backend->ops->alloc(engine->backend, n_pairs * sizeof(float), &memory, err));
  engine->inv_freq = memory;
  K3_TRY(engine->backend->ops->upload(engine->backend, memory, inv_freq, n_pairs * sizeof(float), err));
  engine->rope = (struct k3_rope_table){engine->inv_freq, n_pairs, (float)k3_rope_amplitude(&m->rope)};
  engine->softmax_scale = (float)k3_rope_softmax_scale(&m->rope, m->qk_nope_head_dim + m->qk_rope_head_dim);
  // The plan of K3: both branches deferred to the norm that follows; layer 0's input norm completes nothing.
  static const struct k3_flow nothing = {.name = "nothing"}, norm = {.name = "norm", .reduce = K3_REDUCE_ALL},
                              part = {.name = "part", .partial = true};
  struct k3_reductions *r = &engine->reductions;
  const struct k3_flow ***lists[] = {&r->input_norm, &r->post_norm, &r->o_proj, &r->down};
  for (unsigned k = 0; k < 4; k++) {
    *lists[k] = k3_arena_alloc(&engine->arena, m->n_layers * sizeof(**lists[k]), err);
    for (uint64_t i = 0; i < m->n_layers; i++)
      (*lists[k])[i] = size == 1 || (k == 0 && i == 0) ? &nothing : k < 2 ? &norm : &part;
  }
  r->embedding = &nothing;
  r->final_norm = size == 1 ? &nothing : &norm;
  engine->info = (struct k3_engine_info){
      .hidden_size = m->hidden_size,
      .target_hidden_size = m->target_hidden_size,
      .n_taps = m->n_taps,
      .n_layers = m->n_layers,
      .row_width = m->kv_lora_rank + m->qk_rope_head_dim,
      .latent_rank = m->kv_lora_rank,
      .vocab_size = m->vocab_size,
      .block_width = m->block_width,
      .max_positions = m->max_position_embeddings,
      .mask_token_id = m->mask_token_id,
      .memory = engine->backend->memory,
      .activation_dtype = model->weights.all_f32 ? K3_DTYPE_F32 : K3_DTYPE_BF16,
      .has_embedding = true,
      .has_head = true,
      .has_confidence = true,
  };
  return K3_OK;
}

struct k3_engine *test_engine_create(const struct test_model *model, const char *backend, struct k3_comm *comm, int rank, int size,
                                     struct k3_error *err) {
  struct k3_engine *engine = k3_calloc(1, sizeof *engine, err);
  if (engine && prepare(engine, model, backend, comm, rank, size, err) == K3_OK)
    return engine;
  test_engine_free(engine);
  return NULL;
}

void test_engine_free(struct k3_engine *engine) {
  if (!engine)
    return;
  if (engine->backend) {
    if (engine->inv_freq)
      engine->backend->ops->release(engine->backend, engine->inv_freq);
    engine->backend->ops->destroy(engine->backend);
  }
  k3_arena_free(&engine->weights.arena);
  k3_arena_free(&engine->arena);
  k3_free(engine);
}
