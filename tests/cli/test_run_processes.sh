#!/bin/sh
# "one process per rank from the usual launch variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR": ranks that are processes give the bytes of ranks that
# are threads, and "a rank that dies or never comes is named on every other one within the timeout".
set -eu
folder=$(mktemp -d)
pids=
trap 'rm -rf "$folder"; [ -z "$pids" ] || kill $pids 2>/dev/null || :' EXIT INT TERM
here=$PWD
cd "$folder"
fail() { echo "$*"; exit 1; }
command -v "${K3PACK_PYTHON:-python3}" >/dev/null || { echo "no python3 to find a free port: ranks as processes were NOT tested"; exit 77; }
unset RANK WORLD_SIZE LOCAL_RANK MASTER_PORT || :
export MASTER_ADDR=127.0.0.1

free_port() { "${K3PACK_PYTHON:-python3}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# ranks SIZE ARGUMENT...: runs all of them; rank r leaves out.r, err.r and code.r, and writes r.out, which only rank 0 may do.
ranks() {
  size=$1
  shift
  MASTER_PORT=$(free_port)
  export MASTER_PORT
  rm -f code.* ./*.out
  r=$((size - 1))
  while [ $r -ge 0 ]; do
    { RANK=$r WORLD_SIZE=$size LOCAL_RANK=$r timeout 60 "$K3PACK" "$@" -o $r.out >out.$r 2>err.$r && code=0 || code=$?; echo $code >code.$r; } &
    r=$((r - 1))
  done
  wait
}
succeed() {
  r=0
  while [ $r -lt "$1" ]; do
    [ "$(cat code.$r)" = 0 ] || fail "rank $r: exit $(cat code.$r): $(cat err.$r)"
    [ $r = 0 ] || { [ ! -s out.$r ] && [ ! -e $r.out ]; } || fail "rank $r wrote something"
    r=$((r + 1))
  done
}
each() {  # size, exit code, text: on every rank
  r=0
  while [ $r -lt "$1" ]; do
    [ "$(cat code.$r)" = "$2" ] || fail "rank $r: exit $(cat code.$r), not $2: $(cat err.$r)"
    grep -q "$3" err.$r || fail "rank $r does not say \"$3\": $(cat err.$r)"
    r=$((r + 1))
  done
  [ ! -e 0.out ] || fail "a failed run left an output"
}

"$K3PACK" synth heads --preset tiny-heads --dtype f32 --quiet
"${K3PACK_PYTHON:-python3}" "$here/tests/python/write_scenario.py" heads/config.json scenario
"$K3PACK" convert heads -o whole.k3p --quiet
"$K3PACK" synth bf16 --preset tiny-heads --quiet --quant nvfp4
"$K3PACK" convert bf16 -o nvfp4.k3p --quiet
"$K3PACK" convert heads -o cut --tp 2 --quiet

# "rank 0 writes the output; results equal --tp N threads byte for byte", whole images and cut ones.
for image in whole.k3p nvfp4.k3p cut; do
  for size in 2 4; do
    [ $image$size = cut4 ] && continue
    "$K3PACK" run $image --input scenario --emit all -o threads.$size --force --quiet --tp $size --threads 2
    ranks $size run $image --input scenario --emit all --threads 1
    succeed $size
    cmp threads.$size 0.out || fail "$image on $size processes gives other bytes than on threads"
    grep -q '^request 0: anchor' out.0 || fail "rank 0 shows nothing: $(cat out.0)"
  done
done
ranks 2 run whole.k3p --input scenario --tp 2 --json
succeed 2
"${K3PACK_PYTHON:-python3}" -c 'import json; assert json.load(open("out.0"))["ok"]'

# Decoder layers likewise.
"$K3PACK" synth m3 --preset m3-tiny --quiet
"$K3PACK" convert m3 -o m3.k3p --quiet
"${K3PACK_PYTHON:-python3}" - m3/config.json states <<'PY'
import json, struct, sys
config = json.load(open(sys.argv[1]))
H = config.get("text_config", config)["hidden_size"]
n, seed, values = 6, 1, []
for _ in range(n * H):
    seed = (seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
    values.append((seed >> 40) / (1 << 23) - 1)
data = struct.pack("<%df" % len(values), *values) + struct.pack("<%dq" % n, *range(n)) + struct.pack("<%dq" % n, *([0] * n))
a = 4 * len(values)
header = json.dumps({"hidden_states": {"dtype": "F32", "shape": [n, H], "data_offsets": [0, a]},
                     "positions": {"dtype": "I64", "shape": [n], "data_offsets": [a, a + 8 * n]},
                     "request_ids": {"dtype": "I64", "shape": [n], "data_offsets": [a + 8 * n, a + 16 * n]}}).encode()
header += b" " * (-len(header) % 8)
open(sys.argv[2], "wb").write(struct.pack("<Q", len(header)) + header + data)
PY
for how in --quiet --sequence-parallel; do
  "$K3PACK" run m3.k3p --layers 0..2 --input states -o threads.layers --force --tp 2 $how >said 2>err
  [ ! -s err ] || fail "without a terminal something is said: $(cat err)"
  ranks 2 run m3.k3p --layers 0..2 --input states $how
  succeed 2
  cmp threads.layers 0.out || fail "layers on processes give other bytes than on threads ($how)"
  cmp said out.0
done
grep -q 'scattered' said || fail "nothing was scattered: $(cat said)"

# "a different image seal on a rank is an error that names the ranks", and so is another input or another list of outputs.
"$K3PACK" synth other --preset tiny-heads --dtype f32 --seed 9 --quiet
"$K3PACK" convert other -o other.k3p --quiet
"${K3PACK_PYTHON:-python3}" "$here/tests/python/write_scenario.py" heads/config.json scenario2
printf x | dd of=scenario2 bs=1 seek=$(($(wc -c <scenario2) / 2)) conv=notrunc 2>/dev/null
mkdir 0 1
pair() {  # what rank 1 has instead
  rm -f 0/* 1/*
  ln -s ../whole.k3p 0/image; ln -s "../$1" 1/image; ln -s ../scenario 0/in; ln -s "../$2" 1/in
  MASTER_PORT=$(free_port)
  export MASTER_PORT
  rm -f ./*.out
  (cd 1 && { RANK=1 WORLD_SIZE=2 timeout 60 "$K3PACK" run image --input in --emit "$3" --rank-timeout "$4" -o ../1.out >../out.1 2>../err.1 && code=0 || code=$?; echo $code >../code.1; }) &
  (cd 0 && { RANK=0 WORLD_SIZE=2 timeout 60 "$K3PACK" run image --input in --rank-timeout "$4" -o ../0.out >../out.0 2>../err.0 && code=0 || code=$?; echo $code >../code.0; }) &
  wait
}
pair other.k3p scenario draft_ids,confidence 30
each 2 4 "the image's seal: rank 1 has $("$K3PACK" inspect other.k3p --json | sed -n 's/.*"identity": *"\([0-9a-f]*\)".*/\1/p')"
pair whole.k3p scenario2 draft_ids,confidence 30
each 2 4 "input: rank 1 has [0-9a-f]* where rank 0 has"
pair whole.k3p scenario hidden 30
each 2 4 "emit: rank 1 has hidden where rank 0 has draft_ids,confidence"
# A rank that cannot begin says why; the others say who.
pair nowhere.k3p scenario draft_ids,confidence 30
[ "$(cat code.1)" = 4 ] && grep -q 'image' err.1 || fail "rank 1: $(cat code.1) $(cat err.1)"
[ "$(cat code.0)" = 4 ] && grep -q 'rank 1 stopped:' err.0 || fail "rank 0: $(cat code.0) $(cat err.0)"

# A rank that never comes, at the time that was set; and nobody else is there at all.
MASTER_PORT=$(free_port)
export MASTER_PORT
begin=$(date +%s)
for r in 0 2; do
  { RANK=$r WORLD_SIZE=3 timeout 60 "$K3PACK" run whole.k3p --input scenario --rank-timeout 2 -o $r.out >out.$r 2>err.$r && code=0 || code=$?; echo $code >code.$r; } &
done
wait
for r in 0 2; do
  [ "$(cat code.$r)" = 4 ] && grep -q 'rank 1 of 3 did not come to 127.0.0.1' err.$r || fail "rank $r: $(cat code.$r) $(cat err.$r)"
done
[ $(($(date +%s) - begin)) -lt 30 ] || fail "--rank-timeout 2 took $(($(date +%s) - begin)) s"
RANK=1 WORLD_SIZE=2 "$K3PACK" run whole.k3p --input scenario --rank-timeout 0.3 -o no.out 2>err && fail "rank 1 ran without rank 0"
grep -q 'rank 0 did not come: rank 1 tried 127.0.0.1' err || fail "$(cat err)"

# One that is killed, and one that is stopped: rank 1, when it has made its connection and before rank 3 has come, so that no run is over by then.
one() {  # rank
  { RANK=$1 WORLD_SIZE=4 timeout 60 "$K3PACK" run whole.k3p --input scenario --rank-timeout 4 -o "$1.out" >"out.$1" 2>"err.$1" && code=0 || code=$?; echo $code >"code.$1"; } &
}
for signal in KILL STOP; do
  rm -f code.*
  MASTER_PORT=$(free_port)
  export MASTER_PORT
  one 0
  one 2
  RANK=1 WORLD_SIZE=4 "$K3PACK" run whole.k3p --input scenario --rank-timeout 4 -o 1.out >out.1 2>err.1 &
  victim=$!
  pids=$victim
  n=0
  # The socket is connected, not only made: 01 is "established".
  until port=$(printf '%04X' "$MASTER_PORT") && inode=$(readlink /proc/$victim/fd/* 2>/dev/null | sed -n 's/^socket:.\([0-9]*\).$/\1/p') &&
    [ -n "$inode" ] && awk -v p=":$port" -v i="$inode" '$3 ~ p "$" && $4 == "01" && $10 == i { found = 1 } END { exit !found }' /proc/net/tcp; do
    n=$((n + 1))
    [ $n -lt 3000 ] || fail "rank 1 made no connection"
  done
  kill -$signal $victim
  one 3
  while [ ! -e code.0 ] || [ ! -e code.2 ] || [ ! -e code.3 ]; do sleep 0.1; done
  kill -KILL $victim 2>/dev/null || :
  wait $victim 2>/dev/null || :
  pids=
  for r in 0 2 3; do
    [ "$(cat code.$r)" = 4 ] && grep -Eq 'rank 1 (is gone|is late or dead|of 4 did not come)' err.$r || fail "$signal: rank $r: $(cat code.$r) $(cat err.$r)"
  done
done
[ ! -e 0.out ] || fail "a failed run left an output"

# What a launcher's variables must be.
unset MASTER_PORT
usage() {
  text=$1
  shift
  env "$@" "$K3PACK" run whole.k3p --input scenario -o no.out 2>err && fail "no error: $*"
  grep -q "$text" err || fail "\"$text\" is not said: $(cat err)"
}
usage 'WORLD_SIZE is 2 and RANK is not set' WORLD_SIZE=2 MASTER_PORT=29511
usage 'WORLD_SIZE is 2 and MASTER_PORT is not set' WORLD_SIZE=2 RANK=0
usage 'RANK is 2, WORLD_SIZE 2' WORLD_SIZE=2 RANK=2 MASTER_PORT=29511
usage 'WORLD_SIZE is "two"' WORLD_SIZE=two RANK=0 MASTER_PORT=29511
usage 'MASTER_PORT is "99999"' WORLD_SIZE=2 RANK=0 MASTER_PORT=99999
WORLD_SIZE=2 RANK=0 MASTER_PORT=29511 "$K3PACK" run whole.k3p --input scenario -o no.out --tp 4 2>err && fail "--tp 4 with WORLD_SIZE 2"
grep -q 'tp 4, and a launcher has started 2 processes' err || fail "$(cat err)"
"$K3PACK" run whole.k3p --input scenario -o no.out --tp 2 --rank-timeout -1 2>err && fail "a time below 0"
WORLD_SIZE=1 RANK=0 "$K3PACK" run whole.k3p --input scenario -o one.out --quiet
"$K3PACK" run whole.k3p --input scenario -o tp1.out --quiet
cmp one.out tp1.out
