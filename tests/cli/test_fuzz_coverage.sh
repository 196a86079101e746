#!/bin/sh
# "The committed corpus (under 2 MB) covers at least 95% of each parser's lines" (make fuzz-coverage). Once per suite: the replay programs have a build of
# their own for this, so the other configurations leave it to the release build.
set -u
case "$K3PACK_BUILD" in
  */build/release) ;;
  *) echo "the corpus is measured in a build of its own: it runs with the release build"; exit 77 ;;
esac
cc=${CC:-cc}
"$cc" --version 2>/dev/null | grep -q 'Free Software Foundation' || { echo "$cc is no gcc: the coverage of the fuzz corpus was NOT measured"; exit 77; }
command -v "${GCOV:-gcov}" >/dev/null 2>&1 || { echo "${GCOV:-gcov} is not installed: the coverage of the fuzz corpus was NOT measured"; exit 77; }
exec make -s -j"$(nproc)" CC="$cc" fuzz-coverage
