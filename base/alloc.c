#include "base/alloc.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Atomic uint64_t alloc_count, fail_at;
static _Atomic size_t limit_nbytes = SIZE_MAX;

// Counts one allocation; true when this is the one that a test wants to fail.
static bool must_fail(size_t nbytes) {
  uint64_t index = atomic_fetch_add_explicit(&alloc_count, 1, memory_order_relaxed) + 1;
  return index == atomic_load_explicit(&fail_at, memory_order_relaxed) || nbytes > atomic_load_explicit(&limit_nbytes, memory_order_relaxed);
}

void k3_alloc_set_limit(size_t nbytes) {
  atomic_store(&limit_nbytes, nbytes ? nbytes : SIZE_MAX);
}

void k3_alloc_fail_at(uint64_t n) {
  atomic_store(&fail_at, n ? atomic_load(&alloc_count) + n : 0);
}

uint64_t k3_alloc_count(void) {
  return atomic_load(&alloc_count);
}

void *k3_calloc(size_t n_elems, size_t elem_nbytes, struct k3_error *err) {
  size_t nbytes;
  if (__builtin_mul_overflow(n_elems, elem_nbytes, &nbytes)) {
    k3_fail_memory(err, SIZE_MAX);
    return NULL;
  }
  void *ptr = must_fail(nbytes) ? NULL : calloc(nbytes ? nbytes : 1, 1);
  if (!ptr)
    k3_fail_memory(err, nbytes);
  return ptr;
}

void *k3_alloc_aligned(size_t nbytes, size_t align_nbytes, struct k3_error *err) {
  void *ptr = NULL;
  if (must_fail(nbytes) || posix_memalign(&ptr, align_nbytes, nbytes ? nbytes : 1) != 0) {
    k3_fail_memory(err, nbytes);
    return NULL;
  }
  return ptr;
}

enum k3_status k3_grow(void *array_ptr, size_t *capacity, size_t n_needed, size_t elem_nbytes, struct k3_error *err) {
  if (n_needed <= *capacity)
    return K3_OK;
  // Growing by half keeps the peak (old and new copy) at 2.5 x the content instead of 3 x.
  size_t n_new = *capacity + *capacity / 2 + 16, nbytes;
  if (n_new < n_needed)
    n_new = n_needed;
  void *old;
  memcpy(&old, array_ptr, sizeof old);  // array_ptr points to a pointer of any object type
  if (__builtin_mul_overflow(n_new, elem_nbytes, &nbytes))
    return k3_fail_memory(err, SIZE_MAX);
  void *grown = must_fail(nbytes) ? NULL : realloc(old, nbytes);
  if (!grown)
    return k3_fail_memory(err, nbytes);
  memcpy(array_ptr, &grown, sizeof grown);
  *capacity = n_new;
  return K3_OK;
}

char *k3_strndup(const char *src, size_t nbytes, struct k3_error *err) {
  char *copy = k3_calloc(nbytes + 1, 1, err);
  if (copy)
    memcpy(copy, src, nbytes);
  return copy;
}

char *k3_asprintf(struct k3_error *err, const char *format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  int n = vsnprintf(NULL, 0, format, args);
  char *text = n < 0 ? NULL : k3_calloc((size_t)n + 1, 1, err);
  if (text)
    vsnprintf(text, (size_t)n + 1, format, again);
  va_end(again);
  va_end(args);
  return text;
}

void k3_free(void *ptr) {
  free(ptr);
}

struct k3_arena_block {
  struct k3_arena_block *next;
  max_align_t bytes[];
};

void *k3_arena_alloc(struct k3_arena *arena, size_t nbytes, struct k3_error *err) {
  enum { FIRST_BLOCK_NBYTES = 4 << 10, LARGEST_BLOCK_NBYTES = 256 << 10 };
  size_t rounded = (nbytes + 7) & ~(size_t)7;
  if (rounded < nbytes) {
    k3_fail_memory(err, nbytes);
    return NULL;
  }
  arena->used_nbytes = (arena->used_nbytes + 7) & ~(size_t)7;  // behind a text it may be odd
  if (!arena->blocks || arena->block_nbytes - arena->used_nbytes < rounded) {
    // Blocks double, so that an arena of few objects stays small and one of many needs few blocks.
    size_t usual = arena->blocks ? 2 * arena->block_nbytes : FIRST_BLOCK_NBYTES, total;
    usual = usual < LARGEST_BLOCK_NBYTES ? usual : LARGEST_BLOCK_NBYTES;
    size_t block_nbytes = rounded > usual ? rounded : usual;
    if (__builtin_add_overflow(block_nbytes, sizeof(struct k3_arena_block), &total)) {
      k3_fail_memory(err, nbytes);
      return NULL;
    }
    struct k3_arena_block *block = must_fail(total) ? NULL : malloc(total);
    if (!block) {
      k3_fail_memory(err, total);
      return NULL;
    }
    block->next = arena->blocks;
    arena->blocks = block;
    arena->used_nbytes = 0;
    arena->block_nbytes = block_nbytes;
  }
  void *ptr = (unsigned char *)arena->blocks->bytes + arena->used_nbytes;
  arena->used_nbytes += rounded;
  return ptr;
}

// Texts stand without padding: a checkpoint has half a million names.
char *k3_arena_strndup(struct k3_arena *arena, const char *src, size_t nbytes, struct k3_error *err) {
  char *copy;
  if (arena->blocks && nbytes < arena->block_nbytes - arena->used_nbytes) {
    copy = (char *)arena->blocks->bytes + arena->used_nbytes;
    arena->used_nbytes += nbytes + 1;
  } else if ((copy = k3_arena_alloc(arena, nbytes + 1, err))) {
    arena->used_nbytes -= ((nbytes + 1 + 7) & ~(size_t)7) - (nbytes + 1);
  }
  if (copy) {
    memcpy(copy, src, nbytes);
    copy[nbytes] = '\0';
  }
  return copy;
}

void k3_arena_free(struct k3_arena *arena) {
  while (arena->blocks) {
    struct k3_arena_block *next = arena->blocks->next;
    free(arena->blocks);
    arena->blocks = next;
  }
  arena->used_nbytes = arena->block_nbytes = 0;
}
