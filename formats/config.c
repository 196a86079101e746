#include "formats/config.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_tree.h"
#include "formats/lfs.h"

struct k3_config {
  json_t *root;
  char *file;
};

static const uint64_t max_u64 = UINT64_C(1) << 53;  // above, a writer that used doubles has lost digits

struct k3_config *k3_config_parse(const char *text, size_t nbytes, const char *file, struct k3_error *err) {
  uint64_t promised_nbytes;
  if (k3_lfs_is_pointer(text, nbytes, &promised_nbytes)) {
    k3_lfs_fail(file, promised_nbytes, err);
    return NULL;
  }
  struct k3_config *config = k3_calloc(1, sizeof *config, err);
  if (!config)
    return NULL;
  config->file = k3_strndup(file ? file : "", file ? strlen(file) : 0, err);
  if (config->file && k3_json_tree_parse(text, nbytes, K3_CFG19, file, &config->root, err) == K3_OK)
    return config;
  k3_config_free(config);
  return NULL;
}

void k3_config_free(struct k3_config *config) {
  if (!config)
    return;
  json_decref(config->root);
  k3_free(config->file);
  k3_free(config);
}

const char *k3_config_file(const struct k3_config *config) {
  return config->file;
}

const struct json_t *k3_config_root(const struct k3_config *config) {
  return config->root;
}

// The value at the path below `object`; NULL when there is none, or null.
static const json_t *find_below(const json_t *object, const char *path) {
  char key[128];
  for (const char *part = path; object; part++) {
    size_t nbytes = strcspn(part, ".");
    if (nbytes >= sizeof key)
      return NULL;
    memcpy(key, part, nbytes);
    key[nbytes] = '\0';
    // A number in a path picks the item of a list ("architectures.0"). NULL when `object` is neither.
    object = json_is_array(object) && key[0] >= '0' && key[0] <= '9' ? json_array_get(object, (size_t)strtoul(key, NULL, 10))
                                                                     : json_object_get(object, key);
    part += nbytes;
    if (*part == '\0')
      break;
  }
  return json_is_null(object) ? NULL : object;
}

static const json_t *find(const struct k3_config *config, const char *path) {
  static const char *const nested[] = {"text_config", "dflash_config"};
  const json_t *value = find_below(config->root, path);
  for (int i = 0; i < 2 && !value; i++)
    value = find_below(json_object_get(config->root, nested[i]), path);
  return value;
}

enum k3_config_kind k3_config_kind_of(const struct k3_config *config, const char *path) {
  const json_t *value = find(config, path);
  if (!value)
    return K3_CONFIG_ABSENT;
  switch (json_typeof(value)) {
    case JSON_OBJECT: return K3_CONFIG_OBJECT;
    case JSON_ARRAY: return K3_CONFIG_LIST;
    case JSON_STRING: return K3_CONFIG_STRING;
    case JSON_INTEGER: return K3_CONFIG_INT;
    case JSON_REAL: return K3_CONFIG_REAL;
    case JSON_TRUE:
    case JSON_FALSE: return K3_CONFIG_BOOL;
    case JSON_NULL: break;
  }
  return K3_CONFIG_ABSENT;
}

static enum k3_status fail_kind(const struct k3_config *config, const char *path, const char *allowed, const json_t *value, struct k3_error *err) {
  char what[128];
  return k3_fail(err, K3_BAD_INPUT, K3_CFG20, config->file, path, allowed, "%s", k3_json_tree_describe(value, what, sizeof what));
}

bool k3_config_contradicts(const struct k3_config *config, const char *path, char *text, size_t capacity) {
  const json_t *top = find_below(config->root, path), *nested = find_below(json_object_get(config->root, "text_config"), path);
  char a[128], b[128];
  text[0] = '\0';
  if (!top || !nested || json_equal(top, nested))
    return false;
  if (json_is_number(top) && json_is_number(nested) && !(json_number_value(top) < json_number_value(nested)) &&
      !(json_number_value(top) > json_number_value(nested)))
    return false;
  snprintf(text, capacity, "%s at the top, %s in text_config", k3_json_tree_describe(top, a, sizeof a), k3_json_tree_describe(nested, b, sizeof b));
  return true;
}

static bool is_u64(const json_t *value) {
  return json_is_integer(value) && json_integer_value(value) >= 0 && (uint64_t)json_integer_value(value) <= max_u64;
}

#define INTEGER_ALLOWED "an integer from 0 to 2^53"

enum k3_status k3_config_u64(const struct k3_config *config, const char *path, uint64_t *value, bool *found, struct k3_error *err) {
  const json_t *at = find(config, path);
  if (found)
    *found = at != NULL;
  if (!at)
    return K3_OK;
  if (!is_u64(at))
    return fail_kind(config, path, INTEGER_ALLOWED, at, err);
  *value = (uint64_t)json_integer_value(at);
  return K3_OK;
}

enum k3_status k3_config_require_u64(const struct k3_config *config, const char *path, uint64_t *value, struct k3_error *err) {
  bool found;
  K3_TRY(k3_config_u64(config, path, value, &found, err));
  return found ? K3_OK : k3_fail(err, K3_BAD_INPUT, K3_CFG20, config->file, path, INTEGER_ALLOWED, "the field is missing");
}

enum k3_status k3_config_real(const struct k3_config *config, const char *path, double *value, bool *found, struct k3_error *err) {
  const json_t *at = find(config, path);
  if (found)
    *found = at != NULL;
  if (!at)
    return K3_OK;
  if (!json_is_number(at) || !isfinite(json_number_value(at)))
    return fail_kind(config, path, "a number", at, err);
  *value = json_number_value(at);
  return K3_OK;
}

enum k3_status k3_config_bool(const struct k3_config *config, const char *path, bool *value, bool *found, struct k3_error *err) {
  const json_t *at = find(config, path);
  if (found)
    *found = at != NULL;
  if (!at)
    return K3_OK;
  if (!json_is_boolean(at))
    return fail_kind(config, path, "true or false", at, err);
  *value = json_is_true(at);
  return K3_OK;
}

enum k3_status k3_config_string(const struct k3_config *config, const char *path, const char **value, bool *found, struct k3_error *err) {
  const json_t *at = find(config, path);
  if (found)
    *found = at != NULL;
  if (!at)
    return K3_OK;
  if (!json_is_string(at))
    return fail_kind(config, path, "a text", at, err);
  *value = json_string_value(at);
  return K3_OK;
}

enum k3_status k3_config_u64_list(const struct k3_config *config, const char *path, uint64_t *values, size_t max_items, size_t *n_items, bool *found,
                                  struct k3_error *err) {
  const json_t *at = find(config, path);
  if (found)
    *found = at != NULL;
  if (!at)
    return K3_OK;
  if (!json_is_array(at))
    return fail_kind(config, path, "a list of integers", at, err);
  if (json_array_size(at) > max_items)
    return k3_fail(err, K3_BAD_INPUT, K3_CFG20, config->file, path, NULL, "a list of %zu entries, at most %zu are allowed", json_array_size(at),
                   max_items);
  for (size_t i = 0; i < json_array_size(at); i++) {
    const json_t *item = json_array_get(at, i);
    if (!is_u64(item)) {
      char what[128];
      return k3_fail(err, K3_BAD_INPUT, K3_CFG20, config->file, path, INTEGER_ALLOWED, "entry %zu is %s", i,
                     k3_json_tree_describe(item, what, sizeof what));
    }
    values[i] = (uint64_t)json_integer_value(item);
  }
  *n_items = json_array_size(at);
  return K3_OK;
}
