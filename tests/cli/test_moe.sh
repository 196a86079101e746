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

# A drafter of the published geometry and its target, both holes: the plan takes embed_tokens and lm_head from the one shard that holds them.
if [ "${K3PACK_BUILD##*/}" = release ]; then
  "$K3PACK" synth "$work/draft" --preset k3-dspark --sparse --quiet && "$K3PACK" synth "$work/target" --preset kimi-k3 --quiet || complain "synth fails"
  for shard in "$work"/target/model-*; do
    [ "${shard##*/}" = model-00094-of-000096.safetensors ] || rm "$shard"
  done
  "$K3PACK" convert "$work/draft" --target "$work/target" --dry-run >"$work/plan" 2>"$work/err" || complain "--target kimi-k3: $(cat "$work/err")"
  grep -q 'language_model.lm_head.weight' "$work/plan" || complain "the plan does not name the target's lm_head"
fi
exit $bad
