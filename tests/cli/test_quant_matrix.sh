# Every quantised scheme in every dialect that has it, as the table of schemes promises: check is clean; convert packs it under the drafter's recipe and
# under generic; verify accepts the image; the manifest's linears name the scheme; `export` of a kept quantised image returns the original bytes.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0 n=0

complain() {
  echo "$1"
  failed=$((failed + 1))
}

# quant option, dialect, scheme in the manifest, block or group in the manifest, direction of the second scale
table='
fp8        compressed-tensors fp8-channel  -          -
fp8        modelopt           fp8-channel  -          -
fp8-tensor compressed-tensors fp8-tensor   -          -
fp8-tensor modelopt           fp8-tensor   -          -
fp8-tensor deepseek           fp8-tensor   -          -
fp8-block  compressed-tensors fp8-block    [128,128]  -
fp8-block  modelopt           fp8-block    [128,128]  -
fp8-block  deepseek           fp8-block    [128,128]  -
mxfp8      compressed-tensors mxfp8        32         -
mxfp8      modelopt           mxfp8        32         -
mxfp8      deepseek           mxfp8        32         -
nvfp4      compressed-tensors nvfp4        16         divide
nvfp4      modelopt           nvfp4        16         multiply
mxfp4      compressed-tensors mxfp4        32         -
mxfp4      modelopt           mxfp4        32         -
'

# The manifest of an image stands behind the header, in the first tensor.
linears_of() {
  python3 - "$1" <<'PY'
import json, struct, sys
with open(sys.argv[1], "rb") as f:
    h = struct.unpack("<Q", f.read(8))[0]
    begin, end = json.loads(f.read(h))["__k3pack__"]["data_offsets"]
    f.seek(8 + h + begin)
    manifest = json.loads(f.read(end - begin))
n = 0
for group in manifest["linears"]:
    n += sum(1 if isinstance(m, str) else m["each"][2] - m["each"][1] for m in group["modules"])
group = manifest["linears"][0]
block = group.get("block", group.get("group", "-"))
print(len(manifest["linears"]), n, group["scheme"], str(block).replace(" ", ""), group.get("second_scale", "-"))
PY
}

for preset in tiny-aliases k3-dspark-small; do
  echo "$table" | while read -r quant dialect scheme block second; do
    [ -n "$quant" ] || continue
    # The larger geometry for what has grids of several blocks, or two directions.
    case "$preset-$quant" in
      k3-dspark-small-fp8-block | k3-dspark-small-nvfp4 | tiny-*) ;;
      *) continue ;;
    esac
    share=none
    [ "$quant$dialect" = nvfp4modelopt ] && share=component
    name=$preset-$quant-$dialect source=$work/source
    rm -rf "$work/"*
    "$K3PACK" synth "$source" --preset $preset --quant $quant --dialect $dialect --share $share --quiet || { echo "$name: synth"; continue; }
    "$K3PACK" check "$source" --strict >"$work/log" 2>&1 || echo "$name: check: $(head -c 400 "$work/log")"
    for recipe in k3-dspark generic; do
      "$K3PACK" convert "$source" -o "$work/image" --recipe $recipe --quiet --force 2>"$work/log" || { echo "$name: convert to $recipe: $(head -c 400 "$work/log")"; continue; }
      "$K3PACK" verify "$work/image" --source "$source" --quiet || echo "$name: verify of $recipe"
      rm -rf "$work/back"
      "$K3PACK" export "$work/image" -o "$work/back" --quiet || echo "$name: export of $recipe"
      diff -r "$source" "$work/back" >/dev/null || echo "$name: the exported files of $recipe are not the original ones"
      if command -v python3 >/dev/null; then
        found=$(linears_of "$work/image")
        # 5 fused modules a layer, context_proj, and markov_w2 where its columns are whole groups.
        case "$preset-$recipe" in
          k3-dspark-small-k3-dspark) wanted_n=12 ;;
          k3-dspark-small-generic) wanted_n=16 ;;
          *-k3-dspark) wanted_n=17 ;;
          *) wanted_n=23 ;;
        esac
        case "$preset-$scheme" in
          k3-dspark-small-*) ;;
          *-mxfp8 | *-mxfp4) wanted_n=$((wanted_n - 1)) ;;
        esac
        [ "$found" = "1 $wanted_n $scheme $block $second" ] || echo "$name: linears of $recipe: $found instead of 1 $wanted_n $scheme $block $second"
      fi
    done
    echo done >>"$work.count"
  done >"$work.log" 2>&1
  [ -s "$work.log" ] && complain "$(cat "$work.log")"
done
n=$(wc -l <"$work.count" 2>/dev/null || echo 0)
rm -f "$work.count" "$work.log"
[ "$n" = 20 ] || complain "$n of 20 checkpoints were looked at"

# What the table does not promise is refused, and leaves nothing behind.
for pair in "fp8 deepseek" "nvfp4 deepseek" "mxfp4 deepseek"; do
  set -- $pair
  "$K3PACK" synth "$work/no" --preset tiny --quant "$1" --dialect "$2" >/dev/null 2>&1
  [ $? = 2 ] && [ ! -e "$work/no" ] || complain "synth --quant $1 --dialect $2 is not refused"
done
echo "$n checkpoints, $failed complaints"
[ "$failed" = 0 ]
