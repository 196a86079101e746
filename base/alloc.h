// Memory: the C library's allocator behind functions that report errors, check products and can be made to fail by a test.
#ifndef K3_BASE_ALLOC_H
#define K3_BASE_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

// n_elems * elem_nbytes bytes, zeroed; free with k3_free. n_elems 0 gives a valid pointer. On overflow or failure: NULL, *err filled.
void *k3_calloc(size_t n_elems, size_t elem_nbytes, struct k3_error *err);
// Memory aligned to `align_nbytes` (a power of two >= sizeof(void *)), not zeroed; free with k3_free. NULL and *err on failure.
void *k3_alloc_aligned(size_t nbytes, size_t align_nbytes, struct k3_error *err);
// Grows *array (NULL at first) so that it holds at least n_needed elements; capacity doubles. New elements are not initialised.
// On failure *array and *capacity are unchanged and still owned by the caller.
enum k3_status k3_grow(void *array_ptr, size_t *capacity, size_t n_needed, size_t elem_nbytes, struct k3_error *err);
// Terminated copy of nbytes bytes of src; free with k3_free.
char *k3_strndup(const char *src, size_t nbytes, struct k3_error *err);
// Terminated formatted text; free with k3_free.
char *k3_asprintf(struct k3_error *err, const char *format, ...) K3_PRINTF(2, 3);
void k3_free(void *ptr);  // NULL is a no-op

// An arena: many small objects that die together. Zero-initialise; free with k3_arena_free. Not thread-safe.
struct k3_arena {
  struct k3_arena_block *blocks;
  size_t used_nbytes, block_nbytes;  // within the newest block
};
void *k3_arena_alloc(struct k3_arena *arena, size_t nbytes, struct k3_error *err);  // aligned to 8, not zeroed
char *k3_arena_strndup(struct k3_arena *arena, const char *src, size_t nbytes, struct k3_error *err);
void k3_arena_free(struct k3_arena *arena);

// Test hooks. After k3_alloc_fail_at(n) the n-th allocation from now (1 = the next) fails, once; 0 switches it off.
// k3_alloc_count gives the number of allocations since the program began (any thread). After k3_alloc_set_limit(nbytes) every single allocation above
// that size fails; 0 switches it off.
void k3_alloc_fail_at(uint64_t n);
void k3_alloc_set_limit(size_t nbytes);
uint64_t k3_alloc_count(void);

#endif
