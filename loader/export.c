#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "loader/export_parts.h"
#include "loader/old_weights.h"
#include "loader/split.h"
#include "loader/verify.h"

enum { COPY_NBYTES = 4 << 20 };

static int compare_located(const void *left, const void *right) {
  return strcmp(((const struct k3_export_located *)left)->source, ((const struct k3_export_located *)right)->source);
}

// Source weights that the image holds encoded: their number, and the first one.
static size_t count_encoded(const struct k3_manifest *manifest, const char **first, const char **scheme) {
  size_t n = 0;
  for (size_t i = 0; i < manifest->n_tensors; i++) {
    const struct k3_manifest_tensor *entry = &manifest->tensors[i];
    const char *dot = strrchr(entry->name, '.');
    const struct k3_manifest_linear *linear;
    if (!dot || entry->n_shards == 0 || (strcmp(dot, ".weight") != 0 && strcmp(dot, ".weight_packed") != 0) ||
        !k3_manifest_encoded(manifest, entry->name, &linear))
      continue;
    if (n == 0) {
      *first = entry->shards[0].source;
      *scheme = linear->scheme;
    }
    n += entry->n_shards;
  }
  return n;
}

// Refuses what cannot be exact, with the first name and the number of them.
static enum k3_status check_complete(const struct k3_export *e, struct k3_error *err) {
  const struct k3_manifest *manifest = &e->image.manifest;
  if (manifest->n_dropped > 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, e->path, manifest->dropped[0].key, "an image that holds every tensor of its source",
                   "%zu source tensors are not in the image (%s), so the original files cannot be written", manifest->n_dropped,
                   manifest->dropped[0].value);
  const char *first = NULL, *scheme = NULL;
  size_t n_encoded = count_encoded(manifest, &first, &scheme), n_own = 0;
  if (n_encoded > 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, e->path, first,
                   "--format compressed-tensors or modelopt, or an image of `convert --quant keep`",
                   "%zu source weights were encoded to %s, so the original files cannot be written", n_encoded, scheme);
  for (size_t s = 0; s < manifest->n_sources; s++)
    n_own += !manifest->sources[s].of_target;
  if (n_own == 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, e->path, NULL, "an image that k3pack converted from a checkpoint",
                   "no source file is recorded");
  return K3_OK;
}

static enum k3_status locate_shards(struct k3_export *e, struct k3_error *err) {
  const struct k3_manifest *manifest = &e->image.manifest;
  for (size_t i = 0; i < manifest->n_tensors; i++) {
    const struct k3_manifest_tensor *entry = &manifest->tensors[i];
    const struct k3_st_tensor *tensor = entry->n_shards ? k3_st_find(&e->image.header, entry->name, strlen(entry->name)) : NULL;
    for (size_t s = 0; tensor && s < entry->n_shards; s++) {
      const struct k3_manifest_shard *shard = &entry->shards[s];
      if (shard->file >= 0 && (size_t)shard->file < manifest->n_sources && manifest->sources[shard->file].of_target)
        continue;
      K3_TRY(k3_grow(&e->located, &e->located_capacity, e->n_located + 1, sizeof *e->located, err));
      e->located[e->n_located++] = (struct k3_export_located){shard->source, tensor, shard->row, shard->n_rows};
    }
  }
  if (e->n_located > 1)
    qsort(e->located, e->n_located, sizeof *e->located, compare_located);
  return K3_OK;
}

const struct k3_export_located *k3_export_find(const struct k3_export *e, const char *source, size_t *n) {
  struct k3_export_located key = {.source = source};
  const struct k3_export_located *found = e->n_located ? bsearch(&key, e->located, e->n_located, sizeof key, compare_located) : NULL;
  *n = 0;
  if (!found)
    return NULL;
  while (found > e->located && strcmp(found[-1].source, source) == 0)
    found--;
  while (found + *n < e->located + e->n_located && strcmp(found[*n].source, source) == 0)
    ++*n;
  return found;
}

// File offset in the image of a source tensor's bytes.
static enum k3_status find_bytes(const struct k3_export *e, const struct k3_st_tensor *source, uint64_t *from, struct k3_error *err) {
  size_t n_found;
  const struct k3_export_located *found = k3_export_find(e, source->name, &n_found);
  const struct k3_st_tensor *tensor = found ? found->tensor : NULL;
  uint64_t begin = 0, nbytes = 0;
  if (found) {
    uint64_t n_rows = tensor->rank ? tensor->shape[0] : 1, row_nbytes = n_rows ? (tensor->end - tensor->begin) / n_rows : 0;
    begin = tensor->begin + found->row * row_nbytes;
    nbytes = found->n_rows * row_nbytes;
    if (found->row > n_rows || found->n_rows > n_rows - found->row)
      tensor = NULL;
  } else {
    char name[2 * K3_ST_MAX_NAME_NBYTES];
    size_t n = k3_manifest_copied_name(&e->image.manifest, source->name, name, sizeof name);
    tensor = n ? k3_st_find(&e->image.header, name, n) : NULL;
    if (tensor) {
      begin = tensor->begin;
      nbytes = tensor->end - tensor->begin;
    }
  }
  if (!tensor || nbytes != source->end - source->begin)
    return k3_fail(err, K3_UNSUPPORTED, K3_IMG01, e->path, source->name, "an image that holds every tensor of its source",
                   "the image does not hold this source tensor's bytes");
  *from = e->image.header.data_begin + begin;
  return K3_OK;
}

enum k3_status k3_export_add_copy(struct k3_export *e, uint64_t from, uint64_t to, uint64_t nbytes, struct k3_error *err) {
  while (nbytes > 0) {
    uint64_t n = nbytes < COPY_NBYTES ? nbytes : COPY_NBYTES;
    K3_TRY(k3_grow(&e->copies, &e->copies_capacity, e->n_copies + 1, sizeof *e->copies, err));
    e->copies[e->n_copies++] = (struct k3_export_copy){from, to, n, e->n_outputs - 1};
    from += n;
    to += n;
    nbytes -= n;
  }
  return K3_OK;
}

enum k3_status k3_export_output(struct k3_export *e, const char *name, uint64_t nbytes, struct k3_error *err) {
  assert(e->n_outputs < e->max_outputs);
  if (strchr(name, '/') || name[0] == '\0' || strcmp(name, "..") == 0 || strcmp(name, ".") == 0)
    return k3_fail(err, K3_BAD_INPUT, K3_IMG01, e->path, name, "a plain file name", "the manifest names a source file that would leave the folder");
  char *path = k3_path_join(e->folder, name, err);
  if (!path)
    return K3_NO_MEMORY;
  enum k3_status status = k3_output_create(&e->outputs[e->n_outputs], path, e->replace, err);
  if (status == K3_OK)
    status = k3_output_reserve(&e->outputs[e->n_outputs++], nbytes, err);
  k3_free(path);
  return status;
}

static enum k3_status plan_weights(struct k3_export *e, const struct k3_manifest_source *source, struct k3_error *err) {
  const struct k3_st_tensor *stored;
  const unsigned char *bytes = k3_image_data(&e->image, source->header_tensor, &stored);
  if (!bytes || stored->end - stored->begin < K3_ST_PREFIX_NBYTES)
    return k3_fail(err, K3_BAD_INPUT, K3_IMG01, e->path, source->header_tensor, NULL, "the header of %s is not in the image", source->file);
  uint64_t n_header = stored->end - stored->begin;
  struct k3_st_header header;
  K3_TRY(k3_st_parse((const char *)bytes + K3_ST_PREFIX_NBYTES, n_header - K3_ST_PREFIX_NBYTES, source->nbytes, source->file, &header, err));
  enum k3_status status = k3_export_output(e, source->file, source->nbytes, err);
  if (status == K3_OK)
    status = k3_export_add_copy(e, e->image.header.data_begin + stored->begin, 0, n_header, err);
  for (size_t i = 0; status == K3_OK && i < header.n_tensors; i++) {
    uint64_t from = 0;
    status = find_bytes(e, &header.tensors[i], &from, err);
    if (status == K3_OK)
      status = k3_export_add_copy(e, from, n_header + header.tensors[i].begin, header.tensors[i].end - header.tensors[i].begin, err);
  }
  k3_st_header_free(&header);
  return status;
}

static enum k3_status plan_all(struct k3_export *e, struct k3_error *err) {
  const struct k3_manifest *manifest = &e->image.manifest;
  K3_TRY(k3_export_begin(e, manifest->n_sources + manifest->n_documents, err));
  for (size_t s = 0; s < manifest->n_sources; s++) {
    if (!manifest->sources[s].of_target)
      K3_TRY(plan_weights(e, &manifest->sources[s], err));
  }
  for (size_t d = 0; d < manifest->n_documents; d++) {
    const struct k3_manifest_document *document = &manifest->documents[d];
    const struct k3_st_tensor *stored;
    if (!k3_image_data(&e->image, document->tensor, &stored))
      return k3_fail(err, K3_BAD_INPUT, K3_IMG01, e->path, document->tensor, NULL, "%s is not in the image", document->file);
    K3_TRY(k3_export_output(e, document->file, stored->end - stored->begin, err));
    K3_TRY(k3_export_add_copy(e, e->image.header.data_begin + stored->begin, 0, stored->end - stored->begin, err));
  }
  return K3_OK;
}

static enum k3_status do_copy(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  struct k3_export *e = ctx;
  const struct k3_export_copy *copy = &e->copies[item];
  const struct k3_output *output = &e->outputs[copy->output];
  K3_TRY(k3_pread_full(e->fd, e->buffers[worker], copy->nbytes, copy->from, e->path, err));
  K3_TRY(k3_pwrite_full(output->fd, e->buffers[worker], copy->nbytes, copy->to, output->final_path, err));
  k3_progress_add(e->progress, copy->nbytes);
  return K3_OK;
}

static enum k3_status copy_all(struct k3_export *e, int n_threads, struct k3_error *err) {
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  if (!pool)
    return K3_NO_MEMORY;
  n_threads = k3_pool_n_threads(pool);
  uint64_t total = 0;
  for (size_t i = 0; i < e->n_copies; i++)
    total += e->copies[i].nbytes;
  e->buffers = k3_calloc((size_t)n_threads, sizeof *e->buffers, err);
  enum k3_status status = e->buffers ? K3_OK : K3_NO_MEMORY;
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    e->buffers[i] = k3_alloc_aligned(COPY_NBYTES, 4096, err);
    status = e->buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK) {
    k3_progress_start(e->progress, "exporting", total);
    status = k3_pool_run(pool, e->n_copies, do_copy, e, err);
    k3_progress_finish(e->progress);
  }
  for (int i = 0; e->buffers && i < n_threads; i++)
    k3_free(e->buffers[i]);
  k3_free(e->buffers);
  k3_pool_free(pool);
  return status;
}

enum k3_status k3_export_open(struct k3_export *e, struct k3_error *err) {
  e->created = access(e->folder, F_OK) != 0;
  if (k3_is_split_folder(e->path))
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, e->path, NULL, "the image of `convert` without --tp",
                   "a folder cut for tensor parallelism does not export the original");
  K3_TRY(k3_map_file(e->path, &e->mapping, err));
  K3_TRY(k3_image_open(e->mapping.data, e->mapping.nbytes, e->path, &e->image, err));
  K3_TRY(k3_open_read(e->path, &e->fd, NULL, err));
  if (e->image.manifest.tp_size > 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, e->path, NULL, "the image of `convert` without --tp",
                   "one file of %u ranks holds no whole checkpoint", e->image.manifest.tp_size);
  return locate_shards(e, err);
}

// An image in the output folder would be taken for one of the checkpoint's files, by readers and by the removal of an older checkpoint.
static enum k3_status refuse_own_folder(const struct k3_export *e, struct k3_error *err) {
  char *folder = realpath(e->folder, NULL), *image = realpath(e->path, NULL), *slash = image ? strrchr(image, '/') : NULL;
  bool inside = folder && slash && strncmp(image, folder, (size_t)(slash - image)) == 0 && folder[slash - image] == '\0';
  free(folder);
  free(image);
  return inside ? k3_fail(err, K3_BAD_ARGUMENT, K3_OUT02, e->folder, NULL, "another folder", "the output folder holds the image %s", e->path) : K3_OK;
}

enum k3_status k3_export_begin(struct k3_export *e, size_t n_outputs, struct k3_error *err) {
  e->outputs = k3_calloc(n_outputs, sizeof *e->outputs, err);
  if (!e->outputs)
    return K3_NO_MEMORY;
  e->max_outputs = n_outputs;
  K3_TRY(k3_make_folder(e->folder, err));
  K3_TRY(refuse_own_folder(e, err));
  const struct k3_manifest *manifest = &e->image.manifest;
  struct k3_names names = {0};
  enum k3_status status = K3_OK;
  for (size_t s = 0; status == K3_OK && s < manifest->n_sources; s++)
    status = k3_names_add(&names, manifest->sources[s].file, strlen(manifest->sources[s].file), err);
  k3_names_sort(&names);
  if (status == K3_OK)
    status = k3_old_weights_refuse(e->folder, e->replace, &names, err);
  k3_names_free(&names);
  return status;
}

// Opening has proven the front; here the rest is: files that differ from the originals by a bit must not be written as if they were these.
static enum k3_status check_body(const struct k3_export *e, int n_threads, struct k3_error *err) {
  struct k3_findings findings = {0};
  struct k3_verify_result verified;
  enum k3_status status = k3_verify_image(e->path, n_threads, e->progress, &verified, &findings, err);
  if (status == K3_OK && findings.n_errors > 0) {
    status = findings.n_items > 0 ? K3_BAD_INPUT : K3_NO_MEMORY;
    if (status == K3_NO_MEMORY) {
      k3_fail_memory(err, 0);
    } else if (err && err->status == K3_OK) {
      *err = findings.items[0].error;
      err->status = K3_BAD_INPUT;
    }
  }
  k3_findings_free(&findings);
  return status;
}

enum k3_status k3_export_finish(struct k3_export *e, int n_threads, struct k3_export_result *result, struct k3_error *err) {
  K3_TRY(check_body(e, n_threads, err));
  K3_TRY(copy_all(e, n_threads, err));
  // Weights first, JSON files (the index among them) last: whoever finds an index finds what it names.
  struct k3_output **outputs = k3_calloc(e->n_outputs, sizeof *outputs, err);
  struct k3_names names = {0};
  enum k3_status status = outputs ? K3_OK : K3_NO_MEMORY;
  for (size_t i = 0; status == K3_OK && i < e->n_outputs; i++) {
    const char *name = k3_path_base(e->outputs[i].final_path);
    outputs[i] = &e->outputs[i];
    status = k3_names_add(&names, name, strlen(name), err);
  }
  k3_names_sort(&names);
  if (status == K3_OK)
    status = k3_outputs_commit(outputs, e->n_outputs, err);
  if (status == K3_OK && e->replace)
    status = k3_old_weights_remove(e->folder, &names, err);
  result->n_files = status == K3_OK ? e->n_outputs : 0;
  k3_free(outputs);
  k3_names_free(&names);
  return status;
}

void k3_export_close(struct k3_export *e, enum k3_status status) {
  for (size_t i = 0; i < e->n_outputs; i++)
    k3_output_abort(&e->outputs[i]);
  if (status != K3_OK && e->created)
    rmdir(e->folder);  // fails, and may, when something is in it
  if (e->fd >= 0)
    close(e->fd);
  if (e->image.bytes)
    k3_image_close(&e->image);
  k3_unmap(&e->mapping);
  k3_free(e->located);
  k3_free(e->copies);
  k3_free(e->outputs);
}

enum k3_status k3_export_original(const char *image, const char *folder, const struct k3_export_options *options, struct k3_export_result *result,
                                  struct k3_error *err) {
  struct k3_export e = {.path = image, .fd = -1, .progress = options->progress, .folder = folder, .replace = options->replace};
  *result = (struct k3_export_result){0};
  enum k3_status status = k3_export_open(&e, err);
  if (status == K3_OK)
    status = check_complete(&e, err);
  if (status == K3_OK)
    status = plan_all(&e, err);
  if (status == K3_OK)
    status = k3_export_finish(&e, options->n_threads, result, err);
  for (size_t i = 0; i < e.n_copies; i++)
    result->nbytes += e.copies[i].nbytes;
  k3_export_close(&e, status);
  return status;
}
