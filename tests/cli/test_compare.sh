#!/bin/sh
# `compare`: an image with itself, a quantised drafter against a re-enactment in float64, real acceptance, refusals.
set -u
command -v python3 >/dev/null || { echo "no python3: figures NOT re-enacted"; exit 77; }
here=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder" || exit 1
failed=0
fail() { echo "FAILED: $*"; failed=1; }
oracle() { python3 "$here/tests/python/compare_oracle.py" "$@" || fail "compare_oracle.py $*"; }

"$K3PACK" synth draft --preset tiny --quiet
"$K3PACK" synth target --preset tiny-target --quiet
python3 "$here/tests/python/write_scenario.py" draft/config.json scenario 6 || fail "no scenario"
oracle add-targets scenario with-targets draft/config.json
"$K3PACK" convert draft -o a.k3p --target target --quiet
"$K3PACK" convert draft -o b.k3p --target target --quant nvfp4 --quiet
"$K3PACK" convert draft -o c.k3p --target target --quant fp8 --quiet

# An image with itself: overlap 1 and KL 0, exactly, in every slot.
"$K3PACK" compare a.k3p a.k3p --input with-targets --json >self.json || fail "compare with itself"
python3 - <<'PY' || fail "an image against itself: $(cat self.json)"
import json
told = json.load(open("self.json"))
for entry in told["slots"] + [told["total"]]:
    assert entry["kl"] == 0 and entry["overlap"] == 1 and entry["agreement"] == 1 and entry["confidence_shift"] == 0, entry
    assert entry["acceptance_a"] == entry["acceptance_b"]
assert told["identity_a"] == told["identity_b"]
PY

# Against the re-enactment, with and without what the target says; the number of threads does not show.
for image in a b c; do "$K3PACK" run $image.k3p --input scenario -o $image.run --emit all --quiet; done
for scenario in scenario with-targets; do
  for image in b c; do
    "$K3PACK" compare a.k3p $image.k3p --input $scenario --json --threads 1 >one.json || fail "compare $image"
    "$K3PACK" compare a.k3p $image.k3p --input $scenario --json --threads 3 >three.json
    cmp one.json three.json || fail "$image: the number of threads shows"
    [ $image = b ] && oracle check one.json $scenario draft a.run $image.run
  done
done
# Fewer bits cost more.
"$K3PACK" compare a.k3p b.k3p --input scenario --json >b.json
"$K3PACK" compare a.k3p c.k3p --input scenario --json >c.json
python3 -c 'import json; b, c = (json.load(open(f))["total"] for f in ("b.json", "c.json")); assert c["overlap"] > b["overlap"] and c["kl"] < b["kl"] and abs(b["acceptance_change_at_most"] + b["overlap"] - 1) < 1e-12' ||
  fail "FP8 is worse than NVFP4"

# One image relabelled into both dialects and packed again drafts the same: with power-of-two second scales nothing is rounded on the way.
"$K3PACK" convert draft -o p.k3p --target target --quant nvfp4 --scale-mode pow2 --quiet
for format in compressed-tensors modelopt; do
  "$K3PACK" export p.k3p -o again-$format --format $format --quiet && "$K3PACK" convert again-$format -o again.k3p --target target --quiet --force || fail "$format"
  "$K3PACK" compare p.k3p again.k3p --input scenario --json >again.json
  python3 -c 'import json; t = json.load(open("again.json"))["total"]; assert t["kl"] == 0 and t["overlap"] == 1, t' || fail "$format drafts otherwise"
done

# The table: a line a slot, the total, the worst requests, and what the figures bound.
"$K3PACK" compare a.k3p b.k3p --input scenario >table || fail "the table"
[ "$(grep -c '^ *[1-7all]* .*%' table)" = 8 ] || fail "not a line for each slot: $(cat table)"
grep -q '^worst requests by overlap: ' table && grep -q 'changes by at most 1 - overlap' table || fail "the table's end: $(cat table)"
"$K3PACK" compare a.k3p b.k3p --input with-targets >table
grep -q 'accept A' table && grep -q 'tokens accepted of a block of 7: ' table && ! grep -q 'at most' table || fail "acceptance in the table: $(cat table)"

# Refusals.
expect() {
  code=$1 text=$2
  shift 2
  "$@" >out 2>err
  got=$?
  [ $got = "$code" ] || fail "exit $got instead of $code: $* ($(cat err))"
  grep -qF -- "$text" err || fail "\"$text\" is not in: $(cat err)"
}
expect 2 "--input" "$K3PACK" compare a.k3p b.k3p
expect 4 "nowhere.k3p" "$K3PACK" compare a.k3p nowhere.k3p --input scenario
expect 3 "" "$K3PACK" compare a.k3p b.k3p --input draft/config.json
exit $failed
