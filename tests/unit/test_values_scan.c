// Counting over raw weight bytes: both instruction sets against one code at a time, at every alignment and odd length; and a pass whose parts end
// inside a tensor.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "loader/check.h"
#include "loader/rules_values.h"
#include "loader/values_scan.h"
#include "quant/number.h"
#include "temp_folder.h"
#include "unit.h"

enum { N_BYTES = 40000, N_TRIALS = 60 };

static uint64_t state = 1;

static uint32_t next_random(void) {
  state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(state >> 33);
}

// Random bytes, many of them special: runs of zeros, NaN codes, largest codes.
static void fill(uint8_t *bytes, size_t n) {
  static const uint8_t special[] = {0x00, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 0x77, 0x88, 0x44, 0x08};
  for (size_t i = 0; i < n; i++)
    bytes[i] = next_random() % 3 ? (uint8_t)next_random() : special[next_random() % sizeof special];
  for (size_t at = next_random() % 100; at + 64 < n; at += 64 + next_random() % 4000)
    memset(bytes + at, next_random() % 2 ? 0 : 0x11, 40);
}

static float magnitude_of(const uint8_t *codes, size_t i) {
  return fabsf(k3_f32_from_e2m1(codes[i / 2] >> (i % 2 ? 4 : 0)));
}

static struct k3_scan_fp4 fp4_oracle(const uint8_t *codes, const uint8_t *scales, size_t n_blocks, size_t block, float large) {
  struct k3_scan_fp4 scan = {0};
  for (size_t b = 0; b < n_blocks; b++) {
    float top = 0;
    for (size_t i = 0; i < block; i++)
      top = fmaxf(top, magnitude_of(codes + b * block / 2, i));
    bool normal = !scales || isnan(k3_f32_from_e4m3(scales[b])) || fabsf(k3_f32_from_e4m3(scales[b])) >= 0x1p-6f;
    scan.n_zero += top == 0;
    scan.n_low += top > 0 && top < large && normal;
  }
  return scan;
}

static void check_table(const struct k3_values_scan *table) {
  uint8_t *area = malloc(N_BYTES + 16), *scales = malloc(N_BYTES);
  for (int trial = 0; trial < N_TRIALS; trial++) {
    size_t shift = next_random() % 16, n = next_random() % N_BYTES;
    uint8_t *bytes = area + shift;
    fill(bytes, n);
    fill(scales, n);
    struct k3_scan_fp8 fp8 = {0}, wanted8 = {0};
    table->e4m3(bytes, n, &fp8);
    for (size_t i = 0; i < n; i++) {
      wanted8.n_nan += isnan(k3_f32_from_e4m3(bytes[i]));
      wanted8.n_largest += fabsf(k3_f32_from_e4m3(bytes[i])) == 448.0f;
    }
    assert_int_equal(fp8.n_nan, wanted8.n_nan);
    assert_int_equal(fp8.n_largest, wanted8.n_largest);
    struct k3_scan_fp4 nvfp4 = {0}, mxfp4 = {0}, wanted = fp4_oracle(bytes, scales, n / 8, 16, 6), wanted_mx = fp4_oracle(bytes, NULL, n / 16, 32, 3);
    table->nvfp4(bytes, scales, n / 8, &nvfp4);
    table->mxfp4(bytes, n / 16, &mxfp4);
    assert_int_equal(nvfp4.n_zero, wanted.n_zero);
    assert_int_equal(nvfp4.n_low, wanted.n_low);
    assert_int_equal(mxfp4.n_zero, wanted_mx.n_zero);
    assert_int_equal(mxfp4.n_low, wanted_mx.n_low);
    uint64_t n_bf16 = 0, n_f32 = 0;
    for (size_t i = 0; i < n / 2; i++)
      n_bf16 += !isfinite(k3_f32_from_bits((uint32_t)bytes[2 * i] << 16 | (uint32_t)bytes[2 * i + 1] << 24));
    for (size_t i = 0; i < n / 4; i++) {
      float value;
      memcpy(&value, bytes + 4 * i, sizeof value);
      n_f32 += !isfinite(value);
    }
    assert_int_equal(table->nonfinite_16(bytes, n / 2, 0x7F80), n_bf16);
    assert_int_equal(table->nonfinite_32(bytes, n / 4), n_f32);
    size_t first = 0;
    while (first < n && bytes[first] == 0)
      first++;
    assert_int_equal(k3_scan_all_zero(bytes, n), first == n);
    assert_true(k3_scan_all_zero(bytes, first));
  }
  free(area);
  free(scales);
}

static void every_instruction_set_counts_alike(void **unused) {
  (void)unused;
  check_table(&K3_VALUES_SCAN_SCALAR);
#if defined(__x86_64__)
  if (k3_cpu_simd() >= K3_SIMD_AVX2)
    check_table(&K3_VALUES_SCAN_AVX2);
#endif
}

// One NaN far inside a tensor of several parts, and one tensor that ends in the middle of a part: the first of them is named exactly.
static void the_first_bad_element_is_named(void **unused) {
  (void)unused;
  enum { N = 300001, BAD = 262145, SECOND = 299999 };
  const char *path = temp_path("model.safetensors");
  char header[160];
  int n = snprintf(header, sizeof header, "{\"a.weight\":{\"dtype\":\"BF16\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", N, 2 * N);
  uint64_t h = (uint64_t)n;
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  fwrite(&h, 1, 8, file);
  fwrite(header, 1, (size_t)n, file);
  for (int i = 0; i < N; i++) {
    uint16_t bits = i == BAD || i == SECOND ? 0xFF80 : 0x3F80;
    fwrite(&bits, 1, 2, file);
  }
  fclose(file);
  for (int n_threads = 1; n_threads <= 3; n_threads++) {
    struct k3_ckpt ckpt;
    struct k3_findings findings = {0};
    struct k3_error err = {0};
    assert_int_equal(k3_ckpt_open(path, NULL, &ckpt, &findings, &err), K3_OK);
    assert_int_equal(k3_rules_values(&ckpt, NULL, K3_JUDGE_K3PACK, n_threads, NULL, &findings, &err), K3_OK);
    assert_int_equal(findings.n_errors, 1);
    assert_int_equal(findings.items[0].error.rule, K3_VAL02);
    assert_non_null(strstr(findings.items[0].error.found, "2 NaN or Inf, the first is element 262145"));
    k3_findings_free(&findings);
    k3_ckpt_close(&ckpt);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_instruction_set_counts_alike), cmocka_unit_test(the_first_bad_element_is_named)};
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
