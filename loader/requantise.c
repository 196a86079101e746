// Which weights are encoded, and how the plan shows it.
#include "loader/requantise.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/pattern.h"
#include "loader/nonfinite.h"
#include "loader/plan_parts.h"
#include "loader/requantise_parts.h"

// ---- patterns ----

struct patterns {
  struct k3_pattern **items;
  uint64_t *n_hits;
  size_t n_items;
  const char *given_up;  // a regex that needs too many steps on some name
};

static enum k3_status compile(const char *const *texts, size_t n, struct patterns *patterns, struct k3_error *err) {
  patterns->items = k3_calloc(n, sizeof *patterns->items, err);
  patterns->n_hits = k3_calloc(n, sizeof *patterns->n_hits, err);
  if (!patterns->items || !patterns->n_hits)
    return K3_NO_MEMORY;
  for (; patterns->n_items < n; patterns->n_items++) {
    const char *text = texts[patterns->n_items];
    bool regex = strncmp(text, "re:", 3) == 0;
    struct k3_error bad = {0};
    struct k3_pattern *pattern = k3_pattern_compile(regex ? K3_PATTERN_REGEX : K3_PATTERN_LITERAL, regex ? text + 3 : text, NULL, &bad);
    if (!pattern)
      return bad.status == K3_NO_MEMORY ? k3_fail_memory(err, 0) : k3_fail(err, K3_BAD_ARGUMENT, K3_CFG10, NULL, text, bad.allowed, "%s", bad.found);
    patterns->items[patterns->n_items] = pattern;
  }
  return K3_OK;
}

static void free_patterns(struct patterns *patterns) {
  for (size_t i = 0; i < patterns->n_items; i++)
    k3_pattern_free(patterns->items[i]);
  k3_free(patterns->items);
  k3_free(patterns->n_hits);
}

// Whether any pattern covers any of the names; every pattern that does is counted.
static bool covered(struct patterns *patterns, const char *const *names, size_t n_names) {
  bool any = false;
  for (size_t i = 0; i < patterns->n_items; i++) {
    bool hit = false;
    for (size_t k = 0; k < n_names && !hit; k++) {
      enum k3_pattern_answer answer = names[k] ? k3_pattern_match(patterns->items[i], names[k], strlen(names[k])) : K3_PATTERN_NO;
      hit = answer == K3_PATTERN_YES;
      if (answer == K3_PATTERN_TOO_MUCH)
        patterns->given_up = k3_pattern_text(patterns->items[i]);
    }
    patterns->n_hits[i] += hit;
    any |= hit;
  }
  return any;
}

static enum k3_status all_hit(const struct patterns *patterns, const char *const *texts, const char *what, struct k3_error *err) {
  if (patterns->given_up)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_CFG10, NULL, patterns->given_up, "a pattern that matches or fails quickly",
                   "%s: matching a module's name takes too many steps", what);
  for (size_t i = 0; i < patterns->n_items; i++) {
    if (patterns->n_hits[i] == 0)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_CFG07, NULL, texts[i], "a whole module name, or re: and a regular expression anchored at the start",
                     "%s: the pattern matches no %s", what, strcmp(what, "--include") == 0 ? "linear layer" : "weight");
  }
  return K3_OK;
}

// ---- modules ----

// A linear layer under the names it has.
struct candidate {
  const struct k3_linear *linear;
  const char *module;  // stored name
  const char *bare;    // without the root; NULL under "generic"
  const char *fused;   // what it is fused into, its own name if nothing
  const char *view;    // a view of its rows, or NULL
  uint32_t item;       // item + 1; 0: stays as it is
};

struct selection {
  struct k3_plan *plan;
  struct k3_requant *requant;
  struct patterns ignore, include;
  struct candidate *items;
  size_t n_items, capacity;
};

static const char *last_component(const char *module) {
  const char *dot = strrchr(module, '.');
  return dot ? dot + 1 : module;
}

// Linear layers that are left alone unless asked for: kv_b_proj is taken apart at run time, the others decide about tokens and experts.
static bool left_alone(const char *module) {
  static const char *const words[] = {"kv_b_proj", "lm_head", "markov_w2", "gate", "router"};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if (strcmp(last_component(module), words[i]) == 0)
      return true;
  }
  return strstr(module, "confidence_head") != NULL;
}

static enum k3_status add_item(struct selection *s, const struct k3_linear *linear, const struct k3_st_tensor *source, struct k3_error *err) {
  struct k3_requant *requant = s->requant;
  K3_TRY(k3_grow(&requant->items, &requant->items_capacity, requant->n_items + 1, sizeof *requant->items, err));
  requant->items[requant->n_items++] = (struct k3_requant_item){.linear = (uint32_t)(linear - s->plan->linears.items),
                                                                .tensor = linear->tensors[K3_PARAM_WEIGHT],
                                                                .of_target = linear->of_target,
                                                                .n_rows = source->shape[0],
                                                                .n_cols = source->shape[1],
                                                                .src_dtype = source->dtype};
  return K3_OK;
}

static enum k3_status consider(struct selection *s, struct candidate candidate, struct k3_findings *findings, struct k3_error *err) {
  struct k3_requant *requant = s->requant;
  const struct k3_linear *linear = candidate.linear;
  const struct k3_st_tensor *source = k3_linear_tensor(s->plan, linear, k3_linear_weight(linear));
  const char *names[] = {candidate.module, candidate.bare, candidate.fused};
  enum { N_NAMES = sizeof names / sizeof *names };
  bool ignored = covered(&s->ignore, names, N_NAMES);
  if (!linear->is_linear || !source || source->rank != 2)
    return K3_OK;
  bool included = covered(&s->include, names, N_NAMES), take = !ignored && (included || !left_alone(candidate.module));
  if (take && !k3_is_plain_float((enum k3_dtype)source->dtype)) {
    k3_findings_report(findings, K3_CFG21, k3_ckpt_file_of(k3_plan_ckpt(s->plan, linear->of_target), linear->tensors[k3_linear_weight(linear)])->path,
                       source->name, "weights in BF16, F16 or F32: give the checkpoint this one was quantised from, or --quant keep",
                       "%s; encoding it again would round twice", k3_dtype_name((enum k3_dtype)source->dtype));
    return K3_OK;
  }
  if (take && requant->scheme.block_rows == 1 && requant->scheme.block_cols > 0 && source->shape[1] % requant->scheme.block_cols != 0) {
    K3_TRY(k3_grow(&requant->kept, &requant->kept_capacity, requant->n_kept + 1, sizeof *requant->kept, err));
    requant->kept[requant->n_kept++] = source->name;
    take = false;
  }
  if (take && source->shape[0] > 0 && source->shape[1] > 0) {
    K3_TRY(add_item(s, linear, source, err));
    candidate.item = (uint32_t)requant->n_items;
  }
  K3_TRY(k3_grow(&s->items, &s->capacity, s->n_items + 1, sizeof *s->items, err));
  s->items[s->n_items++] = candidate;
  return K3_OK;
}

// What engines fuse, by the names in common use; `dst` receives the fused name.
static size_t fused_by_name(const char *module, char *dst, size_t capacity) {
  static const struct {
    const char *member, *fused;
  } known[] = {
      {"q_proj", "qkv_proj"},
      {"k_proj", "qkv_proj"},
      {"v_proj", "qkv_proj"},
      {"gate_proj", "gate_up_proj"},
      {"up_proj", "gate_up_proj"},
      {"w1", "w13"},
      {"w3", "w13"},
      {"q_a_proj", "fused_qkv_a_proj"},
      {"kv_a_proj_with_mqa", "fused_qkv_a_proj"},
  };
  const char *last = last_component(module);
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (strcmp(last, known[i].member) == 0)
      return (size_t)snprintf(dst, capacity, "%.*s%s", (int)(last - module), module, known[i].fused);
  }
  return (size_t)snprintf(dst, capacity, "%s", module);
}

static enum k3_status consider_all(struct selection *s, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_plan *plan = s->plan;
  struct k3_arena *arena = &s->requant->arena;
  for (size_t i = 0; i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    struct candidate candidate = {.linear = linear, .module = k3_arena_strndup(arena, linear->name, linear->name_nbytes, err)};
    char text[K3_ST_MAX_NAME_NBYTES + 64];
    size_t n;
    if (!candidate.module)
      return K3_NO_MEMORY;
    if (plan->recipe->keep_names) {
      n = fused_by_name(candidate.module, text, sizeof text);
    } else {
      const struct k3_recipe_module *module = &plan->recipe->modules[linear->module];
      uint64_t indexes[K3_RECIPE_MAX_INDEXES];
      for (int k = 0; k < K3_RECIPE_MAX_INDEXES; k++)
        indexes[k] = linear->index[k];
      candidate.view = module->view;
      candidate.bare = k3_arena_strndup(arena, text, k3_recipe_expand(plan->recipe, module->name, indexes, text, sizeof text), err);
      if (!candidate.bare)
        return K3_NO_MEMORY;
      n = k3_recipe_expand(plan->recipe, module->into, indexes, text, sizeof text);
    }
    candidate.fused = k3_arena_strndup(arena, text, n, err);
    if (!candidate.fused)
      return K3_NO_MEMORY;
    K3_TRY(consider(s, candidate, findings, err));
  }
  return K3_OK;
}

// ---- sets ----

static uint32_t root_of(uint32_t *parents, uint32_t i) {
  while (parents[i] != i)
    i = parents[i] = parents[parents[i]];
  return i;
}

static void unite(uint32_t *parents, uint32_t a, uint32_t b) {
  a = root_of(parents, a);
  b = root_of(parents, b);
  parents[a > b ? a : b] = a > b ? b : a;
}

static int compare_fused(const void *left, const void *right) {
  const struct candidate *a = left, *b = right;
  int order = strcmp(a->fused, b->fused);
  if (order != 0)
    return order;
  return (a->linear > b->linear) - (a->linear < b->linear);
}

// Weights of one fused tensor, and under COMPONENT of one view, share a second scale.
static enum k3_status make_sets(struct selection *s, struct k3_findings *findings, struct k3_error *err) {
  struct k3_requant *requant = s->requant;
  uint32_t *parents = k3_calloc(requant->n_items, sizeof *parents, err);
  if (!parents)
    return K3_NO_MEMORY;
  for (uint32_t i = 0; i < requant->n_items; i++)
    parents[i] = i;
  if (s->n_items > 1)
    qsort(s->items, s->n_items, sizeof *s->items, compare_fused);
  for (size_t i = 1; i < s->n_items; i++) {
    const struct candidate *a = &s->items[i - 1], *b = &s->items[i];
    if (strcmp(a->fused, b->fused) != 0)
      continue;
    if ((a->item == 0) != (b->item == 0))
      k3_findings_report(findings, K3_FUS01, s->plan->ckpt->source, a->fused, "all members of a fused tensor in one scheme (--ignore and --include)",
                         "%s would be encoded and %s not", a->item ? a->module : b->module, a->item ? b->module : a->module);
    else if (a->item)
      unite(parents, a->item - 1, b->item - 1);
  }
  for (size_t i = 0; requant->options.share == K3_SHARE_COMPONENT && i < s->n_items; i++) {
    for (size_t k = i + 1; s->items[i].view && s->items[i].item && k < s->n_items; k++) {
      if (s->items[k].view && s->items[k].item && strcmp(s->items[i].view, s->items[k].view) == 0) {
        unite(parents, s->items[i].item - 1, s->items[k].item - 1);
        break;  // the next one carries on from there
      }
    }
  }
  for (uint32_t i = 0; i < requant->n_items; i++) {
    uint32_t root = root_of(parents, i);
    requant->items[i].set = root == i ? requant->n_sets++ : requant->items[root].set;  // the lowest number is the root
  }
  k3_free(parents);
  return K3_OK;
}

// ---- the plan ----

const struct k3_st_tensor *k3_requant_stored(const struct k3_requant *requant, uint32_t encoded, enum k3_param param) {
  size_t which = param == K3_PARAM_WEIGHT_SCALE ? 1 : param == K3_PARAM_WEIGHT_GLOBAL_SCALE ? 2 : 0;
  return &requant->stored[(size_t)(encoded - 1) * K3_REQUANT_MAX_PARAMS + which];
}

size_t k3_requant_params(const struct k3_requant *requant, enum k3_param params[K3_REQUANT_MAX_PARAMS]) {
  enum k3_scheme scheme = requant->scheme.scheme;
  params[0] = scheme == K3_SCHEME_NVFP4 || scheme == K3_SCHEME_MXFP4 ? K3_PARAM_WEIGHT_PACKED : K3_PARAM_WEIGHT;
  params[1] = K3_PARAM_WEIGHT_SCALE;
  params[2] = K3_PARAM_WEIGHT_GLOBAL_SCALE;
  return scheme == K3_SCHEME_NVFP4 ? 3 : 2;
}

// The tensors that every weight becomes, described as if they stood in the source.
static enum k3_status describe(struct k3_plan *plan, struct k3_requant *requant, struct k3_error *err) {
  const struct k3_quant_scheme *scheme = &requant->scheme;
  enum k3_param params[K3_REQUANT_MAX_PARAMS];
  size_t n_params = k3_requant_params(requant, params);
  requant->stored = k3_calloc(requant->n_items * K3_REQUANT_MAX_PARAMS, sizeof *requant->stored, err);
  uint64_t *shapes = requant->stored ? k3_arena_alloc(&requant->arena, requant->n_items * K3_REQUANT_MAX_PARAMS * 2 * sizeof *shapes, err) : NULL;
  if (!shapes)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < requant->n_items; i++) {
    const struct k3_requant_item *item = &requant->items[i];
    struct k3_linear *linear = &plan->linears.items[item->linear];
    const struct k3_st_tensor *source = k3_linear_tensor(plan, linear, K3_PARAM_WEIGHT);
    uint64_t scale_rows, scale_cols;
    k3_quant_scale_shape(scheme, item->n_rows, item->n_cols, &scale_rows, &scale_cols);
    for (size_t p = 0; p < n_params; p++, shapes += 2) {
      struct k3_st_tensor *stored = &requant->stored[i * K3_REQUANT_MAX_PARAMS + p];
      *stored = (struct k3_st_tensor){.name = source->name, .name_nbytes = source->name_nbytes, .shape = shapes, .rank = p < 2 ? 2 : 1};
      // Readers older than the E8M0 type know its bytes as U8, as everyone writes them.
      stored->dtype = p == 2   ? K3_DTYPE_F32
                      : p == 1 ? (uint8_t)(scheme->scale_dtype == K3_DTYPE_F8_E8M0 ? K3_DTYPE_U8 : scheme->scale_dtype)
                               : (uint8_t)(params[0] == K3_PARAM_WEIGHT_PACKED ? K3_DTYPE_U8 : K3_DTYPE_F8_E4M3);
      shapes[0] = p == 2 ? 1 : p == 1 ? scale_rows : item->n_rows;
      shapes[1] = p == 2 ? 1 : p == 1 ? scale_cols : k3_quant_row_nbytes(scheme, item->n_cols);
      stored->end = shapes[0] * shapes[1] * k3_dtype_bits((enum k3_dtype)stored->dtype) / 8;
    }
    linear->scheme = *scheme;
    linear->is_plain = false;
    linear->encoded_from = k3_dtype_name((enum k3_dtype)item->src_dtype);
  }
  return K3_OK;
}

// The shards of every encoded weight in place of its own.
static enum k3_status replace_shards(struct selection *s, struct k3_error *err) {
  struct k3_plan *plan = s->plan;
  size_t capacity = plan->n_shards + K3_REQUANT_MAX_PARAMS * s->requant->n_items, n = 0;
  struct k3_plan_shard *shards = k3_calloc(capacity, sizeof *shards, err);
  uint32_t *items[2] = {k3_calloc(plan->ckpt->n_tensors, sizeof **items, err),
                        k3_calloc(plan->target ? plan->target->n_tensors : 0, sizeof **items, err)};
  enum k3_status status = shards && items[0] && items[1] ? K3_OK : K3_NO_MEMORY;
  for (size_t i = 0; status == K3_OK && i < s->requant->n_items; i++)
    items[s->requant->items[i].of_target][s->requant->items[i].tensor] = (uint32_t)i + 1;
  for (size_t i = 0; status == K3_OK && i < plan->n_shards; i++) {
    struct k3_plan_shard shard = plan->shards[i];
    shard.encoded = items[shard.mapped.of_target][shard.mapped.tensor];
    enum k3_param params[K3_REQUANT_MAX_PARAMS];
    size_t n_params = shard.encoded ? k3_requant_params(s->requant, params) : 0;
    if (!shard.encoded)
      shards[n++] = shard;
    for (size_t p = 0; p < n_params; p++) {
      shard.mapped.param = (uint8_t)params[p];
      shard.packed = params[0] == K3_PARAM_WEIGHT_PACKED;
      shards[n++] = shard;
    }
  }
  if (status == K3_OK) {
    k3_free(plan->shards);
    plan->shards = shards;
    plan->n_shards = n;
    plan->shards_capacity = capacity;
    s->requant->item_of = items[0];
    items[0] = NULL;
    shards = NULL;
  }
  k3_free(shards);
  k3_free(items[0]);
  k3_free(items[1]);
  return status;
}

enum k3_status k3_requant_select(struct k3_plan *plan, const struct k3_requant_options *options, struct k3_findings *findings, struct k3_error *err) {
  struct k3_requant *requant = k3_calloc(1, sizeof *requant, err);
  if (!requant)
    return K3_NO_MEMORY;
  enum k3_status status;
  struct selection s = {.plan = plan, .requant = requant};
  uint64_t errors_before = findings->n_errors;
  requant->options = *options;
  requant->scheme = k3_quant_scheme_default(options->scheme);
  requant->allow_nonfinite = plan->options.allowed_rules[K3_VAL02];
  pthread_mutex_init(&requant->mutex, NULL);
  K3_TRY_GOTO(status, out, compile(options->ignore, options->n_ignore, &s.ignore, err));
  K3_TRY_GOTO(status, out, compile(options->include, options->n_include, &s.include, err));
  K3_TRY_GOTO(status, out, consider_all(&s, findings, err));
  K3_TRY_GOTO(status, out, all_hit(&s.ignore, options->ignore, "--ignore", err));
  K3_TRY_GOTO(status, out, all_hit(&s.include, options->include, "--include", err));
  K3_TRY_GOTO(status, out, make_sets(&s, findings, err));
  if (findings->n_errors > errors_before)
    goto out;
  if (requant->n_items == 0) {
    status = k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, plan->ckpt->source, NULL, "--quant keep", "there is no weight that --quant %s would encode",
                     k3_scheme_name(options->scheme));
    goto out;
  }
  K3_TRY_GOTO(status, out, describe(plan, requant, err));
  status = replace_shards(&s, err);
out:
  free_patterns(&s.ignore);
  free_patterns(&s.include);
  k3_free(s.items);
  if (status == K3_OK && findings->n_errors == errors_before)
    plan->requant = requant;
  else
    k3_requant_free(requant);
  return status;
}

void k3_requant_free(struct k3_requant *requant) {
  if (!requant)
    return;
  for (size_t i = 0; i < requant->n_items; i++)
    k3_free(requant->items[i].scales);
  pthread_mutex_destroy(&requant->mutex);
  k3_free(requant->items);
  k3_free(requant->item_of);
  k3_free(requant->kept);
  k3_free(requant->parts);
  k3_free(requant->stored);
  k3_arena_free(&requant->arena);
  k3_free(requant);
}
