#include "quant/decode.h"

#include <assert.h>
#include <string.h>

#include "quant/kernels.h"
#include "quant/number.h"

enum { SCALES_PER_STEP = 64 };  // block scales decoded to a stack buffer at a time

static uint32_t load_u32(const void *src, uint64_t i) {
  const unsigned char *p = (const unsigned char *)src + 4 * i;
  return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

float k3_quant_load_scale(enum k3_dtype dtype, const void *scales, uint64_t i) {
  switch (dtype) {
    case K3_DTYPE_F8_E4M3: return k3_f32_from_e4m3(((const uint8_t *)scales)[i]);
    case K3_DTYPE_F8_E8M0:
    case K3_DTYPE_U8: return k3_f32_from_e8m0(((const uint8_t *)scales)[i]);
    default: return k3_load_float(dtype, scales, i);
  }
}

static uint64_t scale_index(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col) {
  const struct k3_quant_scheme *scheme = &matrix->scheme;
  uint64_t scale_cols = scheme->block_cols ? (matrix->n_cols + scheme->block_cols - 1) / scheme->block_cols : 1;
  uint64_t scale_row = scheme->block_rows ? row / scheme->block_rows : 0;
  uint64_t scale_col = matrix->group_index ? load_u32(matrix->group_index, col) : scheme->block_cols ? col / scheme->block_cols : 0;
  return scale_row * scale_cols + scale_col;
}

float k3_quant_block_scale(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col) {
  if (k3_scheme_is_plain(matrix->scheme.scheme))
    return 1.0f;
  return k3_quant_load_scale(matrix->scheme.scale_dtype, matrix->scale, scale_index(matrix, row, col));
}

float k3_quant_second_factor(enum k3_second_scale direction, float second) {
  switch (direction) {
    case K3_SECOND_DIVIDE: return 1.0f / second;
    case K3_SECOND_MULTIPLY: return second;
    default: return 1.0f;
  }
}

static float apply_second(enum k3_second_scale direction, float block, const float *second) {
  if (!second || direction == K3_SECOND_NONE)
    return block;
  return direction == K3_SECOND_DIVIDE ? block / *second : block * *second;
}

void k3_quant_widen(enum k3_dtype dtype, const void *src, size_t n, float *dst) {
  k3_quant_kernels()->widen(dtype, src, n, dst);
}

// Unsigned code number i of a stream of n_bits-wide codes: dense, or with whole codes per 32-bit word.
static unsigned packed_code(const struct k3_quant_scheme *scheme, const void *words, uint64_t i) {
  unsigned n_bits = scheme->n_bits, mask = (1u << n_bits) - 1;
  if (scheme->words_hold_whole) {
    unsigned per_word = 32 / n_bits;
    return load_u32(words, i / per_word) >> (i % per_word * n_bits) & mask;
  }
  uint64_t bit = i * n_bits;
  unsigned shift = bit % 32, code = load_u32(words, bit / 32) >> shift;
  if (shift + n_bits > 32)
    code |= load_u32(words, bit / 32 + 1) << (32 - shift);
  return code & mask;
}

int k3_quant_int_code(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col) {
  const uint8_t *words = (const uint8_t *)matrix->weight + row * k3_quant_row_nbytes(&matrix->scheme, matrix->n_cols);
  return (int)packed_code(&matrix->scheme, words, col) - (1 << (matrix->scheme.n_bits - 1));
}

// Zero points use the weights' offset but are packed along rows: word w of a scale column stands scale_cols words behind word w-1.
static int int_zero_point(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t scale_col, uint64_t scale_cols) {
  if (!matrix->zero_point)
    return 0;
  const struct k3_quant_scheme *scheme = &matrix->scheme;
  unsigned n_bits = scheme->n_bits, mask = (1u << n_bits) - 1;
  unsigned per_word = 32 / n_bits, code;
  if (scheme->words_hold_whole) {
    code = load_u32(matrix->zero_point, row / per_word * scale_cols + scale_col) >> (row % per_word * n_bits);
  } else {
    uint64_t bit = row * n_bits, word = bit / 32;
    unsigned shift = bit % 32;
    code = load_u32(matrix->zero_point, word * scale_cols + scale_col) >> shift;
    if (shift + n_bits > 32)
      code |= load_u32(matrix->zero_point, (word + 1) * scale_cols + scale_col) << (32 - shift);
  }
  return (int)(code & mask) - (1 << (n_bits - 1));
}

static void decode_int_row(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col, size_t n_cols, float *dst) {
  uint64_t scale_rows, scale_cols;
  k3_quant_scale_shape(&matrix->scheme, matrix->n_rows, matrix->n_cols, &scale_rows, &scale_cols);
  for (size_t i = 0; i < n_cols; i++) {
    uint64_t index = scale_index(matrix, row, col + i);
    int zero_point = int_zero_point(matrix, row, index % scale_cols, scale_cols);
    dst[i] = (float)(k3_quant_int_code(matrix, row, col + i) - zero_point) * k3_quant_load_scale(matrix->scheme.scale_dtype, matrix->scale, index);
  }
}

// FP8 in all its blockings: runs of columns that share a scale.
static void decode_fp8_row(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col, size_t n_cols, const float *second, float *dst) {
  const struct k3_quant_kernels *kernels = k3_quant_kernels();
  const uint8_t *codes = (const uint8_t *)matrix->weight + row * matrix->n_cols;
  uint64_t block_cols = matrix->scheme.block_cols ? matrix->scheme.block_cols : matrix->n_cols;
  for (size_t done = 0; done < n_cols;) {
    uint64_t at = col + done;
    size_t n_run = n_cols - done;
    if (n_run > block_cols - at % block_cols)
      n_run = (size_t)(block_cols - at % block_cols);
    float scale = apply_second(matrix->scheme.second, k3_quant_block_scale(matrix, row, at), second);
    kernels->decode_e4m3(codes + at, n_run, scale, dst + done);
    done += n_run;
  }
}

static void decode_fp4_row(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col, size_t n_cols, const float *second, float *dst) {
  const struct k3_quant_kernels *kernels = k3_quant_kernels();
  const uint8_t *codes = (const uint8_t *)matrix->weight + row * (matrix->n_cols / 2);
  uint64_t block_cols = matrix->scheme.block_cols;
  size_t done = 0;
  while (done < n_cols) {
    uint64_t at = col + done;
    float scales[SCALES_PER_STEP];
    size_t n_blocks = (size_t)((n_cols - done) / block_cols);
    if (at % block_cols == 0 && n_blocks > 0) {
      if (n_blocks > SCALES_PER_STEP)
        n_blocks = SCALES_PER_STEP;
      uint64_t first = scale_index(matrix, row, at);
      for (size_t b = 0; b < n_blocks; b++) {
        float block = k3_quant_load_scale(matrix->scheme.scale_dtype, matrix->scale, first + b);
        scales[b] = apply_second(matrix->scheme.second, block, second);
      }
      kernels->decode_e2m1(codes + at / 2, n_blocks, (size_t)block_cols, scales, dst + done);
      done += n_blocks * (size_t)block_cols;
    } else {  // the range cuts a block
      float scale = apply_second(matrix->scheme.second, k3_quant_block_scale(matrix, row, at), second);
      dst[done++] = k3_f32_from_e2m1((uint8_t)(codes[at / 2] >> (at % 2 * 4))) * scale;
    }
  }
}

void k3_quant_decode_row(const struct k3_quant_matrix *matrix, uint64_t row, uint64_t col, size_t n_cols, const float *second, float *dst) {
  assert(row < matrix->n_rows && col <= matrix->n_cols && n_cols <= matrix->n_cols - col);
  const uint8_t *src = (const uint8_t *)matrix->weight + row * k3_quant_row_nbytes(&matrix->scheme, matrix->n_cols);
  switch (matrix->scheme.scheme) {
    case K3_SCHEME_BF16: k3_quant_widen(K3_DTYPE_BF16, src + 2 * col, n_cols, dst); break;
    case K3_SCHEME_F16: k3_quant_widen(K3_DTYPE_F16, src + 2 * col, n_cols, dst); break;
    case K3_SCHEME_F32: k3_quant_widen(K3_DTYPE_F32, src + 4 * col, n_cols, dst); break;
    case K3_SCHEME_NVFP4:
    case K3_SCHEME_MXFP4: decode_fp4_row(matrix, row, col, n_cols, second, dst); break;
    case K3_SCHEME_INT_PACKED: decode_int_row(matrix, row, col, n_cols, dst); break;
    default: decode_fp8_row(matrix, row, col, n_cols, second, dst); break;
  }
}
