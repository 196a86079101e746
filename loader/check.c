#include "loader/check.h"

#include <stdio.h>
#include <string.h>

#include "loader/family.h"
#include "loader/plan_parts.h"
#include "loader/rules_values.h"
#include "loader/writer.h"

bool k3_rule_may_be_allowed(enum k3_rule rule) {
  switch (rule) {
    case K3_MAP01:
    case K3_IDX06:
    case K3_CFG02:
    case K3_CFG03:
    case K3_CFG05:
    case K3_VAL02: return true;
    default: return false;  // the others leave nothing that could be packed, or something that would be wrong
  }
}

static enum k3_status find_recipe(const struct k3_ckpt *ckpt, const struct k3_check_options *options, struct k3_recipe *recipe,
                                  struct k3_check_summary *summary, struct k3_findings *findings, struct k3_error *err) {
  if (options->recipe)
    return k3_recipe_load(options->recipe, recipe, err);
  bool matched = false;
  if (!k3_variant_refused(ckpt, findings)) {
    K3_TRY(k3_recipe_choose(ckpt, recipe, &matched, err));
    if (!matched && !options->generic_fallback && ckpt->is_folder && !ckpt->config && findings->n_by_rule[K3_CFG19] == 0)
      k3_findings_report(findings, K3_CFG20, ckpt->folder, "config.json", "the model's config.json beside its weights",
                         "no config.json in this folder");
    else if (!matched && !options->generic_fallback)
      k3_findings_report(findings, K3_CFG21, ckpt->source, NULL, "a known model, --recipe FILE, or --recipe generic to keep all names",
                         "no recipe fits this checkpoint");
  }
  if (matched)
    return K3_OK;
  summary->fell_back = true;
  return k3_recipe_load("generic", recipe, err);
}

static void count_files(const struct k3_ckpt *ckpt, const struct k3_findings *findings, struct k3_check_summary *summary) {
  summary->n_files_expected = ckpt->n_files + findings->n_by_rule[K3_IDX01];
  for (size_t i = 0; i < ckpt->n_files; i++)
    summary->n_files += ckpt->files[i].header.data_begin > 0;
}

// An image brings its own plan: its manifest was held against its header when it was opened.
static enum k3_status check_image(const struct k3_ckpt *ckpt, const struct k3_check_options *options, struct k3_recipe *recipe,
                                  struct k3_check_summary *summary, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_manifest *manifest = &ckpt->image.manifest;
  summary->n_tensors = summary->n_tensors_expected = ckpt->n_tensors;
  for (size_t v = 0; v < manifest->n_views; v++) {
    if (strstr(manifest->views[v].name, ".context_kv_proj.weight")) {
      summary->view = "context_kv_proj";
      summary->n_view_shards = summary->n_view_shards_expected = manifest->views[v].n_shards;
      break;
    }
  }
  K3_TRY(k3_recipe_load("generic", recipe, err));
  if (options->depth < K3_DEPTH_VALUES)
    return K3_OK;
  return k3_rules_values(ckpt, NULL, options->engine, options->n_threads, options->progress, findings, err);
}

// In the order of their cost: headers, then the scales and what they mean for fused modules.
static enum k3_status run_rules(const struct k3_plan *plan, const struct k3_check_options *options, struct k3_findings *findings,
                                struct k3_error *err) {
  struct k3_scale_facts *facts = NULL;
  enum k3_status status = K3_OK;
  K3_TRY(k3_rules_config(plan, options->engine, findings, err));
  K3_TRY(k3_rules_model(plan, options->engine, options->depth >= K3_DEPTH_SCALES, options->depth >= K3_DEPTH_VALUES, findings, err));
  if (options->depth >= K3_DEPTH_SCALES && findings->n_errors_by_rule[K3_CFG21] == 0) {
    facts = k3_calloc(plan->linears.n_items, sizeof *facts, err);
    status = facts ? k3_rules_scales(plan, options->engine, options->n_threads, facts, findings, err) : K3_NO_MEMORY;
  }
  if (status == K3_OK)
    status = k3_rules_fusion(plan, options->engine, facts, findings, err);
  k3_free(facts);
  return status;
}

enum k3_status k3_check_run(const struct k3_ckpt *ckpt, const struct k3_ckpt *target, const struct k3_check_options *options,
                            struct k3_recipe *recipe, struct k3_plan *plan, struct k3_check_summary *summary, struct k3_findings *findings,
                            struct k3_error *err) {
  *summary = (struct k3_check_summary){0};
  *recipe = (struct k3_recipe){0};
  *plan = (struct k3_plan){0};
  count_files(ckpt, findings, summary);
  if (findings->n_errors_by_rule[K3_IMG01] + findings->n_errors_by_rule[K3_IMG02] + findings->n_errors_by_rule[K3_IMG03] > 0) {
    // An image that contradicts itself: its own tensors would only be strangers to every recipe.
    summary->n_tensors = summary->n_tensors_expected = ckpt->n_tensors;
    return k3_recipe_load("generic", recipe, err);
  }
  if (ckpt->image.bytes)
    return check_image(ckpt, options, recipe, summary, findings, err);
  K3_TRY(find_recipe(ckpt, options, recipe, summary, findings, err));
  K3_TRY(k3_plan_map(ckpt, target, recipe, &options->plan, plan, findings, err));
  // The plan counts parameters; companions of quantised weights are tensors too, and an absent one is TEN01.
  uint64_t n_companions = 0;
  for (size_t s = 0; s < plan->n_shards; s++) {
    unsigned param = plan->shards[s].mapped.param;
    n_companions += param < K3_PARAM_KNOWN_COUNT && param != K3_PARAM_WEIGHT && param != K3_PARAM_WEIGHT_PACKED;
  }
  plan->n_present += n_companions;
  plan->n_expected += n_companions + findings->n_by_rule[K3_TEN01];
  K3_TRY(run_rules(plan, options, findings, err));
  if (findings->n_errors == 0)  // a set that is complete and right one by one may still not stack
    K3_TRY(k3_plan_check_stacks(plan, findings, err));
  summary->n_tensors = plan->n_present;
  // A name that the index promised and nobody holds is missing under any recipe.
  summary->n_tensors_expected = recipe->keep_names ? plan->n_expected + ckpt->n_promised : plan->n_expected;
  summary->n_view_shards = plan->n_view_shards;
  summary->n_view_shards_expected = plan->n_view_shards_expected;
  for (size_t m = 0; m < recipe->n_modules && !summary->view; m++) {
    if (recipe->modules[m].view)
      summary->view = recipe->modules[m].view + (strncmp(recipe->modules[m].view, recipe->image_root, strlen(recipe->image_root)) == 0
                                                     ? strlen(recipe->image_root) : 0);
  }
  if (options->depth == K3_DEPTH_VALUES)
    K3_TRY(k3_rules_values(ckpt, plan, options->engine, options->n_threads, options->progress, findings, err));
  if (options->depth == K3_DEPTH_VALUES)
    K3_TRY(k3_family_check_values(plan, findings, err));
  if (options->depth == K3_DEPTH_VALUES && findings->n_errors == 0)
    K3_TRY(k3_plan_compare_borrowed(plan, options->n_threads, options->progress, findings, err));
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++) {
    if (options->plan.allowed_rules[rule])
      k3_findings_allow(findings, (enum k3_rule)rule);
  }
  return K3_OK;
}

char *k3_check_summary_text(const struct k3_check_summary *s, enum k3_depth depth, char *dst, size_t capacity) {
  char name[160], view[256] = "";
  if (s->view && s->n_view_shards_expected > 0)
    snprintf(view, sizeof view, ", %s shards %llu/%llu per parameter", k3_printable(name, sizeof name, s->view, strlen(s->view), 100),
             (unsigned long long)s->n_view_shards, (unsigned long long)s->n_view_shards_expected);
  static const char *const not_read[] = {"scales, weights", "weights", "nothing"};
  snprintf(dst, capacity, "files %llu/%llu, tensors %llu/%llu%s; not read: %s", (unsigned long long)s->n_files,
           (unsigned long long)s->n_files_expected, (unsigned long long)s->n_tensors, (unsigned long long)s->n_tensors_expected, view,
           not_read[depth]);
  return dst;
}
