#!/bin/sh
# "a shared library that exports k3_ symbols only (a test compares the list), make install DESTDIR= PREFIX= with pkg-config file, an example C program
# that embeds the engine, compiled and run by the tests": its drafts are those of `run`.
set -u
library=$K3PACK_BUILD/libk3pack.so
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
fail() {
  echo "FAILED: $*"
  exit 1
}

nm -D --defined-only "$library" | awk '{ print $NF }' | grep -v '^_' | sort >"$work/exported"
LC_ALL=C sort -c runtime/exports.txt || fail "runtime/exports.txt is not sorted"
diff runtime/exports.txt "$work/exported" || fail "the exported symbols are not those of runtime/exports.txt"
grep -v '^k3_' "$work/exported" && fail "a symbol without the prefix"

# Built objects are found again, so this only copies.
make -s B="${K3PACK_BUILD#"$PWD"/}" DESTDIR="$work/root" PREFIX=/opt/k3 install >"$work/install" 2>&1 || fail "install: $(cat "$work/install")"
for file in bin/k3pack lib/libk3pack.a lib/libk3pack.so lib/pkgconfig/k3pack.pc include/k3pack/runtime/runtime.h; do
  [ -e "$work/root/opt/k3/$file" ] || fail "$file was not installed"
done
[ "$("$work/root/opt/k3/bin/k3pack" version)" = "$("$K3PACK" version)" ] || fail "the installed program does not run"

# The flags as pkg-config gives them, read by hand where it is not installed.
if command -v pkg-config >/dev/null 2>&1; then
  flags=$(PKG_CONFIG_PATH=$work/root/opt/k3/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$work/root pkg-config --cflags --libs k3pack) || fail "pkg-config"
else
  prefix=$work/root/opt/k3
  flags="-I$prefix/include/k3pack -L$prefix/lib -lk3pack"
  grep -q '^Libs: -L${libdir} -lk3pack$' "$prefix/lib/pkgconfig/k3pack.pc" || fail "the pkg-config file"
fi
# A sanitized library needs its runtime in the program.
sanitize=
nm -D "$library" | grep -q __asan_init && sanitize=-fsanitize=address,undefined
# shellcheck disable=SC2086
${CC:-cc} -std=c17 -Wall -Wextra -Werror $sanitize tests/example/embed.c $flags -o "$work/embed" || fail "the example does not compile"

fixture=fixtures/dspark/tiny_f32
"$K3PACK" convert $fixture/draft -o "$work/alone.k3p" --quiet || fail "convert"
"$K3PACK" convert $fixture/draft --target $fixture/target -o "$work/whole.k3p" --quiet || fail "convert --target"
python3 - $fixture "$work/data" <<'PY' || fail "the data for the example"
import json, struct, sys
def tensors(path):
    data = open(path, "rb").read()
    h = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + h])
    return {name: data[8 + h + t["data_offsets"][0]:8 + h + t["data_offsets"][1]] for name, t in header.items() if name != "__metadata__"}
s, target = tensors(sys.argv[1] + "/scenario.safetensors"), tensors(sys.argv[1] + "/target/model.safetensors")
whole = lambda name: struct.unpack("<%dq" % (len(s[name]) // 8), s[name])
b = 3
row_nbytes = len(s["target_states"]) // len(whole("positions"))
rows = sorted((p, i) for i, (r, p) in enumerate(zip(whole("request_ids"), whole("positions"))) if r == b)
with open(sys.argv[2], "wb") as out:
    out.write(struct.pack("<QQ", len(rows), whole("anchor_ids")[b]))
    for _, i in rows:
        out.write(s["target_states"][i * row_nbytes:(i + 1) * row_nbytes])
    out.write(target["model.embed_tokens.weight"] + target["lm_head.weight"])
PY
LD_LIBRARY_PATH=$work/root/opt/k3/lib "$work/embed" "$work/alone.k3p" "$work/data" >"$work/ids" || fail "the example"
"$K3PACK" run "$work/whole.k3p" --input $fixture/scenario.safetensors -o "$work/out" --emit draft_ids |
  sed -n 's/^request 3: .* -> //p' >"$work/expected"
[ -s "$work/expected" ] || fail "run printed no drafts"
diff "$work/expected" "$work/ids" || fail "the example drafts something else than run"
echo "library, install and example: all right"
