#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "formats/image.h"
#include "formats/manifest_values.h"

typedef unsigned long long ull;  // for %llu

enum { MAX_FILE_NAME_NBYTES = 255, MAX_SHARD_NAMES_NBYTES = 512 << 20, MAX_MODEL_DEPTH = 32, MAX_DIGITS = 16, MAX_BLOCK = 1 << 24 };

// ---- sections ----

// The name of a file of the source's folder: `export` creates it, so it may not lead anywhere else.
static enum k3_status get_file_name(struct k3_mread *reader, const json_t *object, const char *where, const char **kept) {
  const json_t *value = json_object_get(object, "file");
  const char *text = json_string_value(value);
  if (!k3_mread_is_name(text) || strlen(text) > MAX_FILE_NAME_NBYTES || strpbrk(text, "/\\") || strcmp(text, ".") == 0 || strcmp(text, "..") == 0)
    return k3_mread_fail_kind(reader, where, "file", "the base name of a file", value);
  return k3_mread_keep(reader, text, kept);
}

// "__source__.<n>"
static enum k3_status get_source_tensor(struct k3_mread *reader, const json_t *object, const char *key, const char *where, const char **kept) {
  static const char prefix[] = K3_IMAGE_SOURCE_PREFIX;
  const json_t *value = json_object_get(object, key);
  const char *text = json_string_value(value), *digits = text ? text + sizeof prefix - 1 : NULL;
  if (!text || strncmp(text, prefix, sizeof prefix - 1) != 0 || digits[0] == '\0' || digits[strspn(digits, "0123456789")] != '\0' ||
      strlen(digits) > 9)
    return k3_mread_fail_kind(reader, where, key, "\"" K3_IMAGE_SOURCE_PREFIX "<n>\"", value);
  return k3_mread_keep(reader, text, kept);
}

static enum k3_status read_recipe(struct k3_mread *reader, const json_t *root) {
  const json_t *recipe = json_object_get(root, "recipe");
  if (!json_is_object(recipe))
    return k3_mread_fail_kind(reader, NULL, "recipe", "an object", recipe);
  K3_TRY(k3_mread_text(reader, recipe, "name", "recipe", &reader->m->recipe_name));
  return json_object_get(recipe, "sha256") ? k3_mread_text(reader, recipe, "sha256", "recipe", &reader->m->recipe_sha256) : K3_OK;
}

static bool too_deep(const json_t *value, unsigned left) {
  const char *key;
  json_t *entry;
  size_t i;
  json_object_foreach((json_t *)value, key, entry) {
    if (left == 0 || too_deep(entry, left - 1))
      return true;
  }
  json_array_foreach(value, i, entry) {
    if (left == 0 || too_deep(entry, left - 1))
      return true;
  }
  return false;
}

static enum k3_status read_model(struct k3_mread *reader, const json_t *root) {
  const json_t *model = json_object_get(root, "model");
  if (!json_is_object(model))
    return k3_mread_fail_kind(reader, NULL, "model", "an object", model);
  if (too_deep(model, MAX_MODEL_DEPTH))
    return K3_MREAD_FAIL(reader, NULL, "at most 32 levels", "model is nested too deeply");
  K3_TRY(k3_mread_name(reader, model, "family", "model", &reader->m->family));
  struct k3_jsonw writer;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_json_tree_write(&writer, NULL, model);
  char *text = k3_json_tree_take(&writer, reader->err);
  if (!text)
    return K3_NO_MEMORY;
  enum k3_status status = k3_mread_keep(reader, text, &reader->m->model_json);
  if (status == K3_OK && strcmp(reader->m->family, "k3-dspark") == 0)
    status = k3_dspark_model_from_json(text, strlen(text), reader->file, &reader->m->dspark, reader->err);
  k3_free(text);
  return status;
}

static enum k3_status read_names(struct k3_mread *reader, const json_t *root) {
  const json_t *names = json_object_get(root, "names"), *aliases = json_object_get(names, "aliases");
  struct k3_manifest *m = reader->m;
  const char *key;
  json_t *value;
  m->root = m->image_root = "";
  if (!names)
    return K3_OK;
  if (!json_is_object(names))
    return k3_mread_fail_kind(reader, NULL, "names", "an object", names);
  if (json_object_get(names, "root"))
    K3_TRY(k3_mread_text(reader, names, "root", "names", &m->root));
  if (json_object_get(names, "image_root"))
    K3_TRY(k3_mread_text(reader, names, "image_root", "names", &m->image_root));
  if (aliases && !json_is_object(aliases))
    return k3_mread_fail_kind(reader, "names", "aliases", "an object", aliases);
  m->aliases = k3_mread_alloc(reader, json_object_size(aliases), sizeof *m->aliases);
  if (!m->aliases)
    return K3_NO_MEMORY;
  json_object_foreach((json_t *)aliases, key, value) {
    K3_TRY(k3_mread_name(reader, aliases, key, "aliases", &m->aliases[m->n_aliases].value));
    K3_TRY(k3_mread_keep(reader, key, &m->aliases[m->n_aliases++].key));
  }
  return k3_mread_sort_by_name(reader, m->aliases, m->n_aliases, sizeof *m->aliases, "aliases");
}

static enum k3_status read_sources(struct k3_mread *reader, const json_t *root) {
  static const char *const words[] = {"source", "target"};
  struct k3_manifest *m = reader->m;
  const json_t *list;
  K3_TRY(k3_mread_objects(reader, root, "sources", NULL, &list));
  m->sources = k3_mread_alloc(reader, json_array_size(list), sizeof *m->sources);
  if (!m->sources)
    return K3_NO_MEMORY;
  for (; m->n_sources < json_array_size(list); m->n_sources++) {
    struct k3_manifest_source *source = &m->sources[m->n_sources];
    const json_t *entry = json_array_get(list, m->n_sources);
    int of;
    K3_TRY(get_file_name(reader, entry, "sources", &source->file));
    K3_TRY(k3_mread_u64(reader, entry, "size", source->file, K3_ST_PREFIX_NBYTES, INT64_MAX, &source->nbytes));
    K3_TRY(get_source_tensor(reader, entry, "header", source->file, &source->header_tensor));
    K3_TRY(k3_mread_word(reader, entry, "of", source->file, words, 2, false, &of));
    source->of_target = of == 1;
    if (!json_object_get(entry, "sha256"))
      continue;
    K3_TRY(k3_mread_text(reader, entry, "sha256", source->file, &source->sha256));
    if (strlen(source->sha256) != 64 || strspn(source->sha256, "0123456789abcdef") != 64)
      return K3_MREAD_FAIL(reader, source->file, "64 hex digits", "sha256 is no SHA-256");
  }
  return K3_OK;
}

static enum k3_status read_documents(struct k3_mread *reader, const json_t *root) {
  struct k3_manifest *m = reader->m;
  const json_t *list;
  K3_TRY(k3_mread_objects(reader, root, "documents", NULL, &list));
  m->documents = k3_mread_alloc(reader, json_array_size(list), sizeof *m->documents);
  if (!m->documents)
    return K3_NO_MEMORY;
  for (; m->n_documents < json_array_size(list); m->n_documents++) {
    struct k3_manifest_document *document = &m->documents[m->n_documents];
    const json_t *entry = json_array_get(list, m->n_documents);
    K3_TRY(get_file_name(reader, entry, "documents", &document->file));
    K3_TRY(get_source_tensor(reader, entry, "tensor", document->file, &document->tensor));
  }
  return K3_OK;
}

// No two files may be restored to one name, or from one tensor.
static enum k3_status check_files(struct k3_mread *reader) {
  const struct k3_manifest *m = reader->m;
  size_t n_all = m->n_sources + m->n_documents, n[3] = {0};
  const char **lists[3];  // files of the source, files of the target, tensors
  for (int i = 0; i < 3; i++) {
    lists[i] = k3_mread_alloc(reader, n_all, sizeof **lists);
    if (!lists[i])
      return K3_NO_MEMORY;
  }
  for (size_t i = 0; i < m->n_sources; i++) {
    int of = m->sources[i].of_target;
    lists[of][n[of]++] = m->sources[i].file;
    lists[2][n[2]++] = m->sources[i].header_tensor;
  }
  for (size_t i = 0; i < m->n_documents; i++) {
    lists[0][n[0]++] = m->documents[i].file;
    lists[2][n[2]++] = m->documents[i].tensor;
  }
  for (int i = 0; i < 3; i++)
    K3_TRY(k3_mread_sort_by_name(reader, lists[i], n[i], sizeof **lists, "the list of sources and documents"));
  return K3_OK;
}

// ---- runs ----

struct run {
  const char *before, *after;  // of the variable in the pattern
  size_t n_before;
  uint64_t first, n;
};

// {"each": ["e", first, end], key: "...{e}..."}; counts what it will take.
static enum k3_status read_run(struct k3_mread *reader, const json_t *entry, const char *key, const char *where, struct run *run) {
  const json_t *each = json_object_get(entry, "each"), *letter = json_array_get(each, 0);
  const char *pattern = json_string_value(json_object_get(entry, key)), *variable = json_string_value(letter);
  char brace[16];
  uint64_t end;
  if (!json_is_array(each) || json_array_size(each) != 3)
    return k3_mread_fail_kind(reader, where, "each", "a letter and two integers", each);
  if (!variable || strlen(variable) != 1 || variable[0] < 'a' || variable[0] > 'z')
    return k3_mread_fail_kind(reader, where, "each", "a lower-case letter", letter);
  K3_TRY(k3_mread_as_u64(reader, json_array_get(each, 1), "each", where, 0, K3_MREAD_MAX_NUMBER, &run->first));
  K3_TRY(k3_mread_as_u64(reader, json_array_get(each, 2), "each", where, run->first + 1, run->first + K3_MANIFEST_MAX_RUN, &end));
  run->n = end - run->first;
  snprintf(brace, sizeof brace, "{%c}", variable[0]);
  run->before = k3_mread_is_name(pattern) && strlen(pattern) + MAX_DIGITS <= K3_ST_MAX_NAME_NBYTES ? pattern : NULL;
  const char *at = run->before ? strstr(pattern, brace) : NULL;
  if (!at || strchr(pattern, '{') != at || strchr(at + 1, '{'))
    return k3_mread_fail_kind(reader, where, key, "a name that holds the variable once", json_object_get(entry, key));
  run->n_before = (size_t)(at - pattern);
  run->after = at + strlen(brace);
  return K3_OK;
}

// Counts n shards whose names have so many bytes each.
static enum k3_status count_shards(struct k3_mread *reader, const char *where, uint64_t n, uint64_t name_nbytes) {
  reader->n_shards += n;
  reader->n_name_nbytes += n * name_nbytes;
  if (reader->n_shards > K3_MANIFEST_MAX_SHARDS || reader->n_name_nbytes > MAX_SHARD_NAMES_NBYTES)
    return K3_MREAD_FAIL(reader, where, "4000000 shards, 512 MiB of names", "the runs of shards up to here make too many of them");
  return K3_OK;
}

static enum k3_status run_name(struct k3_mread *reader, const struct run *run, uint64_t i, const char **name) {
  char digits[24];
  size_t n_digits = (size_t)snprintf(digits, sizeof digits, "%llu", (ull)(run->first + i)), n_after = strlen(run->after);
  char *text = k3_arena_alloc(&reader->m->arena, run->n_before + n_digits + n_after + 1, reader->err);
  if (!text)
    return K3_NO_MEMORY;
  memcpy(text, run->before, run->n_before);
  memcpy(text + run->n_before, digits, n_digits);
  memcpy(text + run->n_before + n_digits, run->after, n_after + 1);
  *name = text;
  return K3_OK;
}

// First pass over a list of shards or modules: how many entries it expands to.
static enum k3_status count_entries(struct k3_mread *reader, const json_t *list, const char *key, const char *where, size_t *n_entries) {
  *n_entries = 0;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *entry = json_array_get(list, i);
    struct run run = {.n = 1};
    if (json_object_get(entry, "each"))
      K3_TRY(read_run(reader, entry, key, where, &run));
    K3_TRY(count_shards(reader, where, run.n, run.before ? run.n_before + strlen(run.after) + MAX_DIGITS : 0));
    *n_entries += run.n;
  }
  return K3_OK;
}

// ---- tensors ----

static enum k3_status expand_shards(struct k3_mread *reader, const json_t *entry, const char *where, struct k3_manifest_shard *shards, size_t *n) {
  struct run run;
  uint64_t id[2], row[2], n_rows, last;
  K3_TRY(read_run(reader, entry, "source", where, &run));
  K3_TRY(k3_mread_pair(reader, entry, "id", where, 0, id));
  K3_TRY(k3_mread_pair(reader, entry, "row", where, 0, row));
  K3_TRY(k3_mread_u64(reader, entry, "n_rows", where, 0, K3_MREAD_MAX_NUMBER, &n_rows));
  for (int i = 0; i < 2; i++) {
    const uint64_t *series = i == 0 ? id : row;
    if (!k3_mul_u64(series[1], run.n - 1, &last) || !k3_add_u64(series[0], last, &last) || last > K3_MREAD_MAX_NUMBER)
      return K3_MREAD_FAIL(reader, where, "numbers up to 2^53", "a run of shards leaves the range of %s", i == 0 ? "id" : "row");
  }
  for (uint64_t i = 0; i < run.n; i++, ++*n) {
    shards[*n] = (struct k3_manifest_shard){.id = id[0] + i * id[1], .file = -1, .row = row[0] + i * row[1], .n_rows = n_rows};
    K3_TRY(run_name(reader, &run, i, &shards[*n].source));
  }
  return K3_OK;
}

static enum k3_status read_shard(struct k3_mread *reader, const json_t *entry, const char *where, struct k3_manifest_shard *shard) {
  const json_t *file = json_object_get(entry, "file");
  uint64_t index;
  shard->file = -1;
  if (file) {
    K3_TRY(k3_mread_as_u64(reader, file, "file", where, 0, K3_MREAD_MAX_NUMBER, &index));
    if (index >= reader->m->n_sources)
      return K3_MREAD_FAIL(reader, where, "an index into sources", "a shard is of file %llu, but there are %zu sources", (ull)index,
                           reader->m->n_sources);
    shard->file = (int64_t)index;
  }
  K3_TRY(k3_mread_u64(reader, entry, "id", where, 0, K3_MREAD_MAX_NUMBER, &shard->id));
  K3_TRY(k3_mread_u64(reader, entry, "row", where, 0, K3_MREAD_MAX_NUMBER, &shard->row));
  K3_TRY(k3_mread_u64(reader, entry, "n_rows", where, 0, K3_MREAD_MAX_NUMBER, &shard->n_rows));
  return k3_mread_name(reader, entry, "source", where, &shard->source);
}

static enum k3_status read_shards(struct k3_mread *reader, const json_t *list, struct k3_manifest_tensor *tensor) {
  K3_TRY(count_entries(reader, list, "source", tensor->name, &tensor->n_shards));
  tensor->shards = k3_mread_alloc(reader, tensor->n_shards, sizeof *tensor->shards);
  if (!tensor->shards)
    return K3_NO_MEMORY;
  size_t n = 0;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *entry = json_array_get(list, i);
    if (json_object_get(entry, "each"))
      K3_TRY(expand_shards(reader, entry, tensor->name, tensor->shards, &n));
    else
      K3_TRY(read_shard(reader, entry, tensor->name, &tensor->shards[n++]));
  }
  if (n > 1)
    qsort(tensor->shards, n, sizeof *tensor->shards, k3_manifest_compare_shards);
  for (size_t i = 1; i < n; i++) {
    if (tensor->shards[i].row < tensor->shards[i - 1].row + tensor->shards[i - 1].n_rows)
      return K3_MREAD_FAIL(reader, tensor->name, "each row in one shard", "row %llu is in two shards", (ull)tensor->shards[i].row);
  }
  return K3_OK;
}

static enum k3_status read_tensors(struct k3_mread *reader, const json_t *root) {
  static const char *const roles[] = {"core", "optional", "borrowed"}, *const rules[] = {"replicate", "column", "row", "vocab"};
  struct k3_manifest *m = reader->m;
  const json_t *list, *shards;
  K3_TRY(k3_mread_objects(reader, root, "tensors", NULL, &list));
  m->tensors = k3_mread_alloc(reader, json_array_size(list), sizeof *m->tensors);
  if (!m->tensors)
    return K3_NO_MEMORY;
  for (; m->n_tensors < json_array_size(list); m->n_tensors++) {
    struct k3_manifest_tensor *tensor = &m->tensors[m->n_tensors];
    const json_t *entry = json_array_get(list, m->n_tensors);
    int role, rule;
    K3_TRY(k3_mread_name(reader, entry, "name", "tensors", &tensor->name));
    K3_TRY(k3_mread_word(reader, entry, "role", tensor->name, roles, 3, true, &role));
    K3_TRY(k3_mread_word(reader, entry, "tp", tensor->name, rules, 4, true, &rule));
    tensor->role = (enum k3_role)role;
    tensor->tp = (enum k3_tp_rule)rule;
    K3_TRY(k3_mread_objects(reader, entry, "shards", tensor->name, &shards));
    if (shards)
      K3_TRY(read_shards(reader, shards, tensor));
  }
  return k3_mread_sort_by_name(reader, m->tensors, m->n_tensors, sizeof *m->tensors, "tensors");
}

// ---- linears, views, pairs ----

static enum k3_status read_group(struct k3_mread *reader, const json_t *entry, struct k3_manifest_linear *linear) {
  static const char *const directions[] = {"multiply", "divide"}, *const plain[] = {"", "BF16", "F16", "F32"};
  uint64_t block[2];
  int direction, from;
  K3_TRY(k3_mread_name(reader, entry, "scheme", "linears", &linear->scheme));
  bool has_group = json_object_get(entry, "group"), has_block = json_object_get(entry, "block");
  if (has_group && has_block)
    return K3_MREAD_FAIL(reader, "linears", "one of them", "a group and a block for the scheme %s", linear->scheme);
  if (has_group) {
    linear->block_rows = 1;
    K3_TRY(k3_mread_u64(reader, entry, "group", "linears", 1, MAX_BLOCK, &linear->block_cols));
  }
  if (has_block) {
    K3_TRY(k3_mread_pair(reader, entry, "block", "linears", 1, block));
    if (block[0] > MAX_BLOCK || block[1] > MAX_BLOCK)
      return K3_MREAD_FAIL(reader, "linears", "at most 2^24", "a block of %llu x %llu", (ull)block[0], (ull)block[1]);
    linear->block_rows = block[0];
    linear->block_cols = block[1];
  }
  K3_TRY(k3_mread_word(reader, entry, "second_scale", "linears", directions, 2, true, &direction));
  linear->second_scale_divides = direction == 1;
  K3_TRY(k3_mread_word(reader, entry, "from", "linears", plain, 4, true, &from));
  linear->encoded_from = from > 0 ? plain[from] : NULL;
  return K3_OK;
}

static enum k3_status read_modules(struct k3_mread *reader, const json_t *list, const struct k3_manifest_linear *group) {
  struct k3_manifest *m = reader->m;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *entry = json_array_get(list, i);
    struct run run = {.n = 1};
    if (!json_is_object(entry)) {
      if (!k3_mread_is_name(json_string_value(entry)))
        return k3_mread_fail_kind(reader, "linears", "a module", K3_MREAD_NAME, entry);
      m->linears[m->n_linears] = *group;
      K3_TRY(k3_mread_keep(reader, json_string_value(entry), &m->linears[m->n_linears++].module));
      continue;
    }
    K3_TRY(read_run(reader, entry, "module", "linears", &run));
    for (uint64_t k = 0; k < run.n; k++) {
      m->linears[m->n_linears] = *group;
      K3_TRY(run_name(reader, &run, k, &m->linears[m->n_linears++].module));
    }
  }
  return K3_OK;
}

static enum k3_status read_linears(struct k3_mread *reader, const json_t *root) {
  struct k3_manifest *m = reader->m;
  const json_t *list, *modules;
  size_t n_all = 0;
  K3_TRY(k3_mread_objects(reader, root, "linears", NULL, &list));
  for (size_t i = 0; i < json_array_size(list); i++) {
    size_t n_modules;
    K3_TRY(k3_mread_list(reader, json_array_get(list, i), "modules", "linears", &modules));
    K3_TRY(count_entries(reader, modules, "module", "linears", &n_modules));
    n_all += n_modules;
  }
  m->linears = k3_mread_alloc(reader, n_all, sizeof *m->linears);
  if (!m->linears)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < json_array_size(list); i++) {
    struct k3_manifest_linear group = {0};
    K3_TRY(read_group(reader, json_array_get(list, i), &group));
    K3_TRY(read_modules(reader, json_object_get(json_array_get(list, i), "modules"), &group));
  }
  return k3_mread_sort_by_name(reader, m->linears, m->n_linears, sizeof *m->linears, "linears");
}

static enum k3_status read_view(struct k3_mread *reader, const json_t *root, struct k3_manifest_view *view) {
  const json_t *list;
  K3_TRY(k3_mread_objects(reader, root, view->name, "views", &list));
  if (json_array_size(list) == 0)
    return K3_MREAD_FAIL(reader, view->name, "at least one shard", "the view has no shards");
  view->shards = k3_mread_alloc(reader, json_array_size(list), sizeof *view->shards);
  if (!view->shards)
    return K3_NO_MEMORY;
  for (; view->n_shards < json_array_size(list); view->n_shards++) {
    struct k3_manifest_view_shard *shard = &view->shards[view->n_shards];
    const json_t *entry = json_array_get(list, view->n_shards);
    K3_TRY(k3_mread_u64(reader, entry, "id", view->name, 0, K3_MREAD_MAX_NUMBER, &shard->id));
    K3_TRY(k3_mread_u64(reader, entry, "row", view->name, 0, K3_MREAD_MAX_NUMBER, &shard->row));
    K3_TRY(k3_mread_u64(reader, entry, "n_rows", view->name, 1, K3_MREAD_MAX_NUMBER, &shard->n_rows));
    K3_TRY(k3_mread_name(reader, entry, "tensor", view->name, &shard->tensor));
    if (view->n_shards > 0 && shard->id <= shard[-1].id)
      return K3_MREAD_FAIL(reader, view->name, "ascending shard ids", "shard %llu comes after shard %llu", (ull)shard->id, (ull)shard[-1].id);
  }
  return K3_OK;
}

static enum k3_status read_views(struct k3_mread *reader, const json_t *root) {
  struct k3_manifest *m = reader->m;
  const json_t *views = json_object_get(root, "views");
  const char *key;
  json_t *list;
  if (views && !json_is_object(views))
    return k3_mread_fail_kind(reader, NULL, "views", "an object", views);
  m->views = k3_mread_alloc(reader, json_object_size(views), sizeof *m->views);
  if (!m->views)
    return K3_NO_MEMORY;
  json_object_foreach((json_t *)views, key, list) {
    (void)list;
    struct k3_manifest_view *view = &m->views[m->n_views++];
    if (!k3_mread_is_name(key))
      return K3_MREAD_FAIL(reader, "views", K3_MREAD_NAME, "the name of a view is empty, too long or holds a control character");
    K3_TRY(k3_mread_keep(reader, key, &view->name));
    K3_TRY(read_view(reader, views, view));
  }
  return k3_mread_sort_by_name(reader, m->views, m->n_views, sizeof *m->views, "views");
}

static enum k3_status read_pairs(struct k3_mread *reader, const json_t *root, const char *section, const char *key, const char *value,
                                 struct k3_manifest_pair **pairs, size_t *n_pairs) {
  const json_t *list;
  K3_TRY(k3_mread_objects(reader, root, section, NULL, &list));
  *pairs = k3_mread_alloc(reader, json_array_size(list), sizeof **pairs);
  if (!*pairs)
    return K3_NO_MEMORY;
  for (; *n_pairs < json_array_size(list); ++*n_pairs) {
    K3_TRY(k3_mread_name(reader, json_array_get(list, *n_pairs), key, section, &(*pairs)[*n_pairs].key));
    K3_TRY(k3_mread_text(reader, json_array_get(list, *n_pairs), value, section, &(*pairs)[*n_pairs].value));
  }
  return K3_OK;
}

static bool is_seal(const char *text) {
  return text && strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64;
}

static enum k3_status read_split(struct k3_mread *reader, const json_t *root) {
  struct k3_manifest *m = reader->m;
  const json_t *split = json_object_get(root, "split"), *ranks;
  uint64_t tp, rank;
  if (!split)
    return K3_OK;
  if (!json_is_object(split))
    return k3_mread_fail_kind(reader, NULL, "split", "an object", split);
  K3_TRY(k3_mread_u64(reader, split, "tp", "split", 1, K3_MANIFEST_MAX_RANKS, &tp));
  m->tp_size = (uint32_t)tp;
  K3_TRY(k3_mread_list(reader, split, "ranks", "split", &ranks));
  if (!ranks) {
    K3_TRY(k3_mread_u64(reader, split, "rank", "split", 0, tp - 1, &rank));
    m->tp_rank = (uint32_t)rank;
    return K3_OK;
  }
  if (json_array_size(ranks) != tp)
    return K3_MREAD_FAIL(reader, "split", "one seal for each rank", "%zu seals for %llu ranks", json_array_size(ranks), (ull)tp);
  m->rank_seals = k3_mread_alloc(reader, tp, sizeof *m->rank_seals);
  if (!m->rank_seals)
    return K3_NO_MEMORY;
  for (size_t r = 0; r < tp; r++) {
    const json_t *seal = json_array_get(ranks, r);
    if (!is_seal(json_string_value(seal)))
      return k3_mread_fail_kind(reader, "split", "ranks", "seals of 64 hex digits", seal);
    K3_TRY(k3_mread_keep(reader, json_string_value(seal), &m->rank_seals[r]));
  }
  return K3_OK;
}

static enum k3_status read_manifest(struct k3_mread *reader, const json_t *root) {
  struct k3_manifest *m = reader->m;
  const json_t *version = json_object_get(root, "image_version");
  if (json_is_integer(version) && json_integer_value(version) > K3_IMAGE_VERSION)
    return K3_MREAD_FAIL(reader, "image_version", "version 1; a newer k3pack reads this image", "version %lld",
                         (long long)json_integer_value(version));
  if (!json_is_integer(version) || json_integer_value(version) != K3_IMAGE_VERSION)
    return k3_mread_fail_kind(reader, NULL, "image_version", "1", version);
  K3_TRY(k3_mread_text(reader, root, "tool", NULL, &m->tool));
  K3_TRY(k3_mread_bool(reader, root, "digests", &m->digests));
  K3_TRY(k3_mread_bool(reader, root, "crc", &m->crc));
  K3_TRY(read_recipe(reader, root));
  K3_TRY(read_model(reader, root));
  K3_TRY(read_names(reader, root));
  K3_TRY(read_sources(reader, root));
  K3_TRY(read_documents(reader, root));
  K3_TRY(check_files(reader));
  K3_TRY(read_tensors(reader, root));
  K3_TRY(read_linears(reader, root));
  K3_TRY(read_views(reader, root));
  K3_TRY(read_split(reader, root));
  K3_TRY(read_pairs(reader, root, "reductions", "producer", "norm", &m->reductions, &m->n_reductions));
  return read_pairs(reader, root, "dropped", "tensor", "why", &m->dropped, &m->n_dropped);
}

enum k3_status k3_manifest_parse(const char *text, size_t nbytes, const char *file, struct k3_manifest *manifest, struct k3_error *err) {
  struct k3_mread reader = {.m = manifest, .file = file, .err = err};
  json_t *root;
  *manifest = (struct k3_manifest){0};
  if (nbytes > K3_MANIFEST_MAX_NBYTES)
    return K3_MREAD_FAIL(&reader, NULL, "at most 16 MiB", "a manifest of %zu bytes", nbytes);
  K3_TRY(k3_json_tree_parse(text, nbytes, K3_IMG01, file, &root, err));
  enum k3_status status = read_manifest(&reader, root);
  json_decref(root);
  if (status != K3_OK)
    k3_manifest_free(manifest);
  return status;
}

void k3_manifest_free(struct k3_manifest *manifest) {
  k3_arena_free(&manifest->arena);
  *manifest = (struct k3_manifest){0};
}
