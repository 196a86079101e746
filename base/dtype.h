// Element types, spelled as safetensors spells them. Payloads are little-endian, always.
#ifndef K3_BASE_DTYPE_H
#define K3_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/api.h"

// X(enum suffix, safetensors string, bits per element, floating)
#define K3_DTYPE_MAP(X)                  \
  X(BOOL, "BOOL", 8, 0)                  \
  X(F4, "F4", 4, 1)                      \
  X(F6_E2M3, "F6_E2M3", 6, 1)            \
  X(F6_E3M2, "F6_E3M2", 6, 1)            \
  X(U8, "U8", 8, 0)                      \
  X(I8, "I8", 8, 0)                      \
  X(F8_E5M2, "F8_E5M2", 8, 1)            \
  X(F8_E4M3, "F8_E4M3", 8, 1)            \
  X(F8_E8M0, "F8_E8M0", 8, 1)            \
  X(F8_E4M3FNUZ, "F8_E4M3FNUZ", 8, 1)    \
  X(F8_E5M2FNUZ, "F8_E5M2FNUZ", 8, 1)    \
  X(I16, "I16", 16, 0)                   \
  X(U16, "U16", 16, 0)                   \
  X(F16, "F16", 16, 1)                   \
  X(BF16, "BF16", 16, 1)                 \
  X(I32, "I32", 32, 0)                   \
  X(U32, "U32", 32, 0)                   \
  X(F32, "F32", 32, 1)                   \
  X(C64, "C64", 64, 1)                   \
  X(F64, "F64", 64, 1)                   \
  X(I64, "I64", 64, 0)                   \
  X(U64, "U64", 64, 0)

enum k3_dtype {
#define K3_DTYPE_ENUM(id, name, bits, floating) K3_DTYPE_##id,
  K3_DTYPE_MAP(K3_DTYPE_ENUM)
#undef K3_DTYPE_ENUM
      K3_DTYPE_COUNT
};

// "BF16"; static storage; "?" for a value outside the enum.
K3_API const char *k3_dtype_name(enum k3_dtype dtype);
// Bits per element (4 .. 64); 0 for a value outside the enum.
unsigned k3_dtype_bits(enum k3_dtype dtype);
bool k3_dtype_is_float(enum k3_dtype dtype);
// Exact, case-sensitive look-up of `name` (nbytes long, not terminated). Returns false and leaves *dtype alone when unknown.
bool k3_dtype_from_name(const char *name, size_t nbytes, enum k3_dtype *dtype);

// Element i of a buffer of F32, BF16 or F16, read byte-wise (the buffer need not be aligned) and widened exactly.
float k3_load_f32(const void *src, size_t i);
float k3_load_bf16(const void *src, size_t i);
float k3_load_f16(const void *src, size_t i);
// The same for a dtype known at run time; only F32, BF16, F16 (asserted).
float k3_load_float(enum k3_dtype dtype, const void *src, size_t i);

// Conversions of single values, round to nearest even; NaN stays NaN (quiet, sign kept). Sources: IEEE 754; BF16 is the high half of F32.
uint16_t k3_bf16_from_f32(float value);
float k3_f32_from_bf16(uint16_t bits);
float k3_f32_from_f16(uint16_t bits);
uint16_t k3_f16_from_f32(float value);

#endif
