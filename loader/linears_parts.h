// Between loader/linears.c (which modules there are) and loader/rules_tensors.c (how each is stored); nobody else includes this.
#ifndef K3_LOADER_LINEARS_PARTS_H
#define K3_LOADER_LINEARS_PARTS_H

#include "loader/linears.h"
#include "loader/plan.h"

// Decides the scheme of one module and reports what is wrong with its tensors.
void k3_linear_classify(const struct k3_plan *plan, struct k3_linear *linear, struct k3_findings *findings);

// Input scales that some experts of a layer have and others lack (SCL17), and those that the config's activation scheme needs and nobody has (TEN01).
enum k3_status k3_linears_check_inputs(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);

// Kind of a tensor that belongs to an unsupported format, by its name alone (DEEPSEEK_V4, GPT_OSS and SPARSE also by its dtype).
enum k3_foreign k3_foreign_of(const struct k3_st_tensor *tensor);

static inline const struct k3_ckpt *k3_linear_ckpt(const struct k3_plan *plan, const struct k3_linear *linear) {
  return linear->of_target ? plan->target : plan->ckpt;
}

#endif
