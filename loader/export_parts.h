// Between the two ways of exporting an image (loader/export.h); nobody else includes this.
#ifndef K3_LOADER_EXPORT_PARTS_H
#define K3_LOADER_EXPORT_PARTS_H

#include "base/file.h"
#include "formats/image.h"
#include "loader/export.h"

// Bytes of the image that go to a place of an output file.
struct k3_export_copy {
  uint64_t from, to, nbytes;
  size_t output;
};

// Where the rows of a source tensor lie in the image. A weight that was encoded lies in several tensors.
struct k3_export_located {
  const char *source;
  const struct k3_st_tensor *tensor;
  uint64_t row, n_rows;
};

struct k3_export {
  const char *path;
  int fd;
  struct k3_mapping mapping;
  struct k3_image image;
  struct k3_export_located *located;  // [n_located], sorted by source
  size_t n_located, located_capacity;
  struct k3_export_copy *copies;
  size_t n_copies, copies_capacity;
  struct k3_output *outputs;  // [n_outputs], room for max_outputs
  size_t n_outputs, max_outputs;
  unsigned char **buffers;
  struct k3_progress *progress;
  const char *folder;
  bool replace, created;
};

// Opens an image that holds a whole checkpoint (K3_UNSUPPORTED for those cut for tensor parallelism) and sorts its shards. `e` is zeroed but for
// path, fd
// (-1), progress, folder and replace. Call k3_export_close in any case.
enum k3_status k3_export_open(struct k3_export *e, struct k3_error *err);
// The entries of a source tensor: sets *n.
const struct k3_export_located *k3_export_find(const struct k3_export *e, const char *source, size_t *n);
// Makes the folder and room for n_outputs files.
enum k3_status k3_export_begin(struct k3_export *e, size_t n_outputs, struct k3_error *err);
// Creates the next output file, of nbytes.
enum k3_status k3_export_output(struct k3_export *e, const char *name, uint64_t nbytes, struct k3_error *err);
// Notes bytes of the image, by file offset, for place `to` of the newest output.
enum k3_status k3_export_add_copy(struct k3_export *e, uint64_t from, uint64_t to, uint64_t nbytes, struct k3_error *err);
// Does all copies and commits the outputs in their order.
enum k3_status k3_export_finish(struct k3_export *e, int n_threads, struct k3_export_result *result, struct k3_error *err);
void k3_export_close(struct k3_export *e, enum k3_status status);  // a status other than K3_OK removes what was written

#endif
