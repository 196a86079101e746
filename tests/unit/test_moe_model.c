// Geometry of the decoder layers from a manifest: what is read, what may be absent, what is refused by name.
#include <stdio.h>
#include <string.h>

#include "formats/moe_model.h"
#include "unit.h"

static const char M3[] =
    "{\"activation\":{\"alpha\":1.702,\"limit\":7,\"name\":\"swiglu-oai\"},\"dense_intermediate_size\":96,\"family\":\"minimax-m3\",\"head_dim\":16,"
    "\"hidden_size\":64,\"index\":{\"block_size\":4,\"topk_blocks\":2},\"intermediate_size\":32,\"max_position_embeddings\":4096,"
    "\"moe_layers\":[0,1],\"norm\":{\"flavour\":\"gemma\"},\"num_attention_heads\":8,\"num_experts\":4,\"num_experts_per_token\":2,"
    "\"num_hidden_layers\":2,\"num_key_value_heads\":2,\"rms_norm_eps\":1e-6,\"rope\":{\"partial_rotary_factor\":0.5,\"rotary_dim\":8,\"theta\":"
    "10000},"
    "\"rotation\":{\"self_attn.q_proj\":{\"layout\":\"half-split\"}},\"routed_scaling_factor\":2,\"shared_intermediate_size\":32,"
    "\"sparse_layers\":[0,1]}";
static const char V32[] =
    "{\"activation\":{\"name\":\"silu\"},\"family\":\"deepseek-v3.2\",\"first_k_dense_replace\":1,\"hidden_size\":96,\"index\":{\"topk\":8},"
    "\"intermediate_size\":104,\"kv_lora_rank\":40,\"max_position_embeddings\":128,\"moe_intermediate_size\":40,\"n_group\":4,"
    "\"norm\":{\"flavour\":\"plain\"},\"norm_topk_prob\":true,\"num_attention_heads\":2,\"num_experts\":8,\"num_experts_per_token\":2,"
    "\"num_hidden_layers\":3,\"num_shared_experts\":1,\"q_lora_rank\":48,\"qk_nope_head_dim\":16,\"qk_rope_head_dim\":16,\"rms_norm_eps\":1e-6,"
    "\"rope\":{\"scaling\":{\"beta_fast\":32,\"beta_slow\":1,\"factor\":4,\"mscale\":1,\"mscale_all_dim\":1,\"original_max_position_embeddings\":32,"
    "\"type\":\"yarn\"},\"theta\":10000},\"rotation\":{\"self_attn.indexer.wk\":{\"layout\":\"half-split\",\"width\":16},"
    "\"self_attn.indexer.wq_b\":{\"layout\":\"half-split\"},\"self_attn.kv_a_proj_with_mqa\":{\"layout\":\"interleaved\"},"
    "\"self_attn.q_b_proj\":{\"layout\":\"interleaved\"}},\"routed_scaling_factor\":2.5,\"topk_group\":2,\"v_head_dim\":16}";

// `text` with its first `old` replaced.
static const char *edited(const char *text, const char *old, const char *new) {
  static char buffer[4096];
  const char *at = strstr(text, old);
  if (!at)
    fail_msg("no %s", old);
  snprintf(buffer, sizeof buffer, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
  return buffer;
}

static struct k3_moe_model model;

static enum k3_status parse(const char *text, struct k3_error *err) {
  return k3_moe_model_from_json(text, strlen(text), "image", &model, err);
}

static void geometry_is_read(void **state) {
  (void)state;
  assert_int_equal(parse(M3, NULL), K3_OK);
  assert_int_equal(model.family, K3_MOE_MINIMAX_M3);
  assert_int_equal(model.rotary_dim, 8);
  assert_int_equal(model.max_dense_keys, 8);
  assert_true(model.gemma_norm && model.renormalise && !model.is_moe[0] && model.is_moe[1] && !model.is_sparse[0] && model.is_sparse[1]);
  assert_int_equal(parse(V32, NULL), K3_OK);
  assert_int_equal(model.family, K3_MOE_DEEPSEEK_V32);
  assert_int_equal(model.shared_size, 40);
  assert_int_equal(model.max_dense_keys, 8);
  assert_true(!model.gemma_norm && model.rope.yarn && !model.is_moe[0] && model.is_moe[1] && model.is_sparse[0]);
}

// M3V05, 1.9 #3: the documented values stand in for an absent alpha and limit; never plain SwiGLU. The native spelling of the layer lists; no
// rotary_dim.
static void what_may_be_absent(void **state) {
  (void)state;
  assert_int_equal(parse(edited(M3, "\"alpha\":1.702,\"limit\":7,", ""), NULL), K3_OK);
  assert_true(model.activation == K3_ACTIVATION_SWIGLU_OAI && model.alpha == 1.702 && model.limit == 7);
  assert_int_equal(parse(edited(M3, "\"rotary_dim\":8,", ""), NULL), K3_OK);
  assert_int_equal(model.rotary_dim, 8);
  assert_int_equal(parse(edited(M3, "\"moe_layers\":[0,1]", "\"moe_layers\":[\"dense\",\"sparse\"]"), NULL), K3_OK);
  assert_true(!model.is_moe[0] && model.is_moe[1]);
  assert_int_equal(parse(edited(M3, "\"sparse_layers\":[0,1]", "\"sparse_layers\":[\"full_attention\",\"minimax_m3_sparse\"]"), NULL), K3_OK);
  assert_true(!model.is_sparse[0] && model.is_sparse[1]);
  // Without scaling the frequencies are plain; a block of the type default says the same.
  assert_int_equal(parse(edited(V32, "\"type\":\"yarn\"", "\"type\":\"default\""), NULL), K3_OK);
  assert_false(model.rope.yarn);
}

static void refusals_name_the_field(void **state) {
  (void)state;
  static const struct {
    const char *text, *old, *new, *field;
  } cases[] = {
      // X12, X13: the norm's flavour and the rotation are the manifest's word, not a guess.
      {M3, "\"flavour\":\"gemma\"", "\"flavour\":\"plain\"", "model.norm.flavour"},
      {M3, "swiglu-oai", "silu", "model.activation.name"},
      {M3, "half-split", "interleaved", "model.rotation.self_attn.q_proj.layout"},
      {M3, "\"moe_layers\":[0,1]", "\"moe_layers\":[0]", "model.moe_layers"},
      {M3, "\"sparse_layers\":[0,1]", "\"sparse_layers\":[0,1,1]", "model.sparse_layers"},
      {M3, "\"sparse_layers\":[0,1]", "\"sparse_layers\":[0,1.5]", "model.sparse_layers"},
      {M3, "\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "model.num_key_value_heads"},
      {M3, "\"rotary_dim\":8", "\"rotary_dim\":7", "model.rope.rotary_dim"},
      {M3, "\"rotary_dim\":8", "\"rotary_dim\":18", "model.rope.rotary_dim"},
      {M3, "\"num_experts_per_token\":2", "\"num_experts_per_token\":5", "model.num_experts_per_token"},
      {M3, "\"hidden_size\":64,", "", "model.hidden_size"},
      {M3, "\"hidden_size\":64", "\"hidden_size\":-1", "model.hidden_size"},
      {M3, "\"routed_scaling_factor\":2,", "", "model.routed_scaling_factor"},
      {M3, "\"rms_norm_eps\":1e-6", "\"rms_norm_eps\":0", "model.rms_norm_eps"},
      {M3, "\"topk_blocks\":2", "\"topk_blocks\":0", "model.index.topk_blocks"},
      {V32, "\"flavour\":\"plain\"", "\"flavour\":\"gemma\"", "model.norm.flavour"},
      {V32, "\"layout\":\"interleaved\"}},", "\"layout\":\"half-split\"}},", "model.rotation.self_attn.q_b_proj.layout"},
      {V32, "\"layout\":\"interleaved\"", "\"layout\":\"half-split\"", "model.rotation.self_attn.kv_a_proj_with_mqa.layout"},
      // DSV06, 2.6 #1: the indexer turns half-split; one flag for it and MLA, or the other pairs, is refused.
      {V32, "\"self_attn.indexer.wq_b\":{\"layout\":\"half-split\"},", "", "model.rotation.self_attn.indexer.wq_b.layout"},
      {V32, "{\"layout\":\"half-split\",\"width\":16}", "{\"layout\":\"interleaved\"}", "model.rotation.self_attn.indexer.wk.layout"},
      // DSV04
      {V32, "\"n_group\":4", "\"n_group\":3", "model.n_group"},
      {V32, "\"n_group\":4", "\"n_group\":8", "model.n_group"},                              // groups of one have no second best
      {V32, "\"num_experts_per_token\":2", "\"num_experts_per_token\":5", "model.n_group"},  // two groups hold four
      {V32, "\"topk_group\":2", "\"topk_group\":5", "model.topk_group"},
      {V32, "\"qk_rope_head_dim\":16", "\"qk_rope_head_dim\":15", "model.qk_rope_head_dim"},
      {V32, "\"type\":\"yarn\"", "\"type\":\"linear\"", "model.rope.scaling"},
      {V32, "\"factor\":4,", "", "model.rope.scaling.factor"},
      {V32, ",\"original_max_position_embeddings\":32", "", "model.rope.scaling.original_max_position_embeddings"},
      {V32, "\"first_k_dense_replace\":1", "\"first_k_dense_replace\":4", "model.first_k_dense_replace"},
      {V32, "\"topk\":8", "\"topk\":0", "model.index.topk"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_error err = {0};
    const char *text = edited(cases[i].text, cases[i].old, cases[i].new);
    if (parse(text, &err) != K3_BAD_INPUT || err.rule != K3_IMG01 || strcmp(err.tensor, cases[i].field) != 0)
      fail_msg("%s -> %s: %s \"%s\"", cases[i].old, cases[i].new, err.tensor, err.found);
  }
  struct k3_error err = {0};
  assert_int_equal(parse(edited(M3, "minimax-m3", "kimi-k3"), &err), K3_UNSUPPORTED);
  assert_int_equal(err.rule, K3_CFG21);
  err = (struct k3_error){0};
  assert_int_equal(parse("{", &err), K3_BAD_INPUT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(geometry_is_read),
      cmocka_unit_test(what_may_be_absent),
      cmocka_unit_test(refusals_name_the_field),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
