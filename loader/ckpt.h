// A checkpoint as one list of tensors, whatever it is on disk: a folder with an index, a folder with one file, a snapshot of the HuggingFace cache
// (symlinks), "hf:org/name[@revision]" looked up in that cache, one .safetensors file, or a packed image. Nothing is downloaded, no weight is read here.
#ifndef K3_LOADER_CKPT_H
#define K3_LOADER_CKPT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/file.h"
#include "base/findings.h"
#include "base/name_set.h"
#include "formats/config.h"
#include "formats/image.h"
#include "formats/safetensors.h"

struct k3_ckpt_file {
  char *name;               // base name
  char *path;               // how it was opened
  int fd;                   // open for reading; pread only, so any thread may use it
  struct k3_file_id id;     // when it was opened
  struct k3_st_header header;
  uint64_t first_tensor;    // number of its first tensor in the checkpoint
};

// Another JSON file of the folder (config.json, the index, ...), at most 1 MiB for all but the index.
struct k3_ckpt_document {
  char *name, *path;
  uint64_t nbytes;
};

// Tensors are numbered 0 .. n_tensors-1: file after file (files in the order of their names), within a file in the order of the header text.
struct k3_ckpt {
  char *source;             // as the user spelled it
  char *folder;             // the folder the files are in
  bool is_folder;           // opened from a folder (or hf:): an index and documents were looked for
  struct k3_ckpt_file *files;
  size_t n_files;
  uint64_t n_tensors;
  uint64_t tensors_nbytes;  // sum of all spans
  struct k3_name_set names; // of all tensors, by number
  struct k3_ckpt_document *documents;  // sorted by name
  size_t n_documents;
  struct k3_config *config;            // config.json; NULL when there is none
  bool has_index;
  char **promised;                     // [n_promised] names that the index lists and no file holds (IDX01, IDX02), sorted
  size_t n_promised, promised_capacity;
  // A packed image: files[0] is mapped and parsed. image.bytes is NULL otherwise.
  struct k3_mapping mapping;
  struct k3_image image;
};

// Says which tensors the caller is after; only the files that hold one are then needed and opened.
typedef bool (*k3_ckpt_wanted_fn)(void *ctx, const char *tensor);

struct k3_ckpt_options {
  k3_ckpt_wanted_fn wanted;  // NULL: all of them
  void *wanted_ctx;
};

// Opens `source`. Everything wrong with the container, the index or the documents becomes a finding (CNT, IDX, CFG19), as many as there are; the
// checkpoint then holds what could be read. Fails (with *err, *ckpt empty) only when there is nothing to look at: no such file or folder, no permission,
// no memory, or when `findings` is NULL and an error-level finding occurred. options may be NULL.
enum k3_status k3_ckpt_open(const char *source, const struct k3_ckpt_options *options, struct k3_ckpt *ckpt, struct k3_findings *findings,
                            struct k3_error *err);
void k3_ckpt_close(struct k3_ckpt *ckpt);  // an empty struct is fine

// Tensor by number. The pointers live as long as the checkpoint.
const struct k3_st_tensor *k3_ckpt_tensor(const struct k3_ckpt *ckpt, uint64_t tensor);
const struct k3_ckpt_file *k3_ckpt_file_of(const struct k3_ckpt *ckpt, uint64_t tensor);
// Number of the tensor of that name; false when there is none.
bool k3_ckpt_find(const struct k3_ckpt *ckpt, const char *name, size_t name_nbytes, uint64_t *tensor);
// Whether the index promised a tensor of that name although no file holds it: then the cause has been reported.
bool k3_ckpt_promised(const struct k3_ckpt *ckpt, const char *name);
// Reads bytes [offset, offset + nbytes) of a tensor into dst (host). The range must lie inside the tensor. Thread-safe.
enum k3_status k3_ckpt_read(const struct k3_ckpt *ckpt, uint64_t tensor, uint64_t offset, void *dst, size_t nbytes, struct k3_error *err);
// K3_IO naming the first file that changed since it was opened (size or modification time).
enum k3_status k3_ckpt_unchanged(const struct k3_ckpt *ckpt, struct k3_error *err);

#endif
