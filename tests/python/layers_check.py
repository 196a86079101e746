"""Holds `k3pack run --layers` against the float64 re-enactment on the checkpoint itself, weights decoded here by their formats' definitions.
  layers_check.py states OUT HIDDEN_SIZE LENGTHS   writes hidden states of requests of the given lengths ("8,3,1"), rows shuffled
  layers_check.py states OUT HIDDEN_SIZE LENGTHS BF16
  layers_check.py compare CHECKPOINT STATES RESULT FIRST LAST   exit 1 when something is too far
  layers_check.py same A B TOLERANCE                   two results
Needs numpy."""
import json
import pathlib
import struct
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "gen"))
from dspark_case import write_safetensors  # noqa: E402
from moe_oracle import Layers, round_bf16  # noqa: E402

KINDS = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8", "U8": "u1", "F8_E4M3": "u1"}


def read(path):
    """name -> (dtype, raw array; BF16 widened to float32)"""
    data = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        raw = np.frombuffer(data[8 + n + begin:8 + n + end], KINDS[t["dtype"]]).reshape(t["shape"])
        if t["dtype"] == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        out[name] = (t["dtype"], raw)
    return out


def e4m3(codes):
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 7), ((codes >> 3) & 15).astype(int), (codes & 7).astype(float)
    value = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return sign * value


def e2m1(codes):
    low, high = codes & 15, codes >> 4
    nibbles = np.stack([low, high], -1).reshape(codes.shape[0], -1)
    return np.array([0, .5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * (1.0 - 2.0 * (nibbles >> 3))


def spread(scale, shape, rows, cols):
    return np.repeat(np.repeat(scale, rows, 0), cols, 1)[:shape[0], :shape[1]]


def load(folder):
    """(family, config, weights below the text root in float64, whether all are F32)"""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    text = config.get("text_config", config)
    block = config.get("quantization_config", {}).get("weight_block_size", [128, 128])
    tensors = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors.update(read(path))
    weights, all_f32 = {}, True
    for name, (dtype, raw) in tensors.items():
        module, _, part = name.rpartition(".")
        if "scale" in part:
            continue
        scale = tensors.get(module + ".weight_scale_inv") or tensors.get(module + ".weight_scale")
        if dtype == "F8_E4M3":
            value = e4m3(raw)
            if scale[0] == "U8":
                value = value * spread(2.0 ** (scale[1].astype(float) - 127), value.shape, 1, 32)
            else:
                value = value * spread(scale[1].astype(float), value.shape, *block)
        elif dtype == "U8":
            value = e2m1(raw)
            if module + ".weight_scale_2" in tensors:
                value = value * spread(e4m3(scale[1]), value.shape, 1, 16) * float(tensors[module + ".weight_scale_2"][1])
            else:
                value = value * spread(2.0 ** (scale[1].astype(float) - 127), value.shape, 1, 32)
        else:
            value = raw.astype(np.float64)
            all_f32 &= dtype == "F32"
        for root in ("language_model.model.", "model."):
            if name.startswith(root):
                weights[name[len(root):]] = value
                break
    if "q_lora_rank" in text:
        return "deepseek-v3.2", text, weights, all_f32
    # The other shape and spelling of MiniMax-M3 in the terms of the first.
    rope = text.get("rope_parameters", {})
    text = dict(text)
    text["rope_theta"] = text.get("rope_theta", rope.get("rope_theta"))
    text["rotary_dim"] = text.get("rotary_dim", round(text.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)) * text["head_dim"]))
    text["swiglu_alpha"], text["swiglu_limit"] = text.get("swiglu_alpha", 1.702), text.get("swiglu_limit", 7.0)
    if "moe_layer_freq" not in text:
        text["moe_layer_freq"] = [int(kind == "sparse") for kind in text["mlp_layer_types"]]
    n = len(text["moe_layer_freq"])
    for name in list(weights):
        other = name
        for old, new in ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")):
            if ".experts." in name:
                other = other.replace(old, new)
        if name.startswith("mtp.layers."):
            k, _, rest = name[len("mtp.layers."):].partition(".transformer_layer.")
            other = f"layers.{n + int(k)}.{rest}" if rest else name
        weights[other] = weights[name]
    return "minimax-m3", text, weights, all_f32


def states(path, width, lengths, bf16):
    random = np.random.default_rng(5)
    requests = np.concatenate([np.full(m, b, np.int64) for b, m in enumerate(lengths)])
    positions = np.concatenate([np.arange(m, dtype=np.int64) for m in lengths])
    order = random.permutation(len(requests))
    hidden = random.standard_normal((len(requests), width)).astype(np.float32)
    write_safetensors(path, [("hidden_states", "BF16" if bf16 else "F32", round_bf16(hidden) if bf16 else hidden),
                             ("positions", "I64", positions[order]), ("request_ids", "I64", requests[order])])


def compare(checkpoint, scenario, result, first, last):
    family, config, weights, all_f32 = load(checkpoint)
    given, ours = read(scenario), {name: raw.astype(np.float64) for name, (_, raw) in read(result).items()}
    inputs = [given[name][1] for name in ("hidden_states", "positions", "request_ids")]
    residual = given["residual"][1] if "residual" in given else None

    def run(bf16):
        layers = Layers(family, config, weights, bf16=bf16)
        hidden, before, streams = layers.forward(*inputs, first, last, residual)
        out = {"hidden_states": hidden, "residual": before}
        out.update({f"taps.{first + k}": s for k, s in enumerate(streams)})
        norms = {config["num_hidden_layers"] - 1: "norm", config["num_hidden_layers"]: f"layers.{last}.shared_head.norm"}
        if last in norms and norms[last] + ".weight" in weights:
            out["final_hidden_states"] = layers.norm(streams[-1], norms[last])
        return out, layers.margins

    truth, margins = run(False)
    reference = run(True)[0] if not all_f32 else None
    failed = "final_hidden_states" in truth and "final_hidden_states" not in ours
    for name, values in ours.items():
        off, norm = np.linalg.norm(values - truth[name]), np.linalg.norm(truth[name])
        allowed = 1e-5 * norm if all_f32 else 1.5 * np.linalg.norm(reference[name] - truth[name])
        print(f"{name}: off by {off / norm:.2e} of its norm, allowed {allowed / norm:.2e}")
        failed |= not off <= allowed
    if margins and min(margins) < 1e-6:
        print("an expert was chosen by a hair: this scenario proves nothing")
        failed = True
    return failed


def same(a, b, tolerance):
    a, b = read(a), read(b)
    failed = a.keys() != b.keys()
    for name in a.keys() & b.keys():
        x, y = a[name][1].astype(np.float64), b[name][1].astype(np.float64)
        failed |= not np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)
    return failed


def main():
    verb, args = sys.argv[1], sys.argv[2:]
    if verb == "states":
        states(args[0], int(args[1]), [int(n) for n in args[2].split(",")], args[3:] == ["BF16"])
    elif verb == "compare":
        sys.exit(compare(args[0], args[1], args[2], int(args[3]), int(args[4])))
    elif verb == "same":
        sys.exit(same(args[0], args[1], float(args[2])))


main()
