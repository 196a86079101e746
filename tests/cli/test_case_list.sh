# Every case of the list of real-world inputs is a test, or has a written reason why it cannot concern this program (fixtures/cases.txt).
set -u
cases="01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26 28 29 31 32 34 35 37 38 40 41 43 44 46 47 49 50 52 53 55 56 58 59 61 62 64 65 67 68 70 71 73
  74 76 77 79 80 82 83 85 86 88 89 91 92 94 95 97 98 100 101 103 104 106 107"
failed=0 n=0

complain() {
  echo "$1"
  failed=$((failed + 1))
}

for number in $cases; do
  id=B$number
  n=$((n + 1))
  entry=$(grep "^$id " fixtures/cases.txt)
  [ "$(printf '%s\n' "$entry" | grep -c .)" = 1 ] || { complain "$id has no entry, or several"; continue; }
  places=${entry#* }
  reason=${places#*: }
  [ "$reason" = "$places" ] && reason=
  for place in ${places%%: *}; do
    case $place in
      -) [ -n "$reason" ] || complain "$id has neither a test nor a reason" ;;
      fixtures/*)
        found=no
        for folder in $place; do
          [ -s "$folder/expect" ] || { [ -e "$folder/expect" ] && case $folder in *-clean) : ;; *) false ;; esac; } || continue
          found=yes
        done
        [ "$found" = yes ] || complain "$id: there is no fixture $place"
        ;;
      tests/*) grep -qw "$id" "$place" 2>/dev/null || complain "$id: $place does not name it" ;;
      *) complain "$id: $place is neither a fixture nor a test" ;;
    esac
  done
done
for id in $(sed -n 's/^\(B[0-9]*\) .*/\1/p' fixtures/cases.txt); do
  case " $(printf '%s ' $cases)" in *" ${id#B} "*) : ;; *) complain "fixtures/cases.txt names $id, which is no case" ;; esac
done
# Every fixture that carries a number is one of a case.
for folder in fixtures/reject/b[0-9]* fixtures/reject/quant-b[0-9]*; do
  name=${folder##*/}
  name=${name#quant-}
  number=${name%%-*}
  grep -q "^B${number#b} .*fixtures/reject/\(quant-\)\{0,1\}$number-" fixtures/cases.txt || complain "no case names $folder"
done
[ "$n" = 72 ] || complain "$n cases instead of 72"
echo "$n cases, $failed complaints"
[ "$failed" = 0 ]
