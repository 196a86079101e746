#include "loader/values_scan.h"

#if defined(__x86_64__)
#include "loader/values_scan_loops.h"

const struct k3_values_scan K3_VALUES_SCAN_AVX2 = K3_VALUES_SCAN_TABLE;
#endif
