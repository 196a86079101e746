"""Holds the folder of `convert --tp N` against the whole image of the same checkpoint. Usage: split_equals_whole.py WHOLE FOLDER N

Needs no package. What every rank shares must be in shared.safetensors with the same bytes; of everything else, the ranks' parts put together must be
the whole: rows one after another (of gate and up each on their own), columns side by side. Says how many tensors it compared.
"""
import json
import re
import sys

COLUMN = re.compile(r"\.(q_b_proj|kv_b_proj)\.|^lm_head\.")  # rows of the output
STACKED = re.compile(r"\.gate_up_proj\.")                      # two members, each cut on its own
ROW = re.compile(r"\.(o_proj|down_proj)\.")                    # columns of the input


def read(path):
    data = open(path, "rb").read()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]]) for k, v in header.items()}


def rows(tensor):
    _, shape, data = tensor
    n = shape[0]
    size = len(data) // n
    return [data[i * size : (i + 1) * size] for i in range(n)]


def halves(parts):
    return parts[: len(parts) // 2], parts[len(parts) // 2 :]


def joined(name, parts):
    """The whole tensor's rows from the ranks' parts, or one part where all hold the same."""
    lists = [rows(p) for p in parts]
    whole_everywhere = all(p == parts[0] for p in parts)
    if name.endswith(("global_scale", "input_scale")) or (name.endswith("weight_scale") and len(parts[0][1]) == 1):
        assert whole_everywhere, f"{name}: a scale of the tensor differs between ranks"
        return lists[0]
    if STACKED.search(name):
        pairs = [halves(x) for x in lists]
        return sum((a for a, _ in pairs), []) + sum((b for _, b in pairs), [])
    if ROW.search(name):
        if name.endswith("weight_scale") and parts[0][1][1] == 1 and whole_everywhere:
            return lists[0]  # one scale for each row
        return [b"".join(x[i] for x in lists) for i in range(len(lists[0]))]
    return sum(lists, [])


def main():
    whole, folder, n = read(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    shared = read(f"{folder}/shared.safetensors")
    ranks = [read(f"{folder}/rank-{r}-of-{n}.safetensors") for r in range(n)]
    n_shared = n_split = 0
    for name, tensor in whole.items():
        if name.startswith("__"):
            continue
        if COLUMN.search(name) or STACKED.search(name) or ROW.search(name):
            assert name not in shared, f"{name} is split and shared"
            assert all(name in r for r in ranks), f"{name} is missing on a rank"
            got = joined(name, [r[name] for r in ranks])
            assert b"".join(got) == tensor[2], f"{name}: the parts are not the whole"
            assert all(r[name][0] == tensor[0] for r in ranks), f"{name}: another dtype"
            n_split += 1
        else:
            assert shared.get(name) == tensor, f"{name}: not in the shared file, or other bytes"
            assert not any(name in r for r in ranks), f"{name} is shared and on a rank"
            n_shared += 1
    extra = {k for f in ranks + [shared] for k in f if not k.startswith("__")} - set(whole)
    assert not extra, f"more than the whole holds: {extra}"
    print(f"{n_shared} shared, {n_split} split")
    assert n_split > 0 and n_shared > 0


main()
