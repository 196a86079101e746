// Builds safetensors headers and packed images in memory from a list of tensors, so that a test can put anything anywhere.
#ifndef K3_TESTS_UNIT_BUILD_IMAGE_H
#define K3_TESTS_UNIT_BUILD_IMAGE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/hash.h"
#include "formats/image.h"
#include "formats/safetensors.h"
#include "unit.h"

struct build_tensor {
  const char *name;
  enum k3_dtype dtype;
  unsigned rank;
  uint64_t shape[3];
};

enum { BUILD_MAX_TENSORS = 64 };

struct build {
  struct build_tensor tensors[BUILD_MAX_TENSORS];  // in file order
  size_t n;
  const char *manifest;      // text; the tensor __k3pack__ may be longer (spaces) or shorter
  const char *version;       // of the metadata, NULL: none
  uint64_t header_multiple;  // the data begins at such a multiple
  unsigned char *bytes;      // of the file, after build_file; free with build_free
  uint64_t nbytes;
};

static inline uint64_t build_tensor_nbytes(const struct build_tensor *tensor) {
  uint64_t n = 1;
  for (unsigned d = 0; d < tensor->rank; d++)
    n *= tensor->shape[d];
  return n * k3_dtype_bits(tensor->dtype) / 8;
}

static inline void build_add(struct build *build, const char *name, enum k3_dtype dtype, unsigned rank, uint64_t a, uint64_t b, uint64_t c) {
  assert_true(build->n < BUILD_MAX_TENSORS);
  build->tensors[build->n++] = (struct build_tensor){name, dtype, rank, {a, b, c}};
}

static inline struct build_tensor *build_find(struct build *build, const char *name) {
  for (size_t i = 0; i < build->n; i++) {
    if (strcmp(build->tensors[i].name, name) == 0)
      return &build->tensors[i];
  }
  fail_msg("no tensor %s", name);
  return NULL;
}

static inline uint64_t build_offset(struct build *build, const char *name) {
  uint64_t offset = 0;
  for (size_t i = 0; i < build->n && strcmp(build->tensors[i].name, name) != 0; i++)
    offset += build_tensor_nbytes(&build->tensors[i]);
  return offset;
}

struct build_text {
  char *bytes;
  size_t n, capacity;
};

static inline enum k3_status build_sink(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct build_text *text = ctx;
  (void)err;
  if (text->n + nbytes > text->capacity) {
    text->capacity = 2 * (text->n + nbytes);
    text->bytes = realloc(text->bytes, text->capacity);
    assert_non_null(text->bytes);
  }
  memcpy(text->bytes + text->n, bytes, nbytes);
  text->n += nbytes;
  return K3_OK;
}

static inline uint64_t build_write_header(const struct build *build, struct build_text *text, uint64_t padded_nbytes) {
  struct k3_st_writer writer;
  uint64_t offset = 0, h = 0;
  k3_st_write_begin(&writer, build_sink, text);
  if (build->version)
    assert_int_equal(k3_st_write_metadata(&writer, "k3pack", build->version, NULL), K3_OK);
  for (size_t i = 0; i < build->n; i++) {
    const struct build_tensor *t = &build->tensors[i];
    uint64_t nbytes = build_tensor_nbytes(t);
    assert_int_equal(k3_st_write_tensor(&writer, t->name, t->dtype, t->shape, t->rank, offset, offset + nbytes, NULL), K3_OK);
    offset += nbytes;
  }
  assert_int_equal(k3_st_write_end(&writer, padded_nbytes, &h, NULL), K3_OK);
  return h;
}

// The parsed header alone; free with k3_st_header_free.
static inline void build_header(const struct build *build, struct k3_st_header *header) {
  struct build_text text = {0};
  uint64_t h = build_write_header(build, &text, 0), data = 0;
  for (size_t i = 0; i < build->n; i++)
    data += build_tensor_nbytes(&build->tensors[i]);
  assert_int_equal(k3_st_parse(text.bytes, h, 8 + h + data, "image", header, NULL), K3_OK);
  free(text.bytes);
}

static inline void build_seal(struct build *build) {
  for (size_t i = 0; i < build->n; i++) {
    if (strcmp(build->tensors[i].name, K3_IMAGE_SEAL_NAME) != 0 || build_tensor_nbytes(&build->tensors[i]) < 32)
      continue;
    uint64_t h = 0;
    for (int k = 0; k < 8; k++)
      h |= (uint64_t)build->bytes[k] << 8 * k;
    uint64_t at = 8 + h + build_offset(build, K3_IMAGE_SEAL_NAME);
    assert_int_equal(k3_sha256(build->bytes, at, build->bytes + at, NULL), K3_OK);
  }
}

// The whole file: weights hold a pattern, pads zeros, tables and seal what belongs there as far as there is room for it.
static inline void build_file(struct build *build) {
  struct build_text text = {0};
  free(build->bytes);
  uint64_t h = build_write_header(build, &text, 0), data = 0;
  uint64_t padded = (h + 8 + build->header_multiple - 1) / build->header_multiple * build->header_multiple - 8;
  text.n = 0;
  h = build_write_header(build, &text, padded);
  for (size_t i = 0; i < build->n; i++)
    data += build_tensor_nbytes(&build->tensors[i]);
  build->nbytes = 8 + h + data;
  build->bytes = calloc(1, build->nbytes);
  assert_non_null(build->bytes);
  for (int k = 0; k < 8; k++)
    build->bytes[k] = (unsigned char)(h >> 8 * k);
  memcpy(build->bytes + 8, text.bytes, h);
  free(text.bytes);
  unsigned char *at = build->bytes + 8 + h, *digests = NULL, *crcs = NULL;
  uint64_t body = build->nbytes, n_digests = 0, n_crcs = 0;
  for (size_t i = 0; i < build->n; i++) {
    const struct build_tensor *t = &build->tensors[i];
    uint64_t nbytes = build_tensor_nbytes(t);
    if (strcmp(t->name, K3_IMAGE_MANIFEST_NAME) == 0) {
      size_t n_text = strlen(build->manifest);
      memset(at, ' ', nbytes);
      memcpy(at, build->manifest, n_text < nbytes ? n_text : nbytes);
    } else if (strcmp(t->name, K3_IMAGE_DIGESTS_NAME) == 0) {
      digests = at;
      n_digests = nbytes / 32;
    } else if (strcmp(t->name, K3_IMAGE_CRC_NAME) == 0) {
      crcs = at;
      n_crcs = nbytes / 4;
    } else if (strcmp(t->name, K3_IMAGE_SEAL_NAME) == 0) {
      body = (uint64_t)(at - build->bytes) + nbytes;
    } else if (strncmp(t->name, K3_IMAGE_PAD_PREFIX, strlen(K3_IMAGE_PAD_PREFIX)) != 0) {
      for (uint64_t k = 0; k < nbytes; k++)
        at[k] = (unsigned char)(k * 31 + i * 7 + (k >> 8));
    }
    at += nbytes;
  }
  bool with_digests = strstr(build->manifest, "\"digests\":true") != NULL;
  for (uint64_t begin = body, s = 0; begin < build->nbytes; begin += K3_IMAGE_SEGMENT_NBYTES, s++) {
    uint64_t left = build->nbytes - begin, nbytes = left < K3_IMAGE_SEGMENT_NBYTES ? left : K3_IMAGE_SEGMENT_NBYTES;
    if (digests && with_digests && s < n_digests)
      assert_int_equal(k3_sha256(build->bytes + begin, nbytes, digests + 32 * s, NULL), K3_OK);
    uint32_t crc = k3_crc32(build->bytes + begin, nbytes);
    for (int k = 0; crcs && k < 4 && s < n_crcs; k++)
      crcs[4 * s + (uint64_t)k] = (unsigned char)(crc >> 8 * k);
  }
  build_seal(build);
}

static inline void build_free(struct build *build) {
  free(build->bytes);
  *build = (struct build){0};
}

#endif
