#include "runtime/weights.h"

#include <stdio.h>
#include <string.h>

// What the binding functions share.
struct binder {
  const struct k3_image *image;
  struct k3_arena *arena;
  bool all_f32;
  struct k3_error *err;
};

static bool is_plain_float(enum k3_dtype dtype) {
  return dtype == K3_DTYPE_F32 || dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16;
}

static const struct k3_st_tensor *find(struct binder *binder, const char *name, const void **data) {
  const struct k3_st_tensor *tensor;
  *data = k3_image_data(binder->image, name, &tensor);
  return *data ? tensor : NULL;
}

static enum k3_status missing(struct binder *binder, const char *name) {
  return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, "an image that convert has written for this model", "the tensor is not in the image");
}

static enum k3_status check_plain(struct binder *binder, const char *name, const struct k3_st_tensor *tensor) {
  if (!is_plain_float(tensor->dtype))
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, "F32, BF16 or F16", "its dtype is %s", k3_dtype_name(tensor->dtype));
  binder->all_f32 &= tensor->dtype == K3_DTYPE_F32;
  return K3_OK;
}

static enum k3_status bind_vector(struct binder *binder, struct k3_vector *vector, uint64_t n, const char *name) {
  const void *data;
  const struct k3_st_tensor *tensor = find(binder, name, &data);
  if (!tensor)
    return missing(binder, name);
  K3_TRY(check_plain(binder, name, tensor));
  if (tensor->rank != 1 || tensor->shape[0] != n)
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, NULL, "its shape is not [%llu]", (unsigned long long)n);
  *vector = (struct k3_vector){data, tensor->dtype, n};
  return K3_OK;
}

// `rows` lists the rows of each shard; they must sum up to the matrix.
static enum k3_status bind_matrix(struct binder *binder, struct k3_matrix *matrix, const uint64_t *rows, unsigned n_shards, uint64_t n_cols,
                                  const char *module) {
  char name[K3_ST_MAX_NAME_NBYTES];
  snprintf(name, sizeof name, "%s.weight", module);
  const void *data;
  const struct k3_st_tensor *tensor = find(binder, name, &data);
  if (!tensor)
    return missing(binder, name);
  K3_TRY(check_plain(binder, name, tensor));
  uint64_t n_rows = 0;
  for (unsigned i = 0; i < n_shards; i++)
    n_rows += rows[i];
  if (tensor->rank != 2 || tensor->shape[0] != n_rows || tensor->shape[1] != n_cols)
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, NULL, "its shape is not [%llu, %llu]", (unsigned long long)n_rows,
                   (unsigned long long)n_cols);
  const uint64_t row_nbytes = n_cols * k3_dtype_bits(tensor->dtype) / 8;
  *matrix = (struct k3_matrix){.n_rows = n_rows, .n_cols = n_cols};
  matrix->shards = k3_arena_alloc(binder->arena, n_shards * sizeof *matrix->shards, binder->err);
  if (!matrix->shards)
    return K3_NO_MEMORY;
  matrix->n_shards = n_shards;
  uint64_t row = 0;
  for (unsigned i = 0; i < n_shards; i++) {
    matrix->shards[i] = (struct k3_matrix_shard){row, rows[i], (const unsigned char *)data + row * row_nbytes, row_nbytes, tensor->dtype};
    row += rows[i];
  }
  return K3_OK;
}

static enum k3_status bind_one(struct binder *binder, struct k3_matrix *matrix, uint64_t n_rows, uint64_t n_cols, const char *module) {
  return bind_matrix(binder, matrix, &n_rows, 1, n_cols, module);
}

// Embedding or head: the caller's, the image's, or absent.
static enum k3_status bind_borrowed(struct binder *binder, struct k3_matrix *matrix, const struct k3_dspark_model *m, const struct k3_array *borrowed,
                                    const char *module) {
  char name[64];
  snprintf(name, sizeof name, "%s.weight", module);
  if (!borrowed || !borrowed->data) {
    const void *data;
    return find(binder, name, &data) ? bind_one(binder, matrix, m->vocab_size, m->hidden_size, module) : K3_OK;
  }
  if (!is_plain_float(borrowed->dtype))
    return k3_fail(binder->err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, "F32, BF16 or F16", "the borrowed array is %s", k3_dtype_name(borrowed->dtype));
  const uint64_t row_nbytes = borrowed->row_nbytes ? borrowed->row_nbytes : m->hidden_size * k3_dtype_bits(borrowed->dtype) / 8;
  *matrix = (struct k3_matrix){.n_rows = m->vocab_size, .n_cols = m->hidden_size};
  matrix->shards = k3_arena_alloc(binder->arena, sizeof *matrix->shards, binder->err);
  if (!matrix->shards)
    return K3_NO_MEMORY;
  matrix->n_shards = 1;
  matrix->shards[0] = (struct k3_matrix_shard){0, m->vocab_size, borrowed->data, row_nbytes, borrowed->dtype};
  binder->all_f32 &= borrowed->dtype == K3_DTYPE_F32;
  return K3_OK;
}

static enum k3_status bind_layer(struct binder *binder, struct k3_layer_weights *layer, const struct k3_dspark_model *m, uint64_t i) {
  char base[64], name[160];
  snprintf(base, sizeof base, "model.layers.%llu", (unsigned long long)i);
#define NAME(suffix) (snprintf(name, sizeof name, "%s.%s", base, suffix), name)
  const uint64_t row_width = m->kv_lora_rank + m->qk_rope_head_dim, head_dim = m->qk_nope_head_dim + m->qk_rope_head_dim;
  const uint64_t latents[2] = {m->q_lora_rank, row_width}, mlp[2] = {m->intermediate_size, m->intermediate_size};
  K3_TRY(bind_vector(binder, &layer->input_norm, m->hidden_size, NAME("input_layernorm.weight")));
  K3_TRY(bind_matrix(binder, &layer->qkv_a, latents, 2, m->hidden_size, NAME("self_attn.fused_qkv_a_proj")));
  K3_TRY(bind_vector(binder, &layer->q_a_norm, m->q_lora_rank, NAME("self_attn.q_a_layernorm.weight")));
  K3_TRY(bind_one(binder, &layer->q_b, m->n_heads * head_dim, m->q_lora_rank, NAME("self_attn.q_b_proj")));
  K3_TRY(bind_vector(binder, &layer->kv_a_norm, m->kv_lora_rank, NAME("self_attn.kv_a_layernorm.weight")));
  K3_TRY(bind_one(binder, &layer->kv_b, m->n_heads * (m->qk_nope_head_dim + m->v_head_dim), m->kv_lora_rank, NAME("self_attn.kv_b_proj")));
  K3_TRY(bind_one(binder, &layer->o_proj, m->hidden_size, m->n_heads * m->v_head_dim, NAME("self_attn.o_proj")));
  K3_TRY(bind_vector(binder, &layer->post_norm, m->hidden_size, NAME("post_attention_layernorm.weight")));
  K3_TRY(bind_matrix(binder, &layer->gate_up, mlp, 2, m->hidden_size, NAME("mlp.gate_up_proj")));
  K3_TRY(bind_one(binder, &layer->down, m->hidden_size, m->intermediate_size, NAME("mlp.down_proj")));
#undef NAME
  return K3_OK;
}

// The manifest's view must name the rows that the layers use anyway; then it needs no bytes and no table of its own.
static enum k3_status check_view(struct binder *binder, const struct k3_dspark_model *m) {
  static const char name[] = "model.context_kv_proj.weight";
  const struct k3_manifest_view *view = k3_manifest_view_of(&binder->image->manifest, name);
  if (!view)
    return missing(binder, name);
  bool fits = view->n_shards == m->n_layers;
  for (uint64_t i = 0; fits && i < m->n_layers; i++) {
    const struct k3_manifest_view_shard *shard = &view->shards[i];
    char tensor[160];
    snprintf(tensor, sizeof tensor, "model.layers.%llu.self_attn.fused_qkv_a_proj.weight", (unsigned long long)i);
    fits = shard->id == i && strcmp(shard->tensor, tensor) == 0 && shard->row == m->q_lora_rank &&
           shard->n_rows == m->kv_lora_rank + m->qk_rope_head_dim;
  }
  return fits ? K3_OK
              : k3_fail(binder->err, K3_BAD_INPUT, K3_IMG03, NULL, name, "one shard per layer: the latent and rotary rows of its A-projection",
                        "the view names other rows");
}

static enum k3_status bind_all(struct binder *binder, const struct k3_dspark_model *m, const struct k3_array *embed_tokens,
                               const struct k3_array *lm_head, struct k3_weights *w) {
  K3_TRY(bind_borrowed(binder, &w->embedding, m, embed_tokens, "model.embed_tokens"));
  K3_TRY(bind_one(binder, &w->context_proj, m->hidden_size, m->n_taps * m->target_hidden_size, "model.context_proj"));
  K3_TRY(bind_vector(binder, &w->context_norm, m->hidden_size, "model.context_norm.weight"));
  if (m->fc_norm) {
    w->tap_norms = k3_arena_alloc(binder->arena, m->n_taps * sizeof *w->tap_norms, binder->err);
    if (!w->tap_norms)
      return K3_NO_MEMORY;
    for (uint64_t t = 0; t < m->n_taps; t++) {
      char name[64];
      snprintf(name, sizeof name, "model.fc_norm.%llu.weight", (unsigned long long)t);
      K3_TRY(bind_vector(binder, &w->tap_norms[t], m->target_hidden_size, name));
    }
  }
  w->layers = k3_arena_alloc(binder->arena, m->n_layers * sizeof *w->layers, binder->err);
  w->kv_norms = k3_arena_alloc(binder->arena, m->n_layers * sizeof *w->kv_norms, binder->err);
  w->context_kv.shards = k3_arena_alloc(binder->arena, m->n_layers * sizeof *w->context_kv.shards, binder->err);
  if (!w->layers || !w->kv_norms || !w->context_kv.shards)
    return K3_NO_MEMORY;
  memset(w->layers, 0, m->n_layers * sizeof *w->layers);
  for (uint64_t i = 0; i < m->n_layers; i++) {
    K3_TRY(bind_layer(binder, &w->layers[i], m, i));
    w->kv_norms[i] = &w->layers[i].kv_a_norm;
  }
  K3_TRY(check_view(binder, m));
  k3_weights_link_context(w, m);
  K3_TRY(bind_vector(binder, &w->final_norm, m->hidden_size, "model.final_norm.weight"));
  K3_TRY(bind_one(binder, &w->markov_w1, m->vocab_size, m->markov_rank, "model.markov_head.markov_w1"));
  K3_TRY(bind_one(binder, &w->markov_w2, m->vocab_size, m->markov_rank, "model.markov_head.markov_w2"));
  if (m->confidence_head) {
    uint64_t width = m->hidden_size + (m->confidence_with_markov ? m->markov_rank : 0);
    K3_TRY(bind_one(binder, &w->confidence, 1, width, "model.confidence_head.proj"));
    K3_TRY(bind_vector(binder, &w->confidence_bias, 1, "model.confidence_head.proj.bias"));
  }
  return bind_borrowed(binder, &w->head, m, lm_head, "lm_head");
}

enum k3_status k3_weights_bind(const struct k3_image *image, const struct k3_dspark_model *model, const struct k3_array *embed_tokens,
                               const struct k3_array *lm_head, struct k3_weights *weights, struct k3_error *err) {
  *weights = (struct k3_weights){0};
  struct binder binder = {image, &weights->arena, true, err};
  enum k3_status status = bind_all(&binder, model, embed_tokens, lm_head, weights);
  weights->all_f32 = binder.all_f32;
  if (status != K3_OK)
    k3_weights_free(weights);
  return status;
}

void k3_weights_link_context(struct k3_weights *weights, const struct k3_dspark_model *model) {
  const uint64_t row_width = model->kv_lora_rank + model->qk_rope_head_dim;
  struct k3_matrix *view = &weights->context_kv;
  view->n_rows = model->n_layers * row_width;
  view->n_cols = model->hidden_size;
  view->n_shards = (unsigned)model->n_layers;
  for (uint64_t i = 0; i < model->n_layers; i++) {
    view->shards[i] = weights->layers[i].qkv_a.shards[1];
    view->shards[i].row = i * row_width;
  }
}

void k3_weights_free(struct k3_weights *weights) {
  k3_arena_free(&weights->arena);
  *weights = (struct k3_weights){0};
}

uint64_t k3_matrix_nbytes(const struct k3_matrix *matrix) {
  uint64_t nbytes = 0;
  for (unsigned i = 0; i < matrix->n_shards; i++)
    nbytes += matrix->shards[i].n_rows * matrix->shards[i].row_nbytes;
  return nbytes;
}

uint64_t k3_weights_context_nbytes(const struct k3_weights *weights) {
  return k3_matrix_nbytes(&weights->context_proj) + k3_matrix_nbytes(&weights->context_kv);
}

uint64_t k3_weights_draft_nbytes(const struct k3_weights *weights, const struct k3_dspark_model *model) {
  uint64_t nbytes = k3_matrix_nbytes(&weights->head) + model->block_width * k3_matrix_nbytes(&weights->markov_w2);
  for (uint64_t i = 0; i < model->n_layers; i++) {
    const struct k3_layer_weights *layer = &weights->layers[i];
    nbytes += k3_matrix_nbytes(&layer->qkv_a) + k3_matrix_nbytes(&layer->q_b) + k3_matrix_nbytes(&layer->kv_b) + k3_matrix_nbytes(&layer->o_proj) +
              k3_matrix_nbytes(&layer->gate_up) + k3_matrix_nbytes(&layer->down);
  }
  return nbytes;
}
