#!/bin/sh
# The GPU benchmark without a GPU: smoke.sh BUILD PYTHON [PLUGIN]. Its arithmetic, its Triton kernels in the interpreter and compiled, and everything
# else at the tiny geometry: every re-enactment computes what our CPU backend computes, and with the simulator's plug-in what the CUDA backend computes.
set -u
build=$1 python=$2 plugin=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
export OMP_NUM_THREADS=1
here=tests/bench/gpu
"$python" $here/test_figures.py || failed=1
for script in test_kernels compile_kernels; do
  "$python" -W ignore $here/$script.py >"$work/log" 2>&1
  case $? in
    0 | 77) tail -n 1 "$work/log" ;;
    *) cat "$work/log"; failed=1 ;;
  esac
done
sh $here/images.sh "$build/k3pack" "$work/images" tiny >/dev/null 2>"$work/log" || { cat "$work/log"; exit 1; }
side() {  # what, backend
  "$python" -W ignore $here/bench_gpu.py --build "$build" --images "$work/images" --device cpu --geometry tiny --backend "$2" \
    --json "$work/$2.json" >"$work/log" 2>&1 && "$python" - "$work/$2.json" <<'PY' || { cat "$work/log"; echo "FAILED: bench-gpu, $1"; failed=1; return; }
import json, sys
told = json.load(open(sys.argv[1]))
sides = {row["side"] for row in told["times"]}
wanted = {"ours", "ours bf16", "ours fp8", "ours nvfp4", "P1 graph", "P1 eager", "P2 graph", "P3 graph", "P4 graph", "P4 + P7 graph", "P5a graph",
          "P5b graph", "P5c graph", "P6 packed graph", "P6 expanded graph", "P7 graph", "P7 candidates", "P8 pinned ring", "P8 torch.load(mmap), part",
          "P10 graph"}
assert sides >= wanted, wanted - sides
assert len(told["numerics"]) >= 60 and all(n["good"] for n in told["numerics"]), told["numerics"]
assert not told["measured"] and all(bar["verdict"] == "not measured" for bar in told["bars"]), told["bars"]
PY
  grep '^numerics:.*of' "$work/log" | sed "s/^/bench-gpu, $1: /"
}
side "our CPU backend" cpu
# A forward with another rotation, a dropped norm or a swapped nibble must be noticed, or the comparison proves nothing.
broken() {  # file, sed expression
  cp -r $here "$work/broken"
  sed "$2" $here/"$1" >"$work/broken/$1"
  cmp -s "$work/broken/$1" $here/"$1" && { echo "FAILED: \"$2\" changes nothing"; failed=1; }
  if "$python" -W ignore "$work/broken/bench_gpu.py" --build "$build" --images "$work/images" --device cpu --geometry tiny --backend cpu \
    --sections numerics >"$work/log" 2>&1; then
    echo "FAILED: not noticed: $2"
    failed=1
  fi
  rm -rf "$work/broken"
}
broken kernels.py 's/x\[..., 0::2\].float(), x\[..., 1::2\].float()/x.chunk(2, -1)[0].float(), x.chunk(2, -1)[1].float()/'
broken peers.py 's/layer\["post_norm"\], self.eps, residual/layer["in_norm"], self.eps, residual/'
broken peers.py 's/n_keys = anchor_positions + g.T/n_keys = anchor_positions + 1/'
broken kernels.py 's/torch.stack((packed & 15, packed >> 4), -1)/torch.stack((packed >> 4, packed \& 15), -1)/'
if [ -n "$plugin" ] && [ -f "$plugin" ]; then
  K3PACK_CUDA_PLUGIN=$PWD/$plugin side "the CUDA backend in the simulator" cuda
else
  echo "bench-gpu: no simulator (clang and CUDA's headers): the CUDA side was NOT run"
fi
exit $failed
