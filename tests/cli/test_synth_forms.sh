#!/bin/sh
# Every preset of synth in every scheme: what it writes is JSON to Python and to us, ids lie in the vocabulary, `check` finds nothing, `convert`
# plans it; what it cannot write is refused and leaves nothing. Small presets hold weights, those of published geometry are holes.
set -u
python=${K3PACK_PYTHON:-python3}
"$python" -c '' 2>/dev/null || { echo "no $python: what synth writes NOT read by another JSON reader"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
bad=0
complain() {
  echo "test_synth_forms: $*" >&2
  bad=1
}
cat >"$work/read_all.py" <<'EOF'
import json, pathlib, sys
def no_twins(pairs):
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        sys.exit(f"a key twice among {names[:9]}")
    return dict(pairs)
def ids(node, vocab):
    for key, value in node.items():
        if isinstance(value, dict):
            ids(value, value.get("vocab_size", vocab))
        elif key.endswith("token_id") and vocab and not 0 <= value < vocab:
            sys.exit(f"{key} is {value} of {vocab} ids")
for folder in sys.argv[1:]:
    files = sorted(pathlib.Path(folder).glob("*.json"))
    if not any(path.name == "config.json" for path in files):
        sys.exit(f"{folder}: no config.json")
    for path in files:
        try:
            content = json.loads(path.read_text(), object_pairs_hook=no_twins)
        except ValueError as error:
            sys.exit(f"{path}: {error}")
        if path.name == "config.json":
            ids(content, content.get("vocab_size") or content.get("text_config", {}).get("vocab_size"))
EOF
names=$("$K3PACK" synth 2>/dev/null | sed 's/ .*//')
small=$(echo "$names" | grep -e tiny -e small)
[ "$(echo "$small" | wc -l)" -ge 20 ] || complain "synth lists only: $names"

# check takes a target's few tensors for an incomplete checkpoint, which they are: only its JSON is held to be readable.
clean() {  # folder, preset
  case $2 in *-target) return 0 ;; esac
  "$K3PACK" check "$1" >"$work/out" 2>"$work/err" || complain "$2: check says no: $(cat "$work/err")"
  "$K3PACK" convert "$1" --dry-run >"$work/out" 2>"$work/err" || complain "$2: convert --dry-run: $(cat "$work/err")"
}

for preset in $small; do
  for quant in none fp8 fp8-tensor fp8-block mxfp8 nvfp4 mxfp4; do
    for dialect in compressed-tensors modelopt deepseek; do
      [ $quant = none ] && [ $dialect != compressed-tensors ] && continue
      case $preset in k3-dspark-small*) sparse=--sparse ;; *) sparse= ;; esac
      folder=$work/$preset.$quant.$dialect
      "$K3PACK" synth "$folder" --preset "$preset" --quant $quant --dialect $dialect $sparse --quiet 2>"$work/err"
      case $?$quant in
        0*) [ -n "$sparse" ] || clean "$folder" "$preset" ;;
        2none) complain "$preset: $(cat "$work/err")" ;;
        2*) [ -e "$folder" ] && complain "$preset --quant $quant --dialect $dialect: refused, and left $folder" ;;
        *) complain "$preset --quant $quant --dialect $dialect: $(cat "$work/err")" ;;
      esac
    done
  done
  # Our own reader on every JSON of the checkpoint, the tensors aside.
  for folder in "$work/$preset".*; do
    "$K3PACK" check "$folder" --depth headers >/dev/null 2>"$work/err"
    grep -q CFG19 "$work/err" && complain "$folder: $(cat "$work/err")"
  done
  "$python" "$work/read_all.py" "$work/$preset".* 2>"$work/err" || complain "$(cat "$work/err")"
  rm -rf "$work/$preset".*
done

# A mixture of experts in a form that nobody published: the message names those that there are.
"$K3PACK" synth "$work/none" --preset m3-tiny --quant fp8 2>"$work/err" && complain "m3-tiny --quant fp8 is written"
grep -q 'm3-tiny-mxfp8, .*m3-tiny-mxfp4' "$work/err" || complain "the forms are not named: $(cat "$work/err")"

# Published geometry, headers only; the release build alone has the time.
if [ "${K3PACK_BUILD##*/}" = release ]; then
  for preset in minimax-m3 minimax-m3-mxfp8 minimax-m3-nvfp4 minimax-m3-mxfp4 deepseek-v3.2; do
    "$K3PACK" synth "$work/full" --preset $preset --quiet || complain "$preset: synth fails"
    "$K3PACK" check "$work/full" --depth headers >"$work/out" 2>"$work/err" || complain "$preset: $(cat "$work/err")"
    "$K3PACK" convert "$work/full" --dry-run >"$work/out" 2>"$work/err" || complain "$preset: convert --dry-run: $(cat "$work/err")"
    "$python" "$work/read_all.py" "$work/full" 2>"$work/err" || complain "$(cat "$work/err")"
    rm -rf "$work/full"
  done
fi
exit $bad
