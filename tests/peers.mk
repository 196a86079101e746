#help   test-peers     our reader, encoders and exports against safetensors, compressed-tensors, ModelOpt and llm-compressor, decoder layers against
#help                  PyTorch, from PyPI into build/peers-venv (8 GB)
PYTHON ?= python3
# An interpreter that has the packages already can be given: make test-peers PEERS_PYTHON=.../python
PEERS_PYTHON ?= build/peers-venv/bin/python
# NumPy below 2.4: with the PyTorch that llmcompressor asks for comes a Triton whose interpreter takes no later one.
PEERS_PACKAGES := 'numpy<2.4' safetensors torch compressed-tensors nvidia-modelopt requests tqdm pulp scipy nvidia-ml-py rich regex omegaconf

$(B)/peers/read_headers: tests/peers/read_headers.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

# In one go, since llmcompressor asks for exact versions of others. Where it cannot be had, one test makes its file another way and says so.
build/peers-venv/bin/python:
	$(PYTHON) -m venv build/peers-venv
	build/peers-venv/bin/pip install -q $(PEERS_PACKAGES) llmcompressor || build/peers-venv/bin/pip install -q $(PEERS_PACKAGES)

test-peers: all $(B)/peers/read_headers $(PEERS_PYTHON) $(if $(and $(SIM_CUDA),$(shell command -v $(SIM_CLANG))),sim-plain)
	$(PEERS_PYTHON) tests/peers/diff_safetensors.py $(B)/peers/read_headers
	$(PEERS_PYTHON) -W ignore tests/peers/quantised.py $(B)/k3pack
	$(PEERS_PYTHON) tests/peers/moe_layers.py $(B)/k3pack
	sh tests/bench/gpu/smoke.sh $(B) $(PEERS_PYTHON) $(SIM)/plain/libk3pack_cuda.so

#help   bench-quant-peers  our encoders beside torch and compressed-tensors, interleaved, as ratios (PEERS_PYTHON; SCHEMES DTYPES THREADS RUNS CLOCK)
$(B)/peers/quant_shared.so: tests/bench/quant_shared.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -shared -MMD -MP -MF $@.d $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

# The C library keeps freed pages, so that nobody pays for the page faults of new results.
bench-quant-peers: $(B)/peers/quant_shared.so $(PEERS_PYTHON)
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 $(PEERS_PYTHON) -W ignore tests/bench/bench_quant_peers.py $<

.PHONY: test-peers bench-quant-peers
