#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/arith.h"
#include "base/utf8.h"
#include "formats/json_pull.h"
#include "formats/lfs.h"
#include "formats/safetensors.h"

typedef unsigned long long ull;  // for %llu

// What an entry of the smallest size takes in the text, comma included: "a":{"dtype":"U8","shape":[],"data_offsets":[0,0]},
enum { MIN_ENTRY_NBYTES = 51, SHAPES_LOOKED_BACK = 8 };

struct st_parser {
  struct k3_json json;
  struct k3_st_header *header;
  size_t capacity;  // of header->tensors
  size_t metadata_capacity;
};

// An entry that breaks a rule.
#define FAIL(parser, rule, tensor, allowed, ...) k3_fail((parser)->json.err, K3_BAD_INPUT, rule, (parser)->json.file, tensor, allowed, __VA_ARGS__)

static bool text_is(struct k3_json_text text, const char *word) {
  return text.nbytes == strlen(word) && memcmp(text.bytes, word, text.nbytes) == 0;
}

static bool tensor_is_named(const void *owner, uint32_t index, const char *name, size_t nbytes) {
  const struct k3_st_tensor *tensor = &((const struct k3_st_header *)owner)->tensors[index];
  return tensor->name_nbytes == nbytes && memcmp(tensor->name, name, nbytes) == 0;
}

static bool pair_is_named(const void *owner, uint32_t index, const char *name, size_t nbytes) {
  const char *key = ((const struct k3_st_header *)owner)->metadata[index].key;
  return strlen(key) == nbytes && memcmp(key, name, nbytes) == 0;
}

// ---- the length in front ----

// Says what the file is, when its first eight bytes are no length: the mark of another format, or plain text.
static void describe_text(const unsigned char *prefix, char *dst, size_t capacity) {
  static const struct {
    const char *mark, *what;
  } others[] = {{"PK\003\004", "a ZIP archive, as PyTorch's own format is"}, {"\200\002", "a pickle"}, {"\200\004", "a pickle"},
                {"GGUF", "a GGUF file"},      {"\211HDF", "an HDF5 file"},    {"\037\213", "compressed with gzip"}, {"(\265/\375", "compressed with zstd"}};
  dst[0] = '\0';
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    if (memcmp(prefix, others[i].mark, strlen(others[i].mark)) == 0) {
      snprintf(dst, capacity, ": the file is %s", others[i].what);
      return;
    }
  }
  bool printable = true;
  for (int i = 0; i < 8; i++)
    printable &= (prefix[i] >= 0x20 && prefix[i] < 0x7F) || prefix[i] == '\n' || prefix[i] == '\r' || prefix[i] == '\t';
  if (!printable)
    return;
  char text[64];
  size_t at = 0;
  while (at < 3 && prefix[at] <= ' ')
    at++;
  bool html = strncasecmp((const char *)prefix + at, "<!doc", 5) == 0 || strncasecmp((const char *)prefix + at, "<html", 5) == 0;
  k3_printable(text, sizeof text, (const char *)prefix, 8, 8);
  snprintf(dst, capacity, "; the file begins with the text \"%s\"%s", text, html ? ": an HTML page, saved instead of the file" : "");
}

enum k3_status k3_st_header_length(const void *prefix, size_t n_prefix, uint64_t file_nbytes, const char *file, uint64_t *h, struct k3_error *err) {
  const unsigned char *bytes = prefix;
  uint64_t promised_nbytes, length = 0;
  *h = 0;
  if (k3_lfs_is_pointer(prefix, n_prefix, &promised_nbytes))
    return k3_lfs_fail(file, promised_nbytes, err);
  if (file_nbytes < K3_ST_PREFIX_NBYTES || n_prefix < K3_ST_PREFIX_NBYTES)
    return k3_fail(err, K3_BAD_INPUT, K3_CNT02, file, NULL, "at least 10 bytes", "a file of %llu bytes", (ull)file_nbytes);
  for (int i = 0; i < K3_ST_PREFIX_NBYTES; i++)
    length |= (uint64_t)bytes[i] << 8 * i;
  if (length > K3_ST_MAX_HEADER_NBYTES) {
    char text[160];
    describe_text(bytes, text, sizeof text);
    return k3_fail(err, K3_BAD_INPUT, K3_CNT02, file, NULL, "2 to 100000000 bytes", "the header length is %llu, above the limit of 100000000%s",
                   (ull)length, text);
  }
  if (length < 2)
    return k3_fail(err, K3_BAD_INPUT, K3_CNT02, file, NULL, "2 to 100000000 bytes", "the header length is %llu", (ull)length);
  if (length > file_nbytes - K3_ST_PREFIX_NBYTES)
    return k3_fail(err, K3_BAD_INPUT, K3_CNT02, file, NULL, "the whole header",
                   "the header has %llu bytes, the file only %llu behind its first 8: %llu are missing", (ull)length,
                   (ull)(file_nbytes - K3_ST_PREFIX_NBYTES), (ull)(length - (file_nbytes - K3_ST_PREFIX_NBYTES)));
  *h = length;
  return K3_OK;
}

// ---- one entry ----

// Skips a value of another JSON type than the one that belongs here, and says so.
static enum k3_status fail_type(struct st_parser *parser, enum k3_rule rule, const char *tensor, const char *allowed, const char *found) {
  K3_TRY(k3_json_skip(&parser->json));
  return FAIL(parser, rule, tensor, allowed, "%s", found);
}

static enum k3_status parse_dtype(struct st_parser *parser, struct k3_st_tensor *tensor) {
  struct k3_json_text text;
  enum k3_dtype dtype;
  if (k3_json_peek(&parser->json) != '"')
    return fail_type(parser, K3_CNT06, tensor->name, "a text such as \"BF16\"", "dtype is no text");
  K3_TRY(k3_json_string(&parser->json, &text));
  if (!k3_dtype_from_name(text.bytes, text.nbytes, &dtype)) {
    char spelling[100];
    k3_printable(spelling, sizeof spelling, text.bytes, text.nbytes, 64);
    return FAIL(parser, K3_CNT06, tensor->name, "a dtype of the safetensors format, in its spelling", "unknown dtype \"%s\"", spelling);
  }
  tensor->dtype = (uint8_t)dtype;
  return K3_OK;
}

static enum k3_status parse_shape(struct st_parser *parser, struct k3_st_tensor *tensor, uint64_t *shape) {
  if (k3_json_peek(&parser->json) != '[')
    return fail_type(parser, K3_CNT05, tensor->name, "a list of dimensions", "shape is no list");
  K3_TRY(k3_json_enter_array(&parser->json));
  for (;;) {
    bool more;
    uint64_t dim;
    K3_TRY(k3_json_next_item(&parser->json, &more));
    if (!more)
      return K3_OK;
    K3_TRY(k3_json_u64(&parser->json, K3_CNT05, tensor->name, &dim));
    if (tensor->rank == K3_ST_MAX_RANK)
      return FAIL(parser, K3_CNT05, tensor->name, "at most 16 dimensions", "more than 16 dimensions");
    if (dim > K3_ST_MAX_DIM)
      return FAIL(parser, K3_CNT05, tensor->name, "dimensions up to 1099511627776", "dimension %u is %llu", tensor->rank, (ull)dim);
    shape[tensor->rank++] = dim;
  }
}

static enum k3_status parse_offsets(struct st_parser *parser, struct k3_st_tensor *tensor) {
  uint64_t *const offsets[2] = {&tensor->begin, &tensor->end};
  if (k3_json_peek(&parser->json) != '[')
    return fail_type(parser, K3_CNT05, tensor->name, "[begin, end]", "data_offsets is no list");
  K3_TRY(k3_json_enter_array(&parser->json));
  for (int i = 0;; i++) {
    bool more;
    K3_TRY(k3_json_next_item(&parser->json, &more));
    if (!more && i == 2)
      return K3_OK;
    if (!more || i == 2)
      return FAIL(parser, K3_CNT05, tensor->name, "[begin, end]", "data_offsets has %s than two entries", more ? "more" : "fewer");
    K3_TRY(k3_json_u64(&parser->json, K3_CNT05, tensor->name, offsets[i]));
  }
}

// "shape [2, 3] in BF16"
static const char *describe(const struct k3_st_tensor *tensor, const uint64_t *shape, char *dst, size_t capacity) {
  size_t n = (size_t)snprintf(dst, capacity, "shape [");
  for (unsigned i = 0; i < tensor->rank; i++)
    n += (size_t)snprintf(dst + n, capacity - n, "%s%llu", i ? ", " : "", (ull)shape[i]);
  snprintf(dst + n, capacity - n, "] in %s", k3_dtype_name((enum k3_dtype)tensor->dtype));
  return dst;
}

// Shape, dtype and span of one tensor must agree.
static enum k3_status check_nbytes(struct st_parser *parser, const struct k3_st_tensor *tensor, const uint64_t *shape) {
  uint64_t n_bits = k3_dtype_bits((enum k3_dtype)tensor->dtype);
  bool fits = true, empty = false;
  char what[K3_ST_MAX_RANK * 15 + 32];
  // Without the zeros first: the order of the dimensions must not decide whether a product overflows.
  for (unsigned i = 0; i < tensor->rank; i++) {
    empty |= shape[i] == 0;
    fits = fits && (shape[i] == 0 || k3_mul_u64(n_bits, shape[i], &n_bits));
  }
  if (!fits)
    return FAIL(parser, K3_CNT05, tensor->name, "less than 2^64 bits", "the size of %s overflows", describe(tensor, shape, what, sizeof what));
  n_bits = empty ? 0 : n_bits;
  if (n_bits % 8 != 0)
    return FAIL(parser, K3_CNT05, tensor->name, "a whole number of bytes", "%s takes %llu bits", describe(tensor, shape, what, sizeof what),
                (ull)n_bits);
  if (tensor->begin > tensor->end)
    return FAIL(parser, K3_CNT05, tensor->name, "begin <= end", "data_offsets [%llu, %llu]", (ull)tensor->begin, (ull)tensor->end);
  if (tensor->end - tensor->begin != n_bits / 8)
    return FAIL(parser, K3_CNT05, tensor->name, "a span of exactly the tensor's bytes", "data_offsets [%llu, %llu] are %llu bytes, %s takes %llu",
                (ull)tensor->begin, (ull)tensor->end, (ull)(tensor->end - tensor->begin), describe(tensor, shape, what, sizeof what),
                (ull)(n_bits / 8));
  return K3_OK;
}

static enum k3_status parse_fields(struct st_parser *parser, struct k3_st_tensor *tensor, uint64_t *shape) {
  enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
  unsigned seen = 0;
  if (k3_json_peek(&parser->json) != '{')
    return fail_type(parser, K3_CNT05, tensor->name, "an object with dtype, shape and data_offsets", "the entry is no object");
  K3_TRY(k3_json_enter_object(&parser->json));
  for (;;) {
    bool more;
    struct k3_json_text key;
    K3_TRY(k3_json_next_key(&parser->json, &more, &key));
    if (!more)
      break;
    unsigned field = text_is(key, "dtype") ? DTYPE : text_is(key, "shape") ? SHAPE : text_is(key, "data_offsets") ? OFFSETS : 0;
    if (seen & field)
      return FAIL(parser, K3_CNT07, tensor->name, "each key once", "%s occurs twice",
                  field == DTYPE   ? "dtype"
                  : field == SHAPE ? "shape"
                                   : "data_offsets");
    seen |= field;
    switch (field) {
      case DTYPE: K3_TRY(parse_dtype(parser, tensor)); break;
      case SHAPE: K3_TRY(parse_shape(parser, tensor, shape)); break;
      case OFFSETS: K3_TRY(parse_offsets(parser, tensor)); break;
      default: K3_TRY(k3_json_skip(&parser->json));  // fields of later versions, as the reference reader does
    }
  }
  if (!(seen & DTYPE))
    return FAIL(parser, K3_CNT06, tensor->name, "dtype, shape and data_offsets", "dtype is missing");
  if (!(seen & SHAPE) || !(seen & OFFSETS))
    return FAIL(parser, K3_CNT05, tensor->name, "dtype, shape and data_offsets", "%s is missing", seen & SHAPE ? "data_offsets" : "shape");
  return K3_OK;
}

static enum k3_status check_name(struct st_parser *parser, struct k3_json_text name) {
  if (name.nbytes == 0)
    return FAIL(parser, K3_CNT12, NULL, "1 to 4096 bytes", "a tensor name is empty");
  if (name.nbytes > K3_ST_MAX_NAME_NBYTES) {
    char shortened[256];
    return FAIL(parser, K3_CNT12, k3_printable(shortened, sizeof shortened, name.bytes, name.nbytes, 200), "1 to 4096 bytes",
                "a tensor name of %zu bytes", name.nbytes);
  }
  for (size_t i = 0; i < name.nbytes; i++) {
    unsigned char byte = (unsigned char)name.bytes[i];
    // C1 is C2 80 .. C2 9F in UTF-8.
    bool is_c1 = byte == 0xC2 && (unsigned char)name.bytes[i + 1] < 0xA0;
    if (byte >= 0x20 && byte != 0x7F && !is_c1)
      continue;
    char shown[256];
    return FAIL(parser, K3_CNT12, k3_printable(shown, sizeof shown, name.bytes, name.nbytes, 200), "no control characters",
                "a tensor name holds the control character U+%04X", is_c1 ? (unsigned char)name.bytes[i + 1] : byte);
  }
  return K3_OK;
}

// Thousands of experts have a handful of shapes, which take turns: one kept copy serves them all.
static enum k3_status keep_shape(struct st_parser *parser, struct k3_st_tensor *tensor, const uint64_t *shape, struct k3_error *err) {
  size_t nbytes = tensor->rank * sizeof *shape, n = parser->header->n_tensors;
  for (size_t back = 1; back <= SHAPES_LOOKED_BACK && back <= n; back++) {
    const struct k3_st_tensor *earlier = &parser->header->tensors[n - back];
    if (earlier->rank == tensor->rank && memcmp(earlier->shape, shape, nbytes) == 0) {
      tensor->shape = earlier->shape;
      return K3_OK;
    }
  }
  uint64_t *kept = k3_arena_alloc(&parser->header->arena, nbytes, err);
  if (!kept)
    return K3_NO_MEMORY;
  memcpy(kept, shape, nbytes);
  tensor->shape = kept;
  return K3_OK;
}

static enum k3_status parse_tensor(struct st_parser *parser, struct k3_json_text name) {
  struct k3_st_header *header = parser->header;
  struct k3_error *err = parser->json.err;
  uint64_t shape[K3_ST_MAX_RANK];
  K3_TRY(check_name(parser, name));
  // The name may lie in the scratch buffer of the reader, so it is kept before the next string is read.
  struct k3_st_tensor tensor = {.name = k3_arena_strndup(&header->arena, name.bytes, name.nbytes, err), .name_nbytes = (uint32_t)name.nbytes};
  if (!tensor.name)
    return K3_NO_MEMORY;
  uint32_t earlier;
  K3_TRY(k3_name_set_add(&header->names, tensor_is_named, header, tensor.name, name.nbytes, (uint32_t)header->n_tensors, &earlier, err));
  if (earlier != K3_NAME_NONE)
    return FAIL(parser, K3_CNT07, tensor.name, "each name once", "the header names this tensor twice");
  K3_TRY(parse_fields(parser, &tensor, shape));
  K3_TRY(check_nbytes(parser, &tensor, shape));
  K3_TRY(keep_shape(parser, &tensor, shape, err));
  unsigned align_nbytes = k3_dtype_bits((enum k3_dtype)tensor.dtype) / 8;
  header->n_misaligned += align_nbytes > 1 && (header->data_begin + tensor.begin) % align_nbytes != 0;
  assert(header->n_tensors < parser->capacity);  // an entry that got here is at least MIN_ENTRY_NBYTES long
  header->tensors[header->n_tensors++] = tensor;
  return K3_OK;
}

// ---- __metadata__ ----

static enum k3_status add_pair(struct st_parser *parser, struct k3_name_set *keys, struct k3_json_text key, bool *is_text) {
  struct k3_st_header *header = parser->header;
  struct k3_error *err = parser->json.err;
  struct k3_json_text value;
  struct k3_st_pair pair = {0};
  size_t key_nbytes = key.nbytes;
  uint32_t earlier;
  K3_TRY(k3_grow(&header->metadata, &parser->metadata_capacity, header->n_metadata + 1, sizeof *header->metadata, err));
  pair.key = k3_arena_strndup(&header->arena, key.bytes, key.nbytes, err);
  if (!pair.key)
    return K3_NO_MEMORY;
  K3_TRY(k3_name_set_add(keys, pair_is_named, header, key.bytes, key.nbytes, (uint32_t)header->n_metadata, &earlier, err));
  if (earlier != K3_NAME_NONE)
    return FAIL(parser, K3_CNT07, "__metadata__", "each key once", "the key \"%s\" occurs twice", pair.key);
  *is_text = k3_json_peek(&parser->json) == '"';
  // A terminated text cannot hold a NUL; nothing in use writes one.
  bool keep = *is_text && !memchr(pair.key, '\0', key_nbytes);
  if (*is_text) {
    K3_TRY(k3_json_string(&parser->json, &value));
    keep = keep && !memchr(value.bytes, '\0', value.nbytes);
  } else {
    K3_TRY(k3_json_skip(&parser->json));
  }
  if (keep) {
    pair.value = k3_arena_strndup(&header->arena, value.bytes, value.nbytes, err);
    if (!pair.value)
      return K3_NO_MEMORY;
  }
  header->metadata_odd |= !keep;
  header->metadata[header->n_metadata++] = pair;  // value NULL: only there to find a second key of that name
  return K3_OK;
}

static enum k3_status parse_metadata(struct st_parser *parser) {
  struct k3_st_header *header = parser->header;
  struct k3_name_set keys = {0};
  unsigned n_fields = 0;
  if (k3_json_peek(&parser->json) == 'n')
    return k3_json_null(&parser->json);
  if (k3_json_peek(&parser->json) != '{') {
    header->metadata_odd = true;
    return k3_json_skip(&parser->json);
  }
  K3_TRY(k3_json_enter_object(&parser->json));
  enum k3_status status;
  for (;;) {
    bool more, is_text = false;
    struct k3_json_text key;
    K3_TRY_GOTO(status, out, k3_json_next_key(&parser->json, &more, &key));
    if (!more)
      break;
    bool is_dtype = text_is(key, "dtype"), is_list = text_is(key, "shape") || text_is(key, "data_offsets");
    K3_TRY_GOTO(status, out, add_pair(parser, &keys, key, &is_text));
    n_fields += (is_dtype && is_text) || (is_list && !is_text);
  }
  if (n_fields == 3)
    status = FAIL(parser, K3_CNT12, "__metadata__", "another name; __metadata__ is reserved", "a tensor is called __metadata__");
  // Keep the texts only.
  size_t n_texts = 0;
  for (size_t i = 0; i < header->n_metadata; i++) {
    if (header->metadata[i].value)
      header->metadata[n_texts++] = header->metadata[i];
  }
  header->n_metadata = n_texts;
out:
  k3_name_set_free(&keys);
  return status;
}

// ---- the whole ----

// In the order of the data; a tensor without bytes comes before the one that begins where it lies.
static int compare_spans(const void *a, const void *b, void *header) {
  const struct k3_st_tensor *tensors = ((const struct k3_st_header *)header)->tensors;
  const struct k3_st_tensor *left = &tensors[*(const uint32_t *)a], *right = &tensors[*(const uint32_t *)b];
  if (left->begin != right->begin)
    return left->begin < right->begin ? -1 : 1;
  return left->end < right->end ? -1 : left->end > right->end;
}

static enum k3_status check_next_span(struct st_parser *parser, const struct k3_st_tensor *before, const struct k3_st_tensor *tensor) {
  uint64_t end = before ? before->end : 0;
  if (tensor->begin == end)
    return K3_OK;
  char neighbour[220] = "the data";
  if (before)
    k3_printable(neighbour, sizeof neighbour, before->name, before->name_nbytes, 160);
  if (tensor->begin > end)
    return FAIL(parser, K3_CNT04, tensor->name, "no hole between tensors", "%llu bytes between the %s of %s and this tensor belong to no tensor",
                (ull)(tensor->begin - end), before ? "end" : "begin", neighbour);
  return FAIL(parser, K3_CNT04, tensor->name, "each byte in one tensor", "data_offsets [%llu, %llu] overlap those of %s, [%llu, %llu]",
              (ull)tensor->begin, (ull)tensor->end, neighbour, (ull)before->begin, (ull)before->end);
}

// The spans must tile the data area. Most files hold their tensors in the order of the header; the others are sorted.
static enum k3_status check_tiling(struct st_parser *parser) {
  struct k3_st_header *header = parser->header;
  const struct k3_st_tensor *last = NULL;
  size_t n_in_order = 0;
  for (; n_in_order < header->n_tensors; n_in_order++) {
    const struct k3_st_tensor *tensor = &header->tensors[n_in_order];
    if (tensor->begin != (last ? last->end : 0))
      break;
    last = tensor;
  }
  if (n_in_order < header->n_tensors) {
    uint32_t *order = k3_calloc(header->n_tensors, sizeof *order, parser->json.err);
    if (!order)
      return K3_NO_MEMORY;
    for (size_t i = 0; i < header->n_tensors; i++)
      order[i] = (uint32_t)i;
    qsort_r(order, header->n_tensors, sizeof *order, compare_spans, header);
    enum k3_status status = K3_OK;
    last = NULL;
    for (size_t i = 0; i < header->n_tensors && status == K3_OK; i++) {
      status = check_next_span(parser, last, &header->tensors[order[i]]);
      last = &header->tensors[order[i]];
    }
    k3_free(order);
    K3_TRY(status);
  }
  uint64_t end = last ? last->end : 0;
  if (end > header->data_nbytes)
    return FAIL(parser, K3_CNT03, last->name, "the whole file",
                "the last tensor ends at byte %llu of the data, the file has %llu: %llu bytes are missing", (ull)end, (ull)header->data_nbytes,
                (ull)(end - header->data_nbytes));
  if (end < header->data_nbytes)
    return FAIL(parser, K3_CNT04, NULL, "a file that ends with its last tensor", "%llu bytes after the last tensor are not covered by any tensor",
                (ull)(header->data_nbytes - end));
  return K3_OK;
}

static enum k3_status parse_header(struct st_parser *parser, uint64_t h) {
  struct k3_json *json = &parser->json;
  struct k3_st_header *header = parser->header;
  bool has_metadata = false;
  if (h == 0 || *json->begin != '{')
    return k3_json_fail(json, "'{' as the first byte of the header");
  // Every tensor has a brace of its own: counting them sizes the tables exactly, and the shortest entry bounds what a hostile text can ask for.
  size_t n_braces = 0;
  for (uint64_t i = 0; i < h; i++)
    n_braces += json->begin[i] == '{';
  parser->capacity = n_braces < h / MIN_ENTRY_NBYTES + 1 ? n_braces : h / MIN_ENTRY_NBYTES + 1;
  header->tensors = k3_arena_alloc(&header->arena, parser->capacity * sizeof *header->tensors, json->err);
  if (!header->tensors)
    return K3_NO_MEMORY;
  K3_TRY(k3_name_set_reserve(&header->names, parser->capacity, json->err));
  K3_TRY(k3_json_enter_object(json));
  for (;;) {
    bool more;
    struct k3_json_text name;
    K3_TRY(k3_json_next_key(json, &more, &name));
    if (!more)
      break;
    bool is_metadata = text_is(name, "__metadata__");
    if (is_metadata && has_metadata)
      return FAIL(parser, K3_CNT07, "__metadata__", "each key once", "__metadata__ occurs twice");
    has_metadata |= is_metadata;
    K3_TRY(is_metadata ? parse_metadata(parser) : parse_tensor(parser, name));
  }
  K3_TRY(k3_json_finish(json));
  return check_tiling(parser);
}

// Is the text one JSON value at all?
static enum k3_status check_syntax(const char *text, uint64_t h, const char *file, struct k3_error *err) {
  struct k3_json json;
  k3_json_open(&json, text, h, file, K3_CNT02, err);
  enum k3_status status = k3_json_skip(&json);
  if (status == K3_OK)
    status = k3_json_finish(&json);
  k3_json_close(&json);
  return status;
}

enum k3_status k3_st_parse(const char *text, uint64_t h, uint64_t file_nbytes, const char *file, struct k3_st_header *header, struct k3_error *err) {
  struct k3_error first = {0};
  struct st_parser parser = {.header = header};
  *header = (struct k3_st_header){.data_begin = K3_ST_PREFIX_NBYTES + h};
  if (h > K3_ST_MAX_HEADER_NBYTES || file_nbytes < K3_ST_PREFIX_NBYTES || h > file_nbytes - K3_ST_PREFIX_NBYTES) {
    *header = (struct k3_st_header){0};
    return k3_fail(err, K3_BAD_INPUT, K3_CNT02, file, NULL, "at most 100000000 bytes, and no more than the file has",
                   "a header of %llu bytes in a file of %llu", (ull)h, (ull)file_nbytes);
  }
  header->data_nbytes = file_nbytes - header->data_begin;
  k3_json_open(&parser.json, text, h, file, K3_CNT02, &first);
  enum k3_status status = parse_header(&parser, h);
  k3_json_close(&parser.json);
  if (status == K3_OK)
    return K3_OK;
  if (status == K3_BAD_INPUT && first.rule != K3_CNT02) {  // broken JSON behind the first bad entry goes before
    struct k3_error syntax = {0};
    if (check_syntax(text, h, file, &syntax) == K3_BAD_INPUT)
      first = syntax;
  }
  k3_st_header_free(header);
  if (err && err->status == K3_OK)
    *err = first;
  return status;
}

void k3_st_header_free(struct k3_st_header *header) {
  k3_name_set_free(&header->names);
  k3_free(header->metadata);
  k3_arena_free(&header->arena);
  *header = (struct k3_st_header){0};
}

const struct k3_st_tensor *k3_st_find(const struct k3_st_header *header, const char *name, size_t name_nbytes) {
  uint32_t index = k3_name_set_find(&header->names, tensor_is_named, header, name, name_nbytes);
  return index == K3_NAME_NONE ? NULL : &header->tensors[index];
}

uint64_t k3_st_n_elems(const struct k3_st_tensor *tensor) {
  uint64_t n_elems = 1;
  for (unsigned i = 0; i < tensor->rank; i++) {
    if (tensor->shape[i] == 0)
      return 0;
    n_elems *= tensor->shape[i];
  }
  return n_elems;
}

const char *k3_st_metadata(const struct k3_st_header *header, const char *key) {
  for (size_t i = 0; i < header->n_metadata; i++) {
    if (strcmp(header->metadata[i].key, key) == 0)
      return header->metadata[i].value;
  }
  return NULL;
}
