// Ranges of a drafter's geometry, shared by its two readers (config.json and the manifest). Private to this folder.
#ifndef K3_FORMATS_DSPARK_FIELDS_H
#define K3_FORMATS_DSPARK_FIELDS_H

#include <stddef.h>

#include "formats/dspark_model.h"

// A whole number of the geometry. The upper bounds are far above anything built, and low enough that the bytes of every tensor of the model fit
// 64 bits: 2^16 heads x 2^17 rows x 2^24 columns x 4 bytes are 2^59.
struct k3_dspark_field {
  const char *name;  // in config.json and in the manifest
  size_t offset;     // of a uint64_t in struct k3_dspark_model
  uint64_t min, max;
};

enum { K3_DSPARK_N_FIELDS = 15, K3_DSPARK_MAX_BLOCK = 1024 };
#define K3_DSPARK_MAX_POSITIONS (UINT64_C(1) << 31)  // a position fits 32 bits with sign

extern const struct k3_dspark_field k3_dspark_fields[K3_DSPARK_N_FIELDS];  // in the order of their names

static inline uint64_t *k3_dspark_member(struct k3_dspark_model *model, const struct k3_dspark_field *field) {
  return (uint64_t *)((char *)model + field->offset);
}

// What ranges of single fields leave open. NULL when the geometry is sound, else what is wrong with *name (static storage both).
const char *k3_dspark_contradiction(const struct k3_dspark_model *model, const char **name);

#endif
