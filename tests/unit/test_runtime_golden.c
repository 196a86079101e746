// The forward against its independent re-enactment (fixtures/gen/dspark_oracle.py): float64, keys and values expanded per head, no code in common.
#include "dspark_rig.h"

static double distance(const float *ours, const double *truth, uint64_t n, double *norm) {
  double sum = 0, total = 0;
  for (uint64_t i = 0; i < n; i++) {
    sum += ((double)ours[i] - truth[i]) * ((double)ours[i] - truth[i]);
    total += truth[i] * truth[i];
  }
  *norm = sqrt(total);
  return sqrt(sum);
}

// |ours - truth| and |truth| over the part of an output that belongs to request b.
static double request_distance(const struct rig *r, const char *name, const float *ours, const double *truth, uint64_t b, double *norm) {
  const uint64_t T = r->m->block_width, H = r->m->hidden_size, V = r->m->vocab_size;
  if (strncmp(name, "context_", 8) != 0) {
    uint64_t n = strcmp(name, "hidden") == 0 ? T * H : strcmp(name, "confidence") == 0 ? T : T * V;
    return distance(ours + b * n, truth + b * n, n, norm);
  }
  double sum = 0, total = 0;
  bool is_states = strcmp(name, "context_states") == 0;
  for (uint64_t row = 0; row < r->n_rows; row++) {
    if (r->request_ids[row] != (int64_t)b)
      continue;
    for (uint64_t i = 0; i < (is_states ? 1 : r->m->n_layers); i++) {
      uint64_t width = is_states ? H : r->E, at = (i * r->n_rows + row) * width;
      double part_norm, d = distance(ours + at, truth + at, width, &part_norm);
      sum += d * d;
      total += part_norm * part_norm;
    }
  }
  *norm = sqrt(total);
  return sqrt(sum);
}

static const float *output_of(const struct rig *r, const char *name) {
  const struct {
    const char *name;
    const float *values;
  } outputs[] = {{"context_states", r->context_states}, {"context_kv", r->context_kv}, {"hidden", r->hidden},
                 {"base_logits", r->base_logits},       {"logits", r->logits},         {"confidence", r->confidence}};
  for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
    if (strcmp(outputs[i].name, name) == 0)
      return outputs[i].values;
  return NULL;
}

static const char *const OUTPUTS[] = {"context_states", "context_kv", "hidden", "base_logits", "logits", "confidence"};

// F32 checkpoints within ||a-b|| <= 1e-5 ||b|| per tensor and request, drafts identical.
static void check_f32(const struct fixture_case *c) {
  struct rig r;
  struct golden g;
  rig_open(&r, c);
  golden_open(&g, c);
  assert_int_equal(k3_engine_info(r.engine)->activation_dtype, K3_DTYPE_F32);
  rig_run(&r);
  for (size_t i = 0; i < sizeof OUTPUTS / sizeof OUTPUTS[0]; i++) {
    double *truth = golden_values(&g, OUTPUTS[i]), norm;
    if (!truth) {
      assert_false(c->model.confidence_head);
      continue;
    }
    for (uint64_t b = 0; b < r.n_requests; b++) {
      double d = request_distance(&r, OUTPUTS[i], output_of(&r, OUTPUTS[i]), truth, b, &norm);
      if (!(d <= 1e-5 * norm))
        fail_msg("%s: %s of request %llu is off by %g of its norm", c->name, OUTPUTS[i], (unsigned long long)b, d / norm);
    }
    free(truth);
  }
  double *ids = golden_values(&g, "draft_ids");
  for (uint64_t i = 0; i < r.n_requests * c->model.block_width; i++)
    assert_int_equal(r.draft_ids[i], (int64_t)ids[i]);
  free(ids);
  golden_close(&g);
  rig_close(&r);
}

static void test_f32_agrees_with_float64(void **state) {
  (void)state;
  check_f32(&TINY_F32);
  check_f32(&VARIANT_F32);  // causal block, one norm per tap, plain rotation, confidence without Markov part, logit scale, odd widths
  check_f32(&LIMIT_F32);    // the block ends at the model's last position; no confidence head
  check_f32(&WIDE_F32);
}

// BF16 checkpoints at most 1.5 x as far from float64 as a numpy run with the same casts; drafts identical wherever the margin exceeds the difference.
static void check_bf16(const struct fixture_case *c) {
  struct rig r;
  struct golden g;
  rig_open(&r, c);
  golden_open(&g, c);
  assert_int_equal(k3_engine_info(r.engine)->activation_dtype, K3_DTYPE_BF16);
  double *ids = golden_values(&g, "draft_ids"), *logits = golden_values(&g, "logits");
  const uint64_t T = c->model.block_width, V = c->model.vocab_size, q = r.n_requests * T;
  int64_t *previous = rig_array(q, 8);
  for (uint64_t i = 0; i < q; i++)
    previous[i] = (int64_t)ids[i];
  rig_append(&r);
  rig_draft(&r, previous);  // conditioned as the reference run was
  for (size_t i = 0; i < sizeof OUTPUTS / sizeof OUTPUTS[0]; i++) {
    char name[64];
    snprintf(name, sizeof name, "bf16_distance.%s", OUTPUTS[i]);
    double *truth = golden_values(&g, OUTPUTS[i]), *reference = golden_values(&g, name), norm;
    assert_non_null(truth);
    assert_non_null(reference);
    for (uint64_t b = 0; b < r.n_requests; b++) {
      double d = request_distance(&r, OUTPUTS[i], output_of(&r, OUTPUTS[i]), truth, b, &norm);
      if (!(d <= 1.5 * reference[b]))
        fail_msg("%s: %s of request %llu is %g from float64, the reference run %g", c->name, OUTPUTS[i], (unsigned long long)b, d, reference[b]);
    }
    free(truth);
    free(reference);
  }
  uint64_t n_compared = 0;
  for (uint64_t row = 0; row < q; row++) {
    double best = -INFINITY, second = -INFINITY, off = 0;
    for (uint64_t v = 0; v < V; v++) {
      double logit = logits[row * V + v];
      second = logit > best ? best : fmax(second, logit);
      best = fmax(best, logit);
      off = fmax(off, fabs((double)r.logits[row * V + v] - logit));
    }
    if (best - second > 2 * off) {
      assert_int_equal(r.draft_ids[row], (int64_t)ids[row]);
      n_compared++;
    }
  }
  assert_true(n_compared * 4 >= q * 3);  // otherwise the fixture proves too little
  free(ids);
  free(logits);
  free(previous);
  golden_close(&g);
  rig_close(&r);
}

static void test_bf16_is_as_close_as_the_reference_casts(void **state) {
  (void)state;
  check_bf16(&TINY_BF16);
  check_bf16(&WIDE_BF16);
}

// Each deliberate fault of the oracle must be told from the truth by the comparison above, far beyond its tolerance.
static void test_every_mutation_is_noticed(void **state) {
  (void)state;
  static const char *const mutations[] = {
      "neox",      "causal",        "row_shift", "previous_shift", "w1_w2_swapped",     "mscale_forgotten", "mscale_twice", "clamp_high",
      "amplitude", "parts_swapped", "eps",       "row_dropped",    "context_input_norm"};
  struct rig r;
  struct golden g;
  rig_open(&r, &TINY_F32);
  golden_open(&g, &TINY_F32);
  rig_run(&r);
  for (size_t i = 0; i < sizeof mutations / sizeof mutations[0]; i++) {
    char name[64];
    snprintf(name, sizeof name, "mutant.%s", mutations[i]);
    double *wrong = golden_values(&g, name), norm, worst = 0;
    assert_non_null(wrong);
    for (uint64_t b = 0; b < r.n_requests; b++) {
      double d = request_distance(&r, "logits", r.logits, wrong, b, &norm);
      worst = fmax(worst, d / norm);
    }
    if (!(worst > 1e-2))
      fail_msg("the comparison would not notice the mutation %s: %g", mutations[i], worst);
    free(wrong);
  }
  golden_close(&g);
  rig_close(&r);
}

// Positions up to the model's limit, rotated in float from a float angle.
static void test_far_positions(void **state) {
  (void)state;
  static const int64_t positions[] = {0, 1, 2, 1000, 32767, 32768, 524287, 1048574, 1048575};
  enum { N = sizeof positions / sizeof positions[0] };
  struct rig r;
  struct golden g;
  memset(&r, 0, sizeof r);
  fixture_open(&r.fixture, &FAR_F32);
  golden_open(&g, &FAR_F32);
  r.m = &FAR_F32.model;
  r.E = r.m->kv_lora_rank + r.m->qk_rope_head_dim;
  rig_scenario(&r, &FAR_F32, positions, N);
  rig_engine(&r, NULL);
  r.block_size = 16, r.max_blocks = 1;
  rig_session(&r, 1);
  rig_cache(&r, K3_DTYPE_F32, NULL);
  r.context_states = rig_array(N * r.m->hidden_size, 4);
  r.context_kv = rig_array(2 * N * r.E, 4);
  for (int i = 0; i < N; i++)
    r.slots[i] = i;
  rig_append(&r);
  double *truth = golden_values(&g, "context_kv"), norm;
  for (uint64_t row = 0; row < 2 * N; row++) {
    double d = distance(r.context_kv + row * r.E, truth + row * r.E, r.E, &norm);
    if (!(d <= 1e-5 * norm))
      fail_msg("row %d at position %lld is off by %g", (int)row % N, (long long)positions[row % N], d / norm);
  }
  free(truth);
  golden_close(&g);
  rig_close(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_f32_agrees_with_float64),
      cmocka_unit_test(test_bf16_is_as_close_as_the_reference_casts),
      cmocka_unit_test(test_every_mutation_is_noticed),
      cmocka_unit_test(test_far_positions),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
