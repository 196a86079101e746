// SHA-256, CRC-32 and the set of names.
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/name_set.h"
#include "unit.h"

// Vectors of FIPS 180-2, appendix B, and the empty message.
static void sha256_vectors(void **state) {
  (void)state;
  static char million[1000000];
  memset(million, 'a', sizeof million);
  const struct {
    const char *src;
    size_t nbytes;
    const char *hex;
  } cases[] = {
      {"", 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {million, sizeof million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    uint8_t digest[K3_SHA256_NBYTES];
    char hex[2 * K3_SHA256_NBYTES + 1];
    assert_int_equal(k3_sha256(cases[i].src, cases[i].nbytes, digest, NULL), K3_OK);
    k3_hex(hex, digest);
    assert_string_equal(hex, cases[i].hex);
    struct k3_sha256 *stream = k3_sha256_create(NULL);
    assert_non_null(stream);
    for (size_t at = 0; at < cases[i].nbytes;) {
      size_t n = at % 97 + 1;
      n = n < cases[i].nbytes - at ? n : cases[i].nbytes - at;
      assert_int_equal(k3_sha256_update(stream, cases[i].src + at, n, NULL), K3_OK);
      at += n;
    }
    assert_int_equal(k3_sha256_finish(stream, digest, NULL), K3_OK);
    k3_sha256_free(stream);
    k3_hex(hex, digest);
    assert_string_equal(hex, cases[i].hex);
  }
  k3_sha256_free(NULL);
  k3_alloc_fail_at(1);
  struct k3_error err = {0};
  assert_null(k3_sha256_create(&err));
  assert_int_equal(err.status, K3_NO_MEMORY);
}

// The check value of the CRC catalogue, and one more.
static void crc32_vectors(void **state) {
  (void)state;
  assert_int_equal(k3_crc32("123456789", 9), 0xCBF43926u);
  assert_int_equal(k3_crc32("", 0), 0);
  assert_int_equal(k3_crc32("The quick brown fox jumps over the lazy dog", 43), 0x414FA339u);
}

enum { N_NAMES = 20000, NAME_NBYTES = 24 };
static char names[N_NAMES][NAME_NBYTES];

static bool name_is(const void *owner, uint32_t number, const char *name, size_t nbytes) {
  (void)owner;
  return strlen(names[number]) == nbytes && memcmp(names[number], name, nbytes) == 0;
}

static void name_set_finds_what_was_added(void **state) {
  (void)state;
  struct k3_name_set set = {0};
  uint32_t earlier;
  assert_true(k3_name_set_find(&set, name_is, NULL, "x", 1) == K3_NAME_NONE);
  for (uint32_t i = 0; i < N_NAMES; i++) {
    snprintf(names[i], NAME_NBYTES, "layers.%u.w", i);
    assert_int_equal(k3_name_set_add(&set, name_is, NULL, names[i], strlen(names[i]), i, &earlier, NULL), K3_OK);
    assert_true(earlier == K3_NAME_NONE);
  }
  assert_int_equal(set.n_used, N_NAMES);
  assert_true(set.mask + 1 <= 4 * N_NAMES);
  for (uint32_t i = 0; i < N_NAMES; i++) {
    assert_true(k3_name_set_find(&set, name_is, NULL, names[i], strlen(names[i])) == i);
    assert_int_equal(k3_name_set_add(&set, name_is, NULL, names[i], strlen(names[i]), 7, &earlier, NULL), K3_OK);
    assert_true(earlier == i);
    char absent[NAME_NBYTES + 1];
    snprintf(absent, sizeof absent, "%s.", names[i]);
    assert_true(k3_name_set_find(&set, name_is, NULL, absent, strlen(absent)) == K3_NAME_NONE);
  }
  assert_int_equal(set.n_used, N_NAMES);
  k3_name_set_free(&set);
  k3_alloc_fail_at(1);
  assert_int_equal(k3_name_set_add(&set, name_is, NULL, "x", 1, 0, &earlier, NULL), K3_NO_MEMORY);
  k3_name_set_free(&set);
}

// Every byte, the length and the order count: no two of these differ only by chance.
static void name_hash_depends_on_every_byte(void **state) {
  (void)state;
  char name[80] = {0};
  for (size_t n = 0; n < sizeof name; n++) {
    uint64_t hash = k3_name_hash(name, n);
    assert_true(hash == k3_name_hash(name, n));
    assert_true(hash != k3_name_hash(name, n + (n < sizeof name - 1)) || n == sizeof name - 1);
    for (size_t bit = 0; bit < 8 * n; bit++) {
      name[bit / 8] ^= (char)(1 << bit % 8);
      assert_true(hash != k3_name_hash(name, n));
      name[bit / 8] ^= (char)(1 << bit % 8);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sha256_vectors),
      cmocka_unit_test(crc32_vectors),
      cmocka_unit_test(name_set_finds_what_was_added),
      cmocka_unit_test(name_hash_depends_on_every_byte),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
