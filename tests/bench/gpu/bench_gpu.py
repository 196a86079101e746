#!/usr/bin/env python3
"""k3pack's GPU forward against PyTorch re-enactments of what vLLM does (P1 to P8, P10), in one process, by turns, on the same inputs: numerics first, then
times with cold and warm L2, then the table of bars.

    bench_gpu.py --build build/release --images DIR [--json FILE] [--budget SECONDS]          on a GPU
    bench_gpu.py --build build/release --images DIR --device cpu --geometry tiny              everything runs, nothing is measured

DIR holds f32.k3p (tiny only), bf16.k3p, fp8.k3p and nvfp4.k3p (tests/bench/gpu/run.sh makes them). Needs Python with PyTorch; safetensors for one of the
loaders. --backend cpu|cuda says what stands on our side; with K3PACK_CUDA_PLUGIN naming the simulator's plug-in, cuda works without a GPU too."""
import argparse
import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.nn.functional as F

import figures
import kernels
import ours
import peers
from timing import Op, Timer

# ||a - b|| / ||b||. Two BF16 forwards of other roundings are 0.02 apart in their hidden rows; a wrong rotation, norm or mask gives 0.3 and more.
TOLERANCES = {"f32": 1e-4, "bf16": 6e-2, "fp8": 6e-2, "nvfp4": 6e-2}


class Inputs:
    """Random taps and a cache of random rows for B requests of `context` tokens each; both sides take these tensors."""

    def __init__(self, g, dtype, device, n_requests, context, block_size, fill=False, taps=True, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.n_requests, self.context, self.block_size, self.g = n_requests, context, block_size, g
        per_request = -(-(context + g.T) // block_size)
        n = n_requests * context
        self.taps = torch.randn(n if taps else 0, g.A * g.Ht, generator=random).to(dtype).to(device)
        tables = torch.randperm(n_requests * per_request, generator=random).view(n_requests, per_request).int()
        positions = torch.arange(context).repeat(n_requests)
        request = torch.arange(n_requests).repeat_interleave(context)
        slots = tables[request, positions // block_size].long() * block_size + positions % block_size if context else positions
        self.positions, self.slots, self.tables = positions.to(device), slots.to(device), tables.to(device)
        self.anchor_ids = torch.randint(g.V, (n_requests,), generator=random).to(device)
        self.anchor_positions = torch.full((n_requests,), context).to(device)
        self.n_blocks, self.max_keys, self.dtype, self.device = n_requests * per_request, per_request * block_size, dtype, device
        self.rows = torch.randn(g.L, self.n_blocks, block_size, g.E, generator=random).to(dtype).to(device) if fill else None

    def caches(self):
        """Layers of a new cache."""
        shape = self.g.L, self.n_blocks, self.block_size, self.g.E
        whole = self.rows.clone() if self.rows is not None else torch.zeros(shape, dtype=self.dtype, device=self.device)
        return [whole[i] for i in range(self.g.L)]


class Bench:
    def __init__(self, args):
        self.args, self.device, self.start = args, args.device, time.monotonic()
        self.library = ours.Library(os.path.join(args.build, "libk3pack.so"))
        self.timer = Timer(args.device, args.replays)
        self.rows, self.values, self.numerics, self.notes, self.failed = [], {}, [], [], 0
        self.drafters = {}
        self.ceilings = {"copy_bytes_per_second": float("nan")}
        self.block_size = 64 if args.geometry == "k3" else 16

    def path(self, scheme):
        return os.path.join(self.args.images, scheme + ".k3p")

    def note(self, text):
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)

    def check(self, what, found, expected, tolerance):
        """||found - expected|| / ||expected||, before anything is timed."""
        off = ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()
        good = off <= tolerance
        self.numerics.append({"what": what, "off": off, "allowed": tolerance, "good": good})
        if not good:
            self.failed += 1
            self.note(f"FAILED: {what}: off by {off:.2e}, allowed {tolerance:.0e}")

    def step_op(self, name, side, step, sessions, calls, per_call, other_nbytes=0):
        """One step alone, of every session in turn. `per_call` calls of it are one sample each."""
        nbytes = sessions[0].step_bytes(calls[0])[step]
        fns = [(lambda stream, s=s, call=call: (s.measure(step), call(stream))) for s, call in zip(sessions, calls)]
        return Op(name, side, fns, (nbytes[1] + nbytes[2]) / per_call + other_nbytes, per_call)

    def compare(self, section, ops, min_calls=32, warm=True):
        """Times the ops; returns name+side -> cold spread."""
        cold = self.timer.compare(ops, True, min_calls)
        warm = self.timer.compare(ops, False, min_calls) if warm else [None] * len(ops)
        for op, c, w in zip(ops, cold, warm):
            self.rows.append({"section": section, "name": op.name, "side": op.side, "cold": c, "warm": w, "nbytes": op.nbytes})
        return {op.side: c for op, c in zip(ops, cold)}

    # --- what the device gives ---------------------------------------------------------------------------------------------------------------------

    def section_ceilings(self):
        n = 1 << 30 if self.device == "cuda" else 1 << 16
        a, b = torch.empty(n, dtype=torch.uint8, device=self.device), torch.empty(n, dtype=torch.uint8, device=self.device)
        copy, = self.timer.compare([Op("copy", "device", [lambda s: b.copy_(a)], 2 * n)], True, 4)
        self.ceilings["copy_bytes_per_second"] = 2 * n / copy["p10"]
        m = 8192 if self.device == "cuda" else 64
        x, y = (torch.randn(m, m, device=self.device).to(torch.bfloat16) for _ in range(2))
        product, = self.timer.compare([Op("gemm", "device", [lambda s: x @ y], 0)], True, 2)
        self.ceilings["bf16_flop_per_second"] = 2 * m ** 3 / product["p10"]

    # --- numerics ----------------------------------------------------------------------------------------------------------------------------------

    def section_numerics(self):
        """Every re-enactment against our side; a side that computes something else is not worth timing."""
        for scheme in (["f32"] if os.path.exists(self.path("f32")) else []) + ["fp8", "nvfp4", "bf16"]:
            drafter = self.drafter(scheme)
            g = drafter.g
            x = Inputs(g, drafter.embed.dtype, self.device, 3, 20, self.block_size)
            layers = x.caches()
            with ours.closing(self.engine(scheme)) as (engine,), ours.closing(self.session(engine, x, layers)) as (session,):
                seal = ours.Image(self.path(scheme)).part("__seal__").hex()
                if engine.info.vocab_size != g.V or engine.info.n_layers != g.L or engine.info.identity.decode() != seal:
                    sys.exit("the structs of tests/bench/gpu/ours.py are not those of runtime/runtime.h")
                self.check_context(scheme, drafter, x, session, layers)
                self.check_block(scheme, drafter, x, session, layers)
        for scheme in ("fp8", "nvfp4"):
            self.check_packed(scheme)

    def check_context(self, scheme, drafter, x, session, layers):
        g, tolerance = drafter.g, TOLERANCES[scheme]
        states = torch.zeros(x.taps.shape[0], g.H, device=self.device)
        rows = torch.zeros(g.L, x.taps.shape[0], g.E, device=self.device)
        session.append_call(x.taps, x.positions, x.slots, states, rows)()
        self.synchronize()
        c = drafter.combine(x.taps)
        self.check(f"{scheme}: P3, combined taps", c, states, tolerance)
        by_layers, stacked = x.caches(), x.caches()
        drafter.context_by_layers(c, x.positions, x.slots, by_layers, self.bases(by_layers))
        drafter.context_stacked(c, x.positions, x.slots, stacked, self.bases(stacked))
        self.check(f"{scheme}: P1, cache", torch.stack(by_layers), torch.stack(layers), tolerance)
        plain = x.caches()
        drafter.context_stacked(c, x.positions, x.slots, plain, self.bases(plain), None, lambda *a: drafter.stacked_rows(*a, plain=True))
        self.check(f"{scheme}: P2 as it is compiled, cache", torch.stack(plain), torch.stack(layers), tolerance)
        self.check(f"{scheme}: P2, cache", torch.stack(stacked), torch.stack(layers), tolerance)
        self.check(f"{scheme}: our rows and our cache", rows[:, 5], torch.stack([t.view(-1, g.E)[x.slots[5]] for t in layers]), tolerance)

    def check_block(self, scheme, drafter, x, session, layers):
        g, tolerance, n = drafter.g, TOLERANCES[scheme], x.n_requests * drafter.g.T
        before = [t.clone() for t in layers]
        ids = torch.zeros(x.n_requests, g.T, dtype=torch.int64, device=self.device)
        hidden, base, logits = (torch.zeros(n, w, device=self.device) for w in (g.H, g.V, g.V))
        session.draft_call(x.anchor_ids, x.anchor_positions, x.tables, ids, hidden, base, logits)()
        self.synchronize()
        for variant in ("einsum", "folded", "flattened"):
            caches = [t.clone() for t in before]
            found = drafter.block(x.anchor_ids, x.anchor_positions, x.tables, caches, variant)
            self.check(f"{scheme}: P4 with P5 {variant}, hidden rows", found, hidden, tolerance)
            self.check(f"{scheme}: P4 with P5 {variant}, the block's cache rows", torch.stack(caches), torch.stack(layers), tolerance)
        self.check(f"{scheme}: P7, lm_head", drafter.logits(found), base, tolerance)
        # The loop on our logits in FP32, conditioned on our drafts, so that drafts are compared and neither roundings nor what follows from a tie.
        steps = base.view(x.n_requests, g.T, g.V).transpose(0, 1).contiguous()
        w1, w2, drafter.w1, drafter.w2 = drafter.w1, drafter.w2, drafter.w1.float(), drafter.w2.float()
        best = peers.Candidates(drafter, g.V)(steps.clone(), x.anchor_ids, ids)
        wanted = drafter.markov(steps, x.anchor_ids, previous_ids=ids)
        drafter.w1, drafter.w2 = w1, w2
        self.check(f"{scheme}: P7, logits", steps.transpose(0, 1).reshape(n, g.V), logits, 1e-4 if scheme in ("f32", "bf16") else 1e-2)
        for name, other in (("P7", wanted), ("P7 with all as candidates", best)):
            different = (other != ids).double().mean()
            self.check(f"{scheme}: {name}, drafted ids, share of different ones", 1 + different, torch.ones(()), {"f32": 0, "bf16": 0.05}.get(scheme, 0.2))

    def check_packed(self, scheme):
        """P6 against the dequantised matrix."""
        image = ours.Image(self.path(scheme))
        random = torch.Generator().manual_seed(3)
        for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_up_proj", "lm_head"):
            packed = peers.Packed(image, name, self.device)
            whole = packed.dequantised(torch.float32)
            x = torch.randn(7, whole.shape[1], generator=random).to(torch.bfloat16).to(self.device)
            self.check(f"{scheme}: P6, {name}", packed.linear(x), F.linear(x.float(), whole), TOLERANCES[scheme])

    # --- P1, P2, P3: the context path --------------------------------------------------------------------------------------------------------------

    def section_context(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        n_kv = figures.copies_needed(figures.weight_bytes(g, "bf16", "context_kv")) if self.measures() else 2
        engines = [self.engine("bf16", lend=True) for _ in range(n_kv)]
        stacked = [drafter.stacked_kv] + [drafter.stacked_kv.clone() for _ in range(n_kv - 1)]
        by_layers = [[layer["qkv_a"] for layer in drafter.layers]] + [[layer["qkv_a"].clone() for layer in drafter.layers] for _ in range(3)]
        projections = [drafter.context_proj] + [drafter.context_proj.clone() for _ in range(3)]
        against_p1, against_p2 = [], []
        counts = self.args.contexts
        with ours.closing(*engines):
            for n in counts:
                x = Inputs(g, torch.bfloat16, self.device, 1, n, self.block_size, fill=True)
                sessions = [self.session(engine, x, x.caches()) for engine in engines]
                calls = [s.append_call(x.taps, x.positions, x.slots) for s in sessions]
                for call in calls:
                    call()
                self.synchronize()
                c, caches = drafter.combine(x.taps), x.caches()
                bases, kv_bytes = self.bases(caches), 2 * g.L * g.E * g.H + 2 * n * (g.H + g.L * g.E)
                p1_bytes = 2 * g.L * (g.Rq + g.E) * g.H + 2 * n * (g.H + g.L * g.E)
                others = x.caches()
                drafter.context_by_layers(c, x.positions, x.slots, caches, bases)
                drafter.context_stacked(c, x.positions, x.slots, others, self.bases(others))
                for side, found in (("P1", caches), ("P2", others)):
                    self.check(f"{side}, cache of {n} rows", torch.stack(found), torch.stack(sessions[-1].layers), TOLERANCES["bf16"])
                p1 = [lambda s, w=w: drafter.context_by_layers(c, x.positions, x.slots, caches, bases, w) for w in by_layers]
                p2 = [lambda s, w=w: drafter.context_stacked(c, x.positions, x.slots, caches, bases, w) for w in stacked]
                ops = [self.step_op(f"context KV, n = {n}", "ours", "context_insert", sessions, calls, 1),
                       Op(f"context KV, n = {n}", "P1 graph", p1, p1_bytes), Op(f"context KV, n = {n}", "P2 graph", p2, kv_bytes)]
                if n in (counts[0], counts[-1]):
                    ops += [Op(f"context KV, n = {n}", "P1 eager", p1, p1_bytes, eager=True),
                            Op(f"context KV, n = {n}", "P2 eager", p2, kv_bytes, eager=True)]
                    compiled = self.compiled(lambda c, p, w: drafter.stacked_rows(c, p, w, plain=True), (c, x.positions, stacked[0]))
                    if compiled:
                        ops.append(Op(f"context KV, n = {n}", "P2 compiled", [
                            lambda s, w=w: drafter.context_stacked(c, x.positions, x.slots, caches, bases, w, compiled) for w in stacked], kv_bytes))
                times = self.compare("context", ops)
                against_p1.append(figures.ratio(times["P1 graph"], times["ours"]))
                against_p2.append(figures.ratio(times["P2 graph"], times["ours"]))
                if n == counts[min(1, len(counts) - 1)]:
                    few = sessions[:4]
                    self.compare("context", [
                        self.step_op(f"combine, n = {n}", "ours", "combine", few, calls[:4], 1),
                        Op(f"combine, n = {n}", "P3 graph", [lambda s, w=w: drafter.combine(x.taps, w) for w in projections],
                           2 * (g.H * g.A * g.Ht + n * (g.A * g.Ht + g.H)))], min_calls=4)
                for session in sessions:
                    session.close()
        self.values["context_kv_vs_p1"], self.values["context_kv_vs_p2"] = figures.worst(against_p1), figures.worst(against_p2)

    # --- P4, P7: the block, whole drafts, the Markov loop ------------------------------------------------------------------------------------------

    def section_block(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        for n_requests in (1, 8) if self.measures() else (1,):
            x = Inputs(g, torch.bfloat16, self.device, n_requests, 64 if self.measures() else 9, self.block_size, fill=True)
            schemes, opened, blocks, drafts = ("bf16", "fp8", "nvfp4"), [], [], []
            ids = torch.zeros(n_requests, g.T, dtype=torch.int64, device=self.device)
            hidden = torch.zeros(n_requests * g.T, g.H, device=self.device)
            expected = drafter.block(x.anchor_ids, x.anchor_positions, x.tables, x.caches())
            for scheme in schemes:
                engine = self.engine(scheme)
                session = self.session(engine, x, x.caches())
                opened += [session, engine]
                block = session.draft_call(x.anchor_ids, x.anchor_positions, x.tables, hidden=hidden)
                block()
                self.synchronize()
                if scheme == "bf16":
                    self.check(f"P4, {n_requests} x {g.T} hidden rows", hidden, expected, TOLERANCES["bf16"])
                draft = session.draft_call(x.anchor_ids, x.anchor_positions, x.tables, draft_ids=ids)
                for name, call, ops in (("block", block, blocks), ("draft", draft, drafts)):
                    nbytes = sum(b[1] + b[2] for b in session.step_bytes(call).values()) + 2 * g.L * n_requests * (x.context + g.T) * g.E
                    ops.append(Op(f"{name}, {n_requests} x {g.T} rows", f"ours {scheme}", [call], nbytes))
            caches, step_logits = x.caches(), torch.empty(g.T, n_requests, g.V, dtype=torch.bfloat16, device=self.device)

            def p4(stream):
                return drafter.block(x.anchor_ids, x.anchor_positions, x.tables, caches)

            def p47(stream):
                step_logits.copy_(drafter.logits(p4(stream)).view(n_requests, g.T, g.V).transpose(0, 1))
                return drafter.markov(step_logits, x.anchor_ids)

            with ours.closing(*opened):
                times = self.compare("block", blocks + [Op(f"block, {n_requests} x {g.T} rows", "P4 graph", [p4], blocks[0].nbytes)], 2, warm=False)
                whole = self.compare("draft", drafts + [Op(f"draft, {n_requests} x {g.T} rows", "P4 + P7 graph", [p47], drafts[0].nbytes)], 2,
                                     warm=False)
            if n_requests == 1:
                self.values["block_bf16_vs_p4"] = figures.ratio(times["P4 graph"], times["ours bf16"])
                floor = figures.floor_seconds(figures.weight_bytes(g, "bf16", "layers"))
                self.values["block_bf16_of_floor"] = 100 * floor / times["ours bf16"]["median"]
                for scheme in ("fp8", "nvfp4"):
                    self.values[f"block_{scheme}_vs_bf16"] = figures.ratio(times["ours bf16"], times[f"ours {scheme}"])
                    self.values[f"draft_{scheme}_vs_bf16"] = figures.ratio(whole["ours bf16"], whole[f"ours {scheme}"])
                parts = [p for p in figures.weight_counts(g) if not p.startswith("context")]
                for scheme in schemes:
                    nbytes = sum(figures.weight_bytes(g, scheme, p) for p in parts)
                    self.values[f"draft_{scheme}_of_floor"] = 100 * figures.floor_seconds(nbytes) / whole[f"ours {scheme}"]["median"]
                self.values["draft_bf16_vs_p4_p7"] = figures.ratio(whole["P4 + P7 graph"], whole["ours bf16"])

    def section_markov(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        x = Inputs(g, torch.bfloat16, self.device, 1, 9, self.block_size)
        ids = torch.zeros(1, g.T, dtype=torch.int64, device=self.device)
        base = torch.randn(g.T, 1, g.V, device=self.device).to(torch.bfloat16)
        logits = [base.clone() for _ in range(4)]  # gets the bias in place, again and again: BF16 stays finite for as long as this runs
        w2 = [drafter.w2] + [drafter.w2.clone() for _ in range(3)]
        loop_bytes = 2 * g.T * g.V * (g.r + 1)
        ops, opened = [], []
        for scheme in ("bf16", "fp8", "nvfp4"):
            engines = [self.engine(scheme, lend=True) for _ in range(4)]
            sessions = [self.session(engine, x, x.caches()) for engine in engines]
            opened += sessions + engines
            calls = [s.draft_call(x.anchor_ids, x.anchor_positions, x.tables, draft_ids=ids) for s in sessions]
            for call in calls:
                call()
            ops.append(self.step_op("Markov steps", f"ours {scheme}", "markov", sessions, calls, 1))
        ops += [Op("Markov steps", "P7 graph", [lambda s, w=w, l=l: drafter.markov(l, x.anchor_ids, w) for w, l in zip(w2, logits)], loop_bytes),
                Op("Markov steps", "P7 candidates", [lambda s, l=l: peers.Candidates(drafter)(l, x.anchor_ids) for l in logits], loop_bytes)]
        with ours.closing(*opened):
            times = self.compare("markov", ops, 4)
        self.values["markov_vs_p7"] = figures.ratio(times["P7 graph"], times["ours bf16"])
        packed = [figures.ratio(times["P7 graph"], times[f"ours {scheme}"]) for scheme in ("fp8", "nvfp4")]
        self.values["markov_packed_vs_p7"] = max(packed) if None not in packed else None

    # --- P5: attention over a long context ---------------------------------------------------------------------------------------------------------

    def section_attention(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        n_requests, context = (8, 8192) if self.measures() else (2, 40)
        x = Inputs(g, torch.bfloat16, self.device, n_requests, context, self.block_size, fill=True, taps=False)
        engine = self.engine("bf16", lend=True)
        session = self.session(engine, x, x.caches())
        hidden = torch.zeros(n_requests * g.T, g.H, device=self.device)
        call = session.draft_call(x.anchor_ids, x.anchor_positions, x.tables, hidden=hidden)
        call()
        query = [torch.randn(n_requests * g.T, g.N, g.E, device=self.device).to(torch.bfloat16) for _ in range(g.L)]
        caches, n_keys = x.caches(), x.anchor_positions + g.T
        kv_bytes = 2 * n_requests * (context + g.T) * g.E

        def variant(name):
            def run(stream):
                for layer, cache, q in zip(drafter.layers, caches, query):
                    drafter.expand(drafter.attend(q, cache, x.tables, n_keys, name), layer)
            return run

        found = {v: drafter.attend(query[0], caches[0], x.tables, n_keys, v) for v in ("einsum", "flattened", "folded")}
        for v in ("flattened", "folded"):
            self.check(f"P5 {v} at {context} keys", found[v], found["einsum"], TOLERANCES["bf16"])
        name = f"attention of a layer, {n_requests} x {g.T} rows, {context} keys"
        ops = [self.step_op(name, "ours", "attend", [session], [call], g.L, kv_bytes)]
        ops += [Op(name, side, [variant(v)], ops[0].nbytes, g.L)
                for side, v in (("P5a graph", "flattened"), ("P5b graph", "folded"), ("P5c graph", "einsum"))]
        with ours.closing(session, engine):
            times = self.compare("attention", ops, 1, warm=False)
        self.values["attention_vs_p5a"] = figures.ratio(times["P5a graph"], times["ours"])

    # --- P6: products of few rows ------------------------------------------------------------------------------------------------------------------

    def section_gemm(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        x = Inputs(g, torch.bfloat16, self.device, 1, 9, self.block_size)
        ids = torch.zeros(1, g.T, dtype=torch.int64, device=self.device)
        rows = {n: torch.randn(g.T, n, device=self.device).to(torch.bfloat16) for n in {g.H, g.N * g.Vd, g.I}}

        def mlp(gate_up, down):
            return down(kernels.silu_mul(gate_up(rows[g.H])))

        for scheme in ("bf16", "fp8", "nvfp4"):
            image = ours.Image(self.path(scheme))
            n_engines = 1 if scheme == "bf16" or not self.measures() else 2
            engines = [self.engine(scheme) for _ in range(n_engines)]
            sessions = [self.session(engine, x, x.caches()) for engine in engines]
            calls = [s.draft_call(x.anchor_ids, x.anchor_positions, x.tables, draft_ids=ids) for s in sessions]
            for call in calls:
                call()

            def linear(module):
                if scheme == "bf16":
                    weight = image.tensor(module + ".weight", self.device)
                    return {"F.linear graph": lambda r: F.linear(r, weight)}
                packed = peers.Packed(image, module, self.device)
                made = {"P6 packed graph": packed.linear}
                if module != "lm_head" or self.device != "cuda" or torch.cuda.mem_get_info()[0] > 40e9:
                    whole = packed.dequantised()
                    made["P6 expanded graph"] = lambda r: F.linear(r, whole)
                return made

            layers = [{k: linear(f"model.layers.{i}.{m}") for k, m in (("o", "self_attn.o_proj"), ("gate_up", "mlp.gate_up_proj"),
                                                                        ("down", "mlp.down_proj"))} for i in range(g.L)]
            head = linear("lm_head")
            with ours.closing(*sessions, *engines):
                for name, step, per_call, peer in (
                        (f"o_proj, {g.T} rows, {scheme}", "project", g.L, lambda side: [
                            (lambda s, l=l: l["o"][side](rows[g.N * g.Vd])) for l in layers]),
                        (f"gate_up, SiLU, down, {g.T} rows, {scheme}", "mlp", g.L, lambda side: [
                            (lambda s, l=l: mlp(l["gate_up"][side], l["down"][side])) for l in layers]),
                        (f"lm_head, {g.T} rows, {scheme}", "logits", 1, lambda side: [lambda s: head[side](rows[g.H])])):
                    op = self.step_op(name, "ours", step, sessions, calls, per_call)
                    self.compare("gemm", [op] + [Op(name, side, peer(side), op.nbytes) for side in head], g.L, warm=False)
            del layers, head

    # --- P8: loading -------------------------------------------------------------------------------------------------------------------------------

    def section_load(self):
        path = self.path("bf16")
        nbytes = os.path.getsize(path)

        def timed(function):
            self.synchronize()
            start = time.perf_counter()
            kept = function()
            self.synchronize()
            seconds = time.perf_counter() - start
            del kept
            return seconds

        def by_us():
            start = time.perf_counter()
            engine = self.engine("bf16")
            seconds, loaded = time.perf_counter() - start - engine.info.start_seconds, engine.info.load_nbytes
            engine.close()
            return seconds, loaded

        peers_ = {"P8 pinned ring": lambda: self.pinned_ring(path)}
        try:
            import safetensors.torch
            peers_["P8 load_file"] = lambda: safetensors.torch.load_file(path, device=self.device)

            def one_by_one():
                with safetensors.safe_open(path, "pt", device=self.device) as file:
                    return [file.get_tensor(name) for name in file.keys()]
            peers_["P8 safe_open"] = one_by_one
        except ImportError:
            self.note("P8: the Python package safetensors is not installed: load_file and safe_open are not measured")
        with tempfile.NamedTemporaryFile(dir=self.args.images, suffix=".pt") as pickled:
            part = {"context_proj": self.drafter("bf16").context_proj.cpu(), "w2": self.drafter("bf16").w2.cpu()}
            torch.save(part, pickled.name)
            part_bytes = sum(t.numel() * t.element_size() for t in part.values())
            load = lambda: {k: v.to(self.device) for k, v in torch.load(pickled.name, mmap=True).items()}
            load()
            self.load_row("P8 torch.load(mmap), part", figures.spread([timed(load) for _ in range(3)]), None, part_bytes)
        by_us()  # into the page cache
        warm = [by_us() for _ in range(3)]
        warm_spread = figures.spread([w[0] for w in warm])
        loaded = warm[0][1]
        if loaded:  # on a CPU the image is used where it lies
            self.values["load_warm_gb_per_s"] = loaded / warm_spread["median"] / 1e9
        cold = self.cold(path, lambda: by_us()[0])
        self.load_row("ours", warm_spread if loaded else None, cold, loaded)
        for name, function in peers_.items():
            timed(function)
            warm_spread = figures.spread([timed(function) for _ in range(2)])
            theirs = self.cold(path, lambda: timed(function))
            self.load_row(name, warm_spread, theirs, nbytes)
            if name == "P8 load_file" and loaded:
                self.values["load_cold_vs_load_file"] = figures.ratio(theirs, cold)

    def load_row(self, side, warm, cold, nbytes):
        self.rows.append({"section": "load", "name": "image (cold: not in the page cache)", "side": side, "cold": cold, "warm": warm, "nbytes": nbytes})

    def cold(self, path, seconds_of):
        """The spread of one run with the file out of the page cache; None where it stays in (a memory file system)."""
        if not self.measures():
            return figures.spread([seconds_of()])
        os.sync()
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if resident_share(file) > 0.02:
                self.note(f"{path} stays in the page cache: no cold load measured")
                return None
        return figures.spread([seconds_of()])

    def pinned_ring(self, path):
        """The whole file to the device through two pinned buffers."""
        nbytes, size = os.path.getsize(path), 64 << 20
        arena = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=self.device == "cuda") for _ in range(2)]
        copied = [None, None]
        with open(path, "rb", buffering=0) as file:
            for i, at in enumerate(range(0, nbytes, size)):
                turn = i % 2
                if copied[turn]:
                    copied[turn].synchronize()
                n = file.readinto(memoryview(pinned[turn].numpy()))
                arena[at:at + n].copy_(pinned[turn][:n], non_blocking=True)
                if self.device == "cuda":
                    copied[turn] = torch.cuda.Event()
                    copied[turn].record()
        return arena

    # --- P10: what a sum over one rank costs -------------------------------------------------------------------------------------------------------

    def section_norm(self):
        drafter, g = self.drafter("bf16"), self.drafter("bf16").g
        x = Inputs(g, torch.bfloat16, self.device, 1, 9, self.block_size)
        engine = self.engine("bf16", lend=True)
        session = self.session(engine, x, x.caches())
        call = session.draft_call(x.anchor_ids, x.anchor_positions, x.tables, hidden=torch.zeros(g.T, g.H, device=self.device))
        call()
        residual, branch = (torch.randn(g.T, g.H, device=self.device).to(torch.bfloat16) for _ in range(2))
        distributed = None
        try:
            import torch.distributed as distributed
            with tempfile.TemporaryDirectory() as folder:
                distributed.init_process_group("nccl" if self.device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        except Exception as error:  # a build of PyTorch without it
            self.note(f"P10: torch.distributed does not start ({error}): add and norm alone")
            distributed = None

        def p10(stream):
            if distributed:
                distributed.all_reduce(branch)
            return kernels.rms(branch, drafter.final_norm, drafter.eps, residual)

        n = 2 * g.L + 1
        ops = [self.step_op(f"sum, add, norm of {g.T} rows, one rank", "ours", "reduce_add_norm", [session], [call], n),
               Op(f"sum, add, norm of {g.T} rows, one rank", "P10 graph", [p10], 2 * 4 * g.T * g.H)]
        with ours.closing(session, engine):
            self.compare("norm", ops, n)
        if distributed:
            distributed.destroy_process_group()

    # --- the run -----------------------------------------------------------------------------------------------------------------------------------

    def measures(self):
        return self.device == "cuda"

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def drafter(self, scheme):
        if scheme not in self.drafters:
            self.drafters = {scheme: peers.Drafter(ours.Image(self.path(scheme)), self.device)}
        return self.drafters[scheme]

    def engine(self, scheme, lend=False):
        """`lend`: embedding and head are the re-enactment's tensors, so that a further engine holds only what is rotated."""
        lent = (self.drafter("bf16").embed, self.drafter("bf16").head) if lend and self.args.backend == "cuda" else (None, None)
        return ours.Engine(self.library, self.path(scheme), self.args.backend, *lent)

    def session(self, engine, x, layers):
        return ours.Session(engine, layers, x.n_requests, max(x.taps.shape[0], 1), x.max_keys)

    def bases(self, caches):
        return torch.tensor([t.data_ptr() for t in caches], dtype=torch.int64, device=self.device)

    def compiled(self, function, arguments):
        """torch.compile with autotuning, or None with the reason said."""
        if self.device != "cuda":
            return None
        try:
            made = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
            made(*arguments)
            return made
        except Exception as error:
            self.note(f"torch.compile fails, its variant is not measured: {str(error).splitlines()[0]}")
            return None

    SECTIONS = ("ceilings", "numerics", "context", "block", "markov", "attention", "gemm", "load", "norm")

    def run(self):
        sections = self.args.sections.split(",") if self.args.sections else self.SECTIONS
        for name in sections:
            spent = time.monotonic() - self.start
            if spent > self.args.budget:
                self.note(f"section {name} left out: {spent:.0f} of {self.args.budget} seconds are spent")
                continue
            try:  # what one section cannot measure must not cost the others
                with torch.inference_mode():
                    getattr(self, "section_" + name)()
            except Exception as error:
                self.failed += 1
                traceback.print_exc()
                self.note(f"section {name} fails: {error}")
            if self.device == "cuda":
                torch.cuda.empty_cache()
            print(f"{name}: {time.monotonic() - self.start - spent:.1f} s", file=sys.stderr, flush=True)
            if name == "numerics" and not all(n["good"] for n in self.numerics):
                self.note("the sides do not compute the same: nothing is timed")
                break


def resident_share(file):
    """How much of a file the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        n_pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * n_pages)()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        if libc.mincore(address, ctypes.c_size_t(len(mapped)), resident) != 0:
            return 1.0
        return sum(b & 1 for b in bytes(resident)) / n_pages


def report(bench):
    args = bench.args
    out = []
    if not bench.measures():
        out.append("A run without a GPU: the numbers below are of plain calls on a CPU and say nothing about a GPU; no bar is judged.")
        out.append(f"Triton kernels: {'in its interpreter' if kernels.triton_runs('cpu') else 'REPLACED by their PyTorch equivalents'}.")
    good = sum(n["good"] for n in bench.numerics)
    out.append(f"numerics: {good} of {len(bench.numerics)} comparisons within their tolerance")
    copy = bench.ceilings["copy_bytes_per_second"]
    out.append(f"ceilings: copy {copy / 1e9:.0f} GB/s, BF16 product {bench.ceilings.get('bf16_flop_per_second', 0) / 1e12:.0f} TFLOP/s")
    out.append(figures.times_table(bench.rows, copy))
    bars = figures.judge(bench.values if bench.measures() else {})
    out.append(figures.bars_table(bars))
    other = {k: v for k, v in bench.values.items() if k not in {b.key for b in figures.BARS}}
    if bench.measures():
        out += [f"{k}: {v:.3g}" for k, v in sorted(other.items()) if v is not None]
    print("\n\n".join(out[:3]) + "\n\n" + "\n\n".join(out[3:]))
    if args.json:
        device = torch.cuda.get_device_name() if bench.measures() else "cpu"
        with open(args.json, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "backend": args.backend, "geometry": args.geometry, "measured": bench.measures(),
                       "numerics": bench.numerics, "ceilings": bench.ceilings, "times": bench.rows, "values": bench.values, "bars": bars,
                       "notes": bench.notes, "seconds": time.monotonic() - bench.start}, file, indent=1)
    return 1 if bench.failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--images", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--geometry", choices=("k3", "tiny"), default="k3")
    parser.add_argument("--backend", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--sections", help="comma-separated, of: " + ",".join(Bench.SECTIONS))
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no further section begins")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.backend = args.backend or args.device
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: --device cpu --geometry tiny shows that everything runs")
    args.contexts = (1, 8, 16, 32, 64) if args.device == "cuda" else (1, 9)
    args.replays = args.replays if args.device == "cuda" else 2
    bench = Bench(args)
    bench.run()
    return report(bench)


if __name__ == "__main__":
    sys.exit(main())
