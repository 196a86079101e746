#!/bin/sh
# Finds nvcc, cuBLASLt and NCCL and prints them as make variables; says on stderr what is missing. Looked for in CUDA_HOME, /usr/local/cuda and PATH;
# the libraries also where Python packages put them (nvidia/cu13, nvidia/cublas, nvidia/nccl). Exit 1: nothing can be built.
set -u

nvcc=
for candidate in "${CUDA_HOME:-/nowhere}/bin/nvcc" /usr/local/cuda/bin/nvcc "$(command -v nvcc 2>/dev/null)"; do
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

# find_library HEADER LIBRARY PACKAGE...: sets found_include and found_library.
find_library() {
  header=$1 library=$2
  shift 2
  found_include= found_library=
  for root in "$toolkit" /usr/local /usr $(for p in $packages; do for name; do echo "$p/$name"; done; done); do
    [ -f "$root/include/$header" ] || continue
    for folder in "$root/lib64" "$root/lib" "$root/lib/x86_64-linux-gnu" "$root/targets/x86_64-linux/lib"; do
      for file in "$folder/$library.so" "$folder/$library".so.[0-9]*; do
        if [ -f "$file" ]; then
          found_include=$root/include
          found_library=$file
          return 0
        fi
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
if find_library nccl_device.h libnccl nccl; then
  echo "NCCL_INCLUDE := $found_include"
  echo "NCCL_LIBRARY := $found_library"
else
  echo "make cuda: nccl_device.h with libnccl.so is missing (NCCL 2.28 or later, or the Python package nvidia-nccl-cu13): built for one rank" >&2
fi
