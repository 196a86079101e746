#include "quant/scheme.h"

#include <string.h>

#include "base/arith.h"

static const struct {
  const char *name;
  uint32_t block_rows, block_cols;
  enum k3_dtype scale_dtype;
} SCHEMES[K3_SCHEME_COUNT] = {
#define K3_SCHEME_ROW(id, name, rows, cols, scale) {name, rows, cols, scale},
    K3_SCHEME_MAP(K3_SCHEME_ROW)
#undef K3_SCHEME_ROW
};

const char *k3_scheme_name(enum k3_scheme scheme) {
  return scheme < K3_SCHEME_COUNT ? SCHEMES[scheme].name : "?";
}

bool k3_scheme_from_name(const char *name, enum k3_scheme *scheme) {
  for (int i = 0; i < K3_SCHEME_COUNT; i++) {
    if (strcmp(SCHEMES[i].name, name) == 0) {
      *scheme = (enum k3_scheme)i;
      return true;
    }
  }
  return false;
}

bool k3_scheme_is_plain(enum k3_scheme scheme) {
  return scheme == K3_SCHEME_BF16 || scheme == K3_SCHEME_F16 || scheme == K3_SCHEME_F32;
}

struct k3_quant_scheme k3_quant_scheme_default(enum k3_scheme scheme) {
  return (struct k3_quant_scheme){.scheme = scheme,
                                  .block_rows = SCHEMES[scheme].block_rows,
                                  .block_cols = SCHEMES[scheme].block_cols,
                                  .scale_dtype = SCHEMES[scheme].scale_dtype,
                                  .second = scheme == K3_SCHEME_NVFP4 ? K3_SECOND_DIVIDE : K3_SECOND_NONE,
                                  .n_bits = scheme == K3_SCHEME_INT_PACKED ? 4 : 0};
}

uint64_t k3_quant_row_nbytes(const struct k3_quant_scheme *scheme, uint64_t n_cols) {
  switch (scheme->scheme) {
    case K3_SCHEME_F32: return 4 * n_cols;
    case K3_SCHEME_BF16:
    case K3_SCHEME_F16: return 2 * n_cols;
    case K3_SCHEME_NVFP4:
    case K3_SCHEME_MXFP4: return n_cols / 2;
    case K3_SCHEME_INT_PACKED:
      if (scheme->words_hold_whole)
        return 4 * k3_ceil_div_u64(n_cols, 32u / scheme->n_bits);
      return 4 * k3_ceil_div_u64(n_cols * scheme->n_bits, 32);
    default: return n_cols;
  }
}

void k3_quant_scale_shape(const struct k3_quant_scheme *scheme, uint64_t n_rows, uint64_t n_cols, uint64_t *scale_rows, uint64_t *scale_cols) {
  if (k3_scheme_is_plain(scheme->scheme)) {
    *scale_rows = *scale_cols = 0;
    return;
  }
  *scale_rows = scheme->block_rows ? k3_ceil_div_u64(n_rows, scheme->block_rows) : 1;
  *scale_cols = scheme->block_cols ? k3_ceil_div_u64(n_cols, scheme->block_cols) : 1;
}

static bool scale_dtype_fits(const struct k3_quant_scheme *scheme) {
  enum k3_dtype dtype = scheme->scale_dtype;
  bool is_e8m0 = dtype == K3_DTYPE_F8_E8M0 || dtype == K3_DTYPE_U8;
  bool is_wide = dtype == K3_DTYPE_F32 || dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16;
  switch (scheme->scheme) {
    case K3_SCHEME_NVFP4: return dtype == K3_DTYPE_F8_E4M3;
    case K3_SCHEME_MXFP4:
    case K3_SCHEME_MXFP8: return is_e8m0;
    case K3_SCHEME_FP8_BLOCK: return is_wide || is_e8m0;
    default: return is_wide;
  }
}

static enum k3_status check_group_index(const struct k3_quant_matrix *matrix, const char *tensor, struct k3_error *err) {
  uint64_t scale_rows, scale_cols;
  k3_quant_scale_shape(&matrix->scheme, matrix->n_rows, matrix->n_cols, &scale_rows, &scale_cols);
  for (uint64_t col = 0; col < matrix->n_cols; col++) {
    uint32_t group;
    memcpy(&group, (const char *)matrix->group_index + 4 * col, 4);
    if (group >= scale_cols)
      return k3_fail(err, K3_BAD_INPUT, K3_TEN10, NULL, tensor, "a group index below the number of scale columns",
                     "column %llu has group %d, there are %llu", (unsigned long long)col, (int)group, (unsigned long long)scale_cols);
  }
  return K3_OK;
}

enum k3_status k3_quant_matrix_check(const struct k3_quant_matrix *matrix, const char *tensor, struct k3_error *err) {
  const struct k3_quant_scheme *scheme = &matrix->scheme;
  if (k3_scheme_is_plain(scheme->scheme))
    return K3_OK;
  if (!scale_dtype_fits(scheme))
    return k3_fail(err, K3_BAD_INPUT, K3_TEN04, NULL, tensor, "the scale dtype of the format", "scales of dtype %s with scheme %s",
                   k3_dtype_name(scheme->scale_dtype), k3_scheme_name(scheme->scheme));
  if (!matrix->scale)
    return k3_fail(err, K3_BAD_INPUT, K3_TEN01, NULL, tensor, "a scale beside every quantised weight", "no scale for scheme %s",
                   k3_scheme_name(scheme->scheme));
  bool whole_blocks = scheme->scheme == K3_SCHEME_NVFP4 || scheme->scheme == K3_SCHEME_MXFP4 || scheme->scheme == K3_SCHEME_MXFP8;
  if (whole_blocks && (scheme->block_cols == 0 || scheme->block_cols % 16 || scheme->block_rows != 1 || matrix->n_cols % scheme->block_cols))
    return k3_fail(err, K3_BAD_INPUT, K3_TEN07, NULL, tensor, "columns that are a multiple of the block", "%llu columns in blocks of %u",
                   (unsigned long long)matrix->n_cols, scheme->block_cols);
  if (scheme->scheme == K3_SCHEME_INT_PACKED && (scheme->n_bits < 2 || scheme->n_bits > 8))
    return k3_fail(err, K3_BAD_INPUT, K3_CFG11, NULL, tensor, "2 to 8 bits", "%u bits", scheme->n_bits);
  return matrix->group_index ? check_group_index(matrix, tensor, err) : K3_OK;
}
