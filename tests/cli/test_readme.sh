#!/bin/sh
# The first run of the README: every command in it is run (but the building), and prints what the page says; "..." there stands for anything.
set -u
readme=$PWD/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work" || exit 1
PATH=$(dirname "$K3PACK"):$PATH
export PATH
bad=0 n=0
# The first block of lines indented by four.
awk '/^    / { inside = 1; print substr($0, 5); next } inside { exit }' "$readme" >block
[ "$(head -n 20 "$readme" | grep -c '^    \$ k3pack')" -ge 4 ] || { echo "the first run does not stand in the first 20 lines"; bad=1; }
while IFS= read -r line; do
  case $line in
    '$ sh setup.sh'*) : >expected; : >printed ;;
    '$ '*)
      # Whatever the last command printed must have been expected by now.
      [ ! -s printed ] || { echo "not on the page:"; cat printed; bad=1; }
      ${line#\$ } >printed 2>&1 || { echo "$line: exit $?"; cat printed; bad=1; }
      n=$((n + 1))
      ;;
    *)
      first=$(head -n 1 printed)
      sed -i 1d printed
      pattern=$(printf '%s' "$line" | sed 's/[][\\.*^$]/\\&/g; s/\\\.\\\.\\\./.*/g')
      printf '%s\n' "$first" | grep -qx -- "$pattern" || { echo "the page says: $line"; echo "it prints:     $first"; bad=1; }
      ;;
  esac
done <block
[ ! -s printed ] || { echo "not on the page:"; cat printed; bad=1; }
[ "$n" -ge 4 ] || { echo "only $n commands"; bad=1; }
exit "$bad"
