// Typed values of a manifest's JSON tree: the lower half of formats/manifest_read.c, private to it. Every failure is IMG01 with K3_BAD_INPUT, or
// K3_NO_MEMORY. `where` (may be NULL) and `key` say in messages what is read; texts and lists are kept in the manifest's arena.
#ifndef K3_FORMATS_MANIFEST_VALUES_H
#define K3_FORMATS_MANIFEST_VALUES_H

#include <stdbool.h>
#include <stdint.h>

#include "formats/json_tree.h"
#include "formats/manifest.h"

#define K3_MREAD_MAX_NUMBER (UINT64_C(1) << 53)
#define K3_MREAD_NAME       "1 to 4096 bytes without control characters"

struct k3_mread {
  struct k3_manifest *m;
  const char *file;
  struct k3_error *err;
  uint64_t n_shards, n_name_nbytes;  // what the runs have been expanded to so far
};

#define K3_MREAD_FAIL(reader, where, allowed, ...) k3_fail((reader)->err, K3_BAD_INPUT, K3_IMG01, (reader)->file, where, allowed, __VA_ARGS__)

// "<key> is <value>".
enum k3_status k3_mread_fail_kind(const struct k3_mread *reader, const char *where, const char *key, const char *allowed, const json_t *value);

// Zeroed memory for n entries, NULL when there is none.
void *k3_mread_alloc(struct k3_mread *reader, size_t n, size_t elem_nbytes);
enum k3_status k3_mread_keep(struct k3_mread *reader, const char *text, const char **kept);

// A text of any length.
enum k3_status k3_mread_text(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char **kept);
// The name of a tensor or a module: K3_MREAD_NAME.
enum k3_status k3_mread_name(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char **kept);
bool k3_mread_is_name(const char *text);  // NULL is none
enum k3_status k3_mread_as_u64(struct k3_mread *reader, const json_t *value, const char *key, const char *where, uint64_t min, uint64_t max,
                               uint64_t *number);
enum k3_status k3_mread_u64(struct k3_mread *reader, const json_t *object, const char *key, const char *where, uint64_t min, uint64_t max,
                            uint64_t *number);
// Two integers from min to K3_MREAD_MAX_NUMBER.
enum k3_status k3_mread_pair(struct k3_mread *reader, const json_t *object, const char *key, const char *where, uint64_t min, uint64_t pair[2]);
enum k3_status k3_mread_bool(struct k3_mread *reader, const json_t *object, const char *key, bool *flag);
// Which of n words; absent gives the first when `optional`.
enum k3_status k3_mread_word(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char *const *words, int n,
                             bool optional, int *index);
// A list, or a list of objects; absent gives NULL.
enum k3_status k3_mread_list(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const json_t **list);
enum k3_status k3_mread_objects(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const json_t **list);
// Sorts entries that begin with a `const char *` by it; an equal pair is an error ("<what> names this twice").
enum k3_status k3_mread_sort_by_name(struct k3_mread *reader, void *list, size_t n, size_t elem_nbytes, const char *what);

// Order of the shards of a tensor, for qsort: by row.
int k3_manifest_compare_shards(const void *a, const void *b);

#endif
