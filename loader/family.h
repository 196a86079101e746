// What recipes cannot say: the rules of single model families, by the names in a recipe's `require`. Each family has a file of its own.
#ifndef K3_LOADER_FAMILY_H
#define K3_LOADER_FAMILY_H

#include "loader/plan.h"

// Whether a recipe's `family` (unless it is its own name: a container of weights) and every name of `require` are known here: K3_BAD_INPUT naming what
// was found and what may stand there. `file` is for the message.
enum k3_status k3_family_check_recipe(const struct k3_recipe *recipe, const char *file, struct k3_error *err);

// Rules about config.json alone, before any name is mapped. What is wrong is added to `findings`.
void k3_family_check_config(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_findings *findings);

// Rules about names, shapes and dtypes, after the mapping (plan->shards sorted by module instance). Fails only for lack of memory.
enum k3_status k3_family_check_tensors(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);

// Rules that compare whole tensors: reads the weights concerned, twice a few GB in the released models.
enum k3_status k3_family_check_values(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);

#endif
