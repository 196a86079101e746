// The mapper: names to destinations, in the order that a loader sees them.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "formats/config.h"
#include "loader/mapper.h"
#include "loader/recipes.h"

static const char CONFIG[] =
    "{\"model_type\": \"k3_dspark\", \"hidden_size\": 64, \"intermediate_size\": 128, \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
    " \"q_lora_rank\": 32, \"kv_lora_rank\": 16, \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 16, \"vocab_size\": 512,"
    " \"target_hidden_size\": 64, \"target_layer_ids\": [1, 5, 9], \"markov_rank\": 16, \"confidence_head_with_markov\": true}";

struct fixture {
  struct k3_config *config;
  struct k3_recipe recipe;
  struct k3_mapper mapper;
};

static int set_up(void **state) {
  static struct fixture f;
  struct k3_error err = {0};
  memset(&f, 0, sizeof f);
  f.config = k3_config_parse(CONFIG, strlen(CONFIG), "config.json", &err);
  assert_non_null(f.config);
  assert_int_equal(k3_recipe_load("k3-dspark", &f.recipe, &err), K3_OK);
  assert_int_equal(k3_mapper_create(&f.recipe, f.config, &f.mapper, &err), K3_OK);
  k3_mapper_set_root(&f.mapper, "");
  *state = &f;
  return 0;
}

static int tear_down(void **state) {
  struct fixture *f = *state;
  k3_mapper_free(&f->mapper);
  k3_recipe_free(&f->recipe);
  k3_config_free(f->config);
  return 0;
}

static enum k3_mapper_answer resolve(struct fixture *f, const char *name, struct k3_mapped *mapped) {
  const char *why = NULL;
  memset(mapped, 0, sizeof *mapped);
  return k3_mapper_resolve(&f->mapper, name, strlen(name), mapped, &why);
}

// A stream of layers.0...weight_packed and layers.1...weight_scale gives four names in order with shard ids 1, 0, 1, 1: the loader contract that
// vLLM's K3 drafter has, for every parameter suffix. That the bytes are shared shows in the plan: the second destination is a view.
static void stream_of_two_gives_four_names_in_order(void **state) {
  struct fixture *f = *state;
  static const char *const stream[] = {"layers.0.self_attn.kv_a_proj_with_mqa.weight_packed", "layers.1.self_attn.kv_a_proj_with_mqa.weight_scale"};
  static const char *const names[] = {
      "model.layers.0.self_attn.fused_qkv_a_proj.weight_packed", "model.context_kv_proj.weight_packed",
      "model.layers.1.self_attn.fused_qkv_a_proj.weight_scale", "model.context_kv_proj.weight_scale"};
  static const uint64_t shards[] = {1, 0, 1, 1};
  static const bool views[] = {false, true, false, true};
  size_t n = 0;
  for (size_t i = 0; i < 2; i++) {
    struct k3_mapped mapped;
    struct k3_destination places[2];
    assert_int_equal(resolve(f, stream[i], &mapped), K3_MAPPED);
    size_t n_places = k3_mapper_destinations(&f->mapper, &mapped, true, places);
    assert_int_equal(n_places, 2);
    for (size_t p = 0; p < n_places; p++, n++) {
      assert_string_equal(places[p].name, names[n]);
      assert_int_equal(places[p].shard, shards[n]);
      assert_int_equal(places[p].view, views[n]);
    }
  }
  assert_int_equal(n, 4);
}

// Every suffix is duplicated, scalars included.
static void every_parameter_suffix_has_two_places(void **state) {
  struct fixture *f = *state;
  static const char *const suffixes[] = {"weight",       "weight_packed",    "weight_scale", "weight_global_scale", "weight_scale_2",
                                         "input_scale", "weight_scale_inv", "input_global_scale"};
  static const char *const in_image[] = {"weight",       "weight_packed", "weight_scale", "weight_global_scale", "weight_global_scale",
                                         "input_scale", "weight_scale",  "input_global_scale"};
  for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
    char name[128], wanted[128];
    struct k3_mapped mapped;
    struct k3_destination places[2];
    snprintf(name, sizeof name, "layers.1.self_attn.kv_a_proj_with_mqa.%s", suffixes[i]);
    assert_int_equal(resolve(f, name, &mapped), K3_MAPPED);
    assert_int_equal(k3_mapper_destinations(&f->mapper, &mapped, false, places), 2);
    snprintf(wanted, sizeof wanted, "model.layers.1.self_attn.fused_qkv_a_proj.%s", in_image[i]);
    assert_string_equal(places[0].name, wanted);
    snprintf(wanted, sizeof wanted, "model.context_kv_proj.%s", in_image[i]);
    assert_string_equal(places[1].name, wanted);
    assert_int_equal(places[0].shard, 1);
    assert_int_equal(places[1].shard, 1);
  }
}

// Names match as whole components, numbers in their one spelling, layers below the count.
static void names_match_as_whole_components(void **state) {
  struct fixture *f = *state;
  struct k3_mapped mapped;
  assert_int_equal(resolve(f, "layers.0.mlp.gate_proj.weight", &mapped), K3_MAPPED);
  assert_int_equal(resolve(f, "layers.0.mlp.xgate_proj.weight", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "layers.0.mlp.gate_proj.weightx", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "layers.0.mlp.gate_proj", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "layers.2.mlp.gate_proj.weight", &mapped), K3_BEYOND_COUNT);
  assert_int_equal(resolve(f, "layers.18446744073709551616.mlp.gate_proj.weight", &mapped), K3_ODD_NUMBER);
  assert_int_equal(resolve(f, "layers.01.mlp.gate_proj.weight", &mapped), K3_ODD_NUMBER);
  assert_int_equal(resolve(f, "layers.+1.mlp.gate_proj.weight", &mapped), K3_ODD_NUMBER);
  assert_int_equal(resolve(f, "layers.1x.mlp.gate_proj.weight", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "rotary_emb.inv_freq", &mapped), K3_MAPPED_IGNORE);
  assert_int_equal(resolve(f, "layers.1.self_attn.rotary_emb.inv_freq", &mapped), K3_MAPPED_IGNORE);
  assert_int_equal(resolve(f, "", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "...", &mapped), K3_UNKNOWN_NAME);
}

// fc, hidden_norm and norm are context_proj, context_norm and final_norm; layer norms are not.
static void aliases_name_whole_modules(void **state) {
  struct fixture *f = *state;
  static const char *const pairs[][2] = {{"fc.weight", "model.context_proj.weight"},
                                         {"encoder.fc.weight", "model.context_proj.weight"},
                                         {"main_proj.weight", "model.context_proj.weight"},
                                         {"hidden_norm.weight", "model.context_norm.weight"},
                                         {"norm.weight", "model.final_norm.weight"},
                                         {"lm_head.weight", "lm_head.weight"}};
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    struct k3_mapped mapped;
    struct k3_destination places[2];
    assert_int_equal(resolve(f, pairs[i][0], &mapped), K3_MAPPED);
    assert_int_equal(k3_mapper_destinations(&f->mapper, &mapped, false, places), 1);
    assert_string_equal(places[0].name, pairs[i][1]);
  }
  struct k3_mapped mapped;
  assert_int_equal(resolve(f, "layers.0.norm.weight", &mapped), K3_UNKNOWN_NAME);
}

// Under the root "model." the head is found inside and outside of it; nothing else is.
static void the_head_may_stand_outside_the_root(void **state) {
  struct fixture *f = *state;
  struct k3_mapped mapped;
  k3_mapper_set_root(&f->mapper, "language_model.model.");
  assert_int_equal(resolve(f, "language_model.model.lm_head.weight", &mapped), K3_MAPPED);
  assert_int_equal(resolve(f, "language_model.lm_head.weight", &mapped), K3_MAPPED);
  assert_int_equal(resolve(f, "language_model.final_norm.weight", &mapped), K3_UNKNOWN_NAME);
  assert_int_equal(resolve(f, "final_norm.weight", &mapped), K3_UNKNOWN_NAME);
}

// Taps have norms of their own only when the config says so.
static void modules_exist_by_config(void **state) {
  struct fixture *f = *state;
  struct k3_mapped mapped;
  assert_int_equal(resolve(f, "fc_norm.0.weight", &mapped), K3_UNKNOWN_NAME);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(stream_of_two_gives_four_names_in_order, set_up, tear_down),
      cmocka_unit_test_setup_teardown(every_parameter_suffix_has_two_places, set_up, tear_down),
      cmocka_unit_test_setup_teardown(names_match_as_whole_components, set_up, tear_down),
      cmocka_unit_test_setup_teardown(aliases_name_whole_modules, set_up, tear_down),
      cmocka_unit_test_setup_teardown(the_head_may_stand_outside_the_root, set_up, tear_down),
      cmocka_unit_test_setup_teardown(modules_exist_by_config, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
