"""Our encoders beside torch and compressed-tensors, in one process, on the same bytes and cores. Usage: bench_quant_peers.py LIBRARY

"Rates of section 8 of the design, in tests/bench, beside torch and compressed-tensors on the same cores as ratios; at least 2 x the compiled torch
version at equal threads": the last line of every table says how many times.

LIBRARY is tests/bench/quant_shared.c as a shared library. Environment: SCHEMES (default: all), DTYPES ("bf16 f32"), THREADS ("1 2"), MIB (64, of BF16),
RUNS (15), CLOCK (wall; cpu counts the process' own seconds and suits one thread on a busy machine).

Who runs, from the same Gaussian weight [n, 7168] in memory to codes and scales (and NVFP4's second scale, so its amax is part of everybody's work):
  k3pack              k3_quant_encode_rows in a pool of threads
  torch compiled      the fastest of the forms below, by torch.compile, written into tensors that are there, warmed up
  torch eager         the plainest of these forms without torch.compile
  compressed-tensors  its own calculate_qparams and compress, as in tests/peers/reference.py, in the weight's dtype
The forms of torch: "one graph" over the whole weight; "panels", the same over 128 rows at a time, whose intermediate results stay in the cache; for FP4
"words", which writes a code per byte and then joins the two bytes of every 16-bit word, since only that is vectorised, as graphs of their own.

Before timing, torch's codes and scales are compared with ours byte for byte, and the library's too where it computes in F32 (from BF16 weights it
computes scales in BF16; tests/peers/quantised.py says what then differs). Runs are interleaved and every figure is the minimum; who needs more than
half a second joins every fifth round only.
"""
import ctypes
import importlib.metadata
import os
import sys
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "peers"))
from reference import library  # noqa: E402

N_COLS, PANEL, SLOW = 7168, 128, 0.5
PAUSE = 0.05  # seconds before each run: OpenMP's threads spin for a while after theirs, on the core that the next candidate's second thread wants
OURS = ctypes.CDLL(os.path.abspath(sys.argv[1]))
OURS.bench_simd.restype = ctypes.c_char_p
OURS.bench_encode.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p,
                              ctypes.c_void_p, ctypes.c_void_p]
# scheme -> name in quant/scheme.h, group, codes per byte, dtype of the scales
SCHEMES = {"fp8": ("fp8-channel", N_COLS, 1, torch.float32), "nvfp4": ("nvfp4", 16, 2, torch.float8_e4m3fn), "mxfp4": ("mxfp4", 32, 2, torch.uint8),
           "mxfp8": ("mxfp8", 32, 1, torch.uint8), "fp8-block": ("fp8-block", 128, 1, torch.float32)}


def outputs(w, scheme):
    _, group, per_byte, scale_dtype = SCHEMES[scheme]
    rows, cols = w.shape
    scale = (rows // 128, cols // 128) if scheme == "fp8-block" else (rows, cols // group)
    codes = torch.empty(rows, cols // per_byte, dtype=torch.uint8 if per_byte == 2 else torch.float8_e4m3fn)
    return codes, torch.empty(*scale, dtype=scale_dtype), torch.ones(1)


def ours(w, scheme, n_threads, out):
    dtype = b"BF16" if w.dtype == torch.bfloat16 else b"F32"
    status = OURS.bench_encode(SCHEMES[scheme][0].encode(), dtype, w.data_ptr(), *w.shape, n_threads, *(t.data_ptr() for t in out))
    assert status == 0, status


# ---- torch, in F32 like the formats' definitions

def e4m3(value):
    return value.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def e2m1(quotient):
    """Codes in 32 bits: an addend of the right binade makes the processor round to the one bit that is left."""
    magnitude = quotient.abs().clamp(max=6.0)
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp(min=127 << 23)
    addend = exponent + (22 << 23)
    codes = (magnitude + addend.view(torch.float32)).view(torch.int32) - addend + (exponent >> 22) - (127 << 1)
    return codes | ((quotient < 0).to(torch.int32) << 3)


def e2m1_eager(quotient):
    magnitude = quotient.abs()
    codes = torch.zeros(quotient.shape, dtype=torch.uint8)
    for boundary, is_passed in ((0.25, torch.gt), (0.75, torch.ge), (1.25, torch.gt), (1.75, torch.ge), (2.5, torch.gt), (3.5, torch.ge), (5.0, torch.gt)):
        codes += is_passed(magnitude, boundary)
    return codes | ((quotient < 0).to(torch.uint8) << 3)


def mx_scale(amax, top):
    byte = (((amax.view(torch.int32) + 0x00200000) >> 23) - top).clamp(0, 254)
    byte = torch.where(amax == 0, 127, byte)
    return byte.to(torch.uint8), ((254 - byte) << 23).view(torch.float32)  # the reciprocal of a power of two


def block_amax(w, group):
    return w.view(w.shape[0], -1, group).abs().amax(2).float()


def fp8(w, codes, scale, second):
    s = torch.maximum(w.amax(1, keepdim=True), -w.amin(1, keepdim=True)).float() / 448.0
    codes.copy_(e4m3(w.float() / s))
    scale.copy_(s)


def fp8_block(w, codes, scale, second):
    tiles = w.view(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
    s = tiles.abs().amax((1, 3)).float() / 448.0
    codes.view(tiles.shape).copy_(e4m3(tiles.float() / s[:, None, :, None]))
    scale.copy_(s)


def mxfp8(w, codes, scale, second):
    byte, factor = mx_scale(block_amax(w, 32), 8)
    codes.copy_(e4m3((w.view(w.shape[0], -1, 32).float() * factor[:, :, None]).view(w.shape)))
    scale.copy_(byte)


def nvfp4_scales(w, second):
    s = (second * (block_amax(w, 16) / 6.0)).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    s = torch.where(s == 0, 0.125, s)
    return s.to(torch.float8_e4m3fn), s / second


def join(codes):
    """Pairs of codes in neighbouring bytes, seen as one word each."""
    return ((codes | (codes >> 4)) & 0xFF).to(torch.uint8)


def nvfp4_second(w):
    return 2688.0 / torch.maximum(w.amax(), -w.amin()).float().reshape(1)


def nvfp4_codes(w, effective, encode):
    return encode(w.view(w.shape[0], -1, 16).float() / effective[:, :, None]).view(w.shape).to(torch.uint8)


def nvfp4(w, codes, scale, second, encode=e2m1):
    s, effective = nvfp4_scales(w, second)
    codes.copy_(join(nvfp4_codes(w, effective, encode).view(torch.int16)))
    scale.copy_(s)


def mxfp4_codes(w, factor, encode):
    return encode(w.view(w.shape[0], -1, 32).float() * factor[:, :, None]).view(w.shape).to(torch.uint8)


def mxfp4(w, codes, scale, second, encode=e2m1):
    byte, factor = mx_scale(block_amax(w, 32), 2)
    codes.copy_(join(mxfp4_codes(w, factor, encode).view(torch.int16)))
    scale.copy_(byte)


# The steps of "words", each a graph: scales and what a weight is divided by or multiplied with; a code per byte; pairs.
def words_scales_nvfp4(w, second, scale, factor):
    s, effective = nvfp4_scales(w, second)
    scale.copy_(s)
    factor.copy_(effective)


def words_scales_mxfp4(w, second, scale, factor):
    byte, inverse = mx_scale(block_amax(w, 32), 2)
    scale.copy_(byte)
    factor.copy_(inverse)


def words_codes_nvfp4(w, factor, bytes_):
    bytes_.copy_(nvfp4_codes(w, factor, e2m1))


def words_codes_mxfp4(w, factor, bytes_):
    bytes_.copy_(mxfp4_codes(w, factor, e2m1))


def words_join(words, codes):
    codes.copy_(join(words))


GRAPHS = {"fp8": fp8, "fp8-block": fp8_block, "mxfp8": mxfp8, "nvfp4": nvfp4, "mxfp4": mxfp4}


def compile_(function):
    return torch.compile(function, dynamic=False, fullgraph=True)


def forms(w, scheme, out):
    """Name -> a call without arguments that fills out."""
    codes, scale, second = out
    graph, whole_amax = compile_(GRAPHS[scheme]), compile_(nvfp4_second)
    scale_rows = PANEL // 128 if scheme == "fp8-block" else PANEL

    def begin():
        if scheme == "nvfp4":
            second.copy_(whole_amax(w))

    def one_graph():
        begin()
        graph(w, codes, scale, second)

    def panels(step):
        begin()
        for i, part in enumerate(parts):
            step(i, *part)

    parts = [(w[row:row + PANEL], codes[row:row + PANEL], scale[i * scale_rows:(i + 1) * scale_rows]) for i, row in enumerate(range(0, len(w), PANEL))]
    panel_graph = compile_(GRAPHS[scheme])
    made = {"one graph": one_graph, "panels": lambda: panels(lambda i, part, c, s: panel_graph(part, c, s, second))}
    if SCHEMES[scheme][2] == 2:
        steps = [compile_(globals()[f"words_{step}_{scheme}"]) for step in ("scales", "codes")] + [compile_(words_join)]
        for name, n_rows in (("words", len(w)), ("words in panels", PANEL)):
            bytes_, factor = torch.empty(n_rows, w.shape[1], dtype=torch.uint8), torch.empty(n_rows, scale.shape[1])
            words = bytes_.view(torch.int16)

            def step(i, part, c, s, bytes_=bytes_, factor=factor, words=words):
                steps[0](part, second, s, factor)
                steps[1](part, factor, bytes_)
                steps[2](words, c)
            made[name] = (lambda step=step: (begin(), step(0, w, codes, scale))) if n_rows == len(w) else (lambda step=step: panels(step))
    return made


def eager(w, scheme, out):
    codes, scale, second = out
    if scheme == "nvfp4":
        second.copy_(nvfp4_second(w))
    GRAPHS[scheme](w, codes, scale, second, **({"encode": e2m1_eager} if SCHEMES[scheme][2] == 2 else {}))


# ---- running

def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def check(name, scheme, expected, found):
    for what, a, b in zip(("codes", "scales", "second scale"), expected, found):
        n = int((raw(a) != raw(b)).sum()) if b is not None else 0
        assert n == 0, f"{scheme}: {name} gives {n} other bytes of {what}"


def library_parts(made, scheme):
    weight = made["weight_packed" if SCHEMES[scheme][2] == 2 else "weight"]
    return weight, made["weight_scale"], made.get("weight_global_scale")


def measure(calls, n_runs, clock, n_threads):
    now = time.perf_counter if clock == "wall" else time.process_time
    best, counts, is_slow = {}, {}, {}
    for run in range(n_runs):
        for name, call in calls.items():
            if is_slow.get(name) and run % 5:
                continue
            if clock == "wall":
                time.sleep(PAUSE)
            start = now()
            call()
            elapsed = (now() - start) / (n_threads if clock == "cpu" else 1)
            best[name], counts[name] = min(elapsed, best.get(name, elapsed)), counts.get(name, 0) + 1
            is_slow[name] = elapsed > SLOW
    return best, counts


def main():
    chosen = {key: os.environ.get(key, default).split() for key, default in
              (("SCHEMES", " ".join(SCHEMES)), ("DTYPES", "bf16 f32"), ("THREADS", "1 2"), ("MIB", "64"), ("RUNS", "15"), ("CLOCK", "wall"))}
    clock, n_runs = chosen["CLOCK"][0], int(chosen["RUNS"][0])
    n_rows = -(-int(chosen["MIB"][0]) * 2**20 // (2 * N_COLS * PANEL)) * PANEL
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "compressed-tensors"))
    print(f"k3pack with {OURS.bench_simd().decode()}, {versions} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} CPUs, load "
          f"{os.getloadavg()[0]:.1f}; a weight of {n_rows} x {N_COLS}; minimum of {n_runs} interleaved runs by the {clock} clock")
    print("ratio: time of that candidate / time of k3pack")
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(n_rows, N_COLS, generator=generator) * 0.02
    for dtype in chosen["DTYPES"]:
        w = source.to(torch.bfloat16) if dtype == "bf16" else source
        for n_threads in map(int, chosen["THREADS"]):
            torch.set_num_threads(n_threads)
            torch._dynamo.reset()
            for scheme in chosen["SCHEMES"]:
                expected, out = outputs(w, scheme), outputs(w, scheme)
                ours(w, scheme, n_threads, expected)
                calls = {"k3pack": lambda: ours(w, scheme, n_threads, expected)}
                for name, call in forms(w, scheme, out).items():
                    call()
                    check("torch compiled, " + name, scheme, expected, out)
                    calls["torch compiled, " + name] = call
                eager_out = outputs(w, scheme)
                eager(w, scheme, eager_out)
                check("torch eager", scheme, expected, eager_out)
                calls["torch eager"] = lambda: eager(w, scheme, eager_out)
                if dtype == "f32":
                    check("compressed-tensors", scheme, expected, library_parts(library(w, scheme), scheme))
                calls["compressed-tensors"] = lambda: library(w, scheme)
                destination = torch.empty_like(w)
                calls["memcpy of the weight"] = lambda: destination.copy_(w)
                best, counts = measure(calls, n_runs, clock, n_threads)
                print(f"\n{dtype} -> {scheme}, {n_threads} thread{'s' if n_threads > 1 else ''}")
                print(f"  {'':34} {'ms':>9} {'Gelem/s':>9} {'ratio':>8} {'runs':>5}")
                for name, seconds in best.items():
                    print(f"  {name:34} {seconds * 1e3:9.1f} {w.numel() / seconds * 1e-9:9.3f} {seconds / best['k3pack']:8.2f} {counts[name]:5}")
                fastest = min(seconds for name, seconds in best.items() if name.startswith("torch compiled"))
                print(f"  k3pack is {fastest / best['k3pack']:.2f} x the fastest compiled torch", flush=True)


if __name__ == "__main__":
    main()
