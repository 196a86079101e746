// JSON of which a tree is kept (jansson): config files, recipes, manifests. Small texts only; a header or an index goes through formats/json_pull.h.
#ifndef K3_FORMATS_JSON_TREE_H
#define K3_FORMATS_JSON_TREE_H

#include <jansson.h>
#include <stddef.h>

#include "base/error.h"
#include "formats/json_write.h"

// Parses one JSON object: RFC 8259, strictly (no byte-order mark, comments, NaN), no key twice, no NUL, at most 64 levels. Failures are `rule`
// with line and column, or K3_NO_MEMORY; *root is then NULL. An integer that fits no int64 (a limit of 10^30 means "none" to some writers) becomes
// the nearest double. Release with json_decref.
enum k3_status k3_json_tree_parse(const char *text, size_t nbytes, enum k3_rule rule, const char *file, json_t **root, struct k3_error *err);

// What a value is, for a message: `the text "x"`, `-3`, `true`, `a list`. Independent of the locale. Returns dst, always terminated.
const char *k3_json_tree_describe(const json_t *value, char *dst, size_t capacity);

// Writes a tree through the writer, the keys of every object in the order of their bytes.
void k3_json_tree_write(struct k3_jsonw *writer, const char *key, const json_t *value);

// Finishes a writer without sink and hands over its text without the line feed at the end (free with k3_free); closes the writer in any case. NULL
// and *err on failure.
char *k3_json_tree_take(struct k3_jsonw *writer, struct k3_error *err);

#endif
