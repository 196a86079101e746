// inspect --reductions: where the partial sums of tensor parallelism are completed.
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "cli/inspect_parts.h"
#include "formats/reduction_plan.h"
#include "loader/recipes.h"
#include "loader/split.h"
#include "runtime/moe.h"

// ---- which modules there are ----

static bool header_has(void *ctx, const char *module) {
  const struct k3_image *image = ctx;
  static const char *const params[] = {"weight", "weight_packed"};
  char name[1100];
  for (size_t i = 0; i < sizeof params / sizeof params[0]; i++) {
    int n = snprintf(name, sizeof name, "%s.%s", module, params[i]);
    if (n > 0 && (size_t)n < sizeof name && k3_st_find(&image->header, name, (size_t)n))
      return true;
  }
  return false;
}

static bool plan_has(void *ctx, const char *module) {
  const struct k3_plan *plan = ctx;
  size_t n = strlen(module);
  for (size_t i = 0; i < plan->n_tensors; i++) {
    const char *name = plan->tensors[i].kind == K3_PLAN_DATA ? plan->tensors[i].name : NULL;
    if (name && strncmp(name, module, n) == 0 && name[n] == '.' && !strchr(name + n + 1, '.'))
      return true;
  }
  return false;
}

// ---- whether the model can be cut for so many ranks, as `run --tp` would find out ----

// Binds the first rank's part, which reads no weights. What else is wrong with the image is for `run` to say.
static enum k3_status check_image_width(const struct k3_image *image, uint32_t tp, bool sequence_parallel, struct k3_error *err) {
  const struct k3_manifest *manifest = &image->manifest;
  const struct k3_weights_source source = {.image = image, .tp_rank = 0, .tp_size = tp};
  struct k3_error wrong = {0};
  if (manifest->family && strcmp(manifest->family, "k3-dspark") == 0) {
    const struct k3_array own = {0};
    struct k3_weights weights;
    if (k3_weights_bind(&source, &manifest->dspark, &own, &own, &weights, &wrong) == K3_OK)
      k3_weights_free(&weights);
  } else {
    struct k3_comm **comms = k3_calloc(tp, sizeof *comms, err);
    if (!comms)
      return K3_NO_MEMORY;
    if (tp == 1 || k3_comm_threads_create((int)tp, 1, comms, &wrong) == K3_OK) {
      const struct k3_moe_options options = {
          .n_layers = k3_manifest_n_layers(manifest), .tp_size = tp, .comm = comms[0], .sequence_parallel = sequence_parallel, .n_threads = 1};
      k3_moe_free(k3_moe_open(&source, &options, &wrong));
    }
    for (uint32_t r = 0; r < tp; r++) {
      if (comms[r])
        comms[r]->ops->destroy(comms[r]);
    }
    k3_free(comms);
  }
  if (wrong.rule != K3_PCK05)
    return K3_OK;
  *err = wrong;
  return wrong.status;
}

// ---- the stack ----

// Of a checkpoint, as its recipe would pack it.
static enum k3_status stack_of_checkpoint(const struct k3_ckpt *ckpt, uint32_t tp, struct k3_stack *stack, struct k3_findings *findings,
                                          struct k3_error *err) {
  struct k3_recipe recipe = {0};
  struct k3_plan plan = {0};
  const struct k3_plan_options options = {0};
  struct k3_manifest_pair *map = NULL;
  size_t n_map = 0;
  bool matched;
  enum k3_status status;
  K3_TRY_GOTO(status, out, k3_recipe_choose(ckpt, &recipe, &matched, err));
  if (!matched) {
    status = k3_fail(err, K3_UNSUPPORTED, K3_CFG21, ckpt->source, NULL, "a checkpoint that a recipe fits (k3pack recipes)",
                     "no recipe fits this checkpoint");
    goto out;
  }
  K3_TRY_GOTO(status, out, k3_plan_map(ckpt, NULL, &recipe, &options, &plan, findings, err));
  if (findings->n_errors == 0)
    K3_TRY_GOTO(status, out, k3_split_check(&plan, tp, err));
  if (findings->n_errors == 0)
    K3_TRY_GOTO(status, out, k3_plan_layout(&plan, findings, err));
  if (findings->n_errors > 0) {
    status = K3_BAD_INPUT;
    goto out;
  }
  uint64_t n_layers;
  if (k3_recipe_eval(&recipe, ckpt->config, "num_hidden_layers", NULL, &n_layers, NULL) != K3_OK)
    n_layers = K3_ALL_LAYERS;
  map = k3_calloc(recipe.n_modules, sizeof *map, err);
  status = map ? K3_OK : K3_NO_MEMORY;
  for (size_t m = 0; map && m < recipe.n_modules; m++) {
    if (recipe.modules[m].reduce_into && plan.mapper.exists[m])
      map[n_map++] = (struct k3_manifest_pair){recipe.modules[m].into, recipe.modules[m].reduce_into};
  }
  if (map)
    status = k3_stack_from_map(map, n_map, n_layers, plan_has, &plan, stack, err);
out:
  k3_free(map);
  k3_plan_free(&plan);
  k3_recipe_free(&recipe);
  return status;
}

// ---- the report ----

static const char *reason(const char *rule) {
  static const struct {
    const char *rule, *text;
  } reasons[] = {
      {"D1", "one rank"},
      {"D2", "the post-attention norm completes it"},
      {"D3", "the next layer's input norm completes it"},
      {"D4", "the next norm completes it, unless the MoE kernels cannot leave it open"},
      {"D5", "the kernel returns whole sums"},
      {"D6", "nothing is left open across pipeline stages"},
      {"D8", "the final norm completes it"},
      {"D9", "something else than a norm reads it"},
      {"D10", "sequence parallel"},
  };
  for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
    if (strcmp(reasons[i].rule, rule) == 0)
      return reasons[i].text;
  }
  return "";
}

// A step as the list shows it, but for a branch.
static void print_step(const struct k3_flow *step, const struct k3_flow *next) {
  char name[512];
  if (step->kind == K3_FLOW_START)
    printf("%-9s  %s -> %s  (D7: the first norm of a stream reduces nothing)\n", "whole", step->name[0] ? step->name : "the prediction block's input",
           k3_cli_name_text(name, next->name ? next->name : "the block"));
  else if (step->kind == K3_FLOW_TAP)
    printf("%-9s  the stream after %llu layers, once it is complete%s  (D9)\n", "tap", (unsigned long long)step->layer + 1,
           step->gather != K3_GATHER_NONE ? " and gathered" : "");
  else if (step->kind == K3_FLOW_BORDER)
    printf("           -- end of stage %u --\n", step->stage);
  else if (step->kind == K3_FLOW_OUTPUT && step->gather != K3_GATHER_NONE)
    printf("%-9s  output  (D10: whoever reads it reads every row)\n", "gathered");
  else if (step->kind == K3_FLOW_NORM && step->gather != K3_GATHER_NONE)
    printf("%-9s  %s  (D10: %s)\n", "gathered", k3_cli_name_text(name, step->name),
           step->gather == K3_GATHER_OUTPUT ? "the next attention reads every row" : "the stream leaves the ranks' own rows");
}

static void put_taps(struct k3_jsonw *json, const struct k3_reduction_plan *plan) {
  k3_jsonw_begin_array(json, "taps");
  for (size_t i = 0; i < plan->n_steps; i++) {
    if (plan->steps[i].kind != K3_FLOW_TAP)
      continue;
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_u64(json, "after_layers", plan->steps[i].layer + 1);
    k3_jsonw_u64(json, "stage", plan->steps[i].stage);
    k3_jsonw_bool(json, "gathered", plan->steps[i].gather != K3_GATHER_NONE);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
}

// What begins without a reduction: the model, and each prediction block.
static void put_streams(struct k3_jsonw *json, const struct k3_reduction_plan *plan) {
  k3_jsonw_begin_array(json, "streams");
  for (size_t i = 0; i + 1 < plan->n_steps; i++) {
    if (plan->steps[i].kind != K3_FLOW_START)
      continue;
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_u64(json, "layer", plan->steps[i].layer);
    k3_jsonw_string(json, "first_norm", plan->steps[i + 1].name);
    k3_jsonw_bool(json, "reduces", plan->steps[i + 1].reduce != K3_REDUCE_NONE);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
}

static int report_json(struct k3_cli *cli, const struct k3_reduction_plan *plan, const struct k3_inspect_parallel *asked) {
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_u64(&json, "tp", plan->parallel.tp);
  k3_jsonw_u64(&json, "pp", plan->parallel.pp);
  k3_jsonw_u64(&json, "deferred", plan->n_deferred);
  k3_jsonw_u64(&json, "immediate", plan->n_immediate);
  k3_jsonw_u64(&json, "scattered", plan->n_scattered);
  k3_jsonw_u64(&json, "gathered", plan->n_gathered);
  k3_jsonw_begin_object(&json, "sequence_parallel");
  k3_jsonw_bool(&json, "requested", asked->sequence_parallel);
  k3_jsonw_bool(&json, "effective", plan->n_scattered > 0);
  k3_jsonw_end_object(&json);
  put_streams(&json, plan);
  put_taps(&json, plan);
  k3_jsonw_string(&json, "embedding", "replicated: layer 0 reduces nothing");
  k3_jsonw_string(&json, "lm_head", plan->parallel.tp > 1 ? "split by vocabulary, logits gathered once" : "whole");
  k3_jsonw_begin_array(&json, "plan");
  for (size_t i = 0; plan->parallel.tp > 1 && i < plan->n_steps; i++) {
    const struct k3_flow *step = &plan->steps[i];
    if (step->kind != K3_FLOW_PRODUCE)
      continue;
    k3_jsonw_begin_object(&json, NULL);
    k3_jsonw_string(&json, "producer", step->name);
    k3_jsonw_string(&json, "norm", step->norm);
    k3_jsonw_u64(&json, "layer", step->layer);
    k3_jsonw_u64(&json, "stage", step->stage);
    k3_jsonw_string(&json, "action", k3_reduction_plan_action(plan, i));
    k3_jsonw_string(&json, "rule", step->rule);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}

static void report_text(const struct k3_reduction_plan *plan, const struct k3_inspect_parallel *asked) {
  char name[512], norm[512];
  for (size_t i = 0; plan->parallel.tp > 1 && i < plan->n_steps; i++) {
    const struct k3_flow *step = &plan->steps[i];
    if (step->kind == K3_FLOW_PRODUCE)
      printf("%-9s  %s -> %s  (%s: %s)\n", k3_reduction_plan_action(plan, i), k3_cli_name_text(name, step->name),
             k3_cli_name_text(norm, step->norm ? step->norm : "output"), step->rule, reason(step->rule));
    else
      print_step(step, i + 1 < plan->n_steps ? step + 1 : step);
  }
  if (plan->n_steps == 0) {
    printf("no sum of this model is completed by a norm: every row-parallel product is reduced at once\n");
    return;
  }
  printf("tp %u, pp %u: %llu all-reduces deferred into norms, %llu at once", plan->parallel.tp, plan->parallel.pp,
         (unsigned long long)plan->n_deferred, (unsigned long long)plan->n_immediate);
  if (plan->n_scattered > 0)
    printf(", %llu scattered by rows", (unsigned long long)plan->n_scattered);
  else if (asked->sequence_parallel)
    printf(", no experts on own rows (they take several ranks and one stage)");
  printf(plan->parallel.tp > 1 ? "; the embedding is replicated, logits are gathered once\n" : ": nothing is partial\n");
}

int k3_inspect_reductions(struct k3_cli *cli, const struct k3_ckpt *ckpt, const struct k3_inspect_parallel *asked) {
  enum { MAX_RANKS = 4096, MAX_TAPS = 64 };
  const uint64_t tp = asked->tp, pp = asked->pp;
  uint64_t taps[MAX_TAPS];
  size_t n_taps = 0, n_behind_layers = 0;
  struct k3_error err = {0};
  struct k3_findings findings = {0};
  struct k3_stack stack = {0};
  struct k3_reduction_plan plan = {0};
  if (tp < 1 || tp > MAX_RANKS || pp < 1 || pp > MAX_RANKS)
    return k3_cli_usage(cli, "--tp and --pp take 1 to %d", MAX_RANKS);
  if (!k3_cli_numbers(asked->taps, taps, MAX_TAPS, &n_taps))
    return k3_cli_usage(cli, "--taps takes different numbers of layers, separated by commas, not \"%s\"", asked->taps);
  for (size_t t = 0; t < n_taps; t++) {
    if (taps[t] > 0)  // before the first layer it is the embedding
      taps[n_behind_layers++] = taps[t] - 1;
  }
  int exit_code = 0;
  const struct k3_parallel parallel = {.tp = (uint32_t)tp, .pp = (uint32_t)pp, .tap = K3_TAP_BEHIND_NORM, .taps = taps, .n_taps = n_behind_layers};
  enum k3_status status = K3_OK;
  if (ckpt->image.bytes && ckpt->image.manifest.tp_size > 0)
    status = k3_fail(&err, K3_UNSUPPORTED, K3_RULE_NONE, ckpt->source, NULL, "the whole image, or the checkpoint",
                     "one file of an image that was cut for %u ranks", ckpt->image.manifest.tp_size);
  else if (ckpt->image.bytes)
    status = check_image_width(&ckpt->image, parallel.tp, asked->sequence_parallel, &err);
  else
    // Experts on own rows are whole: what else cannot be cut, the image says.
    status = stack_of_checkpoint(ckpt, asked->sequence_parallel ? 1 : parallel.tp, &stack, &findings, &err);
  if (status == K3_OK && ckpt->image.bytes)
    status = k3_stack_from_map(ckpt->image.manifest.reductions, ckpt->image.manifest.n_reductions, k3_manifest_n_layers(&ckpt->image.manifest),
                               header_has, (void *)(uintptr_t)&ckpt->image, &stack, &err);
  for (size_t s = 0; s < stack.n_sums; s++)
    stack.sums[s].sequence_parallel = asked->sequence_parallel && stack.sums[s].kind == K3_SUM_MOE;
  if (status == K3_OK)
    status = k3_reduction_plan_make(&stack, &parallel, &plan, &err);
  k3_cli_print_findings(cli, &findings);
  if (status == K3_OK && cli->json)
    exit_code = report_json(cli, &plan, asked);
  else if (status == K3_OK)
    report_text(&plan, asked);
  else if (findings.n_errors > 0)
    exit_code = k3_status_exit_code(status);
  else
    exit_code = k3_cli_fail(cli, &err);
  k3_reduction_plan_free(&plan);
  k3_stack_free(&stack);
  k3_findings_free(&findings);
  return exit_code;
}
