# A checkpoint in the local HuggingFace cache: snapshots of symlinks into blobs, named as hf:org/name[@revision]. Nothing is downloaded.
. tests/cli/k3.sh
hub=$work/hub/models--org--drafter
commit=cf6b8244620e7ea4b0651d214f28e89eac75bed6
mkdir -p "$hub/blobs" "$hub/refs" "$hub/snapshots/$commit"
printf '%s' "$commit" >"$hub/refs/main"
for file in "$work"/draft/*; do
  digest=$(sha256sum <"$file" | cut -c 1-64)
  cp "$file" "$hub/blobs/$digest"
  ln -s "../../blobs/$digest" "$hub/snapshots/$commit/$(basename "$file")"
done
HF_HUB_CACHE=$work/hub
export HF_HUB_CACHE
expect 0 "$K3PACK" check hf:org/drafter
expect 0 "$K3PACK" check "hf:org/drafter@$commit"
expect 0 "$K3PACK" convert hf:org/drafter -o "$work/a.k3p" --target "$work/target"
expect 0 "$K3PACK" convert "$work/draft" -o "$work/b.k3p" --target "$work/target"
cmp "$work/a.k3p" "$work/b.k3p" || complain "the cache and the folder give different images"
expect 0 "$K3PACK" export "$work/a.k3p" -o "$work/again"
cmp "$work/draft/model.safetensors.index.json" "$work/again/model.safetensors.index.json" || complain "the index does not come back"

# HF_HOME and the default place.
unset HF_HUB_CACHE
mkdir -p "$work/home/.cache/huggingface" "$work/hf"
mv "$work/hub" "$work/hf/hub"
expect 0 env HF_HOME="$work/hf" "$K3PACK" check hf:org/drafter
mv "$work/hf/hub" "$work/home/.cache/huggingface/hub"
expect 0 env -u HF_HOME HOME="$work/home" "$K3PACK" check hf:org/drafter
HF_HUB_CACHE=$work/home/.cache/huggingface/hub
export HF_HUB_CACHE
hub=$HF_HUB_CACHE/models--org--drafter

# What is not there, and names that are none, say so.
expect 4 "$K3PACK" check hf:org/other
said 'downloads nothing' "an absent repository is not explained"
expect 4 "$K3PACK" check hf:org/drafter@v9
for bad in hf: hf:org hf:org/ hf:/name hf:../.. hf:org/name/more "hf:org/drafter@" "hf:org/drafter@../x" "hf:o rg/name"; do
  expect 2 "$K3PACK" check "$bad"
done
printf '../../../../etc' >"$hub/refs/evil"
expect 4 "$K3PACK" check hf:org/drafter@evil

# A link whose target is missing, and the piece of a broken-off download.
victim=$hub/snapshots/$commit/model-00002-of-00003.safetensors
blob=$(readlink "$victim")
mv "$hub/snapshots/$commit/$blob" "$work/kept"
expect 1 "$K3PACK" check hf:org/drafter
said 'IDX01.*link target missing' "a dangling link is not named"
printf 'x' >"$hub/blobs/0000.incomplete"
mv "$work/kept" "$hub/snapshots/$commit/$blob"
expect 0 "$K3PACK" check hf:org/drafter
said 'CNT09.*0000.incomplete' "an unfinished download is not named"
expect 1 "$K3PACK" check hf:org/drafter --strict
rm "$hub/snapshots/$commit/config.json"
ln -s ../../blobs/absent "$hub/snapshots/$commit/config.json"
expect 1 "$K3PACK" check hf:org/drafter --json
[ "$(rules)" = CFG19 ] || complain "a dangling config.json is \"$(rules)\""
finish
