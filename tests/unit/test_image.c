// Images opened: the order of the parts, the seal, the tables, and every byte that is no longer as it was.
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "build_image.h"
#include "formats/image.h"
#include "unit.h"

static const char manifest[] =
    "{\"image_version\":1,\"tool\":\"k3pack "
    "test\",\"digests\":true,\"crc\":false,\"recipe\":{\"name\":\"generic\"},\"model\":{\"family\":\"generic\"},"
    "\"sources\":[{\"file\":\"model.safetensors\",\"header\":\"__source__.0\",\"of\":\"source\",\"size\":1000}],"
    "\"views\":{\"model.kv.weight\":[{\"id\":0,\"n_rows\":3,\"row\":4,\"tensor\":\"model.qkv.weight\"}]}}";

static const char without_digests[] =
    "{\"image_version\":1,\"tool\":\"\",\"digests\":false,\"crc\":false,\"recipe\":{\"name\":\"generic\"},\"model\":{\"family\":\"generic\"}}";
static const char with_crc[] =
    "{\"image_version\":1,\"tool\":\"\",\"digests\":true,\"crc\":true,\"recipe\":{\"name\":\"generic\"},\"model\":{\"family\":\"generic\"}}";

enum { PAGE = 4096 };

static uint64_t pad(uint64_t offset, uint64_t multiple) {
  return (multiple - offset % multiple) % multiple;
}

// A right image, which the tests then spoil. In front: manifest, digests, perhaps crc32, pad, seal. Body: a scalar, 7 rows of 1024 bytes at a
// multiple of 256, big_rows rows of 4096 at a multiple of 4096, a source, pad.
static struct build good(const char *text, bool crc, uint64_t big_rows) {
  struct build b = {.manifest = text, .version = "1", .header_multiple = PAGE};
  uint64_t n_manifest = strlen(text) + 13, qkv_end = 256 + 7 * 1024, big = qkv_end + pad(qkv_end, PAGE), end = big + big_rows * PAGE + 99;
  uint64_t body = end + pad(end, PAGE), n_segments = (body + K3_IMAGE_SEGMENT_NBYTES - 1) / K3_IMAGE_SEGMENT_NBYTES;
  build_add(&b, K3_IMAGE_MANIFEST_NAME, K3_DTYPE_U8, 1, n_manifest, 0, 0);
  build_add(&b, K3_IMAGE_DIGESTS_NAME, K3_DTYPE_U8, 2, n_segments, 32, 0);
  if (crc)
    build_add(&b, K3_IMAGE_CRC_NAME, K3_DTYPE_U8, 2, n_segments, 4, 0);
  build_add(&b, "__pad__.0", K3_DTYPE_U8, 1, pad(n_manifest + n_segments * (crc ? 36 : 32) + 32, PAGE), 0, 0);
  build_add(&b, K3_IMAGE_SEAL_NAME, K3_DTYPE_U8, 1, 32, 0, 0);
  build_add(&b, "model.scale", K3_DTYPE_BF16, 0, 0, 0, 0);
  build_add(&b, "__pad__.1", K3_DTYPE_U8, 1, 254, 0, 0);
  build_add(&b, "model.qkv.weight", K3_DTYPE_U8, 2, 7, 1024, 0);
  build_add(&b, "__pad__.2", K3_DTYPE_U8, 1, pad(qkv_end, PAGE), 0, 0);
  build_add(&b, "model.big.weight", K3_DTYPE_F32, 2, big_rows, 1024, 0);
  build_add(&b, "__source__.0", K3_DTYPE_U8, 1, 99, 0, 0);
  build_add(&b, "__pad__.3", K3_DTYPE_U8, 1, pad(end, PAGE), 0, 0);
  return b;
}

static enum k3_status open_bytes(const unsigned char *bytes, uint64_t nbytes, struct k3_image *image, struct k3_error *err) {
  *err = (struct k3_error){0};
  return k3_image_open(bytes, nbytes, "image.k3", image, err);
}

static void accept(struct build *b) {
  struct k3_image image;
  struct k3_error err;
  build_file(b);
  if (open_bytes(b->bytes, b->nbytes, &image, &err) != K3_OK)
    fail_msg("%s %s: %s", k3_rule_info(err.rule)->id, err.tensor, err.found);
  k3_image_close(&image);
}

// Refused as it lies in b->bytes.
static void refuse_bytes(const struct build *b, const char *rule, const char *tensor, const char *said) {
  struct k3_image image;
  struct k3_error err;
  enum k3_status status = open_bytes(b->bytes, b->nbytes, &image, &err);
  if (status != K3_BAD_INPUT || strcmp(k3_rule_info(err.rule)->id, rule) != 0 || strcmp(err.tensor, tensor) != 0 || !strstr(err.found, said))
    fail_msg("%s %s: \"%s\" instead of %s %s \"%s\"", k3_rule_info(err.rule)->id, err.tensor, err.found, rule, tensor, said);
  assert_string_equal(err.file, "image.k3");
  assert_true(!image.bytes && image.header.n_tensors == 0 && !image.manifest.arena.blocks);
}

static void refuse(struct build *b, const char *rule, const char *tensor, const char *said) {
  build_file(b);
  refuse_bytes(b, rule, tensor, said);
  build_free(b);
}

static void a_small_image(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  struct k3_image image;
  struct k3_error err;
  build_file(&b);
  assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_OK);
  assert_ptr_equal(image.bytes, b.bytes);
  assert_int_equal(image.nbytes, b.nbytes);
  uint64_t data = image.header.data_begin, seal = build_offset(&b, K3_IMAGE_SEAL_NAME);
  assert_int_equal(data % PAGE, 0);
  assert_int_equal(image.body_begin, data + seal + 32);
  assert_int_equal(image.n_segments, 1);
  assert_ptr_equal(image.digests, b.bytes + data + build_offset(&b, K3_IMAGE_DIGESTS_NAME));
  assert_null(image.crcs);
  // The identity by the definition: SHA-256 of everything in front of the seal.
  uint8_t digest[32];
  k3_sha256(b.bytes, data + seal, digest, NULL);
  assert_memory_equal(image.identity, digest, 32);
  k3_sha256(b.bytes + image.body_begin, b.nbytes - image.body_begin, digest, NULL);
  assert_memory_equal(image.digests, digest, 32);
  const struct k3_st_tensor *tensor;
  assert_ptr_equal(k3_image_data(&image, "model.qkv.weight", &tensor), b.bytes + data + build_offset(&b, "model.qkv.weight"));
  assert_true(tensor->shape[0] == 7 && tensor->dtype == K3_DTYPE_U8);
  assert_ptr_equal(k3_image_data(&image, "model.scale", NULL), b.bytes + image.body_begin);
  assert_null(k3_image_data(&image, "model.kv.weight", &tensor));  // a view has no bytes
  assert_null(tensor);
  assert_int_equal(image.manifest.n_views, 1);
  assert_int_equal(image.manifest.views[0].shards[0].row, 4);
  assert_int_equal(k3_image_check_segment(&image, 0, &err), K3_OK);
  assert_int_equal(k3_image_check_segment_crc(&image, 0, &err), K3_OK);
  assert_int_equal(k3_image_check_segment(&image, 1, &err), K3_BAD_ARGUMENT);
  assert_int_equal(k3_image_check_segment_crc(&image, UINT64_MAX, NULL), K3_BAD_ARGUMENT);
  k3_image_close(&image);
  k3_image_close(&image);
  build_free(&b);
}

// Each bit of the file, flipped: in front of the body the image does not open, behind it the segment differs. (One bit of every byte, every bit of
// some.)
static void one_flipped_bit_anywhere(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  struct k3_image image;
  struct k3_error err;
  build_file(&b);
  assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_OK);
  uint64_t body = image.body_begin;
  k3_image_close(&image);
  for (uint64_t i = 0; i < body; i++) {
    int bit = (int)(i % 8);
    b.bytes[i] ^= (unsigned char)(1 << bit);
    assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_BAD_INPUT);
    assert_int_not_equal(err.rule, K3_RULE_NONE);
    b.bytes[i] ^= (unsigned char)(1 << bit);
  }
  assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_OK);
  for (uint64_t i = body; i < b.nbytes; i++) {
    int bit = (int)(i % 8);
    b.bytes[i] ^= (unsigned char)(1 << bit);
    err = (struct k3_error){0};
    assert_int_equal(k3_image_check_segment(&image, 0, &err), K3_DIFFERENT);
    assert_string_equal(k3_rule_info(err.rule)->id, "IMG02");
    b.bytes[i] ^= (unsigned char)(1 << bit);
  }
  assert_int_equal(k3_image_check_segment(&image, 0, &err), K3_OK);
  k3_image_close(&image);
  build_free(&b);
}

static void the_seal_covers_the_front(void **state) {
  (void)state;
  struct build b = good(manifest, true, 1);
  b.manifest = with_crc;
  build_file(&b);
  uint64_t h = b.bytes[0] | (uint64_t)b.bytes[1] << 8, data = 8 + h;
  static const char *const names[] = {K3_IMAGE_MANIFEST_NAME, K3_IMAGE_DIGESTS_NAME, K3_IMAGE_CRC_NAME, "__pad__.0", K3_IMAGE_SEAL_NAME};
  for (int i = 0; i < 5; i++) {
    unsigned char *at = b.bytes + data + build_offset(&b, names[i]);
    *at ^= 1;
    refuse_bytes(&b, "IMG02", K3_IMAGE_SEAL_NAME, "SHA-256");
    *at ^= 1;
  }
  b.bytes[data - 1] = '\n';  // the padding of the header
  refuse_bytes(&b, "IMG02", K3_IMAGE_SEAL_NAME, "SHA-256");
  build_free(&b);
}

// 8.4 MB: three segments, the last one shorter.
static void segments_of_4_mib(void **state) {
  (void)state;
  struct build b = good(with_crc, true, 2051);
  struct k3_image image;
  struct k3_error err;
  build_file(&b);
  assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_OK);
  assert_int_equal(image.n_segments, 3);
  assert_non_null(image.crcs);
  for (uint64_t s = 0; s < 3; s++) {
    assert_int_equal(k3_image_check_segment(&image, s, &err), K3_OK);
    assert_int_equal(k3_image_check_segment_crc(&image, s, &err), K3_OK);
  }
  static const struct {
    uint64_t at, segment;
  } flips[] = {{0, 0}, {K3_IMAGE_SEGMENT_NBYTES - 1, 0}, {K3_IMAGE_SEGMENT_NBYTES, 1}, {2 * K3_IMAGE_SEGMENT_NBYTES, 2}, {0, 2}};
  for (int f = 0; f < 5; f++) {
    unsigned char *at = f == 4 ? b.bytes + b.nbytes - 1 : b.bytes + image.body_begin + flips[f].at;
    *at ^= 0x80;
    for (uint64_t s = 0; s < 3; s++) {
      enum k3_status expected = s == flips[f].segment ? K3_DIFFERENT : K3_OK;
      err = (struct k3_error){0};
      assert_int_equal(k3_image_check_segment(&image, s, &err), expected);
      assert_int_equal(err.rule, expected == K3_OK ? K3_RULE_NONE : K3_IMG02);
      err = (struct k3_error){0};
      assert_int_equal(k3_image_check_segment_crc(&image, s, &err), expected);
      assert_int_equal(err.rule, expected == K3_OK ? K3_RULE_NONE : K3_IMG02);
    }
    *at ^= 0x80;
  }
  k3_image_close(&image);
  build_free(&b);
}

static void without_digests_nothing_is_compared(void **state) {
  (void)state;
  struct build b = good(without_digests, false, 1);
  struct k3_image image;
  struct k3_error err;
  build_file(&b);
  assert_int_equal(open_bytes(b.bytes, b.nbytes, &image, &err), K3_OK);
  assert_null(image.digests);
  b.bytes[b.nbytes - 1] ^= 1;
  assert_int_equal(k3_image_check_segment(&image, 0, &err), K3_OK);
  k3_image_close(&image);
  // A table that is there all the same would look as if it had been checked.
  build_file(&b);
  uint64_t data = 8 + (b.bytes[0] | (uint64_t)b.bytes[1] << 8);
  b.bytes[data + build_offset(&b, K3_IMAGE_DIGESTS_NAME)] = 1;
  build_seal(&b);
  refuse_bytes(&b, "IMG01", K3_IMAGE_DIGESTS_NAME, "no digests");
  build_free(&b);
}

static void other_files_are_no_images(void **state) {
  (void)state;
  struct build b = {.manifest = manifest, .header_multiple = 8};
  build_add(&b, "weight", K3_DTYPE_BF16, 2, 4, 4, 0);
  refuse(&b, "IMG01", K3_IMAGE_MANIFEST_NAME, "no packed image");
  struct k3_image image;
  struct k3_error err;
  assert_int_equal(open_bytes(NULL, 0, &image, &err), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(err.rule)->id, "CNT02");
  static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1251\n";
  assert_int_equal(open_bytes((const unsigned char *)pointer, sizeof pointer - 1, &image, &err), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(err.rule)->id, "CNT01");
  // Cut off anywhere, in a buffer of exactly that size.
  b = good(manifest, false, 1);
  build_file(&b);
  for (uint64_t n = 0; n < b.nbytes; n += n < 9000 ? 1 : 97) {
    unsigned char *copy = malloc(n ? n : 1);
    memcpy(copy, b.bytes, n);
    assert_int_equal(open_bytes(copy, n, &image, &err), K3_BAD_INPUT);
    free(copy);
  }
  build_free(&b);
}

static void a_newer_version_is_named(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  b.version = "2";
  b.tensors[1].rank = 1;  // whatever version 2 does with its tables
  b.tensors[1].shape[0] = 32;
  refuse(&b, "IMG01", "", "an image of version 2");
  b = good("{\"image_version\":3}", false, 1);
  refuse(&b, "IMG01", "image_version", "version 3");
  b = good(manifest, false, 1);
  b.version = NULL;
  accept(&b);
  b.version = "1 of old";
  accept(&b);
  build_free(&b);
}

static size_t index_of(struct build *b, const char *name) {
  return (size_t)(build_find(b, name) - b->tensors);
}

static void swap(struct build *b, const char *one, const char *two) {
  size_t i = index_of(b, one), k = index_of(b, two);
  struct build_tensor kept = b->tensors[i];
  b->tensors[i] = b->tensors[k];
  b->tensors[k] = kept;
}

static void the_parts_stand_in_their_order(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  accept(&b);
  b.header_multiple = 8;
  refuse(&b, "IMG01", "", "the data begins at byte");
  b = good(with_crc, true, 1);
  accept(&b);
  swap(&b, K3_IMAGE_DIGESTS_NAME, K3_IMAGE_CRC_NAME);
  refuse(&b, "IMG01", "", "not in their order");
  b = good(manifest, false, 1);
  swap(&b, K3_IMAGE_DIGESTS_NAME, K3_IMAGE_MANIFEST_NAME);
  refuse(&b, "IMG01", "", "not in their order");
  b = good(manifest, false, 1);
  swap(&b, "__pad__.0", K3_IMAGE_SEAL_NAME);
  refuse(&b, "IMG01", K3_IMAGE_SEAL_NAME, "the seal ends at byte");
  b = good(manifest, false, 1);
  swap(&b, "__pad__.0", "model.qkv.weight");  // 7 KiB and more in front of the seal
  refuse(&b, "IMG01", K3_IMAGE_SEAL_NAME, "the seal begins at byte");
  b = good(manifest, false, 1);
  build_find(&b, "__pad__.0")->shape[0] += PAGE;
  refuse(&b, "IMG01", K3_IMAGE_SEAL_NAME, "the seal begins at byte");
  b = good(manifest, false, 1);
  build_find(&b, K3_IMAGE_SEAL_NAME)->shape[0] = 31;
  build_find(&b, "__pad__.3")->shape[0] += 1;
  refuse(&b, "IMG01", K3_IMAGE_SEAL_NAME, "31 bytes");
  b = good(manifest, false, 1);
  build_find(&b, "__pad__.3")->shape[0] -= 1;
  refuse(&b, "IMG01", "", "the file has");
  static const char *const parts[] = {K3_IMAGE_MANIFEST_NAME, K3_IMAGE_DIGESTS_NAME, K3_IMAGE_SEAL_NAME};
  for (int i = 0; i < 3; i++) {
    b = good(manifest, false, 1);
    build_find(&b, parts[i])->dtype = K3_DTYPE_I8;
    refuse(&b, "IMG01", parts[i], "I8 of rank");
    if (i == 0)
      continue;
    b = good(manifest, false, 1);
    build_find(&b, parts[i])->name = "other";
    refuse(&b, "IMG01", parts[i], "missing");
  }
  b = good(manifest, false, 1);
  *build_find(&b, K3_IMAGE_DIGESTS_NAME) = (struct build_tensor){K3_IMAGE_DIGESTS_NAME, K3_DTYPE_U8, 1, {32}};
  refuse(&b, "IMG01", K3_IMAGE_DIGESTS_NAME, "U8 of rank 1");
}

// Something else than zeros, or than a pad, between the tables and the seal.
static void only_pads_before_the_seal(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  build_find(&b, "__pad__.0")->name = "model.hidden";
  refuse(&b, "IMG01", "model.hidden", "in front of the seal");
  b = good(manifest, false, 1);
  build_file(&b);
  uint64_t data = 8 + (b.bytes[0] | (uint64_t)b.bytes[1] << 8);
  b.bytes[data + build_offset(&b, "__pad__.0") + 5] = 1;
  build_seal(&b);
  refuse_bytes(&b, "IMG01", "__pad__.0", "holds something");
  build_free(&b);
}

static void tables_have_an_entry_per_segment(void **state) {
  (void)state;
  static const uint64_t wrong[][2] = {{0, 32}, {2, 32}, {1, 31}, {2, 16}};
  for (int i = 0; i < 4; i++) {
    struct build b = good(manifest, false, 1);
    struct build_tensor *table = build_find(&b, K3_IMAGE_DIGESTS_NAME), *pad = build_find(&b, "__pad__.0");
    table->shape[0] = wrong[i][0];
    table->shape[1] = wrong[i][1];
    pad->shape[0] = pad->shape[0] + 32 - wrong[i][0] * wrong[i][1];
    refuse(&b, "IMG01", K3_IMAGE_DIGESTS_NAME, "1 segments");
  }
  struct build b = good(with_crc, true, 1);
  build_find(&b, K3_IMAGE_CRC_NAME)->shape[0] = 0;
  build_find(&b, "__pad__.0")->shape[0] += 4;
  refuse(&b, "IMG01", K3_IMAGE_CRC_NAME, "1 segments");
  b = good(manifest, true, 1);
  refuse(&b, "IMG01", K3_IMAGE_CRC_NAME, "the table is there");
  b = good(with_crc, false, 1);
  refuse(&b, "IMG01", K3_IMAGE_CRC_NAME, "the table is missing");
}

// Tensors of 4 KiB and more begin at multiples of 256, those of 1 MiB and more at multiples of 4096.
static void tensors_are_aligned(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  build_find(&b, "__pad__.1")->shape[0] = 253;
  build_find(&b, "__pad__.2")->shape[0] += 1;
  refuse(&b, "IMG01", "model.qkv.weight", "no multiple of 256");
  b = good(manifest, false, 256);
  accept(&b);
  build_find(&b, "__pad__.2")->shape[0] -= 256;
  build_find(&b, "__pad__.3")->shape[0] += 256;
  refuse(&b, "IMG01", "model.big.weight", "no multiple of 4096");
  b = good(manifest, false, 255);  // less than 1 MiB: a multiple of 256 is enough
  build_find(&b, "__pad__.2")->shape[0] -= 256;
  build_find(&b, "__pad__.3")->shape[0] += 256;
  accept(&b);
  build_free(&b);
}

static void manifest_and_header_must_agree(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  build_find(&b, "model.qkv.weight")->shape[0] = 6;
  build_find(&b, "__pad__.2")->shape[0] += 1024;
  refuse(&b, "IMG03", "model.kv.weight", "which has 6");
  b = good(manifest, false, 1);
  build_find(&b, "__source__.0")->name = "__source__.1";
  refuse(&b, "IMG01", "__source__.0", "no such tensor");
  b = good("{}", false, 1);
  refuse(&b, "IMG01", "", "image_version is nothing");
  b = good("version https://git-lfs.github.com/spec/v1", false, 1);
  refuse(&b, "IMG01", "", "line 1, column 1");
}

static void *counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

static void memory_may_fail_anywhere(void **state) {
  (void)state;
  struct build b = good(manifest, false, 1);
  build_file(&b);
  json_set_alloc_funcs(counted_malloc, k3_free);
  bool done = false;
  for (uint64_t n = 1; !done; n++) {
    struct k3_image image;
    struct k3_error err;
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    enum k3_status status = open_bytes(b.bytes, b.nbytes, &image, &err);
    done = k3_alloc_count() - before < n;
    k3_alloc_fail_at(0);
    assert_int_equal(status, done ? K3_OK : K3_NO_MEMORY);
    assert_true(done || (err.status == K3_NO_MEMORY && !image.bytes));
    k3_image_close(&image);
  }
  json_set_alloc_funcs(malloc, free);
  build_free(&b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_small_image),
      cmocka_unit_test(one_flipped_bit_anywhere),
      cmocka_unit_test(the_seal_covers_the_front),
      cmocka_unit_test(segments_of_4_mib),
      cmocka_unit_test(without_digests_nothing_is_compared),
      cmocka_unit_test(other_files_are_no_images),
      cmocka_unit_test(a_newer_version_is_named),
      cmocka_unit_test(the_parts_stand_in_their_order),
      cmocka_unit_test(only_pads_before_the_seal),
      cmocka_unit_test(tables_have_an_entry_per_segment),
      cmocka_unit_test(tensors_are_aligned),
      cmocka_unit_test(manifest_and_header_must_agree),
      cmocka_unit_test(memory_may_fail_anywhere),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
