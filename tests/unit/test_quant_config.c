// Quantization configs in every form: what they say about modules. (What must be reported about them is in fixtures/reject/quant-*.)
#include <stdio.h>
#include <string.h>

#include "formats/quant_config.h"
#include "unit.h"

static struct k3_quant_config *read_two(const char *config_text, const char *hf_text, struct k3_findings *findings) {
  struct k3_quant_config *quant = NULL;
  struct k3_error err = {0};
  struct k3_config *config = config_text ? k3_config_parse(config_text, strlen(config_text), "config.json", &err) : NULL;
  struct k3_config *hf = hf_text ? k3_config_parse(hf_text, strlen(hf_text), "hf_quant_config.json", &err) : NULL;
  if ((config_text && !config) || (hf_text && !hf))
    fail_msg("not JSON: %s", err.found);
  assert_int_equal(k3_quant_config_read(config, hf, &quant, findings, &err), K3_OK);
  k3_config_free(config);
  k3_config_free(hf);
  return quant;
}

// The config must be usable, with nothing to report.
static struct k3_quant_config *usable(const char *config_text, const char *hf_text) {
  struct k3_findings findings = {0};
  struct k3_quant_config *quant = read_two(config_text, hf_text, &findings);
  if (!quant || findings.n_items > 0)
    fail_msg("%s: %s", config_text ? config_text : hf_text, findings.n_items ? findings.items[0].error.found : "nothing was read");
  k3_findings_free(&findings);
  return quant;
}

static struct k3_quant_answer find(struct k3_quant_config *quant, const char *module) {
  return k3_quant_config_find(quant, module, strlen(module), strstr(module, "norm") == NULL && strstr(module, "embed") == NULL);
}

static void expect(struct k3_quant_config *quant, const char *module, enum k3_quant_says says, const char *args) {
  struct k3_quant_answer answer = find(quant, module);
  char text[160] = "";
  if (answer.group)
    k3_quant_args_text(&answer.group->weights, text, sizeof text);
  if (answer.says != says || strcmp(text, args) != 0)
    fail_msg("%s: says %d \"%s\" instead of %d \"%s\"", module, (int)answer.says, text, (int)says, args);
}

#define CT(groups, ignore) \
  "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":{" groups "},\"ignore\":[" ignore "]}}"
#define FLOAT4 "\"weights\":{\"num_bits\":4,\"type\":\"float\",\"strategy\":\"tensor_group\",\"group_size\":16}"
#define FLOAT8 "\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"channel\"}"

static void compressed_tensors_targets_and_ignore(void **state) {
  (void)state;
  struct k3_quant_config *quant =
      usable(CT("\"g\":{\"targets\":[\"Linear\"]," FLOAT4 "}", "\"lm_head\",\"re:.*self_attn.*\",\"a.qkv_proj\",\"b.c.linear\""), NULL);
  expect(quant, "layers.0.mlp.up_proj", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");
  expect(quant, "lm_head", K3_SAYS_PLAIN, "");
  expect(quant, "model.lm_head", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");  // literals are whole names
  expect(quant, "layers.0.self_attn.q_proj", K3_SAYS_PLAIN, "");
  expect(quant, "a.k_proj", K3_SAYS_PLAIN, "");  // a member of the fused module that is named
  expect(quant, "a.o_proj", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");
  expect(quant, "b.c", K3_SAYS_PLAIN, "");            // behind a wrapper's suffix
  expect(quant, "layers.0.norm", K3_SAYS_PLAIN, "");  // no linear layer
  assert_int_equal(quant->ignore.items[1].n_matches, 1);
  k3_quant_config_free(quant);
}

// An exact name beats a pattern, a pattern beats a class; equals with other arguments are rivals; ignore wins over all.
static void specific_targets_win(void **state) {
  (void)state;
  struct k3_quant_config *quant = usable(CT("\"class\":{\"targets\":[\"Linear\"]," FLOAT4 "},\"pattern\":{\"targets\":[\"re:.*down.*\"]," FLOAT8 "},"
                                            "\"name\":{\"targets\":[\"x.down_proj\"]," FLOAT4 "},\"rival\":{\"targets\":[\"re:y.*\"]," FLOAT4 "}",
                                            "\"x.z\""),
                                         NULL);
  expect(quant, "x.up_proj", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");
  expect(quant, "w.down_proj", K3_SAYS_QUANTISED, "float 8 bits, channel");
  assert_string_equal(find(quant, "x.down_proj").group->name, "name");
  assert_null(find(quant, "w.down_proj").rival);
  assert_non_null(find(quant, "y.down_proj").rival);
  expect(quant, "x.z", K3_SAYS_PLAIN, "");
  k3_quant_config_free(quant);
}

static void presets_stand_for_schemes(void **state) {
  (void)state;
  static const char *const cases[][2] = {
      {"NVFP4", "float 4 bits, tensor_group of 16"},
      {"NVFP4A16", "float 4 bits, tensor_group of 16"},
      {"MXFP4", "float 4 bits, group of 32"},
      {"MXFP4A16", "float 4 bits, group of 32"},
      {"MXFP8", "float 8 bits, group of 32"},
      {"FP8", "float 8 bits, tensor"},
      {"FP8_DYNAMIC", "float 8 bits, channel"},
      {"FP8_BLOCK", "float 8 bits, block of 128 x 128"},
      {"W8A8", "int 8 bits, channel"},
      {"W4A16", "int 4 bits, group of 128"},
      {"W4A16_ASYM", "int 4 bits, group of 128"},
      {"W8A16", "int 8 bits, channel"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char text[400];
    snprintf(text, sizeof text, CT("\"%s\":[\"Linear\"]", ""), cases[i][0]);
    struct k3_quant_config *quant = usable(text, NULL);
    expect(quant, "a.b", K3_SAYS_QUANTISED, cases[i][1]);
    k3_quant_config_free(quant);
  }
}

static void strategies_are_derived_and_legacy_blocks_read(void **state) {
  (void)state;
  static const char *const cases[][2] = {
      {"\"num_bits\":4,\"type\":\"int\",\"group_size\":64", "int 4 bits, group of 64"},
      {"\"num_bits\":4,\"type\":\"int\",\"group_size\":-1", "int 4 bits, channel"},
      {"\"num_bits\":8,\"type\":\"float\"", "float 8 bits, tensor"},
      {"\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":\"128x64\"", "float 8 bits, block of 128 x 64"},
      {"\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":[32,32]", "float 8 bits, block of 32 x 32"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char text[600];
    snprintf(text, sizeof text, CT("\"g\":{\"targets\":[],\"weights\":{%s}}", ""), cases[i][0]);
    struct k3_quant_config *quant = usable(text, NULL);
    expect(quant, "a.b", K3_SAYS_QUANTISED, cases[i][1]);
    k3_quant_config_free(quant);
  }
}

static void modelopt_algorithms_and_globs(void **state) {
  (void)state;
  static const char *const algos[][2] = {
      {"NVFP4", "float 4 bits, tensor_group of 16"},
      {"W4A16_NVFP4", "float 4 bits, tensor_group of 16"},
      {"FP8", "float 8 bits, tensor"},
      {"FP8_PER_CHANNEL_PER_TOKEN", "float 8 bits, channel"},
      {"fp8_pb_wo", "float 8 bits, block of 128 x 128"},
      {"MXFP8", "float 8 bits, group of 32"},
      {"MXFP4", "float 4 bits, group of 32"},
  };
  for (size_t i = 0; i < sizeof algos / sizeof algos[0]; i++) {
    char text[400];
    snprintf(text, sizeof text,
             "{\"quantization\":{\"quant_algo\":\"%s\",\"kv_cache_quant_algo\":null,\"exclude_modules\":[\"lm_head\",\"layers.1*\"]}}", algos[i][0]);
    struct k3_quant_config *quant = usable(NULL, text);
    expect(quant, "layers.2.mlp.up_proj", K3_SAYS_QUANTISED, algos[i][1]);
    expect(quant, "layers.1.mlp.up_proj", K3_SAYS_PLAIN, "");
    expect(quant, "layers.10.mlp.up_proj", K3_SAYS_PLAIN, "");  // that is what the glob says; CFG09 tells of other readings
    expect(quant, "model.layers.1.x", K3_SAYS_QUANTISED, algos[i][1]);
    k3_quant_config_free(quant);
  }
}

// An unlisted module is unquantised, never "like its siblings".
static void unlisted_modules_are_plain(void **state) {
  (void)state;
  struct k3_quant_config *quant = usable(
      "{\"quantization_config\":{\"quant_method\":\"modelopt_mixed\",\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{"
      "\"l.0.q_proj\":{\"quant_algo\":\"FP8\"},\"l.0.k_proj\":{\"quant_algo\":\"FP8\"},\"l.0.gate_up_proj\":{\"quant_algo\":\"NVFP4\",\"group_size\":"
      "16},"
      "\"l.0.experts\":{\"quant_algo\":\"NVFP4\"}}}}",
      NULL);
  expect(quant, "l.0.q_proj", K3_SAYS_QUANTISED, "float 8 bits, tensor");
  expect(quant, "l.0.v_proj", K3_SAYS_PLAIN, "");
  expect(quant, "l.0.up_proj", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");
  expect(quant, "l.0.experts.7.w1", K3_SAYS_QUANTISED, "float 4 bits, tensor_group of 16");
  expect(quant, "l.0.expertsx.w1", K3_SAYS_PLAIN, "");
  expect(quant, "l.1.q_proj", K3_SAYS_PLAIN, "");
  k3_quant_config_free(quant);
  quant = usable(CT("\"g\":{\"targets\":[\"a.q_proj\",\"a.k_proj\"]," FLOAT8 "}", ""), NULL);
  expect(quant, "a.v_proj", K3_SAYS_PLAIN, "");
  k3_quant_config_free(quant);
}

static void short_methods_leave_modules_to_the_tensors(void **state) {
  (void)state;
  static const struct {
    const char *config, *args;
  } cases[] = {
      {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"lm_head\",\"layers.1\"]}}",
       "float 8 bits, block of 128 x 128"},
      {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"ignored_layers\":[\"lm_head\",\"layers.1\"]}}", "float 8 bits, tensor"},
      {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[1,32],\"ignored_layers\":[\"lm_head\",\"layers.1\"]}}",
       "float 8 bits, group of 32"},
      {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[1,32],\"ignored_layers\":[\"lm_head\",\"layers.1\"]}}",
       "float 8 bits, group of 32"},
      {"{\"text_config\":{\"quantization_config\":{\"quant_method\":\"mxfp4\",\"modules_to_not_convert\":[\"lm_head\",\"layers.1\"]}}}",
       "float 4 bits, group of 32"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_quant_config *quant = usable(cases[i].config, NULL);
    expect(quant, "model.layers.10.up_proj", K3_SAYS_EITHER, cases[i].args);
    expect(quant, "model.layers.1.up_proj", K3_SAYS_PLAIN, "");
    expect(quant, "model.lm_head", K3_SAYS_PLAIN, "");
    k3_quant_config_free(quant);
  }
}

#define QUARK(more) "{\"quantization_config\":{\"quant_method\":\"quark\"," more "}}"
#define QUARK_FP4(group)                                                                                                                             \
  "{\"weight\":{\"dtype\":\"fp4\",\"qscheme\":\"per_group\",\"ch_axis\":-1,\"group_size\":" group ",\"scale_format\":\"e8m0\",\"is_dynamic\":false}" \
                                                                                                  "}"
#define QUARK_FP8 "{\"weight\":{\"dtype\":\"fp8_e4m3\",\"qscheme\":\"per_tensor\"}}"

// AMD's Quark: names and globs are left out, the global config holds for the rest, or configs by pattern alone.
static void quark_says_what_is_left_out(void **state) {
  (void)state;
  struct k3_quant_config *quant =
      usable(QUARK("\"exclude\":[\"lm_head\",\"*self_attn*\",\"re:.*shared_experts.*\"],\"global_quant_config\":" QUARK_FP4(
                 "32") ",\"layer_quant_config\":{},\"algo_config\":null,\"export\":{\"weight_format\":\"real_quantized\"}"),
             NULL);
  expect(quant, "model.layers.3.block_sparse_moe.experts.0.w1", K3_SAYS_EITHER, "float 4 bits, group of 32");
  expect(quant, "model.layers.3.self_attn.q_proj", K3_SAYS_PLAIN, "");
  expect(quant, "model.layers.3.block_sparse_moe.shared_experts.up_proj", K3_SAYS_PLAIN, "");
  expect(quant, "lm_head", K3_SAYS_PLAIN, "");
  expect(quant, "model.lm_head", K3_SAYS_EITHER, "float 4 bits, group of 32");  // a name is the whole name
  k3_quant_config_free(quant);
  quant = usable(QUARK("\"global_quant_config\":{\"weight\":null},\"layer_quant_config\":{\"*experts*\":" QUARK_FP4("32") "},\"exclude\":[]"), NULL);
  expect(quant, "model.layers.3.block_sparse_moe.experts.0.w1", K3_SAYS_EITHER, "float 4 bits, group of 32");
  expect(quant, "model.layers.3.self_attn.q_proj", K3_SAYS_PLAIN, "");
  k3_quant_config_free(quant);
}

static void quark_of_other_kinds_is_refused_by_name(void **state) {
  (void)state;
  static const struct {
    const char *config, *found;
    enum k3_rule rule;
  } cases[] = {
      {QUARK("\"global_quant_config\":" QUARK_FP8), "dtype \"fp8_e4m3\", qscheme \"per_tensor\"", K3_CFG21},
      {QUARK("\"global_quant_config\":" QUARK_FP4("16")), "group_size 16", K3_CFG21},
      {QUARK("\"global_quant_config\":" QUARK_FP4("32") ",\"layer_quant_config\":{\"*self_attn*\":" QUARK_FP8 "}"), "*self_attn*: Quark weights",
       K3_CFG21},
      {QUARK("\"global_quant_config\":" QUARK_FP4("32") ",\"layer_type_quant_config\":{\"Linear\":" QUARK_FP4("32") "}"), "by the type", K3_CFG21},
      {QUARK("\"global_quant_config\":" QUARK_FP4("32") ",\"export\":{\"weight_format\":\"fake_quantized\"}"), "fake_quantized", K3_CFG21},
      {QUARK("\"global_quant_config\":" QUARK_FP4("32") ",\"algo_config\":[{\"name\":\"awq\"},{\"name\":\"rotation\"}]"), "rotated weights",
       K3_CFG21},
      {QUARK("\"global_quant_config\":[]"), "another kind", K3_CFG20},
      {QUARK("\"global_quant_config\":{\"weight\":4}"), "another kind", K3_CFG20},
      {QUARK("\"layer_quant_config\":[]"), "another kind", K3_CFG20},
      {QUARK("\"exclude\":\"lm_head\""), "no list", K3_CFG20},
      {QUARK("\"exclude\":[1]"), "entry 0", K3_CFG20},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_findings findings = {0};
    assert_null(read_two(cases[i].config, NULL, &findings));
    if (findings.n_items != 1 || findings.items[0].error.rule != cases[i].rule || !strstr(findings.items[0].error.found, cases[i].found))
      fail_msg("%s: %zu findings, %s", cases[i].config, findings.n_items, findings.n_items ? findings.items[0].error.found : "");
    k3_findings_free(&findings);
  }
}

static void nothing_is_said_without_a_config(void **state) {
  (void)state;
  struct k3_findings findings = {0};
  assert_null(read_two("{\"model_type\":\"x\",\"quantization_config\":null}", NULL, &findings));
  assert_null(read_two("{\"model_type\":\"x\",\"quantization_config\":{}}", NULL, &findings));
  assert_null(read_two(NULL, NULL, &findings));
  assert_int_equal(findings.n_items, 0);
  k3_findings_free(&findings);
}

// Ten thousand exact names are looked up, not walked.
static void long_lists_of_names(void **state) {
  (void)state;
  enum { N = 10000 };
  size_t capacity = N * 64 + 400, n = 0;
  char *text = test_malloc(capacity);
  n += (size_t)snprintf(text, capacity,
                        "{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\",\"kv_cache_quant_algo\":null,\"exclude_modules\":[],"
                        "\"quantized_layers\":{");
  for (int i = 0; i < N; i++)
    n += (size_t)snprintf(text + n, capacity - n, "%s\"l.%d.proj\":{\"quant_algo\":\"FP8\"}", i ? "," : "", i);
  snprintf(text + n, capacity - n, "}}}");
  struct k3_quant_config *quant = usable(NULL, text);
  for (int i = 0; i < 2 * N; i++) {
    char module[32];
    snprintf(module, sizeof module, "l.%d.proj", i);
    expect(quant, module, i < N ? K3_SAYS_QUANTISED : K3_SAYS_PLAIN, i < N ? "float 8 bits, tensor" : "");
  }
  k3_quant_config_free(quant);
  test_free(text);
}

static void memory_may_fail(void **state) {
  (void)state;
  static const char text[] = CT("\"g\":{\"targets\":[\"Linear\",\"re:a.*\"]," FLOAT4 "},\"MXFP4\":[\"b\"]", "\"lm_head\",\"re:.*self_attn.*\"");
  static const char hf_text[] = "{\"quantization\":{\"quant_algo\":\"NVFP4\",\"kv_cache_quant_algo\":null,\"exclude_modules\":[\"lm_head\"]}}";
  struct k3_config *config = k3_config_parse(text, strlen(text), "config.json", NULL), *hf = k3_config_parse(hf_text, strlen(hf_text), "hf", NULL);
  assert_true(config && hf);
  bool done = false;
  for (uint64_t n = 1; !done && n < 1000; n++) {
    struct k3_quant_config *quant = NULL;
    struct k3_findings findings = {0};
    struct k3_error err = {0};
    k3_alloc_fail_at(n);
    enum k3_status status = k3_quant_config_read(config, hf, &quant, &findings, &err);
    k3_alloc_fail_at(0);
    done = status == K3_OK && !findings.out_of_memory;
    if (status != K3_OK) {
      assert_int_equal(status, K3_NO_MEMORY);
      assert_null(quant);
    }
    k3_quant_config_free(quant);
    k3_findings_free(&findings);
  }
  assert_true(done);
  k3_config_free(config);
  k3_config_free(hf);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(compressed_tensors_targets_and_ignore),
      cmocka_unit_test(specific_targets_win),
      cmocka_unit_test(presets_stand_for_schemes),
      cmocka_unit_test(strategies_are_derived_and_legacy_blocks_read),
      cmocka_unit_test(modelopt_algorithms_and_globs),
      cmocka_unit_test(unlisted_modules_are_plain),
      cmocka_unit_test(short_methods_leave_modules_to_the_tensors),
      cmocka_unit_test(quark_says_what_is_left_out),
      cmocka_unit_test(quark_of_other_kinds_is_refused_by_name),
      cmocka_unit_test(nothing_is_said_without_a_config),
      cmocka_unit_test(long_lists_of_names),
      cmocka_unit_test(memory_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
