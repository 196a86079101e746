// Shapes and dtypes of mapped tensors.
#include <stdio.h>
#include <string.h>

#include "loader/plan_parts.h"

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

unsigned k3_plan_normal_shape(const struct k3_plan *plan, const struct k3_plan_shard *shard, uint64_t shape[K3_ST_MAX_RANK]) {
  const struct k3_st_tensor *t = k3_plan_source_of(plan, &shard->mapped);
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

// The shape that the recipe gives for a plain parameter; false when there is none to hold it against.
static enum k3_status expected_shape(const struct k3_plan *plan, const struct k3_mapped *mapped, uint64_t shape[K3_RECIPE_MAX_RANK], unsigned *rank,
                                     struct k3_error *err) {
  const struct k3_recipe_module *module = &plan->recipe->modules[mapped->module];
  const struct k3_recipe_param *param = &module->params[mapped->param >= K3_PARAM_OF_MODULE ? mapped->param - K3_PARAM_OF_MODULE : 0];
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = mapped->index[i];
  *rank = param->rank;
  for (unsigned i = 0; i < param->rank; i++)
    K3_TRY(k3_recipe_eval(plan->recipe, plan->mapper.config, param->shape[i], indexes, &shape[i], err));
  return K3_OK;
}

static enum k3_status check_one(const struct k3_plan *plan, const struct k3_plan_shard *shard, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_mapped *mapped = &shard->mapped;
  const struct k3_st_tensor *t = k3_plan_source_of(plan, mapped);
  const struct k3_recipe_module *module = &plan->recipe->modules[mapped->module];
  if (mapped->param != K3_PARAM_WEIGHT && mapped->param != K3_PARAM_WEIGHT_PACKED && mapped->param < K3_PARAM_OF_MODULE)
    return K3_OK;  // companions are checked with their scheme
  uint64_t expected[K3_RECIPE_MAX_RANK];
  unsigned rank;
  K3_TRY(expected_shape(plan, mapped, expected, &rank, err));
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
  if (!plain && shard->packed && rank == 2)
    expected[1] /= 2;  // two codes a byte
  if (!plain && (t->dtype == K3_DTYPE_I32 || t->dtype == K3_DTYPE_I8))
    return K3_OK;  // the width of packed integers is a matter of the scheme
  bool equal = rank == t->rank;
  for (unsigned i = 0; equal && i < rank; i++)
    equal = expected[i] == t->shape[i];
  if (!equal) {
    char found[160], allowed[160];
    shape_text(t->shape, t->rank, found, sizeof found);
    shape_text(expected, rank, allowed, sizeof allowed);
    k3_findings_report(findings, K3_MAP05, k3_plan_path_of(plan, mapped), t->name, allowed, "shape %s", found);
  }
  return K3_OK;
}

// Shards that lie in one tensor must agree in dtype and row shape. Shards of a stack are not neighbours here, so each is held against the first of its
// stack, found through the destination's name.
enum k3_status k3_plan_check_shapes(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  for (size_t s = 0; s < plan->n_shards; s++) {
    if (plan->shards[s].mapped.module != K3_MODULE_CARRY)
      K3_TRY(check_one(plan, &plan->shards[s], findings, err));
  }
  return K3_OK;
}
