#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "formats/dspark_fields.h"
#include "formats/dspark_model.h"

typedef unsigned long long ull;  // for %llu

struct reader {
  const struct k3_config *config;
  struct k3_findings *findings;
  const char *model_type;  // "" when absent
  bool bad_input, unsupported, no_memory;
};

static void add(struct reader *reader, enum k3_severity severity, const struct k3_error *error) {
  if (error->status == K3_NO_MEMORY || k3_findings_add(reader->findings, severity, error) != K3_OK)
    reader->no_memory = true;
  if (severity == K3_ERROR) {
    reader->unsupported |= error->rule == K3_CFG21;
    reader->bad_input |= error->rule != K3_CFG21;
  }
}

#define REPORT(reader, severity, status, rule, field, allowed, ...)                                      \
  do {                                                                                                   \
    struct k3_error report_error = {0};                                                                  \
    k3_fail(&report_error, status, rule, k3_config_file((reader)->config), field, allowed, __VA_ARGS__); \
    add(reader, severity, &report_error);                                                                \
  } while (0)
#define CONTRADICTS(reader, field, allowed, ...) REPORT(reader, K3_ERROR, K3_BAD_INPUT, K3_CFG20, field, allowed, __VA_ARGS__)
#define WARN(reader, field, allowed, ...)        REPORT(reader, K3_WARNING, K3_BAD_INPUT, K3_CFG20, field, allowed, __VA_ARGS__)
#define REFUSE(reader, field, allowed, ...)      REPORT(reader, K3_ERROR, K3_UNSUPPORTED, K3_CFG21, field, allowed, __VA_ARGS__)

// What became of a look-up: not there, there, or there and wrong, which has been reported.
enum outcome { ABSENT, FOUND, REPORTED };

// Number under the first of up to 4 spellings that is there; the others may not say another one. *name: the spelling found.
static enum outcome read_u64(struct reader *reader, const char *const *names, int n_names, uint64_t *value, const char **name) {
  bool any = false;
  for (int i = 0; i < n_names; i++) {
    struct k3_error error = {0};
    uint64_t one = 0;
    bool found;
    if (k3_config_u64(reader->config, names[i], &one, &found, &error) != K3_OK) {
      add(reader, K3_ERROR, &error);
      return REPORTED;
    }
    if (!found)
      continue;
    if (any && one != *value)
      CONTRADICTS(reader, names[i], "one value under every spelling", "%llu, but %s is %llu", (ull)one, *name, (ull)*value);
    if (any)
      continue;
    any = true;
    *value = one;
    *name = names[i];
  }
  return any ? FOUND : ABSENT;
}

static bool read_bool(struct reader *reader, const char *name, bool *value) {
  struct k3_error error = {0};
  bool found = false;
  if (k3_config_bool(reader->config, name, value, &found, &error) != K3_OK)
    add(reader, K3_ERROR, &error);
  return found;
}

static bool read_real(struct reader *reader, const char *name, double *value) {
  struct k3_error error = {0};
  bool found = false;
  if (k3_config_real(reader->config, name, value, &found, &error) != K3_OK)
    add(reader, K3_ERROR, &error);
  return found;
}

static const char *read_string(struct reader *reader, const char *name, const char *standard) {
  struct k3_error error = {0};
  const char *value = standard;
  if (k3_config_string(reader->config, name, &value, NULL, &error) != K3_OK)
    add(reader, K3_ERROR, &error);
  return value;
}

static bool is_null(const struct k3_config *config, const char *key) {
  return json_is_null(json_object_get((const json_t *)k3_config_root(config), key));
}

// Switches and names of variants that the forward does not cover.
static void refuse_variants(struct reader *reader) {
  static const struct {
    const char *name;
    bool supported;
    const char *what;
  } switches[] = {
      {"mla_use_nope", false, "true: queries and keys are not rotated"},
      {"mla_use_output_gate", false, "true: the attention output is gated by g_proj"},
      {"mla_use_qk_norm", false, "true: queries and keys have norms of their own"},
      {"dspark_bonus_anchor", false, "true: the block begins with a bonus token instead of the anchor"},
      {"sample_from_anchor", true, "false: the first draft is not read from the anchor's row"},
      {"attention_bias", false, "true: the attention projections have biases"},
      {"mlp_bias", false, "true: the MLP projections have biases"},
      {"rope_interleave", true, "false: rotation of halves instead of adjacent pairs"},
      {"is_neox", false, "true: rotation of halves instead of adjacent pairs"},
      {"is_neox_style", false, "true: rotation of halves instead of adjacent pairs"},
  };
  for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
    bool value = switches[i].supported;
    read_bool(reader, switches[i].name, &value);
    if (value != switches[i].supported)
      REFUSE(reader, switches[i].name, switches[i].supported ? "true, or absent" : "false, or absent", "%s", switches[i].what);
  }
  const char *act = read_string(reader, "hidden_act", "silu");
  if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
    REFUSE(reader, "hidden_act", "silu", "the activation %s", act);
  static const char *const head_types[] = {"markov_head_type", "dspark_markov_head_type"};
  for (int i = 0; i < 2; i++) {
    const char *head_type = read_string(reader, head_types[i], "vanilla");
    if (strcmp(head_type, "vanilla") != 0)
      REFUSE(reader, head_types[i], "vanilla", "a Markov head of type %s", head_type);
  }
}

static void read_geometry(struct reader *reader, struct k3_dspark_model *model) {
  static const char *const markov_names[] = {"markov_rank", "dspark_markov_rank"};
  static const char *const mask_names[] = {"mask_token_id", "dflash_config.mask_token_id", "dspark_noise_token_id"};
  for (int i = 0; i < K3_DSPARK_N_FIELDS; i++) {
    const struct k3_dspark_field *field = &k3_dspark_fields[i];
    uint64_t *value = k3_dspark_member(model, field);
    const char *name = field->name;
    bool is_markov = value == &model->markov_rank, is_mask = value == &model->mask_token_id, is_depth = value == &model->target_n_layers;
    enum outcome outcome = is_markov ? read_u64(reader, markov_names, 2, value, &name)
                           : is_mask ? read_u64(reader, mask_names, 3, value, &name)
                                     : read_u64(reader, &field->name, 1, value, &name);
    if (outcome == ABSENT && value == &model->target_hidden_size) {
      *value = model->hidden_size;  // the fields come in the order of their names; the width of context_proj confirms it
      continue;
    }
    // Families other than k3_dspark store the target's depth under the name that k3_dspark uses for the number of taps.
    static const char *const depth_names[] = {"num_target_layers"};
    if (outcome == ABSENT && is_depth && reader->model_type[0] != '\0' && strcmp(reader->model_type, "k3_dspark") != 0)
      outcome = read_u64(reader, depth_names, 1, value, &name);
    if (outcome == ABSENT && value == &model->q_lora_rank && is_null(reader->config, "q_lora_rank"))
      REFUSE(reader, "q_lora_rank", "a rank", "null: queries are projected in one step");
    else if (outcome == ABSENT)
      CONTRADICTS(reader, field->name, "an integer", "the field is missing");
    else if (outcome == FOUND && (*value < field->min || *value > field->max))
      CONTRADICTS(reader, name, NULL, "%llu, allowed are %llu to %llu", (ull)*value, (ull)field->min, (ull)field->max);
    else if (outcome == FOUND)
      continue;
    *value = field->max;  // reported; the checks between fields find nothing in it
  }
  static const char *const draft_names[] = {"draft_vocab_size"};
  uint64_t draft_vocab_size = model->vocab_size;
  const char *name;
  if (read_u64(reader, draft_names, 1, &draft_vocab_size, &name) == FOUND && !reader->bad_input && draft_vocab_size != model->vocab_size)
    CONTRADICTS(reader, "draft_vocab_size", "the same as vocab_size", "%llu, but vocab_size is %llu", (ull)draft_vocab_size, (ull)model->vocab_size);
}

static void read_taps(struct reader *reader, struct k3_dspark_model *model) {
  static const char *const names[] = {"target_layer_ids", "dspark_target_layer_ids"};
  size_t n_taps = 0;
  bool found = false;
  const char *name = names[0];
  for (int i = 0; i < 2 && !found; i++) {
    struct k3_error error = {0};
    name = names[i];
    if (k3_config_u64_list(reader->config, name, model->target_layer_ids, K3_DSPARK_MAX_TAPS, &n_taps, &found, &error) != K3_OK) {
      add(reader, K3_ERROR, &error);
      return;
    }
  }
  if (!found && k3_config_kind_of(reader->config, "aux_hidden_state_layer_ids") != K3_CONFIG_ABSENT) {
    REFUSE(reader, "aux_hidden_state_layer_ids", "target_layer_ids, which count from 0",
           "the taps are given in another convention, which counts from 1");
    return;
  }
  if (!found || n_taps == 0) {
    CONTRADICTS(reader, found ? name : names[0], "a list of target layers", found ? "an empty list" : "the field is missing");
    return;
  }
  model->n_taps = n_taps;
  bool ascending = true;
  for (size_t i = 0; i < n_taps; i++) {
    uint64_t id = model->target_layer_ids[i];
    if (id >= model->target_n_layers)
      CONTRADICTS(reader, name, "0-based ids of target layers", "tap %llu, but the target has %llu layers", (ull)id, (ull)model->target_n_layers);
    for (size_t j = 0; j < i; j++) {
      if (id == model->target_layer_ids[j])
        CONTRADICTS(reader, name, "each layer once", "tap %llu occurs twice", (ull)id);
    }
    ascending &= i == 0 || id > model->target_layer_ids[i - 1];
  }
  if (!ascending)
    WARN(reader, name, "ascending order, which every known drafter has", "the taps are not in ascending order; their stored order is kept");
  static const char *const count_names[] = {"num_target_layers"};
  uint64_t count = n_taps;
  // Only for this type the field counts taps; elsewhere it is the target's depth. Nothing is ever sized by it.
  if (strcmp(reader->model_type, "k3_dspark") == 0 && read_u64(reader, count_names, 1, &count, &name) == FOUND && count != n_taps)
    CONTRADICTS(reader, "num_target_layers", "the number of taps", "%llu, but target_layer_ids has %zu entries", (ull)count, n_taps);
}

// ---- rotation ----

static bool is_kind(const char *type, const char *a, const char *b) {
  return strcmp(type, a) == 0 || strcmp(type, b) == 0;
}

static bool rope_real(struct reader *reader, const char *block, const char *name, double *value) {
  char path[128];
  snprintf(path, sizeof path, "%s.%s", block, name);
  return read_real(reader, path, value);
}

// sqrt of the softmax correction: 0.1 m ln(s) + 1.
static double yarn_gain(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

static void read_yarn(struct reader *reader, const char *block, struct k3_rope *rope) {
  char path[128];
  const char *const names[] = {path};
  const char *name;
  rope->yarn = true;
  if (!rope_real(reader, block, "factor", &rope->factor))
    CONTRADICTS(reader, "factor", "a number", "%s has no factor", block);
  snprintf(path, sizeof path, "%s.original_max_position_embeddings", block);
  if (read_u64(reader, names, 1, &rope->original_max_position, &name) == ABSENT)
    CONTRADICTS(reader, "original_max_position_embeddings", "an integer", "%s has no original_max_position_embeddings", block);
  rope_real(reader, block, "beta_fast", &rope->beta_fast);
  rope_real(reader, block, "beta_slow", &rope->beta_slow);
  rope_real(reader, block, "mscale", &rope->mscale);
  rope_real(reader, block, "mscale_all_dim", &rope->mscale_all_dim);

  bool scaling = true, truncate = true;
  snprintf(path, sizeof path, "%s.apply_yarn_scaling", block);
  read_bool(reader, path, &scaling);
  if (!scaling)
    REFUSE(reader, path, "true, or absent", "false: another scaling class than YaRN");
  snprintf(path, sizeof path, "%s.truncate", block);
  read_bool(reader, path, &truncate);
  if (!truncate)
    REFUSE(reader, path, "true, or absent", "false: the bounds of the ramp are not rounded");
  double attention = 0, amplitude = yarn_gain(rope->factor, rope->mscale) / yarn_gain(rope->factor, rope->mscale_all_dim);
  if (rope_real(reader, block, "attention_factor", &attention) && !(fabs(attention - amplitude) <= 1e-6 * amplitude)) {
    snprintf(path, sizeof path, "%s.attention_factor", block);
    REFUSE(reader, path, "absent, or g(mscale) / g(mscale_all_dim)", "an amplitude of the rotation that mscale does not give");
  }
}

// The block of rotary parameters: "rope_parameters" (newer) or "rope_scaling", NULL for none. Both may be there and then may not disagree.
static const char *rope_block(struct reader *reader) {
  static const char *const blocks[] = {"rope_parameters", "rope_scaling"};
  static const char *const numbers[] = {"factor",        "original_max_position_embeddings", "rope_theta", "beta_fast", "beta_slow", "mscale",
                                        "mscale_all_dim"};
  const char *block = NULL;
  int n_blocks = 0;
  for (int i = 1; i >= 0; i--) {
    enum k3_config_kind kind = k3_config_kind_of(reader->config, blocks[i]);
    if (kind == K3_CONFIG_OBJECT) {
      block = blocks[i];
      n_blocks++;
    } else if (kind != K3_CONFIG_ABSENT) {
      CONTRADICTS(reader, blocks[i], "an object", "not an object");
    }
  }
  for (size_t i = 0; n_blocks == 2 && i < sizeof numbers / sizeof numbers[0]; i++) {
    double values[2] = {0};
    bool found[2];
    for (int j = 0; j < 2; j++)
      found[j] = rope_real(reader, blocks[j], numbers[i], &values[j]);
    if (found[0] && found[1] && values[0] != values[1])
      CONTRADICTS(reader, numbers[i], "one value", "rope_parameters and rope_scaling disagree");
  }
  return block;
}

static void read_rope(struct reader *reader, struct k3_rope *rope) {
  *rope = (struct k3_rope){.factor = 1, .beta_fast = 32, .beta_slow = 1, .mscale = 1};
  const char *block = rope_block(reader);
  double outer = 0;
  bool has_outer = read_real(reader, "rope_theta", &outer), has_inner = block && rope_real(reader, block, "rope_theta", &rope->theta);
  if (!has_inner)
    rope->theta = outer;
  if (!has_inner && !has_outer)
    CONTRADICTS(reader, "rope_theta", "a number", "the field is missing");
  if (has_inner && has_outer && outer != rope->theta)
    WARN(reader, "rope_theta", "one value", "the outer value differs from the one in %s, which counts", block);
  if (!block)
    return;

  char path[2][64];
  snprintf(path[0], sizeof path[0], "%s.rope_type", block);
  snprintf(path[1], sizeof path[1], "%s.type", block);
  const char *older = read_string(reader, path[1], NULL), *type = read_string(reader, path[0], older ? older : "default");
  if (older && strcmp(older, type) != 0 && !(is_kind(older, "yarn", "deepseek_yarn") && is_kind(type, "yarn", "deepseek_yarn")))
    CONTRADICTS(reader, path[1], "the same as rope_type", "%s, but rope_type is %s", older, type);
  if (is_kind(type, "yarn", "deepseek_yarn"))
    read_yarn(reader, block, rope);
  else if (!is_kind(type, "default", "none"))
    REFUSE(reader, path[0], "yarn, deepseek_yarn, default or none", "rotary scaling of type %s", type);
  else if (rope_real(reader, block, "factor", &rope->factor) && rope->factor != 1)
    CONTRADICTS(reader, path[0], "a type that uses the factor", "the type is %s, but there is a factor", type);
}

// ---- the rest ----

static void read_block_width(struct reader *reader, uint64_t block_width, struct k3_dspark_model *model) {
  static const char *const names[] = {"block_size", "dspark_block_size", "dflash_config.block_size", "dflash_config.dspark_block_size"};
  const char *name = "block_size";
  model->block_width = 7;
  if (block_width == 0)
    read_u64(reader, names, 4, &model->block_width, &name);
  else
    model->block_width = block_width;  // whoever asks for a width need not care what the config says
  if (model->block_width < 1 || model->block_width > K3_DSPARK_MAX_BLOCK) {
    CONTRADICTS(reader, name, "1 to 1024", "a block of %llu rows", (ull)model->block_width);
    model->block_width = 1;
  }
}

static void read_causal(struct reader *reader, struct k3_dspark_model *model) {
  static const char *const names[] = {"dflash_config.causal", "dflash_config.is_causal", "full_attention_causal", "is_causal"};
  const char *first = NULL;
  for (int i = 0; i < 4; i++) {
    bool value = false;
    if (!read_bool(reader, names[i], &value))
      continue;
    if (first && value != model->causal)
      CONTRADICTS(reader, names[i], "one value under every spelling", "%s, but %s is %s", value ? "true" : "false", first, value ? "false" : "true");
    if (!first)
      model->causal = value;
    first = first ? first : names[i];
  }
}

enum k3_status k3_dspark_model_from_config(const struct k3_config *config, uint64_t block_width, struct k3_dspark_model *model,
                                           struct k3_findings *findings) {
  struct reader reader = {.config = config, .findings = findings};
  *model = (struct k3_dspark_model){.logit_scale = 1, .confidence_head = true, .confidence_with_markov = true};
  reader.model_type = read_string(&reader, "model_type", "");
  refuse_variants(&reader);
  read_geometry(&reader, model);
  read_taps(&reader, model);
  read_rope(&reader, &model->rope);
  read_block_width(&reader, block_width, model);
  read_causal(&reader, model);
  if (!read_real(&reader, "rms_norm_eps", &model->rms_norm_eps))
    CONTRADICTS(&reader, "rms_norm_eps", "a number", "the field is missing");
  read_real(&reader, "logit_scale", &model->logit_scale);
  read_bool(&reader, "fc_norm", &model->fc_norm);
  read_bool(&reader, "enable_confidence_head", &model->confidence_head);
  read_bool(&reader, "confidence_head_with_markov", &model->confidence_with_markov);
  const char *stream = read_string(&reader, "aux_hidden_stream", "prefix");
  if (is_kind(stream, "prefix", "attn_res"))
    snprintf(model->target_stream, sizeof model->target_stream, "%s", stream);
  else
    REFUSE(&reader, "aux_hidden_stream", "prefix or attn_res", "taps of the stream %s", stream);

  const char *name, *what;
  if (!reader.bad_input && !reader.unsupported && (what = k3_dspark_contradiction(model, &name)) != NULL)
    CONTRADICTS(&reader, name, NULL, "%s", what);
  return reader.no_memory ? K3_NO_MEMORY : reader.unsupported ? K3_UNSUPPORTED : reader.bad_input ? K3_BAD_INPUT : K3_OK;
}
