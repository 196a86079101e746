# The CUDA plug-in. Nothing else needs CUDA.
#help   cuda           the plug-in build/<config>/libk3pack_cuda.so (CUDA 13 with nvcc and cuBLASLt; NCCL 2.28 for several ranks)
#help   cuda-resources registers, shared memory and spills of every kernel; fails when one spills
CUDA_ARCHS   := -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100a,code=sm_100a -gencode arch=compute_90,code=compute_90
CUDA_KERNELS := $(wildcard runtime/cuda/*.cu)
CUDA_HOST    := $(wildcard runtime/cuda/*.c)
CUDA_OBJ     := $(CUDA_KERNELS:%.cu=$(B)/%.cu.o) $(CUDA_HOST:%.c=$(B)/%.host.o)
# NCCL by -I, which comes before the toolkit's own folder: a header of another version there would not be of the library that was found.
NVCC_FLAGS    = -std=c++17 -O3 -I. $(CUDA_ARCHS) -Werror all-warnings -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wshadow \
  -Xptxas -v,-warn-spills $(if $(NCCL_LIBRARY),-DK3_CUDA_NCCL -I$(NCCL_INCLUDE))

# What was found, for this run of make; nothing is searched unless a CUDA target is asked for.
ifneq ($(filter cuda cuda-resources test-gpu bench-gpu %libk3pack_cuda.so,$(MAKECMDGOALS)),)
$(shell mkdir -p $(B)/runtime/cuda && { sh runtime/cuda/find.sh || echo CUDA_MISSING := 1; } > $(B)/runtime/cuda/found.mk)
include $(B)/runtime/cuda/found.mk
ifdef CUDA_MISSING
$(error the CUDA plug-in cannot be built here)
endif
endif

cuda: $(B)/libk3pack_cuda.so

# What ptxas says of a kernel is kept beside its object.
$(B)/runtime/cuda/%.cu.o: runtime/cuda/%.cu $(wildcard runtime/cuda/*.cuh runtime/cuda/*.h)
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c -o $@ $< >$(@:.o=.log) 2>&1 || { cat $(@:.o=.log); rm -f $@; exit 1; }
	@grep -E 'warning|error' $(@:.o=.log) && { rm -f $@; exit 1; } || true

$(B)/runtime/cuda/%.host.o: runtime/cuda/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -isystem $(CUDA_INCLUDE) -isystem $(CUBLASLT_INCLUDE) -MMD -MP -c -o $@ $<

# nvcc takes no file called *.so.2, which is all that a Python package has; the linker finds it by its exact name.
cuda_library = $(if $(1),-L$(dir $(1)) -l:$(notdir $(1)) -Xlinker -rpath=$(dir $(1)))

$(B)/libk3pack_cuda.so: $(CUDA_OBJ) $(B)/libk3pack.a runtime/cuda/exports.map
	$(NVCC) -shared -cudart static $(CUDA_ARCHS) -o $@ $(CUDA_OBJ) $(B)/libk3pack.a $(call cuda_library,$(CUBLASLT_LIBRARY)) \
	  $(call cuda_library,$(NCCL_LIBRARY)) -Xlinker --version-script=runtime/cuda/exports.map \
	  $(if $(filter 1,$(STATIC)),$(shell $(CC) -print-file-name=libz.a),-lz)

cuda-resources: $(CUDA_OBJ)
	sh runtime/cuda/resources.sh $(CUDA_KERNELS:%.cu=$(B)/%.cu.log)

.PHONY: cuda cuda-resources
