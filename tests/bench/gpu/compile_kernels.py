#!/usr/bin/env python3
"""Compiles the benchmark's Triton kernels for compute capability 9.0 at the widths of the published drafter, without a GPU, and prints what they take of
shared memory. Exit 1 when one does not compile or takes more than a block has, 77 without Triton."""
import sys

import kernels

if kernels.triton is None:
    print("Triton is not installed: the benchmark's Triton kernels were NOT compiled")
    sys.exit(77)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_NBYTES = 227 << 10
ROWS, FLOATS, IDS = "*bf16", "*fp32", "*i64"
WIDTHS = {"RK": 512, "R": 64, "BLOCK_RK": 512, "BLOCK_R": 64}
MLA = {"q": ROWS, "cache": ROWS, "tables": "*i32", "n_keys": IDS, "parts": FLOATS, "maxima": FLOATS, "sums": FLOATS, "scale": "fp32", "n_rows": "i32",
       "max_blocks": "i32"}
CASES = [
    (kernels._rms, {"x": ROWS, "residual": ROWS, "gain": ROWS, "out": ROWS, "x_stride": "i32", "rows_per_gain": "i32", "width": "i32", "eps": "fp32"},
     {"ADD": True, "BLOCK": 8192}, 4),
    (kernels._rope, {"x": ROWS, "out": ROWS, "positions": IDS, "cos": FLOATS, "sin": FLOATS, "row_stride": "i32", "head_stride": "i32", "N": "i32"},
     {"HALF": 32, "BLOCK": 32}, 4),
    (kernels._silu_mul, {"x": ROWS, "out": ROWS, "width": "i32"}, {"BLOCK": 1024}, 4),
    (kernels._grouped_insert, {"latents": ROWS, "keys": ROWS, "bases": IDS, "slots": IDS, "n": "i32"}, WIDTHS, 4),
    (kernels._concat_insert, {"q_latent": ROWS, "q_rope": ROWS, "out": ROWS, "z": ROWS, "k": ROWS, "cache": ROWS, "slots": IDS}, {"N": 64, **WIDTHS}, 4),
    (kernels._mla_split, MLA, {"BLOCK_SIZE": 64, "RK": 512, "R": 64, "BM": 16, "BN": 32, "WIDE": False}, 4),
    (kernels._mla_split, MLA, {"BLOCK_SIZE": 64, "RK": 512, "R": 64, "BM": 64, "BN": 32, "WIDE": False}, 8),
    (kernels._mla_combine, {"parts": FLOATS, "maxima": FLOATS, "sums": FLOATS, "out": ROWS, "n_rows": "i32", "n_splits": "i32"}, {"RK": 512}, 4),
    (kernels._w4a16, {"x": ROWS, "packed": "*u8", "scales": "*u8", "factors": FLOATS, "out": ROWS, "M": "i32", "N": "i32", "K": "i32"},
     {"BM": 16, "BN": 64, "BK": 64, "WIDE": False}, 4),
]
failed = 0
for kernel, parameters, constants, n_warps in CASES:
    source = ASTSource(fn=kernel, signature={**parameters, **{c: "constexpr" for c in constants}}, constexprs=constants)
    made = kernels.triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": n_warps, "num_stages": 2})
    fits = made.metadata.shared <= SHARED_NBYTES
    failed += not fits
    print(f"{'ok' if fits else 'FAILED'}: {kernel.__name__} {constants.get('BM', '')}: {made.metadata.shared} bytes of shared memory")
sys.exit(failed > 0)
