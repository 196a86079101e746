#include "loader/values_scan.h"

#include "base/cpu.h"
#include "loader/values_scan_loops.h"

const struct k3_values_scan K3_VALUES_SCAN_SCALAR = K3_VALUES_SCAN_TABLE;

const struct k3_values_scan *k3_values_scan(void) {
#if defined(__x86_64__)
  if (k3_cpu_simd() >= K3_SIMD_AVX2)
    return &K3_VALUES_SCAN_AVX2;
#endif
  return &K3_VALUES_SCAN_SCALAR;
}

bool k3_scan_all_zero(const uint8_t *bytes, size_t n) {
  for (; n >= 64; bytes += 64, n -= 64) {
    uint64_t any = 0;
    for (size_t i = 0; i < 64; i += 8)
      any |= load_64(bytes + i);
    if (any)
      return false;
  }
  while (n > 0 && *bytes == 0) {
    bytes++;
    n--;
  }
  return n == 0;
}
