# The CUDA backend without a GPU: its sources compiled by clang for the simulator (tests/cuda_sim), plain and under each sanitizer.
#help   test-sim       the CUDA backend in the simulator: plain, ASan, TSan, MSan, seeded faults (clang 14 and CUDA's headers; no GPU)
SIM_CLANG    ?= clang
SIM_CUDA_INC := $(shell sh tests/cuda_headers.sh)
SIM          := build/cuda_sim
SIM_VARIANTS := plain asan tsan msan
SIM_SAN_plain :=
SIM_SAN_asan  := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SIM_SAN_tsan  := -fsanitize=thread
SIM_SAN_msan  := -fsanitize=memory -fsanitize-memory-track-origins=2 -fno-math-errno -fsanitize-memory-param-retval
SIM_OPT_plain := -O2
SIM_OPT_asan  := -O1
SIM_OPT_tsan  := -O1
SIM_OPT_msan  := -O1
# Loops that a GPU wants unrolled stay loops where sanitizers would check every copy: a fifth of the time to compile.
SIM_LOOPS      := -mllvm -pragma-unroll-threshold=1 -fno-unroll-loops -Wno-pass-failed
SIM_CXX_asan   := $(SIM_LOOPS)
SIM_CXX_tsan   := $(SIM_LOOPS)
SIM_CXX_msan   := $(SIM_LOOPS)

# The backend without the two files that name the libraries; the runtime and the CPU backend, which it is compared with, instrumented alike.
SIM_KERNELS := $(filter-out runtime/cuda/peers_nccl.cu,$(wildcard runtime/cuda/*.cu))
SIM_HOST    := $(filter-out runtime/cuda/gemm_cublaslt.c,$(wildcard runtime/cuda/*.c))
SIM_LIB     := $(wildcard base/*.c quant/*.c runtime/cpu/*.c) \
  $(addprefix runtime/,comm_seats.c comm_threads.c cuda_layout.c cuda_loader.c engine.c forward.c kv_cache.c measure.c rope.c session.c weights.c)
SIM_ENGINE  := $(wildcard tests/cuda_sim/*.cc)
SIM_TESTS   := $(patsubst tests/kernels/%.c,%,$(wildcard tests/kernels/test_*.c))
SIM_COMMON   = -g -ffunction-sections $(SIM_OPT_$(1)) $(SIM_SAN_$(1)) -fPIC -pthread -fno-strict-aliasing -fno-omit-frame-pointer -ffp-contract=off -ftls-model=initial-exec -I. -MMD -MP
SIM_C        = $(SIM_CLANG) -std=c17 -D_GNU_SOURCE -fvisibility=hidden $(WARN) $(SIM_COMMON)
SIM_CXX      = $(SIM_CLANG)++ -x c++ -std=c++17 -fvisibility=hidden -DK3_CUDA_SIM -DK3_CUDA_BLOCK_THREADS=64 -DK3_CUDA_WIDE_OUTPUTS=300 -Wall -Wextra -Wshadow -Wconversion -Werror $(SIM_COMMON) $(SIM_CXX_$(1)) \
  -Itests/cuda_sim/include -isystem $(SIM_CUDA_INC) $(if $(SIM_FAULT),-DK3_CUDA_FAULT=$(SIM_FAULT))

# Of the backend's host code. Weights come in small pieces, so that a small image turns the ring of buffers too.
SIM_HOST_FLAGS = -isystem $(SIM_CUDA_INC) -DK3_CUDA_ITEM_NBYTES=4096

# The simulator's own code is not seen by TSan: its bookkeeping would order, or race with, what the kernels do.
SIM_ENGINE_FLAGS_tsan := -fno-sanitize=thread -DSIM_TSAN

define SIM_RULES
$(SIM)/$(1)/%.cu.o: %.cu
	@mkdir -p $$(@D)
	$(call SIM_CXX,$(1)) -c -o $$@ $$<
$(SIM)/$(1)/tests/cuda_sim/%.o: tests/cuda_sim/%.cc
	@mkdir -p $$(@D)
	$(call SIM_CXX,$(1)) $(SIM_ENGINE_FLAGS_$(1)) -Itests/cuda_sim -c -o $$@ $$<
$(SIM)/$(1)/runtime/cuda/%.o: runtime/cuda/%.c
	@mkdir -p $$(@D)
	$(call SIM_C,$(1)) $(SIM_HOST_FLAGS) -c -o $$@ $$<
$(SIM)/$(1)/%_avx2.o: SIMD := -mavx2 -mfma -mf16c
$(SIM)/$(1)/%_avx512.o: SIMD := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
$(SIM)/$(1)/%.o: %.c
	@mkdir -p $$(@D)
	$(call SIM_C,$(1)) $$(SIMD) -c -o $$@ $$<
$(SIM)/$(1)/lib.a: $(SIM_LIB:%.c=$(SIM)/$(1)/%.o)
	@rm -f $$@
	$(AR) rcs $$@ $$^
$(SIM)/$(1)/libk3pack_cuda.so: $(SIM_KERNELS:%.cu=$(SIM)/$(1)/%.cu.o) $(SIM_HOST:%.c=$(SIM)/$(1)/%.o) $(SIM_ENGINE:%.cc=$(SIM)/$(1)/%.o) $(SIM)/$(1)/lib.a
	$(SIM_CLANG)++ -shared $(SIM_SAN_$(1)) -o $$@ $$^ -pthread -ldl -lz -Wl,--version-script=runtime/cuda/exports.map
# A test needs no parser of images: functions that would call one are left out with their sections.
$(SIM)/$(1)/test_%: $(SIM)/$(1)/tests/kernels/test_%.o $(SIM)/$(1)/tests/kernels/model.o $(SIM)/$(1)/lib.a
	$(SIM_CLANG)++ $(SIM_SAN_$(1)) -o $$@ $$^ -pthread -ldl -lm -Wl,--gc-sections
sim-$(1): $(SIM)/$(1)/libk3pack_cuda.so $(SIM_TESTS:%=$(SIM)/$(1)/%)
.PHONY: sim-$(1)
endef
$(foreach v,$(SIM_VARIANTS),$(eval $(call SIM_RULES,$(v))))
.PRECIOUS: $(SIM)/%.o

# The plug-in as it is built without NCCL.
$(SIM)/without_nccl/libk3pack_cuda.so: $(SIM)/plain/libk3pack_cuda.so $(SIM)/plain/runtime/cuda/peers_nccl.cu.o
	@mkdir -p $(@D)
	$(SIM_CLANG)++ -shared -o $@ $(SIM_KERNELS:%.cu=$(SIM)/plain/%.cu.o) $(SIM)/plain/runtime/cuda/peers_nccl.cu.o $(SIM_HOST:%.c=$(SIM)/plain/%.o) \
	  $(filter-out %/peers.o,$(SIM_ENGINE:%.cc=$(SIM)/plain/%.o)) $(SIM)/plain/lib.a -pthread -ldl -lz -Wl,--version-script=runtime/cuda/exports.map

# The plug-in of a build with one source compiled anew from FAULT_FOLDER (tests/cuda_sim/faults.sh).
FAULT_OBJECTS = $(filter-out $(SIM)/$(FAULT_BUILD)/$(FAULT_SOURCE).o $(SIM)/$(FAULT_BUILD)/$(FAULT_SOURCE:.c=.o),\
  $(SIM_KERNELS:%.cu=$(SIM)/$(FAULT_BUILD)/%.cu.o) $(SIM_HOST:%.c=$(SIM)/$(FAULT_BUILD)/%.o) $(SIM_ENGINE:%.cc=$(SIM)/$(FAULT_BUILD)/%.o))
sim-fault:
	$(if $(filter %.cu,$(FAULT_SOURCE)),$(call SIM_CXX,$(FAULT_BUILD)),$(call SIM_C,$(FAULT_BUILD)) $(SIM_HOST_FLAGS)) \
	  -iquote $(FAULT_FOLDER) -c -o $(FAULT_FOLDER)/fault.o $(FAULT_FOLDER)/$(FAULT_SOURCE)
	$(SIM_CLANG)++ -shared $(SIM_SAN_$(FAULT_BUILD)) -o $(FAULT_FOLDER)/libk3pack_cuda.so $(FAULT_FOLDER)/fault.o $(FAULT_OBJECTS) \
	  $(SIM)/$(FAULT_BUILD)/lib.a -pthread -ldl -lz -Wl,--version-script=runtime/cuda/exports.map

sim-builds: $(SIM_VARIANTS:%=sim-%) $(SIM)/without_nccl/libk3pack_cuda.so

test-sim: all sim-builds
	sh tests/cuda_sim/run.sh $(B)

#help   test-sim-full  a drafter of the published geometry, BF16 and NVFP4, in the simulator: 24 GB of disk in FULL_DIR (default build/full), some minutes
test-sim-full: all sim-plain
	sh tests/cuda_sim/full.sh $(B)
.PHONY: sim-fault sim-builds test-sim test-sim-full

-include $(shell find $(SIM) -name '*.d' 2>/dev/null)

# On a machine with GPUs: the same comparison on the devices, and under compute-sanitizer.
#help   test-gpu       the CUDA backend on the GPUs at hand, also under compute-sanitizer (nvcc and a driver)
$(B)/gpu_test_%: tests/kernels/test_%.c tests/kernels/model.c $(B)/libk3pack.a
	$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) -o $@ $< tests/kernels/model.c $(B)/libk3pack.a $(LIBS)

test-gpu: all cuda $(B)/gpu_test_forward $(B)/gpu_test_refusals $(B)/gpu_test_steps
	sh tests/kernels/run_gpu.sh $(B)
.PHONY: test-gpu

# What a machine with GPUs needs, made on one without: no compiler, no headers, no network there. `make -C build/carry test-gpu bench-gpu`.
#help   carry          a folder build/carry to copy to a GPU machine: STATIC=1 program, plug-in and tests, with test-gpu and bench-gpu of its own
CARRY      := build/carry
CARRIED    := build/release/k3pack build/release/libk3pack.so build/release/libk3pack_cuda.so build/release/gpu_test_forward build/release/gpu_test_refusals build/release/gpu_test_steps
CARRY_TREE := tests/kernels/run_gpu.sh tests/kernels/golden.sh tests/bench/gpu fixtures/dspark fixtures/gen
carry:
	$(MAKE) STATIC=1 B=build/static all cuda build/static/gpu_test_forward build/static/gpu_test_refusals build/static/gpu_test_steps
	@for file in $(CARRIED:build/release/%=build/static/%); do \
	  ! readelf -d $$file | grep NEEDED | grep -E 'libjansson|libpcre2|libcrypto|libz\.' || { echo "$$file is not static"; exit 1; }; done
	rm -rf $(CARRY)
	mkdir -p $(CARRY)/build/release
	cp $(CARRIED:build/release/%=build/static/%) $(CARRY)/build/release/
	tar -cf - --exclude=__pycache__ $(CARRY_TREE) | tar -xf - -C $(CARRY)
	cp tests/kernels/carried.mk $(CARRY)/Makefile
.PHONY: carry
