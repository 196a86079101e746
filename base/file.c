#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/fault.h"

// Linux moves at most 0x7FFFF000 bytes per call; smaller pieces also keep the process interruptible.
enum { DEFAULT_CHUNK_NBYTES = 1 << 30 };

static _Atomic size_t chunk_limit = DEFAULT_CHUNK_NBYTES;
static _Atomic uint64_t io_count, io_fail_index;
static _Atomic int io_fail_errno;

void k3_io_set_chunk_limit(size_t nbytes) {
  atomic_store(&chunk_limit, nbytes ? nbytes : DEFAULT_CHUNK_NBYTES);
}

void k3_io_fail_at(uint64_t n, int errno_value) {
  atomic_store(&io_fail_errno, errno_value);
  atomic_store(&io_fail_index, n ? atomic_load(&io_count) + n : 0);
}

// Counts one system call that touches a file; true (with errno set) when this is the one that a test wants to fail.
static bool must_fail(void) {
  uint64_t index = atomic_fetch_add_explicit(&io_count, 1, memory_order_relaxed) + 1;
  if (index != atomic_load_explicit(&io_fail_index, memory_order_relaxed))
    return false;
  errno = atomic_load(&io_fail_errno);
  return true;
}

static size_t chunk_of(size_t nbytes) {
  size_t limit = atomic_load_explicit(&chunk_limit, memory_order_relaxed);
  return nbytes < limit ? nbytes : limit;
}

enum k3_status k3_pread_full(int fd, void *dst, size_t nbytes, uint64_t offset, const char *path, struct k3_error *err) {
  unsigned char *to = dst;
  while (nbytes > 0) {
    ssize_t n = must_fail() ? -1 : pread(fd, to, chunk_of(nbytes), (off_t)offset);
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return k3_fail_errno(err, errno, path, "cannot read");
    if (n == 0)
      return k3_fail(err, K3_BAD_INPUT, K3_CNT03, path, NULL, NULL, "the file ends at byte %llu, %zu bytes too early", (unsigned long long)offset,
                     nbytes);
    to += n;
    nbytes -= (size_t)n;
    offset += (uint64_t)n;
  }
  return K3_OK;
}

enum k3_status k3_pwrite_full(int fd, const void *src, size_t nbytes, uint64_t offset, const char *path, struct k3_error *err) {
  const unsigned char *from = src;
  while (nbytes > 0) {
    ssize_t n = must_fail() ? -1 : pwrite(fd, from, chunk_of(nbytes), (off_t)offset);
    if (n < 0 && errno == EINTR)
      continue;
    if (n <= 0)
      return k3_fail_errno(err, n < 0 ? errno : ENOSPC, path, "cannot write");
    from += n;
    nbytes -= (size_t)n;
    offset += (uint64_t)n;
  }
  return K3_OK;
}

bool k3_file_id_equal(const struct k3_file_id *a, const struct k3_file_id *b) {
  return a->device == b->device && a->inode == b->inode && a->nbytes == b->nbytes && a->mtime_sec == b->mtime_sec && a->mtime_nsec == b->mtime_nsec;
}

enum k3_status k3_open_read(const char *path, int *fd, struct k3_file_id *id, struct k3_error *err) {
  *fd = -1;
  struct stat st;
  // O_NONBLOCK: a FIFO must not hang the open that finds out it is one.
  int opened;
  do {
    opened = must_fail() ? -1 : open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (opened < 0 && errno == EINTR);  // network file systems interrupt an open
  if (opened < 0)
    return k3_fail_errno(err, errno, path, "cannot open");
  if (fstat(opened, &st) != 0) {
    int saved = errno;
    close(opened);
    return k3_fail_errno(err, saved, path, "cannot look at");
  }
  if (!S_ISREG(st.st_mode)) {
    close(opened);
    return k3_fail(err, K3_IO, K3_RULE_NONE, path, NULL, "a regular file", "%s", S_ISDIR(st.st_mode) ? "a folder" : "a special file");
  }
  if (id)
    *id = (struct k3_file_id){st.st_dev, st.st_ino, (uint64_t)st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
  *fd = opened;
  return K3_OK;
}

enum k3_status k3_read_file(const char *path, uint64_t max_nbytes, void **data, size_t *nbytes, struct k3_error *err) {
  int fd;
  struct k3_file_id id;
  *data = NULL;
  *nbytes = 0;
  K3_TRY(k3_open_read(path, &fd, &id, err));
  enum k3_status status = K3_OK;
  unsigned char *buffer = NULL;
  if (id.nbytes > max_nbytes) {
    status = k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, path, NULL, NULL, "%llu bytes, more than the limit of %llu", (unsigned long long)id.nbytes,
                     (unsigned long long)max_nbytes);
    goto out;
  }
  buffer = k3_calloc(id.nbytes + 1, 1, err);
  if (!buffer) {
    status = K3_NO_MEMORY;
    goto out;
  }
  K3_TRY_GOTO(status, out, k3_pread_full(fd, buffer, id.nbytes, 0, path, err));
  *data = buffer;
  *nbytes = id.nbytes;
  buffer = NULL;
out:
  k3_free(buffer);
  close(fd);
  return status;
}

enum k3_status k3_map_file(const char *path, struct k3_mapping *mapping, struct k3_error *err) {
  int fd;
  *mapping = (struct k3_mapping){0};
  K3_TRY(k3_open_read(path, &fd, &mapping->id, err));
  enum k3_status status = K3_OK;
  mapping->nbytes = mapping->id.nbytes;
  if (mapping->nbytes > 0) {
    void *data = must_fail() ? MAP_FAILED : mmap(NULL, mapping->nbytes, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      status = k3_fail_errno(err, errno, path, "cannot map");
      *mapping = (struct k3_mapping){0};
    } else {
      mapping->data = data;
      k3_fault_watch_mapping(data, mapping->nbytes, path);
    }
  }
  close(fd);  // the mapping stays
  return status;
}

void k3_unmap(struct k3_mapping *mapping) {
  if (mapping->data) {
    k3_fault_forget_mapping(mapping->data);
    munmap((void *)(uintptr_t)mapping->data, mapping->nbytes);
  }
  *mapping = (struct k3_mapping){0};
}

char *k3_path_join(const char *dir, const char *name, struct k3_error *err) {
  if (!dir || !dir[0])
    return k3_strndup(name, strlen(name), err);
  bool has_slash = dir[strlen(dir) - 1] == '/';
  return k3_asprintf(err, "%s%s%s", dir, has_slash ? "" : "/", name);
}

const char *k3_path_base(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// The folder part of path in new memory; "." when there is none.
static char *parent_of(const char *path, struct k3_error *err) {
  const char *slash = strrchr(path, '/');
  if (!slash)
    return k3_strndup(".", 1, err);
  return slash == path ? k3_strndup("/", 1, err) : k3_strndup(path, (size_t)(slash - path), err);
}

// True when fd still is what temp_path names: between our open and our lock another process may have renamed or removed it.
static bool still_ours(int fd, const char *temp_path) {
  struct stat by_fd, by_path;
  return fstat(fd, &by_fd) == 0 && stat(temp_path, &by_path) == 0 && by_fd.st_dev == by_path.st_dev && by_fd.st_ino == by_path.st_ino;
}

static enum k3_status open_locked_temp(struct k3_output *output, struct k3_error *err) {
  for (int attempt = 0; attempt < 16; attempt++) {
    int fd = must_fail() ? -1 : open(output->temp_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0 && errno == EINTR)
      continue;
    if (fd < 0)
      return k3_fail_errno(err, errno, output->final_path, "cannot create the output");
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      close(fd);
      return k3_fail(err, K3_EXISTS, K3_OUT01, output->final_path, NULL, "one writer at a time", "another process is writing this output");
    }
    if (still_ours(fd, output->temp_path)) {
      output->fd = fd;
      k3_fault_watch_output(output->temp_path);
      return K3_OK;
    }
    close(fd);
  }
  return k3_fail(err, K3_EXISTS, K3_OUT01, output->final_path, NULL, "one writer at a time", "other processes keep replacing the temporary file");
}

enum k3_status k3_output_create(struct k3_output *output, const char *path, bool replace, struct k3_error *err) {
  *output = (struct k3_output){.fd = -1};
  struct stat st;
  if (lstat(path, &st) == 0) {
    if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
      return k3_fail(err, K3_BAD_ARGUMENT, K3_OUT02, path, NULL, "the name of a file", "the output is a folder or a special file");
    if (!replace)
      return k3_fail(err, K3_EXISTS, K3_OUT01, path, NULL, "--force replaces it", "the output exists");
  }
  enum k3_status status = K3_NO_MEMORY;
  char *folder = parent_of(path, err);
  output->final_path = k3_strndup(path, strlen(path), err);
  char *temp_name = k3_asprintf(err, ".%s.k3tmp", k3_path_base(path));
  if (folder && output->final_path && temp_name)
    output->temp_path = k3_path_join(folder, temp_name, err);
  if (output->temp_path)
    status = open_locked_temp(output, err);
  if (status == K3_OK && ftruncate(output->fd, 0) != 0)
    status = k3_fail_errno(err, errno, path, "cannot empty the temporary file");
  k3_free(folder);
  k3_free(temp_name);
  if (status != K3_OK)
    k3_output_abort(output);
  return status;
}

// A memory file system hands its pages out one by one anyway: there the writers' own threads do it faster than one call up front.
static bool in_memory(int fd) {
  struct statfs fs;
  return fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

enum k3_status k3_output_reserve(struct k3_output *output, uint64_t nbytes, struct k3_error *err) {
  int failure;
  do {
    failure = must_fail() ? errno : nbytes == 0 || in_memory(output->fd) ? 0 : fallocate(output->fd, 0, 0, (off_t)nbytes) == 0 ? 0 : errno;
  } while (failure == EINTR);
  if (failure != 0 && failure != EOPNOTSUPP && failure != ENOSYS)
    return k3_fail_errno(err, failure, output->final_path, "cannot reserve the space");
  if (ftruncate(output->fd, (off_t)nbytes) != 0)
    return k3_fail_errno(err, errno, output->final_path, "cannot set the size");
  return K3_OK;
}

static enum k3_status sync_folder(const char *folder, struct k3_error *err) {
  enum k3_status status = K3_OK;
  int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // EINVAL and EROFS: file systems that have nothing to sync for a folder.
  if (fd >= 0 && fsync(fd) != 0 && errno != EINVAL && errno != EROFS)
    status = k3_fail_errno(err, errno, folder, "cannot sync the folder");
  if (fd >= 0)
    close(fd);
  return status;
}

// Until the rename, anything may fail and nothing be left; so what can fail comes first.
static enum k3_status flush(int fd) {
  int failure;
  do {
    failure = must_fail() || fsync(fd) != 0 ? errno : 0;
  } while (failure == EINTR);
  errno = failure;
  return failure ? K3_IO : K3_OK;
}

static void output_release(struct k3_output *output) {
  if (output->fd >= 0) {
    k3_fault_forget_output(output->temp_path);
    close(output->fd);  // releases the lock
  }
  k3_free(output->final_path);
  k3_free(output->temp_path);
  *output = (struct k3_output){.fd = -1};
}

enum k3_status k3_output_commit(struct k3_output *output, struct k3_error *err) {
  char *folder = parent_of(output->final_path, err);
  enum k3_status status = folder ? K3_OK : K3_NO_MEMORY;
  if (folder && flush(output->fd) != K3_OK)
    status = k3_fail_errno(err, errno, output->final_path, "cannot flush to disk");
  else if (folder && (must_fail() || rename(output->temp_path, output->final_path) != 0))
    status = k3_fail_errno(err, errno, output->final_path, "cannot rename the finished file");
  if (status == K3_OK) {
    status = sync_folder(folder, err);
    output_release(output);
  } else {
    k3_output_abort(output);
  }
  k3_free(folder);
  return status;
}

void k3_output_abort(struct k3_output *output) {
  if (output->fd >= 0 && output->temp_path && still_ours(output->fd, output->temp_path))
    unlink(output->temp_path);
  output_release(output);
}

// A second name for what a commit will replace, so that it can come back. *kept is false where there is nothing.
static enum k3_status set_aside(const char *path, const char *aside, bool *kept, struct k3_error *err) {
  unlink(aside);  // of a killed process
  int failure = must_fail() || link(path, aside) != 0 ? errno : 0;
  if (failure == EPERM || failure == EOPNOTSUPP || failure == EMLINK)  // a file system without second names
    failure = rename(path, aside) == 0 ? 0 : errno;
  *kept = failure == 0;
  return failure == 0 || failure == ENOENT ? K3_OK : k3_fail_errno(err, failure, path, "cannot set the old file aside");
}

struct replaced {
  char *path, *aside;
  bool kept;
};

enum k3_status k3_outputs_commit(struct k3_output *const *outputs, size_t n, struct k3_error *err) {
  struct replaced *replaced = k3_calloc(n ? n : 1, sizeof *replaced, err);
  enum k3_status status = replaced ? K3_OK : K3_NO_MEMORY;
  size_t n_begun = 0;
  for (size_t i = 0; i < n && status == K3_OK; i++) {
    struct replaced *r = &replaced[i];
    r->path = k3_strndup(outputs[i]->final_path, strlen(outputs[i]->final_path), err);
    r->aside = r->path ? k3_asprintf(err, "%s.old", outputs[i]->temp_path) : NULL;
    status = r->aside ? set_aside(r->path, r->aside, &r->kept, err) : K3_NO_MEMORY;
    if (status != K3_OK)
      break;
    n_begun++;
    status = k3_output_commit(outputs[i], err);
  }
  for (size_t i = n_begun; status != K3_OK && i-- > 0;) {
    if (replaced[i].kept)
      rename(replaced[i].aside, replaced[i].path);
    else
      unlink(replaced[i].path);
  }
  // A rename from one name of a file to another of its names leaves both.
  for (size_t i = 0; i < n && replaced; i++) {
    if (replaced[i].kept)
      unlink(replaced[i].aside);
    k3_free(replaced[i].path);
    k3_free(replaced[i].aside);
  }
  for (size_t i = 0; i < n; i++)
    k3_output_abort(outputs[i]);
  k3_free(replaced);
  return status;
}

enum k3_status k3_write_file(const char *path, const void *src, size_t nbytes, bool replace, struct k3_error *err) {
  struct k3_output output;
  K3_TRY(k3_output_create(&output, path, replace, err));
  enum k3_status status = k3_pwrite_full(output.fd, src, nbytes, 0, path, err);
  if (status == K3_OK)
    return k3_output_commit(&output, err);
  k3_output_abort(&output);
  return status;
}

enum k3_status k3_make_folder(const char *path, struct k3_error *err) {
  char *copy = k3_strndup(path, strlen(path), err);
  if (!copy)
    return K3_NO_MEMORY;
  enum k3_status status = K3_OK;
  size_t n = strlen(copy);
  for (size_t i = 1; i <= n && status == K3_OK; i++) {
    if (copy[i] != '/' && copy[i] != '\0')
      continue;
    char saved = copy[i];
    copy[i] = '\0';
    struct stat st;
    int failure = mkdir(copy, 0777) != 0 ? errno : 0;
    bool there = failure == EEXIST && stat(copy, &st) == 0;
    if (there && !S_ISDIR(st.st_mode) && i < n)
      status = k3_fail_errno(err, ENOTDIR, copy, "cannot create a folder in it");
    else if (there && !S_ISDIR(st.st_mode))
      status = k3_fail(err, K3_BAD_ARGUMENT, K3_OUT02, copy, NULL, "the name of a folder", "a file has this name");
    else if (failure != 0 && !there)
      status = k3_fail_errno(err, failure, copy, "cannot create the folder");
    copy[i] = saved;
  }
  k3_free(copy);
  return status;
}

void k3_drop_cache(int fd, uint64_t offset, uint64_t nbytes, bool written) {
  if (written)
    sync_file_range(fd, (off_t)offset, (off_t)nbytes, SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  posix_fadvise(fd, (off_t)offset, (off_t)nbytes, POSIX_FADV_DONTNEED);
}

uint64_t k3_free_space(const char *path) {
  struct statvfs fs;
  uint64_t n_free = UINT64_MAX;
  char *folder = parent_of(path, NULL);
  if (folder && statvfs(folder, &fs) == 0)
    n_free = (uint64_t)fs.f_bavail * fs.f_frsize;
  k3_free(folder);
  return n_free;
}
