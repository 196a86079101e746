// What the simulator's two halves share: engine.cc runs a grid, runtime.cc stands in for the CUDA runtime's C functions.
#pragma once
#include <cuda_runtime.h>
#undef cudaLaunchKernelEx

#include "sanitizers.h"

namespace cuda_sim {

// Settings, from the environment:
//   SIM_SEED     0 (default): threads start in order, blocks ascend. Else threads start shuffled by it, and odd seeds run blocks backwards
//   SIM_LAZY     1: a stream's work runs at the first synchronisation, not when it is queued
//   SIM_TIMEOUT  seconds until a wait counts as hung; default 10
struct Settings {
  unsigned long seed;
  bool lazy;
  double timeout_seconds;
};
const Settings &settings();

// Runs every block, one after another, on the calling OS thread. The error text of a failed grid goes to stderr. `overlaps`: it was launched so that
// it may begin before the kernel before has ended.
cudaError_t run_grid(const cudaLaunchConfig_t &config, bool overlaps, const void *kernel, const std::function<void()> &body);

// Work of a stream that is no kernel.
cudaError_t queue(cudaStream_t stream, std::function<cudaError_t()> work);

}  // namespace cuda_sim
