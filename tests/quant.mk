# Benchmark of the encoders and decoders.
#help   bench-quant    rates of quant/ as ratios to memcpy in the same run, per instruction set
$(B)/tests/bench_quant: tests/bench/bench_quant.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -MMD -MP -MF $@.d $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

bench-quant: $(B)/tests/bench_quant
	$(B)/tests/bench_quant

.PHONY: bench-quant
