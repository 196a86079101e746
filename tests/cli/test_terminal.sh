# No C0, C1 or bidirectional control character of an input reaches a terminal or --json unescaped; names over 200 bytes are shortened with their length.
# Such characters stand in names of tensors, files and folders, in metadata, patterns and fields of configs, in recipes and in scenario-like files.
set -u
[ -x "$K3PACK" ] || { echo "no program at $K3PACK"; exit 1; }
python=${K3PACK_PYTHON:-python3}
"$python" -c 'import json' 2>/dev/null || { echo "no python3 to make the inputs with"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
"$python" - "$work" "$K3PACK" <<'END'
import glob, json, os, re, struct, subprocess, sys

work, program = sys.argv[1:]
bad, n_runs = [], 0
# C0 but line feed, DEL, C1, and marks that change the direction of text.
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
NASTY = ["\x1b[31mred", "a\x07b", "\x9b2J", "\u202egnp.exe", "\u2066x\u2069", "\u200fy", "tab\tq", "line\nbreak", "\x7f", "cr\rover"]


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
        run("verify", path, *how)


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
print("%d runs, %d complaints" % (n_runs, len(bad)))
for line in bad[:20]:
    print(line)
sys.exit(1 if bad else 0)
END
