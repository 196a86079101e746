#!/bin/sh
# `convert --quant` and `export --format compressed-tensors|modelopt`: known encodings, one result for every instruction set and thread count, refusals.
set -u
command -v python3 >/dev/null || { echo "no python3: encodings NOT looked at from outside"; exit 77; }
here=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder" || exit 1
failed=0
fail() { echo "FAILED: $*"; failed=1; }
# expect CODE TEXT command...: stderr must hold TEXT
expect() {
  code=$1 text=$2
  shift 2
  "$@" >out 2>err
  got=$?
  [ $got = "$code" ] || fail "exit $got instead of $code: $* ($(cat err))"
  [ -z "$text" ] || grep -qF -- "$text" err || fail "\"$text\" is not in the answer to $*: $(cat err)"
}
look() { python3 "$here/tests/python/quantise.py" "$@" || fail "quantise.py $*"; }

# The test vectors encode exactly in scalar, AVX2, AVX-512, through convert and export.
look write-vectors vectors
for simd in scalar avx2 avx512; do
  rm -rf ct mo mx
  for scheme in nvfp4 mxfp4; do
    K3PACK_SIMD=$simd "$K3PACK" convert vectors -o v.$scheme --recipe generic --quant $scheme --ignore "$([ $scheme = nvfp4 ] && echo t3 || echo 're:t[12]')" \
      --force --quiet || fail "convert vectors $scheme"
  done
  "$K3PACK" export v.nvfp4 -o ct --format compressed-tensors --quiet && "$K3PACK" export v.nvfp4 -o mo --format modelopt --quiet &&
    "$K3PACK" export v.mxfp4 -o mx --format compressed-tensors --quiet || fail "export of the vectors"
  look check-vectors ct mo mx
done

# Relative RMSE on Gaussian weights: NVFP4 0.095, MXFP4 0.112, FP8 per channel 0.027, MXFP8 0.027.
look write-gauss gauss
for line in "nvfp4 0.0945 0.0960" "mxfp4 0.1110 0.1130" "fp8 0.0255 0.0275" "mxfp8 0.0255 0.0275" "fp8-block 0.0255 0.0275"; do
  set -- $line
  "$K3PACK" convert gauss -o g.k3p --recipe generic --quant "$1" --json --force >told.json || fail "convert gauss $1"
  look rmse told.json "$2" "$3"
done
"$K3PACK" convert gauss -o g.k3p --recipe generic --quant nvfp4 --scale-mode pow2 --json --force >told.json
look rmse told.json 0.0945 0.0960

"$K3PACK" synth draft --preset tiny --quiet
"$K3PACK" synth target --preset tiny-target --quiet
for scheme in fp8 fp8-block mxfp8 nvfp4 mxfp4; do
  # One result whatever the instruction set and the number of threads, digests and statistics included.
  K3PACK_SIMD=scalar "$K3PACK" convert draft -o one.k3p --quant $scheme --threads 1 --json --force >one.json 2>/dev/null || fail "convert $scheme"
  for simd in avx2 avx512; do
    K3PACK_SIMD=$simd "$K3PACK" convert draft -o $scheme.k3p --quant $scheme --threads 3 --json --force 2>/dev/null | sed "s/$scheme.k3p/one.k3p/" >many.json
    cmp one.k3p $scheme.k3p || fail "$scheme: $simd and 3 threads show"
    cmp one.json many.json || fail "$scheme: $simd and 3 threads show in the account"
  done
  "$K3PACK" verify $scheme.k3p --source draft --quiet || fail "verify $scheme"
  # The original is not in there; the first weight that was encoded is named.
  expect 5 "context_proj.weight: 22 source weights were encoded" "$K3PACK" export $scheme.k3p -o nothing
  [ ! -e nothing ] || fail "a refused export left a folder"
  "$K3PACK" export $scheme.k3p -o ct-$scheme --format compressed-tensors --quiet || fail "export $scheme"
  # A checkpoint of the export is kept as it is, and the image of it holds the same weights.
  "$K3PACK" convert ct-$scheme -o kept-$scheme.k3p --quiet || fail "convert the export of $scheme"
  "$K3PACK" diff kept-$scheme.k3p $scheme.k3p --quiet || fail "$scheme: the image of the export holds other tensors"
  "$K3PACK" export kept-$scheme.k3p -o again --quiet && diff -r again ct-$scheme >/dev/null || fail "$scheme: the export's export"
  rm -rf again
  "$K3PACK" export kept-$scheme.k3p -o again --format compressed-tensors --quiet && cmp again/model.safetensors ct-$scheme/model.safetensors ||
    fail "$scheme: relabelling into its own dialect changes bytes"
  rm -rf again
done
# Prints SNR per tensor and a summary: as --json tells them.
"$K3PACK" convert draft -o $folder/told.k3p --quant nvfp4 --force >out 2>/dev/null || fail "convert for its account"
"$K3PACK" convert draft -o $folder/told.k3p --quant nvfp4 --force --json >told.json 2>/dev/null
look account out told.json
# verify --source encodes again: one weight with another sign is found, and nothing else.
look flip draft flipped layers.1.self_attn.o_proj.weight
for scheme in nvfp4 fp8; do
  expect 1 "layers.1.self_attn.o_proj.weight: encoded again it gives other bytes" "$K3PACK" verify $scheme.k3p --source flipped
  grep -q "IMG02.*(1 times)\|IMG02[^(]*$" err || fail "more than one difference: $(cat err)"
done

# `check --engine vllm` on the exported NVFP4, MXFP4 and channel-wise FP8 drafters is clean; fp8-block shows FUS05, --share module FUS06.
for scheme in nvfp4 mxfp4 fp8; do
  expect 0 "" "$K3PACK" check ct-$scheme --engine vllm
  [ ! -s err ] || fail "check --engine vllm of $scheme is not clean: $(cat err)"
done
expect 1 "FUS05" "$K3PACK" check ct-fp8-block --engine vllm
"$K3PACK" convert draft -o module.k3p --quant nvfp4 --share module --quiet && "$K3PACK" export module.k3p -o ct-module --format compressed-tensors --quiet
expect 1 "FUS06" "$K3PACK" check ct-module --engine vllm
grep -q FUS02 err && fail "--share module leaves different scales inside a fused tensor"
[ "$(look unfused draft ct-nvfp4)" = 22 ] || fail "22 weights are encoded"
grep -q '"re:.*self_attn\\\\.kv_b_proj$"' ct-nvfp4/config.json || fail "no index-free ignore pattern: $(cat ct-nvfp4/config.json)"
grep 're:' ct-nvfp4/config.json | grep -q layers && fail "a pattern with a layer number: $(grep re: ct-nvfp4/config.json)"

# Both dialects. With power-of-two second scales the way there and back is exact; else the reciprocal is rounded once.
for scheme in nvfp4 fp8; do "$K3PACK" export $scheme.k3p -o mo-$scheme --format modelopt 2>notes >/dev/null || fail "modelopt $scheme"; done
[ -e mo-nvfp4/hf_quant_config.json ] && grep -q '"modelopt"' mo-nvfp4/config.json && grep -q W4A16_NVFP4 mo-nvfp4/hf_quant_config.json || fail "both files of ModelOpt"
expect 0 "" "$K3PACK" check mo-nvfp4 --engine vllm
expect 0 "" "$K3PACK" check mo-fp8 --engine vllm
python3 -c 'import sys; sys.exit(not 0 < float(sys.argv[1]) < 1.3e-7)' "$(look decode ct-nvfp4 mo-nvfp4)" || fail "a reciprocal costs more than one rounding"
"$K3PACK" convert draft -o pow2.k3p --quant nvfp4 --scale-mode pow2 --quiet && "$K3PACK" export pow2.k3p -o ct-pow2 --format compressed-tensors --quiet
"$K3PACK" export pow2.k3p -o mo-pow2 --format modelopt >/dev/null 2>notes
[ ! -s notes ] || fail "powers of two need no note: $(cat notes)"
[ "$(look decode ct-pow2 mo-pow2)" = 0 ] || fail "powers of two are exact in both dialects"
"$K3PACK" convert mo-pow2 -o back.k3p --quiet && "$K3PACK" export back.k3p -o back --format compressed-tensors --quiet &&
  cmp back/model.safetensors ct-pow2/model.safetensors && cmp back/config.json ct-pow2/config.json || fail "relabelled there and back: other bytes"
expect 0 "22 second scales are reciprocals" "$K3PACK" export nvfp4.k3p -o mo --format modelopt --force
for scheme in fp8-block mxfp8 mxfp4; do
  expect 5 "is not written as a modelopt checkpoint" "$K3PACK" export $scheme.k3p -o nothing --format modelopt
done
"$K3PACK" convert draft -o plain.k3p --quiet
expect 5 "no quantised weights" "$K3PACK" export plain.k3p -o nothing --format compressed-tensors

# Sharded sources give sharded exports with an index that is right.
"$K3PACK" synth sharded --preset tiny --shards 3 --quiet
"$K3PACK" convert sharded -o sharded.k3p --quant nvfp4 --quiet && "$K3PACK" export sharded.k3p -o ct-sharded --format compressed-tensors --quiet
[ -e ct-sharded/model.safetensors.index.json ] && expect 0 "" "$K3PACK" check ct-sharded --engine vllm && [ ! -s err ] || fail "a sharded export: $(cat err)"
"$K3PACK" convert ct-sharded -o from-shards.k3p --quiet && "$K3PACK" diff from-shards.k3p nvfp4.k3p --quiet || fail "shards hold other tensors"

# Names with a prefix; tensors that the target's replaced stay out of the export, which says so.
"$K3PACK" synth rooted --preset tiny --root model. --quiet
"$K3PACK" convert rooted -o rooted.k3p --quant nvfp4 --quiet && "$K3PACK" export rooted.k3p -o ct-rooted --format compressed-tensors --quiet
expect 0 "" "$K3PACK" check ct-rooted --engine vllm
[ ! -s err ] || fail "names with a prefix: $(cat err)"
grep -q '"model.layers.0' ct-rooted/config.json && fail "a pattern with a prefix"
"$K3PACK" convert draft -o replaced.k3p --target target --embed target --quant mxfp4 --quiet
expect 0 "1 tensors of the source are not in the image" "$K3PACK" export replaced.k3p -o ct-replaced --format compressed-tensors
expect 0 "" "$K3PACK" check ct-replaced --engine vllm
# The plan without reading: every parameter with its place.
"$K3PACK" convert draft --dry-run --quant nvfp4 >out && [ "$(grep -c 'fused_qkv_a_proj.weight_global_scale shard' out)" = 6 ] || fail "--dry-run: $(head -30 out)"

# inspect says what was encoded, and from what; kept schemes are only named.
"$K3PACK" inspect nvfp4.k3p >out
[ "$(grep -c '^scheme nvfp4: .*, encoded from BF16$' out)" = 16 ] || fail "inspect: $(grep scheme out)"
"$K3PACK" inspect kept-nvfp4.k3p >out
[ "$(grep -c '^scheme nvfp4: [a-z_.0-9]*$' out)" = 16 ] || fail "inspect of kept weights: $(grep scheme out)"

# With --tp every rank gets its part of the same encoded weights.
"$K3PACK" convert draft -o whole.k3p --target target --quant nvfp4 --quiet
for tp in 2 4; do
  "$K3PACK" convert draft -o tp$tp --tp $tp --target target --quant nvfp4 --quiet || fail "--tp $tp --quant"
  python3 "$here/tests/python/split_equals_whole.py" whole.k3p tp$tp $tp >out || fail "--tp $tp cuts other bytes: $(cat out)"
done

# Patterns: whole names and regular expressions; what matches nothing is an error, what splits a fused tensor too.
expect 2 "the pattern matches no weight" "$K3PACK" convert draft -o x.k3p --quant nvfp4 --ignore o_proj
expect 2 "CFG10" "$K3PACK" convert draft -o x.k3p --quant nvfp4 --ignore "re:("
expect 3 "FUS01" "$K3PACK" convert draft -o x.k3p --quant nvfp4 --ignore "re:.*\.up_proj"
expect 2 "need --quant" "$K3PACK" convert draft -o x.k3p --ignore lm_head
expect 2 "second scales" "$K3PACK" convert draft -o x.k3p --quant mxfp4 --share module
expect 5 "encoding it again would round twice" "$K3PACK" convert ct-fp8 -o x.k3p --quant nvfp4
expect 2 "takes too many steps" "$K3PACK" convert draft -o x.k3p --quant nvfp4 --ignore "re:(.+)+[A-Z]"
[ ! -e x.k3p ] || fail "a refused conversion left an image"
"$K3PACK" convert draft -o x.k3p --quant nvfp4 --ignore "re:.*o_proj" --include "markov_head.markov_w2" --include "re:.*kv_b_proj" --quiet || fail "--ignore, --include"
"$K3PACK" export x.k3p -o ct-x --format compressed-tensors --quiet
grep -q 'o_proj' ct-x/config.json && ! grep -q kv_b_proj ct-x/config.json && ! grep -q markov_w2 ct-x/config.json || fail "the ignore list of chosen modules"
expect 0 "" "$K3PACK" check ct-x --engine vllm
[ ! -s err ] || fail "chosen modules: $(cat err)"
# One layer's module alone needs its number in the pattern.
"$K3PACK" convert draft -o x.k3p --quant mxfp4 --ignore layers.1.mlp.down_proj --force --quiet && "$K3PACK" export x.k3p -o ct-one --format compressed-tensors --quiet
grep -q 'layers\\\\.1\\\\.mlp\\\\.down_proj' ct-one/config.json || fail "one layer's module"

# Blocks outside the window of NVFP4: a shared scale (FUS09), a tensor's own range (SCL10); generic leaves embeddings, norms and odd widths alone.
look write-outliers outliers
expect 0 "FUS09" "$K3PACK" convert outliers -o o.k3p --recipe generic --quant nvfp4
grep -q "a.k_proj.weight: the shared second scale leaves 256 of 256 blocks" err || fail "FUS09 does not count: $(cat err)"
grep -q "SCL10" err && grep -q "a.o_proj.weight: 2[0-9]* of 256 blocks get a subnormal scale" err || fail "SCL10 does not count: $(cat err)"
grep -q "stays plain: odd.weight" err || fail "a width that is no multiple of 16: $(cat err)"
grep -q "4 weights to nvfp4" out || fail "generic takes every linear layer: $(cat out)"

# NaN and Inf would spoil what shares their scale.
for kind in nan inf; do
  look write-nan $kind $kind
  for scheme in nvfp4 fp8 mxfp4 mxfp8; do
    expect 3 "VAL02" "$K3PACK" convert $kind -o n.k3p --recipe generic --quant $scheme
    [ ! -e n.k3p ] || fail "$scheme: a refused conversion left an image"
  done
done
"$K3PACK" convert nan -o n.k3p --recipe generic --quant mxfp4 --allow VAL02 --quiet || fail "--allow VAL02"
exit $failed
