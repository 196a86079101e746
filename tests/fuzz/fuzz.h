// What every fuzz target shares. A target is one file tests/fuzz/fuzz_<name>.c that defines LLVMFuzzerTestOneInput; the Makefile finds it, links it
// with replay.c for `make test` and with libFuzzer for `make fuzz`; its seeds lie in tests/fuzz/corpus/<name>/. Its first
// lines hold one "// covers: FILE ..." that names the parsers of which the corpus must execute 95% of the lines (`make fuzz-coverage`).
#ifndef K3_TESTS_FUZZ_FUZZ_H
#define K3_TESTS_FUZZ_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

// An invariant: when it does not hold, the input is a finding.
#define FUZZ_CHECK(condition)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                       \
    }                                                                                \
  } while (0)

enum { FUZZ_MAX_NBYTES = 1 << 20 };

// A copy of the input whose last byte is followed by an unmapped page (and whose area is preceded by one), so that reading past it traps even without
// a sanitizer. Valid until the next call. Inputs above FUZZ_MAX_NBYTES are cut.
static inline const char *fuzz_guarded(const uint8_t *data, size_t *nbytes) {
  static char *area;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  if (!area) {
    char *map = mmap(NULL, FUZZ_MAX_NBYTES + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FUZZ_CHECK(map != MAP_FAILED && mprotect(map + page, FUZZ_MAX_NBYTES, PROT_READ | PROT_WRITE) == 0);
    area = map + page;
  }
  if (*nbytes > FUZZ_MAX_NBYTES)
    *nbytes = FUZZ_MAX_NBYTES;
  char *copy = area + FUZZ_MAX_NBYTES - *nbytes;
  if (*nbytes > 0)
    memcpy(copy, data, *nbytes);
  return copy;
}

// No single allocation of the library may be larger than this in an input's service: what a small file can make a parser ask for is bounded by its
// own size. The parser then fails with K3_NO_MEMORY, which a target must treat as a finding (FUZZ_CHECK(status != K3_NO_MEMORY)).
static inline void fuzz_cap_allocations(size_t input_nbytes) {
  k3_alloc_set_limit(32 * input_nbytes + (512 << 10));
}

// One allocation of what follows fails, which one depends on the input; after fuzz_fail_none none does. jansson's own allocations count too once
// fuzz_count_jansson was called (by targets that include jansson.h before).
static inline void fuzz_fail_one(const uint8_t *data, size_t nbytes, unsigned n_allocations) {
  k3_alloc_fail_at(1 + (nbytes * 7 + (nbytes ? data[nbytes / 2] : 0)) % n_allocations);
}

static inline void fuzz_fail_none(void) {
  k3_alloc_fail_at(0);
}

#ifdef JANSSON_H
static inline void *fuzz_counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

static inline void fuzz_count_jansson(void) {
  json_set_alloc_funcs(fuzz_counted_malloc, k3_free);
}
#endif

#endif
