#include "loader/verify.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/pool.h"

struct verify {
  const struct k3_image *image;
  const char *path;
  int fd;
  unsigned char **buffers;  // [n_threads] of one segment
  struct k3_progress *progress;
  pthread_mutex_t mutex;  // guards findings and result
  struct k3_findings *findings;
  struct k3_verify_result *result;
};

// First tensor that has bytes in [from, to), offsets relative to the data area.
static const char *tensor_in(const struct k3_image *image, uint64_t from, uint64_t to) {
  const struct k3_st_tensor *first = NULL;
  for (size_t i = 0; i < image->header.n_tensors; i++) {
    const struct k3_st_tensor *t = &image->header.tensors[i];
    if (t->begin < to && t->end > from && t->end > t->begin && (!first || t->begin < first->begin))
      first = t;
  }
  return first ? first->name : NULL;
}

static enum k3_status verify_segment(void *ctx, int worker, uint64_t segment, struct k3_error *err) {
  struct verify *v = ctx;
  const struct k3_image *image = v->image;
  uint64_t begin = image->body_begin + segment * K3_IMAGE_SEGMENT_NBYTES, left = image->nbytes - begin;
  size_t nbytes = left < K3_IMAGE_SEGMENT_NBYTES ? (size_t)left : K3_IMAGE_SEGMENT_NBYTES;
  uint8_t digest[K3_SHA256_NBYTES];
  bool bad = false, bad_crc = false;
  K3_TRY(k3_pread_full(v->fd, v->buffers[worker], nbytes, begin, v->path, err));
  if (image->digests) {
    K3_TRY(k3_sha256(v->buffers[worker], nbytes, digest, err));
    bad = memcmp(digest, image->digests + segment * K3_SHA256_NBYTES, sizeof digest) != 0;
  }
  if (image->crcs) {
    const unsigned char *stored = image->crcs + segment * 4;
    uint32_t wanted = (uint32_t)stored[0] | (uint32_t)stored[1] << 8 | (uint32_t)stored[2] << 16 | (uint32_t)stored[3] << 24;
    bad_crc = k3_crc32(v->buffers[worker], nbytes) != wanted;
  }
  if (bad || bad_crc) {
    uint64_t data_from = begin - image->header.data_begin;
    pthread_mutex_lock(&v->mutex);
    v->result->n_bad_segments++;
    k3_findings_report(v->findings, K3_IMG02, v->path, tensor_in(image, data_from, data_from + nbytes), "the bytes that were written",
                       "segment %llu (bytes %llu to %llu) does not match its %s", (unsigned long long)segment, (unsigned long long)begin,
                       (unsigned long long)(begin + nbytes), bad ? "SHA-256" : "CRC-32");
    pthread_mutex_unlock(&v->mutex);
  }
  k3_progress_add(v->progress, nbytes);
  return K3_OK;
}

static enum k3_status verify_segments(struct verify *v, int n_threads, struct k3_error *err) {
  enum k3_status status = K3_OK;
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  if (!pool)
    return K3_NO_MEMORY;
  n_threads = k3_pool_n_threads(pool);
  v->buffers = k3_calloc((size_t)n_threads, sizeof *v->buffers, err);
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    if (v->buffers)
      v->buffers[i] = k3_alloc_aligned(K3_IMAGE_SEGMENT_NBYTES, 4096, err);
    status = v->buffers && v->buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK) {
    k3_progress_start(v->progress, "verifying", v->image->nbytes - v->image->body_begin);
    status = k3_pool_run(pool, v->image->n_segments, verify_segment, v, err);
    k3_progress_finish(v->progress);
  }
  for (int i = 0; v->buffers && i < n_threads; i++)
    k3_free(v->buffers[i]);
  k3_free(v->buffers);
  k3_pool_free(pool);
  return status;
}

enum k3_status k3_verify_image(const char *path, int n_threads, struct k3_progress *progress, struct k3_verify_result *result,
                               struct k3_findings *findings, struct k3_error *err) {
  struct k3_mapping mapping;
  struct k3_image image;
  struct k3_error bad = {0};
  struct verify v = {.image = &image, .path = path, .fd = -1, .progress = progress, .findings = findings, .result = result};
  *result = (struct k3_verify_result){0};
  K3_TRY(k3_map_file(path, &mapping, err));
  result->nbytes = mapping.nbytes;
  enum k3_status status = k3_image_open(mapping.data, mapping.nbytes, path, &image, &bad);
  if (status != K3_OK) {
    k3_unmap(&mapping);
    if (bad.rule != K3_RULE_NONE && (status == K3_BAD_INPUT || status == K3_DIFFERENT || status == K3_UNSUPPORTED))
      return k3_findings_add(findings, K3_ERROR, &bad);
    if (err && err->status == K3_OK)
      *err = bad;
    return status;
  }
  result->n_segments = image.n_segments;
  result->has_digests = image.digests != NULL;
  result->has_crc = image.crcs != NULL;
  k3_hex(result->identity, image.identity);
  pthread_mutex_init(&v.mutex, NULL);
  status = k3_open_read(path, &v.fd, NULL, err);
  if (status == K3_OK && (image.digests || image.crcs))
    status = verify_segments(&v, n_threads, err);
  if (v.fd >= 0)
    close(v.fd);
  pthread_mutex_destroy(&v.mutex);
  k3_image_close(&image);
  k3_unmap(&mapping);
  return status;
}
