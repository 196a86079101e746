// The decoder layers' steps on the CPU, by file.
#ifndef K3_RUNTIME_CPU_MOE_H
#define K3_RUNTIME_CPU_MOE_H

#include "runtime/cpu/cpu.h"
#include "runtime/moe_steps.h"

#define K3_CPU_MOE_STEP(step) enum k3_status k3_cpu_##step(struct k3_exec *exec, const struct k3_##step *p, struct k3_error *err);
K3_MOE_STEPS(K3_CPU_MOE_STEP)
#undef K3_CPU_MOE_STEP

// dst = x / sqrt(mean(x^2) + eps) * (1 + w), rounded once; dst may be src.
void k3_cpu_gemma_norm(const struct k3_exec *exec, const float *src, const struct k3_vector *weight, float eps, float *dst);

#endif
