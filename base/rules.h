// The catalogue of rules. One rule has one id, stable for ever; every finding and every refusal of an input names one.
#ifndef K3_BASE_RULES_H
#define K3_BASE_RULES_H

#include "base/rules_table.h"

enum k3_severity { K3_INFO, K3_WARNING, K3_ERROR };

// What a rule has to read: headers and JSON, scale tensors, every weight byte, or also the BF16 source.
enum k3_rule_cost { K3_COST_HEADERS, K3_COST_SCALES, K3_COST_VALUES, K3_COST_BASELINE };

enum k3_rule {
  K3_RULE_NONE = 0,
#define K3_RULE_ENUM(id, severity, cost, summary) K3_##id,
  K3_RULE_TABLE(K3_RULE_ENUM)
#undef K3_RULE_ENUM
  K3_RULE_COUNT
};

struct k3_rule_info {
  const char *id;               // "CNT04"
  enum k3_severity severity;    // as k3pack itself would suffer it
  enum k3_rule_cost cost;
  const char *summary;          // one sentence: the condition
};

// Description of a rule; static storage. K3_RULE_NONE and unknown values give an entry whose id is "".
const struct k3_rule_info *k3_rule_info(enum k3_rule rule);
// Rule of that exact id ("CNT04"); K3_RULE_NONE when there is none.
enum k3_rule k3_rule_from_id(const char *id);
// "info", "warning" or "error"; static storage.
const char *k3_severity_name(enum k3_severity severity);

#endif
