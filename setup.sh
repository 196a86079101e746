#!/bin/sh
# sh setup.sh build   installs what is missing (Debian, Ubuntu) and builds
#             demo    builds and shows a conversion from end to end, in under a minute
#             test    builds with gcc, with sanitizers and with clang, and runs every test; ends with "N passed, N failed, N skipped"
set -u
cd "$(dirname "$0")" || exit 1
jobs=$(nproc 2>/dev/null || echo 2)

usage() {
  sed -n '2,4s/^# //p' setup.sh >&2
  exit 2
}

has_header() {
  printf '%s\n#include <%s>\n' "${2:-}" "$1" | "${CC:-cc}" -E - >/dev/null 2>&1
}

# Debian packages of what is not there. Nothing is asked of the system's package lists when everything is.
missing() {
  command -v "${CC:-cc}" >/dev/null 2>&1 || echo gcc libc6-dev
  command -v make >/dev/null 2>&1 || echo make
  has_header jansson.h || echo libjansson-dev
  has_header pcre2.h '#define PCRE2_CODE_UNIT_WIDTH 8' || echo libpcre2-dev
  has_header openssl/evp.h || echo libssl-dev
  has_header zlib.h || echo zlib1g-dev
  [ "$1" = test ] || return 0
  [ -n "$(find /usr/include /usr/local/include -name cmocka.h 2>/dev/null)" ] || echo libcmocka-dev
  command -v clang >/dev/null 2>&1 || echo clang
  command -v python3 >/dev/null 2>&1 || echo python3
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || echo python3-venv
}

install_missing() {
  packages=$(missing "$1" | tr '\n' ' ')
  [ -n "$packages" ] || return 0
  echo "missing: $packages"
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "no apt-get here: install what Debian calls $packages" >&2
    exit 1
  fi
  sudo=
  [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -q
  # shellcheck disable=SC2086
  if ! $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages; then
    echo "could not install $packages" >&2
    exit 1
  fi
}

install_python() {
  timeout 300 build/venv/bin/python -m pip install -q --disable-pip-version-check --retries 2 "$@" >>build/venv.log 2>&1
}

# Some tests open our files with other people's libraries, and the simulator compiles with CUDA's headers. Both come from Python packages, into an
# environment of their own; where that cannot be made the tests say that they skip.
python_environment() {
  mkdir -p build
  [ -x build/venv/bin/python ] || python3 -m venv build/venv >build/venv.log 2>&1
  build/venv/bin/python -c 'import numpy, safetensors' 2>/dev/null || install_python numpy safetensors ||
    echo "no Python environment with numpy and safetensors (build/venv.log): the tests that need them will be skipped"
  sh tests/cuda_headers.sh >/dev/null || install_python 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*' ||
    echo "no CUDA headers (build/venv.log): the tests that need them will be skipped"
}

passed=0 failed=0 skipped=0

# run_suite NAME MAKE-ARGUMENTS: builds and tests one configuration and adds up its last line.
run_suite() {
  name=$1
  shift
  echo "== $name"
  log=build/test-$name.log
  mkdir -p build
  if ! make -s -j"$jobs" "$@" all unit >"$log" 2>&1; then
    cat "$log"
    echo "FAILED   build of $name"
    failed=$((failed + 1))
    return
  fi
  make -s "$@" test 2>&1 | tee -a "$log"
  counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log" | tail -n 1)
  if [ -z "$counts" ]; then
    echo "FAILED   $name ended without a result"
    failed=$((failed + 1))
    return
  fi
  # shellcheck disable=SC2086
  set -- $counts
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

case ${1:-} in
  build)
    install_missing build
    exec make -s -j"$jobs" all
    ;;
  demo)
    install_missing demo
    exec make -s -j"$jobs" demo
    ;;
  test)
    install_missing test
    python_environment
    run_suite release
    run_suite sanitize config=sanitize
    if command -v clang >/dev/null 2>&1; then
      echo "== clang"
      if make -s -j"$jobs" CC=clang B=build/clang all unit; then
        echo "ok       clang builds everything without a warning"
        passed=$((passed + 1))
      else
        echo "FAILED   clang"
        failed=$((failed + 1))
      fi
    else
      echo "SKIPPED  clang: not installed"
      skipped=$((skipped + 1))
    fi
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
    ;;
  *) usage ;;
esac
