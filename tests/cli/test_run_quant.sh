#!/bin/sh
# "A drafter whose q_a and kv_a, gate and up, and whose layers, have global scales that differ by up to 8 x in both orders: run equals the float64
# re-enactment on the separately dequantised matrices within F32 rounding, for compressed-tensors NVFP4, ModelOpt NVFP4, MXFP4, FP8 per tensor,
# FP8 128x128 with 576 rows. Naive fusion (max, or first), a swapped nibble, an inverted direction, a shifted scale row each fail this test."
set -u
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import numpy' 2>/dev/null || { echo "no numpy for $python: quantised drafts are NOT compared with float64"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
for what in "nvfp4 compressed-tensors" "nvfp4 modelopt" "mxfp4 compressed-tensors" "mxfp8 compressed-tensors" "fp8 compressed-tensors" \
  "fp8-tensor compressed-tensors" "fp8-tensor modelopt" "fp8-block compressed-tensors" "fp8-block deepseek"; do
  dir=$work/$(echo "$what" | tr ' ' -)
  # shellcheck disable=SC2086
  "$python" fixtures/gen/quant_drafts.py "$dir" $what &&
    "$K3PACK" convert "$dir/draft" --target "$dir/target" -o "$dir/image.k3p" --quiet &&
    "$K3PACK" run "$dir/image.k3p" --input "$dir/scenario.safetensors" -o "$dir/out" --emit all --quiet &&
    "$python" fixtures/gen/check_drafts.py "$dir/golden.safetensors" "$dir/out" "$dir/scenario.safetensors" || { echo "FAILED: $what"; failed=1; }
done
exit $failed
