#!/bin/sh
# resources.sh LOG...: what ptxas said of every kernel, one line each; exit 1 when one spills, or is not there for both devices. Kernels that may spill,
# with the reason, would be listed here: there are none.
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
    n[arch]++
  }
  END {
    printf "%d kernels for sm_90a, %d for sm_100a, %d spill\n", n["sm_90a"], n["sm_100a"], bad
    exit bad > 0 || !n["sm_90a"] || n["sm_90a"] != n["sm_100a"]
  }'
