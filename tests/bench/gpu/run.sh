#!/bin/sh
# The GPU benchmark: run.sh BUILD. Ends with the table of bars; everything is also in build/bench-gpu/results.json. Exit 77 without a GPU or PyTorch.
#   BENCH_PYTHON   an interpreter with PyTorch (default python3)
#   BENCH_IMAGES   where the images are or are made, 20 GB, 33 GB while they are (default build/bench-gpu; a disk, so that a cold load can be timed)
set -u
build=$1
python=${BENCH_PYTHON:-python3} images=${BENCH_IMAGES:-build/bench-gpu}
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" = 0 ]; then
  echo "bench-gpu: no GPU here (nvidia-smi lists none)" >&2
  exit 77
fi
if ! "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
  echo "bench-gpu: $python has no PyTorch with CUDA (BENCH_PYTHON names another interpreter)" >&2
  exit 77
fi
mkdir -p build/bench-gpu "$images" || exit 1
if ! [ -f "$images/nvfp4.k3p" ] && [ "$(df -Pk "$images" | awk 'NR == 2 { print $4 }')" -lt 34603008 ]; then
  echo "bench-gpu: the images need 33 GB in $images while they are made (BENCH_IMAGES names another folder)" >&2
  exit 1
fi
# cuBLASLt and NCCL where Python packages put them, for the program; in Python itself they are loaded already.
libraries=$("$python" -c 'import glob, os, torch
print(":".join(glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "*", "lib"))))')
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries" K3PACK_CUDA_PLUGIN="$PWD/$build/libk3pack_cuda.so"
start=$(date +%s)
sh tests/bench/gpu/images.sh "$build/k3pack" "$images" k3-dspark || exit 1
echo "images: $(($(date +%s) - start)) s"
"$python" -W ignore tests/bench/gpu/bench_gpu.py --build "$build" --images "$images" --json build/bench-gpu/results.json
code=$?
for scheme in bf16 fp8 nvfp4; do
  echo "== k3pack bench, $scheme"
  timeout 60 "$build/k3pack" bench "$images/$scheme.k3p" --backend cuda --quiet || code=1
done
echo "in all: $(($(date +%s) - start)) s"
exit $code
