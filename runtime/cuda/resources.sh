#!/bin/sh
# resources.sh LOG...: what ptxas said of every kernel, one line each; exit 1 when one spills. Kernels that may, with the reason, would be listed here:
# there are none.
set -u
cat "$@" | awk '
  /Compiling entry function/ { split($0, part, "\047"); kernel = part[2]; arch = part[4] }
  /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
  /Used [0-9]+ registers/ {
    shared = 0
    for (i = 2; i <= NF; i++) if ($i ~ /^smem/) shared = $(i - 2)
    for (i = 1; i <= NF; i++) if ($i == "Used") registers = $(i + 1)
    printf "%-8s %4d registers %6d bytes shared %5d stack %5d spilled  %s\n", arch, registers, shared, stack, stores + loads, kernel
    if (stores + loads > 0) bad++
    n++
  }
  END {
    printf "%d kernels, %d spill\n", n, bad
    exit bad > 0 || n == 0
  }'
