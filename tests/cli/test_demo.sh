#!/bin/sh
# "sh setup.sh demo builds, synthesises a small sharded BF16 checkpoint and target, checks, converts, inspects, verifies, exports and compares": all but
# the building. "sh setup.sh demo ends by printing drafts".
set -u
out=$(sh tests/demo.sh "${K3PACK_BUILD#"$PWD"/}" 2>&1) || { echo "$out"; exit 1; }
for verb in synth check convert inspect verify diff export run; do
  echo "$out" | grep -q "^\$ k3pack $verb" || { echo "the demo does not show $verb"; exit 1; }
done
echo "$out" | grep -q "every exported file equals the original, byte for byte" || { echo "$out"; exit 1; }
echo "$out" | tail -n 1 | grep -Eq "^request 1: anchor [0-9]+ at 6 ->( [0-9]+){7}, confidence" || { echo "$out"; exit 1; }
