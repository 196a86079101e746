// The verifier of a reduction plan: it knows what each step leaves behind and what the next one takes it for, and nothing of how a plan is derived.
#include <stdio.h>
#include <string.h>

#include "formats/reduction_plan.h"

enum branch { NO_BRANCH, PARTIAL, WHOLE };

struct walk {
  const struct k3_reduction_plan *plan;
  size_t i;
  enum branch branch;                  // what waits to be added to the stream
  const struct k3_flow *producer;      // its step
  bool branch_on_rows;                 // it is this rank's rows only
  bool stream_on_rows, input_on_rows;  // the stream; what the last norm put out
  struct k3_error *err;
};

static const char *label(const struct walk *w, char dst[192]) {
  const struct k3_flow *step = &w->plan->steps[w->i];
  if (step->name && step->name[0])
    return step->name;
  static const char *const kinds[] = {"the stream's start", "a branch", "the norm", "the tap behind layer", "the stage border behind layer",
                                      "the output of layer"};
  snprintf(dst, 192, "%s %llu", kinds[step->kind], (unsigned long long)step->layer);
  return dst;
}

#define FAIL(walk, rule, allowed, ...)                                                                      \
  do {                                                                                                      \
    char label_buffer[192];                                                                                 \
    return k3_fail((walk)->err, K3_BAD_INPUT, rule, NULL, label(walk, label_buffer), allowed, __VA_ARGS__); \
  } while (0)

static const char *producer_name(const struct walk *w) {
  return w->producer && w->producer->name && w->producer->name[0] ? w->producer->name : "the stream's start";
}

// A branch comes out of START or PRODUCE, reduced at once or not.
static enum k3_status produce(struct walk *w, const struct k3_flow *step) {
  if (w->branch != NO_BRANCH)
    FAIL(w, K3_RED01, "a norm that adds the branch first", "the sum of %s was never added to the stream", producer_name(w));
  if (step->kind == K3_FLOW_PRODUCE && step->on_rows != w->input_on_rows)
    FAIL(w, K3_RED01, "an all-gather before it, or none", "it reads %s",
         w->input_on_rows ? "one rank's rows for the whole" : "every row for its own");
  if (step->partial && step->addend == K3_ADDEND_EVERY_RANK)
    FAIL(w, K3_RED02, "the addend behind the sum, or on one rank only",
         "every rank adds its own copy of a bias to its part, the sum counts it %u times", w->plan->parallel.tp);
  if (!step->partial && step->reduce != K3_REDUCE_NONE)
    FAIL(w, K3_RED02, "no reduction here", "the sum is complete as it comes out and is summed over the ranks again");
  w->producer = step;
  w->branch = step->partial && step->reduce == K3_REDUCE_NONE ? PARTIAL : WHOLE;
  w->branch_on_rows = step->on_rows || step->reduce == K3_REDUCE_SCATTER;
  if (w->branch == PARTIAL && !step->may_defer)
    FAIL(w, K3_RED03, "a reduction where it is produced", "its partial sum is left for later, which rule %s forbids", step->rule);
  return K3_OK;
}

static enum k3_status norm(struct walk *w, const struct k3_flow *step) {
  bool reduces = step->reduce != K3_REDUCE_NONE;
  if (reduces && w->branch == NO_BRANCH)
    FAIL(w, K3_RED02, "no reduction here", "it sums a stream over the ranks that is complete");
  if (reduces && w->branch == WHOLE)
    FAIL(w, K3_RED02, "one reduction for each sum", "the sum of %s is complete and would be summed a second time", producer_name(w));
  if (!reduces && w->branch == PARTIAL)
    FAIL(w, K3_RED01, "an all-reduce in this norm or before it", "it adds one rank's part of the sum of %s as if it were the whole",
         producer_name(w));
  if (w->producer && w->producer->kind == K3_FLOW_PRODUCE && w->branch != NO_BRANCH &&
      (!w->producer->norm || !step->name || strcmp(w->producer->norm, step->name) != 0))
    FAIL(w, K3_RED01, w->producer->norm, "it takes the sum of %s, which another norm completes", producer_name(w));
  bool rows = w->stream_on_rows || w->branch_on_rows;
  if (step->gather != K3_GATHER_NONE && !rows)
    FAIL(w, K3_RED02, "no all-gather here", "it gathers rows that every rank has");
  if (w->stream_on_rows && w->branch == WHOLE && !w->branch_on_rows)
    FAIL(w, K3_RED01, "the rank's own rows", "it adds all rows of %s to a stream of one rank's rows", producer_name(w));
  w->stream_on_rows = rows && step->gather != K3_GATHER_INPUT;
  w->input_on_rows = rows && step->gather == K3_GATHER_NONE;
  w->branch = NO_BRANCH;
  w->branch_on_rows = false;
  return K3_OK;
}

static enum k3_status tap(struct walk *w, const struct k3_flow *step) {
  if (w->branch == PARTIAL && step->reduce == K3_REDUCE_NONE)
    FAIL(w, K3_RED01, "a reduction before the tap, or of its own copy", "it hands out one rank's part of the sum of %s", producer_name(w));
  if (w->branch != PARTIAL && step->reduce != K3_REDUCE_NONE)
    FAIL(w, K3_RED02, "no reduction here", "it sums a stream over the ranks that is complete");
  if ((w->stream_on_rows || w->branch_on_rows) && step->gather == K3_GATHER_NONE)
    FAIL(w, K3_RED01, "an all-gather", "it hands out one rank's rows");
  return K3_OK;
}

static enum k3_status follow(struct walk *w, const struct k3_flow *step) {
  switch (step->kind) {
    case K3_FLOW_START:
      if (w->branch != NO_BRANCH)
        FAIL(w, K3_RED01, "a norm before it", "the sum of %s was never added to the stream", producer_name(w));
      w->stream_on_rows = w->input_on_rows = false;
      K3_TRY(produce(w, step));
      if (w->branch == WHOLE)
        w->branch = NO_BRANCH;  // it is the stream
      return K3_OK;
    case K3_FLOW_PRODUCE: return produce(w, step);
    case K3_FLOW_NORM: return norm(w, step);
    case K3_FLOW_TAP: return tap(w, step);
    case K3_FLOW_BORDER:
      if (w->branch == PARTIAL && w->plan->parallel.border != K3_BORDER_CARRY)
        FAIL(w, K3_RED03, "a reduction before the border", "the partial sum of %s would cross it", producer_name(w));
      return K3_OK;
    case K3_FLOW_OUTPUT:
      if (w->branch == PARTIAL)
        FAIL(w, K3_RED01, "a reduction before it", "one rank's part of the sum of %s is handed out", producer_name(w));
      if ((w->stream_on_rows || w->branch_on_rows) != (step->gather != K3_GATHER_NONE))
        FAIL(w, step->gather == K3_GATHER_NONE ? K3_RED01 : K3_RED02, "an all-gather of what is one rank's rows", "it %s",
             step->gather == K3_GATHER_NONE ? "hands out one rank's rows" : "gathers rows that every rank has");
      w->branch = NO_BRANCH;
      w->stream_on_rows = w->branch_on_rows = false;
      return K3_OK;
  }
  return K3_OK;
}

enum k3_status k3_reduction_plan_verify(const struct k3_reduction_plan *plan, struct k3_error *err) {
  struct walk w = {.plan = plan, .err = err};
  for (w.i = 0; w.i < plan->n_steps; w.i++)
    K3_TRY(follow(&w, &plan->steps[w.i]));
  if (w.branch != NO_BRANCH) {
    w.i = plan->n_steps - 1;
    FAIL(&w, K3_RED01, "a norm or an output behind it", "the sum of %s is never added to the stream", producer_name(&w));
  }
  if (w.stream_on_rows) {
    w.i = plan->n_steps - 1;
    FAIL(&w, K3_RED01, "an all-gather", "the stream ends as one rank's rows");
  }
  return K3_OK;
}
