#!/bin/sh
# What `make test-gpu` runs on machines with no, one and two GPUs, with invented ones: "the same on the device, compute-sanitizer clean", the seam to NCCL
# where there are two, and what is left out is said.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}
mkdir "$work/bin" "$work/build"
log=$work/log
invent() {  # path, body
  printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod +x "$1"
}
for program in gpu_test_steps gpu_test_refusals gpu_test_forward; do
  invent "$work/build/$program" "echo \"$program tp \$K3_TEST_MAX_TP sums \${K3PACK_SUMS:-auto}: \$*\" >>\"$log\"; exit \$(cat \"$work/code\")"
done
invent "$work/build/k3pack" "echo \"k3pack \$1 rank \${RANK:-none} of \${WORLD_SIZE:-none} on \${LOCAL_RANK:-none}\" >>\"$log\"
while [ \$# -gt 0 ]; do [ \"\$1\" = -o ] && echo drafts >\"\$2\"; shift; done; exit 0"
invent "$work/sanitizer" "echo \"sanitizer \$2\" >>\"$log\"; shift 4; exec \"\$@\""
gpus() {  # number, code of the tests, exit code
  : >"$log"
  echo "$2" >"$work/code"
  invent "$work/bin/nvidia-smi" "i=0; while [ \$i -lt $1 ]; do echo \"GPU \$i: invented\"; i=\$((i + 1)); done"
  got=0
  K3PACK_PYTHON=false CUDA_HOME=$work/none PATH="$work/bin:/usr/bin:/bin" sh tests/kernels/run_gpu.sh "$work/build" >"$work/out" 2>"$work/err" || got=$?
  [ -z "$3" ] || [ $got = "$3" ] || fail "$1 GPUs: exit $got, not $3: $(cat "$work/err")"
}
ran() { grep -q "$1" "$log" || fail "\"$1\" was not run: $(cat "$log")"; }
says() { grep -q "$1" "$work/err" || fail "\"$1\" is not said: $(cat "$work/err")"; }

gpus 0 0 77
says 'no GPU here'
gpus 1 0 ''  # golden scenarios fail on an invented program
ran 'gpu_test_steps tp 1'
ran 'gpu_test_refusals tp 1'
ran 'gpu_test_forward tp 1 sums auto'
says 'the seam to NCCL (windows, barriers, one shot, two shots, explicit sums) and ranks as processes were NOT tested'
says 'memcheck and racecheck did NOT run'
grep -q 'rank [01] of' "$log" && fail "processes were started on one GPU"
cp "$work/sanitizer" "$work/bin/compute-sanitizer"
gpus 2 0 ''
for how in one-shot two-shot explicit; do
  ran "gpu_test_forward tp 2 sums $how: f32 plain bf16 plain nvfp4-divide plain sums at once"
done
ran 'k3pack run rank 0 of 2 on 0'
ran 'k3pack run rank 1 of 2 on 1'
ran 'sanitizer memcheck'
ran 'sanitizer racecheck'
grep -q 'NOT' "$work/err" && fail "something was left out on two GPUs: $(cat "$work/err")"
gpus 2 1 1
exit $failed
