"""`k3pack compare` re-enacted in float64 from what `k3pack run` says about both images. Needs no package.

compare_oracle.py add-targets SCENARIO OUT CONFIG.json           the scenario with target_logits
compare_oracle.py check JSON SCENARIO DRAFT A.run B.run           figures of `compare --json` within 1e-6
    DRAFT: the checkpoint (Markov and confidence weights are plain in both images); *.run: outputs of `run --emit all`

B answers for A's tokens: its logits are its base logits, which no token conditions, plus the Markov bias of A's previous token; likewise confidence.
"""
import json
import math
import os
import random
import struct
import sys


def read(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]) for k, v in header.items()}


def values(tensor):
    dtype, _, raw = tensor
    if dtype == "BF16":
        raw, dtype = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)), "F32"
    return struct.unpack({"F32": f"<{len(raw) // 4}f", "I64": f"<{len(raw) // 8}q"}[dtype], raw)


def rows(tensor, width):
    flat = values(tensor)
    return [flat[i:i + width] for i in range(0, len(flat), width)]


def add_targets(scenario, out, config):
    config = json.load(open(config))
    tensors = read(scenario)
    n, width, vocab = tensors["anchor_ids"][1][0], config.get("block_size", 7), config["vocab_size"]
    random.seed(3)
    logits = [random.gauss(0, 2) for _ in range(n * width * vocab)]
    tensors["target_logits"] = ("F32", [n, width, vocab], struct.pack(f"<{len(logits)}f", *logits))
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    open(out, "wb").write(struct.pack("<Q", len(text)) + text + data)


def softmax(logits):
    peak = max(logits)
    powers = [math.exp(v - peak) for v in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


def distance(p, q):
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q))


def mean(numbers):
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers)


def check(told, scenario, draft, run_a, run_b):
    told, scenario, a, b = json.load(open(told)), read(scenario), read(run_a), read(run_b)
    weights = read(os.path.join(draft, "model.safetensors"))
    n, width, vocab = a["logits"][1]
    rank = weights["markov_head.markov_w1.weight"][1][1]
    w1, w2 = rows(weights["markov_head.markov_w1.weight"], rank), rows(weights["markov_head.markov_w2.weight"], rank)
    head, bias = values(weights["confidence_head.proj.weight"]), values(weights["confidence_head.proj.bias"])[0]
    anchors, tokens = values(scenario["anchor_ids"]), rows(a["draft_ids"], width)
    logits_a, base_b, hidden_b = rows(a["logits"], vocab), rows(b["base_logits"], vocab), rows(b["hidden"], b["hidden"][1][-1])
    confidence_a = values(a["confidence"])
    targets = rows(scenario["target_logits"], vocab) if "target_logits" in scenario else None
    slots = []
    for request in range(n):
        for k in range(width):
            at, previous = request * width + k, anchors[request] if k == 0 else tokens[request][k - 1]
            e = w1[previous]
            own_b = [u + math.fsum(x * y for x, y in zip(e, w)) for u, w in zip(base_b[at], w2)]
            p, q = softmax(logits_a[at]), softmax(own_b)
            slot = {"kl": math.fsum(x * math.log(x / y) for x, y in zip(p, q)), "overlap": 1 - distance(p, q),
                    "agreement": float(tokens[request][k] == own_b.index(max(own_b))), "confidence_a": confidence_a[at],
                    "confidence_b": 1 / (1 + math.exp(-bias - math.fsum(x * y for x, y in zip(head, hidden_b[at] + e))))}
            if targets:
                t = softmax(targets[at])
                slot["acceptance_a"], slot["acceptance_b"] = 1 - distance(p, t), 1 - distance(q, t)
            slots.append(slot)

    def same(entry, part, what):
        for key in part[0]:
            assert abs(entry[key] - mean(s[key] for s in part)) < 1e-6, (what, key, entry[key], mean(s[key] for s in part))
        assert abs(entry["confidence_shift"] - mean(s["confidence_b"] - s["confidence_a"] for s in part)) < 1e-6
        assert abs(entry["confidence_moved"] - mean(abs(s["confidence_b"] - s["confidence_a"]) for s in part)) < 1e-6

    assert told["requests"] == n and told["block_width"] == width and len(told["slots"]) == width
    for k in range(width):
        same(told["slots"][k], slots[k::width], f"slot {k}")
    same(told["total"], slots, "total")
    per_request = sorted((mean(s["overlap"] for s in slots[r * width:(r + 1) * width]), r) for r in range(n))
    assert [w["request"] for w in told["worst"]] == [r for _, r in per_request][:5], told["worst"]
    for (overlap, _), entry in zip(per_request, told["worst"]):
        assert abs(entry["overlap"] - overlap) < 1e-6
    for side in ("a", "b") if targets else ():
        accepted = mean(math.fsum(math.prod(s["acceptance_" + side] for s in slots[r * width:r * width + k + 1]) for k in range(width)) for r in range(n))
        assert abs(told["total"]["tokens_" + side] - accepted) < 1e-6, (side, accepted, told["total"])
    # No change of acceptance is larger than what the overlap allows.
    assert not targets or all(abs(s["acceptance_a"] - s["acceptance_b"]) <= 1 - s["overlap"] + 1e-9 for s in slots)
    assert told["total"]["overlap"] < 0.99 and told["total"]["kl"] > 1e-3, "the two images are hardly different"


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
