#!/bin/sh
# "The image opens in Python's safetensors and equals the sources there, tensor by tensor": for one file, shards, other spellings, a root and F32.
set -u
K=$K3PACK
"$K" convert --help >/dev/null 2>&1 || { echo "this build has no convert"; exit 77; }
"$K3PACK_PYTHON" -c 'import numpy, safetensors' 2>/dev/null || { echo "$K3PACK_PYTHON has no numpy and safetensors: images NOT read by another library"; exit 77; }
checker=$PWD/tests/python/image_equals_sources.py
layout=$PWD/tests/python/image_layout.py
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

# The layout of images, checked from its description: alignment, order, pads, tables, seal, manifest, views at one stride.
for scheme in fp8 fp8-tensor fp8-block mxfp8 nvfp4 mxfp4; do
  "$K" synth "$scheme" --preset tiny --quant "$scheme" -q && "$K" convert "$scheme" -o "$scheme.k3p" --target target -q || bad=1
done
"$K" synth small --preset k3-dspark-small -q && "$K" convert small -o small.k3p --crc -q || bad=1 # several segments, tensors above 1 MiB
"$K" convert one -o plain.k3p --no-digests -q && "$K" convert one -o ranks --tp 2 -q || bad=1
"$K" synth experts --preset m3-tiny -q && "$K" convert experts -o experts.k3p -q || bad=1
rm -f flipped.k3p
"$K3PACK_PYTHON" "$layout" ./*.k3p ranks/*.safetensors || bad=1
# The layout checker sees what is off, and what it leaves whole it accepts.
"$K3PACK_PYTHON" "$layout" --break nothing one.k3p copy || bad=1
for edit in pad order view header seal digest; do
  "$K3PACK_PYTHON" "$layout" --break "$edit" one.k3p copy 2>message && { echo "a broken $edit went unnoticed"; bad=1; }
  grep -q AssertionError message || { echo "a broken $edit:"; cat message; bad=1; }
done
exit "$bad"
