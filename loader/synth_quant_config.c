// The quantization config beside a quantised synthetic checkpoint.
#include <stdio.h>
#include <string.h>

#include "formats/json_write.h"
#include "loader/synth_parts.h"

// Linear layers that stay plain, by the last component of their names: what the config has to say of them.
static const char *const PLAIN[] = {"kv_b_proj", "lm_head", "markov_w2", "confidence_head.proj"};

static bool stays_plain(const struct k3_synth_list *list, const char *module) {
  size_t n = strlen(module);
  for (size_t i = 0; i < list->n_tensors; i++) {
    const char *name = list->tensors[i].name, *end = strrchr(name, '.');
    if (!list->tensors[i].matrix && end && strcmp(end, ".weight") == 0 && (size_t)(end - name) >= n && memcmp(end - n, module, n) == 0)
      return true;
  }
  return false;
}

static void put_plain(struct k3_jsonw *w, const char *key, const struct k3_synth_list *list, enum k3_synth_dialect dialect) {
  k3_jsonw_begin_array(w, key);
  for (size_t i = 0; i < sizeof PLAIN / sizeof PLAIN[0]; i++) {
    char text[128];
    if (!stays_plain(list, PLAIN[i]))
      continue;
    // Index-free in every dialect, so that a root or shifted layer numbers do not matter: a regular expression, a glob, a component.
    const char *dot = strrchr(PLAIN[i], '.');
    if (dialect == K3_SYNTH_COMPRESSED_TENSORS)
      snprintf(text, sizeof text, dot ? "re:.*%.*s\\.%s$" : "re:.*%.*s%s$", dot ? (int)(dot - PLAIN[i]) : 0, PLAIN[i], dot ? dot + 1 : PLAIN[i]);
    else
      snprintf(text, sizeof text, dialect == K3_SYNTH_MODELOPT ? "*%s" : "%s", PLAIN[i]);
    k3_jsonw_string(w, NULL, text);
  }
  k3_jsonw_end_array(w);
}

static void put_args(struct k3_jsonw *w, const char *key, unsigned bits, const char *strategy, unsigned group, bool block, const char *dynamic,
                     const char *scale_dtype) {
  k3_jsonw_begin_object(w, key);
  k3_jsonw_u64(w, "num_bits", bits);
  k3_jsonw_string(w, "type", "float");
  k3_jsonw_bool(w, "symmetric", true);
  k3_jsonw_string(w, "strategy", strategy);
  if (group > 0)
    k3_jsonw_u64(w, "group_size", group);
  if (block) {
    k3_jsonw_begin_array(w, "block_structure");
    k3_jsonw_u64(w, NULL, 128);
    k3_jsonw_u64(w, NULL, 128);
    k3_jsonw_end_array(w);
  }
  if (strcmp(dynamic, "local") == 0)
    k3_jsonw_string(w, "dynamic", dynamic);
  else
    k3_jsonw_bool(w, "dynamic", strcmp(dynamic, "true") == 0);
  if (scale_dtype)
    k3_jsonw_string(w, "scale_dtype", scale_dtype);
  k3_jsonw_end_object(w);
}

static void put_compressed_tensors(struct k3_jsonw *w, const struct k3_synth_list *list, enum k3_scheme scheme) {
  const char *format = scheme == K3_SCHEME_NVFP4   ? "nvfp4-pack-quantized"
                       : scheme == K3_SCHEME_MXFP4 ? "mxfp4-pack-quantized"
                       : scheme == K3_SCHEME_MXFP8 ? "mxfp8-quantized"
                                                   : "float-quantized";
  k3_jsonw_string(w, "quant_method", "compressed-tensors");
  k3_jsonw_string(w, "format", format);
  k3_jsonw_string(w, "quantization_status", "compressed");
  k3_jsonw_begin_object(w, "config_groups");
  k3_jsonw_begin_object(w, "group_0");
  k3_jsonw_begin_array(w, "targets");
  k3_jsonw_string(w, NULL, "Linear");
  k3_jsonw_end_array(w);
  switch (scheme) {
    case K3_SCHEME_NVFP4:
      put_args(w, "weights", 4, "tensor_group", 16, false, "false", "torch.float8_e4m3fn");
      put_args(w, "input_activations", 4, "tensor_group", 16, false, "local", "torch.float8_e4m3fn");
      break;
    case K3_SCHEME_MXFP4:
    case K3_SCHEME_MXFP8:
      put_args(w, "weights", scheme == K3_SCHEME_MXFP4 ? 4 : 8, "group", 32, false, "false", "torch.uint8");
      put_args(w, "input_activations", scheme == K3_SCHEME_MXFP4 ? 4 : 8, "group", 32, false, "true", "torch.uint8");
      break;
    case K3_SCHEME_FP8_BLOCK:
      put_args(w, "weights", 8, "block", 0, true, "false", NULL);
      put_args(w, "input_activations", 8, "group", 128, false, "true", NULL);
      break;
    case K3_SCHEME_FP8_CHANNEL:
      put_args(w, "weights", 8, "channel", 0, false, "false", NULL);
      put_args(w, "input_activations", 8, "token", 0, false, "true", NULL);
      break;
    default:
      put_args(w, "weights", 8, "tensor", 0, false, "false", NULL);
      put_args(w, "input_activations", 8, "tensor", 0, false, "false", NULL);
      break;
  }
  k3_jsonw_null(w, "output_activations");
  k3_jsonw_end_object(w);
  k3_jsonw_end_object(w);
  put_plain(w, "ignore", list, K3_SYNTH_COMPRESSED_TENSORS);
  k3_jsonw_null(w, "kv_cache_scheme");
}

static const char *modelopt_algo(enum k3_scheme scheme) {
  switch (scheme) {
    case K3_SCHEME_NVFP4: return "NVFP4";
    case K3_SCHEME_MXFP4: return "MXFP4";
    case K3_SCHEME_MXFP8: return "MXFP8";
    case K3_SCHEME_FP8_BLOCK: return "FP8_PB_WO";
    case K3_SCHEME_FP8_CHANNEL: return "FP8_PER_CHANNEL_PER_TOKEN";
    default: return "FP8";
  }
}

static void put_modelopt(struct k3_jsonw *w, const struct k3_synth_list *list, enum k3_scheme scheme, bool hf) {
  uint32_t group = k3_quant_scheme_default(scheme).block_rows == 1 ? k3_quant_scheme_default(scheme).block_cols : 0;
  if (!hf)
    k3_jsonw_string(w, "quant_method", "modelopt");
  k3_jsonw_string(w, "quant_algo", modelopt_algo(scheme));
  k3_jsonw_null(w, hf ? "kv_cache_quant_algo" : "kv_cache_scheme");
  if (group > 0)
    k3_jsonw_u64(w, "group_size", group);
  put_plain(w, hf ? "exclude_modules" : "ignore", list, K3_SYNTH_MODELOPT);
}

static void put_deepseek(struct k3_jsonw *w, const struct k3_synth_list *list, enum k3_scheme scheme) {
  k3_jsonw_string(w, "quant_method", scheme == K3_SCHEME_MXFP8 ? "mxfp8" : "fp8");
  if (scheme != K3_SCHEME_MXFP8) {
    k3_jsonw_string(w, "activation_scheme", "dynamic");
    k3_jsonw_string(w, "fmt", "e4m3");
  }
  if (scheme != K3_SCHEME_FP8_TENSOR) {
    k3_jsonw_begin_array(w, "weight_block_size");
    k3_jsonw_u64(w, NULL, scheme == K3_SCHEME_MXFP8 ? 1 : 128);
    k3_jsonw_u64(w, NULL, scheme == K3_SCHEME_MXFP8 ? 32 : 128);
    k3_jsonw_end_array(w);
  }
  put_plain(w, "modules_to_not_convert", list, K3_SYNTH_DEEPSEEK);
}

static char *take(struct k3_jsonw *w, struct k3_error *err) {
  char *text = NULL;
  if (k3_jsonw_finish(w, err) == K3_OK)
    text = k3_strndup(w->bytes, w->n_bytes, err);
  k3_jsonw_close(w);
  return text;
}

char *k3_synth_quant_config(char *config, const struct k3_synth_list *list, const struct k3_synth_options *options, char **hf_quant,
                            struct k3_error *err) {
  struct k3_jsonw w;
  *hf_quant = NULL;
  k3_jsonw_open(&w, true, NULL, NULL);
  k3_jsonw_begin_object(&w, NULL);
  k3_jsonw_begin_object(&w, "quantization_config");
  if (options->dialect == K3_SYNTH_MODELOPT)
    put_modelopt(&w, list, options->scheme, false);
  else if (options->dialect == K3_SYNTH_DEEPSEEK)
    put_deepseek(&w, list, options->scheme);
  else
    put_compressed_tensors(&w, list, options->scheme);
  k3_jsonw_end_object(&w);
  k3_jsonw_end_object(&w);
  char *object = take(&w, err), *whole = NULL;
  if (object && options->dialect == K3_SYNTH_MODELOPT) {
    k3_jsonw_open(&w, true, NULL, NULL);
    k3_jsonw_begin_object(&w, NULL);
    k3_jsonw_begin_object(&w, "producer");
    k3_jsonw_string(&w, "name", "modelopt");
    k3_jsonw_end_object(&w);
    k3_jsonw_begin_object(&w, "quantization");
    put_modelopt(&w, list, options->scheme, true);
    k3_jsonw_end_object(&w);
    k3_jsonw_end_object(&w);
    *hf_quant = take(&w, err);
  }
  // Two objects become one: the config without its closing brace, the other without its opening one.
  size_t n = strlen(config);
  while (n > 0 && config[n - 1] != '}')
    n--;
  for (n -= n > 0; n > 0 && strchr(" \n", config[n - 1]);)
    n--;
  if (object && (options->dialect != K3_SYNTH_MODELOPT || *hf_quant))
    whole = k3_asprintf(err, "%.*s,\n%s", (int)n, config, object + 2);
  k3_free(object);
  k3_free(config);
  return whole;
}
