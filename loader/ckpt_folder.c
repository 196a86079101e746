// Which files of a folder make up the checkpoint, and what its index says about them.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/name_set.h"
#include "formats/index.h"
#include "loader/ckpt_parts.h"

#define INDEX_SUFFIX ".safetensors.index.json"
enum { MAX_INDEX_NBYTES = 512 << 20, MAX_INDEX_FILES = 65536 };

enum k3_status k3_names_add(struct k3_names *names, const char *name, size_t nbytes, struct k3_error *err) {
  K3_TRY(k3_grow(&names->items, &names->capacity, names->n_items + 1, sizeof *names->items, err));
  names->items[names->n_items] = k3_strndup(name, nbytes, err);
  return names->items[names->n_items] ? (names->n_items++, K3_OK) : K3_NO_MEMORY;
}

static int compare_names(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

void k3_names_sort(struct k3_names *names) {
  if (names->n_items > 1)
    qsort(names->items, names->n_items, sizeof *names->items, compare_names);
}

bool k3_names_has(const struct k3_names *names, const char *name) {
  return names->n_items > 0 && bsearch(&name, names->items, names->n_items, sizeof *names->items, compare_names);
}

void k3_names_free(struct k3_names *names) {
  for (size_t i = 0; i < names->n_items; i++)
    k3_free(names->items[i]);
  k3_free(names->items);
  *names = (struct k3_names){0};
}

static bool ends_with(const char *name, const char *suffix) {
  size_t n = strlen(name), m = strlen(suffix);
  return n >= m && memcmp(name + n - m, suffix, m) == 0;
}

static struct k3_names *kind_of(struct k3_folder_listing *listing, const char *name) {
  static const char *const unfinished[] = {".incomplete", ".part", ".aria2", ".tmp", ".bak"};
  static const char *const pickles[] = {".bin", ".pt", ".pth", ".ckpt"};
  for (size_t i = 0; i < sizeof unfinished / sizeof unfinished[0]; i++) {
    if (ends_with(name, unfinished[i]))
      return &listing->unfinished;
  }
  for (size_t i = 0; i < sizeof pickles / sizeof pickles[0]; i++) {
    if (ends_with(name, pickles[i]))
      return &listing->pickles;
  }
  return ends_with(name, ".safetensors") ? &listing->weights : ends_with(name, ".json") ? &listing->documents : NULL;
}

static enum k3_status list_into(const char *folder, struct k3_folder_listing *listing, bool unfinished_only, struct k3_error *err) {
  DIR *dir = opendir(folder);
  if (!dir)
    return unfinished_only ? K3_OK : k3_fail_errno(err, errno, folder, "cannot list the folder");
  enum k3_status status = K3_OK;
  const struct dirent *entry;
  while (status == K3_OK && (errno = 0, entry = readdir(dir))) {
    struct k3_names *kind = kind_of(listing, entry->d_name);
    if (kind && entry->d_name[0] != '.' && (!unfinished_only || kind == &listing->unfinished))
      status = k3_names_add(kind, entry->d_name, strlen(entry->d_name), err);
  }
  if (status == K3_OK && errno != 0)
    status = k3_fail_errno(err, errno, folder, "cannot list the folder");
  closedir(dir);
  return status;
}

enum k3_status k3_folder_list(const char *folder, struct k3_folder_listing *listing, struct k3_error *err) {
  K3_TRY(list_into(folder, listing, false, err));
  // A snapshot of the HuggingFace cache links into ../../blobs, where a broken-off download leaves its piece.
  if (strstr(folder, "/snapshots/")) {
    char *blobs = k3_path_join(folder, "../../blobs", err);
    enum k3_status status = blobs ? list_into(blobs, listing, true, err) : K3_NO_MEMORY;
    k3_free(blobs);
    K3_TRY(status);
  }
  k3_names_sort(&listing->weights);
  k3_names_sort(&listing->documents);
  k3_names_sort(&listing->unfinished);
  k3_names_sort(&listing->pickles);
  return K3_OK;
}

void k3_folder_listing_free(struct k3_folder_listing *listing) {
  k3_names_free(&listing->weights);
  k3_names_free(&listing->documents);
  k3_names_free(&listing->unfinished);
  k3_names_free(&listing->pickles);
}

// Parts of "model-00002-of-00005.safetensors": the length of the stem "model", i and n. False for any other name.
static bool parse_numbered(const char *name, size_t *n_stem, unsigned long *i, unsigned long *n) {
  const char *of = strstr(name, "-of-");
  if (!of || of - name < 7 || of[-6] != '-' || !ends_with(name, ".safetensors"))
    return false;
  char *end_i, *end_n;
  *i = strtoul(of - 5, &end_i, 10);
  *n = strtoul(of + 4, &end_n, 10);
  *n_stem = (size_t)(of - 6 - name);
  return end_i == of && strcmp(end_n, ".safetensors") == 0;
}

// The index of the folder: the one document whose name ends in INDEX_SUFFIX. Two of them leave the choice open.
static const char *find_index(const char *folder, const struct k3_folder_listing *listing, struct k3_findings *findings) {
  const char *found = NULL;
  for (size_t i = 0; i < listing->documents.n_items; i++) {
    const char *name = listing->documents.items[i];
    if (!ends_with(name, INDEX_SUFFIX))
      continue;
    if (strcmp(name, "model" INDEX_SUFFIX) == 0)
      return name;
    if (found)
      k3_findings_report(findings, K3_IDX06, folder, NULL, "one index", "two indexes: %s and %s", found, name);
    found = name;
  }
  return found;
}

struct index_files {
  struct k3_names *files;    // each once, in the order met, then sorted
  struct k3_name_set known;  // numbers into files: an index may name as many files as it has tensors
  const char *last;          // the entry before this one: neighbours are in the same file as a rule
  const struct k3_ckpt_options *options;
};

static bool is_wanted(const struct k3_ckpt_options *options, const char *tensor) {
  return !options || !options->wanted || options->wanted(options->wanted_ctx, tensor);
}

static bool is_file(const void *owner, uint32_t number, const char *name, size_t nbytes) {
  const char *item = ((const struct k3_names *)owner)->items[number];
  return strlen(item) == nbytes && memcmp(item, name, nbytes) == 0;
}

static enum k3_status collect_file(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  struct index_files *collected = ctx;
  (void)tensor_nbytes;
  if ((collected->last && strcmp(collected->last, file) == 0) || !is_wanted(collected->options, tensor))
    return K3_OK;
  uint32_t earlier, number = (uint32_t)collected->files->n_items;
  K3_TRY(k3_name_set_add(&collected->known, is_file, collected->files, file, file_nbytes, number, &earlier, err));
  if (earlier != K3_NAME_NONE) {
    collected->last = collected->files->items[earlier];
    return K3_OK;
  }
  if (number >= MAX_INDEX_FILES)
    return k3_fail(err, K3_BAD_INPUT, K3_IDX10, NULL, tensor, "at most 65536 files", "the index names more files than that");
  K3_TRY(k3_names_add(collected->files, file, file_nbytes, err));
  collected->last = collected->files->items[collected->files->n_items - 1];
  return K3_OK;
}

// Reads and parses the index; what is wrong with it becomes a finding and *ok false.
static enum k3_status parse_index(const char *folder, const char *index_name, bool again, k3_index_fn fn, void *ctx, struct k3_index_summary *summary,
                                  bool *ok, struct k3_findings *findings, struct k3_error *err) {
  void *text = NULL;
  size_t nbytes = 0;
  struct k3_error bad = {0};
  char *path = k3_path_join(folder, index_name, err);
  if (!path)
    return K3_NO_MEMORY;
  *ok = true;
  enum k3_status status = k3_read_file(path, MAX_INDEX_NBYTES, &text, &nbytes, &bad);
  if (status == K3_OK)
    status = (again ? k3_index_parse_again : k3_index_parse)(text, nbytes, path, fn, ctx, summary, &bad);
  else if (bad.os_errno == ENOENT)  // a dangling link
    status = K3_BAD_INPUT;
  if (status == K3_BAD_INPUT) {
    if (bad.rule == K3_RULE_NONE)
      bad.rule = K3_IDX10;
    *ok = false;
    status = k3_findings_add(findings, K3_ERROR, &bad);
  } else if (status != K3_OK && err && err->status == K3_OK) {
    *err = bad;
  }
  k3_free(text);
  k3_free(path);
  return status;
}

// Says why a named file is not there: absent, or a link whose target is.
static void report_missing(const char *folder, const char *name, struct k3_findings *findings) {
  char *path = k3_path_join(folder, name, NULL);
  struct stat st;
  char target[256] = "";
  ssize_t n = path && lstat(path, &st) == 0 && S_ISLNK(st.st_mode) ? readlink(path, target, sizeof target - 1) : -1;
  if (n > 0)
    k3_findings_report(findings, K3_IDX01, folder, name, "every file that the index names", "link target missing: %s", target);
  else
    k3_findings_report(findings, K3_IDX01, folder, name, "every file that the index names", "the file is not there");
  k3_free(path);
}

static enum k3_status choose_by_index(const char *folder, const struct k3_folder_listing *listing, const struct k3_ckpt_options *options,
                                      const char *index_name, struct k3_names *chosen, struct k3_findings *findings, struct k3_error *err) {
  struct k3_names named = {0};
  struct index_files collected = {.files = &named, .options = options};
  struct k3_index_summary summary;
  bool ok;
  enum k3_status status;
  size_t n_missing = 0;
  K3_TRY_GOTO(status, out, parse_index(folder, index_name, false, collect_file, &collected, &summary, &ok, findings, err));
  k3_names_sort(&named);
  for (size_t i = 0; status == K3_OK && i < named.n_items; i++) {
    const char *name = named.items[i];
    struct stat st;
    if (!k3_index_file_name_ok(name, strlen(name))) {
      k3_findings_report(findings, K3_IDX09, index_name, name, "the plain name of a .safetensors file in the same folder",
                         "a path that could leave the folder");
      continue;
    }
    char *path = k3_path_join(folder, name, err);
    if (!path) {
      status = K3_NO_MEMORY;
      break;
    }
    if (stat(path, &st) == 0) {
      status = k3_names_add(chosen, name, strlen(name), err);
    } else {
      n_missing++;
      report_missing(folder, name, findings);
    }
    k3_free(path);
  }
  if (status != K3_OK || !ok || (options && options->wanted))
    goto out;
  size_t n_ignored = 0;
  for (size_t i = 0; i < listing->weights.n_items; i++)
    n_ignored += !k3_names_has(&named, listing->weights.items[i]);
  if (n_missing > 0 && n_missing == named.n_items && n_ignored > 0)
    k3_findings_report(findings, K3_IDX01, folder, index_name, "an index that belongs to these files",
                       "none of the listed files exist; %zu other safetensors files do", n_ignored);
  for (size_t i = 0; i < listing->weights.n_items; i++) {
    if (!k3_names_has(&named, listing->weights.items[i]))
      k3_findings_report(findings, K3_IDX05, folder, listing->weights.items[i], NULL, "the index does not name this file; it is ignored");
  }
out:
  k3_name_set_free(&collected.known);
  k3_names_free(&named);
  return status;
}

// Without an index: one file is the checkpoint; of numbered shards all must be there; anything else leaves the choice open.
static enum k3_status choose_by_names(const char *folder, const struct k3_names *weights, struct k3_names *chosen, struct k3_findings *findings,
                                      struct k3_error *err) {
  size_t n_numbered = 0, first_stem = 0;
  unsigned long first_n = 0;
  const char *first = NULL;
  bool disagree = false;
  for (size_t i = 0; i < weights->n_items; i++) {
    const char *name = weights->items[i];
    size_t n_stem;
    unsigned long index, n;
    if (parse_numbered(name, &n_stem, &index, &n)) {
      if (!first) {
        first = name;
        first_stem = n_stem;
        first_n = n;
      }
      disagree |= n != first_n || n_stem != first_stem || memcmp(name, first, n_stem) != 0 || index < 1 || index > n;
      n_numbered++;
    }
    char *path = k3_path_join(folder, name, err);
    struct stat st;
    if (!path)
      return K3_NO_MEMORY;
    bool there = stat(path, &st) == 0;
    k3_free(path);
    if (!there)
      report_missing(folder, name, findings);
    else
      K3_TRY(k3_names_add(chosen, name, strlen(name), err));
  }
  if (weights->n_items == 0) {
    k3_findings_report(findings, K3_IDX06, folder, NULL, "a file whose name ends in .safetensors", "no weights: no such file in this folder");
  } else if (disagree) {
    k3_findings_report(findings, K3_IDX08, folder, first, "one series -0000i-of-0000n", "numbered shards that do not belong together, and no index");
  } else if (n_numbered > 0 && n_numbered != first_n) {
    k3_findings_report(findings, K3_IDX08, folder, first, "all of them", "%zu of %lu numbered shards present, and no index", n_numbered, first_n);
  } else if (weights->n_items > 1) {
    k3_findings_report(findings, K3_IDX06, folder, NULL, "an index, or one file",
                       "%zu safetensors files and no index that says which belong together", weights->n_items);
  }
  return K3_OK;
}

enum k3_status k3_folder_choose(const char *folder, const struct k3_folder_listing *listing, const struct k3_ckpt_options *options,
                                struct k3_names *chosen, const char **index_name, struct k3_findings *findings, struct k3_error *err) {
  for (size_t i = 0; i < listing->unfinished.n_items; i++)
    k3_findings_report(findings, K3_CNT09, folder, listing->unfinished.items[i], "a finished download", "left by an unfinished download; never read");
  if (listing->weights.n_items == 0 && listing->pickles.n_items > 0)
    k3_findings_report(findings, K3_MAP09, folder, listing->pickles.items[0], "safetensors files", "pickle files, which are never read");
  if (k3_names_has(&listing->documents, "adapter_config.json"))
    k3_findings_report(findings, K3_MAP09, folder, "adapter_config.json", "a whole model", "an adapter, not a model: merge it into its base first");
  *index_name = find_index(folder, listing, findings);
  if (*index_name)
    return choose_by_index(folder, listing, options, *index_name, chosen, findings, err);
  return choose_by_names(folder, &listing->weights, chosen, findings, err);
}

struct index_check {
  struct k3_ckpt *ckpt;
  const char *index_name;
  const struct k3_ckpt_options *options;
  struct k3_findings *findings;
  uint8_t *listed;                  // [n_tensors], 1 when the index lists the tensor
  uint64_t n_found;                 // entries of the index whose tensor was found
  bool doubles;                     // some tensor is in two files (IDX03)
  const struct k3_ckpt_file *last;  // of the entry before: neighbours are in the same file as a rule
};

static int compare_file(const void *name, const void *file) {
  return strcmp(name, ((const struct k3_ckpt_file *)file)->name);
}

// The files of a folder stand in the order of their names.
static const struct k3_ckpt_file *file_by_name(const struct k3_ckpt *ckpt, const char *name) {
  return bsearch(name, ckpt->files, ckpt->n_files, sizeof *ckpt->files, compare_file);
}

static enum k3_status check_entry(void *ctx, const char *name, size_t name_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  struct index_check *check = ctx;
  uint64_t tensor;
  (void)file_nbytes;
  if (!is_wanted(check->options, name))
    return K3_OK;
  if (!check->last || strcmp(check->last->name, file) != 0)
    check->last = file_by_name(check->ckpt, file);
  // As a rule the tensor is in the file that the index names; its own small table is faster than that of all tensors.
  const struct k3_st_tensor *there = check->last && !check->doubles ? k3_st_find(&check->last->header, name, name_nbytes) : NULL;
  if (there) {
    check->listed[check->last->first_tensor + (uint64_t)(there - check->last->header.tensors)] = 1;
    check->n_found++;
    return K3_OK;
  }
  if (k3_ckpt_find(check->ckpt, name, name_nbytes, &tensor)) {
    check->listed[tensor] = 1;
    check->n_found++;
    const struct k3_ckpt_file *home = k3_ckpt_file_of(check->ckpt, tensor);
    if (strcmp(home->name, file) == 0)
      return K3_OK;
    const struct k3_ckpt_file *promised = check->last;
    if (promised && k3_st_find(&promised->header, name, name_nbytes))
      return K3_OK;  // it is in both: IDX03 has said so
    if (promised)
      k3_findings_report(check->findings, K3_IDX02, promised->path, name, "the tensor in the file that the index names",
                         "the tensor is in %s instead", home->name);
    return K3_OK;
  }
  struct k3_ckpt *ckpt = check->ckpt;
  K3_TRY(k3_grow(&ckpt->promised, &ckpt->promised_capacity, ckpt->n_promised + 1, sizeof *ckpt->promised, err));
  ckpt->promised[ckpt->n_promised] = k3_strndup(name, name_nbytes, err);
  if (!ckpt->promised[ckpt->n_promised])
    return K3_NO_MEMORY;
  ckpt->n_promised++;
  // A file that is absent (IDX01) or unreadable (CNT) has been reported; its tensors are not repeated one by one.
  const struct k3_ckpt_file *promised = check->last;
  if (promised && promised->header.data_begin > 0)
    k3_findings_report(check->findings, K3_IDX02, promised->path, name, "every tensor that the index lists",
                       "the shard is there, but the tensor is not in it");
  return K3_OK;
}

enum k3_status k3_folder_check_index(struct k3_ckpt *ckpt, const char *index_name, const struct k3_ckpt_options *options,
                                     struct k3_findings *findings, struct k3_error *err) {
  struct k3_index_summary summary = {0};
  bool ok;
  struct index_check check = {.ckpt = ckpt,
                              .index_name = index_name,
                              .options = options,
                              .findings = findings,
                              .listed = k3_calloc(ckpt->n_tensors, 1, err),
                              .doubles = findings->n_by_rule[K3_IDX03] > 0};
  if (!check.listed)
    return K3_NO_MEMORY;
  // The first pass has already reported what is malformed, so its findings are not wanted twice.
  struct k3_findings again = {0};
  enum k3_status status = parse_index(ckpt->folder, index_name, true, check_entry, &check, &summary, &ok, &again, err);
  k3_findings_free(&again);
  if (ckpt->n_promised > 1)
    qsort(ckpt->promised, ckpt->n_promised, sizeof *ckpt->promised, compare_names);
  bool whole = !options || !options->wanted;
  for (size_t f = 0; status == K3_OK && ok && whole && f < ckpt->n_files; f++) {
    const struct k3_ckpt_file *file = &ckpt->files[f];
    for (size_t i = 0; i < file->header.n_tensors; i++) {
      uint64_t first;
      const struct k3_st_tensor *t = &file->header.tensors[i];
      if (!check.listed[file->first_tensor + i] && k3_ckpt_find(ckpt, t->name, t->name_nbytes, &first) && !check.listed[first])
        k3_findings_report(findings, K3_IDX04, file->path, t->name, NULL, "the index does not list this tensor; it is used all the same");
    }
  }
  if (status == K3_OK && ok && whole) {
    if (summary.odd_total_size)
      k3_findings_report(findings, K3_IDX07, index_name, "metadata.total_size", "the sum of the tensors' bytes", "not a plain non-negative integer");
    else if (summary.has_total_size && check.n_found == summary.n_entries && summary.total_size != ckpt->tensors_nbytes)
      k3_findings_report(findings, K3_IDX07, index_name, "metadata.total_size", "the sum of the tensors' bytes",
                         "%llu, but the tensors hold %llu bytes", (unsigned long long)summary.total_size, (unsigned long long)ckpt->tensors_nbytes);
  }
  k3_free(check.listed);
  return status;
}

bool k3_ckpt_promised(const struct k3_ckpt *ckpt, const char *name) {
  return ckpt->n_promised > 0 && bsearch(&name, ckpt->promised, ckpt->n_promised, sizeof *ckpt->promised, compare_names);
}
