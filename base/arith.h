// Checked arithmetic on sizes that come from files. Each function returns false on overflow and then leaves *result unspecified.
#ifndef K3_BASE_ARITH_H
#define K3_BASE_ARITH_H

#include <stdbool.h>
#include <stdint.h>

static inline bool k3_add_u64(uint64_t a, uint64_t b, uint64_t *result) {
  return !__builtin_add_overflow(a, b, result);
}

static inline bool k3_mul_u64(uint64_t a, uint64_t b, uint64_t *result) {
  return !__builtin_mul_overflow(a, b, result);
}

// a rounded up to a multiple of `multiple` (> 0).
static inline bool k3_round_up_u64(uint64_t a, uint64_t multiple, uint64_t *result) {
  uint64_t rest = a % multiple;
  return rest == 0 ? (*result = a, true) : k3_add_u64(a, multiple - rest, result);
}

// Integer ceiling of a / b, b > 0; cannot overflow.
static inline uint64_t k3_ceil_div_u64(uint64_t a, uint64_t b) {
  return a / b + (a % b != 0);
}

#endif
