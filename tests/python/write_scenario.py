"""Writes a scenario for `k3pack run`: write_scenario.py CONFIG.json OUT [n_requests]. Needs no package; equal arguments give equal bytes."""
import json
import random
import struct
import sys


def main():
    config = json.load(open(sys.argv[1]))
    n_requests = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    width = config["target_hidden_size"] * len(config["target_layer_ids"])
    dice = random.Random(7)
    lengths = [5 * b * b + b for b in range(n_requests)]  # the first request has no context
    rows = [(b, p) for b, n in enumerate(lengths) for p in range(n)]
    dice.shuffle(rows)
    tensors = {
        "target_states": ("F32", [len(rows), width], b"".join(struct.pack("<f", dice.gauss(0, 1)) for _ in range(len(rows) * width))),
        "positions": ("I64", [len(rows)], b"".join(struct.pack("<q", p) for _, p in rows)),
        "request_ids": ("I64", [len(rows)], b"".join(struct.pack("<q", b) for b, _ in rows)),
        "anchor_ids": ("I64", [n_requests], b"".join(struct.pack("<q", dice.randrange(config["vocab_size"])) for _ in lengths)),
        "anchor_positions": ("I64", [n_requests], b"".join(struct.pack("<q", n) for n in lengths)),
    }
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(sys.argv[2], "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


main()
