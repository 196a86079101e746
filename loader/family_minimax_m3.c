// MiniMax-M3. Three dense layers, then block-sparse attention and a mixture of experts; which layer is which stands in lists of the config, in the
// released form as 0 and 1, in the transformers-native one as words. Every norm multiplies by 1 + w, the activation is SwiGLU with a bias of 1 on the
// up half and two clamps: reading either as the usual kind gives garbage without an error.
#include <string.h>

#include "loader/family_parts.h"

typedef unsigned long long ull;  // for %llu

static void check_lists(const struct k3_config *config, struct k3_findings *findings) {
  static const char *const moe[] = {"moe_layer_freq", "mlp_layer_types"}, *const sparse[] = {"sparse_attention_config.sparse_attention_freq",
                                                                                             "layer_types"};
  static const char *const all[] = {"moe_layer_freq", "mlp_layer_types", "sparse_attention_config.sparse_attention_freq", "layer_types",
                                    "sparse_attention_config.sparse_disable_index_value"};
  uint64_t n_layers = k3_family_u64(config, "num_hidden_layers", 0);
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    uint64_t n = k3_family_list_length(config, all[i]);
    if (n != UINT64_MAX && n != n_layers)
      K3_FAMILY_CONTRADICTION(findings, config, all[i], "one item for each of num_hidden_layers", "%llu items, %llu layers", (ull)n, (ull)n_layers);
  }
  if (k3_family_list_length(config, moe[0]) == UINT64_MAX && k3_family_list_length(config, moe[1]) == UINT64_MAX)
    K3_FAMILY_CONTRADICTION(findings, config, moe[0], "a list of 0 and 1, or mlp_layer_types", "neither is there: which layers hold experts is open");
  if (k3_family_list_length(config, sparse[0]) == UINT64_MAX && k3_family_list_length(config, sparse[1]) == UINT64_MAX)
    K3_FAMILY_CONTRADICTION(findings, config, sparse[0], "a list of 0 and 1, or layer_types",
                            "neither is there: which layers have an indexer is open");
}

static void check_attention(const struct k3_config *config, struct k3_findings *findings) {
  uint64_t n_kv = k3_family_u64(config, "num_key_value_heads", 0), head_dim = k3_family_u64(config, "head_dim", 0);
  uint64_t n_index = k3_family_u64_of(config, "sparse_attention_config.sparse_num_index_heads", "index_n_heads", n_kv);
  uint64_t index_dim = k3_family_u64_of(config, "sparse_attention_config.sparse_index_dim", "index_head_dim", head_dim);
  if (n_index != n_kv)
    K3_FAMILY_CONTRADICTION(findings, config, "sparse_num_index_heads", "num_key_value_heads: each index head chooses for one KV head",
                            "%llu index heads, %llu KV heads", (ull)n_index, (ull)n_kv);
  if (index_dim != head_dim)
    K3_FAMILY_CONTRADICTION(findings, config, "sparse_index_dim", "head_dim: both are rotated by one table", "%llu, head_dim is %llu", (ull)index_dim,
                            (ull)head_dim);
  double factor = 0;
  bool has_factor = false, has_rotary = false;
  uint64_t rotary = 0;
  k3_config_real(config, "partial_rotary_factor", &factor, &has_factor, NULL);
  if (!has_factor)
    k3_config_real(config, "rope_parameters.partial_rotary_factor", &factor, &has_factor, NULL);
  k3_config_u64(config, "rotary_dim", &rotary, &has_rotary, NULL);
  if (!has_factor && !has_rotary)
    return K3_FAMILY_CONTRADICTION(findings, config, "rotary_dim", "rotary_dim or partial_rotary_factor", "neither is there"), (void)0;
  double by_factor = factor * (double)head_dim;
  if (!has_rotary)
    rotary = by_factor >= 0 && by_factor < 1e9 ? (uint64_t)by_factor : 0;
  if (has_factor && by_factor != (double)rotary)
    K3_FAMILY_CONTRADICTION(findings, config, "rotary_dim", "partial_rotary_factor * head_dim", "%llu, not %g", (ull)rotary, by_factor);
  if (rotary % 2 != 0 || rotary > head_dim)
    K3_FAMILY_CONTRADICTION(findings, config, "rotary_dim", "an even number up to head_dim", "%llu, head_dim is %llu", (ull)rotary, (ull)head_dim);
}

static void check_activation(const struct k3_config *config, struct k3_findings *findings) {
  const char *act = "";
  k3_config_string(config, "hidden_act", &act, NULL, NULL);
  // The transformers-native form writes "silu" although the activation is the clamped one; it is recognised by its word lists.
  bool native = k3_config_kind_of(config, "mlp_layer_types") == K3_CONFIG_LIST;
  if (strcmp(act, "swigluoai") != 0 && !(native && strcmp(act, "silu") == 0))
    K3_FAMILY_CONTRADICTION(findings, config, "hidden_act", "swigluoai (silu in the transformers-native form)", "\"%s\"", act);
  bool gemma = native, found = false;  // the native class has no other norm and no field for it
  k3_config_bool(config, "use_gemma_norm", &gemma, &found, NULL);
  if (!gemma)
    K3_FAMILY_CONTRADICTION(findings, config, "use_gemma_norm", "true: every norm of this model multiplies by 1 + w", "%s",
                            found ? "false" : "absent");
}

static void check_constants(const struct k3_config *config, struct k3_findings *findings) {
  static const struct k3_family_constant constants[] = {
      K3_CONSTANT_NUMBER("swiglu_beta", 1, "not 1, which this model adds to the up half"),
      K3_CONSTANT_TEXT("scoring_func", "sigmoid", "experts of this model are scored one by one"),
      K3_CONSTANT_BOOL("use_routing_bias", true, "false, but this model chooses experts with a bias"),
      K3_CONSTANT_BOOL("use_qk_norm", true, "false, but queries and keys of this model are normed"),
      K3_CONSTANT_TEXT("qk_norm_type", "per_head", "this model norms each head on its own"),
      K3_CONSTANT_BOOL("attention_output_gate", false, "true, but this model has no gate on its attention"),
  };
  k3_family_expect(config, constants, sizeof constants / sizeof constants[0], findings);
  static const char *const numbers[] = {"swiglu_alpha", "swiglu_limit"};  // absent: 1.702 and 7, never a plain SwiGLU
  for (size_t i = 0; i < 2; i++) {
    double value = 1;
    struct k3_error bad = {0};
    if (k3_config_real(config, numbers[i], &value, NULL, &bad) != K3_OK)
      k3_findings_add(findings, K3_ERROR, &bad);
    else if (!(value > 0))
      K3_FAMILY_CONTRADICTION(findings, config, numbers[i], "a number above 0", "%g", value);
  }
}

static void check_config(const struct k3_config *config, struct k3_findings *findings) {
  check_constants(config, findings);
  check_lists(config, findings);
  check_attention(config, findings);
  check_activation(config, findings);
  double scale = 2.0;
  k3_config_real(config, "routed_scaling_factor", &scale, NULL, NULL);
  uint64_t top_k = k3_family_u64(config, "num_experts_per_tok", 4);
  if (scale != 2.0)
    k3_findings_report(findings, K3_M3V12, k3_config_file(config), "routed_scaling_factor", "2.0 in the released model", "%g", scale);
  if (top_k != 4)
    k3_findings_report(findings, K3_M3V12, k3_config_file(config), "num_experts_per_tok", "4 in the released model", "%llu", (ull)top_k);
}

static void check_tensors(const struct k3_plan *plan, struct k3_findings *findings) {
  k3_family_check_plain(plan, NULL, findings);
  bool said_alias = false;
  for (size_t s = 0; s < plan->n_shards; s++) {
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    if (mapped->module == K3_MODULE_CARRY)
      continue;
    const char *module = plan->recipe->modules[mapped->module].name;
    bool router = strstr(module, "block_sparse_moe.gate") || (mapped->param >= K3_PARAM_OF_MODULE && strstr(module, "block_sparse_moe"));
    if (!router && !strstr(module, "patch_embedding"))
      continue;
    const struct k3_st_tensor *t = k3_plan_source_of(plan, mapped);
    if (router && t->dtype != K3_DTYPE_F32)
      k3_findings_report(findings, K3_M3V07, k3_plan_path_of(plan, mapped), t->name, "F32, as released",
                         "%s: rounding the router changes which experts are chosen", k3_dtype_name((enum k3_dtype)t->dtype));
    if (router && !said_alias && strstr(t->name, ".gate.e_score_correction_bias")) {
      said_alias = true;
      k3_findings_report(findings, K3_M3V07, k3_plan_path_of(plan, mapped), t->name, "beside gate", "the bias stands under gate; it is renamed");
    }
    if (!router && t->dtype != K3_DTYPE_F32)
      k3_findings_report(findings, K3_M3V14, k3_plan_path_of(plan, mapped), t->name, "F32, as released", "%s",
                         k3_dtype_name((enum k3_dtype)t->dtype));
  }
  enum { MTP_INDEX = 2 };  // {k}
  uint64_t declared = plan->mapper.index_counts[MTP_INDEX], present = k3_family_n_present(plan, MTP_INDEX, 0);
  if (present < declared)
    k3_findings_report(findings, K3_M3V11, k3_config_file(plan->mapper.config), "num_mtp_modules", NULL,
                       "%llu prediction modules are declared, %llu are in the files; nothing is made up for the others", (ull)declared, (ull)present);
}

const struct k3_family K3_FAMILY_MINIMAX_M3 = {"minimax-m3", check_config, check_tensors, NULL};
