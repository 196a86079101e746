#include "loader/recipes.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "loader/family.h"
#include "loader/mapper.h"

enum { MAX_RECIPE_NBYTES = 4 << 20 };

static bool is_path(const char *name) {
  size_t n = strlen(name);
  return strchr(name, '/') || (n > 5 && strcmp(name + n - 5, ".json") == 0);
}

enum k3_status k3_recipe_load(const char *name, struct k3_recipe *recipe, struct k3_error *err) {
  *recipe = (struct k3_recipe){0};
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++) {
    if (strcmp(file->name, name) == 0)
      return k3_recipe_parse(file->text, file->nbytes, name, recipe, err);
  }
  if (is_path(name)) {
    void *text;
    size_t nbytes;
    K3_TRY(k3_read_file(name, MAX_RECIPE_NBYTES, &text, &nbytes, err));
    enum k3_status status = k3_recipe_parse(text, nbytes, name, recipe, err);
    k3_free(text);
    if (status == K3_OK) {
      status = k3_family_check_recipe(recipe, name, err);
      if (status != K3_OK)
        k3_recipe_free(recipe);
    }
    return status;
  }
  char known[256] = "";
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++)
    snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", known[0] ? ", " : "", file->name);
  return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, known, "no recipe of that name");
}

// Whether some tensor has the name that the pattern (a trailing '*' takes the rest) describes, under any root and alias of the recipe.
static bool has_tensor_like(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, const char *pattern) {
  size_t n_pattern = strlen(pattern);
  bool prefix = n_pattern > 0 && pattern[n_pattern - 1] == '*';
  char spelled[512];
  for (size_t r = 0; r < (recipe->n_roots ? recipe->n_roots : 1); r++) {
    const char *root = recipe->n_roots ? recipe->roots[r] : "";
    for (size_t a = 0; a <= recipe->n_aliases; a++) {
      const char *rest = pattern;
      if (a > 0) {  // the pattern with the canonical module name replaced by the alias
        size_t n = strlen(recipe->aliases[a - 1].value);
        if (strncmp(pattern, recipe->aliases[a - 1].value, n) != 0 || pattern[n] != '.')
          continue;
        rest = pattern + n;
      }
      int n = snprintf(spelled, sizeof spelled, "%s%s%s", root, a > 0 ? recipe->aliases[a - 1].name : "", rest);
      if (n <= 0 || (size_t)n >= sizeof spelled)
        continue;
      size_t n_fixed = (size_t)n - prefix;
      uint64_t tensor;
      if (!prefix && k3_ckpt_find(ckpt, spelled, n_fixed, &tensor))
        return true;
      for (uint64_t t = 0; prefix && t < ckpt->n_tensors; t++) {
        if (strncmp(k3_ckpt_tensor(ckpt, t)->name, spelled, n_fixed) == 0)
          return true;
      }
    }
  }
  return false;
}

static bool match_fits(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, const struct k3_recipe_match *match) {
  if (match->config_field) {
    const char *value = NULL;
    return ckpt->config && k3_config_string(ckpt->config, match->config_field, &value, NULL, NULL) == K3_OK && value &&
           strcmp(value, match->config_value) == 0;
  }
  for (size_t i = 0; i < match->n_tensors; i++) {
    if (!has_tensor_like(ckpt, recipe, match->tensors[i]))
      return false;
  }
  return match->n_tensors > 0;
}

enum k3_status k3_recipe_choose(const struct k3_ckpt *ckpt, struct k3_recipe *recipe, bool *matched, struct k3_error *err) {
  *matched = false;
  // The config's own word counts more than names that families share.
  for (int by_config = 1; by_config >= 0; by_config--) {
    for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++) {
      K3_TRY(k3_recipe_parse(file->text, file->nbytes, file->name, recipe, err));
      for (size_t i = 0; i < recipe->n_matches; i++) {
        if ((recipe->matches[i].config_field != NULL) == (by_config == 1) && match_fits(ckpt, recipe, &recipe->matches[i])) {
          *matched = true;
          return K3_OK;
        }
      }
      k3_recipe_free(recipe);
    }
  }
  return K3_OK;
}

static bool has_fingerprint(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe) {
  for (size_t i = 0; i < recipe->n_matches; i++) {
    if (!recipe->matches[i].config_field && match_fits(ckpt, recipe, &recipe->matches[i]))
      return true;
  }
  return false;
}

enum k3_status k3_recipe_of_tensors(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, const char **other, struct k3_error *err) {
  *other = NULL;
  if (has_fingerprint(ckpt, recipe))
    return K3_OK;
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name && !*other; file++) {
    struct k3_recipe candidate;
    K3_TRY(k3_recipe_parse(file->text, file->nbytes, file->name, &candidate, err));
    if (strcmp(file->name, recipe->name) != 0 && has_fingerprint(ckpt, &candidate))
      *other = file->name;
    k3_recipe_free(&candidate);
  }
  return K3_OK;
}
