#!/bin/sh
# Times `check --depth values` with THREADS threads against one `cat` of the same file to /dev/null, interleaved, minimum of RUNS runs: a plain read
# is the floor of a pass over every byte. Bars: 0.7 of cat for BF16, 0.35 for NVFP4 (whose codes are counted too), 2 threads. Everything lies in WHERE, a
# memory file system, so that no disk is measured.
#   usage: bench_check.sh [build/release]     RUNS=15 PRESET=k3-dspark WHERE=/dev/shm THREADS=2
set -eu
program=$(cd "${1:-build/release}" && pwd)/k3pack
runs=${RUNS:-15} preset=${PRESET:-k3-dspark} threads=${THREADS:-2}
work=$(mktemp -d -p "${WHERE:-/dev/shm}")
trap 'rm -rf "$work"' EXIT INT TERM

# time_one NAME COMMAND...: keeps the minimum in $work/NAME.ns.
time_one() {
  name=$1
  shift
  from=$(date +%s%N)
  "$@" >/dev/null 2>"$work/messages" || { cat "$work/messages"; exit 1; }
  to=$(date +%s%N)
  old=$(cat "$work/$name.ns" 2>/dev/null || echo 0)
  if [ "$old" = 0 ] || [ $((to - from)) -lt "$old" ]; then echo $((to - from)) >"$work/$name.ns"; fi
}

for quant in none nvfp4; do
  "$program" synth "$work/src" --preset "$preset" --quant "$quant" --shards 1 --force --quiet
  nbytes=$(wc -c <"$work/src/model.safetensors" | tr -d ' ')
  rm -f "$work"/*.ns
  run=0
  while [ "$run" -lt "$runs" ]; do
    time_one cat sh -c 'cat "$1" >/dev/null' sh "$work/src/model.safetensors"
    time_one headers "$program" check "$work/src" --depth headers --quiet
    time_one scales "$program" check "$work/src" --depth scales --threads "$threads" --quiet
    time_one values "$program" check "$work/src" --depth values --threads "$threads" --quiet
    run=$((run + 1))
  done
  echo "$preset --quant $quant, $nbytes bytes, $threads threads, minimum of $runs interleaved runs, $(nproc) CPUs"
  bar=0.7
  [ "$quant" = nvfp4 ] && bar=0.35
  for name in cat headers scales values; do
    awk -v n="$name" -v t="$(cat "$work/$name.ns")" -v b="$(cat "$work/cat.ns")" -v bytes="$nbytes" -v bar="$bar" 'BEGIN {
      printf "%-8s %8.4f s  %6.2f GB/s  %6.2f of the rate of cat%s\n", n, t / 1e9, bytes / t, b / t, n == "values" ? " (bar " bar ")" : "" }'
  done
done
