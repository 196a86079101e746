"""Checkpoints for tests/cli/test_quantise.sh and independent looks at what k3pack made of them. Needs no package.

quantise.py write-vectors DIR      three tensors whose encodings are known by hand: NVFP4 (F32 and BF16) and MXFP4
quantise.py check-vectors CT MO MX exports of them: compressed-tensors and modelopt of nvfp4, compressed-tensors of mxfp4
quantise.py write-gauss DIR        Gaussian weights
quantise.py write-outliers DIR     q_proj a million times larger than k_proj; one tensor with an outlier; siblings in BF16
quantise.py write-nan DIR KIND     a weight with one NaN ("nan") or Inf ("inf")
quantise.py flip SRC DIR TENSOR    a copy whose tensor has another sign in its last weight
quantise.py unfused SRC DIR        shapes and names of a compressed-tensors NVFP4 export against its BF16 source; scales shared over the component
quantise.py decode CT MO           both dialects of one image decode to the same values within one rounding; says the largest relative difference
quantise.py rmse JSON LOW HIGH     relative RMSE of `convert --json` within bounds
quantise.py account TEXT JSON      the SNR of every weight and their summary in the text of `convert` are those of its JSON
"""
import json
import math
import os
import random
import struct
import sys

WIDTH = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def write(folder, tensors, config=None):
    os.makedirs(folder, exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        assert len(raw) == WIDTH[dtype] * math.prod(shape), name
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(os.path.join(folder, "model.safetensors"), "wb").write(struct.pack("<Q", len(text)) + text + data)
    json.dump(config or {"model_type": "anything"}, open(os.path.join(folder, "config.json"), "w"))


def read(folder):
    tensors = {}
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".safetensors"):
            continue
        data = open(os.path.join(folder, file), "rb").read()
        n = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + n])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[8 + n + begin:8 + n + end])
    return tensors


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def bf16(values):  # values that are BF16 already
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def floats(raw):
    return struct.unpack(f"<{len(raw) // 4}f", raw)


# Block 0 has a tie for every step and both signs; block 1 is the same at 1/64, block 2 is zero.
BLOCK = [0, .5, -1, 1.5, 2, -3, 4, 6, .25, .75, 1.25, -1.75, 2.5, 3.5, 5, -.25]
T1 = BLOCK + [v / 64 for v in BLOCK] + [0.0] * 16
T2 = ("3CCF 3CDF 3B8B BCBA BCEC BC09 3CA1 3CF3 3C4B BC86 BCF6 BC84 3C4F 3CF3 3CA0 BC0E BD6C BD39 3C13 3D60 3D4E BA0B BD50 BD5F BC02 3D3B 3D6B 3C85 "
      "BD23 BD73 BCC7 3D08 3DB8 3D43 BD1E BDB7 BD6D 3CDB 3DB2 3D89 BC6A BDA9 BD99 3AD1 3D9D 3DA6 3C36 BD8E").split()
T3 = [1, 7 / 6, 1.25, 0.75]


def single(value):  # rounded to F32, as a tensor of that type would hold it
    return struct.unpack("<f", struct.pack("<f", value))[0]


def write_vectors(folder):
    rows = [single(single(f) * v) for f in T3 for v in BLOCK + BLOCK]
    write(folder, {"t1.weight": ("F32", [1, 48], f32(T1)),
                   "t2.weight": ("BF16", [1, 48], b"".join(bytes.fromhex(h)[::-1] for h in T2)),
                   "t3.weight": ("F32", [4, 32], f32(rows))})


def check_vectors(ct, mo, mx):
    ct, mo, mx = read(ct), read(mo), read(mx)
    half = "103AD47620C26486"
    want = {"t1.weight_scale": "7E4E20", "t1.weight_packed": half + half + "00" * 8, "t1.weight_global_scale": "0000E043",
            "t2.weight_scale": "71797E", "t2.weight_global_scale": "38BDE946",
            "t2.weight_packed": "77E2BF76D5DF75C6EF7287FF6A37FE5D57FD4E67FA0E77E1"}
    for name, value in want.items():
        assert ct[name][2].hex().upper() == value, (name, ct[name][2].hex())
    assert ct["t1.weight_packed"][:2] == ("U8", [1, 24]) and ct["t1.weight_scale"][:2] == ("F8_E4M3", [1, 3])
    assert ct["t1.weight_global_scale"][:2] == ("F32", [1]) and "t1.weight" not in ct
    # The other dialect: the same codes and block scales, the multiplier amax / 2688, a scalar.
    for t in ("t1", "t2"):
        assert mo[t + ".weight"] == ct[t + ".weight_packed"] and mo[t + ".weight_scale"] == ct[t + ".weight_scale"]
        assert mo[t + ".weight_scale_2"][:2] == ("F32", []), mo[t + ".weight_scale_2"]
    assert mo["t1.weight_scale_2"][2].hex().upper() == "2549123B" and mo["t2.weight_scale_2"][2].hex().upper() == "C3300C38"
    want = ["103AD47620C26486", "1029C26410A14385", "1029C26410A24385", "102AC36510B25486"]
    assert list(mx["t3.weight_scale"][2]) == [127, 128, 128, 127] and mx["t3.weight_scale"][:2] == ("U8", [4, 1])
    assert mx["t3.weight_packed"][2].hex().upper() == "".join(w + w for w in want), mx["t3.weight_packed"][2].hex()


def write_gauss(folder):
    random.seed(7)
    write(folder, {"gauss.weight": ("F32", [128, 2048], f32([random.gauss(0, 0.02) for _ in range(128 * 2048)]))})


def write_outliers(folder):
    random.seed(8)
    normal = [random.gauss(0, 1) for _ in range(64 * 64)]
    odd = list(normal)
    odd[5] = 1e6
    write(folder, {"a.q_proj.weight": ("F32", [64, 64], f32([v * 1e6 for v in normal])), "a.k_proj.weight": ("F32", [64, 64], f32(normal)),
                   "a.o_proj.weight": ("F32", [64, 64], f32(odd)), "b.o_proj.weight": ("F32", [64, 64], f32(normal)),
                   "embed_tokens.weight": ("F32", [64, 64], f32(normal)), "norm.weight": ("F32", [64], f32(normal[:64])),
                   "odd.weight": ("F32", [64, 40], f32(normal[:64 * 40]))})


def write_nan(folder, kind):
    values = [0.5] * (32 * 32)
    values[77] = math.nan if kind == "nan" else math.inf
    write(folder, {"a.weight": ("F32", [32, 32], f32(values)), "b.weight": ("F32", [32, 32], f32([0.25] * 1024))})


def flip(source, folder, name):
    tensors = read(source)
    dtype, shape, raw = tensors[name]
    raw = bytearray(raw)
    raw[-1] ^= 0x80  # the sign of the last weight
    tensors[name] = (dtype, shape, bytes(raw))
    write(folder, tensors, json.load(open(os.path.join(source, "config.json"))))


def unfused(source, folder):
    source, made = read(source), read(folder)
    kept = ("kv_b_proj", "markov_w1", "markov_w2", "confidence_head", "embed_tokens", "lm_head")
    n, shared, alone = 0, set(), set()
    for name, (dtype, shape, raw) in source.items():
        module = name[:-len(".weight")] if name.endswith(".weight") else ""
        if len(shape) != 2 or any(k in name for k in kept):
            assert made.pop(name) == (dtype, shape, raw), name
            continue
        n += 1
        assert made.pop(module + ".weight_packed")[:2] == ("U8", [shape[0], shape[1] // 2])
        assert made.pop(module + ".weight_scale")[:2] == ("F8_E4M3", [shape[0], shape[1] // 16])
        second = made.pop(module + ".weight_global_scale")
        assert second[:2] == ("F32", [1])
        (shared if "_a_proj" in module else alone).add(second[2])
        # The divisor is 2688 times the rounded reciprocal of the largest magnitude of all that share it; nobody shares beyond a fused tensor here.
    assert not made, made.keys()
    assert len(shared) == 1 and len(alone) > 1, (shared, alone)
    values = [abs(v) for name, (_, shape, raw) in source.items() if "_a_proj" in name and len(shape) == 2
              for v in floats(b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)))]
    assert struct.pack("<f", single(1 / max(values)) * 2688) == shared.pop()
    print(n)


E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6]


def e4m3(code):
    e, m = code >> 3 & 15, code & 7
    return (m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) * (-1 if code & 128 else 1)


def decode(ct, mo):
    ct, mo, worst, n = read(ct), read(mo), 0, 0
    for name in ct:
        if not name.endswith(".weight_packed"):
            continue
        module, (_, (rows, half), codes) = name[:-len(".weight_packed")], ct[name]
        gs, ws2 = floats(ct[module + ".weight_global_scale"][2])[0], floats(mo[module + ".weight_scale_2"][2])[0]
        assert mo[module + ".weight"][2] == codes
        for i, code in enumerate(codes[:64]):
            a = E2M1[code & 7] * e4m3(ct[module + ".weight_scale"][2][i // 8]) / gs
            b = E2M1[code & 7] * e4m3(mo[module + ".weight_scale"][2][i // 8]) * ws2
            worst = max(worst, abs(a - b) / a if a else 0)
            n += 1
    assert n > 0
    print(worst)


def rmse(path, low, high):
    told = json.load(open(path))["quant"]
    assert float(low) <= told["relative_rmse"] <= float(high), told["relative_rmse"]
    assert abs(told["snr_db"] + 20 * math.log10(told["relative_rmse"])) < 1e-9


def account(text, told):
    lines, told = open(text).read().splitlines(), json.load(open(told))["quant"]
    printed = {line.split()[-1]: line.split() for line in lines if " dB  " in line}
    assert sorted(printed) == sorted(t["tensor"] for t in told["tensors"]) and len(printed) == 22, sorted(printed)
    for t in told["tensors"]:
        decibel, _, rmse, error, _ = printed[t["tensor"]]
        assert abs(float(decibel) - t["snr_db"]) < 0.0051 and abs(float(rmse) - t["relative_rmse"]) < 0.000051, (printed[t["tensor"]], t)
        assert abs(float(error) - t["max_error"]) < 0.001 * t["max_error"], (printed[t["tensor"]], t)
    worst = max(told["tensors"], key=lambda t: t["relative_rmse"])
    summary = f'22 weights to nvfp4: SNR {told["snr_db"]:.2f} dB, relative RMSE {told["relative_rmse"]:.4f}; worst {worst["snr_db"]:.2f} dB, {worst["tensor"]}'
    assert summary in lines, (summary, lines)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
