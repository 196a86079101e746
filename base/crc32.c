// The one file that names zlib.
#include <zlib.h>

#include "base/hash.h"

uint32_t k3_crc32(const void *src, size_t nbytes) {
  return (uint32_t)crc32_z(0, src, nbytes);
}
