#include "loader/nonfinite.h"

#include <string.h>

// An exponent of all ones is NaN or Inf. The inner loops count in 32 bits over short blocks, which compilers turn into SIMD code.
enum { BLOCK_ELEMS = 4096 };

static uint64_t count_16(const unsigned char *bytes, size_t n_elems, uint16_t exponent) {
  uint64_t total = 0;
  for (size_t first = 0; first < n_elems; first += BLOCK_ELEMS) {
    size_t n = n_elems - first < BLOCK_ELEMS ? n_elems - first : BLOCK_ELEMS;
    uint16_t count = 0;
    for (size_t i = 0; i < n; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + 2 * (first + i), sizeof bits);
      count = (uint16_t)(count + ((bits & exponent) == exponent));
    }
    total += count;
  }
  return total;
}

static uint64_t count_32(const unsigned char *bytes, size_t n_elems) {
  uint64_t total = 0;
  for (size_t first = 0; first < n_elems; first += BLOCK_ELEMS) {
    size_t n = n_elems - first < BLOCK_ELEMS ? n_elems - first : BLOCK_ELEMS;
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, bytes + 4 * (first + i), sizeof bits);
      count += (bits & 0x7F800000u) == 0x7F800000u;
    }
    total += count;
  }
  return total;
}

uint64_t k3_count_nonfinite(enum k3_dtype dtype, const void *bytes, size_t nbytes) {
  switch (dtype) {
    case K3_DTYPE_BF16: return count_16(bytes, nbytes / 2, 0x7F80);
    case K3_DTYPE_F16: return count_16(bytes, nbytes / 2, 0x7C00);
    case K3_DTYPE_F32: return count_32(bytes, nbytes / 4);
    default: return 0;
  }
}
