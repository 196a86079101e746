// How a serving engine embeds the drafter. Everything that such an engine has already stays its own: the paged cache, the slots of its rows, the taps
// of the target one array each, and the target's embedding and head, which the image does not hold. Only runtime/runtime.h is included.
//
//   embed IMAGE DATA      DATA is a file of little-endian numbers: u64 n (context rows), u64 anchor id, then
//                         n * A * Ht floats (taps), V * H floats (embedding), V * H floats (head)
//
// Prints the drafted ids of one request whose context is the n rows.
#include <runtime/runtime.h>
#include <stdio.h>
#include <stdlib.h>

static void *read_floats(FILE *file, uint64_t n) {
  float *values = malloc(n * sizeof *values + 1);
  if (!values || fread(values, sizeof *values, n, file) != n) {
    fprintf(stderr, "the data end early\n");
    exit(1);
  }
  return values;
}

static int fail(const char *what, const struct k3_error *err) {
  char text[1024];
  fprintf(stderr, "%s: %s: %s\n", what, k3_status_text(err->status), k3_error_text(err, text, sizeof text));
  return 1;
}

int main(int argc, char **argv) {
  struct k3_error err = {0};
  uint64_t head[2];
  FILE *file = argc == 3 ? fopen(argv[2], "rb") : NULL;
  if (!file || fread(head, sizeof head, 1, file) != 1) {
    fprintf(stderr, "usage: embed IMAGE DATA\n");
    return 2;
  }

  // The shapes come from the image, so it is opened once to ask, and again with the tensors it borrows.
  struct k3_engine *engine = k3_engine_open(argv[1], NULL, &err);
  if (!engine)
    return fail("open", &err);
  struct k3_engine_info info = *k3_engine_info(engine);
  k3_engine_free(engine);
  const uint64_t n = head[0], width = info.n_taps * info.target_hidden_size;
  float *states = read_floats(file, n * width);
  float *embedding = read_floats(file, info.vocab_size * info.hidden_size), *lm_head = read_floats(file, info.vocab_size * info.hidden_size);
  fclose(file);
  struct k3_engine_options options = {
      .embed_tokens = {.data = embedding, .memory = K3_MEMORY_HOST, .dtype = K3_DTYPE_F32},
      .lm_head = {.data = lm_head, .memory = K3_MEMORY_HOST, .dtype = K3_DTYPE_F32},
  };
  engine = k3_engine_open(argv[1], &options, &err);
  if (!engine)
    return fail("open", &err);
  info = *k3_engine_info(engine);

  // The engine's own cache: 8 rows a block, one allocation a layer, the request's blocks in whatever order they were free.
  enum { BLOCK_SIZE = 8 };
  const uint64_t n_blocks = (n + info.block_width + BLOCK_SIZE - 1) / BLOCK_SIZE;
  const uint64_t row_nbytes = info.row_width * (info.activation_dtype == K3_DTYPE_F32 ? 4 : 2);
  void **layers = calloc(info.n_layers, sizeof *layers);
  for (uint64_t i = 0; i < info.n_layers; i++)
    layers[i] = calloc(n_blocks * BLOCK_SIZE, row_nbytes);
  struct k3_cache cache = {
      .memory = K3_MEMORY_HOST,
      .dtype = info.activation_dtype,
      .layers = layers,
      .n_blocks = n_blocks,
      .block_size = BLOCK_SIZE,
      .block_nbytes = BLOCK_SIZE * row_nbytes,
      .row_nbytes = row_nbytes,
  };
  int32_t *table = calloc(n_blocks, sizeof *table);
  for (uint64_t i = 0; i < n_blocks; i++)
    table[i] = (int32_t)(n_blocks - 1 - i);

  struct k3_session_options session_options = {.max_requests = 1, .max_keys = n_blocks * BLOCK_SIZE};
  struct k3_session *session = k3_session_create(engine, &session_options, &err);
  if (!session)
    return fail("session", &err);

  // After the target's forward: its taps, one array each (here columns of one), and where the rows go.
  struct k3_array *taps = calloc(info.n_taps, sizeof *taps);
  int64_t *positions = calloc(n + 1, sizeof *positions), *slots = calloc(n + 1, sizeof *slots);
  for (uint64_t t = 0; t < info.n_taps; t++)
    taps[t] = (struct k3_array){states + t * info.target_hidden_size, K3_MEMORY_HOST, K3_DTYPE_F32, width * sizeof(float)};
  for (uint64_t i = 0; i < n; i++) {
    positions[i] = (int64_t)i;
    slots[i] = (int64_t)table[i / BLOCK_SIZE] * BLOCK_SIZE + (int64_t)(i % BLOCK_SIZE);
  }
  struct k3_context context = {.n_rows = n, .taps = taps, .n_tap_arrays = info.n_taps, .positions = positions, .slots = slots};
  if (k3_session_append(session, &cache, &context, NULL, &err) != K3_OK)
    return fail("append", &err);

  // Before the next one: drafts for the token that was just sampled.
  const int64_t anchor = (int64_t)head[1], m = (int64_t)n;
  int64_t *ids = calloc(info.block_width, sizeof *ids);
  struct k3_draft draft = {
      .n_requests = 1,
      .anchor_ids = &anchor,
      .anchor_positions = &m,
      .block_tables = table,
      .max_blocks = n_blocks,
      .draft_ids = {.data = ids, .memory = K3_MEMORY_HOST, .dtype = K3_DTYPE_I64},
  };
  if (k3_session_draft(session, &cache, &draft, NULL, &err) != K3_OK)
    return fail("draft", &err);
  for (uint64_t k = 0; k < info.block_width; k++)
    printf("%lld%c", (long long)ids[k], k + 1 < info.block_width ? ' ' : '\n');

  k3_session_free(session);
  k3_engine_free(engine);
  for (uint64_t i = 0; i < info.n_layers; i++)
    free(layers[i]);
  void *rest[] = {layers, table, taps, positions, slots, ids, states, embedding, lm_head};
  for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++)
    free(rest[i]);
  return 0;
}
