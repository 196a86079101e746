#include "quant/kernels.h"

static _Atomic int chosen_level = -1;  // -1: not asked for

enum k3_simd k3_quant_set_simd(enum k3_simd level) {
  enum k3_simd best = k3_cpu_simd();
  chosen_level = (int)(level < best ? level : best);
  return (enum k3_simd)chosen_level;
}

const struct k3_quant_kernels *k3_quant_kernels(void) {
  return &K3_QUANT_KERNELS_SCALAR;
}
