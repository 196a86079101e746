#include "base/findings.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/alloc.h"

enum k3_status k3_findings_add(struct k3_findings *findings, enum k3_severity severity, const struct k3_error *error) {
  findings->n_errors += severity == K3_ERROR;
  findings->n_errors_by_rule[error->rule] += severity == K3_ERROR;
  findings->n_warnings += severity == K3_WARNING;
  findings->n_warnings_by_rule[error->rule] += severity == K3_WARNING;
  if (findings->n_by_rule[error->rule]++ >= K3_FINDINGS_KEPT_PER_RULE)
    return K3_OK;
  if (k3_grow(&findings->items, &findings->capacity, findings->n_items + 1, sizeof *findings->items, NULL) != K3_OK) {
    findings->out_of_memory = true;
    return K3_NO_MEMORY;
  }
  findings->items[findings->n_items++] = (struct k3_finding){severity, *error};
  return K3_OK;
}

enum k3_status k3_findings_report(struct k3_findings *findings, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                                  const char *found, ...) {
  char text[sizeof((struct k3_error *)0)->found];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  struct k3_error error = {0};
  k3_fail(&error, K3_BAD_INPUT, rule, file, tensor, allowed, "%s", text);
  return k3_findings_add(findings, k3_rule_info(rule)->severity, &error);
}

void k3_findings_allow(struct k3_findings *findings, enum k3_rule rule) {
  findings->n_errors -= findings->n_errors_by_rule[rule];
  findings->n_warnings += findings->n_errors_by_rule[rule];
  findings->n_warnings_by_rule[rule] += findings->n_errors_by_rule[rule];
  findings->n_errors_by_rule[rule] = 0;
  for (size_t i = 0; i < findings->n_items; i++) {
    if (findings->items[i].error.rule == rule && findings->items[i].severity == K3_ERROR)
      findings->items[i].severity = K3_WARNING;
  }
}

void k3_findings_drop(struct k3_findings *findings, enum k3_rule rule) {
  size_t n_kept = 0;
  for (size_t i = 0; i < findings->n_items; i++) {
    if (findings->items[i].error.rule != rule)
      findings->items[n_kept++] = findings->items[i];
  }
  findings->n_items = n_kept;
  findings->n_errors -= findings->n_errors_by_rule[rule];
  findings->n_warnings -= findings->n_warnings_by_rule[rule];
  findings->n_by_rule[rule] = findings->n_errors_by_rule[rule] = findings->n_warnings_by_rule[rule] = 0;
}

void k3_findings_free(struct k3_findings *findings) {
  k3_free(findings->items);
  *findings = (struct k3_findings){0};
}
