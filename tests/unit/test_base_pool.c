// The thread pool: every item once, the lowest failing item reported, the same result for any number of threads.
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/pool.h"
#include "base/progress.h"
#include "unit.h"

enum { N_ITEMS = 5000 };

struct work {
  _Atomic int n_calls[N_ITEMS];
  _Atomic int worker_in_use[64];
  uint64_t fail_first, fail_second;  // items that fail; N_ITEMS: none
  _Atomic bool overlapped;
};

static enum k3_status do_item(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  struct work *work = ctx;
  if (atomic_fetch_add(&work->worker_in_use[worker], 1) != 0)
    work->overlapped = true;
  atomic_fetch_add(&work->n_calls[item], 1);
  enum k3_status status = K3_OK;
  if (item == work->fail_first || item == work->fail_second)
    status = k3_fail(err, K3_BAD_INPUT, K3_CNT04, NULL, NULL, NULL, "item %llu", (unsigned long long)item);
  atomic_fetch_sub(&work->worker_in_use[worker], 1);
  return status;
}

static void every_item_once(void **state) {
  (void)state;
  for (int n_threads = 1; n_threads <= 5; n_threads++) {
    struct k3_pool *pool = k3_pool_create(n_threads, NULL);
    assert_non_null(pool);
    assert_int_equal(k3_pool_n_threads(pool), n_threads);
    static struct work work;
    memset(&work, 0, sizeof work);
    work.fail_first = work.fail_second = N_ITEMS;
    for (int run = 1; run <= 3; run++) {
      uint64_t n_allocations = k3_alloc_count();
      assert_int_equal(k3_pool_run(pool, N_ITEMS, do_item, &work, NULL), K3_OK);
      assert_true(k3_alloc_count() == n_allocations);
      for (int i = 0; i < N_ITEMS; i++)
        assert_int_equal(work.n_calls[i], run);
    }
    assert_false(work.overlapped);
    assert_int_equal(k3_pool_run(pool, 0, do_item, &work, NULL), K3_OK);
    k3_pool_free(pool);
  }
  k3_pool_free(NULL);
}

// Item 3 is handed out long before item 4000, so whoever fails first, item 3 is the one reported; afterwards the pool works again.
static void the_lowest_failure_is_reported(void **state) {
  (void)state;
  for (int n_threads = 1; n_threads <= 4; n_threads++) {
    struct k3_pool *pool = k3_pool_create(n_threads, NULL);
    for (int run = 0; run < 50; run++) {
      static struct work work;
      memset(&work, 0, sizeof work);
      work.fail_first = 3;
      work.fail_second = run % 2 ? 4 : N_ITEMS - 1;
      struct k3_error err = {0};
      assert_int_equal(k3_pool_run(pool, N_ITEMS, do_item, &work, &err), K3_BAD_INPUT);
      assert_int_equal(err.rule, K3_CNT04);
      assert_string_equal(err.found, "item 3");
      int n_done = 0;
      for (int i = 0; i < N_ITEMS; i++)
        n_done += work.n_calls[i];
      if (n_threads == 1)
        assert_int_equal(n_done, 4);  // nothing is started after the failure was seen
    }
    static struct work clean;
    memset(&clean, 0, sizeof clean);
    clean.fail_first = clean.fail_second = N_ITEMS;
    assert_int_equal(k3_pool_run(pool, N_ITEMS, do_item, &clean, NULL), K3_OK);
    k3_pool_free(pool);
  }
}

static void creation_survives_failing_allocations(void **state) {
  (void)state;
  int n_failures = 0;
  for (uint64_t n = 1;; n++) {
    struct k3_error err = {0};
    k3_alloc_fail_at(n);
    struct k3_pool *pool = k3_pool_create(3, &err);
    k3_alloc_fail_at(0);
    if (pool) {
      k3_pool_free(pool);
      break;
    }
    assert_int_equal(err.status, K3_NO_MEMORY);
    n_failures++;
  }
  assert_in_range(n_failures, 2, 6);
}

static uint64_t last_done, last_total;
static int n_progress_calls;

static void watch(void *ctx, const char *what, uint64_t done, uint64_t total) {
  assert_string_equal(what, "reading");
  assert_ptr_equal(ctx, &last_done);
  last_done = done;
  last_total = total;
  n_progress_calls++;
}

static void progress_ends_at_the_total(void **state) {
  (void)state;
  struct k3_progress progress = {.fn = watch, .ctx = &last_done};
  k3_progress_start(&progress, "reading", 1000);
  for (int i = 0; i < 1000; i++)
    k3_progress_add(&progress, 1);
  k3_progress_finish(&progress);
  assert_true(last_done == 1000);
  assert_true(last_total == 1000);
  assert_in_range(n_progress_calls, 1, 20);  // about ten a second, not one per item
  k3_progress_start(NULL, "nothing", 1);
  k3_progress_add(NULL, 1);
  k3_progress_finish(NULL);
}

static void cpu_is_described(void **state) {
  (void)state;
  assert_true(k3_cpu_count() >= 1);
  assert_string_equal(k3_simd_name(K3_SIMD_AVX2), "avx2");
  assert_in_range(k3_cpu_simd(), K3_SIMD_SCALAR, K3_SIMD_AVX512);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_item_once),
      cmocka_unit_test(the_lowest_failure_is_reported),
      cmocka_unit_test(creation_survives_failing_allocations),
      cmocka_unit_test(progress_ends_at_the_total),
      cmocka_unit_test(cpu_is_described),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
