#include "cli/rules.h"

#include <stdio.h>
#include <string.h>

#include "base/rules_advice.h"
#include "loader/rules.h"

static const char *const ENGINES[] = {"k3pack", "vllm", "sglang", "trtllm"};
static const char *const COSTS[] = {"headers", "scales", "values", "baseline"};

static bool is_wanted(enum k3_rule rule, char **ids, size_t n_ids) {
  for (size_t i = 0; i < n_ids; i++) {
    if (k3_rule_from_id(ids[i]) == rule)
      return true;
  }
  return n_ids == 0;
}

static void print_rule(enum k3_rule rule) {
  const struct k3_rule_info *info = k3_rule_info(rule);
  const struct k3_rule_advice *advice = k3_rule_advice(rule);
  bool differs = false;
  printf("%s  %s\n  reads %s; %s", info->id, info->summary, COSTS[info->cost], k3_severity_name(k3_rule_severity(rule, K3_JUDGE_K3PACK)));
  for (int e = K3_JUDGE_VLLM; e <= K3_JUDGE_TRTLLM; e++)
    differs |= k3_rule_severity(rule, (enum k3_judge)e) != k3_rule_severity(rule, K3_JUDGE_K3PACK);
  for (int e = K3_JUDGE_VLLM; differs && e <= K3_JUDGE_TRTLLM; e++)
    printf(", for %s %s", ENGINES[e], k3_severity_name(k3_rule_severity(rule, (enum k3_judge)e)));
  printf("\n  why: %s\n  what to do: %s\n", advice->why, advice->remedy);
}

static void write_rule(struct k3_jsonw *json, enum k3_rule rule) {
  const struct k3_rule_info *info = k3_rule_info(rule);
  k3_jsonw_begin_object(json, NULL);
  k3_jsonw_string(json, "rule", info->id);
  k3_jsonw_string(json, "condition", info->summary);
  k3_jsonw_string(json, "cost", COSTS[info->cost]);
  k3_jsonw_begin_object(json, "severity");
  for (int e = K3_JUDGE_K3PACK; e <= K3_JUDGE_TRTLLM; e++)
    k3_jsonw_string(json, ENGINES[e], k3_severity_name(k3_rule_severity(rule, (enum k3_judge)e)));
  k3_jsonw_end_object(json);
  k3_jsonw_string(json, "why", k3_rule_advice(rule)->why);
  k3_jsonw_string(json, "remedy", k3_rule_advice(rule)->remedy);
  k3_jsonw_end_object(json);
}

int k3_cli_print_rules(struct k3_cli *cli, char **ids, size_t n_ids) {
  struct k3_jsonw json;
  for (size_t i = 0; i < n_ids; i++) {
    if (k3_rule_from_id(ids[i]) == K3_RULE_NONE)
      return k3_cli_usage(cli, "--rules: there is no rule %s", ids[i]);
  }
  if (cli->json) {
    k3_cli_json_begin(cli, &json);
    k3_jsonw_begin_array(&json, "rules");
  }
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++) {
    if (!is_wanted((enum k3_rule)rule, ids, n_ids))
      continue;
    if (cli->json)
      write_rule(&json, (enum k3_rule)rule);
    else
      print_rule((enum k3_rule)rule);
  }
  if (!cli->json)
    return 0;
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}
