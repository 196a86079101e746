#!/bin/sh
# Times the converter against cp, openssl dgst and Python's safetensors on the same bytes, interleaved, and prints the minimum of RUNS runs of each and the
# ratio to cp. Everything lies in WHERE, a memory file system, so that no disk is measured. Floor of a conversion: every byte read once and written once
# (cp), and hashed once (openssl dgst on one core).
#   usage: bench_convert.sh [build/release]     RUNS=15 PRESET=k3-dspark-target WHERE=/dev/shm THREADS=2
set -eu
program=$(cd "${1:-build/release}" && pwd)/k3pack
runs=${RUNS:-15} preset=${PRESET:-k3-dspark-target} threads=${THREADS:-2}
work=$(mktemp -d -p "${WHERE:-/dev/shm}")
trap 'rm -rf "$work"' EXIT INT TERM
"$program" synth "$work/src" --preset "$preset" --shards 1 --quiet
nbytes=$(wc -c <"$work/src/model.safetensors" | tr -d ' ')
python=${PYTHON:-}
for candidate in build/venv/bin/python python3; do
  [ -n "$python" ] || { "$candidate" -c 'import safetensors.numpy, ml_dtypes' 2>/dev/null && python=$candidate || :; }
done

# time_one NAME COMMAND...: keeps the minimum in $work/NAME.ns.
time_one() {
  name=$1
  shift
  rm -rf "$work/out"
  from=$(date +%s%N)
  "$@" >/dev/null
  to=$(date +%s%N)
  old=$(cat "$work/$name.ns" 2>/dev/null || echo 0)
  if [ "$old" = 0 ] || [ $((to - from)) -lt "$old" ]; then echo $((to - from)) >"$work/$name.ns"; fi
}

run=0
while [ "$run" -lt "$runs" ]; do
  time_one cp cp "$work/src/model.safetensors" "$work/out"
  time_one convert "$program" convert "$work/src" -o "$work/out" --recipe generic --threads "$threads" --quiet
  time_one convert-no-digests "$program" convert "$work/src" -o "$work/out" --recipe generic --no-digests --threads "$threads" --quiet
  time_one convert-crc "$program" convert "$work/src" -o "$work/out" --recipe generic --crc --threads "$threads" --quiet
  time_one openssl-dgst openssl dgst -sha256 "$work/src/model.safetensors"
  if [ -n "$python" ] && [ "$run" -lt 3 ]; then
    time_one python-safetensors "$python" -c 'import sys, ml_dtypes; from safetensors.numpy import load_file, save_file; save_file(load_file(sys.argv[1]), sys.argv[2])' \
      "$work/src/model.safetensors" "$work/out"
  fi
  run=$((run + 1))
done
"$program" convert "$work/src" -o "$work/image" --recipe generic --quiet
rm -f "$work/src/model.safetensors"
run=0
while [ "$run" -lt 3 ]; do
  time_one verify "$program" verify "$work/image" --threads "$threads" --quiet
  run=$((run + 1))
done

echo "$preset, $nbytes bytes, $threads threads, minimum of $runs interleaved runs (verify and Python: 3), $(nproc) CPUs"
base=$(cat "$work/cp.ns")
for name in cp convert convert-no-digests convert-crc openssl-dgst python-safetensors verify; do
  [ -e "$work/$name.ns" ] || { echo "$name: SKIPPED (no Python with safetensors and ml_dtypes)"; continue; }
  awk -v n="$name" -v t="$(cat "$work/$name.ns")" -v b="$base" -v bytes="$nbytes" \
    'BEGIN { printf "%-20s %7.3f s  %6.2f GB/s  %5.2f x cp\n", n, t / 1e9, bytes / t, t / b }'
done
