# "The known faults of sections 1.9, 2 and 3 that concern conversion or layers are tests": what people met with MiniMax-M3, DeepSeek-V3.2 and Kimi K3
# (1.9, 2.6, 3.8 and a number), and "the validation rules M3V, DSV, K3V and X become rules of check": one fault in a small synthetic checkpoint, what
# check says of it, and that convert refuses what check calls an error. fixtures/moe/faults.txt and rules.txt say which test carries which; that is
# checked at the end.
. tests/cli/k3.sh
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the faults with"; exit 77; }
m3=language_model.model.layers v32=model.layers
for preset in m3-tiny m3-tiny-native m3-tiny-mtp m3-tiny-mxfp8 m3-tiny-nvfp4 v32-tiny k3-tiny; do
  "$K3PACK" synth "$work/$preset" --preset $preset --quiet || complain "synth $preset"
done

edit() {  # SOURCE EDIT...: a changed copy in $work/case
  rm -rf "$work/case"
  cp -R "$work/$1" "$work/case"
  shift
  for change in "$@"; do
    "$python" tests/python/edit_checkpoint.py "$work/case" $change || complain "the edit failed: $change"
  done
}

# caught WHICH SOURCE RULE TEXT EDIT...: check says RULE with a line that holds TEXT; an error is refused by convert too, which leaves nothing.
caught() {
  which=$1 source=$2 rule=$3 text=$4
  shift 4
  edit "$source" "$@"
  "$K3PACK" check "$work/case" --only "$rule" --verbose >"$work/stdout" 2>"$work/stderr"
  code=$?
  grep -q "^[a-z]* $rule:" "$work/stderr" || complain "$which: no $rule after: $*"
  grep -qF -- "$text" "$work/stderr" || complain "$which: \"$text\" is not said after: $*: $(head -c 500 "$work/stderr")"
  grep -q "^error $rule:" "$work/stderr" || return 0
  [ "$code" = 1 ] || complain "$which: check exits with $code"
  "$K3PACK" convert "$work/case" -o "$work/x.k3p" --quiet >/dev/null 2>&1
  code=$?
  case $code in 3 | 5) : ;; *) complain "$which: convert exits with $code" ;; esac
  [ -e "$work/x.k3p" ] && complain "$which: a refused conversion left an output"
}

# sound WHICH SOURCE EDIT...: no error, and convert makes $work/sound.k3p.
sound() {
  which=$1
  shift
  edit "$@"
  "$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" || complain "$which: $(head -c 400 "$work/stderr")"
  "$K3PACK" convert "$work/case" -o "$work/sound.k3p" --force --quiet >/dev/null 2>"$work/stderr" || complain "$which: $(head -c 400 "$work/stderr")"
}

# manifest PATTERN WHICH: a line of the image's manifest, spread out, matches.
manifest() {
  "$python" - "$work/sound.k3p" >"$work/manifest" <<'PY'
import json, struct, sys
with open(sys.argv[1], "rb") as file:
    n = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(n))
    begin, end = header["__k3pack__"]["data_offsets"]
    file.seek(8 + n + begin)
    manifest = json.loads(file.read(end - begin))
def walk(value, path):
    if isinstance(value, dict):
        for key in value:
            walk(value[key], path + "/" + key)
    elif isinstance(value, list) and value and isinstance(value[0], (dict, str)):
        for item in value:
            walk(item, path)
    else:
        print(path + "=" + json.dumps(value))
walk(manifest, "")
for linear in manifest["linears"]:
    for module in linear["modules"]:
        print("scheme of", module, linear["scheme"])
header.pop("__metadata__", None)
for name in header:
    print("tensor", name, header[name]["dtype"])
PY
  grep -q -- "$1" "$work/manifest" || complain "$2: the manifest has no \"$1\""
}

# ---- MiniMax-M3 ----

caught "M3V01, X06" m3-tiny-native CFG20 layer_types "set text_config.layer_types [\"full_attention\",\"minimax_m3_sparse\",\"minimax_m3_sparse\"]"
# 1.9 #7: a converter that dropped the index tensors left a file that could only run dense.
for name in index_q_proj index_k_proj index_q_norm index_k_norm; do
  caught "M3V02, 1.9 #7" m3-tiny MAP02 "layers.2.self_attn.$name" "drop $m3.2.self_attn.$name.weight"
done
caught "M3V02" m3-tiny MAP01 "layers.1.self_attn.index_q_proj" "set text_config.sparse_attention_config.sparse_attention_freq [0,0,1,1]"
caught "M3V02" m3-tiny MAP01 "layers.2.mlp.gate_proj" "copy $m3.0.mlp.gate_proj.weight $m3.2.mlp.gate_proj.weight"
for name in gate.weight e_score_correction_bias; do
  caught "M3V02" m3-tiny MAP02 "layers.2.block_sparse_moe" "drop $m3.2.block_sparse_moe.$name"
done
caught "M3V02" m3-tiny MAP04 "experts.w2" "drop $m3.2.block_sparse_moe.experts.3.w2.weight"
caught "M3V03" m3-tiny MAP05 index_k_proj "fill $m3.2.self_attn.index_k_proj.weight BF16 32,64 003d"
caught "M3V04" m3-tiny-native CFG20 "an even number" "set text_config.rope_parameters.partial_rotary_factor 0.4375"
# 1.9 #2, 1.9 #3: constants of the activation; another beta cannot be expressed, alpha and limit are carried as they are.
caught "M3V05, 1.9 #3" m3-tiny CFG20 swiglu_beta "set text_config.swiglu_beta 2.0"
caught "M3V05" m3-tiny CFG20 swiglu_alpha "set text_config.swiglu_alpha \"big\""
caught "M3V05" m3-tiny CFG20 swiglu_limit "set text_config.swiglu_limit 0"
sound "M3V05, 1.9 #3" m3-tiny "set text_config.swiglu_alpha -" "set text_config.swiglu_limit -" "set text_config.swiglu_beta 1.0"
manifest '^/model/activation/name="swiglu-oai"$' "1.9 #3"
sound "1.9 #2" m3-tiny "set text_config.swiglu_alpha 1.5" "set text_config.swiglu_limit 6"
manifest '^/model/activation/alpha=1.5$' "1.9 #2"
manifest '^/model/activation/limit=6$' "1.9 #2"
manifest '^tensor vision_tower.vision_model.encoder.layers.1.mlp.fc2.weight BF16$' "1.9 #2, the tower keeps its names"
caught "M3V07" m3-tiny MAP08 "block_sparse_moe.gate" "fill $m3.2.block_sparse_moe.gate.weight F16 4,64 003c"
# 1.9 #5: MXFP8 read as 128 x 128 floats, and four tensors of the patch merger forgotten.
caught "M3V08, 1.9 #5" m3-tiny-mxfp8 CFG11 weight_block_size "set quantization_config.weight_block_size [128,128]"
edit m3-tiny-mxfp8 "fill $m3.2.self_attn.o_proj.weight_scale_inv F32 1,1 0000803f"
"$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" && complain "M3V08, 1.9 #5: a float grid is read as MXFP8"
said "layers.2.self_attn.o_proj" "M3V08, 1.9 #5: the tensor is not named"
for name in linear_1.weight linear_1.bias linear_2.weight linear_2.bias; do
  caught "1.9 #5" m3-tiny MAP02 "patch_merge_mlp" "drop patch_merge_mlp.$name"
done
# 1.9 #6: the shared expert packed as expert 128, and the patch kernel in the wrong order of channels.
shared=$m3.2.block_sparse_moe.shared_experts experts=$m3.2.block_sparse_moe.experts
caught "M3V09, 1.9 #6" m3-tiny MAP04 "experts.4." "copy $shared.gate_proj.weight $experts.4.w1.weight" \
  "copy $shared.up_proj.weight $experts.4.w3.weight" "copy $shared.down_proj.weight $experts.4.w2.weight"
caught "M3V09, 1.9 #6" m3-tiny MAP04 "experts.4." "rename $shared.gate_proj.weight $experts.4.w1.weight" \
  "rename $shared.up_proj.weight $experts.4.w3.weight" "rename $shared.down_proj.weight $experts.4.w2.weight"
edit m3-tiny "drop $shared.gate_proj.weight" "drop $shared.up_proj.weight" "drop $shared.down_proj.weight"
"$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" && complain "M3V09: no shared expert at all is accepted"
said "layers.2.block_sparse_moe.shared_experts" "M3V09: the absent shared expert is not named"
caught "M3V14, 1.9 #6" m3-tiny MAP05 patch_embedding "reshape vision_tower.vision_model.embeddings.patch_embedding.weight 32,2,2,2,3"
caught "M3V14" m3-tiny MAP05 patch_embedding "reshape vision_tower.vision_model.embeddings.patch_embedding.weight 32,24"
# 1.9 #1: a mixed file with the shared expert fused into the routed ones lost its scales: here each module keeps its own scheme and place.
sound "M3V10, X10, 1.9 #1" m3-tiny-nvfp4
manifest '^scheme of model.layers.1.block_sparse_moe.experts.w13 nvfp4$' "M3V10, 1.9 #1"
manifest '^scheme of model.layers.1.block_sparse_moe.shared_experts.gate_up_proj mxfp8$' "M3V10, 1.9 #1"
caught "M3V11, X08" m3-tiny-mtp MAP02 eh_proj "drop language_model.model.mtp.layers.0.eh_proj.weight"
# 1.9 #14, 1.9 #4: ignore lists name unfused modules, the index projections among them.
caught "M3V15, 1.9 #14" m3-tiny-mxfp8 CFG03 index_q_proj "set quantization_config.ignored_layers [\"$m3.1.self_attn.index_q_proj\"]"
plain="fill $m3.1.self_attn.index_k_proj.weight BF16 16,64 003d"
caught "M3V15" m3-tiny-mxfp8 CFG02 index_k_proj "$plain" "drop $m3.1.self_attn.index_k_proj.weight_scale_inv"
gate=$m3.0.mlp.gate_proj up=$m3.0.mlp.up_proj
rest='"language_model.lm_head","language_model.model.embed_tokens","vision_tower","multi_modal_projector","patch_merge_mlp"'
sound "1.9 #4" m3-tiny-mxfp8 "fill $gate.weight BF16 96,64 003d" "fill $up.weight BF16 96,64 003d" "drop $gate.weight_scale_inv" \
  "drop $up.weight_scale_inv" \
  "set quantization_config.ignored_layers [\"$gate\",\"$up\",$rest]"
caught "1.9 #4" m3-tiny-mxfp8 FUS01 gate_proj "fill $gate.weight BF16 96,64 003d" "drop $gate.weight_scale_inv" \
  "set quantization_config.ignored_layers [\"$gate\",$rest]"
# 1.9 #12: dtype and architecture are checked before anything is loaded.
caught "1.9 #12" m3-tiny MAP08 input_layernorm "fill $m3.2.input_layernorm.weight I32 64 00000000"
caught "1.9 #12" m3-tiny TEN01 q_proj "fill $m3.2.self_attn.q_proj.weight I32 128,64 00000000"
caught "1.9 #12" m3-tiny CFG20 scoring_func "set text_config.scoring_func \"softmax\""
caught "1.9 #12" m3-tiny CFG20 use_routing_bias "set text_config.use_routing_bias false"
caught "1.9 #12" m3-tiny CFG20 use_qk_norm "set text_config.use_qk_norm false"
caught "1.9 #12" m3-tiny CFG20 qk_norm_type "set text_config.qk_norm_type \"per_layer\""
caught "1.9 #12" m3-tiny CFG20 attention_output_gate "set text_config.attention_output_gate true"

# ---- DeepSeek-V3.2 ----

for name in indexer.wq_b.weight indexer.wk.weight indexer.k_norm.weight indexer.k_norm.bias indexer.weights_proj.weight; do
  edit v32-tiny "drop $v32.2.self_attn.$name"
  "$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" && complain "DSV01: no $name in layer 2 is accepted"
  said "layers.2.self_attn.${name%.*}" "DSV01: $name is not named"
done
set --
for layer in 0 1 2 3; do
  for name in wq_b.weight wq_b.weight_scale_inv wk.weight wk.weight_scale_inv k_norm.weight k_norm.bias weights_proj.weight; do
    set -- "$@" "drop $v32.$layer.self_attn.indexer.$name"
  done
done
caught "DSV01" v32-tiny CFG20 "no layer has an indexer" "$@"
caught "DSV02" v32-tiny TEN05 q_a_proj "fill $v32.1.self_attn.q_a_proj.weight_scale_inv F32 2,2 0000803f"
edit v32-tiny "fill $v32.1.self_attn.q_a_proj.weight_scale_inv U8 2,3 7f"
"$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" && complain "DSV02: E8M0 bytes are read as a float grid"
said "layers.1.self_attn.q_a_proj" "DSV02: the tensor is not named"
# 2.6 #4, 2.6 #5: wk loaded without its scale; wk and weights_proj stay apart, each in the form it was stored in.
caught "DSV02, 2.6 #4" v32-tiny TEN01 indexer.wk "drop $v32.1.self_attn.indexer.wk.weight_scale_inv"
wk=$v32.2.self_attn.indexer.wk
caught "DSV03, 2.6 #4" v32-tiny CFG02 indexer.wk "fill $wk.weight BF16 32,96 003d" "drop $wk.weight_scale_inv"
sound "DSV03" v32-tiny "fill $wk.weight BF16 32,96 003d" "drop $wk.weight_scale_inv" "set quantization_config.modules_to_not_convert [\"$wk\"]"
sound "2.6 #5" v32-tiny
manifest '^tensor model.layers.2.self_attn.indexer.wk.weight F8_E4M3$' "2.6 #5"
manifest '^tensor model.layers.2.self_attn.indexer.weights_proj.weight BF16$' "2.6 #5, 2.6 #3"
manifest '^tensor lm_head.weight BF16$' "2.6 #3"
manifest '^tensor model.layers.2.mlp.gate.e_score_correction_bias F32$' "2.6 #7"
caught "DSV05" v32-tiny MAP05 e_score_correction_bias "fill $v32.1.mlp.gate.e_score_correction_bias F32 9 0000803f"
# 2.6 #1, 2.6 #2: the indexer turns halves, MLA pairs; descendants that turn pairs there too say so, and that is carried.
manifest '^/model/rotation/self_attn.indexer.wq_b/layout="half-split"$' "DSV06, X13, 2.6 #1"
manifest '^/model/rotation/self_attn.indexer.wk/width=16$' "X13, 2.6 #1"
manifest '^/model/rotation/self_attn.q_b_proj/layout="interleaved"$' "DSV06, X13, 2.6 #1"
manifest '^/model/norm/flavour="plain"$' "X12"
sound "2.6 #2" v32-tiny "set indexer_rope_interleave true"
manifest '^/model/rotation/self_attn.indexer.wk/interleaved=true$' "2.6 #2"
# 2.6 #8: the prediction layer under its own names; its KV scales are skipped, with a reason.
sound "2.6 #8, X03" v32-tiny "copy $v32.3.enorm.weight $v32.3.self_attn.k_scale" "copy $v32.3.enorm.weight $v32.2.self_attn.rotary_emb.inv_freq"
manifest '^tensor model.layers.3.self_attn.q_b_proj.weight F8_E4M3$' "2.6 #8"
manifest '^/dropped/why="a scale of the engine' "2.6 #8"
manifest '^/dropped/why="recomputed from the config"' "X03"
caught "DSV14, 2.6 #8" v32-tiny CFG21 mtp_block "rename $v32.3.self_attn.o_proj.weight $v32.3.mtp_block.self_attn.o_proj.weight"
caught "DSV14" v32-tiny CFG21 w13 "rename $v32.1.mlp.experts.0.gate_proj.weight $v32.1.mlp.experts.w13_weight"
# 2.6 #10: a rope built from the wrong one of two dictionaries.
caught "DSV10, 2.6 #10" v32-tiny CFG20 "rope_parameters says 8" "set rope_parameters {\"rope_type\":\"yarn\",\"factor\":8}"
for field in factor original_max_position_embeddings beta_fast beta_slow mscale_all_dim; do
  caught "DSV10" v32-tiny CFG20 "rope_scaling.$field" "set rope_scaling.$field -"
done
caught "DSV12" v32-tiny SCL11 "1 of 6 scales" "poke $v32.1.self_attn.q_a_proj.weight_scale_inv 0 3333333f"
# 2.6 #11: whether the shared expert is quantised is asked of it, not of the routed ones.
set --
for name in gate_proj:40,96 up_proj:40,96 down_proj:96,40; do
  set -- "$@" "fill $v32.1.mlp.shared_experts.${name%:*}.weight BF16 ${name#*:} 003d" "drop $v32.1.mlp.shared_experts.${name%:*}.weight_scale_inv"
done
sound "2.6 #11" v32-tiny "$@" "set quantization_config.modules_to_not_convert [\"$v32.1.mlp.shared_experts\"]"
manifest '^tensor model.layers.1.mlp.shared_experts.gate_up_proj.weight BF16$' "2.6 #11"
manifest '^tensor model.layers.1.mlp.experts.w13.weight F8_E4M3$' "2.6 #11"
# 2.6 #12: a weight in one shard, its scale in another.
[ -e "$work/v32-tiny/model-00002-of-000002.safetensors" ] || complain "v32-tiny has other shards than this test moves between"
sound "2.6 #12" v32-tiny "move $v32.0.self_attn.q_a_proj.weight_scale_inv model-00002-of-000002.safetensors"
"$K3PACK" convert "$work/v32-tiny" -o "$work/whole.k3p" --force --quiet && "$K3PACK" diff "$work/whole.k3p" "$work/sound.k3p" >/dev/null 2>&1 ||
  complain "2.6 #12: another place of a scale changes the image's tensors"
caught "2.6 #6" v32-tiny CFG20 scoring_func "set scoring_func \"softmax\""
caught "2.6 #6" v32-tiny CFG20 topk_method "set topk_method \"greedy\""
caught "2.6 #6" v32-tiny CFG20 hidden_act "set hidden_act \"gelu\""
caught "2.6 #6" v32-tiny CFG20 moe_layer_freq "set moe_layer_freq 2"

# ---- Kimi K3 ----

k3=$m3
# 3.8 #13: a loader skipped all expert tensors without an error.
set --
for e in 0 1 2 3; do
  for name in w1 w2 w3; do
    set -- "$@" "drop $k3.2.block_sparse_moe.experts.$e.$name.weight_packed" "drop $k3.2.block_sparse_moe.experts.$e.$name.weight_scale"
  done
done
edit k3-tiny "$@"
"$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr" && complain "K3V05, 3.8 #13: a layer without any expert is accepted"
said "layers.2.block_sparse_moe.experts.0.w1" "K3V05, 3.8 #13: the experts are not named"
# 3.8 #8, 3.8 #9: ignore lists with and without the root; what is plain is plain because its dtype says so.
for root in "" "language_model."; do
  items="\"${root}lm_head\",\"vision_tower\",\"mm_projector\",\"re:.*self_attn.*\",\"re:.*shared_experts.*\",\"re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*\""
  sound "K3V10, 3.8 #8" k3-tiny "set text_config.quantization_config.ignore [$items]"
done
manifest '^scheme of model.layers.1.block_sparse_moe.experts.w13 mxfp4$' "3.8 #9"
manifest '^tensor model.layers.3.self_attn.kv_b_proj.weight BF16$' "3.8 #9"
manifest '^tensor model.layers.1.block_sparse_moe.shared_experts.gate_up_proj.weight BF16$' "3.8 #9"
# 3.8 #3, 3.8 #4, 3.8 #16: A_log as it was stored, whole on every rank; widths of experts without a kernel's padding; 3.8 #12: eps is the config's.
manifest '^tensor model.layers.1.self_attn.A_log F32$' "3.8 #3"
manifest '^/model/moe_intermediate_size=64$' "3.8 #16"
manifest '^/model/rms_norm_eps=1e-05$' "3.8 #12"
# 3.8 #11: shared experts are no routed ones.
manifest '^/model/num_experts=4$' "3.8 #11"
manifest '^/model/num_shared_experts=2$' "3.8 #11"
for name in input_layernorm self_attention_res_norm self_attention_res_proj post_attention_layernorm mlp_res_norm mlp_res_proj; do
  caught "K3V03" k3-tiny MAP02 "layers.3.$name" "drop $k3.3.$name.weight"
done
caught "K3V07" k3-tiny SCL01 "experts.2.w1" "poke $k3.2.block_sparse_moe.experts.2.w1.weight_scale 0 ff"
caught "K3V11" k3-tiny MAP02 routed_expert_norm "drop $k3.2.block_sparse_moe.routed_expert_norm.weight"
# K3V17: numbers of five digits before counts of six are one series, of which a file is missing.
[ -e "$work/k3-tiny/model-00008-of-000008.safetensors" ] || complain "K3V17: k3-tiny has other file names"
edit k3-tiny
rm "$work/case/model.safetensors.index.json" "$work/case/model-00003-of-000008.safetensors"
expect 1 "$K3PACK" check "$work/case"
said "IDX08.*7 of 8 numbered shards" "K3V17: the series is not recognised"
# 3.8 #10: two roots.
caught "X03, 3.8 #10" k3-tiny MAP06 "model.norm" "rename language_model.model.norm.weight model.norm.weight"

# ---- all of them ----

# X01: a config of one family over the tensors of another.
for pair in "m3-tiny v32-tiny minimax-m3" "v32-tiny m3-tiny deepseek-v3.2" "k3-tiny m3-tiny kimi-k3" "m3-tiny k3-tiny minimax-m3"; do
  set -- $pair
  cp "$work/$2/config.json" "$work/config.json"
  edit "$1"
  cp "$work/config.json" "$work/case/config.json"
  expect 1 "$K3PACK" check "$work/case"
  said "the tensors are those of $3" "X01: $1 under the config of $2"
done
# X02: a field at the top and another value below text_config; numbers, lists and texts alike.
caught "X02" m3-tiny CFG20 "at the top" "set rms_norm_eps 0.25"
caught "X02" m3-tiny CFG20 "rope_theta" "set rope_theta 20000"
caught "X02" m3-tiny CFG20 "moe_layer_freq" "set moe_layer_freq [1,1,1,1]"
sound "X02" m3-tiny "set rope_theta 10000.0"
caught "X03" m3-tiny MAP01 "layers.1.self_attn.sinks" "copy $m3.1.self_attn.q_norm.weight $m3.1.self_attn.sinks"

# ---- the lists are complete ----

# listed FILE IDS: FILE has each id once, and nothing else; the test it names carries the id, or "-" stands with a reason.
listed() {
  file=$1
  for id in $2; do
    id=$(echo "$id" | tr _ ' ')
    line=$(grep "^$id " "$file")
    [ "$(printf '%s\n' "$line" | grep -c .)" = 1 ] || { complain "$file: $id is there $(printf '%s\n' "$line" | grep -c .) times"; continue; }
    rest=${line#"$id "}
    case $rest in *": "?*) : ;; *) complain "$file: $id has no description" ;; esac
    for test in $(echo "${rest%%:*}" | tr -d ,); do
      [ "$test" = - ] && continue
      grep -q -E "(^|[^A-Za-z0-9])$id([^0-9]|\$)" "$test" || complain "$file: $test does not carry $id"
    done
  done
  [ "$(grep -v -c '^#' "$file")" = "$(echo "$2" | wc -w)" ] || complain "$file has lines that nobody asked for"
}
numbers() {  # PREFIX FIRST LAST FORMAT
  awk -v p="$1" -v a="$2" -v b="$3" -v f="$4" 'BEGIN { for (i = a; i <= b; i++) printf "%s" f " ", p, i }'
}
listed fixtures/moe/faults.txt "$(numbers 1.9_ 1 14 '#%d')$(numbers 2.6_ 1 14 '#%d')$(numbers 3.8_ 1 16 '#%d')"
listed fixtures/moe/rules.txt "$(numbers M3V 1 15 '%02d')$(numbers DSV 1 14 '%02d')$(numbers K3V 1 18 '%02d')$(numbers X 1 13 '%02d')\
$(numbers M 1 10 '%d')$(numbers D 1 7 '%d')"
finish
