// The quantization configs of ModelOpt, and the short ones of "fp8", "mxfp4" and "mxfp8".
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "formats/quant_config_parts.h"

#define F8(how) \
  { .num_bits = 8, .is_float = true, .symmetric = true, .strategy = how }
#define NONE \
  { .num_bits = 0 }
#define NVFP4 \
  { .num_bits = 4, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_TENSOR_GROUP, .group_size = 16 }
static const struct {
  const char *algo;
  struct k3_quant_args weights, inputs;
  const char *refused;  // why it is not supported, or NULL
} ALGOS[] = {
    {"NVFP4", NVFP4, NVFP4, NULL},
    {"W4A16_NVFP4", NVFP4, NONE, NULL},
    {"W4A8_NVFP4_FP8", NVFP4, F8(K3_STRATEGY_TENSOR), NULL},
    {"FP8", F8(K3_STRATEGY_TENSOR), F8(K3_STRATEGY_TENSOR), NULL},
    {"FP8_PER_CHANNEL_PER_TOKEN", F8(K3_STRATEGY_CHANNEL), NONE, NULL},
    {"FP8_PB_WO",
     {.num_bits = 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_BLOCK, .block_rows = 128, .block_cols = 128},
     NONE,
     NULL},
    {"MXFP8", {.num_bits = 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true}, NONE, NULL},
    {"MXFP4", {.num_bits = 4, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true}, NONE, NULL},
    {"NVFP4_AWQ", NONE, NONE, "AWQ scales (pre_quant_scale) multiply the activations"},
    {"NVFP4_SVD", NONE, NONE, "a low-rank correction stands beside every weight"},
    {"W4A16_AWQ", NONE, NONE, "AWQ weights in ModelOpt's own layout"},
    {"W4A8_AWQ", NONE, NONE, "AWQ weights in ModelOpt's own layout"},
    {"W8A16", NONE, NONE, "INT8 weights in ModelOpt's own layout"},
    {"INT8_SQ", NONE, NONE, "SmoothQuant scales multiply the activations"},
    {"W8A8_SQ_PER_CHANNEL", NONE, NONE, "SmoothQuant scales multiply the activations"},
    {"W4A8_MXFP4_FP8", NONE, NONE, "activation scales of another kind than its weights"},
};

// Fills a group's arguments from an algorithm's name. False after a complaint.
static bool read_algo(struct k3_quant_reader *reader, const char *algo, const char *where, struct k3_quant_group *group) {
  for (size_t i = 0; i < sizeof ALGOS / sizeof ALGOS[0]; i++) {
    if (strcasecmp(ALGOS[i].algo, algo) != 0)
      continue;
    if (ALGOS[i].refused) {
      k3_quant_complain(reader, K3_CFG21, where, "an algorithm without factors beside the weights", "%s is not supported: %s", algo,
                        ALGOS[i].refused);
      return false;
    }
    group->weights = ALGOS[i].weights;
    group->inputs = ALGOS[i].inputs;
    return true;
  }
  k3_quant_complain(reader, K3_CFG11, where, "an algorithm of ModelOpt", "the algorithm \"%s\"", algo);
  return false;
}

static bool check_group_size(struct k3_quant_reader *reader, const json_t *object, const char *where, const struct k3_quant_group *group) {
  const json_t *size = json_object_get(object, "group_size");
  if (!json_is_integer(size) || group->weights.group_size == 0 || json_integer_value(size) == (json_int_t)group->weights.group_size)
    return true;
  k3_quant_complain(reader, K3_CFG11, where, "the group of the algorithm", "group_size %lld with algorithm %s, whose groups have %u weights",
                    (long long)json_integer_value(size), group->name, group->weights.group_size);
  return false;
}

// One group for every algorithm that occurs; each named layer is a target of it.
static enum k3_status read_layers(struct k3_quant_reader *reader, const json_t *layers) {
  const char *name;
  json_t *layer;
  // An early sample nests the map once more.
  if (json_is_object(json_object_get(layers, "quantized_layers")))
    layers = json_object_get(layers, "quantized_layers");
  json_object_foreach((json_t *)(uintptr_t)layers, name, layer) {
    const char *algo = k3_quant_text(layer, "quant_algo", NULL);
    struct k3_quant_group *group = NULL;
    if (!algo) {
      k3_quant_complain(reader, K3_CFG13, name, "{\"quant_algo\": ...}", "an entry of quantized_layers without algorithm");
      continue;
    }
    for (size_t g = 0; g < reader->quant->n_groups && !group; g++)
      group = strcasecmp(reader->quant->groups[g].name, algo) == 0 ? &reader->quant->groups[g] : NULL;
    if (!group && !(group = k3_quant_add_group(reader, algo)))
      return K3_NO_MEMORY;
    if (group->weights.num_bits == 0 && !read_algo(reader, algo, name, group))
      continue;
    check_group_size(reader, layer, name, group);
    K3_TRY(k3_quant_add_entry(reader, &group->targets, name, K3_ENTRY_TREE));
  }
  return K3_OK;
}

enum k3_status k3_quant_read_modelopt(struct k3_quant_reader *reader, const json_t *object, bool hf) {
  struct k3_quant_config *quant = reader->quant;
  const char *wanted = hf ? "exclude_modules" : "ignore", *other = hf ? "ignore" : "exclude_modules";
  const char *algo = k3_quant_text(object, "quant_algo", NULL);
  const json_t *layers = json_object_get(object, "quantized_layers"), *kv = json_object_get(object, hf ? "kv_cache_quant_algo" : "kv_cache_scheme");
  if (json_object_get(object, other))
    k3_quant_complain(reader, K3_CFG06, other, wanted, "a key of %s in %s", hf ? "config.json" : "hf_quant_config.json",
                      hf ? "hf_quant_config.json" : "config.json");
  K3_TRY(k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, wanted), wanted, K3_ENTRY_GLOB));
  K3_TRY(k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, other), other, K3_ENTRY_GLOB));
  K3_TRY(
      k3_quant_add_entries(reader, &quant->ignore, json_object_get(object, "modules_to_not_convert"), "modules_to_not_convert", K3_ENTRY_COMPONENTS));
  quant->kv_scheme = kv && !json_is_null(kv) && !(json_is_string(kv) && json_string_value(kv)[0] == '\0');
  if (json_is_true(json_object_get(object, "pre_quant_scale")))
    k3_quant_complain(reader, K3_CFG21, "pre_quant_scale", "weights without AWQ scales", "AWQ scales (pre_quant_scale) are not supported");
  if (algo && strcasecmp(algo, "MIXED_PRECISION") == 0) {
    quant->mixed = true;
    if (!json_is_object(layers) || json_object_size(layers) == 0) {
      k3_quant_complain(reader, K3_CFG13, "quantized_layers", "the algorithm of every quantised layer",
                        "MIXED_PRECISION without quantized_layers (a W4AFP8 file, or an incomplete export)");
      return K3_OK;
    }
    return read_layers(reader, layers);
  }
  if (!algo && !hf && json_object_get(object, "config_groups"))
    return k3_quant_read_groups(reader, json_object_get(object, "config_groups"));
  if (!algo) {
    k3_quant_complain(reader, K3_CFG20, "quant_algo", "the name of an algorithm", "the field is missing");
    return K3_OK;
  }
  struct k3_quant_group *group = k3_quant_add_group(reader, algo);
  if (!group)
    return K3_NO_MEMORY;
  if (read_algo(reader, algo, "quant_algo", group))
    check_group_size(reader, object, "group_size", group);
  return K3_OK;
}

static enum k3_status read_skipped(struct k3_quant_reader *reader, const json_t *object) {
  static const char *const keys[] = {"modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"};
  for (int i = 0; i < 4; i++)
    K3_TRY(k3_quant_add_entries(reader, &reader->quant->ignore, json_object_get(object, keys[i]), keys[i],
                                i == 3 ? K3_ENTRY_GLOB : K3_ENTRY_COMPONENTS));
  return K3_OK;
}

enum k3_status k3_quant_read_fp8(struct k3_quant_reader *reader, const json_t *object) {
  struct k3_quant_config *quant = reader->quant;
  const json_t *block = json_object_get(object, "weight_block_size");
  const char *format = k3_quant_text(object, "fmt", "e4m3"), *activations = k3_quant_text(object, "activation_scheme", "dynamic");
  quant->ue8m0 = strcmp(k3_quant_text(object, "scale_fmt", ""), "ue8m0") == 0;
  if (strcmp(k3_quant_text(object, "expert_dtype", ""), "fp4") == 0)
    k3_quant_complain(reader, K3_CFG21, "expert_dtype", "experts of the same format", "DeepSeek-V4 experts (packed FP4 in I8) are not supported");
  if (strcmp(format, "e4m3") != 0)
    k3_quant_complain(reader, K3_CFG21, "fmt", "e4m3", "FP8 weights in the format \"%s\" are not supported", format);
  struct k3_quant_group *group = k3_quant_add_group(reader, "fp8");
  if (!group)
    return K3_NO_MEMORY;
  group->weights = (struct k3_quant_args){.num_bits = 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_TENSOR};
  if (strcmp(activations, "static") == 0)
    group->inputs = group->weights;
  if (block && !json_is_null(block)) {
    json_int_t rows = json_integer_value(json_array_get(block, 0)), cols = json_integer_value(json_array_get(block, 1));
    if (!json_is_array(block) || json_array_size(block) != 2 || rows < 1 || cols < 1 || rows > 1 << 20 || cols > 1 << 20) {
      k3_quant_complain(reader, K3_CFG11, "weight_block_size", "[128, 128]", "no pair of numbers above 0");
    } else if (rows == 1) {
      group->weights.strategy = K3_STRATEGY_GROUP;
      group->weights.group_size = (uint32_t)cols;
      group->weights.e8m0 = cols == 32;
    } else {
      group->weights.strategy = K3_STRATEGY_BLOCK;
      group->weights.block_rows = (uint32_t)rows;
      group->weights.block_cols = (uint32_t)cols;
    }
  }
  return read_skipped(reader, object);
}

enum k3_status k3_quant_read_mx(struct k3_quant_reader *reader, const json_t *object) {
  bool fp4 = strcmp(reader->quant->method, "mxfp4") == 0;
  struct k3_quant_group *group = k3_quant_add_group(reader, reader->quant->method);
  if (!group)
    return K3_NO_MEMORY;
  group->weights = (struct k3_quant_args){
      .num_bits = fp4 ? 4 : 8, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true};
  const json_t *block = json_object_get(object, "weight_block_size");
  if (json_is_array(block) && !(json_integer_value(json_array_get(block, 0)) == 1 && json_integer_value(json_array_get(block, 1)) == 32))
    k3_quant_complain(reader, K3_CFG11, "weight_block_size", "[1, 32]", "another block than MX formats have");
  return read_skipped(reader, object);
}
