#!/bin/sh
# "The image opens in Python's safetensors and equals the sources there, tensor by tensor": for one file, shards, other spellings, a root and F32.
set -u
K=$K3PACK
"$K" convert --help >/dev/null 2>&1 || { echo "this build has no convert"; exit 77; }
"$K3PACK_PYTHON" -c 'import numpy, safetensors' 2>/dev/null || { echo "$K3PACK_PYTHON has no numpy and safetensors: images NOT read by another library"; exit 77; }
checker=$PWD/tests/python/image_equals_sources.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work" || exit 1
bad=0
"$K" synth target --preset tiny-target -q || exit 1
compare() { # NAME SYNTH-OPTIONS... : with and without a target
  name=$1
  shift
  "$K" synth "$name" "$@" -q && "$K" convert "$name" -o "$name.k3p" -q && "$K3PACK_PYTHON" "$checker" "$name" "$name.k3p" || bad=1
  "$K" convert "$name" --target target -o "$name-target.k3p" -q && "$K3PACK_PYTHON" "$checker" "$name" "$name-target.k3p" target || bad=1
}
compare one --preset tiny
compare three --preset tiny --shards 3
compare aliases --preset tiny-aliases
compare taps --preset tiny-tap-norms --root model.
compare causal --preset tiny-causal --shards 2

# The checker sees a difference: one flipped bit of a weight.
cp one.k3p flipped.k3p
size=$(stat -c %s one.k3p)
offset=$("$K" inspect one.k3p --json | sed -n '/"name": "model.layers.1.mlp.gate_up_proj.weight"/,/offset/s/.*"offset": \([0-9]*\).*/\1/p' | head -n 1)
[ "$offset" -lt "$size" ] || { echo "no offset"; exit 1; }
printf '\377' | dd of=flipped.k3p bs=1 seek=$((offset + 1001)) conv=notrunc 2>/dev/null
"$K3PACK_PYTHON" "$checker" one flipped.k3p 2>/dev/null && { echo "a flipped byte went unnoticed"; bad=1; }
exit "$bad"
