// The folder of a split image: written under a temporary name, verified, recognised.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "loader/plan_parts.h"
#include "loader/split.h"

char *k3_split_rank_name(char dst[64], uint32_t rank, uint32_t tp) {
  snprintf(dst, 64, "rank-%u-of-%u.safetensors", rank, tp);
  return dst;
}

bool k3_is_split_folder(const char *path) {
  struct stat st;
  char *shared = k3_path_join(path, K3_SPLIT_SHARED_NAME, NULL);
  bool found = shared && stat(path, &st) == 0 && S_ISDIR(st.st_mode) && stat(shared, &st) == 0 && S_ISREG(st.st_mode);
  k3_free(shared);
  return found;
}

enum k3_status k3_may_be_image(const char *path, struct k3_error *err) {
  struct stat st;
  if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode) || k3_is_split_folder(path))
    return K3_OK;
  return k3_fail(err, K3_BAD_INPUT, K3_IMG01, path, NULL, "a file written by `k3pack convert`, or the folder of `convert --tp`",
                 "a folder of other files, no packed image: convert it first");
}

// ---- a folder that appears whole or not at all ----

struct folder {
  const char *path;
  char *temp;  // ".<name>.k3tmp" beside it
  int fd;      // of temp, locked
};

static bool is_ours(const char *name) {
  unsigned rank, tp;
  char exact[64];
  if (strcmp(name, K3_SPLIT_SHARED_NAME) == 0)
    return true;
  const char *begin = name[0] == '.' ? name + 1 : name;  // a file that was being written
  if (sscanf(begin, "rank-%u-of-%u.", &rank, &tp) == 2) {
    k3_split_rank_name(exact, rank, tp);
    return strncmp(begin, exact, strlen(exact)) == 0 && (begin[strlen(exact)] == '\0' || strcmp(begin + strlen(exact), ".k3tmp") == 0);
  }
  return strcmp(name, "." K3_SPLIT_SHARED_NAME ".k3tmp") == 0;
}

// Removes our files from a folder; strangers are left.
static void remove_files(const char *path) {
  DIR *dir = opendir(path);
  if (!dir)
    return;
  for (struct dirent *entry; (entry = readdir(dir));) {
    if (is_ours(entry->d_name))
      unlinkat(dirfd(dir), entry->d_name, 0);
  }
  closedir(dir);
}

// The folder too, unless a stranger is in it.
static void remove_folder(const char *path) {
  remove_files(path);
  rmdir(path);
}

// Name of a file in the folder that is none of ours, in dst; false when there is none.
static bool find_stranger(const char *path, char *dst, size_t capacity) {
  DIR *dir = opendir(path);
  bool found = false;
  for (struct dirent *entry; dir && !found && (entry = readdir(dir));) {
    found = strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && !is_ours(entry->d_name);
    if (found)
      snprintf(dst, capacity, "%s", entry->d_name);
  }
  if (dir)
    closedir(dir);
  return found;
}

static enum k3_status check_old(const char *path, bool replace, struct k3_error *err) {
  struct stat st;
  char stranger[256];
  if (lstat(path, &st) != 0)
    return errno == ENOENT ? K3_OK : k3_fail_errno(err, errno, path, "cannot look at the output");
  if (!replace)
    return k3_fail(err, K3_EXISTS, K3_OUT01, path, NULL, "--force replaces it", "the output exists");
  if (!S_ISDIR(st.st_mode))
    return k3_fail(err, K3_EXISTS, K3_OUT01, path, NULL, "a new name, or a folder that `convert --tp` wrote", "the output exists and is no folder");
  if (find_stranger(path, stranger, sizeof stranger))
    return k3_fail(err, K3_EXISTS, K3_OUT01, path, stranger, "a new name, or a folder that `convert --tp` wrote",
                   "the output exists and holds something that --tp did not write");
  return K3_OK;
}

static enum k3_status folder_create(struct folder *folder, const char *path, bool replace, struct k3_error *err) {
  *folder = (struct folder){.path = path, .fd = -1};
  K3_TRY(check_old(path, replace, err));
  const char *name = k3_path_base(path);
  folder->temp = k3_asprintf(err, "%.*s.%s.k3tmp", (int)(name - path), path, name);
  if (!folder->temp)
    return K3_NO_MEMORY;
  if (mkdir(folder->temp, 0777) != 0 && errno != EEXIST)
    return k3_fail_errno(err, errno, folder->temp, "cannot create the temporary folder");
  struct stat by_name, by_fd;
  folder->fd = open(folder->temp, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (folder->fd < 0)
    return k3_fail_errno(err, errno, folder->temp, "cannot open the temporary folder");
  // Whoever holds the lock of the folder that still has the name is the one who writes.
  if (flock(folder->fd, LOCK_EX | LOCK_NB) != 0 || stat(folder->temp, &by_name) != 0 || fstat(folder->fd, &by_fd) != 0 ||
      by_name.st_ino != by_fd.st_ino || by_name.st_dev != by_fd.st_dev) {
    close(folder->fd);
    folder->fd = -1;
    return k3_fail(err, K3_EXISTS, K3_RULE_NONE, path, NULL, "one conversion at a time", "another process is writing this output");
  }
  remove_files(folder->temp);  // what an interrupted conversion left, maybe for another number of ranks
  return K3_OK;
}

static enum k3_status folder_commit(struct folder *folder, bool replace, struct k3_error *err) {
  if (fsync(folder->fd) != 0)
    return k3_fail_errno(err, errno, folder->temp, "cannot sync the temporary folder");
  if (rename(folder->temp, folder->path) != 0) {  // an empty folder in its place is replaced
    if (!replace || (errno != ENOTEMPTY && errno != EEXIST))
      return k3_fail_errno(err, errno, folder->path, "cannot rename the temporary folder");
    if (renameat2(AT_FDCWD, folder->temp, AT_FDCWD, folder->path, RENAME_EXCHANGE) != 0)
      return k3_fail_errno(err, errno, folder->path, "cannot replace the folder");
    remove_folder(folder->temp);
  }
  close(folder->fd);
  folder->fd = -1;
  char *parent = k3_strndup(folder->path, (size_t)(k3_path_base(folder->path) - folder->path), err);
  int fd = parent ? open(parent[0] ? parent : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd >= 0) {
    fsync(fd);
    close(fd);
  }
  k3_free(parent);
  return K3_OK;
}

static void folder_close(struct folder *folder) {
  if (folder->fd >= 0) {
    remove_folder(folder->temp);
    close(folder->fd);
  }
  k3_free(folder->temp);
  *folder = (struct folder){.fd = -1};
}

// ---- writing ----

static enum k3_status write_part(const struct k3_plan *mapped, uint32_t tp, int32_t rank, const char *const *seals, const struct folder *folder,
                                 const struct k3_writer_options *options, struct k3_writer_result *result, struct k3_findings *findings,
                                 struct k3_error *err) {
  char name[64];
  struct k3_plan part;
  K3_TRY(k3_split_part(mapped, tp, rank, seals, &part, findings, err));
  char *path = k3_path_join(folder->temp, rank < 0 ? K3_SPLIT_SHARED_NAME : k3_split_rank_name(name, (uint32_t)rank, tp), err);
  struct k3_writer_options one = {.path = path, .replace = true, .n_threads = options->n_threads, .progress = options->progress};
  enum k3_status status = path ? k3_writer_run(&part, &one, result, findings, err) : K3_NO_MEMORY;
  k3_free(path);
  k3_split_part_free(&part);
  return status;
}

enum k3_status k3_split_write(const struct k3_plan *mapped, uint32_t tp, const struct k3_writer_options *options, struct k3_writer_result *result,
                              struct k3_findings *findings, struct k3_error *err) {
  struct folder folder = {.fd = -1};
  struct k3_writer_result one = {0};
  uint64_t file_nbytes = 0, gathered_nbytes = 0;
  enum k3_status status;
  char(*identities)[65] = NULL;
  const char **seals = NULL;
  if (tp < 1 || tp > K3_MANIFEST_MAX_RANKS)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "1 to 4096", "%u ranks", tp);
  K3_TRY(k3_output_not_input(options->path, mapped->ckpt, err));
  if (mapped->target)
    K3_TRY(k3_output_not_input(options->path, mapped->target, err));
  size_t n_path = strlen(options->path);
  while (n_path > 1 && options->path[n_path - 1] == '/')
    n_path--;
  char *path = k3_strndup(options->path, n_path, err);
  if (!path)
    return K3_NO_MEMORY;
  identities = k3_calloc(tp, sizeof *identities, err);
  seals = k3_calloc(tp, sizeof *seals, err);
  status = identities && seals ? K3_OK : K3_NO_MEMORY;
  if (status != K3_OK)
    goto out;
  K3_TRY_GOTO(status, out, folder_create(&folder, path, options->replace, err));
  for (uint32_t r = 0; r < tp; r++) {
    K3_TRY_GOTO(status, out, write_part(mapped, tp, (int32_t)r, NULL, &folder, options, &one, findings, err));
    memcpy(identities[r], one.identity, sizeof identities[r]);
    seals[r] = identities[r];
    file_nbytes += one.file_nbytes;
    gathered_nbytes += one.gathered_nbytes;
  }
  K3_TRY_GOTO(status, out, write_part(mapped, tp, K3_PART_SHARED, seals, &folder, options, &one, findings, err));
  *result = one;
  result->file_nbytes += file_nbytes;
  result->gathered_nbytes += gathered_nbytes;
  status = folder_commit(&folder, options->replace, err);
out:
  folder_close(&folder);
  k3_free(path);
  k3_free(identities);
  k3_free(seals);
  return status;
}

// ---- verifying ----

// The seals that the shared file names; NULL with a finding when it is no such file.
static enum k3_status read_seals(const char *path, uint32_t *tp, char (**seals)[65], struct k3_findings *findings, struct k3_error *err) {
  struct k3_mapping mapping;
  struct k3_image image;
  enum k3_status status;
  *seals = NULL;
  K3_TRY(k3_map_file(path, &mapping, err));
  status = k3_image_open(mapping.data, mapping.nbytes, path, &image, err);
  if (status == K3_OK && !image.manifest.rank_seals) {
    k3_findings_report(findings, K3_IMG01, path, NULL, "the shared file of `convert --tp N`", "its manifest names no rank files");
    k3_image_close(&image);
  } else if (status == K3_OK) {
    *tp = image.manifest.tp_size;
    *seals = k3_calloc(*tp, sizeof **seals, err);
    status = *seals ? K3_OK : K3_NO_MEMORY;
    for (uint32_t r = 0; *seals && r < *tp; r++)
      snprintf((*seals)[r], sizeof(*seals)[r], "%s", image.manifest.rank_seals[r]);
    k3_image_close(&image);
  }
  k3_unmap(&mapping);
  return status;
}

static enum k3_status verify_rank(const char *folder, uint32_t rank, uint32_t tp, const char *seal, int n_threads, struct k3_progress *progress,
                                  struct k3_verify_result *total, struct k3_findings *findings, struct k3_error *err) {
  char name[64];
  struct stat st;
  struct k3_verify_result one;
  char *path = k3_path_join(folder, k3_split_rank_name(name, rank, tp), err);
  if (!path)
    return K3_NO_MEMORY;
  enum k3_status status = K3_OK;
  if (stat(path, &st) != 0 && errno == ENOENT) {
    k3_findings_report(findings, K3_IMG01, path, NULL, "a file for every rank", "the file of rank %u is absent", rank);
  } else {
    status = k3_verify_image(path, n_threads, progress, &one, findings, err);
    if (status == K3_OK && one.identity[0] && strcmp(one.identity, seal) != 0)
      k3_findings_report(findings, K3_IMG02, path, NULL, seal, "the file of rank %u has the seal %s, the shared file names another", rank,
                         one.identity);
    if (status == K3_OK) {
      total->nbytes += one.nbytes;
      total->n_segments += one.n_segments;
      total->n_bad_segments += one.n_bad_segments;
    }
  }
  k3_free(path);
  return status;
}

enum k3_status k3_verify_split(const char *folder, int n_threads, struct k3_progress *progress, struct k3_verify_result *result, uint32_t *tp,
                               struct k3_findings *findings, struct k3_error *err) {
  char stranger[256];
  char(*seals)[65] = NULL;
  *tp = 0;
  char *shared = k3_path_join(folder, K3_SPLIT_SHARED_NAME, err);
  if (!shared)
    return K3_NO_MEMORY;
  enum k3_status status = k3_verify_image(shared, n_threads, progress, result, findings, err);
  if (status == K3_OK && findings->n_errors == 0)
    status = read_seals(shared, tp, &seals, findings, err);
  for (uint32_t r = 0; status == K3_OK && seals && r < *tp; r++)
    status = verify_rank(folder, r, *tp, seals[r], n_threads, progress, result, findings, err);
  if (status == K3_OK && find_stranger(folder, stranger, sizeof stranger))
    k3_findings_report(findings, K3_IMG01, folder, stranger, "nothing but the files of one split image", "a file that does not belong here");
  k3_free(seals);
  k3_free(shared);
  return status;
}
