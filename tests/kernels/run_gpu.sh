#!/bin/sh
# The CUDA backend on the GPUs of this machine: run_gpu.sh BUILD. Exit 77 without a GPU.
set -u
build=$1
failed=0
n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$n" = 0 ]; then
  echo "test-gpu: no GPU here (nvidia-smi lists none)" >&2
  exit 77
fi
export K3PACK_CUDA_PLUGIN="$PWD/$build/libk3pack_cuda.so" K3_TEST_MAX_TP="$n"
echo "== $n GPUs"
"$build/gpu_test_steps" || failed=1
"$build/gpu_test_forward" || failed=1
export K3_TEST_MAX_TP=1
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -n "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    "$sanitizer" --tool $tool --error-exitcode 1 "$build/gpu_test_steps" || failed=1
    "$sanitizer" --tool $tool --error-exitcode 1 "$build/gpu_test_forward" f32 "bf16 plain" "nvfp4-divide plain" || failed=1
  done
else
  echo "test-gpu: compute-sanitizer is not installed: memcheck and racecheck did not run" >&2
fi
sh tests/kernels/golden.sh "$build" "$n" || failed=1
exit $failed
