#!/bin/sh
# `run` and `bench` from the command line: golden drafts, outputs and their shapes, refusals with their exit codes.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}
expect() {  # exit code, text that stderr must hold, command...
  code=$1 text=$2
  shift 2
  "$@" >"$work/out" 2>"$work/err"
  got=$?
  [ $got = "$code" ] || fail "exit $got instead of $code: $* ($(cat "$work/err"))"
  grep -qF -- "$text" "$work/err" || fail "\"$text\" is not in: $(cat "$work/err")"
}

for c in tiny_f32 tiny_bf16; do
  "$K3PACK" convert fixtures/dspark/$c/draft --target fixtures/dspark/$c/target -o "$work/$c.k3p" --quiet || fail "convert $c"
  for threads in 1 3; do
    "$K3PACK" run "$work/$c.k3p" --input fixtures/dspark/$c/scenario.safetensors -o "$work/$c.$threads" --emit all --threads $threads >"$work/text.$threads" ||
      fail "run $c"
  done
  # Any thread count gives the same bits.
  cmp "$work/$c.1" "$work/$c.3" || fail "$c: the number of threads shows"
  python3 fixtures/gen/check_drafts.py fixtures/dspark/$c/golden.safetensors "$work/$c.1" fixtures/dspark/$c/scenario.safetensors || fail "$c is not golden"
done
image=$work/tiny_f32.k3p scenario=fixtures/dspark/tiny_f32/scenario.safetensors
grep -q '^request 0: anchor 21 at 0 -> 35 29 29 29 29, confidence 0\.410' "$work/text.1" || "$K3PACK" run "$image" --input $scenario -o "$work/x" >"$work/text"
grep -q '^request 0: anchor 21 at 0 -> 35 29 29 29 29, confidence 0\.410' "$work/text" || fail "the printed drafts: $(cat "$work/text")"
"$K3PACK" run "$image" --input $scenario -o "$work/default" --json >"$work/json" || fail "--json"
python3 - "$work/json" "$work/default" <<'PY' || fail "the JSON or the default outputs"
import json, struct, sys
told = json.load(open(sys.argv[1]))
assert told["requests"][0]["drafts"] == [35, 29, 29, 29, 29] and len(told["requests"]) == 4 and len(told["requests"][3]["confidence"]) == 5
data = open(sys.argv[2], "rb").read()
header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
assert set(header) - {"__metadata__"} == {"draft_ids", "confidence"}, header
PY

# Wrong usage.
expect 2 "--input IN is missing" "$K3PACK" run "$image" -o "$work/new"
expect 2 "-o OUT is missing" "$K3PACK" run "$image" --input $scenario
expect 2 'no output "drafts"' "$K3PACK" run "$image" --input $scenario -o "$work/new" --emit hidden,drafts
expect 2 "exists" "$K3PACK" run "$image" --input $scenario -o "$work/default"
cp "$image" "$work/copy.k3p"
expect 2 "one of the inputs" "$K3PACK" run "$work/copy.k3p" --input $scenario -o "$work/copy.k3p" --force
cmp "$image" "$work/copy.k3p" || fail "the input was touched"
expect 4 "no-such" "$K3PACK" run "$work/no-such" --input $scenario -o "$work/new"
expect 3 "" "$K3PACK" run fixtures/dspark/tiny_f32/draft/model.safetensors --input $scenario -o "$work/new"
expect 0 "blocks of 3 rows where the image was made for 5" "$K3PACK" run "$image" --input $scenario -o "$work/block" --block 3

# An image without embedding and head says what to pass to convert.
"$K3PACK" convert fixtures/dspark/tiny_f32/draft -o "$work/alone.k3p" --quiet
expect 3 "--target" "$K3PACK" run "$work/alone.k3p" --input $scenario -o "$work/new"

# Malformed scenarios: exit 3 naming request and tensor, no output.
break_scenario() {  # tensor, index, value
  python3 - $scenario "$work/broken" "$@" <<'PY'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
h = struct.unpack("<Q", data[:8])[0]
begin = json.loads(data[8:8 + h])[sys.argv[3]]["data_offsets"][0]
struct.pack_into("<q", data, 8 + h + begin + 8 * int(sys.argv[4]), int(sys.argv[5]))
open(sys.argv[2], "wb").write(data)
PY
}
break_scenario anchor_positions 1 2
expect 3 "positions: request 1: the context row of position 1 is missing" "$K3PACK" run "$image" --input "$work/broken" -o "$work/new"
break_scenario anchor_ids 2 48
expect 3 "anchor_ids: request 2" "$K3PACK" run "$image" --input "$work/broken" -o "$work/new"
break_scenario request_ids 0 4
expect 3 "request_ids: row 0 belongs to request 4" "$K3PACK" run "$image" --input "$work/broken" -o "$work/new"
break_scenario anchor_positions 0 1020
expect 3 "anchor_positions: request 0" "$K3PACK" run "$image" --input "$work/broken" -o "$work/new"
head -c 1000 $scenario >"$work/broken"
expect 3 "CNT0" "$K3PACK" run "$image" --input "$work/broken" -o "$work/new"
[ -e "$work/new" ] && fail "a failed run left an output"

# "An image with one flipped bit in the header or manifest is refused at open": bytes of the first page, and of the manifest behind it.
header=$(od -An -tu8 -N 8 "$image" | tr -d ' ')
for offset in 0 5 9 100 1000 $((header + 7)) $((header + 8)) $((header + 20)) $((header + 500)) $((header + 1000)); do
  cp "$image" "$work/flipped.k3p"
  byte=$(od -An -tu1 -j $offset -N 1 "$image" | tr -d ' ')
  # shellcheck disable=SC2059
  printf "\\$(printf %03o $((byte ^ 4)))" | dd of="$work/flipped.k3p" bs=1 seek=$offset conv=notrunc 2>/dev/null
  expect 3 "error" "$K3PACK" run "$work/flipped.k3p" --input $scenario -o "$work/new"
done

# No context rows at all, and no requests.
python3 - "$work/none" "$work/nobody" <<'PY'
import json, struct, sys
def write(path, ids, positions):
    spec = [("target_states", "F32", [0, 40], b""), ("positions", "I64", [0], b""), ("request_ids", "I64", [0], b""),
            ("anchor_ids", "I64", [len(ids)], struct.pack("<%dq" % len(ids), *ids)),
            ("anchor_positions", "I64", [len(ids)], struct.pack("<%dq" % len(ids), *positions))]
    header, at = {}, 0
    for name, dtype, shape, blob in spec:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(blob)]}
        at += len(blob)
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + b"".join(blob for *_, blob in spec))
write(sys.argv[1], [21], [0])
write(sys.argv[2], [], [])
PY
"$K3PACK" run "$image" --input "$work/none" -o "$work/none.out" | grep -q '21 at 0 -> 35 29 29 29 29' || fail "empty context"
"$K3PACK" run "$image" --input "$work/nobody" -o "$work/nobody.out" --emit all || fail "no requests"
[ -s "$work/nobody.out" ] || fail "no requests, no output"

"$K3PACK" bench "$image" --context 10 --requests 2 --runs 1 --quiet | grep -q '^  attend ' || fail "bench prints no steps"
"$K3PACK" bench "$image" --json --runs 1 | python3 -c 'import json, sys
told = json.load(sys.stdin)
assert {s["step"] for s in told["steps"]} >= {"combine", "context_insert", "latents", "attend", "mlp", "markov"} and told["draft_nbytes"] > 0' ||
  fail "bench --json"
expect 2 "beyond the model" "$K3PACK" bench "$image" --context 1020
exit $failed
