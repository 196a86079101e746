#!/bin/sh
# Our single-value conversions against the host functions of the CUDA headers. Needs the headers, not a GPU.
set -eu
if ! headers=$(sh tests/cuda_headers.sh); then
  echo "no CUDA headers (tests/cuda_headers.sh says where they are looked for): NOT compared with CUDA"
  exit 77
fi
# The headers set off warnings of their own, so ours are off; and the sources are compiled here, whatever flags the library was built with.
program=$K3PACK_BUILD/tests/quant_cuda_host
mkdir -p "$(dirname "$program")"
${CC:-cc} -std=c17 -D_GNU_SOURCE -O2 -ffp-contract=off -I. -isystem "$headers" -o "$program" tests/kernels/quant_cuda_host.c quant/number.c base/*.c \
  -lcrypto -lz -lm -pthread
"$program"
