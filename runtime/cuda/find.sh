#!/bin/sh
# Finds nvcc, cuBLASLt and NCCL and prints them as make variables; says on stderr what is missing. Looked for in CUDA_HOME, /usr/local/cuda and PATH;
# the libraries also where Python packages put them (nvidia/cu13, nvidia/cublas, nvidia/nccl). Exit 1: nothing can be built.
#   SYSROOT  before every folder of the system, for a toolkit that is not this machine's (and for tests)
set -u
root=${SYSROOT-}

nvcc=
for candidate in "${CUDA_HOME:-/nowhere}/bin/nvcc" "$root/usr/local/cuda/bin/nvcc" "$(command -v nvcc 2>/dev/null)"; do
  [ -n "$candidate" ] && [ -x "$candidate" ] && nvcc=$candidate && break
done
if [ -z "$nvcc" ]; then
  echo "make cuda: nvcc is missing (CUDA_HOME, /usr/local/cuda and PATH were searched): install the CUDA 13 toolkit" >&2
  exit 1
fi
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
if [ "${release:-0}" -lt 13 ]; then
  echo "make cuda: $nvcc is of CUDA ${release:-?}, CUDA 13 is needed" >&2
  exit 1
fi

# Folders named nvidia of the Python packages, if there is a Python.
packages=$("${K3PACK_PYTHON:-python3}" -c 'import site, sys
print("\n".join(p + "/nvidia" for p in site.getsitepackages() + [site.getusersitepackages()]))' 2>/dev/null)

# find_library HEADER LIBRARY PACKAGE...: sets found_include and found_library. A package of libraries alone takes the toolkit's header.
find_library() {
  header=$1 library=$2
  shift 2
  found_include= found_library=
  for base in "$toolkit" "$root/usr/local" "$root/usr" $(for p in $packages; do for name; do echo "$p/$name"; done; done); do
    for folder in "$base/lib64" "$base/lib" "$base/lib/x86_64-linux-gnu" "$base/lib/aarch64-linux-gnu" "$base"/targets/*/lib; do
      for file in "$folder/$library.so" "$folder/$library".so.[0-9]*; do
        [ -f "$file" ] || continue
        for include in "$base/include" "$toolkit/include"; do
          if [ -f "$include/$header" ]; then
            found_include=$include
            found_library=$file
            return 0
          fi
        done
      done
    done
  done
  return 1
}

echo "NVCC := $nvcc"
echo "CUDA_INCLUDE := $toolkit/include"
if ! find_library cublasLt.h libcublasLt cu13 cublas; then
  echo "make cuda: cublasLt.h with libcublasLt.so is missing: install cuBLAS of CUDA 13 (or the Python package nvidia-cublas)" >&2
  exit 1
fi
echo "CUBLASLT_INCLUDE := $found_include"
echo "CUBLASLT_LIBRARY := $found_library"
if ! find_library nccl.h libnccl nccl; then
  echo "make cuda: nccl.h with libnccl.so is missing (NCCL 2.28 or later, or the Python package nvidia-nccl-cu13): built for one rank" >&2
  exit 0
fi
echo "NCCL_INCLUDE := $found_include"
echo "NCCL_LIBRARY := $found_library"
minor=$(sed -n 's/^#define NCCL_MINOR *\([0-9]*\).*/\1/p' "$found_include/nccl.h")
if [ "${minor:-0}" -lt 28 ] || [ ! -f "$found_include/nccl_device.h" ]; then
  echo "make cuda: $found_include/nccl.h is of NCCL 2.${minor:-?}; below 2.28 the ranks' sums are not fused with the norms (all-reduce, then norm)" >&2
fi
