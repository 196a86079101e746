// Kimi K3: linear attention (KDA) layers, every fourth and the last one MLA, by two lists that count from one; an attention over block residuals
// instead of plain sums; experts of a latent width. What a drafter borrows from it are embed_tokens and lm_head.
#include <stdio.h>
#include <string.h>

#include "loader/family_parts.h"

typedef unsigned long long ull;  // for %llu

enum { MAX_LAYERS = 4096 };

// Counts a list into `times`; out of range entries are reported.
static void count_layers(const struct k3_config *config, const char *path, uint64_t n_layers, unsigned char times[MAX_LAYERS + 1],
                         struct k3_findings *findings) {
  uint64_t items[MAX_LAYERS];
  size_t n = 0;
  bool found = false;
  struct k3_error bad = {0};
  if (k3_config_u64_list(config, path, items, MAX_LAYERS, &n, &found, &bad) != K3_OK) {
    k3_findings_add(findings, K3_ERROR, &bad);
    return;
  }
  if (!found)
    K3_FAMILY_CONTRADICTION(findings, config, path, "a list of layers, counted from 1", "the field is missing");
  for (size_t i = 0; i < n; i++) {
    if (items[i] < 1 || items[i] > n_layers)
      K3_FAMILY_CONTRADICTION(findings, config, path, "1 to num_hidden_layers: the lists count from 1", "layer %llu%s", (ull)items[i],
                              items[i] == 0 ? ", as if counted from 0" : "");
    else if (times[items[i]] < 255)
      times[items[i]]++;
  }
}

static void check_kinds(const struct k3_config *config, struct k3_findings *findings) {
  unsigned char times[MAX_LAYERS + 1] = {0};
  uint64_t n_layers = k3_family_u64(config, "num_hidden_layers", 0), errors = findings->n_errors;
  if (n_layers > MAX_LAYERS)
    return;  // the mapper says so
  count_layers(config, "linear_attn_config.kda_layers", n_layers, times, findings);
  count_layers(config, "linear_attn_config.full_attn_layers", n_layers, times, findings);
  for (uint64_t layer = 1; layer <= n_layers && findings->n_errors == errors; layer++) {
    if (times[layer] != 1)
      K3_FAMILY_CONTRADICTION(findings, config, "linear_attn_config", "every layer once, in kda_layers or in full_attn_layers",
                              "layer %llu is listed %s", (ull)layer, times[layer] ? "twice" : "nowhere");
  }
}

// Spellings of other models are understood, but not beside K3's own with another value.
static void check_spelling(const struct k3_config *config, const char *own, const char *other, struct k3_findings *findings) {
  uint64_t a = 0, b = 0;
  bool has_a = false, has_b = false;
  k3_config_u64(config, own, &a, &has_a, NULL);
  k3_config_u64(config, other, &b, &has_b, NULL);
  if (has_a && has_b && a != b)
    K3_FAMILY_CONTRADICTION(findings, config, other, own, "%llu, but %s is %llu", (ull)b, own, (ull)a);
  else if (!has_a && has_b)
    k3_findings_report(findings, K3_K3V15, k3_config_file(config), other, own, "the spelling of other models");
}

static void check_config(const struct k3_config *config, struct k3_findings *findings) {
  check_kinds(config, findings);
  check_spelling(config, "num_experts_per_token", "num_experts_per_tok", findings);
  check_spelling(config, "num_experts", "num_local_experts", findings);
  uint64_t freq = k3_family_u64(config, "moe_layer_freq", 1);
  if (freq != 1)
    K3_FAMILY_CONTRADICTION(findings, config, "moe_layer_freq", "1", "%llu: which layers then hold experts is not known", (ull)freq);
  static const char *const ropes[] = {"rope_theta", "rope_scaling", "rope_parameters"};
  bool nope = false;
  k3_config_bool(config, "mla_use_nope", &nope, NULL, NULL);
  if (!nope)
    K3_FAMILY_CONTRADICTION(findings, config, "mla_use_nope", "true: MLA of this model does not rotate", "false or absent");
  for (size_t i = 0; i < sizeof ropes / sizeof ropes[0]; i++) {
    const char *type = "";
    char path[64];
    snprintf(path, sizeof path, "%s.rope_type", ropes[i]);
    k3_config_string(config, path, &type, NULL, NULL);
    if (k3_config_kind_of(config, ropes[i]) != K3_CONFIG_ABSENT && strcmp(type, "default") != 0)
      K3_FAMILY_CONTRADICTION(findings, config, ropes[i], "no rotary parameters: this model does not rotate", "the field is there");
  }
}

// A layer whose names say one kind while the lists say the other: zero-based lists shift every layer and would otherwise drown in absent names.
static void check_shift(const struct k3_plan *plan, struct k3_findings *findings) {
  static const struct { const char *mark, *is, *listed; } kinds[] = {{".self_attn.kv_b_proj.", "MLA", "KDA"}, {".self_attn.A_log", "KDA", "MLA"}};
  for (size_t i = 0; i < plan->n_dropped; i++) {
    for (size_t k = 0; k < 2; k++) {
      if (!strstr(plan->dropped[i].tensor, kinds[k].mark))
        continue;
      K3_FAMILY_CONTRADICTION(findings, plan->mapper.config, "linear_attn_config", "lists that count from 1 and agree with the tensors",
                              "%s is a tensor of %s, the config lists its layer as %s", plan->dropped[i].tensor, kinds[k].is, kinds[k].listed);
      return;
    }
  }
}

// The released model's own counts: a complete one has exactly these. Other geometries and other storage forms are not held against them.
static void check_release(const struct k3_plan *plan, struct k3_findings *findings) {
  static const struct {
    const char *field;
    uint64_t value;
  } release[] = {{"hidden_size", 7168},        {"num_hidden_layers", 93},
                 {"num_experts", 896},         {"moe_intermediate_size", 3072},
                 {"vocab_size", 163840},       {"num_attention_heads", 96},
                 {"first_k_dense_replace", 1}, {"routed_expert_hidden_size", 3584},
                 {"intermediate_size", 33792}, {"vision_config.vt_num_hidden_layers", 27}};
  for (size_t i = 0; i < sizeof release / sizeof release[0]; i++) {
    if (k3_family_u64(plan->mapper.config, release[i].field, 0) != release[i].value)
      return;
  }
  uint64_t n_packed = 0;
  for (size_t s = 0; s < plan->n_shards; s++)
    n_packed += plan->shards[s].mapped.param == K3_PARAM_WEIGHT_PACKED;
  const uint64_t n_tensors = 497220, nbytes = UINT64_C(1560860324864);
  if (n_packed > 0 && (plan->ckpt->n_tensors != n_tensors || plan->ckpt->tensors_nbytes != nbytes))
    k3_findings_report(findings, K3_K3V18, plan->ckpt->source, NULL, "497220 tensors of 1560860324864 bytes, as released",
                       "%llu tensors of %llu bytes", (ull)plan->ckpt->n_tensors, (ull)plan->ckpt->tensors_nbytes);
}

static void check_tensors(const struct k3_plan *plan, struct k3_findings *findings) {
  bool said_bias = false, said_vector = false;
  for (size_t s = 0; s < plan->n_shards; s++) {
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    if (mapped->module == K3_MODULE_CARRY)
      continue;
    const struct k3_recipe_module *module = &plan->recipe->modules[mapped->module];
    const struct k3_recipe_param *param = &module->params[mapped->param >= K3_PARAM_OF_MODULE ? mapped->param - K3_PARAM_OF_MODULE : 0];
    bool bias = mapped->param >= K3_PARAM_OF_MODULE && strcmp(param->name, "e_score_correction_bias") == 0;
    if (!bias && !param->other)
      continue;
    const struct k3_st_tensor *t = k3_plan_source_of(plan, mapped);
    if (bias && !said_bias && !strstr(t->name, ".gate.e_score_correction_bias")) {
      said_bias = true;
      k3_findings_report(findings, K3_K3V08, k3_plan_path_of(plan, mapped), t->name, "under gate", "the bias stands beside gate; it is renamed");
    }
    if (param->other && !said_vector && strcmp(param->name, "weight") == 0 && t->rank != param->rank) {
      said_vector = true;
      k3_findings_report(findings, K3_K3V12, k3_plan_path_of(plan, mapped), t->name, NULL,
                         "a vector without its dimension of one, as some exports write it");
    }
  }
  check_shift(plan, findings);
  check_release(plan, findings);
}

// Embedding and head are trained apart; equal bytes mean that one of them was written twice.
static enum k3_status check_values(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  uint64_t embed = k3_family_tensor(plan, "embed_tokens", 0), head = k3_family_tensor(plan, "lm_head", 0);
  bool same = false;
  if (embed != UINT64_MAX && head != UINT64_MAX)
    K3_TRY(k3_family_same_bytes(plan, embed, head, &same, err));
  if (same)
    k3_findings_report(findings, K3_K3V14, k3_ckpt_file_of(plan->ckpt, head)->path, k3_ckpt_tensor(plan->ckpt, head)->name, NULL,
                       "the same bytes as %s", k3_ckpt_tensor(plan->ckpt, embed)->name);
  return K3_OK;
}

const struct k3_family K3_FAMILY_KIMI_K3 = {"kimi-k3", check_config, check_tensors, check_values};
