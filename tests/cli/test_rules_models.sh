# Rules that need a whole model of a family: one fault in a synthetic checkpoint, one rule. Each checkpoint is clean of the rule before the fault.
. tests/cli/k3.sh
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the faults with"; exit 77; }

# says RULE: whether the last --json output reports the rule.
says() {
  grep -q "\"rule\": \"$1\"" "$work/stdout"
}

# breaks RULE SEVERITY SOURCE EDIT...: the rule is silent before the edit, and afterwards says so with that severity.
breaks() {
  rule=$1 severity=$2 source=$3
  shift 3
  rm -rf "$work/case"
  cp -R "$source" "$work/case"
  "$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null
  says "$rule" && complain "$rule: said of a clean checkpoint"
  while [ $# -gt 0 ]; do
    "$python" tests/python/edit_checkpoint.py "$work/case" $1 || complain "$rule: the edit failed: $1"
    shift
  done
  "$K3PACK" check "$work/case" --json >"$work/stdout" 2>"$work/stderr"
  code=$?
  says "$rule" || complain "$rule: not said: $(head -c 300 "$work/stderr")"
  awk -v rule="$rule" '/"severity": "/ { s = $2 } /"rule": "/ { if (index($0, "\"" rule "\"")) print s }' "$work/stdout" | grep -q "$severity" ||
    complain "$rule: not with severity $severity"
  if [ "$severity" = error ] && [ "$code" != 1 ]; then complain "$rule: exit $code"; fi
}

for preset in k3-tiny m3-tiny-mtp v32-tiny; do
  "$K3PACK" synth "$work/$preset" --preset "$preset" --quiet || complain "synth $preset"
done
k3=language_model.model.layers
breaks K3V04 warning "$work/k3-tiny" "poke $k3.1.self_attn.A_log 28 0000803f"
breaks K3V08 warning "$work/k3-tiny" "rename $k3.1.block_sparse_moe.gate.e_score_correction_bias $k3.1.block_sparse_moe.e_score_correction_bias"
breaks K3V12 info "$work/k3-tiny" "reshape $k3.0.mlp_res_proj.weight 64"
breaks K3V15 warning "$work/k3-tiny" "set text_config.num_experts_per_token -" "set text_config.num_experts_per_tok 2"
breaks M3V07 warning "$work/m3-tiny-mtp" "to-bf16 $k3.1.block_sparse_moe.gate.weight"
breaks M3V11 info "$work/m3-tiny-mtp" "set text_config.num_mtp_modules 2"
breaks M3V14 warning "$work/m3-tiny-mtp" "to-bf16 vision_tower.vision_model.embeddings.patch_embedding.weight"
"$K3PACK" check "$work/m3-tiny-mtp" --json >"$work/stdout" 2>/dev/null
says M3V12 || complain "M3V12: two experts a token are not four"
"$python" tests/python/edit_checkpoint.py "$work/m3-tiny-mtp" set text_config.num_experts_per_tok 4
"$K3PACK" check "$work/m3-tiny-mtp" --json >"$work/stdout" 2>/dev/null
says M3V12 && complain "M3V12: four experts a token are the released model's"
breaks X08 info "$work/v32-tiny" "set num_nextn_predict_layers 2"
breaks TEN14 warning "$work/v32-tiny" "set tie_word_embeddings true"

# Names of the drafter.
breaks MAP03 error "$work/draft" "copy context_proj.weight fc.weight"
breaks MAP07 error "$work/draft" "rename layers.1.mlp.up_proj.weight layers.01.mlp.up_proj.weight"
breaks MAP08 error "$work/draft" "to-i16 final_norm.weight"
finish
