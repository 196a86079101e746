// A set of names that live elsewhere (an array, a text): the set holds 32 hash bits and a number per name, 8 bytes at a load of at most 2/3, so that
// half a million names need no copy. The hash is keyed with random bits of the process: names chosen by an attacker collide no more than others.
// The numbers are whatever the owner identifies a name by: an array index, an offset.
#ifndef K3_BASE_NAME_SET_H
#define K3_BASE_NAME_SET_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum { K3_NAME_NONE = 0xFFFFFFFF };  // no such name; so the largest number is 0xFFFFFFFE

struct k3_name_slot {
  uint32_t tag, number_plus_1;  // 0: empty
};

// Zero-initialise; release with k3_name_set_free. Look-ups may run on several threads once nothing is added any more.
struct k3_name_set {
  struct k3_name_slot *slots;
  uint32_t mask;
  uint32_t n_used;
};

// Is the name with this number equal to the nbytes bytes at `name`? Called only when 32 hash bits agree.
typedef bool (*k3_name_equal_fn)(const void *owner, uint32_t number, const char *name, size_t nbytes);

// Hash of a name, the same within one run of the program, different in the next.
uint64_t k3_name_hash(const char *name, size_t nbytes);

// Makes room for n names (growing later is possible, and costs a moment of both tables). K3_NO_MEMORY leaves the set as it was.
enum k3_status k3_name_set_reserve(struct k3_name_set *set, size_t n, struct k3_error *err);
// Number of the name, or K3_NAME_NONE.
uint32_t k3_name_set_find(const struct k3_name_set *set, k3_name_equal_fn equal, const void *owner, const char *name, size_t nbytes);
// Adds the name under `number`. *earlier becomes K3_NAME_NONE, or the number under which it was there before, and then the set is unchanged.
enum k3_status k3_name_set_add(struct k3_name_set *set, k3_name_equal_fn equal, const void *owner, const char *name, size_t nbytes, uint32_t number,
                               uint32_t *earlier, struct k3_error *err);
void k3_name_set_free(struct k3_name_set *set);

#endif
