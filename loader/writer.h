// The streaming writer: turns a plan into an image. The 4 MiB segment of the output is the unit of work: a worker gathers its bytes from the sources,
// looks at them, hashes them and writes them to the segment's place. Memory is one segment buffer a worker, whatever the checkpoint.
#ifndef K3_LOADER_WRITER_H
#define K3_LOADER_WRITER_H

#include "base/pool.h"
#include "base/progress.h"
#include "loader/plan.h"

struct k3_writer_options {
  const char *path;
  bool replace;
  int n_threads;                 // 0: one per CPU
  struct k3_progress *progress;  // may be NULL; counts bytes of the image
};

struct k3_writer_result {
  uint64_t file_nbytes, gathered_nbytes;  // of the image; copied from sources (headers and documents included)
  char identity[65];                      // the seal in hex
};

// Writes the image. Refuses an output that is, or lies inside, an input (OUT02), exists (OUT01) or does not fit (OUT03) before the first byte.
// NaN and Inf met on the way become VAL02 findings with warning severity (the bytes are kept as they are). On failure there is no output and no
// temporary file, and an old output is untouched. The bytes do not depend on the number of threads.
enum k3_status k3_writer_run(const struct k3_plan *plan, const struct k3_writer_options *options, struct k3_writer_result *result,
                             struct k3_findings *findings, struct k3_error *err);

// The bytes [offset, offset + nbytes) of the image's data area, from the first segment on, gathered from the sources into dst. For tests and for
// `verify --source`. Thread-safe.
enum k3_status k3_plan_gather(const struct k3_plan *plan, uint64_t offset, size_t nbytes, void *dst, struct k3_error *err);

// SHA-256 of every source file, in parallel over files (--source-digest); before the layout.
enum k3_status k3_plan_digest_sources(struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_error *err);

// Rule MAP10: compares the draft's own embedding and head with the target's, row by row; a difference is a warning that says how many rows. Does nothing
// without a target. Reads both tensors whole.
enum k3_status k3_plan_compare_borrowed(const struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_findings *findings,
                                        struct k3_error *err);

// OUT02: K3_BAD_ARGUMENT when `path` is an input of the checkpoint or lies in its folder.
enum k3_status k3_output_not_input(const char *path, const struct k3_ckpt *ckpt, struct k3_error *err);

#endif
