# check --engine: the severity of a finding is what that engine would suffer. Quantised drafters whose q_a and kv_a, gate and up, and whose layers have
# scales of their own: k3pack informs only, vllm reports FUS02, FUS05 and FUS06 with ratio and expected error.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 77; }
command -v python3 >/dev/null || { echo "python3 is not there, so nothing can be damaged: skipped"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0

complain() {
  echo "$1"
  failed=$((failed + 1))
}

# "RULE severity" of every finding, sorted, each once.
rules_of() {
  python3 -c 'import json, sys; print(*sorted({f["rule"] + "/" + f["severity"] for f in json.load(sys.stdin)["findings"]}))'
}

expect() { # name, options of check, wanted rules, wanted exit code
  found=$("$K3PACK" check "$work/$1" $2 --json 2>/dev/null)
  code=$?
  rules=$(printf '%s' "$found" | rules_of)
  [ "$rules" = "$3" ] || complain "$1 $2: found \"$rules\" instead of \"$3\""
  [ "$code" = "$4" ] || complain "$1 $2: exit code $code instead of $4"
}

make() { # folder, options of synth
  "$K3PACK" synth "$work/$1" --preset tiny --quiet $2 || complain "synth $2"
}

make plain ""
make nvfp4 "--quant nvfp4"
make nvfp4-modelopt "--quant nvfp4 --dialect modelopt"
make nvfp4-module "--quant nvfp4 --share module"
make nvfp4-component "--quant nvfp4 --share component"
make fp8-tensor "--quant fp8-tensor"
make fp8-block "--quant fp8-block --dialect deepseek"
make mxfp4 "--quant mxfp4"
make fp8-channel "--quant fp8"

# `check --engine vllm` reports FUS02, FUS05, FUS06 on those files, `--engine k3pack` informs only.
for name in nvfp4 nvfp4-modelopt; do
  expect $name "" "FUS02/info FUS06/info" 0
  expect $name "--strict" "FUS02/info FUS06/info" 0
  expect $name "--engine vllm" "FUS02/error FUS06/error" 1
  expect $name "--engine sglang" "FUS02/error FUS06/warning" 1
  expect $name "--engine trtllm" "FUS02/error FUS06/warning" 1
  expect $name "--engine vllm --depth headers" "" 0
done
expect nvfp4-module "--engine vllm" "FUS06/error" 1
expect nvfp4-component "--engine vllm" "" 0
expect fp8-tensor "" "FUS04/info FUS06/info" 0
expect fp8-tensor "--engine vllm" "FUS04/warning FUS06/error" 1
expect fp8-block "--depth headers" "FUS05/info" 0
expect fp8-block "--engine vllm --depth headers" "FUS05/error" 1
expect mxfp4 "--engine vllm" "" 0
expect fp8-channel "--engine vllm" "" 0
expect plain "" "" 0
expect plain "--engine vllm" "CFG17/warning" 0
expect plain "--engine vllm --strict" "CFG17/warning" 1

# With ratio and expected error, in opposite directions for the two naming conventions.
"$K3PACK" check "$work/nvfp4" --engine vllm --verbose >"$work/log" 2>&1
grep -q 'layers.0.self_attn.kv_a_proj_with_mqa.weight_global_scale: 2 members with second scales .* ratio 7\.[0-9]*: .* shrinks layers.0.self_attn.kv_a_proj_with_mqa by 7\.[0-9]* (error 8[0-9]\.[0-9] %)' "$work/log" ||
  complain "no ratio and error for compressed-tensors: $(grep -m 1 FUS02 -A 1 "$work/log")"
grep -q 'model.context_kv_proj: 6 members with second scales .* ratio 7\.' "$work/log" || complain "FUS06 does not name the cross-layer projection"
"$K3PACK" check "$work/nvfp4-modelopt" --engine vllm --verbose >"$work/log" 2>&1
grep -q 'ratio 7\.[0-9]*: .* inflates layers.0.self_attn.q_a_proj by 7\.[0-9]* (error 6[0-9][0-9]\.[0-9] %)' "$work/log" || complain "no ratio and error for ModelOpt"

# Damage: each kind gives its rule, and convert leaves no output.
damage() { # source, python statements on `t` (name -> [dtype, shape, bytes]) and `c` (config), wanted rules of check, exit code of convert
  rm -rf "$work/bad"
  cp -r "$work/$1" "$work/bad"
  python3 - "$work/bad" "$2" <<'PY'
import json, struct, sys
folder, code = sys.argv[1:]
path = folder + "/model.safetensors"
raw = open(path, "rb").read()
h = struct.unpack("<Q", raw[:8])[0]
header = json.loads(raw[8:8 + h])
meta = header.pop("__metadata__", None)
t = {k: [v["dtype"], v["shape"], raw[8 + h + v["data_offsets"][0]:8 + h + v["data_offsets"][1]]] for k, v in header.items()}
c = json.load(open(folder + "/config.json"))
exec(code)
out, data = {"__metadata__": meta} if meta else {}, b""
for name, (dtype, shape, value) in t.items():
    out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
    data += value
text = json.dumps(out).encode()
text += b" " * (-len(text) % 8)
open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)
json.dump(c, open(folder + "/config.json", "w"))
PY
  found=$("$K3PACK" check "$work/bad" --json 2>/dev/null | rules_of)
  case " $found " in
    *" $3 "*) ;;
    *) complain "$1: $2: found \"$found\", without $3" ;;
  esac
  mkdir -p "$work/out"
  "$K3PACK" convert "$work/bad" -o "$work/out/image" >"$work/log" 2>&1
  code=$?
  [ "$code" = "$4" ] || complain "$1: $2: convert exits with $code instead of $4: $(head -c 300 "$work/log")"
  [ "$code" = 0 ] || [ -z "$(ls -A "$work/out")" ] || complain "$1: $2: convert left an output"
  rm -rf "$work/out"
}
kv=layers.1.self_attn.kv_a_proj_with_mqa
up=layers.2.mlp.up_proj
damage nvfp4 "del t['$kv.weight_scale']" TEN01/error 3
damage nvfp4 "del t['$kv.weight_global_scale']" TEN01/error 3
damage nvfp4 "del t['$kv.weight_packed']" TEN02/error 3
damage nvfp4 "t['$kv.weight_scale'][1] = [4, 40]" TEN06/error 3
damage nvfp4 "e = t['$kv.weight_scale']; e[1] = [40, 2]; e[2] = e[2][:80]" TEN05/error 3
damage nvfp4 "e = t['$kv.weight_scale']; e[2] = b'\\x7f' + e[2][1:]" SCL01/error 3
damage nvfp4 "t['$kv.weight_global_scale'][2] = b'\\0\\0\\x80\\x7f'" SCL02/error 3
damage nvfp4 "t['$kv.weight_global_scale'][2] = bytes(4)" SCL03/error 3
damage nvfp4 "e = t['$kv.weight_global_scale']; e[2] = e[2][:3] + bytes([e[2][3] | 0x80])" SCL05/error 3
damage nvfp4 "e = t['$kv.weight_global_scale']; e[2] = struct.pack('<f', 1 / struct.unpack('<f', e[2])[0])" SCL08/error 3
damage nvfp4-modelopt "e = t['$kv.weight_scale_2']; e[2] = struct.pack('<f', 1 / struct.unpack('<f', e[2])[0])" SCL08/error 3
damage nvfp4 "t['$kv.input_global_scale'][2] = b'\\0\\0\\xc0\\x7f'" SCL01/error 3
damage nvfp4 "del t['$kv.input_global_scale']" TEN01/error 3
damage mxfp4 "e = t['$kv.weight_scale']; e[2] = b'\\xff' + e[2][1:]" SCL01/error 3
damage mxfp4 "e = t['$kv.weight_scale']; e[2] = bytes(b & 1 for b in e[2])" SCL15/error 3
damage mxfp4 "e = t['$kv.weight_scale']; e[0] = 'F32'; e[2] = b''.join(struct.pack('<f', 2.0 ** (b - 127)) for b in e[2])" TEN04/error 3
damage fp8-block "e = t['layers.0.mlp.gate_proj.weight_scale_inv']; e[1] = [1, 2]; e[2] *= 2" TEN05/error 3
damage fp8-channel "e = t['$kv.weight_scale']; e[1] = [1, 40]" TEN06/error 3
# One sibling quantised and the other not, whatever the config says of it; then one layer unlike the others.
plain_up="
for p in ('weight_packed', 'weight_scale', 'weight_global_scale', 'input_global_scale'):
    del t['$up.' + p]
t['$up.weight'] = ['BF16', [128, 64], bytes(2 * 128 * 64)]
"
damage nvfp4 "$plain_up" CFG02/error 3
damage nvfp4 "$plain_up
c['quantization_config']['ignore'].append('$up')" FUS01/error 3
damage nvfp4 "
for q in ('q_a_proj', 'kv_a_proj_with_mqa'):
    rows = t['layers.1.self_attn.%s.weight_packed' % q][1][0]
    for p in ('weight_packed', 'weight_scale', 'weight_global_scale', 'input_global_scale'):
        del t['layers.1.self_attn.%s.%s' % (q, p)]
    t['layers.1.self_attn.%s.weight' % q] = ['BF16', [rows, 64], bytes(2 * rows * 64)]
c['quantization_config']['ignore'].append('re:.*layers.1.self_attn.(q|kv)_a_proj.*')" FUS01/error 3
# What only generic packs.
damage fp8-channel "
for k in list(t):
    if k.endswith('.weight_scale'):
        rows, cols = t[k[:-6]][1]
        t[k] = ['BF16', [rows, cols // 16], b''.join(t[k][2][2 * r:2 * r + 2] * (cols // 16) for r in range(rows))]
c['quantization_config']['config_groups']['group_0']['weights'].update(strategy='group', group_size=16)" "" 5
# Entries that depend on layer numbers or the prefix; several groups.
damage mxfp4 "c['quantization_config']['ignore'].append('re:.*layers.7.*')" CFG08/info 0
damage mxfp4 "c['quantization_config']['ignore'].append('model.layers.0.self_attn.kv_b_proj')" CFG08/info 0
damage mxfp4 "
g = c['quantization_config']['config_groups']
g['group_0']['format'] = 'mxfp4-pack-quantized'
g['group_1'] = dict(g['group_0'], targets=['re:.*nothing'])
c['quantization_config']['format'] = 'mixed-precision'" CFG18/info 0
# Scales of the KV cache, under any spelling: carried under their own names, so that export gives the same files back.
damage nvfp4 "
for l in range(3):
    for x in 'kv':
        t['layers.%d.self_attn.%s_proj.%s_scale' % (l, x, x)] = ['F32', [], struct.pack('<f', 0.05 + l)]
c['quantization_config']['kv_cache_scheme'] = {'num_bits': 8, 'type': 'float', 'strategy': 'tensor'}" "FUS02/info" 0
"$K3PACK" convert "$work/bad" -o "$work/image" --quiet && "$K3PACK" export "$work/image" -o "$work/back" --quiet && diff -r "$work/bad" "$work/back" >/dev/null ||
  complain "a checkpoint with KV scales does not come back as it was"
"$K3PACK" inspect "$work/image" --json | grep -q 'layers.2.self_attn.v_proj.v_scale' || complain "the image does not hold the KV scales"
damage nvfp4 "t['layers.0.self_attn.v_scale'] = ['F32', [], struct.pack('<f', 0.05)]" CFG15/warning 0
echo "$failed complaints"
[ "$failed" = 0 ]
