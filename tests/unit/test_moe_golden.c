// The published counts of MiniMax-M3, DeepSeek-V3.2 and Kimi K3, computed from the recipes and the published configs alone, and from synthetic
// checkpoints of full geometry.
#include "loader/synth_parts.h"
#include "moe_rig.h"
#include "quant/scheme.h"

// The configs as published, as far as the recipes read them; written down here once more so that they do not share a mistake with the synthesiser.
#define ONES_57 "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"
static const char m3_config[] =
    "{\"architectures\": [\"MiniMaxM3SparseForConditionalGeneration\"], \"model_type\": \"minimax_m3_vl\", \"projector_hidden_size\": 6144,"
    " \"text_config\": {\"hidden_size\": 6144, \"num_hidden_layers\": 60, \"num_attention_heads\": 64, \"num_key_value_heads\": 4, \"head_dim\": 128,"
    " \"vocab_size\": 200064, \"intermediate_size\": 3072, \"dense_intermediate_size\": 12288, \"shared_intermediate_size\": 3072,"
    " \"num_local_experts\": 128, \"num_experts_per_tok\": 4, \"num_mtp_modules\": 7, \"moe_layer_freq\": [0,0,0," ONES_57
    "],"
    " \"sparse_attention_config\": {\"sparse_index_dim\": 128, \"sparse_num_index_heads\": 4, \"sparse_attention_freq\": [0,0,0," ONES_57
    "]}},"
    " \"vision_config\": {\"hidden_size\": 1280, \"num_hidden_layers\": 32, \"intermediate_size\": 5120, \"patch_size\": 14}}";
static const char v32_config[] =
    "{\"model_type\": \"deepseek_v32\", \"hidden_size\": 7168, \"num_hidden_layers\": 61, \"num_nextn_predict_layers\": 1, \"intermediate_size\": "
    "18432,"
    " \"moe_intermediate_size\": 2048, \"num_attention_heads\": 128, \"vocab_size\": 129280, \"q_lora_rank\": 1536, \"kv_lora_rank\": 512,"
    " \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"n_routed_experts\": 256, \"n_shared_experts\": 1,"
    " \"num_experts_per_tok\": 8, \"first_k_dense_replace\": 3, \"index_n_heads\": 64, \"index_head_dim\": 128}";
static const char k3_config[] =
    "{\"model_type\": \"kimi_k3\", \"text_config\": {\"hidden_size\": 7168, \"num_hidden_layers\": 93, \"intermediate_size\": 33792,"
    " \"vocab_size\": 163840, \"num_attention_heads\": 96, \"q_lora_rank\": 1536, \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128,"
    " \"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"mla_use_output_gate\": true, \"num_experts\": 896, \"num_experts_per_token\": 16,"
    " \"num_shared_experts\": 2, \"moe_intermediate_size\": 3072, \"routed_expert_hidden_size\": 3584, \"latent_moe_use_norm\": true,"
    " \"first_k_dense_replace\": 1, \"linear_attn_config\": {\"num_heads\": 96, \"head_dim\": 128, \"short_conv_kernel_size\": 4,"
    " \"use_full_rank_gate\": true, \"full_attn_layers\": [4,8,12,16,20,24,28,32,36,40,44,48,52,56,60,64,68,72,76,80,84,88,92,93],"
    " \"kda_layers\": [1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26,27,29,30,31,33,34,35,37,38,39,41,42,43,45,46,47,49,50,51,53,54,55,57,"
    "58,59,61,62,63,65,66,67,69,70,71,73,74,75,77,78,79,81,82,83,85,86,87,89,90,91]}},"
    " \"vision_config\": {\"patch_size\": 14, \"init_pos_emb_height\": 64, \"init_pos_emb_width\": 64, \"vt_num_hidden_layers\": 27,"
    " \"vt_hidden_size\": 1024, \"vt_intermediate_size\": 4096, \"qkv_hidden_size\": 1536, \"merge_kernel_size\": [2, 2]}}";

// What the recipe expects of a checkpoint, prediction modules only when asked for.
struct totals {
  uint64_t n_tensors, n_elems;
  uint64_t n_wide;                     // elements of parameters that are F32 alone
  uint64_t n_linears, linear_elems;    // matrices whose name holds one of the given parts
  uint64_t n_scales_32, n_scales_128;  // of these, one per 32 columns, one per 128 x 128
};

static bool named(const char *name, const char *const *parts) {
  for (; parts && *parts; parts++) {
    if (strstr(name, *parts))
      return true;
  }
  return false;
}

static struct totals totals_of(const char *recipe_name, const char *config_text, bool prediction, const char *const *quantised,
                               const char *const * not ) {
  struct k3_error err = {0};
  struct k3_recipe recipe;
  struct k3_mapper mapper;
  struct totals totals = {0};
  struct k3_config *config = k3_config_parse(config_text, strlen(config_text), "config.json", &err);
  assert_non_null(config);
  assert_int_equal(k3_recipe_load(recipe_name, &recipe, &err), K3_OK);
  if (k3_mapper_create(&recipe, config, &mapper, &err) != K3_OK)
    fail_msg("%s: %s %s", recipe_name, err.tensor, err.found);
  for (size_t m = 0; m < recipe.n_modules; m++) {
    const struct k3_recipe_module *module = &recipe.modules[m];
    if (!mapper.exists[m])
      continue;
    uint64_t n_instances = 1;
    for (size_t i = 0; i < recipe.n_indexes; i++) {
      char letter[4] = {'{', recipe.indexes[i].letter, '}', '\0'};
      if (!strstr(module->name, letter))
        continue;
      uint64_t count = mapper.index_counts[i], n = 0, from = mapper.optional_from[i];
      for (uint64_t v = 0; v < count; v++)
        n += (i > 0 || k3_mapper_layer_exists(&mapper, m, v)) && (prediction || v < from);
      n_instances *= n;
    }
    for (size_t p = 0; p < module->n_params; p++) {
      uint64_t shape[K3_RECIPE_MAX_RANK], n_elems = n_instances, zeros[K3_RECIPE_MAX_INDEXES] = {0};
      for (unsigned d = 0; n_instances > 0 && d < module->params[p].rank; d++) {
        assert_int_equal(k3_recipe_eval(&recipe, config, module->params[p].shape[d], zeros, &shape[d], &err), K3_OK);
        n_elems *= shape[d];
      }
      totals.n_tensors += n_instances;
      totals.n_elems += n_elems;
      if ((module->dtypes & 1u << K3_DTYPE_F32) && !(module->dtypes & 1u << K3_DTYPE_F16))
        totals.n_wide += n_elems;
      if (n_instances > 0 && module->linear && p == 0 && module->params[0].rank == 2 && (!quantised || named(module->name, quantised)) &&
          !named(module->name, not )) {
        totals.n_linears += n_instances;
        totals.linear_elems += n_elems;
        totals.n_scales_32 += n_instances * shape[0] * (shape[1] / 32);
        totals.n_scales_128 += n_instances * ((shape[0] + 127) / 128) * ((shape[1] + 127) / 128);
      }
    }
  }
  k3_mapper_free(&mapper);
  k3_recipe_free(&recipe);
  k3_config_free(config);
  return totals;
}

// "MiniMax-M3 BF16 23,416 tensors and 854,172,958,720 payload bytes, MXFP8 45,838 and 443,742,085,120".
static void minimax_m3_by_its_recipe(void **state) {
  (void)state;
  struct totals t = totals_of("minimax-m3", m3_config, false, NULL, NULL);
  assert_int_equal(t.n_tensors, 23416);
  assert_int_equal(t.n_elems, UINT64_C(427040140160));
  const uint64_t patch = 1505280;  // stored in F32, which the recipe leaves open
  assert_int_equal(t.n_wide + patch, 46339200);
  assert_int_equal(2 * t.n_elems + 2 * (t.n_wide + patch), UINT64_C(854172958720));
  assert_int_equal(t.n_linears, 22422);
  assert_int_equal(t.n_tensors + t.n_linears, 45838);
  assert_int_equal(t.linear_elems, UINT64_C(423670579200));
  assert_int_equal(t.n_scales_32, UINT64_C(13239705600));
  assert_int_equal(t.linear_elems + t.n_scales_32 + 2 * (t.n_elems - t.linear_elems) + 2 * (t.n_wide + patch), UINT64_C(443742085120));
}

// "DeepSeek-V3.2 92,425 tensors in 163 shards, 685,396,921,376 elements".
static void deepseek_v32_by_its_recipe(void **state) {
  (void)state;
  static const char *const plain[] = {"eh_proj", NULL};
  struct totals t = totals_of("deepseek-v3.2", v32_config, true, NULL, plain);
  assert_int_equal(t.n_tensors, 46493);
  assert_int_equal(t.n_elems, UINT64_C(685355329792));
  assert_int_equal(t.n_linears, 45932);
  assert_int_equal(t.n_tensors + t.n_linears, 92425);
  assert_int_equal(t.n_scales_128, 41591584);
  assert_int_equal(t.n_elems + t.n_scales_128, UINT64_C(685396921376));
  assert_int_equal(t.linear_elems, UINT64_C(681408069632));
  struct totals without = totals_of("deepseek-v3.2", v32_config, false, NULL, plain);
  assert_int_equal(without.n_tensors, 45700);
  assert_int_equal(without.n_linears, 45154);
  assert_int_equal(without.n_elems, UINT64_C(671877944064));
}

// 3.8 #7, "Kimi K3 497,220 tensors in 96 shards, total_size 1,560,860,324,864".
static void kimi_k3_by_its_recipe(void **state) {
  (void)state;
  static const char *const experts[] = {".experts.", NULL};
  struct totals t = totals_of("kimi-k3", k3_config, false, experts, NULL);
  assert_int_equal(t.n_elems, UINT64_C(2779931837184));
  assert_int_equal(t.n_wide, 11122432);
  assert_int_equal(t.linear_elems, UINT64_C(2722740830208));
  assert_int_equal(t.n_linears, 92 * 896 * 3);
  assert_int_equal(t.n_tensors + t.n_linears, 497220);
  assert_int_equal(t.n_elems - t.linear_elems - t.n_wide, UINT64_C(57179884544));
  assert_int_equal(t.linear_elems / 2 + t.n_scales_32 + 2 * (t.n_elems - t.linear_elems) + 2 * t.n_wide, UINT64_C(1560860324864));
}

// "The tiny fixtures have exactly the counts of the page": tensors and bytes of every small preset.
static void tiny_presets_have_their_counts(void **state) {
  (void)state;
  static const struct {
    const char *preset;
    uint64_t n_tensors, nbytes;
  } rows[] = {{"m3-tiny-text", 101, 440944},  {"m3-tiny", 144, 532080},           {"m3-tiny-mtp", 177, 658816},
              {"m3-tiny-mxfp8", 214, 336656}, {"m3-tiny-mtp-mxfp8", 269, 402880}, {"m3-tiny-native", 144, 532080},
              {"v32-tiny", 267, 612904},      {"v32-tiny-128", 267, 610784},      {"k3-tiny", 236, 455688}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const char *folder = temp_path(rows[i].preset);
    struct k3_synth_report report = moe_synth(folder, rows[i].preset);
    assert_int_equal(report.n_tensors, rows[i].n_tensors);
    assert_int_equal(report.weights_nbytes, rows[i].nbytes);
    struct moe_check check;
    moe_check(folder, &check);
    if (check.findings.n_errors)
      moe_print(&check);
    assert_int_equal(check.findings.n_errors, 0);
    assert_int_equal(check.summary.n_tensors, rows[i].n_tensors);
    assert_int_equal(check.summary.n_tensors_expected, rows[i].n_tensors);
    moe_close(&check);
  }
  assert_int_equal(moe_synth(temp_path("k3-tiny"), "k3-tiny").files_nbytes, 485432);
}

// One of each family of names in every small preset, one at a time: it is absent, and that is said by name, with the index still promising it and
// without an index.
static void each_absent_tensor_is_named(void **state) {
  (void)state;
  static const char *const presets[] = {"m3-tiny-mtp-mxfp8", "m3-tiny-nvfp4", "m3-tiny-native", "v32-tiny", "k3-tiny", "k3-tiny-nvfp4"};
  for (size_t p = 0; p < sizeof presets / sizeof presets[0]; p++) {
    const char *folder = temp_path(presets[p]);
    moe_synth(folder, presets[p]);
    struct k3_ckpt whole;
    struct k3_findings findings = {0};
    assert_int_equal(k3_ckpt_open(folder, NULL, &whole, &findings, NULL), K3_OK);
    static char seen[256][512];
    size_t n_seen = 0;
    uint8_t *drop = calloc(whole.n_tensors, 1);
    for (uint64_t t = 0; t < whole.n_tensors; t++) {
      const char *name = k3_ckpt_tensor(&whole, t)->name;
      char family[512];
      moe_family(name, family);
      bool known = false;
      for (size_t i = 0; i < n_seen; i++)
        known |= strcmp(seen[i], family) == 0;
      if (known)
        continue;
      memcpy(seen[n_seen++], family, sizeof family);
      drop[t] = 1;
      for (int with_index = 1; with_index >= 0; with_index--) {
        struct moe_check check;
        moe_drop(&whole, temp_path("absent"), drop, with_index == 1);
        moe_check(temp_path("absent"), &check);
        if (!moe_named(&check, name)) {
          moe_print(&check);
          fail_msg("%s: %s is absent (%s index), and nobody says so", presets[p], name, with_index ? "with" : "without");
        }
        moe_close(&check);
      }
      drop[t] = 0;
    }
    print_message("%s: %zu families\n", presets[p], n_seen);
    assert_true(n_seen > 20);
    free(drop);
    k3_ckpt_close(&whole);
    k3_findings_free(&findings);
    assert_int_equal(nftw(temp_path("absent"), temp_remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(minimax_m3_by_its_recipe),       cmocka_unit_test(deepseek_v32_by_its_recipe),  cmocka_unit_test(kimi_k3_by_its_recipe),
      cmocka_unit_test(tiny_presets_have_their_counts), cmocka_unit_test(each_absent_tensor_is_named),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
