// model.safetensors.index.json: {"metadata": {"total_size": N}, "weight_map": {tensor: file}}. Read in one pass that calls back for every entry, so
// that an index of half a million tensors needs no table of its own.
#ifndef K3_FORMATS_INDEX_H
#define K3_FORMATS_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct k3_index_summary {
  uint64_t n_entries;
  bool has_total_size;  // metadata.total_size is present and a plain non-negative integer
  bool odd_total_size;  // it is present but something else (rule IDX07, a warning)
  uint64_t total_size;
};

// One entry of weight_map. Both texts are terminated and valid during the call only; the file name is not yet checked (k3_index_file_name_ok).
typedef enum k3_status (*k3_index_fn)(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes,
                                      struct k3_error *err);

// Parses the text. CNT01 for a Git LFS pointer, IDX10 for anything that is not such an object (also: weight_map absent, a value that is no string),
// CNT07 is not used here: a tensor listed twice, also when hidden by escapes, is IDX10.
enum k3_status k3_index_parse(const char *text, size_t nbytes, const char *file, k3_index_fn fn, void *ctx, struct k3_index_summary *summary,
                              struct k3_error *err);
// The same for a text that has passed k3_index_parse: names that occur twice are not looked for, which saves a table of all of them.
enum k3_status k3_index_parse_again(const char *text, size_t nbytes, const char *file, k3_index_fn fn, void *ctx, struct k3_index_summary *summary,
                                    struct k3_error *err);

// True for a plain file name: not empty, no '/', no '\\', not "." or "..", no NUL or control character, ending in ".safetensors" (rule IDX09).
bool k3_index_file_name_ok(const char *file, size_t nbytes);

#endif
