// What the manifest says about a laid-out plan.
#include <stdio.h>
#include <string.h>

#include "base/version.h"
#include "formats/json_write.h"
#include "loader/plan_parts.h"

enum { MANIFEST_ROUND_NBYTES = 64 };

// Lists grow in plain memory (the arena cannot), strings live in the manifest's arena or in the checkpoint.
struct lists {
  const struct k3_plan *plan;
  struct k3_manifest m;
  char *model_json;  // of recipes that describe their model
  size_t sources_capacity, documents_capacity, tensors_capacity, linears_capacity, views_capacity, reductions_capacity, dropped_capacity;
};

static const char *keep(struct lists *l, const char *text, struct k3_error *err) {
  return k3_arena_strndup(&l->m.arena, text, strlen(text), err);
}

static enum k3_status list_sources(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t s = 0; s < plan->n_sources; s++) {
    char text[32];
    snprintf(text, sizeof text, K3_IMAGE_SOURCE_PREFIX "%zu", s);
    const char *tensor = keep(l, text, err);
    if (!tensor)
      return K3_NO_MEMORY;
    if (plan->sources[s].is_header) {
      K3_TRY(k3_grow(&l->m.sources, &l->sources_capacity, l->m.n_sources + 1, sizeof *l->m.sources, err));
      l->m.sources[l->m.n_sources++] = (struct k3_manifest_source){.file = plan->sources[s].name,
                                                                   .nbytes = plan->sources[s].file_nbytes,
                                                                   .header_tensor = tensor,
                                                                   .of_target = plan->sources[s].of_target,
                                                                   .sha256 = plan->sources[s].sha256[0] ? plan->sources[s].sha256 : NULL};
    } else {
      K3_TRY(k3_grow(&l->m.documents, &l->documents_capacity, l->m.n_documents + 1, sizeof *l->m.documents, err));
      l->m.documents[l->m.n_documents++] = (struct k3_manifest_document){plan->sources[s].name, tensor};
    }
  }
  return K3_OK;
}

// Index into the manifest's sources of the file that holds a mapped tensor. The plan lists the source's files first, then those of the target that
// gave something.
static int64_t source_index(const struct k3_plan *plan, const struct lists *l, const struct k3_mapped *mapped) {
  const struct k3_ckpt *ckpt = k3_plan_ckpt(plan, mapped->of_target);
  const struct k3_ckpt_file *file = k3_ckpt_file_of(ckpt, mapped->tensor);
  if (l->m.n_sources == 0)
    return -1;  // a rank file: the shared one lists the sources
  if (!mapped->of_target)
    return file - ckpt->files;
  for (size_t s = 0; s < l->m.n_sources; s++) {
    if (l->m.sources[s].of_target && strcmp(l->m.sources[s].file, file->name) == 0)
      return (int64_t)s;
  }
  return -1;
}

static enum k3_status add_tensor(struct lists *l, struct k3_manifest_tensor tensor, struct k3_error *err) {
  K3_TRY(k3_grow(&l->m.tensors, &l->tensors_capacity, l->m.n_tensors + 1, sizeof *l->m.tensors, err));
  l->m.tensors[l->m.n_tensors++] = tensor;
  return K3_OK;
}

// The plan's shards from tensor->first on.
static void list_shards(const void *ctx, const struct k3_manifest_tensor *tensor, struct k3_manifest_shard *dst) {
  const struct lists *l = ctx;
  for (size_t s = 0; s < tensor->n_shards; s++) {
    const struct k3_plan_shard *shard = &l->plan->shards[tensor->first + s];
    dst[s] = (struct k3_manifest_shard){shard->id, k3_plan_source_of(l->plan, &shard->mapped)->name, source_index(l->plan, l, &shard->mapped),
                                        shard->row, shard->n_rows};
  }
}

// An entry for every stacked or renamed-from-elsewhere tensor; its shards are listed when they are written.
static enum k3_status list_stacks(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t first = 0, last; first < plan->n_shards; first = last) {
    const struct k3_plan_shard *head = &plan->shards[first];
    for (last = first + 1; last < plan->n_shards && plan->shards[last].plan_tensor == head->plan_tensor;)
      last++;
    // A tensor that is carried outside the modules keeps its name; it needs an entry only where its name alone would say otherwise.
    const struct k3_recipe_module *module = head->mapped.module == K3_MODULE_CARRY ? NULL : &plan->recipe->modules[head->mapped.module];
    const char *name = plan->tensors[head->plan_tensor].name;
    char copied[2 * K3_ST_MAX_NAME_NBYTES];
    size_t n_copied = k3_manifest_copied_name(&l->m, k3_plan_source_of(plan, &head->mapped)->name, copied, sizeof copied);
    bool follows = n_copied > 0 ? strcmp(copied, name) == 0 : !module;
    if (follows && (!module || !module->shard) && !head->mapped.of_target && !head->encoded)
      continue;  // merely copied: its name follows from root and aliases
    K3_TRY(add_tensor(
        l,
        (struct k3_manifest_tensor){name, module ? module->role : K3_ROLE_OPTIONAL, module ? module->tp : K3_TP_REPLICATE, NULL, last - first, first},
        err));
  }
  return K3_OK;
}

// Without modules, only encoded weights are not what their names say.
static enum k3_status list_encoded(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t i = 0; i < plan->n_tensors; i++) {
    const struct k3_plan_tensor *tensor = &plan->tensors[i];
    const struct k3_plan_piece *piece = tensor->kind == K3_PLAN_DATA ? &plan->pieces[tensor->first_piece] : NULL;
    if (!piece || !piece->encoded)
      continue;
    const struct k3_ckpt_file *file = k3_ckpt_file_of(plan->ckpt, piece->tensor);
    struct k3_manifest_shard *shard = k3_arena_alloc(&l->m.arena, sizeof *shard, err);
    if (!shard)
      return K3_NO_MEMORY;
    *shard = (struct k3_manifest_shard){0, k3_ckpt_tensor(plan->ckpt, piece->tensor)->name, file - plan->ckpt->files, 0, tensor->shape[0]};
    K3_TRY(add_tensor(l, (struct k3_manifest_tensor){tensor->name, K3_ROLE_CORE, K3_TP_REPLICATE, shard, 1, 0}, err));
  }
  return K3_OK;
}

// Patterns for modules whose role or tensor-parallel rule is not the default.
static enum k3_status list_rules(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    const struct k3_recipe_module *module = &plan->recipe->modules[m];
    if (!plan->mapper.exists[m] || module->shard || (module->role == K3_ROLE_CORE && module->tp == K3_TP_REPLICATE))
      continue;
    bool named = false;  // two kinds of layers may have a module of the same name
    for (size_t earlier = 0; earlier < m && !named; earlier++)
      named = plan->mapper.exists[earlier] && !plan->recipe->modules[earlier].shard && plan->recipe->modules[earlier].tp == module->tp &&
              plan->recipe->modules[earlier].role == module->role && strcmp(plan->recipe->modules[earlier].into, module->into) == 0;
    if (named)
      continue;
    char text[600];
    snprintf(text, sizeof text, "%s.*", module->into);
    const char *name = keep(l, text, err);
    if (!name)
      return K3_NO_MEMORY;
    K3_TRY(add_tensor(l, (struct k3_manifest_tensor){name, module->role, module->tp, NULL, 0, 0}, err));
  }
  return K3_OK;
}

static enum k3_status list_reductions(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    const struct k3_recipe_module *module = &plan->recipe->modules[m];
    if (!module->reduce_into || !plan->mapper.exists[m])
      continue;
    K3_TRY(k3_grow(&l->m.reductions, &l->reductions_capacity, l->m.n_reductions + 1, sizeof *l->m.reductions, err));
    l->m.reductions[l->m.n_reductions++] = (struct k3_manifest_pair){module->into, module->reduce_into};
  }
  return K3_OK;
}

// A module of the image that is not plain. Members of a stack have one scheme, so the first one speaks for all of them.
static enum k3_status add_linear(struct lists *l, const char *module, const struct k3_linear *linear, struct k3_error *err) {
  const struct k3_quant_scheme *scheme = &linear->scheme;
  bool blocks = scheme->block_rows > 0 && scheme->block_cols > 0;
  K3_TRY(k3_grow(&l->m.linears, &l->linears_capacity, l->m.n_linears + 1, sizeof *l->m.linears, err));
  l->m.linears[l->m.n_linears++] = (struct k3_manifest_linear){.module = module,
                                                               .scheme = k3_scheme_name(scheme->scheme),
                                                               .encoded_from = linear->encoded_from,
                                                               .block_rows = blocks ? scheme->block_rows : 0,
                                                               .block_cols = blocks ? scheme->block_cols : 0,
                                                               .second_scale_divides = scheme->second == K3_SECOND_DIVIDE};
  return K3_OK;
}

// Shards stand image tensor after image tensor here, so the shards of a weight name each module once.
static enum k3_status list_linears(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t i = 0; plan->recipe->keep_names && i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    if (linear->is_plain)
      continue;
    const char *module = k3_arena_strndup(&l->m.arena, linear->name, linear->name_nbytes, err);
    if (!module)
      return K3_NO_MEMORY;
    K3_TRY(add_linear(l, module, linear, err));
  }
  uint32_t last = UINT32_MAX;
  for (size_t s = 0; s < plan->n_shards; s++) {
    const struct k3_plan_shard *shard = &plan->shards[s];
    bool weight = shard->mapped.param == K3_PARAM_WEIGHT || shard->mapped.param == K3_PARAM_WEIGHT_PACKED;
    if (!weight || shard->linear == K3_LINEAR_ABSENT || plan->linears.items[shard->linear].is_plain || shard->plan_tensor == last)
      continue;
    last = shard->plan_tensor;
    const char *name = plan->tensors[shard->plan_tensor].name, *dot = strrchr(name, '.');
    const char *module = k3_arena_strndup(&l->m.arena, name, (size_t)(dot - name), err);
    if (!module)
      return K3_NO_MEMORY;
    K3_TRY(add_linear(l, module, &plan->linears.items[shard->linear], err));
  }
  return K3_OK;
}

// Where a shard of a view stands in the view: sorted insertion keeps the list in id order. The room doubles; what an arena leaves behind goes with
// it.
static enum k3_status insert_view_shard(struct lists *l, struct k3_manifest_view *view, struct k3_manifest_view_shard shard, struct k3_error *err) {
  size_t at = view->n_shards;
  if ((at & (at - 1)) == 0) {
    struct k3_manifest_view_shard *room = k3_arena_alloc(&l->m.arena, (at ? 2 * at : 1) * sizeof *room, err);
    if (!room)
      return K3_NO_MEMORY;
    if (at > 0)
      memcpy(room, view->shards, at * sizeof *room);
    view->shards = room;
  }
  for (; at > 0 && view->shards[at - 1].id > shard.id; at--)
    ;
  if (at > 0 && view->shards[at - 1].id == shard.id)
    return k3_fail(err, K3_BAD_INPUT, K3_MAP04, NULL, view->name, "each shard id once", "shard %llu of the view a second time",
                   (unsigned long long)shard.id);
  memmove(view->shards + at + 1, view->shards + at, (view->n_shards - at) * sizeof *view->shards);
  view->shards[at] = shard;
  view->n_shards++;
  return K3_OK;
}

static struct k3_manifest_view *find_view(struct lists *l, const char *name) {
  for (size_t v = 0; v < l->m.n_views; v++) {
    if (strcmp(l->m.views[v].name, name) == 0)
      return &l->m.views[v];
  }
  return NULL;
}

static enum k3_status list_views(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  for (size_t s = 0; s < plan->n_shards; s++) {
    const struct k3_plan_shard *shard = &plan->shards[s];
    if (shard->mapped.module == K3_MODULE_CARRY || !plan->recipe->modules[shard->mapped.module].view)
      continue;
    const struct k3_recipe_module *module = &plan->recipe->modules[shard->mapped.module];
    uint64_t indexes[K3_RECIPE_MAX_INDEXES], id;
    for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
      indexes[i] = shard->mapped.index[i];
    K3_TRY(k3_recipe_eval(plan->recipe, plan->mapper.config, module->view_shard, indexes, &id, err));
    char name[512];
    snprintf(name, sizeof name, "%s.%s", module->view, k3_param_image_name(module, shard->mapped.param, shard->packed));
    struct k3_manifest_view *view = find_view(l, name);
    if (!view) {
      K3_TRY(k3_grow(&l->m.views, &l->views_capacity, l->m.n_views + 1, sizeof *l->m.views, err));
      view = &l->m.views[l->m.n_views];
      *view = (struct k3_manifest_view){.name = keep(l, name, err)};
      if (!view->name)
        return K3_NO_MEMORY;
      l->m.n_views++;
    }
    const struct k3_manifest_view_shard row = {id, plan->tensors[shard->plan_tensor].name, shard->row, shard->n_rows};
    K3_TRY(insert_view_shard(l, view, row, err));
  }
  return K3_OK;
}

static enum k3_status fill(const struct k3_plan *plan, struct lists *l, struct k3_error *err) {
  const struct k3_recipe *recipe = plan->recipe;
  l->m.tool = K3_TOOL;
  l->m.recipe_name = recipe->name;
  l->m.recipe_sha256 = recipe->sha256;
  l->m.family = recipe->family;
  l->m.dspark = plan->dspark;
  l->m.model_json = l->model_json;
  l->m.root = plan->mapper.root ? plan->mapper.root : "";
  l->m.image_root = recipe->image_root;
  l->m.tp_size = plan->part.tp;
  l->m.tp_rank = plan->part.rank < 0 ? 0 : (uint32_t)plan->part.rank;
  l->m.rank_seals = (const char **)(uintptr_t)plan->part.rank_seals;
  l->m.digests = plan->options.digests;
  l->m.crc = plan->options.crc;
  K3_TRY(list_sources(plan, l, err));
  l->m.aliases = k3_arena_alloc(&l->m.arena, (recipe->n_aliases + 1) * sizeof *l->m.aliases, err);
  if (!l->m.aliases)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < recipe->n_aliases; i++)
    l->m.aliases[l->m.n_aliases++] = (struct k3_manifest_pair){recipe->aliases[i].name, recipe->aliases[i].value};
  for (size_t i = 0; i < plan->n_dropped; i++) {
    K3_TRY(k3_grow(&l->m.dropped, &l->dropped_capacity, l->m.n_dropped + 1, sizeof *l->m.dropped, err));
    l->m.dropped[l->m.n_dropped++] = (struct k3_manifest_pair){plan->dropped[i].tensor, plan->dropped[i].why};
  }
  K3_TRY(list_linears(plan, l, err));
  if (recipe->keep_names)
    return list_encoded(plan, l, err);
  K3_TRY(list_stacks(plan, l, err));
  K3_TRY(list_rules(plan, l, err));
  K3_TRY(list_reductions(plan, l, err));
  return list_views(plan, l, err);
}

enum k3_status k3_plan_write_manifest(struct k3_plan *plan, struct k3_error *err) {
  struct lists l = {.plan = plan};
  l.m.list_shards = list_shards;
  l.m.list_ctx = &l;
  if (plan->recipe->model && plan->ckpt->config) {
    l.model_json = k3_recipe_model_json(plan->recipe, plan->ckpt->config, err);
    if (!l.model_json)
      return err && err->status != K3_OK ? err->status : K3_NO_MEMORY;
  }
  enum k3_status status = fill(plan, &l, err);
  if (status == K3_OK) {
    k3_free(plan->manifest);
    plan->manifest = k3_manifest_to_json(&l.m, err);
    status = plan->manifest ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK)
    plan->manifest_nbytes = (strlen(plan->manifest) + MANIFEST_ROUND_NBYTES - 1) / MANIFEST_ROUND_NBYTES * MANIFEST_ROUND_NBYTES;
  k3_free(l.model_json);
  k3_free(l.m.sources);
  k3_free(l.m.documents);
  k3_free(l.m.tensors);
  k3_free(l.m.linears);
  k3_free(l.m.views);
  k3_free(l.m.reductions);
  k3_free(l.m.dropped);
  k3_arena_free(&l.m.arena);
  return status;
}
