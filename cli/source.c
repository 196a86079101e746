#include "cli/source.h"

static bool read_allowed(struct k3_cli *cli, const struct k3_cli_list *allow, uint8_t allowed[K3_RULE_COUNT], int *exit_code) {
  for (size_t i = 0; i < allow->n_items; i++) {
    enum k3_rule rule = k3_rule_from_id(allow->items[i]);
    if (rule == K3_RULE_NONE) {
      *exit_code = k3_cli_usage(cli, "--allow: there is no rule %s", allow->items[i]);
      return false;
    }
    if (!k3_rule_may_be_allowed(rule)) {
      *exit_code = k3_cli_usage(cli, "--allow: rule %s cannot be allowed, it leaves nothing sound to pack", allow->items[i]);
      return false;
    }
    allowed[rule] = 1;
  }
  return true;
}

// The recipe that decides which tensors of the target are wanted: the named one, or the drafter's.
static enum k3_status open_target(const char *path, const struct k3_check_options *check, struct k3_source *source, struct k3_error *err) {
  struct k3_recipe recipe;
  bool matched = true;
  if (check->recipe)
    K3_TRY(k3_recipe_load(check->recipe, &recipe, err));
  else
    K3_TRY(k3_recipe_choose(&source->ckpt, &recipe, &matched, err));
  struct k3_ckpt_options options = {k3_plan_borrowed_name, &recipe};
  // Without borrowed modules there is nothing to look for, and the plan will not ask.
  enum k3_status status = k3_ckpt_open(path, matched && recipe.n_borrowed_roots > 0 ? &options : NULL, &source->target, &source->findings, err);
  source->has_target = status == K3_OK;
  k3_recipe_free(&recipe);
  return status;
}

bool k3_source_open(struct k3_cli *cli, const char *path, const struct k3_source_options *options, struct k3_check_options *check,
                    struct k3_source *source, int *exit_code) {
  struct k3_error err = {0};
  *source = (struct k3_source){0};
  check->recipe = options->recipe;
  check->n_threads = cli->n_threads;
  check->progress = &cli->progress;
  check->plan.block_width = options->block_width;
  check->plan.embed_from_target = options->embed == 1;
  if (!read_allowed(cli, &options->allow, check->plan.allowed_rules, exit_code))
    return false;
  enum k3_status status = k3_ckpt_open(path, NULL, &source->ckpt, &source->findings, &err);
  if (status == K3_OK && options->target)
    status = open_target(options->target, check, source, &err);
  if (status == K3_OK)
    status = k3_check_run(&source->ckpt, source->has_target ? &source->target : NULL, check, &source->recipe, &source->plan, &source->summary,
                          &source->findings, &err);
  if (status == K3_OK)
    return true;
  *exit_code = k3_cli_fail(cli, &err);
  return false;
}

void k3_source_close(struct k3_source *source) {
  k3_plan_free(&source->plan);
  k3_recipe_free(&source->recipe);
  k3_ckpt_close(&source->target);
  k3_ckpt_close(&source->ckpt);
  k3_findings_free(&source->findings);
}
