#!/bin/sh
# A drafter of the published geometry on the simulated backend: "a full BF16 and an NVFP4 image load and draft with one command", one request of four
# context rows, compared with the CPU backend. Needs 16 GB of memory, 24 GB of disk in FULL_DIR and some minutes; not part of the ordinary tests.
#   full.sh BUILD [QUANT...]   default: none (BF16) and nvfp4
set -u
build=$1
shift
dir=${FULL_DIR:-build/full}
mkdir -p "$dir"
free=$(df -Pk "$dir" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt 25165824 ]; then
  echo "SKIPPED: the full geometry needs 24 GB in $dir, there are $((free / 1048576)) GB"
  exit 77
fi
trap 'rm -rf "$dir/draft" "$dir/target" "$dir/image.k3p" "$dir/scenario" "$dir/cpu" "$dir/cuda"' EXIT INT TERM
python3 - "$dir/scenario" <<'PY'
import json, random, struct, sys
n, width = 4, 5 * 7168
draw = random.Random(1)
states = struct.pack("<%dH" % (n * width), *(struct.unpack("<I", struct.pack("<f", draw.gauss(0, 1)))[0] >> 16 for _ in range(n * width)))
parts = [("target_states", "BF16", [n, width], states), ("positions", "I64", [n], struct.pack("<%dq" % n, *range(n))),
         ("request_ids", "I64", [n], bytes(8 * n)), ("anchor_ids", "I64", [1], struct.pack("<q", 1234)),
         ("anchor_positions", "I64", [1], struct.pack("<q", n))]
header, at = {}, 0
for name, dtype, shape, data in parts:
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
    at += len(data)
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(part[3] for part in parts))
PY
failed=0
[ $# -gt 0 ] || set -- none nvfp4
for quant in "$@"; do
  rm -rf "$dir/draft" "$dir/image.k3p"
  "$build/k3pack" synth "$dir/draft" --preset k3-dspark --quant "$quant" --force --quiet || exit 1
  [ -d "$dir/target" ] || "$build/k3pack" synth "$dir/target" --preset k3-dspark-target --quiet || exit 1
  "$build/k3pack" convert "$dir/draft" --target "$dir/target" -o "$dir/image.k3p" --no-digests --force --quiet || exit 1
  rm -rf "$dir/draft"
  "$build/k3pack" run "$dir/image.k3p" --input "$dir/scenario" -o "$dir/cpu" --emit draft_ids,confidence,hidden --force --quiet || exit 1
  K3PACK_CUDA_PLUGIN=build/cuda_sim/plain/libk3pack_cuda.so SIM_FREE_MIB=16384 "$build/k3pack" run "$dir/image.k3p" --input "$dir/scenario" \
    -o "$dir/cuda" --emit draft_ids,confidence,hidden --backend cuda --force || exit 1
  python3 - "$dir/cpu" "$dir/cuda" "$quant" <<'PY' || failed=1
import math, sys
sys.path.insert(0, "fixtures/gen")
from check_drafts import load
cpu, cuda = load(sys.argv[1]), load(sys.argv[2])
off = math.dist(cpu["hidden"][1], cuda["hidden"][1]) / math.hypot(*cpu["hidden"][1])
same = sum(a == b for a, b in zip(cpu["draft_ids"][1], cuda["draft_ids"][1]))
print(f"{sys.argv[3]}: hidden states within {off:.2g}, {same} of {len(cpu['draft_ids'][1])} drafts equal")
sys.exit(not off < 0.05)
PY
done
exit $failed
