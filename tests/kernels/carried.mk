# The Makefile of a carried folder (`make carry`): everything is built. cuBLASLt of CUDA 13 and NCCL must be where the build machine had them, in
# LD_LIBRARY_PATH, or among the packages of BENCH_PYTHON (default python3), as they are where PyTorch is.
#   test-gpu   the comparison with the CPU backend on the GPUs at hand, also under compute-sanitizer where it is installed
#   bench-gpu  the benchmark (BENCH_PYTHON=python with PyTorch, BENCH_IMAGES=folder with 33 GB)
BENCH_PYTHON ?= python3
export BENCH_PYTHON
PACKAGED := $(shell $(BENCH_PYTHON) -c 'import glob, site; print(":".join(d for p in site.getsitepackages() for d in glob.glob(p + "/nvidia/*/lib")))' 2>/dev/null)
export LD_LIBRARY_PATH := $(LD_LIBRARY_PATH):$(PACKAGED)

test-gpu:
	sh tests/kernels/run_gpu.sh build/release

bench-gpu:
	sh tests/bench/gpu/run.sh build/release

.PHONY: test-gpu bench-gpu
