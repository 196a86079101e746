#include "base/cpu.h"

#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

const char *k3_simd_name(enum k3_simd simd) {
  static const char *const names[] = {"scalar", "avx2", "avx512"};
  return names[simd];
}

#if defined(__x86_64__)
// clang before 16 does not know "f16c" in __builtin_cpu_supports.
static bool has_f16c(void) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

static enum k3_simd detect_simd(void) {
  enum k3_simd best = K3_SIMD_SCALAR;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    best = K3_SIMD_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      best = K3_SIMD_AVX512;
  }
#endif
  const char *wish = getenv("K3PACK_SIMD");
  for (enum k3_simd level = K3_SIMD_SCALAR; wish && level < best; level++) {
    if (strcmp(wish, k3_simd_name(level)) == 0)
      best = level;
  }
  return best;
}

enum k3_simd k3_cpu_simd(void) {
  static _Atomic int cached = -1;  // several threads may detect at once; they find the same
  if (cached < 0)
    cached = (int)detect_simd();
  return (enum k3_simd)cached;
}

int k3_cpu_count(void) {
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return n > 0 ? n : 1;
}
