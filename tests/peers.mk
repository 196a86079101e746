#help   test-peers     our safetensors reader against the reference one (Python package safetensors, PYTHON=python3)
PYTHON ?= python3

$(B)/peers/read_headers: tests/peers/read_headers.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

test-peers: $(B)/peers/read_headers
	$(PYTHON) tests/peers/diff_safetensors.py $<

.PHONY: test-peers
