// The quantization config of AMD's Quark: one config for all modules, others for modules that match a pattern, and what is left out.
#include <stdio.h>
#include <string.h>

#include "formats/quant_config_parts.h"

// MXFP4 only: what Quark's other types are stored as is not settled by the config alone.
static bool is_mxfp4(const json_t *weight) {
  return strcmp(k3_quant_text(weight, "dtype", ""), "fp4") == 0 && strcmp(k3_quant_text(weight, "qscheme", ""), "per_group") == 0 &&
         strcmp(k3_quant_text(weight, "scale_format", ""), "e8m0") == 0 && json_integer_value(json_object_get(weight, "group_size")) == 32;
}

// One config of modules; its pattern, or NULL for all that no other names. Absent weights: nothing is quantised.
static enum k3_status read_layer(struct k3_quant_reader *reader, const json_t *config, const char *key, const char *pattern) {
  static const char allowed[] = "dtype fp4, qscheme per_group, group_size 32, scale_format e8m0";
  const json_t *weight = json_object_get(config, "weight");
  if (!config || json_is_null(config) || (json_is_object(config) && (!weight || json_is_null(weight))))
    return K3_OK;
  if (!json_is_object(config) || !json_is_object(weight)) {
    k3_quant_complain(reader, K3_CFG20, key, "an object with \"weight\"", "%s%sa value of another kind", pattern ? pattern : "", pattern ? ": " : "");
    return K3_OK;
  }
  if (!is_mxfp4(weight)) {
    k3_quant_complain(reader, K3_CFG21, key, allowed, "%s%sQuark weights with dtype \"%s\", qscheme \"%s\", group_size %lld, scale_format \"%s\"",
                      pattern ? pattern : "", pattern ? ": " : "", k3_quant_text(weight, "dtype", "?"), k3_quant_text(weight, "qscheme", "?"),
                      (long long)json_integer_value(json_object_get(weight, "group_size")), k3_quant_text(weight, "scale_format", "?"));
    return K3_OK;
  }
  struct k3_quant_group *group = k3_quant_add_group(reader, pattern ? pattern : key);
  if (!group)
    return K3_NO_MEMORY;
  group->weights =
      (struct k3_quant_args){.num_bits = 4, .is_float = true, .symmetric = true, .strategy = K3_STRATEGY_GROUP, .group_size = 32, .e8m0 = true};
  return pattern ? k3_quant_add_entry(reader, &group->targets, pattern, K3_ENTRY_GLOB) : K3_OK;
}

// Names and globs; a text that begins with "re:" is a regular expression, as engines take it.
static enum k3_status read_exclude(struct k3_quant_reader *reader, const json_t *list) {
  if (list && !json_is_null(list) && !json_is_array(list))
    k3_quant_complain(reader, K3_CFG20, "exclude", "a list of texts", "no list");
  for (size_t i = 0; i < json_array_size(list); i++) {
    const char *text = json_string_value(json_array_get(list, i));
    if (!text)
      k3_quant_complain(reader, K3_CFG20, "exclude", "a list of texts", "entry %zu is no text", i);
    else
      K3_TRY(k3_quant_add_entry(reader, &reader->quant->ignore, text,
                                strpbrk(text, "*?[") && strncmp(text, "re:", 3) != 0 ? K3_ENTRY_GLOB : K3_ENTRY_COMPRESSED_TENSORS));
  }
  return K3_OK;
}

// Rotations that an engine has to undo in the activations.
static void check_algorithms(struct k3_quant_reader *reader, const json_t *algorithms) {
  const json_t *one = json_is_object(algorithms) ? algorithms : json_array_get(algorithms, 0);
  for (size_t i = 0; one; one = json_array_get(algorithms, ++i)) {
    const char *name = k3_quant_text(one, "name", "");
    if (strcmp(name, "rotation") == 0 || strcmp(name, "quarot") == 0)
      k3_quant_complain(reader, K3_CFG21, "algo_config", "weights as the model has them", "rotated weights (%s) are not supported", name);
  }
}

enum k3_status k3_quant_read_quark(struct k3_quant_reader *reader, const json_t *object) {
  const json_t *layers = json_object_get(object, "layer_quant_config"), *types = json_object_get(object, "layer_type_quant_config");
  const json_t *kv = json_object_get(object, "kv_cache_quant_config"), *config;
  const char *format = k3_quant_text(json_object_get(object, "export"), "weight_format", "real_quantized"), *pattern;
  if (strcmp(format, "real_quantized") != 0)
    k3_quant_complain(reader, K3_CFG21, "export.weight_format", "real_quantized", "weights in the format \"%s\" are not supported", format);
  check_algorithms(reader, json_object_get(object, "algo_config"));
  if (json_object_size(types) > 0)
    k3_quant_complain(reader, K3_CFG21, "layer_type_quant_config", "none", "configs by the type of a layer are not supported");
  reader->quant->kv_scheme = json_object_size(kv) > 0;
  if (layers && !json_is_null(layers) && !json_is_object(layers))
    k3_quant_complain(reader, K3_CFG20, "layer_quant_config", "an object", "a value of another kind");
  K3_TRY(read_layer(reader, json_object_get(object, "global_quant_config"), "global_quant_config", NULL));
  json_object_foreach((json_t *)(uintptr_t)layers, pattern, config) K3_TRY(read_layer(reader, config, "layer_quant_config", pattern));
  return read_exclude(reader, json_object_get(object, "exclude"));
}
