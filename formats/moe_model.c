#include "formats/moe_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "formats/dspark_fields.h"
#include "formats/json_tree.h"

enum { MAX_WIDTH = 1 << 24, MAX_HEAD = 1 << 16 };

struct loader {
  const json_t *root;
  const char *file;
  struct k3_error *err;
};

static enum k3_status wrong(const struct loader *loader, const char *path, const char *allowed, const json_t *value) {
  char what[128], field[128];
  snprintf(field, sizeof field, "model.%s", path);
  return k3_fail(loader->err, K3_BAD_INPUT, K3_IMG01, loader->file, field, allowed, "%s", k3_json_tree_describe(value, what, sizeof what));
}

// Value of a path of keys joined by '.', or NULL.
static const json_t *at(const json_t *object, const char *path) {
  char key[64];
  while (object && *path) {
    size_t n = strcspn(path, ".");
    snprintf(key, sizeof key, "%.*s", (int)n, path);
    object = json_object_get(object, key);
    path += n + (path[n] == '.');
  }
  return object;
}

static enum k3_status read_u64(const struct loader *loader, const char *path, uint64_t min, uint64_t max, uint64_t *value) {
  const json_t *item = at(loader->root, path);
  char allowed[64];
  snprintf(allowed, sizeof allowed, "an integer from %llu to %llu", (unsigned long long)min, (unsigned long long)max);
  if (!json_is_integer(item) || json_integer_value(item) < 0 || (uint64_t)json_integer_value(item) < min || (uint64_t)json_integer_value(item) > max)
    return wrong(loader, path, allowed, item);
  *value = (uint64_t)json_integer_value(item);
  return K3_OK;
}

// A number within bounds; absent: `otherwise`, unless that is NAN.
static enum k3_status read_real(const struct loader *loader, const char *path, double min, double max, double otherwise, double *value) {
  const json_t *item = at(loader->root, path);
  char allowed[64];
  snprintf(allowed, sizeof allowed, "a number from %g to %g", min, max);
  *value = item ? json_number_value(item) : otherwise;
  if ((item && !json_is_number(item)) || !(*value >= min && *value <= max))
    return wrong(loader, path, allowed, item);
  return K3_OK;
}

static enum k3_status expect_word(const struct loader *loader, const char *path, const char *word) {
  const json_t *item = at(loader->root, path);
  const char *text = json_string_value(item);
  return text && strcmp(text, word) == 0 ? K3_OK : wrong(loader, path, word, item);
}

// How a projection's components turn; the modules' names hold dots of their own.
static enum k3_status expect_rotation(const struct loader *loader, const char *module, const char *layout) {
  const json_t *item = json_object_get(json_object_get(at(loader->root, "rotation"), module), "layout");
  const char *text = json_string_value(item);
  char path[96];
  snprintf(path, sizeof path, "rotation.%s.layout", module);
  return text && strcmp(text, layout) == 0 ? K3_OK : wrong(loader, path, layout, item);
}

// Which layers are marked in a list of 0 and 1 or of words; `word` marks one.
static enum k3_status read_marks(const struct loader *loader, const char *path, const char *word, uint64_t n, bool *marks) {
  const json_t *list = at(loader->root, path);
  char allowed[64];
  snprintf(allowed, sizeof allowed, "a list of %llu entries, one per layer", (unsigned long long)n);
  if (!json_is_array(list) || json_array_size(list) != n)
    return wrong(loader, path, allowed, list);
  for (size_t i = 0; i < n; i++) {
    const json_t *item = json_array_get(list, i);
    if (!json_is_integer(item) && !json_is_string(item))
      return wrong(loader, path, "0, 1, or the kind of the layer", item);
    marks[i] = json_is_integer(item) ? json_integer_value(item) != 0 : strcmp(json_string_value(item), word) == 0;
  }
  return K3_OK;
}

static enum k3_status load_common(const struct loader *loader, struct k3_moe_model *m) {
  K3_TRY(read_u64(loader, "hidden_size", 1, MAX_WIDTH, &m->hidden_size));
  K3_TRY(read_u64(loader, "num_hidden_layers", 1, K3_MOE_MAX_LAYERS, &m->n_layers));
  K3_TRY(read_u64(loader, "num_attention_heads", 1, MAX_HEAD, &m->n_heads));
  K3_TRY(read_u64(loader, "num_experts", 1, K3_MOE_MAX_EXPERTS, &m->n_experts));
  K3_TRY(read_u64(loader, "num_experts_per_token", 1, m->n_experts, &m->n_active));
  K3_TRY(read_u64(loader, "max_position_embeddings", 1, K3_DSPARK_MAX_POSITIONS, &m->max_position_embeddings));
  K3_TRY(read_real(loader, "routed_scaling_factor", 1e-6, 1e6, NAN, &m->routed_scale));
  K3_TRY(read_real(loader, "rms_norm_eps", 1e-30, 1, NAN, &m->rms_norm_eps));
  m->rope = (struct k3_rope){.factor = 1, .beta_fast = 32, .beta_slow = 1, .mscale = 1};
  return read_real(loader, "rope.theta", 1.000001, 1e15, NAN, &m->rope.theta);
}

static enum k3_status load_minimax_m3(const struct loader *loader, struct k3_moe_model *m) {
  uint64_t block = 0, n_blocks = 0;
  double factor;
  m->gemma_norm = true;
  m->renormalise = true;
  m->activation = K3_ACTIVATION_SWIGLU_OAI;
  m->n_groups = m->n_active_groups = 1;
  K3_TRY(expect_word(loader, "norm.flavour", "gemma"));
  K3_TRY(expect_word(loader, "activation.name", "swiglu-oai"));
  K3_TRY(read_real(loader, "activation.alpha", 1e-6, 1e6, 1.702, &m->alpha));
  K3_TRY(read_real(loader, "activation.limit", 1e-6, 1e30, 7, &m->limit));
  K3_TRY(read_u64(loader, "num_key_value_heads", 1, m->n_heads, &m->n_kv_heads));
  K3_TRY(read_u64(loader, "head_dim", 2, MAX_HEAD, &m->head_dim));
  K3_TRY(read_u64(loader, "dense_intermediate_size", 1, MAX_WIDTH, &m->dense_size));
  K3_TRY(read_u64(loader, "intermediate_size", 1, MAX_WIDTH, &m->expert_size));
  K3_TRY(read_u64(loader, "shared_intermediate_size", 1, MAX_WIDTH, &m->shared_size));
  K3_TRY(read_marks(loader, "moe_layers", "sparse", m->n_layers, m->is_moe));
  K3_TRY(read_marks(loader, "sparse_layers", "minimax_m3_sparse", m->n_layers, m->is_sparse));
  K3_TRY(expect_rotation(loader, "self_attn.q_proj", "half-split"));
  K3_TRY(read_u64(loader, "index.block_size", 1, MAX_WIDTH, &block));
  K3_TRY(read_u64(loader, "index.topk_blocks", 1, MAX_WIDTH, &n_blocks));
  m->max_dense_keys = block * n_blocks;
  K3_TRY(read_real(loader, "rope.partial_rotary_factor", 0, 1, 1, &factor));
  m->rotary_dim = (uint64_t)llround(factor * (double)m->head_dim);
  if (at(loader->root, "rope.rotary_dim"))
    K3_TRY(read_u64(loader, "rope.rotary_dim", 0, m->head_dim, &m->rotary_dim));
  if (m->rotary_dim % 2 != 0)
    return wrong(loader, "rope.rotary_dim", "an even number: rotation takes pairs", at(loader->root, "rope.rotary_dim"));
  if (m->n_heads % m->n_kv_heads != 0)
    return wrong(loader, "num_key_value_heads", "a divisor of the number of heads", at(loader->root, "num_key_value_heads"));
  return K3_OK;
}

// The scaling block of the config as it was; every number that YaRN needs must be there.
static enum k3_status load_yarn(const struct loader *loader, struct k3_rope *rope) {
  const json_t *scaling = at(loader->root, "rope.scaling");
  const char *kind = json_string_value(at(scaling, at(scaling, "rope_type") ? "rope_type" : "type"));
  if (!scaling || (kind && strcmp(kind, "default") == 0))
    return K3_OK;
  if (!kind || strcmp(kind, "yarn") != 0)
    return wrong(loader, "rope.scaling", "a block of the type yarn", scaling);
  rope->yarn = true;
  K3_TRY(read_real(loader, "rope.scaling.factor", 1e-6, 1e6, NAN, &rope->factor));
  K3_TRY(read_u64(loader, "rope.scaling.original_max_position_embeddings", 1, K3_DSPARK_MAX_POSITIONS, &rope->original_max_position));
  K3_TRY(read_real(loader, "rope.scaling.beta_fast", 1e-6, 1e6, 32, &rope->beta_fast));
  K3_TRY(read_real(loader, "rope.scaling.beta_slow", 1e-6, rope->beta_fast, 1, &rope->beta_slow));
  K3_TRY(read_real(loader, "rope.scaling.mscale", 0, 1e3, 1, &rope->mscale));
  return read_real(loader, "rope.scaling.mscale_all_dim", 0, 1e3, 0, &rope->mscale_all_dim);
}

static enum k3_status load_deepseek_v32(const struct loader *loader, struct k3_moe_model *m) {
  uint64_t n_shared, first_moe;
  const json_t *renormalise = at(loader->root, "norm_topk_prob");
  m->activation = K3_ACTIVATION_SILU;
  m->renormalise = !json_is_false(renormalise);
  K3_TRY(expect_word(loader, "norm.flavour", "plain"));
  K3_TRY(expect_word(loader, "activation.name", "silu"));
  K3_TRY(expect_rotation(loader, "self_attn.q_b_proj", "interleaved"));
  K3_TRY(expect_rotation(loader, "self_attn.kv_a_proj_with_mqa", "interleaved"));
  // The indexer turns the other way: an image with one flag for both was made by somebody who did not know.
  K3_TRY(expect_rotation(loader, "self_attn.indexer.wq_b", "half-split"));
  K3_TRY(expect_rotation(loader, "self_attn.indexer.wk", "half-split"));
  K3_TRY(read_u64(loader, "q_lora_rank", 1, MAX_WIDTH, &m->q_lora_rank));
  K3_TRY(read_u64(loader, "kv_lora_rank", 1, MAX_WIDTH, &m->kv_lora_rank));
  K3_TRY(read_u64(loader, "qk_nope_head_dim", 1, MAX_HEAD, &m->qk_nope_head_dim));
  K3_TRY(read_u64(loader, "qk_rope_head_dim", 2, MAX_HEAD, &m->qk_rope_head_dim));
  K3_TRY(read_u64(loader, "v_head_dim", 1, MAX_HEAD, &m->v_head_dim));
  K3_TRY(read_u64(loader, "intermediate_size", 1, MAX_WIDTH, &m->dense_size));
  K3_TRY(read_u64(loader, "moe_intermediate_size", 1, MAX_WIDTH, &m->expert_size));
  K3_TRY(read_u64(loader, "num_shared_experts", 1, MAX_HEAD, &n_shared));
  K3_TRY(read_u64(loader, "first_k_dense_replace", 0, m->n_layers, &first_moe));
  K3_TRY(read_u64(loader, "n_group", 1, m->n_experts, &m->n_groups));
  K3_TRY(read_u64(loader, "topk_group", 1, m->n_groups, &m->n_active_groups));
  K3_TRY(read_u64(loader, "index.topk", 1, K3_DSPARK_MAX_POSITIONS, &m->max_dense_keys));
  m->shared_size = n_shared * m->expert_size;
  for (uint64_t i = 0; i < m->n_layers; i++) {
    m->is_moe[i] = i >= first_moe;
    m->is_sparse[i] = true;
  }
  const uint64_t group = m->n_experts / m->n_groups;
  if (m->n_experts % m->n_groups != 0 || group < 2 || m->n_active_groups * group < m->n_active)
    return wrong(loader, "n_group", "equal groups of two experts or more, of which the active ones hold the experts of a token",
                 at(loader->root, "n_group"));
  if (m->qk_rope_head_dim % 2 != 0)
    return wrong(loader, "qk_rope_head_dim", "an even number: rotation takes pairs", at(loader->root, "qk_rope_head_dim"));
  return load_yarn(loader, &m->rope);
}

static enum k3_status load(const struct loader *loader, struct k3_moe_model *m) {
  const char *family = json_string_value(json_object_get(loader->root, "family"));
  bool is_m3 = family && strcmp(family, "minimax-m3") == 0, is_v32 = family && strcmp(family, "deepseek-v3.2") == 0;
  if (!is_m3 && !is_v32)
    return k3_fail(loader->err, K3_UNSUPPORTED, K3_CFG21, loader->file, NULL, "an image of minimax-m3 or deepseek-v3.2",
                   "there are no decoder layers for the family \"%s\"", family ? family : "");
  m->family = is_m3 ? K3_MOE_MINIMAX_M3 : K3_MOE_DEEPSEEK_V32;
  K3_TRY(load_common(loader, m));
  return is_m3 ? load_minimax_m3(loader, m) : load_deepseek_v32(loader, m);
}

enum k3_status k3_moe_model_from_json(const char *text, size_t nbytes, const char *file, struct k3_moe_model *model, struct k3_error *err) {
  json_t *root;
  memset(model, 0, sizeof *model);
  K3_TRY(k3_json_tree_parse(text, nbytes, K3_IMG01, file, &root, err));
  enum k3_status status = load(&(struct loader){root, file, err}, model);
  json_decref(root);
  return status;
}
