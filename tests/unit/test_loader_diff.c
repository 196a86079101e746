// diff and the statistics of inspect, on files of a few numbers whose answers are worked out by hand.
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/file.h"
#include "loader/diff.h"
#include "loader/element.h"
#include "loader/stats.h"
#include "temp_folder.h"
#include "unit.h"

// Writes a safetensors file: header text and data.
static const char *write_st(const char *name, const char *header, const void *data, size_t nbytes) {
  size_t h = strlen(header);
  unsigned char *bytes = k3_calloc(8 + h + nbytes, 1, NULL);
  for (int i = 0; i < 8; i++)
    bytes[i] = (unsigned char)(h >> 8 * i);
  memcpy(bytes + 8, header, h);
  memcpy(bytes + 8 + h, data, nbytes);
  const char *path = temp_path(name);
  assert_int_equal(k3_write_file(path, bytes, 8 + h + nbytes, true, NULL), K3_OK);
  k3_free(bytes);
  return path;
}

static struct k3_diff_result compare(const char *a, const char *b, const struct k3_diff_options *options) {
  struct k3_ckpt ckpt_a, ckpt_b;
  struct k3_diff_result result;
  assert_int_equal(k3_ckpt_open(a, NULL, &ckpt_a, NULL, NULL), K3_OK);
  assert_int_equal(k3_ckpt_open(b, NULL, &ckpt_b, NULL, NULL), K3_OK);
  assert_int_equal(k3_diff(&ckpt_a, &ckpt_b, options, &result, NULL), K3_OK);
  for (size_t i = 0; i < result.n_items; i++) {  // the names die with the checkpoints, which these tests close here
    result.items[i].name = NULL;
    result.items[i].a = result.items[i].b = NULL;
    result.items[i].shape = NULL;
  }
  k3_ckpt_close(&ckpt_a);
  k3_ckpt_close(&ckpt_b);
  return result;
}

static const struct k3_diff_options bits = {.n_threads = 1};
static const char header_f32[] = "{\"x\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}";

static void errors_by_hand(void **state) {
  (void)state;
  const float a[4] = {1, 2, 3, 4}, b[4] = {1, 2, 3, 4.5f};
  const char *file_a = write_st("a", header_f32, a, sizeof a), *file_b = write_st("b", header_f32, b, sizeof b);
  struct k3_diff_result result = compare(file_a, file_a, &bits);
  assert_int_equal(result.n_equal, 1);
  assert_int_equal(result.n_items, 0);
  k3_diff_free(&result);
  result = compare(file_a, file_b, &bits);
  assert_int_equal(result.n_items, 1);
  const struct k3_diff_item *item = &result.items[0];
  assert_int_equal(item->kind, K3_DIFF_VALUES);
  assert_true(item->exceeds);
  assert_int_equal(item->n_different, 1);
  assert_int_equal(item->first, 3);
  assert_true(item->first_a == 4 && item->first_b == 4.5);
  assert_true(item->max_error == 0.5);
  assert_int_equal(item->max_at, 3);
  assert_true(fabs(item->cosine - 32 / (sqrt(30) * sqrt(34.25))) < 1e-15);
  assert_true(fabs(item->snr_db - 10 * log10(30 / 0.25)) < 1e-12);
  k3_diff_free(&result);
  // A tolerance is met at its edge and not below it.
  result = compare(file_a, file_b, &(struct k3_diff_options){.has_tolerance = true, .tolerance = 0.5});
  assert_int_equal(result.n_within, 1);
  k3_diff_free(&result);
  result = compare(file_a, file_b, &(struct k3_diff_options){.has_tolerance = true, .tolerance = 0.4999});
  assert_int_equal(result.n_within, 0);
  k3_diff_free(&result);
}

static void signed_zeros_and_nan(void **state) {
  (void)state;
  const struct k3_diff_options zero = {.has_tolerance = true, .tolerance = 0};
  float a[4] = {0, 1, NAN, INFINITY}, b[4] = {-0.0f, 1, NAN, INFINITY};
  const char *file_a = write_st("a", header_f32, a, sizeof a), *file_b = write_st("b", header_f32, b, sizeof b);
  struct k3_diff_result result = compare(file_a, file_b, &bits);
  assert_int_equal(result.n_items, 1);
  assert_int_equal(result.items[0].n_different, 1);  // the zero: its bits
  assert_true(result.items[0].max_error == 0);
  assert_true(isinf(result.items[0].snr_db));
  k3_diff_free(&result);
  result = compare(file_a, file_b, &zero);
  assert_int_equal(result.n_within, 1);
  k3_diff_free(&result);
  b[2] = 7;  // a number where the other side has NaN exceeds every tolerance
  file_b = write_st("b", header_f32, b, sizeof b);
  result = compare(file_a, file_b, &(struct k3_diff_options){.has_tolerance = true, .tolerance = 1e30});
  assert_int_equal(result.n_within, 0);
  assert_int_equal(result.items[0].n_not_number, 1);
  k3_diff_free(&result);
  b[2] = NAN, b[3] = -INFINITY;
  file_b = write_st("b", header_f32, b, sizeof b);
  result = compare(file_a, file_b, &(struct k3_diff_options){.has_tolerance = true, .tolerance = 1e30});
  assert_int_equal(result.items[0].n_not_number, 1);
  k3_diff_free(&result);
}

static void other_types_and_shapes(void **state) {
  (void)state;
  const float a[4] = {1, -2, 0.5f, 4};
  const uint16_t b[4] = {0x3F80, 0xC000, 0x3F00, 0x4080};  // the same numbers in BF16
  const char *file_a = write_st("a", header_f32, a, sizeof a);
  const char *file_b = write_st("b", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]}}", b, sizeof b);
  struct k3_diff_result result = compare(file_a, file_b, &bits);
  assert_int_equal(result.items[0].kind, K3_DIFF_DTYPE);
  assert_int_equal(result.items[0].n_different, 0);
  assert_true(result.items[0].exceeds);
  k3_diff_free(&result);
  result = compare(file_a, file_b, &(struct k3_diff_options){.has_tolerance = true, .tolerance = 0});
  assert_int_equal(result.n_within, 1);
  k3_diff_free(&result);
  file_b = write_st("b", "{\"x\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", a, sizeof a);
  result = compare(file_a, file_b, &bits);
  assert_int_equal(result.items[0].kind, K3_DIFF_SHAPE);
  k3_diff_free(&result);
  file_b = write_st("b", "{\"y\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}", a, sizeof a);
  result = compare(file_a, file_b, &bits);
  assert_int_equal(result.n_items, 2);
  assert_int_equal(result.items[0].kind, K3_DIFF_ONLY_A);
  assert_int_equal(result.items[1].kind, K3_DIFF_ONLY_B);
  k3_diff_free(&result);
}

// Two units and a bit, a difference in the last element and a larger one in the middle: found whatever the threads, with equal sums.
static void many_elements_and_threads(void **state) {
  (void)state;
  enum { N = (1 << 20) + 5 };
  char header[100];
  snprintf(header, sizeof header, "{\"x\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", N, 4 * N);
  float *x = k3_calloc(N, sizeof *x, NULL);
  for (int i = 0; i < N; i++)
    x[i] = (float)(i % 1000) / 1000;
  const char *file_a = write_st("a", header, x, N * sizeof *x);
  x[700000] += 2;
  x[N - 1] += 1;
  const char *file_b = write_st("b", header, x, N * sizeof *x);
  k3_free(x);
  struct k3_diff_result one = compare(file_a, file_b, &bits);
  struct k3_diff_result four = compare(file_a, file_b, &(struct k3_diff_options){.n_threads = 4});
  assert_int_equal(one.n_items, 1);
  assert_int_equal(one.items[0].n_different, 2);
  assert_int_equal(one.items[0].first, 700000);
  assert_int_equal(one.items[0].max_at, 700000);
  assert_true(one.items[0].max_error == 2);
  assert_memory_equal(&one.items[0].cosine, &four.items[0].cosine, sizeof(double));
  assert_memory_equal(&one.items[0].snr_db, &four.items[0].snr_db, sizeof(double));
  k3_diff_free(&one);
  k3_diff_free(&four);
}

static void elements_of_every_width(void **state) {
  (void)state;
  double x[4];
  k3_elements_widen(K3_DTYPE_F4, (const uint8_t[]){0x21, 0xF7}, 4, x);  // low nibble first: 0.5, 1, 6, -6
  assert_true(x[0] == 0.5 && x[1] == 1 && x[2] == 6 && x[3] == -6);
  k3_elements_widen(K3_DTYPE_F8_E4M3, (const uint8_t[]){0x7E, 0x01, 0xB8}, 3, x);
  assert_true(x[0] == 448 && x[1] == 1.0 / 512 && x[2] == -1);
  k3_elements_widen(K3_DTYPE_F8_E5M2, (const uint8_t[]){0x7B, 0x3C}, 2, x);
  assert_true(x[0] == 57344 && x[1] == 1);
  k3_elements_widen(K3_DTYPE_F8_E8M0, (const uint8_t[]){127, 124, 0}, 3, x);
  assert_true(x[0] == 1 && x[1] == 0.125 && x[2] == ldexp(1, -127));
  k3_elements_widen(K3_DTYPE_I16, (const uint8_t[]){0xFE, 0xFF}, 1, x);
  assert_true(x[0] == -2);
  k3_elements_widen(K3_DTYPE_I64, (const uint8_t[]){0, 0, 0, 0, 0, 0, 0, 0x80}, 1, x);
  assert_true(x[0] == -ldexp(1, 63));
  k3_elements_widen(K3_DTYPE_U32, (const uint8_t[]){0xFF, 0xFF, 0xFF, 0xFF}, 1, x);
  assert_true(x[0] == 4294967295.0);
  const double pi = 3.14159;
  k3_elements_widen(K3_DTYPE_F64, &pi, 1, x);
  assert_true(x[0] == pi);
  k3_elements_widen(K3_DTYPE_F16, (const uint16_t[]){0x3C00, 0xC500}, 2, x);
  assert_true(x[0] == 1 && x[1] == -5);
  assert_false(k3_element_is_number(K3_DTYPE_C64));
  assert_false(k3_element_is_number(K3_DTYPE_F6_E2M3));
  assert_int_equal(k3_element_bits(K3_DTYPE_F4, (const uint8_t[]){0x21}, 1), 2);
}

static void statistics_by_hand(void **state) {
  (void)state;
  static struct k3_stats stats;
  const float a[4] = {0, -3, NAN, 5};
  struct k3_ckpt ckpt;
  assert_int_equal(k3_ckpt_open(write_st("a", header_f32, a, sizeof a), NULL, &ckpt, NULL, NULL), K3_OK);
  assert_int_equal(k3_stats_of(&ckpt, "x", 3, NULL, &stats, NULL), K3_OK);
  assert_int_equal(stats.n_elems, 4);
  assert_int_equal(stats.n_nan, 1);
  assert_int_equal(stats.n_inf, 0);
  assert_int_equal(stats.n_zero, 1);
  assert_true(stats.min == -3 && stats.max == 5 && stats.max_abs == 5);
  assert_true(fabs(stats.mean - 2.0 / 3) < 1e-15);
  assert_true(fabs(stats.std - sqrt(34.0 / 3 - 4.0 / 9)) < 1e-14);
  assert_int_equal(stats.n_first, 3);
  assert_true(stats.first[1] == -3);
  struct k3_error err = {0};
  assert_int_equal(k3_stats_of(&ckpt, "y", 3, NULL, &stats, &err), K3_BAD_ARGUMENT);
  k3_ckpt_close(&ckpt);
}

static void failing_memory(void **state) {
  (void)state;
  const float a[4] = {1, 2, 3, 4}, b[4] = {1, 2, 3, 5};
  struct k3_ckpt ckpt_a, ckpt_b;
  assert_int_equal(k3_ckpt_open(write_st("a", header_f32, a, sizeof a), NULL, &ckpt_a, NULL, NULL), K3_OK);
  assert_int_equal(k3_ckpt_open(write_st("b", header_f32, b, sizeof b), NULL, &ckpt_b, NULL, NULL), K3_OK);
  for (uint64_t n = 1;; n++) {
    struct k3_diff_result result;
    k3_alloc_fail_at(n);
    enum k3_status status = k3_diff(&ckpt_a, &ckpt_b, &bits, &result, NULL);
    k3_alloc_fail_at(0);
    if (status == K3_OK) {
      assert_true(n > 5);
      k3_diff_free(&result);
      break;
    }
    assert_int_equal(status, K3_NO_MEMORY);
  }
  k3_ckpt_close(&ckpt_a);
  k3_ckpt_close(&ckpt_b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(errors_by_hand),          cmocka_unit_test(signed_zeros_and_nan),
      cmocka_unit_test(other_types_and_shapes),  cmocka_unit_test(many_elements_and_threads),
      cmocka_unit_test(elements_of_every_width), cmocka_unit_test(statistics_by_hand),
      cmocka_unit_test(failing_memory),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
