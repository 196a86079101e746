// The recipes that are compiled in, and the choice among them.
#ifndef K3_LOADER_RECIPES_H
#define K3_LOADER_RECIPES_H

#include "formats/recipe.h"
#include "loader/ckpt.h"

struct k3_recipe_file {
  const char *name;  // "k3-dspark"; NULL ends the table
  const char *text;
  size_t nbytes;
};
extern const struct k3_recipe_file K3_RECIPE_FILES[];

// Parses the recipe of that name, or else the file of that name ("./my.json": anything with a '/' or ending in ".json"). K3_BAD_ARGUMENT when there is
// neither, with the names there are.
enum k3_status k3_recipe_load(const char *name, struct k3_recipe *recipe, struct k3_error *err);

// Finds the recipe that fits a checkpoint: by config, then by tensor names. *matched false and an empty recipe when none does.
enum k3_status k3_recipe_choose(const struct k3_ckpt *ckpt, struct k3_recipe *recipe, bool *matched, struct k3_error *err);

// Whether a checkpoint, matched to `recipe` by its config, has the tensors of another family: *other names that recipe, NULL when it has those of its
// own or of none.
enum k3_status k3_recipe_of_tensors(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, const char **other, struct k3_error *err);

// Names a drafter or engine format that is recognised but not supported, and what differs, as a CFG21 finding. Returns whether there was one.
bool k3_variant_refused(const struct k3_ckpt *ckpt, struct k3_findings *findings);

#endif
