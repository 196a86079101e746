"""Weights that k3pack encoded, against the libraries that define the formats. Usage: quantised.py K3PACK

Packages: torch, numpy, safetensors, compressed-tensors, nvidia-modelopt (with requests, tqdm, pulp, scipy, nvidia-ml-py, rich, regex, omegaconf).
Optional: llmcompressor, whose model-free path then makes the file with unshared scales; without it the same file is made with compressed-tensors.

1. "random tensors equal compressed-tensors' encoding byte for byte on F32 input": `convert --quant` and `export` give its bytes. Explained exceptions,
   counted: the scale of an all-zero MX block (ours 127, the library's 0) and codes 0 and 8 (plus and minus zero).
2. "and on BF16 within its stated tolerance (list every explained exception)". The library computes scales in the weights' dtype, we in F32, so from
   BF16 weights these differ, and nothing else; each is counted and printed:
     nvfp4            the second scale, by 2^-8 at most; then block scales, by one code; then codes, by one step (more only in blocks whose scales are
                      neighbouring subnormal E4M3 numbers, a factor of up to two apart)
     fp8, fp8-block   scales, by 2^-8 at most (the library stores them in BF16, we in F32; a region of zeros: 2^-7 there, 2^-23 here); then codes, by
                      one step (the library also rounds the quotient to BF16)
     mxfp4, mxfp8     none: powers of two are exact in BF16. The scale of an all-zero block as in 1
3. "files k3pack wrote are decompressed by compressed-tensors, and read by nvidia-modelopt and safetensors, to our values": those of the formats'
   definitions, and the error against the source is the one that `convert --json` told.
4. "on a file made by llm-compressor's model-free path (q_a and kv_a not shared) FUS02": `check --engine vllm` says so.
"""
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

from reference import library, ranges, scheme_of

K3PACK = sys.argv[1]
ROWS, COLS = 192, 256
failed = []


def expect(truth, what):
    if not truth:
        failed.append(what)
        print("FAILED:", what)


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def k3pack(*args, codes=(0,)):
    done = subprocess.run([K3PACK, *args], capture_output=True, text=True)
    assert done.returncode in codes, (args, done.returncode, done.stderr)
    return done


def random_weights(seed, dtype):
    """Gaussian weights over many binades with zero blocks, ties, both zeros and tiny values. The first column block keeps the largest magnitude."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((ROWS, COLS)).astype(np.float32) * 0.02
    w *= np.exp2(rng.integers(-7, 4, (ROWS, COLS // 32))).repeat(32, axis=1).astype(np.float32)
    w[1, :64], w[2, :32], w[3, :32] = 0.0, -0.0, w[3, :32] * np.float32(2.0**-13)
    w[4, :32] = np.resize(np.float32([6, .75, -.75, 1.75, -1.75, 3.5, -3.5, .25, -.25, 1.25, 2.5, 5, 0.0, -0.0, 1e-6, -1e-6]), 32)
    w[5] = 0.0
    return torch.from_numpy(w).to(dtype)


def nibbles(raw):
    raw = raw.numpy()
    return np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)


E2M1 = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6])


def defined(tensors, module, name):
    """Values by the definition of the format, in F32 and in the order of the libraries."""
    scale = tensors[module + ".weight_scale"]
    if name in ("nvfp4", "mxfp4"):
        codes = E2M1[nibbles(tensors[module + ".weight_packed"])]
    else:
        codes = tensors[module + ".weight"].to(torch.float32).numpy()
    if name == "nvfp4":
        scale = (scale.to(torch.float32) / tensors[module + ".weight_global_scale"]).numpy().repeat(16, 1)
    elif name.startswith("mx"):
        scale = np.exp2(scale.numpy().astype(np.float32) - 127).repeat(32, 1)
    elif name == "fp8-block":
        scale = scale.numpy().repeat(128, 0)[:codes.shape[0]].repeat(128, 1)[:, :codes.shape[1]]
    else:
        scale = scale.numpy()
    return codes * scale


def convert_and_export(work, weights, name, *more):
    source, image, out = (os.path.join(work, part) for part in ("source", "image.k3p", "out"))
    os.makedirs(source, exist_ok=True)
    save_file(weights, os.path.join(source, "model.safetensors"))
    json.dump({"model_type": "any"}, open(os.path.join(source, "config.json"), "w"))
    told = json.loads(k3pack("convert", source, "-o", image, "--recipe", "generic", "--quant", name, "--force", "--json", *more).stdout)
    k3pack("export", image, "-o", out, "--format", "compressed-tensors", "--force")
    return told["quant"], load_file(os.path.join(out, "model.safetensors")), image


def equal_bytes(work, name):
    weights = {f"m{i}.weight": random_weights(i, torch.float32) * (1 + i / 7) for i in range(12)}
    told, made, image = convert_and_export(work, weights, name)
    config = json.load(open(os.path.join(work, "out", "config.json")))["quantization_config"]
    stated, preset = QuantizationConfig.model_validate(config).config_groups["group_0"], scheme_of(name)
    expect(stated.format == preset.format, f"{name}: config.json says {stated.format}, the library writes {preset.format}")
    for key in ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "scale_dtype", "dynamic"):
        said, wanted = getattr(stated.weights, key), getattr(preset.weights, key)
        expect(said == wanted, f"{name}: config.json says {key} {said}, the library {wanted}")
    n_zero_blocks = n_zero_codes = n_bytes = 0
    for tensor, w in weights.items():
        module = tensor[:-len(".weight")]
        for param, theirs in library(w, name).items():
            ours = made[f"{module}.{param}"]
            a, b = ours.contiguous().view(torch.uint8).numpy().reshape(-1), theirs.contiguous().view(torch.uint8).numpy().reshape(-1)
            expect(list(ours.shape) == list(theirs.shape), f"{name} {param}: shape {list(ours.shape)}, the library's {list(theirs.shape)}")
            n_bytes += a.size
            differ = np.flatnonzero(a != b)
            if param == "weight_scale" and name.startswith("mx"):
                zero = (w.reshape(w.shape[0], -1, 32).abs().amax(2) == 0).numpy().reshape(-1)
                expect(all(zero[i] and a[i] == 127 for i in differ), f"{name}: scales of blocks that are not zero differ")
                n_zero_blocks += differ.size
            elif param in ("weight", "weight_packed"):
                masks = ((0x0F, 0x08), (0xF0, 0x80)) if param == "weight_packed" else ((0xFF, 0x80),)
                for mask, minus in masks:
                    odd = (a & mask) != (b & mask)
                    expect(np.all(((a[odd] & mask) | minus) == minus) and np.all(((b[odd] & mask) | minus) == minus), f"{name}: codes differ")
                    n_zero_codes += int(odd.sum())
            else:
                expect(differ.size == 0, f"{name} {param}: {differ.size} bytes differ")
        ours = defined(made, module, name)
        packed = {key[len(module) + 1:]: value for key, value in made.items() if key.startswith(module + ".")}
        back = BaseCompressor.get_value_from_registry(scheme_of(name).format).decompress(packed, scheme_of(name))["weight"].to(torch.float32).numpy()
        # The library decodes in the dtype of its scales: BF16 for MX formats and NVFP4.
        rounded = torch.from_numpy(ours).to(torch.bfloat16).to(torch.float32).numpy()
        expect(np.array_equal(back, ours) or np.array_equal(back, rounded), f"{name}: compressed-tensors decodes to other values")
        error = relative_rmse(ours, w.numpy())
        said = next(t["relative_rmse"] for t in told["tensors"] if t["tensor"] == tensor)
        expect(abs(said - error) < 1e-9, f"{name}: convert says a relative RMSE of {said}, it is {error}")
    print(f"{name}: {n_bytes} bytes as compressed-tensors on F32; explained: {n_zero_blocks} scales of zero blocks, {n_zero_codes} signs of zero")


def steps_apart(a, b, bits):
    """How many representable values lie between codes of E2M1 (4 bits) or E4M3 (8): 1 for neighbours, plus and minus zero are one value."""
    half = 1 << (bits - 1)
    line = [np.where(c >= half, half - c.astype(int), c.astype(int)) for c in (a, b)]
    return np.abs(line[0] - line[1])


def relative_rmse(values, w):
    return float(np.sqrt(((values.astype(np.float64) - w) ** 2).sum() / (w.astype(np.float64) ** 2).sum()))


def bf16_tolerance(work, name):
    """From BF16 weights the library computes scales (and FP8 quotients) in BF16, we in F32. Whatever differs must be one of these, and is counted."""
    weights = {f"m{i}.weight": (random_weights(i + 10, torch.float32) * 1.07).to(torch.bfloat16) for i in range(2)}
    _, made, _ = convert_and_export(work, weights, name)
    n_scales = n_codes = n_zero = 0
    worst, errors = 0.0, [[], []]
    for tensor, w in weights.items():
        module, theirs = tensor[:-len(".weight")], library(w, name)
        if name == "nvfp4":  # 2688 / amax in BF16; block scales by it, off by one code at most
            worst = max(worst, abs(float(made[module + ".weight_global_scale"] / theirs["weight_global_scale"]) - 1))
        a, b = made[module + ".weight_scale"], theirs["weight_scale"]
        if a.dtype == torch.float32:  # amax / 448 in BF16, which is also what the library stores; 2^-7 and not 2^-23 where all weights are zero
            b, dead = b.to(torch.float32), ranges(w, name)[1] == 0
            worst = max(worst, float((a / b - 1)[~dead].abs().max()))
            expect(bool((a[dead] == 2.0**-23).all() and (b[dead] == 2.0**-7).all()), f"{name} on BF16: the scale of a dead region")
            n_scales, n_zero = n_scales + int((a != b)[~dead].sum()), n_zero + int(dead.sum())
            far = np.zeros(w.shape, bool)
        else:
            a, b = (t.contiguous().view(torch.uint8).numpy().astype(int) for t in (a, b))
            zero = (w.reshape(w.shape[0], a.shape[1], -1).abs().amax(2) == 0).numpy()
            n_zero += int(((a != b) & zero).sum())
            expect(np.abs(a - b)[~zero].max() <= (1 if name == "nvfp4" else 0), f"{name} on BF16: a block scale is off by more than one code")
            n_scales += int(((a != b) & ~zero).sum())
            # Neighbouring subnormal scales are a factor of up to two apart, and the codes accordingly.
            far = ((a != b) & (np.minimum(a, b) < 8)).repeat(w.shape[1] // a.shape[1], 1)
        if name in ("nvfp4", "mxfp4"):
            steps = steps_apart(nibbles(made[module + ".weight_packed"]), nibbles(theirs["weight_packed"]), 4)
        else:
            steps = steps_apart(*(t.view(torch.uint8).numpy() for t in (made[module + ".weight"], theirs["weight"])), 8)
        expect(steps[~far].max() <= 1, f"{name} on BF16: a code is off by {steps[~far].max()} steps")
        n_codes += int((steps > 0).sum())
        wide = w.to(torch.float32).numpy()
        errors[0].append(relative_rmse(defined(made, module, name), wide))
        widened = {f"{module}.{key}": value.to(torch.float32) if value.dtype == torch.bfloat16 else value for key, value in theirs.items()}
        errors[1].append(relative_rmse(defined(widened, module, name), wide))
    expect(worst <= 2**-8, f"{name} on BF16: a scale is off by {worst}")
    if name.startswith("mx"):
        expect(n_scales == 0 and n_codes == 0, f"{name} on BF16: {n_scales} scales and {n_codes} codes differ, powers of two are exact in BF16")
    print(f"{name} on BF16: explained: F32 scales within {worst:.1e} of the library's, {n_scales} scales and {n_zero} of zero blocks differ, "
          f"{n_codes} codes of {sum(w.numel() for w in weights.values())} are the neighbour; relative RMSE {max(errors[0]):.5f}, "
          f"the library's {max(errors[1]):.5f}")


def modelopt_reads(work):
    weights = {"m0.weight": random_weights(20, torch.float32)}
    _, made, image = convert_and_export(work, weights, "nvfp4", "--scale-mode", "pow2")
    out = os.path.join(work, "modelopt")
    k3pack("export", image, "-o", out, "--format", "modelopt", "--force")
    theirs = load_file(os.path.join(out, "model.safetensors"))
    packed = NVFP4QTensor(torch.Size((ROWS, COLS)), torch.float32, theirs["m0.weight"])
    back = packed.dequantize(torch.float32, scale=theirs["m0.weight_scale"], double_scale=theirs["m0.weight_scale_2"], block_sizes={-1: 16})
    expect(np.array_equal(back.numpy(), defined(made, "m0", "nvfp4")), "ModelOpt decodes to other values")
    own, scale, scale_2 = NVFP4QTensor.quantize(weights["m0.weight"].clone(), 16)
    k3pack("convert", os.path.join(work, "source"), "-o", image, "--recipe", "generic", "--quant", "nvfp4", "--force")
    k3pack("export", image, "-o", out, "--format", "modelopt", "--force")
    theirs = load_file(os.path.join(out, "model.safetensors"))
    a, b = theirs["m0.weight_scale"].view(torch.uint8).numpy(), scale.view(torch.uint8).numpy().reshape(ROWS, -1)
    dead = a == 0x20  # ModelOpt's byte for these is 0x38, or 0x01 where the block is merely tiny
    expect(np.array_equal(a[~dead], b[~dead]), "ModelOpt's own block scales differ beyond dead blocks")
    expect(abs(float(theirs["m0.weight_scale_2"]) / float(scale_2) - 1) < 2**-22, "ModelOpt's own second scale differs")
    codes_a, codes_b = nibbles(theirs["m0.weight"]), nibbles(own._quantized_data)
    alive = ~dead.repeat(16, 1)
    n_other = int(((codes_a != codes_b) & alive & ~((codes_a & 7 == 0) & (codes_b & 7 == 0))).sum())
    expect(n_other <= codes_a.size // 2000, f"{n_other} codes differ from ModelOpt's own")
    print(f"modelopt: reads our file to our values; its own encoding differs in {int(dead.sum())} dead blocks and {n_other} codes on a tie's edge")


def unshared_scales(work):
    """q_a_proj and kv_a_proj_with_mqa each with a scale of its own."""
    draft, out = os.path.join(work, "draft"), os.path.join(work, "unshared")
    k3pack("synth", draft, "--preset", "tiny", "--quiet")
    ignore = ["re:.*kv_b_proj$", "re:.*markov_head.*", "re:.*confidence_head.*", "re:.*embed_tokens$", "re:.*lm_head$"]
    try:
        from llmcompressor import model_free_ptq
        model_free_ptq(model_stub=draft, save_directory=out, scheme="NVFP4A16", ignore=ignore, device="cpu")
        how = "llm-compressor " + importlib.metadata.version("llmcompressor")
    except ImportError:
        os.makedirs(out, exist_ok=True)
        tensors = {}
        for name, w in load_file(os.path.join(draft, "model.safetensors")).items():
            kept = w.dim() != 2 or any(part in name for part in ("kv_b_proj", "markov_head", "confidence_head", "embed_tokens"))
            if kept:
                tensors[name] = w
            else:
                tensors.update({f"{name[:-len('.weight')]}.{param}": value for param, value in library(w, "nvfp4").items()})
        save_file(tensors, os.path.join(out, "model.safetensors"))
        config = json.load(open(os.path.join(draft, "config.json")))
        scheme = json.loads(scheme_of("nvfp4").model_dump_json())
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
                                         "config_groups": {"group_0": scheme}, "ignore": ignore}
        json.dump(config, open(os.path.join(out, "config.json"), "w"))
        how = "compressed-tensors, module by module"
        print("WITHOUT LLM-COMPRESSOR: it is not installed, so the file with unshared scales is made by compressed-tensors, module by module")
    said = k3pack("check", out, "--engine", "vllm", codes=(0, 1)).stderr
    expect("FUS02" in said, f"unshared scales by {how}: no FUS02 in {said}")
    print(f"unshared scales by {how}: FUS02")


def main():
    packages = ("torch", "compressed-tensors", "nvidia-modelopt", "llmcompressor", "safetensors", "numpy")
    print("with " + ", ".join(f"{p} {version_of(p)}" for p in packages))
    torch.manual_seed(0)
    for name in ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-block"):
        with tempfile.TemporaryDirectory() as work:
            equal_bytes(work, name)
        with tempfile.TemporaryDirectory() as work:
            bf16_tolerance(work, name)
    for step in (modelopt_reads, unshared_scales):
        with tempfile.TemporaryDirectory() as work:
            step(work)
    print("FAILED" if failed else "passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
