// Counting NaN and Inf in plain floating tensors.
#ifndef K3_LOADER_NONFINITE_H
#define K3_LOADER_NONFINITE_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

// F32, BF16 or F16.
static inline bool k3_is_plain_float(enum k3_dtype dtype) {
  return dtype == K3_DTYPE_F32 || dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16;
}

// Number of NaN and Inf among the whole elements in nbytes bytes (little-endian, any alignment); a cut element at the end is not counted.
uint64_t k3_count_nonfinite(enum k3_dtype dtype, const void *bytes, size_t nbytes);

#endif
