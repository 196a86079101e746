"""Decoder layers of MiniMax-M3 and DeepSeek-V3.2 in PyTorch float64, against `k3pack run --layers`. Usage: moe_layers.py K3PACK [PART_OF_A_NAME]

Written from the models' published mathematics; it shares nothing with fixtures/gen/moe_oracle.py (numpy, which makes
the golden outputs) nor with the C code. Every published storage form of the small models and a geometry with 1024
hidden components is synthesised, converted and run one layer at a time on requests of 8, 3 and 1 tokens (8 visible
tokens are the most for which dense attention is exact); stored weights are decoded here with torch's own float8
types. A line for each layer kind and scheme says ||ours - float64|| / ||float64|| of what attention and what the
feed-forward part gave.

"each layer kind equals an independent PyTorch re-enactment (float64; F32 within 1e-5), quantised forms equal it on
dequantised weights": activations of the F32 images are F32, so they have that bound for every form. Those of BF16
images are rounded at every step: they must be as close to float64 as PyTorch's own BF16 run of the same layer, within
a factor of 1.5. Rows for which float64 itself chooses experts by less than the dtype resolves are left out of the
feed-forward figure, and counted.
Packages: torch, numpy, safetensors.
"""
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

K3PACK, ONLY = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
failed = []


def k3pack(*args):
    done = subprocess.run([K3PACK, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, (args, done.returncode, done.stderr)


# ---- stored forms ----

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=torch.float64)


def over_columns(scale, n_cols):
    return scale.repeat_interleave(n_cols // scale.shape[1], dim=1)


def exponent(bytes_):
    return torch.pow(torch.tensor(2.0, dtype=torch.float64), bytes_.view(torch.uint8).double() - 127)


def decode(tensors, module, block):
    """The matrix of a module in float64, whatever form it is stored in."""
    weight = tensors.get(module + ".weight", tensors.get(module + ".weight_packed"))
    scale = tensors.get(module + ".weight_scale", tensors.get(module + ".weight_scale_inv"))
    if scale is None:
        return weight.double()
    if weight.dtype == torch.float8_e4m3fn:
        values = weight.double()
        if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
            return values * over_columns(exponent(scale), values.shape[1])
        grid = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        return values * grid[:values.shape[0], :values.shape[1]]
    codes = weight.view(torch.uint8).long()
    values = torch.stack((FP4[codes % 16], FP4[codes // 16]), -1).flatten(1)
    if scale.dtype == torch.float8_e4m3fn:
        return values * over_columns(scale.double(), values.shape[1]) * tensors[module + ".weight_scale_2"].double()
    return values * over_columns(exponent(scale), values.shape[1])


class Checkpoint:
    def __init__(self, folder):
        whole = json.loads((folder / "config.json").read_text())
        self.config = whole.get("text_config", whole)
        quantised = whole.get("quantization_config") or self.config.get("quantization_config") or {}
        self.block = quantised.get("weight_block_size", [128, 128])
        self.tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                self.tensors.update({name: file.get_tensor(name) for name in file.keys()})
        self.root = min((name for name in self.tensors if name.endswith("embed_tokens.weight")), key=len)[:-len("embed_tokens.weight")]
        self.f32 = all(t.dtype != torch.bfloat16 for t in self.tensors.values())

    def matrix(self, *spellings):
        for name in spellings:
            if any(self.root + name + end in self.tensors for end in (".weight", ".weight_packed")):
                return decode(self.tensors, self.root + name, self.block)
        raise KeyError(spellings)

    def vector(self, *spellings):
        return next(self.tensors[self.root + name] for name in spellings if self.root + name in self.tensors).double()


# ---- mathematics ----

def silu_gate(gate, up, c):
    return gate * torch.sigmoid(gate) * up


def oai_gate(gate, up, c):
    limit, alpha = c.get("swiglu_limit", 7.0), c.get("swiglu_alpha", 1.702)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class Layer:
    """One decoder layer. dtype: float64, or bfloat16 for what PyTorch makes of it with stored values rounded."""

    def __init__(self, checkpoint, index, dtype):
        self.ck, self.c, self.dtype = checkpoint, checkpoint.config, dtype
        self.m3 = "q_lora_rank" not in self.c
        n_layers = self.c["num_hidden_layers"]
        self.base = f"layers.{index}."
        self.moe = index >= self.c["first_k_dense_replace"] if not self.m3 else index >= n_layers or self.marked(index)
        if self.m3 and index >= n_layers:
            self.base = f"mtp.layers.{index - n_layers}.transformer_layer."
        self.margin = None

    def marked(self, index):
        lists = self.c.get("moe_layer_freq"), self.c.get("mlp_layer_types")
        return lists[0][index] == 1 if lists[0] else lists[1][index] == "sparse"

    def linear(self, x, *spellings):
        return x @ self.ck.matrix(*(self.base + s for s in spellings)).to(x.dtype).T

    def norm(self, x, name):
        wide = x if self.dtype == torch.float64 else x.float()
        weight = self.ck.vector(self.base + name + ".weight").to(wide.dtype)
        unit = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return (unit * (1 + weight)).to(self.dtype) if self.m3 else unit.to(self.dtype) * weight.to(self.dtype)

    def causal(self, q, k, v, scale):
        """q [t, N, D], k [t, N, D], v [t, N, Dv] of one request in the order of positions."""
        t = len(q)
        score = torch.einsum("inf,jnf->nij", q, k).to(torch.float64 if self.dtype == torch.float64 else torch.float32) * scale
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weight = torch.softmax(score.masked_fill(hidden, float("-inf")), -1).to(self.dtype)
        return torch.einsum("nij,jnf->inf", weight, v).flatten(1)

    def grouped_query(self, x, positions):
        c, t = self.c, len(x)
        heads, groups, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        rope = c.get("rope_parameters", c)
        turned = c.get("rotary_dim") or int(round(rope["partial_rotary_factor"] * width))
        half = turned // 2
        angle = positions.double()[:, None, None] * rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)

        def turn(y):
            low, high, rest = y[..., :half], y[..., half:turned], y[..., turned:]
            return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)

        q = turn(self.norm(self.linear(x, "self_attn.q_proj").view(t, heads, width), "self_attn.q_norm"))
        k = turn(self.norm(self.linear(x, "self_attn.k_proj").view(t, groups, width), "self_attn.k_norm"))
        v = self.linear(x, "self_attn.v_proj").view(t, groups, width)
        repeat = heads // groups
        return self.causal(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), width ** -0.5)

    def yarn(self):
        """(frequencies, factor on the softmax scale)"""
        c = self.c
        d, base, s = c["qk_rope_head_dim"], c["rope_theta"], c["rope_scaling"]
        fast = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        # The component that turns `turns` times within the original context.
        component = [d / 2 * math.log(s["original_max_position_embeddings"] / (2 * math.pi * turns)) / math.log(base)
                     for turns in (s["beta_fast"], s["beta_slow"])]
        first, last = max(math.floor(component[0]), 0), min(math.ceil(component[1]), d - 1)
        slow_share = ((torch.arange(d // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
        m = 0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1 if s["factor"] > 1 else 1.0
        return torch.lerp(fast, fast / s["factor"], slow_share), m * m

    def latent(self, x, positions):
        c, t = self.c, len(x)
        heads, plain, turned, width = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        frequency, factor = self.yarn()
        spin = torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, None, None] * frequency)

        def turn(y):  # pairs (0, 1), (2, 3), ..: as complex numbers
            pairs = torch.view_as_complex(y.double().reshape(*y.shape[:-1], -1, 2).contiguous())
            return torch.view_as_real(pairs * spin).flatten(-2).to(self.dtype)

        q = self.linear(self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"), "self_attn.q_b_proj")
        q = q.view(t, heads, plain + turned)
        both = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        compressed, shared_key = both.split([c["kv_lora_rank"], turned], -1)
        expanded = self.linear(self.norm(compressed, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj").view(t, heads, plain + width)
        key, value = expanded.split([plain, width], -1)
        key = torch.cat((key, turn(shared_key[:, None]).expand(-1, heads, -1)), -1)
        q = torch.cat((q[..., :plain], turn(q[..., plain:])), -1)
        return self.causal(q, key, value, (plain + turned) ** -0.5 * factor)

    def attention(self, x, positions, requests):
        out = torch.empty(len(x), 0, dtype=self.dtype)
        for request in requests.unique():
            rows = (requests == request).nonzero().flatten()
            rows = rows[positions[rows].argsort()]
            heads = (self.grouped_query if self.m3 else self.latent)(x[rows], positions[rows])
            out = out if out.shape[1] else torch.empty(len(x), heads.shape[1], dtype=self.dtype)
            out[rows] = heads
        return self.linear(out, "self_attn.o_proj")

    def mlp(self, x, gate, up, down):
        return self.linear((oai_gate if self.m3 else silu_gate)(self.linear(x, *gate), self.linear(x, *up), self.c), *down)

    def route(self, x):
        """experts [n, K], weights [n, K]; also keeps how clearly each row chose."""
        c, wide = self.c, x.double() if self.dtype == torch.float64 else x.float()
        prefix = "block_sparse_moe." if self.m3 else "mlp."
        score = torch.sigmoid(self.linear(wide, prefix + "gate"))
        bias = self.ck.vector(*(self.base + prefix + s for s in ("e_score_correction_bias", "gate.e_score_correction_bias"))).to(wide.dtype)
        choice, k = score + bias, c["num_experts_per_tok"]
        margin = torch.full((len(x),), float("inf"), dtype=wide.dtype)
        if not self.m3:
            groups = choice.unflatten(-1, (c["n_group"], -1))
            ranked, order = groups.topk(2, -1).values.sum(-1).sort(-1, descending=True)
            kept = torch.zeros(len(x), c["n_group"], dtype=torch.bool).scatter(1, order[:, :c["topk_group"]], True)
            if c["topk_group"] < c["n_group"]:
                margin = ranked[:, c["topk_group"] - 1] - ranked[:, c["topk_group"]]
            choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        ranked, order = choice.sort(-1, descending=True)
        self.margin = torch.minimum(margin, ranked[:, k - 1] - ranked[:, k])
        weight = score.gather(1, order[:, :k])
        return order[:, :k], c["routed_scaling_factor"] * weight / (weight.sum(-1, keepdim=True) + (0 if self.m3 else 1e-20))

    def experts(self, x):
        prefix = "block_sparse_moe." if self.m3 else "mlp."
        names = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
        chosen, weights = self.route(x)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        out = self.mlp(x, *([prefix + "shared_experts." + spellings[1]] for spellings in names)).to(wide)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            part = self.mlp(x[rows], *([f"{prefix}experts.{expert}.{s}" for s in spellings] for spellings in names)).to(wide)
            out.index_add_(0, rows, part * weights[rows, place, None].to(wide))
        return out.to(self.dtype)

    def __call__(self, hidden, positions, requests):
        """(what attention adds, the stream behind it, what the feed-forward part adds)"""
        hidden = hidden.to(self.dtype)
        added = self.attention(self.norm(hidden, "input_layernorm"), positions, requests)
        stream = hidden + added
        x = self.norm(stream, "post_attention_layernorm")
        return added, stream, self.experts(x) if self.moe else self.mlp(x, ["mlp.gate_proj"], ["mlp.up_proj"], ["mlp.down_proj"])


# ---- a geometry of our own ----

def wide_geometry(folder, small, family, dtype):
    """A model of 1024 hidden components under the published names; `small` lends its config."""
    config = json.loads((small / "config.json").read_text())
    text = config.get("text_config", config)
    generator = torch.Generator().manual_seed(11)
    tensors = {}

    def put(name, *shape, gain=1.0, kind=dtype, centre=0.0):
        spread = gain / math.sqrt(shape[-1]) if len(shape) > 1 else gain
        tensors[name] = (torch.randn(*shape, generator=generator) * spread + centre).to(kind)

    def mlp(base, names, width):
        for name in names[:2]:
            put(f"{base}.{name}.weight", width, 1024, gain=6.0)  # beyond the limit of SwiGLU-OAI, on both sides
        put(f"{base}.{names[2]}.weight", 1024, width)

    usual = ("gate_proj", "up_proj", "down_proj")
    if family == "m3":
        text.update(hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64, rotary_dim=32,
                    partial_rotary_factor=0.5, rope_theta=5000000, vocab_size=64, dense_intermediate_size=384, intermediate_size=160,
                    shared_intermediate_size=96, num_local_experts=8, num_experts_per_tok=3, moe_layer_freq=[0, 1], num_mtp_modules=0)
        text["sparse_attention_config"].update(sparse_index_dim=64, sparse_attention_freq=[0, 1], sparse_disable_index_value=[0, 1])
        config.pop("vision_config", None)
        root, head, centre = "language_model.model.", "language_model.lm_head.weight", 0.0
    else:
        text.update(hidden_size=1024, num_hidden_layers=2, num_nextn_predict_layers=0, first_k_dense_replace=1, num_attention_heads=6,
                    qk_nope_head_dim=48, qk_rope_head_dim=32, v_head_dim=40, q_lora_rank=192, kv_lora_rank=136, intermediate_size=384,
                    moe_intermediate_size=120, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4, n_shared_experts=2,
                    index_n_heads=2, index_head_dim=64, vocab_size=64)
        text["rope_scaling"].update(factor=40, original_max_position_embeddings=4096)
        config.pop("quantization_config", None)
        root, head, centre = "model.", "lm_head.weight", 1.0
    put(root + "embed_tokens.weight", 64, 1024)
    put(head, 64, 1024)
    put(root + "norm.weight", 1024, gain=0.1, centre=centre)
    for i in range(2):
        base = f"{root}layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            put(base + name + ".weight", 1024, gain=0.1, centre=centre)
        shapes = {"q_proj": (512, 1024), "k_proj": (128, 1024), "v_proj": (128, 1024), "o_proj": (1024, 512), "q_norm": (64,), "k_norm": (64,)}
        if family == "m3" and i == 1:
            shapes.update(index_q_proj=(128, 1024), index_k_proj=(64, 1024), index_q_norm=(64,), index_k_norm=(64,))
        if family == "v32":
            shapes = {"q_a_proj": (192, 1024), "q_a_layernorm": (192,), "q_b_proj": (480, 192), "kv_a_proj_with_mqa": (168, 1024),
                      "kv_a_layernorm": (136,), "kv_b_proj": (528, 136), "o_proj": (1024, 240), "indexer.wq_b": (128, 192), "indexer.wk": (64, 1024),
                      "indexer.weights_proj": (2, 1024)}
            put(base + "self_attn.indexer.k_norm.weight", 64, gain=0.1, centre=1.0, kind=torch.float32)
            put(base + "self_attn.indexer.k_norm.bias", 64, gain=0.1, kind=torch.float32)
        for name, shape in shapes.items():
            put(f"{base}self_attn.{name}.weight", *shape, gain=1.0 if len(shape) > 1 else 0.1, centre=0.0 if len(shape) > 1 else centre)
        if i == 0:
            mlp(base + "mlp", usual, 384)
            continue
        ffn, names, n, width = (("block_sparse_moe", ("w1", "w3", "w2"), 8, 160) if family == "m3" else ("mlp", usual, 16, 120))
        put(f"{base}{ffn}.gate.weight", n, 1024, gain=3.0, kind=torch.float32 if family == "m3" else dtype)
        put(f"{base}{ffn}.{'' if family == 'm3' else 'gate.'}e_score_correction_bias", n, gain=0.2, kind=torch.float32)
        for e in range(n):
            mlp(f"{base}{ffn}.experts.{e}", names, width)
        mlp(f"{base}{ffn}.shared_experts", usual, 96 if family == "m3" else 240)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# ---- comparison ----

def off(ours, truth):
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def compare(name, folder, work):
    if ONLY not in name:
        return
    ck = Checkpoint(folder)
    image, given, result = work / "image.k3p", work / "states.safetensors", work / "result.safetensors"
    k3pack("convert", folder, "-o", image, "--force", "--quiet")
    generator = torch.Generator().manual_seed(5)
    lengths = (8, 3, 1)
    requests = torch.cat([torch.full((n,), r) for r, n in enumerate(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    order = torch.randperm(len(requests), generator=generator)
    requests, positions = requests[order], positions[order]
    hidden = torch.randn(len(order), ck.config["hidden_size"], generator=generator)
    hidden = hidden if ck.f32 else hidden.bfloat16()
    save_file({"hidden_states": hidden, "positions": positions, "request_ids": requests}, given)
    n_layers = ck.config["num_hidden_layers"]
    last = n_layers + any(".mtp.layers.0." in t or f".layers.{n_layers}.self_attn.o_proj" in t for t in ck.tensors)
    worst, resolution = {}, 1e-6 if ck.f32 else 2e-2
    for index in range(last):
        k3pack("run", image, "--layers", index, "--input", given, "-o", result, "--force", "--quiet")
        ours = load_file(result)
        layer = Layer(ck, index, torch.float64)
        attention, stream, ffn = layer(hidden.double(), positions, requests)
        rows = torch.ones(len(hidden), dtype=torch.bool) if layer.margin is None else layer.margin > resolution
        if not ck.f32:
            reference = Layer(ck, index, torch.bfloat16)(hidden, positions, requests)
        block = "prediction block, " if index == n_layers else ""
        kinds = ((block + ("GQA" if layer.m3 else "MLA"), ours["residual"].double() - hidden.double(), attention, 0, slice(None)),
                 (block + ("MoE" if layer.moe else "dense MLP"), ours["hidden_states"], ffn, 2, rows))
        bad = off(ours["residual"], stream) > 1e-5 if ck.f32 else False
        for kind, got, truth, part, keep in kinds:
            error = off(got[keep], truth[keep])
            if ck.f32:
                allowed = 1e-5
            else:
                theirs = reference[1].double() - hidden.double() if part == 0 else reference[part]
                allowed = 1.5 * off(theirs[keep], truth[keep])
            bad |= not error <= allowed
            n_out = int((~rows).sum()) if part == 2 else 0
            before = worst.get(kind, (0, 0, 0, 0))
            worst[kind] = max((error / allowed, error, allowed, n_out), before)
            if n_out > len(rows) // 3:
                failed.append(f"{name}, layer {index}: {n_out} of {len(rows)} rows chose by a hair")
        if bad:
            failed.append(f"{name}, layer {index}")
        if index == n_layers - 1:
            truth = final_norm(ck, stream + ffn)[rows]
            allowed = 1e-5 if ck.f32 else 1.5 * off(final_norm(ck, (reference[1] + reference[2]).double())[rows], truth)
            if not off(ours["final_hidden_states"][rows], truth) <= allowed:
                failed.append(f"{name}, final norm: off by {off(ours['final_hidden_states'][rows], truth):.2e}, allowed {allowed:.2e}")
    for kind, (_, error, allowed, n_out) in worst.items():
        print(f"{name:28} {kind:28} off by {error:.2e} of its norm, allowed {allowed:.2e}" + (f", {n_out} rows left out" if n_out else ""))


def final_norm(ck, x):
    weight = ck.vector("norm.weight") + (0 if "q_lora_rank" in ck.config else 1)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + ck.config["rms_norm_eps"]) * weight


def main():
    torch.manual_seed(0)
    presets = ("m3-tiny", "m3-tiny-text", "m3-tiny-native", "m3-tiny-mtp", "m3-tiny-mxfp8", "m3-tiny-mtp-mxfp8", "m3-tiny-nvfp4", "v32-tiny",
               "v32-tiny-128")
    listed = subprocess.run([K3PACK, "synth"], capture_output=True, text=True)
    names = {word for word in (listed.stdout + listed.stderr).split() if word.startswith(("m3-tiny", "v32-tiny"))}
    if not names <= set(presets):
        presets += tuple(sorted(names - set(presets)))  # a form that is new here runs too
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(temporary)
        for dtype in ("f32", "bf16"):
            for preset in presets:
                folder = work / f"{preset}-{dtype}"
                k3pack("synth", folder, "--preset", preset, "--dtype", dtype, "--quiet")
                compare(f"{preset}, {dtype}", folder, work)
            for family, small in (("m3", "m3-tiny"), ("v32", "v32-tiny")):
                folder = work / f"{family}-1024-{dtype}"
                wide_geometry(folder, work / f"{small}-{dtype}", family, torch.float32 if dtype == "f32" else torch.bfloat16)
                compare(f"{family} of 1024, {dtype}", folder, work)
    for what in failed:
        print("FAILED:", what)
    sys.exit(bool(failed))


main()
