#include "quant/stats.h"

#include <math.h>

#include "quant/kernels.h"
#include "quant/number.h"

float k3_quant_amax(enum k3_dtype dtype, const void *src, size_t n) {
  return k3_f32_from_bits(k3_quant_kernels()->amax_bits(dtype, src, n));
}

// Magnitudes compare as integers, and NaN is above Inf.
float k3_amax_merge(float a, float b) {
  uint32_t a_bits = k3_f32_bits(a) & 0x7FFFFFFFu, b_bits = k3_f32_bits(b) & 0x7FFFFFFFu;
  return k3_f32_from_bits(a_bits > b_bits ? a_bits : b_bits);
}

// Four partial sums hide the latency of the additions; their number is part of the result.
void k3_snr_add(struct k3_snr *snr, enum k3_dtype dtype, const void *src, const float *decoded, size_t n) {
  enum { LANES = 4, CHUNK = 256 };
  double signal[LANES] = {0}, noise[LANES] = {0}, max_error[LANES] = {0};
  float original[CHUNK];
  for (size_t done = 0; done < n;) {
    size_t n_chunk = n - done < CHUNK ? n - done : CHUNK;
    k3_quant_kernels()->widen(dtype, (const char *)src + done * (k3_dtype_bits(dtype) / 8), n_chunk, original);
    for (size_t i = 0; i < n_chunk; i++) {
      double value = original[i], error = fabs((double)decoded[done + i] - value);
      signal[i % LANES] += value * value;
      noise[i % LANES] += error * error;
      max_error[i % LANES] = error > max_error[i % LANES] ? error : max_error[i % LANES];
    }
    done += n_chunk;
  }
  snr->signal += (signal[0] + signal[1]) + (signal[2] + signal[3]);
  snr->noise += (noise[0] + noise[1]) + (noise[2] + noise[3]);
  snr->max_error = fmax(snr->max_error, fmax(fmax(max_error[0], max_error[1]), fmax(max_error[2], max_error[3])));
  snr->n_elems += n;
}

void k3_snr_merge(struct k3_snr *snr, const struct k3_snr *part) {
  snr->signal += part->signal;
  snr->noise += part->noise;
  snr->max_error = fmax(snr->max_error, part->max_error);
  snr->n_elems += part->n_elems;
}

double k3_snr_decibel(const struct k3_snr *snr) {
  return snr->noise == 0 ? INFINITY : 10 * log10(snr->signal / snr->noise);
}

double k3_snr_relative_rmse(const struct k3_snr *snr) {
  return snr->noise == 0 ? 0 : sqrt(snr->noise / snr->signal);
}

void k3_nvfp4_window_add(struct k3_nvfp4_window *window, float amax, enum k3_dtype dtype, const void *src, size_t n_blocks) {
  for (size_t b = 0; b < n_blocks; b++) {
    float block_amax = k3_quant_amax(dtype, (const char *)src + 16 * b * (k3_dtype_bits(dtype) / 8), 16);
    double block = block_amax;  // products of an F32 and these constants are exact in F64
    window->n_blocks++;
    if (block_amax == 0)
      window->n_zero++;
    else if (amax >= 458752 * block)
      window->n_lost++;
    else if (amax > 229376 * block)
      window->n_lowest++;
    else if (amax > 28672 * block)
      window->n_subnormal++;
    else
      window->n_full++;
    if (block_amax > 0 && (window->smallest_amax == 0 || block_amax < window->smallest_amax))
      window->smallest_amax = block_amax;
  }
}

void k3_nvfp4_window_merge(struct k3_nvfp4_window *window, const struct k3_nvfp4_window *part) {
  window->n_blocks += part->n_blocks;
  window->n_zero += part->n_zero;
  window->n_full += part->n_full;
  window->n_subnormal += part->n_subnormal;
  window->n_lowest += part->n_lowest;
  window->n_lost += part->n_lost;
  if (part->smallest_amax > 0 && (window->smallest_amax == 0 || part->smallest_amax < window->smallest_amax))
    window->smallest_amax = part->smallest_amax;
}
