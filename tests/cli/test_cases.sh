# Inputs that people met in the wild and that no other test holds: one fault in a synthetic checkpoint, and what check and convert say. The letters B and a
# number count such cases; those of containers, indexes and configs are fixtures (fixtures/reject), those of the runtime are unit tests.
. tests/cli/k3.sh
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the faults with"; exit 77; }
"$K3PACK" synth "$work/k3" --preset k3-tiny --quiet || exit 1
k3=language_model.model.layers

# edited SOURCE EDIT...: a copy of a checkpoint, changed, in $work/case.
edited() {
  rm -rf "$work/case"
  cp -R "$1" "$work/case"
  shift
  while [ $# -gt 0 ]; do
    "$python" tests/python/edit_checkpoint.py "$work/case" $1 || complain "the edit failed: $1"
    shift
  done
}

# found RULES WHY: the errors of check on $work/case are exactly these rules; convert refuses the same and leaves nothing.
found() {
  if [ -n "$1" ]; then expect 1 "$K3PACK" check "$work/case" --json; else expect 0 "$K3PACK" check "$work/case" --json; fi
  [ "$(rules)" = "$1" ] || complain "$2: \"$(rules)\" instead of \"$1\""
  rm -rf "$work/out"
  mkdir "$work/out"
  "$K3PACK" convert "$work/case" -o "$work/out/x.k3p" --quiet >/dev/null 2>&1
  code=$?
  if [ -n "$1" ]; then
    [ "$code" = 3 ] || [ "$code" = 5 ] || complain "$2: convert exits with $code"
    [ -z "$(ls -A "$work/out")" ] || complain "$2: a refused conversion left $(ls -A "$work/out")"
  else
    [ "$code" = 0 ] || complain "$2: convert exits with $code"
  fi
}

# B46: one expert missing, of another shape, or beyond the count.
edited "$work/k3" "drop $k3.2.block_sparse_moe.experts.1.w1.weight_packed" "drop $k3.2.block_sparse_moe.experts.1.w1.weight_scale"
found "MAP04" "B46, expert 1 without w1"
"$K3PACK" check "$work/case" >"$work/stdout" 2>"$work/stderr"
said "layers.2.block_sparse_moe.experts.1.w1" "B46: the expert is not named"
edited "$work/k3" "reshape $k3.2.block_sparse_moe.experts.1.w1.weight_packed 16,64"
"$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null && complain "B46: an expert of another shape is accepted"
case $(rules) in *MAP05* | *TEN0*) : ;; *) complain "B46, transposed: \"$(rules)\"" ;; esac
edited "$work/k3" "copy $k3.2.block_sparse_moe.experts.1.w1.weight_packed $k3.2.block_sparse_moe.experts.4.w1.weight_packed"
found "MAP04" "B46, expert 4 of 4"

# B47: layers.1 is not layers.10, and two tensors for one place are told.
edited "$work/k3" "copy $k3.1.self_attn.o_proj.weight $k3.10.self_attn.o_proj.weight"
found "MAP04" "B47, layer 10 of 5"

# B49: g_proj in both kinds of layers; one missing, one spare.
edited "$work/k3" "drop $k3.3.self_attn.g_proj.weight"
found "MAP02" "B49, no gate in an MLA layer"
edited "$work/k3" "drop $k3.1.self_attn.g_proj.weight"
found "MAP02" "B49, no gate in a KDA layer"
edited "$work/k3" "copy $k3.1.self_attn.f_a_proj.weight $k3.1.self_attn.g_a_proj.weight"
found "MAP01" "B49, a low-rank gate besides"

# B50: the lists count from one; taken from zero they contradict the tensors; a layer in no list, or in two.
edited "$work/k3" "set text_config.linear_attn_config.kda_layers [0,1,2]" "set text_config.linear_attn_config.full_attn_layers [3,4]"
"$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null && complain "B50: lists that count from 0 are accepted"
case $(rules) in *CFG20*) : ;; *) complain "B50, from 0: \"$(rules)\"" ;; esac
edited "$work/k3" "set text_config.linear_attn_config.full_attn_layers -"
"$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null && complain "B50: a missing list is accepted"
case $(rules) in *CFG20*) : ;; *) complain "B50, no list: \"$(rules)\"" ;; esac
edited "$work/k3" "set text_config.linear_attn_config.full_attn_layers [3,4,5]"
found "CFG20" "B50, a layer of two kinds"

# B23: F8_E8M0 and F4 tensors: sixteen 4-bit elements are eight bytes. B70: all 256 codes of E4M3, exactly.
mkdir "$work/new"
"$python" - "$work/new" <<'END'
import json, struct, sys
def write(name, tensors):
    header, data = {}, b""
    for n, (dtype, shape, value) in tensors.items():
        header[n] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(sys.argv[1] + "/" + name, "wb").write(struct.pack("<Q", len(text)) + text + data)
write("b23.safetensors", {"s": ("F8_E8M0", [4], bytes.fromhex("7f8000fe")), "w": ("F4", [2, 8], bytes.fromhex("1032547698badcfe"))})
write("b70.safetensors", {"codes": ("F8_E4M3", [256], bytes(range(256)))})
# B53, in small: 896 experts with short names.
write("b53.safetensors", {"e.%d.w" % i: ("U8", [1, 1], bytes([i % 256])) for i in range(896)})
END
expect 0 "$K3PACK" check "$work/new/b23.safetensors" --recipe generic --depth values
expect 0 "$K3PACK" inspect "$work/new/b23.safetensors"
grep -q 'w .*F4 .*\[2, 8\] .* 8 bytes' "$work/stdout" || complain "B23: F4 [2, 8] is not shown as 8 bytes: $(cat "$work/stdout")"
expect 0 "$K3PACK" convert "$work/new/b23.safetensors" -o "$work/new/b23.k3p" --recipe generic
expect 0 "$K3PACK" diff "$work/new/b23.safetensors" "$work/new/b23.k3p"
expect 0 "$K3PACK" inspect "$work/new/b70.safetensors" --tensor codes
expect 0 "$K3PACK" check "$work/new/b53.safetensors" --recipe generic --depth values
grep -q 'tensors 896/896' "$work/stdout" || complain "B53: not 896 tensors"

# B16: data that begins at any byte is packed with its bits. B25: headers that end around the sizes in which readers read. B26: the cap itself.
"$python" - "$work/new" <<'END'
import json, struct, sys
folder = sys.argv[1]
def write(name, text, data, length=None):
    open(folder + "/" + name, "wb").write(struct.pack("<Q", len(text) if length is None else length) + text + data)
text = b'{"u":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"f":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}'
for extra in range(8):
    write("b16-%d.safetensors" % extra, text + b" " * extra + b"}", b"abc" + struct.pack("<f", 1.0))
text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
for end in (65535, 65536, 65537, 99994, 99999, 100000, 100001, 100008):
    write("b25-%d.safetensors" % end, text.ljust(end - 8), b"x")
write("b26-at-the-cap.safetensors", b"{}", b"", 100000000)
write("b26-above.safetensors", b"{}", b"", 100000001)
# B29: payloads are little-endian.
values = {"bf16": ("BF16", [2], bytes.fromhex("803f00c0")), "f32": ("F32", [1], bytes.fromhex("0000803f")), "i64": ("I64", [1], bytes.fromhex("0100000000000000"))}
header, data = {}, b""
for n, (dtype, shape, value) in values.items():
    header[n] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
    data += value
write("b29.safetensors", json.dumps(header).encode(), data)
# B79: 1.0, NaN, Inf and a NaN with another payload.
write("b79.safetensors", b'{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}', bytes.fromhex("803fc07f807f817f"))
END
for file in "$work"/new/b16-*.safetensors "$work"/new/b25-*.safetensors; do
  expect 0 "$K3PACK" check "$file" --recipe generic --depth values
  expect 0 "$K3PACK" convert "$file" -o "$work/new/x.k3p" --recipe generic --force
  expect 0 "$K3PACK" verify "$work/new/x.k3p" --source "$file"
  case $file in
    *b16*) "$K3PACK" inspect "$file" --tensor f | grep -q 'min 1.*max 1' || complain "B16: $file does not hold 1.0: $("$K3PACK" inspect "$file" --tensor f)" ;;
  esac
done
expect 1 "$K3PACK" check "$work/new/b26-at-the-cap.safetensors" --recipe generic
said 'CNT02.*100000000' "B26: the length is not said"
at_cap=$(cat "$work/stderr")
expect 1 "$K3PACK" check "$work/new/b26-above.safetensors" --recipe generic
said 'CNT02.*100000001.*100000000' "B26: length and limit are not said"
[ "$at_cap" != "$(cat "$work/stderr")" ] || complain "B26: the cap and one more are the same"
"$K3PACK" inspect "$work/new/b29.safetensors" --tensor bf16 | grep -q 'min -2.*max 1' || complain "B29: BF16 $("$K3PACK" inspect "$work/new/b29.safetensors" --tensor bf16)"
"$K3PACK" inspect "$work/new/b29.safetensors" --tensor i64 | grep -q '\b1\b' || complain "B29: I64 $("$K3PACK" inspect "$work/new/b29.safetensors" --tensor i64)"
expect 0 "$K3PACK" convert "$work/new/b79.safetensors" -o "$work/new/b79.k3p" --recipe generic
said 'VAL02.*3 values' "B79: convert does not count NaN and Inf"
expect 0 "$K3PACK" export "$work/new/b79.k3p" -o "$work/new/b79"
cmp "$work/new/b79.safetensors" "$work/new/b79/b79.safetensors" || complain "B79: NaN payloads do not survive"
# B10: metadata alone is a checkpoint of no tensors, which comes back.
expect 0 "$K3PACK" convert fixtures/reject/b10-metadata-alone-clean/input.safetensors -o "$work/new/b10.k3p" --recipe generic
expect 0 "$K3PACK" export "$work/new/b10.k3p" -o "$work/new/b10"
cmp fixtures/reject/b10-metadata-alone-clean/input.safetensors "$work/new/b10/input.safetensors" || complain "B10: metadata alone does not come back"
# B35: the index decides whose bytes are packed.
expect 0 "$K3PACK" convert fixtures/reject/b35-with-index/input -o "$work/new/b35.k3p" --recipe generic
expect 0 "$K3PACK" diff fixtures/reject/idx-clean/input "$work/new/b35.k3p"

# B80: every tensor of the drafter, taken away one at a time. The embedding, which the target has too, and the confidence head may be absent.
"$K3PACK" synth "$work/one" --preset tiny --shards 1 --quiet || complain "synth"
for name in $("$K3PACK" inspect "$work/one" 2>/dev/null | awk '$2 == "BF16" { print $1 }'); do
  edited "$work/one" "drop $name"
  "$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null
  code=$?
  case $name in
    embed_tokens.weight) [ "$code" = 0 ] || complain "B80: the embedding must not be demanded: $(rules)" ;;
    confidence_head.*) : ;;
    *) case "$code $(rules)" in "1 MAP02" | "1 MAP04" | "1 MAP02 MAP04") : ;; *) complain "B80: without $name: exit $code, \"$(rules)\"" ;; esac ;;
  esac
done
edited "$work/one" "copy final_norm.weight extra_norm.weight"
found "MAP01" "B80, one more tensor"

# B82: embedding and head each on their own: absent is recorded, present is used.
edited "$work/one" "drop embed_tokens.weight"
expect 0 "$K3PACK" convert "$work/case" -o "$work/borrowed.k3p"
said "embed_tokens is borrowed" "B82: a borrowed embedding is not said"
expect 0 "$K3PACK" convert "$work/case" -o "$work/packed.k3p" --target "$work/target"

# B83: a reduced vocabulary with d2t and t2d tables is another family: refused by name or by tensor.
edited "$work/one" "set draft_vocab_size 256"
"$K3PACK" convert "$work/case" -o "$work/x.k3p" >/dev/null 2>&1 && complain "B83: a reduced draft vocabulary is packed"
edited "$work/one" "copy markov_head.markov_w2.weight d2t"
"$K3PACK" convert "$work/case" -o "$work/x.k3p" >/dev/null 2>&1 && complain "B83: a d2t table is packed"

# B85: fc_norm true needs one norm per tap, none and some are refused; tensors of another family under this config too.
edited "$work/one" "set fc_norm true"
found "MAP02" "B85, fc_norm without norms"
edited "$work/one" "set fc_norm true" "copy context_norm.weight fc_norm.0.weight"
found "MAP02" "B85, one norm of three"
edited "$work/one" "set fc_norm true" "copy context_norm.weight fc_norm.0.weight" "copy context_norm.weight fc_norm.1.weight" \
  "copy context_norm.weight fc_norm.2.weight"
found "" "B85, a norm for every tap"
edited "$work/one" "copy context_norm.weight fc_norm.0.weight"
"$K3PACK" check "$work/case" >/dev/null 2>&1 && complain "B85: a norm that the config does not know is accepted"
edited "$work/one" "rename layers.1.self_attn.q_b_proj.weight layers.1.self_attn.q_proj.weight"
"$K3PACK" convert "$work/case" -o "$work/x.k3p" >/dev/null 2>&1 && complain "B85: q_proj in an MLA drafter is packed"

# B104: a folder that holds an older checkpoint: refused, or replaced as a whole; what is not ours stays, and what would spoil the new one is refused.
"$K3PACK" convert "$work/draft" -o "$work/three.k3p" --quiet 2>/dev/null
"$K3PACK" convert "$work/one" -o "$work/one.k3p" --quiet 2>/dev/null
expect 0 "$K3PACK" export "$work/three.k3p" -o "$work/old"
echo notes >"$work/old/notes.txt"
expect 2 "$K3PACK" export "$work/one.k3p" -o "$work/old"
said 'OUT01.*the folder holds model-0000' "B104: what the folder holds is not said"
expect 0 "$K3PACK" export "$work/one.k3p" -o "$work/old" --force
[ "$(ls -A "$work/old" | tr '\n' ' ')" = "config.json model.safetensors notes.txt " ] || complain "B104: the folder holds $(ls -A "$work/old" | tr '\n' ' ')"
expect 0 "$K3PACK" check "$work/old" --strict
expect 0 "$K3PACK" export "$work/three.k3p" -o "$work/old" --force
[ "$(ls -A "$work/old" | grep -c .)" = 6 ] && [ ! -e "$work/old/model.safetensors" ] || complain "B104: the folder holds $(ls -A "$work/old" | tr '\n' ' ')"
echo other >"$work/old/other.safetensors"
before=$(cd "$work/old" && cksum *)
expect 2 "$K3PACK" export "$work/one.k3p" -o "$work/old" --force
said 'OUT01.*other.safetensors' "B104: foreign weights are not named"
[ "$before" = "$(cd "$work/old" && cksum *)" ] || complain "B104: a refused export changed the folder"
# An export that fails midway loses nothing: the second file is too large for the limit, or cannot be written over.
rm "$work/old/other.safetensors"
before=$(cd "$work/old" && cksum *)
(ulimit -f 100; exec "$K3PACK" export "$work/one.k3p" -o "$work/old" --force) >/dev/null 2>&1 && complain "B104: no space is not noticed"
[ "$before" = "$(cd "$work/old" && cksum *)" ] || complain "B104: an export without space changed the folder"
rm "$work/old/config.json"
mkdir "$work/old/config.json"
expect 2 "$K3PACK" export "$work/one.k3p" -o "$work/old" --force
[ -e "$work/old/model-00001-of-00003.safetensors" ] && [ ! -e "$work/old/model.safetensors" ] || complain "B104: a failed export changed the folder"
# B103: the output folder holds the image.
mkdir "$work/own"
cp "$work/one.k3p" "$work/own/model.safetensors"
expect 2 "$K3PACK" export "$work/own/model.safetensors" -o "$work/own" --force
said 'OUT02.*holds the image' "B103: export beside the image"
cmp -s "$work/one.k3p" "$work/own/model.safetensors" || complain "B103: export replaced its own image"
# A file where a folder should be is wrong usage, as it is for convert.
echo file >"$work/file"
expect 2 "$K3PACK" export "$work/one.k3p" -o "$work/file"
[ "$(cat "$work/file")" = file ] || complain "export touched a file"

# B88: tap ids: beyond the target, twice; another order is a warning.
edited "$work/one" "set target_layer_ids [1,3,8]"
found "CFG20" "B88, layer 8 of 8"
edited "$work/one" "set target_layer_ids [1,3,3]"
found "CFG20" "B88, one layer twice"
edited "$work/one" "set target_layer_ids [3,1,6]"
expect 1 "$K3PACK" check "$work/case" --strict
expect 0 "$K3PACK" check "$work/case"
edited "$work/one" "set target_layer_ids [1,3]"
"$K3PACK" check "$work/case" --json >"$work/stdout" 2>/dev/null && complain "B88: a context_proj of another width is accepted"
case $(rules) in *CFG20* | *MAP05*) : ;; *) complain "B88, two taps: \"$(rules)\"" ;; esac
finish
