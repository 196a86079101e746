// Shapes and dtypes of mapped tensors.
#include <stdio.h>
#include <string.h>

#include "loader/plan_parts.h"
#include "loader/requantise.h"

enum k3_param k3_plan_image_param(const struct k3_plan_shard *shard) {
  switch (shard->mapped.param) {
    case K3_PARAM_WEIGHT: return shard->packed ? K3_PARAM_WEIGHT_PACKED : K3_PARAM_WEIGHT;
    case K3_PARAM_WEIGHT_SCALE_INV: return K3_PARAM_WEIGHT_SCALE;
    case K3_PARAM_WEIGHT_SCALE_2: return K3_PARAM_WEIGHT_GLOBAL_SCALE;
    case K3_PARAM_INPUT_SCALE: return shard->packed ? K3_PARAM_INPUT_GLOBAL_SCALE : K3_PARAM_INPUT_SCALE;
    default: return (enum k3_param)shard->mapped.param;
  }
}

static bool is_scale(enum k3_param param) {
  return param == K3_PARAM_WEIGHT_SCALE || param == K3_PARAM_WEIGHT_GLOBAL_SCALE || param == K3_PARAM_INPUT_SCALE ||
         param == K3_PARAM_INPUT_GLOBAL_SCALE;
}

const struct k3_st_tensor *k3_plan_stored_of(const struct k3_plan *plan, const struct k3_plan_shard *shard) {
  return shard->encoded ? k3_requant_stored(plan->requant, shard->encoded, (enum k3_param)shard->mapped.param)
                        : k3_plan_source_of(plan, &shard->mapped);
}

unsigned k3_plan_normal_shape(const struct k3_plan *plan, const struct k3_plan_shard *shard, uint64_t shape[K3_ST_MAX_RANK]) {
  const struct k3_st_tensor *t = k3_plan_stored_of(plan, shard);
  enum k3_param param = k3_plan_image_param(shard);
  unsigned rank = t->rank;
  for (unsigned i = 0; i < rank; i++)
    shape[i] = t->shape[i];
  const struct k3_linear *linear = shard->linear != K3_LINEAR_ABSENT ? &plan->linears.items[shard->linear] : NULL;
  enum k3_scheme scheme = linear ? linear->scheme.scheme : K3_SCHEME_BF16;
  bool scale = param == K3_PARAM_WEIGHT_SCALE;
  if (scale && (scheme == K3_SCHEME_FP8_BLOCK || scheme == K3_SCHEME_FP8_CHANNEL)) {
    // A grid stays one, even of a single block: [r, 1, c, 1], [N] and [] become [r, c], [N, 1] and [1, 1].
    uint64_t cols = rank == 4 ? shape[2] : rank == 2 ? shape[1] : 1;
    shape[0] = rank > 0 ? shape[0] : 1;
    shape[1] = cols;
    return 2;
  }
  if (is_scale(param) && k3_st_n_elems(t) == 1 && (!scale || scheme == K3_SCHEME_FP8_TENSOR)) {
    shape[0] = 1;
    return 1;
  }
  return rank;
}

static void shape_text(const uint64_t *shape, unsigned rank, char *dst, size_t capacity) {
  size_t n = (size_t)snprintf(dst, capacity, "[");
  for (unsigned i = 0; i < rank && n < capacity; i++)
    n += (size_t)snprintf(dst + n, capacity - n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
  if (n < capacity)
    snprintf(dst + n, capacity - n, "]");
}

// Shapes that the recipe gives for a plain parameter, evaluated once where they do not depend on an index: half a million tensors share a few dozen.
struct expected {
  bool known;
  uint64_t shape[K3_RECIPE_MAX_RANK];
};

struct shapes {
  struct expected *cached;  // [n_modules, max_params]
  size_t max_params;
};

static bool fits(const uint64_t *expected, unsigned rank, const struct k3_st_tensor *t, bool packed) {
  bool equal = rank == t->rank;
  for (unsigned i = 0; equal && i < rank; i++)
    equal = (packed && i == 1 && rank == 2 ? expected[i] / 2 : expected[i]) == t->shape[i];  // two codes a byte
  return equal;
}

static enum k3_status eval_at(const struct k3_plan *plan, const struct k3_mapped *mapped, const char *expression, uint64_t *value,
                              struct k3_error *err) {
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = mapped->index[i];
  return k3_recipe_eval(plan->recipe, plan->mapper.config, expression, indexes, value, err);
}

static enum k3_status evaluate(const struct k3_plan *plan, const struct k3_mapped *mapped, const struct k3_recipe_param *param,
                               uint64_t shape[K3_RECIPE_MAX_RANK], struct k3_error *err) {
  for (unsigned i = 0; i < param->rank; i++)
    K3_TRY(eval_at(plan, mapped, param->shape[i], &shape[i], err));
  return K3_OK;
}

static enum k3_status expected_shape(const struct k3_plan *plan, struct shapes *shapes, const struct k3_mapped *mapped,
                                     uint64_t shape[K3_RECIPE_MAX_RANK], struct k3_error *err) {
  size_t k = mapped->param >= K3_PARAM_OF_MODULE ? mapped->param - K3_PARAM_OF_MODULE : 0;
  const struct k3_recipe_param *param = &plan->recipe->modules[mapped->module].params[k];
  struct expected *cached = &shapes->cached[mapped->module * shapes->max_params + k];
  if (!cached->known) {
    K3_TRY(evaluate(plan, mapped, param, cached->shape, err));
    cached->known = true;
    for (unsigned i = 0; i < param->rank; i++)
      cached->known &= strchr(param->shape[i], '{') == NULL;
  }
  memcpy(shape, cached->shape, sizeof cached->shape);
  return K3_OK;
}

static enum k3_status check_one(const struct k3_plan *plan, struct shapes *shapes, const struct k3_plan_shard *shard, struct k3_findings *findings,
                                struct k3_error *err) {
  const struct k3_mapped *mapped = &shard->mapped;
  const struct k3_st_tensor *t = k3_plan_source_of(plan, mapped);
  const struct k3_recipe_module *module = &plan->recipe->modules[mapped->module];
  if (mapped->param != K3_PARAM_WEIGHT && mapped->param != K3_PARAM_WEIGHT_PACKED && mapped->param < K3_PARAM_OF_MODULE)
    return K3_OK;  // companions are checked with their scheme
  const struct k3_recipe_param *param = &module->params[mapped->param >= K3_PARAM_OF_MODULE ? mapped->param - K3_PARAM_OF_MODULE : 0];
  uint64_t expected[K3_RECIPE_MAX_RANK], other[K3_RECIPE_MAX_RANK];
  K3_TRY(expected_shape(plan, shapes, mapped, expected, err));
  bool plain = module->dtypes >> t->dtype & 1;
  bool quantised = module->linear && (t->dtype == K3_DTYPE_U8 || t->dtype == K3_DTYPE_I8 || t->dtype == K3_DTYPE_F8_E4M3 || t->dtype == K3_DTYPE_I32);
  if (!plain && !(quantised && mapped->param < K3_PARAM_OF_MODULE)) {
    char allowed[256] = "";
    for (int d = 0; d < K3_DTYPE_COUNT; d++) {
      if (module->dtypes >> d & 1)
        snprintf(allowed + strlen(allowed), sizeof allowed - strlen(allowed), "%s%s", allowed[0] ? ", " : "", k3_dtype_name((enum k3_dtype)d));
    }
    k3_findings_report(findings, K3_MAP08, k3_plan_path_of(plan, mapped), t->name, allowed, "dtype %s", k3_dtype_name((enum k3_dtype)t->dtype));
    return K3_OK;
  }
  if (!plain && (t->dtype == K3_DTYPE_I32 || t->dtype == K3_DTYPE_I8))
    return K3_OK;  // the width of packed integers is a matter of the scheme
  bool packed = !plain && shard->packed, equal = fits(expected, param->rank, t, packed);
  for (const struct k3_recipe_param *at = param->other; at && !equal; at = at->other) {
    K3_TRY(evaluate(plan, mapped, at, other, err));
    equal = fits(other, at->rank, t, packed);
  }
  if (!equal) {
    char found[160], allowed[160];
    shape_text(t->shape, t->rank, found, sizeof found);
    if (packed && param->rank == 2)
      expected[1] /= 2;
    shape_text(expected, param->rank, allowed, sizeof allowed);
    k3_findings_report(findings, K3_MAP05, k3_plan_path_of(plan, mapped), t->name, allowed, "shape %s", found);
  }
  return K3_OK;
}

enum k3_status k3_plan_check_shapes(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  struct shapes shapes = {.max_params = 1};
  for (size_t m = 0; m < plan->recipe->n_modules; m++)
    shapes.max_params = plan->recipe->modules[m].n_params > shapes.max_params ? plan->recipe->modules[m].n_params : shapes.max_params;
  shapes.cached = k3_calloc(plan->recipe->n_modules * shapes.max_params, sizeof *shapes.cached, err);
  enum k3_status status = shapes.cached ? K3_OK : K3_NO_MEMORY;
  for (size_t s = 0; status == K3_OK && s < plan->n_shards; s++) {
    if (plan->shards[s].mapped.module != K3_MODULE_CARRY)
      status = check_one(plan, &shapes, &plan->shards[s], findings, err);
  }
  k3_free(shapes.cached);
  return status;
}

bool k3_plan_shards_agree(const struct k3_plan *plan, const struct k3_plan_shard *head, const struct k3_plan_shard *shard,
                          struct k3_findings *findings) {
  const struct k3_st_tensor *first = k3_plan_stored_of(plan, head), *t = k3_plan_stored_of(plan, shard);
  uint64_t shape[K3_ST_MAX_RANK + 1], own[K3_ST_MAX_RANK + 1];
  unsigned rank = k3_plan_normal_shape(plan, head, shape), own_rank = k3_plan_normal_shape(plan, shard, own);
  if (t->dtype != first->dtype) {
    k3_findings_report(findings, K3_MAP08, k3_plan_path_of(plan, &shard->mapped), t->name, k3_dtype_name((enum k3_dtype)first->dtype),
                       "dtype %s, unlike %s that it is stacked with", k3_dtype_name((enum k3_dtype)t->dtype), first->name);
    return false;
  }
  if (own_rank != rank || (rank > 1 && memcmp(own + 1, shape + 1, (rank - 1) * sizeof *own) != 0)) {
    k3_findings_report(findings, K3_MAP05, k3_plan_path_of(plan, &shard->mapped), t->name, "rows of the same shape in every shard",
                       "rows of another shape than %s that it is stacked with", first->name);
    return false;
  }
  return true;
}

enum k3_status k3_plan_number_shards(struct k3_plan *plan, struct k3_error *err) {
  for (size_t s = 0; s < plan->n_shards; s++) {
    struct k3_plan_shard *shard = &plan->shards[s];
    const struct k3_recipe_module *module = shard->mapped.module == K3_MODULE_CARRY ? NULL : &plan->recipe->modules[shard->mapped.module];
    if (module && module->shard)
      K3_TRY(eval_at(plan, &shard->mapped, module->shard, &shard->id, err));
  }
  return K3_OK;
}

// What makes two shards parts of one image tensor: the stack, its indexes, the parameter. With an id: one place in it. Of a view, `stack` is the
// first module that shows it, and no index counts.
struct place {
  uint32_t stack, param, index[K3_RECIPE_MAX_INDEXES];
  uint64_t id;
};

// Places that were met, by the shard that was there first. Shards of a stack are no neighbours before the layout, so each is held against the first.
struct places {
  const struct k3_plan *plan;
  bool with_id, of_view;
  struct k3_name_set known;
};

static size_t first_of_view(const struct k3_recipe *recipe, size_t module) {
  size_t first = 0;
  while (!recipe->modules[first].view || strcmp(recipe->modules[first].view, recipe->modules[module].view) != 0)
    first++;
  return first;
}

static struct place place_of(const struct places *places, const struct k3_plan_shard *shard) {
  const struct k3_plan *plan = places->plan;
  const struct k3_mapper *mapper = &plan->mapper;
  size_t m = shard->mapped.module;
  struct place place = {.param = (uint32_t)k3_plan_image_param(shard)};
  if (places->of_view) {
    place.stack = (uint32_t)first_of_view(plan->recipe, m);
    if (eval_at(plan, &shard->mapped, plan->recipe->modules[m].view_shard, &place.id, NULL) != K3_OK)
      place.id = UINT64_MAX;  // for the layout to refuse
    return place;
  }
  place.stack = mapper->stack_of[m];
  place.id = places->with_id ? shard->id : 0;
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    place.index[i] = mapper->stack_indexes[m] >> i & 1 ? shard->mapped.index[i] : 0;
  return place;
}

static bool same_place(const void *owner, uint32_t number, const char *name, size_t nbytes) {
  const struct places *places = owner;
  struct place place = place_of(places, &places->plan->shards[number]);
  return nbytes == sizeof place && memcmp(&place, name, sizeof place) == 0;
}

// *first is the shard that had the place before, or NULL.
static enum k3_status take_place(struct places *places, size_t shard, const struct k3_plan_shard **first, struct k3_error *err) {
  struct place place = place_of(places, &places->plan->shards[shard]);
  uint32_t number = K3_NAME_NONE;
  enum k3_status status = k3_name_set_add(&places->known, same_place, places, (const char *)&place, sizeof place, (uint32_t)shard, &number, err);
  *first = status == K3_OK && number != K3_NAME_NONE ? &places->plan->shards[number] : NULL;
  return status;
}

static enum k3_status look_at_places(struct places sets[3], const struct k3_plan *plan, size_t s, struct k3_findings *findings,
                                     struct k3_error *err) {
  const struct k3_plan_shard *shard = &plan->shards[s], *first;
  const struct k3_recipe_module *module = &plan->recipe->modules[shard->mapped.module];
  const char *path = k3_plan_path_of(plan, &shard->mapped), *name = k3_plan_source_of(plan, &shard->mapped)->name;
  if (module->shard) {
    K3_TRY(take_place(&sets[0], s, &first, err));
    if (first && !k3_plan_shards_agree(plan, first, shard, findings))
      return K3_OK;
    K3_TRY(take_place(&sets[1], s, &first, err));
    if (first)
      k3_findings_report(findings, K3_MAP04, path, name, "each shard id once", "shard %llu a second time: %s is there", (unsigned long long)shard->id,
                         k3_plan_source_of(plan, &first->mapped)->name);
  }
  if (module->view) {
    K3_TRY(take_place(&sets[2], s, &first, err));
    if (first)
      k3_findings_report(findings, K3_MAP04, path, name, "each shard id once", "a shard of the view %s a second time: %s is there", module->view,
                         k3_plan_source_of(plan, &first->mapped)->name);
  }
  return K3_OK;
}

enum k3_status k3_plan_check_stacks(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  struct places sets[3] = {{.plan = plan}, {.plan = plan, .with_id = true}, {.plan = plan, .of_view = true}};
  enum k3_status status = k3_plan_number_shards(plan, err);
  for (size_t s = 0; status == K3_OK && s < plan->n_shards && s < K3_NAME_NONE; s++) {
    if (plan->shards[s].mapped.module != K3_MODULE_CARRY)
      status = look_at_places(sets, plan, s, findings, err);
  }
  for (int i = 0; i < 3; i++)
    k3_name_set_free(&sets[i].known);
  return status;
}
