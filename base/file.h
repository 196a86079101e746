// Files: full reads and writes, whole-file reads with a cap, read-only mappings, and outputs that appear whole or not at all.
#ifndef K3_BASE_FILE_H
#define K3_BASE_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

// Reads exactly nbytes at byte `offset` of fd. Restarts on EINTR, goes on after short counts, splits above the chunk limit. End of file before
// nbytes: K3_BAD_INPUT with rule CNT03. `path` is for the message only. dst is unspecified after failure.
enum k3_status k3_pread_full(int fd, void *dst, size_t nbytes, uint64_t offset, const char *path, struct k3_error *err);
// Writes exactly nbytes at byte `offset`, likewise.
enum k3_status k3_pwrite_full(int fd, const void *src, size_t nbytes, uint64_t offset, const char *path, struct k3_error *err);

// What identifies a file and tells whether it changed.
struct k3_file_id {
  uint64_t device, inode, nbytes;
  int64_t mtime_sec, mtime_nsec;
};
bool k3_file_id_equal(const struct k3_file_id *a, const struct k3_file_id *b);

// Opens a regular file for reading (O_CLOEXEC) and describes it. A folder, device or FIFO is K3_IO. *fd is -1 after failure.
enum k3_status k3_open_read(const char *path, int *fd, struct k3_file_id *id, struct k3_error *err);
// Reads a whole file of at most max_nbytes into a new buffer with a terminating zero behind it (free with k3_free).
enum k3_status k3_read_file(const char *path, uint64_t max_nbytes, void **data, size_t *nbytes, struct k3_error *err);

// A read-only mapping of a whole file; k3_unmap takes a zeroed struct. An empty file maps to data NULL, nbytes 0.
struct k3_mapping {
  const unsigned char *data;
  uint64_t nbytes;
  struct k3_file_id id;
};
enum k3_status k3_map_file(const char *path, struct k3_mapping *mapping, struct k3_error *err);
void k3_unmap(struct k3_mapping *mapping);

// An output file: created as a locked sibling ".<name>.k3tmp", filled, then renamed onto its name. Whatever happens before commit, the final
// name keeps its old content, and abort (or the next run, after a kill) removes the temporary file.
struct k3_output {
  int fd;
  char *final_path, *temp_path;
};
// Creates and locks the temporary file. A temporary file that another live process holds: K3_EXISTS. One left by a dead process is taken over.
// The output exists and `replace` is false: K3_EXISTS with rule OUT01.
enum k3_status k3_output_create(struct k3_output *output, const char *path, bool replace, struct k3_error *err);
// Reserves nbytes on disk, so that a full disk shows before the first byte; file systems without fallocate get ftruncate. Sets the size.
enum k3_status k3_output_reserve(struct k3_output *output, uint64_t nbytes, struct k3_error *err);
// fsync, rename, fsync of the folder, unlock. On failure the temporary file is removed and the old output, if any, is untouched.
enum k3_status k3_output_commit(struct k3_output *output, struct k3_error *err);
// Removes the temporary file. A no-op after commit, after abort and on a zeroed struct with fd -1.
void k3_output_abort(struct k3_output *output);

// Commits n outputs of one folder, in their order, all or none: what they replace is set aside until the last of them has its name, and comes back when
// one fails. All are released. A process that is killed in between leaves both: some new files, and the old ones as ".<name>.k3tmp.old".
enum k3_status k3_outputs_commit(struct k3_output *const *outputs, size_t n, struct k3_error *err);

// Writes a small file whole: create, write, commit.
enum k3_status k3_write_file(const char *path, const void *src, size_t nbytes, bool replace, struct k3_error *err);

// Creates a folder and its missing parents; an existing folder is fine, a file in its place is K3_BAD_ARGUMENT with OUT02.
enum k3_status k3_make_folder(const char *path, struct k3_error *err);

// "dir/name" in new memory (free with k3_free); name alone when dir is "" or NULL.
char *k3_path_join(const char *dir, const char *name, struct k3_error *err);
// Pointer into path, behind its last '/'.
const char *k3_path_base(const char *path);

// For huge files that are read or written once: lets go of the pages of a range, so that they do not push everything else out of the page cache. A
// range that was written is sent to the disk first. Advice only; never fails.
void k3_drop_cache(int fd, uint64_t offset, uint64_t nbytes, bool written);
// Bytes free on the file system of the folder that `path` is in; UINT64_MAX when it cannot be told.
uint64_t k3_free_space(const char *path);

// Test hooks: largest count of one read or write call (0: the default, 1 GiB), and a failure of the n-th call from now with that errno (0: off).
void k3_io_set_chunk_limit(size_t nbytes);
void k3_io_fail_at(uint64_t n, int errno_value);

#endif
