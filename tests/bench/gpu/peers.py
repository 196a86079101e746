"""The other side: what vLLM's drafter does (P1 to P7, P10), re-enacted in PyTorch on the weights of an image. Element types and cast points are those of
the models: sums in FP32, results in the image's type, norms and softmax in FP32."""
import math

import torch
import torch.nn.functional as F

import kernels
from figures import Geometry


class Rope:
    """YaRN of the manifest; interleaved pairs."""

    def __init__(self, m, device):
        rope, d = m["rope"], m["qk_rope_head_dim"]
        theta, factor = float(rope["rope_theta"]), float(rope.get("factor", 1))
        freqs = []
        yarn = rope.get("rope_type") == "yarn"

        def dim_of(turns):
            return d * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

        def magnitude(scale):
            return 0.1 * scale * math.log(factor) + 1 if yarn and factor > 1 else 1.0

        for i in range(d // 2):
            plain = theta ** (-2 * i / d)
            if yarn:
                low, high = max(math.floor(dim_of(rope["beta_fast"])), 0), min(math.ceil(dim_of(rope["beta_slow"])), d - 1)
                t = min(max((i - low) / ((high - low) or 0.001), 0), 1)
                plain = plain / factor * t + plain * (1 - t)
            freqs.append(plain)
        self.inv = torch.tensor(freqs, dtype=torch.float64).float().to(device)
        self.amplitude = magnitude(rope.get("mscale", 1)) / magnitude(rope.get("mscale_all_dim", 0))
        self.softmax_scale = magnitude(rope.get("mscale_all_dim", 0)) ** 2 / math.sqrt(m["qk_nope_head_dim"] + d)

        # One table for all positions that occur, made once, as engines do.
        angle = torch.arange(min(m["max_position_embeddings"], 1 << 14), device=device).float()[:, None] * self.inv
        self.cos, self.sin = (angle.cos() * self.amplitude).contiguous(), (angle.sin() * self.amplitude).contiguous()

    def turn(self, x, positions):
        """x [n, heads, R]."""
        return kernels.rope(x, positions, self.cos, self.sin)


class Drafter:
    """The weights of an image, dequantised to BF16 where they are packed, and the steps on them."""

    def __init__(self, image, device):
        m = image.model
        self.g, self.eps, self.mask_id, self.device = Geometry.of_model(m), m["rms_norm_eps"], m["mask_token_id"], device
        assert not m["causal"] and not m["fc_norm"] and m["logit_scale"] == 1, "re-enacted is the published variant"
        self.rope = Rope(m, device)

        def t(name, heights=None):
            module = name.removesuffix(".weight")
            return Packed(image, module, device, heights).dequantised() if image.has(module + ".weight_scale") else image.tensor(name, device)

        self.context_proj, self.context_norm, self.final_norm = (t(f"model.{n}.weight") for n in ("context_proj", "context_norm", "final_norm"))
        self.embed, self.head = t("model.embed_tokens.weight"), t("lm_head.weight")
        self.w1, self.w2 = t("model.markov_head.markov_w1.weight"), t("model.markov_head.markov_w2.weight")
        g = self.g
        self.layers = []
        for i in range(g.L):
            p = f"model.layers.{i}."
            layer = {"qkv_a": t(p + "self_attn.fused_qkv_a_proj.weight", (g.Rq, g.E)), "q_norm": t(p + "self_attn.q_a_layernorm.weight"),
                     "kv_norm": t(p + "self_attn.kv_a_layernorm.weight"), "q_b": t(p + "self_attn.q_b_proj.weight"),
                     "o": t(p + "self_attn.o_proj.weight"), "gate_up": t(p + "mlp.gate_up_proj.weight"), "down": t(p + "mlp.down_proj.weight"),
                     "in_norm": t(p + "input_layernorm.weight"), "post_norm": t(p + "post_attention_layernorm.weight")}
            kv_b = t(p + "self_attn.kv_b_proj.weight").view(g.N, g.P + g.Vd, g.Rk)
            layer["uk"] = kv_b[:, :g.P].contiguous()                  # [N, P, Rk]
            layer["uv"] = kv_b[:, g.P:].transpose(1, 2).contiguous()  # [N, Rk, Vd]
            self.layers.append(layer)
        self.stacked_kv = torch.cat([layer["qkv_a"][g.Rq:] for layer in self.layers])
        self.kv_norms = torch.stack([layer["kv_norm"] for layer in self.layers])

    # P3: the taps combined.
    def combine(self, taps, context_proj=None):
        return kernels.rms(F.linear(taps, self.context_proj if context_proj is None else context_proj), self.context_norm, self.eps)

    # P1: every layer's whole A-projection, of which the queries are thrown away; norm, rotation and insert of each.
    def context_by_layers(self, c, positions, slots, caches, bases, qkv_a=None):
        g = self.g
        for i, layer in enumerate(self.layers):
            kv = F.linear(c, layer["qkv_a"] if qkv_a is None else qkv_a[i])[:, g.Rq:]
            latents = kernels.rms(kv[:, :g.Rk], layer["kv_norm"], self.eps)
            keys = self.rope.turn(kv[:, None, g.Rk:], positions)
            kernels.grouped_insert(latents[None], keys.view(1, -1, g.R), caches[i:i + 1], bases[i:i + 1], slots)

    # P2: one projection for all layers, two copies to layer-major, one norm, positions repeated, one rotation, one grouped insert.
    def stacked_rows(self, c, positions, stacked_kv, plain=False):
        """plain: norm and rotation in PyTorch's own operations, for its compiler to fuse."""
        g, n, rms = self.g, c.shape[0], kernels.rms_torch if plain else kernels.rms
        rope = kernels.rope_torch if plain else kernels.rope
        kv = F.linear(c, stacked_kv).view(n, g.L, g.E)
        latents = kv[..., :g.Rk].permute(1, 0, 2).contiguous()
        keys = kv[..., g.Rk:].permute(1, 0, 2).contiguous()
        latents = rms(latents.view(g.L * n, g.Rk), self.kv_norms, self.eps).view(g.L, n, g.Rk)
        return latents, rope(keys.view(g.L * n, 1, g.R), positions.repeat(g.L), self.rope.cos, self.rope.sin).view(g.L, n, g.R)

    def context_stacked(self, c, positions, slots, caches, bases, stacked_kv=None, rows=None):
        latents, keys = (rows or self.stacked_rows)(c, positions, self.stacked_kv if stacked_kv is None else stacked_kv)
        kernels.grouped_insert(latents, keys, caches, bases, slots)

    def attend(self, query, cache, tables, n_keys, variant):
        """P5: query [B * T, N, E] to [B, T * N, Rk]. flattened (a), folded (b), einsum (c)."""
        g = self.g
        q = query.view(tables.shape[0], g.T * g.N, g.E)
        if variant == "einsum":
            return kernels.mla_torch(q, cache, tables, n_keys, self.rope.softmax_scale, g.Rk)
        return kernels.mla(q, cache, tables, n_keys, self.rope.softmax_scale, g.Rk, 16 if variant == "flattened" else 64)

    def expand(self, latent, layer):
        """[B, T * N, Rk] through W_UV: [B * T, N * Vd]."""
        g = self.g
        return torch.bmm(latent.view(-1, g.N, g.Rk).transpose(0, 1), layer["uv"]).transpose(0, 1).reshape(-1, g.N * g.Vd)

    # P4: the block forward of B requests; returns the hidden rows after the last norm.
    def block(self, anchor_ids, anchor_positions, tables, caches, variant="folded"):
        g, n_requests = self.g, anchor_ids.shape[0]
        offsets = torch.arange(g.T, device=self.device)
        positions = (anchor_positions[:, None] + offsets).view(-1)
        ids = torch.where(offsets[None, :] == 0, anchor_ids[:, None], self.mask_id).view(-1)
        block_size = caches[0].shape[1]
        blocks = torch.gather(tables.long(), 1, (positions.view(n_requests, g.T) // block_size)).view(-1)
        slots = blocks * block_size + positions % block_size
        n_keys = anchor_positions + g.T
        residual = self.embed[ids]
        branch = None
        for layer, cache in zip(self.layers, caches):
            normed = kernels.rms(residual if branch is None else branch, layer["in_norm"], self.eps, None if branch is None else residual)
            a = F.linear(normed, layer["qkv_a"])
            q = F.linear(kernels.rms(a[:, :g.Rq], layer["q_norm"], self.eps), layer["q_b"]).view(-1, g.N, g.P + g.R)
            z = kernels.rms(a[:, g.Rq:g.Rq + g.Rk], layer["kv_norm"], self.eps)
            k = self.rope.turn(a[:, None, g.Rq + g.Rk:], positions).view(-1, g.R)
            q_latent = torch.bmm(q[..., :g.P].transpose(0, 1), layer["uk"]).transpose(0, 1).contiguous()
            query = kernels.concat_insert(q_latent, self.rope.turn(q[..., g.P:], positions), z, k, cache, slots)
            latent = self.attend(query, cache, tables, n_keys, variant)
            normed = kernels.rms(F.linear(self.expand(latent, layer), layer["o"]), layer["post_norm"], self.eps, residual)
            branch = F.linear(kernels.silu_mul(F.linear(normed, layer["gate_up"])), layer["down"])
        return kernels.rms(branch, self.final_norm, self.eps, residual)

    def logits(self, hidden, head=None):
        return F.linear(hidden, self.head if head is None else head)

    # P7: the loop over slots; logits are step-major [T, B, V] and get the bias in place. Returns ids [B, T]. previous_ids as in runtime.h.
    def markov(self, step_logits, anchor_ids, w2=None, previous_ids=None):
        w2 = self.w2 if w2 is None else w2
        previous, ids = anchor_ids, []
        for k in range(self.g.T):
            ids.append(step_logits[k].addmm_(self.w1[previous], w2.t()).argmax(-1))
            previous = ids[-1] if previous_ids is None else previous_ids[:, k]
        return torch.stack(ids, 1)


class Candidates:
    """P7 with the k best base logits of each row as the only candidates: their rows of w2 are gathered once (proposals change)."""

    def __init__(self, drafter, k=512):
        self.drafter, self.k = drafter, k

    def __call__(self, step_logits, anchor_ids, previous_ids=None):
        d, previous, ids = self.drafter, anchor_ids, []
        best, candidates = step_logits.topk(min(self.k, step_logits.shape[-1]), -1)
        rows = d.w2[candidates]  # [T, B, k, r]
        for k in range(d.g.T):
            scores = best[k] + torch.einsum("bkr,br->bk", rows[k], d.w1[previous])
            ids.append(candidates[k].gather(1, scores.argmax(-1, keepdim=True))[:, 0])
            previous = ids[-1] if previous_ids is None else previous_ids[:, k]
        return torch.stack(ids, 1)


class Packed:
    """P6: one linear of a quantised image. Shards, of equal or of the given heights, have factors of their own."""

    def __init__(self, image, name, device, heights=None):
        second = {e["scheme"]: e.get("second_scale") for e in image.manifest["linears"]}
        self.scheme = "nvfp4" if image.has(name + ".weight_packed") else "fp8"
        self.scale = image.tensor(name + ".weight_scale", device)
        if self.scheme == "fp8":
            self.weight = image.tensor(name + ".weight", device)
            return
        self.weight = image.tensor(name + ".weight_packed", device)
        factors = image.tensor(name + ".weight_global_scale", device).float()
        factors = 1 / factors if second["nvfp4"] == "divide" else factors
        heights = heights or [self.weight.shape[0] // factors.shape[0]] * factors.shape[0]
        self.factors = factors.repeat_interleave(torch.tensor(heights, device=device)).contiguous()

    def copy(self):
        other = object.__new__(Packed)
        other.__dict__ = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.__dict__.items()}
        return other

    def dequantised(self, dtype=torch.bfloat16):
        if self.scheme == "fp8":
            return (self.weight.float() * self.scale).to(dtype)
        return kernels.nvfp4_dequantise(self.weight, self.scale, self.factors, dtype)

    def linear(self, x):
        """fp8: rows of x quantised too and the library's row-wise product; elsewhere than on a GPU what that equals. nvfp4: decoded in the kernel."""
        if self.scheme == "nvfp4":
            return kernels.w4a16(x, self.weight, self.scale, self.factors)
        x_scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        codes = (x.float() / x_scale).to(torch.float8_e4m3fn)
        if x.device.type != "cuda":
            return F.linear(codes.float() * x_scale, self.weight.float() * self.scale).to(x.dtype)
        pad = -codes.shape[0] % 16  # the library wants multiples of 16 rows
        if pad:
            codes = torch.cat((codes.view(torch.uint8), codes.new_zeros(pad, codes.shape[1]).view(torch.uint8))).view(torch.float8_e4m3fn)
            x_scale = torch.cat((x_scale, x_scale.new_ones(pad, 1)))
        out = torch._scaled_mm(codes, self.weight.t(), scale_a=x_scale, scale_b=self.scale.view(1, -1), out_dtype=torch.bfloat16)
        return out[:x.shape[0]]
