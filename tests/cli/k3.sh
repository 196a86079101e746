# Shared by the command line tests of the drafter: sourced, not run. Gives $work (removed on exit), a sharded tiny drafter in $work/draft with its target
# in $work/target, and helpers. Files are changed with sed and dd only: the replaced names have the same length, so headers stay well formed.
set -u
[ -x "${K3PACK:-}" ] || { echo "no program at ${K3PACK:-\$K3PACK}"; exit 77; }
work=$(mktemp -d)
trap 'chmod -R u+w "$work" 2>/dev/null; rm -rf "$work"' EXIT INT TERM
failed=0

complain() {
  echo "FAILED: $*"
  failed=$((failed + 1))
}

# finish: the last line of a test script.
finish() {
  [ "$failed" = 0 ] || { echo "$failed complaints"; exit 1; }
  echo "all right"
  exit 0
}

# expect CODE COMMAND...: runs it quietly; output is in $work/stdout and $work/stderr.
expect() {
  wanted=$1
  shift
  "$@" >"$work/stdout" 2>"$work/stderr"
  code=$?
  [ "$code" = "$wanted" ] || complain "exit $code instead of $wanted: $* : $(head -c 400 "$work/stderr")"
}

# said PATTERN COMPLAINT: the messages of the last command, put on one line, match the pattern.
said() {
  tr '\n' ' ' <"$work/stderr" | grep -q -- "$1" || complain "$2: $(head -c 600 "$work/stderr")"
}

# flip FILE BYTE: inverts the lowest bit of one byte.
flip() {
  value=$(od -An -tu1 -j "$2" -N 1 "$1" | tr -d ' ')
  printf "\\$(printf %03o $((value ^ 1)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

size_of() {
  wc -c <"$1" | tr -d ' '
}

# rules: the rule ids of error level in the JSON of the last command, sorted, each once, on one line.
rules() {
  awk '/"severity": "error"/ { e = 1 } /"severity": "(warning|info)"/ { e = 0 }
       /"rule": "/ { r = $0; sub(/.*"rule": "/, "", r); sub(/".*/, "", r); rule = r }
       /^    }/ { if (e && rule != "") print rule; e = 0; rule = "" }' "$work/stdout" | sort -u | tr '\n' ' ' | sed 's/ $//'
}

"$K3PACK" synth "$work/draft" --preset tiny --shards 3 --quiet || exit 1
"$K3PACK" synth "$work/target" --preset tiny-target --quiet || exit 1
