# k3pack. `make help` lists the targets.
config ?= release
CC     ?= cc
B      := build/$(config)

WARN   := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wformat=2 -Wvla -Wundef -Werror
# No -ffast-math, no -march=native, no contraction: packed bytes and drafts must not depend on the compiler or the machine.
CFLAGS_COMMON   := -std=c17 -D_GNU_SOURCE -I. -ffp-contract=off -fno-math-errno -fPIC -pthread -fvisibility=hidden $(WARN)
CFLAGS_release  := -O3 -g
CFLAGS_debug    := -O0 -g3
CFLAGS_sanitize := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
CFLAGS_coverage := -O0 -g --coverage
LDFLAGS_sanitize := -fsanitize=address,undefined
LDFLAGS_coverage := --coverage
CFLAGS_ALL  := $(CFLAGS_COMMON) $(CFLAGS_$(config)) $(CFLAGS)
LDFLAGS_ALL := -pthread $(LDFLAGS_$(config)) $(LDFLAGS)

# STATIC=1 links jansson, PCRE2, zlib and libcrypto into the program; it then needs the C library alone.
LIBS_OPEN := -ljansson -lpcre2-8 -lcrypto -lz
ifeq ($(STATIC),1)
LIBS := -Wl,-Bstatic $(LIBS_OPEN) -Wl,-Bdynamic -ldl -lm
else
LIBS := $(LIBS_OPEN) -ldl -lm
endif

LIB_DIRS := base formats loader quant runtime runtime/cpu
LIB_SRC  := $(foreach d,$(LIB_DIRS),$(wildcard $(d)/*.c))
RECIPES  := $(wildcard loader/recipes/*.json)
LIB_OBJ  := $(LIB_SRC:%.c=$(B)/%.o) $(if $(RECIPES),$(B)/loader/recipes.gen.o)
CLI_OBJ  := $(patsubst %.c,$(B)/%.o,$(wildcard cli/*.c))
UNIT     := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))

all: $(B)/k3pack $(B)/libk3pack.a

$(B)/libk3pack.a: $(LIB_OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/k3pack: $(CLI_OBJ) $(B)/libk3pack.a
	$(CC) $(LDFLAGS_ALL) -o $@ $(CLI_OBJ) $(B)/libk3pack.a $(LIBS)

# A file whose name ends in an instruction set is compiled for it and called after a run-time check (base/cpu.h).
$(B)/%_avx2.o: SIMD := -mavx2 -mfma -mf16c
$(B)/%_avx512.o: SIMD := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) $(SIMD) -MMD -MP -c -o $@ $<

$(B)/loader/recipes.gen.c: $(RECIPES) loader/recipes/embed.sh
	@mkdir -p $(@D)
	sh loader/recipes/embed.sh $(RECIPES) > $@.tmp && mv $@.tmp $@

$(B)/loader/recipes.gen.o: $(B)/loader/recipes.gen.c
	$(CC) $(CFLAGS_ALL) -c -o $@ $<

# Unit tests: one cmocka program per tests/unit/test_*.c.
$(B)/tests/%: tests/unit/%.c $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -MMD -MP -MF $@.d -Itests/unit $(LDFLAGS_ALL) -o $@ $< $(B)/libk3pack.a -lcmocka $(LIBS)

# Faults within a verb: this test calls the verbs' own functions.
$(B)/libcli.a: $(filter-out $(B)/cli/main.o,$(CLI_OBJ))
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/tests/test_faults: tests/unit/test_faults.c $(B)/libcli.a $(B)/libk3pack.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -MMD -MP -MF $@.d -Itests/unit $(LDFLAGS_ALL) -o $@ $< $(B)/libcli.a $(B)/libk3pack.a -lcmocka $(LIBS)

include $(wildcard tests/*.mk runtime/*.mk)

unit: $(UNIT)

test: all $(UNIT)
	CC="$(CC)" K3PACK_LDFLAGS="$(LDFLAGS_$(config))" sh tests/run.sh $(B)

format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')

clean:
	rm -rf build

help:
	@echo "make [config=release|debug|sanitize|coverage] [CC=clang] [STATIC=1] TARGET"
	@echo "  all            the program build/<config>/k3pack and the library"
	@echo "  test           unit, command line, layer and corpus tests (no GPU)"
	@sed -n 's/^#help //p' $(wildcard tests/*.mk runtime/*.mk)
	@echo "  format         clang-format over every source file"
	@echo "  clean          removes build/"

-include $(shell find $(B) -name '*.d' 2>/dev/null)

.PHONY: all unit test format clean help
.DELETE_ON_ERROR:
