#!/bin/sh
# A conversion from end to end, with the program in $1 (build/release): writes a small sharded checkpoint and its target, checks, converts, inspects,
# verifies, compares and exports, holds the exported files against the originals, and drafts. Stops at the first surprise.
set -eu
build=${1:-build/release}
K3PACK=$PWD/$build/k3pack
scenario=$PWD/fixtures/demo/scenario.safetensors  # of tests/python/write_scenario.py, for two requests of this drafter
work=$build/demo
rm -rf "$work"
mkdir -p "$work"
cd "$work"

k3pack() {
  printf '\n$ k3pack %s\n' "$*"
  "$K3PACK" "$@"
}

k3pack synth draft --preset tiny --shards 3
k3pack synth target --preset tiny-target
k3pack check draft
k3pack convert draft -o draft.k3p --target target
k3pack inspect draft.k3p 'model.layers.0.self_attn.fused*'
k3pack inspect draft.k3p 'model.context_kv_proj*'
k3pack verify draft.k3p --source draft
k3pack diff draft draft.k3p
k3pack export draft.k3p -o exported
for file in draft/*; do
  printf '\n$ cmp %s exported/%s' "$file" "${file#draft/}"
  cmp "$file" "exported/${file#draft/}"
done
printf '\n\nevery exported file equals the original, byte for byte\n'
cp "$scenario" scenario.safetensors
k3pack run draft.k3p --input scenario.safetensors -o drafts.safetensors
