#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "cli/inspect_parts.h"
#include "cli/verbs.h"
#include "loader/stats.h"

static const struct k3_cli_help help = {
    .operands = "SRC [PATTERN]",
    .n_min = 1,
    .n_max = 2,
    .about =
        "Shows what a checkpoint or an image holds: files, tensors, shapes, types, places; of an image also its identity, the geometry of the "
        "model,\n"
        "which source tensors each stacked tensor is made of, and the views, which have no bytes of their own. PATTERN (with * and ?) picks tensors.",
    .examples =
        "  k3pack inspect model/                                  every tensor of a checkpoint\n"
        "  k3pack inspect model.k3p 'model.layers.0.*'            one layer of an image, with its shards\n"
        "  k3pack inspect model.k3p --tensor model.context_kv_proj.weight    values and statistics, here of a view",
};

static bool wanted(const char *pattern, const char *name) {
  return !pattern || fnmatch(pattern, name, 0) == 0;
}

static const char *shape_text(char *dst, size_t capacity, const uint64_t *shape, unsigned rank) {
  size_t n = (size_t)snprintf(dst, capacity, "[");
  for (unsigned i = 0; i < rank && n < capacity; i++)
    n += (size_t)snprintf(dst + n, capacity - n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
  if (n < capacity)
    snprintf(dst + n, capacity - n, "]");
  return dst;
}

// "rows 1536..2111"
static void print_rows(uint64_t id, const char *tensor, uint64_t row, uint64_t n_rows) {
  char name[512];
  printf("    shard %llu: %s rows %llu..%llu", (unsigned long long)id, k3_cli_name_text(name, tensor), (unsigned long long)row,
         (unsigned long long)(row + n_rows - (n_rows > 0)));
}

static void print_tensors(const struct k3_cli *cli, const struct k3_ckpt *ckpt, const char *pattern) {
  for (size_t f = 0; f < ckpt->n_files; f++) {
    const struct k3_ckpt_file *file = &ckpt->files[f];
    char name[512], shape[400], size[32];
    printf("%s: %zu tensors, %s, data from byte %llu\n", k3_cli_name_text(name, file->name), file->header.n_tensors,
           k3_cli_size_text(size, file->id.nbytes), (unsigned long long)file->header.data_begin);
    uint64_t n_internal = 0;
    for (size_t i = 0; i < file->header.n_tensors; i++) {
      const struct k3_st_tensor *t = &file->header.tensors[i];
      bool internal = ckpt->image.bytes && t->name[0] == '_' && t->name[1] == '_';
      n_internal += internal;
      if ((internal && !cli->verbose && !pattern) || !wanted(pattern, t->name))
        continue;
      printf("  %-60s %-8s %-18s %12llu bytes at %llu\n", k3_cli_name_text(name, t->name), k3_dtype_name(t->dtype),
             shape_text(shape, sizeof shape, t->shape, t->rank), (unsigned long long)(t->end - t->begin),
             (unsigned long long)(file->header.data_begin + t->begin));
    }
    if (n_internal > 0 && !cli->verbose && !pattern)
      printf("  and %llu of the format's own (manifest, digests, seal, sources, pads; --verbose shows them)\n", (unsigned long long)n_internal);
  }
}

static void print_image(const struct k3_image *image) {
  const struct k3_manifest *m = &image->manifest;
  char name[512], other[512], size[32], hex[2 * K3_SHA256_NBYTES + 1];
  k3_hex(hex, image->identity);
  printf("image of version %d by %s, recipe %s, %llu segment%s %s\n", K3_IMAGE_VERSION, k3_cli_name_text(name, m->tool),
         k3_cli_name_text(other, m->recipe_name), (unsigned long long)image->n_segments, image->n_segments == 1 ? "" : "s",
         m->digests ? "under digests" : "without digests");
  printf("identity %s\n", hex);
  for (size_t i = 0; i < m->n_sources; i++)
    printf("source %s%s, %s%s%s\n", k3_cli_name_text(name, m->sources[i].file), m->sources[i].of_target ? " (target)" : "",
           k3_cli_size_text(size, m->sources[i].nbytes), m->sources[i].sha256 ? ", SHA-256 " : "",
           m->sources[i].sha256 ? k3_cli_name_text(other, m->sources[i].sha256) : "");
  for (size_t i = 0; i < m->n_linears; i++)
    printf("scheme %s: %s%s%s\n", k3_cli_name_text(other, m->linears[i].scheme), k3_cli_name_text(name, m->linears[i].module),
           m->linears[i].encoded_from ? ", encoded from " : "", m->linears[i].encoded_from ? m->linears[i].encoded_from : "");
  for (size_t i = 0; i < m->n_dropped; i++)
    printf("dropped %s: %s\n", k3_cli_name_text(name, m->dropped[i].key), k3_cli_name_text(other, m->dropped[i].value));
}

// The tensor that a shard of a view shows rows of, and how many bytes a row has. The opening of the image has checked that they exist.
static const struct k3_st_tensor *shard_tensor(const struct k3_image *image, const struct k3_manifest_view_shard *shard, uint64_t *row_nbytes) {
  const struct k3_st_tensor *t = k3_st_find(&image->header, shard->tensor, strlen(shard->tensor));
  *row_nbytes = t && t->rank > 0 && t->shape[0] > 0 ? (t->end - t->begin) / t->shape[0] : 0;
  return t;
}

// Type and shape of a view: those of its shards, with all their rows. [rank] numbers to shape.
static unsigned view_shape(const struct k3_image *image, const struct k3_manifest_view *view, uint64_t *shape, enum k3_dtype *dtype) {
  uint64_t row_nbytes, n_rows = 0;
  unsigned rank = 1;
  *dtype = K3_DTYPE_COUNT;
  for (size_t s = 0; s < view->n_shards; s++) {
    const struct k3_st_tensor *t = shard_tensor(image, &view->shards[s], &row_nbytes);
    if (t && t->rank > 0) {
      rank = t->rank;
      *dtype = t->dtype;
      memcpy(shape, t->shape, rank * sizeof *shape);
    }
    n_rows += view->shards[s].n_rows;
  }
  shape[0] = n_rows;
  return rank;
}

static void print_view(const struct k3_image *image, const struct k3_manifest_view *view) {
  char name[512], text[400];
  uint64_t shape[K3_ST_MAX_RANK], row_nbytes;
  enum k3_dtype dtype;
  unsigned rank = view_shape(image, view, shape, &dtype);
  printf("view %s %s %s, zero-copy: no bytes of its own\n", k3_cli_name_text(name, view->name), k3_dtype_name(dtype),
         shape_text(text, sizeof text, shape, rank));
  for (size_t s = 0; s < view->n_shards; s++) {
    const struct k3_manifest_view_shard *shard = &view->shards[s];
    const struct k3_st_tensor *t = shard_tensor(image, shard, &row_nbytes);
    print_rows(shard->id, shard->tensor, shard->row, shard->n_rows);
    if (t)
      printf(", %llu bytes at %llu", (unsigned long long)(shard->n_rows * row_nbytes),
             (unsigned long long)(image->header.data_begin + t->begin + shard->row * row_nbytes));
    putchar('\n');
  }
}

static void print_places(const struct k3_image *image, const char *pattern) {
  const struct k3_manifest *m = &image->manifest;
  char name[512];
  bool any = false;
  for (size_t i = 0; i < m->n_tensors; i++) {
    const struct k3_manifest_tensor *t = &m->tensors[i];
    if (t->n_shards == 0 || !wanted(pattern, t->name))
      continue;
    if (!any)
      printf("made of:\n");
    any = true;
    printf("  %s\n", k3_cli_name_text(name, t->name));
    for (size_t s = 0; s < t->n_shards; s++) {
      print_rows(t->shards[s].id, t->shards[s].source, t->shards[s].row, t->shards[s].n_rows);
      putchar('\n');
    }
  }
  for (size_t i = 0; i < m->n_views; i++)
    if (wanted(pattern, m->views[i].name))
      print_view(image, &m->views[i]);
}

static void json_shape(struct k3_jsonw *json, const char *key, const uint64_t *shape, unsigned rank) {
  k3_jsonw_begin_array(json, key);
  for (unsigned i = 0; i < rank; i++)
    k3_jsonw_u64(json, NULL, shape[i]);
  k3_jsonw_end_array(json);
}

static void json_rows(struct k3_jsonw *json, uint64_t id, const char *source, uint64_t row, uint64_t n_rows) {
  k3_jsonw_begin_object(json, NULL);
  k3_jsonw_u64(json, "id", id);
  k3_jsonw_string(json, "source", source);
  k3_jsonw_u64(json, "row", row);
  k3_jsonw_u64(json, "n_rows", n_rows);
  k3_jsonw_end_object(json);
}

static void json_image(struct k3_jsonw *json, const struct k3_image *image, const char *pattern) {
  const struct k3_manifest *m = &image->manifest;
  char hex[2 * K3_SHA256_NBYTES + 1];
  k3_hex(hex, image->identity);
  k3_jsonw_begin_object(json, "image");
  k3_jsonw_u64(json, "image_version", K3_IMAGE_VERSION);
  k3_jsonw_string(json, "tool", m->tool);
  k3_jsonw_string(json, "recipe", m->recipe_name);
  k3_jsonw_string(json, "identity", hex);
  k3_jsonw_string(json, "family", m->family);
  k3_jsonw_bool(json, "digests", m->digests);
  k3_jsonw_bool(json, "crc", m->crc);
  k3_jsonw_u64(json, "segments", image->n_segments);
  k3_jsonw_begin_array(json, "sources");
  for (size_t i = 0; i < m->n_sources; i++) {
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "file", m->sources[i].file);
    k3_jsonw_u64(json, "nbytes", m->sources[i].nbytes);
    k3_jsonw_string(json, "of", m->sources[i].of_target ? "target" : "source");
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_begin_array(json, "stacked");
  for (size_t i = 0; i < m->n_tensors; i++) {
    const struct k3_manifest_tensor *t = &m->tensors[i];
    if (t->n_shards == 0 || !wanted(pattern, t->name))
      continue;
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "name", t->name);
    k3_jsonw_begin_array(json, "shards");
    for (size_t s = 0; s < t->n_shards; s++)
      json_rows(json, t->shards[s].id, t->shards[s].source, t->shards[s].row, t->shards[s].n_rows);
    k3_jsonw_end_array(json);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_begin_array(json, "views");
  for (size_t i = 0; i < m->n_views; i++) {
    if (!wanted(pattern, m->views[i].name))
      continue;
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "name", m->views[i].name);
    uint64_t shape[K3_ST_MAX_RANK], row_nbytes;
    enum k3_dtype dtype;
    unsigned rank = view_shape(image, &m->views[i], shape, &dtype);
    k3_jsonw_string(json, "dtype", k3_dtype_name(dtype));
    json_shape(json, "shape", shape, rank);
    k3_jsonw_u64(json, "nbytes", 0);
    k3_jsonw_begin_array(json, "shards");
    for (size_t s = 0; s < m->views[i].n_shards; s++) {
      const struct k3_manifest_view_shard *shard = &m->views[i].shards[s];
      const struct k3_st_tensor *t = shard_tensor(image, shard, &row_nbytes);
      k3_jsonw_begin_object(json, NULL);
      k3_jsonw_u64(json, "id", shard->id);
      k3_jsonw_string(json, "tensor", shard->tensor);
      k3_jsonw_u64(json, "row", shard->row);
      k3_jsonw_u64(json, "n_rows", shard->n_rows);
      if (t) {
        k3_jsonw_u64(json, "shown_nbytes", shard->n_rows * row_nbytes);
        k3_jsonw_u64(json, "offset", image->header.data_begin + t->begin + shard->row * row_nbytes);
      }
      k3_jsonw_end_object(json);
    }
    k3_jsonw_end_array(json);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_begin_array(json, "linears");
  for (size_t i = 0; i < m->n_linears; i++) {
    if (!wanted(pattern, m->linears[i].module))
      continue;
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "module", m->linears[i].module);
    k3_jsonw_string(json, "scheme", m->linears[i].scheme);
    if (m->linears[i].encoded_from)
      k3_jsonw_string(json, "encoded_from", m->linears[i].encoded_from);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_begin_array(json, "dropped");
  for (size_t i = 0; i < m->n_dropped; i++) {
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "tensor", m->dropped[i].key);
    k3_jsonw_string(json, "why", m->dropped[i].value);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_end_object(json);
}

static int report_json(struct k3_cli *cli, const struct k3_ckpt *ckpt, const char *pattern, const struct k3_findings *findings, int exit_code) {
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_string(&json, "source", ckpt->source);
  k3_jsonw_string(&json, "kind", ckpt->image.bytes ? "image" : ckpt->is_folder ? "folder" : "file");
  k3_jsonw_bool(&json, "index", ckpt->has_index);
  k3_jsonw_u64(&json, "tensors", ckpt->n_tensors);
  k3_jsonw_u64(&json, "tensors_nbytes", ckpt->tensors_nbytes);
  k3_jsonw_begin_array(&json, "files");
  for (size_t f = 0; f < ckpt->n_files; f++) {
    const struct k3_ckpt_file *file = &ckpt->files[f];
    k3_jsonw_begin_object(&json, NULL);
    k3_jsonw_string(&json, "name", file->name);
    k3_jsonw_u64(&json, "nbytes", file->id.nbytes);
    k3_jsonw_u64(&json, "data_begin", file->header.data_begin);
    k3_jsonw_begin_object(&json, "metadata");
    for (size_t i = 0; i < file->header.n_metadata; i++)
      k3_jsonw_string(&json, file->header.metadata[i].key, file->header.metadata[i].value);
    k3_jsonw_end_object(&json);
    k3_jsonw_begin_array(&json, "tensors");
    for (size_t i = 0; i < file->header.n_tensors; i++) {
      const struct k3_st_tensor *t = &file->header.tensors[i];
      if (!wanted(pattern, t->name))
        continue;
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_string(&json, "name", t->name);
      k3_jsonw_string(&json, "dtype", k3_dtype_name(t->dtype));
      json_shape(&json, "shape", t->shape, t->rank);
      k3_jsonw_u64(&json, "nbytes", t->end - t->begin);
      k3_jsonw_u64(&json, "offset", file->header.data_begin + t->begin);
      k3_jsonw_end_object(&json);
    }
    k3_jsonw_end_array(&json);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  struct k3_dspark_model model;
  if (k3_inspect_model(ckpt, &model))
    k3_inspect_json_model(&json, &model);
  if (ckpt->image.bytes)
    json_image(&json, &ckpt->image, pattern);
  k3_cli_json_findings(&json, findings);
  return k3_cli_json_end(cli, &json, exit_code);
}

static int report_tensor(struct k3_cli *cli, const struct k3_ckpt *ckpt, const char *name, uint64_t n_first) {
  static struct k3_stats stats;
  struct k3_error err = {0};
  if (k3_stats_of(ckpt, name, n_first, &cli->progress, &stats, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  char text[512], shape[400], size[32];
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_string(&json, "name", name);
    k3_jsonw_string(&json, "dtype", k3_dtype_name(stats.dtype));
    json_shape(&json, "shape", stats.shape, stats.rank);
    k3_jsonw_bool(&json, "view", stats.is_view);
    k3_jsonw_u64(&json, "nbytes", stats.is_view ? 0 : stats.nbytes);
    k3_jsonw_u64(&json, "elements", stats.n_elems);
    if (stats.numeric) {
      k3_jsonw_double(&json, "min", stats.min);
      k3_jsonw_double(&json, "max", stats.max);
      k3_jsonw_double(&json, "max_abs", stats.max_abs);
      k3_jsonw_double(&json, "mean", stats.mean);
      k3_jsonw_double(&json, "std", stats.std);
      k3_jsonw_u64(&json, "zeros", stats.n_zero);
      k3_jsonw_u64(&json, "nan", stats.n_nan);
      k3_jsonw_u64(&json, "inf", stats.n_inf);
      k3_jsonw_begin_array(&json, "first");
      for (size_t i = 0; i < stats.n_first; i++)
        k3_jsonw_double(&json, NULL, stats.first[i]);
      k3_jsonw_end_array(&json);
    }
    return k3_cli_json_end(cli, &json, 0);
  }
  printf("%s: %s %s, %llu elements, %s\n", k3_cli_name_text(text, name), k3_dtype_name(stats.dtype),
         shape_text(shape, sizeof shape, stats.shape, stats.rank), (unsigned long long)stats.n_elems,
         stats.is_view ? "a view without bytes of its own" : k3_cli_size_text(size, stats.nbytes));
  if (!stats.numeric) {
    printf("elements of this type are not shown as numbers\n");
    return 0;
  }
  printf("min %.9g, max %.9g, max |x| %.9g, mean %.9g, standard deviation %.9g\n", stats.min, stats.max, stats.max_abs, stats.mean, stats.std);
  printf("zeros %llu, NaN %llu, Inf %llu\n", (unsigned long long)stats.n_zero, (unsigned long long)stats.n_nan, (unsigned long long)stats.n_inf);
  for (size_t i = 0; i < stats.n_first; i++)
    printf("%s%.9g%s", i % 8 == 0 ? "  " : " ", stats.first[i], i % 8 == 7 || i + 1 == stats.n_first ? "\n" : "");
  return 0;
}

int k3_cmd_inspect(struct k3_cli *cli, int argc, char **argv) {
  const char *tensor = NULL;
  uint64_t n_first = 16;
  struct k3_inspect_parallel parallel = {.tp = 1, .pp = 1};
  bool reductions = false;
  const struct k3_option options[] = {
      {"tensor", 't', K3_OPT_TEXT, "NAME", "statistics and the first values of one tensor or view", &tensor},
      {"count", 'n', K3_OPT_U64, "N", "how many values --tensor prints (default 16, at most 4096)", &n_first},
      {"reductions", 0, K3_OPT_FLAG, NULL, "where partial sums are completed under --tp and --pp", &reductions},
      {"tp", 0, K3_OPT_U64, "N", "tensor-parallel ranks (default 1)", &parallel.tp},
      {"pp", 0, K3_OPT_U64, "N", "pipeline stages (default 1)", &parallel.pp},
      {"sequence-parallel", 0, K3_OPT_FLAG, NULL, "ask for experts on each rank's own rows", &parallel.sequence_parallel},
      {"taps", 0, K3_OPT_TEXT, "LIST", "streams that are handed out, after so many layers", &parallel.taps},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  const char *pattern = cli->n_operands > 1 ? cli->operands[1] : NULL;
  if (tensor && pattern)
    return k3_cli_usage(cli, "--tensor and a pattern exclude each other");
  struct k3_ckpt ckpt = {0};
  struct k3_findings findings = {0};
  struct k3_error err = {0};
  if (k3_ckpt_open(cli->operands[0], NULL, &ckpt, &findings, &err) != K3_OK) {
    exit_code = k3_cli_fail(cli, &err);
    goto out;
  }
  exit_code = findings.n_errors > 0 ? k3_status_exit_code(K3_BAD_INPUT) : 0;
  k3_cli_print_findings(cli, &findings);
  if (reductions) {
    int code = k3_inspect_reductions(cli, &ckpt, &parallel);
    exit_code = code ? code : exit_code;
  } else if (tensor) {
    int code = report_tensor(cli, &ckpt, tensor, n_first);
    exit_code = code ? code : exit_code;
  } else if (cli->json) {
    exit_code = report_json(cli, &ckpt, pattern, &findings, exit_code);
  } else if (!cli->quiet) {
    char size[32];
    struct k3_dspark_model model;
    if (ckpt.image.bytes && !pattern)
      print_image(&ckpt.image);
    if (!pattern && k3_inspect_model(&ckpt, &model))
      k3_inspect_print_model(&model);
    print_tensors(cli, &ckpt, pattern);
    if (ckpt.image.bytes)
      print_places(&ckpt.image, pattern);
    printf("%llu tensors in %zu file%s, %s\n", (unsigned long long)ckpt.n_tensors, ckpt.n_files, ckpt.n_files == 1 ? "" : "s",
           k3_cli_size_text(size, ckpt.tensors_nbytes));
  }
out:
  k3_findings_free(&findings);
  k3_ckpt_close(&ckpt);
  return exit_code;
}
