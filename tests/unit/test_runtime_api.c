// What an embedding engine relies on: what influences what, paging, threads, memory, borrowed tensors, refusals.
#include "base/alloc.h"
#include "dspark_rig.h"
#include "quant/number.h"

static bool same(const float *a, const float *b, uint64_t n) {
  return memcmp(a, b, n * sizeof *a) == 0;
}

static float *copy_of(const float *values, uint64_t n) {
  float *copy = rig_array(n, sizeof *copy);
  memcpy(copy, values, n * sizeof *copy);
  return copy;
}

static float *hidden_row(struct rig *r, uint64_t b, uint64_t t) {
  return r->hidden + (b * r->m->block_width + t) * r->m->hidden_size;
}

// Adds 1 to every element of row `row` of an F32 tensor with n_cols columns; row UINT64_MAX: of the whole tensor.
static void disturb(struct rig *r, const char *name, uint64_t row, uint64_t n_cols) {
  uint64_t n;
  float *values = fixture_data(&r->fixture, name, &n);
  for (uint64_t i = 0; i < n; i++)
    if (row == UINT64_MAX || i / n_cols == row) {
      float value = k3_load_f32(values, i) + 1;
      memcpy((unsigned char *)values + 4 * i, &value, sizeof value);
    }
}

// Bidirectional block: changing the input of the later rows changes row 0. In a causal block it must not.
static void test_block_mask(void **state) {
  (void)state;
  const struct fixture_case *cases[] = {&TINY_F32, &VARIANT_F32};
  for (int k = 0; k < 2; k++) {
    struct rig r;
    rig_open(&r, cases[k]);
    const uint64_t H = r.m->hidden_size, n = r.n_requests * r.m->block_width * H;
    rig_run(&r);
    float *before = copy_of(r.hidden, n);
    disturb(&r, "model.embed_tokens.weight", r.m->mask_token_id, H);  // rows 1 .. T-1 of every request
    rig_draft(&r, NULL);
    for (uint64_t b = 0; b < r.n_requests; b++) {
      if ((uint64_t)r.anchor_ids[b] == r.m->mask_token_id)
        continue;
      assert_int_equal(same(before + b * r.m->block_width * H, hidden_row(&r, b, 0), H), r.m->causal);
      assert_false(same(before + (b * r.m->block_width + 1) * H, hidden_row(&r, b, 1), H));
    }
    free(before);
    rig_close(&r);
  }
}

// The last context row, m - 1, is seen by all rows; what lies in the cache from slot m on is not context.
static void test_context_boundaries(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  const uint64_t H = r.m->hidden_size, T = r.m->block_width, n = r.n_requests * T * H, b = 3, m = TINY_F32.context[3];
  rig_run(&r);
  float *before = copy_of(r.hidden, n);
  for (uint64_t i = 0; i < r.m->n_layers; i++)
    for (uint64_t position = m; position < m + T; position++) {
      uint64_t slot = (uint64_t)r.tables[b * r.max_blocks + position / r.block_size] * r.block_size + position % r.block_size;
      memset((unsigned char *)r.cache.layers[i] + slot * r.cache.row_nbytes, 0xff, r.cache.row_nbytes);  // NaN
    }
  rig_draft(&r, NULL);
  assert_true(same(before, r.hidden, n));
  uint64_t slot = (uint64_t)r.tables[b * r.max_blocks + (m - 1) / r.block_size] * r.block_size + (m - 1) % r.block_size;
  float *row = (float *)((unsigned char *)r.cache.layers[0] + slot * r.cache.row_nbytes);
  for (uint64_t e = 0; e < r.E; e++)
    row[e] += 1;
  rig_draft(&r, NULL);
  for (uint64_t t = 0; t < T; t++)
    assert_false(same(before + (b * T + t) * H, hidden_row(&r, b, t), H));
  assert_true(same(before, r.hidden, b * T * H));  // the other requests are not touched
  free(before);
  rig_close(&r);
}

// The context path does not pass through any layer's input norm.
static void test_context_is_invariant_to_input_layernorm(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  const uint64_t n_states = r.n_rows * r.m->hidden_size, n_kv = r.m->n_layers * r.n_rows * r.E,
                 n_hidden = r.n_requests * r.m->block_width * r.m->hidden_size;
  rig_run(&r);
  float *states = copy_of(r.context_states, n_states), *kv = copy_of(r.context_kv, n_kv), *hidden = copy_of(r.hidden, n_hidden);
  disturb(&r, "model.layers.0.input_layernorm.weight", 0, 1);
  disturb(&r, "model.layers.1.input_layernorm.weight", 2, 1);
  rig_run(&r);
  assert_true(same(states, r.context_states, n_states));
  assert_true(same(kv, r.context_kv, n_kv));
  assert_false(same(hidden, r.hidden, n_hidden));
  free(states), free(kv), free(hidden);
  rig_close(&r);
}

// B86: slot 0 depends on the anchor alone, slot k on the token before it; the base logits on neither.
static void test_markov_dependence(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  const uint64_t T = r.m->block_width, V = r.m->vocab_size, n = r.n_requests * T * V;
  rig_run(&r);
  float *logits = copy_of(r.logits, n), *base = copy_of(r.base_logits, n);
  int64_t *previous = rig_array(r.n_requests * T, 8);
  memcpy(previous, r.draft_ids, r.n_requests * T * 8);
  rig_draft(&r, previous);  // its own drafts: nothing changes
  assert_true(same(logits, r.logits, n));
  previous[1] = (previous[1] + 1) % (int64_t)V;  // request 0, what follows slot 1
  rig_draft(&r, previous);
  assert_true(same(base, r.base_logits, n));
  for (uint64_t k = 0; k < T; k++)
    assert_int_equal(same(logits + k * V, r.logits + k * V, V), k != 2);
  r.anchor_ids[1] = (r.anchor_ids[1] + 1) % (int64_t)V;
  rig_draft(&r, previous);
  assert_false(same(logits + T * V, r.logits + T * V, V));
  free(logits), free(base), free(previous);
  rig_close(&r);
}

// Ties go to the lowest id, within one work item of the vocabulary (256 ids) and between two.
static void test_ties_go_to_the_lowest_id(void **state) {
  (void)state;
  static const struct {
    uint64_t rows[3], n_rows;
    int64_t expected;
  } cases[] = {{{0}, 0, 0}, {{9, 5, 300}, 3, 5}, {{300, 9}, 2, 9}, {{319, 300}, 2, 300}};
  struct rig r;
  rig_open(&r, &WIDE_F32);
  uint64_t n;
  memset(fixture_data(&r.fixture, "lm_head.weight", &n), 0, r.m->vocab_size * r.m->hidden_size * sizeof(float));
  float *w1 = fixture_data(&r.fixture, "model.markov_head.markov_w1.weight", &n);
  const float one = 1;
  for (uint64_t i = 0; i < n; i++)
    memcpy((unsigned char *)w1 + 4 * i, &one, sizeof one);
  unsigned char *w2 = fixture_data(&r.fixture, "model.markov_head.markov_w2.weight", &n);
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    memset(w2, 0, n * sizeof(float));
    for (uint64_t i = 0; i < cases[k].n_rows * r.m->markov_rank; i++)
      memcpy(w2 + 4 * (cases[k].rows[i / r.m->markov_rank] * r.m->markov_rank + i % r.m->markov_rank), &one, sizeof one);
    rig_run(&r);
    for (uint64_t i = 0; i < r.m->block_width; i++)
      assert_int_equal(r.draft_ids[i], cases[k].expected);
  }
  rig_close(&r);
}

// Any thread count gives the same bits.
static void test_thread_count_does_not_show(void **state) {
  (void)state;
  const struct fixture_case *cases[] = {&TINY_F32, &TINY_BF16, &WIDE_F32};
  for (int k = 0; k < 3; k++) {
    struct rig r;
    rig_open(&r, cases[k]);
    const uint64_t q = r.n_requests * r.m->block_width;
    rig_session(&r, 1);
    rig_run(&r);
    float *kv = copy_of(r.context_kv, r.m->n_layers * r.n_rows * r.E), *logits = copy_of(r.logits, q * r.m->vocab_size),
          *conf = copy_of(r.confidence, q);
    static const int threads[] = {2, 3, 7};
    for (int t = 0; t < 3; t++) {
      rig_session(&r, threads[t]);
      rig_cache(&r, r.cache.dtype, NULL);
      memset(r.logits, 0, q * r.m->vocab_size * sizeof *r.logits);
      rig_run(&r);
      assert_true(same(kv, r.context_kv, r.m->n_layers * r.n_rows * r.E));
      assert_true(same(logits, r.logits, q * r.m->vocab_size));
      assert_true(same(conf, r.confidence, q));
    }
    free(kv), free(logits), free(conf);
    rig_close(&r);
  }
}

// 64 requests of different length at once, in blocks of any size: each row as when it is alone, bit for bit.
static void test_64_requests_and_block_sizes(void **state) {
  (void)state;
  struct fixture_case many = TINY_F32;
  many.n_requests = 64;
  for (uint64_t b = 0; b < many.n_requests; b++)
    many.context[b] = b * 7 % 23;
  struct rig r;
  rig_open(&r, &many);
  const uint64_t T = r.m->block_width, V = r.m->vocab_size, q = r.n_requests * T;
  rig_run(&r);
  float *logits = copy_of(r.logits, q * V);
  static const uint64_t block_sizes[] = {1, 3, 64};
  for (int k = 0; k < 3; k++) {
    rig_lay_out(&r, block_sizes[k]);
    rig_session(&r, 2);
    rig_cache(&r, K3_DTYPE_F32, NULL);
    memset(r.logits, 0, q * V * sizeof *r.logits);
    rig_run(&r);
    assert_true(same(logits, r.logits, q * V));
  }
  for (uint64_t b = 0; b < r.n_requests; b += 9) {
    struct k3_draft draft = rig_draft_params(&r);
    draft.n_requests = 1;
    draft.anchor_ids += b;
    draft.anchor_positions += b;
    draft.block_tables += b * r.max_blocks;
    assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_OK);
    assert_true(same(logits + b * T * V, r.logits, T * V));
  }
  free(logits);
  rig_close(&r);
}

// B97: no rows, no requests: success, nothing written. Empty context: finite logits (request 0 of the fixture has none).
static void test_zero_rows(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  struct k3_context context = {0};
  struct k3_draft draft = {0};
  assert_int_equal(k3_session_append(r.session, &r.cache, &context, NULL, NULL), K3_OK);
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_OK);
  rig_run(&r);
  for (uint64_t i = 0; i < r.m->block_width * r.m->vocab_size; i++)
    assert_true(isfinite(r.logits[i]));
  rig_close(&r);
}

// Slot -1 is computed and dropped; slots may differ by layer.
static void test_slots(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  rig_append(&r);
  const uint64_t row_nbytes = r.cache.row_nbytes, n_slots = r.cache.n_blocks * r.cache.block_size;
  int64_t *by_layer = rig_array(2 * r.n_rows, 8);
  for (uint64_t row = 0; row < r.n_rows; row++) {
    by_layer[row] = row == 5 ? -1 : (int64_t)row;
    by_layer[r.n_rows + row] = (int64_t)(r.n_rows - row);
  }
  float *kv = copy_of(r.context_kv, 2 * r.n_rows * r.E);
  for (int i = 0; i < 2; i++)
    memset(r.cache.layers[i], 0xee, n_slots * row_nbytes);
  struct k3_array taps = {.data = r.states, .dtype = K3_DTYPE_F32};
  struct k3_context context = {.n_rows = r.n_rows,
                               .taps = &taps,
                               .n_tap_arrays = 1,
                               .positions = r.positions,
                               .slots = by_layer,
                               .slots_layer_stride = r.n_rows,
                               .rows = rig_f32(r.context_kv)};
  assert_int_equal(k3_session_append(r.session, &r.cache, &context, NULL, NULL), K3_OK);
  assert_true(same(kv, r.context_kv, 2 * r.n_rows * r.E));
  for (uint64_t row = 0; row < r.n_rows; row++) {
    const unsigned char *first = (unsigned char *)r.cache.layers[0] + row * row_nbytes;
    const unsigned char *second = (unsigned char *)r.cache.layers[1] + (r.n_rows - row) * row_nbytes;
    if (row == 5)
      assert_true(first[0] == 0xee && first[row_nbytes - 1] == 0xee);
    else
      assert_memory_equal(first, kv + row * r.E, row_nbytes);
    assert_memory_equal(second, kv + (r.n_rows + row) * r.E, row_nbytes);
  }
  assert_true(((unsigned char *)r.cache.layers[0])[r.n_rows * row_nbytes] == 0xee);
  free(by_layer), free(kv);
  rig_close(&r);
}

// Taps as one array or one per tap, rows apart, BF16 or F32; a cache of the caller's with rows and blocks apart.
static void test_layouts_of_the_caller(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_BF16);
  rig_run(&r);
  const uint64_t A = r.m->n_taps, Ht = r.m->target_hidden_size, n_kv = r.m->n_layers * r.n_rows * r.E, q = r.n_requests * r.m->block_width;
  float *kv = copy_of(r.context_kv, n_kv), *logits = copy_of(r.logits, q * r.m->vocab_size);
  const uint64_t stride = (Ht + 3) * sizeof(float);
  struct k3_array taps[2];
  for (uint64_t a = 0; a < A; a++) {
    taps[a] = (struct k3_array){.data = rig_array(r.n_rows, stride), .dtype = K3_DTYPE_F32, .row_nbytes = stride};
    for (uint64_t row = 0; row < r.n_rows; row++)
      for (uint64_t i = 0; i < Ht; i++)
        *(float *)((unsigned char *)taps[a].data + row * stride + 4 * i) = k3_load_bf16(r.states, row * A * Ht + a * Ht + i);
  }
  // Rows of 64 bytes, blocks of 4 rows and a gap; the layers lie in two allocations.
  void *layers[2] = {rig_array(r.cache.n_blocks, 4 * 64 + 32), rig_array(r.cache.n_blocks, 4 * 64 + 32)};
  struct k3_cache own = {
      .dtype = K3_DTYPE_BF16, .layers = layers, .n_blocks = r.cache.n_blocks, .block_size = 4, .block_nbytes = 4 * 64 + 32, .row_nbytes = 64};
  struct k3_context context = {.n_rows = r.n_rows,
                               .taps = taps,
                               .n_tap_arrays = A,
                               .positions = r.positions,
                               .slots = r.slots,
                               .rows = {.data = rig_array(r.m->n_layers * r.n_rows, 96), .dtype = K3_DTYPE_F32, .row_nbytes = 96}};
  assert_int_equal(k3_session_append(r.session, &own, &context, NULL, NULL), K3_OK);
  for (uint64_t row = 0; row < r.m->n_layers * r.n_rows; row++)
    assert_memory_equal((unsigned char *)context.rows.data + row * 96, kv + row * r.E, r.E * sizeof(float));
  struct k3_draft draft = rig_draft_params(&r);
  memset(r.logits, 0, q * r.m->vocab_size * sizeof *r.logits);
  assert_int_equal(k3_session_draft(r.session, &own, &draft, NULL, NULL), K3_OK);
  assert_true(same(logits, r.logits, q * r.m->vocab_size));
  free(taps[0].data), free(taps[1].data), free(layers[0]), free(layers[1]), free(context.rows.data), free(kv), free(logits);
  rig_close(&r);
}

// B82: embedding and head lent by the target win over the image's; a drafter without either is refused with the way out.
static void test_borrowed_embedding_and_head(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  rig_run(&r);
  const uint64_t H = r.m->hidden_size, V = r.m->vocab_size, n = r.n_requests * r.m->block_width * V, stride = (H + 2) * sizeof(float);
  float *logits = copy_of(r.logits, n);
  struct k3_engine_options options = {
      .embed_tokens = {.data = rig_array(V, stride), .dtype = K3_DTYPE_F32, .row_nbytes = stride},
      .lm_head = {.data = rig_array(V, H * sizeof(float)), .dtype = K3_DTYPE_F32},
  };
  uint64_t count;
  const float *embedding = fixture_data(&r.fixture, "model.embed_tokens.weight", &count);
  for (uint64_t v = 0; v < V; v++)
    memcpy((unsigned char *)options.embed_tokens.data + v * stride, (const unsigned char *)embedding + v * H * 4, H * 4);
  memcpy(options.lm_head.data, fixture_data(&r.fixture, "lm_head.weight", &count), V * H * 4);
  k3_cache_free(r.engine, &r.cache);
  // The image's own are spoiled: they must not be read.
  disturb(&r, "model.embed_tokens.weight", UINT64_MAX, H);
  disturb(&r, "lm_head.weight", UINT64_MAX, H);
  rig_engine(&r, &options);
  rig_session(&r, 2);
  rig_cache(&r, K3_DTYPE_F32, NULL);
  memset(r.logits, 0, n * sizeof *r.logits);
  rig_run(&r);
  assert_true(same(logits, r.logits, n));
  free(options.embed_tokens.data), free(options.lm_head.data), free(logits);
  k3_cache_free(r.engine, &r.cache);

  static const char *const borrowed[] = {"lm_head.weight", "model.embed_tokens.weight"};
  for (int k = 0; k < 2; k++) {
    // A name of the same length takes the tensor away from the binder.
    struct k3_st_tensor *tensor = (struct k3_st_tensor *)k3_st_find(&r.fixture.image.header, borrowed[k], strlen(borrowed[k]));
    char *name = (char *)tensor->name;
    name[0] = 'X';
    rig_engine(&r, NULL);
    rig_session(&r, 1);
    rig_cache(&r, K3_DTYPE_F32, NULL);
    struct k3_error err = {0};
    struct k3_draft draft = rig_draft_params(&r);
    rig_append(&r);
    assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, &err), K3_BAD_INPUT);
    assert_string_equal(err.tensor, borrowed[k]);
    assert_non_null(strstr(err.allowed, "--target"));
    name[0] = borrowed[k][0];
    k3_cache_free(r.engine, &r.cache);
  }
  rig_close(&r);
}

// stored = saturate(value / scale), one scale per layer for latent and rotary part alike; read back as stored * scale.
static void test_fp8_cache(void **state) {
  (void)state;
  static const float scales[2] = {0.03125f, 0.004f};
  static const enum k3_dtype dtypes[] = {K3_DTYPE_F8_E4M3, K3_DTYPE_F8_E5M2};
  struct rig r;
  rig_open(&r, &TINY_F32);
  rig_run(&r);
  const uint64_t n = r.n_requests * r.m->block_width * r.m->hidden_size;
  float *exact = copy_of(r.hidden, n);
  for (int k = 0; k < 2; k++) {
    rig_cache(&r, dtypes[k], scales);
    rig_append(&r);
    uint64_t n_saturated = 0;
    for (uint64_t i = 0; i < 2; i++)
      for (uint64_t row = 0; row < r.n_rows; row++)
        for (uint64_t e = 0; e < r.E; e++) {
          uint8_t stored = ((const uint8_t *)r.cache.layers[i])[(uint64_t)r.slots[row] * r.E + e];
          float value = r.context_kv[(i * r.n_rows + row) * r.E + e] / scales[i];
          assert_int_equal(stored, k == 0 ? k3_e4m3_from_f32(value) : k3_e5m2_from_f32(value));
          n_saturated += k == 0 && (stored & 0x7f) == 0x7e;
        }
    assert_true(k == 1 || n_saturated > 0);  // the second scale is too small for E4M3: saturation is tested
    rig_draft(&r, NULL);
    float *with_scales = copy_of(r.hidden, n);
    for (uint64_t i = 0; i < n; i++)
      assert_true(isfinite(with_scales[i]));
    rig_cache(&r, dtypes[k], NULL);
    rig_run(&r);
    assert_false(same(with_scales, r.hidden, n));
    double off = 0, norm = 0;
    for (uint64_t i = 0; i < n; i++) {
      off += ((double)r.hidden[i] - (double)exact[i]) * ((double)r.hidden[i] - (double)exact[i]);
      norm += (double)exact[i] * (double)exact[i];
    }
    assert_true(sqrt(off / norm) < (k == 0 ? 0.1 : 0.2) && off > 0);  // scale 1 fits these values: FP8 rounding and no more
    free(with_scales);
  }
  struct k3_error err = {0};
  struct k3_cache cache;
  static const float bad[2] = {1, 0};
  assert_int_equal(k3_cache_create(r.engine, K3_DTYPE_F8_E4M3, 1, 1, bad, &cache, &err), K3_BAD_ARGUMENT);
  assert_int_equal(k3_cache_create(r.engine, K3_DTYPE_BF16, 1, 1, scales, &cache, NULL), K3_BAD_ARGUMENT);  // scales must be absent
  assert_int_equal(k3_cache_create(r.engine, K3_DTYPE_F16, 1, 1, NULL, &cache, NULL), K3_BAD_ARGUMENT);
  free(exact);
  rig_close(&r);
}

// With power-of-two scales the scaled cache holds the same codes as scale 1 would of scaled values, and reading undoes it exactly.
static void test_fp8_scale_is_undone(void **state) {
  (void)state;
  static const float scales[2] = {0.25f, 4};
  struct rig r;
  rig_open(&r, &TINY_F32);
  const uint64_t n = r.n_requests * r.m->block_width * r.m->hidden_size;
  rig_cache(&r, K3_DTYPE_F8_E5M2, NULL);
  rig_run(&r);
  float *plain = copy_of(r.hidden, n);
  rig_cache(&r, K3_DTYPE_F8_E5M2, scales);
  rig_run(&r);
  double off = 0, norm = 0;
  for (uint64_t i = 0; i < n; i++) {
    off += ((double)r.hidden[i] - (double)plain[i]) * ((double)r.hidden[i] - (double)plain[i]);
    norm += (double)plain[i] * (double)plain[i];
  }
  assert_true(sqrt(off / norm) < 1e-3);  // equal but for values near E5M2's subnormals
  free(plain);
  rig_close(&r);
}

// No allocation in the step after warm-up.
static void test_no_allocation_in_a_step(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_BF16);
  rig_run(&r);
  uint64_t before = k3_alloc_count();
  for (int i = 0; i < 3; i++)
    rig_run(&r);
  assert_int_equal(k3_alloc_count(), before);
  rig_close(&r);
}

struct watched {
  uint64_t n_calls, total;
  uint64_t last_done;
};

static void watch(void *ctx, const char *what, uint64_t done, uint64_t total) {
  struct watched *w = ctx;
  assert_non_null(what);
  w->n_calls++;
  w->total = total;
  w->last_done = done;
}

// Sums over the steps of the newest call; the call's own time comes back.
static double summed_times(struct rig *r, uint64_t *weight_nbytes, uint64_t *n_calls, double *step_seconds) {
  struct k3_call_time times;
  assert_int_equal(k3_session_times(r->session, &times, NULL), K3_OK);
  *weight_nbytes = *n_calls = 0;
  *step_seconds = 0;
  for (size_t i = 0; i < times.n_steps; i++) {
    *weight_nbytes += times.steps[i].weight_nbytes;
    *n_calls += times.steps[i].n_calls;
    *step_seconds += times.steps[i].seconds;
    assert_true(times.steps[i].activation_nbytes > 0);
  }
  return times.seconds;
}

// Progress shown while it works: a draft counts exactly the weight bytes it promises, and so do the steps that a measurement sees.
static void test_progress_and_steps(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_BF16);
  struct watched watched = {0};
  struct k3_progress progress = {.fn = watch, .ctx = &watched};
  struct k3_session_options options = {.max_requests = r.n_requests, .max_context_rows = 8, .max_keys = 64, .n_threads = 2, .progress = &progress};
  k3_session_free(r.session);
  r.session = k3_session_create(r.engine, &options, NULL);
  assert_non_null(r.session);
  struct k3_call_time times;
  assert_int_equal(k3_session_times(r.session, &times, NULL), K3_BAD_ARGUMENT);
  k3_session_measure(r.session, &(struct k3_measure){.steps = true});
  rig_append(&r);
  const uint64_t n_passes = (r.n_rows + 7) / 8, context_nbytes = k3_engine_info(r.engine)->context_nbytes;
  uint64_t nbytes, n_calls;
  double seconds, step_seconds;
  assert_int_equal(progress.done, n_passes * context_nbytes);
  assert_int_equal(watched.total, n_passes * context_nbytes);
  seconds = summed_times(&r, &nbytes, &n_calls, &step_seconds);
  assert_int_equal(nbytes, n_passes * context_nbytes);
  assert_int_equal(n_calls, 2 * n_passes);
  assert_true(seconds > 0 && step_seconds > 0.999 * seconds && step_seconds < 1.001 * seconds);  // every moment belongs to a step
  rig_draft(&r, NULL);
  assert_int_equal(progress.done, k3_engine_info(r.engine)->draft_nbytes);
  summed_times(&r, &nbytes, &n_calls, &step_seconds);
  assert_int_equal(nbytes, k3_engine_info(r.engine)->draft_nbytes);
  assert_true(watched.n_calls > 0 && watched.last_done == watched.total && n_calls > 10);
  rig_close(&r);
}

// A measurement of whole calls has no times of steps, one of a step alone takes no other, and one that ends leaves a session as new.
static void test_measure(void **state) {
  (void)state;
  struct rig r;
  uint64_t nbytes, n_calls;
  double seconds, step_seconds;
  struct k3_call_time times;
  rig_open(&r, &TINY_BF16);
  rig_append(&r);
  rig_draft(&r, NULL);
  int64_t ids[64];
  const uint64_t n_ids = r.n_requests * k3_engine_info(r.engine)->block_width;
  assert_true(n_ids <= 64);
  memcpy(ids, r.draft_ids, n_ids * sizeof *ids);
  k3_session_measure(r.session, &(struct k3_measure){.calls = true, .cold = true});
  rig_draft(&r, NULL);
  seconds = summed_times(&r, &nbytes, &n_calls, &step_seconds);
  assert_true(seconds > 0 && step_seconds == 0);
  assert_int_equal(nbytes, k3_engine_info(r.engine)->draft_nbytes);
  memset(r.draft_ids, 0xff, n_ids * sizeof *ids);
  k3_session_measure(r.session, &(struct k3_measure){.calls = true, .only_step = "mlp"});
  rig_draft(&r, NULL);
  assert_int_equal(k3_session_times(r.session, &times, NULL), K3_OK);
  assert_true(times.seconds > 0 && times.n_steps == 1 && strcmp(times.steps[0].step, "mlp") == 0);
  assert_int_equal(times.steps[0].n_calls, k3_engine_info(r.engine)->n_layers);
  assert_int_equal(r.draft_ids[0], -1);  // the Markov loop was left out
  k3_session_measure(r.session, &(struct k3_measure){0});
  rig_draft(&r, NULL);
  assert_memory_equal(r.draft_ids, ids, n_ids * sizeof *ids);
  assert_int_equal(k3_session_times(r.session, &times, NULL), K3_BAD_ARGUMENT);
  double bandwidth;
  assert_int_equal(k3_session_bandwidth(r.session, &bandwidth, NULL), K3_OK);
  assert_true(bandwidth > 1e7);
  rig_close(&r);
}

// Memory that fails at any allocation of opening leaves nothing behind and says so.
static void test_failing_memory(void **state) {
  (void)state;
  struct fixture f;
  fixture_open(&f, &TINY_F32);
  int n_failures = 0;
  for (uint64_t n = 1;; n++) {
    struct k3_error err = {0};
    k3_alloc_fail_at(n);
    struct k3_engine *engine = k3_engine_open_image(&f.image, NULL, &err);
    struct k3_cache cache = {0};
    enum k3_status status = engine ? k3_cache_create(engine, K3_DTYPE_F32, 2, 4, NULL, &cache, &err) : K3_NO_MEMORY;
    struct k3_session *session = NULL;
    if (status == K3_OK) {
      struct k3_session_options options = {.max_requests = 2, .max_context_rows = 4, .max_keys = 8, .n_threads = 2};
      session = k3_session_create(engine, &options, &err);
    }
    bool whole = session != NULL;
    k3_session_free(session);
    if (engine)
      k3_cache_free(engine, &cache);
    k3_engine_free(engine);
    k3_alloc_fail_at(0);
    if (whole)
      break;
    assert_int_equal(err.status, K3_NO_MEMORY);
    n_failures++;
  }
  assert_true(n_failures > 20);
  fixture_close(&f);
}

// The anchor is clamped into the vocabulary; positions beyond the limit are clamped to it and their rows dropped.
static void test_clamps(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &LIMIT_F32);
  const uint64_t n = r.n_requests * r.m->block_width * r.m->vocab_size;
  r.anchor_ids[0] = 0;
  r.anchor_ids[1] = (int64_t)r.m->vocab_size - 1;
  rig_run(&r);
  float *logits = copy_of(r.logits, n);
  r.anchor_ids[0] = -1;
  r.anchor_ids[1] = (int64_t)r.m->vocab_size + 5;
  rig_draft(&r, NULL);
  assert_true(same(logits, r.logits, n));
  // m + T is one above the limit: the first rows still see every key, nothing is written outside.
  r.anchor_positions[0] = 26;
  rig_draft(&r, NULL);
  for (uint64_t i = 0; i < r.m->block_width * r.m->vocab_size; i++)
    assert_true(isfinite(r.logits[i]));
  free(logits);
  rig_close(&r);
}

static void test_refusals(void **state) {
  (void)state;
  struct rig r;
  rig_open(&r, &TINY_F32);
  rig_append(&r);
  struct k3_error err = {0};
  r.slots[2] = (int64_t)(r.cache.n_blocks * r.cache.block_size);
  assert_int_equal(rig_try_append(&r, &err), K3_BAD_ARGUMENT);
  assert_string_equal(err.tensor, "slots");
  struct k3_draft draft = rig_draft_params(&r);
  draft.max_blocks = 1;  // too few for request 3
  err = (struct k3_error){0};
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, &err), K3_BAD_ARGUMENT);
  assert_string_equal(err.tensor, "block_tables");
  draft = rig_draft_params(&r);
  r.tables[0] = (int32_t)r.cache.n_blocks;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  r.tables[0] = 0;
  draft.n_requests = r.n_requests + 1;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  draft.n_requests = r.n_requests;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, &draft, NULL), K3_BAD_ARGUMENT);  // a stream on a CPU
  draft.logits.dtype = K3_DTYPE_BF16;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  draft.logits.dtype = K3_DTYPE_F32;
  draft.hidden.memory = K3_MEMORY_DEVICE;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  draft.hidden.memory = K3_MEMORY_HOST;
  struct k3_cache wrong = r.cache;
  wrong.row_nbytes--;
  assert_int_equal(k3_session_draft(r.session, &wrong, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  r.anchor_positions[0] = -1;
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  r.anchor_positions[0] = (int64_t)(r.max_blocks * r.block_size);  // more keys than the session has room for
  assert_int_equal(k3_session_draft(r.session, &r.cache, &draft, NULL, NULL), K3_BAD_ARGUMENT);
  struct k3_engine_options options = {.backend = "tpu"};
  err = (struct k3_error){0};
  assert_null(k3_engine_open_image(&r.fixture.image, &options, &err));
  assert_int_equal(err.status, K3_UNSUPPORTED);
  rig_close(&r);

  // A tensor that is missing or has another shape is IMG01 and names itself; a view that points elsewhere is IMG03.
  struct fixture f;
  fixture_open(&f, &TINY_F32);
  err = (struct k3_error){0};
  f.view.shards[1].row--;
  assert_null(k3_engine_open_image(&f.image, NULL, &err));
  assert_int_equal(err.rule, K3_IMG03);
  f.view.shards[1].row++;
  char *name = (char *)k3_st_find(&f.image.header, "model.layers.1.mlp.down_proj.weight", 35)->name;
  name[0] = 'X';
  err = (struct k3_error){0};
  assert_null(k3_engine_open_image(&f.image, NULL, &err));
  assert_int_equal(err.rule, K3_IMG01);
  name[0] = 'm';
  assert_string_equal(err.tensor, "model.layers.1.mlp.down_proj.weight");
  f.image.manifest.dspark.q_lora_rank++;
  err = (struct k3_error){0};
  assert_null(k3_engine_open_image(&f.image, NULL, &err));
  assert_int_equal(err.rule, K3_IMG01);
  fixture_close(&f);
}

// B94: per head nope rows, then value rows: 2 heads, nope 2, value 3, rank 4, rows filled with 10 * head + row. The absorbed query and the expanded value
// of each head must meet their own rows only.
static void test_kv_b_split(void **state) {
  (void)state;
  enum { N = 2, P = 2, VD = 3, RK = 4, R = 2, D = P + R };
  float kv_b[N * (P + VD)][RK], q_b[N * D][1], q_a[1] = {1}, inv[1] = {1};
  for (int h = 0; h < N; h++)
    for (int row = 0; row < P + VD; row++)
      for (int e = 0; e < RK; e++)
        kv_b[h * (P + VD) + row][e] = (float)(10 * h + row) + 0.25f * (float)e;
  for (int i = 0; i < N * D; i++)
    q_b[i][0] = (float)(i + 1);
  struct k3_matrix_shard kv_shard = {.n_rows = N * (P + VD), .second = 1}, q_shard = {.n_rows = N * D, .second = 1};
  kv_shard.codes = (struct k3_quant_matrix){.scheme = k3_quant_scheme_default(K3_SCHEME_F32), .n_rows = N * (P + VD), .n_cols = RK, .weight = kv_b};
  q_shard.codes = (struct k3_quant_matrix){.scheme = k3_quant_scheme_default(K3_SCHEME_F32), .n_rows = N * D, .n_cols = 1, .weight = q_b};
  struct k3_matrix kv_matrix = {N * (P + VD), RK, &kv_shard, 1}, q_matrix = {N * D, 1, &q_shard, 1};
  struct k3_rope_table rope = {inv, 1, 1};
  struct k3_backend *backend = k3_cpu_backend_create(false, NULL);
  struct k3_exec_options options = {.max_rows = 1,
                                    .max_requests = 1,
                                    .max_keys = 1,
                                    .block_width = 1,
                                    .row_width = RK + R,
                                    .max_cols = 16,
                                    .vocab_size = 1,
                                    .markov_rank = 1,
                                    .n_threads = 1};
  struct k3_exec *exec;
  assert_int_equal(backend->ops->exec_create(backend, &options, &exec, NULL), K3_OK);
  int64_t position = 0, n_keys = 1, anchor = 0;
  float q[N * D], query[N][RK + R], latent[N][RK], out[N][VD];
  struct k3_query params = {.n_rows = 1,
                            .q_rank = 1,
                            .n_heads = N,
                            .nope_width = P,
                            .rope_width = R,
                            .v_width = VD,
                            .latent_rank = RK,
                            .q_a = q_a,
                            .q_b = &q_matrix,
                            .kv_b = &kv_matrix,
                            .rope = &rope,
                            .positions = &position,
                            .q = q,
                            .out = query};
  assert_int_equal(backend->ops->query(exec, &params, NULL), K3_OK);
  for (int h = 0; h < N; h++)
    for (int e = 0; e < RK; e++) {
      float expected = 0;
      for (int p = 0; p < P; p++)
        expected += (float)(h * D + p + 1) * ((float)(10 * h + p) + 0.25f * (float)e);
      assert_true(fabsf(query[h][e] - expected) < 1e-4f);
    }
  assert_true(query[1][RK] == 7 && query[1][RK + 1] == 8);  // the rotary part, position 0
  // B98: one key: attention gives its latent back, also with a score near -60,000.
  float row[RK + R] = {1, 0, -2, 0.5f, 0, 0};
  void *layers[1] = {row};
  struct k3_cache cache = {
      .dtype = K3_DTYPE_F32, .layers = layers, .n_blocks = 1, .block_size = 1, .block_nbytes = sizeof row, .row_nbytes = sizeof row};
  int32_t table = 0;
  for (int pass = 0; pass < 2; pass++) {
    struct k3_attend attend = {.n_requests = 1,
                               .block_width = 1,
                               .n_heads = N,
                               .nope_width = P,
                               .rope_width = R,
                               .v_width = VD,
                               .latent_rank = RK,
                               .max_blocks = 1,
                               .query = query,
                               .kv_b = &kv_matrix,
                               .cache = &cache,
                               .block_tables = &table,
                               .n_keys = &n_keys,
                               .anchor_positions = &anchor,
                               .scale = pass == 0 ? 1.f : -60000.f,
                               .latent = latent,
                               .out = out};
    assert_int_equal(backend->ops->attend(exec, &attend, NULL), K3_OK);
    for (int h = 0; h < N; h++)
      for (int v = 0; v < VD; v++) {
        float expected = 0;
        for (int e = 0; e < RK; e++)
          expected += row[e] * ((float)(10 * h + P + v) + 0.25f * (float)e);
        assert_true(fabsf(out[h][v] - expected) < 1e-4f);
      }
  }
  // B98: no key at all: exactly 0, whatever lies in the cache.
  n_keys = 0;
  for (int e = 0; e < RK + R; e++)
    row[e] = NAN;
  struct k3_attend attend = {.n_requests = 1,
                             .block_width = 1,
                             .n_heads = N,
                             .nope_width = P,
                             .rope_width = R,
                             .v_width = VD,
                             .latent_rank = RK,
                             .max_blocks = 1,
                             .query = query,
                             .kv_b = &kv_matrix,
                             .cache = &cache,
                             .block_tables = &table,
                             .n_keys = &n_keys,
                             .anchor_positions = &anchor,
                             .scale = 1,
                             .latent = latent,
                             .out = out};
  assert_int_equal(backend->ops->attend(exec, &attend, NULL), K3_OK);
  for (int h = 0; h < N; h++)
    for (int v = 0; v < VD; v++)
      assert_true(out[h][v] == 0);
  backend->ops->exec_destroy(exec);
  backend->ops->destroy(backend);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_block_mask),
      cmocka_unit_test(test_context_boundaries),
      cmocka_unit_test(test_context_is_invariant_to_input_layernorm),
      cmocka_unit_test(test_markov_dependence),
      cmocka_unit_test(test_ties_go_to_the_lowest_id),
      cmocka_unit_test(test_thread_count_does_not_show),
      cmocka_unit_test(test_64_requests_and_block_sizes),
      cmocka_unit_test(test_zero_rows),
      cmocka_unit_test(test_slots),
      cmocka_unit_test(test_layouts_of_the_caller),
      cmocka_unit_test(test_borrowed_embedding_and_head),
      cmocka_unit_test(test_fp8_cache),
      cmocka_unit_test(test_fp8_scale_is_undone),
      cmocka_unit_test(test_no_allocation_in_a_step),
      cmocka_unit_test(test_progress_and_steps),
      cmocka_unit_test(test_measure),
      cmocka_unit_test(test_failing_memory),
      cmocka_unit_test(test_clamps),
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_kv_b_split),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
