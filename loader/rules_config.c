// The quantization config against the tensors, and the severity of rules for engines.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/name_set.h"
#include "loader/linears_parts.h"
#include "loader/rules.h"

typedef unsigned long long ull;

// Rows for the rules that engines suffer differently; k3pack fuses exactly, reads stored names and takes nothing over from a target.
static const struct {
  enum k3_rule rule;
  enum k3_severity of[4];  // k3pack, vllm, sglang, trtllm
} BY_ENGINE[] = {
    {K3_FUS01, {K3_ERROR, K3_ERROR, K3_ERROR, K3_ERROR}},
    {K3_FUS02, {K3_INFO, K3_ERROR, K3_ERROR, K3_ERROR}},  // maximum without rescaling; TensorRT-LLM asserts equality
    {K3_FUS03, {K3_INFO, K3_WARNING, K3_WARNING, K3_WARNING}},
    {K3_FUS04, {K3_INFO, K3_WARNING, K3_WARNING, K3_WARNING}},  // requantised with the maximum
    {K3_FUS05, {K3_INFO, K3_ERROR, K3_ERROR, K3_ERROR}},
    {K3_FUS06, {K3_INFO, K3_ERROR, K3_WARNING, K3_WARNING}},  // vLLM builds the cross-layer projection
    {K3_FUS09, {K3_INFO, K3_WARNING, K3_WARNING, K3_WARNING}},
    {K3_CFG08, {K3_INFO, K3_WARNING, K3_WARNING, K3_WARNING}},
    {K3_CFG09, {K3_INFO, K3_WARNING, K3_WARNING, K3_INFO}},
    {K3_CFG15, {K3_WARNING, K3_WARNING, K3_WARNING, K3_WARNING}},
    {K3_CFG16, {K3_INFO, K3_WARNING, K3_WARNING, K3_INFO}},
    {K3_CFG17, {K3_INFO, K3_WARNING, K3_WARNING, K3_INFO}},
    {K3_CFG18, {K3_INFO, K3_WARNING, K3_INFO, K3_INFO}},
};

enum k3_severity k3_rule_severity(enum k3_rule rule, enum k3_judge engine) {
  for (size_t i = 0; i < sizeof BY_ENGINE / sizeof BY_ENGINE[0]; i++) {
    if (BY_ENGINE[i].rule == rule)
      return BY_ENGINE[i].of[engine];
  }
  return k3_rule_info(rule)->severity;
}

void k3_rules_report(struct k3_findings *findings, enum k3_judge engine, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                     const char *found, ...) {
  struct k3_error finding = {0};
  char text[512];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  k3_fail(&finding, K3_BAD_INPUT, rule, file, tensor, allowed, "%s", text);
  k3_findings_add(findings, k3_rule_severity(rule, engine), &finding);
}

struct rules {
  const struct k3_plan *plan;
  const struct k3_linears *linears;
  struct k3_quant_config *config;
  enum k3_judge engine;
  struct k3_findings *findings;
  bool drafter;
};

#define REPORT(r, rule, file, subject, allowed, ...) k3_rules_report((r)->findings, (r)->engine, rule, file, subject, allowed, __VA_ARGS__)

static const struct k3_st_tensor *weight_of(const struct rules *r, const struct k3_linear *linear) {
  return k3_linear_tensor(r->plan, linear, k3_linear_weight(linear));
}

static const char *path_of(const struct rules *r, const struct k3_linear *linear) {
  return k3_ckpt_file_of(k3_linear_ckpt(r->plan, linear), linear->tensors[k3_linear_weight(linear)])->path;
}

// CFG01 and CFG04: one of the two witnesses says nothing at all. Returns whether module by module there is still something to say.
static bool check_presence(const struct rules *r) {
  const struct k3_linear *first = NULL;
  uint64_t n_quantised = 0;
  for (size_t i = 0; i < r->linears->n_items; i++) {
    const struct k3_linear *linear = &r->linears->items[i];
    if (linear->is_plain || linear->of_target)
      continue;
    first = first ? first : linear;
    n_quantised++;
  }
  if (!r->linears->config_present && first)
    REPORT(r, K3_CFG01, path_of(r, first), weight_of(r, first)->name, "a quantization_config in config.json, or hf_quant_config.json",
           "%llu quantised modules, and no config says how", (ull)n_quantised);
  if (!r->config)
    return false;
  if (n_quantised == 0 && r->linears->n_items > 0) {
    REPORT(r, K3_CFG04, r->config->file, "quantization_config", "no quantization config beside plain weights",
           "every module is plain: merged or dequantised, and the config was left behind");
    return false;
  }
  return true;
}

static void check_modules(const struct rules *r) {
  char said[160];
  for (size_t i = 0; i < r->linears->n_items; i++) {
    const struct k3_linear *linear = &r->linears->items[i];
    const struct k3_quant_answer *says = linear->says;
    if (linear->of_target)
      continue;
    const struct k3_st_tensor *weight = weight_of(r, linear);
    if (says->says == K3_SAYS_QUANTISED && linear->is_plain && linear->is_linear && says->group->weights.num_bits > 0)
      REPORT(r, K3_CFG02, path_of(r, linear), weight->name, k3_quant_args_text(&says->group->weights, said, sizeof said),
             "a plain %s weight that the config has quantised (group %s)", k3_dtype_name((enum k3_dtype)weight->dtype), says->group->name);
    else if (says->says == K3_SAYS_PLAIN && !linear->is_plain && says->ignored_by)
      REPORT(r, K3_CFG03, path_of(r, linear), weight->name, "a plain weight, or no such entry", "stored as %s, but \"%s\" excludes it",
             k3_scheme_name(linear->scheme.scheme), says->ignored_by);
    else if (says->says == K3_SAYS_PLAIN && !linear->is_plain)
      REPORT(r, r->config->mixed && r->config->dialect == K3_DIALECT_MODELOPT ? K3_CFG13 : K3_CFG03, path_of(r, linear), weight->name,
             "an entry for every quantised module", "stored as %s, but nothing in the config names it", k3_scheme_name(linear->scheme.scheme));
    if (says->rival)
      REPORT(r, K3_CFG12, path_of(r, linear), weight->name, "one group for each module",
             "groups %s and %s match it equally well, with other arguments", says->group->name, says->rival->name);
  }
}

// A part of a pattern that fixes a layer number: "layers.3", "layers\.3".
static bool names_layer(const char *text) {
  for (const char *at = text; (at = strstr(at, "layers")); at++) {
    const char *next = at + strlen("layers");
    next += *next == '\\';
    next += *next == '.';
    if (*next >= '0' && *next <= '9')
      return true;
  }
  return false;
}

static bool begins(const char *text, const char *with) {
  return strncmp(text, with, strlen(with)) == 0;
}

// An expert's number in an entry: "experts.3.".
static bool names_expert(const char *text) {
  const char *at = strstr(text, "experts");
  if (!at)
    return false;
  at += strlen("experts");
  at += *at == '\\';
  at += *at == '.';
  return *at >= '0' && *at <= '9';
}

// How many modules a glob would match as a substring (its stars cut off) and not as a glob.
static uint64_t n_only_substring(const struct rules *r, const struct k3_quant_entry *entry) {
  char core[512];
  const char *from = entry->text + (entry->text[0] == '*');
  size_t n = strlen(from);
  while (n > 0 && from[n - 1] == '*')
    n--;
  if (n == 0 || n >= sizeof core || strcspn(from, "*?[") < n)
    return 0;
  memcpy(core, from, n);
  core[n] = '\0';
  uint64_t n_odd = 0;
  for (size_t i = 0; i < r->linears->n_items; i++) {
    const struct k3_linear *linear = &r->linears->items[i];
    bool substring = memmem(linear->name, linear->name_nbytes, core, n) != NULL;
    n_odd += substring && k3_pattern_match(entry->pattern, linear->name, linear->name_nbytes) == K3_PATTERN_NO;
  }
  return n_odd;
}

static void check_entry(const struct rules *r, const struct k3_quant_entry *entry, bool target) {
  const char *file = r->config->file, *body = entry->text + (begins(entry->text, "re:") ? 3 : 0);
  bool mixed = target && r->config->mixed && r->config->dialect == K3_DIALECT_MODELOPT;
  if (entry->too_much)
    REPORT(r, K3_CFG10, file, entry->text, "a pattern that matches or fails quickly",
           "matching a module's name takes too many steps; the match was given up");
  // A head that is borrowed from the target is often listed all the same.
  bool head =
      strcmp(entry->text, "lm_head") == 0 || strcmp(body, ".*lm_head.*") == 0 || strcmp(body, ".*lm_head") == 0 || strcmp(body, ".*lm_head$") == 0;
  if (entry->n_matches == 0 && !entry->class_name && !entry->too_much && !head) {
    if (mixed)
      REPORT(r, K3_CFG13, file, entry->text, "names of modules that are there", "an entry of quantized_layers that names no module");
    else
      REPORT(r, K3_CFG07, file, entry->text, "patterns that match a module by its stored name", "matches no module of this checkpoint");
  }
  if (r->drafter && !entry->class_name && (names_layer(body) || begins(body, "model.") || begins(body, "model\\.") || begins(body, "language_model")))
    REPORT(r, K3_CFG08, file, entry->text, "class names, or patterns without layer number and prefix",
           "depends on the %s, which engines change when they load a drafter", names_layer(body) ? "layer's number" : "prefix of the names");
  if (names_expert(body))
    REPORT(r, K3_CFG16, file, entry->text, "entries for whole expert modules", "names a single expert, where engines build one fused module");
  if (k3_pattern_kind_of(entry->pattern) == K3_PATTERN_GLOB) {
    uint64_t n_odd = n_only_substring(r, entry);
    if (n_odd > 0)
      REPORT(r, K3_CFG09, file, entry->text, "globs that mean the same as substrings", "read as a substring it would match %llu more modules",
             (ull)n_odd);
  }
}

// ---- scales of the KV cache ----

struct kv_seen {
  uint64_t hash;
  uint32_t first[4];  // tensor of k, v, q, both; UINT32_MAX
};

static enum k3_status check_kv(const struct rules *r, struct k3_error *err) {
  const struct k3_ckpt *ckpt = r->plan->ckpt;
  size_t n_kv = 0, n_slots = 16, stem;
  uint64_t first = 0;
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    if (k3_kv_scale_of(tensor->name, tensor->name_nbytes, &stem) && n_kv++ == 0)
      first = t;
  }
  if (n_kv > 0 && r->config && !r->config->kv_scheme)
    REPORT(r, K3_CFG15, k3_ckpt_file_of(ckpt, first)->path, k3_ckpt_tensor(ckpt, first)->name, "a kv_cache_scheme in the config",
           "%zu scales of a KV cache, and the config declares no quantised cache", n_kv);
  if (n_kv == 0 && r->config && r->config->kv_scheme)
    REPORT(r, K3_CFG15, r->config->file, "kv_cache_scheme", "k_scale and v_scale of every layer",
           "a quantised KV cache is declared, and no tensor holds a scale");
  while (n_slots < 2 * n_kv)
    n_slots *= 2;
  struct kv_seen *seen = k3_calloc(n_slots, sizeof *seen, err);
  if (!seen)
    return K3_NO_MEMORY;
  for (uint64_t t = 0; n_kv > 0 && t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    char which = k3_kv_scale_of(tensor->name, tensor->name_nbytes, &stem);
    if (!which)
      continue;
    uint64_t hash = k3_name_hash(tensor->name, stem) | 1;
    size_t slot = hash & (n_slots - 1);
    while (seen[slot].hash != 0 && seen[slot].hash != hash)
      slot = (slot + 1) & (n_slots - 1);
    if (seen[slot].hash == 0) {
      seen[slot].hash = hash;
      memset(seen[slot].first, 0xFF, sizeof seen[slot].first);
    }
    int w = which == 'k' ? 0 : which == 'v' ? 1 : which == 'q' ? 2 : 3;
    if (seen[slot].first[w] != UINT32_MAX)
      REPORT(r, K3_MAP03, k3_ckpt_file_of(ckpt, t)->path, tensor->name, "one spelling of each scale", "the same scale of the KV cache as %s",
             k3_ckpt_tensor(ckpt, seen[slot].first[w])->name);
    else
      seen[slot].first[w] = (uint32_t)t;
  }
  for (size_t s = 0; s < n_slots; s++) {
    bool k = seen[s].hash && seen[s].first[0] != UINT32_MAX, v = seen[s].hash && seen[s].first[1] != UINT32_MAX;
    if (seen[s].hash && k != v && seen[s].first[3] == UINT32_MAX) {
      uint32_t t = seen[s].first[k ? 0 : 1];
      REPORT(r, K3_CFG15, k3_ckpt_file_of(ckpt, t)->path, k3_ckpt_tensor(ckpt, t)->name, "a scale for keys and one for values",
             "only the %s of this layer have a scale; nothing is made up for the other", k ? "keys" : "values");
    }
  }
  k3_free(seen);
  return K3_OK;
}

enum k3_status k3_rules_config(const struct k3_plan *plan, enum k3_judge engine, struct k3_findings *findings, struct k3_error *err) {
  struct rules r = {plan, &plan->linears, plan->linears.config, engine, findings, strcmp(plan->recipe->family, "k3-dspark") == 0};
  // Weights of an unsupported format were named; what a config says about them follows rules of its own.
  if (findings->n_errors_by_rule[K3_CFG21] > 0)
    return K3_OK;
  if (check_presence(&r)) {
    check_modules(&r);
    for (size_t i = 0; i < r.config->ignore.n_items; i++)
      check_entry(&r, &r.config->ignore.items[i], false);
    for (size_t g = 0; g < r.config->n_groups; g++) {
      for (size_t i = 0; i < r.config->groups[g].targets.n_items; i++)
        check_entry(&r, &r.config->groups[g].targets.items[i], true);
    }
    if (r.drafter && r.config->mixed && r.config->n_groups > 1)
      REPORT(&r, K3_CFG18, r.config->file, "config_groups", "one group", "a drafter in %zu mixed-precision groups", r.config->n_groups);
  }
  if (r.drafter && !plan->linears.config_present && engine != K3_JUDGE_K3PACK)
    REPORT(&r, K3_CFG17, plan->ckpt->source, "quantization_config", "an own config, or an explicit ignore of the drafter's modules in the target's",
           "a drafter without a statement about quantisation: engines take over the target's");
  return check_kv(&r, err);
}

void k3_rules_packable(const struct k3_plan *plan, struct k3_findings *findings) {
  for (size_t i = 0; !plan->recipe->keep_names && i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    if (linear->is_plain || (linear->scheme.scheme != K3_SCHEME_INT_PACKED && linear->scheme.scheme != K3_SCHEME_FP8_GROUP))
      continue;
    uint32_t t = linear->tensors[k3_linear_weight(linear)];
    k3_findings_report(findings, K3_CFG21, k3_ckpt_file_of(k3_linear_ckpt(plan, linear), t)->path,
                       k3_ckpt_tensor(k3_linear_ckpt(plan, linear), t)->name, "--recipe generic, which keeps every tensor as it is",
                       "%s is read, but not packed by recipe %s", k3_scheme_name(linear->scheme.scheme), plan->recipe->name);
  }
}
