#!/bin/sh
# Folders of `convert --tp N`, and the reduction plan on the command line.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
here=$OLDPWD
fail() { echo "$*"; exit 1; }
# expect CODE command...: runs it, keeps its stderr in err
expect() { code=$1; shift; got=0; "$@" >out 2>err || got=$?; [ "$got" = "$code" ] || { cat err; fail "exit $got, not $code: $*"; }; }

"$K3PACK" synth draft --preset tiny --quiet
"$K3PACK" synth target --preset tiny-target --quiet
"$K3PACK" convert draft -o whole.k3p --target target --quiet

# inspect --reductions --tp N --json: an object with tp, deferred, immediate and the list plan; 2L deferred for tp > 1 (3 layers here), 0 for tp 1.
for source in draft whole.k3p; do
  "$K3PACK" inspect $source --reductions --tp 4 --json >plan.json
  for part in '"tp": 4' '"deferred": 6' '"immediate": 0' '"plan": \['; do grep -q "$part" plan.json || fail "$source: no $part"; done
  [ "$(grep -c '"action": "deferred"' plan.json)" = 6 ] || fail "$source: not 6 entries"
  [ "$(grep -c '"norm": "model.final_norm"' plan.json)" = 1 ] || fail "$source: the final norm does not complete the last sum"
  ! grep -q '"norm": "model.layers.0.input_layernorm"' plan.json || fail "$source: layer 0 reduces"
  "$K3PACK" inspect $source --reductions --tp 1 --json >plan.json
  for part in '"tp": 1' '"deferred": 0' '"immediate": 0' '"plan": \[\]'; do grep -q "$part" plan.json || fail "$source: no $part"; done
done
"$K3PACK" inspect draft --reductions --tp 2 --pp 3 --json >plan.json
grep -q '"deferred": 3' plan.json && grep -q '"immediate": 3' plan.json || fail "pp 3: not 3 and 3"
# Ranks that would cut a head: no plan, but what `run --tp` says, with its exit code (PCK05), of the checkpoint and of the image.
printf '' >scenario
for source in draft whole.k3p; do
  expect 5 "$K3PACK" inspect $source --reductions --tp 3
  [ ! -s out ] || fail "$source: a plan for 3 ranks"
  grep -q 'PCK05.*q_b_proj.*4 heads cannot be cut into 3 equal parts (allowed: tp 1, 2, 4)' err || fail "$source: $(cat err)"
done
expect 5 "$K3PACK" run whole.k3p --input scenario -o drafts --tp 3
grep -q 'PCK05.*4 heads cannot be cut into 3 equal parts' err || fail "run: $(cat err)"
expect 2 "$K3PACK" inspect draft --reductions --tp 0
expect 2 "$K3PACK" inspect draft --reductions --tp 2 --pp 4

# Every file is a valid image; verify takes the folder, export refuses it; equal input gives equal bytes whatever the threads.
for tp in 1 2 4; do
  "$K3PACK" convert draft -o tp$tp --tp $tp --target target --quiet --threads 2
  "$K3PACK" verify tp$tp >out
  grep -q "shared file and $tp rank files" out || fail "verify tp$tp: $(cat out)"
  "$K3PACK" verify tp$tp/rank-0-of-$tp.safetensors >/dev/null
done
[ "$(ls tp2 | tr '\n' ' ')" = "rank-0-of-2.safetensors rank-1-of-2.safetensors shared.safetensors " ] || fail "names: $(ls tp2)"
"$K3PACK" convert draft -o again --tp 2 --target target --quiet --threads 1
for file in tp2/*; do cmp "$file" "again/$(basename "$file")"; done
expect 5 "$K3PACK" export tp2 -o exported
expect 5 "$K3PACK" export tp2/shared.safetensors -o exported
for verb in inspect check; do expect 5 "$K3PACK" $verb tp2; done
expect 5 "$K3PACK" inspect tp2/shared.safetensors --reductions --tp 2
[ ! -e exported ] || fail "a refused export left something"

# A spoiled or exchanged rank file is named.
cp -r again spoiled
printf 'X' | dd of=spoiled/rank-1-of-2.safetensors bs=1 seek=20000 conv=notrunc 2>/dev/null
expect 1 "$K3PACK" verify spoiled
grep -q 'rank-1-of-2.safetensors.*does not match' err || fail "not named: $(cat err)"
cp again/rank-0-of-2.safetensors spoiled/rank-1-of-2.safetensors
expect 1 "$K3PACK" verify spoiled
grep -q 'the file of rank 1 has the seal' err || fail "exchange not seen: $(cat err)"
rm spoiled/rank-1-of-2.safetensors
expect 1 "$K3PACK" verify spoiled
grep -q 'the file of rank 1 is absent' err || fail "absence not seen: $(cat err)"

# Widths that cut a head: PCK05 with those that would work, nothing left behind.
expect 5 "$K3PACK" convert draft -o tp8 --tp 8 --target target
grep -q 'PCK05.*q_b_proj.*4 heads.*tp 1, 2, 4' err || fail "PCK05: $(cat err)"
[ ! -e tp8 ] && [ ! -e .tp8.k3tmp ] || fail "a refused conversion left something"
expect 5 "$K3PACK" convert draft -o generic --tp 2 --recipe generic

# An existing output: refused, replaced with --force when it is such a folder, never when it holds anything else.
expect 2 "$K3PACK" convert draft -o tp2 --tp 4 --target target
"$K3PACK" convert draft -o tp2 --tp 4 --target target --force --quiet
[ "$(ls tp2 | wc -l)" = 5 ] || fail "not replaced: $(ls tp2)"
touch tp2/mine
expect 2 "$K3PACK" convert draft -o tp2 --tp 2 --target target --force
[ -e tp2/mine ] && [ -e tp2/rank-3-of-4.safetensors ] || fail "another's file is gone"
expect 2 "$K3PACK" convert draft -o draft/inside --tp 2

# What an interrupted conversion left is gone with the next one; two at a time exclude each other; a slash at the end is no name.
mkdir .late.k3tmp
cp again/rank-0-of-2.safetensors .late.k3tmp/rank-7-of-8.safetensors
cp again/rank-0-of-2.safetensors .late.k3tmp/.rank-6-of-8.safetensors.k3tmp
if command -v flock >/dev/null; then
  flock .late.k3tmp sleep 2 &
  sleep 0.5
  expect 2 "$K3PACK" convert draft -o late --tp 2 --target target
  grep -q 'another process' err || fail "no lock: $(cat err)"
  wait
fi
"$K3PACK" convert draft -o late/ --tp 2 --target target --quiet
[ "$(ls -A late | tr '\n' ' ')" = "rank-0-of-2.safetensors rank-1-of-2.safetensors shared.safetensors " ] || fail "left over: $(ls -A late)"
[ ! -e .late.k3tmp ] || fail "the temporary folder is still there"

# FP8 blocks of 128 rows: the tiny drafter is too small for two ranks, and that is said.
"$K3PACK" synth blocks --preset tiny --quant fp8-block --quiet
expect 5 "$K3PACK" convert blocks -o blocks2 --tp 2
grep -q 'PCK05.*q_b_proj.*96 rows with one scale for every 128.*tp 1)' err || fail "PCK05: $(cat err)"

if command -v "${K3PACK_PYTHON:-python3}" >/dev/null; then
  # Row and column splits of every scheme and dialect.
  for quant in none fp8 fp8-tensor fp8-block mxfp8 nvfp4 mxfp4 "nvfp4 --dialect modelopt" "fp8-block --dialect deepseek"; do
    case $quant in none | fp8-block | nvfp4) widths="2 16" ;; *) widths=16 ;; esac
    for tp in $widths; do
      rm -rf folder heads heads.k3p
      # shellcheck disable=SC2086
      "$K3PACK" synth heads --preset tiny-heads --quiet --quant $quant
      "$K3PACK" convert heads -o heads.k3p --quiet
      "$K3PACK" convert heads -o folder --tp $tp --quiet
      "$K3PACK" verify folder --quiet
      "${K3PACK_PYTHON:-python3}" "$here/tests/python/split_equals_whole.py" heads.k3p folder $tp
    done
  done
  # Weights that are quantised on the way, too.
  "$K3PACK" synth plain --preset tiny-heads --quiet
  for quant in fp8-block nvfp4; do
    rm -rf folder heads.k3p
    "$K3PACK" convert plain -o heads.k3p --quant $quant --quiet
    "$K3PACK" convert plain -o folder --tp 8 --quant $quant --quiet
    "${K3PACK_PYTHON:-python3}" "$here/tests/python/split_equals_whole.py" heads.k3p folder 8
  done
  for tp in 1 2 4; do
    rm -rf folder
    "$K3PACK" convert draft -o folder --tp $tp --target target --quiet
    "${K3PACK_PYTHON:-python3}" "$here/tests/python/split_equals_whole.py" whole.k3p folder $tp
  done
else
  echo "no python3: slices not compared with the whole image"
  exit 77
fi
