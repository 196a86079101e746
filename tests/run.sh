#!/bin/sh
# Runs every test that needs no GPU against the build in $1 (build/<config>) and ends with one line "N passed, N failed, N skipped".
# A test is a cmocka program in $1/tests or a script tests/cli/*.sh (exit 0 passed, 77 skipped, anything else failed).
set -u
build=${1:-build/release}
passed=0 failed=0 skipped=0
export K3PACK="$PWD/$build/k3pack" K3PACK_BUILD="$PWD/$build"
# Tests that open files with other people's libraries: the environment that setup.sh made, or whatever python3 is there.
if [ -z "${K3PACK_PYTHON:-}" ]; then
  K3PACK_PYTHON=python3
  build/venv/bin/python -c 'import numpy, safetensors' 2>/dev/null && K3PACK_PYTHON=$PWD/build/venv/bin/python
fi
export K3PACK_PYTHON
log=$(mktemp)
trap 'rm -f "$log"' EXIT INT TERM

run_one() {  # name, command...
  name=$1
  shift
  "$@" >"$log" 2>&1 </dev/null
  code=$?
  case $code in
    0) passed=$((passed + 1)); echo "ok       $name" ;;
    77) skipped=$((skipped + 1)); echo "SKIPPED  $name: $(tail -n 1 "$log")" ;;
    *) failed=$((failed + 1)); echo "FAILED   $name (exit $code)"; cat "$log" ;;
  esac
}

run_one check_layers sh tests/check_layers.sh
for program in "$build"/tests/test_*; do
  case "$program" in *.d) continue ;; esac
  [ -x "$program" ] && run_one "unit/$(basename "$program")" "$program"
done
for script in tests/cli/test_*.sh; do
  [ -e "$script" ] && run_one "cli/$(basename "$script" .sh)" sh "$script"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
