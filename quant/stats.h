// What is measured about weights before and after encoding.
#ifndef K3_QUANT_STATS_H
#define K3_QUANT_STATS_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

// Largest magnitude of n elements of BF16, F16 or F32; 0 for n = 0; NaN if one is NaN. Independent of order and instruction set, so partial results
// combine with k3_amax_merge in any order.
float k3_quant_amax(enum k3_dtype dtype, const void *src, size_t n);
float k3_amax_merge(float a, float b);

// Signal and noise of encoded weights. Zero-initialise; partial sums of parts are merged in a fixed order by the caller, for results that do not
// depend on the number of threads.
struct k3_snr {
  double signal, noise;  // sums of squares of the original, and of decoded - original
  double max_error;      // largest |decoded - original|
  uint64_t n_elems;
};
// src: n originals; decoded: the same n after a round trip, second scale included.
void k3_snr_add(struct k3_snr *snr, enum k3_dtype dtype, const void *src, const float *decoded, size_t n);
void k3_snr_merge(struct k3_snr *snr, const struct k3_snr *part);
// 10 log10(signal / noise); +Inf without noise.
double k3_snr_decibel(const struct k3_snr *snr);
// sqrt(noise / signal); 0 without noise, +Inf with noise and no signal.
double k3_snr_relative_rmse(const struct k3_snr *snr);

// How far the blocks of 16 of a tensor lie below the amax that its second scale was made for. A block scale is 448 * amax_b / amax; with
// ratio = amax / amax_b it is a normal E4M3 number up to 28672 (full precision), subnormal up to 229376 (1 to 3 significant bits; some kernels
// flush it), 2^-9 below 458752, and beyond that zero: the block is lost.
struct k3_nvfp4_window {
  uint64_t n_blocks, n_zero, n_full, n_subnormal, n_lowest, n_lost;  // the last five add up to n_blocks
  float smallest_amax;                                               // of a block that is not zero; 0 if there is none
};
// Adds n_blocks blocks of 16 elements. `amax` is that of everything that shares the second scale.
void k3_nvfp4_window_add(struct k3_nvfp4_window *window, float amax, enum k3_dtype dtype, const void *src, size_t n_blocks);
void k3_nvfp4_window_merge(struct k3_nvfp4_window *window, const struct k3_nvfp4_window *part);

#endif
