#!/bin/sh
# The GPU benchmark as far as plain Python goes: bytes and floors against the published roofline, quantiles, verdicts, tables; every script compiles; and
# without a GPU the run says so. The re-enactments themselves run in `make test-peers`, which has PyTorch.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
PYTHONDONTWRITEBYTECODE=1 python3 tests/bench/gpu/test_figures.py || failed=1
for script in tests/bench/gpu/*.py; do
  python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read())' "$script" || { echo "FAILED: $script is no Python"; failed=1; }
done
# The structs that Python passes to the library are those of the header; a field too few is noticed.
layout() {
  python3 -c 'import sys; sys.path.insert(0, "tests/bench/gpu"); sys.dont_write_bytecode = True; import ours
if len(sys.argv) > 1: ours.STRUCTS = {"k3_context": ours.Draft}
print(ours.layout_in_c())' "$@" >"$work/layout.c" && ${CC:-cc} -std=c17 -D_GNU_SOURCE -I. -fsyntax-only "$work/layout.c" 2>"$work/log"
}
layout || { cat "$work/log"; echo "FAILED: tests/bench/gpu/ours.py and runtime/runtime.h differ"; failed=1; }
layout broken && { echo "FAILED: another struct is not noticed"; failed=1; }
# A formula that counts half a byte too few per 16 weights must be noticed.
cp -r tests/bench/gpu "$work/broken"
sed -i 's|0.5 + 1 / 16|0.5|' "$work/broken/figures.py"
python3 "$work/broken/test_figures.py" >"$work/log" && { echo "FAILED: wrong bytes are not noticed"; failed=1; }
if ! nvidia-smi -L >/dev/null 2>&1; then
  sh tests/bench/gpu/run.sh "$K3PACK_BUILD" 2>"$work/log"
  [ $? = 77 ] && grep -q "no GPU here" "$work/log" || { echo "FAILED: bench-gpu without a GPU: $(cat "$work/log")"; failed=1; }
fi
exit $failed
