#include "formats/quant_config_write.h"

#include <string.h>

#include "base/version.h"
#include "formats/json_tree.h"

// How a scheme reads in both dialects. Arguments of weights and inputs: number of bits, strategy, and what the strategy needs.
struct words {
  const char *scheme, *format;
  int n_bits, group;
  const char *strategy, *scale_dtype;
  const char *input_strategy;  // of dynamic scales; NULL: the inputs stay as they are
  int input_group;
  const char *algo, *stored_algo;  // of ModelOpt, without and with stored scales of the inputs; NULL: not said
};

static const struct words TABLE[] = {
    {"nvfp4", "nvfp4-pack-quantized", 4, 16, "tensor_group", "torch.float8_e4m3fn", NULL, 0, "W4A16_NVFP4", "NVFP4"},
    {"mxfp4", "mxfp4-pack-quantized", 4, 32, "group", "torch.uint8", NULL, 0, NULL, NULL},
    {"mxfp8", "mxfp8-quantized", 8, 32, "group", "torch.uint8", "group", 32, NULL, NULL},
    {"fp8-tensor", "float-quantized", 8, 0, "tensor", NULL, "token", 0, NULL, "FP8"},
    {"fp8-channel", "float-quantized", 8, 0, "channel", NULL, "token", 0, "FP8_PER_CHANNEL_PER_TOKEN", NULL},
    {"fp8-block", "float-quantized", 8, 0, "block", NULL, "group", 128, NULL, NULL},
};

static const struct words *find(const char *scheme) {
  for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
    if (strcmp(TABLE[i].scheme, scheme) == 0)
      return &TABLE[i];
  }
  return NULL;
}

bool k3_quant_statement_possible(enum k3_quant_dialect dialect, const char *scheme) {
  const struct words *words = find(scheme);
  return words && (dialect == K3_DIALECT_COMPRESSED_TENSORS || words->algo || words->stored_algo);
}

static const char *algo_of(const struct words *words, bool stored_inputs) {
  return (stored_inputs && words->stored_algo) || !words->algo ? words->stored_algo : words->algo;
}

// dynamic: 0 false, 1 true, 2 "local"
static void put_args(struct k3_jsonw *json, const char *key, const struct words *words, const char *strategy, int group, int dynamic) {
  k3_jsonw_begin_object(json, key);
  if (strcmp(strategy, "block") == 0) {
    k3_jsonw_begin_array(json, "block_structure");
    k3_jsonw_u64(json, NULL, 128);
    k3_jsonw_u64(json, NULL, 128);
    k3_jsonw_end_array(json);
  }
  if (dynamic == 2)
    k3_jsonw_string(json, "dynamic", "local");
  else
    k3_jsonw_bool(json, "dynamic", dynamic == 1);
  if (group > 0)
    k3_jsonw_u64(json, "group_size", (uint64_t)group);
  k3_jsonw_u64(json, "num_bits", (uint64_t)words->n_bits);
  if (words->scale_dtype && group == words->group)
    k3_jsonw_string(json, "scale_dtype", words->scale_dtype);
  k3_jsonw_string(json, "strategy", strategy);
  k3_jsonw_bool(json, "symmetric", true);
  k3_jsonw_string(json, "type", "float");
  k3_jsonw_end_object(json);
}

static void put_ignore(struct k3_jsonw *json, const char *key, const struct k3_quant_statement *statement) {
  k3_jsonw_begin_array(json, key);
  for (size_t i = 0; i < statement->n_ignore; i++)
    k3_jsonw_string(json, NULL, statement->ignore[i]);
  k3_jsonw_end_array(json);
}

static void put_producer(struct k3_jsonw *json) {
  k3_jsonw_begin_object(json, "producer");
  k3_jsonw_string(json, "name", "modelopt");  // engines take this for the name of the dialect
  k3_jsonw_string(json, "version", K3_TOOL);
  k3_jsonw_end_object(json);
}

static void put_groups(struct k3_jsonw *json, const struct k3_quant_statement *statement, const struct words *words) {
  bool compressed_tensors = statement->dialect == K3_DIALECT_COMPRESSED_TENSORS;
  k3_jsonw_begin_object(json, "config_groups");
  k3_jsonw_begin_object(json, "group_0");
  if (compressed_tensors)
    k3_jsonw_string(json, "format", words->format);
  if (statement->stored_inputs)
    put_args(json, "input_activations", words, words->strategy, words->group, words->group == 16 && compressed_tensors ? 2 : 0);
  else if (words->input_strategy && compressed_tensors)
    put_args(json, "input_activations", words, words->input_strategy, words->input_group, 1);
  else
    k3_jsonw_null(json, "input_activations");
  k3_jsonw_null(json, "output_activations");
  k3_jsonw_begin_array(json, "targets");
  k3_jsonw_string(json, NULL, "Linear");
  k3_jsonw_end_array(json);
  put_args(json, "weights", words, words->strategy, words->group, 0);
  k3_jsonw_end_object(json);
  k3_jsonw_end_object(json);
}

static void put_statement(struct k3_jsonw *json, const struct k3_quant_statement *statement) {
  const struct words *words = find(statement->scheme);
  bool modelopt = statement->dialect == K3_DIALECT_MODELOPT;
  k3_jsonw_begin_object(json, "quantization_config");
  put_groups(json, statement, words);
  if (!modelopt)
    k3_jsonw_string(json, "format", words->format);
  if (modelopt && words->group > 0)
    k3_jsonw_u64(json, "group_size", (uint64_t)words->group);
  put_ignore(json, "ignore", statement);
  k3_jsonw_null(json, "kv_cache_scheme");
  if (modelopt) {
    put_producer(json);
    k3_jsonw_string(json, "quant_algo", algo_of(words, statement->stored_inputs));
  }
  k3_jsonw_string(json, "quant_method", modelopt ? "modelopt" : "compressed-tensors");
  if (!modelopt)
    k3_jsonw_string(json, "quantization_status", "compressed");
  k3_jsonw_end_object(json);
}

// What is written over; the statement goes where the key's place is in the order.
static bool is_statement(const char *key) {
  return strcmp(key, "quantization_config") == 0 || strcmp(key, "compression_config") == 0;
}

static int compare_keys(const void *left, const void *right) {
  return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static void put_config(struct k3_jsonw *json, json_t *root, const struct k3_quant_statement *statement) {
  static const char own[] = "quantization_config";
  size_t n = 0, n_keys = json_object_size(root) + 1;
  const char **keys = k3_calloc(n_keys, sizeof *keys, &json->error), *key;
  json_t *value;
  if (!keys)
    return;
  json_object_foreach(root, key, value) {
    if (!is_statement(key))
      keys[n++] = key;
  }
  keys[n++] = own;
  qsort(keys, n, sizeof *keys, compare_keys);
  k3_jsonw_begin_object(json, NULL);
  for (size_t i = 0; i < n; i++) {
    value = json_object_get(root, keys[i]);
    if (keys[i] == own) {
      put_statement(json, statement);
      continue;
    }
    if (strcmp(keys[i], "text_config") == 0 && json_is_object(value)) {
      json_object_del(value, "quantization_config");
      json_object_del(value, "compression_config");
    }
    k3_json_tree_write(json, keys[i], value);
  }
  k3_jsonw_end_object(json);
  k3_free(keys);
}

char *k3_quant_config_text(const char *config, size_t nbytes, const struct k3_quant_statement *statement, struct k3_error *err) {
  json_t *root = NULL;
  if (config)
    k3_json_tree_parse(config, nbytes, K3_CFG19, "config.json", &root, err);
  else
    root = json_object();
  if (!root) {
    k3_fail_memory(err, 0);  // keeps an earlier failure
    return NULL;
  }
  struct k3_jsonw json;
  k3_jsonw_open(&json, true, NULL, NULL);
  put_config(&json, root, statement);
  json_decref(root);
  return k3_json_tree_take(&json, err);
}

char *k3_hf_quant_config_text(const struct k3_quant_statement *statement, struct k3_error *err) {
  const struct words *words = find(statement->scheme);
  struct k3_jsonw json;
  k3_jsonw_open(&json, true, NULL, NULL);
  k3_jsonw_begin_object(&json, NULL);
  put_producer(&json);
  k3_jsonw_begin_object(&json, "quantization");
  put_ignore(&json, "exclude_modules", statement);
  if (words->group > 0)
    k3_jsonw_u64(&json, "group_size", (uint64_t)words->group);
  else
    k3_jsonw_null(&json, "group_size");
  k3_jsonw_null(&json, "kv_cache_quant_algo");
  k3_jsonw_string(&json, "quant_algo", algo_of(words, statement->stored_inputs));
  k3_jsonw_end_object(&json);
  k3_jsonw_end_object(&json);
  return k3_json_tree_take(&json, err);
}
