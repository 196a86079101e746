// From a mapped plan to the plans of a folder's files: which shard goes where, and which slice of it.
#include "loader/split.h"

#include <stdio.h>
#include <string.h>

#include "loader/plan_parts.h"
#include "quant/slice.h"

enum { MAX_EXTENT = 1 << 30 };

static bool same_instance(const struct k3_mapped *a, const struct k3_mapped *b) {
  return a->module == b->module && memcmp(a->index, b->index, sizeof a->index) == 0;
}

// The parameter as cuts see it: the recipe's own spelling of bias or weight is one too.
static enum k3_param bias_or_param(const struct k3_plan *plan, const struct k3_plan_shard *shard) {
  unsigned param = shard->mapped.param;
  if (param < K3_PARAM_OF_MODULE)
    return k3_plan_image_param(shard);
  const char *name = plan->recipe->modules[shard->mapped.module].params[param - K3_PARAM_OF_MODULE].name;
  return strcmp(name, "bias") == 0 ? K3_PARAM_BIAS : strcmp(name, "weight") == 0 ? K3_PARAM_WEIGHT : (enum k3_param)param;
}

// The weight of a module instance and how its scales lie.
struct instance {
  const char *name;  // the weight's
  uint64_t n_rows, n_cols;
  unsigned rank;
  uint32_t cols_per_elem;           // 2 when an element holds two codes
  uint32_t block_rows, block_cols;  // 0: the whole extent shares a scale, or there is none
  bool found;
};

// Shards [first, last) are one instance.
static struct instance look_at(const struct k3_plan *plan, size_t first, size_t last) {
  struct instance w = {.cols_per_elem = 1};
  for (size_t s = first; s < last; s++) {
    const struct k3_plan_shard *shard = &plan->shards[s];
    enum k3_param param = bias_or_param(plan, shard);
    if (param != K3_PARAM_WEIGHT && param != K3_PARAM_WEIGHT_PACKED)
      continue;
    uint64_t shape[K3_ST_MAX_RANK + 1];
    unsigned rank = k3_plan_normal_shape(plan, shard, shape);
    w.cols_per_elem = shard->packed ? 2 : 1;
    w.n_rows = rank > 0 ? shape[0] : 1;
    w.n_cols = rank > 1 ? shape[1] * w.cols_per_elem : 0;
    w.rank = rank;
    w.name = k3_plan_source_of(plan, &shard->mapped)->name;
    // Of a weight with more dimensions, as convolutions have, rows are cut alike.
    w.found = rank == 2 || (rank > 2 && (shard->linear == K3_LINEAR_ABSENT || plan->linears.items[shard->linear].is_plain));
    if (shard->linear == K3_LINEAR_ABSENT)
      continue;
    const struct k3_quant_scheme *scheme = &plan->linears.items[shard->linear].scheme;
    w.block_rows = scheme->block_rows;
    w.block_cols = scheme->block_cols;
    w.found &= scheme->scheme != K3_SCHEME_INT_PACKED;
  }
  return w;
}

// Attention heads stay whole: the first factor of a projection's rows (or columns, when those are cut) in the recipe, as in "N*P + N*R" or "G*D".
static enum k3_status heads_of(const struct k3_plan *plan, const struct k3_recipe_module *module, uint64_t *n_units, struct k3_error *err) {
  *n_units = 0;
  const char *extent = module->n_params > 0 && module->params[0].rank == 2 ? module->params[0].shape[module->tp == K3_TP_ROW] : NULL;
  size_t n = extent ? strcspn(extent, "*+ ") : 0;
  if (!strstr(module->name, "self_attn.") || module->tp == K3_TP_VOCAB || n == 0)
    return K3_OK;
  char factor[64] = "num_attention_heads";  // of a width that is one symbol
  if (extent[n] == '*' && n < sizeof factor) {
    memcpy(factor, extent, n);
    factor[n] = '\0';
  }
  return k3_recipe_eval(plan->recipe, plan->mapper.config, factor, NULL, n_units, err);
}

static bool is_kept_whole(enum k3_param param) {
  return param == K3_PARAM_WEIGHT_GLOBAL_SCALE || param == K3_PARAM_INPUT_SCALE || param == K3_PARAM_INPUT_GLOBAL_SCALE;
}

static enum k3_status cut_shard(const struct instance *w, enum k3_tp_rule rule, const struct k3_slice *slice, enum k3_param param,
                                const struct k3_st_tensor *source, struct k3_plan_cut *cut, struct k3_error *err) {
  bool rows = rule != K3_TP_ROW;
  *cut = (struct k3_plan_cut){0};
  if (is_kept_whole(param))
    return K3_OK;
  if (w->n_rows >= MAX_EXTENT || w->n_cols >= MAX_EXTENT)  // what a cut has room for
    return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, source->name, "below 2^30 rows and columns", "%llu rows, %llu columns",
                   (unsigned long long)w->n_rows, (unsigned long long)w->n_cols);
  const uint32_t first = (uint32_t)slice->first, n = (uint32_t)slice->n;
  switch (param) {
    case K3_PARAM_WEIGHT:
    case K3_PARAM_WEIGHT_PACKED:
      *cut = rows ? (struct k3_plan_cut){first, n, 1} : (struct k3_plan_cut){first / w->cols_per_elem, n / w->cols_per_elem, 2};
      return K3_OK;
    case K3_PARAM_WEIGHT_SCALE:
      if (rows && w->block_rows)
        *cut = (struct k3_plan_cut){first / w->block_rows, n / w->block_rows, 1};
      else if (!rows && w->block_cols)
        *cut = (struct k3_plan_cut){first / w->block_cols, n / w->block_cols, 2};
      return K3_OK;
    case K3_PARAM_BIAS:
      if (rows)
        *cut = (struct k3_plan_cut){first, n, 1};
      return K3_OK;
    default:
      return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, source->name, "weight, scales and bias", "there is no rule how to cut this parameter");
  }
}

// The rank's slice of one instance that the rule cuts.
static enum k3_status slice_of(const struct k3_plan *mapped, size_t first, size_t last, uint32_t tp, uint32_t rank, struct instance *w,
                               struct k3_slice *slice, struct k3_error *err) {
  const struct k3_recipe_module *module = &mapped->recipe->modules[mapped->shards[first].mapped.module];
  const bool rows = module->tp != K3_TP_ROW;
  uint64_t n_units, n_heads = 0;
  *w = look_at(mapped, first, last);
  K3_TRY(heads_of(mapped, module, &n_units, err));
  // Key heads, and index heads with them, are fewer than those of the queries.
  if (n_units > 0 && rows && k3_recipe_eval(mapped->recipe, mapped->mapper.config, "num_attention_heads", NULL, &n_heads, NULL) == K3_OK &&
      n_units < n_heads)
    k3_slice_repeat(n_units, &tp, &rank);
  if (!w->found || (!rows && w->rank != 2))
    return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, k3_plan_source_of(mapped, &mapped->shards[first].mapped)->name,
                   "a weight with two dimensions", "a module without one cannot be cut");
  return k3_slice_of(rows ? w->n_rows : w->n_cols, n_units, rows ? w->block_rows : w->block_cols, tp, rank, w->name, rows ? "rows" : "columns", slice,
                     err);
}

// Behind the last shard of the module instance that begins with shard `first`.
static size_t end_of_instance(const struct k3_plan *mapped, size_t first) {
  size_t last = first + 1;
  while (last < mapped->n_shards && same_instance(&mapped->shards[first].mapped, &mapped->shards[last].mapped))
    last++;
  return last;
}

static enum k3_tp_rule rule_of(const struct k3_plan *mapped, size_t shard) {
  uint16_t module = mapped->shards[shard].mapped.module;
  return module == K3_MODULE_CARRY ? K3_TP_REPLICATE : mapped->recipe->modules[module].tp;
}

enum k3_status k3_split_check(const struct k3_plan *mapped, uint32_t tp, struct k3_error *err) {
  struct instance w;
  struct k3_slice slice;
  for (size_t first = 0, last; first < mapped->n_shards; first = last) {
    last = end_of_instance(mapped, first);
    if (rule_of(mapped, first) != K3_TP_REPLICATE)
      K3_TRY(slice_of(mapped, first, last, tp, 0, &w, &slice, err));
  }
  return K3_OK;
}

// Adds the shards of one instance that belong to the part, with their cuts.
static enum k3_status add_instance(const struct k3_plan *mapped, size_t first, size_t last, struct k3_plan *part, struct k3_error *err) {
  bool carried = mapped->shards[first].mapped.module == K3_MODULE_CARRY, shared = part->part.rank < 0;
  enum k3_tp_rule rule = rule_of(mapped, first);
  struct instance w = {0};
  struct k3_slice slice = {0};
  if (rule != K3_TP_REPLICATE)
    K3_TRY(slice_of(mapped, first, last, part->part.tp, shared ? 0 : (uint32_t)part->part.rank, &w, &slice, err));
  for (size_t s = first; s < last; s++) {
    struct k3_plan_shard shard = mapped->shards[s];
    enum k3_param param = carried ? K3_PARAM_WEIGHT : bias_or_param(mapped, &shard);
    bool split = rule != K3_TP_REPLICATE && !(rule == K3_TP_ROW && param == K3_PARAM_BIAS);
    if (split == shared)
      continue;
    if (split)
      K3_TRY(cut_shard(&w, rule, &slice, param, k3_plan_source_of(mapped, &shard.mapped), &shard.cut, err));
    part->shards[part->n_shards++] = shard;
  }
  return K3_OK;
}

static enum k3_status fill_part(const struct k3_plan *mapped, struct k3_plan *part, struct k3_findings *findings, struct k3_error *err) {
  bool any = false;
  for (size_t m = 0; m < mapped->recipe->n_modules; m++)
    any |= mapped->recipe->modules[m].tp != K3_TP_REPLICATE;
  if (!any)
    return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, NULL, "a recipe with tensor-parallel rules", "the recipe %s splits nothing",
                   mapped->recipe->name);
  part->shards = k3_calloc(mapped->n_shards, sizeof *part->shards, err);
  if (!part->shards)
    return K3_NO_MEMORY;
  for (size_t first = 0, last; first < mapped->n_shards; first = last) {
    last = end_of_instance(mapped, first);
    K3_TRY(add_instance(mapped, first, last, part, err));
  }
  if (part->part.rank < 0 && mapped->n_dropped > 0) {
    part->dropped = k3_calloc(mapped->n_dropped, sizeof *part->dropped, err);
    if (!part->dropped)
      return K3_NO_MEMORY;
    memcpy(part->dropped, mapped->dropped, mapped->n_dropped * sizeof *part->dropped);
    part->n_dropped = mapped->n_dropped;
  }
  if (part->part.rank < 0 && mapped->sources) {
    part->sources = k3_calloc(mapped->n_sources, sizeof *part->sources, err);
    if (!part->sources)
      return K3_NO_MEMORY;
    memcpy(part->sources, mapped->sources, mapped->n_sources * sizeof *part->sources);
    part->n_sources = mapped->n_sources;
  }
  return k3_plan_layout(part, findings, err);
}

enum k3_status k3_split_part(const struct k3_plan *mapped, uint32_t tp, int32_t rank, const char *const *rank_seals, struct k3_plan *part,
                             struct k3_findings *findings, struct k3_error *err) {
  *part = (struct k3_plan){.ckpt = mapped->ckpt,
                           .target = mapped->target,
                           .recipe = mapped->recipe,
                           .mapper = mapped->mapper,
                           .options = mapped->options,
                           .part = {tp, rank, rank < 0 ? rank_seals : NULL},
                           .dspark = mapped->dspark,
                           .linears = mapped->linears,
                           .requant = mapped->requant};
  enum k3_status status = fill_part(mapped, part, findings, err);
  if (status != K3_OK)
    k3_split_part_free(part);
  return status;
}

void k3_split_part_free(struct k3_plan *part) {
  part->mapper = (struct k3_mapper){0};  // these are the mapped plan's
  part->linears = (struct k3_linears){0};
  part->requant = NULL;
  k3_plan_free(part);
}

enum k3_status k3_plan_apply_cut(const struct k3_plan_shard *shard, const struct k3_st_tensor *source, unsigned rank, uint64_t *shape,
                                 struct k3_plan_piece *piece, struct k3_error *err) {
  const struct k3_plan_cut *cut = &shard->cut;
  if (cut->axis == 0)
    return K3_OK;
  uint64_t n_rows = rank > 0 ? shape[0] : 1, nbytes = source->end - source->begin, row_nbytes = n_rows ? nbytes / n_rows : 0;
  uint64_t bits = k3_dtype_bits((enum k3_dtype)source->dtype);
  bool fits = cut->axis == 1 ? rank >= 1 && cut->first + cut->n <= n_rows
                             : rank == 2 && cut->first + cut->n <= shape[1] && cut->first * bits % 8 == 0 && cut->n * bits % 8 == 0;
  if (!fits || n_rows > UINT32_MAX)
    return k3_fail(err, K3_UNSUPPORTED, K3_PCK05, NULL, source->name, NULL, "the tensor has no such slice");
  if (cut->axis == 1) {
    piece->src_offset = cut->first * row_nbytes;
    piece->row_nbytes = piece->src_stride = cut->n * row_nbytes;
  } else {
    piece->src_offset = cut->first * bits / 8;
    piece->row_nbytes = cut->n * bits / 8;
    piece->src_stride = row_nbytes;
    piece->n_rows = (uint32_t)n_rows;
  }
  shape[cut->axis - 1] = cut->n;
  return K3_OK;
}
