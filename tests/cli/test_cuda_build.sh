#!/bin/sh
# "`make cuda` finds the toolkit (CUDA_HOME, /usr/local/cuda, PATH) and NCCL / cuBLASLt also where Python packages put them (nvidia/nccl, nvidia/cublas), and
# says clearly what is missing; without NCCL it builds for tp 1; without nvcc everything else builds and works, and `--backend cuda` exits 5 with what to
# install": the search on invented trees. Where nvcc is, also that a compiled plug-in has "one exported symbol".
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}
# An invented nvcc of CUDA $2 at $1, and libraries: header, library, folder.
nvcc() { mkdir -p "$1" && printf '#!/bin/sh\necho "Cuda compilation tools, release %s.0, V%s.0.1"\n' "$2" "$2" >"$1/nvcc" && chmod +x "$1/nvcc"; }
library() {
  mkdir -p "$3/include" "$3/$4" && : >"$3/$4/$2"
  [ "$1" = none ] || printf '#define NCCL_MAJOR 2\n#define NCCL_MINOR %s\n' "${5:-28}" >"$3/include/$1"
}
tree=$work/root
python=$work/python   # its packages are in $work/site
printf '#!/bin/sh\necho "%s/nvidia"\n' "$work/site" >"$python" && chmod +x "$python"
# find CODE [SETTING...]: $work/out, $work/err
find_cuda() {
  code=$1
  shift
  got=0
  env -u CUDA_HOME SYSROOT="$tree" K3PACK_PYTHON="$python" PATH="$work/path:/usr/bin:/bin" "$@" sh runtime/cuda/find.sh >"$work/out" 2>"$work/err" || got=$?
  [ "$got" = "$code" ] || fail "find.sh $*: exit $got, not $code: $(cat "$work/err")"
}
gives() { grep -qx "$1" "$work/out" || fail "no line \"$1\": $(cat "$work/out" "$work/err")"; }
says() { grep -q "$1" "$work/err" || fail "it does not say \"$1\": $(cat "$work/err")"; }
mkdir -p "$work/path" "$work/site/nvidia"

if ! PATH=/usr/bin:/bin command -v nvcc >/dev/null; then
  find_cuda 1
  says 'nvcc is missing (CUDA_HOME, /usr/local/cuda and PATH were searched): install the CUDA 13 toolkit'
fi
nvcc "$work/path" 12
find_cuda 1
says "$work/path/nvcc is of CUDA 12, CUDA 13 is needed"
nvcc "$work/path" 13
find_cuda 1
says 'cublasLt.h with libcublasLt.so is missing: install cuBLAS of CUDA 13 (or the Python package nvidia-cublas)'
[ "$(grep -c missing "$work/err")" = 1 ] || fail "more is said than is missing: $(cat "$work/err")"

# nvcc: CUDA_HOME before /usr/local/cuda before PATH.
nvcc "$tree/usr/local/cuda/bin" 13
nvcc "$work/home/bin" 14
library cublasLt.h libcublasLt.so.13 "$tree/usr/local/cuda" lib64
library cublasLt.h libcublasLt.so.13 "$work/home" targets/x86_64-linux/lib
find_cuda 0
gives "NVCC := $tree/usr/local/cuda/bin/nvcc"
gives "CUBLASLT_LIBRARY := $tree/usr/local/cuda/lib64/libcublasLt.so.13"
find_cuda 0 CUDA_HOME="$work/home"
gives "NVCC := $work/home/bin/nvcc"
gives "CUDA_INCLUDE := $work/home/include"
gives "CUBLASLT_LIBRARY := $work/home/targets/x86_64-linux/lib/libcublasLt.so.13"

# "without NCCL it builds for tp 1", and what is missing is said.
says 'nccl.h with libnccl.so is missing (NCCL 2.28 or later, or the Python package nvidia-nccl-cu13): built for one rank'
grep -q NCCL "$work/out" && fail "NCCL was found: $(cat "$work/out")"

# Libraries of Python packages, with headers of their own or with the toolkit's; a header without its library is none.
rm -r "$tree/usr/local/cuda/lib64" "$tree/usr/local/cuda/include"
library nccl.h nothing "$tree/usr/local/cuda" lib64
library cublasLt.h libcublasLt.so.13 "$work/site/nvidia/cu13" lib
library nccl.h libnccl.so.2 "$work/site/nvidia/nccl" lib
: >"$work/site/nvidia/nccl/include/nccl_device.h"
find_cuda 0
gives "CUBLASLT_INCLUDE := $work/site/nvidia/cu13/include"
gives "CUBLASLT_LIBRARY := $work/site/nvidia/cu13/lib/libcublasLt.so.13"
gives "NCCL_INCLUDE := $work/site/nvidia/nccl/include"
gives "NCCL_LIBRARY := $work/site/nvidia/nccl/lib/libnccl.so.2"
[ ! -s "$work/err" ] || fail "something is said where nothing is missing: $(cat "$work/err")"
rm -r "$work/site/nvidia/cu13"
: >"$tree/usr/local/cuda/include/cublasLt.h"
library none libcublasLt.so.13 "$work/site/nvidia/cublas" lib
find_cuda 0
gives "CUBLASLT_INCLUDE := $tree/usr/local/cuda/include"
gives "CUBLASLT_LIBRARY := $work/site/nvidia/cublas/lib/libcublasLt.so.13"
library nccl.h libnccl.so.2 "$work/site/nvidia/nccl" lib 27
find_cuda 0
gives "NCCL_LIBRARY := $work/site/nvidia/nccl/lib/libnccl.so.2"
says 'is of NCCL 2.27; below 2.28 the ranks. sums are not fused with the norms'

# "says clearly what is missing": make stops with one line of find.sh's and one of its own, and has built nothing.
env -u CUDA_HOME SYSROOT="$work/none" K3PACK_PYTHON="$python" PATH="$work/empty:/usr/bin:/bin" make -s B="$work/build" cuda >"$work/out" 2>&1 && fail "make cuda without nvcc"
if ! PATH=/usr/bin:/bin command -v nvcc >/dev/null; then
  { grep -q 'make cuda: nvcc is missing' "$work/out" && grep -q 'the CUDA plug-in cannot be built here' "$work/out"; } || fail "make cuda: $(cat "$work/out")"
fi
[ -z "$(find "$work/build" -name '*.o')" ] || fail "something was built"

# "without nvcc everything else builds and works, and --backend cuda exits 5 with what to install": the program beside which there is no plug-in.
mkdir "$work/bin" && cp "$K3PACK" "$work/bin/k3pack"
case=fixtures/dspark/tiny_f32
"$work/bin/k3pack" convert $case/draft --target $case/target -o "$work/image" --quiet || fail "convert"
got=0
env -u K3PACK_CUDA_PLUGIN "$work/bin/k3pack" run "$work/image" --input $case/scenario.safetensors -o "$work/o" --backend cuda >"$work/out" 2>"$work/err" || got=$?
{ [ $got = 5 ] && grep -q 'the CUDA plug-in cannot be opened: .*allowed: .make cuda. beside the program (CUDA 13 with nvcc' "$work/err"; } ||
  fail "--backend cuda: exit $got: $(cat "$work/err")"
"$work/bin/k3pack" run "$work/image" --input $case/scenario.safetensors -o "$work/o" --quiet || fail "--backend cpu"

# "a target prints registers, spills and shared memory per kernel; 0 spill bytes", "both in the fat binary": what ptxas would say.
told() {  # arch, spilled bytes
  printf "ptxas info    : Compiling entry function 'kernel' for '%s'\nptxas info    : Function properties for kernel\n" "$1"
  printf '    16 bytes stack frame, %s bytes spill stores, 0 bytes spill loads\nptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem\n' "$2"
}
{ told sm_90a 0; told sm_100a 0; } >"$work/log"
sh runtime/cuda/resources.sh "$work/log" >"$work/out" || fail "resources: $(cat "$work/out")"
grep -q 'sm_90a *40 registers *512 bytes shared *16 stack *0 spilled *kernel' "$work/out" || fail "resources: $(cat "$work/out")"
{ told sm_90a 8; told sm_100a 0; } >"$work/log"
sh runtime/cuda/resources.sh "$work/log" >/dev/null && fail "a spill is let pass"
told sm_90a 0 >"$work/log"
sh runtime/cuda/resources.sh "$work/log" >/dev/null && fail "a kernel without sm_100a is let pass"

# "one exported symbol": of the plug-in that the simulator's build links with the same list, and of the compiled one where there is one.
seen=0
for plugin in build/cuda_sim/plain/libk3pack_cuda.so "$K3PACK_BUILD/libk3pack_cuda.so"; do
  [ -f "$plugin" ] || continue
  seen=1
  exported=$(nm -D --defined-only "$plugin" | awk '{ print $NF }')
  [ "$exported" = k3_cuda_plugin ] || fail "$plugin exports $exported"
done
[ $seen = 1 ] || echo "no plug-in is built here: its exports were NOT looked at"
exit $failed
