// The linear layers of synthetic quantised drafters: which scheme each is found to have, what its scales say, and how severe that is for whom.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "loader/check.h"
#include "loader/linears.h"
#include "loader/synth.h"
#include "temp_folder.h"
#include "unit.h"

struct opened {
  struct k3_ckpt ckpt;
  struct k3_recipe recipe;
  struct k3_plan plan;
  struct k3_check_summary summary;
  struct k3_findings findings;
};

static void open_synth(struct opened *o, const struct k3_synth_options *options, const char *recipe) {
  struct k3_error err = {0};
  struct k3_check_options check = {.recipe = recipe, .depth = K3_DEPTH_SCALES, .n_threads = 1, .plan = {.digests = true}};
  *o = (struct opened){0};
  if (k3_synth_write(temp_path("source"), options, NULL, &err) != K3_OK ||
      k3_ckpt_open(temp_path("source"), NULL, &o->ckpt, &o->findings, &err) != K3_OK ||
      k3_check_run(&o->ckpt, NULL, &check, &o->recipe, &o->plan, &o->summary, &o->findings, &err) != K3_OK)
    fail_msg("%s", err.found);
}

static void close_all(struct opened *o) {
  k3_plan_free(&o->plan);
  k3_recipe_free(&o->recipe);
  k3_ckpt_close(&o->ckpt);
  k3_findings_free(&o->findings);
}

static const struct k3_linear *linear_of(const struct opened *o, const char *name) {
  char text[512];
  for (size_t i = 0; i < o->plan.linears.n_items; i++) {
    if (strcmp(k3_linear_text(&o->plan.linears.items[i], text, sizeof text), name) == 0)
      return &o->plan.linears.items[i];
  }
  fail_msg("no linear layer %s", name);
  return NULL;
}

static const struct row {
  enum k3_scheme scheme;
  enum k3_synth_dialect dialect;
  enum k3_dtype scale_dtype;
  enum k3_second_scale second;
} TABLE[] = {
    {K3_SCHEME_FP8_CHANNEL, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_BF16, K3_SECOND_NONE},
    {K3_SCHEME_FP8_CHANNEL, K3_SYNTH_MODELOPT, K3_DTYPE_F32, K3_SECOND_NONE},
    {K3_SCHEME_FP8_TENSOR, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_BF16, K3_SECOND_NONE},
    {K3_SCHEME_FP8_TENSOR, K3_SYNTH_MODELOPT, K3_DTYPE_F32, K3_SECOND_NONE},
    {K3_SCHEME_FP8_TENSOR, K3_SYNTH_DEEPSEEK, K3_DTYPE_F32, K3_SECOND_NONE},
    {K3_SCHEME_FP8_BLOCK, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_BF16, K3_SECOND_NONE},
    {K3_SCHEME_FP8_BLOCK, K3_SYNTH_MODELOPT, K3_DTYPE_F32, K3_SECOND_NONE},
    {K3_SCHEME_FP8_BLOCK, K3_SYNTH_DEEPSEEK, K3_DTYPE_F32, K3_SECOND_NONE},
    {K3_SCHEME_MXFP8, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_U8, K3_SECOND_NONE},
    {K3_SCHEME_MXFP8, K3_SYNTH_DEEPSEEK, K3_DTYPE_U8, K3_SECOND_NONE},
    {K3_SCHEME_NVFP4, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_F8_E4M3, K3_SECOND_DIVIDE},
    {K3_SCHEME_NVFP4, K3_SYNTH_MODELOPT, K3_DTYPE_F8_E4M3, K3_SECOND_MULTIPLY},
    {K3_SCHEME_MXFP4, K3_SYNTH_COMPRESSED_TENSORS, K3_DTYPE_U8, K3_SECOND_NONE},
    {K3_SCHEME_MXFP4, K3_SYNTH_MODELOPT, K3_DTYPE_U8, K3_SECOND_NONE},
};

static void schemes_are_found(void **state) {
  (void)state;
  for (size_t r = 0; r < sizeof TABLE / sizeof TABLE[0]; r++) {
    for (int generic = 0; generic < 2; generic++) {
      struct opened o;
      open_synth(
          &o,
          &(struct k3_synth_options){
              .preset = "tiny", .dtype = K3_DTYPE_BF16, .scheme = TABLE[r].scheme, .dialect = TABLE[r].dialect, .replace = true, .n_threads = 1},
          generic ? "generic" : "k3-dspark");
      const struct k3_quant_scheme usual = k3_quant_scheme_default(TABLE[r].scheme);
      const struct k3_linear *kv = linear_of(&o, "layers.2.self_attn.kv_a_proj_with_mqa");
      if (kv->scheme.scheme != TABLE[r].scheme)
        fail_msg("row %zu: found %s instead of %s", r, k3_scheme_name(kv->scheme.scheme), k3_scheme_name(TABLE[r].scheme));
      assert_int_equal(kv->scheme.scale_dtype, TABLE[r].scale_dtype);
      assert_int_equal(kv->scheme.second, TABLE[r].second);
      assert_int_equal(kv->scheme.block_rows, usual.block_rows);
      assert_int_equal(kv->scheme.block_cols, usual.block_cols);
      assert_int_equal(kv->n_rows, 40);
      assert_int_equal(kv->n_cols, 64);
      assert_true(kv->is_sound && !kv->is_plain && kv->is_linear);
      const struct k3_linear *plain = linear_of(&o, "layers.2.self_attn.kv_b_proj"), *table = linear_of(&o, "embed_tokens");
      assert_true(plain->is_plain && plain->is_linear && plain->scheme.scheme == K3_SCHEME_BF16 && plain->says->says == K3_SAYS_PLAIN);
      assert_true(table->is_plain && !table->is_linear);
      assert_int_equal(o.findings.n_errors + o.findings.n_warnings, o.findings.n_by_rule[K3_TEN14]);  // that one is about the head, under generic
      // 7 projections in each of 3 layers, context_proj, and markov_w2 where its 16 columns are whole groups.
      bool mx = TABLE[r].scheme == K3_SCHEME_MXFP8 || TABLE[r].scheme == K3_SCHEME_MXFP4;
      assert_int_equal(o.plan.linears.n_quantised, 3 * 7 - 0 + (mx ? 1 : 2));
      close_all(&o);
    }
  }
}

static void plain_checkpoints_have_no_quantised_layers(void **state) {
  (void)state;
  struct opened o;
  open_synth(&o, &(struct k3_synth_options){.preset = "tiny", .dtype = K3_DTYPE_BF16, .replace = true, .n_threads = 1}, "k3-dspark");
  assert_int_equal(o.plan.linears.n_quantised, 0);
  assert_null(o.plan.linears.config);
  assert_int_equal(o.findings.n_items, 0);
  close_all(&o);
}

// What the scales say is what the encoder was given: the largest weight of a layer, whatever the direction of its second scale.
static void facts_of_scales(void **state) {
  (void)state;
  for (int dialect = K3_SYNTH_COMPRESSED_TENSORS; dialect <= K3_SYNTH_MODELOPT; dialect++) {
    for (int share = K3_SYNTH_SHARE_NONE; share <= K3_SYNTH_SHARE_COMPONENT; share++) {
      struct opened o;
      open_synth(&o,
                 &(struct k3_synth_options){.preset = "tiny",
                                            .dtype = K3_DTYPE_BF16,
                                            .scheme = K3_SCHEME_NVFP4,
                                            .dialect = (enum k3_synth_dialect)dialect,
                                            .share = (enum k3_synth_share)share,
                                            .replace = true,
                                            .n_threads = 1},
                 "k3-dspark");
      struct k3_scale_facts *facts = test_calloc(o.plan.linears.n_items, sizeof *facts);
      struct k3_findings findings = {0};
      assert_int_equal(k3_rules_scales(&o.plan, K3_JUDGE_K3PACK, 2, facts, &findings, NULL), K3_OK);
      size_t q = (size_t)(linear_of(&o, "layers.0.self_attn.q_a_proj") - o.plan.linears.items);
      size_t kv = (size_t)(linear_of(&o, "layers.0.self_attn.kv_a_proj_with_mqa") - o.plan.linears.items);
      size_t other = (size_t)(linear_of(&o, "layers.1.self_attn.q_a_proj") - o.plan.linears.items);
      assert_true(facts[q].read && facts[q].has_second && facts[q].has_input && facts[q].factor > 0);
      // 6 codes * 448: the tensor with the largest weight is tight, at least within the rounding of its largest block scale.
      float amax_q = 6 * facts[q].max_scale * facts[q].factor, amax_kv = 6 * facts[kv].max_scale * facts[kv].factor;
      assert_true(amax_kv / amax_q > 5 && amax_kv / amax_q < 11);
      assert_true(share == K3_SYNTH_SHARE_NONE ? facts[q].second != facts[kv].second : facts[q].second == facts[kv].second);
      assert_true(share == K3_SYNTH_SHARE_COMPONENT ? facts[q].second == facts[other].second : facts[q].second != facts[other].second);
      assert_true(share == K3_SYNTH_SHARE_NONE ? facts[q].max_scale == 448 : facts[q].max_scale < 224);
      assert_float_equal(facts[q].input, facts[kv].input, 0);
      test_free(facts);
      k3_findings_free(&findings);
      close_all(&o);
    }
  }
}

// Only FUS, CFG07-09 and CFG15-18 differ by engine; k3pack's own severities are the catalogue's.
static void severities(void **state) {
  (void)state;
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++) {
    const char *id = k3_rule_info((enum k3_rule)rule)->id;
    bool may_differ = strncmp(id, "FUS", 3) == 0 || strcmp(id, "CFG07") == 0 || strcmp(id, "CFG08") == 0 || strcmp(id, "CFG09") == 0 ||
                      (strcmp(id, "CFG15") >= 0 && strcmp(id, "CFG18") <= 0 && strncmp(id, "CFG", 3) == 0);
    assert_int_equal(k3_rule_severity((enum k3_rule)rule, K3_JUDGE_K3PACK), k3_rule_info((enum k3_rule)rule)->severity);
    for (int engine = K3_JUDGE_VLLM; engine <= K3_JUDGE_TRTLLM && !may_differ; engine++)
      assert_int_equal(k3_rule_severity((enum k3_rule)rule, (enum k3_judge)engine), k3_rule_info((enum k3_rule)rule)->severity);
  }
  assert_int_equal(k3_rule_severity(K3_FUS02, K3_JUDGE_K3PACK), K3_INFO);
  assert_int_equal(k3_rule_severity(K3_FUS02, K3_JUDGE_VLLM), K3_ERROR);
  assert_int_equal(k3_rule_severity(K3_FUS05, K3_JUDGE_VLLM), K3_ERROR);
  assert_int_equal(k3_rule_severity(K3_FUS06, K3_JUDGE_VLLM), K3_ERROR);
}

static void names_of_cache_scales(void **state) {
  (void)state;
  static const struct {
    const char *name;
    char which;
    const char *stem;
  } cases[] = {
      {"l.0.self_attn.k_scale", 'k', "l.0.self_attn"},
      {"l.0.self_attn.k_proj.k_scale", 'k', "l.0.self_attn"},
      {"l.0.self_attn.attn.v_scale", 'v', "l.0.self_attn"},
      {"l.0.self_attn.v_proj.output_scale", 'v', "l.0.self_attn"},
      {"l.0.self_attn.q_proj.q_scale", 'q', "l.0.self_attn"},
      {"l.0.self_attn.kv_scale", 'b', "l.0.self_attn"},
      {"l.0.mlp.up_proj.weight_scale", 0, ""},
      {"k_scale", 0, ""},
      {"l.0.o_proj.output_scale", 0, ""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    size_t stem = 0;
    char which = k3_kv_scale_of(cases[i].name, strlen(cases[i].name), &stem);
    if (which != cases[i].which || (which && (stem != strlen(cases[i].stem) || memcmp(cases[i].name, cases[i].stem, stem) != 0)))
      fail_msg("%s", cases[i].name);
  }
}

// Any allocation may fail, and nothing leaks or is half done.
static void memory_may_fail(void **state) {
  (void)state;
  struct k3_synth_options options = {.preset = "tiny", .dtype = K3_DTYPE_BF16, .scheme = K3_SCHEME_NVFP4, .replace = true, .n_threads = 1};
  assert_int_equal(k3_synth_write(temp_path("source"), &options, NULL, NULL), K3_OK);
  struct k3_check_options check = {.recipe = "k3-dspark", .depth = K3_DEPTH_SCALES, .n_threads = 1};
  bool done = false;
  for (uint64_t n = 1; !done && n < 20000; n += 1 + n / 16) {
    struct opened o = {0};
    struct k3_error err = {0};
    assert_int_equal(k3_ckpt_open(temp_path("source"), NULL, &o.ckpt, &o.findings, &err), K3_OK);
    k3_alloc_fail_at(n);
    uint64_t before = k3_alloc_count();
    enum k3_status status = k3_check_run(&o.ckpt, NULL, &check, &o.recipe, &o.plan, &o.summary, &o.findings, &err);
    k3_alloc_fail_at(0);
    done = k3_alloc_count() - before < n;
    assert_true(status == K3_OK || status == K3_NO_MEMORY);
    close_all(&o);
  }
  assert_true(done);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(schemes_are_found),     cmocka_unit_test(plain_checkpoints_have_no_quantised_layers),
      cmocka_unit_test(facts_of_scales),       cmocka_unit_test(severities),
      cmocka_unit_test(names_of_cache_scales), cmocka_unit_test(memory_may_fail),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
