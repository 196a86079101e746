// Rotary frequencies and scales against published values, and the rotation against one written out by hand.
#include <math.h>

#include "runtime/cpu/cpu.h"
#include "runtime/rope.h"
#include "unit.h"

static const struct k3_rope PUBLISHED = {
    .yarn = true, .theta = 50000, .factor = 32, .original_max_position = 32768, .beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1};

static void close_to(double a, double b, double relative) {
  if (!(fabs(a - b) <= relative * fabs(b)))
    fail_msg("%.17g is not %.17g", a, b);
}

// The seven inv_i, low and high, the softmax scale 0.13086079996295005 and amplitude 1 of the published drafter.
static void test_published_values(void **state) {
  (void)state;
  static const struct {
    unsigned i;
    double inv;
  } values[] = {{0, 1}, {1, 0.7131110849}, {15, 6.27130338e-3}, {16, 4.07828307e-3}, {25, 2.54469837e-5}, {26, 4.75266161e-6}, {31, 8.76441291e-7}};
  for (size_t k = 0; k < sizeof values / sizeof values[0]; k++)
    close_to(k3_rope_inv_freq(&PUBLISHED, 64, values[k].i), values[k].inv, 2e-9);
  double low, high;
  k3_rope_ramp(&PUBLISHED, 64, &low, &high);
  assert_true(low == 15 && high == 26);
  assert_true(k3_rope_amplitude(&PUBLISHED) == 1);
  close_to(k3_rope_softmax_scale(&PUBLISHED, 192), 0.13086079996295005, 1e-15);
}

// B91: two corrections: softmax by mscale_all_dim squared, amplitude by the ratio. Factor 40 with 0.707 and 1.0, factor 16 with 1.0; nope 4 + rope 4.
static void test_both_corrections(void **state) {
  (void)state;
  static const struct { double factor, mscale_all_dim, scale; } rows[] = {{40, 0.707, 0.5620177}, {40, 1, 0.6625075}, {16, 1, 0.5767835}};
  struct k3_rope rope = PUBLISHED;
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    rope.factor = rows[k].factor;
    rope.mscale_all_dim = rows[k].mscale_all_dim;
    close_to(k3_rope_softmax_scale(&rope, 8), rows[k].scale, 1e-6);
  }
  rope = (struct k3_rope){.yarn = true,
                          .theta = 10000,
                          .factor = 40,
                          .original_max_position = 4096,
                          .beta_fast = 32,
                          .beta_slow = 1,
                          .mscale = 1,
                          .mscale_all_dim = 0.707};
  close_to(k3_rope_amplitude(&rope), 1.3688879 / 1.2608038, 1e-6);
  rope.mscale_all_dim = 0;  // absent: no softmax correction, the whole amplitude
  close_to(k3_rope_softmax_scale(&rope, 16), 0.25, 1e-15);
  close_to(k3_rope_amplitude(&rope), 1.3688879, 1e-6);
  rope.factor = 1;
  assert_true(k3_rope_amplitude(&rope) == 1 && k3_rope_softmax_scale(&rope, 16) == 0.25);
  rope.yarn = false;  // B92: nope 8 + rope 4, not the latent's 12 + 4
  close_to(k3_rope_softmax_scale(&rope, 12), 1 / sqrt(12), 1e-15);
}

// The clamp of high is d - 1, and low = high is split by 0.001.
static void test_ramp_edges(void **state) {
  (void)state;
  double low, high;
  struct k3_rope rope = {.yarn = true, .theta = 2, .factor = 4, .original_max_position = 1 << 20, .beta_fast = 4, .beta_slow = 1};
  k3_rope_ramp(&rope, 8, &low, &high);
  assert_true(high == 7);
  rope = (struct k3_rope){.yarn = true, .theta = 100, .factor = 4, .original_max_position = 6, .beta_fast = 4, .beta_slow = 1};
  k3_rope_ramp(&rope, 8, &low, &high);
  assert_true(low == 0 && high == 0.001);
}

// B89: interleaved: rope dim 4, vector (1, 2, 3, 4), position 1, theta 10000 turns (1, 2) by 1 rad and (3, 4) by 0.01 rad. Position 0 changes nothing.
static void test_interleaved_pairs(void **state) {
  (void)state;
  struct k3_rope rope = {.theta = 10000, .factor = 1};
  float inv[2] = {(float)k3_rope_inv_freq(&rope, 4, 0), (float)k3_rope_inv_freq(&rope, 4, 1)};
  struct k3_rope_table table = {inv, 2, 1};
  struct k3_exec exec = {0};
  float x[4] = {1, 2, 3, 4};
  k3_cpu_rope(&exec, &table, 0, x);
  assert_true(x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4);
  k3_cpu_rope(&exec, &table, 1, x);
  close_to((double)x[0], cos(1) - 2 * sin(1), 1e-6);
  close_to((double)x[1], 2 * cos(1) + sin(1), 1e-6);
  close_to((double)x[2], 3 * cos(0.01) - 4 * sin(0.01), 1e-6);
  close_to((double)x[3], 4 * cos(0.01) + 3 * sin(0.01), 1e-6);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_published_values),
      cmocka_unit_test(test_both_corrections),
      cmocka_unit_test(test_ramp_edges),
      cmocka_unit_test(test_interleaved_pairs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
