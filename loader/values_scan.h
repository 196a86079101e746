// Counting over raw weight bytes, without decoding them: what the rules about weight values need to know. Pure functions on the caller's buffers;
// nothing needs to be aligned. loader/values_scan_avx2.c is the same code for another instruction set, chosen at run time; the counts are the same.
#ifndef K3_LOADER_VALUES_SCAN_H
#define K3_LOADER_VALUES_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Codes of 8 bits: e4m3 0x7F and 0xFF are NaN, 0x7E and 0xFE the largest numbers.
struct k3_scan_fp8 {
  uint64_t n_nan, n_largest;
};

// Blocks of packed E2M1 codes, two a byte.
struct k3_scan_fp4 {
  uint64_t n_zero;  // blocks whose codes are all 0 or 8
  uint64_t n_low;   // blocks that are not zero and never use the large codes: NVFP4 +-6, under a normal scale; MXFP4 +-3, +-4, +-6
};

struct k3_values_scan {
  void (*e4m3)(const uint8_t *codes, size_t n, struct k3_scan_fp8 *scan);
  // n blocks of 16 with their E4M3 scales.
  void (*nvfp4)(const uint8_t *codes, const uint8_t *scales, size_t n_blocks, struct k3_scan_fp4 *scan);
  // n blocks of 32.
  void (*mxfp4)(const uint8_t *codes, size_t n_blocks, struct k3_scan_fp4 *scan);
  // NaN and Inf among n elements whose exponent has all bits of `exponent` set.
  uint64_t (*nonfinite_16)(const uint8_t *bytes, size_t n, uint16_t exponent);
  uint64_t (*nonfinite_32)(const uint8_t *bytes, size_t n);
};

extern const struct k3_values_scan K3_VALUES_SCAN_SCALAR, K3_VALUES_SCAN_AVX2;  // the last: x86-64
// The best one for this machine (base/cpu.h).
const struct k3_values_scan *k3_values_scan(void);

// Whether all n bytes are zero; stops at the first that is not.
bool k3_scan_all_zero(const uint8_t *bytes, size_t n);

#endif
