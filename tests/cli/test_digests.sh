# --digests: a snapshot of the HuggingFace cache against its blob names; the releases that a recipe pins; what is no safetensors file is named as what it is.
. tests/cli/k3.sh
hub=$work/hub/models--org--drafter
commit=cf6b8244620e7ea4b0651d214f28e89eac75bed6
mkdir -p "$hub/blobs" "$hub/refs" "$hub/snapshots/$commit"
printf '%s' "$commit" >"$hub/refs/main"
for file in "$work"/draft/*; do
  # Small files are named by a git object's id (40 hex digits), large ones by their SHA-256.
  digest=$(sha256sum <"$file" | cut -c 1-64)
  [ "${file##*/}" = config.json ] && digest=5a3c2f4f91c965ed93b14de5f12a4e9c17fd98d8
  cp "$file" "$hub/blobs/$digest"
  ln -s "../../blobs/$digest" "$hub/snapshots/$commit/${file##*/}"
done
HF_HUB_CACHE=$work/hub
export HF_HUB_CACHE
expect 0 "$K3PACK" check hf:org/drafter --digests
grep -q '^digests: 5 files, 4 proved' "$work/stdout" || complain "digests are not counted: $(cat "$work/stdout")"
expect 0 "$K3PACK" check hf:org/drafter --digests --json
grep -q '"digests_proved": 4' "$work/stdout" || complain "--json has no digests"
victim=$(readlink "$hub/snapshots/$commit/model-00002-of-00003.safetensors")
flip "$hub/snapshots/$commit/$victim" $(($(size_of "$hub/snapshots/$commit/$victim") - 9))
expect 0 "$K3PACK" check hf:org/drafter
expect 1 "$K3PACK" check hf:org/drafter --digests
said 'IMG02.*model-00002-of-00003.*not its name' "a blob of other bytes than its name is not told"

# A release that a recipe pins. The sizes alone are a guess, and said to be one.
"$K3PACK" synth "$work/one" --preset tiny --shards 1 --quiet || complain "synth"
sed -e "s|Inferact/Kimi-K3-DSpark\"|org/tiny\"|" -e "s/7124633450/$(size_of "$work/one/model.safetensors")/" -e "s/\"nbytes\": 1251/\"nbytes\": $(size_of "$work/one/config.json")/" \
  -e "s/f9972a636d92a11994cdcfc88fd4c5b5d50d6eb2a89af016031593b8c65c2053/$(sha256sum <"$work/one/model.safetensors" | cut -c 1-64)/" \
  -e "s/5a3c2f4f91c965ed93b14de5f12a4e9c17fd98d8c99916ed2deb26ce8702f970/$(sha256sum <"$work/one/config.json" | cut -c 1-64)/" \
  loader/recipes/k3-dspark.json >"$work/recipe.json"
expect 0 "$K3PACK" check "$work/one" --recipe "$work/recipe.json"
grep -q '^release org/tiny, revision cf6b8244620e: names and sizes' "$work/stdout" || complain "the release is not recognised: $(cat "$work/stdout")"
expect 0 "$K3PACK" check "$work/one" --recipe "$work/recipe.json" --digests
grep -q '^release org/tiny, revision cf6b8244620e: every byte' "$work/stdout" || complain "the release is not proved: $(cat "$work/stdout")"
expect 0 "$K3PACK" check "$work/one" --recipe "$work/recipe.json" --digests --json
grep -q '"release_proved": true' "$work/stdout" || complain "--json does not say the release"
flip "$work/one/model.safetensors" $(($(size_of "$work/one/model.safetensors") - 9))
expect 0 "$K3PACK" check "$work/one" --recipe "$work/recipe.json" --digests
grep -q '^release' "$work/stdout" && complain "a changed checkpoint is called the release"
expect 0 "$K3PACK" check "$work/one"
grep -q '^release' "$work/stdout" && complain "a tiny checkpoint is called a release"

# A comparison of nothing does not pass for one that found nothing: digests outside a cache, baselines without a twin, images.
expect 0 "$K3PACK" check "$work/draft" --digests
grep -q '^digests: 5 files read, nothing to compare them with' "$work/stdout" || complain "digests that nothing holds are not called so: $(cat "$work/stdout")"
"$K3PACK" convert "$work/draft" --quant mxfp4 -o "$work/fp4.k3p" --quiet 2>/dev/null
expect 0 "$K3PACK" export "$work/fp4.k3p" --format compressed-tensors -o "$work/fp4"
expect 0 "$K3PACK" check "$work/fp4" --baseline "$work/draft"
grep -q '^baseline: 22 weights compared, 0 without a twin' "$work/stdout" || complain "the baseline: $(cat "$work/stdout")"
expect 3 "$K3PACK" check "$work/fp4" --baseline "$work/fp4"
said 'none of 22 quantised weights has a plain twin here' "a baseline without a twin"
expect 3 "$K3PACK" check "$work/draft" --baseline "$work/draft"
said 'no quantised weight' "plain weights have no baseline"
expect 5 "$K3PACK" check "$work/fp4.k3p" --baseline "$work/draft"
said 'verify IMAGE --source' "an image has no baseline"
"$K3PACK" convert "$work/draft" -o "$work/draft.k3p" --quiet 2>/dev/null
expect 0 "$K3PACK" check "$work/fp4" --baseline "$work/draft.k3p"
said 'warning: 12 of 22 quantised weights have no plain twin' "weights that were not compared are not told"

# The published drafter, by its names and sizes: a checkpoint of that geometry is as long as the published file.
expect 0 "$K3PACK" synth "$work/published" --preset k3-dspark --sparse --quiet
[ "$(size_of "$work/published/model.safetensors")" = 7124633450 ] || complain "the published geometry has $(size_of "$work/published/model.safetensors") bytes"

# Other things under the name of weights.
probe() {
  printf "$1" >"$work/model.safetensors"
  expect 1 "$K3PACK" check "$work/model.safetensors"
  said "$2" "\"$2\" is not said"
}
probe '<!doctype html><html><body>Sign in</body></html>' 'CNT02.*HTML page'
probe '\n<HTML><head><title>404</title></head></HTML>' 'CNT02.*HTML page'
probe 'PK\003\004\024\000\000\000\010\010model/data.pkl' 'CNT02.*ZIP archive'
probe '\200\002}q\000(X\006\000\000\000weight' 'CNT02.*pickle'
probe 'GGUF\003\000\000\000\001\000\000\000\000\000\000\000' 'CNT02.*GGUF'
probe 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n' 'CNT01.*4976698672'
finish
