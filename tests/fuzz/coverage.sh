# The committed corpus (under 2 MB) covers at least 95% of each parser's lines: replays the corpus of every fuzz target, its files as they are, in a
# coverage build (its folder is $1) and fails when a file that the target says it covers (a line "// covers: FILE ..." at its top) has less than 95% of
# its lines executed. Each target counts alone. GCOV names the gcov of the compiler, when it is not `gcov`.
set -u
build=$1
failed=0
# Files of formats/ that no target covers, because they read no input.
writers="formats/json_write.c formats/safetensors_write.c formats/manifest_names.c formats/quant_config_write.c"

bytes=$(find tests/fuzz/corpus -type f -exec wc -c {} + | awk '$2 != "total" { sum += $1 } END { print sum + 0 }')
echo "corpus: $bytes bytes"
[ "$bytes" -lt 2000000 ] || { echo "corpus: 2 MB and more (make fuzz-merge keeps what covers something)"; failed=1; }

for file in formats/*.c; do
  case " $writers " in *" $file "*) continue ;; esac
  grep -q "^// covers:.* $file\( \|\$\)" tests/fuzz/fuzz_*.c || { echo "$file: no fuzz target covers this parser"; failed=1; }
done

for source in tests/fuzz/fuzz_*.c; do
  target=$(basename "$source" .c)
  target=${target#fuzz_}
  files=$(sed -n '1,6s|^// covers: ||p' "$source")
  [ -n "$files" ] || { echo "$target: $source does not say what it covers"; failed=1; continue; }
  find "$build" -name '*.gcda' -exec rm -f {} +
  "$build/fuzz/replay_$target" --whole "tests/fuzz/corpus/$target" >/dev/null || { echo "$target: the replay failed"; failed=1; continue; }
  for file in $files; do
    percent=$("${GCOV:-gcov}" -n -o "$build/$(dirname "$file")" "$build/${file%.c}.o" 2>/dev/null |
              awk -v want="File '$file'" '$0 == want { found = 1; next } found && /^Lines executed:/ { sub(/.*:/, ""); sub(/%.*/, ""); print; exit }')
    echo "$target: $file: ${percent:-none}% of lines"
    awk -v percent="${percent:-0}" 'BEGIN { exit !(percent >= 95) }' || { echo "$target: $file: FAILED, 95% are needed"; failed=1; }
  done
done
[ "$failed" = 0 ]
