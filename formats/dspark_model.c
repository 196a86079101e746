#include "formats/dspark_model.h"

#include <stdio.h>
#include <string.h>

#include "formats/dspark_fields.h"
#include "formats/json_tree.h"

typedef unsigned long long ull;  // for %llu

#define FIELD(name, member, min, max) \
  { name, offsetof(struct k3_dspark_model, member), min, max }
enum { MAX_WIDTH = 1 << 24, MAX_HEAD = 1 << 16, MAX_VOCAB = 1 << 28 };

const struct k3_dspark_field k3_dspark_fields[K3_DSPARK_N_FIELDS] = {
    FIELD("hidden_size", hidden_size, 1, MAX_WIDTH),
    FIELD("intermediate_size", intermediate_size, 1, MAX_WIDTH),
    FIELD("kv_lora_rank", kv_lora_rank, 1, MAX_WIDTH),
    FIELD("markov_rank", markov_rank, 1, MAX_WIDTH),
    FIELD("mask_token_id", mask_token_id, 0, MAX_VOCAB - 1),
    FIELD("max_position_embeddings", max_position_embeddings, 1, K3_DSPARK_MAX_POSITIONS),
    FIELD("num_attention_heads", n_heads, 1, MAX_HEAD),
    FIELD("num_hidden_layers", n_layers, 1, K3_DSPARK_MAX_LAYERS),
    FIELD("q_lora_rank", q_lora_rank, 1, MAX_WIDTH),
    FIELD("qk_nope_head_dim", qk_nope_head_dim, 1, MAX_HEAD),
    FIELD("qk_rope_head_dim", qk_rope_head_dim, 2, MAX_HEAD),
    FIELD("target_hidden_size", target_hidden_size, 1, MAX_WIDTH),
    FIELD("target_num_hidden_layers", target_n_layers, 1, MAX_HEAD),
    FIELD("v_head_dim", v_head_dim, 1, MAX_HEAD),
    FIELD("vocab_size", vocab_size, 1, MAX_VOCAB),
};

const char *k3_dspark_contradiction(const struct k3_dspark_model *model, const char **name) {
  const struct k3_rope *rope = &model->rope;
  bool distinct = true;
  for (uint64_t i = 0; i < model->n_taps; i++) {
    *name = "target_layer_ids";
    if (model->target_layer_ids[i] >= model->target_n_layers)
      return "a tap is not below the number of target layers";
    for (uint64_t j = 0; j < i; j++)
      distinct &= model->target_layer_ids[i] != model->target_layer_ids[j];
  }
  if (!distinct)
    return "a tap occurs twice";
  *name = "qk_rope_head_dim";
  if (model->qk_rope_head_dim % 2 != 0)
    return "an odd number; rotation takes pairs";
  *name = "mask_token_id";
  if (model->mask_token_id >= model->vocab_size)
    return "not below vocab_size";
  *name = "block_width";
  if (model->block_width < 1 || model->block_width > K3_DSPARK_MAX_BLOCK || model->block_width > model->max_position_embeddings)
    return "not between 1 and 1024 and at most max_position_embeddings";
  *name = "rms_norm_eps";
  if (!(model->rms_norm_eps > 0 && model->rms_norm_eps < 1))
    return "not between 0 and 1";
  *name = "logit_scale";
  if (!(model->logit_scale > 0 && model->logit_scale <= 1e6))
    return "not between 0 and 10^6";
  *name = "rope_theta";
  if (!(rope->theta > 1 && rope->theta <= 1e15))
    return "not between 1 and 10^15";
  if (!rope->yarn)
    return NULL;
  *name = "factor";
  if (!(rope->factor >= 1 && rope->factor <= 1e6))
    return "not between 1 and 10^6";
  *name = "original_max_position_embeddings";
  if (rope->original_max_position < 1 || rope->original_max_position > K3_DSPARK_MAX_POSITIONS)
    return "not between 1 and 2^31";
  *name = "beta_fast";
  if (!(rope->beta_slow > 0 && rope->beta_fast >= rope->beta_slow && rope->beta_fast <= 1e6))
    return "beta_fast and beta_slow are not positive and in that order";
  *name = "mscale";
  if (!(rope->mscale >= 0 && rope->mscale <= 1e3 && rope->mscale_all_dim >= 0 && rope->mscale_all_dim <= 1e3))
    return "mscale and mscale_all_dim are not between 0 and 1000";
  return NULL;
}

// ---- the manifest's "model" object ----

// Writes the whole numbers whose names come before `key`.
static void put_before(struct k3_jsonw *writer, const struct k3_dspark_model *model, int *next, const char *key) {
  for (; *next < K3_DSPARK_N_FIELDS && strcmp(k3_dspark_fields[*next].name, key) < 0; ++*next)
    k3_jsonw_u64(writer, k3_dspark_fields[*next].name, *k3_dspark_member((struct k3_dspark_model *)model, &k3_dspark_fields[*next]));
}

static void put_rope(struct k3_jsonw *writer, const struct k3_rope *rope) {
  k3_jsonw_begin_object(writer, "rope");
  if (rope->yarn) {
    k3_jsonw_double(writer, "beta_fast", rope->beta_fast);
    k3_jsonw_double(writer, "beta_slow", rope->beta_slow);
    k3_jsonw_double(writer, "factor", rope->factor);
    k3_jsonw_double(writer, "mscale", rope->mscale);
    k3_jsonw_double(writer, "mscale_all_dim", rope->mscale_all_dim);
    k3_jsonw_u64(writer, "original_max_position_embeddings", rope->original_max_position);
  }
  k3_jsonw_double(writer, "rope_theta", rope->theta);
  k3_jsonw_string(writer, "rope_type", rope->yarn ? "yarn" : "default");
  k3_jsonw_end_object(writer);
  // The layout the forward applies; said in the image so that no reader has to guess it.
  k3_jsonw_begin_object(writer, "rotation");
  k3_jsonw_string(writer, "kv_a_proj_with_mqa", "interleaved");
  k3_jsonw_string(writer, "q_b_proj", "interleaved");
  k3_jsonw_end_object(writer);
}

char *k3_dspark_model_to_json(const struct k3_dspark_model *model, struct k3_error *err) {
  struct k3_jsonw writer;
  int next = 0;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_jsonw_begin_object(&writer, NULL);
  k3_jsonw_u64(&writer, "block_width", model->block_width);
  k3_jsonw_bool(&writer, "causal", model->causal);
  k3_jsonw_bool(&writer, "confidence_head", model->confidence_head);
  k3_jsonw_bool(&writer, "confidence_head_with_markov", model->confidence_with_markov);
  k3_jsonw_string(&writer, "family", "k3-dspark");
  k3_jsonw_bool(&writer, "fc_norm", model->fc_norm);
  put_before(&writer, model, &next, "logit_scale");
  k3_jsonw_double(&writer, "logit_scale", model->logit_scale);
  put_before(&writer, model, &next, "norm");
  k3_jsonw_string(&writer, "norm", "rms");
  put_before(&writer, model, &next, "rms_norm_eps");
  k3_jsonw_double(&writer, "rms_norm_eps", model->rms_norm_eps);
  put_rope(&writer, &model->rope);
  put_before(&writer, model, &next, "target_layer_ids");
  k3_jsonw_begin_array(&writer, "target_layer_ids");
  for (uint64_t i = 0; i < model->n_taps && i < K3_DSPARK_MAX_TAPS; i++)
    k3_jsonw_u64(&writer, NULL, model->target_layer_ids[i]);
  k3_jsonw_end_array(&writer);
  put_before(&writer, model, &next, "target_stream");
  k3_jsonw_string(&writer, "target_stream", model->target_stream);
  put_before(&writer, model, &next, "~");
  k3_jsonw_end_object(&writer);
  return k3_json_tree_take(&writer, err);
}

struct loader {
  const json_t *root;
  const char *file;
  struct k3_error *err;
};

static enum k3_status fail_field(const struct loader *loader, const char *name, const char *allowed, const json_t *value) {
  char what[128], field[96];
  snprintf(field, sizeof field, "model.%s", name);
  return k3_fail(loader->err, K3_BAD_INPUT, K3_IMG01, loader->file, field, allowed, "%s", k3_json_tree_describe(value, what, sizeof what));
}

static enum k3_status load_u64(const struct loader *loader, const json_t *object, const char *name, uint64_t min, uint64_t max, uint64_t *value) {
  const json_t *at = json_object_get(object, name);
  char allowed[64];
  snprintf(allowed, sizeof allowed, "an integer from %llu to %llu", (ull)min, (ull)max);
  if (!json_is_integer(at) || json_integer_value(at) < 0 || (uint64_t)json_integer_value(at) < min || (uint64_t)json_integer_value(at) > max)
    return fail_field(loader, name, allowed, at);
  *value = (uint64_t)json_integer_value(at);
  return K3_OK;
}

static enum k3_status load_real(const struct loader *loader, const json_t *object, const char *name, double *value) {
  const json_t *at = json_object_get(object, name);
  if (!json_is_number(at))
    return fail_field(loader, name, "a number", at);
  *value = json_number_value(at);
  return K3_OK;
}

static enum k3_status load_bool(const struct loader *loader, const char *name, bool *value) {
  const json_t *at = json_object_get(loader->root, name);
  if (!json_is_boolean(at))
    return fail_field(loader, name, "true or false", at);
  *value = json_is_true(at);
  return K3_OK;
}

// A text that is one of two words (b may be NULL).
static enum k3_status load_word(const struct loader *loader, const json_t *object, const char *name, const char *a, const char *b, bool *is_b) {
  const json_t *at = json_object_get(object, name);
  const char *text = json_string_value(at);
  char allowed[64];
  snprintf(allowed, sizeof allowed, "\"%s\"%s%s%s", a, b ? " or \"" : "", b ? b : "", b ? "\"" : "");
  if (!text || (strcmp(text, a) != 0 && !(b && strcmp(text, b) == 0)))
    return fail_field(loader, name, allowed, at);
  *is_b = strcmp(text, a) != 0;
  return K3_OK;
}

static enum k3_status load_rope(const struct loader *loader, struct k3_rope *rope) {
  const json_t *block = json_object_get(loader->root, "rope"), *rotation = json_object_get(loader->root, "rotation");
  bool other;
  *rope = (struct k3_rope){.factor = 1, .beta_fast = 32, .beta_slow = 1, .mscale = 1};
  K3_TRY(load_word(loader, block, "rope_type", "default", "yarn", &rope->yarn));
  K3_TRY(load_real(loader, block, "rope_theta", &rope->theta));
  K3_TRY(load_word(loader, rotation, "kv_a_proj_with_mqa", "interleaved", NULL, &other));
  K3_TRY(load_word(loader, rotation, "q_b_proj", "interleaved", NULL, &other));
  if (!rope->yarn)
    return K3_OK;
  K3_TRY(load_real(loader, block, "factor", &rope->factor));
  K3_TRY(load_u64(loader, block, "original_max_position_embeddings", 1, K3_DSPARK_MAX_POSITIONS, &rope->original_max_position));
  K3_TRY(load_real(loader, block, "beta_fast", &rope->beta_fast));
  K3_TRY(load_real(loader, block, "beta_slow", &rope->beta_slow));
  K3_TRY(load_real(loader, block, "mscale", &rope->mscale));
  return load_real(loader, block, "mscale_all_dim", &rope->mscale_all_dim);
}

static enum k3_status load_taps(const struct loader *loader, struct k3_dspark_model *model) {
  const json_t *taps = json_object_get(loader->root, "target_layer_ids");
  size_t n_taps = json_array_size(taps);
  if (n_taps < 1 || n_taps > K3_DSPARK_MAX_TAPS)
    return fail_field(loader, "target_layer_ids", "a list of 1 to 64 layers", taps);
  for (size_t i = 0; i < n_taps; i++) {
    const json_t *tap = json_array_get(taps, i);
    if (!json_is_integer(tap) || json_integer_value(tap) < 0)
      return fail_field(loader, "target_layer_ids", "a list of layers", tap);
    model->target_layer_ids[i] = (uint64_t)json_integer_value(tap);
  }
  model->n_taps = n_taps;
  return K3_OK;
}

static enum k3_status load_model(const struct loader *loader, struct k3_dspark_model *model) {
  const char *name = NULL, *what;
  bool other;
  K3_TRY(load_word(loader, loader->root, "family", "k3-dspark", NULL, &other));
  K3_TRY(load_word(loader, loader->root, "norm", "rms", NULL, &other));
  for (int i = 0; i < K3_DSPARK_N_FIELDS; i++)
    K3_TRY(load_u64(loader, loader->root, k3_dspark_fields[i].name, k3_dspark_fields[i].min, k3_dspark_fields[i].max,
                    k3_dspark_member(model, &k3_dspark_fields[i])));
  K3_TRY(load_u64(loader, loader->root, "block_width", 1, K3_DSPARK_MAX_BLOCK, &model->block_width));
  K3_TRY(load_taps(loader, model));
  K3_TRY(load_real(loader, loader->root, "rms_norm_eps", &model->rms_norm_eps));
  K3_TRY(load_real(loader, loader->root, "logit_scale", &model->logit_scale));
  K3_TRY(load_rope(loader, &model->rope));
  K3_TRY(load_bool(loader, "causal", &model->causal));
  K3_TRY(load_bool(loader, "fc_norm", &model->fc_norm));
  K3_TRY(load_bool(loader, "confidence_head", &model->confidence_head));
  K3_TRY(load_bool(loader, "confidence_head_with_markov", &model->confidence_with_markov));
  K3_TRY(load_word(loader, loader->root, "target_stream", "prefix", "attn_res", &other));
  snprintf(model->target_stream, sizeof model->target_stream, "%s", other ? "attn_res" : "prefix");
  if ((what = k3_dspark_contradiction(model, &name)) != NULL)
    return k3_fail(loader->err, K3_BAD_INPUT, K3_IMG01, loader->file, name, NULL, "model: %s", what);
  return K3_OK;
}

enum k3_status k3_dspark_model_from_json(const char *text, size_t nbytes, const char *file, struct k3_dspark_model *model, struct k3_error *err) {
  *model = (struct k3_dspark_model){0};
  json_t *root;
  K3_TRY(k3_json_tree_parse(text, nbytes, K3_IMG01, file, &root, err));
  enum k3_status status = load_model(&(struct loader){root, file, err}, model);
  json_decref(root);
  return status;
}
