# Every fuzz target over its committed corpus and every fixture, without a fuzzing engine: whole, cut at every byte, and with every byte changed.
set -u
failed=0 n=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT INT TERM
for program in "$K3PACK_BUILD"/fuzz/replay_*; do
  [ -x "$program" ] || continue
  target=${program##*/replay_}
  [ -e "tests/fuzz/fuzz_$target.c" ] || continue  # a target that is gone
  n=$((n + 1))
  set -- fixtures/reject
  [ -d "tests/fuzz/corpus/$target" ] && set -- "$@" "tests/fuzz/corpus/$target"
  if "$program" "$@" >"$log" 2>&1; then
    echo "$target: $(tail -n 1 "$log")"
  else
    echo "$target: FAILED"
    tail -n 40 "$log"
    failed=$((failed + 1))
  fi
done
[ "$n" -gt 0 ] || { echo "no replay program in $K3PACK_BUILD/fuzz (make test builds them)"; exit 1; }
[ "$failed" = 0 ]
