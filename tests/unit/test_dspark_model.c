// The drafter's geometry: out of config.json, every contradiction and every other variant refused, and through the manifest and back.
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "comma_locale.h"
#include "formats/dspark_model.h"
#include "unit.h"

// The complete config.json of Inferact/Kimi-K3-DSpark.
static const char published[] =
    "{\"architectures\": [\"K3DSparkModel\"], \"model_type\": \"k3_dspark\", \"hidden_size\": 7168, \"intermediate_size\": 14336,"
    " \"num_hidden_layers\": 5, \"num_attention_heads\": 64, \"num_key_value_heads\": 64, \"q_lora_rank\": 1536, \"kv_lora_rank\": 512,"
    " \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"mla_use_nope\": false, \"mla_use_output_gate\": false,"
    " \"vocab_size\": 163840, \"draft_vocab_size\": 163840, \"rms_norm_eps\": 1e-05, \"max_position_embeddings\": 1048576,"
    " \"rope_theta\": 50000.0, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 32.0, \"original_max_position_embeddings\": 32768,"
    " \"rope_theta\": 50000.0, \"beta_fast\": 32, \"beta_slow\": 1, \"mscale\": 1.0, \"mscale_all_dim\": 1.0}, \"num_target_layers\": 5,"
    " \"target_hidden_size\": 7168, \"target_num_hidden_layers\": 93, \"target_layer_ids\": [2, 23, 47, 71, 89], \"mask_token_id\": 163837,"
    " \"bos_token_id\": 163584, \"eos_token_id\": 163586, \"pad_token_id\": 163839, \"markov_rank\": 256, \"markov_head_type\": \"vanilla\","
    " \"enable_confidence_head\": true, \"confidence_head_with_markov\": true, \"tie_word_embeddings\": false,"
    " \"_torchspec_version\": \"0.1.0\", \"torch_dtype\": \"bfloat16\"}";

static struct k3_dspark_model model;
static struct k3_findings findings;

// The published config with the keys of `patch` put in; the text "-" takes a key away, a dotted key reaches into an object.
static struct k3_config *patched(const char *patch) {
  json_t *root = json_loads(published, 0, NULL), *changes = json_loads(patch, JSON_REJECT_DUPLICATES, NULL), *value;
  const char *key;
  assert_true(json_is_object(root) && json_is_object(changes));
  json_object_foreach(changes, key, value) {
    json_t *object = root;
    const char *name = key, *dot = strchr(key, '.');
    if (dot) {
      char outer[64];
      snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
      if (!json_object_get(root, outer))
        json_object_set_new(root, outer, json_object());
      object = json_object_get(root, outer);
      name = dot + 1;
    }
    if (json_is_string(value) && strcmp(json_string_value(value), "-") == 0)
      assert_int_equal(json_object_del(object, name), 0);
    else
      json_object_set(object, name, value);
  }
  char *text = json_dumps(root, 0);
  struct k3_config *config = k3_config_parse(text, strlen(text), "config.json", NULL);
  assert_non_null(config);
  free(text);
  json_decref(root);
  json_decref(changes);
  return config;
}

static enum k3_status read_patched(const char *patch, uint64_t block_width) {
  struct k3_config *config = patched(patch);
  k3_findings_free(&findings);
  enum k3_status status = k3_dspark_model_from_config(config, block_width, &model, &findings);
  k3_config_free(config);
  return status;
}

// "CFG20 error hidden_size;" for each finding.
static const char *findings_text(void) {
  static char text[2048];
  size_t n = 0;
  text[0] = '\0';
  for (size_t i = 0; i < findings.n_items; i++) {
    const struct k3_finding *finding = &findings.items[i];
    n += (size_t)snprintf(text + n, sizeof text - n, "%s %s %s;", k3_rule_info(finding->error.rule)->id, k3_severity_name(finding->severity),
                          finding->error.tensor);
    assert_string_equal(finding->error.file, "config.json");
    assert_true(finding->error.found[0] != '\0');
  }
  return text;
}

static void accept(const char *patch) {
  if (read_patched(patch, 0) != K3_OK || findings.n_items > 0)
    fail_msg("%s: %s", patch, findings_text());
}

static void expect(const char *patch, enum k3_status status, const char *text) {
  enum k3_status got = read_patched(patch, 0);
  if (got != status || strcmp(findings_text(), text) != 0)
    fail_msg("%s: %s, \"%s\" instead of \"%s\"", patch, k3_status_name(got), findings_text(), text);
}

static void bad(const char *patch, const char *field) {
  char text[128];
  snprintf(text, sizeof text, "CFG20 error %s;", field);
  expect(patch, K3_BAD_INPUT, text);
}

static void other(const char *patch, const char *field) {
  char text[128];
  snprintf(text, sizeof text, "CFG21 error %s;", field);
  expect(patch, K3_UNSUPPORTED, text);
}

static void the_published_config(void **state) {
  (void)state;
  static const uint64_t taps[] = {2, 23, 47, 71, 89};
  accept("{}");
  assert_int_equal(model.hidden_size, 7168);
  assert_int_equal(model.target_hidden_size, 7168);
  assert_int_equal(model.n_taps, 5);
  assert_memory_equal(model.target_layer_ids, taps, sizeof taps);
  assert_int_equal(model.target_n_layers, 93);
  assert_int_equal(model.n_layers, 5);
  assert_int_equal(model.n_heads, 64);
  assert_int_equal(model.qk_nope_head_dim, 128);
  assert_int_equal(model.qk_rope_head_dim, 64);
  assert_int_equal(model.v_head_dim, 128);
  assert_int_equal(model.q_lora_rank, 1536);
  assert_int_equal(model.kv_lora_rank, 512);
  assert_int_equal(model.intermediate_size, 14336);
  assert_int_equal(model.vocab_size, 163840);
  assert_int_equal(model.markov_rank, 256);
  assert_int_equal(model.block_width, 7);
  assert_int_equal(model.mask_token_id, 163837);
  assert_int_equal(model.max_position_embeddings, 1048576);
  assert_true(model.rms_norm_eps == 1e-5 && model.logit_scale == 1);
  assert_true(model.rope.yarn && model.rope.theta == 50000 && model.rope.factor == 32 && model.rope.original_max_position == 32768);
  assert_true(model.rope.beta_fast == 32 && model.rope.beta_slow == 1 && model.rope.mscale == 1 && model.rope.mscale_all_dim == 1);
  assert_true(!model.causal && !model.fc_norm && model.confidence_head && model.confidence_with_markov);
  assert_string_equal(model.target_stream, "prefix");
}

static void absent_keys_have_their_defaults(void **state) {
  (void)state;
  accept(
      "{\"architectures\": \"-\", \"num_key_value_heads\": \"-\", \"mla_use_nope\": \"-\", \"mla_use_output_gate\": \"-\", \"draft_vocab_size\": "
      "\"-\","
      "\"target_hidden_size\": \"-\", \"markov_head_type\": \"-\", \"enable_confidence_head\": \"-\", \"num_target_layers\": \"-\","
      "\"rope_theta\": \"-\", \"rope_parameters.beta_fast\": \"-\", \"rope_parameters.beta_slow\": \"-\", \"rope_parameters.mscale\": \"-\","
      "\"rope_parameters.mscale_all_dim\": \"-\", \"confidence_head_with_markov\": \"-\"}");
  assert_true(model.rope.beta_fast == 32 && model.rope.beta_slow == 1 && model.rope.mscale == 1 && model.rope.mscale_all_dim == 0);
  assert_int_equal(model.target_hidden_size, 7168);
  assert_true(model.confidence_head && model.confidence_with_markov);
  static const char *const needed[] = {"hidden_size",      "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                       "q_lora_rank",      "kv_lora_rank",      "qk_nope_head_dim",  "qk_rope_head_dim",
                                       "v_head_dim",       "vocab_size",        "rms_norm_eps",      "max_position_embeddings",
                                       "target_layer_ids", "mask_token_id",     "markov_rank",       "target_num_hidden_layers"};
  for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"%s\": \"-\"}", needed[i]);
    bad(patch, needed[i]);
    assert_non_null(strstr(findings.items[0].error.found, "missing"));
    snprintf(patch, sizeof patch, "{\"%s\": \"7\"}", needed[i]);  // a text
    bad(patch, needed[i]);
    snprintf(patch, sizeof patch, "{\"%s\": -5}", needed[i]);
    bad(patch, needed[i]);
  }
  bad("{\"rope_parameters.factor\": \"-\"}", "factor");
  bad("{\"rope_parameters.original_max_position_embeddings\": \"-\"}", "original_max_position_embeddings");
  bad("{\"rope_theta\": \"-\", \"rope_parameters.rope_theta\": \"-\"}", "rope_theta");
  expect("{\"hidden_size\": \"-\", \"vocab_size\": 1.5}", K3_BAD_INPUT, "CFG20 error hidden_size;CFG20 error vocab_size;");
}

static void hidden_size_need_not_be_a_multiple_of_the_heads(void **state) {
  (void)state;
  accept("{\"num_attention_heads\": 96}");
  assert_int_equal(model.n_heads, 96);
  accept("{\"hidden_size\": 100, \"target_hidden_size\": 30, \"num_attention_heads\": 7}");
}

// The number of taps is the length of target_layer_ids. num_target_layers means the same for k3_dspark, and the target's depth elsewhere.
static void taps_are_counted_not_told(void **state) {
  (void)state;
  bad("{\"num_target_layers\": 93}", "num_target_layers");
  bad("{\"num_target_layers\": 4}", "num_target_layers");
  accept("{\"num_target_layers\": 93, \"model_type\": \"kimi_k3_dspark\"}");
  assert_int_equal(model.n_taps, 5);
  accept("{\"num_target_layers\": 93, \"model_type\": \"qwen3\", \"target_num_hidden_layers\": \"-\"}");
  assert_int_equal(model.target_n_layers, 93);
  accept("{\"num_target_layers\": 7, \"model_type\": \"-\"}");
  bad("{\"model_type\": \"-\", \"target_num_hidden_layers\": \"-\"}", "target_num_hidden_layers");
}

// A target of 4 layers: taps 1 and 3 are fine; a tap beyond the last layer and one twice are errors; another order is kept, with a warning.
static void tap_ids(void **state) {
  (void)state;
  static const char four[] = "{\"target_num_hidden_layers\": 4, \"num_target_layers\": 2, \"target_layer_ids\": %s}";
  char patch[160];
  snprintf(patch, sizeof patch, four, "[1, 3]");
  accept(patch);
  snprintf(patch, sizeof patch, four, "[0, 3]");
  accept(patch);
  snprintf(patch, sizeof patch, four, "[1, 4]");
  bad(patch, "target_layer_ids");
  assert_non_null(strstr(findings.items[0].error.found, "tap 4, but the target has 4 layers"));
  snprintf(patch, sizeof patch, four, "[1, -1]");
  bad(patch, "target_layer_ids");
  snprintf(patch, sizeof patch, four, "[3, 1]");
  expect(patch, K3_OK, "CFG20 warning target_layer_ids;");
  assert_true(model.n_taps == 2 && model.target_layer_ids[0] == 3 && model.target_layer_ids[1] == 1);
  snprintf(patch, sizeof patch, four, "[1, 1]");
  expect(patch, K3_BAD_INPUT, "CFG20 error target_layer_ids;CFG20 warning target_layer_ids;");
  bad("{\"target_layer_ids\": []}", "target_layer_ids");
  bad("{\"target_layer_ids\": 5}", "target_layer_ids");
  accept("{\"target_layer_ids\": \"-\", \"dspark_target_layer_ids\": [1, 2, 3, 4, 92]}");
  accept("{\"target_layer_ids\": \"-\", \"dflash_config.target_layer_ids\": [7, 23, 51, 67, 83]}");
  assert_int_equal(model.target_layer_ids[4], 83);
  // Counting from 1: a shift by one would go unnoticed.
  other("{\"target_layer_ids\": \"-\", \"aux_hidden_state_layer_ids\": [24, 48, 72, 88, 92]}", "aux_hidden_state_layer_ids");
  char many[400] = "[0", patch_many[512];
  for (int i = 1; i < 65; i++)
    snprintf(many + strlen(many), sizeof many - strlen(many), ",%d", i);
  snprintf(patch_many, sizeof patch_many, "{\"num_target_layers\": 65, \"target_layer_ids\": %s]}", many);
  bad(patch_many, "target_layer_ids");
}

static void other_spellings(void **state) {
  (void)state;
  accept("{\"mask_token_id\": \"-\", \"dflash_config.mask_token_id\": 12}");
  assert_int_equal(model.mask_token_id, 12);
  accept("{\"mask_token_id\": \"-\", \"dspark_noise_token_id\": 13}");
  assert_int_equal(model.mask_token_id, 13);
  bad("{\"dflash_config.mask_token_id\": 12}", "dflash_config.mask_token_id");
  accept("{\"dflash_config.mask_token_id\": 163837}");
  bad("{\"mask_token_id\": 163840}", "mask_token_id");
  accept("{\"mask_token_id\": 163839}");
  accept("{\"markov_rank\": \"-\", \"dspark_markov_rank\": 512}");
  assert_int_equal(model.markov_rank, 512);
  bad("{\"markov_rank\": 0}", "markov_rank");
}

static void block_width(void **state) {
  (void)state;
  static const char *const keys[] = {"block_size", "dspark_block_size", "dflash_config.block_size", "dflash_config.dspark_block_size"};
  for (int i = 0; i < 4; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"%s\": 5}", keys[i]);
    accept(patch);
    assert_int_equal(model.block_width, 5);
    assert_int_equal(read_patched(patch, 9), K3_OK);
    assert_int_equal(model.block_width, 9);
  }
  bad("{\"block_size\": 7, \"dflash_config.block_size\": 8}", "dflash_config.block_size");
  assert_int_equal(read_patched("{\"block_size\": 7, \"dflash_config.block_size\": 8}", 7), K3_OK);
  bad("{\"block_size\": 0}", "block_size");
  bad("{\"block_size\": 1025}", "block_size");
  assert_int_equal(read_patched("{}", 1024), K3_OK);
  assert_int_equal(read_patched("{}", 1025), K3_BAD_INPUT);
  bad("{\"max_position_embeddings\": 6}", "block_width");
}

static void causal_blocks(void **state) {
  (void)state;
  static const char *const keys[] = {"dflash_config.causal", "dflash_config.is_causal", "full_attention_causal", "is_causal"};
  for (int i = 0; i < 4; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"%s\": true}", keys[i]);
    accept(patch);
    assert_true(model.causal);
    snprintf(patch, sizeof patch, "{\"%s\": false}", keys[i]);
    accept(patch);
    assert_false(model.causal);
  }
  bad("{\"dflash_config.causal\": true, \"is_causal\": false}", "is_causal");
  bad("{\"is_causal\": 1}", "is_causal");
}

static void variants_are_refused_by_what_differs(void **state) {
  (void)state;
  static const char *const switches[] = {
      "mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor", "attention_bias", "mlp_bias", "is_neox", "is_neox_style"};
  for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"%s\": true}", switches[i]);
    other(patch, switches[i]);
    snprintf(patch, sizeof patch, "{\"%s\": false}", switches[i]);
    accept(patch);
  }
  other("{\"sample_from_anchor\": false}", "sample_from_anchor");
  accept("{\"sample_from_anchor\": true}");
  other("{\"rope_interleave\": false}", "rope_interleave");
  accept("{\"rope_interleave\": true}");
  other("{\"hidden_act\": \"situ\"}", "hidden_act");
  accept("{\"hidden_act\": \"silu\"}");
  other("{\"markov_head_type\": \"gated\"}", "markov_head_type");
  other("{\"markov_head_type\": \"rnn\"}", "markov_head_type");
  other("{\"q_lora_rank\": null}", "q_lora_rank");
  bad("{\"draft_vocab_size\": 32000}", "draft_vocab_size");
  // What an Automodel-trained drafter says: each difference is named.
  expect(
      "{\"mla_use_nope\": true, \"mla_use_output_gate\": true, \"hidden_act\": \"situ\", \"num_target_layers\": 93, \"model_type\": \"kimi_linear\"}",
      K3_UNSUPPORTED, "CFG21 error mla_use_nope;CFG21 error mla_use_output_gate;CFG21 error hidden_act;");
}

static void supported_switches(void **state) {
  (void)state;
  accept("{\"fc_norm\": true, \"aux_hidden_stream\": \"attn_res\", \"target_layer_ids\": [7, 31, 47, 63, 87]}");
  assert_true(model.fc_norm);
  assert_string_equal(model.target_stream, "attn_res");
  other("{\"aux_hidden_stream\": \"mixture\"}", "aux_hidden_stream");
  accept("{\"enable_confidence_head\": false, \"confidence_head_with_markov\": false, \"logit_scale\": 0.5, \"rms_norm_eps\": 0.1}");
  assert_true(!model.confidence_head && !model.confidence_with_markov && model.logit_scale == 0.5 && model.rms_norm_eps == 0.1);
  bad("{\"logit_scale\": 0}", "logit_scale");
  bad("{\"rms_norm_eps\": 0}", "rms_norm_eps");
  bad("{\"rms_norm_eps\": 1}", "rms_norm_eps");
  bad("{\"qk_rope_head_dim\": 63}", "qk_rope_head_dim");
}

static void rotary_blocks(void **state) {
  (void)state;
  accept(
      "{\"rope_parameters\": null, \"rope_scaling\": {\"type\": \"deepseek_yarn\", \"factor\": 40, \"original_max_position_embeddings\": 4096,"
      "\"mscale\": 0.707, \"mscale_all_dim\": 1}}");
  assert_true(model.rope.yarn && model.rope.theta == 50000 && model.rope.factor == 40 && model.rope.mscale == 0.707 &&
              model.rope.mscale_all_dim == 1);
  accept("{\"rope_parameters\": \"-\"}");
  assert_true(!model.rope.yarn && model.rope.factor == 1 && model.rope.theta == 50000);
  accept("{\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 50000.0}}");
  assert_false(model.rope.yarn);
  accept("{\"rope_parameters\": {\"rope_theta\": 50000.0, \"type\": \"none\"}}");
  assert_false(model.rope.yarn);
  // The inner theta wins.
  expect("{\"rope_theta\": 10000}", K3_OK, "CFG20 warning rope_theta;");
  assert_true(model.rope.theta == 50000);
  accept("{\"rope_parameters.rope_theta\": \"-\"}");
  assert_true(model.rope.theta == 50000);
  accept("{\"rope_parameters.type\": \"deepseek_yarn\"}");
  bad("{\"rope_parameters.type\": \"linear\"}", "rope_parameters.type");
  static const char *const types[] = {"linear", "dynamic", "llama3", "longrope", "mrope"};
  for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"rope_parameters.rope_type\": \"%s\"}", types[i]);
    other(patch, "rope_parameters.rope_type");
  }
  bad("{\"rope_parameters\": {\"factor\": 4}}", "rope_parameters.rope_type");
  other("{\"rope_parameters.apply_yarn_scaling\": false}", "rope_parameters.apply_yarn_scaling");
  accept("{\"rope_parameters.apply_yarn_scaling\": true}");
  other("{\"rope_parameters.truncate\": false}", "rope_parameters.truncate");
  // g(1) / g(1) is 1; with mscale_all_dim 0 the amplitude is 0.1 ln 32 + 1.
  accept("{\"rope_parameters.attention_factor\": 1.0}");
  other("{\"rope_parameters.attention_factor\": 1.2}", "rope_parameters.attention_factor");
  accept("{\"rope_parameters.attention_factor\": 1.3465735902799727, \"rope_parameters.mscale_all_dim\": 0}");
  bad("{\"rope_scaling\": {\"factor\": 16}}", "factor");
  accept("{\"rope_scaling\": {\"factor\": 32, \"type\": \"yarn\"}}");
  bad("{\"rope_parameters\": 5, \"rope_scaling\": {\"factor\": 32, \"type\": \"yarn\", \"original_max_position_embeddings\": 32768}}",
      "rope_parameters");
  bad("{\"rope_parameters.factor\": 0.5}", "factor");
  bad("{\"rope_parameters.beta_fast\": 0.5}", "beta_fast");
  bad("{\"rope_parameters.beta_slow\": 0}", "beta_fast");
  bad("{\"rope_parameters.mscale\": -1}", "mscale");
  bad("{\"rope_parameters.original_max_position_embeddings\": 0}", "original_max_position_embeddings");
  bad("{\"rope_parameters.rope_theta\": 1, \"rope_theta\": 1}", "rope_theta");
}

// Everything that is accepted can be multiplied: any two numbers of the geometry, and the bytes of every tensor.
static void ranges_keep_products_small(void **state) {
  (void)state;
  static const struct {
    const char *field;
    unsigned long long max;
  } limits[] = {{"hidden_size", 1 << 24},
                {"intermediate_size", 1 << 24},
                {"q_lora_rank", 1 << 24},
                {"kv_lora_rank", 1 << 24},
                {"markov_rank", 1 << 24},
                {"num_attention_heads", 65536},
                {"v_head_dim", 65536},
                {"qk_nope_head_dim", 65536},
                {"num_hidden_layers", 1024},
                {"max_position_embeddings", 1ull << 31},
                {"target_num_hidden_layers", 65536}};
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
    char patch[96];
    snprintf(patch, sizeof patch, "{\"%s\": %llu}", limits[i].field, limits[i].max);
    accept(patch);
    snprintf(patch, sizeof patch, "{\"%s\": %llu}", limits[i].field, limits[i].max + 1);
    bad(patch, limits[i].field);
    snprintf(patch, sizeof patch, "{\"%s\": 9223372036854775807}", limits[i].field);
    bad(patch, limits[i].field);
  }
  accept("{\"vocab_size\": 268435456, \"draft_vocab_size\": 268435456}");
  bad("{\"vocab_size\": 268435457, \"draft_vocab_size\": 268435457}", "vocab_size");
}

static const char published_model[] =
    "{\"block_width\":7,\"causal\":false,\"confidence_head\":true,\"confidence_head_with_markov\":true,\"family\":\"k3-dspark\",\"fc_norm\":false,"
    "\"hidden_size\":7168,\"intermediate_size\":14336,\"kv_lora_rank\":512,\"logit_scale\":1,\"markov_rank\":256,\"mask_token_id\":163837,"
    "\"max_position_embeddings\":1048576,\"norm\":\"rms\",\"num_attention_heads\":64,\"num_hidden_layers\":5,\"q_lora_rank\":1536,"
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"rms_norm_eps\":1e-05,\"rope\":{\"beta_fast\":32,\"beta_slow\":1,\"factor\":32,\"mscale\":1,"
    "\"mscale_all_dim\":1,\"original_max_position_embeddings\":32768,\"rope_theta\":50000,\"rope_type\":\"yarn\"},"
    "\"rotation\":{\"kv_a_proj_with_mqa\":\"interleaved\",\"q_b_proj\":\"interleaved\"},\"target_hidden_size\":7168,"
    "\"target_layer_ids\":[2,23,47,71,89],\"target_num_hidden_layers\":93,\"target_stream\":\"prefix\",\"v_head_dim\":128,\"vocab_size\":163840}";

static void round_trip(const char *patch) {
  struct k3_dspark_model back;
  assert_int_equal(read_patched(patch, 0), K3_OK);
  char *text = k3_dspark_model_to_json(&model, NULL);
  assert_non_null(text);
  struct k3_error err = {0};
  assert_int_equal(k3_dspark_model_from_json(text, strlen(text), "image", &back, &err), K3_OK);
  char *again = k3_dspark_model_to_json(&back, NULL);
  assert_string_equal(text, again);
  assert_int_equal(back.n_taps, model.n_taps);
  assert_int_equal(back.causal, model.causal);
  assert_int_equal(back.fc_norm, model.fc_norm);
  assert_int_equal(back.confidence_head, model.confidence_head);
  assert_int_equal(back.confidence_with_markov, model.confidence_with_markov);
  assert_int_equal(back.block_width, model.block_width);
  assert_int_equal(back.rope.yarn, model.rope.yarn);
  assert_true(back.rms_norm_eps == model.rms_norm_eps && back.logit_scale == model.logit_scale && back.rope.theta == model.rope.theta);
  assert_true(back.rope.mscale == model.rope.mscale && back.rope.mscale_all_dim == model.rope.mscale_all_dim);
  assert_string_equal(back.target_stream, model.target_stream);
  k3_free(text);
  k3_free(again);
}

static void the_manifest_carries_everything(void **state) {
  (void)state;
  accept("{}");
  char *text = k3_dspark_model_to_json(&model, NULL);
  assert_string_equal(text, published_model);
  k3_free(text);
  round_trip("{}");
  round_trip("{\"rope_parameters\": \"-\"}");
  round_trip(
      "{\"is_causal\": true, \"fc_norm\": true, \"aux_hidden_stream\": \"attn_res\", \"enable_confidence_head\": false,"
      "\"confidence_head_with_markov\": false, \"logit_scale\": 0.30000000000000004, \"rms_norm_eps\": 1e-6, \"block_size\": 16,"
      "\"rope_parameters.mscale\": 0.707, \"rope_parameters.mscale_all_dim\": 0, \"target_layer_ids\": [92, 0, 5, 6, 7]}");
}

// Reads the published model with the first `from` replaced by `to`.
static enum k3_status load(const char *from, const char *to, struct k3_error *err) {
  char text[2048];
  const char *at = strstr(published_model, from);
  assert_non_null(at);
  int n = snprintf(text, sizeof text, "%.*s%s%s", (int)(at - published_model), published_model, to, at + strlen(from));
  struct k3_dspark_model back;
  return k3_dspark_model_from_json(text, (size_t)n, "image", &back, err);
}

static void the_manifest_is_checked(void **state) {
  (void)state;
  static const char *const changes[][3] = {
      {"\"hidden_size\":7168", "\"hidden_size\":0", "hidden_size"},
      {"\"hidden_size\":7168", "\"hidden_size\":16777217", "hidden_size"},
      {"\"hidden_size\":7168", "\"hidden_size\":7168.0", "hidden_size"},
      {"\"hidden_size\":7168,", "", "hidden_size"},
      {"\"num_hidden_layers\":5", "\"num_hidden_layers\":1025", "num_hidden_layers"},
      {"\"mask_token_id\":163837", "\"mask_token_id\":163840", "mask_token_id"},
      {"\"block_width\":7", "\"block_width\":0", "block_width"},
      {"\"block_width\":7", "\"block_width\":-1", "block_width"},
      {"\"qk_rope_head_dim\":64", "\"qk_rope_head_dim\":63", "qk_rope_head_dim"},
      {"[2,23,47,71,89]", "[]", "target_layer_ids"},
      {"[2,23,47,71,89]", "[2,23,47,71,93]", "target_layer_ids"},
      {"[2,23,47,71,89]", "[2,2]", "target_layer_ids"},
      {"[2,23,47,71,89]", "[2,-1]", "target_layer_ids"},
      {"[2,23,47,71,89]", "7", "target_layer_ids"},
      {"\"prefix\"", "\"sum\"", "target_stream"},
      {"\"k3-dspark\"", "\"k3\"", "family"},
      {"\"norm\":\"rms\"", "\"norm\":\"layer\"", "norm"},
      {"\"causal\":false", "\"causal\":0", "causal"},
      {"\"rms_norm_eps\":1e-05", "\"rms_norm_eps\":0", "rms_norm_eps"},
      {"\"rms_norm_eps\":1e-05", "\"rms_norm_eps\":\"a\"", "rms_norm_eps"},
      {"\"rope_type\":\"yarn\"", "\"rope_type\":\"linear\"", "rope_type"},
      {"\"factor\":32", "\"factor\":0", "factor"},
      {"\"factor\":32,", "", "factor"},
      {"\"rope_theta\":50000", "\"rope_theta\":0.5", "rope_theta"},
      {"\"q_b_proj\":\"interleaved\"", "\"q_b_proj\":\"half\"", "q_b_proj"},
      {"\"rope\":{", "\"rape\":{", "rope_type"},
      {"\"hidden_size\":7168", "\"hidden_size\":7168,\"hidden_size\":7168", ""},
  };
  struct k3_error err = {0};
  assert_int_equal(load("7168", "7168", &err), K3_OK);
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    err = (struct k3_error){0};
    assert_int_equal(load(changes[i][0], changes[i][1], &err), K3_BAD_INPUT);
    assert_string_equal(k3_rule_info(err.rule)->id, "IMG01");
    assert_string_equal(err.file, "image");
    if (!strstr(err.tensor, changes[i][2]))
      fail_msg("%s: reported for %s", changes[i][1], err.tensor);
  }
}

static void numbers_do_not_follow_the_locale(void **state) {
  (void)state;
  bool comma = comma_locale_set();
  enum k3_status status = read_patched("{\"rope_parameters.mscale\": 0.707, \"rope_parameters.factor\": 40.5}", 0);
  char *text = k3_dspark_model_to_json(&model, NULL);
  struct k3_dspark_model back;
  enum k3_status back_status = k3_dspark_model_from_json(text, strlen(text), "image", &back, NULL);
  setlocale(LC_ALL, "C");
  assert_int_equal(status, K3_OK);
  assert_int_equal(back_status, K3_OK);
  assert_non_null(strstr(text, "\"factor\":40.5,\"mscale\":0.707,"));
  assert_true(back.rope.mscale == 0.707 && back.rope.factor == 40.5 && back.rms_norm_eps == 1e-5);
  k3_free(text);
  if (!comma) {
    print_message("SKIPPED: no locale with a decimal comma is installed, and localedef made none: only the C locale was tested\n");
    skip();
  }
}

static void memory_may_fail_anywhere(void **state) {
  (void)state;
  struct k3_config *config = patched("{\"hidden_size\": -1, \"q_lora_rank\": 0, \"hidden_act\": \"gelu\"}");
  bool done = false;
  for (uint64_t n = 1; !done; n++) {
    k3_findings_free(&findings);
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    enum k3_status status = k3_dspark_model_from_config(config, 0, &model, &findings);
    done = k3_alloc_count() - before < n;
    k3_alloc_fail_at(0);
    assert_int_equal(status, done ? K3_UNSUPPORTED : K3_NO_MEMORY);
    assert_int_equal(findings.n_errors, 3);
  }
  k3_config_free(config);
  accept("{}");
  done = false;
  for (uint64_t n = 1; !done; n++) {
    struct k3_error err = {0};
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    char *text = k3_dspark_model_to_json(&model, &err);
    done = k3_alloc_count() - before < n;
    k3_alloc_fail_at(0);
    assert_int_equal(err.status, done ? K3_OK : K3_NO_MEMORY);
    assert_true(done == (text != NULL));
    k3_free(text);
  }
}

static int teardown(void **state) {
  k3_findings_free(&findings);
  return temp_folder_teardown(state);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_published_config),
      cmocka_unit_test(absent_keys_have_their_defaults),
      cmocka_unit_test(hidden_size_need_not_be_a_multiple_of_the_heads),
      cmocka_unit_test(taps_are_counted_not_told),
      cmocka_unit_test(tap_ids),
      cmocka_unit_test(other_spellings),
      cmocka_unit_test(block_width),
      cmocka_unit_test(causal_blocks),
      cmocka_unit_test(variants_are_refused_by_what_differs),
      cmocka_unit_test(supported_switches),
      cmocka_unit_test(rotary_blocks),
      cmocka_unit_test(ranges_keep_products_small),
      cmocka_unit_test(the_manifest_carries_everything),
      cmocka_unit_test(the_manifest_is_checked),
      cmocka_unit_test(numbers_do_not_follow_the_locale),
      cmocka_unit_test(memory_may_fail_anywhere),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, teardown);
}
