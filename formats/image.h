// The packed image: a safetensors file with a manifest, digests and a seal. This is the whole of what a loader needs: give it the mapped bytes, get
// checked tensors, views and linears. Layout and manifest keys: formats/manifest.h.
#ifndef K3_FORMATS_IMAGE_H
#define K3_FORMATS_IMAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"

enum { K3_IMAGE_VERSION = 1, K3_IMAGE_SEGMENT_NBYTES = 4 << 20 };

#define K3_IMAGE_MANIFEST_NAME "__k3pack__"
#define K3_IMAGE_DIGESTS_NAME  "__digests__"
#define K3_IMAGE_CRC_NAME      "__crc32__"
#define K3_IMAGE_SEAL_NAME     "__seal__"
#define K3_IMAGE_PAD_PREFIX    "__pad__."
#define K3_IMAGE_SOURCE_PREFIX "__source__."

// An opened image. Points into `bytes`, which the caller keeps mapped as long as the struct lives. Read-only after opening.
struct k3_image {
  const unsigned char *bytes;  // the file
  uint64_t nbytes;
  struct k3_st_header header;
  struct k3_manifest manifest;
  uint64_t body_begin;           // file offset of the first segment = end of the seal, a multiple of 4096
  uint64_t n_segments;           // of 4 MiB, the last one shorter
  const unsigned char *digests;  // [n_segments, 32], NULL with --no-digests
  const unsigned char *crcs;     // [n_segments, 4] little-endian CRC-32, NULL without --crc
  unsigned char identity[32];    // the seal
};

// Parses and checks: header (CNT rules), manifest (IMG01), the seal over header, manifest and tables (IMG02), every view and linear against the
// tensors (IMG03, IMG01). Reads nothing behind the seal. On failure *image is empty and needs no free.
//   bytes, nbytes  the whole file (host memory, typically a mapping)
enum k3_status k3_image_open(const void *bytes, uint64_t nbytes, const char *file, struct k3_image *image, struct k3_error *err);
void k3_image_close(struct k3_image *image);  // does not unmap

// Bytes of a tensor of the image, or NULL when it has none of that name; *tensor (may be NULL) receives its description.
const void *k3_image_data(const struct k3_image *image, const char *name, const struct k3_st_tensor **tensor);

// Checks segment `index` against its digest. K3_DIFFERENT with IMG02 on a mismatch; K3_OK without reading when the image has no digests.
enum k3_status k3_image_check_segment(const struct k3_image *image, uint64_t index, struct k3_error *err);
// Checks it against its CRC-32; likewise.
enum k3_status k3_image_check_segment_crc(const struct k3_image *image, uint64_t index, struct k3_error *err);

#endif
