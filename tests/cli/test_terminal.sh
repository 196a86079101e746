# No C0, C1 or bidirectional control character of an input reaches a terminal or --json unescaped; names over 200 bytes are shortened with their length.
# Such characters stand in names of tensors, files and folders, in metadata, in every text of configs, indexes, recipes and of an image's manifest, and in
# arguments; every verb that reads an input meets them.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 1; }
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the inputs with"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
"$python" - "$work" "$K3PACK" <<'END'
import copy, glob, hashlib, json, os, re, shutil, struct, subprocess, sys

work, program = sys.argv[1:]
bad, n_runs = [], 0
thorough = os.environ.get("K3PACK_BUILD", "release").endswith("release")
# C0 but line feed, DEL, C1, line separators, marks that change the direction of text, the byte-order mark.
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
MARKS = "".join(map(chr, [0x85, 0x9F, 0x61C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF]))
NASTY = ["\x1b[31mred", "a\x07b", "\x9b2J", "\u202egnp.exe", "\u2066x\u2069", "\u200fy", "tab\tq", "line\nbreak", "\x7f", "cr\rover", "m" + MARKS]


def file(tensors, metadata=None):
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, (dtype, shape, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def run(*args):
    global n_runs
    n_runs += 1
    done = subprocess.run([program, *args], capture_output=True, env={**os.environ, "TERM": "xterm"})
    for stream, raw in (("stdout", done.stdout), ("stderr", done.stderr)):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            bad.append("%s: %s is no UTF-8: %s" % (args, stream, error))
            continue
        found = FORBIDDEN.search(text)
        if found:
            bad.append("%s: %r on %s: %r" % (args, found.group(), stream, text[max(0, found.start() - 60):found.end() + 20]))
    return done


def look(path):
    for how in ([], ["--json"], ["--verbose"]):
        run("check", path, "--recipe", "generic", "--depth", "values", *how)
        run("check", path, *how)
        run("inspect", path, *how)
        run("diff", path, path, *how)
        run("convert", path, "-o", os.path.join(work, "out.k3p"), "--recipe", "generic", "--force", *how)
        run("convert", path, "--dry-run", "--recipe", "generic", *how)
        run("convert", path, "--dry-run", "--recipe", "generic", "--verbose", *how)
        run("verify", path, *how)
        run("inspect", path, "[", *how)


one = ("F32", [1], b"\0\0\x80\x3f")
for i, nasty in enumerate(NASTY):
    folder = os.path.join(work, "case%d" % i)
    os.mkdir(folder)
    with open(os.path.join(folder, "model.safetensors"), "wb") as out:
        out.write(file({"w": one}, {nasty: nasty}))
    config = {"architectures": [nasty], "model_type": nasty, "torch_dtype": nasty, nasty: nasty,
              "quantization_config": {"quant_method": "compressed-tensors", "format": nasty, "ignore": [nasty, "re:(" + nasty],
                                      "config_groups": {nasty: {"targets": [nasty], "weights": {"num_bits": 4, "type": nasty, "strategy": nasty}}}}}
    with open(os.path.join(folder, "config.json"), "w") as out:
        json.dump(config, out)
    look(folder)
    named = os.path.join(work, "named%d.safetensors" % i)
    with open(named, "wb") as out:
        out.write(file({"a" + nasty: one, "b": one}))
    look(named)
    if "/" not in nasty and "\0" not in nasty:
        odd = os.path.join(work, "odd " + nasty)
        os.mkdir(odd)
        with open(os.path.join(odd, "model-" + nasty + ".safetensors"), "wb") as out:
            out.write(file({"w": one})[:-2])
        with open(os.path.join(odd, "x" + nasty + ".incomplete"), "wb") as out:
            out.write(b"x")
        look(odd)
    index = os.path.join(work, "index%d" % i)
    os.mkdir(index)
    with open(os.path.join(index, "model.safetensors.index.json"), "w") as out:
        json.dump({"weight_map": {nasty: nasty + ".safetensors", "w": "../" + nasty}}, out)
    look(index)
    recipe = os.path.join(work, "recipe%d.json" % i)
    with open(recipe, "w") as out:
        json.dump({"name": nasty, "about": nasty, nasty: 1}, out)
    run("check", folder, "--recipe", recipe)
    run("check", folder, "--only", nasty)
    run("check", folder, "--rules", nasty)
    run(nasty)
    run("check", "hf:" + nasty)


def texts(value, place=()):
    """Every text of a JSON value and every key of a table of names, as the path to it."""
    if isinstance(value, str):
        yield place
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from texts(item, place + (key,))


def changed(value, places, nasty):
    """A copy in which the texts at these paths are others."""
    value = copy.deepcopy(value)
    for place in places:
        item = value
        for key in place[:-1]:
            item = item[key]
        item[place[-1]] = nasty + item[place[-1]][len(nasty.encode()):]
    return value


def kinds(value):
    """Paths of the same kind together: list positions and layer numbers do not count."""
    found = {}
    for place in texts(value):
        found.setdefault(tuple("#" if isinstance(key, int) or re.search("[0-9]", key) else key for key in place), []).append(place)
    groups = list(found.values())
    return groups if thorough else groups[::4]  # what is printed is the same in every build; the slower ones look for other faults


# Every text of a manifest, the seal made right again: each verb that opens an image.
draft, target, image, broken = (os.path.join(work, name) for name in ("draft", "target", "image.k3p", "broken.k3p"))
scenario = "fixtures/demo/scenario.safetensors"
run("synth", draft, "--preset", "tiny", "--shards", "2", "--quiet")
run("synth", target, "--preset", "tiny-target", "--quiet")
run("convert", draft, "--target", target, "-o", image, "--quant", "nvfp4", "--quiet")
with open(image, "rb") as source:
    whole = source.read()
data = 8 + struct.unpack("<Q", whole[:8])[0]
header = json.loads(whole[8:data])
first, last = header["__k3pack__"]["data_offsets"]
manifest, seal = json.loads(whole[data + first:data + last]), data + header["__seal__"]["data_offsets"][0]
out = os.path.join(work, "out")
for places in kinds(manifest):
    for nasty in ("\u202e", "\u009b"):
        text = json.dumps(changed(manifest, places, nasty), ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > last - first:
            continue
        bytes_ = bytearray(whole)
        bytes_[data + first:data + last] = text.ljust(last - first)
        bytes_[seal:seal + 32] = hashlib.sha256(bytes_[:seal]).digest()
        with open(broken, "wb") as file_:
            file_.write(bytes_)
        shutil.rmtree(out, ignore_errors=True)
        for args in (["inspect", broken], ["inspect", broken, "--json"], ["inspect", broken, "--reductions", "--tp", "2"], ["check", broken],
                     ["verify", broken, "--source", draft], ["export", broken, "-o", out], ["diff", draft, broken],
                     ["run", broken, "--input", scenario, "-o", out + ".drafts", "--force"]):
            run(*args)
# Every text of a drafter's config, of a quantised one's, and of its index.
for scheme, dialect in (("none", None), ("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt")):
    folder = os.path.join(work, "variant")
    run("synth", folder, "--preset", "tiny", "--shards", "2", "--quant", scheme, *(["--dialect", dialect] if dialect else []), "--force", "--quiet")
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        with open(path) as source:
            content = source.read()
        for places in kinds(json.loads(content)):
            with open(path, "w") as file_:
                json.dump(changed(json.loads(content), places, "\u202e\x1b"), file_)
            run("check", folder, "--depth", "scales")
            run("check", folder, "--json")
            run("inspect", folder)
            run("convert", folder, "--dry-run", "--verbose")
        with open(path, "w") as file_:
            file_.write(content)
# A recipe of one's own, whose texts come back in plans and messages.
for name in ("k3-dspark", "minimax-m3"):
    done = run("recipes", name)
    recipe_path = os.path.join(work, "own.json")
    for places in kinds(json.loads(done.stdout)):
        with open(recipe_path, "w") as file_:
            json.dump(changed(json.loads(done.stdout), places, "\u202e"), file_)
        run("check", draft, "--recipe", recipe_path)
        run("convert", draft, "--dry-run", "--verbose", "--recipe", recipe_path)
        run("inspect", draft, "--reductions", "--tp", "2", "--recipe", recipe_path)
# Arguments and paths, also those that are not there; scenarios under such names.
for nasty in ("\x1b[31m", "\u009b2J", "m" + MARKS):
    odd = os.path.join(work, nasty)
    for args in (["run", image, "--input", odd, "-o", odd], ["run", odd, "--input", odd, "-o", out], ["run", image, "--input", scenario, "-o", out, "--emit", nasty],
                 ["run", image, "--input", scenario, "-o", out, "--layers", nasty], ["run", image, "--input", scenario, "-o", out, "--taps", nasty, "--layers", "0"],
                 ["compare", odd, odd, "--input", odd], ["compare", image, image, "--input", odd], ["bench", odd], ["inspect", image, nasty],
                 ["inspect", image, "--tensor", nasty], ["export", odd, "-o", odd], ["verify", odd], ["verify", image, "--source", odd], ["diff", odd, odd],
                 ["diff", image, odd], ["recipes", nasty], ["synth", odd + "/x", "--preset", nasty], ["help", nasty], ["check", draft, "--baseline", odd],
                 ["check", draft, "--engine", nasty], ["convert", draft, "-o", image, "--quant", nasty], ["convert", draft, "-o", odd + "/", "--ignore", nasty],
                 ["check", draft, "--" + nasty], ["check", draft, "--threads", nasty], ["check", draft, "--recipe", odd]):
        run(*args)
        run(*args, "--json")
    folder = os.path.join(work, "under " + nasty)
    os.mkdir(folder)
    copy_, sample = os.path.join(folder, "image" + nasty + ".k3p"), os.path.join(folder, "scenario" + nasty)
    shutil.copy(image, copy_)
    shutil.copy(scenario, sample)
    for how in ([], ["--json"]):
        run("synth", os.path.join(folder, "synth"), "--preset", "tiny", "--force", *how)
        run("convert", os.path.join(folder, "synth"), "-o", copy_, "--target", target, "--force", "--quant", "nvfp4", "--verbose", *how)
        run("inspect", copy_, *how)
        run("verify", copy_, "--source", os.path.join(folder, "synth"), *how)
        run("diff", copy_, image, *how)
        run("export", copy_, "-o", os.path.join(folder, "out"), *how)
        run("export", copy_, "-o", os.path.join(folder, "ct"), "--format", "compressed-tensors", "--force", *how)
        run("run", copy_, "--input", sample, "-o", os.path.join(folder, "drafts"), "--force", *how)
        run("compare", copy_, image, "--input", sample, *how)
        run("bench", copy_, "--runs", "1", *how)
    with open(sample, "wb") as file_:
        file_.write(file({nasty: one, "target_states": one}))
    run("run", copy_, "--input", sample, "-o", out)
    run("run", copy_, "--input", sample, "-o", out, "--layers", "0")
    run("compare", copy_, image, "--input", sample)
for folder in sorted(glob.glob("fixtures/reject/*/")):
    path = folder + "input" if os.path.exists(folder + "input") else folder + "input.safetensors"
    run("check", path)
    run("check", path, "--json")

# Names of 200 bytes stand as they are; longer ones are shortened, and their length is said; text and JSON alike.
for length, whole in ((190, True), (300, False), (1000, False)):
    name = "n" * (length - 7) + ".weight"
    path = os.path.join(work, "long.safetensors")
    with open(path, "wb") as out:
        out.write(file({name: ("BF16", [2, 2], b"\x80\x7f" * 4)}))
    for how in ([], ["--json"]):
        done = run("check", path, "--recipe", "generic", "--depth", "values", *how)
        text = (done.stdout if how else done.stderr).decode()
        if (name in text) != whole:
            bad.append("a name of %d bytes is %s" % (length, "shortened" if whole else "not shortened: " + text[:400]))
        if not whole and "%d bytes" % length not in text:
            bad.append("the length %d is not said: %s" % (length, text[:500]))
    for args in (["inspect", path], ["inspect", path, "--tensor", name], ["diff", path, path + ".other"], ["convert", path, "--dry-run", "--verbose", "--recipe", "generic"]):
        with open(path + ".other", "wb") as out:
            out.write(file({name: ("BF16", [2, 2], b"\0" * 8)}))
        text = run(*args).stdout.decode()
        if (name in text) != whole or (not whole and "%d bytes" % length not in text):
            bad.append("%s: a name of %d bytes: %s" % (args[0], length, text[:400]))
print("%d runs, %d complaints" % (n_runs, len(bad)))
for line in bad[:20]:
    print(line)
sys.exit(1 if bad else 0)
END
