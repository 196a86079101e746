# Checks the layout of packed images with nothing but the standard library: alignment, order, names, pads, tables, seal, manifest. It shares no code and
# no constant with the program; what it asserts is the description of the format in the README and formats/manifest.h, written a second time.
#   python3 image_layout.py IMAGE...
#   python3 image_layout.py --break WHAT IMAGE COPY   checks a copy in which one thing is off and the seal is right again: it must fail
import hashlib
import json
import re
import sys
import zlib

PAGE, SEGMENT, SMALL, LARGE = 4096, 4 << 20, 4 << 10, 1 << 20
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16}
BITS |= {"BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}


def no_duplicates(pairs):
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), "a key twice"
    return dict(pairs)


def load(text):
    return json.loads(text, object_pairs_hook=no_duplicates)


def n_elements(shape):
    n = 1
    for d in shape:
        n *= d
    return n


def check(path):
    with open(path, "rb") as f:
        whole = f.read()
    h = int.from_bytes(whole[:8], "little")
    begin = 8 + h
    text = whole[8:begin]
    assert begin % PAGE == 0, f"data begins at {begin}"
    assert len(whole) % PAGE == 0, f"{len(whole)} bytes"
    assert text[:1] == b"{" and text.rstrip(b" ")[-1:] == b"}", "the header is padded with something else than spaces"
    header = load(text)
    metadata = header.pop("__metadata__")
    assert set(metadata) == {"format", "k3pack", "recipe", "tool"}, metadata
    assert metadata["format"] == "pt" and metadata["k3pack"] == "1" and all(isinstance(v, str) for v in metadata.values()), metadata

    # Every byte belongs to exactly one tensor of the right size.
    at, tensors = 0, []
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        a, b = t["data_offsets"]
        assert a == at, f"{name} begins at {a}, the tensor before it ends at {at}"
        assert n_elements(t["shape"]) * BITS[t["dtype"]] == 8 * (b - a), name
        tensors.append((name, t["dtype"], t["shape"], begin + a, begin + b))
        at = b
    assert begin + at == len(whole), "bytes behind the last tensor"
    place = {t[0]: t for t in tensors}

    def data(name):
        return whole[place[name][3] : place[name][4]]

    # The front: manifest, tables, pad, seal, which ends on a page and hashes all before it.
    names = [t[0] for t in tensors]
    front = names[: names.index("__seal__") + 1]
    expected = ["__k3pack__", "__digests__"] + (["__crc32__"] if "__crc32__" in names else [])
    assert [n for n in front if not n.startswith("__pad__.")] == expected + ["__seal__"], front
    seal_begin, body = place["__seal__"][3:]
    assert body - seal_begin == 32 and body % PAGE == 0, f"the seal ends at {body}"
    assert hashlib.sha256(whole[:seal_begin]).digest() == data("__seal__"), "the seal is wrong"
    m = -(-(len(whole) - body) // SEGMENT)
    segments = [whole[body + i * SEGMENT : body + (i + 1) * SEGMENT] for i in range(m)]
    assert place["__digests__"][1:3] == ("U8", [m, 32]), place["__digests__"]
    manifest_text = data("__k3pack__").rstrip(b" ")
    manifest = load(manifest_text)
    if any(data("__digests__")):
        assert data("__digests__") == b"".join(hashlib.sha256(s).digest() for s in segments), "a digest is wrong"
    else:
        assert manifest.get("digests") is False, "digests of zeros that the manifest does not announce"
    if "__crc32__" in names:
        assert place["__crc32__"][1:3] == ("U8", [m, 4]), place["__crc32__"]
        assert data("__crc32__") == b"".join(zlib.crc32(s).to_bytes(4, "little") for s in segments), "a CRC is wrong"

    # Behind it: small tensors (wide types first, then those of a view, then by name), large ones, last the sources; pads are zeros and bear consecutive numbers.
    pads = [n for n in names if n.startswith("__pad__.")]
    assert sorted(pads, key=lambda n: int(n[8:])) == [f"__pad__.{i}" for i in range(len(pads))], pads
    for name in pads:
        assert place[name][1] == "U8" and not any(data(name)), name
    rest = [t for t in tensors if t[3] >= body and t[0] != "__seal__" and not t[0].startswith("__pad__.")]
    kinds = [2 if t[0].startswith("__source__.") else int(t[4] - t[3] >= SMALL) for t in rest]
    assert kinds == sorted(kinds), "small tensors, large tensors and sources are mixed"
    small, large = ([t for t, k in zip(rest, kinds) if k == kind] for kind in (0, 1))
    viewed = {s["tensor"] for shards in manifest.get("views", {}).values() for s in shards}
    order = [(-BITS[t[1]], t[0] not in viewed, b"" if t[0] in viewed else t[0].encode()) for t in small]
    assert order == sorted(order), "the small tensors have another order"
    assert all(a[4] == b[3] for a, b in zip(small, small[1:])), "a gap between small tensors"
    assert not small or small[0][3] % 256 == 0, "the small tensors begin off the alignment"
    for name, _, _, a, b in large:
        assert a % (PAGE if b - a >= LARGE else 256) == 0, f"{name} of {b - a} bytes begins at {a}"

    # The manifest: sorted keys, small, every shard and view within its tensor, the members of a view at one stride.
    assert len(manifest_text) < 1 << 20, f"a manifest of {len(manifest_text)} bytes"
    canonical = json.dumps(manifest, sort_keys=True)
    assert canonical == json.dumps(manifest), "unsorted keys"
    assert manifest["image_version"] == 1 and manifest["tool"] == metadata["tool"] and manifest["recipe"]["name"] == metadata["recipe"]
    assert re.fullmatch("[0-9a-f]{64}", manifest["recipe"]["sha256"])
    n_views = 0
    for view, shards in manifest.get("views", {}).items():
        n_views += 1
        assert view not in header, f"{view} is a view and a tensor"
        rows, starts = 0, []
        assert [s["id"] for s in shards] == list(range(len(shards))), view
        for s in shards:
            _, dtype, shape, a, b = place[s["tensor"]]
            assert 0 <= s["row"] and s["n_rows"] > 0 and s["row"] + s["n_rows"] <= shape[0], s
            assert (dtype, shape[1:]) == (place[shards[0]["tensor"]][1], place[shards[0]["tensor"]][2][1:]), s
            starts.append(a + s["row"] * ((b - a) // shape[0]))
            rows += s["n_rows"]
        assert len({b - a for a, b in zip(starts, starts[1:])}) <= 1, f"{view}: strides {starts}"
        tensors_of_view = [names.index(s["tensor"]) for s in shards]
        between = [n for n in names[tensors_of_view[0] : tensors_of_view[-1]] if not n.startswith("__pad__.")]
        assert between == [s["tensor"] for s in shards[:-1]], f"{view}: {between}"
    print(f"{path}: {len(names)} tensors, {len(pads)} pads, {m} segments, {n_views} views, a manifest of {len(manifest_text)} bytes")
    return len(rest)


def damage(what, image, copy):
    with open(image, "rb") as f:
        whole = bytearray(f.read())
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = load(bytes(whole[8:begin]))
    at = {name: begin + t["data_offsets"][0] for name, t in header.items() if name != "__metadata__"}
    end = {name: begin + t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"}

    def swap(old, new, first, last):
        assert len(old) == len(new) and whole[first:last].count(old) >= 1, (old, new)
        whole[first:last] = whole[first:last].replace(old, new, 1)

    if what == "pad":  # a byte in the last of them
        whole[end[max((n for n in at if n.startswith("__pad__.")), key=lambda n: at[n])] - 1] = 1
    elif what == "order":  # two small tensors of one shape change names
        swap(b"model.layers.0.input_layernorm.weight", b"model.layers.9.input_layernorm.weight", 8, begin)
    elif what == "view":  # the first shard begins a row early
        swap(b'"row":32,"tensor"', b'"row":31,"tensor"', at["__k3pack__"], end["__k3pack__"])
    elif what == "header":  # a name of a large tensor that is one of the format's own
        swap(b'"model.context_proj.weight"', b'"__pad__.99999999999999999"', 8, begin)
    body = end["__seal__"]
    for i in range((end["__digests__"] - at["__digests__"]) // 32):
        whole[at["__digests__"] + 32 * i : at["__digests__"] + 32 * i + 32] = hashlib.sha256(whole[body + i * SEGMENT : body + (i + 1) * SEGMENT]).digest()
    whole[at["__seal__"] : body] = hashlib.sha256(whole[: at["__seal__"]]).digest()
    if what == "seal":
        whole[at["__seal__"]] ^= 1
    elif what == "digest":
        whole[-1] ^= 1
    with open(copy, "wb") as f:
        f.write(whole)


if __name__ == "__main__":
    if sys.argv[1] == "--break":
        damage(*sys.argv[2:5])
        check(sys.argv[4])
    else:
        for image in sys.argv[1:]:
            check(image)
