#include "loader/digests.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/pool.h"

enum { CHUNK_NBYTES = 1 << 20 };

struct file {
  const char *name, *path;
  uint64_t nbytes;
  char sha256[2 * K3_SHA256_NBYTES + 1];
};

struct job {
  struct file *files;
  size_t n_files;
  struct k3_progress *progress;
};

static enum k3_status list_files(const struct k3_ckpt *ckpt, struct job *job, struct k3_error *err) {
  job->files = k3_calloc(ckpt->n_files + ckpt->n_documents, sizeof *job->files, err);
  if (!job->files)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < ckpt->n_files; i++)
    job->files[job->n_files++] = (struct file){.name = ckpt->files[i].name, .path = ckpt->files[i].path, .nbytes = ckpt->files[i].id.nbytes};
  for (size_t i = 0; i < ckpt->n_documents; i++)
    job->files[job->n_files++] = (struct file){.name = ckpt->documents[i].name, .path = ckpt->documents[i].path, .nbytes = ckpt->documents[i].nbytes};
  return K3_OK;
}

static enum k3_status hash_file(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  struct job *job = ctx;
  struct file *file = &job->files[item];
  struct k3_file_id id;
  uint8_t digest[K3_SHA256_NBYTES];
  int fd = -1;
  enum k3_status status = K3_NO_MEMORY;
  (void)worker;
  unsigned char *buffer = k3_calloc(CHUNK_NBYTES, 1, err);
  struct k3_sha256 *state = buffer ? k3_sha256_create(err) : NULL;
  if (!state)
    goto out;
  K3_TRY_GOTO(status, out, k3_open_read(file->path, &fd, &id, err));
  for (uint64_t at = 0; at < id.nbytes; at += CHUNK_NBYTES) {
    size_t n = id.nbytes - at < CHUNK_NBYTES ? (size_t)(id.nbytes - at) : CHUNK_NBYTES;
    K3_TRY_GOTO(status, out, k3_pread_full(fd, buffer, n, at, file->path, err));
    K3_TRY_GOTO(status, out, k3_sha256_update(state, buffer, n, err));
    k3_progress_add(job->progress, n);
  }
  file->nbytes = id.nbytes;
  K3_TRY_GOTO(status, out, k3_sha256_finish(state, digest, err));
  k3_hex(file->sha256, digest);
out:
  if (fd >= 0)
    close(fd);
  k3_sha256_free(state);
  k3_free(buffer);
  return status;
}

// The digest that a cache gave the file as a name: .../blobs/<64 hex digits> behind its link. False: no such name.
static bool blob_name(const char *path, char name[2 * K3_SHA256_NBYTES + 1]) {
  char *real = realpath(path, NULL);
  const char *base = real ? k3_path_base(real) : "";
  bool is_blob = strlen(base) == 64 && strspn(base, "0123456789abcdef") == 64 && base - real >= 7 && memcmp(base - 7, "/blobs/", 7) == 0;
  if (is_blob)
    memcpy(name, base, 2 * K3_SHA256_NBYTES + 1);
  free(real);
  return is_blob;
}

// A release fits when every file of it is here with its size, and no other weights are. With digests they must be its own.
static struct k3_release_match find_release(const struct file *files, size_t n_files, size_t n_weights, const struct k3_recipe *recipe) {
  for (size_t r = 0; r < recipe->n_releases; r++) {
    const struct k3_recipe_release *release = &recipe->releases[r];
    size_t n_found = 0, n_proved = 0, n_other = 0, n_weights_found = 0;
    for (size_t f = 0; f < release->n_files; f++) {
      for (size_t i = 0; i < n_files; i++) {
        if (strcmp(files[i].name, release->files[f].name) != 0 || files[i].nbytes != release->files[f].nbytes)
          continue;
        n_found++;
        n_weights_found += i < n_weights;
        n_proved += strcmp(files[i].sha256, release->files[f].sha256) == 0;
        n_other += files[i].sha256[0] && strcmp(files[i].sha256, release->files[f].sha256) != 0;
      }
    }
    if (n_found == release->n_files && n_weights_found == n_weights && n_other == 0)
      return (struct k3_release_match){release, n_proved == release->n_files};
  }
  return (struct k3_release_match){0};
}

struct k3_release_match k3_release_by_size(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe) {
  struct job job = {0};
  struct k3_release_match match = {0};
  if (recipe->n_releases > 0 && list_files(ckpt, &job, NULL) == K3_OK)
    match = find_release(job.files, job.n_files, ckpt->n_files, recipe);
  k3_free(job.files);
  return match;
}

enum k3_status k3_digests_check(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, int n_threads, struct k3_progress *progress,
                                struct k3_digests *result, struct k3_findings *findings, struct k3_error *err) {
  struct job job = {.progress = progress};
  struct k3_pool *pool = NULL;
  enum k3_status status;
  *result = (struct k3_digests){0};
  K3_TRY_GOTO(status, out, list_files(ckpt, &job, err));
  status = K3_NO_MEMORY;
  if (!(pool = k3_pool_create(n_threads, err)))
    goto out;
  uint64_t nbytes = 0;
  for (size_t i = 0; i < job.n_files; i++)
    nbytes += job.files[i].nbytes;
  k3_progress_start(progress, "digests", nbytes);
  status = k3_pool_run(pool, job.n_files, hash_file, &job, err);
  k3_progress_finish(progress);
  if (status != K3_OK)
    goto out;
  result->n_files = job.n_files;
  for (size_t i = 0; i < job.n_files; i++) {
    char name[2 * K3_SHA256_NBYTES + 1];
    if (!blob_name(job.files[i].path, name))
      continue;
    if (strcmp(name, job.files[i].sha256) == 0)
      result->n_proved++;
    else
      k3_findings_report(findings, K3_IMG02, job.files[i].path, NULL, name,
                         "the blob's SHA-256 is %s, not its name: damaged, or changed since the download", job.files[i].sha256);
  }
  result->match = find_release(job.files, job.n_files, ckpt->n_files, recipe);
out:
  k3_pool_free(pool);
  k3_free(job.files);
  return status;
}
