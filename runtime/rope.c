#include "runtime/rope.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

// The dimension whose wave turns `rotations` times within the original length.
static double dim_of_rotations(const struct k3_rope *rope, double d, double rotations) {
  return d * log((double)rope->original_max_position / (rotations * 2 * PI)) / (2 * log(rope->theta));
}

void k3_rope_ramp(const struct k3_rope *rope, uint64_t rope_dim, double *low, double *high) {
  double d = (double)rope_dim;
  *low = fmax(floor(dim_of_rotations(rope, d, rope->beta_fast)), 0);
  *high = fmin(ceil(dim_of_rotations(rope, d, rope->beta_slow)), d - 1);  // d, although only d / 2 frequencies exist: so the reference
  if (*low == *high)
    *high += 0.001;
}

double k3_rope_inv_freq(const struct k3_rope *rope, uint64_t rope_dim, uint64_t i) {
  double plain = 1 / pow(rope->theta, 2 * (double)i / (double)rope_dim);
  if (!rope->yarn)
    return plain;
  double low, high;
  k3_rope_ramp(rope, rope_dim, &low, &high);
  double t = fmin(fmax(((double)i - low) / (high - low), 0), 1);
  return plain / rope->factor * t + plain * (1 - t);
}

static double magnitude(const struct k3_rope *rope, double scale) {
  return !rope->yarn || rope->factor <= 1 ? 1 : 0.1 * scale * log(rope->factor) + 1;
}

double k3_rope_amplitude(const struct k3_rope *rope) {
  return magnitude(rope, rope->mscale) / magnitude(rope, rope->mscale_all_dim);
}

double k3_rope_softmax_scale(const struct k3_rope *rope, uint64_t head_dim) {
  double m = magnitude(rope, rope->mscale_all_dim);
  return m * m / sqrt((double)head_dim);
}
