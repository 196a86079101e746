# The section of the README that shows `check` catching three real-world faults: every command in it is run and prints what the page says; "..." there stands
# for anything.
set -u
readme=$PWD/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work" || exit 1
PATH=$(dirname "$K3PACK"):$PATH
export PATH
bad=0 n=0 faults=0
awk '/^## What `check` catches/ { section = 1; next } /^## / { section = 0 } section && /^    / { print substr($0, 5) }' "$readme" >block
: >printed
while IFS= read -r line; do
  case $line in
    '$ '*)
      [ ! -s printed ] || { echo "not on the page:"; cat printed; bad=1; }
      # Findings go to stderr, the closing line to stdout: in the order in which a terminal shows them.
      ${line#\$ } >out 2>err
      code=$?
      cat err out >printed
      n=$((n + 1))
      case $line in
        *'k3pack check'*) faults=$((faults + 1)); [ "$code" = 1 ] || { echo "$line: exit $code"; bad=1; } ;;
        *) [ "$code" = 0 ] || { echo "$line: exit $code"; bad=1; } ;;
      esac
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
[ "$faults" -ge 3 ] || { echo "only $faults faults in $n commands"; bad=1; }
exit "$bad"
