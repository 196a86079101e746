// The drafters of fixtures/gen/dspark_case.py, made in memory: same names, same formula of the weights (described there), packed as an image would
// hold them. Golden outputs lie in fixtures/dspark/<case>/golden.safetensors.
#ifndef K3_TESTS_UNIT_DSPARK_FIXTURE_H
#define K3_TESTS_UNIT_DSPARK_FIXTURE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/file.h"
#include "formats/image.h"
#include "runtime/engine.h"
#include "unit.h"

enum { FIXTURE_MAX_REQUESTS = 64, FIXTURE_MAX_TENSORS = 128 };

struct fixture_case {
  const char *name;
  bool bf16;
  struct k3_dspark_model model;
  uint64_t seed, n_requests, context[FIXTURE_MAX_REQUESTS];  // m of each request
};

#define TINY_MODEL                                                                                                                       \
  .hidden_size = 24, .target_hidden_size = 20, .n_taps = 2, .n_layers = 2, .n_heads = 2, .qk_nope_head_dim = 6, .qk_rope_head_dim = 8,   \
  .v_head_dim = 6, .q_lora_rank = 12, .kv_lora_rank = 10, .intermediate_size = 32, .vocab_size = 48, .markov_rank = 4, .block_width = 5, \
  .mask_token_id = 45, .max_position_embeddings = 1024, .rms_norm_eps = 1e-5, .logit_scale = 1, .confidence_head = true,                 \
  .confidence_with_markov = true,                                                                                                        \
  .rope = {                                                                                                                              \
      .yarn = true, .theta = 100, .factor = 4, .original_max_position = 256, .beta_fast = 4, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 0.5}
#define WIDE_MODEL                                                                                                                            \
  .hidden_size = 1024, .n_heads = 4, .qk_nope_head_dim = 32, .qk_rope_head_dim = 16, .v_head_dim = 32, .q_lora_rank = 96, .kv_lora_rank = 64, \
  .intermediate_size = 640, .vocab_size = 320, .markov_rank = 16, .block_width = 7, .mask_token_id = 317, .max_position_embeddings = 1 << 20, \
  .rms_norm_eps = 1e-5, .logit_scale = 1, .confidence_head = true, .confidence_with_markov = true,                                            \
  .rope = {                                                                                                                                   \
      .yarn = true, .theta = 50000, .factor = 32, .original_max_position = 32768, .beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1}

static const struct fixture_case TINY_F32 = {.name = "tiny_f32", .model = {TINY_MODEL}, .n_requests = 4, .context = {0, 1, 9, 21}};
static const struct fixture_case TINY_BF16 = {
    .name = "tiny_bf16", .bf16 = true, .model = {TINY_MODEL}, .seed = 4, .n_requests = 4, .context = {0, 1, 9, 21}};
#define RANKS_MODEL                                                                                                                      \
  .hidden_size = 24, .target_hidden_size = 20, .n_taps = 2, .n_layers = 2, .n_heads = 8, .qk_nope_head_dim = 6, .qk_rope_head_dim = 8,   \
  .v_head_dim = 6, .q_lora_rank = 12, .kv_lora_rank = 10, .intermediate_size = 64, .vocab_size = 48, .markov_rank = 4, .block_width = 5, \
  .mask_token_id = 45, .max_position_embeddings = 1024, .rms_norm_eps = 1e-5, .logit_scale = 1, .confidence_head = true,                 \
  .confidence_with_markov = true,                                                                                                        \
  .rope = {                                                                                                                              \
      .yarn = true, .theta = 100, .factor = 4, .original_max_position = 256, .beta_fast = 4, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 0.5}
static const struct fixture_case RANKS_F32 = {.name = "ranks_f32", .model = {RANKS_MODEL}, .seed = 21, .n_requests = 4, .context = {0, 1, 9, 21}};
static const struct fixture_case RANKS_BF16 = {
    .name = "ranks_bf16", .bf16 = true, .model = {RANKS_MODEL}, .seed = 22, .n_requests = 4, .context = {0, 1, 9, 21}};
static const struct fixture_case VARIANT_F32 = {
    .name = "variant_f32",
    .model = {.hidden_size = 20,
              .target_hidden_size = 36,
              .n_taps = 3,
              .n_layers = 3,
              .n_heads = 3,
              .qk_nope_head_dim = 5,
              .qk_rope_head_dim = 4,
              .v_head_dim = 7,
              .q_lora_rank = 9,
              .kv_lora_rank = 11,
              .intermediate_size = 28,
              .vocab_size = 37,
              .markov_rank = 5,
              .block_width = 4,
              .mask_token_id = 34,
              .max_position_embeddings = 4096,
              .rms_norm_eps = 1e-3,
              .logit_scale = 0.5,
              .confidence_head = true,
              .causal = true,
              .fc_norm = true,
              .rope = {.theta = 10000, .factor = 1}},
    .seed = 7,
    .n_requests = 2,
    .context = {5, 33},
};
static const struct fixture_case LIMIT_F32 = {
    .name = "limit_f32",
    .model =
        {.hidden_size = 16,
         .target_hidden_size = 16,
         .n_taps = 1,
         .n_layers = 1,
         .n_heads = 1,
         .qk_nope_head_dim = 4,
         .qk_rope_head_dim = 4,
         .v_head_dim = 4,
         .q_lora_rank = 8,
         .kv_lora_rank = 8,
         .intermediate_size = 16,
         .vocab_size = 24,
         .markov_rank = 4,
         .block_width = 7,
         .mask_token_id = 21,
         .max_position_embeddings = 32,
         .rms_norm_eps = 1e-5,
         .logit_scale = 1,
         .rope =
             {.yarn = true, .theta = 100, .factor = 4, .original_max_position = 8, .beta_fast = 4, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1}},
    .seed = 3,
    .n_requests = 2,
    .context = {25, 24},
};
static const struct fixture_case WIDE_BF16 = {.name = "wide_bf16",
                                              .bf16 = true,
                                              .model = {WIDE_MODEL, .target_hidden_size = 1024, .n_taps = 2, .n_layers = 2},
                                              .seed = 11,
                                              .n_requests = 1,
                                              .context = {6}};
static const struct fixture_case WIDE_F32 = {
    .name = "wide_f32", .model = {WIDE_MODEL, .target_hidden_size = 512, .n_taps = 3, .n_layers = 1}, .seed = 12, .n_requests = 1, .context = {6}};
static const struct fixture_case FAR_F32 = {
    .name = "far_f32",
    .model = {.hidden_size = 8,
              .target_hidden_size = 8,
              .n_taps = 1,
              .n_layers = 2,
              .n_heads = 1,
              .qk_nope_head_dim = 4,
              .qk_rope_head_dim = 64,
              .v_head_dim = 4,
              .q_lora_rank = 8,
              .kv_lora_rank = 8,
              .intermediate_size = 8,
              .vocab_size = 16,
              .markov_rank = 4,
              .block_width = 5,
              .mask_token_id = 13,
              .max_position_embeddings = 1 << 20,
              .rms_norm_eps = 1e-5,
              .logit_scale = 1,
              .confidence_head = true,
              .confidence_with_markov = true,
              .rope = {.yarn = true,
                       .theta = 50000,
                       .factor = 32,
                       .original_max_position = 32768,
                       .beta_fast = 32,
                       .beta_slow = 1,
                       .mscale = 1,
                       .mscale_all_dim = 1}},
    .seed = 5,
};

// splitmix64 over the FNV-1a hash of a name, as the generator describes it; the top `bits` bits, centred.
static inline int64_t fixture_bits(const char *name, uint64_t i, uint64_t seed, unsigned bits) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *name; name++)
    hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
  uint64_t z = hash + (i + seed + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return (int64_t)(z >> (64 - bits)) - ((int64_t)1 << (bits - 1));
}

enum fixture_kind { FIXTURE_LINEAR, FIXTURE_NORM, FIXTURE_PLAIN };

static inline float fixture_value(const struct fixture_case *c, const char *name, uint64_t i, enum fixture_kind kind, uint64_t n_cols) {
  unsigned bits = c->bf16 ? 8 : 16;
  double u = (double)fixture_bits(name, i, c->seed, bits) / (double)(1 << (bits - 1));
  if (kind == FIXTURE_NORM)
    return (float)(1 + (c->bf16 ? floor(u * 16) / 16 : u) / 4);
  if (kind == FIXTURE_LINEAR)
    u = ldexp(u, -(int)((63 - __builtin_clzll(n_cols)) / 2));
  return (float)u;
}

// An image in memory under construction and after it.
struct fixture {
  const struct fixture_case *c;
  struct k3_image image;
  unsigned char *bytes;
  uint64_t nbytes;
  struct {
    char name[160];
    uint64_t shape[2];
    unsigned rank;
    uint64_t begin, nbytes;
  } tensors[FIXTURE_MAX_TENSORS];
  size_t n_tensors;
  struct k3_manifest_view view;
};

static inline void fixture_put(const struct fixture_case *c, void *dst, uint64_t i, float value) {
  if (c->bf16) {
    uint16_t bits = k3_bf16_from_f32(value);
    memcpy((unsigned char *)dst + 2 * i, &bits, sizeof bits);
  } else {
    memcpy((unsigned char *)dst + 4 * i, &value, sizeof value);
  }
}

// Adds image tensor `name` of the rows of one or two source tensors.
static inline void fixture_add(struct fixture *f, const char *name, enum fixture_kind kind, uint64_t n_cols, const char *first, uint64_t n_first,
                               const char *second, uint64_t n_second) {
  const uint64_t elem = f->c->bf16 ? 2 : 4, n = (n_first + n_second) * n_cols;
  assert_true(f->n_tensors < FIXTURE_MAX_TENSORS);
  size_t t = f->n_tensors++;
  snprintf(f->tensors[t].name, sizeof f->tensors[t].name, "%s", name);
  f->tensors[t].rank = kind == FIXTURE_NORM || strcmp(first, "confidence_head.proj.bias") == 0 ? 1 : 2;
  f->tensors[t].shape[0] = f->tensors[t].rank == 1 ? n : n_first + n_second;
  f->tensors[t].shape[1] = n_cols;
  f->tensors[t].begin = f->nbytes;
  f->tensors[t].nbytes = n * elem;
  f->bytes = realloc(f->bytes, f->nbytes + n * elem);
  assert_non_null(f->bytes);
  for (uint64_t i = 0; i < n; i++) {
    bool in_first = i < n_first * n_cols;
    fixture_put(f->c, f->bytes + f->nbytes, i, fixture_value(f->c, in_first ? first : second, in_first ? i : i - n_first * n_cols, kind, n_cols));
  }
  f->nbytes += n * elem;
}

static inline enum k3_status fixture_sink(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  (void)err;
  char **text = ctx;
  size_t n = *text ? strlen(*text) : 0;
  *text = realloc(*text, n + nbytes + 1);
  assert_non_null(*text);
  memcpy(*text + n, bytes, nbytes);
  (*text)[n + nbytes] = 0;
  return K3_OK;
}

static inline void fixture_seal(struct fixture *f) {
  char *text = NULL;
  struct k3_st_writer writer;
  uint64_t h;
  k3_st_write_begin(&writer, fixture_sink, &text);
  for (size_t t = 0; t < f->n_tensors; t++)
    assert_int_equal(k3_st_write_tensor(&writer, f->tensors[t].name, f->c->bf16 ? K3_DTYPE_BF16 : K3_DTYPE_F32, f->tensors[t].shape,
                                        f->tensors[t].rank, f->tensors[t].begin, f->tensors[t].begin + f->tensors[t].nbytes, NULL),
                     K3_OK);
  assert_int_equal(k3_st_write_end(&writer, 0, &h, NULL), K3_OK);
  assert_int_equal(k3_st_parse(text, h, 8 + h + f->nbytes, "fixture", &f->image.header, NULL), K3_OK);
  free(text);
  f->bytes = realloc(f->bytes, f->nbytes + 8 + h);  // as in a file: header, then data
  assert_non_null(f->bytes);
  memmove(f->bytes + 8 + h, f->bytes, f->nbytes);
  f->image.bytes = f->bytes;
  f->image.nbytes = f->nbytes + 8 + h;
}

static inline void fixture_open(struct fixture *f, const struct fixture_case *c) {
  const struct k3_dspark_model *m = &c->model;
  const uint64_t E = m->kv_lora_rank + m->qk_rope_head_dim, D = m->qk_nope_head_dim + m->qk_rope_head_dim, I = m->intermediate_size;
  memset(f, 0, sizeof *f);
  f->c = c;
  char image[160], a[128], b[128];
#define SOURCE(buffer, ...)            (snprintf(buffer, sizeof buffer, __VA_ARGS__), buffer)
#define LAYER(buffer, suffix)          SOURCE(buffer, "layers.%llu." suffix, (unsigned long long)i)
#define COPY(kind, rows, cols, source) (snprintf(image, sizeof image, "model.%s", source), fixture_add(f, image, kind, cols, source, rows, NULL, 0))
  for (uint64_t i = 0; i < m->n_layers; i++) {
    fixture_add(f, SOURCE(image, "model.layers.%llu.self_attn.fused_qkv_a_proj.weight", (unsigned long long)i), FIXTURE_LINEAR, m->hidden_size,
                LAYER(a, "self_attn.q_a_proj.weight"), m->q_lora_rank, LAYER(b, "self_attn.kv_a_proj_with_mqa.weight"), E);
    COPY(FIXTURE_NORM, m->hidden_size, 1, LAYER(a, "input_layernorm.weight"));
    COPY(FIXTURE_NORM, m->q_lora_rank, 1, LAYER(a, "self_attn.q_a_layernorm.weight"));
    COPY(FIXTURE_LINEAR, m->n_heads * D, m->q_lora_rank, LAYER(a, "self_attn.q_b_proj.weight"));
    COPY(FIXTURE_NORM, m->kv_lora_rank, 1, LAYER(a, "self_attn.kv_a_layernorm.weight"));
    COPY(FIXTURE_LINEAR, m->n_heads * (m->qk_nope_head_dim + m->v_head_dim), m->kv_lora_rank, LAYER(a, "self_attn.kv_b_proj.weight"));
    COPY(FIXTURE_LINEAR, m->hidden_size, m->n_heads * m->v_head_dim, LAYER(a, "self_attn.o_proj.weight"));
    COPY(FIXTURE_NORM, m->hidden_size, 1, LAYER(a, "post_attention_layernorm.weight"));
    fixture_add(f, SOURCE(image, "model.layers.%llu.mlp.gate_up_proj.weight", (unsigned long long)i), FIXTURE_LINEAR, m->hidden_size,
                LAYER(a, "mlp.gate_proj.weight"), I, LAYER(b, "mlp.up_proj.weight"), I);
    COPY(FIXTURE_LINEAR, m->hidden_size, I, LAYER(a, "mlp.down_proj.weight"));
  }
  COPY(FIXTURE_LINEAR, m->hidden_size, m->n_taps * m->target_hidden_size, "context_proj.weight");
  COPY(FIXTURE_NORM, m->hidden_size, 1, "context_norm.weight");
  for (uint64_t i = 0; m->fc_norm && i < m->n_taps; i++)
    COPY(FIXTURE_NORM, m->target_hidden_size, 1, SOURCE(a, "fc_norm.%llu.weight", (unsigned long long)i));
  COPY(FIXTURE_NORM, m->hidden_size, 1, "final_norm.weight");
  COPY(FIXTURE_PLAIN, m->vocab_size, m->markov_rank, "markov_head.markov_w1.weight");
  COPY(FIXTURE_LINEAR, m->vocab_size, m->markov_rank, "markov_head.markov_w2.weight");
  if (m->confidence_head) {
    COPY(FIXTURE_LINEAR, 1, m->hidden_size + (m->confidence_with_markov ? m->markov_rank : 0), "confidence_head.proj.weight");
    COPY(FIXTURE_PLAIN, 1, 1, "confidence_head.proj.bias");
  }
  COPY(FIXTURE_PLAIN, m->vocab_size, m->hidden_size, "embed_tokens.weight");
  fixture_add(f, "lm_head.weight", FIXTURE_LINEAR, m->hidden_size, "lm_head.weight", m->vocab_size, NULL, 0);
  fixture_seal(f);
  f->image.manifest.family = "k3-dspark";
  f->image.manifest.dspark = *m;
  f->view.name = "model.context_kv_proj.weight";
  f->view.n_shards = m->n_layers;
  f->view.shards = calloc(m->n_layers, sizeof *f->view.shards);
  assert_non_null(f->view.shards);
  for (uint64_t i = 0; i < m->n_layers; i++) {
    SOURCE(image, "model.layers.%llu.self_attn.fused_qkv_a_proj.weight", (unsigned long long)i);
    f->view.shards[i] = (struct k3_manifest_view_shard){i, k3_st_find(&f->image.header, image, strlen(image))->name, m->q_lora_rank, E};
  }
  f->image.manifest.views = &f->view;
  f->image.manifest.n_views = 1;
}

static inline void fixture_close(struct fixture *f) {
  k3_st_header_free(&f->image.header);
  free(f->view.shards);
  free(f->bytes);
}

// Writable bytes of a tensor.
static inline void *fixture_data(struct fixture *f, const char *name, uint64_t *n) {
  const struct k3_st_tensor *tensor;
  const void *data = k3_image_data(&f->image, name, &tensor);
  assert_non_null(data);
  *n = k3_st_n_elems(tensor);
  return f->bytes + ((const unsigned char *)data - f->bytes);
}

// A golden file: tensor `name` as floats (F32, F64 or I64 widened) in new memory; NULL when it is not there.
struct golden {
  struct k3_mapping mapping;
  struct k3_st_header header;
};

static inline void golden_open(struct golden *g, const struct fixture_case *c) {
  char path[256];
  uint64_t h;
  memset(g, 0, sizeof *g);
  snprintf(path, sizeof path, "fixtures/dspark/%s/golden.safetensors", c->name);
  assert_int_equal(k3_map_file(path, &g->mapping, NULL), K3_OK);
  assert_int_equal(k3_st_header_length(g->mapping.data, 8, g->mapping.nbytes, path, &h, NULL), K3_OK);
  assert_int_equal(k3_st_parse((const char *)g->mapping.data + 8, h, g->mapping.nbytes, path, &g->header, NULL), K3_OK);
}

static inline void golden_close(struct golden *g) {
  k3_st_header_free(&g->header);
  k3_unmap(&g->mapping);
}

static inline double *golden_values(const struct golden *g, const char *name) {
  const struct k3_st_tensor *tensor = k3_st_find(&g->header, name, strlen(name));
  if (!tensor)
    return NULL;
  uint64_t n = k3_st_n_elems(tensor);
  const unsigned char *data = g->mapping.data + g->header.data_begin + tensor->begin;
  double *values = malloc((n + 1) * sizeof *values);
  assert_non_null(values);
  for (uint64_t i = 0; i < n; i++) {
    int64_t whole;
    if (tensor->dtype == K3_DTYPE_F64) {
      memcpy(&values[i], data + 8 * i, 8);
    } else if (tensor->dtype == K3_DTYPE_I64) {
      memcpy(&whole, data + 8 * i, 8);
      values[i] = (double)whole;
    } else {
      values[i] = (double)k3_load_f32(data, i);
    }
  }
  return values;
}

#endif
