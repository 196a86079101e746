#!/bin/sh
# The CUDA backend in the simulator (make test-sim). Once per suite: the simulator has builds of its own, so the other configurations leave it to the
# release build.
set -u
case "$K3PACK_BUILD" in
  */build/release) ;;
  *) echo "the simulator has builds of its own: it runs with the release build"; exit 77 ;;
esac
for tool in "${SIM_CLANG:-clang}" "${SIM_CLANG:-clang}++" git; do
  command -v "$tool" >/dev/null 2>&1 || { echo "$tool is not installed: the CUDA backend was NOT tested"; exit 77; }
done
[ -f "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime.h" ] || [ -f /usr/local/cuda/include/cuda_runtime.h ] ||
  { echo "CUDA's headers are not installed (CUDA_HOME, /usr/local/cuda): the CUDA backend was NOT tested"; exit 77; }
exec make -s -j"$(nproc)" test-sim
