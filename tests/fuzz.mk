#help   fuzz           libFuzzer over every parser, FUZZ_SECONDS=60 each (FUZZ_TARGETS="header index" picks); needs clang
#help   fuzz-coverage  fails when the corpus covers less than 95% of a parser's lines, or has 2 MB (gcc and its gcov)
#help   fuzz-merge     adds what `make fuzz` found and what covers new code to tests/fuzz/corpus
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FUZZ_BUILD   := build/fuzz
FUZZ_COVERAGE := build/fuzz-coverage
FUZZ_CC      ?= clang
FUZZ_SANITIZE := address,undefined
# On the command line, because the Makefile has used the flags of its configuration before it reads this file.
FUZZ_MAKE     = $(MAKE) CC=$(FUZZ_CC) config=fuzz B=$(FUZZ_BUILD) FUZZ_TARGETS="$(FUZZ_TARGETS)" LDFLAGS_fuzz="-fsanitize=$(FUZZ_SANITIZE)" \
  CFLAGS_fuzz="-O1 -g -fsanitize=fuzzer-no-link,$(FUZZ_SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer"
FUZZ_FLAGS   := -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=16384 -dict=tests/fuzz/json.dict -print_final_stats=1

$(B)/fuzz/replay_%: tests/fuzz/fuzz_%.c tests/fuzz/replay.c tests/fuzz/fuzz.h $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(LDFLAGS_ALL) -o $@ $< tests/fuzz/replay.c $(B)/libk3pack.a $(LIBS)

$(B)/fuzz/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/fuzz.h $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -fsanitize=fuzzer $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a $(LIBS)

# The corpus is replayed by tests/cli/test_fuzz_corpus.sh.
test: $(FUZZ_TARGETS:%=$(B)/fuzz/replay_%)

fuzz-engines: $(FUZZ_TARGETS:%=$(B)/fuzz/fuzz_%)

fuzz:
	$(FUZZ_MAKE) fuzz-engines
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p $(FUZZ_BUILD)/corpus/$$target tests/fuzz/corpus/$$target; \
	  echo "fuzz $$target: $(FUZZ_SECONDS) s"; \
	  $(FUZZ_BUILD)/fuzz/fuzz_$$target $(FUZZ_FLAGS) -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$(FUZZ_BUILD)/$$target- \
	    $(FUZZ_BUILD)/corpus/$$target tests/fuzz/corpus/$$target fixtures/reject >$(FUZZ_BUILD)/$$target.log 2>&1 || \
	    { tail -n 60 $(FUZZ_BUILD)/$$target.log; exit 1; }; \
	  grep -E 'number_of_executed_units|peak_rss' $(FUZZ_BUILD)/$$target.log; \
	done

fuzz-merge:
	$(FUZZ_MAKE) fuzz-engines
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p $(FUZZ_BUILD)/corpus/$$target tests/fuzz/corpus/$$target; \
	  $(FUZZ_BUILD)/fuzz/fuzz_$$target $(FUZZ_FLAGS) -use_counters=0 -merge=1 tests/fuzz/corpus/$$target $(FUZZ_BUILD)/corpus/$$target 2>&1 | tail -n 1; \
	done

# Only what the targets call is built: the parsers, and the mapper, which reads names by a recipe.
fuzz-coverage:
	$(MAKE) config=coverage B=$(FUZZ_COVERAGE) LIB_SRC="$(wildcard base/*.c formats/*.c) loader/mapper.c" RECIPES= $(FUZZ_TARGETS:%=$(FUZZ_COVERAGE)/fuzz/replay_%)
	sh tests/fuzz/coverage.sh $(FUZZ_COVERAGE)

.PHONY: fuzz fuzz-coverage fuzz-engines fuzz-merge
