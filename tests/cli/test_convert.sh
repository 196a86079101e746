# Conversion of a drafter: complete, deterministic, reversible, provable, zero-copy.
. tests/cli/k3.sh

expect 0 "$K3PACK" convert "$work/draft" -o "$work/a.k3p" --target "$work/target" --threads 1
expect 0 "$K3PACK" convert "$work/draft" -o "$work/b.k3p" --target "$work/target" --threads 4

# "Converting twice, with 1 and with 4 threads, gives byte-identical images."
cmp "$work/a.k3p" "$work/b.k3p" || complain "1 and 4 threads give different images"

# "export returns files whose SHA-256 equals the originals'": shards with index.
expect 0 "$K3PACK" export "$work/a.k3p" -o "$work/exported"
for file in "$work"/draft/*; do
  [ "$(sha256sum <"$file")" = "$(sha256sum <"$work/exported/$(basename "$file")")" ] || complain "export changed $(basename "$file")"
done
[ "$(ls "$work/draft" | wc -l)" = "$(ls -A "$work/exported" | wc -l)" ] || complain "export wrote other files: $(ls -A "$work/exported")"

# One file, not sharded.
expect 0 "$K3PACK" synth "$work/one" --preset tiny
expect 0 "$K3PACK" convert "$work/one" -o "$work/one.k3p"
expect 0 "$K3PACK" export "$work/one.k3p" -o "$work/one-again"
cmp "$work/one/model.safetensors" "$work/one-again/model.safetensors" || complain "one file does not come back"

# Where it cannot be exact, export refuses with 5 and says why: a tensor was dropped.
cp -r "$work/one" "$work/extra"
LC_ALL=C sed -i 's/context_norm\.weight/contest_norm.weight/' "$work/extra/model.safetensors"
expect 3 "$K3PACK" convert "$work/extra" -o "$work/extra.k3p"
said MAP01 "an extra tensor is not MAP01"
expect 3 "$K3PACK" convert "$work/extra" -o "$work/extra.k3p" --allow MAP01
said 'MAP02.*context_norm' "--allow MAP01 hides a missing tensor"

# "the same bytes": the view adds none. Every source byte is in the image once: the sum of the tensors is the source's.
"$K3PACK" convert "$work/draft" --target "$work/target" --dry-run --json >"$work/plan" || complain "dry run fails"
python3 - "$work/plan" <<'PY' || complain "the dry run is not what the loader contract asks for"
import json, sys
plan = json.load(open(sys.argv[1]))
by = {t["source"]: t["destinations"] for t in plan["tensors"]}
for i in range(3):
    a, b = by["layers.%d.self_attn.kv_a_proj_with_mqa.weight" % i]
    assert a["tensor"] == "model.layers.%d.self_attn.fused_qkv_a_proj.weight" % i and a["shard"] == 1
    assert b["view"] == "model.context_kv_proj.weight" and b["shard"] == i
    assert (a["offset"], a["nbytes"]) == (b["offset"], b["nbytes"]), "the same bytes"
spans = sorted((t["destinations"][0]["offset"], t["destinations"][0]["nbytes"]) for t in plan["tensors"])
assert all(x[0] + x[1] <= y[0] for x, y in zip(spans, spans[1:])), "every source byte is in the image once"
PY

# "verify notices one flipped bit anywhere in the file": header, manifest, tables, seal, tensors, pads, sources, last byte.
expect 0 "$K3PACK" verify "$work/a.k3p"
expect 0 "$K3PACK" verify "$work/a.k3p" --source "$work/draft"
size=$(size_of "$work/a.k3p")
step=$((size / 97))
at=0
while [ "$at" -lt "$size" ]; do
  flip "$work/a.k3p" "$at"
  "$K3PACK" verify "$work/a.k3p" >/dev/null 2>&1
  [ $? = 1 ] || complain "verify does not notice a flipped bit at byte $at"
  flip "$work/a.k3p" "$at"
  at=$((at + step))
done
flip "$work/a.k3p" $((size - 1))
expect 1 "$K3PACK" verify "$work/a.k3p"
flip "$work/a.k3p" $((size - 1))
cmp "$work/a.k3p" "$work/b.k3p" || complain "the flips did not undo themselves"

# An image with one flipped bit is not exported as if it held the originals: refused, nothing written.
flip "$work/a.k3p" $((size / 2))
expect 3 "$K3PACK" export "$work/a.k3p" -o "$work/flipped"
said 'IMG02.*segment' "a flipped bit does not stop an export"
[ ! -e "$work/flipped" ] || complain "an export of a flipped image leaves $(ls -A "$work/flipped")"
flip "$work/a.k3p" $((size / 2))

# verify --source notices a checkpoint that is not the image's.
expect 0 "$K3PACK" synth "$work/other" --preset tiny --seed 7
expect 1 "$K3PACK" verify "$work/a.k3p" --source "$work/other"

# Roots and exporters' spellings give the same tensors: model. in front, and V1d's fc, hidden_norm, norm with an own head.
for root in model. language_model.model. draft_model.; do
  expect 0 "$K3PACK" synth "$work/r-$root" --preset tiny --root "$root"
  expect 0 "$K3PACK" convert "$work/r-$root" -o "$work/r.k3p" --force --target "$work/target"
  expect 0 "$K3PACK" diff "$work/a.k3p" "$work/r.k3p"
done

# V1d's spellings (spaces fill the header up) give the same tensors, and come back as they were.
cp -r "$work/one" "$work/v1d"
LC_ALL=C sed -i 's/"context_proj\.weight"/"fc.weight"          /; s/"context_norm\.weight"/"hidden_norm.weight" /; s/"final_norm\.weight"/"norm.weight"      /' \
  "$work/v1d/model.safetensors"
expect 0 "$K3PACK" convert "$work/v1d" -o "$work/v1d.k3p"
expect 0 "$K3PACK" diff "$work/one.k3p" "$work/v1d.k3p"
expect 0 "$K3PACK" export "$work/v1d.k3p" -o "$work/v1d-again"
cmp "$work/v1d/model.safetensors" "$work/v1d-again/model.safetensors" || complain "odd spacing does not come back"

# The draft's own embedding wins; a difference is warned of with the number of rows; --embed target decides otherwise.
expect 0 "$K3PACK" synth "$work/target2" --preset tiny-target --seed 5
expect 0 "$K3PACK" convert "$work/draft" -o "$work/c.k3p" --target "$work/target2"
said 'MAP10.*512 of 512 rows differ' "no MAP10"
expect 0 "$K3PACK" convert "$work/draft" -o "$work/d.k3p" --target "$work/target2" --embed target
expect 1 "$K3PACK" diff "$work/c.k3p" "$work/d.k3p"
grep -q embed_tokens "$work/stdout" || complain "--embed target changed something else: $(cat "$work/out")"
expect 5 "$K3PACK" export "$work/d.k3p" -o "$work/d-again"
said embed_tokens "export does not name what was replaced"
[ ! -e "$work/d-again" ] || complain "a refused export leaves a folder"

# Only the target's shards that hold the borrowed tensors need be there.
for shard in "$work"/target/*.safetensors; do
  cp -r "$work/target" "$work/part"
  rm "$work/part/$(basename "$shard")"
  if "$K3PACK" convert "$work/draft" -o "$work/p.k3p" --force --target "$work/part" >/dev/null 2>&1; then
    expect 0 cmp "$work/p.k3p" "$work/a.k3p"
    echo "without $(basename "$shard"): fine" >>"$work/fine"
  fi
  rm -rf "$work/part"
done
[ -s "$work/fine" ] || complain "every shard of the target is needed"

# Options that add or leave out tables.
expect 0 "$K3PACK" convert "$work/draft" -o "$work/e.k3p" --crc --source-digest
expect 0 "$K3PACK" verify "$work/e.k3p"
expect 0 "$K3PACK" export "$work/e.k3p" -o "$work/e-again"
cmp "$work/draft/config.json" "$work/e-again/config.json" || complain "config.json does not come back"
expect 0 "$K3PACK" convert "$work/draft" -o "$work/f.k3p" --no-digests
expect 0 "$K3PACK" verify "$work/f.k3p"
grep -q 'not proven' "$work/stdout" || complain "verify claims to have proven an image without digests"

# B103: outputs: kept unless --force, never an input, never in the input's folder, atomic.
expect 2 "$K3PACK" convert "$work/draft" -o "$work/a.k3p"
said OUT01 "an existing output is not OUT01"
expect 0 "$K3PACK" convert "$work/draft" -o "$work/a.k3p" --force
expect 2 "$K3PACK" convert "$work/one/model.safetensors" -o "$work/one/model.safetensors" --force
said OUT02 "the input as output is not OUT02"
ln -s "$work/one/model.safetensors" "$work/link"
expect 2 "$K3PACK" convert "$work/one/model.safetensors" -o "$work/link" --force
ln "$work/one/model.safetensors" "$work/hard"
expect 2 "$K3PACK" convert "$work/one/model.safetensors" -o "$work/hard" --force
expect 2 "$K3PACK" convert "$work/one" -o "$work/one/new.k3p"
cmp "$work/one/model.safetensors" "$work/one-again/model.safetensors" || complain "the input was touched"
expect 4 "$K3PACK" convert "$work/one" -o "$work/no/such/folder/x.k3p"
ls -A "$work" | grep k3tmp && complain "temporary files are left"

# The image is itself a checkpoint that check, inspect and diff read.
expect 0 "$K3PACK" check "$work/b.k3p"
expect 0 "$K3PACK" inspect "$work/b.k3p"
grep -q 'shard 2: model.layers.2.self_attn.fused_qkv_a_proj.weight rows' "$work/stdout" || complain "inspect does not show the view"
expect 0 "$K3PACK" diff "$work/draft" "$work/b.k3p"
finish
