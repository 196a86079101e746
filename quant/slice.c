#include "quant/slice.h"

#include <stdio.h>
#include <string.h>

static bool works(uint64_t extent, uint64_t n_units, uint64_t block, uint64_t tp) {
  return extent % tp == 0 && extent >= tp && (n_units == 0 || n_units % tp == 0) && (block <= 1 || tp == 1 || extent / tp % block == 0);
}

// "1, 2, 4": the widths up to 64 that work.
static void list_works(uint64_t extent, uint64_t n_units, uint64_t block, char *dst, size_t capacity) {
  size_t n = (size_t)snprintf(dst, capacity, "tp");
  for (uint64_t tp = 1; tp <= 64 && n < capacity; tp++) {
    if (works(extent, n_units, block, tp))
      n += (size_t)snprintf(dst + n, capacity - n, "%s %llu", tp == 1 ? "" : ",", (unsigned long long)tp);
  }
}

enum k3_status k3_slice_of(uint64_t extent, uint64_t n_units, uint64_t block, uint32_t tp, uint32_t rank, const char *tensor, const char *what,
                           struct k3_slice *slice, struct k3_error *err) {
  if (works(extent, n_units, block, tp)) {
    *slice = (struct k3_slice){extent / tp * rank, extent / tp};
    return K3_OK;
  }
  char allowed[384], found[160];
  list_works(extent, n_units, block, allowed, sizeof allowed);
  if (n_units && n_units % tp)
    snprintf(found, sizeof found, "%llu heads", (unsigned long long)n_units);
  else if (extent % tp)
    snprintf(found, sizeof found, "%llu %s", (unsigned long long)extent, what);
  else
    snprintf(found, sizeof found, "%llu %s with one scale for every %llu", (unsigned long long)extent, what, (unsigned long long)block);
  return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, tensor, allowed, "%s cannot be cut into %u equal parts", found, tp);
}

void k3_slice_rows(struct k3_quant_matrix *matrix, const struct k3_slice *slice) {
  uint64_t scale_rows, scale_cols;
  k3_quant_scale_shape(&matrix->scheme, matrix->n_rows, matrix->n_cols, &scale_rows, &scale_cols);
  matrix->weight = (const unsigned char *)matrix->weight + slice->first * k3_quant_row_nbytes(&matrix->scheme, matrix->n_cols);
  if (matrix->scale && matrix->scheme.block_rows)
    matrix->scale =
        (const unsigned char *)matrix->scale + slice->first / matrix->scheme.block_rows * scale_cols * k3_dtype_bits(matrix->scheme.scale_dtype) / 8;
  matrix->n_rows = slice->n;
}
