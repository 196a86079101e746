#include "loader/nonfinite.h"

#include "loader/values_scan.h"

// An exponent of all ones is NaN or Inf.
uint64_t k3_count_nonfinite(enum k3_dtype dtype, const void *bytes, size_t nbytes) {
  switch (dtype) {
    case K3_DTYPE_BF16: return k3_values_scan()->nonfinite_16(bytes, nbytes / 2, 0x7F80);
    case K3_DTYPE_F16: return k3_values_scan()->nonfinite_16(bytes, nbytes / 2, 0x7C00);
    case K3_DTYPE_F32: return k3_values_scan()->nonfinite_32(bytes, nbytes / 4);
    default: return 0;
  }
}
