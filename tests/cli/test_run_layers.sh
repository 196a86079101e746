#!/bin/sh
# `run --layers`: synthetic MiniMax-M3 and DeepSeek-V3.2 in their published forms, converted and run, against the float64 re-enactment on weights that
# are decoded independently; ranks, ranges, taps, and what is refused.
set -u
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import numpy' 2>/dev/null || { echo "$python has no numpy: decoder layers NOT compared with float64"; exit 77; }
check="$python tests/python/layers_check.py"
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
layers() {  # image, layers, states, output, more...
  image=$1 range=$2 states=$3 output=$4
  shift 4
  "$K3PACK" run "$image" --layers "$range" --input "$states" -o "$output" --force --quiet "$@"
}
make() {  # preset, dtype -> $work/<preset>, .k3p
  rm -rf "$work/$1"
  "$K3PACK" synth "$work/$1" --preset "$1" --dtype "$2" --quiet && "$K3PACK" convert "$work/$1" -o "$work/$1.k3p" --force --quiet || fail "make $1"
}

$check states "$work/m3" 64 8,3,1 && $check states "$work/v32" 96 8,3,1 && $check states "$work/m3.bf16" 64 8,3,1 BF16 &&
  $check states "$work/v32.bf16" 96 8,3,1 BF16 || fail "states"

# "each layer kind equals ... (float64; F32 within 1e-5), quantised forms equal it on dequantised weights": every form, all
# layers, each kind of layer alone; a prediction block behind the layers.
for c in "m3-tiny m3 3" "m3-tiny-native m3 3" "m3-tiny-mxfp8 m3 3" "m3-tiny-nvfp4 m3 3" "m3-tiny-mxfp4 m3 3" "v32-tiny v32 2" "v32-tiny-128 v32 2"; do
  set -- $c
  make "$1" f32
  for range in "0 $3" "0 0" "1 1"; do
    first=${range% *} last=${range#* }
    layers "$work/$1.k3p" "$first..$last" "$work/$2" "$work/result" || fail "$1 $range"
    $check compare "$work/$1" "$work/$2" "$work/result" "$first" "$last" >"$work/text" || fail "$1, layers $range: $(cat "$work/text")"
  done
done
make m3-tiny-mtp f32
for tp in 1 2 4; do
  layers "$work/m3-tiny-mtp.k3p" 4 "$work/m3" "$work/result" --tp $tp || fail "m3-tiny-mtp, tp $tp"
  # What a prediction block adds is read by no norm: that sum is complete at once.
  [ $tp = 1 ] || "$K3PACK" run "$work/m3-tiny-mtp.k3p" --layers 4 --input "$work/m3" -o "$work/result" --force --tp $tp 2>/dev/null |
    grep -q ': 1 sums deferred into norms, 1 at once$' || fail "the reductions of a prediction block"
  $check compare "$work/m3-tiny-mtp" "$work/m3" "$work/result" 4 4 >"$work/text" || fail "m3-tiny-mtp, tp $tp: $(cat "$work/text")"
done
layers "$work/v32-tiny.k3p" 3 "$work/v32" "$work/result" || fail "v32-tiny, block"
$check compare "$work/v32-tiny" "$work/v32" "$work/result" 3 3 >"$work/text" || fail "v32-tiny, block: $(cat "$work/text")"

# The comparison tells another model's result.
layers "$work/m3-tiny.k3p" 1..2 "$work/m3" "$work/result"
$check compare "$work/m3-tiny" "$work/m3" "$work/result" 0 1 >/dev/null && fail "the comparison accepts other layers"

# 2.6 #14: every norm takes the config's eps, those of the latents and of the heads too.
for c in "m3-tiny m3 3" "v32-tiny v32 2"; do
  set -- $c
  make "$1" f32
  cp -r "$work/$1" "$work/eps" && sed 's/"rms_norm_eps": 1e-0*6/"rms_norm_eps": 0.25/' "$work/$1/config.json" >"$work/eps/config.json"
  grep -q '"rms_norm_eps": 0.25' "$work/eps/config.json" || fail "no eps in the config of $1"
  "$K3PACK" convert "$work/eps" -o "$work/eps.k3p" --force --quiet && layers "$work/eps.k3p" "0..$3" "$work/$2" "$work/result" || fail "$1, eps"
  $check compare "$work/eps" "$work/$2" "$work/result" 0 "$3" >"$work/text" || fail "$1, eps: $(cat "$work/text")"
  $check compare "$work/$1" "$work/$2" "$work/result" 0 "$3" >/dev/null && fail "$1: another eps goes unnoticed"
  rm -rf "$work/eps"
done

# BF16 models, as published; a plain one and quantised ones.
for c in "m3-tiny m3 1" "m3-tiny-mxfp8 m3 1" "v32-tiny v32 1"; do
  set -- $c
  make "$1" bf16
  layers "$work/$1.k3p" "0..$3" "$work/$2.bf16" "$work/result" || fail "$1 bf16"
  $check compare "$work/$1" "$work/$2.bf16" "$work/result" 0 "$3" >"$work/text" || fail "$1 bf16: $(cat "$work/text")"
done

# MXFP4 experts in Quark's spelling on ranks: the experts' 32 columns are one scale's, so that two ranks need them whole.
layers "$work/m3-tiny-mxfp4.k3p" 0..3 "$work/m3" "$work/rows" --tp 2 --sequence-parallel || fail "m3-tiny-mxfp4, tp 2"
$check compare "$work/m3-tiny-mxfp4" "$work/m3" "$work/rows" 0 3 >"$work/text" || fail "m3-tiny-mxfp4, tp 2: $(cat "$work/text")"

# Ranks, from a whole image and from a folder that was cut for them; taps from before the first layer to behind the last.
make m3-tiny f32
layers "$work/m3-tiny.k3p" 0..3 "$work/m3" "$work/one" --taps 0,1,2,3,4 --threads 1 || fail "taps"
$check compare "$work/m3-tiny" "$work/m3" "$work/one" 0 3 >"$work/text" || fail "taps: $(cat "$work/text")"
for tp in 2 4 8; do
  layers "$work/m3-tiny.k3p" 0..3 "$work/m3" "$work/tp$tp" --taps 0,1,2,3,4 --tp $tp || fail "tp $tp"
  $check same "$work/tp$tp" "$work/one" 5e-6 || fail "tp $tp differs"
done
"$K3PACK" convert "$work/m3-tiny" -o "$work/m3-tiny-2" --tp 2 --quiet || fail "convert --tp"
layers "$work/m3-tiny-2" 0..3 "$work/m3" "$work/folder" --taps 0,1,2,3,4 --tp 2 || fail "folder"
cmp "$work/folder" "$work/tp2" || fail "a folder's files and slices of a whole image differ"
# More ranks than key heads: as many files hold the same one.
"$K3PACK" convert "$work/m3-tiny" -o "$work/m3-tiny-8" --tp 8 --quiet || fail "convert --tp 8"
"$K3PACK" verify "$work/m3-tiny-8" >/dev/null || fail "verify of 8 ranks"
layers "$work/m3-tiny-8" 0..3 "$work/m3" "$work/folder" --taps 0,1,2,3,4 --tp 8 || fail "folder of 8"
cmp "$work/folder" "$work/tp8" || fail "a folder of 8 ranks and slices of a whole image differ"
layers "$work/m3-tiny.k3p" 0..3 "$work/m3" "$work/three" --taps 0,1,2,3,4 --threads 3 && cmp "$work/one" "$work/three" || fail "the number of threads shows"
"$K3PACK" run "$work/m3-tiny.k3p" --layers 0..3 --input "$work/m3" -o "$work/x" --tp 2 >"$work/text" 2>/dev/null
grep -q '^layers 0..3 on 12 rows, 2 ranks: 8 sums deferred into norms, 0 at once$' "$work/text" || fail "the summary: $(cat "$work/text")"

# Experts on each rank's own rows, 12 rows and 11, which neither 2 nor 4 nor 8 divides; a prediction block; the plan decides what becomes of the option.
$check states "$work/odd" 64 8,3
layers "$work/m3-tiny.k3p" 0..3 "$work/odd" "$work/one.odd" --taps 0,1,2,3,4 || fail "11 rows"
for tp in 1 2 4 8; do
  layers "$work/m3-tiny.k3p" 0..3 "$work/m3" "$work/rows" --taps 0,1,2,3,4 --tp $tp --sequence-parallel && $check same "$work/rows" "$work/one" 5e-6 ||
    fail "own rows, tp $tp: not as one rank"
  layers "$work/m3-tiny.k3p" 0..3 "$work/odd" "$work/rows" --taps 0,1,2,3,4 --tp $tp --sequence-parallel && $check same "$work/rows" "$work/one.odd" 5e-6 ||
    fail "own rows, 11 of them, tp $tp: not as one rank"
  layers "$work/m3-tiny-mtp.k3p" 4 "$work/m3" "$work/rows" --tp $tp --sequence-parallel || fail "own rows, a prediction block, tp $tp"
  $check compare "$work/m3-tiny-mtp" "$work/m3" "$work/rows" 4 4 >"$work/text" || fail "own rows, a prediction block, tp $tp: $(cat "$work/text")"
done
# Experts whose 32 columns cannot be cut between two ranks' scales run whole on own rows.
make m3-tiny-mxfp8 f32
expect 5 "PCK05" "$K3PACK" run "$work/m3-tiny-mxfp8.k3p" --layers 1..3 --input "$work/m3" -o "$work/new" --tp 2
layers "$work/m3-tiny-mxfp8.k3p" 1..3 "$work/m3" "$work/rows" --tp 2 --sequence-parallel || fail "own rows, MXFP8"
$check compare "$work/m3-tiny-mxfp8" "$work/m3" "$work/rows" 1 3 >"$work/text" || fail "own rows, MXFP8: $(cat "$work/text")"
summary() {  # tp, what must follow
  "$K3PACK" run "$work/m3-tiny.k3p" --layers 0..3 --input "$work/m3" -o "$work/x" --force --tp "$1" --sequence-parallel 2>/dev/null >"$work/text"
  grep -q "$2\$" "$work/text" || fail "own rows, tp $1: $(cat "$work/text")"
}
summary 2 ': 2 sums deferred into norms, 0 at once, 3 scattered by rows and gathered 3 times'
summary 1 ': 0 sums deferred into norms, 0 at once'
"$K3PACK" run "$work/m3-tiny.k3p" --layers 0..3 --input "$work/m3" -o "$work/x" --force --tp 4 --sequence-parallel --json >"$work/text" 2>/dev/null
grep -q '"reductions_scattered": *3' "$work/text" && grep -q '"gathers": *3' "$work/text" || fail "own rows, --json: $(cat "$work/text")"
expect 5 "are needed whole" "$K3PACK" run "$work/m3-tiny-2" --layers 0..3 --input "$work/m3" -o "$work/new" --tp 2 --sequence-parallel
layers "$work/m3-tiny-2" 0..0 "$work/m3" "$work/rows" --tp 2 --sequence-parallel || fail "a dense layer of a folder has no experts to be cut"

# Lengths at the border of dense attention: 8 visible keys run, 9 and 17 are refused with the reason.
for c in "m3-tiny 64" "v32-tiny 96"; do
  set -- $c
  for length in 9 17; do
    $check states "$work/long" "$2" $length
    expect 5 "dense attention is exact up to 8" "$K3PACK" run "$work/$1.k3p" --layers 0..1 --input "$work/long" -o "$work/new"
  done
done
[ -e "$work/new" ] && fail "a refused run left an output"
$check states "$work/long" 64 17
layers "$work/m3-tiny.k3p" 0 "$work/long" "$work/result" || fail "a dense layer has no border"
$check compare "$work/m3-tiny" "$work/long" "$work/result" 0 0 >"$work/text" || fail "17 rows of a dense layer: $(cat "$work/text")"

# Refusals.
expect 2 "--layers takes I..J" "$K3PACK" run "$work/m3-tiny.k3p" --layers 3..1 --input "$work/m3" -o "$work/new"
expect 2 "--taps takes different numbers" "$K3PACK" run "$work/m3-tiny.k3p" --layers 0 --taps 1,1 --input "$work/m3" -o "$work/new"
expect 2 "--taps goes with --layers" "$K3PACK" run "$work/m3-tiny.k3p" --taps 1 --input "$work/m3" -o "$work/new"
expect 2 "--sequence-parallel goes with --layers" "$K3PACK" run "$work/m3-tiny.k3p" --sequence-parallel --input "$work/m3" -o "$work/new"
expect 2 "neither --emit nor --block" "$K3PACK" run "$work/m3-tiny.k3p" --layers 0 --emit logits --input "$work/m3" -o "$work/new"
expect 2 "the model has 4" "$K3PACK" run "$work/m3-tiny.k3p" --layers 2..4 --input "$work/m3" -o "$work/new"
expect 2 "a tap after 3 layers" "$K3PACK" run "$work/m3-tiny.k3p" --layers 0..1 --taps 3 --input "$work/m3" -o "$work/new"
expect 3 "96 columns where the model has 64" "$K3PACK" run "$work/m3-tiny.k3p" --layers 0 --input "$work/v32" -o "$work/new"
expect 3 "the tensor is missing" "$K3PACK" run "$work/m3-tiny.k3p" --layers 0 --input "$work/result" -o "$work/new"
expect 5 "PCK05" "$K3PACK" run "$work/v32-tiny.k3p" --layers 0..1 --tp 4 --input "$work/v32" -o "$work/new"
make k3-tiny bf16
expect 5 "there are no decoder layers for the family \"kimi-k3\"" "$K3PACK" run "$work/k3-tiny.k3p" --layers 0 --input "$work/m3" -o "$work/new"
exit $failed
