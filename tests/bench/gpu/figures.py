"""Bytes, floors, ratios, bars and tables of the GPU benchmark. Plain Python, no packages."""
import dataclasses

HBM_BYTES_PER_SECOND = 4.8e12  # H200's data sheet; what a copy reaches is measured and reported beside it
BYTES_PER_WEIGHT = {"f32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}  # NVFP4: half a byte and a scale byte per 16
MIN_COPIES, MIN_BYTES = 4, 256e6  # of weights that a cold graph goes through


@dataclasses.dataclass
class Geometry:
    """Widths as in the forward (runtime/steps.h): L layers, H hidden, A taps of Ht, N heads of P + R and Vd, ranks Rq and Rk, I, V, r, block T."""
    L: int
    H: int
    Ht: int
    A: int
    N: int
    P: int
    R: int
    Vd: int
    Rq: int
    Rk: int
    I: int
    V: int
    r: int
    T: int = 7

    @property
    def E(self):
        return self.Rk + self.R

    @classmethod
    def of_model(cls, m):
        """From the manifest's model."""
        return cls(m["num_hidden_layers"], m["hidden_size"], m["target_hidden_size"], len(m["target_layer_ids"]), m["num_attention_heads"],
                   m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"], m["q_lora_rank"], m["kv_lora_rank"], m["intermediate_size"],
                   m["vocab_size"], m["markov_rank"], m["block_width"])

    def linears(self):
        """Weights of one layer's linears."""
        return {"qkv_a": (self.Rq + self.E) * self.H, "q_b": self.N * (self.P + self.R) * self.Rq, "kv_b": self.N * (self.P + self.Vd) * self.Rk,
                "o_proj": self.H * self.N * self.Vd, "gate_up": 2 * self.I * self.H, "down": self.H * self.I}


K3 = Geometry(L=5, H=7168, Ht=7168, A=5, N=64, P=128, R=64, Vd=128, Rq=1536, Rk=512, I=14336, V=163840, r=256)


def weight_counts(g, markov_steps=None):
    """Weights that one round reads: the layers, the head, the Markov rows of every step, the context projections."""
    steps = g.T if markov_steps is None else markov_steps
    return {"layers": g.L * sum(g.linears().values()), "lm_head": g.V * g.H, "context_proj": g.H * g.A * g.Ht, "markov": steps * g.V * g.r,
            "context_kv": g.L * g.E * g.H}


def weight_bytes(g, scheme, part, plain_kv_b=True, markov_steps=None):
    """Bytes of one part of a round in a scheme. kv_b stays BF16 in what `convert --quant` makes, unless plain_kv_b is False; NVFP4 elsewhere."""
    n = weight_counts(g, markov_steps)[part]
    if part != "layers" or not plain_kv_b or scheme == "f32":
        return n * BYTES_PER_WEIGHT[scheme]
    plain = g.L * g.linears()["kv_b"]
    return (n - plain) * BYTES_PER_WEIGHT[scheme] + plain * BYTES_PER_WEIGHT["bf16"]


def floor_seconds(nbytes, bytes_per_second=HBM_BYTES_PER_SECOND):
    return nbytes / bytes_per_second


def copies_needed(nbytes_per_copy):
    """How many weight copies a cold graph needs: at least 4, and 256 MB in all."""
    return max(MIN_COPIES, -int(-MIN_BYTES // max(nbytes_per_copy, 1)))


def quantile(values, q):
    """The value that a share q of the values does not exceed, between two values in proportion."""
    values = sorted(values)
    at = q * (len(values) - 1)
    i = int(at)
    return values[i] + (at - i) * (values[i + 1] - values[i]) if i + 1 < len(values) else values[-1]


def spread(seconds):
    return {"median": quantile(seconds, 0.5), "p10": quantile(seconds, 0.1), "p90": quantile(seconds, 0.9), "n": len(seconds)}


# --- bars ------------------------------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Bar:
    name: str
    at_least: float
    unit: str  # "x", "%" or "GB/s"
    key: str   # of the measured value in `values`


BARS = [
    Bar("fused context KV vs P1 (graph, cold), worst of n = 1..64", 4.6, "x", "context_kv_vs_p1"),
    Bar("fused context KV vs P2 (graph, cold), worst of n = 1..64", 1.3, "x", "context_kv_vs_p2"),
    Bar("block of one request, BF16, vs P4 (graph)", 1.15, "x", "block_bf16_vs_p4"),
    Bar("block of one request, BF16: share of the 4.8 TB/s floor", 80, "%", "block_bf16_of_floor"),
    Bar("block, FP8 vs our BF16", 1.8, "x", "block_fp8_vs_bf16"),
    Bar("block, NVFP4 vs our BF16", 2.6, "x", "block_nvfp4_vs_bf16"),
    Bar("attention, folded, vs P5a, 8192 keys, 8 requests", 3.0, "x", "attention_vs_p5a"),
    Bar("Markov steps, exact (BF16), vs P7 (graph)", 1.5, "x", "markov_vs_p7"),
    Bar("Markov steps, packed w2 that stays in the L2, vs P7 (graph)", 3.0, "x", "markov_packed_vs_p7"),
    Bar("image load from the page cache into device memory", 40, "GB/s", "load_warm_gb_per_s"),
    Bar("image load vs safetensors load_file, both cold", 5.0, "x", "load_cold_vs_load_file"),
]


def judge(values, bars=BARS):
    """Per bar: the measured value and whether it is met; a value that is absent or None was not measured."""
    rows = []
    for bar in bars:
        value = values.get(bar.key)
        rows.append({"bar": bar.name, "at_least": bar.at_least, "unit": bar.unit, "measured": value,
                     "verdict": "not measured" if value is None else "met" if value >= bar.at_least else "not met"})
    return rows


def bars_table(rows):
    lines = ["| bar | at least | measured | |", "|---|---|---|---|"]
    for row in rows:
        unit = " GB/s" if row["unit"] == "GB/s" else " " + row["unit"]
        measured = "-" if row["measured"] is None else f"{row['measured']:.3g}{unit}"
        lines.append(f"| {row['bar']} | {row['at_least']:g}{unit} | {measured} | {row['verdict']} |")
    return "\n".join(lines)


def ratio(theirs, ours):
    """How many times faster ours is: medians; None when one was not measured."""
    return theirs["median"] / ours["median"] if theirs and ours and ours["median"] > 0 else None


def worst(ratios):
    """The smallest of the ratios; None when one of them was not measured, or there are none."""
    ratios = list(ratios)
    return None if not ratios or any(r is None for r in ratios) else min(ratios)


def times_table(rows, copy_bytes_per_second):
    """rows: dicts with section, name, side, cold and warm spreads (or None), nbytes."""
    def cell(s):
        return f"{1e6 * s['median']:.1f} ({1e6 * s['p10']:.1f}-{1e6 * s['p90']:.1f})" if s else "-"

    lines = ["| section | what | side | cold us (p10-p90) | warm us (p10-p90) | MB | GB/s cold | of copy |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cold = row.get("cold") or row.get("warm")
        rate = row["nbytes"] / cold["median"] if row.get("nbytes") and cold and cold["median"] > 0 else None
        lines.append(f"| {row['section']} | {row['name']} | {row['side']} | {cell(row.get('cold'))} | {cell(row.get('warm'))} | "
                     f"{row['nbytes'] / 1e6:.1f} | " + (f"{rate / 1e9:.0f} | {100 * rate / copy_bytes_per_second:.0f}% |" if rate else "- | - |"))
    return "\n".join(lines)
