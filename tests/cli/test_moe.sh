#!/bin/sh
# The small mixtures of experts in every storage form: checked, converted, verified against their source and exported byte for byte; what a drafter
# borrows from a full-geometry target is planned from one of its shards.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
bad=0
complain() {
  echo "test_moe: $*" >&2
  bad=1
}

for preset in m3-tiny m3-tiny-text m3-tiny-native m3-tiny-mtp m3-tiny-mxfp8 m3-tiny-mtp-mxfp8 m3-tiny-nvfp4 m3-tiny-mxfp4 v32-tiny v32-tiny-128 k3-tiny k3-tiny-nvfp4; do
  source=$work/$preset
  "$K3PACK" synth "$source" --preset $preset --quiet || complain "$preset: synth fails"
  "$K3PACK" check "$source" >"$work/out" 2>"$work/err" || complain "$preset: check says no: $(cat "$work/err")"
  "$K3PACK" convert "$source" -o "$work/image.k3p" --force --quiet 2>"$work/err" || complain "$preset: convert fails: $(cat "$work/err")"
  "$K3PACK" verify "$work/image.k3p" --source "$source" >"$work/out" 2>"$work/err" || complain "$preset: verify says no: $(cat "$work/err")"
  rm -rf "$work/export"
  "$K3PACK" export "$work/image.k3p" -o "$work/export" --quiet 2>"$work/err" || complain "$preset: export fails: $(cat "$work/err")"
  diff -r "$source" "$work/export" >"$work/err" || complain "$preset: the export differs: $(cat "$work/err")"
  # Equal input gives equal images, whatever the number of threads.
  "$K3PACK" convert "$source" -o "$work/again.k3p" --force --quiet --threads 1 2>/dev/null
  cmp -s "$work/image.k3p" "$work/again.k3p" || complain "$preset: one thread gives another image"
done

# Names of the transformers-native spelling land in the same places of the image.
"$K3PACK" synth "$work/a" --preset m3-tiny --quiet && "$K3PACK" synth "$work/b" --preset m3-tiny-native --quiet
"$K3PACK" convert "$work/a" -o "$work/a.k3p" --quiet 2>/dev/null && "$K3PACK" convert "$work/b" -o "$work/b.k3p" --quiet 2>/dev/null
for image in a b; do
  "$K3PACK" inspect "$work/$image.k3p" --json 2>/dev/null | grep -o '"name": "[^"]*"' | grep -v -e __ -e k3p | sort -u >"$work/$image.names"
done
[ -s "$work/a.names" ] || complain "inspect lists no names"
cmp -s "$work/a.names" "$work/b.names" || complain "the native spelling gives other names in the image"

# inspect --reductions: the first layer, the last one, stages, prediction modules, taps, experts on own rows; asked for and what it comes to.
"$K3PACK" synth "$work/r" --preset m3-tiny-mtp --quiet && "$K3PACK" convert "$work/r" -o "$work/r.k3p" --quiet 2>/dev/null
shows() {  # text, options...
  text=$1
  shift
  for source in "$work/r" "$work/r.k3p"; do
    "$K3PACK" inspect "$source" --reductions "$@" >"$work/out" 2>"$work/err" || complain "--reductions $*: $(cat "$work/err")"
    grep -qF -- "$text" "$work/out" || complain "--reductions $* does not say \"$text\""
  done
}
block=model.mtp.layers.0.transformer_layer
shows "whole      embedding -> model.layers.0.input_layernorm" --tp 2
shows "deferred   model.layers.0.mlp.down_proj -> model.layers.1.input_layernorm" --tp 2
shows "deferred   model.layers.3.block_sparse_moe.experts.w2 -> model.norm" --tp 8
shows "whole      the prediction block's input -> $block.input_layernorm" --tp 2
shows "deferred   $block.self_attn.o_proj -> $block.post_attention_layernorm" --tp 2
shows "immediate  $block.block_sparse_moe.experts.w2 -> output" --tp 2
shows "tap        the stream after 2 layers, once it is complete" --tp 2 --taps 0,2
shows "tp 2, pp 1: 9 all-reduces deferred into norms, 1 at once;" --tp 2 --taps 0,1,2,3,4
shows "           -- end of stage 0 --" --tp 2 --pp 2
shows "immediate  model.layers.3.block_sparse_moe.experts.w2 -> model.norm" --tp 2 --pp 2
shows "scattered  model.layers.1.self_attn.o_proj -> model.layers.1.post_attention_layernorm" --tp 2 --sequence-parallel
shows "gathered   model.norm" --tp 2 --sequence-parallel
shows "no experts on own rows" --tp 2 --pp 2 --sequence-parallel
shows "nothing is partial" --tp 1
[ "$("$K3PACK" inspect "$work/r" --reductions --tp 2 --taps 0,1,2,3,4 2>/dev/null | grep -c '^tap ')" = 4 ] || complain "not every tap is listed once"
shows '"effective": false' --tp 2 --pp 2 --sequence-parallel --json
shows '"after_layers": 4' --tp 2 --taps 4 --json
shows '"reduces": false' --tp 2 --json
shows '"norm": null' --tp 2 --json

# "the borrowed `embed_tokens` / `lm_head` found under their roots by `convert --target`": of every family, plain and quantised, in the published
# spelling, those of other exports and none; a prediction layer's copies are not them. A drafter's own sizes are put in place, each with a value of its
# own.
python=${K3PACK_PYTHON:-python3}
edit="$python tests/python/edit_checkpoint.py"
if "$python" -c '' 2>/dev/null; then
  "$K3PACK" synth "$work/d" --preset tiny --quiet || complain "synth tiny"
  borrows() {  # case, preset, root that stands before embed_tokens, the one before lm_head; as published, then as exported
    rm -rf "$work/t"
    "$K3PACK" synth "$work/t" --preset "$2" --quiet || complain "$1: synth"
    $edit "$work/t" fill "${3}embed_tokens.weight" BF16 512,64 803f && $edit "$work/t" fill "${4}lm_head.weight" BF16 512,64 0040 || complain "$1: edit"
    [ "$3" = "$5" ] || $edit "$work/t" rename "${3}embed_tokens.weight" "${5}embed_tokens.weight" || complain "$1: edit"
    [ "$4" = "$6" ] || $edit "$work/t" rename "${4}lm_head.weight" "${6}lm_head.weight" || complain "$1: edit"
    "$K3PACK" convert "$work/d" --target "$work/t" --embed target -o "$work/b.k3p" --force --quiet 2>"$work/err" || complain "$1: $(cat "$work/err")"
    for tensor in model.embed_tokens.weight:1 lm_head.weight:2; do
      "$K3PACK" inspect "$work/b.k3p" --tensor "${tensor%:*}" --json >"$work/out" 2>&1
      grep -Eq "\"min\": ${tensor#*:}(\.0)?," "$work/out" && grep -Eq "\"max\": ${tensor#*:}(\.0)?," "$work/out" || complain "$1: ${tensor%:*} is another: $(cat "$work/out")"
    done
  }
  for preset in m3-tiny m3-tiny-text m3-tiny-native m3-tiny-mxfp8 m3-tiny-nvfp4 m3-tiny-mxfp4 m3-tiny-mtp k3-tiny k3-tiny-nvfp4; do
    borrows $preset $preset language_model.model. language_model. language_model.model. language_model.
  done
  for preset in v32-tiny v32-tiny-128; do
    borrows $preset $preset model. '' model. ''
  done
  borrows "k3-tiny, an older export" k3-tiny language_model.model. language_model. language_model. language_model.
  borrows "k3-tiny, text only" k3-tiny language_model.model. language_model. model. ''
  borrows "k3-tiny, bare" k3-tiny language_model.model. language_model. '' ''
  borrows "m3-tiny, model first" m3-tiny language_model.model. language_model. model.language_model. ''
  borrows "v32-tiny, bare" v32-tiny model. '' '' ''
  # Without them: named, with nothing written.
  rm -rf "$work/t" "$work/n.k3p"
  "$K3PACK" synth "$work/t" --preset v32-tiny --quiet && $edit "$work/t" drop lm_head.weight
  "$K3PACK" convert "$work/d" --target "$work/t" -o "$work/n.k3p" --quiet 2>"$work/err" && complain "a target without lm_head is taken"
  grep -q 'MAP02.*\|lm_head' "$work/err" && [ ! -e "$work/n.k3p" ] || complain "a target without lm_head: $(cat "$work/err")"
else
  echo "test_moe: no $python: what convert --target takes from the small targets NOT tested" >&2
fi

# A drafter of the published geometry and its target, both holes: the plan takes embed_tokens and lm_head from the one shard that holds them.
if [ "${K3PACK_BUILD##*/}" = release ]; then
  "$K3PACK" synth "$work/draft" --preset k3-dspark --sparse --quiet && "$K3PACK" synth "$work/target" --preset kimi-k3 --quiet || complain "synth fails"
  for shard in "$work"/target/model-*; do
    [ "${shard##*/}" = model-00094-of-000096.safetensors ] || rm "$shard"
  done
  "$K3PACK" convert "$work/draft" --target "$work/target" --dry-run >"$work/plan" 2>"$work/err" || complain "--target kimi-k3: $(cat "$work/err")"
  grep -q 'language_model.lm_head.weight' "$work/plan" || complain "the plan does not name the target's lm_head"
fi
if [ "${K3PACK_BUILD##*/}" = release ]; then
  # DeepSeek's last layer goes to the final norm, its prediction layer to the norm of the shared head (rule D6).
  "$K3PACK" synth "$work/v32" --preset deepseek-v3.2 --quiet && "$K3PACK" inspect "$work/v32" --reductions --tp 8 >"$work/out" 2>"$work/err"
  grep -q 'deferred  *model.layers.60.mlp.experts.w2 -> model.norm ' "$work/out" || complain "DeepSeek-V3.2's last layer: $(tail -n 4 "$work/out")"
  grep -q 'deferred  *model.layers.61.mlp.experts.w2 -> model.layers.61.shared_head.norm ' "$work/out" || complain "its prediction layer"
  grep -q '^tp 8, pp 1: 124 all-reduces deferred into norms, 0 at once' "$work/out" || complain "its sums: $(tail -n 1 "$work/out")"
fi
exit $bad
