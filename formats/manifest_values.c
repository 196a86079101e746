// Typed values of the manifest's JSON tree.
#include "formats/manifest_values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long ull;  // for %llu

enum k3_status k3_mread_fail_kind(const struct k3_mread *reader, const char *where, const char *key, const char *allowed, const json_t *value) {
  char what[128];
  return K3_MREAD_FAIL(reader, where, allowed, "%s is %s", key, k3_json_tree_describe(value, what, sizeof what));
}

void *k3_mread_alloc(struct k3_mread *reader, size_t n, size_t elem_nbytes) {
  void *list = k3_arena_alloc(&reader->m->arena, n * elem_nbytes, reader->err);  // n is at most 16 Mi, the bytes of the text
  if (list)
    memset(list, 0, n * elem_nbytes);
  return list;
}

enum k3_status k3_mread_keep(struct k3_mread *reader, const char *text, const char **kept) {
  *kept = k3_arena_strndup(&reader->m->arena, text, strlen(text), reader->err);
  return *kept ? K3_OK : K3_NO_MEMORY;
}

enum k3_status k3_mread_text(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char **kept) {
  const json_t *value = json_object_get(object, key);
  return json_is_string(value) ? k3_mread_keep(reader, json_string_value(value), kept) : k3_mread_fail_kind(reader, where, key, "a text", value);
}

bool k3_mread_is_name(const char *text) {
  size_t nbytes = text ? strlen(text) : 0;
  for (size_t i = 0; i < nbytes; i++) {
    if ((unsigned char)text[i] < 0x20 || text[i] == 0x7F)
      return false;
  }
  return nbytes >= 1 && nbytes <= K3_ST_MAX_NAME_NBYTES;
}

enum k3_status k3_mread_name(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char **kept) {
  const json_t *value = json_object_get(object, key);
  return k3_mread_is_name(json_string_value(value)) ? k3_mread_keep(reader, json_string_value(value), kept)
                                                    : k3_mread_fail_kind(reader, where, key, K3_MREAD_NAME, value);
}

enum k3_status k3_mread_as_u64(struct k3_mread *reader, const json_t *value, const char *key, const char *where, uint64_t min, uint64_t max,
                               uint64_t *number) {
  if (!json_is_integer(value) || json_integer_value(value) < 0 || (uint64_t)json_integer_value(value) < min ||
      (uint64_t)json_integer_value(value) > max) {
    char allowed[64];
    snprintf(allowed, sizeof allowed, "an integer from %llu to %llu", (ull)min, (ull)max);
    return k3_mread_fail_kind(reader, where, key, allowed, value);
  }
  *number = (uint64_t)json_integer_value(value);
  return K3_OK;
}

enum k3_status k3_mread_u64(struct k3_mread *reader, const json_t *object, const char *key, const char *where, uint64_t min, uint64_t max,
                            uint64_t *number) {
  return k3_mread_as_u64(reader, json_object_get(object, key), key, where, min, max, number);
}

enum k3_status k3_mread_pair(struct k3_mread *reader, const json_t *object, const char *key, const char *where, uint64_t min, uint64_t pair[2]) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_array(value) || json_array_size(value) != 2)
    return k3_mread_fail_kind(reader, where, key, "a list of two integers", value);
  for (size_t i = 0; i < 2; i++)
    K3_TRY(k3_mread_as_u64(reader, json_array_get(value, i), key, where, min, K3_MREAD_MAX_NUMBER, &pair[i]));
  return K3_OK;
}

enum k3_status k3_mread_bool(struct k3_mread *reader, const json_t *object, const char *key, bool *flag) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_boolean(value))
    return k3_mread_fail_kind(reader, NULL, key, "true or false", value);
  *flag = json_is_true(value);
  return K3_OK;
}

enum k3_status k3_mread_word(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char *const *words, int n,
                             bool optional, int *index) {
  const json_t *value = json_object_get(object, key);
  *index = 0;
  if (!value && optional)
    return K3_OK;
  for (; *index < n; ++*index) {
    if (json_is_string(value) && strcmp(json_string_value(value), words[*index]) == 0)
      return K3_OK;
  }
  return k3_mread_fail_kind(reader, where, key, "one of the words of this key", value);
}

enum k3_status k3_mread_list(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const json_t **list) {
  *list = json_object_get(object, key);
  return !*list || json_is_array(*list) ? K3_OK : k3_mread_fail_kind(reader, where, key, "a list", *list);
}

enum k3_status k3_mread_objects(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const json_t **list) {
  K3_TRY(k3_mread_list(reader, object, key, where, list));
  for (size_t i = 0; i < json_array_size(*list); i++) {
    if (!json_is_object(json_array_get(*list, i)))
      return k3_mread_fail_kind(reader, where, key, "a list of objects", json_array_get(*list, i));
  }
  return K3_OK;
}

static int compare_texts(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

enum k3_status k3_mread_sort_by_name(struct k3_mread *reader, void *list, size_t n, size_t elem_nbytes, const char *what) {
  if (n > 1)
    qsort(list, n, elem_nbytes, compare_texts);
  for (size_t i = 1; i < n; i++) {
    const char *before, *name;
    memcpy(&before, (const char *)list + (i - 1) * elem_nbytes, sizeof before);
    memcpy(&name, (const char *)list + i * elem_nbytes, sizeof name);
    if (strcmp(before, name) == 0)
      return K3_MREAD_FAIL(reader, name, "each name once", "%s names this twice", what);
  }
  return K3_OK;
}

int k3_manifest_compare_shards(const void *a, const void *b) {
  const struct k3_manifest_shard *left = a, *right = b;
  if (left->row != right->row)
    return left->row < right->row ? -1 : 1;
  if (left->n_rows != right->n_rows)
    return left->n_rows < right->n_rows ? -1 : 1;
  int order = strcmp(left->source, right->source);
  if (order != 0 || left->id == right->id)
    return order;
  return left->id < right->id ? -1 : 1;
}
