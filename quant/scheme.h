// How the weights of one linear layer are stored. A weight is [n_rows, n_cols] (output rows, input columns), row-major; every description here
// is plain data and owns nothing.
#ifndef K3_QUANT_SCHEME_H
#define K3_QUANT_SCHEME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/error.h"

// X(enum suffix, name, rows of a block, columns of a block, dtype of the block scales). 0 rows or columns: the whole extent.
//   bf16, f16, f32    plain weights, no scale
//   fp8-tensor        F8_E4M3 [N, K]; one scale
//   fp8-channel       F8_E4M3 [N, K]; one scale per row
//   fp8-group         F8_E4M3 [N, K]; one scale per row and run of block_cols columns
//   fp8-block         F8_E4M3 [N, K]; one scale per tile of block_rows x block_cols, ceil(N / rows) x ceil(K / cols) of them (128 x 128 in use)
//   mxfp8             F8_E4M3 [N, K]; E8M0 scale per 32 columns
//   nvfp4             U8 [N, K/2], two E2M1 codes a byte, even column in the low nibble; E4M3 scale per 16 columns; an F32 second scale
//   mxfp4             U8 [N, K/2] likewise; E8M0 scale per 32 columns
//   int-packed        I32 [N, ceil(K * n_bits / 32)], unsigned codes q + 2^(n_bits-1); one scale per row and run of block_cols columns
#define K3_SCHEME_MAP(X)                            \
  X(BF16, "bf16", 0, 0, K3_DTYPE_BF16)              \
  X(F16, "f16", 0, 0, K3_DTYPE_F16)                 \
  X(F32, "f32", 0, 0, K3_DTYPE_F32)                 \
  X(FP8_TENSOR, "fp8-tensor", 0, 0, K3_DTYPE_F32)   \
  X(FP8_CHANNEL, "fp8-channel", 1, 0, K3_DTYPE_F32) \
  X(FP8_GROUP, "fp8-group", 1, 128, K3_DTYPE_F32)   \
  X(FP8_BLOCK, "fp8-block", 128, 128, K3_DTYPE_F32) \
  X(MXFP8, "mxfp8", 1, 32, K3_DTYPE_F8_E8M0)        \
  X(NVFP4, "nvfp4", 1, 16, K3_DTYPE_F8_E4M3)        \
  X(MXFP4, "mxfp4", 1, 32, K3_DTYPE_F8_E8M0)        \
  X(INT_PACKED, "int-packed", 1, 32, K3_DTYPE_BF16)

enum k3_scheme {
#define K3_SCHEME_ENUM(id, name, rows, cols, scale) K3_SCHEME_##id,
  K3_SCHEME_MAP(K3_SCHEME_ENUM)
#undef K3_SCHEME_ENUM
      K3_SCHEME_COUNT
};

// How the second scale of NVFP4 acts when a weight is decoded. The two conventions store reciprocals of one another, and 1/x does not survive
// rounding, so the stored value is kept together with its direction.
enum k3_second_scale {
  K3_SECOND_NONE,
  K3_SECOND_DIVIDE,    // compressed-tensors `weight_global_scale`: value = code * (block / second)
  K3_SECOND_MULTIPLY,  // ModelOpt `weight_scale_2`: value = code * (block * second)
};

struct k3_quant_scheme {
  enum k3_scheme scheme;
  uint32_t block_rows, block_cols;  // weights that share a block scale; 0: all rows or all columns
  enum k3_dtype scale_dtype;        // F32, BF16, F16, F8_E4M3 or F8_E8M0; U8 stands for F8_E8M0
  enum k3_second_scale second;
  uint8_t n_bits;         // int-packed: 2 .. 8
  bool words_hold_whole;  // int-packed, older files with 3, 5, 6 or 7 bits: floor(32 / n_bits) codes a word, none crosses a word's edge
};

// A matrix in memory, or rows of one that begin at a block edge. Nothing needs to be aligned. Shards stacked into one tensor are one matrix each:
// their scale grids stand one after another, so a shard's pointers are the tensor's plus whole rows.
struct k3_quant_matrix {
  struct k3_quant_scheme scheme;
  uint64_t n_rows, n_cols;
  const void *weight;       // [n_rows, k3_quant_row_nbytes()]
  const void *scale;        // [k3_quant_scale_shape()] of scheme.scale_dtype; NULL for plain weights
  const void *zero_point;   // int-packed, asymmetric: I32 [ceil(n_rows * n_bits / 32), scale columns], packed along rows; else NULL
  const void *group_index;  // int-packed, reordered: I32 [n_cols], the scale column of every column; else NULL
};

// "nvfp4"; static storage; "?" for a value outside the enum.
const char *k3_scheme_name(enum k3_scheme scheme);
// Exact, case-sensitive. Returns false and leaves *scheme alone when unknown.
bool k3_scheme_from_name(const char *name, enum k3_scheme *scheme);
// bf16, f16 or f32: no scales.
bool k3_scheme_is_plain(enum k3_scheme scheme);
// The scheme with the usual block and scale dtype of the table above; NVFP4 with K3_SECOND_DIVIDE, int-packed with 4 bits.
struct k3_quant_scheme k3_quant_scheme_default(enum k3_scheme scheme);

// Bytes of one row of the weight tensor.
uint64_t k3_quant_row_nbytes(const struct k3_quant_scheme *scheme, uint64_t n_cols);
// Rows and columns of the block-scale tensor; 0 x 0 for plain weights.
void k3_quant_scale_shape(const struct k3_quant_scheme *scheme, uint64_t n_rows, uint64_t n_cols, uint64_t *scale_rows, uint64_t *scale_cols);

// Refuses what the decoders cannot take: columns that are no multiple of an FP4 or MX block (rule TEN07), a scale dtype the scheme does not have
// (TEN04), a missing scale (TEN01), a group index out of range (TEN10). Reads group_index, nothing else. `tensor` names the weight in the error.
enum k3_status k3_quant_matrix_check(const struct k3_quant_matrix *matrix, const char *tensor, struct k3_error *err);

#endif
