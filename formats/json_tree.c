#include "formats/json_tree.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_pull.h"

enum { MAX_NUMBER_NBYTES = 4096 };

struct builder {
  struct k3_json json;
  struct k3_error *err;
};

static enum k3_status build(struct builder *builder, json_t **value);

static enum k3_status out_of_memory(struct builder *builder) {
  return k3_fail_memory(builder->err, sizeof(json_t));
}

static enum k3_status fail(struct builder *builder, const char *allowed, const char *found) {
  return k3_fail(builder->err, K3_BAD_INPUT, builder->json.rule, NULL, NULL, allowed, "%s", found);
}

static enum k3_status build_object(struct builder *builder, json_t *object) {
  K3_TRY(k3_json_enter_object(&builder->json));
  for (;;) {
    bool more;
    struct k3_json_text name;
    json_t *value = NULL;
    K3_TRY(k3_json_next_key(&builder->json, &more, &name));
    if (!more)
      return K3_OK;
    if (memchr(name.bytes, '\0', name.nbytes))
      return fail(builder, "keys without NUL", "a key with a NUL");
    char *key = k3_strndup(name.bytes, name.nbytes, builder->err);
    enum k3_status status = key ? K3_OK : K3_NO_MEMORY;
    if (key && json_object_get(object, key)) {
      char shown[80], found[128];
      k3_printable(shown, sizeof shown, key, name.nbytes, 64);
      snprintf(found, sizeof found, "the key \"%s\" for the second time", shown);
      status = fail(builder, "each key once", found);
    }
    if (status == K3_OK)
      status = build(builder, &value);
    if (status == K3_OK && json_object_set_new_nocheck(object, key, value) != 0)
      status = out_of_memory(builder);
    k3_free(key);
    K3_TRY(status);
  }
}

static enum k3_status build_array(struct builder *builder, json_t *array) {
  K3_TRY(k3_json_enter_array(&builder->json));
  for (;;) {
    bool more;
    json_t *value;
    K3_TRY(k3_json_next_item(&builder->json, &more));
    if (!more)
      return K3_OK;
    K3_TRY(build(builder, &value));
    if (json_array_append_new(array, value) != 0)
      return out_of_memory(builder);
  }
}

static enum k3_status build_string(struct builder *builder, json_t **value) {
  struct k3_json_text text;
  K3_TRY(k3_json_string(&builder->json, &text));
  if (memchr(text.bytes, '\0', text.nbytes))
    return fail(builder, "texts without NUL", "a text with a NUL");
  *value = json_stringn_nocheck(text.bytes, text.nbytes);
  return *value ? K3_OK : out_of_memory(builder);
}

// The nearest double, whatever the decimal separator of the locale is.
static enum k3_status to_double(struct builder *builder, const char *digits, size_t n, double *number) {
  const char *separator = localeconv()->decimal_point, *point = memchr(digits, '.', n);
  size_t n_before = point ? (size_t)(point - digits) : n, n_after = point ? n - n_before - 1 : 0;
  char *text = k3_asprintf(builder->err, "%.*s%s%.*s", (int)n_before, digits, point ? separator : "", (int)n_after, point ? point + 1 : "");
  if (!text)
    return K3_NO_MEMORY;
  *number = strtod(text, NULL);
  k3_free(text);
  return isfinite(*number) ? K3_OK : fail(builder, "numbers that a double holds", "a number that overflows");
}

static enum k3_status build_number(struct builder *builder, json_t **value) {
  const char *digits = builder->json.next;
  int64_t integer = 0;
  bool whole = true, negative = *digits == '-';
  K3_TRY(k3_json_skip(&builder->json));
  size_t n = (size_t)(builder->json.next - digits);
  if (n > MAX_NUMBER_NBYTES)
    return fail(builder, "at most 4096 digits", "a longer number");
  for (size_t i = negative; i < n && whole; i++) {
    int digit = digits[i] - '0';
    whole = digit >= 0 && digit <= 9 && !__builtin_mul_overflow(integer, 10, &integer) &&
            !__builtin_add_overflow(integer, negative ? -digit : digit, &integer);
  }
  whole = whole && !(negative && integer == 0);  // no integer has the sign of -0
  double real = 0;
  if (!whole)
    K3_TRY(to_double(builder, digits, n, &real));
  *value = whole ? json_integer(integer) : json_real(real);
  return *value ? K3_OK : out_of_memory(builder);
}

static enum k3_status build_word(struct builder *builder, json_t **value) {
  char first = k3_json_peek(&builder->json);
  K3_TRY(k3_json_skip(&builder->json));
  *value = first == 't' ? json_true() : first == 'f' ? json_false() : json_null();
  return K3_OK;
}

// Depth of the recursion: at most K3_JSON_MAX_DEPTH.
static enum k3_status build(struct builder *builder, json_t **value) {
  char first = k3_json_peek(&builder->json);
  *value = NULL;
  if (first == '"')
    return build_string(builder, value);
  if (first == '-' || (first >= '0' && first <= '9'))
    return build_number(builder, value);
  if (first != '{' && first != '[')
    return build_word(builder, value);
  json_t *container = first == '{' ? json_object() : json_array();
  if (!container)
    return out_of_memory(builder);
  enum k3_status status = first == '{' ? build_object(builder, container) : build_array(builder, container);
  if (status == K3_OK)
    *value = container;
  else
    json_decref(container);
  return status;
}

// Says line and column (in bytes, from 1) where the reader stopped, instead of its byte offset.
static void report(const struct builder *builder, const char *file, const struct k3_error *first, struct k3_error *err) {
  static const char prefix[] = "JSON error at byte ";
  unsigned long line = 1, column = 1;
  for (const char *p = builder->json.begin; p < builder->json.next; p++) {
    line += *p == '\n';
    column = *p == '\n' ? 1 : column + 1;
  }
  const char *what = strncmp(first->found, prefix, sizeof prefix - 1) == 0 ? strstr(first->found, ": ") : NULL;
  k3_fail(err, K3_BAD_INPUT, first->rule, file, NULL, first->allowed[0] ? first->allowed : "strict JSON", "line %lu, column %lu: %s", line, column,
          what ? what + 2 : first->found);
}

// Not jansson's own parser: out of memory it may drop a character of a text without a word.
enum k3_status k3_json_tree_parse(const char *text, size_t nbytes, enum k3_rule rule, const char *file, json_t **root, struct k3_error *err) {
  struct k3_error first = {0};
  struct builder builder = {.err = &first};
  *root = NULL;
  if (nbytes == 0)
    return k3_fail(err, K3_BAD_INPUT, rule, file, NULL, "one JSON object", "the text is empty");
  k3_json_open(&builder.json, text, nbytes, NULL, rule, &first);
  enum k3_status status = build(&builder, root);
  if (status == K3_OK)
    status = k3_json_finish(&builder.json);
  if (status == K3_OK && !json_is_object(*root)) {
    char what[96];
    snprintf(first.found, sizeof first.found, "%s instead of an object", k3_json_tree_describe(*root, what, sizeof what));
    first.rule = rule;
    status = K3_BAD_INPUT;
  }
  if (status != K3_OK) {
    json_decref(*root);
    *root = NULL;
  }
  if (status == K3_BAD_INPUT)
    report(&builder, file, &first, err);
  k3_json_close(&builder.json);
  if (status != K3_OK && status != K3_BAD_INPUT && err && err->status == K3_OK)
    *err = first;
  return status;
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
