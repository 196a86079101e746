#!/usr/bin/env python3
# Changes one thing in a checkpoint folder, the way a faulty exporter would. Needs Python 3.8 and nothing else.
#   edit_checkpoint.py FOLDER rename OLD NEW            a tensor, in its shard and in the index
#   edit_checkpoint.py FOLDER reshape NAME 8,3          another shape of as many elements
#   edit_checkpoint.py FOLDER to-bf16 NAME              an F32 tensor, cut to its upper halves
#   edit_checkpoint.py FOLDER to-i16 NAME               a 16-bit tensor, called I16
#   edit_checkpoint.py FOLDER fill NAME DTYPE 8,3 HEX   another dtype and shape, the bytes over and over (HEX: one element)
#   edit_checkpoint.py FOLDER move NAME SHARD           to another shard of the folder
#   edit_checkpoint.py FOLDER poke NAME BYTE HEX        bytes of a tensor
#   edit_checkpoint.py FOLDER drop NAME                 a tensor, from its shard and the index
#   edit_checkpoint.py FOLDER copy OLD NEW              a second tensor with the same bytes, in the same shard
#   edit_checkpoint.py FOLDER equal NAME OTHER          the bytes of another tensor, in whichever shard that is
#   edit_checkpoint.py FOLDER set PATH JSON             a field of config.json ("a.b" goes down); JSON "-" removes it
import json
import math
import os
import struct
import sys


def load(path):
    with open(path, "rb") as file:
        raw = file.read()
    h = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + h])
    metadata = header.pop("__metadata__", None)
    order = sorted(header, key=lambda name: header[name]["data_offsets"][0])
    tensors = {name: [header[name]["dtype"], header[name]["shape"], raw[8 + h:][slice(*header[name]["data_offsets"])]] for name in order}
    return metadata, tensors


def save(path, metadata, tensors):
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, (dtype, shape, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def edit_config(folder, path, value):
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    if value == "-":
        del place[last]
    else:
        place[last] = json.loads(value)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)


def bytes_of(folder, name):
    for shard in sorted(os.listdir(folder)):
        if shard.endswith(".safetensors"):
            tensors = load(os.path.join(folder, shard))[1]
            if name in tensors:
                return tensors[name][2]
    sys.exit("no tensor " + name)


def edit_tensor(folder, verb, name, args):
    for shard in sorted(os.listdir(folder)):
        if not shard.endswith(".safetensors"):
            continue
        metadata, tensors = load(os.path.join(folder, shard))
        if name not in tensors:
            continue
        dtype, shape, value = tensors[name]
        if verb == "rename":
            tensors = {args[0] if n == name else n: t for n, t in tensors.items()}
        elif verb == "reshape":
            tensors[name][1] = [int(x) for x in args[0].split(",")]
        elif verb == "to-bf16":
            tensors[name] = ["BF16", shape, b"".join(value[i + 2:i + 4] for i in range(0, len(value), 4))]
        elif verb == "to-i16":
            tensors[name][0] = "I16"
        elif verb == "fill":
            new_shape = [int(x) for x in args[1].split(",")]
            tensors[name] = [args[0], new_shape, bytes.fromhex(args[2]) * math.prod(new_shape)]
        elif verb == "move":
            moved = load(os.path.join(folder, args[0]))
            moved[1][name] = tensors.pop(name)
            save(os.path.join(folder, args[0]), *moved)
        elif verb == "poke":
            at, new = int(args[0]), bytes.fromhex(args[1])
            tensors[name][2] = value[:at] + new + value[at + len(new):]
        elif verb == "drop":
            del tensors[name]
        elif verb == "equal":
            tensors[name][2] = bytes_of(folder, args[0])
        elif verb == "copy":
            tensors[args[0]] = [dtype, shape, value]
        else:
            sys.exit("no verb " + verb)
        save(os.path.join(folder, shard), metadata, tensors)
        for document in os.listdir(folder):
            if document.endswith(".index.json") and verb in ("rename", "copy", "drop", "move"):
                with open(os.path.join(folder, document)) as file:
                    index = json.load(file)
                if verb == "move":
                    index["weight_map"][name] = args[0]
                elif verb != "drop":
                    index["weight_map"][args[0]] = index["weight_map"][name]
                if verb not in ("copy", "move"):
                    del index["weight_map"][name]
                with open(os.path.join(folder, document), "w") as file:
                    json.dump(index, file)
        return
    sys.exit("no tensor " + name)


def main():
    folder, verb, name, *args = sys.argv[1:]
    if verb == "set":
        edit_config(folder, name, args[0])
    else:
        edit_tensor(folder, verb, name, args)


if __name__ == "__main__":
    main()
