#include "base/rules.h"

#include <string.h>

static const struct k3_rule_info RULES[K3_RULE_COUNT] = {
    [K3_RULE_NONE] = {"", K3_INFO, K3_COST_HEADERS, ""},
#define K3_RULE_ROW(id, severity, cost, summary) [K3_##id] = {#id, severity, cost, summary},
    K3_RULE_TABLE(K3_RULE_ROW)
#undef K3_RULE_ROW
};

const struct k3_rule_info *k3_rule_info(enum k3_rule rule) {
  if (rule <= K3_RULE_NONE || rule >= K3_RULE_COUNT)
    return &RULES[K3_RULE_NONE];
  return &RULES[rule];
}

enum k3_rule k3_rule_from_id(const char *id) {
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++) {
    if (strcmp(RULES[rule].id, id) == 0)
      return (enum k3_rule)rule;
  }
  return K3_RULE_NONE;
}

const char *k3_severity_name(enum k3_severity severity) {
  static const char *const names[] = {"info", "warning", "error"};
  return severity >= K3_INFO && severity <= K3_ERROR ? names[severity] : "?";
}
