// A fixture drafter opened as an engine, with cache, scenario and outputs: append everything, draft everything.
#ifndef K3_TESTS_UNIT_DSPARK_RIG_H
#define K3_TESTS_UNIT_DSPARK_RIG_H

#include "dspark_fixture.h"

enum { RIG_BLOCK_SIZE = 4 };

struct rig {
  struct fixture fixture;
  const struct k3_dspark_model *m;
  struct k3_engine *engine;
  struct k3_session *session;
  struct k3_cache cache;
  uint64_t n_rows, n_requests, E, block_size, max_blocks;
  void *states;  // [n, A*Ht] F32 or BF16
  enum k3_dtype state_dtype;
  int64_t *positions, *request_ids, *slots, *anchor_ids, *anchor_positions;
  int32_t *tables;
  float *context_states, *context_kv, *hidden, *base_logits, *logits, *confidence;  // outputs
  int64_t *draft_ids;
};

static inline void *rig_array(uint64_t n, size_t elem_nbytes) {
  void *array = calloc(n + 1, elem_nbytes);
  assert_non_null(array);
  return array;
}

// The scenario of fixtures/gen/dspark_case.py: rows of all requests, shuffled.
static inline void rig_scenario(struct rig *r, const struct fixture_case *c, const int64_t *explicit_positions, uint64_t n_explicit) {
  const uint64_t width = r->m->n_taps * r->m->target_hidden_size;
  r->n_requests = c->n_requests;
  for (uint64_t b = 0; b < c->n_requests; b++)
    r->n_rows += c->context[b];
  r->n_rows += n_explicit;
  r->state_dtype = c->bf16 ? K3_DTYPE_BF16 : K3_DTYPE_F32;
  r->states = rig_array(r->n_rows * width, 4);
  r->positions = rig_array(r->n_rows, 8);
  r->request_ids = rig_array(r->n_rows, 8);
  r->slots = rig_array(r->n_rows, 8);
  r->anchor_ids = rig_array(c->n_requests, 8);
  r->anchor_positions = rig_array(c->n_requests, 8);
  for (uint64_t i = 0; i < r->n_rows * width; i++)
    fixture_put(c, r->states, i, fixture_value(c, "target_states", i, FIXTURE_PLAIN, width));
  uint64_t at = 0, *order = rig_array(r->n_rows, 8);
  int64_t *key = rig_array(r->n_rows, 8);
  for (uint64_t i = 0; i < r->n_rows; i++) {  // insertion sort by the key of each row
    key[i] = fixture_bits("order", i, c->seed, 32);
    uint64_t j = i;
    for (; j > 0 && !n_explicit && key[order[j - 1]] > key[i]; j--)
      order[j] = order[j - 1];
    order[j] = i;
  }
  int64_t *positions = rig_array(r->n_rows, 8), *ids = rig_array(r->n_rows, 8);
  for (uint64_t b = 0; b < c->n_requests; b++) {
    r->anchor_positions[b] = (int64_t)c->context[b];
    int64_t V = (int64_t)r->m->vocab_size, id = fixture_bits("anchor_ids", b, c->seed, 16) % V;
    r->anchor_ids[b] = id < 0 ? id + V : id;
    for (uint64_t p = 0; p < c->context[b]; p++, at++) {
      positions[at] = (int64_t)p;
      ids[at] = (int64_t)b;
    }
  }
  for (uint64_t i = 0; i < n_explicit; i++)
    positions[i] = explicit_positions[i];
  for (uint64_t i = 0; i < r->n_rows; i++) {
    r->positions[i] = positions[order[i]];
    r->request_ids[i] = ids[order[i]];
  }
  free(order), free(key), free(positions), free(ids);
}

// Block tables that walk through the cache with a stride, so that no request's blocks stand next to each other. Slots of the context rows.
static inline void rig_lay_out(struct rig *r, uint64_t block_size) {
  r->block_size = block_size;
  r->max_blocks = 0;
  for (uint64_t b = 0; b < r->n_requests; b++) {
    uint64_t n = ((uint64_t)r->anchor_positions[b] + r->m->block_width + block_size - 1) / block_size;
    r->max_blocks = n > r->max_blocks ? n : r->max_blocks;
  }
  free(r->tables);
  r->tables = rig_array(r->n_requests * r->max_blocks, 4);
  for (uint64_t b = 0; b < r->n_requests; b++)
    for (uint64_t i = 0; i < r->max_blocks; i++)
      r->tables[b * r->max_blocks + i] = (int32_t)((r->max_blocks - 1 - i) * r->n_requests + b);
  for (uint64_t i = 0; i < r->n_rows && r->n_requests > 0; i++) {
    uint64_t position = (uint64_t)r->positions[i];
    int64_t block = r->tables[(uint64_t)r->request_ids[i] * r->max_blocks + position / block_size];
    r->slots[i] = block * (int64_t)block_size + (int64_t)(position % block_size);
  }
}

static inline void rig_fail(const struct k3_error *err) {
  char text[1024];
  fail_msg("%s", k3_error_text(err, text, sizeof text));
}

static inline void rig_session(struct rig *r, int n_threads) {
  struct k3_error err = {0};
  k3_session_free(r->session);
  struct k3_session_options options = {
      .max_requests = r->n_requests, .max_context_rows = 8, .max_keys = r->max_blocks * r->block_size, .n_threads = n_threads};
  r->session = k3_session_create(r->engine, &options, &err);
  if (!r->session)
    rig_fail(&err);
}

static inline void rig_cache(struct rig *r, enum k3_dtype dtype, const float *scales) {
  struct k3_error err = {0};
  k3_cache_free(r->engine, &r->cache);
  if (k3_cache_create(r->engine, dtype, r->n_requests * r->max_blocks + 1, r->block_size, scales, &r->cache, &err) != K3_OK)
    rig_fail(&err);
}

static inline void rig_engine(struct rig *r, const struct k3_engine_options *options) {
  struct k3_error err = {0};
  k3_session_free(r->session);
  r->session = NULL;
  k3_engine_free(r->engine);
  r->engine = k3_engine_open_image(&r->fixture.image, options, &err);
  if (!r->engine)
    rig_fail(&err);
}

static inline void rig_open(struct rig *r, const struct fixture_case *c) {
  memset(r, 0, sizeof *r);
  fixture_open(&r->fixture, c);
  r->m = &c->model;
  r->E = r->m->kv_lora_rank + r->m->qk_rope_head_dim;
  rig_scenario(r, c, NULL, 0);
  rig_lay_out(r, RIG_BLOCK_SIZE);
  rig_engine(r, NULL);
  rig_session(r, 2);
  rig_cache(r, k3_engine_info(r->engine)->activation_dtype, NULL);
  const uint64_t q = r->n_requests * r->m->block_width;
  r->context_states = rig_array(r->n_rows * r->m->hidden_size, 4);
  r->context_kv = rig_array(r->m->n_layers * r->n_rows * r->E, 4);
  r->hidden = rig_array(q * r->m->hidden_size, 4);
  r->base_logits = rig_array(q * r->m->vocab_size, 4);
  r->logits = rig_array(q * r->m->vocab_size, 4);
  r->confidence = rig_array(q, 4);
  r->draft_ids = rig_array(q, 8);
}

static inline void rig_close(struct rig *r) {
  k3_session_free(r->session);
  k3_cache_free(r->engine, &r->cache);
  k3_engine_free(r->engine);
  void *arrays[] = {r->states,         r->positions,  r->request_ids, r->slots,       r->anchor_ids, r->anchor_positions, r->tables,
                    r->context_states, r->context_kv, r->hidden,      r->base_logits, r->logits,     r->confidence,       r->draft_ids};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
    free(arrays[i]);
  fixture_close(&r->fixture);
}

static inline struct k3_array rig_f32(float *data) {
  return (struct k3_array){.data = data, .dtype = K3_DTYPE_F32};
}

static inline enum k3_status rig_try_append(struct rig *r, struct k3_error *err) {
  struct k3_array taps = {.data = r->states, .dtype = r->state_dtype};
  struct k3_context context = {.n_rows = r->n_rows,
                               .taps = &taps,
                               .n_tap_arrays = 1,
                               .positions = r->positions,
                               .slots = r->slots,
                               .states = rig_f32(r->context_states),
                               .rows = rig_f32(r->context_kv)};
  return k3_session_append(r->session, &r->cache, &context, NULL, err);
}

static inline struct k3_draft rig_draft_params(struct rig *r) {
  return (struct k3_draft){.n_requests = r->n_requests,
                           .anchor_ids = r->anchor_ids,
                           .anchor_positions = r->anchor_positions,
                           .block_tables = r->tables,
                           .max_blocks = r->max_blocks,
                           .draft_ids = {.data = r->draft_ids, .dtype = K3_DTYPE_I64},
                           .confidence = rig_f32(r->m->confidence_head ? r->confidence : NULL),
                           .hidden = rig_f32(r->hidden),
                           .base_logits = rig_f32(r->base_logits),
                           .logits = rig_f32(r->logits)};
}

static inline void rig_append(struct rig *r) {
  struct k3_error err = {0};
  if (rig_try_append(r, &err) != K3_OK)
    rig_fail(&err);
}

static inline void rig_draft(struct rig *r, const int64_t *previous_ids) {
  struct k3_error err = {0};
  struct k3_draft draft = rig_draft_params(r);
  draft.previous_ids = previous_ids;
  if (k3_session_draft(r->session, &r->cache, &draft, NULL, &err) != K3_OK)
    rig_fail(&err);
}

static inline void rig_run(struct rig *r) {
  rig_append(r);
  rig_draft(r, NULL);
}

#endif
