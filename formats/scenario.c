#include "formats/scenario.h"

#include <stdlib.h>
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

// Finds a tensor of the given rank; its bytes, or NULL with an error (or without one when it is optional and absent).
static const unsigned char *find(struct reader *reader, const char *name, unsigned rank, bool optional, const struct k3_st_tensor **tensor) {
  *tensor = k3_st_find(&reader->header, name, strlen(name));
  if (!*tensor && optional)
    return NULL;
  if (!*tensor) {
    BAD(reader, name, "target_states, positions, request_ids, anchor_ids, anchor_positions", "the tensor is missing");
    return NULL;
  }
  if ((*tensor)->rank != rank) {
    BAD(reader, name, rank == 1 ? "1" : rank == 2 ? "2" : "3", "it has %u dimensions", (*tensor)->rank);
    return NULL;
  }
  return reader->bytes + reader->header.data_begin + (*tensor)->begin;
}

// Copies an I64 tensor of rank 1. `same_as` names the tensor that gave *n already, or is NULL when this one gives it.
static enum k3_status read_ids(struct reader *reader, const char *name, const char *same_as, uint64_t *n, int64_t **ids) {
  const struct k3_st_tensor *tensor;
  const unsigned char *bytes = find(reader, name, 1, false, &tensor);
  if (!bytes)
    return K3_BAD_INPUT;
  if (tensor->dtype != K3_DTYPE_I64)
    return BAD(reader, name, "I64", "its dtype is %s", k3_dtype_name(tensor->dtype));
  if (!same_as)
    *n = tensor->shape[0];
  else if (tensor->shape[0] != *n)
    return BAD(reader, name, "as many entries as its partner", "%llu entries, %s has %llu", (ull)tensor->shape[0], same_as, (ull)*n);
  *ids = k3_calloc(*n, sizeof **ids, reader->err);
  if (!*ids)
    return K3_NO_MEMORY;
  for (uint64_t i = 0; i < *n; i++) {
    uint64_t value = 0;
    for (int k = 7; k >= 0; k--)
      value = value << 8 | bytes[8 * i + (unsigned)k];
    memcpy(&(*ids)[i], &value, sizeof value);
  }
  return K3_OK;
}

static enum k3_status read_tensors(struct reader *reader, const struct k3_scenario_shape *shape, struct k3_scenario *s) {
  const struct k3_st_tensor *tensor;
  s->target_states = find(reader, "target_states", 2, false, &tensor);
  if (!s->target_states)
    return K3_BAD_INPUT;
  if (tensor->dtype != K3_DTYPE_F32 && tensor->dtype != K3_DTYPE_BF16)
    return BAD(reader, "target_states", "BF16 or F32", "its dtype is %s", k3_dtype_name(tensor->dtype));
  if (tensor->shape[1] != shape->state_width)
    return BAD(reader, "target_states", "taps times target hidden size", "%llu columns where the model takes %llu", (ull)tensor->shape[1],
               (ull)shape->state_width);
  s->state_dtype = tensor->dtype;
  s->n_rows = tensor->shape[0];
  K3_TRY(read_ids(reader, "positions", "target_states", &s->n_rows, &s->positions));
  K3_TRY(read_ids(reader, "request_ids", "target_states", &s->n_rows, &s->request_ids));
  K3_TRY(read_ids(reader, "anchor_ids", NULL, &s->n_requests, &s->anchor_ids));
  K3_TRY(read_ids(reader, "anchor_positions", "anchor_ids", &s->n_requests, &s->anchor_positions));
  s->target_logits = find(reader, "target_logits", 3, true, &tensor);
  if (!tensor)
    return K3_OK;
  if (!s->target_logits)
    return K3_BAD_INPUT;
  if (tensor->dtype != K3_DTYPE_F32)
    return BAD(reader, "target_logits", "F32", "its dtype is %s", k3_dtype_name(tensor->dtype));
  if (tensor->shape[0] != s->n_requests || tensor->shape[1] != shape->block_width || tensor->shape[2] != shape->vocab_size)
    return BAD(reader, "target_logits", "requests, block width, vocabulary", "[%llu, %llu, %llu] where [%llu, %llu, %llu] is needed",
               (ull)tensor->shape[0], (ull)tensor->shape[1], (ull)tensor->shape[2], (ull)s->n_requests, (ull)shape->block_width,
               (ull)shape->vocab_size);
  return K3_OK;
}

static enum k3_status check_anchors(struct reader *reader, const struct k3_scenario_shape *shape, const struct k3_scenario *s) {
  for (uint64_t b = 0; b < s->n_requests; b++) {
    int64_t id = s->anchor_ids[b], m = s->anchor_positions[b];
    if (id < 0 || (uint64_t)id >= shape->vocab_size)
      return BAD(reader, "anchor_ids", "an id of the vocabulary", "request %llu has the anchor %lld, the vocabulary %llu ids", (ull)b, (long long)id,
                 (ull)shape->vocab_size);
    if (m < 0 || shape->block_width > shape->max_positions || (uint64_t)m > shape->max_positions - shape->block_width)
      return BAD(reader, "anchor_positions", "0 or more, and position plus block width within the model's limit",
                 "request %llu has its anchor at %lld, the block has %llu rows and the limit is %llu", (ull)b, (long long)m, (ull)shape->block_width,
                 (ull)shape->max_positions);
  }
  return K3_OK;
}

struct row {
  int64_t request, position;
  uint64_t index;
};

static int compare_rows(const void *left, const void *right) {
  const struct row *a = left, *b = right;
  if (a->request != b->request)
    return a->request < b->request ? -1 : 1;
  if (a->position != b->position)
    return a->position < b->position ? -1 : 1;
  return a->index < b->index ? -1 : a->index > b->index;
}

// Every request has exactly the rows 0 .. m-1. Sorted, they are a run without gap or repetition.
static enum k3_status check_sorted_rows(struct reader *reader, const struct k3_scenario *s, const struct row *rows) {
  uint64_t at = 0;
  for (uint64_t b = 0; b < s->n_requests; b++) {
    int64_t next = 0, m = s->anchor_positions[b];
    for (; at < s->n_rows && rows[at].request == (int64_t)b; at++, next++) {
      const struct row *row = &rows[at];
      if (row->position < 0 || row->position >= m)
        return BAD(reader, "positions", "positions below the anchor's", "request %llu: row %llu has position %lld, the anchor stands at %lld", (ull)b,
                   (ull)row->index, (long long)row->position, (long long)m);
      if (row->position < next)
        return BAD(reader, "positions", "every position once", "request %llu: position %lld occurs twice (rows %llu and %llu)", (ull)b,
                   (long long)row->position, (ull)rows[at - 1].index, (ull)row->index);
      if (row->position > next)
        break;
    }
    if (next < m)
      return BAD(reader, "positions", "every position below the anchor's",
                 "request %llu: the context row of position %lld is missing (anchor at %lld)", (ull)b, (long long)next, (long long)m);
  }
  return K3_OK;
}

static enum k3_status check_rows(struct reader *reader, const struct k3_scenario *s) {
  struct row *rows = k3_calloc(s->n_rows, sizeof *rows, reader->err);
  if (!rows)
    return K3_NO_MEMORY;
  enum k3_status status = K3_OK;
  for (uint64_t i = 0; i < s->n_rows && status == K3_OK; i++) {
    rows[i] = (struct row){s->request_ids[i], s->positions[i], i};
    if (rows[i].request < 0 || (uint64_t)rows[i].request >= s->n_requests)
      status = BAD(reader, "request_ids", "0 .. number of anchors - 1", "row %llu belongs to request %lld of %llu", (ull)i,
                   (long long)rows[i].request, (ull)s->n_requests);
  }
  if (status == K3_OK) {
    qsort(rows, s->n_rows, sizeof *rows, compare_rows);
    status = check_sorted_rows(reader, s, rows);
  }
  k3_free(rows);
  return status;
}

enum k3_status k3_scenario_parse(const void *bytes, uint64_t nbytes, const char *file, const struct k3_scenario_shape *shape,
                                 struct k3_scenario *scenario, struct k3_error *err) {
  struct reader reader = {.bytes = bytes, .file = file, .err = err};
  uint64_t h;
  *scenario = (struct k3_scenario){0};
  K3_TRY(k3_st_header_length(bytes, nbytes < 200 ? (size_t)nbytes : 200, nbytes, file, &h, err));
  K3_TRY(k3_st_parse((const char *)bytes + K3_ST_PREFIX_NBYTES, h, nbytes, file, &reader.header, err));
  enum k3_status status = read_tensors(&reader, shape, scenario);
  if (status == K3_OK)
    status = check_anchors(&reader, shape, scenario);
  if (status == K3_OK)
    status = check_rows(&reader, scenario);
  k3_st_header_free(&reader.header);
  if (status != K3_OK)
    k3_scenario_free(scenario);
  return status;
}

void k3_scenario_free(struct k3_scenario *scenario) {
  k3_free(scenario->positions);
  k3_free(scenario->request_ids);
  k3_free(scenario->anchor_ids);
  k3_free(scenario->anchor_positions);
  *scenario = (struct k3_scenario){0};
}
