// config.json: a parsed JSON object with typed look-ups that say what is wrong. Nested spellings are searched where the caller says so.
#ifndef K3_FORMATS_CONFIG_H
#define K3_FORMATS_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct k3_config;

// Parses one JSON object (strict JSON: no NaN, no comments, no duplicate keys, no byte-order mark). CNT01 for a Git LFS pointer, CFG19 otherwise with
// line and column. `file` is kept for messages. NULL and *err on failure; free with k3_config_free (NULL is a no-op). Read-only afterwards.
struct k3_config *k3_config_parse(const char *text, size_t nbytes, const char *file, struct k3_error *err);
void k3_config_free(struct k3_config *config);
const char *k3_config_file(const struct k3_config *config);

// A path is keys joined by '.', such as "rope_parameters.factor". Each look-up tries the path as it is, then below "text_config", then below
// "dflash_config"; null counts as absent.
enum k3_config_kind { K3_CONFIG_ABSENT, K3_CONFIG_INT, K3_CONFIG_REAL, K3_CONFIG_BOOL, K3_CONFIG_STRING, K3_CONFIG_LIST, K3_CONFIG_OBJECT };
enum k3_config_kind k3_config_kind_of(const struct k3_config *config, const char *path);

// Typed look-ups. Absent: K3_OK, *found false, the value untouched (so set the default first). Wrong type, negative or above 2^53: CFG20.
// `found` may be NULL.
enum k3_status k3_config_u64(const struct k3_config *config, const char *path, uint64_t *value, bool *found, struct k3_error *err);
enum k3_status k3_config_real(const struct k3_config *config, const char *path, double *value, bool *found,
                              struct k3_error *err);  // finite; integers too
enum k3_status k3_config_bool(const struct k3_config *config, const char *path, bool *value, bool *found, struct k3_error *err);
// The string lives as long as the config.
enum k3_status k3_config_string(const struct k3_config *config, const char *path, const char **value, bool *found, struct k3_error *err);
// A list of non-negative integers, at most max_items; *n_items receives their number.
enum k3_status k3_config_u64_list(const struct k3_config *config, const char *path, uint64_t *values, size_t max_items, size_t *n_items, bool *found,
                                  struct k3_error *err);
// As k3_config_u64, but absent is CFG20 too.
enum k3_status k3_config_require_u64(const struct k3_config *config, const char *path, uint64_t *value, struct k3_error *err);

// Whether a path has one value at the top and another below "text_config" (1 and 1.0 are one value): which of them counts is then anybody's guess.
//   text  [capacity] receives both when they are short ("65 at the top, 64 in text_config"); empty when false
bool k3_config_contradicts(const struct k3_config *config, const char *path, char *text, size_t capacity);

// The jansson tree (borrowed), for the readers of this folder.
struct json_t;
const struct json_t *k3_config_root(const struct k3_config *config);

#endif
