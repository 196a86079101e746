// Everything that can be said about a checkpoint before it is converted: the rules, in the order headers, scales, weight bytes. `check` prints it,
// `convert` refuses on any error-level finding.
#ifndef K3_LOADER_CHECK_H
#define K3_LOADER_CHECK_H

#include "loader/plan.h"
#include "loader/recipes.h"
#include "loader/rules.h"

enum k3_depth { K3_DEPTH_HEADERS, K3_DEPTH_SCALES, K3_DEPTH_VALUES };

struct k3_check_options {
  const char *recipe;        // name or file; NULL: find one
  bool generic_fallback;     // check: use "generic" when none fits; convert: that is CFG21
  enum k3_depth depth;
  enum k3_judge engine;      // whose severities count
  int n_threads;
  struct k3_progress *progress;
  struct k3_plan_options plan;
};

// What was looked at, for the closing line.
struct k3_check_summary {
  bool fell_back;                      // no recipe fits, "generic" was used
  uint64_t n_files, n_files_expected;  // files that were read; files that should be there
  uint64_t n_tensors, n_tensors_expected;
  uint64_t n_view_shards, n_view_shards_expected;  // of each parameter of the view; expected 0: the recipe has no view
  const char *view;                    // its name, without the image's root
};

// Finds the recipe, maps, checks. `recipe` and `plan` are filled as far as possible and must be freed by the caller in any case (k3_plan_free, then
// k3_recipe_free); the plan borrows the recipe. `target` may be NULL. What is wrong is in `findings`; fails only when looking itself fails, or when the
// recipe asked for does not exist.
enum k3_status k3_check_run(const struct k3_ckpt *ckpt, const struct k3_ckpt *target, const struct k3_check_options *options,
                            struct k3_recipe *recipe, struct k3_plan *plan, struct k3_check_summary *summary, struct k3_findings *findings,
                            struct k3_error *err);

// "files 1/1, tensors 68/68, context_kv_proj shards 5/5 per parameter; not read: ..." in dst, which it returns.
char *k3_check_summary_text(const struct k3_check_summary *summary, enum k3_depth depth, char *dst, size_t capacity);

// Rules whose errors --allow may turn into warnings.
bool k3_rule_may_be_allowed(enum k3_rule rule);

#endif
