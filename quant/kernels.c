#include "quant/kernels.h"

static _Atomic int chosen_level = -1;  // -1: nobody asked for less than the machine has

enum k3_simd k3_quant_set_simd(enum k3_simd level) {
  enum k3_simd best = k3_cpu_simd();
  chosen_level = (int)(level < best ? level : best);
  return (enum k3_simd)chosen_level;
}

const struct k3_quant_kernels *k3_quant_kernels(void) {
#if defined(__x86_64__)
  int level = chosen_level;
  switch (level < 0 ? k3_cpu_simd() : (enum k3_simd)level) {
    case K3_SIMD_AVX512: return &K3_QUANT_KERNELS_AVX512;
    case K3_SIMD_AVX2: return &K3_QUANT_KERNELS_AVX2;
    default: break;
  }
#endif
  return &K3_QUANT_KERNELS_SCALAR;
}
