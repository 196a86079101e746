#!/bin/sh
# The CUDA backend on the GPUs of this machine: run_gpu.sh BUILD. Exit 77 without a GPU. What cannot be tested here is said at the end.
set -u
build=$1
failed=0 skipped=
n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$n" = 0 ]; then
  echo "test-gpu: no GPU here (nvidia-smi lists none)" >&2
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
skip() { skipped="$skipped
test-gpu: $*"; }
export K3PACK_CUDA_PLUGIN="$PWD/$build/libk3pack_cuda.so" K3_TEST_MAX_TP="$n"
echo "== $n GPUs"
for test in gpu_test_steps gpu_test_refusals gpu_test_forward; do
  "$build/$test" || failed=1
done

# The seam to NCCL (runtime/cuda/peers_nccl.cu): windows and barriers, each way to add up, and ranks that are processes.
ranks() {
  case=fixtures/dspark/tiny_bf16
  "$build/k3pack" convert $case/draft --target $case/target -o "$work/image" --quiet || return 1
  for how in one-shot two-shot explicit; do
    echo "== sums over 2 ranks: $how"
    K3PACK_SUMS=$how K3_TEST_MAX_TP=2 "$build/gpu_test_forward" "f32 plain" "bf16 plain" "nvfp4-divide plain" "sums at once" || failed=1
  done
  echo "== 2 ranks as processes"
  "$build/k3pack" run "$work/image" --input $case/scenario.safetensors -o "$work/threads" --emit all --backend cuda --tp 2 --verbose || return 1
  for rank in 1 0; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29511}" "$build/k3pack" run "$work/image" \
      --input $case/scenario.safetensors -o "$work/processes" --emit all --backend cuda --rank-timeout 120 --verbose || : >"$work/rank_failed" &
  done
  wait
  [ ! -e "$work/rank_failed" ] && cmp "$work/threads" "$work/processes"
}
if [ "$n" -ge 2 ]; then
  ranks || failed=1
else
  skip "1 GPU: the seam to NCCL (windows, barriers, one shot, two shots, explicit sums) and ranks as processes were NOT tested; two GPUs are needed"
fi

# Each tool on every step, and on the whole forward; memcheck also with two ranks, whose kernels read one another's memory.
sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
if [ -n "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    tp=1
    [ $tool = memcheck ] && [ "$n" -ge 2 ] && tp=2
    echo "== compute-sanitizer $tool, up to $tp ranks"
    for test in gpu_test_steps gpu_test_refusals; do
      "$sanitizer" --tool $tool --error-exitcode 1 "$build/$test" || failed=1
    done
    K3_TEST_MAX_TP=$tp "$sanitizer" --tool $tool --error-exitcode 1 "$build/gpu_test_forward" f32 "bf16 plain" "nvfp4-divide plain" || failed=1
  done
else
  skip "compute-sanitizer is not installed (part of the CUDA toolkit): memcheck and racecheck did NOT run"
fi
sh tests/kernels/golden.sh "$build" "$n" || failed=1
[ -z "$skipped" ] || echo "$skipped" >&2
exit $failed
