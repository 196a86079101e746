#!/usr/bin/env python3
"""Our header reader against the reference reader over generated files: both must accept the same files and read the same tensors, except for the
differences listed in STRICTER and LENIENT, each with its reason. A difference that is on neither list, or a list entry that never occurs, fails.

Needs Python 3.8 and the package safetensors (PyPI). Usage: diff_safetensors.py READ_HEADERS [--count N] [--seed S]
"""
import argparse
import json
import random
import re
import struct
import subprocess
import sys

try:
    import safetensors
except ImportError:
    print("the Python package safetensors is not installed")
    sys.exit(77)

# What we refuse and the reference accepts: rule, pattern of our message, reason.
STRICTER = [
    ("CNT02", r"at byte 0: (found byte 0x20|found byte 0x0A|found byte 0x09|found byte 0x0D)",
     "white space before the first brace: the README says that the header begins with {"),
    ("CNT07", r"names this tensor twice", "a name twice with equal spans: the README forbids duplicate keys"),
    ("CNT07", r"the key .* occurs twice", "a key of __metadata__ twice: the README forbids duplicate keys"),
    ("CNT05", r"dimension \d+ is \d+", "a dimension above 2^40 beside a zero has no honest use"),
    ("CNT05", r"the size of shape .* overflows", "the reference multiplies from the left, so that [0, big, big] passes and [big, big, 0] does not"),
    ("CNT05", r"more than 16 dimensions", "no tensor has as many; a bound keeps every table fixed in size"),
    ("CNT05", r"the entry is no object", "the reference's JSON library also takes [dtype, shape, offsets] for the object"),
    ("CNT12", r"name is empty", "a tensor without a name cannot be spoken of"),
    ("CNT12", r"control character", "such names steer terminals and end C strings"),
    ("CNT12", r"name of \d+ bytes", "names above 4096 bytes"),
    ("CNT05", r"in a header that names a tensor twice", "a bad entry that a later one of the same name hides: the reference keeps the last"),
    ("CNT02", r"nested too deeply", "unknown values may nest 64 deep, in the reference 127"),
]
# What we accept and the reference refuses: pattern of its message, reason.
LENIENT = [
    (r"number out of range", "a number in an unknown field that no double holds: the field is ignored, so its value is not looked at"),
    (r"^odd metadata", "__metadata__ that holds something else than texts is a warning (CNT08): the weights are unharmed"),
]

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
NAMES = ["a", "b", "weight", "model.layers.0.q", "é", "日本", "😀", "a b", "a/b", "__metadata___", "\u202e", "x" * 70, "quote\"", "back\\slash"]
ODD_NAMES = ["", "\n", "\x00", "a\x1b", "\x7f", "\u0085", "n" * 4096, "n" * 4097, "__metadata__"]
ODD_DIMS = ["-1", "1.0", "1e0", "-0", "01", '"1"', "null", "true", "[]", str(2**53 + 1), str(2**63), str(2**64), str(2**40), str(2**40 + 1), "0", "+1", ""]
ODD_METADATA = ["null", "{}", '{"a":"b"}', '{"a":1}', '{"a":null}', "[]", '"x"', "3", '{"a":"1","a":"2"}', '{"a":"1","\\u0061":"2"}', '{"a":{}}', "true", '{"a":"\\u00e9"}']


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def chance(self, p):
        return self.random.random() < p

    def quoted(self, text):
        """A JSON string, sometimes with needless escapes."""
        out = json.dumps(text, ensure_ascii=self.chance(0.3))
        if self.chance(0.2) and text and ord(text[0]) < 0x80 and text[0] not in '"\\':
            out = '"\\u%04x' % ord(text[0]) + json.dumps(text[1:])[1:]
        return out

    def space(self):
        return self.random.choice(["", "", "", "", " ", "\n", "\t\r"])

    def entry(self, dtype, dims, begin, end, odd):
        r = self.random
        shape = "[" + ",".join(dims) + "]"
        offsets = "[%s,%s]" % (begin, end)
        fields = [["dtype", json.dumps(dtype)], ["shape", shape], ["data_offsets", offsets]]
        r.shuffle(fields)
        if odd:
            kind = r.randrange(12)
            if kind == 0:
                fields.pop()
            elif kind == 1:
                fields.append(list(r.choice(fields)))
            elif kind == 2:
                fields.append(["new", r.choice(["1", "null", '{"a":[1,2.5e3]}', "[" * 70 + "]" * 70, "[" * 140 + "]" * 140, '"\\ud800"', "1e999", "01"])])
            elif kind == 3:
                return "[%s,%s,%s]" % (json.dumps(dtype), shape, offsets)
            elif kind == 4:
                return r.choice(["null", "1", "{}", "[]", '"x"'])
            elif kind == 5:
                fields = [[k, r.choice(["F9", "f32", "", 3]) if k == "dtype" else v] for k, v in fields]
                fields = [[k, v if isinstance(v, str) and v[:1] in '"[' else json.dumps(v)] for k, v in fields]
            elif kind == 6:
                fields = [[k, r.choice(["[%s]" % begin, "[%s,%s,%s]" % (begin, end, end), "[%s,%s]" % (end, begin), "{}", "null"]) if k == "data_offsets" else v]
                          for k, v in fields]
            else:
                where = r.randrange(len(dims) + 1)
                with_odd = dims[:where] + [r.choice(ODD_DIMS)] + dims[where + r.randrange(2):]
                if kind == 11:
                    with_odd = dims + ["1"] * r.randrange(12, 18)
                if kind == 10:
                    with_odd = ["0", str(2**40), str(2**40)][:: r.choice([1, -1])]
                    fields = [[k, "[%s,%s]" % (begin, begin) if k == "data_offsets" else v] for k, v in fields]
                fields = [[k, "[" + ",".join(with_odd) + "]" if k == "shape" else v] for k, v in fields]
        s = self.space
        return "{" + ",".join(s() + self.quoted(k) + s() + ":" + s() + v + s() for k, v in fields) + "}"

    def file(self):
        r = self.random
        odd_file = self.chance(0.7)
        names = r.sample(NAMES, r.randrange(0, 5))
        if odd_file and self.chance(0.15):
            names.append(r.choice(ODD_NAMES))
        if odd_file and names and self.chance(0.15):
            names.append(r.choice(names))
        tensors, at = [], 0
        for name in names:
            dtype = r.choice(list(BITS))
            dims = [r.choice([0, 1, 2, 3, 4, 8]) for _ in range(r.randrange(0, 4))]
            n_bits = BITS[dtype]
            for d in dims:
                n_bits *= d
            if n_bits % 8 and not (odd_file and self.chance(0.2)):
                dtype, n_bits = "U8", n_bits // BITS[dtype] * 8
            begin, end = at, at + n_bits // 8
            at = end
            if odd_file and self.chance(0.05):
                begin += r.choice([-1, 1])
            if odd_file and self.chance(0.05):
                end += r.choice([-1, 1, 2**64])
            if odd_file and tensors and self.chance(0.05):
                begin, end, at = tensors[-1][3], tensors[-1][4], begin
            tensors.append([name, dtype, [str(d) for d in dims], begin, end])
        if self.chance(0.5):
            r.shuffle(tensors)
        entries = [self.quoted(t[0]) + ":" + self.space() + self.entry(t[1], t[2], max(t[3], 0), t[4], odd_file and self.chance(0.12)) for t in tensors]
        for _ in range(r.choice([0, 0, 1, 1, 2]) if odd_file else r.randrange(2)):
            entries.insert(r.randrange(len(entries) + 1), '"__metadata__":' + (r.choice(ODD_METADATA) if odd_file else '{"format":"pt"}'))
        text = ("{" + ",".join(entries) + "}").encode()
        if odd_file and self.chance(0.1):
            text = r.choice([b" ", b"\n", b"\xef\xbb\xbf", b"\t", b"\r"]) + text
        if self.chance(0.3):
            text += r.choice([b" ", b"\t", b"\n", b"\r", b"   "])
        if odd_file and self.chance(0.03):
            text += r.choice([b"{}", b"x", b"\0", b","])
        data = bytes(r.randrange(256) for _ in range(min(at, 5000) + (r.choice([-1, 1, 4]) if odd_file and self.chance(0.08) else 0)))
        content = bytearray(struct.pack("<Q", len(text)) + text + data)
        if odd_file and self.chance(0.2):
            for _ in range(r.randrange(1, 3)):
                i = r.randrange(len(content))
                content[i] = r.choice([content[i] ^ 1 << r.randrange(8), r.randrange(256), ord(r.choice('"\\{}[],:019-e'))])
        if odd_file and self.chance(0.03):
            del content[r.randrange(len(content)):]
        return bytes(content)


def reference(content):
    """The tensors that the reference reads, or its error."""
    try:
        return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(content)}, None
    except Exception as error:  # SafetensorError, and OverflowError of the binding
        return None, str(error)


def ours(line, content):
    if not line.startswith("ok "):
        return None, line, False
    h = struct.unpack("<Q", content[:8])[0]
    words = line.split(" ")
    tensors = {}
    for word in words[2:]:
        name, dtype, dims, begin, end = word.split(":")
        tensors[bytes.fromhex(name).decode()] = (dtype, [int(d) for d in dims.split(",") if d], content[8 + h + int(begin):8 + h + int(end)])
    return tensors, None, words[1] == "1"


def names_twice(content):
    """Does the top object hold a key twice?"""
    try:
        pairs = json.loads(content[8:8 + struct.unpack("<Q", content[:8])[0]].decode(), object_pairs_hook=list)
        return len(set(k for k, _ in pairs)) < len(pairs)
    except ValueError:
        return False


# The binding spells dtypes of its own.
def canonical(dtype):
    return {"F4_E2M1FN_X2": "F4"}.get(dtype, dtype)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    maker = Maker(options.seed)
    files = [maker.file() for _ in range(options.count)]
    stream = b"".join(struct.pack("<I", len(f)) + f for f in files)
    lines = subprocess.run([options.program], input=stream, stdout=subprocess.PIPE, check=True).stdout.decode().splitlines()
    assert len(lines) == len(files), "one line per file"
    n_both, n_neither, n_bad = 0, 0, 0
    seen = {}
    for content, line in zip(files, lines):
        theirs, their_error = reference(content)
        mine, my_error, odd = ours(line, content)
        if theirs is not None and mine is not None:
            n_both += 1
            same = {n: (canonical(t[0]), t[1], t[2]) for n, t in theirs.items()} == mine
            problem = None if same else "both accept, but read different tensors: %r and %r" % (theirs, mine)
        elif theirs is None and mine is None:
            n_neither += 1
            problem = None
        elif theirs is not None:
            my_error += " in a header that names a tensor twice" if names_twice(content) else ""
            entry = next((e for e in STRICTER if my_error.startswith(e[0] + " ") and re.search(e[1], my_error)), None)
            problem = None if entry else "only the reference accepts: " + my_error
            seen[entry] = seen.get(entry, 0) + 1
        else:
            their_error = "odd metadata: " + their_error if odd else their_error
            entry = next((e for e in LENIENT if re.search(e[0], their_error)), None)
            problem = None if entry else "only we accept; the reference says: " + their_error
            seen[entry] = seen.get(entry, 0) + 1
        if problem:
            n_bad += 1
            if n_bad <= 5:
                print(problem[:600], "\n ", content[:400])
    for entry in STRICTER + LENIENT:
        print("%6d  %s" % (seen.get(entry, 0), entry[-1]))
        if not seen.get(entry):
            print("        never occurred: remove it from the list, or make the generator reach it")
            n_bad += 1
    print("safetensors %s: %d files, both accept %d, both refuse %d, unlisted differences %d" %
          (safetensors.__version__, len(files), n_both, n_neither, n_bad))
    return 1 if n_bad or n_both < len(files) // 10 or n_neither < len(files) // 10 else 0


sys.exit(main())
