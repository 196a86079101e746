#!/usr/bin/env python3
"""The benchmark's Triton kernels against their PyTorch equivalents, in Triton's interpreter, on a CPU, in F32
and BF16. Exit 1 when one differs, 77 without Triton. On a GPU bench_gpu.py itself compares them in BF16 before it times them."""
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch

import kernels

if kernels.triton is None:
    print("Triton is not installed: the benchmark's Triton kernels were NOT run")
    sys.exit(77)
torch.manual_seed(1)
failed = 0


def expect(what, found, expected, tolerance):
    global failed
    off = ((found - expected).norm() / expected.norm()).item()
    if not off <= tolerance:
        print(f"FAILED: {what}: off by {off:.2e}")
        failed += 1


def in_torch(function, *arguments):
    """What the PyTorch equivalent gives."""
    os.environ["TRITON_INTERPRET"] = "0"
    result = function(*arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    return result


L, n, n_heads, rk, r, block_size = 3, 5, 16, 32, 16, 4
slots = torch.tensor([7, 0, 19, 3, 12])
latents, keys = torch.randn(L, n, rk), torch.randn(L, n, r)
caches = [torch.randn(6, block_size, rk + r) for _ in range(L)]
expected = [c.clone() for c in caches]
for layer, cache in enumerate(expected):
    cache.view(-1, rk + r)[slots] = torch.cat((latents[layer], keys[layer]), 1)
kernels.grouped_insert(latents, keys, caches, torch.tensor([c.data_ptr() for c in caches]), slots)
expect("grouped insert", torch.stack(caches), torch.stack(expected), 0)

x, gain, gains, residual = torch.randn(6, 90), torch.randn(72), torch.randn(3, 72), torch.randn(6, 72)
again = residual.clone()
expect("norm of a slice", kernels.rms(x[:, 5:77], gain, 1e-5), in_torch(kernels.rms, x[:, 5:77], gain, 1e-5), 1e-6)
expect("norm, gains by group", kernels.rms(x[:, :72], gains, 1e-5), in_torch(kernels.rms, x[:, :72], gains, 1e-5), 1e-6)
expect("norm with residual", kernels.rms(x[:, :72], gain, 1e-5, residual), in_torch(kernels.rms, x[:, :72], gain, 1e-5, again), 1e-6)
expect("residual", residual, again, 0)
heads, positions, table = torch.randn(4, 3, 20), torch.tensor([5, 0, 9, 9]), torch.rand(10, 6)
expect("rotation", kernels.rope(heads[..., 8:], positions, table.cos(), table.sin()),
       in_torch(kernels.rope, heads[..., 8:], positions, table.cos(), table.sin()), 1e-6)
expect("SiLU, product", kernels.silu_mul(x), in_torch(kernels.silu_mul, x), 1e-6)

q_latent, q_rope, z, k = torch.randn(n, n_heads, rk), torch.randn(n, n_heads, r), torch.randn(n, rk), torch.randn(n, r)
wanted = caches[0].clone()
wanted.view(-1, rk + r)[slots] = torch.cat((z, k), 1)
expect("concatenated queries", kernels.concat_insert(q_latent, q_rope, z, k, caches[0], slots), torch.cat((q_latent, q_rope), 2), 0)
expect("insert beside them", caches[0], wanted, 0)

T, n_requests, per_request = 7, 2, 18
q = torch.randn(n_requests, T * n_heads, rk + r)
cache = torch.randn(n_requests * per_request, block_size, rk + r)
tables = torch.randperm(n_requests * per_request).view(n_requests, per_request).int()
n_keys = torch.tensor([69, 9])
truth = kernels.mla_torch(q, cache, tables, n_keys, 0.2, rk)
for tile in (16, 64):
    for n_splits in (1, 3):
        expect(f"attention, tile {tile}, {n_splits} splits", kernels.mla(q, cache, tables, n_keys, 0.2, rk, tile, n_splits), truth, 1e-6)
    halves = kernels.mla(q.bfloat16(), cache.bfloat16(), tables, n_keys, 0.2, rk, tile, 3)
    expect(f"attention in BF16, tile {tile}", halves.float(), truth, 2e-2)

x = torch.randn(7, 192)
packed = torch.randint(256, (72, 96), dtype=torch.uint8)
scales = (torch.rand(72, 12) * 3).to(torch.float8_e4m3fn)
scales.view(torch.uint8)[0, :3] = torch.tensor([0, 1, 7], dtype=torch.uint8)  # zero and subnormal scales
factors = torch.rand(72) + 0.5
whole = kernels.nvfp4_dequantise(packed, scales, factors, torch.float32)
expect("FP4 product", kernels.w4a16(x, packed, scales, factors), x @ whole.t(), 1e-6)
expect("FP4 product in BF16", kernels.w4a16(x.bfloat16(), packed, scales, factors).float(), x @ whole.t(), 1e-2)
expect("norm in BF16", kernels.rms(residual.bfloat16(), gain.bfloat16(), 1e-5).float(), kernels.rms(residual, gain, 1e-5), 1e-2)
print("Triton kernels: " + (f"{failed} wrong" if failed else "all right"))
sys.exit(failed > 0)
