# Opens an image with the safetensors library and compares it with the checkpoint it was made from, tensor by tensor. The renaming and stacking rules of
# the drafter are written here a second time, by hand. Needs numpy and safetensors.
#   python3 image_equals_sources.py CHECKPOINT IMAGE [TARGET]
import json
import os
import re
import sys

from safetensors import safe_open


def open_all(path):
    """name -> raw bytes view and (dtype, shape), read by the library, of a folder or a file."""
    files = [path] if os.path.isfile(path) else [os.path.join(path, f) for f in sorted(os.listdir(path)) if f.endswith(".safetensors")]
    tensors = {}
    for file in files:
        with safe_open(file, framework="numpy") as st:  # the whole validation of the library
            names = list(st.keys())
        with open(file, "rb") as f:
            h = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(h))
            for name in names:
                entry = header[name]
                begin, end = entry["data_offsets"]
                f.seek(8 + h + begin)
                assert name not in tensors, name
                tensors[name] = (entry["dtype"], entry["shape"], f.read(end - begin))
    return tensors


def place(name):
    """Where a source tensor goes: image name, order within it."""
    name = re.sub(r"^model\.", "", name)
    if name.startswith("lm_head."):
        return name, 0
    name = re.sub(r"^fc\.", "context_proj.", name)
    name = re.sub(r"^hidden_norm\.", "context_norm.", name)
    name = re.sub(r"^norm\.", "final_norm.", name)
    for piece, into, order in (
        (".self_attn.q_a_proj.", ".self_attn.fused_qkv_a_proj.", 0),
        (".self_attn.kv_a_proj_with_mqa.", ".self_attn.fused_qkv_a_proj.", 1),
        (".mlp.gate_proj.", ".mlp.gate_up_proj.", 0),
        (".mlp.up_proj.", ".mlp.gate_up_proj.", 1),
    ):
        if piece in name:
            return "model." + name.replace(piece, into), order
    return "model." + name, 0


def main():
    source, image = open_all(sys.argv[1]), open_all(sys.argv[2])
    made = {}
    for name, (dtype, shape, data) in source.items():
        target, order = place(name)
        made.setdefault(target, []).append((order, dtype, shape, data))
    if len(sys.argv) > 3:
        for name, value in open_all(sys.argv[3]).items():
            for borrowed, target in (("language_model.lm_head.weight", "lm_head.weight"), ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight")):
                if name == borrowed and target not in made:
                    made[target] = [(0,) + value]
    n = 0
    for target, parts in made.items():
        parts.sort(key=lambda part: part[0])
        dtype, shape, data = image[target]
        assert all(part[1] == dtype for part in parts), target
        assert shape == [sum(part[2][0] for part in parts)] + parts[0][2][1:], (target, shape)
        assert data == b"".join(part[3] for part in parts), target
        n += len(parts)
    extra = [name for name in image if name not in made and not name.startswith("__")]
    assert not extra, extra
    # Zero copy: the stacked cross-layer projection has no tensor of its own, and no source byte stands in the image twice.
    assert not any("context_kv_proj" in name for name in image)
    assert sum(len(v[2]) for k, v in image.items() if not k.startswith("__")) == sum(len(part[3]) for parts in made.values() for part in parts)
    print(f"{n} source tensors are in {len(made)} image tensors, byte for byte")


main()
