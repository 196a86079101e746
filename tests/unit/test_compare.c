// Distances of two drafters' distributions: figures worked out by hand, extremes, and independence of threads.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/compare.h"
#include "unit.h"

static const double TINY = 1e-12;

// p = (1/4, 3/4), q = (1/2, 1/2), t = (4/5, 1/5).
static void figures_by_hand(void **state) {
  (void)state;
  const float a[] = {0, logf(3)}, b[] = {2, 2}, t[] = {logf(4), 0};
  struct k3_slot_difference d;
  k3_compare_slot(a, b, t, 2, &d);
  assert_true(fabs(d.kl - (0.25 * log(0.5) + 0.75 * log(1.5))) < 1e-7);  // log 3 in F32
  assert_true(fabs(d.overlap - 0.75) < 1e-7);
  assert_true(fabs(d.acceptance_a - 0.45) < 1e-7);
  assert_true(fabs(d.acceptance_b - 0.70) < 1e-7);
  assert_false(d.agree);  // ties go to the lowest id
  k3_compare_slot(b, a, NULL, 2, &d);
  assert_true(fabs(d.kl - 0.5 * (log(2) + log(2.0 / 3))) < 1e-7);  // the other direction has another value
  assert_true(fabs(d.overlap - 0.75) < 1e-7);
  assert_true(d.acceptance_a == 0 && d.acceptance_b == 0);
}

// "compare of an image with itself gives overlap 1 and KL 0": exactly, also where exponentials would overflow or a token is impossible.
static void equal_logits_are_exactly_equal(void **state) {
  (void)state;
  const float a[] = {3000, -3000, 2999.5f, -INFINITY, 0.25f};
  struct k3_slot_difference d;
  k3_compare_slot(a, a, a, 5, &d);
  assert_true(d.kl == 0 && d.overlap == 1 && d.agree && d.acceptance_a == 1 && d.acceptance_b == 1);
}

static void a_shift_of_all_logits_changes_nothing(void **state) {
  (void)state;
  const float a[] = {0.5f, -1.25f, 3, 2.75f}, b[] = {64.5f, 62.75f, 67, 66.75f};
  struct k3_slot_difference d;
  k3_compare_slot(a, b, NULL, 4, &d);
  assert_true(fabs(d.kl) < TINY && fabs(d.overlap - 1) < TINY && d.agree);
}

// What A never drafts costs nothing in KL; what only A drafts makes it infinite, and the overlap stays a number.
static void impossible_tokens(void **state) {
  (void)state;
  const float a[] = {0, -INFINITY}, b[] = {0, 0};
  struct k3_slot_difference d;
  k3_compare_slot(a, b, NULL, 2, &d);
  assert_true(fabs(d.kl - log(2)) < TINY && fabs(d.overlap - 0.5) < TINY);
  k3_compare_slot(b, a, NULL, 2, &d);
  assert_true(isinf(d.kl) && d.kl > 0 && fabs(d.overlap - 0.5) < TINY);
}

static void slots_do_not_depend_on_threads_or_alignment(void **state) {
  (void)state;
  enum { SLOTS = 37, VOCAB = 501 };
  static float a[SLOTS * VOCAB], b[SLOTS * VOCAB];
  static unsigned char target[sizeof a + 1];
  uint32_t seed = 1;
  for (size_t i = 0; i < SLOTS * VOCAB; i++) {
    seed = seed * 1664525u + 1013904223u;
    a[i] = (float)(seed >> 8) / 4e6f;
    b[i] = a[i] + (float)(seed & 0xFF) / 200;
  }
  memcpy(target + 1, b, sizeof b);  // as a file may leave it
  struct k3_slot_difference one[SLOTS], three[SLOTS], single;
  assert_int_equal(k3_compare_slots(a, b, target + 1, SLOTS, VOCAB, 1, one, NULL), K3_OK);
  assert_int_equal(k3_compare_slots(a, b, target + 1, SLOTS, VOCAB, 3, three, NULL), K3_OK);
  for (size_t i = 0; i < SLOTS; i++) {
    k3_compare_slot(a + i * VOCAB, b + i * VOCAB, b + i * VOCAB, VOCAB, &single);
    assert_true(one[i].kl == three[i].kl && one[i].overlap == three[i].overlap && one[i].kl == single.kl && one[i].kl > 0);
    assert_true(one[i].acceptance_b == 1 && one[i].acceptance_a == one[i].overlap && three[i].acceptance_a == one[i].acceptance_a);
  }
}

static void expected_tokens_of_a_block(void **state) {
  (void)state;
  const double acceptance[] = {0.5, 0.5, 1, 0, 1};
  assert_true(k3_expected_tokens(acceptance, 5) == 0.5 + 0.25 + 0.25);
  assert_true(k3_expected_tokens(acceptance, 0) == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(figures_by_hand),
      cmocka_unit_test(equal_logits_are_exactly_equal),
      cmocka_unit_test(impossible_tokens),
      cmocka_unit_test(a_shift_of_all_logits_changes_nothing),
      cmocka_unit_test(slots_do_not_depend_on_threads_or_alignment),
      cmocka_unit_test(expected_tokens_of_a_block),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
