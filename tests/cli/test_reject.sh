# Every fixture of fixtures/reject: check prints exactly the expected findings and exits 1 for an error, 0 for a clean twin or a mere warning; convert
# refuses an error with 3, leaves the folder as it was, and takes the rest. Fixtures with options of their own carry them in a file "options" (for both
# verbs) or "check-options"; "convert-code" holds the exit code of convert where the findings do not give it.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0 n=0

complain() {
  echo "$1"
  failed=$((failed + 1))
}

# "RULE severity subject" of every finding of a --json text on stdin; the subject is the tensor, else the base name of the file. The writer puts one
# member on a line.
findings_of() {
  awk '
    /^  "findings": \[/ { inside = 1; next }
    inside && /^  \]/ { inside = 0 }
    !inside { next }
    /^    \{/ { rule = severity = file = tensor = "" }
    /^      "[a-z]+": "/ {
      key = $0; sub(/^      "/, "", key); sub(/".*/, "", key)
      value = $0; sub(/^      "[a-z]+": "/, "", value); sub(/",?$/, "", value)
      gsub(/\\\\/, "\001", value); gsub(/\\"/, "\"", value); gsub(/\001/, "\\", value)
      if (key == "rule") rule = value
      if (key == "severity") severity = value
      if (key == "file") file = value
      if (key == "tensor") tensor = value
    }
    /^    \}/ {
      if (tensor == "") { tensor = file; sub(/.*\//, "", tensor) }
      print rule, severity, tensor
    }' | LC_ALL=C sort
}

for expect in fixtures/reject/*/expect; do
  folder=$(dirname "$expect")
  name=$(basename "$folder")
  input=$folder/input
  [ -e "$input" ] || input=$folder/input.safetensors
  [ -e "$input" ] || { complain "$name: no input"; continue; }
  n=$((n + 1))
  options="--recipe generic"
  [ -e "$folder/options" ] && options=$(cat "$folder/options")

  depth="--depth headers"
  [ -e "$folder/check-options" ] && depth=$(cat "$folder/check-options")
  "$K3PACK" check $depth $options --json "$input" >"$work/json" 2>"$work/log"
  code=$?
  findings_of <"$work/json" >"$work/found"
  LC_ALL=C sort "$expect" >"$work/expect"
  cmp -s "$work/found" "$work/expect" || complain "$name: expected and found differ:
$(diff "$work/expect" "$work/found")"
  wanted=0
  grep -q '^[A-Z0-9]* error ' "$expect" && wanted=1
  [ "$code" = "$wanted" ] || complain "$name: check exits with $code instead of $wanted: $(head -c 300 "$work/log")"

  [ "$wanted" = 1 ] && wanted=3
  # An error for another engine is none for convert, and the other way round.
  [ -e "$folder/convert-code" ] && wanted=$(cat "$folder/convert-code")
  mkdir "$work/out"
  before=$(find "$folder" -print | LC_ALL=C sort)
  "$K3PACK" convert $options "$input" -o "$work/out/image" >"$work/log" 2>&1
  code=$?
  case "$code" in
    "$wanted") ;;
    5) grep -q CFG21 "$expect" || complain "$name: convert exits with 5 instead of $wanted" ;;
    *) complain "$name: convert exits with $code instead of $wanted: $(head -c 300 "$work/log")" ;;
  esac
  [ "$before" = "$(find "$folder" -print | LC_ALL=C sort)" ] || complain "$name: convert changed the source folder"
  if [ "$wanted" = 3 ] && [ -n "$(ls -A "$work/out")" ]; then
    complain "$name: a refused conversion left $(ls -A "$work/out")"
  fi
  rm -rf "$work/out"
done

[ "$n" -ge 120 ] || complain "only $n fixtures were found"
echo "$n fixtures, $failed complaints"
[ "$failed" = 0 ]
