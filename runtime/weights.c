#include "runtime/weights.h"

#include <stdio.h>
#include <string.h>

#include "quant/slice.h"
#include "runtime/bind.h"

static bool is_plain_float(enum k3_dtype dtype) {
  return dtype == K3_DTYPE_F32 || dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16;
}

static struct k3_quant_scheme plain_scheme(enum k3_dtype dtype) {
  return k3_quant_scheme_default(dtype == K3_DTYPE_F32 ? K3_SCHEME_F32 : dtype == K3_DTYPE_BF16 ? K3_SCHEME_BF16 : K3_SCHEME_F16);
}

static const struct k3_st_tensor *find(struct k3_binder *binder, const char *name, const void **data) {
  const struct k3_st_tensor *tensor;
  *data = k3_image_data(binder->source->image, name, &tensor);
  if (!*data && binder->source->slices)
    *data = k3_image_data(binder->source->slices, name, &tensor);
  return *data ? tensor : NULL;
}

static const struct k3_manifest_linear *linear_of(const struct k3_binder *binder, const char *module) {
  const struct k3_manifest_linear *linear = k3_manifest_linear_of(&binder->source->image->manifest, module);
  return linear || !binder->source->slices ? linear : k3_manifest_linear_of(&binder->source->slices->manifest, module);
}

static enum k3_status missing(struct k3_binder *binder, const char *name) {
  return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, "an image that convert has written for this model",
                 "the tensor is not in the image");
}

static enum k3_status check_plain(struct k3_binder *binder, const char *name, const struct k3_st_tensor *tensor) {
  if (!is_plain_float(tensor->dtype))
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, name, "F32, BF16 or F16", "its dtype is %s", k3_dtype_name(tensor->dtype));
  binder->all_f32 &= tensor->dtype == K3_DTYPE_F32;
  return K3_OK;
}

enum k3_status k3_bind_vector(struct k3_binder *binder, struct k3_vector *vector, uint64_t n, const char *name) {
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

// The tensors of one linear layer.
struct parameters {
  struct k3_quant_scheme scheme;
  const struct k3_st_tensor *codes;
  const unsigned char *code_data, *scale_data, *second_data;  // scale and second: NULL when the scheme has none
  uint64_t n_scales, n_seconds;                               // elements
};

// Tensor `module`.`parameter` when it is there.
static const void *parameter(struct k3_binder *binder, const char *module, const char *suffix, const struct k3_st_tensor **tensor) {
  char name[K3_ST_MAX_NAME_NBYTES];
  snprintf(name, sizeof name, "%s.%s", module, suffix);
  const void *data;
  *tensor = find(binder, name, &data);
  return data;
}

static enum k3_status find_plain(struct k3_binder *binder, const char *module, struct parameters *found) {
  char name[K3_ST_MAX_NAME_NBYTES];
  snprintf(name, sizeof name, "%s.weight", module);
  found->code_data = parameter(binder, module, "weight", &found->codes);
  if (!found->code_data)
    return missing(binder, name);
  K3_TRY(check_plain(binder, name, found->codes));
  found->scheme = plain_scheme(found->codes->dtype);
  return K3_OK;
}

static enum k3_status find_quantised(struct k3_binder *binder, const struct k3_manifest_linear *linear, struct parameters *found) {
  enum k3_scheme scheme;
  if (!k3_scheme_from_name(linear->scheme, &scheme))
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, linear->module, NULL, "the scheme \"%s\" is unknown", linear->scheme);
  if (k3_scheme_is_plain(scheme))
    return find_plain(binder, linear->module, found);
  if (scheme == K3_SCHEME_INT_PACKED || scheme == K3_SCHEME_FP8_GROUP)
    return k3_fail(binder->err, K3_UNSUPPORTED, K3_CFG21, NULL, linear->module, "FP8 per tensor, channel or block, MXFP8, NVFP4, MXFP4",
                   "the runtime has no %s", linear->scheme);
  found->scheme = k3_quant_scheme_default(scheme);
  if (linear->block_rows)
    found->scheme.block_rows = (uint32_t)linear->block_rows;
  if (linear->block_cols)
    found->scheme.block_cols = (uint32_t)linear->block_cols;
  const struct k3_st_tensor *scale, *second = NULL;
  found->code_data = parameter(binder, linear->module, "weight_packed", &found->codes);
  if (!found->code_data)
    found->code_data = parameter(binder, linear->module, "weight", &found->codes);
  found->scale_data = parameter(binder, linear->module, "weight_scale", &scale);
  if (!found->code_data || !found->scale_data)
    return missing(binder, linear->module);
  found->scheme.scale_dtype = scale->dtype;
  found->n_scales = k3_st_n_elems(scale);
  found->scheme.second = K3_SECOND_NONE;
  if (scheme != K3_SCHEME_NVFP4)
    return K3_OK;
  found->scheme.second = linear->second_scale_divides ? K3_SECOND_DIVIDE : K3_SECOND_MULTIPLY;
  found->second_data = parameter(binder, linear->module, "weight_global_scale", &second);
  if (!found->second_data)
    return missing(binder, linear->module);
  found->n_seconds = second->dtype == K3_DTYPE_F32 ? k3_st_n_elems(second) : 0;
  return K3_OK;
}

// How this rank's part of a module lies in what was found.
struct cut {
  bool rows, cols;  // which axis is cut, if any
  bool stored;      // the tensors hold the part alone, not the whole
  uint64_t n_units, block;
};

static enum k3_status find_cut(const struct k3_binder *binder, const struct parameters *found, uint64_t n_units, enum k3_tp_rule needed,
                               struct cut *cut) {
  static const char *const names[] = {"replicate", "column", "row", "vocab"};
  const struct k3_weights_source *source = binder->source;
  enum k3_role role;
  enum k3_tp_rule rule = K3_TP_REPLICATE;
  *cut = (struct cut){.n_units = n_units};
  if (source->tp_size <= 1 && !source->slices)
    return K3_OK;
  cut->stored = source->slices && k3_st_find(&source->slices->header, found->codes->name, found->codes->name_nbytes) == found->codes;
  if (cut->stored || !source->slices)
    k3_manifest_role_of(cut->stored ? &source->slices->manifest : &source->image->manifest, found->codes->name, &role, &rule);
  if (rule != needed && !(rule == K3_TP_REPLICATE && needed == K3_TP_VOCAB))
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, found->codes->name, names[needed], "the manifest's rule for several ranks is \"%s\"",
                   names[rule]);
  cut->rows = rule == K3_TP_COLUMN || rule == K3_TP_VOCAB;
  cut->cols = rule == K3_TP_ROW;
  cut->block = cut->rows ? found->scheme.block_rows : found->scheme.block_cols;
  return K3_OK;
}

static enum k3_status slice_of(const struct k3_binder *binder, const struct cut *cut, uint64_t extent, const char *module, struct k3_slice *slice) {
  uint32_t tp = binder->source->tp_size, rank = binder->source->tp_rank;
  if (binder->repeat_units)
    k3_slice_repeat(cut->n_units, &tp, &rank);
  return k3_slice_of(extent, cut->n_units, cut->block, tp, rank, module, cut->rows ? "rows" : "columns", slice, binder->err);
}

// Turns a matrix that was bound whole into this rank's part: rows of each sibling, or columns of all rows.
static enum k3_status take_part(const struct k3_binder *binder, const struct cut *cut, struct k3_matrix *matrix, const char *module) {
  struct k3_slice slice;
  uint64_t row = 0;
  if (cut->cols) {
    K3_TRY(slice_of(binder, cut, matrix->n_cols, module, &slice));
    for (unsigned i = 0; i < matrix->n_shards; i++)
      matrix->shards[i].first_col = slice.first;
    matrix->n_cols = slice.n;
  }
  for (unsigned i = 0; cut->rows && i < matrix->n_shards; i++) {
    struct k3_matrix_shard *shard = &matrix->shards[i];
    K3_TRY(slice_of(binder, cut, shard->n_rows, module, &slice));
    k3_slice_rows(&shard->codes, &slice);
    shard->row = row;
    shard->n_rows = slice.n;
    row += slice.n;
  }
  if (cut->rows)
    matrix->n_rows = row;
  return K3_OK;
}

enum k3_status k3_bind_matrix(struct k3_binder *binder, struct k3_matrix *matrix, const uint64_t *whole_rows, unsigned n_shards, uint64_t whole_cols,
                              uint64_t n_units, enum k3_tp_rule tp, const char *module) {
  struct parameters found = {0};
  const struct k3_manifest_linear *linear = linear_of(binder, module);
  K3_TRY(linear ? find_quantised(binder, linear, &found) : find_plain(binder, module, &found));
  struct cut cut;
  K3_TRY(find_cut(binder, &found, n_units, tp, &cut));
  // What the tensors hold: the module, or this rank's part of it.
  uint64_t *rows = k3_arena_alloc(binder->arena, n_shards * sizeof *rows, binder->err), n_cols = whole_cols;
  struct k3_slice slice;
  if (!rows)
    return K3_NO_MEMORY;
  for (unsigned i = 0; i < n_shards; i++) {
    rows[i] = whole_rows[i];
    if (cut.stored && cut.rows) {
      K3_TRY(slice_of(binder, &cut, whole_rows[i], module, &slice));
      rows[i] = slice.n;
    }
  }
  if (cut.stored && cut.cols) {
    K3_TRY(slice_of(binder, &cut, whole_cols, module, &slice));
    n_cols = slice.n;
  }
  uint64_t n_rows = 0, n_scales = 0, scale_rows, scale_cols;
  for (unsigned i = 0; i < n_shards; i++) {
    k3_quant_scale_shape(&found.scheme, rows[i], n_cols, &scale_rows, &scale_cols);
    n_rows += rows[i];
    n_scales += scale_rows * scale_cols;
  }
  const uint64_t row_nbytes = k3_quant_row_nbytes(&found.scheme, n_cols);
  if (found.codes->rank != 2 || found.codes->shape[0] != n_rows || found.codes->end - found.codes->begin != n_rows * row_nbytes)
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, found.codes->name, NULL, "it does not hold %llu rows of %llu columns (%s)",
                   (unsigned long long)n_rows, (unsigned long long)n_cols, k3_scheme_name(found.scheme.scheme));
  if (found.n_scales != n_scales || (found.second_data && found.n_seconds != n_shards))
    return k3_fail(binder->err, K3_BAD_INPUT, K3_IMG01, NULL, module, NULL, "%llu scales where %llu are needed",
                   (unsigned long long)(found.n_scales != n_scales ? found.n_scales : found.n_seconds),
                   (unsigned long long)(found.n_scales != n_scales ? n_scales : n_shards));
  *matrix = (struct k3_matrix){.n_rows = n_rows, .n_cols = n_cols};
  matrix->shards = k3_arena_alloc(binder->arena, n_shards * sizeof *matrix->shards, binder->err);
  if (!matrix->shards)
    return K3_NO_MEMORY;
  matrix->n_shards = n_shards;
  uint64_t row = 0;
  const unsigned char *scale = found.scale_data;
  for (unsigned i = 0; i < n_shards; i++) {
    struct k3_quant_matrix codes = {.scheme = found.scheme, .n_rows = rows[i], .n_cols = n_cols};
    codes.weight = found.code_data + row * row_nbytes;
    codes.scale = scale;
    K3_TRY(k3_quant_matrix_check(&codes, found.codes->name, binder->err));
    matrix->shards[i] = (struct k3_matrix_shard){.row = row, .n_rows = rows[i], .codes = codes};
    matrix->shards[i].second = found.second_data ? k3_load_f32(found.second_data, i) : 1;
    k3_quant_scale_shape(&found.scheme, rows[i], n_cols, &scale_rows, &scale_cols);
    if (scale)
      scale += scale_rows * scale_cols * k3_dtype_bits(found.scheme.scale_dtype) / 8;
    row += rows[i];
  }
  return cut.stored ? K3_OK : take_part(binder, &cut, matrix, module);
}

static enum k3_status bind_one(struct k3_binder *binder, struct k3_matrix *matrix, uint64_t n_rows, uint64_t n_cols, enum k3_tp_rule tp,
                               const char *module) {
  return k3_bind_matrix(binder, matrix, &n_rows, 1, n_cols, 0, tp, module);
}

// Embedding or head: the caller's, the image's, or absent.
static enum k3_status bind_borrowed(struct k3_binder *binder, struct k3_matrix *matrix, const struct k3_dspark_model *m,
                                    const struct k3_array *borrowed, enum k3_tp_rule tp, const char *module) {
  const struct k3_st_tensor *tensor;
  if (!borrowed || !borrowed->data) {
    bool there = parameter(binder, module, "weight", &tensor) || parameter(binder, module, "weight_packed", &tensor);
    return there ? bind_one(binder, matrix, m->vocab_size, m->hidden_size, tp, module) : K3_OK;
  }
  const uint64_t elem_nbytes = k3_dtype_bits(borrowed->dtype) / 8;
  const uint64_t row_nbytes = borrowed->row_nbytes ? borrowed->row_nbytes : m->hidden_size * elem_nbytes;
  if (!is_plain_float(borrowed->dtype) || row_nbytes % elem_nbytes != 0 || row_nbytes / elem_nbytes < m->hidden_size)
    return k3_fail(binder->err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, module, "rows of hidden_size F32, BF16 or F16 values",
                   "the borrowed array is %s with rows of %llu bytes", k3_dtype_name(borrowed->dtype), (unsigned long long)row_nbytes);
  matrix->shards = k3_arena_alloc(binder->arena, sizeof *matrix->shards, binder->err);
  if (!matrix->shards)
    return K3_NO_MEMORY;
  matrix->n_rows = m->vocab_size;
  matrix->n_cols = m->hidden_size;
  matrix->n_shards = 1;
  matrix->shards[0] = (struct k3_matrix_shard){.n_rows = m->vocab_size, .second = 1};
  matrix->shards[0].codes = (struct k3_quant_matrix){.scheme = plain_scheme(borrowed->dtype), .n_rows = m->vocab_size};
  matrix->shards[0].codes.n_cols = row_nbytes / elem_nbytes;  // what stands beyond hidden_size is never read
  matrix->shards[0].codes.weight = borrowed->data;
  binder->all_f32 &= borrowed->dtype == K3_DTYPE_F32;
  return K3_OK;
}

static enum k3_status bind_layer(struct k3_binder *binder, struct k3_layer_weights *layer, const struct k3_dspark_model *m, uint64_t i) {
  char base[64], name[160];
  snprintf(base, sizeof base, "model.layers.%llu", (unsigned long long)i);
#define NAME(suffix) (snprintf(name, sizeof name, "%s.%s", base, suffix), name)
  const uint64_t row_width = m->kv_lora_rank + m->qk_rope_head_dim, head_dim = m->qk_nope_head_dim + m->qk_rope_head_dim;
  const uint64_t latents[2] = {m->q_lora_rank, row_width}, mlp[2] = {m->intermediate_size, m->intermediate_size};
  K3_TRY(k3_bind_vector(binder, &layer->input_norm, m->hidden_size, NAME("input_layernorm.weight")));
  const uint64_t q_rows = m->n_heads * head_dim, kv_rows = m->n_heads * (m->qk_nope_head_dim + m->v_head_dim), hidden_rows = m->hidden_size;
  K3_TRY(k3_bind_matrix(binder, &layer->qkv_a, latents, 2, m->hidden_size, 0, K3_TP_REPLICATE, NAME("self_attn.fused_qkv_a_proj")));
  K3_TRY(k3_bind_vector(binder, &layer->q_a_norm, m->q_lora_rank, NAME("self_attn.q_a_layernorm.weight")));
  K3_TRY(k3_bind_matrix(binder, &layer->q_b, &q_rows, 1, m->q_lora_rank, m->n_heads, K3_TP_COLUMN, NAME("self_attn.q_b_proj")));
  K3_TRY(k3_bind_vector(binder, &layer->kv_a_norm, m->kv_lora_rank, NAME("self_attn.kv_a_layernorm.weight")));
  K3_TRY(k3_bind_matrix(binder, &layer->kv_b, &kv_rows, 1, m->kv_lora_rank, m->n_heads, K3_TP_COLUMN, NAME("self_attn.kv_b_proj")));
  K3_TRY(k3_bind_matrix(binder, &layer->o_proj, &hidden_rows, 1, m->n_heads * m->v_head_dim, m->n_heads, K3_TP_ROW, NAME("self_attn.o_proj")));
  K3_TRY(k3_bind_vector(binder, &layer->post_norm, m->hidden_size, NAME("post_attention_layernorm.weight")));
  K3_TRY(k3_bind_matrix(binder, &layer->gate_up, mlp, 2, m->hidden_size, 0, K3_TP_COLUMN, NAME("mlp.gate_up_proj")));
  K3_TRY(bind_one(binder, &layer->down, m->hidden_size, m->intermediate_size, K3_TP_ROW, NAME("mlp.down_proj")));
#undef NAME
  return K3_OK;
}

// A view must name the rows that the layers use anyway; then it needs no bytes and no table of its own.
//   row, n_rows  the latent and rotary rows, in the parameter's own unit
static enum k3_status check_view(struct k3_binder *binder, uint64_t n_layers, const char *suffix, uint64_t row, uint64_t n_rows) {
  char name[64];
  snprintf(name, sizeof name, "model.context_kv_proj.%s", suffix);
  const struct k3_manifest_view *view = k3_manifest_view_of(&binder->source->image->manifest, name);
  if (!view)
    return missing(binder, name);
  bool fits = view->n_shards == n_layers;
  for (uint64_t i = 0; fits && i < n_layers; i++) {
    const struct k3_manifest_view_shard *shard = &view->shards[i];
    char tensor[160];
    snprintf(tensor, sizeof tensor, "model.layers.%llu.self_attn.fused_qkv_a_proj.%s", (unsigned long long)i, suffix);
    fits = shard->id == i && strcmp(shard->tensor, tensor) == 0 && shard->row == row && shard->n_rows == n_rows;
  }
  return fits ? K3_OK
              : k3_fail(binder->err, K3_BAD_INPUT, K3_IMG03, NULL, name, "one shard per layer: the latent and rotary rows of its A-projection",
                        "the view names other rows");
}

static enum k3_status check_views(struct k3_binder *binder, const struct k3_dspark_model *m, const struct k3_matrix *qkv_a) {
  static const char module[] = "model.layers.0.self_attn.fused_qkv_a_proj";
  const struct k3_quant_matrix *q = &qkv_a->shards[0].codes, *kv = &qkv_a->shards[1].codes;
  const struct k3_st_tensor *tensor;
  bool packed = parameter(binder, module, "weight_packed", &tensor) != NULL;
  K3_TRY(check_view(binder, m->n_layers, packed ? "weight_packed" : "weight", q->n_rows, kv->n_rows));
  if (!kv->scale)
    return K3_OK;
  uint64_t q_rows, kv_rows, cols;
  k3_quant_scale_shape(&q->scheme, q->n_rows, q->n_cols, &q_rows, &cols);
  k3_quant_scale_shape(&kv->scheme, kv->n_rows, kv->n_cols, &kv_rows, &cols);
  K3_TRY(check_view(binder, m->n_layers, "weight_scale", q_rows, kv_rows));
  if (kv->scheme.second == K3_SECOND_NONE)
    return K3_OK;
  return check_view(binder, m->n_layers, "weight_global_scale", 1, 1);
}

static enum k3_status bind_all(struct k3_binder *binder, const struct k3_dspark_model *m, const struct k3_array *embed_tokens,
                               const struct k3_array *lm_head, struct k3_weights *w) {
  K3_TRY(bind_borrowed(binder, &w->embedding, m, embed_tokens, K3_TP_REPLICATE, "model.embed_tokens"));
  K3_TRY(bind_one(binder, &w->context_proj, m->hidden_size, m->n_taps * m->target_hidden_size, K3_TP_REPLICATE, "model.context_proj"));
  K3_TRY(k3_bind_vector(binder, &w->context_norm, m->hidden_size, "model.context_norm.weight"));
  if (m->fc_norm) {
    w->tap_norms = k3_arena_alloc(binder->arena, m->n_taps * sizeof *w->tap_norms, binder->err);
    if (!w->tap_norms)
      return K3_NO_MEMORY;
    for (uint64_t t = 0; t < m->n_taps; t++) {
      char name[64];
      snprintf(name, sizeof name, "model.fc_norm.%llu.weight", (unsigned long long)t);
      K3_TRY(k3_bind_vector(binder, &w->tap_norms[t], m->target_hidden_size, name));
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
  K3_TRY(check_views(binder, m, &w->layers[0].qkv_a));
  k3_weights_link_context(w, m);
  K3_TRY(k3_bind_vector(binder, &w->final_norm, m->hidden_size, "model.final_norm.weight"));
  K3_TRY(bind_one(binder, &w->markov_w1, m->vocab_size, m->markov_rank, K3_TP_REPLICATE, "model.markov_head.markov_w1"));
  K3_TRY(bind_one(binder, &w->markov_w2, m->vocab_size, m->markov_rank, K3_TP_REPLICATE, "model.markov_head.markov_w2"));
  if (m->confidence_head) {
    uint64_t width = m->hidden_size + (m->confidence_with_markov ? m->markov_rank : 0);
    K3_TRY(bind_one(binder, &w->confidence, 1, width, K3_TP_REPLICATE, "model.confidence_head.proj"));
    K3_TRY(k3_bind_vector(binder, &w->confidence_bias, 1, "model.confidence_head.proj.bias"));
  }
  return bind_borrowed(binder, &w->head, m, lm_head, K3_TP_VOCAB, "lm_head");
}

enum k3_status k3_weights_bind(const struct k3_weights_source *source, const struct k3_dspark_model *model, const struct k3_array *embed_tokens,
                               const struct k3_array *lm_head, struct k3_weights *weights, struct k3_error *err) {
  *weights = (struct k3_weights){.source = *source};
  struct k3_binder binder = {.source = source, .arena = &weights->arena, .all_f32 = true, .err = err};
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

uint64_t k3_matrix_row_nbytes(const struct k3_matrix *matrix, const struct k3_matrix_shard *shard) {
  return k3_quant_row_nbytes(&shard->codes.scheme, matrix->n_cols);
}

uint64_t k3_matrix_nbytes(const struct k3_matrix *matrix) {
  uint64_t nbytes = 0;
  for (unsigned i = 0; i < matrix->n_shards; i++) {
    const struct k3_matrix_shard *shard = &matrix->shards[i];
    uint64_t scale_rows, scale_cols;
    k3_quant_scale_shape(&shard->codes.scheme, shard->n_rows, matrix->n_cols, &scale_rows, &scale_cols);
    nbytes += shard->n_rows * k3_matrix_row_nbytes(matrix, shard) + scale_rows * scale_cols * k3_dtype_bits(shard->codes.scheme.scale_dtype) / 8;
  }
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
