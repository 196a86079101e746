// CPU features and counts.
#ifndef K3_BASE_CPU_H
#define K3_BASE_CPU_H

enum k3_simd { K3_SIMD_SCALAR, K3_SIMD_AVX2, K3_SIMD_AVX512 };

// Best instruction set of this machine, read once. AVX2 means AVX2 + FMA + F16C; AVX512 means F + BW + DQ + VL on top. The environment variable
// K3PACK_SIMD=scalar|avx2|avx512 may lower it, never raise it, so that tests reach every path.
enum k3_simd k3_cpu_simd(void);
const char *k3_simd_name(enum k3_simd simd);  // "scalar", "avx2", "avx512"; static storage
// CPUs this process may run on, at least 1 (affinity mask).
int k3_cpu_count(void);

#endif
