// The loops of loader/values_scan.h, written so that compilers make SIMD code of them; included once per instruction set.
#ifndef K3_LOADER_VALUES_SCAN_LOOPS_H
#define K3_LOADER_VALUES_SCAN_LOOPS_H

#include <string.h>

#include "loader/values_scan.h"

// Counters of the inner loops are as narrow as the elements, and blocks so short that they cannot overflow.
enum { BLOCK_8 = 128, BLOCK_16 = 4096, BLOCK_32 = 4096 };

static inline uint64_t load_64(const uint8_t *bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

static void scan_e4m3(const uint8_t *codes, size_t n, struct k3_scan_fp8 *scan) {
  for (size_t first = 0; first < n; first += BLOCK_8) {
    size_t n_here = n - first < BLOCK_8 ? n - first : BLOCK_8;
    uint8_t n_nan = 0, n_largest = 0;
    for (size_t i = 0; i < n_here; i++) {
      uint8_t magnitude = codes[first + i] & 0x7F;
      n_nan = (uint8_t)(n_nan + (magnitude == 0x7F));
      n_largest = (uint8_t)(n_largest + (magnitude == 0x7E));
    }
    scan->n_nan += n_nan;
    scan->n_largest += n_largest;
  }
}

// Sixteen codes are one word; bit 3 of each is the sign. Magnitude 7 (+-6) has all of bits 0, 1 and 2.
static void scan_nvfp4(const uint8_t *codes, const uint8_t *scales, size_t n_blocks, struct k3_scan_fp4 *scan) {
  const uint64_t magnitude = 0x7777777777777777u, low_bits = 0x1111111111111111u;
  uint64_t n_zero = 0, n_low = 0;
  for (size_t i = 0; i < n_blocks; i++) {
    uint64_t word = load_64(codes + 8 * i), zero = (word & magnitude) == 0, six = (word & (word >> 1) & (word >> 2) & low_bits) != 0;
    n_zero += zero;
    n_low += (zero | six) == 0 && (scales[i] & 0x7F) >= 0x08;
  }
  scan->n_zero += n_zero;
  scan->n_low += n_low;
}

// Magnitudes 5, 6 and 7 (+-3, +-4, +-6) have bit 2 and one of the others.
static void scan_mxfp4(const uint8_t *codes, size_t n_blocks, struct k3_scan_fp4 *scan) {
  const uint64_t magnitude = 0x7777777777777777u, low_bits = 0x1111111111111111u;
  uint64_t n_zero = 0, n_low = 0;
  for (size_t i = 0; i < n_blocks; i++) {
    uint64_t a = load_64(codes + 16 * i), b = load_64(codes + 16 * i + 8);
    uint64_t zero = ((a | b) & magnitude) == 0, high = (((a >> 2) & ((a >> 1) | a)) | ((b >> 2) & ((b >> 1) | b))) & low_bits;
    n_zero += zero;
    n_low += zero == 0 && high == 0;
  }
  scan->n_zero += n_zero;
  scan->n_low += n_low;
}

static uint64_t scan_nonfinite_16(const uint8_t *bytes, size_t n, uint16_t exponent) {
  uint64_t total = 0;
  for (size_t first = 0; first < n; first += BLOCK_16) {
    size_t n_here = n - first < BLOCK_16 ? n - first : BLOCK_16;
    uint16_t count = 0;
    for (size_t i = 0; i < n_here; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + 2 * (first + i), sizeof bits);
      count = (uint16_t)(count + ((bits & exponent) == exponent));
    }
    total += count;
  }
  return total;
}

static uint64_t scan_nonfinite_32(const uint8_t *bytes, size_t n) {
  uint64_t total = 0;
  for (size_t first = 0; first < n; first += BLOCK_32) {
    size_t n_here = n - first < BLOCK_32 ? n - first : BLOCK_32;
    uint32_t count = 0;
    for (size_t i = 0; i < n_here; i++) {
      uint32_t bits;
      memcpy(&bits, bytes + 4 * (first + i), sizeof bits);
      count += (bits & 0x7F800000u) == 0x7F800000u;
    }
    total += count;
  }
  return total;
}

#define K3_VALUES_SCAN_TABLE \
  { scan_e4m3, scan_nvfp4, scan_mxfp4, scan_nonfinite_16, scan_nonfinite_32 }

#endif
