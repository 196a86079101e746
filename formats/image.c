#include "formats/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/hash.h"

typedef unsigned long long ull;  // for %llu

enum { PAGE_NBYTES = 4096, SMALL_ALIGN_NBYTES = 256, SMALL_NBYTES = 4 << 10, LARGE_NBYTES = 1 << 20, CRC_NBYTES = 4 };

struct opener {
  struct k3_image *image;
  const char *file;
  struct k3_error *err;
  const struct k3_st_tensor *manifest, *digests, *crcs, *seal;
};

#define FAIL(opener, where, allowed, ...) k3_fail((opener)->err, K3_BAD_INPUT, K3_IMG01, (opener)->file, where, allowed, __VA_ARGS__)

static bool begins_with(const char *name, const char *prefix) {
  return strncmp(name, prefix, strlen(prefix)) == 0;
}

static uint64_t nbytes_of(const struct k3_st_tensor *tensor) {
  return tensor->end - tensor->begin;
}

static const unsigned char *bytes_of(const struct k3_image *image, const struct k3_st_tensor *tensor) {
  return image->bytes + image->header.data_begin + tensor->begin;
}

static enum k3_status find_special(const struct opener *opener, const char *name, unsigned rank, const struct k3_st_tensor **tensor) {
  *tensor = k3_st_find(&opener->image->header, name, strlen(name));
  if (!*tensor)
    return FAIL(opener, name, NULL, "the tensor is missing");
  if ((*tensor)->dtype != K3_DTYPE_U8 || (*tensor)->rank != rank)
    return FAIL(opener, name, rank == 1 ? "U8 [n]" : "U8 [segments, bytes]", "%s of rank %u", k3_dtype_name((enum k3_dtype)(*tensor)->dtype),
                (*tensor)->rank);
  return K3_OK;
}

// A newer writer may have moved everything; it says so in the header's metadata, which is all that is read here.
static enum k3_status check_version(const struct opener *opener) {
  const char *version = k3_st_metadata(&opener->image->header, "k3pack");
  char *end = NULL;
  unsigned long number = version ? strtoul(version, &end, 10) : 0;
  if (version && *end == '\0' && number > K3_IMAGE_VERSION)
    return FAIL(opener, NULL, "version 1; a newer k3pack reads this image", "an image of version %lu", number);
  return K3_OK;
}

// Where the parts in front stand, and that nothing else stands among them.
static enum k3_status check_front(struct opener *opener) {
  struct k3_image *image = opener->image;
  const struct k3_st_header *header = &image->header;
  if (!k3_st_find(header, K3_IMAGE_MANIFEST_NAME, strlen(K3_IMAGE_MANIFEST_NAME)))
    return FAIL(opener, K3_IMAGE_MANIFEST_NAME, "a file written by `k3pack convert`", "no packed image: there is no manifest in it");
  K3_TRY(check_version(opener));
  K3_TRY(find_special(opener, K3_IMAGE_MANIFEST_NAME, 1, &opener->manifest));
  K3_TRY(find_special(opener, K3_IMAGE_DIGESTS_NAME, 2, &opener->digests));
  K3_TRY(find_special(opener, K3_IMAGE_SEAL_NAME, 1, &opener->seal));
  if (k3_st_find(header, K3_IMAGE_CRC_NAME, strlen(K3_IMAGE_CRC_NAME)))
    K3_TRY(find_special(opener, K3_IMAGE_CRC_NAME, 2, &opener->crcs));

  if (header->data_begin % PAGE_NBYTES != 0)
    return FAIL(opener, NULL, "a multiple of 4096", "the data begins at byte %llu", (ull)header->data_begin);
  if (image->nbytes % PAGE_NBYTES != 0)
    return FAIL(opener, NULL, "a multiple of 4096", "the file has %llu bytes", (ull)image->nbytes);
  if (opener->manifest->begin != 0 || opener->digests->begin != opener->manifest->end ||
      (opener->crcs && opener->crcs->begin != opener->digests->end))
    return FAIL(opener, NULL, "manifest, digests, crc32", "the tensors in front are not in their order");
  uint64_t tables_end = opener->crcs ? opener->crcs->end : opener->digests->end;
  if (nbytes_of(opener->seal) != K3_SHA256_NBYTES)
    return FAIL(opener, K3_IMAGE_SEAL_NAME, "32 bytes", "%llu bytes", (ull)nbytes_of(opener->seal));
  if (opener->seal->begin < tables_end || opener->seal->begin - tables_end >= PAGE_NBYTES)
    return FAIL(opener, K3_IMAGE_SEAL_NAME, "behind the tables, padded to a page", "the seal begins at byte %llu, the tables end at %llu",
                (ull)opener->seal->begin, (ull)tables_end);
  image->body_begin = header->data_begin + opener->seal->end;  // the parser has made sure that it lies inside the file
  if (image->body_begin % PAGE_NBYTES != 0)
    return FAIL(opener, K3_IMAGE_SEAL_NAME, "a multiple of 4096", "the seal ends at byte %llu", (ull)image->body_begin);
  return K3_OK;
}

static enum k3_status check_tensor(const struct opener *opener, const struct k3_st_tensor *tensor) {
  const struct k3_st_header *header = &opener->image->header;
  uint64_t nbytes = nbytes_of(tensor), offset = header->data_begin + tensor->begin;
  bool special = tensor == opener->manifest || tensor == opener->digests || tensor == opener->crcs || tensor == opener->seal;
  bool pad = begins_with(tensor->name, K3_IMAGE_PAD_PREFIX);
  if (special)
    return K3_OK;
  if (tensor->begin < opener->seal->end && nbytes > 0) {
    if (!pad)
      return FAIL(opener, tensor->name, "behind the seal", "a tensor in front of the seal");
    for (uint64_t i = 0; i < nbytes; i++) {
      if (bytes_of(opener->image, tensor)[i] != 0)
        return FAIL(opener, tensor->name, "zeros", "a pad holds something");
    }
  }
  uint64_t align_nbytes = nbytes >= LARGE_NBYTES ? PAGE_NBYTES : nbytes >= SMALL_NBYTES ? SMALL_ALIGN_NBYTES : 1;
  if (!begins_with(tensor->name, "__") && offset % align_nbytes != 0)
    return FAIL(opener, tensor->name, NULL, "%llu bytes at byte %llu, which is no multiple of %llu", (ull)nbytes, (ull)offset, (ull)align_nbytes);
  return K3_OK;
}

// The tables have an entry for each segment.
static enum k3_status check_table(const struct opener *opener, const char *name, const struct k3_st_tensor *table, uint64_t entry_nbytes) {
  if (table->shape[0] != opener->image->n_segments || table->shape[1] != entry_nbytes)
    return FAIL(opener, name, NULL, "a table of %llu entries of %llu bytes, the file has %llu segments, which need %llu", (ull)table->shape[0],
                (ull)table->shape[1], (ull)opener->image->n_segments, (ull)entry_nbytes);
  return K3_OK;
}

static enum k3_status check_seal(const struct opener *opener) {
  struct k3_image *image = opener->image;
  uint64_t nbytes = image->header.data_begin + opener->seal->begin;
  uint8_t digest[K3_SHA256_NBYTES];
  char found[2 * K3_SHA256_NBYTES + 1], sealed[2 * K3_SHA256_NBYTES + 1];
  memcpy(image->identity, bytes_of(image, opener->seal), sizeof image->identity);
  K3_TRY(k3_sha256(image->bytes, nbytes, digest, opener->err));
  if (memcmp(digest, image->identity, sizeof digest) == 0)
    return K3_OK;
  k3_hex(found, digest);
  k3_hex(sealed, image->identity);
  return k3_fail(opener->err, K3_BAD_INPUT, K3_IMG02, opener->file, K3_IMAGE_SEAL_NAME, "the bytes that were sealed",
                 "the first %llu bytes have SHA-256 %s, the seal says %s", (ull)nbytes, found, sealed);
}

static enum k3_status open_image(struct opener *opener) {
  struct k3_image *image = opener->image;
  const struct k3_st_header *header = &image->header;
  uint64_t h;
  size_t n_prefix = image->nbytes < 200 ? image->nbytes : 200;
  K3_TRY(k3_st_header_length(image->bytes, n_prefix, image->nbytes, opener->file, &h, opener->err));
  K3_TRY(k3_st_parse((const char *)image->bytes + K3_ST_PREFIX_NBYTES, h, image->nbytes, opener->file, &image->header, opener->err));
  K3_TRY(check_front(opener));
  image->n_segments = k3_ceil_div_u64(image->nbytes - image->body_begin, K3_IMAGE_SEGMENT_NBYTES);
  K3_TRY(check_table(opener, K3_IMAGE_DIGESTS_NAME, opener->digests, K3_SHA256_NBYTES));
  if (opener->crcs)
    K3_TRY(check_table(opener, K3_IMAGE_CRC_NAME, opener->crcs, CRC_NBYTES));
  K3_TRY(check_seal(opener));
  for (size_t i = 0; i < header->n_tensors; i++)
    K3_TRY(check_tensor(opener, &header->tensors[i]));
  K3_TRY(
      k3_manifest_parse((const char *)bytes_of(image, opener->manifest), nbytes_of(opener->manifest), opener->file, &image->manifest, opener->err));
  if (image->manifest.crc != (opener->crcs != NULL))
    return FAIL(opener, K3_IMAGE_CRC_NAME, NULL, "the manifest says crc %s, the table is %s", image->manifest.crc ? "true" : "false",
                opener->crcs ? "there" : "missing");
  image->digests = image->manifest.digests ? bytes_of(image, opener->digests) : NULL;
  image->crcs = opener->crcs ? bytes_of(image, opener->crcs) : NULL;
  for (uint64_t i = 0; !image->digests && i < nbytes_of(opener->digests); i++) {
    if (bytes_of(image, opener->digests)[i] != 0)
      return FAIL(opener, K3_IMAGE_DIGESTS_NAME, "zeros", "the manifest says that there are no digests, but the table holds some");
  }
  return k3_manifest_check(&image->manifest, header, opener->file, opener->err);
}

enum k3_status k3_image_open(const void *bytes, uint64_t nbytes, const char *file, struct k3_image *image, struct k3_error *err) {
  struct opener opener = {.image = image, .file = file, .err = err};
  *image = (struct k3_image){.bytes = bytes, .nbytes = nbytes};
  enum k3_status status = open_image(&opener);
  if (status != K3_OK)
    k3_image_close(image);
  return status;
}

void k3_image_close(struct k3_image *image) {
  k3_manifest_free(&image->manifest);
  k3_st_header_free(&image->header);
  *image = (struct k3_image){0};
}

const void *k3_image_data(const struct k3_image *image, const char *name, const struct k3_st_tensor **tensor) {
  const struct k3_st_tensor *found = k3_st_find(&image->header, name, strlen(name));
  if (tensor)
    *tensor = found;
  return found ? bytes_of(image, found) : NULL;
}

// Bytes of a segment; K3_BAD_ARGUMENT beyond the last.
static enum k3_status segment_of(const struct k3_image *image, uint64_t index, const unsigned char **bytes, uint64_t *nbytes, struct k3_error *err) {
  *bytes = NULL;
  *nbytes = 0;
  if (index >= image->n_segments)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, NULL, "segment %llu of %llu", (ull)index, (ull)image->n_segments);
  uint64_t offset = image->body_begin + index * K3_IMAGE_SEGMENT_NBYTES, left = image->nbytes - offset;
  *bytes = image->bytes + offset;
  *nbytes = left < K3_IMAGE_SEGMENT_NBYTES ? left : K3_IMAGE_SEGMENT_NBYTES;
  return K3_OK;
}

static enum k3_status fail_segment(const struct k3_image *image, uint64_t index, uint64_t nbytes, const char *table, struct k3_error *err) {
  uint64_t offset = image->body_begin + index * K3_IMAGE_SEGMENT_NBYTES;
  return k3_fail(err, K3_DIFFERENT, K3_IMG02, NULL, table, "the bytes that were written", "segment %llu (bytes %llu to %llu of the file) differs",
                 (ull)index, (ull)offset, (ull)(offset + nbytes));
}

enum k3_status k3_image_check_segment(const struct k3_image *image, uint64_t index, struct k3_error *err) {
  const unsigned char *bytes;
  uint64_t nbytes;
  uint8_t digest[K3_SHA256_NBYTES];
  K3_TRY(segment_of(image, index, &bytes, &nbytes, err));
  if (!image->digests)
    return K3_OK;
  K3_TRY(k3_sha256(bytes, nbytes, digest, err));
  return memcmp(digest, image->digests + index * K3_SHA256_NBYTES, sizeof digest) == 0
             ? K3_OK
             : fail_segment(image, index, nbytes, K3_IMAGE_DIGESTS_NAME, err);
}

enum k3_status k3_image_check_segment_crc(const struct k3_image *image, uint64_t index, struct k3_error *err) {
  const unsigned char *bytes;
  uint64_t nbytes;
  K3_TRY(segment_of(image, index, &bytes, &nbytes, err));
  if (!image->crcs)
    return K3_OK;
  const unsigned char *entry = image->crcs + index * CRC_NBYTES;
  uint32_t expected = (uint32_t)entry[0] | (uint32_t)entry[1] << 8 | (uint32_t)entry[2] << 16 | (uint32_t)entry[3] << 24;
  return k3_crc32(bytes, nbytes) == expected ? K3_OK : fail_segment(image, index, nbytes, K3_IMAGE_CRC_NAME, err);
}
