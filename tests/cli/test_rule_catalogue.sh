# Each rule has a fixture with its exact list of findings and a twin that is clean of it, or a written reason (fixtures/reasons.txt); check finds nothing in
# any clean fixture and exits 0.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 1; }
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the faults of whole models with"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0 n=0 n_clean=0

complain() {
  echo "$1"
  failed=$((failed + 1))
}

# "RULE severity subject" of every finding of a --json text on stdin; see test_reject.sh.
findings_of() {
  awk '
    /^  "findings": \[/ { inside = 1; next }
    inside && /^  \]/ { inside = 0 }
    !inside { next }
    /^    \{/ { rule = severity = file = tensor = "" }
    /^      "[a-z]+": "/ {
      key = $0; sub(/^      "/, "", key); sub(/".*/, "", key)
      value = $0; sub(/^      "[a-z]+": "/, "", value); sub(/",?$/, "", value)
      if (key == "rule") rule = value
      if (key == "severity") severity = value
      if (key == "file") file = value
      if (key == "tensor") tensor = value
      if (key == "remedy" && value == "") bad = 1
    }
    /^    \}/ {
      if (tensor == "") { tensor = file; sub(/.*\//, "", tensor) }
      print rule, severity, tensor
    }' | LC_ALL=C sort
}

# make_input STEPS: $work/made/input (and target) as the steps of a fixture say, see fixtures/gen/gen_rules.py. Checkpoints that synth makes are kept.
make_input() {
  rm -rf "$work/made"
  mkdir -p "$work/made" "$work/synth"
  while read -r verb rest; do
    case $verb in
      synth | target)
        kept="$work/synth/$(printf '%s' "$rest" | tr ' /' '__')"
        [ -d "$kept" ] || "$K3PACK" synth "$kept" $rest || return 1
        if [ "$verb" = synth ]; then cp -R "$kept" "$work/made/input"; else cp -R "$kept" "$work/made/target"; fi
        ;;
      edit)
        # A value may hold spaces: verb, name, and the rest as one word, or as two names.
        edit=${rest%% *}
        rest=${rest#* }
        case $edit in
          poke) set -- ${rest} ;;
          *) case $rest in *" "*) set -- "${rest%% *}" "${rest#* }" ;; *) set -- "$rest" ;; esac ;;
        esac
        "$python" tests/python/edit_checkpoint.py "$work/made/input" "$edit" "$@" || return 1
        ;;
      image) "$K3PACK" convert "$work/made/input" -o "$work/made/image" --quiet 2>/dev/null && rm -r "$work/made/input" && mv "$work/made/image" "$work/made/input" || return 1 ;;
      manifest) "$python" tests/python/edit_image.py "$work/made/input" $rest || return 1 ;;
      file) printf '%s' "${rest#* }" >"$work/made/input/${rest%% *}" ;;
      *) echo "no step $verb"; return 1 ;;
    esac
  done <"$1"
}

for expect in fixtures/rules/*/expect; do
  folder=${expect%/expect}
  name=${folder##*/}
  n=$((n + 1))
  input=$folder/input at=$folder
  if [ -e "$folder/make" ]; then
    make_input "$folder/make" || { complain "$name: its input cannot be made"; continue; }
    at=$work/made input=$work/made/input
  fi
  # The findings are the same with one thread, with more, and with plain loops instead of SIMD.
  for how in "1 scalar" "3 avx512"; do
    K3PACK_SIMD=${how#* } "$K3PACK" check $(sed "s|@|$at|" "$folder/options") --threads "${how% *}" --json "$input" >"$work/json" 2>"$work/log"
    code=$?
    findings_of <"$work/json" >"$work/found"
    LC_ALL=C sort "$expect" >"$work/expect"
    cmp -s "$work/found" "$work/expect" || complain "$name ($how): expected and found differ:
$(diff "$work/expect" "$work/found")"
    wanted=0
    grep -q '^[A-Z0-9]* error ' "$expect" && wanted=1
    # Warnings fail a release pipeline.
    grep -q -- --strict "$folder/options" && [ -s "$expect" ] && wanted=1
    [ "$code" = "$wanted" ] || complain "$name: check exits with $code instead of $wanted: $(head -c 300 "$work/log")"
  done
  if [ -s "$expect" ]; then
    twin=$(cat "$folder/twin" 2>/dev/null)
    [ -n "$twin" ] && [ -e "fixtures/rules/$twin/expect" ] || { complain "$name has no twin"; continue; }
    rule=$(printf '%s' "${name%%-*}" | tr a-z A-Z)
    [ ! -s "fixtures/rules/$twin/expect" ] || complain "$name: its twin $twin is not clean"
    grep -q "^$rule " "$expect" || complain "$name does not break the rule it is named after"
  else
    n_clean=$((n_clean + 1))
    case $name in *-clean) : ;; *) complain "$name is clean and not named so" ;; esac
  fi
done

# Rules that fixtures/reject breaks have their twins there (tests/cli/test_reject.sh runs them).
for expect in fixtures/reject/*/expect; do
  [ -s "$expect" ] || continue
  twin=$(cat "${expect%/expect}/twin" 2>/dev/null)
  [ -n "$twin" ] && [ -e "fixtures/reject/$twin/expect" ] && [ ! -s "fixtures/reject/$twin/expect" ] || complain "${expect%/expect} has no clean twin"
done

"$K3PACK" check --rules >"$work/rules" || complain "--rules fails"
grep -oE '^[A-Z][A-Z0-9]+  ' "$work/rules" | tr -d ' ' >"$work/ids"
[ "$(wc -l <"$work/ids")" -ge 130 ] || complain "--rules lists $(wc -l <"$work/ids") rules"
for id in $(cat "$work/ids"); do
  fixture=no
  cat fixtures/rules/*/expect fixtures/reject/*/expect | grep -q "^$id " && fixture=yes
  reason=$(grep "^$id " fixtures/reasons.txt)
  case $fixture,$reason in
    yes,) ;;
    no,) complain "$id has neither a fixture nor a written reason" ;;
    yes,*) complain "$id has a fixture; its reason is out of date" ;;
    *)
      test=$(printf '%s' "$reason" | sed 's/^[A-Z0-9]* //; s/:.*//')
      [ "$test" = - ] || grep -qwE "(K3_)?$id" "$test" || complain "$id: $test does not name it"
      ;;
  esac
done
for id in $(sed -n 's/^\([A-Z][A-Z0-9]*\) .*/\1/p' fixtures/reasons.txt); do
  grep -qx "$id" "$work/ids" || complain "fixtures/reasons.txt names $id, which is no rule"
done

# Every rule says why it matters and what to do, also as JSON.
[ "$(grep -c '^  why: .' "$work/rules")" = "$(wc -l <"$work/ids")" ] || complain "a rule does not say why it matters"
[ "$(grep -c '^  what to do: .' "$work/rules")" = "$(wc -l <"$work/ids")" ] || complain "a rule does not say what to do"
"$K3PACK" check --rules --json >"$work/json" || complain "--rules --json fails"
[ "$(grep -c '"why": "[^"]' "$work/json")" = "$(wc -l <"$work/ids")" ] || complain "--rules --json is not whole"
"$K3PACK" check --rules FUS02 | grep -q 'info, for vllm error' || complain "--rules does not tell the engines apart"
"$K3PACK" check --rules NOPE9 >/dev/null 2>&1 && complain "--rules takes an id that is none"

# --only and --ignore.
"$K3PACK" check fixtures/rules/ten15/input --recipe generic --ignore TEN15 --json >"$work/json" 2>/dev/null
[ "$(findings_of <"$work/json")" = "CFG03 error layers.0.input_norm.weight" ] || complain "--ignore: $(findings_of <"$work/json")"
"$K3PACK" check fixtures/rules/ten15/input --recipe generic --ignore TEN15 --ignore CFG03 >/dev/null 2>&1 || complain "--ignore of all findings does not exit 0"
"$K3PACK" check fixtures/rules/ten15/input --recipe generic --only CFG03 --json >"$work/json" 2>/dev/null
[ "$(findings_of <"$work/json")" = "CFG03 error layers.0.input_norm.weight" ] || complain "--only: $(findings_of <"$work/json")"
"$K3PACK" check fixtures/rules/ten15/input --only BAD1 >/dev/null 2>&1
[ $? = 2 ] || complain "--only with no rule is not wrong usage"

# --baseline says which mistake fits.
while IFS='|' read -r name words; do
  "$K3PACK" check $(sed "s|@|fixtures/rules/$name|" "fixtures/rules/$name/options") "fixtures/rules/$name/input" 2>&1 >/dev/null | grep -q "it fits $words" ||
    complain "$name does not say \"it fits $words\""
done <<END
val07-nibbles|with the two nibbles of every byte swapped
val07-inverted|with the reciprocal of the second scale
val07-interleaved|with the rows of the two halves interleaved
val07-transposed|with the grid of scales transposed
END

[ "$n" -ge 90 ] && [ "$n_clean" -ge 14 ] || complain "only $n fixtures, $n_clean clean"
echo "$n fixtures, $(wc -l <"$work/ids") rules, $failed complaints"
[ "$failed" = 0 ]
