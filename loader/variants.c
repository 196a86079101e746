// Drafters and formats that carry a known name but are not what the recipes cover. They are refused by name, with what differs: running one with the
// wrong mathematics would only lower the acceptance, and nobody would see why.
#include <stdio.h>
#include <string.h>

#include "loader/recipes.h"

struct variant {
  const char *name;
  const char *architecture;  // architectures[0], or NULL
  const char *model_type;    // NULL: any
  const char *field;         // a config field that must be there (and true, if a bool), or NULL
  const char *tensor;        // a tensor name part that must occur, or NULL
  const char *differs;
};

// The first row whose every given mark fits names the variant.
static const struct variant VARIANTS[] = {
    {"DFlash2 drafter (V7)", "DFlash2DraftModel", NULL, NULL, NULL, "not DSpark: no Markov head, another block layout and verification"},
    {"SpecForge K3 MLA experiment (V5)", "KimiK3DSpark5MLADraftModel", NULL, NULL, NULL, "no rotation, an output gate (g_proj), 96 heads"},
    {"sglang-native K3 MLA drafter (V6)", "KimiK3DSparkMLADraftModel", NULL, NULL, NULL, "another config class with its own rotary and naming defaults"},
    {"sglang-native K3 MLA drafter (V6)", NULL, "kimi_k3_dspark", NULL, NULL, "another config class with its own rotary and naming defaults"},
    {"Automodel-trained K3 drafter (V4)", "KimiK3DSparkModel", NULL, NULL, NULL,
     "no rotation, an output gate (g_proj), a SiTU MLP, a softmax scale without YaRN"},
    {"gated K3 MLA drafter (V4/V5)", NULL, NULL, NULL, "self_attn.g_proj.weight", "an output gate (g_proj) and no rotation"},
    {"speculators-format GQA drafter (V2b)", NULL, NULL, "transformer_layer_config", NULL,
     "GQA with a sliding window, tap ids counted from 1, nested config"},
    {"RadixArk GQA drafter (V2)", "DSparkDraftModel", NULL, NULL, NULL, "GQA (q_proj, k_proj, v_proj, q_norm, k_norm), half-split rotation"},
    {"RadixArk GQA drafter (V2)", "Qwen3DSparkModel", NULL, NULL, NULL, "GQA (q_proj, k_proj, v_proj, q_norm, k_norm), half-split rotation"},
    {"RadixArk GQA drafter (V2)", NULL, "qwen3", "dflash_config", "self_attn.k_proj.weight", "GQA, fields nested in dflash_config"},
    {"DeepSeek-V4 in-checkpoint drafter (V3)", NULL, NULL, NULL, "mtp.0.main_proj.", "lives inside the target under mtp.*, with MoE and hyper-connections"},
    {"DeepSeek-V4 in-checkpoint drafter (V3)", NULL, NULL, "dspark_noise_token_id", NULL, "lives inside the target under mtp.*"},
};

static bool text_is(const struct k3_config *config, const char *path, const char *wanted) {
  const char *value = NULL;
  return config && k3_config_string(config, path, &value, NULL, NULL) == K3_OK && value && strcmp(value, wanted) == 0;
}

static bool any_tensor(const struct k3_ckpt *ckpt, const char *part) {
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    if (strstr(k3_ckpt_tensor(ckpt, t)->name, part))
      return true;
  }
  return false;
}

bool k3_variant_refused(const struct k3_ckpt *ckpt, struct k3_findings *findings) {
  // Variants are drafters: without any of these marks a big target model is not searched tensor by tensor.
  bool drafter = any_tensor(ckpt, "markov_head.") || any_tensor(ckpt, "mtp.0.main_proj.") || (ckpt->config && k3_config_kind_of(ckpt->config, "dflash_config") != K3_CONFIG_ABSENT);
  for (size_t i = 0; ckpt->config && i < sizeof VARIANTS / sizeof VARIANTS[0]; i++) {
    const struct variant *v = &VARIANTS[i];
    if ((v->architecture && !text_is(ckpt->config, "architectures.0", v->architecture)) ||
        (v->model_type && !text_is(ckpt->config, "model_type", v->model_type)) ||
        (v->field && k3_config_kind_of(ckpt->config, v->field) == K3_CONFIG_ABSENT) || (v->tensor && (!drafter || !any_tensor(ckpt, v->tensor))))
      continue;
    k3_findings_report(findings, K3_CFG21, ckpt->source, NULL, "the k3-dspark family (MLA, interleaved rotation, no gate), or --recipe generic",
                       "%s is not supported: %s", v->name, v->differs);
    return true;
  }
  return false;
}
