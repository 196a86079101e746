# Classes of hostile input that a parser must survive, as generated files: framing, text, JSON, geometry, indexes, configs, names and mapper, images. Each is
# refused by the rule that names it (or taken, where it is fine), quickly, without a signal, and convert leaves nothing behind. Quantisation is the matter of
# fixtures/reject/quant-* and fixtures/rules, manifests and views of tests/unit/test_manifest.c, and the world (full disks, kills, files that shrink) of
# tests/cli/test_interrupt.sh and tests/unit/test_base_file.c.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 1; }
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the inputs with"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
"$K3PACK" synth "$work/draft" --preset tiny --quiet && "$K3PACK" convert "$work/draft" -o "$work/image.k3p" --quiet 2>/dev/null || exit 1
"$python" - "$work" "$K3PACK" <<'END'
import hashlib, json, os, resource, shutil, socket, struct, subprocess, sys, time

work, program = sys.argv[1:]
complaints, n = [], 0
W = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
ONE = b"\0\0\x80\x3f"


def raw(text, data=b"", length=None):
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def limits():
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))


def run(*args):
    begin = time.time()
    done = subprocess.run([program, *args], capture_output=True, preexec_fn=limits)
    return done.returncode, done.stdout.decode(errors="replace"), time.time() - begin


def look(name, path, rules, recipe=("--recipe", "generic"), depth="values"):
    """rules: one of these must be among the errors; empty: no error at all."""
    global n
    n += 1
    code, out, seconds = run("check", path, *recipe, "--json", "--depth", depth)
    try:
        report = json.loads(out)
        errors = [f["rule"] for f in report.get("findings", []) if f["severity"] == "error"]
        if "error" in report:
            errors.append(report["error"].get("rule", report["error"]["status"]))
    except ValueError:
        errors = ["no JSON: " + out[:200]]
    if code < 0 or code > 5 or (rules and not set(rules) & set(errors)) or (not rules and errors):
        complaints.append("%s: exit %d, errors %s, expected %s" % (name, code, errors, rules))
    if seconds > 15:
        complaints.append("%s: %.1f s" % (name, seconds))
    out_path = os.path.join(work, "out.k3p")
    code, _, _ = run("convert", path, *recipe, "-o", out_path, "--quiet")
    if code < 0 or (rules and code == 0) or (code != 0 and os.path.exists(out_path)) or os.path.exists(os.path.join(work, ".out.k3p.k3tmp")):
        complaints.append("%s: convert exits with %d" % (name, code))
    if os.path.exists(out_path):
        os.remove(out_path)


def file(name, content, *rules, depth="values"):
    path = os.path.join(work, "input.safetensors")
    with open(path, "wb") as out:
        out.write(content)
    look(name, path, rules, depth=depth)


# Framing.
for size in range(8):
    file("%d bytes" % size, bytes(size), "CNT02")
for length in (0, 1, 100000000, 100000001, 2 ** 31, 2 ** 32, 2 ** 63, 2 ** 64 - 1):
    file("header length %d" % length, raw("{}", length=length), "CNT02")
for name, content in (("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),):
    file(name, content, "CNT01")
for name, content in (("page", b"<html><body>no</body></html>"), ("zip", b"PK\3\4" + bytes(60)), ("pickle", b"\x80\4\x95" + b"x" * 60), ("gguf", b"GGUF" + b"\3" * 60)):
    file(name, content, "CNT02")
# Text.
for name, text in (("bad UTF-8", b'{"\xff":{%s}}'), ("overlong", b'{"\xc0\xaf":{%s}}'), ("surrogate bytes", b'{"\xed\xa0\x80":{%s}}'), ("mark", b'\xef\xbb\xbf{"a":{%s}}'),
                   ("lone surrogate", b'{"\\ud800":{%s}}'), ("NUL behind", b'{"a":{%s}}\0'), ("unterminated", b'{"a:{%s}}'), ("no end", b'{"a":{%s}'),
                   ("array", b'[{%s}]'), ("comment", b'{/**/"a":{%s}}'), ("trailing comma", b'{"a":{%s},}'), ("single quotes", b"{'a':{%s}}")):
    file(name, raw(text % W.encode(), ONE), "CNT02", "CNT12")
for name, key in (("empty", ""), ("escape", "\\u001b[2J"), ("NUL", "a\\u0000b"), ("C1", "\\u009b"), ("megabyte", "x" * 1000000)):
    file("name " + name, raw('{"%s":{%s}}' % (key, W), ONE), "CNT12")
for name, key in (("slash", "a/b"), ("backslash", "a\\\\b"), ("dots", "../a"), ("absolute", "/etc/passwd"), ("right to left", "a\\u202eb\\u2067c"),
                  ("right to left, bytes", "\u202egnp.exe")):
    file("name " + name, raw('{"%s":{%s}}' % (key, W), ONE))
# JSON.
file("twice", raw('{"a":{%s},"a":{%s}}' % (W, W), ONE), "CNT07")
file("metadata key twice", raw('{"__metadata__":{"k":"1","k":"2"},"a":{%s}}' % W, ONE), "CNT07")
file("unknown field", raw('{"a":{%s,"strides":[1],"x":{"y":[null]}}}' % W, ONE))
file("field twice", raw('{"a":{"dtype":"F32",%s}}' % W, ONE), "CNT07")
for depth in (100, 100000):
    file("nested %d" % depth, raw('{"a":' + "[" * depth + "]" * depth + "}"), "CNT02", "CNT05", "CNT06", "CNT12")
for name, dims in (("boolean", "true"), ("minus one", "-1"), ("point", "1.0"), ("exponent", "1e3"), ("minus zero", "-0"), ("beyond 2^64", "18446744073709551616"),
                   ("leading zero", "01"), ("text", '"1"'), ("2^53 + 1", "9007199254740993"), ("null", "null"), ("NaN", "NaN")):
    file("dimension " + name, raw('{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % dims, ONE), "CNT02", "CNT05")
many = {"t.%d" % i: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(200000)}
file("200000 tensors", raw(json.dumps(many, separators=(",", ":")), bytes([1]) * 200000), depth="headers")
million = {"t.%d" % i: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(1000000)}
with open(os.path.join(work, "million.safetensors"), "wb") as out:
    out.write(raw(json.dumps(million, separators=(",", ":")), bytes(1000000)))
del million
code, out, seconds = run("check", os.path.join(work, "million.safetensors"), "--recipe", "generic", "--depth", "headers", "--json")
n += 1
if code != 0 or json.loads(out)["tensors"] != 1000000 or seconds > 15:
    complaints.append("a million tensors: exit %d, %.1f s" % (code, seconds))
os.remove(os.path.join(work, "million.safetensors"))
# Geometry.
for name, entry, data, rules in (
        ("dtype", '"dtype":"F9","shape":[1],"data_offsets":[0,4]', ONE, ["CNT06"]), ("wrap", '"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]', b"", ["CNT05"]),
        ("wrap with zero", '"dtype":"F32","shape":[1099511627777,0],"data_offsets":[0,0]', b"", ["CNT05"]), ("zero", '"dtype":"F32","shape":[0,7],"data_offsets":[0,0]', b"", []),
        ("scalar", '"dtype":"F32","shape":[],"data_offsets":[0,4]', ONE, []), ("rank 17", '"dtype":"F32","shape":[%s],"data_offsets":[0,4]' % ",".join("1" * 17), ONE, ["CNT05"]),
        ("half a byte", '"dtype":"F4","shape":[3],"data_offsets":[0,2]', b"xx", ["CNT05"]), ("begin above end", '"dtype":"F32","shape":[1],"data_offsets":[4,0]', ONE, ["CNT04", "CNT05"]),
        ("beyond the end", '"dtype":"F32","shape":[1],"data_offsets":[0,4]', b"", ["CNT03"]), ("far beyond", '"dtype":"F32","shape":[1],"data_offsets":[9223372036854775804,9223372036854775808]', ONE, ["CNT03", "CNT04", "CNT05"]),
        ("trailing", '"dtype":"F32","shape":[1],"data_offsets":[0,4]', ONE + b"x", ["CNT04"]), ("hole", '"dtype":"F32","shape":[1],"data_offsets":[4,8]', ONE * 2, ["CNT04"])):
    file("geometry " + name, raw('{"a":{%s}}' % entry, data), *rules)
file("unaligned start", raw('{"u":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"a":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}}', b"abc" + ONE))
file("overlap", raw('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', ONE * 3), "CNT04")
file("shared range", raw('{"a":{%s},"b":{%s}}' % (W, W), ONE), "CNT04")


def folder(name, index, rules, shards=None, config=None, links=None, recipe=("--recipe", "generic")):
    path = os.path.join(work, "folder")
    shutil.rmtree(path, ignore_errors=True)
    os.mkdir(path)
    for shard, content in (shards or {}).items():
        with open(os.path.join(path, shard), "wb") as out:
            out.write(content)
    for link, target in (links or {}).items():
        os.symlink(target, os.path.join(path, link))
    if index is not None:
        with open(os.path.join(path, "model.safetensors.index.json"), "w") as out:
            out.write(index if isinstance(index, str) else json.dumps({"weight_map": index}))
    with open(os.path.join(path, "config.json"), "w") as out:
        out.write(config or '{"model_type":"toy"}')
    look(name, path, rules, recipe)


# Indexes.
good = raw('{"a":{%s}}' % W, ONE)
for name in ("/etc/passwd", "../x.safetensors", "a/b.safetensors", "..", "", "x", "a\\b.safetensors", "\u0000.safetensors"):
    folder("index names " + repr(name), {"a": name}, ["IDX09", "IDX10", "IDX01"])
folder("device as shard", {"a": "z.safetensors"}, ["IDX01", "CNT02", "K3_IO"], links={"z.safetensors": "/dev/zero"})
folder("folder as shard", {"a": "z.safetensors"}, ["IDX01", "K3_IO"], links={"z.safetensors": "."})
folder("link to itself", {"a": "z.safetensors"}, ["IDX01"], links={"z.safetensors": "z.safetensors"})
folder("two shards hold it", {"a": "x.safetensors", "b": "y.safetensors"}, ["IDX03", "IDX02"], {"x.safetensors": good, "y.safetensors": good})
folder("absent", {"a": "x.safetensors", "b": "x.safetensors"}, ["IDX02"], {"x.safetensors": good})
folder("present but unlisted", {"a": "x.safetensors"}, [], {"x.safetensors": raw('{"a":{%s},"b":{%s}}' % (W, W.replace("0,4", "4,8")), ONE * 2)})
folder("false total size", '{"metadata":{"total_size":18446744073709551615},"weight_map":{"a":"x.safetensors"}}', [], {"x.safetensors": good})
folder("stale index", {"t%d" % i: "m-%d.safetensors" % i for i in range(5)}, ["IDX01"], {"x.safetensors": good})
with open(os.path.join(work, "elsewhere.safetensors"), "wb") as out:
    out.write(good)
folder("link to a shard elsewhere", {"a": "z.safetensors"}, [], links={"z.safetensors": os.path.join(work, "elsewhere.safetensors")})
folder("thousands of shards that are there", {"t%d" % i: "m-%05d.safetensors" % (i * 7919 % 2000) for i in range(2000)}, [],
       {"m-%05d.safetensors" % (i * 7919 % 2000): raw('{"t%d":{%s}}' % (i, W), ONE) for i in range(2000)})
folder("thousands of shards", {"t%d" % i: "m-%05d.safetensors" % i for i in range(3000)}, ["IDX01"])
folder("cut index", '{"weight_map":{"a":', ["IDX10"], {"x.safetensors": good})
folder("nested index", '{"weight_map":' + "{" * 50000, ["IDX10"], {"x.safetensors": good})
# Configs.
with open(os.path.join(work, "draft/config.json")) as source:
    drafter = json.load(source)
with open(os.path.join(work, "draft/model.safetensors"), "rb") as source:
    weights = source.read()
for field, values in (("num_hidden_layers", (0, -1, 2 ** 31, 2 ** 63, 1.5, "3", None, True)), ("hidden_size", (0, -64, 2 ** 40)), ("kv_lora_rank", (31, 0, 2 ** 62)),
                      ("vocab_size", (0, 2 ** 60)), ("target_layer_ids", ([], [0] * 100000, "x", [2 ** 63], [-1]))):
    for value in values:
        folder("config %s %.20r" % (field, value), None, ["CFG20", "MAP02", "MAP04", "MAP05", "CFG19", "CFG21"], {"model.safetensors": weights}, json.dumps({**drafter, field: value}), recipe=())
# A config that promises more experts than anything has: refused, not counted one by one.
subprocess.run([program, "synth", os.path.join(work, "promised"), "--preset", "v32-tiny", "--quiet", "--shards", "1"], check=True)
with open(os.path.join(work, "promised/config.json")) as source:
    promised = json.load(source)
with open(os.path.join(work, "promised/model.safetensors"), "rb") as source:
    promised_weights = source.read()
for value in (2 ** 31, 2 ** 20, 2 ** 53, 0):
    folder("config n_routed_experts %d" % value, None, ["CFG20", "MAP02", "MAP04"], {"model.safetensors": promised_weights}, json.dumps({**promised, "n_routed_experts": value}),
           recipe=())
folder("config nested", None, ["CFG19"], {"model.safetensors": weights}, "[" * 200000, recipe=())
folder("unknown quantisation", None, ["CFG21", "CFG11", "CFG20"], {"model.safetensors": good}, json.dumps({"quantization_config": {"quant_method": "x" * 3000}}))
blow = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:(a+)+$", "re:(.*)*x", "*" * 200 + "b"], "config_groups": {}}
folder("patterns that blow up", None, [], {"model.safetensors": raw('{"%s.weight":{%s}}' % ("a" * 60, W), ONE)},
       json.dumps({"quantization_config": blow}))
# Names and mapper: odd spellings of a layer, two sources for one place, one source for none, recipes whose aliases go round.
def renamed(old, new):
    h = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8:8 + h])
    header = {new if name == old else name: value for name, value in header.items()}
    return raw(json.dumps(header, separators=(",", ":")), weights[8 + h:])


def added(new, old):
    h = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8:8 + h])
    begin, end = header[old]["data_offsets"]
    total = len(weights) - 8 - h
    header[new] = {**header[old], "data_offsets": [total, total + end - begin]}
    return raw(json.dumps(header, separators=(",", ":")), weights[8 + h:] + weights[8 + h + begin:8 + h + end])


norm = "layers.%s.input_layernorm.weight"
for layer, rules in (("007", ["MAP07"]), ("01", ["MAP07"]), ("+1", ["MAP07"]), ("-1", ["MAP07"]), ("1e1", ["MAP01"]), ("18446744073709551616", ["MAP07", "MAP04"]),
                     ("1.5", ["MAP01"]), ("\u0661", ["MAP01"]), ("", ["MAP01"]), ("4294967297", ["MAP04", "MAP07"]), ("3", ["MAP04"])):
    folder("layer %r" % layer, None, rules, {"model.safetensors": renamed(norm % "1", norm % layer)}, json.dumps(drafter), recipe=())
folder("two sources for one place", None, ["MAP03"], {"model.safetensors": added("fc.weight", "context_proj.weight")}, json.dumps(drafter), recipe=())
folder("one source for none", None, ["MAP01"], {"model.safetensors": added("nobody.weight", "final_norm.weight")}, json.dumps(drafter), recipe=())
recipe = json.loads(subprocess.run([program, "recipes", "k3-dspark"], capture_output=True).stdout)
for name, aliases, rules in (("cycle of two", {"context_proj": "final_norm", "final_norm": "context_proj"}, []), ("cycle of one", {"fc": "fc"}, []),
                             ("cycle of strangers", {"x": "y", "y": "x"}, [])):
    with open(os.path.join(work, "recipe.json"), "w") as out:
        json.dump({**recipe, "aliases": aliases}, out)
    folder("aliases, " + name, None, rules, {"model.safetensors": weights}, json.dumps(drafter), recipe=("--recipe", os.path.join(work, "recipe.json")))
# Quantisation: what fixtures/reject/quant-* and fixtures/rules hold is not repeated; a header whose packed width and number of scale groups disagree wildly is.
for cols in (1, 3, 2 ** 32):
    body = {"l.weight_packed": ("U8", [4, 8], 32), "l.weight_scale": ("F8_E4M3", [4, cols], 4 * cols), "l.weight_global_scale": ("F32", [1], 4)}
    header, at = {}, 0
    for key, (dtype, shape, nbytes) in body.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}
    folder("%d scale columns" % cols, None, [] if cols == 1 else ["TEN05", "CNT03"], {"model.safetensors": raw(json.dumps(header), b"\x38" * 32 + b"\x7e" * min(4 * cols, 64) + b"\0\0\x28\x45")},
           json.dumps({"model_type": "toy", "quantization_config": config}))
# Images: bytes behind the end; cut and changed everywhere in the front.
with open(os.path.join(work, "long.k3p"), "wb") as out, open(os.path.join(work, "image.k3p"), "rb") as source:
    out.write(source.read() + b"x")
n += 1
if run("verify", os.path.join(work, "long.k3p"))[0] != 1:
    complaints.append("an image with a byte behind its end is verified")
with open(os.path.join(work, "image.k3p"), "rb") as source:
    image = source.read()
path = os.path.join(work, "broken.k3p")
for cut in (0, 1, 7, 8, 9, 100, 4095, 4096, 4097, len(image) // 2, len(image) - 4096, len(image) - 1):
    with open(path, "wb") as out:
        out.write(image[:cut])
    code, _, _ = run("verify", path)
    n += 1
    if code != 1:
        complaints.append("image cut to %d bytes: verify exits with %d" % (cut, code))
begin = 8 + struct.unpack("<Q", image[:8])[0]
for at in [0, 3, 7, 9, 40] + list(range(10, begin + 3000, 1511)):
    changed = bytearray(image)
    changed[at] ^= 0x20
    with open(path, "wb") as out:
        out.write(changed)
    for verb in ("verify", "check"):
        code, _, _ = run(verb, path, *([] if verb == "verify" else ["--depth", "values"]))
        n += 1
        if code not in (1, 5) and not (verb == "check" and code in (0, 3)):
            complaints.append("image with byte %d changed: %s exits with %d" % (at, verb, code))


# What a path may lead to besides a file, and sizes that nothing backs: an answer at once that names it, never a wait, nothing left behind.
def odd(name, place, change, codes=(3, 4)):
    """The draft with one file changed: convert must end with one of these codes, check with 1 or 4."""
    global n
    path = os.path.join(work, "odd")
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(os.path.join(work, "draft"), path)
    target = os.path.join(path, place)
    if os.path.exists(target):
        os.remove(target)
    change(target)
    for args in (["check", path], ["convert", path, "-o", os.path.join(work, "out.k3p")], ["inspect", path], ["diff", path, path]):
        n += 1
        try:
            done = subprocess.run([program, *args], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        except subprocess.TimeoutExpired:
            complaints.append("%s: %s waits" % (name, args[0]))
            continue
        allowed = (1, 4) if args[0] == "check" and codes != (0,) else codes
        if done.returncode not in allowed or (codes != (0,) and place.encode() not in done.stderr):
            complaints.append("%s: %s exits with %d: %s" % (name, args[0], done.returncode, done.stderr[:200]))
    left = [file for file in os.listdir(work) if file.endswith(".k3tmp") or (file == "out.k3p" and codes != (0,))]
    if left:
        complaints.append("%s: convert leaves %s" % (name, left))
    if os.path.exists(os.path.join(work, "out.k3p")):
        os.remove(os.path.join(work, "out.k3p"))


def grow(path):
    with open(path, "wb") as out:
        out.truncate(1 << 40)


def listen(path):
    socket.socket(socket.AF_UNIX).bind(path)


for place in ("model.safetensors", "config.json"):
    for name, change in (("pipe", os.mkfifo), ("folder", os.mkdir), ("link to itself", lambda path: os.symlink(path, path)), ("endless device", lambda path: os.symlink("/dev/zero", path)),
                         ("socket", listen), ("terabyte of nothing", grow)):
        odd("%s for %s" % (name, place), place, change)
for name, change in (("pipe", os.mkfifo), ("folder", os.mkdir), ("link to itself", lambda path: os.symlink(path, path)), ("endless device", lambda path: os.symlink("/dev/zero", path))):
    odd("%s for a further document" % name, "tokenizer.json", change, (0,))  # convert keeps what it can of those
for args in (["check", ""], ["check", "/dev/stdin"], ["verify", "/dev/zero"], ["convert", os.path.join(work, "draft"), "-o", "/dev/null"], ["check", "hf:a/b@../.."]):
    n += 1
    done = subprocess.run([program, *args], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    if done.returncode not in (2, 4) or not done.stderr:
        complaints.append("%s: exit %d" % (args, done.returncode))
# A broken file is malformed input, whatever recipe would have been asked for.
path = os.path.join(work, "input.safetensors")
with open(path, "wb") as out:
    out.write(raw("[" * 1000))
code, _, _ = run("convert", path, "-o", os.path.join(work, "out.k3p"))
if code != 3:
    complaints.append("a broken header without a recipe: convert exits with %d" % code)
# Torn: a checkpoint, an image and a scenario cut all along. No cut may be taken for the whole.
with open("fixtures/demo/scenario.safetensors", "rb") as source:
    scenario = source.read()
subprocess.run([program, "synth", os.path.join(work, "target"), "--preset", "tiny-target", "--quiet"], check=True)
borrowed, torn = os.path.join(work, "borrowed.k3p"), os.path.join(work, "torn.safetensors")
subprocess.run([program, "convert", os.path.join(work, "draft"), "--target", os.path.join(work, "target"), "-o", borrowed, "--quiet"], check=True)
with open(borrowed, "rb") as source:
    whole_image = source.read()
for whole, what in ((weights, "draft"), (whole_image, "image"), (scenario, "scenario")):
    front = 8 + struct.unpack("<Q", whole[:8])[0]
    for cut in sorted({*range(0, front + 512, 512), *range(front, len(whole), max(512, len(whole) // 24 // 512 * 512)), len(whole) - 1}):
        if cut >= len(whole):
            continue
        with open(torn, "wb") as out:
            out.write(whole[:cut])
        out_path = os.path.join(work, "torn.out")
        for args, codes in {"draft": [(["check", torn, "--recipe", "generic"], (1,)), (["convert", torn, "--recipe", "generic", "-o", out_path], (3,))],
                            "image": [(["verify", torn], (1,)), (["run", torn, "--input", "fixtures/demo/scenario.safetensors", "-o", out_path], (3,))],
                            "scenario": [(["run", borrowed, "--input", torn, "-o", out_path], (3,))]}[what]:
            n += 1
            code, _, _ = run(*args)
            if code not in codes or os.path.exists(out_path):
                complaints.append("%s cut to %d bytes: %s exits with %d" % (what, cut, args[0], code))
# A manifest that cuts modules in another way than the forward, under a seal that is right: refused, in both runtimes, not computed beyond a buffer.
subprocess.run([program, "synth", os.path.join(work, "m3"), "--preset", "m3-tiny", "--quiet"], check=True)
layers, states, sealed = os.path.join(work, "m3.k3p"), os.path.join(work, "states"), os.path.join(work, "sealed.k3p")
subprocess.run([program, "convert", os.path.join(work, "m3"), "-o", layers, "--quiet"], check=True)
with open(states, "wb") as out:
    out.write(raw('{"hidden_states":{"dtype":"F32","shape":[1,64],"data_offsets":[0,256]},"positions":{"dtype":"I64","shape":[1],"data_offsets":[256,264]},'
                  '"request_ids":{"dtype":"I64","shape":[1],"data_offsets":[264,272]}}', bytes(272)))
for path, args in ((borrowed, ["--input", "fixtures/demo/scenario.safetensors"]), (layers, ["--layers", "0..2", "--input", states])):
    with open(path, "rb") as source:
        whole = source.read()
    front = 8 + struct.unpack("<Q", whole[:8])[0]
    places = json.loads(whole[8:front])
    first, last = (front + offset for offset in places["__k3pack__"]["data_offsets"])
    seal = front + places["__seal__"]["data_offsets"][0]
    for rule, other in (("column", None), ("row", None), ("column", "row"), ("row", "column"), (None, "row")):
        manifest = json.loads(whole[first:last])
        for tensor in manifest["tensors"]:
            if tensor.get("tp") == rule and tensor.get("role") is None:
                tensor["tp"] = other
                if other is None:
                    del tensor["tp"]
        text = json.dumps(manifest, separators=(",", ":")).encode()
        if len(text) > last - first:
            continue
        content = bytearray(whole)
        content[first:last] = text.ljust(last - first)
        content[seal:seal + 32] = hashlib.sha256(content[:seal]).digest()
        with open(sealed, "wb") as out:
            out.write(content)
        n += 1
        code, _, _ = run("run", sealed, *args, "-o", os.path.join(work, "sealed.out"), "--tp", "2", "--force")
        if code != 3:
            complaints.append("rule %s for %s in %s: run exits with %d" % (other, rule, os.path.basename(path), code))
print("%d inputs, %d complaints" % (n, len(complaints)))
for line in complaints[:40]:
    print(line)
sys.exit(1 if complaints else 0)
END
