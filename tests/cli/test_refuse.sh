# Each of these is refused by check (exit 1) and by convert (exit 3) with the expected rule id, the folder listing unchanged.
. tests/cli/k3.sh

# refused RULES NAME: the folder $work/NAME.
refused() {
  expect 1 "$K3PACK" check "$work/$2" --json
  found=$(rules)
  [ "$found" = "$1" ] || complain "$2: check finds \"$found\" instead of \"$1\""
  before=$(ls -lA "$work/$2")
  mkdir "$work/output"
  expect "${3:-3}" "$K3PACK" convert "$work/$2" -o "$work/output/x.k3p" --target "$work/target" --json
  found=$(rules)
  [ "$found" = "$1" ] || complain "$2: convert finds \"$found\" instead of \"$1\""
  [ -z "$(ls -A "$work/output")" ] || complain "$2: a refused convert leaves $(ls -A "$work/output")"
  [ "$before" = "$(ls -lA "$work/$2")" ] || complain "$2: the folder changed"
  rm -rf "$work/output" "$work/$2"
}

variant() {
  cp -r "$work/draft" "$work/$1"
}
shard=$work/draft/model-00002-of-00003.safetensors
name=$(basename "$shard")

variant missing-shard
rm "$work/missing-shard/$name"
refused IDX01 missing-shard

# B32: a missing tensor, the three causes told apart: not in the index (MAP02), shard file absent (IDX01 above), shard present without it (IDX02).
variant not-in-index
for file in "$work"/not-in-index/*; do LC_ALL=C sed -i 's/layers\.1\.mlp\.down_proj\.weight/layers.1.mlp.dowm_proj.weight/' "$file"; done
expect 1 "$K3PACK" check "$work/not-in-index"
said 'MAP02.*layers.1.mlp.down_proj.weight.*not in the index' "MAP02 does not say that the index lacks it"
refused "MAP01 MAP02" not-in-index
variant not-in-shard
for file in "$work"/not-in-shard/*.safetensors; do LC_ALL=C sed -i 's/layers\.1\.mlp\.down_proj\.weight/layers.1.mlp.dowm_proj.weight/' "$file"; done
expect 1 "$K3PACK" check "$work/not-in-shard"
said 'IDX02.*layers.1.mlp.down_proj.weight.*the shard is there' "IDX02 does not say that the shard lacks it"
refused "IDX02 MAP01" not-in-shard

variant extra
for file in "$work"/extra/*; do LC_ALL=C sed -i 's/layers\.1\.input_layernorm\.weight/layers.1.imput_layernorm.weight/' "$file"; done
refused "MAP01 MAP02" extra

# Half of a pair: the stack lacks a shard id.
variant half
for file in "$work"/half/*; do LC_ALL=C sed -i 's/layers\.2\.self_attn\.q_a_proj\.weight/layers.2.self_attn.q_x_proj.weight/' "$file"; done
refused "MAP01 MAP04" half

# A duplicate key, plain and hidden by an escape.
variant duplicate
for file in "$work"/duplicate/*.safetensors; do
  LC_ALL=C sed -i 's/layers\.0\.input_layernorm\.weight/layers.1.input_layernorm.weight/' "$file"
done
expect 1 "$K3PACK" check "$work/duplicate" --json
case $(rules) in *CNT07* | *IDX03*) : ;; *) complain "a duplicate tensor is \"$(rules)\"" ;; esac
rm -rf "$work/duplicate"
"$K3PACK" synth "$work/escaped" --preset tiny --quiet
LC_ALL=C sed -i 's/"markov_head\.markov_w1\.weight"/"\\u0066inal_norm.weight"      /' "$work/escaped/model.safetensors"
expect 1 "$K3PACK" check "$work/escaped" --json
case $(rules) in *CNT07*) : ;; *) complain "a duplicate hidden by an escape is \"$(rules)\"" ;; esac
rm -rf "$work/escaped"

variant truncated
truncate -s -1 "$work/truncated/$name"
expect 1 "$K3PACK" check "$work/truncated" --json
case $(rules) in *CNT03*) : ;; *) complain "a truncated shard is \"$(rules)\"" ;; esac
variant trailing
printf 'abcd' >>"$work/trailing/$name"
expect 1 "$K3PACK" check "$work/trailing" --json
case $(rules) in *CNT04*) : ;; *) complain "trailing bytes are \"$(rules)\"" ;; esac
variant pointer
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 4976698672\n' 0 >"$work/pointer/$name"
expect 1 "$K3PACK" check "$work/pointer"
said 'CNT01.*4976698672' "an LFS pointer is not named with its size"
for broken in truncated trailing pointer; do
  before=$(ls -lA "$work/$broken")
  expect 3 "$K3PACK" convert "$work/$broken" -o "$work/x.k3p"
  [ ! -e "$work/x.k3p" ] && [ "$before" = "$(ls -lA "$work/$broken")" ] || complain "$broken: something was written"
done

# A wrong shape; a wrong config in several ways; a layer beyond the count.
variant shape
LC_ALL=C sed -i 's/"intermediate_size": 128/"intermediate_size": 192/' "$work/shape/config.json"
refused MAP05 shape
# Shards that do not stack: one half of a pair in another dtype. check and convert say the same.
variant dtype
for file in "$work"/dtype/*.safetensors; do
  LC_ALL=C sed -i 's/\("layers\.1\.self_attn\.q_a_proj\.weight": *{"dtype": *"\)BF16"/\1F16" /' "$file"
done
refused MAP08 dtype
variant mask
LC_ALL=C sed -i 's/"mask_token_id": [0-9]*/"mask_token_id": 512/' "$work/mask/config.json"
refused CFG20 mask
variant taps
LC_ALL=C sed -i 's/"num_target_layers": [0-9]*/"num_target_layers": 93/' "$work/taps/config.json"
refused CFG20 taps
variant json
printf '{"model_type": "k3_dspark", ' >"$work/json/config.json"
expect 1 "$K3PACK" check "$work/json" --json
case $(rules) in CFG19*) : ;; *) complain "a broken config.json is \"$(rules)\"" ;; esac
variant layers
LC_ALL=C sed -i 's/"num_hidden_layers": 3/"num_hidden_layers": 2/' "$work/layers/config.json"
refused MAP04 layers
# B43: no config.json.
variant no-config
rm "$work/no-config/config.json"
expect 3 "$K3PACK" convert "$work/no-config" -o "$work/x.k3p"
said 'CFG20.*no config.json' "B43: a folder without config.json is not called one"

# A path that leaves the folder, with a real file waiting there.
variant outside
mv "$work/outside/$name" "$work/$name"
LC_ALL=C sed -i "s#\"$name\"#\"../$name\"#" "$work/outside/model.safetensors.index.json"
expect 1 "$K3PACK" check "$work/outside" --json
case $(rules) in *IDX09*) : ;; *) complain "a path that leaves the folder is \"$(rules)\"" ;; esac
expect 3 "$K3PACK" convert "$work/outside" -o "$work/x.k3p"

# Variants of the drafter are refused by name with what differs: CFG21, exit 5.
for pair in DFlash2DraftModel:V7 KimiK3DSpark5MLADraftModel:V5 KimiK3DSparkMLADraftModel:V6 KimiK3DSparkModel:V4 DSparkDraftModel:V2; do
  variant named
  LC_ALL=C sed -i "s/K3DSparkModel/${pair%%:*}/; s/\"k3_dspark\"/\"qwen3\"/" "$work/named/config.json"
  expect 5 "$K3PACK" convert "$work/named" -o "$work/x.k3p"
  said "CFG21.*${pair##*:}" "${pair%%:*} is not refused as ${pair##*:}"
  rm -rf "$work/named"
done
variant gated
for file in "$work"/gated/*; do LC_ALL=C sed -i 's/layers\.1\.self_attn\.o_proj/layers.1.self_attn.g_proj/' "$file"; done
expect 5 "$K3PACK" convert "$work/gated" -o "$work/x.k3p"
said 'CFG21.*g_proj' "a gated drafter is not refused"
variant unknown
LC_ALL=C sed -i 's/k3_dspark/x9_dspark/' "$work/unknown/config.json"
for file in "$work"/unknown/*; do LC_ALL=C sed -i 's/markov_head/marxov_head/g' "$file"; done
expect 5 "$K3PACK" convert "$work/unknown" -o "$work/x.k3p"
expect 0 "$K3PACK" convert "$work/unknown" -o "$work/x.k3p" --recipe generic

# B44: mixed roots, adapters, odd numbers.
variant roots
for file in "$work"/roots/*; do LC_ALL=C sed -i 's/"final_norm\.weight"/"model.norm.weight"/' "$file"; done
expect 1 "$K3PACK" check "$work/roots" --json
case $(rules) in *MAP06*) : ;; *) complain "mixed roots are \"$(rules)\"" ;; esac
variant odd
for file in "$work"/odd/*; do LC_ALL=C sed -i 's/layers\.1\.mlp\.up_proj/layers.01.mlp.up_prj/' "$file"; done
expect 1 "$K3PACK" check "$work/odd"
variant adapter
printf '{}' >"$work/adapter/adapter_config.json"
expect 1 "$K3PACK" check "$work/adapter" --json
case $(rules) in *MAP09*) : ;; *) complain "an adapter is \"$(rules)\"" ;; esac

# A recipe of one's own that gives two shards of a view one id: no image, since its own manifest would be refused.
"$K3PACK" recipes k3-dspark | sed 's/"shard": "{i}"/"shard": "0"/' >"$work/recipe.json"
expect 3 "$K3PACK" convert "$work/draft" -o "$work/x.k3p" --recipe "$work/recipe.json" --force
said 'MAP04.*kv_a_proj_with_mqa.weight: a shard of the view model.context_kv_proj a second time' "two shards of a view have one id"
expect 1 "$K3PACK" check "$work/draft" --recipe "$work/recipe.json" --json
[ "$(rules)" = MAP04 ] || complain "check finds \"$(rules)\" in a view with one id twice"
"$K3PACK" recipes k3-dspark | sed 's/"into": "model.layers.{i}.self_attn.fused_qkv_a_proj", "shard": 1,/"into": "model.layers.{i}.self_attn.fused_qkv_a_proj", "shard": 0,/' >"$work/recipe.json"
expect 3 "$K3PACK" convert "$work/draft" -o "$work/x.k3p" --recipe "$work/recipe.json" --force
expect 1 "$K3PACK" check "$work/draft" --recipe "$work/recipe.json" --json
[ "$(rules)" = MAP04 ] || complain "check finds \"$(rules)\" in a stack with one id twice"
grep -q 'shard 0 a second time' "$work/stdout" || complain "the doubled shard is not named"
# Families and checks that this version does not know would be rules that silently do not hold: named with what may stand there.
for key in family require; do
  "$K3PACK" recipes k3-dspark | sed "s/\"$key\": \(\[*\)\"k3-dspark\"/\"$key\": \1\"k3-spark\"/" >"$work/recipe.json"
  for verb in check convert; do
    expect 3 "$K3PACK" $verb "$work/draft" --recipe "$work/recipe.json" $([ $verb = check ] || echo "-o $work/x.k3p --force")
    said "recipe.json: $key: .k3-spark., which this version does not know (allowed: k3-dspark, minimax-m3, deepseek-v3.2, kimi-k3" "an unknown $key"
  done
done
# A view of more shards than there are layers: both projections of every layer.
"$K3PACK" recipes k3-dspark | sed 's/"into": "model.layers.{i}.self_attn.fused_qkv_a_proj", "shard": 0}/"into": "model.layers.{i}.self_attn.fused_qkv_a_proj", "shard": 0, "view": {"name": "model.context_kv_proj", "shard": "{i} + 1000"}}/' >"$work/recipe.json"
expect 0 "$K3PACK" convert "$work/draft" -o "$work/x.k3p" --recipe "$work/recipe.json" --force
expect 0 "$K3PACK" verify "$work/x.k3p"
expect 0 "$K3PACK" inspect "$work/x.k3p"
grep -q 'shard 1002: ' "$work/stdout" || complain "a view of twice the layers is not shown"
# An index that names more files than a checkpoint can have: said at once.
variant many
awk 'BEGIN { printf "{\"weight_map\": {"; for (i = 0; i < 70000; i++) printf "%s\"t%d\": \"m-%d.safetensors\"", i ? ", " : "", i, i; print "}}" }' >"$work/many/model.safetensors.index.json"
expect 1 timeout 60 "$K3PACK" check "$work/many" --json
case $(rules) in *IDX10*) : ;; *) complain "an index of 70000 files is \"$(rules)\"" ;; esac
finish
