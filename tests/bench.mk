#help   bench          every benchmark below; figures depend on the machine, so nothing fails
#help   bench-convert  convert, verify: ratios to cp, openssl dgst and Python's safetensors (RUNS=15 PRESET=... WHERE=/dev/shm)
#help   bench-check    check --depth values: ratio to cat, BF16 and NVFP4 (RUNS=15 PRESET=... WHERE=/dev/shm THREADS=2)
#help   bench-headers  half a million tensors: time and peak memory
bench: bench-convert bench-check bench-headers

bench-convert: all
	sh tests/bench/bench_convert.sh $(B)

bench-check: all
	sh tests/bench/bench_check.sh $(B)

bench-headers: all
	sh tests/bench/bench_headers.sh $(B)

#help   bench-gpu      our forward on a GPU beside PyTorch re-enactments, table of bars (nvcc, BENCH_PYTHON=python with PyTorch; under ten minutes)
bench-gpu: all cuda
	sh tests/bench/gpu/run.sh $(B)

#help   test-full      the published geometry: 30 GB of disk in FULL_DIR (default build/full), some minutes
test-full: all
	sh tests/cli/full.sh $(B)

.PHONY: bench bench-convert bench-check bench-headers bench-gpu test-full
