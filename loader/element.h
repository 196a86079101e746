// Elements of a tensor as numbers, for those who compare and describe: diff and inspect.
#ifndef K3_LOADER_ELEMENT_H
#define K3_LOADER_ELEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"

// Is there one number per element? False for C64 and for the 6-bit types, whose packing the format does not define, and the FNUZ types.
bool k3_element_is_number(enum k3_dtype dtype);
// Elements [0, n) of src (host memory, not necessarily aligned) to dst [n]. Exact for all but I64 and U64 above 2^53. F4: two a byte, the low nibble
// first. Only for types that are numbers (asserted).
void k3_elements_widen(enum k3_dtype dtype, const void *src, size_t n, double *dst);
// The bits of element i, right-aligned; for sub-byte types of the types above only F4.
uint64_t k3_element_bits(enum k3_dtype dtype, const void *src, uint64_t i);

#endif
