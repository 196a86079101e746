# Names as people really met them: roots, strangers, long names, a bias that must not be squeezed.
. tests/cli/k3.sh
expect 0 "$K3PACK" convert "$work/draft" -o "$work/a.k3p" --target "$work/target"

# B44: one toy model saved under five prefixes gives the same tensors; exactly one root may match.
for root in language_model.model. model.language_model. model. base_model.model.model. draft_model.; do
  rm -rf "$work/root"
  expect 0 "$K3PACK" synth "$work/root" --preset tiny --root "$root"
  expect 0 "$K3PACK" convert "$work/root" -o "$work/b.k3p" --force --target "$work/target"
  expect 0 "$K3PACK" diff "$work/a.k3p" "$work/b.k3p"
  expect 0 "$K3PACK" export "$work/b.k3p" -o "$work/again-$root"
  cmp "$work/root/model.safetensors" "$work/again-$root/model.safetensors" || complain "$root does not come back"
done
# An unknown root is an error, never a silent skip.
rm -rf "$work/root"
expect 0 "$K3PACK" synth "$work/root" --preset tiny --root "elsewhere."
expect 3 "$K3PACK" convert "$work/root" -o "$work/c.k3p"
said MAP01 "an unknown root is not MAP01"

# B56: strangers are listed by pattern with counts; ignores are explicit rules of the recipe that the report names.
rm -rf "$work/root"
expect 0 "$K3PACK" synth "$work/root" --preset tiny --seed 2
LC_ALL=C sed -i 's/self_attn\.o_proj/self_attn.x_gate/g' "$work/root/model.safetensors"
expect 3 "$K3PACK" convert "$work/root" -o "$work/c.k3p"
said '3 tensors like layers\.\*\.self_attn\.x_gate\.weight' "strangers are not counted by pattern"
rm -rf "$work/root"
expect 0 "$K3PACK" synth "$work/root" --preset tiny --seed 2
LC_ALL=C sed -i 's/"confidence_head\.proj\.bias"/"rotary_emb.inv_freq"      /' "$work/root/model.safetensors"
expect 3 "$K3PACK" convert "$work/root" -o "$work/c.k3p"
said 'MAP02.*confidence_head.proj.bias' "half a confidence head is not noticed"

# header TEXT BYTES-FILE: a safetensors file with that header.
header() {
  n=${#1}
  printf "\\$(printf %03o $((n & 255)))\\$(printf %03o $((n >> 8)))\\0\\0\\0\\0\\0\\0%s" "$1"
}

# B55: 238 close F32 values keep their bytes and stay 238 different ones.
mkdir "$work/bias"
i=0
while [ "$i" -lt 238 ]; do
  printf "\\$(printf %03o $((i)))\\042\\332\\100"
  i=$((i + 1))
done >"$work/values"
{
  header '{"model.layers.3.mlp.gate.e_score_correction_bias":{"dtype":"F32","shape":[238],"data_offsets":[0,952]}}'
  cat "$work/values"
} >"$work/bias/model.safetensors"
expect 0 "$K3PACK" convert "$work/bias" -o "$work/bias.k3p" --recipe generic
expect 0 "$K3PACK" export "$work/bias.k3p" -o "$work/bias-again"
cmp "$work/bias/model.safetensors" "$work/bias-again/model.safetensors" || complain "the bias changed"
expect 0 "$K3PACK" inspect "$work/bias.k3p"
grep -q 'e_score_correction_bias *F32' "$work/stdout" || complain "the bias is no longer F32"

# B52: names of 63, 64, 65, 255, 256 and 1000 bytes; two of 200 that differ in the last character.
for length in 63 64 65 255 256 1000; do
  name=$(head -c "$length" /dev/zero | tr '\0' n)
  mkdir "$work/n$length"
  { header "{\"$name\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}"; printf x; } >"$work/n$length/model.safetensors"
  expect 0 "$K3PACK" convert "$work/n$length" -o "$work/n$length.k3p" --recipe generic
  expect 0 "$K3PACK" verify "$work/n$length.k3p" --source "$work/n$length"
done
name=$(head -c 199 /dev/zero | tr '\0' n)
mkdir "$work/twins"
{ header "{\"${name}a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"${name}b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}"; printf xy; } \
  >"$work/twins/model.safetensors"
expect 0 "$K3PACK" check "$work/twins" --recipe generic --json
grep -q '"tensors": 2' "$work/stdout" || complain "two long names fall together"

# B17: the order of the header text does not matter: two headers over the same bytes give the same body.
mkdir "$work/o1" "$work/o2"
{ header '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'; printf abcdefgh; } >"$work/o1/model.safetensors"
{ header '{"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'; printf abcdefgh; } >"$work/o2/model.safetensors"
for o in o1 o2; do
  expect 0 "$K3PACK" convert "$work/$o" -o "$work/$o.k3p" --recipe generic
  "$K3PACK" inspect "$work/$o.k3p" | sed -n '/ U8 /s/^ *//p' >"$work/$o.txt"
done
cmp "$work/o1.txt" "$work/o2.txt" || complain "the order of the header text shows in the image"
finish
