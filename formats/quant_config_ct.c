// The quantization config of compressed-tensors: groups of targets with their arguments, presets, and what contradicts itself in them.
#include <stdio.h>
#include <string.h>

#include "formats/quant_config_parts.h"

// Preset names that may stand for a scheme, with a list of targets as value.
struct preset {
  const char *name;
  struct k3_quant_args weights, inputs;
};
#define NVFP4_WEIGHTS \
  { .num_bits = 4, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_TENSOR_GROUP, .group_size = 16 }
#define NVFP4_INPUTS \
  { .num_bits = 4, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_TENSOR_GROUP, .group_size = 16, .local = true }
#define MX(bits) \
  { .num_bits = bits, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true }
#define MX_INPUTS(bits) \
  { .num_bits = bits, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true, .dynamic = true }
#define FLAT(bits, floating, how) \
  { .num_bits = bits, .is_float = floating, .symmetric = true, .strategy = how }
#define FLAT_DYNAMIC(bits, floating, how) \
  { .num_bits = bits, .is_float = floating, .symmetric = true, .strategy = how, .dynamic = true }
#define GROUPED(bits, even) \
  { .num_bits = bits, .symmetric = even, .strategy = K3_STRATEGY_GROUP, .group_size = 128 }
static const struct preset PRESETS[] = {
    {"NVFP4", NVFP4_WEIGHTS, NVFP4_INPUTS},
    {"NVFP4A16", NVFP4_WEIGHTS, {0}},
    {"MXFP4", MX(4), MX_INPUTS(4)},
    {"MXFP4A16", MX(4), {0}},
    {"MXFP8", MX(8), MX_INPUTS(8)},
    {"FP8", FLAT(8, true, K3_STRATEGY_TENSOR), FLAT(8, true, K3_STRATEGY_TENSOR)},
    {"FP8_DYNAMIC", FLAT(8, true, K3_STRATEGY_CHANNEL), FLAT_DYNAMIC(8, true, K3_STRATEGY_TOKEN)},
    {"FP8_BLOCK",
     {.num_bits = 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_BLOCK, .block_rows = 128, .block_cols = 128},
     {.num_bits = 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 128, .dynamic = true}},
    {"W8A8", FLAT(8, false, K3_STRATEGY_CHANNEL), FLAT_DYNAMIC(8, false, K3_STRATEGY_TOKEN)},
    {"INT8", FLAT(8, false, K3_STRATEGY_CHANNEL), FLAT_DYNAMIC(8, false, K3_STRATEGY_TOKEN)},
    {"W4A16", GROUPED(4, true), {0}},
    {"W4A16_ASYM", GROUPED(4, false), {0}},
    {"W8A16", FLAT(8, false, K3_STRATEGY_CHANNEL), {0}},
    {"W4AFP8", GROUPED(4, true), FLAT_DYNAMIC(8, true, K3_STRATEGY_TOKEN)},
};

static const char *const FORMATS[] = {"dense",          "int-quantized",        "float-quantized",      "naive-quantized",
                                      "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
                                      "mixed-precision"};
static const char *const REFUSED_FORMATS[] = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24", "sparse-24"};

static bool one_of(const char *text, const char *const *list, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (strcmp(list[i], text) == 0)
      return true;
  }
  return false;
}
#define ONE_OF(text, list) one_of(text, list, sizeof(list) / sizeof(list)[0])

static bool check_keys(struct k3_quant_reader *reader, const json_t *object, const char *where, const char *const *known, size_t n_known) {
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)(uintptr_t)object, key, value) {
    if (!one_of(key, known, n_known)) {
      k3_quant_complain(reader, K3_CFG11, where, "the keys that compressed-tensors knows", "the key \"%s\", which the library rejects", key);
      return false;
    }
  }
  return true;
}

static bool read_u32(struct k3_quant_reader *reader, const char *where, const char *key, const json_t *value, uint32_t max, uint32_t *result) {
  if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > (json_int_t)max) {
    k3_quant_complain(reader, K3_CFG11, where, "a number in its range", "%s is no number from 0 to %u", key, max);
    return false;
  }
  *result = (uint32_t)json_integer_value(value);
  return true;
}

static bool read_block(struct k3_quant_reader *reader, const char *where, const json_t *value, struct k3_quant_args *args) {
  unsigned rows = 0, cols = 0;
  char behind;
  if (json_is_array(value) && json_array_size(value) == 2)
    return read_u32(reader, where, "block_structure", json_array_get(value, 0), 1 << 20, &args->block_rows) &&
           read_u32(reader, where, "block_structure", json_array_get(value, 1), 1 << 20, &args->block_cols);
  if (json_is_string(value) && strlen(json_string_value(value)) < 16 && sscanf(json_string_value(value), "%ux%u%c", &rows, &cols, &behind) == 2) {
    args->block_rows = rows;
    args->block_cols = cols;
    return true;
  }
  k3_quant_complain(reader, K3_CFG11, where, "[128, 128]", "a block_structure that is no pair of numbers");
  return false;
}

// The arguments of weights or activations; null and absent leave *args empty.
static bool read_args(struct k3_quant_reader *reader, const json_t *object, const char *where, struct k3_quant_args *args) {
  static const char *const known[] = {"num_bits", "type",     "symmetric",   "strategy", "group_size", "block_structure",
                                      "dynamic",  "actorder", "scale_dtype", "zp_dtype", "observer",   "observer_kwargs"};
  static const char *const strategies[] = {"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"};
  if (!object || json_is_null(object))
    return true;
  if (!json_is_object(object)) {
    k3_quant_complain(reader, K3_CFG11, where, "an object or null", "a value of another kind");
    return false;
  }
  if (!check_keys(reader, object, where, known, sizeof known / sizeof known[0]))
    return false;
  *args = (struct k3_quant_args){.num_bits = 8, .symmetric = true};
  uint32_t number;
  const json_t *value = json_object_get(object, "num_bits");
  if (value) {
    if (!read_u32(reader, where, "num_bits", value, 16, &number))
      return false;
    args->num_bits = (uint8_t)number;
  }
  args->is_float = strcmp(k3_quant_text(object, "type", "int"), "float") == 0;
  value = json_object_get(object, "symmetric");
  args->symmetric = !json_is_false(value);
  value = json_object_get(object, "dynamic");
  args->local = json_is_string(value) && strcmp(json_string_value(value), "local") == 0;
  args->dynamic = json_is_true(value);
  args->e8m0 = strstr(k3_quant_text(object, "scale_dtype", ""), "uint8") || strstr(k3_quant_text(object, "scale_dtype", ""), "e8m0");
  value = json_object_get(object, "group_size");
  bool whole_rows = json_is_integer(value) && json_integer_value(value) == -1;
  if (value && !json_is_null(value) && !whole_rows && !read_u32(reader, where, "group_size", value, 1 << 20, &args->group_size))
    return false;
  args->strategy = args->group_size > 0 ? K3_STRATEGY_GROUP : whole_rows ? K3_STRATEGY_CHANNEL : K3_STRATEGY_TENSOR;
  value = json_object_get(object, "strategy");
  if (value && !json_is_null(value)) {
    size_t s = 0;
    const char *text = json_is_string(value) ? json_string_value(value) : "";
    while (s < 7 && strcmp(strategies[s], text) != 0)
      s++;
    if (s == 7) {
      k3_quant_complain(reader, K3_CFG11, where, "tensor, channel, group, block, token, tensor_group, attn_head", "the strategy \"%s\"", text);
      return false;
    }
    args->strategy = (uint8_t)s;
  }
  value = json_object_get(object, "block_structure");
  if (value && !json_is_null(value) && !read_block(reader, where, value, args))
    return false;
  bool grouped = args->strategy == K3_STRATEGY_GROUP || args->strategy == K3_STRATEGY_TENSOR_GROUP;
  if (grouped && args->group_size == 0)
    k3_quant_complain(reader, K3_CFG11, where, "a group_size above 0", "a strategy of groups without group_size");
  else if (!grouped && args->group_size > 0 && args->strategy != K3_STRATEGY_TOKEN)
    k3_quant_complain(reader, K3_CFG11, where, "no group_size, or a strategy of groups", "group_size %u with strategy %s", args->group_size,
                      strategies[args->strategy]);
  else if (args->strategy == K3_STRATEGY_BLOCK && (args->block_rows == 0 || args->block_cols == 0))
    k3_quant_complain(reader, K3_CFG11, where, "block_structure [rows, columns]", "strategy block without block_structure");
  else if (args->strategy == K3_STRATEGY_TOKEN && !args->dynamic)
    k3_quant_complain(reader, K3_CFG11, where, "dynamic true", "strategy token with stored scales");
  else
    return true;
  return false;
}

// The formats that arguments can be stored in.
static bool format_fits(const char *format, const struct k3_quant_args *w) {
  bool grouped_32 = w->strategy == K3_STRATEGY_GROUP && w->group_size == 32;
  if (strcmp(format, "nvfp4-pack-quantized") == 0)
    return w->is_float && w->num_bits == 4 && w->strategy == K3_STRATEGY_TENSOR_GROUP && w->group_size == 16;
  if (strcmp(format, "mxfp4-pack-quantized") == 0)
    return w->is_float && w->num_bits == 4 && grouped_32;
  if (strcmp(format, "mxfp8-quantized") == 0)
    return w->is_float && w->num_bits == 8 && grouped_32;
  if (strcmp(format, "float-quantized") == 0)
    return w->is_float && w->num_bits == 8;
  if (strcmp(format, "naive-quantized") == 0)
    return w->num_bits == 8;
  if (strcmp(format, "int-quantized") == 0)
    return !w->is_float && w->num_bits <= 8;
  if (strcmp(format, "pack-quantized") == 0)
    return !w->is_float && w->num_bits >= 2 && w->num_bits <= 8;
  return strcmp(format, "dense") == 0 && w->num_bits == 0;
}

// Whether quant/ has a scheme for these weights at all.
static bool known_weights(const struct k3_quant_args *w) {
  if (w->is_float && w->num_bits == 4)
    return w->symmetric &&
           ((w->strategy == K3_STRATEGY_TENSOR_GROUP && w->group_size == 16) || (w->strategy == K3_STRATEGY_GROUP && w->group_size == 32));
  if (w->is_float)
    return w->symmetric && w->num_bits == 8 && w->strategy != K3_STRATEGY_TOKEN && w->strategy != K3_STRATEGY_ATTN_HEAD &&
           w->strategy != K3_STRATEGY_TENSOR_GROUP;
  return w->num_bits >= 2 && w->num_bits <= 8 &&
         (w->strategy == K3_STRATEGY_GROUP || w->strategy == K3_STRATEGY_CHANNEL || w->strategy == K3_STRATEGY_TENSOR);
}

static void check_group(struct k3_quant_reader *reader, const struct k3_quant_group *group, const char *where) {
  const struct k3_quant_args *w = &group->weights;
  const char *format = group->format ? group->format : reader->quant->format;
  char text[160];
  if (w->num_bits == 0)
    return;
  if (!known_weights(w))
    k3_quant_complain(reader, K3_CFG11, where, "float 4 or 8 bits, or int 2 to 8 bits, symmetric when float", "weights of %s",
                      k3_quant_args_text(w, text, sizeof text));
  else if (format && ONE_OF(format, FORMATS) && strcmp(format, "mixed-precision") != 0 && !format_fits(format, w))
    k3_quant_complain(reader, K3_CFG11, where, "arguments of that format", "format %s with weights of %s", format,
                      k3_quant_args_text(w, text, sizeof text));
}

static enum k3_status read_preset(struct k3_quant_reader *reader, const char *name, const json_t *targets) {
  for (size_t i = 0; i < sizeof PRESETS / sizeof PRESETS[0]; i++) {
    if (strcmp(PRESETS[i].name, name) != 0)
      continue;
    struct k3_quant_group *group = k3_quant_add_group(reader, name);
    if (!group)
      return K3_NO_MEMORY;
    group->weights = PRESETS[i].weights;
    group->inputs = PRESETS[i].inputs;
    check_group(reader, group, name);
    return k3_quant_add_entries(reader, &group->targets, targets, name, K3_ENTRY_COMPRESSED_TENSORS);
  }
  k3_quant_complain(reader, K3_CFG11, name, "NVFP4, MXFP4, MXFP8, FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8, W4A16, ...", "no preset has this name");
  return K3_OK;
}

static enum k3_status read_group(struct k3_quant_reader *reader, const char *name, const json_t *object) {
  static const char *const known[] = {"targets", "weights", "input_activations", "output_activations", "format"};
  if (json_is_array(object))
    return read_preset(reader, name, object);
  if (!json_is_object(object)) {
    k3_quant_complain(reader, K3_CFG11, name, "a scheme, or a preset's list of targets", "a value of another kind");
    return K3_OK;
  }
  if (!check_keys(reader, object, name, known, sizeof known / sizeof known[0]))
    return K3_OK;
  struct k3_quant_group *group = k3_quant_add_group(reader, name);
  if (!group)
    return K3_NO_MEMORY;
  const char *format = k3_quant_text(object, "format", NULL);
  if (format && !(group->format = k3_quant_keep(reader, format)))
    return K3_NO_MEMORY;
  if (format && ONE_OF(format, REFUSED_FORMATS))
    k3_quant_complain(reader, K3_CFG21, name, "a dense format", "the sparse format %s is not supported", format);
  else if (format && (!ONE_OF(format, FORMATS) || strcmp(format, "mixed-precision") == 0))
    k3_quant_complain(reader, K3_CFG11, name, "a format that compressed-tensors has for one group", "the format \"%s\"", format);
  else if (read_args(reader, json_object_get(object, "weights"), name, &group->weights) &&
           read_args(reader, json_object_get(object, "input_activations"), name, &group->inputs))
    check_group(reader, group, name);
  return k3_quant_add_entries(reader, &group->targets, json_object_get(object, "targets"), name, K3_ENTRY_COMPRESSED_TENSORS);
}

enum k3_status k3_quant_read_groups(struct k3_quant_reader *reader, const json_t *groups) {
  const char *name;
  json_t *value;
  if (!json_is_object(groups)) {
    k3_quant_complain(reader, K3_CFG20, "config_groups", "an object", "the field is missing or of another kind");
    return K3_OK;
  }
  json_object_foreach((json_t *)(uintptr_t)groups, name, value) K3_TRY(read_group(reader, name, value));
  return K3_OK;
}

static bool is_filled(const json_t *object) {
  return json_is_object(object) ? json_object_size(object) > 0 : json_is_array(object) ? json_array_size(object) > 0 : false;
}

enum k3_status k3_quant_read_compressed_tensors(struct k3_quant_reader *reader, const json_t *object) {
  struct k3_quant_config *quant = reader->quant;
  const json_t *sparsity = json_object_get(object, "sparsity_config");
  const char *format = k3_quant_text(object, "format", NULL), *sparse = k3_quant_text(sparsity, "format", "");
  if (format && !(quant->format = k3_quant_keep(reader, format)))
    return K3_NO_MEMORY;
  if ((is_filled(sparsity) && strcmp(sparse, "dense") != 0) || (format && ONE_OF(format, REFUSED_FORMATS)))
    k3_quant_complain(reader, K3_CFG21, "sparsity_config", "dense weights", "sparse weights (%s) are not supported",
                      sparse[0] ? sparse
                      : format  ? format
                                : "?");
  if (is_filled(json_object_get(object, "transform_config")))
    k3_quant_complain(reader, K3_CFG21, "transform_config", "weights without a rotation",
                      "rotated weights are not supported: the image cannot express the transform");
  if (!reader->usable)
    return K3_OK;
  if (format && !ONE_OF(format, FORMATS))
    k3_quant_complain(reader, K3_CFG11, "format", "a format of compressed-tensors", "the format \"%s\"", format);
  if (json_object_get(object, "exclude_modules"))
    k3_quant_complain(reader, K3_CFG06, "exclude_modules", "ignore", "a key of hf_quant_config.json in config.json");
  quant->mixed = format && strcmp(format, "mixed-precision") == 0;
  quant->kv_scheme = json_is_object(json_object_get(object, "kv_cache_scheme"));
  K3_TRY(k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, "exclude_modules"), "exclude_modules", K3_ENTRY_GLOB));
  K3_TRY(
      k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, "modules_to_not_convert"), "modules_to_not_convert", K3_ENTRY_COMPONENTS));
  K3_TRY(k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, "ignore"), "ignore", K3_ENTRY_COMPRESSED_TENSORS));
  if (quant->mixed && json_is_object(json_object_get(object, "config_groups"))) {
    const char *name;
    json_t *group;
    json_object_foreach(json_object_get(object, "config_groups"), name, group) {
      if (json_is_object(group) && !k3_quant_text(group, "format", NULL))
        k3_quant_complain(reader, K3_CFG11, name, "a format for every group of a mixed-precision config", "a group without format");
    }
  }
  return k3_quant_read_groups(reader, json_object_get(object, "config_groups"));
}
