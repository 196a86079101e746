#!/bin/sh
# "For every scheme and both ways of loading, tp 2, 4, 8 equal ... the float64 re-enactment": of the separately dequantised matrices.
set -u
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import numpy' 2>/dev/null || { echo "no numpy for $python: ranks with quantised weights are NOT compared with float64"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
for what in "nvfp4 compressed-tensors" "nvfp4 modelopt" "mxfp4 compressed-tensors" "mxfp8 compressed-tensors" "fp8 compressed-tensors" \
  "fp8-tensor compressed-tensors" "fp8-block compressed-tensors" "fp8-block deepseek"; do
  dir=$work/$(echo "$what" | tr ' ' -)
  # shellcheck disable=SC2086
  "$python" fixtures/gen/quant_drafts.py "$dir" $what ranks &&
    "$K3PACK" convert "$dir/draft" --target "$dir/target" -o "$dir/image.k3p" --quiet || { echo "FAILED: $what"; failed=1; continue; }
  for tp in 2 4 8; do
    "$K3PACK" convert "$dir/draft" --target "$dir/target" -o "$dir/tp$tp" --tp $tp --quiet || failed=1
    for image in image.k3p tp$tp; do
      "$K3PACK" run "$dir/$image" --input "$dir/scenario.safetensors" -o "$dir/out" --emit all --tp $tp --force --quiet &&
        "$python" fixtures/gen/check_drafts.py "$dir/golden.safetensors" "$dir/out" "$dir/scenario.safetensors" || { echo "FAILED: $what, tp $tp, $image"; failed=1; }
    done
  done
done
exit $failed
