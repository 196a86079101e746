// A growing list of findings: what `check` prints. Many findings of one rule are kept as the first few and a count.
#ifndef K3_BASE_FINDINGS_H
#define K3_BASE_FINDINGS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct k3_finding {
  enum k3_severity severity;
  struct k3_error error;  // rule, file, tensor, found, allowed
};

enum { K3_FINDINGS_KEPT_PER_RULE = 20 };

// Zero-initialise; release with k3_findings_free.
struct k3_findings {
  struct k3_finding *items;
  size_t n_items, capacity;
  uint64_t n_by_rule[K3_RULE_COUNT];  // all of them, also those not kept
  uint64_t n_errors_by_rule[K3_RULE_COUNT], n_warnings_by_rule[K3_RULE_COUNT];
  uint64_t n_errors, n_warnings;
  bool out_of_memory;  // a finding could not be kept; it is counted all the same
};

// Adds `error` (its rule must be set) with the given severity. K3_NO_MEMORY when it cannot be kept; the counts are right all the same.
enum k3_status k3_findings_add(struct k3_findings *findings, enum k3_severity severity, const struct k3_error *error);
// Formats one in place, with the severity of the catalogue.
enum k3_status k3_findings_report(struct k3_findings *findings, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                                  const char *found, ...) K3_PRINTF(6, 7);
// Turns every error of that rule into a warning (--allow).
void k3_findings_allow(struct k3_findings *findings, enum k3_rule rule);
// Forgets every finding of that rule, its counts included.
void k3_findings_drop(struct k3_findings *findings, enum k3_rule rule);
void k3_findings_free(struct k3_findings *findings);

#endif
