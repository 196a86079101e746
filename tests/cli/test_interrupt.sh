# What a killed, doubled or starved conversion leaves behind.
. tests/cli/k3.sh
"$K3PACK" synth "$work/big" --preset k3-dspark-small --quiet || exit 1
"$K3PACK" convert "$work/big" -o "$work/good.k3p" --quiet || exit 1

# B100: "kill -9 during convert leaves at most a temp file that the next run removes".
mkdir "$work/out"
killed=0
for delay in 0.00 0.01 0.02 0.03 0.05 0.08 0.12; do
  "$K3PACK" convert "$work/big" -o "$work/out/x.k3p" --force --quiet 2>/dev/null &
  pid=$!
  sleep "$delay"
  kill -9 "$pid" 2>/dev/null && killed=$((killed + 1))
  wait "$pid" 2>/dev/null
  for left in $(ls -A "$work/out"); do
    case $left in
      x.k3p) cmp -s "$work/out/x.k3p" "$work/good.k3p" || complain "a killed run leaves a bad image under the final name" ;;
      .x.k3p.k3tmp) : ;;
      *) complain "a killed run leaves $left" ;;
    esac
  done
  rm -f "$work/out/x.k3p"
done
[ "$killed" -gt 0 ] || complain "no run was killed in time"
expect 0 "$K3PACK" convert "$work/big" -o "$work/out/x.k3p"
[ "$(ls -A "$work/out")" = x.k3p ] || complain "the next run does not clean up: $(ls -A "$work/out")"

# "two converts at once do not harm each other".
rm "$work/out/x.k3p"
"$K3PACK" convert "$work/big" -o "$work/out/x.k3p" --quiet 2>"$work/err1" &
first=$!
"$K3PACK" convert "$work/big" -o "$work/out/x.k3p" --quiet 2>"$work/err2" &
second=$!
wait "$first"; code1=$?
wait "$second"; code2=$?
case $code1$code2 in
  00 | 02 | 20) : ;;
  *) complain "two converts at once end with $code1 and $code2: $(cat "$work/err1" "$work/err2")" ;;
esac
cmp -s "$work/out/x.k3p" "$work/good.k3p" || complain "two converts at once give a bad image"
[ "$(ls -A "$work/out")" = x.k3p ] || complain "two converts at once leave $(ls -A "$work/out")"

# B101: a full disk (here: a limit on the size of files), a read-only folder: exit 4, old output untouched.
cp "$work/draft/config.json" "$work/out/old.k3p"
(ulimit -f 100; exec "$K3PACK" convert "$work/big" -o "$work/out/old.k3p" --force) >/dev/null 2>"$work/stderr"
[ $? = 4 ] || complain "no space is not exit 4: $(cat "$work/stderr")"
said OUT03 "no space is not OUT03"
cmp -s "$work/draft/config.json" "$work/out/old.k3p" || complain "no space: the old output was touched"
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
  chmod 755 "$work"
  chmod 555 "$work/out"
  setpriv --reuid=65534 --regid=65534 --clear-groups "$K3PACK" convert "$work/big" -o "$work/out/new.k3p" >/dev/null 2>"$work/stderr"
  [ $? = 4 ] || complain "a read-only folder is not exit 4: $(cat "$work/stderr")"
else
  chmod 555 "$work/out"
  expect 4 "$K3PACK" convert "$work/big" -o "$work/out/new.k3p"
fi
chmod 755 "$work/out"
ls -A "$work/out" | grep k3tmp && complain "a failed run leaves its temporary file"

# A file that shrinks while it is mapped is a failed read, not a crash.
"$K3PACK" synth "$work/big-target" --preset k3-dspark-small-target --quiet && "$K3PACK" convert "$work/big" --target "$work/big-target" -o "$work/shrinks.k3p" --quiet ||
  complain "the image for shrinking cannot be made"
"$K3PACK" bench "$work/shrinks.k3p" --runs 100000 >"$work/stdout" 2>"$work/stderr" &
pid=$!
sleep 1
truncate -s 20000 "$work/shrinks.k3p"
wait "$pid"
code=$?
case $code in
  3) : ;;  # a slow machine was still opening it
  4) said 'cut short' "a file that shrinks is not told" ;;
  *) complain "an image that shrinks under bench ends with $code: $(cat "$work/stderr")" ;;
esac

# Reports that do not arrive are failures too.
if [ -e /dev/full ]; then
  "$K3PACK" inspect "$work/good.k3p" >/dev/full 2>/dev/null
  [ $? = 4 ] || complain "a report to a full device is not exit 4"
fi
finish
