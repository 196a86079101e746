#include "formats/index.h"

#include <string.h>

#include "base/alloc.h"
#include "base/name_set.h"
#include "formats/json_pull.h"
#include "formats/lfs.h"

struct index_parser {
  struct k3_json json;
  struct k3_name_set names;  // by the offset of the name in the text
  char *tensor, *file;       // terminated copies for the callback
  size_t tensor_capacity, file_capacity;
  k3_index_fn fn;
  void *ctx;
  struct k3_index_summary *summary;
  bool doubles_known;  // no need to look for names that occur twice
};

static enum k3_status fail(struct index_parser *parser, const char *tensor, const char *allowed, const char *found) {
  return k3_fail(parser->json.err, K3_BAD_INPUT, K3_IDX10, parser->json.file, tensor, allowed, "%s", found);
}

static bool name_at(const void *owner, uint32_t offset, const char *name, size_t nbytes) {
  const struct k3_json *json = owner;
  return k3_json_raw_equal(json->begin + offset, json->end, name, nbytes);
}

static enum k3_status copy_text(struct k3_json_text text, char **copy, size_t *capacity, struct k3_error *err) {
  K3_TRY(k3_grow(copy, capacity, text.nbytes + 1, 1, err));
  memcpy(*copy, text.bytes, text.nbytes);
  (*copy)[text.nbytes] = '\0';
  return K3_OK;
}

static enum k3_status parse_weight_map(struct index_parser *parser) {
  struct k3_json *json = &parser->json;
  if (k3_json_peek(json) != '{') {
    K3_TRY(k3_json_skip(json));
    return fail(parser, "weight_map", "an object of tensor names and file names", "weight_map is no object");
  }
  K3_TRY(k3_json_enter_object(json));
  for (;;) {
    bool more;
    struct k3_json_text key, value;
    K3_TRY(k3_json_next_key(json, &more, &key));
    if (!more)
      return K3_OK;
    K3_TRY(copy_text(key, &parser->tensor, &parser->tensor_capacity, json->err));
    if (memchr(key.bytes, '\0', key.nbytes) || key.nbytes == 0)
      return fail(parser, parser->tensor, "a name without NUL", "a tensor name in weight_map is empty or holds a NUL");
    uint32_t earlier = K3_NAME_NONE;
    if (!parser->doubles_known)
      K3_TRY(k3_name_set_add(&parser->names, name_at, json, key.bytes, key.nbytes, (uint32_t)(json->raw - json->begin), &earlier, json->err));
    if (earlier != K3_NAME_NONE)
      return fail(parser, parser->tensor, "each tensor once", "weight_map lists this tensor twice");
    if (k3_json_peek(json) != '"') {
      K3_TRY(k3_json_skip(json));
      return fail(parser, parser->tensor, "a file name", "the value in weight_map is no text");
    }
    K3_TRY(k3_json_string(json, &value));
    K3_TRY(copy_text(value, &parser->file, &parser->file_capacity, json->err));
    parser->summary->n_entries++;
    K3_TRY(parser->fn(parser->ctx, parser->tensor, key.nbytes, parser->file, value.nbytes, json->err));
  }
}

static enum k3_status parse_total_size(struct index_parser *parser) {
  struct k3_json *json = &parser->json;
  struct k3_error odd = {0}, *err = json->err;
  json->err = &odd;
  enum k3_status status = k3_json_u64(json, K3_IDX07, "metadata.total_size", &parser->summary->total_size);
  json->err = err;
  if (status == K3_OK) {
    parser->summary->has_total_size = true;
    return K3_OK;
  }
  if (status == K3_BAD_INPUT && odd.rule == K3_IDX07) {  // JSON, but another kind of value: it has been skipped
    parser->summary->odd_total_size = true;
    return K3_OK;
  }
  if (err && err->status == K3_OK)
    *err = odd;
  return status;
}

static enum k3_status parse_metadata(struct index_parser *parser) {
  struct k3_json *json = &parser->json;
  if (k3_json_peek(json) == 'n')
    return k3_json_null(json);
  if (k3_json_peek(json) != '{') {
    parser->summary->odd_total_size = true;
    return k3_json_skip(json);
  }
  K3_TRY(k3_json_enter_object(json));
  for (bool seen = false;;) {
    static const char total_size[] = "total_size";
    bool more;
    struct k3_json_text key;
    K3_TRY(k3_json_next_key(json, &more, &key));
    if (!more)
      return K3_OK;
    if (key.nbytes != sizeof total_size - 1 || memcmp(key.bytes, total_size, key.nbytes) != 0) {
      K3_TRY(k3_json_skip(json));
      continue;
    }
    if (seen)
      return fail(parser, NULL, "each key once", "metadata holds total_size twice");
    seen = true;
    K3_TRY(parse_total_size(parser));
  }
}

static enum k3_status parse_top(struct index_parser *parser) {
  struct k3_json *json = &parser->json;
  bool has_map = false, has_metadata = false;
  if (k3_json_peek(json) == '\0' && json->next == json->end)
    return fail(parser, NULL, "an object with weight_map", "the index is empty");
  K3_TRY(k3_json_enter_object(json));
  for (;;) {
    bool more;
    struct k3_json_text key;
    K3_TRY(k3_json_next_key(json, &more, &key));
    if (!more)
      break;
    bool is_map = key.nbytes == 10 && memcmp(key.bytes, "weight_map", 10) == 0;
    bool is_metadata = key.nbytes == 8 && memcmp(key.bytes, "metadata", 8) == 0;
    if ((is_map && has_map) || (is_metadata && has_metadata))
      return fail(parser, NULL, "each key once", is_map ? "weight_map occurs twice" : "metadata occurs twice");
    has_map |= is_map;
    has_metadata |= is_metadata;
    K3_TRY(is_map ? parse_weight_map(parser) : is_metadata ? parse_metadata(parser) : k3_json_skip(json));
  }
  K3_TRY(k3_json_finish(json));
  return has_map ? K3_OK : fail(parser, NULL, "an object with weight_map", "weight_map is absent");
}

static enum k3_status parse(struct index_parser *parser, const char *text, size_t nbytes, const char *file, struct k3_error *err) {
  uint64_t promised_nbytes;
  *parser->summary = (struct k3_index_summary){0};
  if (k3_lfs_is_pointer(text, nbytes, &promised_nbytes))
    return k3_lfs_fail(file, promised_nbytes, err);
  if (nbytes >= K3_NAME_NONE)
    return k3_fail(err, K3_BAD_INPUT, K3_IDX10, file, NULL, "less than 4 GiB", "an index of %zu bytes", nbytes);
  k3_json_open(&parser->json, text, nbytes, file, K3_IDX10, err);
  enum k3_status status = parse_top(parser);
  k3_json_close(&parser->json);
  k3_name_set_free(&parser->names);
  k3_free(parser->tensor);
  k3_free(parser->file);
  return status;
}

enum k3_status k3_index_parse(const char *text, size_t nbytes, const char *file, k3_index_fn fn, void *ctx, struct k3_index_summary *summary,
                              struct k3_error *err) {
  struct index_parser parser = {.fn = fn, .ctx = ctx, .summary = summary};
  return parse(&parser, text, nbytes, file, err);
}

enum k3_status k3_index_parse_again(const char *text, size_t nbytes, const char *file, k3_index_fn fn, void *ctx, struct k3_index_summary *summary,
                                    struct k3_error *err) {
  struct index_parser parser = {.fn = fn, .ctx = ctx, .summary = summary, .doubles_known = true};
  return parse(&parser, text, nbytes, file, err);
}

bool k3_index_file_name_ok(const char *file, size_t nbytes) {
  static const char suffix[] = ".safetensors";
  size_t n_suffix = sizeof suffix - 1;
  if (nbytes <= n_suffix || memcmp(file + nbytes - n_suffix, suffix, n_suffix) != 0)
    return false;
  for (size_t i = 0; i < nbytes; i++) {
    if (file[i] == '/' || file[i] == '\\' || (unsigned char)file[i] < 0x20 || file[i] == 0x7F)
      return false;
  }
  return true;
}
