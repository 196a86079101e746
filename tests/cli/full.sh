#!/bin/sh
# The published geometry of the Kimi K3 DSpark drafter, with random weights: exact sizes, memory bar, every source byte once, export byte for byte.
# Needs about 30 GB of disk in FULL_DIR; skips loudly where there is less. Not part of the ordinary tests.
set -u
K3PACK=$(cd "${1:-build/release}" && pwd)/k3pack
export K3PACK
dir=${FULL_DIR:-build/full}
mkdir -p "$dir"
free=$(df -Pk "$dir" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt 31457280 ]; then
  echo "SKIPPED: the full geometry needs 30 GB in $dir, there are $((free / 1048576)) GB"
  exit 77
fi
command -v /usr/bin/time >/dev/null || { echo "SKIPPED: /usr/bin/time is not installed (package time)"; exit 77; }
failed=0
complain() {
  echo "FAILED: $*"
  failed=$((failed + 1))
}
trap 'rm -rf "$dir/draft" "$dir/target" "$dir/image.k3p" "$dir/again"' EXIT INT TERM

# "synth --preset k3-dspark writes the published geometry: 68 tensors, a header of exactly 7,520 bytes, a file of exactly 7,124,633,450 bytes".
"$K3PACK" synth "$dir/draft" --preset k3-dspark --force || exit 1
"$K3PACK" synth "$dir/target" --preset k3-dspark-target --force || exit 1
file=$dir/draft/model.safetensors
[ "$(wc -c <"$file" | tr -d ' ')" = 7124633450 ] || complain "the file has $(wc -c <"$file") bytes"
[ "$(od -An -tu8 -N 8 "$file" | tr -d ' ')" = 7520 ] || complain "the header has another length"
"$K3PACK" check "$dir/draft" --json | grep -q '"tensors": 68' || complain "not 68 tensors"

# "Converting it with a synthetic target stays inside the memory bar": 64 MiB plus 300 bytes a tensor.
/usr/bin/time -f '%M' -o "$dir/peak" "$K3PACK" convert "$dir/draft" -o "$dir/image.k3p" --force --target "$dir/target" || complain "convert fails"
peak=$(cat "$dir/peak")
rm -f "$dir/peak"
[ "$peak" -lt 65600 ] || complain "convert needs $peak KiB"

# "every source byte is in the image once (context_kv_proj adds none)": image = draft + lm_head + header, manifest, tables and pads.
image=$(wc -c <"$dir/image.k3p" | tr -d ' ')
extra=$((image - 7124633450 - 163840 * 7168 * 2))
[ "$extra" -gt 0 ] && [ "$extra" -lt 1048576 ] || complain "the image has $extra bytes beyond its sources"
"$K3PACK" verify "$dir/image.k3p" --source "$dir/draft" || complain "verify"
"$K3PACK" export "$dir/image.k3p" -o "$dir/again" || complain "export"
cmp "$file" "$dir/again/model.safetensors" || complain "export is not exact"
cmp "$dir/draft/config.json" "$dir/again/config.json" || complain "export changes config.json"

# "The full-geometry BF16 image (7.1 GB plus lm_head) drafts for one request inside 24 GB of memory, progress shown while it works."
cat >"$dir/scenario.py" <<'PY'
import json, struct, sys
n, width = 8, 5 * 7168
parts = [("target_states", "BF16", [n, width], bytes((i * 37 & 0x80) | (0x3f if i & 1 else i * 11 & 0x7f) for i in range(2 * n * width))),
         ("positions", "I64", [n], struct.pack("<%dq" % n, *range(n))), ("request_ids", "I64", [n], bytes(8 * n)),
         ("anchor_ids", "I64", [1], struct.pack("<q", 1234)), ("anchor_positions", "I64", [1], struct.pack("<q", n))]
header, at = {}, 0
for name, dtype, shape, data in parts:
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
    at += len(data)
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(part[3] for part in parts))
PY
python3 "$dir/scenario.py" "$dir/scenario" || complain "no scenario"
/usr/bin/time -f '%M' -o "$dir/peak" "$K3PACK" run "$dir/image.k3p" --input "$dir/scenario" -o "$dir/drafts" --force || complain "run fails"
drafting=$(cat "$dir/peak")
rm -f "$dir/peak" "$dir/scenario.py" "$dir/scenario" "$dir/drafts"
[ "$drafting" -lt 25165824 ] || complain "run needs $drafting KiB"

# "The 7.1 GB synthetic drafter becomes NVFP4 in one command with bounded memory", and the relative RMSE of Gaussian weights is 0.095.
rm -rf "$dir/image.k3p" "$dir/again"
/usr/bin/time -f '%M' -o "$dir/peak" "$K3PACK" convert "$dir/draft" -o "$dir/image.k3p" --quant nvfp4 --json >"$dir/told" || complain "convert --quant fails"
encoding=$(cat "$dir/peak")
[ "$encoding" -lt 65600 ] || complain "convert --quant needs $encoding KiB"
python3 -c 'import json, sys; q = json.load(open(sys.argv[1]))["quant"]; assert 0.0945 < q["relative_rmse"] < 0.0960 and len(q["tensors"]) == 36, q' "$dir/told" ||
  complain "the account of --quant nvfp4"
rm -f "$dir/peak" "$dir/told"
"$K3PACK" verify "$dir/image.k3p" --source "$dir/draft" || complain "verify of the encoded image"
"$K3PACK" export "$dir/image.k3p" -o "$dir/again" --format compressed-tensors || complain "export of the encoded image"
"$K3PACK" check "$dir/again" --engine vllm --strict || complain "the exported NVFP4 drafter is not clean"
[ "$failed" = 0 ] || exit 1
echo "full geometry: all right (convert peaked at $peak KiB, --quant at $encoding KiB, run at $drafting KiB, the image has $extra bytes beyond its sources)"
