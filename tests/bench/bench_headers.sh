#!/bin/sh
# Half a million tensors in 96 shards plus an index (sparse files): time and peak memory of `check --depth headers`, of the plan, and whether time is
# linear. Floor: the bytes of the headers and the index read once (cat). Peak memory is VmHWM as /usr/bin/time reports it.
#   usage: bench_headers.sh [build/release]     RUNS=5 WHERE=/dev/shm
set -eu
program=$(cd "${1:-build/release}" && pwd)/k3pack
runs=${RUNS:-5}
work=$(mktemp -d -p "${WHERE:-/dev/shm}")
trap 'rm -rf "$work"' EXIT INT TERM
command -v /usr/bin/time >/dev/null || { echo "SKIPPED: /usr/bin/time is not installed (package time)"; exit 77; }
"$program" synth "$work/many" --preset many-tensors --quiet
n=$("$program" check "$work/many" --recipe generic --depth headers --json | sed -n 's/.*"tensors": \([0-9]*\).*/\1/p')

# measure NAME COMMAND...: minimum of the seconds and maximum of the peak KiB over the runs.
measure() {
  name=$1
  shift
  run=0
  : >"$work/log"
  while [ "$run" -lt "$runs" ]; do
    /usr/bin/time -a -o "$work/log" -f '%e %M' "$@" >/dev/null
    run=$((run + 1))
  done
  awk -v name="$name" -v n="$n" 'NR == 1 || $1 < s { s = $1 } $2 > m { m = $2 } END {
    printf "%-24s %6.2f s  %7.1f MB  (%d tensors, %.0f bytes a tensor)\n", name, s, m * 1024 / 1e6, n, m * 1024 / n }' "$work/log"
}

measure "check --depth headers" "$program" check "$work/many" --recipe generic --depth headers --quiet
measure "convert --dry-run" "$program" convert "$work/many" --recipe generic --dry-run --quiet
measure "cat of the index" cat "$work/many/model.safetensors.index.json"
