#!/bin/sh
# The frame of the command line: help, usage errors, exit codes, streams.
set -u
K=$K3PACK
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
bad=0

# expect CODE WORDS... : runs k3pack with the words; stdout in $work/out, stderr in $work/err.
expect() {
  want=$1
  shift
  "$K" "$@" >"$work/out" 2>"$work/err"
  got=$?
  [ "$got" = "$want" ] || { echo "k3pack $*: exit $got, wanted $want"; cat "$work/err"; bad=1; }
}
says() { # says out|err TEXT
  grep -qF -- "$2" "$work/$1" || { echo "std$1 lacks: $2"; cat "$work/$1"; bad=1; }
}
silent() { # silent out|err
  [ ! -s "$work/$1" ] || { echo "std$1 is not empty:"; cat "$work/$1"; bad=1; }
}

expect 2
silent out
says err "usage: k3pack VERB"
for word in help --help -h; do
  expect 0 $word
  says out "usage: k3pack VERB"
  says out "exit codes: 0 done and clean"
  silent err
done
for word in version --version -V; do
  expect 0 $word
  says out "k3pack "
done

# Every verb explains itself with an example, through --help and through help VERB, on stdout.
"$K" help | sed -n 's/^  \([a-z][a-z]*\)  *.*/\1/p' >"$work/verbs"
grep -qx synth "$work/verbs" || { echo "help lists no verbs"; bad=1; }
while read -r verb; do
  expect 0 "$verb" --help
  says out "usage: k3pack $verb"
  says out "examples:"
  says out "--json"
  silent err
  cp "$work/out" "$work/first"
  expect 0 help "$verb"
  cmp -s "$work/out" "$work/first" || { echo "help $verb differs from $verb --help"; bad=1; }
  expect 2 "$verb" --no-such-option
  says err "k3pack $verb: error: unknown option --no-such-option"
  silent out
done <"$work/verbs"

# Wrong usage: exit 2, nothing on stdout, what was probably meant.
expect 2 sytnh
says err "did you mean synth?"
expect 2 help nonsense
expect 2 version --jsno
says err "did you mean --json?"
expect 2 version --quiet=yes
says err "takes no value"
expect 2 version --threads
says err "needs a value"
expect 2 version --threads=-1
says err "whole number"
expect 2 version --threads 100000
expect 2 version extra
says err 'unexpected argument "extra"'
expect 2 diff one
says err "too few arguments"
expect 2 diff a b --tolerance x
says err "takes a number"
expect 2 synth "$work/d" --preset tiny --dtype bf61
says err "did you mean bf16?"
expect 2 synth "$work/d" --preset tinny
says err "tiny-target"
[ ! -e "$work/d" ] || { echo "a refused synth left a folder"; bad=1; }
expect 2 version "$(printf 'a\033[31mb')"
! grep -q "$(printf '\033')" "$work/err" || { echo "an escape sequence reached the terminal"; bad=1; }

# Options anywhere, with and without '=', short ones in a cluster, "--" ends them.
expect 0 synth --preset=tiny -qv "$work/one" --seed 3
silent out
expect 0 synth -q --preset tiny --seed=3 -- "$work/two"
cmp "$work/one/model.safetensors" "$work/two/model.safetensors" || bad=1
expect 0 diff "$work/one" "$work/two" --json
says out '"equal": true'

# Wrong usage under --json is an object too, wherever the word stands; as the value of an option it is none.
for words in "check --no-such-option --json" "check --json --no-such-option" "sytnh --json" "check --json" "convert $work/one --json" "verify --threads x --json"; do
  expect 2 $words
  says out '"ok": false'
  says out '"status": "K3_BAD_ARGUMENT"'
  python3 -c 'import json, sys; json.load(sys.stdin)' <"$work/out" 2>/dev/null || ! command -v python3 >/dev/null || { echo "$words: no JSON"; bad=1; }
done
expect 2 check "$work/one" --only --json
silent out
expect 2 check "$work/one" -- --json
silent out

# A folder of a checkpoint is no image: said, with what to do, where an image is needed; an answer like any other for verify.
for words in "run $work/one --input x -o y" "run $work/one --input x -o y --layers 0..1" "bench $work/one" "compare $work/one $work/one --input x" \
  "export $work/one -o $work/y"; do
  expect 3 $words
  says err "IMG01: $work/one: a folder of other files, no packed image: convert it first"
done
expect 1 verify "$work/one"
says err "no packed image: convert it first"

# What cannot be opened: 4; what is malformed: 3, also under --json, where stdout gets the error as an object.
expect 4 inspect "$work/absent"
says err "k3pack inspect: error: "
says err "absent"
expect 4 diff "$work/absent" "$work/one" --json
says out '"ok": false'
says out '"status": "K3_IO"'
head -c 1000 "$work/one/model.safetensors" >"$work/cut.safetensors"
expect 3 inspect "$work/cut.safetensors"
says err "CNT0"

# Output that is lost: exit 4. A reader that has had enough is not an error message.
if [ -w /dev/full ]; then
  for words in "help" "version --json" "inspect $work/one" "inspect $work/one --json" "diff $work/one $work/two"; do
    # shellcheck disable=SC2086
    "$K" $words >/dev/full 2>"$work/err"
    [ $? = 4 ] || { echo "k3pack $words >/dev/full: not exit 4"; bad=1; }
    says err "cannot write to standard output"
  done
fi
"$K" help >&- 2>"$work/err"
[ $? = 4 ] || { echo "a closed stdout: not exit 4"; bad=1; }
{ "$K" synth "$work/three" --preset tiny-target --shards 12 -q && "$K" inspect "$work/three" --json; echo $? >"$work/code"; } 2>"$work/err" | head -c 1 >"$work/out"
# The pipe holds 64 KiB, so a short report may still be complete: 0 or 4, and no word either way.
case $(cat "$work/code") in 0 | 4) ;; *) echo "a closed pipe: exit $(cat "$work/code")"; bad=1 ;; esac
silent err

# An empty value, as a shell variable that is not set leaves it, is wrong usage and not the current folder.
expect 2 convert "$work/two" -o ""
says err "--output takes IMAGE, not an empty text"
expect 2 export "$work/two" -o ""
expect 0 synth "$work/seven" --preset tiny --root ""

# A standard stream that is closed at the start is not reused for an output file.
"$K" synth "$work/four" --preset tiny >&- 2>&-
cmp "$work/four/model.safetensors" "$work/two/model.safetensors" >/dev/null 2>&1 && { echo "seeds 0 and 3 gave the same bytes"; bad=1; }
"$K" synth "$work/five" --preset tiny -q && cmp "$work/four/model.safetensors" "$work/five/model.safetensors" || bad=1

# Progress and colour only on a terminal, and no colour where it is not wanted.
expect 0 synth "$work/six" --preset k3-dspark-small
silent err
if command -v script >/dev/null 2>&1; then
  escape=$(printf '\033')
  TERM=xterm script -qec "$K sytnh" /dev/null </dev/null >"$work/out"
  grep -q "$escape\[31merror" "$work/out" || { echo "no colour on a terminal"; bad=1; }
  NO_COLOR=1 TERM=xterm script -qec "$K sytnh" /dev/null </dev/null >"$work/out"
  ! grep -q "$escape" "$work/out" || { echo "NO_COLOR is not obeyed"; bad=1; }
  TERM=dumb script -qec "$K sytnh" /dev/null </dev/null >"$work/out"
  ! grep -q "$escape" "$work/out" || { echo "colour on a dumb terminal"; bad=1; }
fi
exit "$bad"
