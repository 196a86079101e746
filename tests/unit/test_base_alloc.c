// Memory that can be made to fail, and checked arithmetic.
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "unit.h"

static void overflow_is_caught(void **state) {
  (void)state;
  uint64_t result;
  assert_true(k3_add_u64(UINT64_MAX - 1, 1, &result));
  assert_true(result == UINT64_MAX);
  assert_false(k3_add_u64(UINT64_MAX, 1, &result));
  assert_true(k3_mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &result));
  assert_true(result == 0xFFFFFFFF00000000u);
  assert_false(k3_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &result));
  assert_true(k3_mul_u64(UINT64_MAX, 0, &result));
  assert_true(result == 0);
  assert_true(k3_round_up_u64(4096, 4096, &result) && result == 4096);
  assert_true(k3_round_up_u64(4097, 4096, &result) && result == 8192);
  assert_true(k3_round_up_u64(0, 256, &result) && result == 0);
  assert_true(k3_round_up_u64(UINT64_MAX - 5, 2, &result) && result == UINT64_MAX - 5 + (UINT64_MAX - 5) % 2);
  assert_false(k3_round_up_u64(UINT64_MAX - 5, 4096, &result));
  assert_true(k3_ceil_div_u64(UINT64_MAX, 2) == UINT64_C(1) << 63);
  assert_true(k3_ceil_div_u64(0, 7) == 0);
  assert_true(k3_ceil_div_u64(14, 7) == 2);
  assert_true(k3_ceil_div_u64(15, 7) == 3);
}

static void calloc_checks_the_product(void **state) {
  (void)state;
  struct k3_error err = {0};
  assert_null(k3_calloc(SIZE_MAX / 2, 3, &err));
  assert_int_equal(err.status, K3_NO_MEMORY);
  unsigned char *bytes = k3_calloc(7, 3, NULL);
  for (int i = 0; i < 21; i++)
    assert_int_equal(bytes[i], 0);
  k3_free(bytes);
  void *none = k3_calloc(0, 8, NULL);
  assert_non_null(none);
  k3_free(none);
  k3_free(NULL);
  void *aligned = k3_alloc_aligned(100, 4096, NULL);
  assert_int_equal((uintptr_t)aligned % 4096, 0);
  k3_free(aligned);
}

static void the_nth_allocation_fails_once(void **state) {
  (void)state;
  struct k3_error err = {0};
  uint64_t before = k3_alloc_count();
  k3_alloc_fail_at(2);
  void *first = k3_calloc(1, 1, &err), *second = k3_calloc(1, 9, &err), *third = k3_calloc(1, 1, NULL);
  assert_non_null(first);
  assert_null(second);
  assert_non_null(third);
  assert_int_equal(err.status, K3_NO_MEMORY);
  assert_non_null(strstr(err.found, "9 bytes"));
  assert_true(k3_alloc_count() - before == 3);
  k3_alloc_fail_at(1);
  k3_alloc_fail_at(0);
  void *fourth = k3_calloc(1, 1, NULL);
  assert_non_null(fourth);
  k3_alloc_set_limit(100);
  assert_null(k3_calloc(101, 1, NULL));
  void *small = k3_calloc(100, 1, NULL);
  assert_non_null(small);
  k3_free(small);
  k3_alloc_set_limit(0);
  k3_free(first);
  k3_free(third);
  k3_free(fourth);
}

static void grow_keeps_content_and_survives_failure(void **state) {
  (void)state;
  int *numbers = NULL;
  size_t capacity = 0;
  for (int i = 0; i < 1000; i++) {
    assert_int_equal(k3_grow(&numbers, &capacity, (size_t)i + 1, sizeof *numbers, NULL), K3_OK);
    numbers[i] = i;
  }
  for (int i = 0; i < 1000; i++)
    assert_int_equal(numbers[i], i);
  size_t old = capacity;
  struct k3_error err = {0};
  assert_int_equal(k3_grow(&numbers, &capacity, SIZE_MAX / 2, sizeof *numbers, &err), K3_NO_MEMORY);
  k3_alloc_fail_at(1);
  assert_int_equal(k3_grow(&numbers, &capacity, old + 1, sizeof *numbers, NULL), K3_NO_MEMORY);
  assert_int_equal(capacity, old);
  assert_int_equal(numbers[999], 999);
  k3_free(numbers);
}

static void arena_pieces_are_apart_and_aligned(void **state) {
  (void)state;
  struct k3_arena arena = {0};
  char *pieces[300];
  for (int i = 0; i < 300; i++) {
    size_t n = (size_t)(i * 37 % 5000) + 1;
    pieces[i] = k3_arena_alloc(&arena, n, NULL);
    assert_non_null(pieces[i]);
    assert_int_equal((uintptr_t)pieces[i] % 8, 0);
    memset(pieces[i], i & 0xFF, n);
  }
  char *large = k3_arena_alloc(&arena, 3 << 20, NULL);
  memset(large, 0xEE, 3 << 20);
  for (int i = 0; i < 300; i++) {
    size_t n = (size_t)(i * 37 % 5000) + 1;
    for (size_t k = 0; k<n; k += n> 1 ? n - 1 : 1)
      assert_int_equal((unsigned char)pieces[i][k], i & 0xFF);
  }
  assert_string_equal(k3_arena_strndup(&arena, "weights", 6, NULL), "weight");
  struct k3_error err = {0};
  assert_null(k3_arena_alloc(&arena, SIZE_MAX - 3, &err));
  assert_int_equal(err.status, K3_NO_MEMORY);
  k3_arena_free(&arena);
  assert_null(arena.blocks);
}

static void texts_are_copied(void **state) {
  (void)state;
  char *copy = k3_strndup("abcdef", 3, NULL), *text = k3_asprintf(NULL, "%s-%d", copy, 42);
  assert_string_equal(copy, "abc");
  assert_string_equal(text, "abc-42");
  k3_free(copy);
  k3_free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(overflow_is_caught),
      cmocka_unit_test(calloc_checks_the_product),
      cmocka_unit_test(the_nth_allocation_fails_once),
      cmocka_unit_test(grow_keeps_content_and_survives_failure),
      cmocka_unit_test(arena_pieces_are_apart_and_aligned),
      cmocka_unit_test(texts_are_copied),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
