#include "loader/ckpt.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "loader/ckpt_parts.h"
#include "loader/split.h"

enum { MAX_CONFIG_NBYTES = 16 << 20, MAX_DOCUMENT_NBYTES = 1 << 20 };

const struct k3_ckpt_file *k3_ckpt_file_of(const struct k3_ckpt *ckpt, uint64_t tensor) {
  size_t low = 0, high = ckpt->n_files;  // last file whose first tensor is <= tensor
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (ckpt->files[middle].first_tensor <= tensor)
      low = middle;
    else
      high = middle;
  }
  return &ckpt->files[low];
}

const struct k3_st_tensor *k3_ckpt_tensor(const struct k3_ckpt *ckpt, uint64_t tensor) {
  const struct k3_ckpt_file *file = k3_ckpt_file_of(ckpt, tensor);
  return &file->header.tensors[tensor - file->first_tensor];
}

static bool name_equal(const void *owner, uint32_t tensor, const char *name, size_t nbytes) {
  const struct k3_st_tensor *candidate = k3_ckpt_tensor(owner, tensor);
  return candidate->name_nbytes == nbytes && memcmp(candidate->name, name, nbytes) == 0;
}

bool k3_ckpt_find(const struct k3_ckpt *ckpt, const char *name, size_t name_nbytes, uint64_t *tensor) {
  uint32_t found = k3_name_set_find(&ckpt->names, name_equal, ckpt, name, name_nbytes);
  if (found != K3_NAME_NONE)
    *tensor = found;
  return found != K3_NAME_NONE;
}

enum k3_status k3_ckpt_read(const struct k3_ckpt *ckpt, uint64_t tensor, uint64_t offset, void *dst, size_t nbytes, struct k3_error *err) {
  const struct k3_ckpt_file *file = k3_ckpt_file_of(ckpt, tensor);
  const struct k3_st_tensor *t = &file->header.tensors[tensor - file->first_tensor];
  return k3_pread_full(file->fd, dst, nbytes, file->header.data_begin + t->begin + offset, file->path, err);
}

enum k3_status k3_ckpt_unchanged(const struct k3_ckpt *ckpt, struct k3_error *err) {
  for (size_t i = 0; i < ckpt->n_files; i++) {
    const struct k3_ckpt_file *file = &ckpt->files[i];
    struct stat st;
    if (fstat(file->fd, &st) != 0)
      return k3_fail_errno(err, errno, file->path, "cannot look at");
    struct k3_file_id now = {st.st_dev, st.st_ino, (uint64_t)st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec};
    if (!k3_file_id_equal(&now, &file->id))
      return k3_fail(err, K3_IO, K3_RULE_NONE, file->path, NULL, "a file that nobody writes to meanwhile", "the file changed while it was read");
  }
  return K3_OK;
}

static void raise_file_limit(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);  // one descriptor a shard; where the limit stays low, open says so
  }
}

// Opens one file and parses its header. A malformed one becomes a finding and stays in the list without tensors.
static enum k3_status open_file(struct k3_ckpt *ckpt, const char *path, struct k3_findings *findings, struct k3_error *err) {
  struct k3_ckpt_file *file = &ckpt->files[ckpt->n_files];
  *file = (struct k3_ckpt_file){.fd = -1, .first_tensor = ckpt->n_tensors};
  file->path = k3_strndup(path, strlen(path), err);
  file->name = k3_strndup(k3_path_base(path), strlen(k3_path_base(path)), err);
  ckpt->n_files++;
  if (!file->path || !file->name)
    return K3_NO_MEMORY;
  K3_TRY(k3_open_read(path, &file->fd, &file->id, err));

  enum { FIRST_READ_NBYTES = 512 };  // a pointer file fits and can be recognised whole
  char prefix[FIRST_READ_NBYTES];
  size_t n_prefix = file->id.nbytes < sizeof prefix ? (size_t)file->id.nbytes : sizeof prefix;
  K3_TRY(k3_pread_full(file->fd, prefix, n_prefix, 0, path, err));
  struct k3_error bad = {0};
  uint64_t h = 0;
  enum k3_status status = k3_st_header_length(prefix, n_prefix, file->id.nbytes, path, &h, &bad);
  char *text = NULL;
  if (status == K3_OK) {
    text = k3_alloc_aligned(h, 64, err);
    if (!text)
      return K3_NO_MEMORY;
    status = k3_pread_full(file->fd, text, h, K3_ST_PREFIX_NBYTES, path, &bad);
  }
  if (status == K3_OK)
    status = k3_st_parse(text, h, file->id.nbytes, path, &file->header, &bad);
  k3_free(text);
  if (status == K3_BAD_INPUT && bad.rule != K3_RULE_NONE)
    return k3_findings_add(findings, K3_ERROR, &bad);
  if (status != K3_OK) {
    if (err && err->status == K3_OK)
      *err = bad;
    return status;
  }
  ckpt->n_tensors += file->header.n_tensors;
  ckpt->tensors_nbytes += file->header.data_nbytes;
  if (file->header.metadata_odd)
    k3_findings_report(findings, K3_CNT08, path, "__metadata__", "an object of strings, or null", "a value that is no string");
  if (file->header.n_misaligned > 0)
    k3_findings_report(findings, K3_CNT11, path, NULL, NULL, "%llu tensors begin at an address that is no multiple of their element size",
                       (unsigned long long)file->header.n_misaligned);
  return K3_OK;
}

// True when two tensors hold the same bytes; false also when reading fails (the caller reports a duplicate either way).
static bool same_bytes(const struct k3_ckpt *ckpt, uint64_t a, uint64_t b) {
  const struct k3_st_tensor *ta = k3_ckpt_tensor(ckpt, a), *tb = k3_ckpt_tensor(ckpt, b);
  uint64_t nbytes = ta->end - ta->begin;
  if (ta->dtype != tb->dtype || nbytes != tb->end - tb->begin)
    return false;
  char left[16384], right[16384];
  for (uint64_t at = 0; at < nbytes; at += sizeof left) {
    size_t n = nbytes - at < sizeof left ? (size_t)(nbytes - at) : sizeof left;
    if (k3_ckpt_read(ckpt, a, at, left, n, NULL) != K3_OK || k3_ckpt_read(ckpt, b, at, right, n, NULL) != K3_OK || memcmp(left, right, n) != 0)
      return false;
  }
  return true;
}

static enum k3_status build_table(struct k3_ckpt *ckpt, struct k3_findings *findings, struct k3_error *err) {
  if (ckpt->n_tensors >= UINT32_MAX / 2)
    return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, ckpt->source, NULL, "fewer than 2^31 tensors", "%llu tensors", (unsigned long long)ckpt->n_tensors);
  K3_TRY(k3_name_set_reserve(&ckpt->names, ckpt->n_tensors, err));
  for (size_t f = 0; f < ckpt->n_files; f++) {
    const struct k3_ckpt_file *file = &ckpt->files[f];
    for (size_t i = 0; i < file->header.n_tensors; i++) {
      const struct k3_st_tensor *t = &file->header.tensors[i];
      uint32_t number = (uint32_t)(file->first_tensor + i), first;
      K3_TRY(k3_name_set_add(&ckpt->names, name_equal, ckpt, t->name, t->name_nbytes, number, &first, err));
      if (first != K3_NAME_NONE)
        k3_findings_report(findings, K3_IDX03, file->path, t->name, "each tensor in one file", "the tensor is also in %s%s",
                           k3_ckpt_file_of(ckpt, first)->name,
                           same_bytes(ckpt, first, number) ? " (identical bytes)" : " with other bytes, shape or dtype");
    }
  }
  return K3_OK;
}

static enum k3_status add_documents(struct k3_ckpt *ckpt, const struct k3_folder_listing *listing, const char *index_name, struct k3_error *err) {
  ckpt->documents = k3_calloc(listing->documents.n_items, sizeof *ckpt->documents, err);
  if (!ckpt->documents)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < listing->documents.n_items; i++) {
    const char *name = listing->documents.items[i];
    char *path = k3_path_join(ckpt->folder, name, err);
    struct stat st;
    if (!path)
      return K3_NO_MEMORY;
    bool is_index = index_name && strcmp(name, index_name) == 0;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode) || (!is_index && st.st_size > MAX_DOCUMENT_NBYTES)) {
      k3_free(path);
      continue;
    }
    struct k3_ckpt_document *document = &ckpt->documents[ckpt->n_documents++];
    document->path = path;
    document->nbytes = (uint64_t)st.st_size;
    document->name = k3_strndup(name, strlen(name), err);
    if (!document->name)
      return K3_NO_MEMORY;
  }
  return K3_OK;
}

// Parses config.json of the folder when there is one; what is wrong with it becomes a finding.
static enum k3_status read_config(struct k3_ckpt *ckpt, struct k3_findings *findings, struct k3_error *err) {
  char *path = k3_path_join(ckpt->folder, "config.json", err);
  if (!path)
    return K3_NO_MEMORY;
  enum k3_status status = K3_OK;
  void *text = NULL;
  size_t nbytes = 0;
  struct stat st;
  if (lstat(path, &st) == 0) {
    struct k3_error bad = {0};
    status = k3_read_file(path, MAX_CONFIG_NBYTES, &text, &nbytes, &bad);
    if (status == K3_OK) {
      ckpt->config = k3_config_parse(text, nbytes, path, &bad);
      status = ckpt->config ? K3_OK : bad.status;
    } else if (status == K3_BAD_INPUT || bad.os_errno == ENOENT) {  // too large, or a link whose target is missing
      status = K3_BAD_INPUT;
      bad.rule = K3_CFG19;
    }
    if (status == K3_BAD_INPUT)
      status = k3_findings_add(findings, K3_ERROR, &bad);
    else if (status != K3_OK && err && err->status == K3_OK)
      *err = bad;
  }
  k3_free(text);
  k3_free(path);
  return status;
}

static enum k3_status open_folder(struct k3_ckpt *ckpt, const struct k3_ckpt_options *options, struct k3_findings *findings, struct k3_error *err) {
  struct k3_folder_listing listing = {0};
  struct k3_names chosen = {0};
  const char *index_name = NULL;
  enum k3_status status;
  ckpt->is_folder = true;
  K3_TRY_GOTO(status, out, k3_folder_list(ckpt->folder, &listing, err));
  K3_TRY_GOTO(status, out, k3_folder_choose(ckpt->folder, &listing, options, &chosen, &index_name, findings, err));
  ckpt->has_index = index_name != NULL;
  K3_TRY_GOTO(status, out, read_config(ckpt, findings, err));
  K3_TRY_GOTO(status, out, add_documents(ckpt, &listing, index_name, err));
  ckpt->files = k3_calloc(chosen.n_items, sizeof *ckpt->files, err);
  if (!ckpt->files) {
    status = K3_NO_MEMORY;
    goto out;
  }
  for (size_t i = 0; i < chosen.n_items; i++) {
    char *path = k3_path_join(ckpt->folder, chosen.items[i], err);
    status = path ? open_file(ckpt, path, findings, err) : K3_NO_MEMORY;
    k3_free(path);
    if (status != K3_OK)
      goto out;
  }
  K3_TRY_GOTO(status, out, build_table(ckpt, findings, err));
  if (index_name)
    status = k3_folder_check_index(ckpt, index_name, options, findings, err);
  for (size_t f = 0; f < ckpt->n_files; f++)
    k3_name_set_free(&ckpt->files[f].header.names);  // from here on names are looked up in the table of all of them
out:
  k3_names_free(&chosen);
  k3_folder_listing_free(&listing);
  return status;
}

// One file on its own. config.json beside it is read too: a drafter's geometry stands nowhere else.
static enum k3_status open_single(struct k3_ckpt *ckpt, const char *path, struct k3_findings *findings, struct k3_error *err) {
  ckpt->files = k3_calloc(1, sizeof *ckpt->files, err);
  if (!ckpt->files)
    return K3_NO_MEMORY;
  K3_TRY(open_file(ckpt, path, findings, err));
  K3_TRY(build_table(ckpt, findings, err));
  uint64_t manifest;
  if (k3_ckpt_find(ckpt, K3_IMAGE_MANIFEST_NAME, strlen(K3_IMAGE_MANIFEST_NAME), &manifest)) {
    K3_TRY(k3_map_file(path, &ckpt->mapping, err));
    struct k3_error bad = {0};
    enum k3_status status = k3_image_open(ckpt->mapping.data, ckpt->mapping.nbytes, path, &ckpt->image, &bad);
    if (status == K3_OK || bad.rule == K3_RULE_NONE) {
      if (status != K3_OK && err && err->status == K3_OK)
        *err = bad;
      return status;
    }
    return k3_findings_add(findings, K3_ERROR, &bad);
  }
  K3_TRY(read_config(ckpt, findings, err));
  if (ckpt->config) {
    struct k3_folder_listing listing = {0};
    enum k3_status status = k3_names_add(&listing.documents, "config.json", strlen("config.json"), err);
    if (status == K3_OK)
      status = add_documents(ckpt, &listing, NULL, err);
    k3_folder_listing_free(&listing);
    return status;
  }
  return K3_OK;
}

static enum k3_status open_any(const char *source, const struct k3_ckpt_options *options, struct k3_ckpt *ckpt, struct k3_findings *findings,
                               struct k3_error *err) {
  ckpt->source = k3_strndup(source, strlen(source), err);
  if (!ckpt->source)
    return K3_NO_MEMORY;
  raise_file_limit();
  if (strncmp(source, "hf:", 3) == 0) {
    K3_TRY(k3_hf_snapshot(source, &ckpt->folder, err));
    return open_folder(ckpt, options, findings, err);
  }
  struct stat st;
  if (stat(source, &st) != 0)
    return k3_fail_errno(err, errno, source, "cannot open");
  if (S_ISDIR(st.st_mode)) {
    ckpt->folder = k3_strndup(source, strlen(source), err);
    return ckpt->folder ? open_folder(ckpt, options, findings, err) : K3_NO_MEMORY;
  }
  size_t n_folder = (size_t)(k3_path_base(source) - source);
  ckpt->folder = n_folder > 1 ? k3_strndup(source, n_folder - 1, err) : k3_strndup(n_folder ? "/" : ".", 1, err);
  return ckpt->folder ? open_single(ckpt, source, findings, err) : K3_NO_MEMORY;
}

enum k3_status k3_ckpt_open(const char *source, const struct k3_ckpt_options *options, struct k3_ckpt *ckpt, struct k3_findings *findings,
                            struct k3_error *err) {
  struct k3_findings own = {0}, *collected = findings ? findings : &own;
  *ckpt = (struct k3_ckpt){0};
  if (k3_is_split_folder(source))
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, source, NULL, "one of its files; verify and run take the folder",
                   "a folder that was cut for tensor parallelism is no checkpoint");
  enum k3_status status = open_any(source, options, ckpt, collected, err);
  for (size_t i = 0; status == K3_OK && i < own.n_items; i++) {
    if (own.items[i].severity == K3_ERROR) {
      status = own.items[i].error.status;
      if (err && err->status == K3_OK)
        *err = own.items[i].error;
    }
  }
  k3_findings_free(&own);
  if (status != K3_OK)
    k3_ckpt_close(ckpt);
  return status;
}

void k3_ckpt_close(struct k3_ckpt *ckpt) {
  if (ckpt->image.bytes)
    k3_image_close(&ckpt->image);
  k3_unmap(&ckpt->mapping);
  for (size_t i = 0; i < ckpt->n_files; i++) {
    struct k3_ckpt_file *file = &ckpt->files[i];
    k3_st_header_free(&file->header);
    if (file->fd >= 0)
      close(file->fd);
    k3_free(file->name);
    k3_free(file->path);
  }
  for (size_t i = 0; i < ckpt->n_documents; i++) {
    k3_free(ckpt->documents[i].name);
    k3_free(ckpt->documents[i].path);
  }
  for (size_t i = 0; i < ckpt->n_promised; i++)
    k3_free(ckpt->promised[i]);
  k3_config_free(ckpt->config);
  k3_free(ckpt->promised);
  k3_free(ckpt->documents);
  k3_free(ckpt->files);
  k3_name_set_free(&ckpt->names);
  k3_free(ckpt->folder);
  k3_free(ckpt->source);
  *ckpt = (struct k3_ckpt){0};
}
