// Slices of tensor parallelism: equal parts that cut no head and no block of scales; and the refusal that names the widths that would work.
#include <string.h>

#include "quant/decode.h"
#include "quant/slice.h"
#include "unit.h"

static void parts_tile_the_extent(void **state) {
  (void)state;
  static const struct {
    uint64_t extent, n_units, block;
  } cases[] = {{12288, 64, 128}, {16384, 64, 128}, {14336, 0, 128}, {8192, 64, 128}, {163840, 0, 0}, {14336, 0, 16}, {8192, 64, 32}};
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    for (uint32_t tp = 1; tp <= 16; tp *= 2) {  // the published drafter, every width
      uint64_t at = 0;
      for (uint32_t r = 0; r < tp; r++) {
        struct k3_slice slice;
        assert_int_equal(k3_slice_of(cases[c].extent, cases[c].n_units, cases[c].block, tp, r, "t", "rows", &slice, NULL), K3_OK);
        assert_int_equal(slice.first, at);
        assert_int_equal(slice.n, cases[c].extent / tp);
        assert_true(cases[c].block == 0 || slice.first % cases[c].block == 0);
        at += slice.n;
      }
      assert_int_equal(at, cases[c].extent);
    }
  }
}

// NVFP4 and MXFP4 K-slices on group borders, FP8 blocks on 128, heads whole; else PCK05 with the sizes that would work.
static void cut_groups_blocks_and_heads_are_refused(void **state) {
  (void)state;
  static const struct {
    uint64_t extent, n_units, block;
    uint32_t tp;
    const char *found, *allowed;
  } cases[] = {
      {64, 0, 16, 8, "64 columns with one scale for every 16 cannot be cut into 8 equal parts", "tp 1, 2, 4"},
      {96, 0, 32, 2, "96 columns with one scale for every 32 cannot be cut into 2 equal parts", "tp 1, 3"},
      {512, 0, 128, 8, "512 columns with one scale for every 128 cannot be cut into 8 equal parts", "tp 1, 2, 4"},
      {64, 0, 128, 2, "64 columns with one scale for every 128 cannot be cut into 2 equal parts", "tp 1"},
      {1152, 6, 0, 4, "6 heads cannot be cut into 4 equal parts", "tp 1, 2, 3, 6"},
      {10, 0, 0, 4, "10 columns cannot be cut into 4 equal parts", "tp 1, 2, 5, 10"},
  };
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    struct k3_slice slice;
    struct k3_error err = {0};
    assert_int_equal(k3_slice_of(cases[c].extent, cases[c].n_units, cases[c].block, cases[c].tp, 0, "w", "columns", &slice, &err), K3_UNSUPPORTED);
    assert_int_equal(err.rule, K3_PCK05);
    assert_string_equal(err.tensor, "w");
    assert_string_equal(err.found, cases[c].found);
    assert_string_equal(err.allowed, cases[c].allowed);
  }
}

// Row slices of every scheme decode to the rows of the whole.
static void row_slices_decode_to_the_same_values(void **state) {
  (void)state;
  enum { ROWS = 512, COLS = 256, TP = 4 };
  static unsigned char codes[ROWS * COLS * 4], scales[ROWS * COLS * 4];
  static const enum k3_scheme schemes[] = {K3_SCHEME_BF16,      K3_SCHEME_F16,       K3_SCHEME_F32,   K3_SCHEME_FP8_TENSOR, K3_SCHEME_FP8_CHANNEL,
                                           K3_SCHEME_FP8_GROUP, K3_SCHEME_FP8_BLOCK, K3_SCHEME_MXFP8, K3_SCHEME_NVFP4,      K3_SCHEME_MXFP4};
  uint32_t random = 1;
  for (size_t i = 0; i < sizeof codes; i++) {
    random = random * 1664525 + 1013904223;
    codes[i] = (unsigned char)(random >> 24) & 0x37;  // no NaN in any of the types
    scales[i] = (unsigned char)(random >> 16) & 0x37;
  }
  for (size_t s = 0; s < sizeof schemes / sizeof schemes[0]; s++) {
    struct k3_quant_matrix whole = {
        k3_quant_scheme_default(schemes[s]), ROWS, COLS, codes, k3_scheme_is_plain(schemes[s]) ? NULL : scales, NULL, NULL};
    const float second = 1.5f;
    for (uint32_t rank = 0; rank < TP; rank++) {
      struct k3_quant_matrix part = whole;
      struct k3_slice slice;
      assert_int_equal(k3_slice_of(ROWS, 0, whole.scheme.block_rows, TP, rank, "w", "rows", &slice, NULL), K3_OK);
      k3_slice_rows(&part, &slice);
      assert_int_equal(part.n_rows, ROWS / TP);
      for (uint64_t row = 0; row < part.n_rows; row += 37) {
        float a[COLS], b[COLS];
        k3_quant_decode_row(&whole, slice.first + row, 0, COLS, &second, a);
        k3_quant_decode_row(&part, row, 0, COLS, &second, b);
        assert_memory_equal(a, b, sizeof a);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(parts_tile_the_extent),
      cmocka_unit_test(cut_groups_blocks_and_heads_are_refused),
      cmocka_unit_test(row_slices_decode_to_the_same_values),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
