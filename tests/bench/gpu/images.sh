#!/bin/sh
# The images of the GPU benchmark, those that are not there yet: images.sh K3PACK FOLDER PRESET. BF16, FP8 and NVFP4 (with lm_head and markov_w2), and
# of the tiny preset F32.
set -u
k3pack=$1 dir=$2 preset=$3
mkdir -p "$dir" || exit 1
image() {  # NAME DTYPE OPTIONS...
  name=$1 dtype=$2
  shift 2
  [ -f "$dir/$name.k3p" ] && return
  for part in "" -target; do
    [ -d "$dir/$dtype$part" ] || "$k3pack" synth "$dir/$dtype$part" --preset "$preset$part" --dtype "$dtype" || exit 1
  done
  "$k3pack" convert "$dir/$dtype" --target "$dir/$dtype-target" -o "$dir/$name.k3p" --no-digests --force "$@" || exit 1
}
[ "$preset" != tiny ] || image f32 f32
image bf16 bf16
image fp8 bf16 --quant fp8 --include lm_head --include 're:.*markov_w2'
image nvfp4 bf16 --quant nvfp4 --include lm_head --include 're:.*markov_w2'
rm -rf "$dir/bf16" "$dir/bf16-target" "$dir/f32" "$dir/f32-target"
