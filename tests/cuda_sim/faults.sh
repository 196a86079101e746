#!/bin/sh
# Every fault of tests/cuda_sim/faults must fail its test: the patch is applied to a copy of the source, which takes the place of the shipped one in the
# plug-in of the build that is said to find it. Run from the project's root after `make sim-builds`.
#   faults.sh [FAULT...]   default: all
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

run_one() {  # patch: one line of result
  patch=$1
  name=$(basename "$patch" .patch)
  source=$(sed -n 's/^source: //p' "$patch") build=$(sed -n 's/^build: //p' "$patch") cases=$(sed -n 's/^cases: //p' "$patch")
  settings=$(sed -n 's/^settings: //p' "$patch") test=$(sed -n 's/^test: //p' "$patch")
  folder=$work/$name
  mkdir -p "$folder/runtime/cuda"
  cp runtime/cuda/* "$folder/runtime/cuda/"
  if ! (cd "$folder" && GIT_DIR=/nowhere git apply "$OLDPWD/$patch") >"$folder/log" 2>&1 ||
    ! make -s sim-fault FAULT_BUILD="$build" FAULT_SOURCE="$source" FAULT_FOLDER="$folder" >>"$folder/log" 2>&1; then
    echo "FAILED  $name cannot be built"
    cat "$folder/log"
    return
  fi
  # A fault that hangs ends after a second; TSan and MSan end at the first report.
  # shellcheck disable=SC2086
  if env K3PACK_CUDA_PLUGIN="$folder/libk3pack_cuda.so" SIM_TIMEOUT=1 K3_TEST_MAX_TP=2 TSAN_OPTIONS=halt_on_error=1 $settings \
    timeout 120 "build/cuda_sim/$build/${test:-test_forward}" "$cases" >"$folder/out" 2>&1; then
    echo "FAILED  $name is not found by $build"
  else
    echo "found   $name ($build: $(grep -m 1 -oE 'SUMMARY: [A-Za-z]*: [a-z-]*( [a-z]*)?|deadlock|a wait timed out|differs by|other drafts|FAILED +[a-z_]+,.*: within [0-9.e+inf-]*|copies under way|without waiting|[0-9]* captures|unspecified launch failure' "$folder/out"))"
  fi
  rm -rf "$folder"
}

if [ "${1:-}" = --one ]; then
  run_one "$2"
  exit
fi
[ $# -gt 0 ] || set -- tests/cuda_sim/faults/*.patch
printf '%s\n' "$@" | xargs -n 1 -P "$(nproc)" sh "$0" --one | tee "$work/results"
n=$(grep -c '^found' "$work/results")
echo "$n of $# faults found"
[ "$n" = $# ]
