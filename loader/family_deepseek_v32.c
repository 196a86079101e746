// DeepSeek-V3.2: the layers of V3 with a token indexer in each. The two rotations differ (interleaved pairs in MLA, half-split in the indexer), which
// the manifest states projection by projection.
#include <string.h>

#include "loader/family_parts.h"

typedef unsigned long long ull;  // for %llu

static void check_router(const struct k3_config *config, struct k3_findings *findings) {
  uint64_t n = k3_family_u64(config, "n_routed_experts", 0), n_group = k3_family_u64(config, "n_group", 1);
  uint64_t kept = k3_family_u64(config, "topk_group", 1), top_k = k3_family_u64(config, "num_experts_per_tok", 1);
  if (n_group == 0 || n % n_group != 0)
    return K3_FAMILY_CONTRADICTION(findings, config, "n_group", "a divisor of n_routed_experts", "%llu groups of %llu experts", (ull)n_group, (ull)n),
           (void)0;
  uint64_t size = n / n_group;
  if (kept > n_group)
    K3_FAMILY_CONTRADICTION(findings, config, "topk_group", "at most n_group", "%llu of %llu groups", (ull)kept, (ull)n_group);
  if (size < 2)
    K3_FAMILY_CONTRADICTION(findings, config, "n_group", "groups of two experts and more: a group's score is the sum of its two best",
                            "groups of %llu", (ull)size);
  if (kept <= n_group && kept * size < top_k)
    K3_FAMILY_CONTRADICTION(findings, config, "topk_group", "enough groups for num_experts_per_tok", "%llu groups of %llu for the best %llu",
                            (ull)kept, (ull)size, (ull)top_k);
}

static void check_rope(const struct k3_config *config, struct k3_findings *findings) {
  const char *block = k3_config_kind_of(config, "rope_scaling") == K3_CONFIG_OBJECT ? "rope_scaling" : "rope_parameters";
  // Two dictionaries under two names: an engine of one release reads the one, of the next the other.
  static const char *const shared[] = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"};
  for (size_t i = 0; i < sizeof shared / sizeof shared[0]; i++) {
    char old[64], new[64];
    double a = 0, b = 0;
    bool has_old = false, has_new = false;
    strcat(strcpy(old, "rope_scaling."), shared[i]);
    strcat(strcpy(new, "rope_parameters."), shared[i]);
    k3_config_real(config, old, &a, &has_old, NULL);
    k3_config_real(config, new, &b, &has_new, NULL);
    if (has_old && has_new && (a < b || a > b))
      K3_FAMILY_CONTRADICTION(findings, config, old, "one value", "%g, but rope_parameters says %g", a, b);
  }
  const char *type = NULL;
  char path[64];
  static const char *const types[] = {"type", "rope_type"};
  for (int i = 0; i < 2 && !type; i++) {
    strcat(strcat(strcpy(path, block), "."), types[i]);
    k3_config_string(config, path, &type, NULL, NULL);
  }
  static const char *const needed[] = {"factor", "original_max_position_embeddings", "mscale_all_dim", "beta_fast", "beta_slow"};
  for (size_t i = 0; type && strcmp(type, "yarn") == 0 && i < sizeof needed / sizeof needed[0]; i++) {
    strcat(strcat(strcpy(path, block), "."), needed[i]);
    if (k3_config_kind_of(config, path) != K3_CONFIG_INT && k3_config_kind_of(config, path) != K3_CONFIG_REAL)
      K3_FAMILY_CONTRADICTION(findings, config, path, "every number of the YaRN block", "not a number");
  }
  if (k3_config_kind_of(config, block) == K3_CONFIG_OBJECT && !type)
    K3_FAMILY_CONTRADICTION(findings, config, block, "a type", "a block without type");
}

static void check_config(const struct k3_config *config, struct k3_findings *findings) {
  static const struct k3_family_constant constants[] = {
      K3_CONSTANT_TEXT("scoring_func", "sigmoid", "experts of this model are scored one by one"),
      K3_CONSTANT_TEXT("topk_method", "noaux_tc", "this model chooses groups by the sum of their two best biased scores"),
      K3_CONSTANT_TEXT("hidden_act", "silu", "the gate of this model's MLPs is SiLU"),
      K3_CONSTANT_NUMBER("moe_layer_freq", 1, "not 1: which layers then hold experts is not known"),
  };
  k3_family_expect(config, constants, sizeof constants / sizeof constants[0], findings);
  check_router(config, findings);
  check_rope(config, findings);
  uint64_t index_dim = k3_family_u64(config, "index_head_dim", 0), rope = k3_family_u64(config, "qk_rope_head_dim", 0);
  if (index_dim < rope)
    K3_FAMILY_CONTRADICTION(findings, config, "index_head_dim", "at least qk_rope_head_dim", "%llu, the rotated part has %llu", (ull)index_dim,
                            (ull)rope);
  if (index_dim == 0 || (index_dim & (index_dim - 1)) != 0)
    K3_FAMILY_CONTRADICTION(findings, config, "index_head_dim", "a power of two, for the Hadamard rotation", "%llu", (ull)index_dim);
  if (rope % 2 != 0)
    K3_FAMILY_CONTRADICTION(findings, config, "qk_rope_head_dim", "an even number", "%llu", (ull)rope);
}

static void check_tensors(const struct k3_plan *plan, struct k3_findings *findings) {
  k3_family_check_plain(plan, "layers.{i}.eh_proj", findings);
  bool indexer = false;
  for (size_t s = 0; s < plan->n_shards && !indexer; s++) {
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    indexer = mapped->module != K3_MODULE_CARRY && strstr(plan->recipe->modules[mapped->module].name, ".indexer.");
  }
  if (!indexer && plan->n_shards > 0)
    K3_FAMILY_CONTRADICTION(findings, plan->mapper.config, "model_type", "deepseek_v3 for a model without indexer",
                            "config.json says DeepSeek-V3.2, but no layer has an indexer");
  uint64_t n_layers = k3_family_u64(plan->mapper.config, "num_hidden_layers", 0);
  uint64_t declared = k3_family_u64(plan->mapper.config, "num_nextn_predict_layers", 0), present = k3_family_n_present(plan, 0, n_layers);
  if (present < declared)
    k3_findings_report(findings, K3_X08, k3_config_file(plan->mapper.config), "num_nextn_predict_layers", NULL,
                       "%llu prediction layers are declared, %llu are in the files; nothing is made up for the others", (ull)declared, (ull)present);
}

// The prediction layer's embedding and head are copies of the main ones; engines load one of the two and share it.
static enum k3_status check_values(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  static const char *const pairs[][2] = {{"embed_tokens", "layers.{i}.embed_tokens"}, {"lm_head", "layers.{i}.shared_head.head"}};
  uint64_t n_layers = k3_family_u64(plan->mapper.config, "num_hidden_layers", 0);
  for (uint64_t layer = n_layers; layer < plan->mapper.index_counts[0]; layer++) {
    for (size_t p = 0; p < 2; p++) {
      uint64_t main = k3_family_tensor(plan, pairs[p][0], 0), copy = k3_family_tensor(plan, pairs[p][1], layer);
      bool same = true;
      if (main != UINT64_MAX && copy != UINT64_MAX)
        K3_TRY(k3_family_same_bytes(plan, main, copy, &same, err));
      if (!same)
        k3_findings_report(findings, K3_DSV08, k3_ckpt_file_of(plan->ckpt, copy)->path, k3_ckpt_tensor(plan->ckpt, copy)->name, "the same bytes",
                           "other bytes than %s", k3_ckpt_tensor(plan->ckpt, main)->name);
    }
  }
  return K3_OK;
}

const struct k3_family K3_FAMILY_DEEPSEEK_V32 = {"deepseek-v3.2", check_config, check_tensors, check_values};
