#include "loader/writer.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "loader/nonfinite.h"
#include "loader/plan_parts.h"

enum { MAX_NONFINITE_TENSORS = 256 };

struct writer {
  const struct k3_plan *plan;
  struct k3_output output;
  const char *path;
  unsigned char **buffers;  // [n_threads] of one segment
  uint8_t *digests;         // [n_segments, 32]
  uint8_t *crcs;            // [n_segments, 4], NULL without --crc
  struct k3_progress *progress;
  pthread_mutex_t mutex;  // guards what follows
  struct {
    size_t tensor;
    uint64_t n_values;
  } nonfinite[MAX_NONFINITE_TENSORS];
  size_t n_nonfinite;
};

// File offset of the data area.
static uint64_t data_begin(const struct k3_plan *plan) {
  return K3_ST_PREFIX_NBYTES + plan->header_nbytes;
}

static void note_nonfinite(struct writer *w, size_t tensor, uint64_t n_values) {
  pthread_mutex_lock(&w->mutex);
  size_t i = 0;
  while (i < w->n_nonfinite && w->nonfinite[i].tensor != tensor)
    i++;
  if (i < MAX_NONFINITE_TENSORS) {
    w->nonfinite[i].tensor = tensor;
    w->nonfinite[i].n_values = (i < w->n_nonfinite ? w->nonfinite[i].n_values : 0) + n_values;
    w->n_nonfinite = i == w->n_nonfinite ? i + 1 : w->n_nonfinite;
  }
  pthread_mutex_unlock(&w->mutex);
}

// Counts NaN and Inf of the plain floating tensors in the bytes [offset, offset + nbytes) of the data area.
static void scan_segment(struct writer *w, uint64_t offset, size_t nbytes, const unsigned char *bytes) {
  const struct k3_plan *plan = w->plan;
  size_t low = 0, high = plan->n_tensors;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (plan->tensors[middle].offset + plan->tensors[middle].nbytes <= offset)
      low = middle + 1;
    else
      high = middle;
  }
  for (uint64_t end = offset + nbytes; low < plan->n_tensors && plan->tensors[low].offset < end; low++) {
    const struct k3_plan_tensor *t = &plan->tensors[low];
    if (t->kind != K3_PLAN_DATA || !k3_is_plain_float((enum k3_dtype)t->dtype))
      continue;
    uint64_t from = t->offset > offset ? t->offset : offset, to = t->offset + t->nbytes < end ? t->offset + t->nbytes : end;
    uint64_t n = k3_count_nonfinite((enum k3_dtype)t->dtype, bytes + (from - offset), (size_t)(to - from));
    if (n > 0)
      note_nonfinite(w, low, n);
  }
}

static enum k3_status write_segment(void *ctx, int worker, uint64_t segment, struct k3_error *err) {
  struct writer *w = ctx;
  const struct k3_plan *plan = w->plan;
  unsigned char *buffer = w->buffers[worker];
  uint64_t offset = plan->body_offset + segment * K3_IMAGE_SEGMENT_NBYTES, left = plan->data_nbytes - offset;
  size_t nbytes = left < K3_IMAGE_SEGMENT_NBYTES ? (size_t)left : K3_IMAGE_SEGMENT_NBYTES;
  K3_TRY(k3_plan_gather(plan, offset, nbytes, buffer, err));
  scan_segment(w, offset, nbytes, buffer);
  if (plan->options.digests)
    K3_TRY(k3_sha256(buffer, nbytes, w->digests + segment * K3_SHA256_NBYTES, err));
  if (w->crcs) {
    uint32_t crc = k3_crc32(buffer, nbytes);
    for (int i = 0; i < 4; i++)
      w->crcs[segment * 4 + (uint64_t)i] = (uint8_t)(crc >> 8 * i);
  }
  K3_TRY(k3_pwrite_full(w->output.fd, buffer, nbytes, data_begin(plan) + offset, w->path, err));
  if (plan->huge)
    k3_drop_cache(w->output.fd, data_begin(plan) + offset, nbytes, true);
  k3_progress_add(w->progress, nbytes);
  return K3_OK;
}

// Writes the front of the file in order, hashing as it goes: what the seal covers.
struct front {
  struct writer *w;
  struct k3_sha256 *hash;
  uint64_t offset;
};

static enum k3_status front_bytes(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct front *front = ctx;
  K3_TRY(k3_sha256_update(front->hash, bytes, nbytes, err));
  K3_TRY(k3_pwrite_full(front->w->output.fd, bytes, nbytes, front->offset, front->w->path, err));
  front->offset += nbytes;
  return K3_OK;
}

static enum k3_status front_fill(struct front *front, unsigned char byte, uint64_t nbytes, struct k3_error *err) {
  unsigned char block[4096];
  memset(block, byte, sizeof block);
  for (; nbytes > 0; nbytes -= nbytes < sizeof block ? nbytes : sizeof block)
    K3_TRY(front_bytes(front, block, nbytes < sizeof block ? (size_t)nbytes : sizeof block, err));
  return K3_OK;
}

static enum k3_status write_front(struct writer *w, struct k3_writer_result *result, struct k3_error *err) {
  const struct k3_plan *plan = w->plan;
  struct front front = {w, k3_sha256_create(err), 0};
  if (!front.hash)
    return K3_NO_MEMORY;
  uint8_t prefix[K3_ST_PREFIX_NBYTES], seal[K3_SHA256_NBYTES];
  uint64_t h = plan->header_nbytes;
  enum k3_status status;
  for (int i = 0; i < K3_ST_PREFIX_NBYTES; i++)
    prefix[i] = (uint8_t)(plan->header_nbytes >> 8 * i);
  K3_TRY_GOTO(status, out, front_bytes(&front, prefix, sizeof prefix, err));
  K3_TRY_GOTO(status, out, k3_plan_write_header(plan, front_bytes, &front, plan->header_nbytes, &h, err));
  for (size_t i = 0; i < plan->n_tensors && plan->tensors[i].kind != K3_PLAN_SEAL; i++) {
    const struct k3_plan_tensor *t = &plan->tensors[i];
    size_t n_text = strlen(plan->manifest);
    switch ((enum k3_plan_kind)t->kind) {
      case K3_PLAN_MANIFEST:
        K3_TRY_GOTO(status, out, front_bytes(&front, plan->manifest, n_text, err));
        K3_TRY_GOTO(status, out, front_fill(&front, ' ', t->nbytes - n_text, err));
        break;
      case K3_PLAN_DIGESTS: K3_TRY_GOTO(status, out, front_bytes(&front, w->digests, t->nbytes, err)); break;
      case K3_PLAN_CRC: K3_TRY_GOTO(status, out, front_bytes(&front, w->crcs, t->nbytes, err)); break;
      default: K3_TRY_GOTO(status, out, front_fill(&front, 0, t->nbytes, err)); break;
    }
  }
  K3_TRY_GOTO(status, out, k3_sha256_finish(front.hash, seal, err));
  K3_TRY_GOTO(status, out, k3_pwrite_full(w->output.fd, seal, sizeof seal, front.offset, w->path, err));
  k3_hex(result->identity, seal);
out:
  k3_sha256_free(front.hash);
  return status;
}

static bool is_below(const char *folder, const char *path) {
  size_t n = strlen(folder);
  return strncmp(folder, path, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

enum k3_status k3_output_not_input(const char *path, const struct k3_ckpt *ckpt, struct k3_error *err) {
  struct stat st;
  if (stat(path, &st) == 0) {
    for (size_t i = 0; i < ckpt->n_files; i++) {
      if (ckpt->files[i].id.device == st.st_dev && ckpt->files[i].id.inode == st.st_ino)
        return k3_fail(err, K3_BAD_ARGUMENT, K3_OUT02, path, NULL, "another place for the output", "the output is the input %s", ckpt->files[i].path);
    }
  }
  if (!ckpt->is_folder)
    return K3_OK;
  char inputs[PATH_MAX], outputs[PATH_MAX];
  char *parent = k3_strndup(path, strlen(path), err);
  if (!parent)
    return K3_NO_MEMORY;
  char *slash = strrchr(parent, '/');
  if (slash)
    slash[slash == parent] = '\0';
  bool inside = realpath(ckpt->folder, inputs) && realpath(slash ? parent : ".", outputs) && is_below(inputs, outputs);
  k3_free(parent);
  if (inside)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_OUT02, path, NULL, "a place outside the checkpoint's folder", "the output would lie in the input folder %s",
                   inputs);
  return K3_OK;
}

static enum k3_status create_output(struct writer *w, const struct k3_writer_options *options, struct k3_error *err) {
  const struct k3_plan *plan = w->plan;
  uint64_t nbytes = k3_plan_file_nbytes(plan), n_free = k3_free_space(options->path);
  K3_TRY(k3_output_not_input(options->path, plan->ckpt, err));
  if (plan->target)
    K3_TRY(k3_output_not_input(options->path, plan->target, err));
  K3_TRY(k3_output_create(&w->output, options->path, options->replace, err));
  if (nbytes > n_free)
    return k3_fail(err, K3_NO_SPACE, K3_OUT03, options->path, NULL, NULL, "the image needs %llu bytes, %llu are free", (unsigned long long)nbytes,
                   (unsigned long long)n_free);
  return k3_output_reserve(&w->output, nbytes, err);
}

enum k3_status k3_writer_run(const struct k3_plan *plan, const struct k3_writer_options *options, struct k3_writer_result *result,
                             struct k3_findings *findings, struct k3_error *err) {
  struct writer w = {.plan = plan, .output = {.fd = -1}, .path = options->path, .progress = options->progress};
  enum k3_status status;
  *result = (struct k3_writer_result){.file_nbytes = k3_plan_file_nbytes(plan)};
  pthread_mutex_init(&w.mutex, NULL);
  struct k3_pool *pool = k3_pool_create(options->n_threads, err);
  int n_threads = pool ? k3_pool_n_threads(pool) : 0;
  w.buffers = k3_calloc((size_t)n_threads + 1, sizeof *w.buffers, err);
  w.digests = k3_calloc(plan->n_segments, K3_SHA256_NBYTES, err);
  status = pool && w.buffers && w.digests ? K3_OK : K3_NO_MEMORY;
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    w.buffers[i] = k3_alloc_aligned(K3_IMAGE_SEGMENT_NBYTES, 4096, err);
    status = w.buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK && plan->options.crc) {
    w.crcs = k3_calloc(plan->n_segments, 4, err);
    status = w.crcs ? K3_OK : K3_NO_MEMORY;
  }
  if (status != K3_OK)
    goto out;
  K3_TRY_GOTO(status, out, create_output(&w, options, err));
  k3_progress_start(options->progress, "writing", plan->data_nbytes - plan->body_offset);
  K3_TRY_GOTO(status, out, k3_pool_run(pool, plan->n_segments, write_segment, &w, err));
  K3_TRY_GOTO(status, out, write_front(&w, result, err));
  K3_TRY_GOTO(status, out, k3_ckpt_unchanged(plan->ckpt, err));
  if (plan->target)
    K3_TRY_GOTO(status, out, k3_ckpt_unchanged(plan->target, err));
  K3_TRY_GOTO(status, out, k3_output_commit(&w.output, err));
  k3_progress_finish(options->progress);
  result->gathered_nbytes = 0;
  for (size_t i = 0; i < plan->n_tensors; i++)
    result->gathered_nbytes += plan->tensors[i].kind == K3_PLAN_DATA || plan->tensors[i].kind == K3_PLAN_SOURCE ? plan->tensors[i].nbytes : 0;
  for (size_t i = 0; i < w.n_nonfinite; i++) {
    struct k3_error warning = {0};
    k3_fail(&warning, K3_BAD_INPUT, K3_VAL02, options->path, plan->tensors[w.nonfinite[i].tensor].name, "finite weights; the bytes were kept",
            "%llu values are NaN or Inf", (unsigned long long)w.nonfinite[i].n_values);
    k3_findings_add(findings, K3_WARNING, &warning);
  }
out:
  k3_output_abort(&w.output);
  for (int i = 0; i < n_threads && w.buffers; i++)
    k3_free(w.buffers[i]);
  k3_free(w.buffers);
  k3_free(w.digests);
  k3_free(w.crcs);
  k3_pool_free(pool);
  pthread_mutex_destroy(&w.mutex);
  return status;
}

struct digest_job {
  struct k3_plan *plan;
  struct k3_progress *progress;
};

static enum k3_status digest_source(void *ctx, int worker, uint64_t index, struct k3_error *err) {
  struct digest_job *job = ctx;
  struct k3_plan_source *source = &job->plan->sources[index];
  (void)worker;
  if (!source->is_header)
    return K3_OK;
  enum { BLOCK_NBYTES = 1 << 20 };
  unsigned char *block = k3_alloc_aligned(BLOCK_NBYTES, 4096, err);
  struct k3_sha256 *hash = block ? k3_sha256_create(err) : NULL;
  enum k3_status status = hash ? K3_OK : K3_NO_MEMORY;
  uint8_t digest[K3_SHA256_NBYTES];
  for (uint64_t at = 0; status == K3_OK && at < source->file_nbytes; at += BLOCK_NBYTES) {
    size_t n = source->file_nbytes - at < BLOCK_NBYTES ? (size_t)(source->file_nbytes - at) : BLOCK_NBYTES;
    status = k3_pread_full(source->fd, block, n, at, source->path, err);
    if (status == K3_OK)
      status = k3_sha256_update(hash, block, n, err);
    k3_progress_add(job->progress, n);
  }
  if (status == K3_OK)
    status = k3_sha256_finish(hash, digest, err);
  if (status == K3_OK)
    k3_hex(source->sha256, digest);
  k3_sha256_free(hash);
  k3_free(block);
  return status;
}

enum k3_status k3_plan_digest_sources(struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_error *err) {
  struct digest_job job = {plan, progress};
  uint64_t total = 0;
  K3_TRY(k3_plan_list_sources(plan, err));
  for (size_t s = 0; s < plan->n_sources; s++)
    total += plan->sources[s].is_header ? plan->sources[s].file_nbytes : 0;
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  if (!pool)
    return K3_NO_MEMORY;
  k3_progress_start(progress, "hashing the sources", total);
  enum k3_status status = k3_pool_run(pool, plan->n_sources, digest_source, &job, err);
  k3_progress_finish(progress);
  k3_pool_free(pool);
  return status;
}
