#include "formats/layer_states.h"

#include <string.h>

#include "base/alloc.h"
#include "formats/safetensors.h"

typedef unsigned long long ull;  // for %llu

struct reader {
  const unsigned char *bytes;
  const char *file;
  struct k3_st_header header;
  struct k3_error *err;
};

#define BAD(reader, tensor, allowed, ...) k3_fail((reader)->err, K3_BAD_INPUT, K3_RULE_NONE, (reader)->file, tensor, allowed, __VA_ARGS__)

// A matrix of floats. The first one read gives the shape, the others must have it; *data stays NULL for an optional one that is absent.
static enum k3_status read_rows(struct reader *reader, const char *name, bool optional, struct k3_layer_states *s, const void **data,
                                enum k3_dtype *dtype) {
  const struct k3_st_tensor *tensor = k3_st_find(&reader->header, name, strlen(name));
  if (!tensor)
    return optional ? K3_OK : BAD(reader, name, "hidden_states, positions and request_ids", "the tensor is missing");
  if (tensor->rank != 2)
    return BAD(reader, name, "2", "it has %u dimensions", tensor->rank);
  if (tensor->dtype != K3_DTYPE_F32 && tensor->dtype != K3_DTYPE_BF16)
    return BAD(reader, name, "BF16 or F32", "its dtype is %s", k3_dtype_name(tensor->dtype));
  if (optional && (tensor->shape[0] != s->n_rows || tensor->shape[1] != s->width))
    return BAD(reader, name, "the shape of hidden_states", "its shape is [%llu, %llu], hidden_states has [%llu, %llu]", (ull)tensor->shape[0],
               (ull)tensor->shape[1], (ull)s->n_rows, (ull)s->width);
  s->n_rows = tensor->shape[0];
  s->width = tensor->shape[1];
  *data = reader->bytes + reader->header.data_begin + tensor->begin;
  *dtype = tensor->dtype;
  return K3_OK;
}

static enum k3_status read_ids(struct reader *reader, const char *name, const struct k3_layer_states *s, int64_t **ids) {
  const struct k3_st_tensor *tensor = k3_st_find(&reader->header, name, strlen(name));
  if (!tensor)
    return BAD(reader, name, "hidden_states, positions and request_ids", "the tensor is missing");
  if (tensor->rank != 1 || tensor->dtype != K3_DTYPE_I64 || tensor->shape[0] != s->n_rows)
    return BAD(reader, name, "a list of I64, one for each row of hidden_states", "it has %u dimensions of %s, the first of %llu", tensor->rank,
               k3_dtype_name(tensor->dtype), (ull)(tensor->rank > 0 ? tensor->shape[0] : 0));
  const unsigned char *bytes = reader->bytes + reader->header.data_begin + tensor->begin;
  *ids = k3_calloc(s->n_rows, sizeof **ids, reader->err);
  if (!*ids)
    return K3_NO_MEMORY;
  for (uint64_t i = 0; i < s->n_rows; i++) {
    uint64_t value = 0;
    for (int k = 7; k >= 0; k--)
      value = value << 8 | bytes[8 * i + (unsigned)k];
    memcpy(&(*ids)[i], &value, sizeof value);
  }
  return K3_OK;
}

enum k3_status k3_layer_states_parse(const void *bytes, uint64_t nbytes, const char *file, struct k3_layer_states *states, struct k3_error *err) {
  struct reader reader = {.bytes = bytes, .file = file, .err = err};
  uint64_t h;
  *states = (struct k3_layer_states){0};
  K3_TRY(k3_st_header_length(bytes, nbytes < 200 ? (size_t)nbytes : 200, nbytes, file, &h, err));
  K3_TRY(k3_st_parse((const char *)bytes + K3_ST_PREFIX_NBYTES, h, nbytes, file, &reader.header, err));
  enum k3_status status = read_rows(&reader, "hidden_states", false, states, &states->hidden, &states->hidden_dtype);
  if (status == K3_OK)
    status = read_rows(&reader, "residual", true, states, &states->residual, &states->residual_dtype);
  if (status == K3_OK)
    status = read_ids(&reader, "positions", states, &states->positions);
  if (status == K3_OK)
    status = read_ids(&reader, "request_ids", states, &states->request_ids);
  k3_st_header_free(&reader.header);
  if (status != K3_OK)
    k3_layer_states_free(states);
  return status;
}

void k3_layer_states_free(struct k3_layer_states *states) {
  k3_free(states->positions);
  k3_free(states->request_ids);
  *states = (struct k3_layer_states){0};
}
