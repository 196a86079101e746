// What convert and check share: the options that decide how a checkpoint is read, and the opening of SRC and --target.
#ifndef K3_CLI_SOURCE_H
#define K3_CLI_SOURCE_H

#include "cli/cli.h"
#include "loader/check.h"

struct k3_source_options {
  const char *recipe, *target;
  int embed;                // 0 draft, 1 target
  uint64_t block_width;
  struct k3_cli_list allow;  // rule ids
};

// Rows of an option table for the struct `source`.
#define K3_SOURCE_OPTIONS(source)                                                                                                       \
  {"recipe", 'r', K3_OPT_TEXT, "NAME|FILE", "the recipe (k3pack recipes lists them); default: the one that fits", &(source).recipe},     \
      {"target", 't', K3_OPT_TEXT, "SRC",                                                                                               \
       "the target model: embed_tokens and lm_head come from there; only the shards that hold them need be there", &(source).target},   \
      {"embed", 0, K3_OPT_CHOICE, "draft|target", "whose embedding and head win when both have them (default draft)", &(source).embed}, \
      {"block", 0, K3_OPT_U64, "T", "block width; default: the config's, else 7", &(source).block_width},                               \
  {                                                                                                                                     \
    "allow", 0, K3_OPT_LIST, "RULE", "turn errors of this rule into warnings (MAP01, IDX06, CFG02, CFG03, CFG05, VAL02); may be repeated", \
        &(source).allow                                                                                                                 \
  }

// An opened source with everything found out about it. Free with k3_source_close in any case.
struct k3_source {
  struct k3_ckpt ckpt, target;
  bool has_target;
  struct k3_recipe recipe;
  struct k3_plan plan;
  struct k3_check_summary summary;
  struct k3_findings findings;
};

// Fills check->recipe and check->plan from the options, opens both checkpoints and runs the rules. On failure prints the error and stores the exit code.
bool k3_source_open(struct k3_cli *cli, const char *path, const struct k3_source_options *options, struct k3_check_options *check,
                    struct k3_source *source, int *exit_code);
void k3_source_close(struct k3_source *source);

#endif
