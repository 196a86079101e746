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
sh tests/cuda_headers.sh >/dev/null ||
  { echo "there are no CUDA headers (tests/cuda_headers.sh says where they are looked for): the CUDA backend was NOT tested"; exit 77; }
exec make -s -j"$(nproc)" test-sim
