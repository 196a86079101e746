#!/bin/sh
# The CUDA backend in the simulator, every build of it: run.sh BUILD (build/<config>, for the program). Ends with exit 1 when something failed.
set -u
build=$1
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
sim=build/cuda_sim

# run PROGRAM VARIANT [SETTING=VALUE...] -- [CASE...]
run() {
  program=$1 variant=$2
  shift 2
  settings=
  while [ "$1" != -- ]; do
    settings="$settings $1"
    shift
  done
  shift
  out=$work/out.$variant.$program
  # shellcheck disable=SC2086
  env K3PACK_CUDA_PLUGIN=$sim/$variant/libk3pack_cuda.so $settings timeout 600 $sim/$variant/$program "$@" >"$out" 2>&1 || {
    cat "$out"
    : >"$work/failed"
  }
  echo "$variant $program$settings $*: $(tail -n 1 "$out")"
}

# Every step alone; every scheme at tp 1 and 2, BF16 and NVFP4 at 4 and 8; then work put off to the first wait, threads shuffled, blocks backwards.
plain() {
  run test_steps plain --
  run test_refusals plain --
  run test_steps plain SIM_PROCESSORS=40 -- f32 "bf16 full"
  run test_forward plain --
  run test_forward plain SIM_LAZY=1 SIM_SEED=3 K3_TEST_MAX_TP=2 -- f32 "bf16 plain"
  run test_forward plain SIM_SEED=2 K3_TEST_MAX_TP=2 -- "f32 causal" "nvfp4-divide with f32"
  # Sums over the ranks in two shots, and by the library where kernels do not reach the others, within the same table.
  run test_forward plain K3PACK_SUMS=two-shot -- "f32 plain" "bf16 plain" "nvfp4-divide plain" "at once"
  run test_forward plain K3PACK_SUMS=explicit -- "f32 plain" "bf16 plain" "nvfp4-divide plain" "at once"
}

sanitized() {
  run test_steps asan SIM_LAZY=1 SIM_SEED=5 --
  run test_steps tsan TSAN_OPTIONS=halt_on_error=1 SIM_SEED=1 -- "f32 odd" "nvfp4, f32" "bf16 full latents,"
  run test_refusals asan SIM_LAZY=1 --
  run test_steps msan -- "f32 odd" "bf16" "mxfp4"
  run test_forward asan K3_TEST_MAX_TP=2 -- f32 bf16 f16 nvfp4-divide mxfp4 fp8-block
  run test_forward asan SIM_LAZY=1 SIM_SEED=1 K3_TEST_MAX_TP=2 -- "bf16 plain"
  run test_forward tsan TSAN_OPTIONS=halt_on_error=1 K3_TEST_MAX_TP=2 -- "bf16 plain" "nvfp4-divide plain" "bf16 odd" "bf16 causal"
  run test_forward tsan TSAN_OPTIONS=halt_on_error=1 K3_TEST_MAX_TP=2 K3PACK_SUMS=two-shot -- "bf16 plain"
  run test_forward asan SIM_LAZY=1 K3_TEST_MAX_TP=4 K3PACK_SUMS=two-shot -- "bf16 plain" "f32 sums at once"
  run test_forward asan SIM_LAZY=1 K3_TEST_MAX_TP=2 K3PACK_SUMS=explicit -- "bf16 plain" "f32 sums at once"
  run test_forward msan K3_TEST_MAX_TP=2 -- "bf16 plain" "nvfp4-divide with f32" "f32 odd"
  run test_forward msan K3_TEST_MAX_TP=2 K3PACK_SUMS=two-shot -- "bf16 plain"
}

plain &
sanitized
wait
[ -e "$work/failed" ] && failed=1

# The program as it is shipped opens the plug-in, loads an image through the pinned ring, and drafts what is golden; several ranks draft the same.
plugin=K3PACK_CUDA_PLUGIN=$sim/plain/libk3pack_cuda.so
env "$plugin" sh tests/kernels/golden.sh "$build" 8 || failed=1
sh tests/cuda_sim/program.sh "$build" "$sim" || failed=1

for c in tiny_f32 tiny_bf16; do
  "$build/k3pack" convert fixtures/dspark/$c/draft --target fixtures/dspark/$c/target -o "$work/$c.k3p" --quiet || failed=1
done

# Timings come from the device: bench replays every step alone and whole calls, cold and warm, and reports loading apart from starting CUDA.
K3PACK_CUDA_PLUGIN=$sim/plain/libk3pack_cuda.so "$build/k3pack" bench "$work/tiny_bf16.k3p" --backend cuda --context 10 --requests 2 --runs 5 --json \
  >"$work/bench" 2>"$work/out" && python3 - "$work/bench" <<'PY' || {
import json, sys
told = json.load(open(sys.argv[1]))
names = [s["step"] for s in told["steps"]]
assert names == ["combine", "context_insert", "block_begin", "reduce_add_norm", "latents", "query", "attend", "project", "mlp", "logits", "markov"], names
for s in told["steps"] + [told["append"], told["draft"]]:
    assert s["nbytes"] > s["weight_nbytes"] >= 0 and s["calls"] > 0, s
    for state in ("cold", "warm"):
        assert 0 < s[state]["p10_seconds"] <= s[state]["median_seconds"] <= s[state]["p90_seconds"], s
assert sum(s["weight_nbytes"] for s in told["steps"]) == told["context_nbytes"] + told["draft_nbytes"]
assert told["requests"] == 2 and told["context_rows"] == 20 and told["bandwidth"] > 0
assert told["load_nbytes"] > told["draft_nbytes"] and told["load_seconds"] > 0 and told["reload_seconds"] > 0 and told["start_seconds"] > 0
PY
  cat "$work/out"
  echo "FAILED: k3pack bench --backend cuda"
  failed=1
}

# What is missing is said with exit 5: device, driver, memory, plug-in.
refuses() {  # text, environment...
  text=$1
  shift
  env "$@" "$build/k3pack" run "$work/tiny_f32.k3p" --input fixtures/dspark/tiny_f32/scenario.safetensors -o "$work/none" --backend cuda >"$work/out" 2>&1
  code=$?
  if [ $code != 5 ] || ! grep -q "$text" "$work/out"; then
    echo "FAILED: exit $code where 5 with \"$text\" is due: $(cat "$work/out")"
    failed=1
  fi
}
refuses "there is no GPU" "$plugin" SIM_DEVICES=0
refuses "CUDA 12.4, CUDA 13.0 is needed" "$plugin" SIM_DRIVER=12040
refuses "bytes of GPU memory are needed, 0 of 0 are free" "$plugin" SIM_FREE_MIB=0
refuses "make cuda" K3PACK_CUDA_PLUGIN=/nowhere/libk3pack_cuda.so

sh tests/cuda_sim/faults.sh || failed=1
exit $failed
