#!/bin/sh
# inspect and diff on images: the zero-copy view with shard ids, tensors and row ranges; a checkpoint held against its image.
set -u
K=$K3PACK
"$K" convert --help >/dev/null 2>&1 || { echo "this build has no convert"; exit 77; }
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
lacks() { ! grep -qF -- "$2" "$1" || { echo "std$1 has: $2"; cat "$1"; bad=1; }; }

"$K" synth draft --preset tiny --shards 3 -q && "$K" synth target --preset tiny-target -q && "$K" synth aliases --preset tiny-aliases --root model. -q || exit 1
expect 0 convert draft -o draft.k3p --target target
expect 0 convert aliases -o aliases.k3p

# "The zero-copy view is shown by inspect with its shard ids, tensors and row ranges": layer i's rows 32..71 of its fused_qkv_a_proj.
expect 0 inspect draft.k3p
says out "recipe k3-dspark"
says out "view model.context_kv_proj.weight BF16 [120, 64], zero-copy: no bytes of its own"
for i in 0 1 2; do
  says out "shard $i: model.layers.$i.self_attn.fused_qkv_a_proj.weight rows 32..71, 5120 bytes at "
done
lacks out "shard 3"
says out "    shard 1: layers.2.mlp.up_proj.weight rows 128..255"
says out "(target), "
says out "3 taps of 64 (1, 3, 6)"
lacks out "__k3pack__"
expect 0 inspect draft.k3p --verbose
says out "__k3pack__"
expect 0 inspect draft.k3p --json
says out '"name": "model.context_kv_proj.weight"'
says out '"target_layer_ids"'

# The bytes that the view shows are the source's: the offset leads to the same values.
offset=$(sed -n '/"name": "model.context_kv_proj.weight"/,$s/.*"offset": \([0-9]*\).*/\1/p' out | sed -n 2p)
expect 0 inspect draft --tensor layers.1.self_attn.kv_a_proj_with_mqa.weight --count 1
first=$(tail -n 1 out)
tail -c +$((offset + 1)) draft.k3p | head -c 2 >two
printf '%s' '{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}' >header
{ printf '\067\000\000\000\000\000\000\000'; cat header two; } >two.safetensors
expect 0 inspect two.safetensors --tensor x
[ "$(tail -n 1 out)" = "$first" ] || { echo "the view's offset shows other bytes"; bad=1; }

# Statistics of the view: all three shards' rows.
expect 0 inspect draft.k3p --tensor model.context_kv_proj.weight
says out "BF16 [120, 64], 7680 elements, a view without bytes of its own"

# A checkpoint against its image: under the checkpoint's names, whatever root and aliases it has; what came from the target is left out.
expect 0 diff draft draft.k3p
says out "equal: 44 tensors in A, 44 in B; 44 equal to the bit, 0 different"
expect 0 diff draft.k3p draft
expect 0 diff aliases.k3p aliases
says out "45 equal to the bit"

# One changed weight in the image: found under the source's name, at its own row.
expect 0 inspect draft.k3p --json 'model.layers.1.mlp.gate_up_proj.weight'
begin=$(sed -n 's/.*"offset": \([0-9]*\).*/\1/p' out | head -n 1)
cp draft.k3p bent.k3p
printf '\177' | dd of=bent.k3p bs=1 seek=$((begin + 2 * (64 * 130 + 5) + 1)) conv=notrunc 2>/dev/null
expect 1 diff draft bent.k3p
says out "layers.1.mlp.up_proj.weight: BF16 [128, 64]: 1 of 8192 elements differ, first [2, 5]: "
expect 1 diff draft.k3p bent.k3p
says out "model.layers.1.mlp.gate_up_proj.weight: BF16 [256, 64]: 1 of 16384 elements differ, first [130, 5]: "

# Another checkpoint's image; a geometry that differs where no tensor does.
expect 1 diff draft aliases.k3p
says out "only in A"
expect 0 convert draft -o eight.k3p --target target --block 8
expect 1 diff draft.k3p eight.k3p
says out "the geometry of the model"
says out "39 equal to the bit"
lacks out "elements differ"
exit "$bad"
