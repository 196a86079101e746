// One contract for both backends: positions, slots, anchors and block tables that make no sense are K3_BAD_ARGUMENT and name what is wrong, on the
// CPU, on the device when the call is done, and in a stream of the caller by the next call. Nothing is written beyond the cache; the session goes on.
#include <stdio.h>
#include <string.h>

#include "tests/kernels/model.h"

enum { N_ROWS = 3, BLOCK_SIZE = 4, N_BLOCKS = 6, MAX_BLOCKS = 4, MAX_KEYS = 16 };

// What is wrong with an append (slots, positions) or a draft (anchor, tables); NULL: nothing.
struct refusal {
  const char *name, *wrong, *found;
  int64_t positions[N_ROWS], slots[N_ROWS], anchor;
  int32_t table[MAX_BLOCKS];
};
static const struct refusal CASES[] = {
    {"nothing", NULL, NULL, {0, 1, 2}, {20, -1, 22}, 3, {5, 0, 1, 2}},
    {"a slot beyond the cache", "slots", "row 1 has", {0, 1, 2}, {20, 24, 22}, 3, {5, 0, 1, 2}},
    {"a slot far beyond it", "slots", "row 2 has", {0, 1, 2}, {20, 21, INT64_MAX}, 3, {5, 0, 1, 2}},
    {"a position below 0", "positions", "row 0 has", {-1, 1, 2}, {20, 21, 22}, 3, {5, 0, 1, 2}},
    {"an anchor below 0", "anchor_positions", "request 0", {0, 1, 2}, {20, 21, 22}, -3, {5, 0, 1, 2}},
    {"an anchor beyond the limit", "anchor_positions", "request 0", {0, 1, 2}, {20, 21, 22}, INT64_MAX / 2, {5, 0, 1, 2}},
    {"more keys than there is room for", "anchor_positions", "request 0 needs", {0, 1, 2}, {20, 21, 22}, MAX_KEYS - 2, {5, 0, 1, 2}},
    {"a block that is not", "block_tables", "request 0 has none", {0, 1, 2}, {20, 21, 22}, 3, {5, 6, 1, 2}},
    {"a block below 0", "block_tables", "request 0 has none", {0, 1, 2}, {20, 21, 22}, 3, {-1, 0, 1, 2}},
};

struct side {
  struct k3_engine *engine;
  struct k3_session *session;
  struct k3_cache cache;
  void *taps, *positions, *slots, *ids, *anchors, *tables, *out;
};

static enum k3_status open_side(struct side *s, const struct test_model *model, const char *backend, struct k3_error *err) {
  const struct k3_session_options options = {.max_requests = 1, .max_keys = MAX_KEYS, .n_threads = 1};
  s->engine = test_engine_create(model, backend, NULL, 0, 1, err);
  s->session = s->engine ? k3_session_create(s->engine, &options, err) : NULL;
  if (!s->session)
    return err->status;
  const uint64_t width = model->dims.n_taps * model->dims.target_hidden_size;
  struct {
    void **memory;
    size_t nbytes;
  } list[] = {{&s->taps, N_ROWS * width * 4}, {&s->positions, N_ROWS * 8},           {&s->slots, N_ROWS * 8}, {&s->ids, 8}, {&s->anchors, 8},
              {&s->tables, MAX_BLOCKS * 4},   {&s->out, model->dims.block_width * 8}};
  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
    K3_TRY(k3_memory_create(s->engine, list[i].nbytes, list[i].memory, err));
  return k3_cache_create(s->engine, K3_DTYPE_F32, N_BLOCKS, BLOCK_SIZE, NULL, &s->cache, err);
}

static void close_side(struct side *s) {
  void *list[] = {s->taps, s->positions, s->slots, s->ids, s->anchors, s->tables, s->out};
  for (size_t i = 0; s->engine && i < sizeof list / sizeof list[0]; i++)
    k3_memory_free(s->engine, list[i]);
  if (s->engine)
    k3_cache_free(s->engine, &s->cache);
  k3_session_free(s->session);
  test_engine_free(s->engine);
}

// Appends and drafts once; with a stream the error is the next call's, here an append of nothing wrong.
static enum k3_status run(struct side *s, const struct refusal *c, void *stream, struct k3_error *err) {
  const enum k3_memory memory = s->engine->info.memory;
  const struct k3_array taps = {s->taps, memory, K3_DTYPE_F32, 0};
  const struct k3_context context = {.n_rows = N_ROWS, .taps = &taps, .n_tap_arrays = 1, .positions = s->positions, .slots = s->slots};
  const struct k3_draft draft = {.n_requests = 1,
                                 .anchor_ids = s->ids,
                                 .anchor_positions = s->anchors,
                                 .block_tables = s->tables,
                                 .max_blocks = MAX_BLOCKS,
                                 .draft_ids = {s->out, memory, K3_DTYPE_I64, 0}};
  K3_TRY(k3_memory_write(s->engine, s->positions, c->positions, sizeof c->positions, err));
  K3_TRY(k3_memory_write(s->engine, s->slots, c->slots, sizeof c->slots, err));
  K3_TRY(k3_memory_write(s->engine, s->anchors, &c->anchor, sizeof c->anchor, err));
  K3_TRY(k3_memory_write(s->engine, s->tables, c->table, sizeof c->table, err));
  K3_TRY(k3_session_append(s->session, &s->cache, &context, stream, err));
  if (stream) {
    int64_t id;
    K3_TRY(k3_memory_read(s->engine, &id, s->ids, sizeof id, err));  // waits
  }
  K3_TRY(k3_session_draft(s->session, &s->cache, &draft, stream, err));
  if (!stream)
    return K3_OK;
  int64_t id;
  K3_TRY(k3_memory_read(s->engine, &id, s->ids, sizeof id, err));
  K3_TRY(k3_memory_write(s->engine, s->positions, CASES[0].positions, sizeof c->positions, err));
  K3_TRY(k3_memory_write(s->engine, s->slots, CASES[0].slots, sizeof c->slots, err));
  return k3_session_append(s->session, &s->cache, &context, stream, err);
}

static bool check(struct side *s, const struct refusal *c, const char *backend, void *stream) {
  struct k3_error err = {0};
  const enum k3_status status = run(s, c, stream, &err);
  char text[1024];
  if (c->wrong ? status == K3_BAD_ARGUMENT && strcmp(err.tensor, c->wrong) == 0 && strncmp(err.found, c->found, strlen(c->found)) == 0
               : status == K3_OK)
    return true;
  printf("FAILED %s%s: %s: %s\n", backend, stream ? " in a stream" : "", c->name, k3_error_text(&err, text, sizeof text));
  return false;
}

int main(void) {
  static const struct test_scheme f32 = {"f32", K3_SCHEME_F32, K3_SECOND_NONE};
  static const char *const backends[] = {"cpu", "cuda"};
  struct test_model model;
  int n_failed = 0, n_run = 0;
  test_model_create(&model, &f32, 0, 5);
  for (int b = 0; b < 2; b++) {
    struct side side = {0};
    struct k3_error err = {0};
    char text[1024];
    if (open_side(&side, &model, backends[b], &err) != K3_OK) {
      printf("FAILED %s: %s\n", backends[b], k3_error_text(&err, text, sizeof text));
      n_failed++;
    }
    for (size_t c = 0; side.session && c < sizeof CASES / sizeof CASES[0]; c++) {
      n_run += 2;
      n_failed += !check(&side, &CASES[c], backends[b], NULL);
      n_failed += !check(&side, &CASES[0], backends[b], NULL);  // and it is over with that
    }
    // The device's default stream by its number (cudaStreamLegacy), so that this file needs no CUDA.
    for (size_t c = 0; side.session && b == 1 && c < sizeof CASES / sizeof CASES[0]; c++) {
      n_run++;
      n_failed += !check(&side, &CASES[c], backends[b], (void *)(uintptr_t)1);
    }
    close_side(&side);
  }
  test_model_free(&model);
  printf("%d refusals, %d failed\n", n_run, n_failed);
  return n_failed > 0;
}
