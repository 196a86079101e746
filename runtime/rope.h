// Rotary embedding with YaRN: frequencies, amplitude and the correction of the softmax scale. Source: DeepSeek-style YaRN as in DeepSeek-V3's and
// vLLM's rotary code. Interleaved pairs: elements 2i and 2i + 1 turn by position * inv_i.
//   f_i = theta^(2i/d)    dim(rho) = d * ln(M0 / (2 pi rho)) / (2 ln theta)
//   low = max(floor(dim(beta_fast)), 0)    high = min(ceil(dim(beta_slow)), d - 1), plus 0.001 when equal to low
//   t_i = clamp((i - low) / (high - low), 0, 1)    inv_i = t_i / (s f_i) + (1 - t_i) / f_i
//   m(a) = 1 for s <= 1, else 0.1 a ln(s) + 1
#ifndef K3_RUNTIME_ROPE_H
#define K3_RUNTIME_ROPE_H

#include <stdint.h>

#include "formats/dspark_model.h"

// low and high of the ramp, for d = rope_dim.
void k3_rope_ramp(const struct k3_rope *rope, uint64_t rope_dim, double *low, double *high);
// inv_i, i < rope_dim / 2.
double k3_rope_inv_freq(const struct k3_rope *rope, uint64_t rope_dim, uint64_t i);
// Factor of every cos and sin: m(mscale) / m(mscale_all_dim).
double k3_rope_amplitude(const struct k3_rope *rope);
// m(mscale_all_dim)^2 / sqrt(head_dim), head_dim the whole width of a query before absorption (nope + rope).
double k3_rope_softmax_scale(const struct k3_rope *rope, uint64_t head_dim);

// What a backend needs. The angle is a float product of position and inv_freq, rounded to float, as in the reference's FP32 table; cos and sin are
// those of that angle, times the amplitude, in FP32.
struct k3_rope_table {
  const float *inv_freq;  // [n_pairs], backend memory
  uint64_t n_pairs;
  float amplitude;
};

#endif
