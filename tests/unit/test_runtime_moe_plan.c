// The reduction plan of the decoder layers, rule by rule, on real ranks: what it orders, that outputs agree however sums are completed, and that a
// broken rule is named by the verifier and, with the verifier out of the way, shows in the numbers.
//   M1 .. M10  MiniMax-M3 as served by vLLM: all-reduces deferred from row-parallel products into the norms that follow
//   D1 .. D7   DeepSeek-V3.2, likewise (not the rule names of a plan's steps)
#include "moe_ranks.h"

static struct moe_fixture f;
static struct moe_ranks r;

static struct k3_flow *step_of(struct k3_moe *moe, enum k3_flow_kind kind, const char *name) {
  return (struct k3_flow *)(uintptr_t)k3_reduction_plan_step(&moe->plan, kind, name);
}

static bool reduces(struct k3_moe *moe, enum k3_flow_kind kind, const char *name) {
  const struct k3_flow *step = step_of(moe, kind, name);
  if (!step)
    fail_msg("the plan has no step %s", name);
  return step->reduce == K3_REDUCE_ALL;
}

// Hidden, residual, final and all taps of rank 0 to the golden ones; the same bits on every rank. The worst of them.
static double off_of_all(const struct k3_moe_options *o) {
  const uint64_t n = r.n_rows * f.m.hidden_size;
  double worst = moe_off(&f, "hidden_states", r.out[0].hidden, n);
  worst = fmax(worst, moe_off(&f, "residual", r.out[0].residual, n));
  worst = fmax(worst, moe_off(&f, "final", r.out[0].final, n));
  for (size_t t = 0; t < o->n_taps; t++) {
    char name[32];
    snprintf(name, sizeof name, "stream.%llu", (unsigned long long)o->taps[t]);
    worst = fmax(worst, moe_off(&f, name, r.out[0].taps[t], n));
  }
  for (int i = 1; i < r.n; i++) {
    assert_memory_equal(r.out[i].hidden, r.out[0].hidden, n * sizeof(float));
    assert_memory_equal(r.out[i].final, r.out[0].final, n * sizeof(float));
    for (size_t t = 0; t < o->n_taps; t++)
      assert_memory_equal(r.out[i].taps[t], r.out[0].taps[t], n * sizeof(float));
  }
  return worst;
}

static const uint64_t TAPS[] = {0, 1, 2, 3, 4};  // before the first layer up to behind the last; DeepSeek's fixture has 3 layers

// "With deferral, without, and for tp 1-8 the outputs agree": every way to complete the sums, every tap from 0 to L (1.9 #9, 2.6 #9), both families.
// MiniMax-M3 has two key heads here, which 4 and 8 ranks share. D7: one rank adds and norms plainly.
static void every_setting_gives_the_same(void **state) {
  (void)state;
  static const struct {
    const char *what;
    struct k3_moe_options o;
    bool taps;
  } settings[] = {
      {"deferred into the norms", {0}, false},
      {"taps behind the norms", {.tap = K3_TAP_BEHIND_NORM}, true},
      {"taps between layers", {.tap = K3_TAP_BETWEEN_LAYERS}, true},
      {"two stages, reduced before the border, taps relayed", {.pp = 2, .border = K3_BORDER_REDUCE, .tap = K3_TAP_BEHIND_NORM}, true},
      {"two stages, partial sums carried over", {.pp = 2, .border = K3_BORDER_CARRY, .tap = K3_TAP_BEHIND_NORM}, true},
      {"experts that return whole sums", {.whole_moe = true}, false},
      {"experts on a rank's own rows", {.sequence_parallel = true}, false},
      {"experts on a rank's own rows, taps behind the norms", {.sequence_parallel = true, .tap = K3_TAP_BEHIND_NORM}, true},
      {"experts on a rank's own rows, taps between layers", {.sequence_parallel = true, .tap = K3_TAP_BETWEEN_LAYERS}, true},
      {"two stages, where nothing works on own rows", {.sequence_parallel = true, .pp = 2}, false},
  };
  for (int family = 0; family < 2; family++) {
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    for (size_t s = 0; s < sizeof settings / sizeof settings[0]; s++) {
      for (int tp = 1; tp <= 8; tp *= 2) {
        struct k3_moe_options o = settings[s].o;
        o.taps = TAPS;
        o.n_taps = settings[s].taps ? f.m.n_layers + 1 : 0;
        moe_ranks_open(&r, &f, tp, &o);
        moe_ranks_run(&r);
        double off = off_of_all(&o);
        if (!(off <= 1e-5))
          fail_msg("%s, tp %d, %s: off by %g", f.c->name, tp, settings[s].what, off);
        if (tp == 1)
          assert_true(r.moe[0]->plan.n_deferred == 0 && r.moe[0]->plan.n_immediate == 0);
        moe_ranks_close(&r);
      }
    }
    moe_close(&f);
  }
}

// BF16: a sum is rounded once, when it is complete.
static void bf16_sums_are_rounded_once(void **state) {
  (void)state;
  static const struct moe_case *const cases[] = {&M3_BF16, &V32_BF16};
  for (int c = 0; c < 2; c++) {
    moe_open(&f, cases[c]);
    const struct k3_moe_options o = {0};
    moe_ranks_open(&r, &f, 1, NULL);
    moe_ranks_run(&r);
    const double one = off_of_all(&o);
    moe_ranks_close(&r);
    moe_ranks_open(&r, &f, 8, NULL);
    moe_ranks_run(&r);
    const double eight = off_of_all(&o);
    print_message("%s: %.3g from float64 with one rank, %.3g with 8\n", f.c->name, one, eight);
    assert_true(eight <= 1.5 * one);
    moe_ranks_close(&r);
    moe_close(&f);
  }
}

// ---- what the plan orders ----

// M1, M4, M5, M6 and D1, D2: attention into its own layer's norm, dense MLPs and experts alike into the next input norm or the final one; the first
// layer of a range fuses nothing.
static void sums_wait_for_the_next_norm(void **state) {
  (void)state;
  for (int family = 0; family < 2; family++) {
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    moe_ranks_open(&r, &f, 2, NULL);
    struct k3_moe *moe = r.moe[1];
    char name[128];
    for (uint64_t i = 0; i < f.m.n_layers; i++) {
      snprintf(name, sizeof name, "model.layers.%llu.self_attn.o_proj", (unsigned long long)i);
      assert_false(reduces(moe, K3_FLOW_PRODUCE, name));
      snprintf(name, sizeof name, "model.layers.%llu.post_attention_layernorm", (unsigned long long)i);
      assert_true(reduces(moe, K3_FLOW_NORM, name));
      assert_int_equal(k3_moe_fuses_input(moe, i), i > 0);  // experts defer as dense layers do
    }
    assert_true(reduces(moe, K3_FLOW_NORM, "model.norm"));
    assert_int_equal(moe->plan.n_deferred, 2 * f.m.n_layers);
    assert_int_equal(moe->plan.n_immediate, 0);
    moe_ranks_close(&r);
    // A range that begins later: its first layer fuses nothing either; what ends before the last layer is handed out complete (M7).
    moe_ranks_open(&r, &f, 2, &(struct k3_moe_options){.first_layer = 1, .n_layers = 1});
    assert_false(k3_moe_fuses_input(r.moe[0], 1));
    assert_int_equal(r.moe[0]->plan.n_immediate, 1);
    assert_null(k3_reduction_plan_step(&r.moe[0]->plan, K3_FLOW_NORM, "model.norm"));
    moe_ranks_close(&r);
    moe_close(&f);
  }
}

// 1.9 #11. M2: with stages every MLP and MoE reduces at once, attention still defers; D3: or the partial sums cross the border. M3, M4: an MoE kernel
// that returns whole sums overrides the request, and its consumers read that: no second all-reduce behind it.
static void requests_and_what_they_come_to(void **state) {
  (void)state;
  moe_open(&f, &M3_F32);
  moe_ranks_open(&r, &f, 2, &(struct k3_moe_options){.pp = 2});
  assert_int_equal(r.moe[0]->plan.n_immediate, 4);
  assert_int_equal(r.moe[0]->plan.n_deferred, 4);
  for (uint64_t i = 0; i < 4; i++)
    assert_false(k3_moe_fuses_input(r.moe[0], i));
  assert_false(reduces(r.moe[0], K3_FLOW_NORM, "model.norm"));
  moe_ranks_close(&r);
  moe_ranks_open(&r, &f, 2, &(struct k3_moe_options){.pp = 2, .border = K3_BORDER_CARRY});
  assert_int_equal(r.moe[0]->plan.n_deferred, 8);
  moe_ranks_close(&r);
  moe_ranks_open(&r, &f, 2, &(struct k3_moe_options){.whole_moe = true});
  static const bool fused[] = {false, true, false, false};  // behind layer 0, which is dense
  for (uint64_t i = 0; i < 4; i++)
    assert_int_equal(k3_moe_fuses_input(r.moe[0], i), fused[i]);
  assert_false(reduces(r.moe[0], K3_FLOW_NORM, "model.norm"));
  assert_int_equal(r.moe[0]->plan.n_deferred, 5);
  moe_ranks_close(&r);
  // D5: experts on own rows are a request too; with one rank or several stages it comes to nothing.
  static const struct {
    int tp;
    uint32_t pp;
    uint64_t n_scattered, n_gathered;
  } requests[] = {{1, 1, 0, 0}, {2, 1, 3, 3}, {2, 2, 0, 0}};
  for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
    moe_ranks_open(&r, &f, requests[i].tp, &(struct k3_moe_options){.sequence_parallel = true, .pp = requests[i].pp});
    assert_int_equal(r.moe[0]->plan.n_scattered, requests[i].n_scattered);
    assert_int_equal(r.moe[0]->plan.n_gathered, requests[i].n_gathered);
    moe_ranks_close(&r);
  }
  moe_close(&f);
}

// M9: the wiring does not depend on the taps, and a second derivation gives the same.
static void wiring_ignores_taps(void **state) {
  (void)state;
  static struct moe_ranks tapped;
  moe_open(&f, &M3_F32);
  moe_ranks_open(&r, &f, 4, NULL);
  moe_ranks_open(&tapped, &f, 4, &(struct k3_moe_options){.tap = K3_TAP_BEHIND_NORM, .taps = TAPS, .n_taps = 5});
  const struct k3_reduction_plan *a = &r.moe[0]->plan, *b = &tapped.moe[3]->plan;
  size_t j = 0;
  for (size_t i = 0; i < a->n_steps; i++, j++) {
    while (b->steps[j].kind == K3_FLOW_TAP)
      j++;
    assert_int_equal(a->steps[i].kind, b->steps[j].kind);
    assert_int_equal(a->steps[i].reduce, b->steps[j].reduce);
    assert_string_equal(a->steps[i].name, b->steps[j].name);
  }
  assert_int_equal(b->n_steps, a->n_steps + 4);
  moe_ranks_close(&tapped);
  moe_ranks_close(&r);
  moe_close(&f);
}

// ---- sums are counted ----

struct counting {
  struct k3_comm comm;
  struct k3_comm *inner;
  unsigned n, n_scattered, n_gathered;
  unsigned n_rounded;  // sums whose parts had been rounded to BF16
};

static bool all_bf16(const float *values, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    if (bits & 0xFFFF)
      return false;
  }
  return true;
}

static enum k3_status count_all_reduce(struct k3_comm *comm, const char *step, float *values, uint64_t n, void *stream, struct k3_error *err) {
  struct counting *c = (struct counting *)comm;
  c->n++;
  c->n_rounded += all_bf16(values, n);
  return c->inner->ops->all_reduce(c->inner, step, values, n, stream, err);
}
static enum k3_status count_reduce_scatter(struct k3_comm *comm, const char *step, const float *values, uint64_t n, float *dst, void *stream,
                                           struct k3_error *err) {
  struct counting *c = (struct counting *)comm;
  c->n_scattered++;
  return c->inner->ops->reduce_scatter(c->inner, step, values, n, dst, stream, err);
}
static enum k3_status count_all_gather(struct k3_comm *comm, const char *step, const void *src, uint64_t nbytes, void *dst, void *stream,
                                       struct k3_error *err) {
  struct counting *c = (struct counting *)comm;
  c->n_gathered++;
  return c->inner->ops->all_gather(c->inner, step, src, nbytes, dst, stream, err);
}
static void pass_abort(struct k3_comm *comm, const struct k3_error *why) {
  struct counting *c = (struct counting *)comm;
  c->inner->ops->abort(c->inner, why);
}
static const struct k3_comm_ops COUNTING = {count_all_reduce, count_reduce_scatter, count_all_gather, pass_abort, NULL};

// M9, D7, X09, 1.9 #10: each sum is completed exactly once, two a layer, wherever that happens.
static void each_sum_is_completed_once(void **state) {
  (void)state;
  static const struct k3_moe_options settings[] = {{0}, {.pp = 2}, {.whole_moe = true}, {.taps = TAPS, .n_taps = 4}, {.n_layers = 1}};
  for (int family = 0; family < 2; family++) {
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    for (size_t s = 0; s < sizeof settings / sizeof settings[0]; s++) {
      struct k3_moe_options o = settings[s];
      o.n_taps = o.n_taps ? f.m.n_layers + 1 : 0;
      moe_ranks_open(&r, &f, 2, &o);
      struct counting counting[2] = {0};
      for (int i = 0; i < 2; i++) {
        counting[i] = (struct counting){.comm = {&COUNTING, i, 2}, .inner = r.comms[i]};
        r.moe[i]->options.comm = &counting[i].comm;
      }
      moe_ranks_run(&r);
      for (int i = 0; i < 2; i++)
        assert_int_equal(counting[i].n, 2 * r.moe[0]->options.n_layers);
      moe_ranks_close(&r);
    }
    moe_close(&f);
  }
}

// BF16: what ranks add up is not rounded before, neither where a norm completes it nor where it is completed at once.
static void bf16_parts_are_not_rounded(void **state) {
  (void)state;
  static const struct moe_case *const cases[] = {&M3_BF16, &V32_BF16};
  for (int c = 0; c < 2; c++) {
    moe_open(&f, cases[c]);
    for (unsigned pp = 1; pp <= 2; pp++) {
      moe_ranks_open(&r, &f, 2, &(struct k3_moe_options){.pp = pp});
      struct counting counting[2] = {0};
      for (int i = 0; i < 2; i++) {
        counting[i] = (struct counting){.comm = {&COUNTING, i, 2}, .inner = r.comms[i]};
        r.moe[i]->options.comm = &counting[i].comm;
      }
      moe_ranks_run(&r);
      for (int i = 0; i < 2; i++)
        assert_true(counting[i].n == 2 * f.m.n_layers && counting[i].n_rounded == 0);
      moe_ranks_close(&r);
    }
    moe_close(&f);
  }
}

// D5: pad, reduce-scatter behind the attention, own rows, all-gather before the next attention, plain norms inside and nothing deferred: two whole
// sums a layer as ever, of which the attention's are scattered and the experts' are nobody's parts.
static void own_rows_are_scattered_and_gathered_once(void **state) {
  (void)state;
  for (int family = 0; family < 2; family++) {
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    for (int tp = 2; tp <= 8; tp *= 2) {
      moe_ranks_open(&r, &f, tp, &(struct k3_moe_options){.sequence_parallel = true});
      struct counting counting[MOE_MAX_RANKS] = {0};
      for (int i = 0; i < tp; i++) {
        counting[i] = (struct counting){.comm = {&COUNTING, i, tp}, .inner = r.comms[i]};
        r.moe[i]->options.comm = &counting[i].comm;
      }
      moe_ranks_run(&r);
      const unsigned n_moe = (unsigned)f.m.n_layers - 1;  // behind a dense layer, whose two sums are deferred
      for (int i = 0; i < tp; i++) {
        assert_int_equal(counting[i].n, 2);
        assert_int_equal(counting[i].n_scattered, n_moe);
        assert_int_equal(counting[i].n_gathered, n_moe + 1);  // a norm's output each; stream and branch for the final norm
      }
      char name[128];
      for (uint64_t l = 1; l < f.m.n_layers; l++) {
        snprintf(name, sizeof name, "model.layers.%llu.post_attention_layernorm", (unsigned long long)l);
        assert_false(reduces(r.moe[0], K3_FLOW_NORM, name));
        assert_int_equal(k3_moe_fuses_input(r.moe[0], l), l == 1);
      }
      moe_ranks_close(&r);
    }
    moe_close(&f);
  }
}

// D5: rows that the ranks do not divide: a rank with fewer, ranks with none, one row for all; also of a range that ends between layers and of a
// prediction block, whose output is gathered too.
static void rows_that_do_not_divide(void **state) {
  (void)state;
  static const uint64_t lengths[][3] = {{5, 2, 0}, {8, 5, 0}, {1, 0, 0}, {3, 0, 0}};
  static const struct k3_moe_options ranges[] = {{0}, {.first_layer = 1, .n_layers = 1}, {.first_layer = 3, .n_layers = 1}};
  static struct moe_ranks sound;
  for (int family = 0; family < 2; family++) {
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
      struct moe_case c = family == 0 ? M3_F32 : V32_F32;
      memcpy(c.lengths, lengths[l], sizeof lengths[l]);
      c.n_requests = lengths[l][1] ? 2 : 1;
      moe_open(&f, &c);
      for (size_t range = 0; range < 3; range++) {
        struct k3_moe_options o = ranges[range];
        moe_ranks_open(&sound, &f, 1, &o);
        moe_ranks_run(&sound);
        o.sequence_parallel = true;
        for (int tp = 2; tp <= 8; tp *= 2) {
          moe_ranks_open(&r, &f, tp, &o);
          assert_true(r.moe[0]->plan.n_scattered > 0);
          moe_ranks_run(&r);
          const uint64_t n = r.n_rows * f.m.hidden_size;
          for (int i = 0; i < tp; i++) {
            assert_true(moe_relative(r.out[i].hidden, sound.out[0].hidden, n) <= 1e-5);
            assert_true(moe_relative(r.out[i].residual, sound.out[0].residual, n) <= 1e-5);
          }
          moe_ranks_close(&r);
        }
        moe_ranks_close(&sound);
      }
      moe_close(&f);
    }
  }
}

// ---- rules broken ----
// "each rule M1-M10 and its DeepSeek counterpart has a test that fails when the rule is broken; the partial-sum tap (DeepSeek rule D4) is caught".

enum where { POST_NORM, INPUT_0, INPUT_1, INPUT_2, FINAL, O_PROJ, FFN_0, FFN_1, LAST_TAP };

static const char *name_of(enum where where, char dst[128]) {
  const char *m3 = f.m.family == K3_MOE_MINIMAX_M3 ? "block_sparse_moe" : "mlp";
  static const char *const fixed[] = {"model.layers.1.post_attention_layernorm",
                                      "model.layers.0.input_layernorm",
                                      "model.layers.1.input_layernorm",
                                      "model.layers.2.input_layernorm",
                                      "model.norm",
                                      "model.layers.1.self_attn.o_proj",
                                      "model.layers.0.mlp.down_proj"};
  if (where == FFN_1)
    snprintf(dst, 128, "model.layers.1.%s.experts.w2", m3);
  else
    snprintf(dst, 128, "%s", fixed[where]);
  return dst;
}

static void set(struct k3_moe *moe, enum where where, enum k3_reduce reduce, bool may_defer) {
  char name[128];
  struct k3_flow *step = NULL;
  for (size_t i = 0; where == LAST_TAP && i < moe->plan.n_steps; i++)
    step = moe->plan.steps[i].kind == K3_FLOW_TAP ? &moe->plan.steps[i] : step;
  if (where != LAST_TAP)
    step = step_of(moe, where >= O_PROJ ? K3_FLOW_PRODUCE : K3_FLOW_NORM, name_of(where, name));
  assert_non_null(step);
  step->reduce = reduce;
  step->may_defer |= may_defer;
}

// M1, D2: o_proj's sum is left to the post-attention norm, which forgets it.
static void forget_post_norm(struct k3_moe *moe) {
  set(moe, POST_NORM, K3_REDUCE_NONE, false);
}
// M1: o_proj reduces although the norm does so too.
static void reduce_o_proj_as_well(struct k3_moe *moe) {
  set(moe, O_PROJ, K3_REDUCE_ALL, false);
}
// M2: a stage's last sum is not reduced; the next stage takes it for whole.
static void leave_open_at_the_border(struct k3_moe *moe) {
  set(moe, FFN_1, K3_REDUCE_NONE, true);
}
// M3, M4: the consumer goes by the request where the kernel had reduced already.
static void consume_by_the_request(struct k3_moe *moe) {
  set(moe, INPUT_2, K3_REDUCE_ALL, false);
}
// M4, D1: experts defer and the next norm goes by "experts always reduce".
static void take_experts_for_reduced(struct k3_moe *moe) {
  set(moe, INPUT_2, K3_REDUCE_NONE, false);
}
// M5, M10, D2: layer 0 reduces an embedding that is complete.
static void fuse_the_first_layer(struct k3_moe *moe) {
  set(moe, INPUT_0, K3_REDUCE_ALL, false);
}
// M5: the dense layer's sum is forgotten by layer 1.
static void forget_the_dense_sum(struct k3_moe *moe) {
  set(moe, INPUT_1, K3_REDUCE_NONE, false);
}
// M6: the final norm forgets the last layer's sum.
static void forget_final_norm(struct k3_moe *moe) {
  set(moe, FINAL, K3_REDUCE_NONE, false);
}
// M7: what something else than a norm reads is left a partial sum.
static void hand_out_a_part(struct k3_moe *moe) {
  set(moe, FFN_1, K3_REDUCE_NONE, true);
}
// M8, D4: a tap reads stream plus branch before the branch is complete.
static void tap_a_part(struct k3_moe *moe) {
  set(moe, FFN_1, K3_REDUCE_NONE, true);
  set(moe, INPUT_2, K3_REDUCE_ALL, false);
}
// M8: a tap reduces what is whole.
static void tap_reduces_a_whole(struct k3_moe *moe) {
  set(moe, LAST_TAP, K3_REDUCE_ALL, false);
}
// D3: the partial sum crosses the border and the next stage's first norm does not reduce.
static void forget_behind_the_border(struct k3_moe *moe) {
  set(moe, INPUT_2, K3_REDUCE_NONE, false);
}

static void set_gather(struct k3_moe *moe, enum where where, enum k3_gather gather) {
  set(moe, where, K3_REDUCE_NONE, false);
  char name[128];
  struct k3_flow *step = NULL;
  for (size_t i = 0; where == LAST_TAP && i < moe->plan.n_steps; i++)
    step = moe->plan.steps[i].kind == K3_FLOW_TAP ? &moe->plan.steps[i] : step;
  (where == LAST_TAP ? step : step_of(moe, K3_FLOW_NORM, name_of(where, name)))->gather = gather;
}
// D5: the attention's sum is not reduced and scattered before the experts take their rows.
static void forget_to_scatter(struct k3_moe *moe) {
  set(moe, O_PROJ, K3_REDUCE_NONE, true);
}
// D5: the norm between the experts' own rows reduces as if a sum had been deferred to it.
static void defer_between_own_rows(struct k3_moe *moe) {
  set(moe, POST_NORM, K3_REDUCE_ALL, false);
}
// D5: the next attention reads one rank's rows.
static void forget_to_gather_the_input(struct k3_moe *moe) {
  set_gather(moe, INPUT_2, K3_GATHER_NONE);
}
// D5: the stream leaves the last experts as one rank's rows.
static void forget_to_gather_the_end(struct k3_moe *moe) {
  set_gather(moe, FINAL, K3_GATHER_NONE);
}
// M8, D4, D5: a tap hands out one rank's rows.
static void tap_own_rows(struct k3_moe *moe) {
  set_gather(moe, LAST_TAP, K3_GATHER_NONE);
}

static void broken_rules_are_named_and_show_in_numbers(void **state) {
  (void)state;
  static const uint64_t two[] = {2};
  static const struct {
    const char *rule;
    void (*mutate)(struct k3_moe *moe);
    struct k3_moe_options o;
    enum k3_rule named;
    bool in_output, in_tap;
  } mutations[] = {
      {"M1/D2, dropped", forget_post_norm, {0}, K3_RED01, true, false},
      {"M1, twice", reduce_o_proj_as_well, {0}, K3_RED02, true, false},
      {"M2", leave_open_at_the_border, {.pp = 2}, K3_RED03, true, false},
      {"M3/M4, request", consume_by_the_request, {.whole_moe = true}, K3_RED02, true, false},
      {"M4/D1, experts", take_experts_for_reduced, {0}, K3_RED01, true, false},
      {"M5/M10/D2, first layer", fuse_the_first_layer, {0}, K3_RED02, true, false},
      {"M5, dense", forget_the_dense_sum, {0}, K3_RED01, true, false},
      {"M6", forget_final_norm, {0}, K3_RED01, true, false},
      {"M7", hand_out_a_part, {.n_layers = 2}, K3_RED01, true, false},
      {"M8/D4, a partial sum is tapped", tap_a_part, {.taps = two, .n_taps = 1}, K3_RED01, false, true},
      {"M8, a tap reduces too much", tap_reduces_a_whole, {.taps = two, .n_taps = 1}, K3_RED02, false, true},
      {"D3", forget_behind_the_border, {.pp = 2, .border = K3_BORDER_CARRY}, K3_RED01, true, false},
      {"D5, scatter", forget_to_scatter, {.sequence_parallel = true}, K3_RED01, true, false},
      {"D5, deferral inside", defer_between_own_rows, {.sequence_parallel = true}, K3_RED02, true, false},
      {"D5, gather", forget_to_gather_the_input, {.sequence_parallel = true}, K3_RED01, true, false},
      {"D5, gather at the end", forget_to_gather_the_end, {.sequence_parallel = true}, K3_RED01, true, false},
      {"D5, tap", tap_own_rows, {.sequence_parallel = true, .taps = two, .n_taps = 1}, K3_RED01, false, true},
  };
  for (int family = 0; family < 2; family++) {
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    for (size_t m = 0; m < sizeof mutations / sizeof mutations[0]; m++) {
      struct k3_error err = {0};
      struct k3_moe_options o = mutations[m].o;
      o.tap = K3_TAP_BETWEEN_LAYERS;
      static struct moe_ranks sound;
      moe_ranks_open(&sound, &f, 1, &o);  // the truth of the same range and taps
      moe_ranks_run(&sound);
      moe_ranks_open(&r, &f, 2, &o);
      assert_int_equal(k3_reduction_plan_verify(&r.moe[0]->plan, &err), K3_OK);
      for (int i = 0; i < 2; i++)
        mutations[m].mutate(r.moe[i]);
      assert_int_equal(k3_reduction_plan_verify(&r.moe[0]->plan, &err), K3_BAD_INPUT);
      assert_int_equal(err.rule, mutations[m].named);
      moe_ranks_run(&r);
      const uint64_t n = r.n_rows * f.m.hidden_size;
      double stream = 0, tap = o.n_taps ? moe_relative(r.out[0].taps[0], sound.out[0].taps[0], n) : 0;
      stream = fmax(moe_relative(r.out[0].hidden, sound.out[0].hidden, n), moe_relative(r.out[0].residual, sound.out[0].residual, n));
      print_message("%s %s: stream off by %.2g, tap by %.2g\n", f.c->name, mutations[m].rule, stream, tap);
      if ((stream > 1e-3) != mutations[m].in_output || (tap > 1e-3) != mutations[m].in_tap)
        fail_msg("%s, rule %s: stream off by %g, tap by %g", f.c->name, mutations[m].rule, stream, tap);
      moe_ranks_close(&r);
      moe_ranks_close(&sound);
    }
    moe_close(&f);
  }
}

// M8, the other way out of D4: the sum stays deferred and the tap reduces a copy of its own; stream and tap are right, and nothing is summed twice in
// the stream.
static void tap_of_a_copy(void **state) {
  (void)state;
  static const uint64_t two[] = {2};
  for (int family = 0; family < 2; family++) {
    struct k3_error err = {0};
    moe_open(&f, family == 0 ? &M3_F32 : &V32_F32);
    moe_ranks_open(&r, &f, 4, &(struct k3_moe_options){.tap = K3_TAP_BETWEEN_LAYERS, .taps = two, .n_taps = 1});
    for (int i = 0; i < 4; i++) {
      tap_a_part(r.moe[i]);
      set(r.moe[i], LAST_TAP, K3_REDUCE_ALL, false);
    }
    assert_int_equal(k3_reduction_plan_verify(&r.moe[0]->plan, &err), K3_OK);
    moe_ranks_run(&r);
    assert_true(off_of_all(&(struct k3_moe_options){.taps = two, .n_taps = 1}) <= 1e-5);
    moe_ranks_close(&r);
    moe_close(&f);
  }
}

// D6: the prediction block's sum is completed by the norm of the shared head; dropped there, the numbers show it.
static void prediction_block_on_ranks(void **state) {
  (void)state;
  moe_open(&f, &V32_F32);
  for (int broken = 0; broken < 2; broken++) {
    moe_ranks_open(&r, &f, 4, &(struct k3_moe_options){.first_layer = 3, .n_layers = 1});
    assert_true(reduces(r.moe[0], K3_FLOW_NORM, "model.layers.3.shared_head.norm"));
    struct k3_error err = {0};
    for (int i = 0; broken && i < 4; i++)
      step_of(r.moe[i], K3_FLOW_NORM, "model.layers.3.shared_head.norm")->reduce = K3_REDUCE_NONE;
    assert_int_equal(k3_reduction_plan_verify(&r.moe[0]->plan, &err), broken ? K3_BAD_INPUT : K3_OK);
    moe_ranks_run(&r);
    const uint64_t n = r.n_rows * f.m.hidden_size;
    const double off = moe_off(&f, "block.final", r.out[0].final, n);
    assert_true(broken ? off > 1e-3 : off <= 1e-5);
    moe_ranks_close(&r);
  }
  moe_close(&f);
}

// M10: the routed factor is linear: equal steps of it change a layer's output by equal amounts, on one rank and on the parts of several.
static void the_routed_factor_is_linear(void **state) {
  (void)state;
  static const char *const factors[] = {"2,\"", "4,\"", "6,\""};
  static char json[3][4096];
  static struct moe_case cases[3];
  for (int tp = 1; tp <= 4; tp *= 4) {
    float *out[3];
    uint64_t n = 0;
    for (int k = 0; k < 3; k++) {
      const char *at = strstr(M3_F32.json, "\"routed_scaling_factor\":2,");
      assert_non_null(at);
      int head = (int)(at - M3_F32.json) + (int)strlen("\"routed_scaling_factor\":");
      snprintf(json[k], sizeof json[k], "%.*s%c%s", head, M3_F32.json, factors[k][0], M3_F32.json + head + 1);
      cases[k] = M3_F32;
      cases[k].json = json[k];
      moe_open(&f, &cases[k]);
      moe_ranks_open(&r, &f, tp, &(struct k3_moe_options){.first_layer = 1, .n_layers = 1});
      moe_ranks_run(&r);
      n = r.n_rows * f.m.hidden_size;
      out[k] = moe_array(n);
      memcpy(out[k], r.out[0].hidden, n * sizeof(float));
      moe_ranks_close(&r);
      moe_close(&f);
    }
    for (uint64_t i = 0; i < n; i++) {
      float first = out[1][i] - out[0][i], second = out[2][i] - out[1][i];
      out[0][i] = first, out[1][i] = second;
    }
    assert_true(moe_relative(out[0], out[1], n) < 1e-5);
    for (int k = 0; k < 3; k++)
      free(out[k]);
  }
}

// A width that cuts a head is refused by name; so is one that is no multiple of the key heads it would repeat.
static void widths_that_cut_a_head_are_refused(void **state) {
  (void)state;
  static const struct {
    int tp;
    const char *tensor;
  } cases[] = {{3, "model.layers.0.self_attn.q_proj"}, {16, "model.layers.0.self_attn.q_proj"}};
  moe_open(&f, &M3_F32);
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    struct k3_comm *comms[16];
    struct k3_error err = {0};
    assert_int_equal(k3_comm_threads_create(cases[c].tp, 1, comms, NULL), K3_OK);
    const struct k3_moe_options o = {.n_layers = 4, .tp_size = (uint32_t)cases[c].tp, .tp_rank = 1, .comm = comms[1]};
    assert_null(k3_moe_open(&(struct k3_weights_source){.image = &f.image}, &o, &err));
    assert_int_equal(err.rule, K3_PCK05);
    assert_string_equal(err.tensor, cases[c].tensor);
    for (int i = 0; i < cases[c].tp; i++)
      comms[i]->ops->destroy(comms[i]);
  }
  moe_close(&f);
}

// Several threads on several ranks: equal bits.
static void equal_bits_whatever_the_threads(void **state) {
  (void)state;
  static struct moe_ranks many;
  moe_open(&f, &V32_F32);
  moe_ranks_open(&r, &f, 4, NULL);
  moe_ranks_run(&r);
  moe_ranks_open(&many, &f, 4, &(struct k3_moe_options){.n_threads = 3});
  moe_ranks_run(&many);
  assert_memory_equal(r.out[0].final, many.out[3].final, r.n_rows * f.m.hidden_size * sizeof(float));
  moe_ranks_close(&many);
  moe_ranks_close(&r);
  moe_close(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_setting_gives_the_same),
      cmocka_unit_test(bf16_sums_are_rounded_once),
      cmocka_unit_test(sums_wait_for_the_next_norm),
      cmocka_unit_test(requests_and_what_they_come_to),
      cmocka_unit_test(wiring_ignores_taps),
      cmocka_unit_test(each_sum_is_completed_once),
      cmocka_unit_test(bf16_parts_are_not_rounded),
      cmocka_unit_test(own_rows_are_scattered_and_gathered_once),
      cmocka_unit_test(rows_that_do_not_divide),
      cmocka_unit_test(broken_rules_are_named_and_show_in_numbers),
      cmocka_unit_test(tap_of_a_copy),
      cmocka_unit_test(prediction_block_on_ranks),
      cmocka_unit_test(the_routed_factor_is_linear),
      cmocka_unit_test(widths_that_cut_a_head_are_refused),
      cmocka_unit_test(equal_bits_whatever_the_threads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
