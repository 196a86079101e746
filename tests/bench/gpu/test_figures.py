#!/usr/bin/env python3
"""The benchmark's own arithmetic: bytes and floors against the published roofline of the drafter, quantiles, ratios, verdicts and tables.
Plain Python, no packages. Exit 1 when something is off."""
import sys

import figures
from figures import K3

# MB per round with 7 Markov steps, every linear in the scheme: layers, lm_head, context_proj, Markov, context_kv, total; floor in us at 4.8 TB/s.
ROOFLINE = {"bf16": (4094, 2349, 514, 587, 41, 7585, 1580), "fp8": (2047, 1174, 257, 294, 21, 3793, 790),
            "nvfp4": (1151, 661, 145, 165, 12, 2133, 444)}
failed = 0


def expect(what, found, expected, tolerance=0.0):
    global failed
    good = abs(found - expected) <= tolerance if isinstance(expected, (int, float)) else found == expected
    if not good:
        print(f"FAILED: {what}: {found!r}, expected {expected!r}")
        failed += 1


# "Parameters without embedding 2 387 907 841": the linears, w1, the norms and the confidence head add up to the published count.
counts = figures.weight_counts(K3, markov_steps=1)
norms = K3.H * 2 + K3.L * (2 * K3.H + K3.Rq + K3.Rk)
expect("parameters without embedding", counts["layers"] + counts["context_proj"] + 2 * counts["markov"] + norms + K3.H + K3.r + 1, 2387907841)
for scheme, row in ROOFLINE.items():
    total = 0
    for part, megabytes in zip(("layers", "lm_head", "context_proj", "markov", "context_kv"), row):
        nbytes = figures.weight_bytes(K3, scheme, part, plain_kv_b=False)
        expect(f"{scheme} {part}, MB", nbytes / 1e6, megabytes, 0.6)
        total += nbytes
    expect(f"{scheme} total, MB", total / 1e6, row[5], 0.6)
    expect(f"{scheme} floor, us", 1e6 * figures.floor_seconds(total), row[6], 0.6)
expect("floor at 4.3 TB/s, us", 1e6 * figures.floor_seconds(7585e6, 4.3e12), 1764, 0.6)
expect("plain kv_b, bytes", figures.weight_bytes(K3, "nvfp4", "layers") - figures.weight_bytes(K3, "nvfp4", "layers", plain_kv_b=False),
       5 * 64 * 256 * 512 * (2 - 0.5625), 1)

expect("copies of 41.3 MB", figures.copies_needed(41.3e6), 7)
expect("copies of 600 MB", figures.copies_needed(600e6), 4)
expect("median", figures.quantile([3, 1, 2], 0.5), 2)
expect("p10 of 0..10", figures.quantile(range(11), 0.1), 1.0)
expect("p90 of 4 values", figures.quantile([1, 2, 3, 4], 0.9), 3.7, 1e-12)
expect("one value", figures.spread([5.0]), {"median": 5.0, "p10": 5.0, "p90": 5.0, "n": 1})
expect("ratio", figures.ratio({"median": 6.0}, {"median": 2.0}), 3.0)
expect("ratio without a side", figures.ratio(None, {"median": 2.0}), None)
expect("worst", figures.worst([3.0, 2.0, 5.0]), 2.0)
expect("worst with a gap", figures.worst([3.0, None]), None)
expect("worst of none", figures.worst([]), None)

rows = figures.judge({"context_kv_vs_p1": 4.6, "context_kv_vs_p2": 1.29, "load_warm_gb_per_s": None})
verdicts = {row["bar"]: row["verdict"] for row in rows}
expect("bars", len(rows), 11)
expect("met at the bar itself", verdicts[figures.BARS[0].name], "met")
expect("below", verdicts[figures.BARS[1].name], "not met")
expect("absent", verdicts[figures.BARS[2].name], "not measured")
expect("None", verdicts[figures.BARS[9].name], "not measured")
table = figures.bars_table(rows).splitlines()
expect("table lines", len(table), 2 + len(rows))
expect("a line", table[2], "| fused context KV vs P1 (graph, cold), worst of n = 1..64 | 4.6 x | 4.6 x | met |")
expect("a line not measured", table[11], "| image load from the page cache into device memory | 40 GB/s | - | not measured |")
s = figures.spread([10e-6])
times = figures.times_table([{"section": "s", "name": "n", "side": "ours", "cold": s, "warm": None, "nbytes": 43e6}], 4.3e12).splitlines()
expect("times", times[2], "| s | n | ours | 10.0 (10.0-10.0) | - | 43.0 | 4300 | 100% |")
print("figures: " + (f"{failed} wrong" if failed else "all right"))
sys.exit(failed > 0)
