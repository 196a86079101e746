// What becomes of modules that are fused (FUS). k3pack keeps every member's second scale and every member's grid, so here most of it is information;
// engines take one scale for all members, or refuse.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/linears_parts.h"
#include "loader/rules.h"

typedef unsigned long long ull;

// A member of a fusion set. Sets stand together, members in the order of their rows.
struct member {
  uint32_t linear;
  uint32_t set;        // what the set is fused into: the first module with that `into`, or a family of names
  uint64_t row;        // shard id, or place in the family
  const char *parent;  // generic: name of the parent module
  size_t parent_nbytes;
};

struct fusion {
  const struct k3_plan *plan;
  enum k3_judge engine;
  const struct k3_scale_facts *facts;
  struct k3_findings *findings;
  struct member *members;
  size_t n_members, capacity;
};

static const struct k3_linear *linear_of(const struct fusion *f, const struct member *member) {
  return &f->plan->linears.items[member->linear];
}

static void report(const struct fusion *f, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *subject,
                   const char *allowed, const char *found, ...) K3_PRINTF(7, 8);
static void report(const struct fusion *f, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *subject,
                   const char *allowed, const char *found, ...) {
  char text[480];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  const struct k3_ckpt *ckpt = k3_linear_ckpt(f->plan, linear);
  uint32_t t = linear->tensors[param];
  k3_rules_report(f->findings, f->engine, rule, k3_ckpt_file_of(ckpt, t)->path, subject ? subject : k3_ckpt_tensor(ckpt, t)->name, allowed, "%s",
                  text);
}

// ---- the sets ----

// Modules that engines fuse, by the last component of their names.
static const struct {
  const char *name;
  uint32_t family, place;
} FAMILIES[] = {
    {"q_proj", 1, 0}, {"k_proj", 1, 1}, {"v_proj", 1, 2}, {"gate_proj", 2, 0}, {"up_proj", 2, 1}, {"q_a_proj", 3, 0}, {"kv_a_proj_with_mqa", 3, 1},
    {"w1", 4, 0},     {"w3", 4, 1},
};

static void family_of(const struct k3_linear *linear, struct member *member) {
  size_t at = linear->name_nbytes;
  while (at > 0 && linear->name[at - 1] != '.')
    at--;
  for (size_t i = 0; i < sizeof FAMILIES / sizeof FAMILIES[0]; i++) {
    if (strlen(FAMILIES[i].name) == linear->name_nbytes - at && memcmp(linear->name + at, FAMILIES[i].name, linear->name_nbytes - at) == 0) {
      member->set = FAMILIES[i].family;
      member->row = FAMILIES[i].place;
      member->parent = linear->name;
      member->parent_nbytes = at;
    }
  }
}

static void stack_of(const struct fusion *f, const struct k3_linear *linear, struct member *member) {
  const struct k3_recipe *recipe = f->plan->recipe;
  const struct k3_recipe_module *module = linear->module < recipe->n_modules ? &recipe->modules[linear->module] : NULL;
  if (!module || !module->shard)
    return;
  uint32_t first = 0;
  while (strcmp(recipe->modules[first].into, module->into) != 0)
    first++;
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = linear->index[i];
  member->set = first + 1;
  k3_recipe_eval(recipe, f->plan->mapper.config, module->shard, indexes, &member->row, NULL);
}

static int compare_sets(const struct fusion *f, const struct member *a, const struct member *b) {
  if (a->set != b->set)
    return a->set < b->set ? -1 : 1;
  if (a->parent) {
    size_t n = a->parent_nbytes < b->parent_nbytes ? a->parent_nbytes : b->parent_nbytes;
    int order = memcmp(a->parent, b->parent, n);
    return order ? order : (a->parent_nbytes > b->parent_nbytes) - (a->parent_nbytes < b->parent_nbytes);
  }
  const uint32_t *x = linear_of(f, a)->index, *y = linear_of(f, b)->index;
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++) {
    if (x[i] != y[i])
      return x[i] < y[i] ? -1 : 1;
  }
  return 0;
}

static int compare_members(const void *left, const void *right, void *ctx) {
  const struct member *a = left, *b = right;
  int order = compare_sets(ctx, a, b);
  if (order != 0)
    return order;
  return a->row != b->row ? (a->row < b->row ? -1 : 1) : (a->linear > b->linear) - (a->linear < b->linear);
}

// ---- one set ----

static bool same_scheme(const struct k3_linear *a, const struct k3_linear *b) {
  return a->scheme.scheme == b->scheme.scheme && a->scheme.block_rows == b->scheme.block_rows && a->scheme.block_cols == b->scheme.block_cols &&
         a->scheme.second == b->scheme.second && a->scheme.n_bits == b->scheme.n_bits;
}

// Values of one kind over members [first, first + n): smallest and largest factor; false when some member has none.
struct range {
  float low, high;
  const struct member *at_low, *at_high;
};

static void widen(struct range *range, float value, const struct member *member) {
  if (!range->at_low || value < range->low) {
    range->low = value;
    range->at_low = member;
  }
  if (!range->at_high || value > range->high) {
    range->high = value;
    range->at_high = member;
  }
}

// More than two units in the last place apart.
static bool differ(float low, float high) {
  return high > low * (1 + 2 * 0x1p-23f);
}

// What a fused scale does to the member it does not fit. Engines take the largest stored number: as a divisor it shrinks the other members, as a
// multiplier it inflates them; the member with the smallest number suffers most.
static void report_second(const struct fusion *f, const struct range *range, enum k3_rule rule, const char *subject, size_t n_values) {
  const struct k3_linear *victim = linear_of(f, range->at_low);
  bool divides = victim->scheme.second == K3_SECOND_DIVIDE;
  double ratio = (double)range->high / (double)range->low;
  char name[512];
  report(f, victim, k3_linear_second(victim), rule, subject, "one second scale for all members, or an engine that keeps each its own",
         "%zu members with second scales %g to %g, ratio %.4g: an engine that takes the largest %s %s by %.4g (error %.1f %%)", n_values,
         (double)range->low, (double)range->high, ratio, divides ? "shrinks" : "inflates", k3_linear_text(victim, name, sizeof name), ratio,
         100 * (divides ? 1 - 1 / ratio : ratio - 1));
}

static void check_scales(const struct fusion *f, const struct member *members, size_t n) {
  struct range second = {0}, input = {0}, tensor = {0}, amax = {0}, block = {0};
  size_t n_second = 0, n_input = 0, n_tensor = 0;
  const struct k3_linear *first = linear_of(f, members);
  for (size_t i = 0; i < n; i++) {
    const struct k3_scale_facts *facts = &f->facts[members[i].linear];
    if (!facts->read)
      continue;
    if (facts->has_second) {
      widen(&second, facts->second, &members[i]);
      n_second++;
      widen(&amax, facts->max_scale * facts->factor, &members[i]);
      if (facts->min_scale > 0)
        widen(&block, facts->min_scale * facts->factor, &members[i]);
    }
    if (facts->has_input && facts->input > 0 && isfinite(facts->input)) {
      widen(&input, facts->input, &members[i]);
      n_input++;
    }
    if (first->scheme.scheme == K3_SCHEME_FP8_TENSOR) {
      widen(&tensor, facts->max_scale, &members[i]);
      n_tensor++;
    }
  }
  if (n_second >= 2 && differ(second.low, second.high)) {
    report_second(f, &second, K3_FUS02, NULL, n_second);
    double reach = block.at_low ? (double)amax.high / (double)block.low : 0;
    if (reach > 28672)
      report(f, first, k3_linear_second(first), K3_FUS09, NULL, "blocks within a factor of 28672 of the largest",
             "with one second scale for all, blocks would lie %.3g below the largest weight: subnormal or lost", reach);
  }
  if (n_input >= 2 && differ(input.low, input.high))
    report(f, first, k3_linear_input(first), K3_FUS03, NULL, "one input scale: all members see the same input", "input scales %g to %g, ratio %.4g",
           (double)input.low, (double)input.high, (double)input.high / (double)input.low);
  if (n_tensor >= 2 && differ(tensor.low, tensor.high))
    report(f, first, k3_linear_scale(first), K3_FUS04, NULL, "one scale for all members, or an engine that keeps each its own",
           "per-tensor scales %g to %g, ratio %.4g: an engine that requantises with the largest rounds once more (error up to 5.9 %%)",
           (double)tensor.low, (double)tensor.high, (double)tensor.high / (double)tensor.low);
}

static void check_set(const struct fusion *f, const struct member *members, size_t n) {
  const struct k3_linear *first = linear_of(f, members);
  char name[512], other[512];
  for (size_t i = 1; i < n; i++) {
    const struct k3_linear *linear = linear_of(f, &members[i]);
    if (same_scheme(first, linear) || (first->is_plain && linear->is_plain))
      continue;
    report(f, linear, k3_linear_weight(linear), K3_FUS01, NULL, "one scheme for all members of a fused module", "%s is stored as %s, %s as %s",
           k3_linear_text(linear, name, sizeof name), k3_scheme_name(linear->scheme.scheme), k3_linear_text(first, other, sizeof other),
           k3_scheme_name(first->scheme.scheme));
    return;
  }
  if (first->is_plain)
    return;
  for (size_t i = 0; i + 1 < n && first->scheme.scheme == K3_SCHEME_FP8_BLOCK; i++) {
    const struct k3_linear *linear = linear_of(f, &members[i]);
    if (linear->n_rows % linear->scheme.block_rows == 0)
      continue;
    report(f, linear, k3_linear_weight(linear), K3_FUS05, NULL, "a multiple of the block's rows in every member but the last",
           "%llu rows in blocks of %u: the grids of the fused module's members cannot be one grid", (ull)linear->n_rows, linear->scheme.block_rows);
    break;
  }
  if (f->facts)
    check_scales(f, members, n);
}

// ---- what a view ties together ----

static void check_view(const struct fusion *f, const char *view) {
  struct range second = {0}, tensor = {0};
  const struct k3_linear *first = NULL, *last = NULL;
  size_t n_second = 0, n_tensor = 0;
  const struct k3_recipe *recipe = f->plan->recipe;
  for (size_t i = 0; i < f->plan->linears.n_items; i++) {
    const struct k3_linear *linear = &f->plan->linears.items[i];
    const char *own = linear->module < recipe->n_modules ? recipe->modules[linear->module].view : NULL;
    if (!own || strcmp(own, view) != 0)
      continue;
    if (!first)
      first = linear;
    else if (!same_scheme(first, linear) && !(first->is_plain && linear->is_plain)) {
      char name[512];
      report(f, linear, k3_linear_weight(linear), K3_FUS01, view, "one scheme for all layers of the cross-layer projection",
             "%s is stored as %s, others as %s", k3_linear_text(linear, name, sizeof name), k3_scheme_name(linear->scheme.scheme),
             k3_scheme_name(first->scheme.scheme));
      return;
    }
    last = linear;
  }
  if (!first || first->is_plain)
    return;
  if (first->scheme.scheme == K3_SCHEME_FP8_BLOCK && last != first && first->n_rows % first->scheme.block_rows != 0)
    report(f, first, k3_linear_weight(first), K3_FUS05, view, "a multiple of the block's rows in every layer but the last",
           "%llu rows of each layer in blocks of %u: the layers' grids cannot be one grid", (ull)first->n_rows, first->scheme.block_rows);
  // The component: every member of every stack that a viewed module is in.
  for (size_t i = 0; f->facts && i < f->n_members; i++) {
    const struct member *member = &f->members[i];
    const struct k3_scale_facts *facts = &f->facts[member->linear];
    bool tied = false;
    for (size_t m = 0; m < recipe->n_modules && !tied; m++)
      tied = recipe->modules[m].view && strcmp(recipe->modules[m].view, view) == 0 &&
             strcmp(recipe->modules[m].into, recipe->modules[linear_of(f, member)->module].into) == 0;
    if (!tied || !facts->read)
      continue;
    if (facts->has_second) {
      widen(&second, facts->second, member);
      n_second++;
    } else if (linear_of(f, member)->scheme.scheme == K3_SCHEME_FP8_TENSOR) {
      widen(&tensor, facts->max_scale, member);
      n_tensor++;
    }
  }
  if (n_second >= 2 && differ(second.low, second.high))
    report_second(f, &second, K3_FUS06, view, n_second);
  else if (n_tensor >= 2 && differ(tensor.low, tensor.high))
    report(f, first, k3_linear_scale(first), K3_FUS06, view, "one scale for all layers, or an engine that keeps each its own",
           "%zu members with per-tensor scales %g to %g, ratio %.4g: requantised with the largest, each is rounded once more (error up to 5.9 %%)",
           n_tensor, (double)tensor.low, (double)tensor.high, (double)tensor.high / (double)tensor.low);
}

enum k3_status k3_rules_fusion(const struct k3_plan *plan, enum k3_judge engine, const struct k3_scale_facts *facts, struct k3_findings *findings,
                               struct k3_error *err) {
  struct fusion f = {.plan = plan, .engine = engine, .facts = facts, .findings = findings};
  bool by_name = plan->recipe->keep_names;
  if (plan->linears.n_quantised == 0 || findings->n_errors_by_rule[K3_CFG21] > 0 || (by_name && engine == K3_JUDGE_K3PACK))
    return K3_OK;
  for (size_t i = 0; i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    struct member member = {.linear = (uint32_t)i};
    if (by_name)
      family_of(linear, &member);
    else
      stack_of(&f, linear, &member);
    // A module whose own tensors are wrong was reported; comparing it would say so again.
    if (member.set == 0 || linear->of_target || !linear->is_sound)
      continue;
    if (k3_grow(&f.members, &f.capacity, f.n_members + 1, sizeof *f.members, err) != K3_OK) {
      k3_free(f.members);
      return K3_NO_MEMORY;
    }
    f.members[f.n_members++] = member;
  }
  if (f.n_members > 1)
    qsort_r(f.members, f.n_members, sizeof *f.members, compare_members, &f);
  for (size_t first = 0, last; first < f.n_members; first = last) {
    last = first + 1;
    while (last < f.n_members && compare_sets(&f, &f.members[first], &f.members[last]) == 0)
      last++;
    if (last - first > 1)
      check_set(&f, &f.members[first], last - first);
  }
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    const char *view = plan->recipe->modules[m].view;
    bool seen = false;
    for (size_t k = 0; view && k < m && !seen; k++)
      seen = plan->recipe->modules[k].view && strcmp(plan->recipe->modules[k].view, view) == 0;
    if (view && !seen)
      check_view(&f, view);
  }
  k3_free(f.members);
  return K3_OK;
}
