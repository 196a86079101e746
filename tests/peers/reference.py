"""What compressed-tensors stores for a weight: its own quantisation and packing, called as its users do. For quantised.py and the benchmark."""
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam


def scheme_of(name):
    def float8(strategy, **more):
        return QuantizationScheme(targets=["Linear"], format="float-quantized",
                                  weights=QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more))
    made = {"nvfp4": lambda: preset_name_to_scheme("NVFP4A16", ["Linear"]), "mxfp4": lambda: preset_name_to_scheme("MXFP4A16", ["Linear"]),
            "mxfp8": lambda: preset_name_to_scheme("MXFP8", ["Linear"]), "fp8": lambda: float8("channel"),
            "fp8-block": lambda: float8("block", block_structure=[128, 128])}[name]()
    made.format = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}.get(name, "float-quantized")
    return made


def ranges(w, name):
    if name == "fp8":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if name == "fp8-block":
        padded = torch.zeros(-(-w.shape[0] // 128) * 128, -(-w.shape[1] // 128) * 128, dtype=w.dtype)
        padded[:w.shape[0], :w.shape[1]] = w
        tiles = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    tiles = w.reshape(w.shape[0], -1, 16 if name == "nvfp4" else 32)
    return tiles.amin(2), tiles.amax(2)


def library(w, name):
    """Parameter name -> tensor."""
    scheme = scheme_of(name)
    gparam = generate_gparam(w.min(), w.max()) if name == "nvfp4" else None
    scale, _ = calculate_qparams(*ranges(w, name), scheme.weights, global_scale=gparam)
    state = {"weight": w, "weight_scale": scale}
    if gparam is not None:
        state["weight_global_scale"] = gparam
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
