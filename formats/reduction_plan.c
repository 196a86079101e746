#include "formats/reduction_plan.h"

#include <stdio.h>
#include <string.h>

#include "formats/json_tree.h"

typedef unsigned long long ull;  // for %llu

enum { MAX_LAYERS = 1 << 16 };

// ---- from a manifest ----

// `pattern` with {i} or {k} and {i+1} replaced; other indexes stay. Returns false when it does not fit.
static bool expand(const char *pattern, size_t nbytes, uint64_t number, char *dst, size_t capacity) {
  size_t n = 0;
  for (size_t i = 0; i < nbytes;) {
    bool same = nbytes - i >= 3 && (memcmp(pattern + i, "{i}", 3) == 0 || memcmp(pattern + i, "{k}", 3) == 0);
    bool next = nbytes - i >= 5 && memcmp(pattern + i, "{i+1}", 5) == 0;
    if (same || next) {
      n += (size_t)snprintf(dst + n, n < capacity ? capacity - n : 0, "%llu", (ull)(number + next));
      i += same ? 3 : 5;
    } else {
      if (n < capacity)
        dst[n] = pattern[i];
      n++;
      i++;
    }
    if (n + 24 > capacity)
      return false;
  }
  dst[n] = '\0';
  return true;
}

// Existence of a module; indexes that are still open ({e}) are tried at 0.
static bool module_exists(k3_module_exists_fn exists, void *ctx, const char *name) {
  char first[1024];
  size_t n = 0;
  for (const char *c = name; *c && n + 1 < sizeof first; c++) {
    const char *end = *c == '{' ? strchr(c, '}') : NULL;
    first[n++] = end ? '0' : *c;
    c = end ? end : c;
  }
  first[n] = '\0';
  return exists(ctx, first);
}

struct builder {
  struct k3_stack *stack;
  size_t capacity;
  uint64_t n_layers;
  k3_module_exists_fn exists;
  void *ctx;
  struct k3_error *err;
};

// Whether a norm pattern lies in the producer's own layer or block.
static bool is_own(const char *pattern, size_t nbytes) {
  return memmem(pattern, nbytes, "{i}", 3) || memmem(pattern, nbytes, "{k}", 3);
}

static size_t alternative_nbytes(const char *alternatives) {
  const char *end = strstr(alternatives, " | ");
  return end ? (size_t)(end - alternatives) : strlen(alternatives);
}

// Where a branch stands: `number` takes the place of {i} or {k}.
struct place {
  uint64_t layer, number;
  bool is_block, by_k;
};

// The first alternative that exists, kept in the arena. Behind the last layer of the model there is no next one, and only a block's own norms are its
// norms: without one *norm stays NULL.
static enum k3_status choose_norm(struct builder *b, const char *alternatives, const struct place *place, const char *producer, const char **norm) {
  char name[1024];
  for (const char *at = alternatives; at;) {
    const size_t nbytes = alternative_nbytes(at);
    const bool next_layer = memmem(at, nbytes, "{i+1}", 5) != NULL;
    const bool usable = place->is_block ? is_own(at, nbytes) : !(next_layer && place->layer + 1 >= b->n_layers);
    if (usable && expand(at, nbytes, place->number, name, sizeof name) && module_exists(b->exists, b->ctx, name)) {
      *norm = k3_arena_strndup(&b->stack->arena, name, strlen(name), b->err);
      return *norm ? K3_OK : K3_NO_MEMORY;
    }
    at = at[nbytes] ? at + nbytes + 3 : NULL;
  }
  if (place->is_block && !is_own(alternatives, alternative_nbytes(alternatives)))
    return K3_OK;
  return k3_fail(b->err, K3_BAD_INPUT, K3_IMG01, NULL, producer, alternatives, "none of the norms that could complete this sum is in the image");
}

// The norm that begins a layer: what {i+1} is behind the layer before; of a block that {k} counts, what is called like it beside the norm `beside`.
// NULL when there is none.
static const char *first_norm(struct builder *b, const struct k3_manifest_pair *map, size_t n_map, const struct place *place, const char *beside) {
  char name[1024], pattern[1024];
  const char *dot = beside ? strrchr(beside, '.') : NULL;
  for (size_t m = 0; m < n_map; m++) {
    const char *next = strstr(map[m].value, "{i+1}");
    if (!next)
      continue;
    const char *begin = map[m].value, *bar;
    while ((bar = strstr(begin, " | ")) && bar < next)
      begin = bar + 3;
    const char *behind = next + strlen("{i+1}");
    const int n_behind = (int)alternative_nbytes(behind);
    if (!place->by_k)
      snprintf(pattern, sizeof pattern, "%.*s{i}%.*s", (int)(next - begin), begin, n_behind, behind);
    else
      snprintf(pattern, sizeof pattern, "%.*s%.*s", dot ? (int)(dot - beside) : 0, dot ? beside : "", n_behind, behind);
    if (expand(pattern, strlen(pattern), place->number, name, sizeof name) && module_exists(b->exists, b->ctx, name))
      return k3_arena_strndup(&b->stack->arena, name, strlen(name), b->err);
  }
  return NULL;
}

static enum k3_status add_branch(struct builder *b, const struct k3_manifest_pair *map, size_t n_map, size_t m, const struct place *place,
                                 const char *name) {
  struct k3_stack *stack = b->stack;
  struct k3_sum sum = {.layer = place->layer}, *last = stack->n_sums > 0 ? &stack->sums[stack->n_sums - 1] : NULL;
  K3_TRY(choose_norm(b, map[m].value, place, name, &sum.norm));
  // Shared and routed experts: one norm takes both.
  if (last && last->layer == sum.layer && (sum.norm && last->norm ? strcmp(last->norm, sum.norm) == 0 : last->norm == sum.norm))
    return K3_OK;
  if (!last || (place->is_block && last->layer != sum.layer))
    sum.starts = first_norm(b, map, n_map, place, sum.norm);
  sum.producer = k3_arena_strndup(&stack->arena, name, strlen(name), b->err);
  if (!sum.producer)
    return K3_NO_MEMORY;
  bool moe = strstr(name, ".experts") || strstr(name, "_experts") || strstr(name, "moe");
  sum.kind = is_own(map[m].value, alternative_nbytes(map[m].value)) ? K3_SUM_ATTENTION : moe ? K3_SUM_MOE : K3_SUM_DENSE;
  K3_TRY(k3_grow(&stack->sums, &b->capacity, stack->n_sums + 1, sizeof *stack->sums, b->err));
  stack->sums[stack->n_sums++] = sum;
  return K3_OK;
}

// The layers that {i} counts, or the blocks that {k} counts.
static enum k3_status add_layers(struct builder *b, const struct k3_manifest_pair *map, size_t n_map, bool by_k) {
  uint64_t n_before = by_k && b->n_layers != K3_ALL_LAYERS ? b->n_layers : 0;
  if (by_k && b->stack->n_sums > 0 && b->stack->sums[b->stack->n_sums - 1].layer >= n_before)
    n_before = b->stack->sums[b->stack->n_sums - 1].layer + 1;
  bool any = true;
  for (uint64_t number = 0; any && number < MAX_LAYERS; number++) {
    const struct place place = {n_before + number, number, by_k || number >= b->n_layers, by_k};
    any = false;
    for (size_t m = 0; m < n_map; m++) {
      char name[1024];
      const bool of_block = strstr(map[m].key, "{k}") != NULL, counted = of_block || strstr(map[m].key, "{i}");
      if (of_block != by_k || (!counted && number > 0) || !expand(map[m].key, strlen(map[m].key), number, name, sizeof name) ||
          !module_exists(b->exists, b->ctx, name))
        continue;
      any = true;
      K3_TRY(add_branch(b, map, n_map, m, &place, name));
      if (!place.is_block)
        b->stack->n_layers = number + 1;
    }
  }
  return K3_OK;
}

enum k3_status k3_stack_from_map(const struct k3_manifest_pair *map, size_t n_map, uint64_t n_layers, k3_module_exists_fn exists, void *ctx,
                                 struct k3_stack *stack, struct k3_error *err) {
  struct builder b = {stack, 0, n_layers, exists, ctx, err};
  *stack = (struct k3_stack){0};
  enum k3_status status = add_layers(&b, map, n_map, false);
  if (status == K3_OK)
    status = add_layers(&b, map, n_map, true);
  if (status != K3_OK)
    k3_stack_free(stack);
  return status;
}

uint64_t k3_manifest_n_layers(const struct k3_manifest *manifest) {
  json_t *model;
  if (manifest->family && strcmp(manifest->family, "k3-dspark") == 0)
    return manifest->dspark.n_layers;
  if (!manifest->model_json || k3_json_tree_parse(manifest->model_json, strlen(manifest->model_json), K3_IMG01, NULL, &model, NULL) != K3_OK)
    return K3_ALL_LAYERS;
  const json_t *n_layers = json_object_get(model, "num_hidden_layers");
  uint64_t n = json_is_integer(n_layers) && json_integer_value(n_layers) > 0 ? (uint64_t)json_integer_value(n_layers) : K3_ALL_LAYERS;
  json_decref(model);
  return n;
}

void k3_stack_free(struct k3_stack *stack) {
  k3_free(stack->sums);
  k3_arena_free(&stack->arena);
  *stack = (struct k3_stack){0};
}

// ---- the plan ----

enum action { DEFERRED, IMMEDIATE, SCATTERED, WHOLE };

static bool is_tapped(const struct k3_parallel *parallel, uint64_t layer) {
  for (size_t t = 0; t < parallel->n_taps; t++) {
    if (parallel->taps[t] == layer)
      return true;
  }
  return false;
}

// Sequence parallelism as it really happens, not as it was asked for.
static bool on_rows(const struct k3_parallel *parallel, const struct k3_sum *sum) {
  return sum->kind == K3_SUM_MOE && sum->sequence_parallel && parallel->tp > 1 && parallel->pp == 1;
}

// The layer's MLP or MoE, behind its attention.
static const struct k3_sum *second_half(const struct k3_stack *stack, size_t s) {
  return stack->sums[s].kind == K3_SUM_ATTENTION && s + 1 < stack->n_sums && stack->sums[s + 1].layer == stack->sums[s].layer ? &stack->sums[s + 1]
                                                                                                                              : NULL;
}

static enum action effective(const struct k3_stack *stack, const struct k3_parallel *parallel, size_t s, const char **rule) {
  const struct k3_sum *sum = &stack->sums[s], *half = second_half(stack, s);
  bool branch = sum->kind != K3_SUM_ATTENTION;
#define BECAUSE(name, action) return *rule = (name), (action)
  if (parallel->tp == 1)
    BECAUSE("D1", WHOLE);
  if (sum->returns_whole)
    BECAUSE("D5", WHOLE);
  if (sum->kind == K3_SUM_MOE && sum->all_to_all)
    BECAUSE("D4", WHOLE);
  if (on_rows(parallel, sum))
    BECAUSE("D10", WHOLE);
  if (half && on_rows(parallel, half))
    BECAUSE("D10", SCATTERED);
  if (sum->kind == K3_SUM_MOE && sum->zero_expert)
    BECAUSE("D4", IMMEDIATE);
  if (!sum->norm)
    BECAUSE("D9", IMMEDIATE);
  if (branch && parallel->pp > 1 && parallel->border == K3_BORDER_REDUCE)
    BECAUSE("D6", IMMEDIATE);
  if (branch && sum->layer < stack->n_layers && parallel->tap == K3_TAP_BETWEEN_LAYERS && is_tapped(parallel, sum->layer))
    BECAUSE("D9", IMMEDIATE);
  BECAUSE(!branch ? "D2" : sum->layer + 1 == stack->n_layers ? "D8" : sum->kind == K3_SUM_MOE ? "D4" : "D3", DEFERRED);
#undef BECAUSE
}

// First layer of a stage; earlier stages take the layers that do not divide.
static uint64_t stage_begin(uint64_t n_layers, uint32_t pp, uint32_t stage) {
  uint64_t each = n_layers / pp, more = n_layers % pp;
  return each * stage + (stage < more ? stage : more);
}

struct deriver {
  const struct k3_stack *stack;
  const struct k3_parallel *parallel;
  struct k3_reduction_plan *plan;
  size_t capacity;
  uint32_t stage;
  bool sharded;  // the stream is spread over the ranks by rows
  struct k3_error *err;
};

static enum k3_status add_step(struct deriver *d, struct k3_flow step) {
  struct k3_reduction_plan *plan = d->plan;
  K3_TRY(k3_grow(&plan->steps, &d->capacity, plan->n_steps + 1, sizeof *plan->steps, d->err));
  step.stage = d->stage;
  plan->n_gathered += step.gather != K3_GATHER_NONE;
  plan->steps[plan->n_steps++] = step;
  return K3_OK;
}

static enum k3_status begin_stream(struct deriver *d, const struct k3_sum *sum) {
  bool partial = d->plan->n_steps == 0 && d->parallel->embedding_partial && d->parallel->tp > 1;
  K3_TRY(add_step(d, (struct k3_flow){.kind = K3_FLOW_START,
                                      .name = d->plan->n_steps == 0 ? "embedding" : "",
                                      .layer = sum->layer,
                                      .rule = "D7",
                                      .partial = partial,
                                      .may_defer = true}));
  d->plan->n_deferred += partial;
  return add_step(
      d, (struct k3_flow){
             .kind = K3_FLOW_NORM, .name = sum->starts, .layer = sum->layer, .rule = "D7", .reduce = partial ? K3_REDUCE_ALL : K3_REDUCE_NONE});
}

// What stands between a branch and the norm that adds it: the border of a stage, a tap.
static enum k3_status cross_over(struct deriver *d, const struct k3_sum *sum, bool behind_norm) {
  const struct k3_parallel *p = d->parallel;
  bool last_of_layer = sum->kind != K3_SUM_ATTENTION, in_stages = sum->layer < d->stack->n_layers;
  if (last_of_layer && in_stages && is_tapped(p, sum->layer) && (p->tap == K3_TAP_BEHIND_NORM) == behind_norm)
    K3_TRY(add_step(
        d, (struct k3_flow){
               .kind = K3_FLOW_TAP, .name = "", .layer = sum->layer, .rule = "D9", .gather = d->sharded ? K3_GATHER_INPUT : K3_GATHER_NONE}));
  if (!behind_norm && last_of_layer && in_stages && d->stage + 1 < p->pp && sum->layer + 1 == stage_begin(d->stack->n_layers, p->pp, d->stage + 1)) {
    K3_TRY(add_step(d, (struct k3_flow){.kind = K3_FLOW_BORDER, .name = "", .layer = sum->layer, .rule = "D6"}));
    d->stage++;
  }
  return K3_OK;
}

static enum k3_status add_sum(struct deriver *d, size_t s) {
  const struct k3_sum *sum = &d->stack->sums[s];
  const char *rule;
  enum action action = effective(d->stack, d->parallel, s, &rule);
  if (sum->starts)
    K3_TRY(begin_stream(d, sum));
  bool may_defer = action == DEFERRED || (action == WHOLE && d->parallel->tp == 1);
  K3_TRY(add_step(d, (struct k3_flow){.kind = K3_FLOW_PRODUCE,
                                      .name = sum->producer,
                                      .norm = sum->norm,
                                      .layer = sum->layer,
                                      .sum = sum->kind,
                                      .rule = rule,
                                      .partial = action != WHOLE,
                                      .may_defer = may_defer,
                                      .on_rows = on_rows(d->parallel, sum),
                                      .addend = sum->addend,
                                      .reduce = action == IMMEDIATE   ? K3_REDUCE_ALL
                                                : action == SCATTERED ? K3_REDUCE_SCATTER
                                                                      : K3_REDUCE_NONE}));
  d->plan->n_deferred += action == DEFERRED;
  d->plan->n_immediate += action == IMMEDIATE;
  d->plan->n_scattered += action == SCATTERED;
  d->sharded |= action == SCATTERED;
  if (!sum->norm) {
    const enum k3_gather whole = d->sharded ? K3_GATHER_INPUT : K3_GATHER_NONE;
    d->sharded = false;
    return add_step(d, (struct k3_flow){.kind = K3_FLOW_OUTPUT, .name = "", .layer = sum->layer, .rule = "D9", .gather = whole});
  }
  K3_TRY(cross_over(d, sum, false));
  // Between sharded layers only the norm's output is gathered, for the attention; leaving them, the stream itself.
  enum k3_gather gather = K3_GATHER_NONE;
  if (d->sharded && action != SCATTERED) {
    const struct k3_sum *half = s + 1 < d->stack->n_sums ? second_half(d->stack, s + 1) : NULL;
    bool stays = half && !d->stack->sums[s + 1].starts && on_rows(d->parallel, half);
    gather = stays ? K3_GATHER_OUTPUT : K3_GATHER_INPUT;
    d->sharded = stays;
  }
  K3_TRY(add_step(d, (struct k3_flow){.kind = K3_FLOW_NORM,
                                      .name = sum->norm,
                                      .layer = sum->layer,
                                      .rule = rule,
                                      .reduce = action == DEFERRED ? K3_REDUCE_ALL : K3_REDUCE_NONE,
                                      .gather = gather}));
  return cross_over(d, sum, true);
}

enum k3_status k3_reduction_plan_make(const struct k3_stack *stack, const struct k3_parallel *parallel, struct k3_reduction_plan *plan,
                                      struct k3_error *err) {
  *plan = (struct k3_reduction_plan){.parallel = *parallel};
  plan->parallel.taps = NULL;
  if (parallel->tp == 0 || parallel->pp == 0 || (parallel->pp > 1 && parallel->pp > stack->n_layers))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "tp of 1 or more, pp from 1 to the number of layers",
                   "tp %u, pp %u with %llu layers", parallel->tp, parallel->pp, (ull)stack->n_layers);
  for (size_t t = 0; t < parallel->n_taps; t++) {
    if (parallel->taps[t] >= stack->n_layers)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "layers from 0 on", "a tap behind layer %llu of %llu", (ull)parallel->taps[t],
                     (ull)stack->n_layers);
  }
  struct deriver d = {.stack = stack, .parallel = parallel, .plan = plan, .err = err};
  enum k3_status status = K3_OK;
  for (size_t s = 0; status == K3_OK && s < stack->n_sums; s++)
    status = add_sum(&d, s);
  if (status == K3_OK)
    status = k3_reduction_plan_verify(plan, err);
  if (status != K3_OK)
    k3_reduction_plan_free(plan);
  return status;
}

void k3_reduction_plan_free(struct k3_reduction_plan *plan) {
  k3_free(plan->steps);
  *plan = (struct k3_reduction_plan){0};
}

const struct k3_flow *k3_reduction_plan_step(const struct k3_reduction_plan *plan, enum k3_flow_kind kind, const char *name) {
  for (size_t i = 0; i < plan->n_steps; i++) {
    if (plan->steps[i].kind == kind && plan->steps[i].name && strcmp(plan->steps[i].name, name) == 0)
      return &plan->steps[i];
  }
  return NULL;
}

const char *k3_reduction_plan_action(const struct k3_reduction_plan *plan, size_t i) {
  if (plan->steps[i].reduce == K3_REDUCE_ALL)
    return "immediate";
  if (plan->steps[i].reduce == K3_REDUCE_SCATTER)
    return "scattered";
  // The effective value is what the next norm reads.
  size_t next = i + 1;
  while (next < plan->n_steps && plan->steps[next].kind != K3_FLOW_NORM && plan->steps[next].kind != K3_FLOW_PRODUCE)
    next++;
  return next < plan->n_steps && plan->steps[next].kind == K3_FLOW_NORM && plan->steps[next].reduce == K3_REDUCE_ALL ? "deferred" : "whole";
}
