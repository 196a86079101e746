#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/image.h"
#include "formats/manifest_values.h"

typedef unsigned long long ull;  // for %llu

// ---- runs ----
// Expert after expert, a stacked tensor of a large model has thousands of shards whose names count up. Several such runs may take turns (w1, w3, w1,
// w3, ...), so each shard is tried as the continuation of the last few runs begun.

enum { MIN_RUN = 8, LOOK_BACK = 32, MAX_DIGITS = 15 };

struct run {
  size_t first, last, n;  // indexes of its shards
  size_t at;              // of the counting number in the names, when n > 1
  uint64_t begin;         // its value in the first name
  uint64_t id_step, row_step;
};

static bool is_digit(char byte) {
  return byte >= '0' && byte <= '9';
}

// Is b equal to a but for one whole component, a number that is one larger in b? *at: where it begins, *number: its value in a.
static bool is_successor(const char *a, const char *b, size_t *at, uint64_t *number) {
  size_t i = 0;
  while (a[i] == b[i] && a[i] != '\0')
    i++;
  while (i > 0 && is_digit(a[i - 1]))
    i--;
  if ((i > 0 && a[i - 1] != '.') || strchr(a, '{') || strchr(a, '}'))
    return false;
  size_t n_a = strspn(a + i, "0123456789"), n_b = strspn(b + i, "0123456789");
  // A number with leading zeros would not come back as it was.
  if (n_a < 1 || n_b < 1 || n_a > MAX_DIGITS || n_b > MAX_DIGITS || (a[i] == '0' && n_a > 1) || b[i] == '0')
    return false;
  if ((a[i + n_a] != '.' && a[i + n_a] != '\0') || strcmp(a + i + n_a, b + i + n_b) != 0)
    return false;
  *at = i;
  *number = strtoull(a + i, NULL, 10);
  return strtoull(b + i, NULL, 10) == *number + 1;
}

static bool of_target(const struct k3_manifest *m, const struct k3_manifest_shard *shard) {
  return shard->file >= 0 && (size_t)shard->file < m->n_sources && m->sources[shard->file].of_target;
}

// Appends shard i to the run if it continues it.
static bool append(const struct k3_manifest *m, struct run *run, const struct k3_manifest_shard *shards, size_t i) {
  const struct k3_manifest_shard *last = &shards[run->last], *next = &shards[i];
  size_t at;
  uint64_t number;
  // A run does not say of which file its shards are, so they must be the source's, where a name is enough.
  if (run->n == K3_MANIFEST_MAX_RUN || next->n_rows != last->n_rows || next->id < last->id || of_target(m, last) || of_target(m, next) ||
      !is_successor(last->source, next->source, &at, &number))
    return false;
  uint64_t id_step = next->id - last->id, row_step = next->row - last->row;
  if (run->n == 1) {
    run->at = at;
    run->begin = number;
    run->id_step = id_step;
    run->row_step = row_step;
  } else if (run->at != at || run->id_step != id_step || run->row_step != row_step) {
    return false;
  }
  run->last = i;
  run->n++;
  return true;
}

// Cuts shards [n], sorted by row, into runs [*n_runs]; run_of [n] says which run each is of.
static void find_runs(const struct k3_manifest *m, const struct k3_manifest_shard *shards, size_t n, struct run *runs, size_t *n_runs,
                      size_t *run_of) {
  *n_runs = 0;
  for (size_t i = 0; i < n; i++) {
    size_t oldest = *n_runs > LOOK_BACK ? *n_runs - LOOK_BACK : 0, r = *n_runs;
    while (r > oldest && !append(m, &runs[r - 1], shards, i))
      r--;
    if (r == oldest) {
      r = ++*n_runs;
      runs[r - 1] = (struct run){.first = i, .last = i, .n = 1};
    }
    run_of[i] = r - 1;
  }
}

// "each" and the pattern, which is the value of `key`.
static void put_each(struct k3_jsonw *writer, const struct run *run) {
  k3_jsonw_begin_array(writer, "each");
  k3_jsonw_string(writer, NULL, "e");
  k3_jsonw_u64(writer, NULL, run->begin);
  k3_jsonw_u64(writer, NULL, run->begin + run->n);
  k3_jsonw_end_array(writer);
}

static void put_pattern(struct k3_jsonw *writer, const char *key, const struct run *run, const char *first_name) {
  struct k3_error *err = &writer->error;
  const char *after = first_name + run->at + strspn(first_name + run->at, "0123456789");
  char *pattern = k3_asprintf(err, "%.*s{e}%s", (int)run->at, first_name, after);
  if (pattern)
    k3_jsonw_string(writer, key, pattern);
  k3_free(pattern);
}

static void put_pair(struct k3_jsonw *writer, const char *key, uint64_t a, uint64_t b) {
  k3_jsonw_begin_array(writer, key);
  k3_jsonw_u64(writer, NULL, a);
  k3_jsonw_u64(writer, NULL, b);
  k3_jsonw_end_array(writer);
}

static void put_shard(struct k3_jsonw *writer, const struct k3_manifest_shard *shard, const struct run *run) {
  bool each = run->n >= MIN_RUN;
  k3_jsonw_begin_object(writer, NULL);
  if (each) {
    put_each(writer, run);
    put_pair(writer, "id", shard->id, run->id_step);
  } else {
    if (shard->file >= 0)
      k3_jsonw_i64(writer, "file", shard->file);
    k3_jsonw_u64(writer, "id", shard->id);
  }
  k3_jsonw_u64(writer, "n_rows", shard->n_rows);
  if (each) {
    put_pair(writer, "row", shard->row, run->row_step);
    put_pattern(writer, "source", run, shard->source);
  } else {
    k3_jsonw_u64(writer, "row", shard->row);
    k3_jsonw_string(writer, "source", shard->source);
  }
  k3_jsonw_end_object(writer);
}

static void put_module(struct k3_jsonw *writer, const char *module, const struct run *run) {
  if (run->n < MIN_RUN) {
    k3_jsonw_string(writer, NULL, module);
    return;
  }
  k3_jsonw_begin_object(writer, NULL);
  put_each(writer, run);
  put_pattern(writer, "module", run, module);
  k3_jsonw_end_object(writer);
}

// Writes shards [n] as entries of the open array; as_modules: their names only.
static void put_runs(struct k3_jsonw *writer, const struct k3_manifest *m, const struct k3_manifest_shard *shards, size_t n, bool as_modules) {
  struct k3_error *err = &writer->error;
  size_t n_runs, *run_of = k3_calloc(n, sizeof *run_of, err);
  struct run *runs = run_of ? k3_calloc(n, sizeof *runs, err) : NULL;
  if (runs) {
    find_runs(m, shards, n, runs, &n_runs, run_of);
    for (size_t i = 0; i < n; i++) {
      const struct run *run = &runs[run_of[i]];
      if (run->n >= MIN_RUN && run->first != i)
        continue;
      if (as_modules)
        put_module(writer, shards[i].source, run);
      else
        put_shard(writer, &shards[i], run);
    }
  }
  k3_free(runs);
  k3_free(run_of);
}

// ---- lists in order ----

// A copy of a list, sorted; NULL when memory fails.
static void *sorted(struct k3_jsonw *writer, const void *list, size_t n, size_t elem_nbytes, int (*compare)(const void *, const void *)) {
  void *copy = k3_calloc(n, elem_nbytes, &writer->error);
  if (copy && n > 0) {
    memcpy(copy, list, n * elem_nbytes);
    qsort(copy, n, elem_nbytes, compare);
  }
  return copy;
}

static int compare_names(const void *a, const void *b) {
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// By value where both have a number, so that layer 10 comes after layer 9.
static int compare_counting(const char *a, const char *b) {
  while (*a && *b) {
    if (is_digit(*a) && is_digit(*b)) {
      size_t n_a = strspn(a, "0123456789"), n_b = strspn(b, "0123456789");
      int order = n_a != n_b ? (n_a < n_b ? -1 : 1) : memcmp(a, b, n_a);
      if (order != 0)
        return order;
      a += n_a;
      b += n_b;
    } else if (*a++ != *b++) {
      return (unsigned char)a[-1] < (unsigned char)b[-1] ? -1 : 1;
    }
  }
  return (*a != '\0') - (*b != '\0');
}

// Linears of one description stand together.
static int compare_linears(const void *a, const void *b) {
  const struct k3_manifest_linear *left = a, *right = b;
  int order = strcmp(left->scheme, right->scheme);
  if (order != 0)
    return order;
  if (left->block_rows != right->block_rows)
    return left->block_rows < right->block_rows ? -1 : 1;
  if (left->block_cols != right->block_cols)
    return left->block_cols < right->block_cols ? -1 : 1;
  if (left->second_scale_divides != right->second_scale_divides)
    return left->second_scale_divides ? 1 : -1;
  order = strcmp(left->encoded_from ? left->encoded_from : "", right->encoded_from ? right->encoded_from : "");
  if (order != 0)
    return order;
  return compare_counting(left->module, right->module);
}

static bool same_description(const struct k3_manifest_linear *a, const struct k3_manifest_linear *b) {
  return strcmp(a->scheme, b->scheme) == 0 && a->block_rows == b->block_rows && a->block_cols == b->block_cols &&
         a->second_scale_divides == b->second_scale_divides &&
         strcmp(a->encoded_from ? a->encoded_from : "", b->encoded_from ? b->encoded_from : "") == 0;
}

// ---- sections, each under its key ----

static void put_pairs(struct k3_jsonw *writer, const char *section, const char *key, const char *value, const struct k3_manifest_pair *pairs,
                      size_t n) {
  k3_jsonw_begin_array(writer, section);
  for (size_t i = 0; i < n; i++) {
    bool key_first = strcmp(key, value) < 0;
    k3_jsonw_begin_object(writer, NULL);
    k3_jsonw_string(writer, key_first ? key : value, key_first ? pairs[i].key : pairs[i].value);
    k3_jsonw_string(writer, key_first ? value : key, key_first ? pairs[i].value : pairs[i].key);
    k3_jsonw_end_object(writer);
  }
  k3_jsonw_end_array(writer);
}

static void put_documents(struct k3_jsonw *writer, const struct k3_manifest *m) {
  k3_jsonw_begin_array(writer, "documents");
  for (size_t i = 0; i < m->n_documents; i++) {
    k3_jsonw_begin_object(writer, NULL);
    k3_jsonw_string(writer, "file", m->documents[i].file);
    k3_jsonw_string(writer, "tensor", m->documents[i].tensor);
    k3_jsonw_end_object(writer);
  }
  k3_jsonw_end_array(writer);
}

static void put_group(struct k3_jsonw *writer, const struct k3_manifest *m, const struct k3_manifest_linear *linears, size_t n) {
  struct k3_manifest_shard *modules = k3_calloc(n, sizeof *modules, &writer->error);
  if (!modules)
    return;
  for (size_t i = 0; i < n; i++)
    modules[i] = (struct k3_manifest_shard){.source = linears[i].module, .file = -1};
  k3_jsonw_begin_object(writer, NULL);
  if (linears->block_rows > 1)
    put_pair(writer, "block", linears->block_rows, linears->block_cols);
  if (linears->encoded_from)
    k3_jsonw_string(writer, "from", linears->encoded_from);
  if (linears->block_rows == 1)
    k3_jsonw_u64(writer, "group", linears->block_cols);
  k3_jsonw_begin_array(writer, "modules");
  put_runs(writer, m, modules, n, true);
  k3_jsonw_end_array(writer);
  k3_jsonw_string(writer, "scheme", linears->scheme);
  if (linears->second_scale_divides)
    k3_jsonw_string(writer, "second_scale", "divide");
  else if (strcmp(linears->scheme, "nvfp4") == 0)
    k3_jsonw_string(writer, "second_scale", "multiply");
  k3_jsonw_end_object(writer);
  k3_free(modules);
}

static void put_linears(struct k3_jsonw *writer, const struct k3_manifest *m) {
  struct k3_manifest_linear *linears = sorted(writer, m->linears, m->n_linears, sizeof *linears, compare_linears);
  k3_jsonw_begin_array(writer, "linears");
  for (size_t first = 0, last; linears && first < m->n_linears; first = last) {
    for (last = first + 1; last < m->n_linears && same_description(&linears[first], &linears[last]);)
      last++;
    put_group(writer, m, &linears[first], last - first);
  }
  k3_jsonw_end_array(writer);
  k3_free(linears);
}

static void put_model(struct k3_jsonw *writer, const struct k3_manifest *m) {
  struct k3_error *err = &writer->error;
  const char *family = m->family ? m->family : "generic";
  char *made = !m->model_json && strcmp(family, "k3-dspark") == 0 ? k3_dspark_model_to_json(&m->dspark, err) : NULL;
  const char *text = m->model_json ? m->model_json : made;
  json_t *tree;
  if (text && k3_json_tree_parse(text, strlen(text), K3_IMG01, NULL, &tree, err) == K3_OK) {
    k3_json_tree_write(writer, "model", tree);
    json_decref(tree);
  } else if (!text) {
    k3_jsonw_begin_object(writer, "model");
    k3_jsonw_string(writer, "family", family);
    k3_jsonw_end_object(writer);
  }
  k3_free(made);
}

static void put_names(struct k3_jsonw *writer, const struct k3_manifest *m) {
  struct k3_manifest_pair *aliases = sorted(writer, m->aliases, m->n_aliases, sizeof *aliases, compare_names);
  k3_jsonw_begin_object(writer, "names");
  k3_jsonw_begin_object(writer, "aliases");
  for (size_t i = 0; aliases && i < m->n_aliases; i++)
    k3_jsonw_string(writer, aliases[i].key, aliases[i].value);
  k3_jsonw_end_object(writer);
  k3_jsonw_string(writer, "image_root", m->image_root ? m->image_root : "");
  k3_jsonw_string(writer, "root", m->root ? m->root : "");
  k3_jsonw_end_object(writer);
  k3_free(aliases);
}

static void put_recipe(struct k3_jsonw *writer, const struct k3_manifest *m) {
  k3_jsonw_begin_object(writer, "recipe");
  k3_jsonw_string(writer, "name", m->recipe_name ? m->recipe_name : "");
  if (m->recipe_sha256)
    k3_jsonw_string(writer, "sha256", m->recipe_sha256);
  k3_jsonw_end_object(writer);
}

static void put_sources(struct k3_jsonw *writer, const struct k3_manifest *m) {
  k3_jsonw_begin_array(writer, "sources");
  for (size_t i = 0; i < m->n_sources; i++) {
    const struct k3_manifest_source *source = &m->sources[i];
    k3_jsonw_begin_object(writer, NULL);
    k3_jsonw_string(writer, "file", source->file);
    k3_jsonw_string(writer, "header", source->header_tensor);
    k3_jsonw_string(writer, "of", source->of_target ? "target" : "source");
    if (source->sha256)
      k3_jsonw_string(writer, "sha256", source->sha256);
    k3_jsonw_u64(writer, "size", source->nbytes);
    k3_jsonw_end_object(writer);
  }
  k3_jsonw_end_array(writer);
}

static void put_split(struct k3_jsonw *writer, const struct k3_manifest *m) {
  if (m->tp_size == 0)
    return;
  k3_jsonw_begin_object(writer, "split");
  if (!m->rank_seals)
    k3_jsonw_u64(writer, "rank", m->tp_rank);
  else
    k3_jsonw_begin_array(writer, "ranks");
  for (uint32_t r = 0; m->rank_seals && r < m->tp_size; r++)
    k3_jsonw_string(writer, NULL, m->rank_seals[r]);
  if (m->rank_seals)
    k3_jsonw_end_array(writer);
  k3_jsonw_u64(writer, "tp", m->tp_size);
  k3_jsonw_end_object(writer);
}

static void put_tensors(struct k3_jsonw *writer, const struct k3_manifest *m) {
  static const char *const roles[] = {"core", "optional", "borrowed"}, *const rules[] = {"replicate", "column", "row", "vocab"};
  struct k3_manifest_tensor *tensors = sorted(writer, m->tensors, m->n_tensors, sizeof *tensors, compare_names);
  k3_jsonw_begin_array(writer, "tensors");
  for (size_t i = 0; tensors && i < m->n_tensors; i++) {
    const struct k3_manifest_tensor *tensor = &tensors[i];
    k3_jsonw_begin_object(writer, NULL);
    k3_jsonw_string(writer, "name", tensor->name);
    if (tensor->role != K3_ROLE_CORE)
      k3_jsonw_string(writer, "role", roles[tensor->role]);
    if (tensor->n_shards > 0) {
      struct k3_manifest_shard *shards = k3_calloc(tensor->n_shards, sizeof *shards, &writer->error);
      if (shards && tensor->shards)
        memcpy(shards, tensor->shards, tensor->n_shards * sizeof *shards);
      else if (shards)
        m->list_shards(m->list_ctx, tensor, shards);
      if (shards)
        qsort(shards, tensor->n_shards, sizeof *shards, k3_manifest_compare_shards);
      k3_jsonw_begin_array(writer, "shards");
      if (shards)
        put_runs(writer, m, shards, tensor->n_shards, false);
      k3_jsonw_end_array(writer);
      k3_free(shards);
    }
    if (tensor->tp != K3_TP_REPLICATE)
      k3_jsonw_string(writer, "tp", rules[tensor->tp]);
    k3_jsonw_end_object(writer);
  }
  k3_jsonw_end_array(writer);
  k3_free(tensors);
}

static void put_views(struct k3_jsonw *writer, const struct k3_manifest *m) {
  struct k3_manifest_view *views = sorted(writer, m->views, m->n_views, sizeof *views, compare_names);
  k3_jsonw_begin_object(writer, "views");
  for (size_t v = 0; views && v < m->n_views; v++) {
    k3_jsonw_begin_array(writer, views[v].name);
    for (size_t i = 0; i < views[v].n_shards; i++) {
      const struct k3_manifest_view_shard *shard = &views[v].shards[i];
      k3_jsonw_begin_object(writer, NULL);
      k3_jsonw_u64(writer, "id", shard->id);
      k3_jsonw_u64(writer, "n_rows", shard->n_rows);
      k3_jsonw_u64(writer, "row", shard->row);
      k3_jsonw_string(writer, "tensor", shard->tensor);
      k3_jsonw_end_object(writer);
    }
    k3_jsonw_end_array(writer);
  }
  k3_jsonw_end_object(writer);
  k3_free(views);
}

char *k3_manifest_to_json(const struct k3_manifest *manifest, struct k3_error *err) {
  struct k3_jsonw writer;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_jsonw_begin_object(&writer, NULL);
  k3_jsonw_bool(&writer, "crc", manifest->crc);
  k3_jsonw_bool(&writer, "digests", manifest->digests);
  put_documents(&writer, manifest);
  put_pairs(&writer, "dropped", "tensor", "why", manifest->dropped, manifest->n_dropped);
  k3_jsonw_u64(&writer, "image_version", K3_IMAGE_VERSION);
  put_linears(&writer, manifest);
  put_model(&writer, manifest);
  put_names(&writer, manifest);
  put_recipe(&writer, manifest);
  put_pairs(&writer, "reductions", "producer", "norm", manifest->reductions, manifest->n_reductions);
  put_sources(&writer, manifest);
  put_split(&writer, manifest);
  put_tensors(&writer, manifest);
  k3_jsonw_string(&writer, "tool", manifest->tool ? manifest->tool : "");
  put_views(&writer, manifest);
  k3_jsonw_end_object(&writer);
  return k3_json_tree_take(&writer, err);
}
