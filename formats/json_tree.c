#include "formats/json_tree.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_pull.h"

// Largest integer up to which every integer is a double.
static const double max_exact = 9007199254740992.0;

// Turns the reals that are whole numbers back into integers, after a parse that made all numbers real. False when memory fails.
static bool restore_integers(json_t *value) {
  const char *key;
  json_t *entry;
  void *next;
  size_t i;
  if (json_is_object(value)) {
    json_object_foreach_safe(value, next, key, entry) {
      if (json_is_real(entry) && fabs(json_real_value(entry)) <= max_exact && json_real_value(entry) == trunc(json_real_value(entry))) {
        if (json_object_set_new(value, key, json_integer((json_int_t)json_real_value(entry))) != 0)
          return false;
      } else if (!restore_integers(entry)) {
        return false;
      }
    }
  } else if (json_is_array(value)) {
    json_array_foreach(value, i, entry) {
      if (json_is_real(entry) && fabs(json_real_value(entry)) <= max_exact && json_real_value(entry) == trunc(json_real_value(entry))) {
        if (json_array_set_new(value, i, json_integer((json_int_t)json_real_value(entry))) != 0)
          return false;
      } else if (!restore_integers(entry)) {
        return false;
      }
    }
  }
  return true;
}

// jansson names lacking memory, says nothing at all, or takes it for a syntax error; then the other reader, which needs next to none, finds no error.
static bool memory_ran_out(const json_error_t *error, const char *text, size_t nbytes) {
  if (json_error_code(error) == json_error_out_of_memory || error->text[0] == '\0')
    return true;
  if (json_error_code(error) != json_error_invalid_syntax)
    return false;
  struct k3_json json;
  k3_json_open(&json, text, nbytes, NULL, K3_RULE_NONE, NULL);
  enum k3_status status = k3_json_skip(&json);
  if (status == K3_OK)
    status = k3_json_finish(&json);
  k3_json_close(&json);
  return status != K3_BAD_INPUT;
}

enum k3_status k3_json_tree_parse(const char *text, size_t nbytes, enum k3_rule rule, const char *file, json_t **root, struct k3_error *err) {
  json_error_t error;
  char what[96];
  *root = NULL;
  if (nbytes == 0)
    return k3_fail(err, K3_BAD_INPUT, rule, file, NULL, "one JSON object", "the text is empty");
  if (nbytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0)
    return k3_fail(err, K3_BAD_INPUT, rule, file, NULL, "JSON in UTF-8 without a mark", "line 1, column 1: a byte-order mark");
  json_t *tree = json_loadb(text, nbytes, JSON_REJECT_DUPLICATES, &error);
  if (!tree && json_error_code(&error) == json_error_numeric_overflow) {
    tree = json_loadb(text, nbytes, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &error);
    if (tree && !restore_integers(tree)) {
      json_decref(tree);
      return k3_fail_memory(err, nbytes);
    }
  }
  if (!tree && memory_ran_out(&error, text, nbytes))
    return k3_fail_memory(err, nbytes);
  if (!tree)
    return k3_fail(err, K3_BAD_INPUT, rule, file, NULL, "strict JSON", "line %d, column %d: %s", error.line, error.column, error.text);
  if (!json_is_object(tree)) {
    k3_fail(err, K3_BAD_INPUT, rule, file, NULL, "one JSON object", "line 1: %s instead of an object",
            k3_json_tree_describe(tree, what, sizeof what));
    json_decref(tree);
    return K3_BAD_INPUT;
  }
  *root = tree;
  return K3_OK;
}

const char *k3_json_tree_describe(const json_t *value, char *dst, size_t capacity) {
  char shown[80];
  size_t n;
  if (!value) {
    snprintf(dst, capacity, "nothing");
    return dst;
  }
  switch (json_typeof(value)) {
    case JSON_OBJECT: snprintf(dst, capacity, "an object"); break;
    case JSON_ARRAY: snprintf(dst, capacity, "a list"); break;
    case JSON_STRING:
      k3_printable(shown, sizeof shown, json_string_value(value), json_string_length(value), 48);
      snprintf(dst, capacity, "the text \"%s\"", shown);
      break;
    case JSON_INTEGER: snprintf(dst, capacity, "%lld", (long long)json_integer_value(value)); break;
    case JSON_REAL:  // not printf, whose point depends on the locale
      n = json_dumpb(value, shown, sizeof shown - 1, JSON_ENCODE_ANY);
      shown[n < sizeof shown ? n : 0] = '\0';
      snprintf(dst, capacity, "%s", shown);
      break;
    case JSON_TRUE: snprintf(dst, capacity, "true"); break;
    case JSON_FALSE: snprintf(dst, capacity, "false"); break;
    case JSON_NULL: snprintf(dst, capacity, "null"); break;
  }
  return dst;
}

static int compare_keys(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void write_object(struct k3_jsonw *writer, const char *key, const json_t *value) {
  size_t n_keys = json_object_size(value), n = 0;
  const char **keys = k3_calloc(n_keys, sizeof *keys, &writer->error), *name;
  json_t *entry;
  if (!keys)
    return;
  json_object_foreach((json_t *)value, name, entry) {
    (void)entry;
    keys[n++] = name;
  }
  qsort(keys, n, sizeof *keys, compare_keys);
  k3_jsonw_begin_object(writer, key);
  for (size_t i = 0; i < n; i++)
    k3_json_tree_write(writer, keys[i], json_object_get(value, keys[i]));
  k3_jsonw_end_object(writer);
  k3_free(keys);
}

void k3_json_tree_write(struct k3_jsonw *writer, const char *key, const json_t *value) {
  size_t i;
  json_t *entry;
  if (writer->error.status != K3_OK)
    return;
  switch (json_typeof(value)) {
    case JSON_OBJECT: write_object(writer, key, value); break;
    case JSON_ARRAY:
      k3_jsonw_begin_array(writer, key);
      json_array_foreach(value, i, entry) k3_json_tree_write(writer, NULL, entry);
      k3_jsonw_end_array(writer);
      break;
    case JSON_STRING: k3_jsonw_string_n(writer, key, json_string_value(value), json_string_length(value)); break;
    case JSON_INTEGER: k3_jsonw_i64(writer, key, json_integer_value(value)); break;
    case JSON_REAL: k3_jsonw_double(writer, key, json_real_value(value)); break;
    case JSON_TRUE: k3_jsonw_bool(writer, key, true); break;
    case JSON_FALSE: k3_jsonw_bool(writer, key, false); break;
    case JSON_NULL: k3_jsonw_null(writer, key); break;
  }
}

char *k3_json_tree_take(struct k3_jsonw *writer, struct k3_error *err) {
  char *text = NULL;
  if (k3_jsonw_finish(writer, err) == K3_OK) {
    text = writer->bytes;
    text[writer->n_bytes - 1] = '\0';  // the line feed
    writer->bytes = NULL;
  }
  k3_jsonw_close(writer);
  return text;
}
