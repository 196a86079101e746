#!/bin/sh
# "For every scheme and both ways of loading, tp 2, 4, 8 equal tp 1 within F32 rounding; equal bits for equal tp whatever the threads."
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
here=$OLDPWD
fail() { echo "$*"; exit 1; }
expect() { code=$1; shift; got=0; "$@" >out 2>err || got=$?; [ "$got" = "$code" ] || { cat err; fail "exit $got, not $code: $*"; }; }
"$K3PACK" run --help >/dev/null 2>&1 || { echo "this build has no run"; exit 77; }
command -v "${K3PACK_PYTHON:-python3}" >/dev/null || { echo "no python3 to write a scenario: ranks NOT compared"; exit 77; }
run() { "$K3PACK" run "$@" --input scenario --emit all --force --quiet; }

for quant in none fp8 fp8-tensor fp8-block mxfp8 nvfp4 mxfp4 "nvfp4 --dialect modelopt" "fp8-block --dialect deepseek"; do
  rm -rf heads cut ./*.k3p
  # shellcheck disable=SC2086
  "$K3PACK" synth heads --preset tiny-heads --dtype f32 --quiet --quant $quant
  [ -e scenario ] || "${K3PACK_PYTHON:-python3}" "$here/tests/python/write_scenario.py" heads/config.json scenario
  "$K3PACK" convert heads -o whole.k3p --quiet
  run whole.k3p -o 1.out --tp 1 --threads 2
  for tp in 2 4 8 16; do
    run whole.k3p -o $tp.out --tp $tp --threads 1
    image=whole.k3p
    if [ $tp = 2 ] || [ $tp = 8 ]; then
      rm -rf cut
      "$K3PACK" convert heads -o cut --tp $tp --quiet
      image=cut
    fi
    run $image -o cut.out --tp $tp --threads 40
    cmp $tp.out cut.out || fail "$quant, tp $tp: $image and other threads give other bits than the whole image"
    "$K3PACK" diff 1.out $tp.out --tolerance 1e-5 >diff.txt || { cat diff.txt; fail "$quant: tp $tp is not tp 1"; }
  done
done

# The comparison sees what it should: another seed's weights are far away.
"$K3PACK" synth other --preset tiny-heads --dtype f32 --seed 9 --quiet
"$K3PACK" convert other -o other.k3p --quiet
run other.k3p -o other.out --tp 2
expect 1 "$K3PACK" diff 1.out other.out --tolerance 1e-2

# Refusals: ranks that do not divide, a folder cut for another number, one of its files, an exchanged file.
expect 5 "$K3PACK" run other.k3p --input scenario -o no.out --tp 3
grep -q PCK05 err || fail "no PCK05: $(cat err)"
"$K3PACK" convert other -o cut2 --tp 2 --quiet
expect 2 "$K3PACK" run cut2 --input scenario -o no.out --tp 4
grep -q 'cut for 2' err || fail "not said: $(cat err)"
expect 2 "$K3PACK" run cut2 --input scenario -o no.out
expect 2 "$K3PACK" run cut2/shared.safetensors --input scenario -o no.out
expect 2 "$K3PACK" run cut2/rank-0-of-2.safetensors --input scenario -o no.out
cp cut2/rank-0-of-2.safetensors cut2/rank-1-of-2.safetensors
expect 3 "$K3PACK" run cut2 --input scenario -o no.out --tp 2
grep -q 'IMG02.*rank-1-of-2' err || fail "exchange not named: $(cat err)"
rm cut2/rank-1-of-2.safetensors
expect 4 "$K3PACK" run cut2 --input scenario -o no.out --tp 2
[ ! -e no.out ] || fail "a refused run left an output"
