# Replays the corpus of every fuzz target in a coverage build (its folder is $1) and fails when a file that the target says it covers (a line
# "// covers: FILE ..." at its top) has less than 95% of its lines executed. Each target counts alone.
set -u
build=$1
failed=0
for source in tests/fuzz/fuzz_*.c; do
  target=$(basename "$source" .c)
  target=${target#fuzz_}
  files=$(sed -n '1,6s|^// covers: ||p' "$source")
  [ -n "$files" ] || { echo "$target: $source does not say what it covers"; failed=1; continue; }
  find "$build" -name '*.gcda' -exec rm -f {} +
  "$build/fuzz/replay_$target" fixtures/reject "tests/fuzz/corpus/$target" >/dev/null || { echo "$target: the replay failed"; failed=1; continue; }
  for file in $files; do
    percent=$(gcov -n -o "$build/$(dirname "$file")" "$build/${file%.c}.o" 2>/dev/null |
              awk -v want="File '$file'" '$0 == want { found = 1; next } found && /^Lines executed:/ { sub(/.*:/, ""); sub(/%.*/, ""); print; exit }')
    echo "$target: $file: ${percent:-none}% of lines"
    awk -v percent="${percent:-0}" 'BEGIN { exit !(percent >= 95) }' || failed=1
  done
done
[ "$failed" = 0 ]
