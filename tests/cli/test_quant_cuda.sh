#!/bin/sh
# Our single-value conversions against the host functions of the CUDA headers. Needs the headers, not a GPU; CUDA_HOME may say where they are.
set -eu
for home in "${CUDA_HOME:-}" /usr/local/cuda /usr/lib/cuda /opt/cuda; do
  [ -n "$home" ] && [ -e "$home/include/cuda_fp4.h" ] && [ -e "$home/include/cuda_fp8.h" ] && break
  home=
done
if [ -z "$home" ]; then
  echo "no CUDA headers with cuda_fp4.h and cuda_fp8.h (looked in CUDA_HOME, /usr/local/cuda, /usr/lib/cuda, /opt/cuda): NOT compared with CUDA"
  exit 77
fi
# The headers set off warnings of their own, so ours are off; and the sources are compiled here, whatever flags the library was built with.
program=$K3PACK_BUILD/tests/quant_cuda_host
mkdir -p "$(dirname "$program")"
${CC:-cc} -std=c17 -D_GNU_SOURCE -O2 -ffp-contract=off -I. -isystem "$home/include" -o "$program" tests/kernels/quant_cuda_host.c quant/number.c base/*.c \
  -lcrypto -lz -lm -pthread
"$program"
