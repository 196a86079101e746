#!/bin/sh
# synth, inspect and diff on checkpoints: what they print, and their answers.
set -u
K=$K3PACK
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work" || exit 1
bad=0
expect() { # CODE WORDS...
  want=$1
  shift
  "$K" "$@" >out 2>err
  got=$?
  [ "$got" = "$want" ] || { echo "k3pack $*: exit $got, wanted $want"; cat err; bad=1; }
}
says() { grep -qF -- "$2" "$1" || { echo "std$1 lacks: $2"; cat "$1"; bad=1; }; }

# Every preset gives a checkpoint that opens, with its own number of files (sparse where it is large).
"$K" synth >presets || bad=1
while read -r preset rest; do
  expect 0 synth "p-$preset" --preset "$preset" --sparse
  expect 0 inspect "p-$preset" --quiet
  rm -rf "p-$preset"
done <presets

# "synth --preset k3-dspark writes the published geometry: 68 tensors, a header of exactly 7,520 bytes, a file of exactly 7,124,633,450 bytes"
expect 0 synth full --preset k3-dspark --sparse --json
says out '"tensors": 68'
says out '"files_nbytes": 7124633450'
[ "$(stat -c %s full/model.safetensors)" = 7124633450 ] || { echo "wrong file size"; bad=1; }
[ "$(head -c 8 full/model.safetensors | od -An -tu8 | tr -d ' ')" = 7520 ] || { echo "wrong header length"; bad=1; }
[ "$(stat -c %s full/config.json)" = 1251 ] || { echo "wrong config"; bad=1; }
rm -rf full

# An existing checkpoint is left alone, or replaced whole: no file of the old one stays.
expect 0 synth a --preset tiny --shards 3
before=$(cat a/* | cksum)
expect 2 synth a --preset tiny --seed 1
says err OUT01
[ "$(cat a/* | cksum)" = "$before" ] || { echo "a refused synth changed the folder"; bad=1; }
expect 0 synth a --preset tiny --seed 1 --force
[ "$(ls a | tr '\n' ' ')" = "config.json model.safetensors " ] || { echo "left over: $(ls a)"; bad=1; }
: >a-file
expect 4 synth a-file/b --preset tiny
ro=$(id -u)
if [ "$ro" != 0 ]; then
  mkdir readonly && chmod a-w readonly
  expect 4 synth readonly --preset tiny
  [ -z "$(ls -A readonly)" ] || { echo "a read-only folder has $(ls -A readonly)"; bad=1; }
fi

# The same weights in one file and in three: equal. Another seed: different, with exit 1.
expect 0 synth one --preset tiny
expect 0 synth three --preset tiny --shards 3
expect 0 diff one three
says out "equal: 44 tensors in A, 44 in B; 44 equal to the bit, 0 different"
expect 1 diff one a --quiet
[ ! -s out ] || { echo "diff --quiet printed"; bad=1; }
expect 0 diff one a --tolerance 10
says out "within the tolerance"

# One changed byte: named with its place and both values.
cp -r one changed
printf '\001' | dd of=changed/model.safetensors bs=1 seek=200000 conv=notrunc 2>/dev/null
expect 1 diff one changed
says out "layers.1.mlp.gate_proj.weight: BF16 [128, 64]: 1 of 8192 elements differ, first [57, 11]: "
says out "43 equal to the bit, 1 different"
expect 1 diff one changed --json
says out '"different": 1'
expect 0 synth wide --preset tiny --dtype f32
expect 1 diff one wide --json
says out '"kind": "dtype"'

# A tensor that only one side has.
expect 0 synth named --preset tiny-aliases --shards 1
expect 1 diff one named
says out "context_proj.weight: only in A (BF16 [64, 192])"
says out "fc.weight: only in B"

# inspect: list, pattern, one tensor, JSON.
expect 0 inspect three
says out "model-00001-of-00003.safetensors"
says out "44 tensors in 3 files"
expect 0 inspect three '*layers.1.mlp*'
[ "$(grep -c weight out)" = 3 ] || { echo "the pattern found other tensors"; cat out; bad=1; }
expect 0 inspect three --tensor layers.0.input_layernorm.weight --count 4
says out "BF16 [64], 64 elements, 128 B"
says out "NaN 0, Inf 0"
expect 2 inspect three --tensor layers.0.input_layrnorm.weight
says err "the nearest name is layers.0.input_layernorm.weight"
expect 0 inspect one --json
says out '"name": "markov_head.markov_w2.weight"'
says out '"torchspec_version": "0.1.0"'
exit "$bad"
