#include "loader/family.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "loader/family_parts.h"
#include "loader/recipes.h"

static const struct k3_family *const FAMILIES[] = {&K3_FAMILY_MINIMAX_M3, &K3_FAMILY_DEEPSEEK_V32, &K3_FAMILY_KIMI_K3};

static const struct k3_family *family_of(const struct k3_recipe *recipe) {
  for (size_t r = 0; r < recipe->n_require; r++) {
    for (size_t i = 0; i < sizeof FAMILIES / sizeof FAMILIES[0]; i++) {
      if (strcmp(FAMILIES[i]->name, recipe->require[r]) == 0)
        return FAMILIES[i];
    }
  }
  return NULL;
}

// The drafter's rules are those of its model (formats/dspark_model.h).
static bool is_known(const char *name) {
  bool known = strcmp(name, "k3-dspark") == 0;
  for (size_t i = 0; i < sizeof FAMILIES / sizeof FAMILIES[0]; i++)
    known |= strcmp(FAMILIES[i]->name, name) == 0;
  return known;
}

static enum k3_status unknown(const char *file, const char *key, const char *name, const char *other, struct k3_error *err) {
  char allowed[160];
  size_t n = (size_t)snprintf(allowed, sizeof allowed, "k3-dspark");
  for (size_t i = 0; i < sizeof FAMILIES / sizeof FAMILIES[0]; i++)
    n += (size_t)snprintf(allowed + n, sizeof allowed - n, ", %s", FAMILIES[i]->name);
  snprintf(allowed + n, sizeof allowed - n, "%s", other);
  return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, file, key, allowed, "\"%s\", which this version does not know", name);
}

enum k3_status k3_family_check_recipe(const struct k3_recipe *recipe, const char *file, struct k3_error *err) {
  if (!is_known(recipe->family) && strcmp(recipe->family, "generic") != 0 && strcmp(recipe->family, recipe->name) != 0)
    return unknown(file, "family", recipe->family, ", or none: a container of weights", err);
  for (size_t r = 0; r < recipe->n_require; r++) {
    if (!is_known(recipe->require[r]))
      return unknown(file, "require", recipe->require[r], "", err);
  }
  return K3_OK;
}

uint64_t k3_family_list_length(const struct k3_config *config, const char *path) {
  if (k3_config_kind_of(config, path) != K3_CONFIG_LIST)
    return UINT64_MAX;
  char item[160];
  uint64_t n = 0;
  do
    snprintf(item, sizeof item, "%s.%llu", path, (unsigned long long)n++);
  while (k3_config_kind_of(config, item) != K3_CONFIG_ABSENT);
  return n - 1;
}

uint64_t k3_family_n_present(const struct k3_plan *plan, size_t index, uint64_t first) {
  char letter[4] = {'{', plan->recipe->indexes[index].letter, '}', '\0'};
  uint64_t n = 0, last = UINT64_MAX;
  for (size_t s = 0; s < plan->n_shards; s++) {  // sorted by module: a module that occurs in every prediction layer counts them
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    if (mapped->module == K3_MODULE_CARRY || mapped->index[index] < first || !strstr(plan->recipe->modules[mapped->module].name, letter))
      continue;
    if (mapped->index[index] != last && (last == UINT64_MAX || mapped->index[index] > last)) {
      last = mapped->index[index];
      n++;
    }
  }
  return n;
}

uint64_t k3_family_tensor(const struct k3_plan *plan, const char *module, uint64_t index) {
  for (size_t s = 0; s < plan->n_shards; s++) {
    const struct k3_mapped *mapped = &plan->shards[s].mapped;
    if (mapped->module != K3_MODULE_CARRY && !mapped->of_target && mapped->param == K3_PARAM_WEIGHT && mapped->index[0] == index &&
        strcmp(plan->recipe->modules[mapped->module].name, module) == 0)
      return mapped->tensor;
  }
  return UINT64_MAX;
}

enum k3_status k3_family_same_bytes(const struct k3_plan *plan, uint64_t a, uint64_t b, bool *same, struct k3_error *err) {
  enum { CHUNK_NBYTES = 1 << 20 };
  const struct k3_st_tensor *ta = k3_ckpt_tensor(plan->ckpt, a), *tb = k3_ckpt_tensor(plan->ckpt, b);
  uint64_t nbytes = ta->end - ta->begin;
  *same = ta->dtype == tb->dtype && nbytes == tb->end - tb->begin;
  unsigned char *chunks = k3_alloc_aligned(2 * CHUNK_NBYTES, 64, err);
  enum k3_status status = chunks ? K3_OK : K3_NO_MEMORY;
  for (uint64_t at = 0; status == K3_OK && *same && at < nbytes; at += CHUNK_NBYTES) {
    size_t n = nbytes - at < CHUNK_NBYTES ? (size_t)(nbytes - at) : CHUNK_NBYTES;
    status = k3_ckpt_read(plan->ckpt, a, at, chunks, n, err);
    if (status == K3_OK)
      status = k3_ckpt_read(plan->ckpt, b, at, chunks + CHUNK_NBYTES, n, err);
    *same = status == K3_OK && memcmp(chunks, chunks + CHUNK_NBYTES, n) == 0;
  }
  k3_free(chunks);
  return status;
}

// Fields named in `text`, up to its end or a character of `end`: each of them must have one value, wherever it stands.
static const char *check_fields(const char *text, const char *end, const struct k3_config *config, struct k3_findings *findings) {
  while (*text && !strchr(end, *text)) {
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || text[n] == '_' || text[n] == '.')
      n++;
    char field[128], both[320];
    if (n > 0 && n < sizeof field && !isdigit((unsigned char)text[0])) {
      snprintf(field, sizeof field, "%.*s", (int)n, text);
      if (k3_config_contradicts(config, field, both, sizeof both))
        K3_FAMILY_CONTRADICTION(findings, config, field, "one value", "%s", both);
    }
    text += n ? n : 1;
  }
  return text;
}

// A field that stands both at the top and in text_config must have one value: which one an engine reads is anybody's guess. Asked of every field that
// shapes or the manifest's model come from.
static void check_doubles(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_findings *findings) {
  if (k3_config_kind_of(config, "text_config") != K3_CONFIG_OBJECT)
    return;
  for (size_t d = 0; d < recipe->n_dims; d++)
    check_fields(recipe->dims[d].value, "", config, findings);
  for (const char *c = recipe->model ? recipe->model : ""; *c; c++) {
    if (c[0] == '"' && c[1] == '$')
      c = check_fields(c + 2, "\"", config, findings) - 1;
  }
}

void k3_family_expect(const struct k3_config *config, const struct k3_family_constant *constants, size_t n, struct k3_findings *findings) {
  for (const struct k3_family_constant *c = constants; c < constants + n; c++) {
    const char *text = c->text;
    double number = c->number;
    bool truth = c->truth;
    struct k3_error bad = {0};
    enum k3_status status = c->text                     ? k3_config_string(config, c->field, &text, NULL, &bad)
                            : c->kind == K3_CONFIG_BOOL ? k3_config_bool(config, c->field, &truth, NULL, &bad)
                                                        : k3_config_real(config, c->field, &number, NULL, &bad);
    if (status != K3_OK)
      k3_findings_add(findings, K3_ERROR, &bad);
    else if (c->text && strcmp(text, c->text) != 0)
      K3_FAMILY_CONTRADICTION(findings, config, c->field, c->text, "\"%s\": %s", text, c->why);
    else if (!c->text && (truth != c->truth || number < c->number || number > c->number))
      K3_FAMILY_CONTRADICTION(findings, config, c->field, NULL, "%s", c->why);
  }
}

void k3_family_check_plain(const struct k3_plan *plan, const char *plain, struct k3_findings *findings) {
  for (size_t i = 0; plan->linears.n_quantised > 0 && i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    if (linear->says->says != K3_SAYS_EITHER || linear->says->group->weights.num_bits != 8 || !linear->is_plain || !linear->is_linear ||
        linear->of_target || (plain && strcmp(plan->recipe->modules[linear->module].name, plain) == 0))
      continue;
    enum k3_param param = k3_linear_weight(linear);
    const struct k3_st_tensor *weight = k3_linear_tensor(plan, linear, param);
    k3_findings_report(findings, K3_CFG02, k3_ckpt_file_of(plan->ckpt, linear->tensors[param])->path, weight->name,
                       "scales beside it, or an entry that excludes it", "a plain %s weight in a quantised checkpoint",
                       k3_dtype_name((enum k3_dtype)weight->dtype));
  }
}

void k3_family_check_config(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_findings *findings) {
  const struct k3_family *family = family_of(recipe);
  if (!family)
    return;
  check_doubles(recipe, config, findings);
  family->check_config(config, findings);
}

// Names that engines make while loading: a dump of their parameters is not what was trained, and nobody can tell how it was cut or permuted.
static void check_dump(const struct k3_plan *plan, struct k3_findings *findings) {
  static const char *const marks[] = {".mtp_block.", ".fused_qkv_a_proj.", ".qkv_proj.", ".gate_up_proj.", ".w13_", ".w2_weight", ".experts.w13"};
  for (size_t i = 0; i < plan->n_dropped; i++) {
    for (size_t k = 0; k < sizeof marks / sizeof marks[0]; k++) {
      if (!strstr(plan->dropped[i].tensor, marks[k]))
        continue;
      k3_findings_report(findings, K3_CFG21, plan->ckpt->source, plan->dropped[i].tensor, "the checkpoint that the engine loaded",
                         "the name of an engine's own parameter: this looks like a dump of a loaded model");
      return;
    }
  }
}

// A config of one family over the tensors of another: one sentence, before the many about single tensors.
static enum k3_status check_fingerprint(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const char *other;
  K3_TRY(k3_recipe_of_tensors(plan->ckpt, plan->recipe, &other, err));
  if (other)
    K3_FAMILY_CONTRADICTION(findings, plan->mapper.config, "model_type", "the config of the model whose weights these are",
                            "the config is one of %s, the tensors are those of %s", plan->recipe->name, other);
  return K3_OK;
}

enum k3_status k3_family_check_tensors(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_family *family = family_of(plan->recipe);
  if (!family)
    return K3_OK;
  check_dump(plan, findings);
  K3_TRY(check_fingerprint(plan, findings, err));
  family->check_tensors(plan, findings);
  return K3_OK;
}

enum k3_status k3_family_check_values(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_family *family = family_of(plan->recipe);
  // Without a sound config nothing was mapped.
  return family && family->check_values && plan->mapper.config ? family->check_values(plan, findings, err) : K3_OK;
}
