// Ranks of tensor parallelism as threads, against one rank and against the float64 re-enactment; and the reduction plan that they execute: what
// happens when it is wrong and nobody verified it.
#include <pthread.h>
#include <time.h>

#include "dspark_rig.h"
#include "runtime/comm.h"
#include "runtime/weights.h"

enum { MAX_RANKS = 8 };

// The rules that the recipe gives an image of the drafter; lists are sorted by name.
static struct k3_manifest_tensor RULES[] = {
    {"lm_head.*", K3_ROLE_BORROWED, K3_TP_VOCAB, NULL, 0, 0},
    {"model.layers.{i}.mlp.down_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.mlp.gate_up_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.kv_b_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.o_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.self_attn.q_b_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
};
static struct k3_manifest_pair REDUCTIONS[] = {
    {"model.layers.{i}.self_attn.o_proj", "model.layers.{i}.post_attention_layernorm"},
    {"model.layers.{i}.mlp.down_proj", "model.layers.{i+1}.input_layernorm | model.final_norm"},
};

struct ranks {
  int n;
  struct rig rigs[MAX_RANKS];
  struct k3_comm *comms[MAX_RANKS];
  pthread_t threads[MAX_RANKS];
  enum k3_status status[MAX_RANKS];
  struct k3_error errs[MAX_RANKS];
};

static void ranks_open(struct ranks *ranks, const struct fixture_case *c, int n, int n_threads, double bound_seconds) {
  memset(ranks, 0, sizeof *ranks);
  ranks->n = n;
  if (n > 1)
    assert_int_equal(k3_comm_threads_create(n, bound_seconds, ranks->comms, NULL), K3_OK);
  for (int r = 0; r < n; r++) {
    rig_open(&ranks->rigs[r], c);
    struct k3_manifest *manifest = &ranks->rigs[r].fixture.image.manifest;
    manifest->tensors = RULES;
    manifest->n_tensors = sizeof RULES / sizeof RULES[0];
    manifest->reductions = REDUCTIONS;
    manifest->n_reductions = 2;
    rig_engine(&ranks->rigs[r], &(struct k3_engine_options){.tp_rank = r, .tp_size = n, .comm = ranks->comms[r]});
    rig_session(&ranks->rigs[r], n_threads);
  }
}

static void ranks_close(struct ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) {
    rig_close(&ranks->rigs[r]);
    if (ranks->comms[r])
      ranks->comms[r]->ops->destroy(ranks->comms[r]);
  }
}

struct one {
  struct ranks *ranks;
  int rank;
};

static void *run_rank(void *arg) {
  struct one *one = arg;
  struct rig *r = &one->ranks->rigs[one->rank];
  struct k3_error *err = &one->ranks->errs[one->rank];
  enum k3_status status = rig_try_append(r, err);
  if (status == K3_OK) {
    struct k3_draft draft = rig_draft_params(r);
    status = k3_session_draft(r->session, &r->cache, &draft, NULL, err);
  }
  one->ranks->status[one->rank] = status;
  return NULL;
}

// Appends and drafts on all ranks but `absent` (-1: none is).
static void ranks_try(struct ranks *ranks, int absent) {
  struct one ones[MAX_RANKS];
  for (int r = 0; r < ranks->n; r++) {
    ones[r] = (struct one){ranks, r};
    if (r != absent)
      assert_int_equal(pthread_create(&ranks->threads[r], NULL, run_rank, &ones[r]), 0);
  }
  for (int r = 0; r < ranks->n; r++) {
    if (r != absent)
      pthread_join(ranks->threads[r], NULL);
  }
}

static void ranks_run(struct ranks *ranks) {
  ranks_try(ranks, -1);
  for (int r = 0; r < ranks->n; r++) {
    if (ranks->status[r] != K3_OK)
      rig_fail(&ranks->errs[r]);
  }
}

struct output {
  const char *name;
  const float *values;
  uint64_t n;
};

static void outputs_of(const struct rig *r, struct output outputs[6]) {
  const uint64_t H = r->m->hidden_size, V = r->m->vocab_size, q = r->n_requests * r->m->block_width;
  outputs[0] = (struct output){"context_states", r->context_states, r->n_rows * H};
  outputs[1] = (struct output){"context_kv", r->context_kv, r->m->n_layers * r->n_rows * r->E};
  outputs[2] = (struct output){"hidden", r->hidden, q * H};
  outputs[3] = (struct output){"base_logits", r->base_logits, q * V};
  outputs[4] = (struct output){"logits", r->logits, q * V};
  outputs[5] = (struct output){"confidence", r->confidence, q};
}

// |a - b| / |b|
static double relative(const float *a, const float *b, uint64_t n) {
  double sum = 0, total = 0;
  for (uint64_t i = 0; i < n; i++) {
    sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    total += (double)b[i] * (double)b[i];
  }
  return sqrt(sum / total);
}

static double relative_to_golden(const struct rig *r, const struct golden *g, unsigned output) {
  struct output outputs[6];
  outputs_of(r, outputs);
  double *truth = golden_values(g, outputs[output].name), sum = 0, total = 0;
  assert_non_null(truth);
  for (uint64_t i = 0; i < outputs[output].n; i++) {
    sum += ((double)outputs[output].values[i] - truth[i]) * ((double)outputs[output].values[i] - truth[i]);
    total += truth[i] * truth[i];
  }
  free(truth);
  return sqrt(sum / total);
}

// tp 2, 4, 8 equal tp 1 within F32 rounding and the float64 re-enactment; every rank has the same bits.
static void tp_2_4_8_equal_tp_1_and_float64(void **state) {
  (void)state;
  static struct ranks one, many;
  struct golden g;
  struct output outputs[6], single[6];
  golden_open(&g, &RANKS_F32);
  ranks_open(&one, &RANKS_F32, 1, 1, 1);
  ranks_run(&one);
  outputs_of(&one.rigs[0], single);
  double *ids = golden_values(&g, "draft_ids");
  for (int tp = 2; tp <= MAX_RANKS; tp *= 2) {
    ranks_open(&many, &RANKS_F32, tp, 1, 60);
    ranks_run(&many);
    outputs_of(&many.rigs[0], outputs);
    for (unsigned i = 0; i < 6; i++) {
      double to_one = relative(outputs[i].values, single[i].values, outputs[i].n), to_truth = relative_to_golden(&many.rigs[0], &g, i);
      if (!(to_one <= 2e-6) || !(to_truth <= 1e-5))
        fail_msg("tp %d: %s is %g from tp 1, %g from float64", tp, outputs[i].name, to_one, to_truth);
      for (int r = 1; r < tp; r++) {
        struct output others[6];
        outputs_of(&many.rigs[r], others);
        assert_memory_equal(outputs[i].values, others[i].values, outputs[i].n * sizeof(float));
      }
    }
    for (uint64_t i = 0; i < many.rigs[0].n_requests * RANKS_F32.model.block_width; i++)
      assert_int_equal(many.rigs[0].draft_ids[i], (int64_t)ids[i]);
    ranks_close(&many);
  }
  free(ids);
  ranks_close(&one);
  golden_close(&g);
}

// BF16: the sum is rounded once, when it is complete; as close to float64 as one rank is, within the reference's own distance.
static void bf16_sums_are_rounded_once(void **state) {
  (void)state;
  static struct ranks one, many;
  struct golden g;
  golden_open(&g, &RANKS_BF16);
  ranks_open(&one, &RANKS_BF16, 1, 1, 1);
  ranks_run(&one);
  ranks_open(&many, &RANKS_BF16, 8, 1, 60);
  ranks_run(&many);
  double off_one = relative_to_golden(&one.rigs[0], &g, 2), off_many = relative_to_golden(&many.rigs[0], &g, 2);
  print_message("hidden: %g from float64 with one rank, %g with 8\n", off_one, off_many);
  assert_true(off_many <= 1.25 * off_one);
  ranks_close(&many);
  ranks_close(&one);
  golden_close(&g);
}

// Equal bits for equal tp, whatever the threads.
static void equal_bits_whatever_the_threads(void **state) {
  (void)state;
  static struct ranks few, many;
  struct output a[6], b[6];
  ranks_open(&few, &RANKS_F32, 4, 1, 60);
  ranks_run(&few);
  outputs_of(&few.rigs[0], a);
  for (int n_threads = 2; n_threads <= 3; n_threads++) {
    ranks_open(&many, &RANKS_F32, 4, n_threads, 60);
    ranks_run(&many);
    outputs_of(&many.rigs[0], b);
    for (unsigned i = 0; i < 6; i++)
      assert_memory_equal(a[i].values, b[i].values, a[i].n * sizeof(float));
    ranks_close(&many);
  }
  ranks_close(&few);
}

// ---- the plan is what the forward executes ----

static const struct k3_flow *altered(struct k3_flow *copy, const struct k3_flow *step, enum k3_reduce reduce) {
  *copy = *step;
  copy->reduce = reduce;
  return copy;
}

enum mutation { DROPPED, DOUBLED, LAYER_0, FINAL_DROPPED, IMMEDIATE, N_MUTATIONS };

// Changes the steps that a rank's forward looks at; the verifier is not asked.
static void mutate(struct k3_reductions *reductions, enum mutation mutation, struct k3_flow copies[2]) {
  switch (mutation) {
    case DROPPED: reductions->post_norm[1] = altered(&copies[0], reductions->post_norm[1], K3_REDUCE_NONE); break;
    case DOUBLED: reductions->down[0] = altered(&copies[0], reductions->down[0], K3_REDUCE_ALL); break;
    case LAYER_0: reductions->input_norm[0] = altered(&copies[0], reductions->input_norm[0], K3_REDUCE_ALL); break;
    case FINAL_DROPPED: reductions->final_norm = altered(&copies[0], reductions->final_norm, K3_REDUCE_NONE); break;
    default:  // no fault: the same sum, completed at once
      reductions->o_proj[0] = altered(&copies[0], reductions->o_proj[0], K3_REDUCE_ALL);
      reductions->post_norm[0] = altered(&copies[1], reductions->post_norm[0], K3_REDUCE_NONE);
      break;
  }
}

// With the verifier out of the way, the numbers show a reduction dropped, one done twice, and layer 0 reducing a reduced embedding; they show nothing
// when a sum is merely completed elsewhere, so there is no reduction in the forward beside the plan's.
static void unverified_plans_show_in_the_numbers(void **state) {
  (void)state;
  static struct ranks ranks;
  static struct k3_flow copies[MAX_RANKS][2];
  struct golden g;
  golden_open(&g, &RANKS_F32);
  for (int m = 0; m < N_MUTATIONS; m++) {
    ranks_open(&ranks, &RANKS_F32, 2, 1, 60);
    for (int r = 0; r < 2; r++)
      mutate(&ranks.rigs[r].engine->reductions, (enum mutation)m, copies[r]);
    ranks_run(&ranks);
    double off = relative_to_golden(&ranks.rigs[0], &g, 2);
    print_message("mutation %d: hidden is off by %g\n", m, off);
    if (m == IMMEDIATE)
      assert_true(off < 1e-5);
    else
      assert_true(off > 1e-2);
    ranks_close(&ranks);
  }
  golden_close(&g);
}

// One rank's step on the backend itself: partial sums (3, 0) and (0, 4) and the residual (1, 1).
struct step {
  struct k3_comm *comm;
  enum k3_status status;
  float partial[2], residual[2], out[2];
};

static void *reduce_add_norm(void *arg) {
  struct step *step = arg;
  static const float gain[2] = {1, 2};
  const struct k3_vector norm = {gain, K3_DTYPE_F32, 2};
  struct k3_backend *backend = k3_cpu_backend_create(false, NULL);
  struct k3_exec *exec = NULL;
  const struct k3_exec_options options = {.max_rows = 1,
                                          .max_requests = 1,
                                          .max_keys = 1,
                                          .block_width = 1,
                                          .row_width = 1,
                                          .max_cols = 2,
                                          .vocab_size = 2,
                                          .markov_rank = 1,
                                          .n_threads = 1,
                                          .comm = step->comm};
  step->status = backend ? backend->ops->exec_create(backend, &options, &exec, NULL) : K3_NO_MEMORY;
  if (step->status == K3_OK)
    step->status = backend->ops->reduce_add_norm(exec,
                                                 &(struct k3_reduce_add_norm){.n_rows = 1,
                                                                              .width = 2,
                                                                              .partial = step->partial,
                                                                              .reduce = true,
                                                                              .name = "the norm",
                                                                              .residual = step->residual,
                                                                              .norm = &norm,
                                                                              .eps = 0,
                                                                              .out = step->out},
                                                 NULL);
  if (exec)
    backend->ops->exec_destroy(exec);
  if (backend)
    backend->ops->destroy(backend);
  return NULL;
}

// B95: each partial sum is reduced exactly once: the norm's input is (4, 5); never reduced it would be (4, 1) or (1, 5), reduced twice (7, 9). With one
// rank the sum is complete as it comes.
static void norm_reads_each_sum_completed_once(void **state) {
  (void)state;
  struct k3_comm *comms[2];
  struct step steps[2] = {{.partial = {3, 0}, .residual = {1, 1}}, {.partial = {0, 4}, .residual = {1, 1}}};
  struct step alone = {.partial = {3, 4}, .residual = {1, 1}};
  pthread_t threads[2];
  assert_int_equal(k3_comm_threads_create(2, 20, comms, NULL), K3_OK);
  for (int r = 0; r < 2; r++) {
    steps[r].comm = comms[r];
    assert_int_equal(pthread_create(&threads[r], NULL, reduce_add_norm, &steps[r]), 0);
  }
  for (int r = 0; r < 2; r++)
    pthread_join(threads[r], NULL);
  reduce_add_norm(&alone);
  for (int r = 0; r < 3; r++) {
    const struct step *step = r < 2 ? &steps[r] : &alone;
    assert_int_equal(step->status, K3_OK);
    assert_true(step->residual[0] == 4 && step->residual[1] == 5);
    assert_float_equal(step->out[0], 4 / sqrt(20.5), 1e-6);
    assert_float_equal(step->out[1], 10 / sqrt(20.5), 1e-6);
  }
  for (int r = 0; r < 2; r++)
    comms[r]->ops->destroy(comms[r]);
}

// A block with zero rows or zero requests: success on every rank, and no collective is left waiting.
static void *run_nothing(void *arg) {
  struct one *one = arg;
  struct rig *r = &one->ranks->rigs[one->rank];
  struct k3_error *err = &one->ranks->errs[one->rank];
  const struct k3_context context = {0};
  const struct k3_draft draft = {0};
  enum k3_status status = k3_session_append(r->session, &r->cache, &context, NULL, err);
  if (status == K3_OK)
    status = k3_session_draft(r->session, &r->cache, &draft, NULL, err);
  one->ranks->status[one->rank] = status;
  return status == K3_OK ? run_rank(arg) : NULL;
}

static void zero_rows_leave_no_collective_waiting(void **state) {
  (void)state;
  static struct ranks ranks;
  struct one ones[2];
  ranks_open(&ranks, &RANKS_F32, 2, 1, 5);
  for (int r = 0; r < 2; r++) {
    ones[r] = (struct one){&ranks, r};
    assert_int_equal(pthread_create(&ranks.threads[r], NULL, run_nothing, &ones[r]), 0);
  }
  for (int r = 0; r < 2; r++) {
    pthread_join(ranks.threads[r], NULL);
    assert_int_equal(ranks.status[r], K3_OK);
  }
  ranks_close(&ranks);
}

// ---- ranks that fail ----

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// A rank that never drafts ends in an error naming it within the bound, never a hang.
static void absent_rank_is_named_within_the_bound(void **state) {
  (void)state;
  static struct ranks ranks;
  ranks_open(&ranks, &RANKS_F32, 4, 1, 0.3);
  double begin = now();
  ranks_try(&ranks, 2);
  assert_true(now() - begin < 5);
  for (int r = 0; r < 4; r++) {
    if (r == 2)
      continue;
    assert_int_equal(ranks.status[r], K3_COMM);
    assert_non_null(strstr(ranks.errs[r].found, "rank 2 is late or dead"));
    assert_string_equal(ranks.errs[r].tensor, "model.layers.0.post_attention_layernorm");
  }
  ranks_close(&ranks);
}

// A rank whose step fails (here: one that was given an anchor below 0) is told to the others at once.
static void failing_rank_is_named_at_once(void **state) {
  (void)state;
  static struct ranks ranks;
  ranks_open(&ranks, &RANKS_F32, 2, 1, 60);
  ranks.rigs[1].anchor_positions[0] = -1;
  double begin = now();
  ranks_try(&ranks, -1);
  assert_true(now() - begin < 20);
  assert_int_equal(ranks.status[1], K3_BAD_ARGUMENT);
  assert_int_equal(ranks.status[0], K3_COMM);
  assert_non_null(strstr(ranks.errs[0].found, "rank 1 stopped"));
  ranks_close(&ranks);
}

static void widths_that_cut_a_head_are_refused(void **state) {
  (void)state;
  static struct rig rig;
  struct k3_comm *comms[16];
  struct k3_error err = {0};
  rig_open(&rig, &RANKS_F32);
  rig.fixture.image.manifest.tensors = RULES;
  rig.fixture.image.manifest.n_tensors = sizeof RULES / sizeof RULES[0];
  rig.fixture.image.manifest.reductions = REDUCTIONS;
  rig.fixture.image.manifest.n_reductions = 2;
  assert_int_equal(k3_comm_threads_create(16, 1, comms, NULL), K3_OK);
  assert_null(k3_engine_open_image(&rig.fixture.image, &(struct k3_engine_options){.tp_rank = 3, .tp_size = 16, .comm = comms[3]}, &err));
  assert_int_equal(err.rule, K3_PCK05);
  assert_int_equal(err.status, K3_UNSUPPORTED);
  // The communicator must be the rank's own.
  err = (struct k3_error){0};
  assert_null(k3_engine_open_image(&rig.fixture.image, &(struct k3_engine_options){.tp_rank = 1, .tp_size = 2}, &err));
  assert_int_equal(err.status, K3_BAD_ARGUMENT);
  // A map that leaves a sum out gives no plan for several ranks.
  rig.fixture.image.manifest.n_reductions = 1;
  struct k3_comm *two[2];
  assert_int_equal(k3_comm_threads_create(2, 1, two, NULL), K3_OK);
  err = (struct k3_error){0};
  assert_null(k3_engine_open_image(&rig.fixture.image, &(struct k3_engine_options){.tp_rank = 0, .tp_size = 2, .comm = two[0]}, &err));
  assert_int_equal(err.rule, K3_RED01);
  for (int r = 0; r < 16; r++)
    comms[r]->ops->destroy(comms[r]);
  for (int r = 0; r < 2; r++)
    two[r]->ops->destroy(two[r]);
  rig_close(&rig);
}

// A sealed manifest may say anything. A module that it cuts in another way than the forward takes it for is refused by name, since widths of buffers and
// the sums over ranks follow from how modules are cut.
static void other_rules_than_the_forwards_are_refused(void **state) {
  (void)state;
  enum { N_RULES = sizeof RULES / sizeof RULES[0] };
  struct rig r;
  rig_open(&r, &RANKS_F32);
  struct k3_manifest_tensor rules[N_RULES];
  const struct k3_weights_source source = {.image = &r.fixture.image, .tp_rank = 1, .tp_size = 2};
  r.fixture.image.manifest.tensors = rules;
  r.fixture.image.manifest.n_tensors = N_RULES;
  for (int i = 0; i < N_RULES; i++) {
    for (int rule = K3_TP_REPLICATE; rule <= K3_TP_VOCAB; rule++) {
      struct k3_weights weights;
      struct k3_error err = {0};
      memcpy(rules, RULES, sizeof rules);
      rules[i].tp = (enum k3_tp_rule)rule;
      enum k3_status status = k3_weights_bind(&source, r.m, NULL, NULL, &weights, &err);
      bool whole_head = i == 0 && rule == K3_TP_REPLICATE;  // every rank computes all logits
      if (rules[i].tp == RULES[i].tp || whole_head)
        assert_int_equal(status, K3_OK);
      else if (status != K3_BAD_INPUT || err.rule != K3_IMG01 || !strstr(err.found, "rule for several ranks"))
        fail_msg("%s with rule %d: status %d, %s", rules[i].name, rule, (int)status, err.found);
      k3_weights_free(&weights);
    }
  }
  rig_close(&r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(tp_2_4_8_equal_tp_1_and_float64),       cmocka_unit_test(bf16_sums_are_rounded_once),
      cmocka_unit_test(equal_bits_whatever_the_threads),       cmocka_unit_test(unverified_plans_show_in_the_numbers),
      cmocka_unit_test(absent_rank_is_named_within_the_bound), cmocka_unit_test(failing_rank_is_named_at_once),
      cmocka_unit_test(norm_reads_each_sum_completed_once),    cmocka_unit_test(zero_rows_leave_no_collective_waiting),
      cmocka_unit_test(widths_that_cut_a_head_are_refused),    cmocka_unit_test(other_rules_than_the_forwards_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
