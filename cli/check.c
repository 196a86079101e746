#include "loader/check.h"

#include <stdio.h>
#include <string.h>

#include "cli/source.h"
#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "SRC",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Says everything that is wrong with a checkpoint or an image, and writes nothing. Exit code 0: clean; 1: something was found. The last line\n"
        "says what was complete and what was not read.",
    .examples =
        "  k3pack check drafter/                      the recipe that fits; generic, and it says so, when none does\n"
        "  k3pack check drafter/ --depth headers      headers and JSON only, in milliseconds\n"
        "  k3pack check drafter/ --engine vllm        what that engine would do with the file, fused scales above all\n"
        "  k3pack check drafter/ --strict --json      for a release pipeline: warnings fail, findings as JSON",
};

int k3_cmd_check(struct k3_cli *cli, int argc, char **argv) {
  struct k3_source_options from = {0};
  struct k3_check_options check = {.generic_fallback = true, .plan = {.digests = true}};
  int depth = K3_DEPTH_SCALES, engine = K3_ENGINE_K3PACK;
  bool strict = false;
  const struct k3_option options[] = {
      K3_SOURCE_OPTIONS(from),
      {"depth", 'd', K3_OPT_CHOICE, "headers|scales|values", "how much is read: headers and JSON; also scale tensors (default); also every weight byte",
       &depth},
      {"engine", 'e', K3_OPT_CHOICE, "k3pack|vllm|sglang|trtllm", "whose trouble decides how severe a finding is (default k3pack)", &engine},
      {"strict", 0, K3_OPT_FLAG, NULL, "warnings fail too", &strict},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  check.depth = (enum k3_depth)depth;
  check.engine = (enum k3_engine)engine;
  struct k3_source source;
  if (!k3_source_open(cli, cli->operands[0], &from, &check, &source, &exit_code)) {
    k3_source_close(&source);
    return exit_code;
  }
  bool clean = source.findings.n_errors == 0 && !(strict && source.findings.n_warnings > 0);
  exit_code = clean ? 0 : 1;
  char line[512];
  k3_check_summary_text(&source.summary, check.depth, line, sizeof line);
  if (source.summary.fell_back && source.findings.n_errors_by_rule[K3_CFG21] == 0)
    k3_cli_note(cli, "no recipe fits; checked as a plain container of tensors (recipe generic)");
  k3_cli_print_findings(cli, &source.findings);
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", clean);
    k3_jsonw_string(&json, "recipe", source.ckpt.image.bytes ? source.ckpt.image.manifest.recipe_name : source.recipe.name);
    k3_jsonw_u64(&json, "files", source.summary.n_files);
    k3_jsonw_u64(&json, "files_expected", source.summary.n_files_expected);
    k3_jsonw_u64(&json, "tensors", source.summary.n_tensors);
    k3_jsonw_u64(&json, "tensors_expected", source.summary.n_tensors_expected);
    k3_jsonw_u64(&json, "view_shards", source.summary.n_view_shards);
    k3_jsonw_u64(&json, "view_shards_expected", source.summary.n_view_shards_expected);
    k3_jsonw_string(&json, "summary", line);
    k3_cli_json_findings(&json, &source.findings);
    exit_code = k3_cli_json_end(cli, &json, exit_code);
  } else if (!cli->quiet) {
    printf("%s\n", line);
  }
  k3_source_close(&source);
  return exit_code;
}
