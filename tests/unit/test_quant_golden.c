// Files written by the real libraries (fixtures/gen/gen_quant.py): ours decode to the values those libraries decode, and encode to their bytes.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/file.h"
#include "quant/decode.h"
#include "quant/encode.h"
#include "quant/kernels.h"
#include "quant/number.h"
#include "quant/stats.h"
#include "unit.h"

static uint8_t *golden;
static char *index_text;

struct tensor {
  enum k3_dtype dtype;
  uint64_t n_rows, n_cols, nbytes;
  const uint8_t *data;
};

static bool find(const char *case_name, const char *name, struct tensor *tensor) {
  char key[96];
  snprintf(key, sizeof key, "\n%s %s ", case_name, name);
  const char *line = strstr(index_text, key);
  if (!line)
    return false;
  char dtype[16];
  unsigned long long rows, cols, offset, nbytes;
  assert_int_equal(sscanf(line + strlen(key), "%15s %llu %llu %llu %llu", dtype, &rows, &cols, &offset, &nbytes), 5);
  assert_true(k3_dtype_from_name(dtype, strlen(dtype), &tensor->dtype));
  tensor->n_rows = rows;
  tensor->n_cols = cols;
  tensor->nbytes = nbytes;
  tensor->data = golden + offset;
  return true;
}

static struct tensor get(const char *case_name, const char *name) {
  struct tensor tensor = {0};
  if (!find(case_name, name, &tensor))
    fail_msg("no tensor %s of %s in the golden file", name, case_name);
  return tensor;
}

// Compares float by float; 0 and -0 are the same value, NaNs are equal.
static void assert_values(const char *what, const float *ours, const struct tensor *theirs) {
  for (uint64_t i = 0; i < theirs->n_rows * theirs->n_cols; i++) {
    float value = k3_load_float(theirs->dtype, theirs->data, i);
    float rounded = theirs->dtype == K3_DTYPE_BF16 ? k3_f32_from_bf16(k3_bf16_from_f32(ours[i])) : ours[i];
    if (!(rounded == value || (isnan(rounded) && isnan(value))))
      fail_msg("%s: row %llu column %llu: ours %.9g, the library's %.9g", what, (unsigned long long)(i / theirs->n_cols),
               (unsigned long long)(i % theirs->n_cols), (double)rounded, (double)value);
  }
}

static void decode_and_compare(const char *case_name, const struct k3_quant_matrix *matrix, const float *second) {
  struct k3_error err = {0};
  assert_int_equal(k3_quant_matrix_check(matrix, case_name, &err), K3_OK);
  float *ours = malloc(4 * matrix->n_rows * matrix->n_cols);
  for (uint64_t row = 0; row < matrix->n_rows; row++)
    k3_quant_decode_row(matrix, row, 0, matrix->n_cols, second, ours + row * matrix->n_cols);
  struct tensor theirs;
  unsigned n_compared = 0;
  if (find(case_name, "decoded", &theirs)) {
    assert_values(case_name, ours, &theirs);
    n_compared++;
  }
  if (find(case_name, "decoded_bf16", &theirs)) {
    assert_values(case_name, ours, &theirs);
    n_compared++;
  }
  assert_true(n_compared > 0);
  free(ours);
}

static const struct {
  const char *name, *weight, *second;
  enum k3_scheme scheme;
  enum k3_nvfp4_mode nvfp4_mode;
  enum k3_mx_mode mx_mode;
  uint32_t block_cols;
} CASES[] = {
    {"ct-nvfp4", "weight_packed", "weight_global_scale", K3_SCHEME_NVFP4, K3_NVFP4_COMPRESSED_TENSORS, 0, 16},
    {"ct-nvfp4-dead", "weight_packed", "weight_global_scale", K3_SCHEME_NVFP4, K3_NVFP4_COMPRESSED_TENSORS, 0, 16},
    {"ct-mxfp4", "weight_packed", NULL, K3_SCHEME_MXFP4, 0, K3_MX_COMPRESSED_TENSORS, 32},
    {"ct-mxfp8", "weight", NULL, K3_SCHEME_MXFP8, 0, K3_MX_COMPRESSED_TENSORS, 32},
    {"ct-fp8-tensor", "weight", NULL, K3_SCHEME_FP8_TENSOR, 0, 0, 0},
    {"ct-fp8-channel", "weight", NULL, K3_SCHEME_FP8_CHANNEL, 0, 0, 0},
    {"ct-fp8-group", "weight", NULL, K3_SCHEME_FP8_GROUP, 0, 0, 32},
    {"ct-fp8-block", "weight", NULL, K3_SCHEME_FP8_BLOCK, 0, 0, 128},
    {"mo-nvfp4", "weight", "weight_scale_2", K3_SCHEME_NVFP4, K3_NVFP4_MODELOPT, 0, 16},
    {"mo-mxfp4", "weight", NULL, K3_SCHEME_MXFP4, 0, K3_MX_MODELOPT, 32},
    {"mo-mxfp8", "weight", NULL, K3_SCHEME_MXFP8, 0, K3_MX_MODELOPT, 32},
};
enum { N_CASES = sizeof CASES / sizeof CASES[0] };

static struct k3_quant_scheme case_scheme(int c) {
  struct k3_quant_scheme scheme = k3_quant_scheme_default(CASES[c].scheme);
  scheme.block_cols = CASES[c].block_cols;
  scheme.scale_dtype = get(CASES[c].name, "weight_scale").dtype;
  if (CASES[c].nvfp4_mode == K3_NVFP4_MODELOPT)
    scheme.second = K3_SECOND_MULTIPLY;
  return scheme;
}

// Files written by the real libraries in NVFP4, MXFP4, MXFP8, FP8 tensor / channel / group / block are decoded to the values those libraries decode.
static void test_decode(void **state) {
  (void)state;
  for (enum k3_simd level = K3_SIMD_SCALAR; level <= k3_cpu_simd(); level++) {
    k3_quant_set_simd(level);
    for (int c = 0; c < N_CASES; c++) {
      struct tensor src = get(CASES[c].name, "src");
      struct k3_quant_matrix matrix = {.scheme = case_scheme(c),
                                       .n_rows = src.n_rows,
                                       .n_cols = src.n_cols,
                                       .weight = get(CASES[c].name, CASES[c].weight).data,
                                       .scale = get(CASES[c].name, "weight_scale").data};
      float second = CASES[c].second ? k3_load_f32(get(CASES[c].name, CASES[c].second).data, 0) : 1.0f;
      if (strcmp(CASES[c].name, "mo-mxfp8") != 0)  // ModelOpt's decompression of that one is not in the file
        decode_and_compare(CASES[c].name, &matrix, CASES[c].second ? &second : NULL);
    }
  }
}

// Random tensors equal the libraries' encoding byte for byte on F32 input, in every instruction set.
static void test_encode(void **state) {
  (void)state;
  for (enum k3_simd level = K3_SIMD_SCALAR; level <= k3_cpu_simd(); level++) {
    k3_quant_set_simd(level);
    for (int c = 0; c < N_CASES; c++) {
      struct tensor src = get(CASES[c].name, "src"), weight = get(CASES[c].name, CASES[c].weight), scale = get(CASES[c].name, "weight_scale");
      float *wide = malloc(4 * src.n_rows * src.n_cols);  // the library worked in F32 where the source is stored as BF16
      k3_quant_widen(src.dtype, src.data, src.n_rows * src.n_cols, wide);
      float amax = k3_quant_amax(K3_DTYPE_F32, wide, src.n_rows * src.n_cols);
      struct k3_quant_encoder encoder = {
          .scheme = case_scheme(c), .src_dtype = K3_DTYPE_F32, .nvfp4_mode = CASES[c].nvfp4_mode, .mx_mode = CASES[c].mx_mode};
      if (CASES[c].second) {
        encoder.scale = CASES[c].nvfp4_mode == K3_NVFP4_MODELOPT ? k3_nvfp4_multiplier(amax) : k3_nvfp4_divisor(amax);
        assert_memory_equal(&encoder.scale, get(CASES[c].name, CASES[c].second).data, 4);
      }
      uint8_t *ours = calloc(1, weight.nbytes), *our_scale = calloc(1, scale.nbytes);
      if (CASES[c].scheme == K3_SCHEME_FP8_TENSOR) {
        encoder.scale = k3_fp8_scale(amax, K3_DTYPE_F32);
        k3_quant_store_float(K3_DTYPE_F32, our_scale, 0, encoder.scale);
      }
      k3_quant_encode_rows(&encoder, wide, src.n_rows, src.n_cols, ours, our_scale);
      for (uint64_t i = 0; i < scale.nbytes; i++) {
        if (our_scale[i] != scale.data[i])
          fail_msg("%s, %s: scale byte %llu: ours %02X, the library's %02X", CASES[c].name, k3_simd_name(level), (unsigned long long)i, our_scale[i],
                   scale.data[i]);
      }
      for (uint64_t i = 0; i < weight.nbytes; i++) {
        if (ours[i] != weight.data[i])
          fail_msg("%s, %s: weight byte %llu: ours %02X, the library's %02X", CASES[c].name, k3_simd_name(level), (unsigned long long)i, ours[i],
                   weight.data[i]);
      }
      free(wide);
      free(ours);
      free(our_scale);
    }
  }
}

// On BF16 input the library computes amax, the global scale and amax_b / 6 in BF16. Stated tolerance: |gs * amax / 2688 - 1| <= 2^-8, block scale
// codes within one, and then codes that follow from the library's own scales exactly where those are equal.
static void test_encode_bf16_tolerance(void **state) {
  (void)state;
  k3_quant_set_simd(K3_SIMD_AVX512);
  struct tensor src = get("ct-nvfp4-bf16", "src"), scale = get("ct-nvfp4-bf16", "weight_scale"), packed = get("ct-nvfp4-bf16", "weight_packed");
  float amax = k3_quant_amax(K3_DTYPE_BF16, src.data, src.n_rows * src.n_cols);
  float theirs = k3_load_f32(get("ct-nvfp4-bf16", "weight_global_scale").data, 0);
  assert_true(fabs((double)theirs * amax / 2688 - 1) <= 1.0 / 256);
  size_t n_blocks = src.n_rows * src.n_cols / 16, n_scales_equal = 0, n_codes_different = 0;
  uint8_t *ours = malloc(8 * n_blocks), *our_scale = malloc(n_blocks);
  k3_quant_encode_nvfp4(K3_NVFP4_COMPRESSED_TENSORS, theirs, K3_DTYPE_BF16, src.data, n_blocks, our_scale, ours);
  for (size_t b = 0; b < n_blocks; b++) {
    assert_in_range(our_scale[b] + 1 - scale.data[b], 0, 2);
    if (our_scale[b] != scale.data[b])
      continue;
    n_scales_equal++;
    for (int i = 0; i < 8; i++)
      n_codes_different += (ours[8 * b + i] ^ packed.data[8 * b + i]) != 0;
  }
  assert_true(n_scales_equal * 10 > n_blocks * 9);
  assert_int_equal(n_codes_different, 0);
  free(ours);
  free(our_scale);
}

// INT3, INT4 and INT8 pack-quantized, symmetric and with zero points packed along rows.
static void test_decode_int(void **state) {
  (void)state;
  for (uint8_t n_bits = 3; n_bits <= 8; n_bits = n_bits == 3 ? 4 : n_bits + 4) {
    for (int asymmetric = 0; asymmetric < 2; asymmetric++) {
      char name[32];
      snprintf(name, sizeof name, "ct-int%d%s", n_bits, asymmetric ? "-asymmetric" : "");
      struct k3_quant_matrix matrix = {.scheme = k3_quant_scheme_default(K3_SCHEME_INT_PACKED), .n_rows = 10, .n_cols = 64};
      matrix.scheme.n_bits = n_bits;
      matrix.scheme.scale_dtype = K3_DTYPE_F32;
      matrix.weight = get(name, "weight_packed").data;
      matrix.scale = get(name, "weight_scale").data;
      matrix.zero_point = asymmetric ? get(name, "weight_zero_point").data : NULL;
      assert_int_equal(k3_quant_row_nbytes(&matrix.scheme, 64) * 10, get(name, "weight_packed").nbytes);
      decode_and_compare(name, &matrix, NULL);
    }
  }
}

static int load(void **state) {
  (void)state;
  size_t nbytes;
  struct k3_error err = {0};
  void *data;
  if (k3_read_file("fixtures/quant/golden.bin", 1 << 20, &data, &nbytes, &err) != K3_OK)
    return -1;
  golden = data;
  if (k3_read_file("fixtures/quant/golden.txt", 1 << 20, &data, &nbytes, &err) != K3_OK)
    return -1;
  index_text = data;
  return 0;
}

static int unload(void **state) {
  (void)state;
  k3_free(golden);
  k3_free(index_text);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_decode),
      cmocka_unit_test(test_encode),
      cmocka_unit_test(test_encode_bf16_tolerance),
      cmocka_unit_test(test_decode_int),
  };
  return cmocka_run_group_tests(tests, load, unload);
}
