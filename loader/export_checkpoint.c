// An image as a quantised checkpoint: the tensors under the names of the source, unfused, in the dialect that an engine reads.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_write.h"
#include "formats/quant_config_write.h"
#include "loader/export_parts.h"

// A tensor of an output file.
struct out_tensor {
  const char *name;
  uint64_t shape[K3_ST_MAX_RANK];
  uint64_t from, nbytes;  // file offset in the image
  float value;            // of a scalar that is computed instead
  uint8_t dtype, rank;
  bool computed;
};

struct names {
  const char **items;
  size_t n_items, capacity;
};

struct checkpoint {
  struct k3_export e;
  enum k3_quant_dialect dialect;
  const struct k3_manifest_linear *scheme;  // of the first linear layer; all have it
  bool stored_inputs;
  struct names plain, quantised;  // modules of the source with a weight of two dimensions
  struct names ignore;
  struct out_tensor *tensors;  // of the file at hand
  size_t n_tensors, capacity;
  struct k3_jsonw index;
  uint64_t total_nbytes;
  struct k3_export_result *result;
  struct k3_arena arena;
};

static enum k3_status add_name(struct checkpoint *c, struct names *names, const char *text, size_t n, struct k3_error *err) {
  K3_TRY(k3_grow(&names->items, &names->capacity, names->n_items + 1, sizeof *names->items, err));
  const char *copy = k3_arena_strndup(&c->arena, text, n, err);
  if (!copy)
    return K3_NO_MEMORY;
  names->items[names->n_items++] = copy;
  return K3_OK;
}

static bool ends_with(const char *text, const char *end) {
  size_t n = strlen(text), n_end = strlen(end);
  return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

// ---- one scheme for all ----

static enum k3_status find_scheme(struct checkpoint *c, struct k3_error *err) {
  const struct k3_manifest *m = &c->e.image.manifest;
  bool modelopt = c->dialect == K3_DIALECT_MODELOPT;
  if (m->n_linears == 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, c->e.path, NULL, "--format original", "the image holds no quantised weights");
  c->scheme = &m->linears[0];
  for (size_t i = 1; i < m->n_linears; i++) {
    const struct k3_manifest_linear *linear = &m->linears[i];
    if (strcmp(linear->scheme, c->scheme->scheme) != 0 || linear->block_rows != c->scheme->block_rows || linear->block_cols != c->scheme->block_cols)
      return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, c->e.path, linear->module, "one scheme for all quantised weights, or --format original",
                     "scheme %s beside %s", linear->scheme, c->scheme->scheme);
  }
  bool odd_block = strcmp(c->scheme->scheme, "fp8-block") == 0 && (c->scheme->block_rows != 128 || c->scheme->block_cols != 128);
  if (odd_block || !k3_quant_statement_possible(c->dialect, c->scheme->scheme))
    return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, c->e.path, NULL,
                   modelopt ? "nvfp4 and fp8 per channel or tensor (modelopt), or --format compressed-tensors" : "nvfp4, mxfp4, mxfp8 and fp8",
                   "the scheme %s is not written as a %s checkpoint", c->scheme->scheme, modelopt ? "modelopt" : "compressed-tensors");
  return K3_OK;
}

// ---- tensors ----

// The parameter's spelling in the dialect, its shape there, and whether its value is inverted.
static const char *spelling(const struct checkpoint *c, const struct k3_manifest_linear *linear, const char *param, struct out_tensor *out) {
  bool modelopt = c->dialect == K3_DIALECT_MODELOPT, other_direction = linear->second_scale_divides == modelopt;
  bool second = strcmp(param, "weight_global_scale") == 0, input = strcmp(param, "input_global_scale") == 0 || strcmp(param, "input_scale") == 0;
  bool nvfp4 = strcmp(linear->scheme, "nvfp4") == 0;
  if (strcmp(param, "weight_packed") == 0)
    return modelopt ? "weight" : "weight_packed";
  if (strcmp(param, "weight_scale") == 0) {
    if (modelopt && strcmp(linear->scheme, "fp8-channel") == 0)
      out->rank = 1;  // [N, 1] -> [N]
    if (strcmp(linear->scheme, "fp8-tensor") == 0)
      out->rank = modelopt ? 0 : 1;
    return "weight_scale";
  }
  if (!second && !input)
    return param;
  out->rank = modelopt ? 0 : 1;
  out->shape[0] = 1;
  out->computed = nvfp4 && other_direction;
  if (second)
    return modelopt ? "weight_scale_2" : "weight_global_scale";
  return nvfp4 && !modelopt ? "input_global_scale" : "input_scale";
}

static bool is_power_of_two(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits & 0x007FFFFFu) == 0;
}

// One image tensor's rows, as a tensor of the checkpoint.
static enum k3_status add_rows(struct checkpoint *c, const struct k3_st_tensor *source, const struct k3_st_tensor *stored, uint64_t row,
                               uint64_t n_rows, struct k3_error *err) {
  const struct k3_export *e = &c->e;
  const char *dot = strrchr(stored->name, '.'), *source_dot = strrchr(source->name, '.');
  char module[K3_ST_MAX_NAME_NBYTES + 64], name[K3_ST_MAX_NAME_NBYTES + 64];
  snprintf(module, sizeof module, "%.*s", (int)(dot ? dot - stored->name : 0), stored->name);
  const struct k3_manifest_linear *linear = k3_manifest_linear_of(&e->image.manifest, module);
  uint64_t all_rows = stored->rank ? stored->shape[0] : 1, row_nbytes = all_rows ? (stored->end - stored->begin) / all_rows : 0;
  if (row > all_rows || n_rows > all_rows - row)
    return k3_fail(err, K3_BAD_INPUT, K3_IMG01, e->path, stored->name, NULL, "the manifest names rows outside this tensor");
  struct out_tensor out = {
      .name = source->name, .from = e->image.header.data_begin + stored->begin + row * row_nbytes, .nbytes = n_rows * row_nbytes};
  const struct k3_st_tensor *like = linear && source_dot ? stored : source;
  out.dtype = like->dtype;
  out.rank = like->rank;
  memcpy(out.shape, like->shape, like->rank * sizeof *out.shape);
  bool is_weight = source_dot && (strcmp(source_dot, ".weight") == 0 || strcmp(source_dot, ".weight_packed") == 0);
  if (linear && source_dot) {
    out.shape[0] = n_rows;
    const char *param = spelling(c, linear, dot + 1, &out);
    size_t n = (size_t)snprintf(name, sizeof name, "%.*s.%s", (int)(source_dot - source->name), source->name, param);
    out.name = k3_arena_strndup(&c->arena, name, n, err);
    if (!out.name)
      return K3_NO_MEMORY;
    c->stored_inputs |= strncmp(param, "input_", 6) == 0;
    if (is_weight && (strcmp(dot, ".weight") == 0 || strcmp(dot, ".weight_packed") == 0))
      K3_TRY(add_name(c, &c->quantised, source->name, (size_t)(source_dot - source->name), err));
  } else if (is_weight && source->rank == 2) {
    K3_TRY(add_name(c, &c->plain, source->name, (size_t)(source_dot - source->name), err));
  }
  if (out.computed) {
    if (stored->dtype != K3_DTYPE_F32 || out.nbytes != 4)
      return k3_fail(err, K3_UNSUPPORTED, K3_TEN12, e->path, stored->name, "a second scale in F32",
                     "a second scale of another type cannot be inverted");
    float value = k3_load_f32(e->image.bytes + out.from, 0);
    out.value = 1.0f / value;
    c->result->n_rounded += !is_power_of_two(value);
  }
  c->total_nbytes += out.nbytes;
  K3_TRY(k3_grow(&c->tensors, &c->capacity, c->n_tensors + 1, sizeof *c->tensors, err));
  c->tensors[c->n_tensors++] = out;
  return K3_OK;
}

static enum k3_status add_source(struct checkpoint *c, const struct k3_st_tensor *source, struct k3_error *err) {
  const struct k3_export *e = &c->e;
  // What was dropped may have been replaced by the target's, under the same name in the image.
  for (size_t i = 0; i < e->image.manifest.n_dropped; i++) {
    if (strcmp(e->image.manifest.dropped[i].key, source->name) == 0) {
      c->result->n_left_out++;
      return K3_OK;
    }
  }
  size_t n;
  const struct k3_export_located *located = k3_export_find(e, source->name, &n);
  for (size_t i = 0; i < n; i++)
    K3_TRY(add_rows(c, source, located[i].tensor, located[i].row, located[i].n_rows, err));
  if (n > 0)
    return K3_OK;
  char name[2 * K3_ST_MAX_NAME_NBYTES];
  size_t n_name = k3_manifest_copied_name(&e->image.manifest, source->name, name, sizeof name);
  const struct k3_st_tensor *stored = n_name ? k3_st_find(&e->image.header, name, n_name) : NULL;
  if (!stored || stored->end - stored->begin != source->end - source->begin)
    return k3_fail(err, K3_UNSUPPORTED, K3_IMG01, e->path, source->name, "an image that holds every tensor of its source",
                   "the image does not hold this source tensor");
  return add_rows(c, source, stored, 0, stored->rank ? stored->shape[0] : 1, err);
}

// Wide elements first, so that everything is aligned to its width; then by name.
static int compare_out(const void *left, const void *right) {
  const struct out_tensor *a = left, *b = right;
  unsigned wa = k3_dtype_bits((enum k3_dtype)a->dtype), wb = k3_dtype_bits((enum k3_dtype)b->dtype);
  return wa != wb ? (wa > wb ? -1 : 1) : strcmp(a->name, b->name);
}

struct text {
  char *bytes;
  size_t n_bytes, capacity;
};

static enum k3_status append(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct text *text = ctx;
  K3_TRY(k3_grow(&text->bytes, &text->capacity, text->n_bytes + nbytes, 1, err));
  memcpy(text->bytes + text->n_bytes, bytes, nbytes);
  text->n_bytes += nbytes;
  return K3_OK;
}

static enum k3_status write_header(const struct checkpoint *c, k3_st_sink_fn sink, void *ctx, uint64_t padded_nbytes, uint64_t *h,
                                   struct k3_error *err) {
  struct k3_st_writer writer;
  uint64_t at = 0;
  k3_st_write_begin(&writer, sink, ctx);
  K3_TRY(k3_st_write_metadata(&writer, "format", "pt", err));
  for (size_t i = 0; i < c->n_tensors; at += c->tensors[i++].nbytes)
    K3_TRY(k3_st_write_tensor(&writer, c->tensors[i].name, (enum k3_dtype)c->tensors[i].dtype, c->tensors[i].shape, c->tensors[i].rank, at,
                              at + c->tensors[i].nbytes, err));
  return k3_st_write_end(&writer, padded_nbytes, h, err);
}

// Creates the newest output with its header, notes the copies and writes what is computed.
static enum k3_status write_weights(struct checkpoint *c, const char *file, struct k3_error *err) {
  struct text text = {0};
  uint64_t h, nbytes = 0, at;
  enum k3_status status = write_header(c, NULL, NULL, 0, &h, err);
  h = (h + 7) / 8 * 8;
  uint8_t prefix[K3_ST_PREFIX_NBYTES];
  for (int i = 0; i < K3_ST_PREFIX_NBYTES; i++)
    prefix[i] = (uint8_t)(h >> 8 * i);
  for (size_t i = 0; i < c->n_tensors; i++)
    nbytes += c->tensors[i].nbytes;
  at = sizeof prefix + h;
  if (status == K3_OK)
    status = append(&text, prefix, sizeof prefix, err);
  if (status == K3_OK)
    status = write_header(c, append, &text, h, &h, err);
  if (status == K3_OK)
    status = k3_export_output(&c->e, file, at + nbytes, err);
  const struct k3_output *output = &c->e.outputs[c->e.n_outputs ? c->e.n_outputs - 1 : 0];
  if (status == K3_OK)
    status = k3_pwrite_full(output->fd, text.bytes, text.n_bytes, 0, output->final_path, err);
  c->result->nbytes += text.n_bytes;
  for (size_t i = 0; status == K3_OK && i < c->n_tensors; at += c->tensors[i++].nbytes) {
    const struct out_tensor *tensor = &c->tensors[i];
    uint32_t bits;
    memcpy(&bits, &tensor->value, sizeof bits);
    const uint8_t value[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16), (uint8_t)(bits >> 24)};
    if (tensor->computed)
      status = k3_pwrite_full(output->fd, value, sizeof value, at, output->final_path, err);
    else
      status = k3_export_add_copy(&c->e, tensor->from, at, tensor->nbytes, err);
    k3_jsonw_string(&c->index, tensor->name, file);
  }
  k3_free(text.bytes);
  return status;
}

static enum k3_status write_file(struct checkpoint *c, const struct k3_manifest_source *source, struct k3_error *err) {
  const struct k3_st_tensor *stored;
  const unsigned char *bytes = k3_image_data(&c->e.image, source->header_tensor, &stored);
  if (!bytes || stored->end - stored->begin < K3_ST_PREFIX_NBYTES)
    return k3_fail(err, K3_BAD_INPUT, K3_IMG01, c->e.path, source->header_tensor, NULL, "the header of %s is not in the image", source->file);
  struct k3_st_header header;
  K3_TRY(k3_st_parse((const char *)bytes + K3_ST_PREFIX_NBYTES, stored->end - stored->begin - K3_ST_PREFIX_NBYTES, source->nbytes, source->file,
                     &header, err));
  enum k3_status status = K3_OK;
  c->n_tensors = 0;
  for (size_t i = 0; status == K3_OK && i < header.n_tensors; i++)
    status = add_source(c, &header.tensors[i], err);
  if (status == K3_OK && c->n_tensors > 1)
    qsort(c->tensors, c->n_tensors, sizeof *c->tensors, compare_out);
  if (status == K3_OK)
    status = write_weights(c, source->file, err);
  k3_st_header_free(&header);
  return status;
}

// ---- documents ----

// What follows the last number in a module's name ("layers.3.self_attn.o_proj": "self_attn.o_proj"), or the name without its root: drafters run under
// other layer numbers and prefixes than they are stored with.
static const char *free_of_numbers(const struct checkpoint *c, const char *module) {
  const char *root = c->e.image.manifest.root, *after = root && strncmp(module, root, strlen(root)) == 0 ? module + strlen(root) : module;
  for (const char *at = module; at; at = strchr(at, '.')) {
    at += *at == '.';
    size_t n_digits = strspn(at, "0123456789");
    if (n_digits > 0 && at[n_digits] == '.')
      after = at + n_digits + 1;
  }
  return after;
}

// The dialect's pattern for names that end so.
static size_t pattern_of(const struct checkpoint *c, const char *suffix, char *dst, size_t capacity) {
  bool modelopt = c->dialect == K3_DIALECT_MODELOPT, head = strcmp(suffix, "lm_head") == 0;  // ModelOpt's own files name it without a star
  size_t n = (size_t)snprintf(dst, capacity, "%s", !modelopt ? "re:.*" : head ? "" : "*");
  for (; *suffix && n + 3 < capacity; suffix++) {
    if (!modelopt && strchr(".^$*+?()[]{}|\\", *suffix))
      dst[n++] = '\\';
    dst[n++] = *suffix;
  }
  if (!modelopt)
    dst[n++] = '$';
  dst[n] = '\0';
  return n;
}

static bool is_ignored(const struct checkpoint *c, const char *pattern) {
  for (size_t i = 0; i < c->ignore.n_items; i++) {
    if (strcmp(c->ignore.items[i], pattern) == 0)
      return true;
  }
  return false;
}

static bool any_ends_with(const struct names *names, const char *suffix) {
  for (size_t i = 0; i < names->n_items; i++) {
    if (ends_with(names->items[i], suffix))
      return true;
  }
  return false;
}

static enum k3_status list_ignored(struct checkpoint *c, struct k3_error *err) {
  char pattern[2 * K3_ST_MAX_NAME_NBYTES + 16];
  // The head that a drafter borrows is not in its checkpoint, and yet one of its modules.
  if (!any_ends_with(&c->quantised, "lm_head"))
    K3_TRY(add_name(c, &c->ignore, pattern, pattern_of(c, "lm_head", pattern, sizeof pattern), err));
  for (size_t i = 0; i < c->plain.n_items; i++) {
    const char *module = c->plain.items[i], *suffix = free_of_numbers(c, module);
    size_t n = pattern_of(c, suffix, pattern, sizeof pattern);
    if (is_ignored(c, pattern))
      continue;  // like other layers' module, for which it was looked up
    if (any_ends_with(&c->quantised, suffix))
      n = pattern_of(c, module, pattern, sizeof pattern);  // only this one, then
    K3_TRY(add_name(c, &c->ignore, pattern, n, err));
  }
  return K3_OK;
}

static enum k3_status write_text(struct checkpoint *c, const char *name, char *text, struct k3_error *err) {
  if (!text)
    return err && err->status != K3_OK ? err->status : K3_NO_MEMORY;
  size_t n = strlen(text);
  text[n++] = '\n';  // in the place of the terminator
  enum k3_status status = k3_export_output(&c->e, name, n, err);
  if (status == K3_OK)
    status = k3_pwrite_full(c->e.outputs[c->e.n_outputs - 1].fd, text, n, 0, c->e.outputs[c->e.n_outputs - 1].final_path, err);
  c->result->nbytes += n;
  k3_free(text);
  return status;
}

static enum k3_status write_documents(struct checkpoint *c, size_t n_files, struct k3_error *err) {
  const struct k3_manifest *m = &c->e.image.manifest;
  const struct k3_quant_statement statement = {c->dialect, c->scheme->scheme, c->stored_inputs, c->ignore.items, c->ignore.n_items};
  const char *config = NULL;
  size_t config_nbytes = 0;
  for (size_t d = 0; d < m->n_documents; d++) {
    const struct k3_st_tensor *stored;
    const char *file = m->documents[d].file, *bytes = k3_image_data(&c->e.image, m->documents[d].tensor, &stored);
    if (!bytes)
      return k3_fail(err, K3_BAD_INPUT, K3_IMG01, c->e.path, m->documents[d].tensor, NULL, "%s is not in the image", file);
    if (strcmp(file, "config.json") == 0) {
      config = bytes;
      config_nbytes = (size_t)(stored->end - stored->begin);
    } else if (strcmp(file, "hf_quant_config.json") != 0 && !ends_with(file, ".index.json")) {
      K3_TRY(k3_export_output(&c->e, file, stored->end - stored->begin, err));
      K3_TRY(k3_export_add_copy(&c->e, c->e.image.header.data_begin + stored->begin, 0, stored->end - stored->begin, err));
    }
  }
  k3_jsonw_end_object(&c->index);
  k3_jsonw_begin_object(&c->index, "metadata");  // behind the names: only now is the sum known
  k3_jsonw_u64(&c->index, "total_size", c->total_nbytes);
  k3_jsonw_end_object(&c->index);
  k3_jsonw_end_object(&c->index);
  K3_TRY(k3_jsonw_finish(&c->index, err));
  if (n_files > 1) {
    K3_TRY(k3_export_output(&c->e, "model.safetensors.index.json", c->index.n_bytes, err));
    K3_TRY(
        k3_pwrite_full(c->e.outputs[c->e.n_outputs - 1].fd, c->index.bytes, c->index.n_bytes, 0, c->e.outputs[c->e.n_outputs - 1].final_path, err));
    c->result->nbytes += c->index.n_bytes;
  }
  if (c->dialect == K3_DIALECT_MODELOPT)
    K3_TRY(write_text(c, "hf_quant_config.json", k3_hf_quant_config_text(&statement, err), err));
  return write_text(c, "config.json", k3_quant_config_text(config, config_nbytes, &statement, err), err);
}

static enum k3_status write_all(struct checkpoint *c, struct k3_error *err) {
  const struct k3_manifest *m = &c->e.image.manifest;
  size_t n_files = 0;
  K3_TRY(find_scheme(c, err));
  K3_TRY(k3_export_begin(&c->e, m->n_sources + m->n_documents + 3, err));
  k3_jsonw_begin_object(&c->index, NULL);
  k3_jsonw_begin_object(&c->index, "weight_map");
  for (size_t s = 0; s < m->n_sources; s++) {
    if (m->sources[s].of_target)
      continue;
    K3_TRY(write_file(c, &m->sources[s], err));
    n_files++;
  }
  if (n_files == 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, c->e.path, NULL, "an image that k3pack converted from a checkpoint",
                   "no source file is recorded");
  K3_TRY(list_ignored(c, err));
  return write_documents(c, n_files, err);
}

enum k3_status k3_export_checkpoint(const char *image, const char *folder, enum k3_quant_dialect dialect, const struct k3_export_options *options,
                                    struct k3_export_result *result, struct k3_error *err) {
  struct checkpoint c = {.e = {.path = image, .fd = -1, .progress = options->progress, .folder = folder, .replace = options->replace},
                         .dialect = dialect,
                         .result = result};
  *result = (struct k3_export_result){0};
  k3_jsonw_open(&c.index, true, NULL, NULL);
  enum k3_status status = k3_export_open(&c.e, err);
  if (status == K3_OK)
    status = write_all(&c, err);
  if (status == K3_OK)
    status = k3_export_finish(&c.e, options->n_threads, result, err);
  for (size_t i = 0; i < c.e.n_copies; i++)
    result->nbytes += c.e.copies[i].nbytes;
  k3_export_close(&c.e, status);
  k3_jsonw_close(&c.index);
  k3_free(c.plain.items);
  k3_free(c.quantised.items);
  k3_free(c.ignore.items);
  k3_free(c.tensors);
  k3_arena_free(&c.arena);
  return status;
}
