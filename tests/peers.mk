#help   test-peers     our reader, encoders and exports against safetensors, compressed-tensors and ModelOpt, decoder layers against PyTorch, from PyPI
#help                  into build/peers-venv
PYTHON ?= python3
# An interpreter that has the packages already can be given: make test-peers PEERS_PYTHON=.../python
PEERS_PYTHON ?= build/peers-venv/bin/python
PEERS_PACKAGES := numpy safetensors torch compressed-tensors nvidia-modelopt requests tqdm pulp scipy nvidia-ml-py rich regex omegaconf

$(B)/peers/read_headers: tests/peers/read_headers.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

# llmcompressor asks for exact versions of others; without it one test makes its file another way and says so.
build/peers-venv/bin/python:
	$(PYTHON) -m venv build/peers-venv
	build/peers-venv/bin/pip install -q $(PEERS_PACKAGES)
	-build/peers-venv/bin/pip install -q llmcompressor

test-peers: all $(B)/peers/read_headers $(PEERS_PYTHON)
	$(PEERS_PYTHON) tests/peers/diff_safetensors.py $(B)/peers/read_headers
	$(PEERS_PYTHON) -W ignore tests/peers/quantised.py $(B)/k3pack
	$(PEERS_PYTHON) tests/peers/moe_layers.py $(B)/k3pack

.PHONY: test-peers
