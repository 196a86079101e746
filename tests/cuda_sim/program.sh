#!/bin/sh
# What the program shows of loading and of several ranks, with the simulator's plug-in: program.sh BUILD SIMULATOR.
set -u
build=$1 sim=$2
python=${K3PACK_PYTHON:-python3}
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
fail() {
  echo "FAILED  $*"
  failed=1
}
export K3PACK_CUDA_PLUGIN="$sim/plain/libk3pack_cuda.so"
case=fixtures/dspark/tiny_bf16
in=$case/scenario.safetensors
"$build/k3pack" convert $case/draft --target $case/target -o "$work/image" --crc --quiet || fail "convert"
"$build/k3pack" convert $case/draft --target $case/target -o "$work/plain" --quiet || fail "convert"
# An image of some hundred of the simulator's pieces.
"$build/k3pack" synth "$work/wide" --preset tiny --quiet && "$build/k3pack" synth "$work/target" --preset tiny-target --quiet &&
  "$build/k3pack" convert "$work/wide" --target "$work/target" -o "$work/large" --crc --quiet &&
  "$python" tests/python/write_scenario.py "$work/wide/config.json" "$work/scenario" || fail "convert"
run() {  # name, argument...: out.name, err.name
  name=$1
  shift
  "$build/k3pack" run "$@" --input $in -o "$work/$name" --backend cuda --emit all >"$work/out.$name" 2>"$work/err.$name"
}
field() { "$python" -c 'import json, sys; v = json.load(open(sys.argv[1])); [v := v[k] for k in sys.argv[2].split(".")]; print(v)' "$1" "$2"; }

# "Loading: ... with several reads in flight ... Context creation reported apart."
most=0 try=0
while [ $try -lt 200 ] && [ $most -le 1 ]; do  # how many threads are at work at a time is the system's choice, up to four
  "$build/k3pack" run "$work/large" --input "$work/scenario" -o "$work/load" --backend cuda --force --json >"$work/out.load" 2>"$work/err" ||
    fail "run: $(cat "$work/err")"
  n=$(field "$work/out.load" load_reads)
  try=$((try + 1))
  [ "$n" -gt 4 ] && fail "$n reads at a time"
  [ "$n" -gt "$most" ] && most=$n
done
[ "$most" -gt 1 ] || fail "never more than $most read was under way"
[ "$(field "$work/out.load" load_nbytes)" -gt 10000 ] || fail "load_nbytes: $(cat "$work/out.load")"
"$python" -c 'import json, sys; v = json.load(open(sys.argv[1])); assert v["start_seconds"] > 0 and v["load_seconds"] > 0' "$work/out.load" || fail "times"
run verbose "$work/image" --verbose
grep -q 'started CUDA in [0-9.]* s, then loaded [0-9.]* kB in [0-9.]* s, up to [0-9] reads at a time' "$work/err.verbose" || fail "$(cat "$work/err.verbose")"

# "filled from the image by a pinned double buffer with several reads in flight while the previous chunk is copied": with work put off to the last moment
# the weights are whole, and when a buffer is waited for, the other one's copies are still to come.
head -c 4096 /dev/zero >"$work/counters"
for how in SIM_LAZY=0 SIM_LAZY=1; do
  env $how SIM_COUNTERS="$work/counters" "$build/k3pack" run "$work/large" --input "$work/scenario" -o "$work/$how" --backend cuda --emit all --quiet ||
    fail "run with $how"
done
cmp "$work/SIM_LAZY=0" "$work/SIM_LAZY=1" || fail "work that is put off gives other drafts"
n=$("$python" -c 'import struct, sys; print(struct.unpack("<6Q", open(sys.argv[1], "rb").read(48))[5])' "$work/counters")
[ "$n" -gt 10 ] || fail "only $n times a copy was under way while a buffer was filled"

# "CRC checked on the way when the image has it": any byte of the body, whichever tensor it is of; without --crc the load does not look.
nbytes=$(wc -c <"$work/image")
for at in 4 8 9; do  # tenths of the file, behind its header
  cp "$work/image" "$work/torn"
  offset=$((nbytes * at / 10))
  printf '\\%o' $((255 - $(od -An -tu1 -j $offset -N1 "$work/torn"))) | { read -r byte; printf "$byte"; } | dd of="$work/torn" bs=1 seek=$offset conv=notrunc 2>/dev/null
  for lazy in 0 1; do
    SIM_LAZY=$lazy "$build/k3pack" run "$work/torn" --input $in -o "$work/none" --backend cuda >"$work/out" 2>"$work/err"
    code=$?
    { [ $code = 3 ] && grep -q "IMG02.*torn: segment 0 has CRC-32 [0-9a-f]*, [0-9a-f]* is stored" "$work/err"; } || fail "a torn byte at $offset: exit $code: $(cat "$work/err")"
  done
  [ ! -e "$work/none" ] || fail "a refused load left an output"
done
printf '\\377\\377' | dd of="$work/plain" bs=1 seek=$((nbytes * 8 / 10)) conv=notrunc 2>/dev/null
run unseen "$work/plain" || fail "an image without CRC-32 is loaded as it is: $(cat "$work/err.unseen")"

# "explicit all-reduce then norm as visible fallback": which way was taken, and why.
says() {  # ranks, how, why, SETTING...
  ranks=$1 how=$2 why=$3
  shift 3
  rm -f "$work/sums"
  env "$@" "$build/k3pack" run "$work/image" --input $in -o "$work/sums" --backend cuda --emit all --tp "$ranks" --json --verbose >"$work/out" 2>"$work/err" ||
    fail "$*: $(cat "$work/err")"
  [ "$(field "$work/out" sums.how)" = "$how" ] && field "$work/out" sums.why | grep -q "$why" || fail "$ranks ranks, $*: $(cat "$work/out")"
  [ "$ranks" = 1 ] || grep -q "sums over $ranks ranks: $how (.*$why" "$work/err" || fail "$ranks ranks, $*: $(cat "$work/err")"
}
says 1 none "one rank"
says 2 fused "one shot up to a size, two above"
cp "$work/sums" "$work/fused"
for how in one-shot two-shot explicit; do
  says 2 $how "asked for by K3PACK_SUMS" K3PACK_SUMS=$how
  cmp "$work/sums" "$work/fused" || fail "$how gives other bytes: sums are in rank order everywhere here"
done
K3PACK_SUMS=fastest "$build/k3pack" run "$work/image" --input $in -o "$work/none" --backend cuda --tp 2 2>"$work/err" && fail "K3PACK_SUMS=fastest"
grep -q 'K3PACK_SUMS is "fastest" (allowed: auto, one-shot, two-shot or explicit)' "$work/err" || fail "$(cat "$work/err")"

# "without NCCL it builds for tp 1": several ranks are refused with what to install.
for tp in 1 2; do
  K3PACK_CUDA_PLUGIN=$sim/without_nccl/libk3pack_cuda.so "$build/k3pack" run "$work/image" --input $in -o "$work/alone.$tp" --backend cuda --emit all \
    --tp $tp --quiet 2>"$work/err"
  echo $? >"$work/code.$tp"
done
[ "$(cat "$work/code.1")" = 0 ] || fail "one rank without NCCL: exit $(cat "$work/code.1")"
{ [ "$(cat "$work/code.2")" = 5 ] && grep -q 'built without NCCL (allowed: NCCL 2.28 or later (or the Python package nvidia-nccl-cu13)' "$work/err"; } ||
  fail "two ranks without NCCL: exit $(cat "$work/code.2"): $(cat "$work/err")"
[ ! -e "$work/alone.2" ] || fail "a refused run left an output"

# "one process per rank from the usual launch variables": ids and settings go over the sockets, LOCAL_RANK picks the device. Processes share no simulated
# memory, so kernels cannot reach the others: what is tested beyond the exchange is the fallback.
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
for r in 1 0; do
  RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 120 "$build/k3pack" run "$work/image" --input $in -o "$work/process" \
    --backend cuda --emit all --json >"$work/out.$r" 2>"$work/err.$r" || fail "rank $r: $(cat "$work/err.$r")" &
done
wait
cmp "$work/process" "$work/fused" || fail "two processes give other bytes than two threads"
[ "$(field "$work/out.0" sums.how)" = explicit ] && field "$work/out.0" sums.why | grep -q 'share no memory' || fail "$(cat "$work/out.0")"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
for r in 1 0; do
  { RANK=$r WORLD_SIZE=2 LOCAL_RANK=$((r * 3)) MASTER_ADDR=127.0.0.1 MASTER_PORT=$port SIM_DEVICES=2 timeout 120 "$build/k3pack" run "$work/image" \
    --input $in -o "$work/none" --backend cuda >"$work/out.$r" 2>"$work/err.$r"; echo $? >"$work/code.$r"; } &
done
wait
[ "$(cat "$work/code.1")" = 5 ] && grep -q "GPU 3 is asked for, there are 2" "$work/err.1" || fail "LOCAL_RANK=3: $(cat "$work/err.1")"
[ "$(cat "$work/code.0")" = 4 ] && grep -q "rank 1 stopped: GPU 3 is asked for" "$work/err.0" || fail "rank 0: $(cat "$work/err.0")"
[ $failed = 0 ] && echo "ok      loading, ways to add up and ranks as processes are as they are said to be"
exit $failed
