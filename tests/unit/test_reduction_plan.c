// The reduction plan: against a table written by hand, under mutations, and in numbers on a toy of ranks.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/reduction_plan.h"
#include "unit.h"

// ---- a stack of every kind of layer ----

enum { N_LAYERS = 9, N_SUMS = 20 };

static char names[4 * N_SUMS][64];

#define NAME(slot, format, layer) (snprintf(names[slot], sizeof names[slot], format, layer), names[slot])

// Layers 0 dense, 1 MoE, 2 MoE with all-to-all, 3 and 4 MoE with sequence parallel, 5 MoE with zero experts, 6 MoE with a tap, 7 MoE whose kernel
// returns whole sums, 8 MoE and last, 9 the MTP block.
static struct k3_stack every_kind(struct k3_sum sums[N_SUMS]) {
  for (unsigned layer = 0; layer <= N_LAYERS; layer++) {
    bool last = layer == N_LAYERS - 1, mtp = layer == N_LAYERS;
    sums[2 * layer] = (struct k3_sum){.producer = NAME(4 * layer, "layers.%u.o_proj", layer),
                                      .norm = NAME(4 * layer + 1, "layers.%u.post_norm", layer),
                                      .starts = layer == 0 ? "layers.0.input_norm"
                                                : mtp      ? "layers.9.input_norm"
                                                           : NULL,
                                      .layer = layer,
                                      .kind = K3_SUM_ATTENTION};
    sums[2 * layer + 1] = (struct k3_sum){.producer = NAME(4 * layer + 2, "layers.%u.mlp", layer),
                                          .norm = last  ? "final_norm"
                                                  : mtp ? NULL
                                                        : NAME(4 * layer + 3, "layers.%u.input_norm", layer + 1),
                                          .layer = layer,
                                          .kind = layer == 0 ? K3_SUM_DENSE : K3_SUM_MOE,
                                          .all_to_all = layer == 2,
                                          .sequence_parallel = layer == 3 || layer == 4,
                                          .zero_expert = layer == 5,
                                          .returns_whole = layer == 7};
  }
  return (struct k3_stack){.sums = sums, .n_sums = N_SUMS, .n_layers = N_LAYERS};
}

struct row {
  const char *attention, *attention_rule, *ffn, *ffn_rule;
  enum k3_reduce next_reduces;  // the norm behind the layer
  enum k3_gather next_gathers;
};

static void check_table(const struct k3_parallel *parallel, const struct row table[N_LAYERS + 1], uint64_t n_deferred, uint64_t n_immediate) {
  struct k3_sum sums[N_SUMS];
  struct k3_stack stack = every_kind(sums);
  struct k3_reduction_plan plan;
  struct k3_error err = {0};
  char text[2048];
  if (k3_reduction_plan_make(&stack, parallel, &plan, &err) != K3_OK)
    fail_msg("%s", k3_error_text(&err, text, sizeof text));
  for (size_t i = 0; i < plan.n_steps; i++) {
    const struct k3_flow *step = &plan.steps[i];
    if (step->kind == K3_FLOW_PRODUCE) {
      const struct row *row = &table[step->layer];
      bool attention = step->sum == K3_SUM_ATTENTION;
      assert_string_equal(k3_reduction_plan_action(&plan, i), attention ? row->attention : row->ffn);
      assert_string_equal(step->rule, attention ? row->attention_rule : row->ffn_rule);
    } else if (step->kind == K3_FLOW_NORM && i > 0 && step->name && (strstr(step->name, "input_norm") || strcmp(step->name, "final_norm") == 0) &&
               plan.steps[i - 1].kind != K3_FLOW_START) {
      assert_int_equal(step->reduce, table[step->layer].next_reduces);
      assert_int_equal(step->gather, table[step->layer].next_gathers);
    }
  }
  assert_int_equal(plan.n_deferred, n_deferred);
  assert_int_equal(plan.n_immediate, n_immediate);
  k3_reduction_plan_free(&plan);
}

#define DEFERRED_ROW(rule) \
  { "deferred", "D2", "deferred", rule, K3_REDUCE_ALL, K3_GATHER_NONE }

// A plan for a MoE stack (dense, MoE, MoE with all-to-all, MoE with sequence parallel, last layer, MTP, tap) matches a table written by hand from the
// deferral rules D1 to D10.
static void moe_stack_matches_the_table_written_by_hand(void **state) {
  (void)state;
  static const uint64_t taps[] = {6};
  static const struct row one_stage[N_LAYERS + 1] = {
      DEFERRED_ROW("D3"),
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "whole", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      {"scattered", "D10", "whole", "D10", K3_REDUCE_NONE, K3_GATHER_OUTPUT},
      {"scattered", "D10", "whole", "D10", K3_REDUCE_NONE, K3_GATHER_INPUT},
      {"deferred", "D2", "immediate", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      {"deferred", "D2", "immediate", "D9", K3_REDUCE_NONE, K3_GATHER_NONE},
      {"deferred", "D2", "whole", "D5", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D8"),
      {"deferred", "D2", "immediate", "D9", K3_REDUCE_NONE, K3_GATHER_NONE},
  };
  check_table(&(struct k3_parallel){.tp = 8, .pp = 1, .taps = taps, .n_taps = 1}, one_stage, 11, 3);
}

// Taps that copy a norm's residual leave the wiring as it is.
static void taps_behind_norms_change_nothing(void **state) {
  (void)state;
  static const uint64_t taps[] = {0, 1, 3, 6, 8};
  static const struct row table[N_LAYERS + 1] = {
      DEFERRED_ROW("D3"),
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "whole", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      {"scattered", "D10", "whole", "D10", K3_REDUCE_NONE, K3_GATHER_OUTPUT},
      {"scattered", "D10", "whole", "D10", K3_REDUCE_NONE, K3_GATHER_INPUT},
      {"deferred", "D2", "immediate", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "whole", "D5", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D8"),
      {"deferred", "D2", "immediate", "D9", K3_REDUCE_NONE, K3_GATHER_NONE},
  };
  check_table(&(struct k3_parallel){.tp = 2, .pp = 1, .tap = K3_TAP_BEHIND_NORM, .taps = taps, .n_taps = 5}, table, 12, 2);
}

// Two stages, the first way of D6: every MLP and MoE is reduced at once, sequence parallelism is off.
static void stages_reduce_every_ffn(void **state) {
  (void)state;
#define STAGE_ROW \
  { "deferred", "D2", "immediate", "D6", K3_REDUCE_NONE, K3_GATHER_NONE }
  static const struct row table[N_LAYERS + 1] = {
      STAGE_ROW,
      STAGE_ROW,
      {"deferred", "D2", "whole", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      STAGE_ROW,
      STAGE_ROW,
      {"deferred", "D2", "immediate", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      STAGE_ROW,
      {"deferred", "D2", "whole", "D5", K3_REDUCE_NONE, K3_GATHER_NONE},
      STAGE_ROW,
      {"deferred", "D2", "immediate", "D9", K3_REDUCE_NONE, K3_GATHER_NONE},
  };
  check_table(&(struct k3_parallel){.tp = 8, .pp = 2}, table, 10, 8);
}

// The second way: the partial sums cross, and the first norm of the next stage completes them.
static void stages_carry_partial_sums(void **state) {
  (void)state;
  static const struct row table[N_LAYERS + 1] = {
      DEFERRED_ROW("D3"),
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "whole", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D4"),
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "immediate", "D4", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D4"),
      {"deferred", "D2", "whole", "D5", K3_REDUCE_NONE, K3_GATHER_NONE},
      DEFERRED_ROW("D8"),
      {"deferred", "D2", "immediate", "D9", K3_REDUCE_NONE, K3_GATHER_NONE},
  };
  check_table(&(struct k3_parallel){.tp = 8, .pp = 3, .border = K3_BORDER_CARRY}, table, 16, 2);
}

static void one_rank_has_nothing_to_do(void **state) {
  (void)state;
#define ONE_ROW \
  { "whole", "D1", "whole", "D1", K3_REDUCE_NONE, K3_GATHER_NONE }
  static const struct row table[N_LAYERS + 1] = {ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW, ONE_ROW};
  static const uint64_t taps[] = {1, 6};
  check_table(&(struct k3_parallel){.tp = 1, .pp = 1, .embedding_partial = true, .taps = taps, .n_taps = 2}, table, 0, 0);
  check_table(&(struct k3_parallel){.tp = 1, .pp = 3}, table, 0, 0);
}

// ---- the drafter's own map ----

static const struct k3_manifest_pair MAP[] = {
    {"model.layers.{i}.self_attn.o_proj", "model.layers.{i}.post_attention_layernorm"},
    {"model.layers.{i}.mlp.down_proj", "model.layers.{i+1}.input_layernorm | model.final_norm"},
};

static bool exists_below(void *ctx, const char *module) {
  unsigned n_layers = *(unsigned *)ctx, layer;
  return strcmp(module, "model.final_norm") == 0 || (sscanf(module, "model.layers.%u.", &layer) == 1 && layer < n_layers);
}

static struct k3_stack drafter(unsigned n_layers) {
  struct k3_stack stack;
  struct k3_error err = {0};
  assert_int_equal(k3_stack_from_map(MAP, 2, K3_ALL_LAYERS, exists_below, &n_layers, &stack, &err), K3_OK);
  return stack;
}

// K3: embedding reduced, layer 0 no reduction, 2L deferred, the final norm completing the last; 0 for tp 1.
static void drafter_defers_two_sums_a_layer(void **state) {
  (void)state;
  struct k3_stack stack = drafter(5);
  struct k3_reduction_plan plan;
  struct k3_error err = {0};
  assert_int_equal(stack.n_layers, 5);
  assert_int_equal(stack.n_sums, 10);
  assert_string_equal(stack.sums[1].norm, "model.layers.1.input_layernorm");
  assert_string_equal(stack.sums[9].producer, "model.layers.4.mlp.down_proj");
  assert_string_equal(stack.sums[9].norm, "model.final_norm");
  for (uint32_t tp = 1; tp <= 16; tp *= 2) {
    assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = tp, .pp = 1}, &plan, &err), K3_OK);
    assert_int_equal(plan.n_deferred, tp > 1 ? 10 : 0);
    assert_int_equal(plan.n_immediate, 0);
    const struct k3_flow *first = k3_reduction_plan_step(&plan, K3_FLOW_NORM, "model.layers.0.input_layernorm");
    const struct k3_flow *last = k3_reduction_plan_step(&plan, K3_FLOW_NORM, "model.final_norm");
    assert_non_null(first);
    assert_non_null(last);
    assert_int_equal(first->reduce, K3_REDUCE_NONE);
    assert_int_equal(last->reduce, tp > 1 ? K3_REDUCE_ALL : K3_REDUCE_NONE);
    k3_reduction_plan_free(&plan);
  }
  // A vocabulary-parallel embedding that is left partial gives layer 0 one reduction more.
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 2, .pp = 1, .embedding_partial = true}, &plan, &err), K3_OK);
  assert_int_equal(plan.n_deferred, 11);
  k3_reduction_plan_free(&plan);
  k3_stack_free(&stack);
}

static void settings_that_make_no_sense_are_refused(void **state) {
  (void)state;
  struct k3_stack stack = drafter(2);
  struct k3_reduction_plan plan;
  static const uint64_t taps[] = {2};
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 0, .pp = 1}, &plan, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 1, .pp = 0}, &plan, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 1, .pp = 3}, &plan, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 2, .pp = 1, .taps = taps, .n_taps = 1}, &plan, NULL), K3_BAD_ARGUMENT);
  k3_stack_free(&stack);
}

static bool without_final_norm(void *ctx, const char *module) {
  return strcmp(module, "model.final_norm") != 0 && exists_below(ctx, module);
}

static void a_sum_without_a_norm_is_named(void **state) {
  (void)state;
  struct k3_stack stack;
  struct k3_error err = {0};
  unsigned n_layers = 2;
  assert_int_equal(k3_stack_from_map(MAP, 2, K3_ALL_LAYERS, without_final_norm, &n_layers, &stack, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_IMG01);
  assert_string_equal(err.tensor, "model.layers.1.mlp.down_proj");
}

static bool moe_exists(void *ctx, const char *module) {
  (void)ctx;
  return strncmp(module, "m.0.", 4) == 0 || strcmp(module, "m.norm") == 0;
}

// Routed and shared experts that one norm takes are one sum.
static void experts_of_one_norm_are_one_sum(void **state) {
  (void)state;
  static const struct k3_manifest_pair map[] = {{"m.{i}.o_proj", "m.{i}.post_norm"},
                                                {"m.{i}.mlp.experts.{e}.down_proj", "m.{i+1}.in_norm | m.norm"},
                                                {"m.{i}.mlp.shared_experts.down_proj", "m.{i+1}.in_norm | m.norm"}};
  struct k3_stack stack;
  assert_int_equal(k3_stack_from_map(map, 3, K3_ALL_LAYERS, moe_exists, NULL, &stack, NULL), K3_OK);
  assert_int_equal(stack.n_sums, 2);
  assert_int_equal(stack.sums[1].kind, K3_SUM_MOE);
  assert_string_equal(stack.sums[0].starts, "m.0.in_norm");
  k3_stack_free(&stack);
}

// A layer behind the model's own is a prediction block: a stream of its own, whose last sum something else reads; the model ends with its final norm.
static void prediction_blocks_begin_and_end_on_their_own(void **state) {
  (void)state;
  struct k3_stack stack;
  struct k3_reduction_plan plan;
  unsigned n_present = 4;
  assert_int_equal(k3_stack_from_map(MAP, 2, 3, exists_below, &n_present, &stack, NULL), K3_OK);
  assert_int_equal(stack.n_layers, 3);
  assert_int_equal(stack.n_sums, 8);
  assert_string_equal(stack.sums[5].norm, "model.final_norm");
  assert_string_equal(stack.sums[6].starts, "model.layers.3.input_layernorm");
  assert_null(stack.sums[7].norm);
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 4, .pp = 1}, &plan, NULL), K3_OK);
  assert_int_equal(plan.n_deferred, 7);
  assert_int_equal(plan.n_immediate, 1);
  k3_reduction_plan_free(&plan);
  k3_stack_free(&stack);
}

static bool with_blocks(void *ctx, const char *module) {
  unsigned layer;
  return strcmp(module, "m.norm") == 0 || (sscanf(module, "m.mtp.%u.", &layer) == 1 && layer < 2) ||
         (sscanf(module, "m.%u.", &layer) == 1 && layer < 3 && (layer == 2) >= (strstr(module, "head_norm") != NULL) && !strstr(module, "mtp")) ||
         ctx;
}

// The layer behind the model's own has a norm for what it puts out (DeepSeek's rule D6: "its reduction is fused into shared_head.norm"); the model's
// last layer goes to the final norm all the same. Blocks that {k} counts are found too; "output" is no norm, so that they reduce at once (MiniMax's
// M7).
static void prediction_blocks_have_norms_of_their_own(void **state) {
  (void)state;
  static const struct k3_manifest_pair map[] = {{"m.{i}.o_proj", "m.{i}.post_norm"},
                                                {"m.{i}.experts.w2", "m.{i+1}.in_norm | m.norm | m.{i}.head_norm"},
                                                {"m.mtp.{k}.o_proj", "m.mtp.{k}.post_norm"},
                                                {"m.mtp.{k}.experts.w2", "output"}};
  struct k3_stack stack;
  struct k3_reduction_plan plan;
  assert_int_equal(k3_stack_from_map(map, 4, 2, with_blocks, NULL, &stack, NULL), K3_OK);
  assert_int_equal(stack.n_layers, 2);
  assert_int_equal(stack.n_sums, 10);
  static const struct {
    const char *producer, *norm, *starts;
    uint64_t layer;
    enum k3_sum_kind kind;
  } rows[] = {
      {"m.0.o_proj", "m.0.post_norm", "m.0.in_norm", 0, K3_SUM_ATTENTION},
      {"m.0.experts.w2", "m.1.in_norm", NULL, 0, K3_SUM_MOE},
      {"m.1.o_proj", "m.1.post_norm", NULL, 1, K3_SUM_ATTENTION},
      {"m.1.experts.w2", "m.norm", NULL, 1, K3_SUM_MOE},
      {"m.2.o_proj", "m.2.post_norm", "m.2.in_norm", 2, K3_SUM_ATTENTION},
      {"m.2.experts.w2", "m.2.head_norm", NULL, 2, K3_SUM_MOE},
      {"m.mtp.0.o_proj", "m.mtp.0.post_norm", "m.mtp.0.in_norm", 3, K3_SUM_ATTENTION},
      {"m.mtp.0.experts.w2", NULL, NULL, 3, K3_SUM_MOE},
      {"m.mtp.1.o_proj", "m.mtp.1.post_norm", "m.mtp.1.in_norm", 4, K3_SUM_ATTENTION},
      {"m.mtp.1.experts.w2", NULL, NULL, 4, K3_SUM_MOE},
  };
  for (size_t s = 0; s < stack.n_sums; s++) {
    const struct k3_sum *sum = &stack.sums[s];
    assert_string_equal(sum->producer, rows[s].producer);
    assert_string_equal(sum->norm ? sum->norm : "-", rows[s].norm ? rows[s].norm : "-");
    assert_string_equal(sum->starts ? sum->starts : "-", rows[s].starts ? rows[s].starts : "-");
    assert_int_equal(sum->layer, rows[s].layer);
    assert_int_equal(sum->kind, rows[s].kind);
  }
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 2, .pp = 1}, &plan, NULL), K3_OK);
  assert_int_equal(plan.n_deferred, 8);
  assert_int_equal(plan.n_immediate, 2);
  k3_reduction_plan_free(&plan);
  // Experts on own rows of a block that something else reads: gathered before it is handed out; a plan without that is refused.
  for (size_t s = 0; s < stack.n_sums; s++)
    stack.sums[s].sequence_parallel = stack.sums[s].kind == K3_SUM_MOE;
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 2, .pp = 1}, &plan, NULL), K3_OK);
  struct k3_flow *output = &plan.steps[plan.n_steps - 1];
  assert_true(output->kind == K3_FLOW_OUTPUT && output->gather == K3_GATHER_INPUT);
  struct k3_error err = {0};
  output->gather = K3_GATHER_NONE;
  assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_RED01);
  k3_reduction_plan_free(&plan);
  k3_stack_free(&stack);
}

// ---- a toy of ranks that executes the steps ----
// The stream is a vector of WIDTH; a branch of rank r is a part that no other rank's part is parallel to, so that a norm cannot hide a factor.

enum { WIDTH = 4, TP = 2 };

static double part_of(unsigned sum, unsigned rank, unsigned i, const double input[WIDTH]) {
  return 0.5 * input[(i + sum) % WIDTH] * (rank == 0 ? 1 : -0.75) + (double)((sum * 7 + rank * 3 + i * 5) % 11) / 4;
}

struct toy {
  double out[WIDTH], taps[4][WIDTH];
  unsigned n_taps;
};

static void rms(const double in[WIDTH], double out[WIDTH]) {
  double sum = 0;
  for (unsigned i = 0; i < WIDTH; i++)
    sum += in[i] * in[i];
  for (unsigned i = 0; i < WIDTH; i++)
    out[i] = in[i] / sqrt(sum / WIDTH + 1e-6);
}

static void all_reduce(double rows[TP][WIDTH]) {
  for (unsigned i = 0; i < WIDTH; i++) {
    double sum = 0;
    for (unsigned r = 0; r < TP; r++)
      sum += rows[r][i];
    for (unsigned r = 0; r < TP; r++)
      rows[r][i] = sum;
  }
}

// Executes a plan of two ranks as it stands; results are rank 0's. `bias` is added by every product whose step has an addend. At a border without
// K3_BORDER_CARRY the receiving stage knows of no branch under way: each rank sends its stream with the branch added.
static void execute(const struct k3_reduction_plan *plan, struct toy *toy) {
  double stream[TP][WIDTH], branch[TP][WIDTH] = {{0}}, normed[TP][WIDTH] = {{0}};
  unsigned n_sums = 0;
  bool pending = false;
  memset(toy, 0, sizeof *toy);
  for (unsigned r = 0; r < TP; r++)
    for (unsigned i = 0; i < WIDTH; i++)
      stream[r][i] = (double)i - 1.25;
  for (size_t s = 0; s < plan->n_steps; s++) {
    const struct k3_flow *step = &plan->steps[s];
    switch (step->kind) {
      case K3_FLOW_START: break;
      case K3_FLOW_PRODUCE:
        for (unsigned r = 0; r < TP; r++)
          for (unsigned i = 0; i < WIDTH; i++) {
            bool adds = step->addend == K3_ADDEND_EVERY_RANK || (step->addend == K3_ADDEND_ONCE && r == 0);
            branch[r][i] = part_of(n_sums, r, i, normed[r]) + (adds ? 0.125 * (i + 1) : 0);
          }
        n_sums++;
        pending = true;
        if (step->reduce == K3_REDUCE_ALL)
          all_reduce(branch);
        break;
      case K3_FLOW_NORM:
        if (step->reduce == K3_REDUCE_ALL)
          all_reduce(pending ? branch : stream);
        for (unsigned r = 0; r < TP; r++) {
          for (unsigned i = 0; i < WIDTH; i++)
            stream[r][i] += pending ? branch[r][i] : 0;
          rms(stream[r], normed[r]);
        }
        pending = false;
        break;
      case K3_FLOW_TAP: {
        double copy[TP][WIDTH];
        memcpy(copy, branch, sizeof copy);
        if (step->reduce == K3_REDUCE_ALL)
          all_reduce(copy);
        for (unsigned i = 0; i < WIDTH; i++)
          toy->taps[toy->n_taps][i] = stream[0][i] + (pending ? copy[0][i] : 0);
        toy->n_taps++;
        break;
      }
      case K3_FLOW_BORDER:
        if (plan->parallel.border == K3_BORDER_CARRY)
          break;
        for (unsigned r = 0; r < TP; r++)
          for (unsigned i = 0; i < WIDTH; i++) {
            stream[r][i] += pending ? branch[r][i] : 0;
            branch[r][i] = 0;
          }
        break;
      case K3_FLOW_OUTPUT: pending = false; break;
    }
  }
  memcpy(toy->out, normed[0], sizeof toy->out);
}

// The same model without ranks: each branch is the sum of its parts.
static void reference(unsigned n_layers, bool bias, unsigned tap_layer, double out[WIDTH], double tap[WIDTH]) {
  double stream[WIDTH], normed[WIDTH];
  for (unsigned i = 0; i < WIDTH; i++)
    stream[i] = (double)i - 1.25;
  rms(stream, normed);
  for (unsigned s = 0; s < 2 * n_layers; s++) {
    double branch[WIDTH];
    for (unsigned i = 0; i < WIDTH; i++) {
      branch[i] = bias ? 0.125 * (i + 1) : 0;
      for (unsigned r = 0; r < TP; r++)
        branch[i] += part_of(s, r, i, normed);
    }
    for (unsigned i = 0; i < WIDTH; i++)
      stream[i] += branch[i];
    rms(stream, normed);
    if (s == 2 * tap_layer + 1)
      memcpy(tap, stream, sizeof stream);
  }
  memcpy(out, normed, sizeof normed);
}

static double distance(const double a[WIDTH], const double b[WIDTH]) {
  double worst = 0;
  for (unsigned i = 0; i < WIDTH; i++)
    worst = fmax(worst, fabs(a[i] - b[i]));
  return worst;
}

enum { TOY_LAYERS = 4, TOY_TAP = 1 };

static struct k3_reduction_plan toy_plan(struct k3_stack *stack, uint32_t pp, enum k3_border_rule border, enum k3_tap_rule tap,
                                         enum k3_addend addend) {
  static const uint64_t taps[] = {TOY_TAP};
  struct k3_reduction_plan plan;
  for (size_t s = 0; s < stack->n_sums; s++)
    stack->sums[s].addend = addend;
  struct k3_parallel parallel = {.tp = TP, .pp = pp, .border = border, .tap = tap, .taps = taps, .n_taps = 1};
  assert_int_equal(k3_reduction_plan_make(stack, &parallel, &plan, NULL), K3_OK);
  return plan;
}

// Every sound plan of the toy computes the same: one stage or two, either border, either tap, a bias added once.
static void sound_plans_agree_in_numbers(void **state) {
  (void)state;
  struct k3_stack stack = drafter(TOY_LAYERS);
  for (unsigned pp = 1; pp <= 2; pp++)
    for (unsigned border = 0; border < 2; border++)
      for (unsigned tap = 0; tap < 2; tap++)
        for (unsigned bias = 0; bias < 2; bias++) {
          struct k3_reduction_plan plan =
              toy_plan(&stack, pp, (enum k3_border_rule)border, (enum k3_tap_rule)tap, bias ? K3_ADDEND_ONCE : K3_ADDEND_NONE);
          struct toy toy;
          double out[WIDTH], tapped[WIDTH];
          execute(&plan, &toy);
          reference(TOY_LAYERS, bias, TOY_TAP, out, tapped);
          assert_true(distance(toy.out, out) < 1e-12);
          assert_int_equal(toy.n_taps, 1);
          assert_true(distance(toy.taps[0], tapped) < 1e-12);
          k3_reduction_plan_free(&plan);
        }
  k3_stack_free(&stack);
}

static struct k3_flow *step_of(struct k3_reduction_plan *plan, enum k3_flow_kind kind, const char *name) {
  struct k3_flow *step = (struct k3_flow *)(uintptr_t)k3_reduction_plan_step(plan, kind, name);
  assert_non_null(step);
  return step;
}

static struct k3_flow *first_of(struct k3_reduction_plan *plan, enum k3_flow_kind kind) {
  for (size_t i = 0; i < plan->n_steps; i++) {
    if (plan->steps[i].kind == kind)
      return &plan->steps[i];
  }
  fail();
  return NULL;
}

#define O_PROJ     "model.layers.2.self_attn.o_proj"
#define POST_NORM  "model.layers.2.post_attention_layernorm"
#define DOWN       "model.layers.1.mlp.down_proj"  // the last sum of the first of two stages; a tap reads behind it
#define INPUT_NORM "model.layers.2.input_layernorm"

static void drop(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_NORM, POST_NORM)->reduce = K3_REDUCE_NONE;
}
static void do_twice(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_PRODUCE, O_PROJ)->reduce = K3_REDUCE_ALL;
}
static void tap_a_partial(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_PRODUCE, DOWN)->reduce = K3_REDUCE_NONE;
  step_of(plan, K3_FLOW_PRODUCE, DOWN)->may_defer = true;
  step_of(plan, K3_FLOW_NORM, INPUT_NORM)->reduce = K3_REDUCE_ALL;
}
static void defer_across_a_border(struct k3_reduction_plan *plan) {
  tap_a_partial(plan);
}
static void bias_on_every_rank(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_PRODUCE, O_PROJ)->addend = K3_ADDEND_EVERY_RANK;
}
static void reduce_a_reduced_embedding(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_NORM, "model.layers.0.input_layernorm")->reduce = K3_REDUCE_ALL;
}
static void defer_what_may_not_be_deferred(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_PRODUCE, DOWN)->reduce = K3_REDUCE_NONE;
  step_of(plan, K3_FLOW_NORM, INPUT_NORM)->reduce = K3_REDUCE_ALL;
}
static void tap_reduces_a_whole(struct k3_reduction_plan *plan) {
  first_of(plan, K3_FLOW_TAP)->reduce = K3_REDUCE_ALL;
}
static void another_norm(struct k3_reduction_plan *plan) {
  step_of(plan, K3_FLOW_NORM, POST_NORM)->name = "model.final_norm";
}

// Every mutation is named by the verifier, at the step where it shows; with the verifier out of the way, the numbers show it too.
static void mutations_are_named_and_show_in_numbers(void **state) {
  (void)state;
  static const struct {
    const char *what;
    void (*mutate)(struct k3_reduction_plan *plan);
    uint32_t pp;
    enum k3_tap_rule tap;
    enum k3_addend addend;
    enum k3_rule rule;
    const char *where;
    bool in_output, in_tap;  // where the numbers show it
  } mutations[] = {
      {"a reduction dropped", drop, 1, K3_TAP_BEHIND_NORM, K3_ADDEND_NONE, K3_RED01, POST_NORM, true, false},
      {"a reduction done twice", do_twice, 1, K3_TAP_BEHIND_NORM, K3_ADDEND_NONE, K3_RED02, POST_NORM, true, false},
      {"a partial sum read by a tap", tap_a_partial, 1, K3_TAP_BETWEEN_LAYERS, K3_ADDEND_NONE, K3_RED01, "the tap behind layer 1", false, true},
      {"deferral across a pipeline border", defer_across_a_border, 2, K3_TAP_BEHIND_NORM, K3_ADDEND_NONE, K3_RED03, "the stage border behind layer 1",
       true, true},
      {"a bias added on every rank", bias_on_every_rank, 1, K3_TAP_BEHIND_NORM, K3_ADDEND_ONCE, K3_RED02, O_PROJ, true, false},
      {"layer 0 reducing a reduced embedding", reduce_a_reduced_embedding, 1, K3_TAP_BEHIND_NORM, K3_ADDEND_NONE, K3_RED02,
       "model.layers.0.input_layernorm", true, true},
      {"a deferral that a rule forbids", defer_what_may_not_be_deferred, 1, K3_TAP_BETWEEN_LAYERS, K3_ADDEND_NONE, K3_RED03, DOWN, false, true},
      {"a tap that reduces a whole sum", tap_reduces_a_whole, 1, K3_TAP_BETWEEN_LAYERS, K3_ADDEND_NONE, K3_RED02, "the tap behind layer 1", false,
       true},
      {"a norm that takes another's sum", another_norm, 1, K3_TAP_BEHIND_NORM, K3_ADDEND_NONE, K3_RED01, "model.final_norm", false, false},
  };
  struct k3_stack stack = drafter(TOY_LAYERS);
  for (size_t m = 0; m < sizeof mutations / sizeof mutations[0]; m++) {
    struct k3_reduction_plan plan = toy_plan(&stack, mutations[m].pp, K3_BORDER_REDUCE, mutations[m].tap, mutations[m].addend);
    struct k3_error err = {0};
    struct toy toy;
    double out[WIDTH], tapped[WIDTH];
    char text[2048];
    assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_OK);
    mutations[m].mutate(&plan);
    assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_BAD_INPUT);
    print_message("%s: %s\n", mutations[m].what, k3_error_text(&err, text, sizeof text));
    assert_int_equal(err.rule, mutations[m].rule);
    assert_string_equal(err.tensor, mutations[m].where);
    execute(&plan, &toy);
    reference(TOY_LAYERS, mutations[m].addend == K3_ADDEND_ONCE, TOY_TAP, out, tapped);
    assert_int_equal(distance(toy.out, out) > 1e-3, mutations[m].in_output);
    assert_int_equal(distance(toy.taps[0], tapped) > 1e-3, mutations[m].in_tap);
    k3_reduction_plan_free(&plan);
  }
  k3_stack_free(&stack);
}

// Rows spread over the ranks: leaving out a gather, or asking for one too many, is named as well.
static void gathers_are_followed(void **state) {
  (void)state;
  struct k3_sum sums[N_SUMS];
  struct k3_stack stack = every_kind(sums);
  struct k3_reduction_plan plan;
  struct k3_error err = {0};
  assert_int_equal(k3_reduction_plan_make(&stack, &(struct k3_parallel){.tp = 4, .pp = 1}, &plan, &err), K3_OK);
  assert_int_equal(plan.n_scattered, 2);
  assert_int_equal(plan.n_gathered, 2);
  struct k3_flow *entering = step_of(&plan, K3_FLOW_NORM, "layers.4.input_norm"), *leaving = step_of(&plan, K3_FLOW_NORM, "layers.5.input_norm");
  entering->gather = K3_GATHER_NONE;
  assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_RED01);
  assert_string_equal(err.tensor, "layers.4.o_proj");
  entering->gather = K3_GATHER_OUTPUT;
  err = (struct k3_error){0};
  leaving->gather = K3_GATHER_OUTPUT;
  assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_RED01);
  leaving->gather = K3_GATHER_INPUT;
  err = (struct k3_error){0};
  step_of(&plan, K3_FLOW_NORM, "layers.1.input_norm")->gather = K3_GATHER_INPUT;
  assert_int_equal(k3_reduction_plan_verify(&plan, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_RED02);
  k3_reduction_plan_free(&plan);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(moe_stack_matches_the_table_written_by_hand),
      cmocka_unit_test(taps_behind_norms_change_nothing),
      cmocka_unit_test(stages_reduce_every_ffn),
      cmocka_unit_test(stages_carry_partial_sums),
      cmocka_unit_test(one_rank_has_nothing_to_do),
      cmocka_unit_test(drafter_defers_two_sums_a_layer),
      cmocka_unit_test(settings_that_make_no_sense_are_refused),
      cmocka_unit_test(a_sum_without_a_norm_is_named),
      cmocka_unit_test(experts_of_one_norm_are_one_sum),
      cmocka_unit_test(prediction_blocks_begin_and_end_on_their_own),
      cmocka_unit_test(prediction_blocks_have_norms_of_their_own),
      cmocka_unit_test(sound_plans_agree_in_numbers),
      cmocka_unit_test(mutations_are_named_and_show_in_numbers),
      cmocka_unit_test(gathers_are_followed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
