#include "loader/check.h"

#include <stdio.h>
#include <string.h>

#include "cli/rules.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "loader/digests.h"
#include "loader/rules_baseline.h"

static const struct k3_cli_help help = {
    .operands = "SRC",
    .n_min = 0,
    .n_max = 64,
    .about =
        "Says everything that is wrong with a checkpoint or an image, and writes nothing. Exit code 0: clean; 1: something was found. The last line\n"
        "says what was complete and what was not read.",
    .examples =
        "  k3pack check drafter/                      the recipe that fits; generic, and it says so, when none does\n"
        "  k3pack check drafter/ --depth headers      headers and JSON only, in milliseconds\n"
        "  k3pack check drafter/ --depth values       every weight byte too: NaN, holes, codes that cannot be right\n"
        "  k3pack check drafter/ --engine vllm        what that engine would do with the file, fused scales above all\n"
        "  k3pack check fp4/ --baseline plain/        a quantised checkpoint against the weights it was made from\n"
        "  k3pack check hf:org/name --digests         the cached files against the SHA-256 that the cache names them by\n"
        "  k3pack check drafter/ --strict --json      for a release pipeline: warnings fail, findings as JSON\n"
        "  k3pack check --rules SCL08 FUS02           what these rules mean, why, and what to do; without ids: all",
};

struct more {
  bool strict, rules, digests;
  const char *baseline;
  struct k3_cli_list only, ignore;
  struct k3_digests digest_result;
  struct k3_baseline_summary baseline_summary;
};

static bool read_ids(struct k3_cli *cli, const char *option, const struct k3_cli_list *list, bool named[K3_RULE_COUNT], int *exit_code) {
  for (size_t i = 0; i < list->n_items; i++) {
    enum k3_rule rule = k3_rule_from_id(list->items[i]);
    if (rule == K3_RULE_NONE) {
      *exit_code = k3_cli_usage(cli, "--%s: there is no rule %s (check --rules lists them)", option, list->items[i]);
      return false;
    }
    named[rule] = true;
  }
  return true;
}

static enum k3_status compare_baseline(struct k3_cli *cli, const struct k3_check_options *check, struct more *more, struct k3_source *source,
                                       struct k3_error *err) {
  if (source->ckpt.image.bytes)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, source->ckpt.source, NULL, "verify IMAGE --source SRC, or a checkpoint exported from the image",
                   "an image, which --baseline does not look into");
  struct k3_ckpt baseline = {0};
  struct k3_findings its_own = {0};  // what is wrong with the baseline is for a check of the baseline
  enum k3_status status = k3_ckpt_open(more->baseline, NULL, &baseline, &its_own, err);
  if (status == K3_OK && its_own.n_errors > 0)
    k3_cli_warn(cli, "the baseline has faults of its own; check it too");
  if (status == K3_OK)
    status = k3_rules_baseline(&source->plan, &baseline, check->engine, check->n_threads, check->progress, &more->baseline_summary, &source->findings,
                               err);
  k3_findings_free(&its_own);
  k3_ckpt_close(&baseline);
  // A comparison of nothing must not pass for one that found nothing.
  const unsigned long long n_compared = more->baseline_summary.n_compared, n_absent = more->baseline_summary.n_absent;
  if (status == K3_OK && n_compared == 0 && n_absent == 0)
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, source->ckpt.source, NULL, "a checkpoint with quantised weights",
                   "nothing to compare: no quantised weight");
  if (status == K3_OK && n_compared == 0)
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, more->baseline, NULL, "the plain weights that the checkpoint was made from",
                   "none of %llu quantised weights has a plain twin here", n_absent);
  if (status == K3_OK && n_absent > 0)
    k3_cli_warn(cli, "%llu of %llu quantised weights have no plain twin in the baseline and were not compared", n_absent, n_absent + n_compared);
  return status;
}

// What goes beyond the checkpoint itself.
static enum k3_status look_further(struct k3_cli *cli, const struct k3_check_options *check, struct more *more, struct k3_source *source,
                                   struct k3_error *err) {
  if (more->digests)
    K3_TRY(k3_digests_check(&source->ckpt, &source->recipe, check->n_threads, check->progress, &more->digest_result, &source->findings, err));
  else
    more->digest_result.match = k3_release_by_size(&source->ckpt, &source->recipe);
  return more->baseline ? compare_baseline(cli, check, more, source, err) : K3_OK;
}

static void write_json(struct k3_cli *cli, const struct more *more, const struct k3_source *source, bool clean, const char *line, int *exit_code) {
  struct k3_jsonw json;
  const struct k3_recipe_release *release = more->digest_result.match.release;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_bool(&json, "ok", clean);
  k3_jsonw_string(&json, "recipe", source->ckpt.image.bytes ? source->ckpt.image.manifest.recipe_name : source->recipe.name);
  k3_jsonw_u64(&json, "files", source->summary.n_files);
  k3_jsonw_u64(&json, "files_expected", source->summary.n_files_expected);
  k3_jsonw_u64(&json, "tensors", source->summary.n_tensors);
  k3_jsonw_u64(&json, "tensors_expected", source->summary.n_tensors_expected);
  k3_jsonw_u64(&json, "view_shards", source->summary.n_view_shards);
  k3_jsonw_u64(&json, "view_shards_expected", source->summary.n_view_shards_expected);
  if (release) {
    k3_jsonw_string(&json, "release", release->name);
    k3_jsonw_string(&json, "revision", release->revision);
    k3_jsonw_bool(&json, "release_proved", more->digest_result.match.proved);
  }
  if (more->digests) {
    k3_jsonw_u64(&json, "digests", more->digest_result.n_files);
    k3_jsonw_u64(&json, "digests_proved", more->digest_result.n_proved);
  }
  if (more->baseline) {
    k3_jsonw_u64(&json, "compared", more->baseline_summary.n_compared);
    k3_jsonw_u64(&json, "without_baseline", more->baseline_summary.n_absent);
    k3_jsonw_double(&json, "worst_rmse", more->baseline_summary.worst_rmse);
  }
  k3_jsonw_string(&json, "summary", line);
  k3_cli_json_findings(&json, &source->findings);
  *exit_code = k3_cli_json_end(cli, &json, *exit_code);
}

static void print_more(const struct more *more) {
  const struct k3_release_match *match = &more->digest_result.match;
  if (match->release)
    printf("release %s, revision %.12s: %s\n", match->release->name, match->release->revision,
           match->proved ? "every byte" : "names and sizes (--digests compares the bytes)");
  if (more->digests && more->digest_result.n_proved == 0 && !match->proved)
    printf("digests: %llu files read, nothing to compare them with: no snapshot of the HuggingFace cache, no published release\n",
           (unsigned long long)more->digest_result.n_files);
  else if (more->digests)
    printf("digests: %llu files, %llu proved by the cache's names\n", (unsigned long long)more->digest_result.n_files,
           (unsigned long long)more->digest_result.n_proved);
  if (more->baseline)
    printf("baseline: %llu weights compared, %llu without a twin, worst relative RMSE %.4f\n", (unsigned long long)more->baseline_summary.n_compared,
           (unsigned long long)more->baseline_summary.n_absent, more->baseline_summary.worst_rmse);
}

int k3_cmd_check(struct k3_cli *cli, int argc, char **argv) {
  struct k3_source_options from = {0};
  struct k3_check_options check = {.generic_fallback = true, .plan = {.digests = true}};
  struct more more = {0};
  int depth = K3_DEPTH_SCALES, engine = K3_JUDGE_K3PACK;
  const struct k3_option options[] = {
      K3_SOURCE_OPTIONS(from),
      {"depth", 'd', K3_OPT_CHOICE, "headers|scales|values",
       "how much is read: headers and JSON; also scale tensors (default); also every weight byte", &depth},
      {"engine", 'e', K3_OPT_CHOICE, "k3pack|vllm|sglang|trtllm", "whose trouble decides how severe a finding is (default k3pack)", &engine},
      {"strict", 0, K3_OPT_FLAG, NULL, "warnings fail too", &more.strict},
      {"only", 0, K3_OPT_LIST, "RULE", "report this rule alone; may be repeated", &more.only},
      {"ignore", 0, K3_OPT_LIST, "RULE", "do not report this rule; may be repeated", &more.ignore},
      {"baseline", 0, K3_OPT_TEXT, "SRC", "the plain weights: rules VAL07 and VAL10", &more.baseline},
      {"digests", 0, K3_OPT_FLAG, NULL, "SHA-256 of every file: against the names of the HuggingFace cache and published releases", &more.digests},
      {"rules", 0, K3_OPT_FLAG, NULL, "explain the rules, or those whose ids are given in place of SRC", &more.rules},
      {0},
  };
  int exit_code;
  bool only[K3_RULE_COUNT] = {false}, ignore[K3_RULE_COUNT] = {false};
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (more.rules)
    return k3_cli_print_rules(cli, cli->operands, cli->n_operands);
  if (cli->n_operands != 1)
    return k3_cli_usage(cli, "needs one SRC, not %zu", cli->n_operands);
  if (!read_ids(cli, "only", &more.only, only, &exit_code) || !read_ids(cli, "ignore", &more.ignore, ignore, &exit_code))
    return exit_code;
  check.depth = (enum k3_depth)depth;
  check.engine = (enum k3_judge)engine;
  struct k3_source source;
  struct k3_error err = {0};
  if (!k3_source_open(cli, cli->operands[0], &from, &check, &source, &exit_code)) {
    k3_source_close(&source);
    return exit_code;
  }
  if (look_further(cli, &check, &more, &source, &err) != K3_OK) {
    k3_source_close(&source);
    return k3_cli_fail(cli, &err);
  }
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++) {
    if (ignore[rule] || (more.only.n_items > 0 && !only[rule]))
      k3_findings_drop(&source.findings, (enum k3_rule)rule);
  }
  bool clean = source.findings.n_errors == 0 && !(more.strict && source.findings.n_warnings > 0);
  exit_code = clean ? 0 : 1;
  char line[512];
  k3_check_summary_text(&source.summary, check.depth, line, sizeof line);
  if (source.summary.fell_back && source.findings.n_errors_by_rule[K3_CFG21] == 0)
    k3_cli_note(cli, "no recipe fits; checked as a plain container of tensors (recipe generic)");
  k3_cli_print_findings(cli, &source.findings);
  if (cli->json) {
    write_json(cli, &more, &source, clean, line, &exit_code);
  } else if (!cli->quiet) {
    print_more(&more);
    printf("%s\n", line);
  }
  k3_source_close(&source);
  return exit_code;
}
