// The "model" object of a manifest, from the template in the recipe.
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "formats/json_tree.h"
#include "formats/recipe.h"

enum { MAX_PATH_NBYTES = 128 };

// Value of a config field, borrowed: as the typed look-ups find it, first as written, then below "text_config".
static const json_t *value_at(const json_t *object, const char *path, size_t n_path) {
  for (size_t at = 0; object && at <= n_path;) {
    size_t n = strcspn(path + at, ".");
    char key[MAX_PATH_NBYTES];
    n = n < n_path - at ? n : n_path - at;
    if (n >= sizeof key)
      return NULL;
    memcpy(key, path + at, n);
    key[n] = '\0';
    object = json_object_get(object, key);
    at += n + 1;
  }
  return json_is_null(object) ? NULL : object;
}

static const json_t *first_field(const struct k3_config *config, const char *alternatives) {
  const json_t *root = (const json_t *)k3_config_root(config), *found = NULL;
  while (!found && *alternatives) {
    size_t n = strcspn(alternatives, " |");
    found = value_at(root, alternatives, n);
    if (!found)
      found = value_at(json_object_get(root, "text_config"), alternatives, n);
    alternatives += n;
    alternatives += strspn(alternatives, " |");
  }
  return found;
}

// *filled: a new reference; NULL when the value is a field that the config does not have.
static enum k3_status fill(const struct k3_recipe *recipe, const struct k3_config *config, json_t *value, json_t **filled, struct k3_error *err) {
  enum k3_status status = K3_OK;
  const char *text = json_string_value(value);
  *filled = NULL;
  if (json_is_object(value)) {
    const char *key;
    json_t *item, *inner;
    *filled = json_object();
    json_object_foreach(value, key, item) {
      status = fill(recipe, config, item, &inner, err);
      if (status == K3_OK && inner && json_object_set_new(*filled, key, inner) != 0)
        status = k3_fail_memory(err, 0);
      if (status != K3_OK)
        break;
    }
  } else if (text && text[0] == '$') {
    const json_t *found = first_field(config, text + 1);
    *filled = found ? json_deep_copy(found) : NULL;
    return found && !*filled ? k3_fail_memory(err, 0) : K3_OK;
  } else if (text && text[0] == '=') {
    uint64_t number;
    K3_TRY(k3_recipe_eval(recipe, config, text + 1, NULL, &number, err));
    *filled = json_integer((json_int_t)number);
  } else {
    *filled = json_incref(value);
  }
  if (status == K3_OK && !*filled)
    status = k3_fail_memory(err, 0);
  if (status != K3_OK) {
    json_decref(*filled);
    *filled = NULL;
  }
  return status;
}

char *k3_recipe_model_json(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_error *err) {
  json_t *template = NULL, *filled = NULL;
  char *text = NULL;
  if (k3_json_tree_parse(recipe->model ? recipe->model : "{}", recipe->model ? strlen(recipe->model) : 2, K3_RULE_NONE, recipe->name, &template,
                         err) != K3_OK ||
      fill(recipe, config, template, &filled, err) != K3_OK)
    goto out;
  if (json_object_set_new(filled, "family", json_string(recipe->family)) != 0) {
    k3_fail_memory(err, 0);
    goto out;
  }
  struct k3_jsonw writer;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_json_tree_write(&writer, NULL, filled);
  text = k3_json_tree_take(&writer, err);
out:
  json_decref(template);
  json_decref(filled);
  return text;
}
