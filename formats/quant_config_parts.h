// Between the files that read quantization configs; nobody else includes this.
#ifndef K3_FORMATS_QUANT_CONFIG_PARTS_H
#define K3_FORMATS_QUANT_CONFIG_PARTS_H

#include <jansson.h>

#include "formats/quant_config.h"

// What is being read, and where findings go. `usable` turns false when the config cannot be used.
struct k3_quant_reader {
  struct k3_quant_config *quant;
  const char *file;
  struct k3_findings *findings;
  struct k3_error *err;
  bool usable;
};

// How a list's texts are meant: literals or "re:" patterns; globs; whole components anywhere; a module and all below it.
enum k3_entry_style { K3_ENTRY_COMPRESSED_TENSORS, K3_ENTRY_GLOB, K3_ENTRY_COMPONENTS, K3_ENTRY_TREE };

// Reports an error of that rule about `subject` (a key or pattern) and marks the config as not usable.
void k3_quant_complain(struct k3_quant_reader *reader, enum k3_rule rule, const char *subject, const char *allowed, const char *found, ...)
    K3_PRINTF(5, 6);

// Copies a text into the config's arena; NULL without memory.
const char *k3_quant_keep(struct k3_quant_reader *reader, const char *text);
// A new group in the config, NULL without memory.
struct k3_quant_group *k3_quant_add_group(struct k3_quant_reader *reader, const char *name);
// Adds the texts of a list (absent and null: none). Anything but texts is CFG20, a bad regex CFG10.
enum k3_status k3_quant_add_entries(struct k3_quant_reader *reader, struct k3_quant_entries *entries, const json_t *list, const char *key,
                                    enum k3_entry_style style);
enum k3_status k3_quant_add_entry(struct k3_quant_reader *reader, struct k3_quant_entries *entries, const char *text, enum k3_entry_style style);

// The forms. Each fills reader->quant from the object.
enum k3_status k3_quant_read_compressed_tensors(struct k3_quant_reader *reader, const json_t *object);
// `groups` of the compressed-tensors form into groups; also used by ModelOpt's config.json.
enum k3_status k3_quant_read_groups(struct k3_quant_reader *reader, const json_t *groups);
// hf: the object is "quantization" of hf_quant_config.json, else "quantization_config" of config.json.
enum k3_status k3_quant_read_modelopt(struct k3_quant_reader *reader, const json_t *object, bool hf);
enum k3_status k3_quant_read_fp8(struct k3_quant_reader *reader, const json_t *object);
enum k3_status k3_quant_read_mx(struct k3_quant_reader *reader, const json_t *object);
enum k3_status k3_quant_read_quark(struct k3_quant_reader *reader, const json_t *object);

// A text member, or `fallback`.
static inline const char *k3_quant_text(const json_t *object, const char *key, const char *fallback) {
  const json_t *value = json_object_get(object, key);
  return json_is_string(value) ? json_string_value(value) : fallback;
}

#endif
