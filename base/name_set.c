#include "base/name_set.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/alloc.h"

static uint64_t hash_key[2];
static pthread_once_t hash_key_once = PTHREAD_ONCE_INIT;

static void make_hash_key(void) {
  if (getrandom(hash_key, sizeof hash_key, GRND_NONBLOCK) == (ssize_t)sizeof hash_key)
    return;
  // Before the kernel's pool is filled: the clock and the place of the stack are better than a constant.
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  hash_key[0] = (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15u ^ (uint64_t)now.tv_sec;
  hash_key[1] = (uint64_t)(uintptr_t)&now * 0xC2B2AE3D27D4EB4Fu ^ hash_key[0] >> 7;
}

// Folds the 128-bit product. The operands carry key bits, so that no input can force one of them to zero and thereby erase the other.
static uint64_t fold(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t k3_name_hash(const char *name, size_t nbytes) {
  pthread_once(&hash_key_once, make_hash_key);
  uint64_t state = hash_key[0] ^ nbytes * 0x9E3779B97F4A7C15u, word[2];
  size_t i = 0;
  for (; nbytes - i >= 16; i += 16) {
    memcpy(word, name + i, 16);
    state = fold(word[0] ^ state, word[1] ^ hash_key[1]);
  }
  word[0] = word[1] = 0;
  memcpy(word, name + i, nbytes - i);
  state = fold(word[0] ^ state, word[1] ^ hash_key[1]);
  return fold(state ^ hash_key[1], hash_key[0] | 1);
}

enum k3_status k3_name_set_reserve(struct k3_name_set *set, size_t n, struct k3_error *err) {
  size_t n_slots = 16;
  while (n_slots < UINT32_MAX && n_slots / 3 * 2 < n)
    n_slots *= 2;
  if (n_slots > UINT32_MAX)
    return k3_fail_memory(err, n);
  if (set->slots && n_slots <= (size_t)set->mask + 1)
    return K3_OK;
  struct k3_name_slot *slots = k3_calloc(n_slots, sizeof *slots, err);
  if (!slots)
    return K3_NO_MEMORY;
  uint32_t mask = (uint32_t)(n_slots - 1);
  for (size_t i = 0; set->slots && i <= set->mask; i++) {
    if (set->slots[i].number_plus_1 == 0)
      continue;
    uint32_t at = set->slots[i].tag & mask;
    while (slots[at].number_plus_1 != 0)
      at = (at + 1) & mask;
    slots[at] = set->slots[i];
  }
  k3_free(set->slots);
  set->slots = slots;
  set->mask = mask;
  return K3_OK;
}

// Slot of the name, or the empty slot where it would go. The set has slots.
static uint32_t slot_of(const struct k3_name_set *set, uint32_t tag, k3_name_equal_fn equal, const void *owner, const char *name, size_t nbytes) {
  uint32_t at = tag & set->mask;
  for (; set->slots[at].number_plus_1 != 0; at = (at + 1) & set->mask) {
    if (set->slots[at].tag == tag && equal(owner, set->slots[at].number_plus_1 - 1, name, nbytes))
      break;
  }
  return at;
}

uint32_t k3_name_set_find(const struct k3_name_set *set, k3_name_equal_fn equal, const void *owner, const char *name, size_t nbytes) {
  if (!set->slots)
    return K3_NAME_NONE;
  uint32_t at = slot_of(set, (uint32_t)k3_name_hash(name, nbytes), equal, owner, name, nbytes);
  return set->slots[at].number_plus_1 - 1;  // 0 - 1 is K3_NAME_NONE
}

enum k3_status k3_name_set_add(struct k3_name_set *set, k3_name_equal_fn equal, const void *owner, const char *name, size_t nbytes, uint32_t number,
                               uint32_t *earlier, struct k3_error *err) {
  K3_TRY(k3_name_set_reserve(set, (size_t)set->n_used + 1, err));
  uint32_t tag = (uint32_t)k3_name_hash(name, nbytes);
  uint32_t at = slot_of(set, tag, equal, owner, name, nbytes);
  *earlier = set->slots[at].number_plus_1 - 1;
  if (*earlier == K3_NAME_NONE) {
    set->slots[at] = (struct k3_name_slot){tag, number + 1};
    set->n_used++;
  }
  return K3_OK;
}

void k3_name_set_free(struct k3_name_set *set) {
  k3_free(set->slots);
  *set = (struct k3_name_set){0};
}
