// From source names to shards: which tensor goes where, and whether the set is complete, unique and of the right shape.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/family.h"
#include "loader/linears_parts.h"
#include "loader/plan.h"
#include "loader/plan_parts.h"
#include "loader/recipes.h"
#include "loader/requantise.h"

enum { N_SAMPLES = 4096 };

// The root under which most of a sample of the names find a module; the longest of equals.
static const char *choose_root(struct k3_plan *plan) {
  const struct k3_recipe *recipe = plan->recipe;
  const char *best = recipe->n_roots ? recipe->roots[0] : "";
  uint64_t n_best = 0, step = plan->ckpt->n_tensors / N_SAMPLES + 1;
  for (size_t r = 0; r < recipe->n_roots; r++) {
    uint64_t n_hits = 0;
    k3_mapper_set_root(&plan->mapper, recipe->roots[r]);
    for (uint64_t t = 0; t < plan->ckpt->n_tensors; t += step) {
      const struct k3_st_tensor *tensor = k3_ckpt_tensor(plan->ckpt, t);
      struct k3_mapped mapped;
      const char *why;
      enum k3_mapper_answer answer = k3_mapper_resolve(&plan->mapper, tensor->name, tensor->name_nbytes, &mapped, &why);
      n_hits += answer != K3_UNKNOWN_NAME && answer != K3_MAPPED_CARRY;
    }
    if (n_hits > n_best || (n_hits == n_best && n_hits > 0 && strlen(recipe->roots[r]) > strlen(best))) {
      n_best = n_hits;
      best = recipe->roots[r];
    }
  }
  return best;
}

// Names nobody claims, grouped by their pattern so that a family of 400 strangers is one finding.
struct stranger {
  char *pattern;
  uint64_t first_tensor, n_tensors;
};

struct strangers {
  struct stranger *items;
  size_t n_items, capacity;
};

static void pattern_text(const char *name, char *dst, size_t capacity) {
  size_t n = 0;
  for (const char *c = name; *c && n + 1 < capacity; c++) {
    bool digit = *c >= '0' && *c <= '9', after_digit = n > 0 && dst[n - 1] == '*';
    if (digit && after_digit)
      continue;
    dst[n++] = digit ? '*' : *c;
  }
  dst[n] = '\0';
}

static enum k3_status add_stranger(struct strangers *strangers, uint64_t tensor, const char *name, struct k3_error *err) {
  char pattern[512];
  pattern_text(name, pattern, sizeof pattern);
  for (size_t i = 0; i < strangers->n_items; i++) {
    if (strcmp(strangers->items[i].pattern, pattern) == 0) {
      strangers->items[i].n_tensors++;
      return K3_OK;
    }
  }
  // A hostile file could invent a pattern per tensor; beyond a thousand they share the last entry.
  if (strangers->n_items == 1000) {
    strangers->items[999].n_tensors++;
    return K3_OK;
  }
  K3_TRY(k3_grow(&strangers->items, &strangers->capacity, strangers->n_items + 1, sizeof *strangers->items, err));
  char *copy = k3_strndup(pattern, strlen(pattern), err);
  if (!copy)
    return K3_NO_MEMORY;
  strangers->items[strangers->n_items++] = (struct stranger){copy, tensor, 1};
  return K3_OK;
}

static const char *other_root_of(struct k3_plan *plan, const struct k3_st_tensor *tensor) {
  struct k3_mapper *mapper = &plan->mapper;
  char saved[sizeof mapper->root_buffer];
  const char *found = NULL;
  snprintf(saved, sizeof saved, "%s", mapper->root);
  for (size_t r = 0; r < plan->recipe->n_roots && !found; r++) {
    struct k3_mapped mapped;
    const char *why;
    k3_mapper_set_root(mapper, plan->recipe->roots[r]);
    enum k3_mapper_answer answer = k3_mapper_resolve(mapper, tensor->name, tensor->name_nbytes, &mapped, &why);
    if (answer == K3_MAPPED || answer == K3_BEYOND_COUNT)
      found = plan->recipe->roots[r];
  }
  k3_mapper_set_root(mapper, saved);
  return found;
}

enum k3_status k3_plan_drop(struct k3_plan *plan, const char *tensor, const char *why, struct k3_error *err) {
  K3_TRY(k3_grow(&plan->dropped, &plan->dropped_capacity, plan->n_dropped + 1, sizeof *plan->dropped, err));
  plan->dropped[plan->n_dropped].tensor = tensor;
  plan->dropped[plan->n_dropped++].why = why;
  return K3_OK;
}

static enum k3_status add_shard(struct k3_plan *plan, const struct k3_mapped *mapped, struct k3_error *err) {
  K3_TRY(k3_grow(&plan->shards, &plan->shards_capacity, plan->n_shards + 1, sizeof *plan->shards, err));
  plan->shards[plan->n_shards++] = (struct k3_plan_shard){.mapped = *mapped};
  return K3_OK;
}

static enum k3_status map_tensors(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  struct strangers strangers = {0};
  enum k3_status status = k3_grow(&plan->shards, &plan->shards_capacity, plan->ckpt->n_tensors, sizeof *plan->shards, err);
  bool adapter = false;
  for (uint64_t t = 0; status == K3_OK && t < plan->ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(plan->ckpt, t);
    const char *path = k3_ckpt_file_of(plan->ckpt, t)->path, *why = NULL, *other;
    struct k3_mapped mapped = {.tensor = (uint32_t)t};
    size_t stem_nbytes;
    switch (k3_mapper_resolve(&plan->mapper, tensor->name, tensor->name_nbytes, &mapped, &why)) {
      case K3_MAPPED: status = add_shard(plan, &mapped, err); break;
      case K3_MAPPED_CARRY:
        mapped.module = K3_MODULE_CARRY;
        status = add_shard(plan, &mapped, err);
        break;
      case K3_MAPPED_IGNORE: status = k3_plan_drop(plan, tensor->name, why, err); break;
      case K3_BEYOND_COUNT:
        k3_findings_report(findings, K3_MAP04, path, tensor->name, "indexes below the counts of config.json", "an index beyond the count");
        break;
      case K3_ODD_NUMBER:
        k3_findings_report(findings, K3_MAP07, path, tensor->name, "plain decimal numbers", "a number in the name is not in its canonical spelling");
        break;
      case K3_UNKNOWN_NAME:
        if (k3_kv_scale_of(tensor->name, tensor->name_nbytes, &stem_nbytes)) {
          mapped.module = K3_MODULE_CARRY;  // an optional scale of the KV cache: kept under its own name
          status = add_shard(plan, &mapped, err);
          break;
        }
        if (k3_foreign_of(tensor) != K3_FOREIGN_NONE) {
          status = k3_plan_drop(plan, tensor->name, "belongs to an unsupported format", err);
          break;
        }
        other = other_root_of(plan, tensor);
        if (strstr(tensor->name, "lora_A") || strstr(tensor->name, "lora_B")) {
          if (!adapter)
            k3_findings_report(findings, K3_MAP09, path, tensor->name, "a whole model: merge the adapter into its base first", "an adapter, not a model");
          adapter = true;
        } else if (other) {
          k3_findings_report(findings, K3_MAP06, path, tensor->name, plan->mapper.root[0] ? plan->mapper.root : "no prefix",
                             "the prefix \"%s\" beside another one in the same checkpoint", other);
        } else {
          status = add_stranger(&strangers, t, tensor->name, err);
          if (status == K3_OK)
            status = k3_plan_drop(plan, tensor->name, "no module claims it (--allow MAP01)", err);
        }
        break;
    }
  }
  for (size_t i = 0; i < strangers.n_items; i++) {
    const struct stranger *s = &strangers.items[i];
    const char *name = k3_ckpt_tensor(plan->ckpt, s->first_tensor)->name, *path = k3_ckpt_file_of(plan->ckpt, s->first_tensor)->path;
    k3_findings_report(findings, K3_MAP01, path, name, "--allow MAP01 drops them", "no module of recipe %s claims it: %llu %s like %s",
                       plan->recipe->name, (unsigned long long)s->n_tensors, s->n_tensors == 1 ? "tensor" : "tensors", s->pattern);
    k3_free(s->pattern);
  }
  k3_free(strangers.items);
  return status;
}

// Borrowed modules come from the draft when it has them, else from the target.
static enum k3_status map_borrowed(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  if (!plan->target)
    return K3_OK;
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    const struct k3_recipe_module *module = &plan->recipe->modules[m];
    if (module->role != K3_ROLE_BORROWED || strchr(module->name, '{'))
      continue;
    size_t own = SIZE_MAX;
    for (size_t s = 0; s < plan->n_shards; s++) {
      if (plan->shards[s].mapped.module == m && !plan->shards[s].mapped.of_target)
        own = s;
    }
    uint64_t tensor = 0;
    bool found = k3_plan_find_borrowed(plan, module->name, &tensor);
    if (own != SIZE_MAX && !(plan->options.embed_from_target && found))
      continue;
    if (!found) {
      k3_findings_report(findings, K3_MAP02, plan->target->source, module->name, "the target model's folder, or at least the shard that holds it",
                         "the target has no tensor of that name under any known root");
      continue;
    }
    struct k3_mapped mapped = {.tensor = (uint32_t)tensor, .module = (uint16_t)m, .param = K3_PARAM_WEIGHT, .of_target = true};
    if (own != SIZE_MAX) {
      K3_TRY(k3_plan_drop(plan, k3_ckpt_tensor(plan->ckpt, plan->shards[own].mapped.tensor)->name, "replaced by the target's (--embed target)", err));
      plan->shards[own].mapped = mapped;
    } else {
      K3_TRY(add_shard(plan, &mapped, err));
    }
  }
  return K3_OK;
}

bool k3_plan_find_own(const struct k3_plan *plan, size_t module, uint64_t *tensor) {
  for (uint64_t t = 0; t < plan->ckpt->n_tensors; t++) {
    const struct k3_st_tensor *candidate = k3_ckpt_tensor(plan->ckpt, t);
    struct k3_mapped mapped;
    const char *why;
    if (strstr(candidate->name, plan->recipe->modules[module].name) &&
        k3_mapper_resolve(&plan->mapper, candidate->name, candidate->name_nbytes, &mapped, &why) == K3_MAPPED && mapped.module == module &&
        mapped.param == K3_PARAM_WEIGHT) {
      *tensor = t;
      return true;
    }
  }
  return false;
}

bool k3_plan_borrowed_name(void *ctx, const char *tensor) {
  const struct k3_recipe *recipe = ctx;
  for (size_t m = 0; m < recipe->n_modules; m++) {
    if (recipe->modules[m].role != K3_ROLE_BORROWED)
      continue;
    for (size_t r = 0; r < recipe->n_borrowed_roots; r++) {
      size_t n_root = strlen(recipe->borrowed_roots[r]), n_name = strlen(recipe->modules[m].name);
      if (strncmp(tensor, recipe->borrowed_roots[r], n_root) == 0 && strncmp(tensor + n_root, recipe->modules[m].name, n_name) == 0 &&
          strcmp(tensor + n_root + n_name, ".weight") == 0)
        return true;
    }
  }
  return false;
}

static int compare_by_instance(const void *left, const void *right) {
  const struct k3_mapped *a = &((const struct k3_plan_shard *)left)->mapped, *b = &((const struct k3_plan_shard *)right)->mapped;
  if (a->module != b->module)
    return a->module < b->module ? -1 : 1;
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++) {
    if (a->index[i] != b->index[i])
      return a->index[i] < b->index[i] ? -1 : 1;
  }
  if (a->param != b->param)
    return a->param < b->param ? -1 : 1;
  return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

// Same module and indexes: two parameters of one instance.
static bool same_instance(const struct k3_mapped *a, const struct k3_mapped *b) {
  return a->module == b->module && memcmp(a->index, b->index, sizeof a->index) == 0;
}

// The module's name as this checkpoint spells it: the alias that another instance of it has, else the recipe's own. Shards are sorted by module.
static const char *spelling_of(const struct k3_plan *plan, size_t m) {
  const struct k3_recipe *recipe = plan->recipe;
  size_t low = 0, high = plan->n_shards;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (plan->shards[middle].mapped.module < m)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == plan->n_shards || plan->shards[low].mapped.module != m || plan->shards[low].mapped.of_target)
    return recipe->modules[m].name;
  const struct k3_mapped *mapped = &plan->shards[low].mapped;
  const char *name = k3_plan_source_of(plan, mapped)->name + strlen(k3_mapper_prefix(&plan->mapper, &recipe->modules[m]));
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = mapped->index[i];
  for (size_t a = 0; a < recipe->n_aliases; a++) {
    char alias[512];
    size_t n = k3_recipe_expand(recipe, recipe->aliases[a].name, indexes, alias, sizeof alias);
    if (strcmp(recipe->aliases[a].value, recipe->modules[m].name) == 0 && n < sizeof alias && strncmp(name, alias, n) == 0 && name[n] == '.')
      return recipe->aliases[a].name;
  }
  return recipe->modules[m].name;
}

static void expected_name(const struct k3_plan *plan, size_t m, const uint64_t *indexes, const char *param, char *dst, size_t capacity) {
  const struct k3_recipe_module *module = &plan->recipe->modules[m];
  size_t n = (size_t)snprintf(dst, capacity, "%s", k3_mapper_prefix(&plan->mapper, module));
  n += k3_recipe_expand(plan->recipe, spelling_of(plan, m), indexes, dst + n, capacity - n);
  if (n < capacity)
    snprintf(dst + n, capacity - n, ".%s", param);
}

// Reports an absent parameter, unless the index promised it: then IDX01 or IDX02 has.
static void report_absent(struct k3_plan *plan, size_t m, const uint64_t *indexes, const char *param, bool siblings_present,
                          struct k3_findings *findings) {
  char name[512];
  expected_name(plan, m, indexes, param, name, sizeof name);
  const struct k3_recipe_module *module = &plan->recipe->modules[m];
  if (k3_ckpt_promised(plan->ckpt, name))
    return;
  uint64_t shard = 0;
  if (module->shard && siblings_present && k3_recipe_eval(plan->recipe, plan->mapper.config, module->shard, indexes, &shard, NULL) == K3_OK) {
    char into[512];
    k3_recipe_expand(plan->recipe, module->into, indexes, into, sizeof into);
    k3_findings_report(findings, K3_MAP04, plan->ckpt->source, name, "every shard of a stacked tensor", "shard %llu of %s is missing",
                       (unsigned long long)shard, into);
  } else {
    k3_findings_report(findings, K3_MAP02, plan->ckpt->source, name, "every tensor of the recipe",
                       plan->ckpt->has_index ? "not in the index and in none of its files" : "in none of the files");
  }
}

// Parameters of one instance [first, last): complete, each once.
static void check_instance(struct k3_plan *plan, size_t first, size_t last, struct k3_findings *findings) {
  const struct k3_mapped *key = &plan->shards[first].mapped;
  const struct k3_recipe_module *module = &plan->recipe->modules[key->module];
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = key->index[i];
  for (size_t s = first + 1; s < last; s++) {
    const struct k3_mapped *a = &plan->shards[s - 1].mapped, *b = &plan->shards[s].mapped;
    if (a->param == b->param)
      k3_findings_report(findings, K3_MAP03, k3_ckpt_file_of(k3_plan_ckpt(plan, b->of_target), b->tensor)->path,
                         k3_ckpt_tensor(k3_plan_ckpt(plan, b->of_target), b->tensor)->name, "one source tensor for each place",
                         "%s has the same place in the image", k3_ckpt_tensor(k3_plan_ckpt(plan, a->of_target), a->tensor)->name);
  }
  bool packed = false;
  for (size_t s = first; s < last; s++) {
    unsigned param = plan->shards[s].mapped.param, dtype = k3_plan_source_of(plan, &plan->shards[s].mapped)->dtype;
    packed |= param == K3_PARAM_WEIGHT_PACKED || (param == K3_PARAM_WEIGHT && (dtype == K3_DTYPE_U8 || dtype == K3_DTYPE_I8));
  }
  for (size_t s = first; s < last; s++)
    plan->shards[s].packed = packed;
  for (size_t k = 0; k < module->n_params; k++) {
    bool weight = strcmp(module->params[k].name, "weight") == 0, present = false;
    for (size_t s = first; s < last; s++) {
      unsigned param = plan->shards[s].mapped.param;
      present |= weight ? param == K3_PARAM_WEIGHT || param == K3_PARAM_WEIGHT_PACKED : param == K3_PARAM_OF_MODULE + k;
    }
    plan->n_expected++;
    plan->n_present += present;
    // A module with companions but no weight is TEN02; it names the companion.
    bool companions_only = weight && !present;
    if (!present && !(companions_only && plan->shards[first].mapped.param < K3_PARAM_KNOWN_COUNT))
      report_absent(plan, key->module, indexes, module->params[k].name, true, findings);
    if (companions_only && plan->shards[first].mapped.param < K3_PARAM_KNOWN_COUNT)
      k3_findings_report(findings, K3_TEN02, k3_ckpt_file_of(plan->ckpt, key->tensor)->path, k3_ckpt_tensor(plan->ckpt, key->tensor)->name,
                         "a weight beside it", "a companion without its weight: neither weight nor weight_packed of this module is there");
  }
}

static bool uses_index(const struct k3_recipe *recipe, const char *pattern, size_t index) {
  char text[4] = {'{', recipe->indexes[index].letter, '}', '\0'};
  return strstr(pattern, text) != NULL;
}

// Whether another module of the same stack has an instance with these indexes (as far as the stack's name uses them).
static bool siblings_present(const struct k3_plan *plan, size_t m, const uint64_t *indexes) {
  const struct k3_recipe *recipe = plan->recipe;
  const char *into = recipe->modules[m].into;
  bool used[K3_RECIPE_MAX_INDEXES] = {false}, same_stack = false;
  for (size_t i = 0; i < recipe->n_indexes; i++)
    used[i] = uses_index(recipe, into, i);
  size_t last = SIZE_MAX;
  for (size_t s = 0; recipe->modules[m].shard && s < plan->n_shards; s++) {
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    if (mapped->module == K3_MODULE_CARRY)
      continue;
    if (mapped->module != last) {  // sorted by module, so one comparison of names each
      last = mapped->module;
      same_stack = strcmp(recipe->modules[last].into, into) == 0;
    }
    bool equal = same_stack;
    for (size_t i = 0; equal && i < K3_RECIPE_MAX_INDEXES; i++)
      equal = !used[i] || mapped->index[i] == indexes[i];
    if (equal)
      return true;
  }
  return false;
}

// For every index from whose value on instances are optional: which values some tensor has.
struct presence {
  uint8_t *of[K3_RECIPE_MAX_INDEXES];  // [index_counts], NULL where nothing is optional
};

static enum k3_status note_presence(const struct k3_plan *plan, struct presence *present, struct k3_error *err) {
  const struct k3_recipe *recipe = plan->recipe;
  for (size_t i = 0; i < recipe->n_indexes; i++) {
    if (plan->mapper.optional_from[i] >= plan->mapper.index_counts[i])
      continue;
    present->of[i] = k3_calloc(plan->mapper.index_counts[i], 1, err);
    if (!present->of[i])
      return K3_NO_MEMORY;
    size_t last = SIZE_MAX;
    bool used = false;
    for (size_t s = 0; s < plan->n_shards; s++) {
      const struct k3_mapped *mapped = &plan->shards[s].mapped;
      if (mapped->module == K3_MODULE_CARRY)
        continue;
      if (mapped->module != last)
        used = uses_index(recipe, recipe->modules[last = mapped->module].name, i);
      if (used)
        present->of[i][mapped->index[i]] = 1;
    }
  }
  return K3_OK;
}

// Walks the instances that a module must have, in the order of the sorted shards, and reports those that are absent.
static void check_module(struct k3_plan *plan, size_t m, const struct presence *present, size_t *at, struct k3_findings *findings) {
  const struct k3_recipe *recipe = plan->recipe;
  const struct k3_recipe_module *module = &recipe->modules[m];
  uint64_t count[K3_RECIPE_MAX_INDEXES], indexes[K3_RECIPE_MAX_INDEXES] = {0};
  uint64_t n_absent = 0;
  bool used[K3_RECIPE_MAX_INDEXES];
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++) {
    used[i] = i < recipe->n_indexes && uses_index(recipe, module->name, i);
    count[i] = used[i] ? plan->mapper.index_counts[i] : 1;
  }
  bool more = plan->mapper.exists[m];
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    more &= count[i] > 0;
  while (more) {
    bool exists = k3_mapper_layer_exists(&plan->mapper, m, indexes[0]), demanded = module->role == K3_ROLE_CORE;
    struct k3_mapped key = {.module = (uint16_t)m};
    for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
      key.index[i] = (uint32_t)indexes[i];
    for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
      demanded &= !used[i] || indexes[i] < plan->mapper.optional_from[i] || present->of[i][indexes[i]];
    size_t first = *at;
    while (*at < plan->n_shards && same_instance(&plan->shards[*at].mapped, &key))
      ++*at;
    if (*at > first) {
      check_instance(plan, first, *at, findings);
    } else if (exists && demanded) {
      plan->n_expected += module->n_params;
      // Thousands of absent experts are one cause; the kept findings show the first ones.
      bool siblings = n_absent < K3_FINDINGS_KEPT_PER_RULE && siblings_present(plan, m, indexes);
      for (size_t k = 0; k < module->n_params; k++)
        report_absent(plan, m, indexes, module->params[k].name, siblings, findings);
      n_absent++;
    }
    // Next tuple, last index fastest; a layer that does not exist is skipped whole.
    size_t i = K3_RECIPE_MAX_INDEXES;
    if (!exists) {
      indexes[1] = indexes[2] = indexes[3] = 0;
      i = 1;
    }
    for (more = false; i-- > 0 && !more;) {
      indexes[i] = (indexes[i] + 1) % count[i];
      more = indexes[i] != 0;
    }
  }
}

static enum k3_status check_complete(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  size_t at = 0;
  struct presence present = {{NULL}};
  if (plan->n_shards > 1)
    qsort(plan->shards, plan->n_shards, sizeof *plan->shards, compare_by_instance);
  enum k3_status status = note_presence(plan, &present, err);
  for (size_t m = 0; status == K3_OK && m < plan->recipe->n_modules; m++)
    check_module(plan, m, &present, &at, findings);
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    k3_free(present.of[i]);
  K3_TRY(status);
  for (; at < plan->n_shards; at++) {  // carried tensors sort last
    plan->n_expected++;
    plan->n_present++;
  }
  return K3_OK;
}

static void count_view_shards(struct k3_plan *plan) {
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    if (!plan->recipe->modules[m].view || !plan->mapper.exists[m])
      continue;
    plan->n_view_shards_expected += plan->mapper.index_counts[0];
    for (size_t s = 0; s < plan->n_shards; s++) {
      const struct k3_mapped *mapped = &plan->shards[s].mapped;
      plan->n_view_shards += mapped->module == m && (mapped->param == K3_PARAM_WEIGHT || mapped->param == K3_PARAM_WEIGHT_PACKED);
    }
  }
}

static bool reserved_name(const char *name) {
  static const char *const prefixes[] = {K3_IMAGE_MANIFEST_NAME, K3_IMAGE_DIGESTS_NAME, K3_IMAGE_CRC_NAME,
                                         K3_IMAGE_SEAL_NAME,     K3_IMAGE_PAD_PREFIX,   K3_IMAGE_SOURCE_PREFIX};
  for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
    if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
      return true;
  }
  return false;
}

static void check_reserved(struct k3_plan *plan, struct k3_findings *findings) {
  for (uint64_t t = 0; t < plan->ckpt->n_tensors; t++) {
    const char *name = k3_ckpt_tensor(plan->ckpt, t)->name;
    if (name[0] == '_' && name[1] == '_' && reserved_name(name))
      k3_findings_report(findings, K3_CNT12, k3_ckpt_file_of(plan->ckpt, t)->path, name, "names that the image does not use for itself",
                         "a reserved name");
  }
}

// Config of a drafter, and the one contradiction between config and names that would otherwise drown in MAP01 and MAP02.
static enum k3_status check_family(struct k3_plan *plan, bool *stop, struct k3_findings *findings, struct k3_error *err) {
  uint64_t errors_before = findings->n_errors;
  *stop = false;
  if (strcmp(plan->recipe->family, "k3-dspark") != 0) {
    k3_family_check_config(plan->recipe, plan->ckpt->config, findings);
    *stop = findings->n_errors > errors_before;
    return K3_OK;
  }
  enum k3_status status = k3_dspark_model_from_config(plan->ckpt->config, plan->options.block_width, &plan->dspark, findings);
  if (status == K3_NO_MEMORY)
    return k3_fail_memory(err, 0);
  for (uint64_t t = 0; t < plan->ckpt->n_tensors; t++) {
    const char *name = k3_ckpt_tensor(plan->ckpt, t)->name;
    size_t stem_nbytes;
    if (strstr(name, ".self_attn.k_proj.") && !k3_kv_scale_of(name, strlen(name), &stem_nbytes)) {
      k3_findings_report(findings, K3_CFG20, k3_config_file(plan->ckpt->config), name, "q_a_proj, kv_a_proj_with_mqa and kv_b_proj",
                         "config.json says k3_dspark (MLA), the tensors are those of a GQA drafter");
      break;
    }
  }
  *stop = findings->n_errors > errors_before;
  return K3_OK;
}

enum k3_status k3_plan_map(const struct k3_ckpt *ckpt, const struct k3_ckpt *target, const struct k3_recipe *recipe,
                           const struct k3_plan_options *options, struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  *plan = (struct k3_plan){.ckpt = ckpt, .target = target, .recipe = recipe, .options = *options};
  check_reserved(plan, findings);
  if (recipe->keep_names) {
    plan->n_expected = plan->n_present = ckpt->n_tensors;
    return k3_plan_classify(plan, findings, err);
  }
  if (!ckpt->config) {
    if (findings->n_by_rule[K3_CFG19] == 0)
      k3_findings_report(findings, K3_CFG20, ckpt->folder, "config.json", "the model's config.json beside its weights", "no config.json in this folder");
    return K3_OK;
  }
  bool stop;
  K3_TRY(check_family(plan, &stop, findings, err));
  if (stop)
    return K3_OK;  // without a sound config every shape would be wrong once more
  struct k3_error bad = {0};
  enum k3_status status = k3_mapper_create(recipe, ckpt->config, &plan->mapper, &bad);
  if (status == K3_BAD_INPUT && bad.rule != K3_RULE_NONE)
    return k3_findings_add(findings, K3_ERROR, &bad);
  if (status != K3_OK) {
    if (err && err->status == K3_OK)
      *err = bad;
    return status;
  }
  k3_mapper_set_root(&plan->mapper, choose_root(plan));
  K3_TRY_GOTO(status, out, map_tensors(plan, findings, err));
  K3_TRY_GOTO(status, out, map_borrowed(plan, findings, err));
  K3_TRY_GOTO(status, out, check_complete(plan, findings, err));
  count_view_shards(plan);
  K3_TRY_GOTO(status, out, k3_plan_classify(plan, findings, err));
  K3_TRY_GOTO(status, out, k3_plan_check_shapes(plan, findings, err));
  status = k3_family_check_tensors(plan, findings, err);
out:
  if (status != K3_OK)
    k3_plan_free(plan);
  return status;
}

void k3_plan_free(struct k3_plan *plan) {
  k3_requant_free(plan->requant);
  k3_mapper_free(&plan->mapper);
  k3_free(plan->tensors);
  k3_free(plan->pieces);
  k3_free(plan->shards);
  k3_free(plan->sources);
  k3_free(plan->manifest);
  k3_free(plan->dropped);
  k3_linears_free(&plan->linears);
  k3_arena_free(&plan->arena);
  *plan = (struct k3_plan){0};
}
