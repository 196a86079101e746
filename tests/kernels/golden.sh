#!/bin/sh
# The golden scenarios through the program as it is shipped, `k3pack run --backend cuda`, with the plug-in that K3PACK_CUDA_PLUGIN names:
#   golden.sh BUILD MAX_TP
# Every scenario of fixtures/dspark that a request can ask for (far_f32 has positions without requests: test_steps takes its context), and the
# quantised drafters of fixtures/gen/quant_drafts.py against float64 on the separately dequantised matrices.
set -u
build=$1 max_tp=$2
python=${K3PACK_PYTHON:-$([ -x build/venv/bin/python ] && echo build/venv/bin/python || echo python3)}
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

# drafts NAME FOLDER GOLDEN TP...
drafts() {
  name=$1 folder=$2 golden=$3
  shift 3
  "$build/k3pack" convert "$folder/draft" --target "$folder/target" -o "$work/$name.k3p" --crc --quiet || failed=1
  for tp in "$@"; do
    [ "$tp" -le "$max_tp" ] || continue
    if "$build/k3pack" run "$work/$name.k3p" --input "$folder/scenario.safetensors" -o "$work/$name.out" --emit all --backend cuda --tp "$tp" \
      --force --quiet >"$work/log" 2>&1 &&
      python3 fixtures/gen/check_drafts.py "$golden" "$work/$name.out" "$folder/scenario.safetensors" >>"$work/log" 2>&1; then
      echo "ok      k3pack run --backend cuda --tp $tp: $name is golden"
    else
      echo "FAILED  k3pack run --backend cuda --tp $tp: $name"
      cat "$work/log"
      failed=1
    fi
  done
}

for c in tiny_f32 tiny_bf16; do
  drafts $c fixtures/dspark/$c fixtures/dspark/$c/golden.safetensors 1 2
done
if ! "$python" -c 'import numpy' 2>/dev/null; then
  echo "no numpy for $python: only two golden scenarios were run"
  exit $failed
fi
of_case() {
  name=$1
  shift
  "$python" fixtures/gen/write_case.py "$name" "$work/$name" || failed=1
  drafts "$name" "$work/$name" "fixtures/dspark/$name/golden.safetensors" "$@"
}
of_case ranks_f32 1 8
of_case ranks_bf16 1 4
of_case variant_f32 1
of_case limit_f32 1
of_case wide_f32 1 2
of_case wide_bf16 1 4
quantised() {  # scheme, dialect, geometry, tp...
  name=$1-$2-$3
  "$python" fixtures/gen/quant_drafts.py "$work/$name" "$1" "$2" "$3" || failed=1
  shift 3
  drafts "$name" "$work/$name" "$work/$name/golden.safetensors" "$@"
}
quantised nvfp4 compressed-tensors siblings 1 2
quantised nvfp4 modelopt siblings 1
quantised mxfp4 compressed-tensors siblings 1 2
quantised fp8 compressed-tensors siblings 1 2
quantised fp8-tensor modelopt siblings 1
quantised fp8-block deepseek siblings 1
quantised fp8-block compressed-tensors ranks 2
quantised nvfp4 modelopt ranks 8
exit $failed
