// Why a rule of the catalogue matters and what to do about a finding: what `check --rules` prints beside each rule, and "remedy" in findings.
#ifndef K3_BASE_RULES_ADVICE_H
#define K3_BASE_RULES_ADVICE_H

#include "base/rules.h"

struct k3_rule_advice {
  const char *why;     // what goes wrong elsewhere when nobody says so
  const char *remedy;  // what to do
};

// Static storage; both texts are "" for K3_RULE_NONE and unknown values.
const struct k3_rule_advice *k3_rule_advice(enum k3_rule rule);

#endif
