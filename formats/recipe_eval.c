// The expressions of recipes: alternatives := sum { '|' sum }, the first whose fields exist; sum := product { '+' product }, product := atom { '*' atom }, atom := number | "{x}" | len(field) | name.
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "formats/recipe.h"

enum { MAX_NESTING = 8, MAX_NAME_NBYTES = 128, MAX_LIST_ITEMS = 4096 };

struct eval {
  const struct k3_recipe *recipe;
  const struct k3_config *config;
  const char *whole, *next;
  const uint64_t *indexes;
  unsigned nesting;
  bool missing;  // the failure is a field that is not there
  struct k3_error *err;
};

static enum k3_status fail_here(const struct eval *e, const char *found) {
  return k3_fail(e->err, K3_BAD_INPUT, K3_CFG20, e->config ? k3_config_file(e->config) : NULL, e->whole, "sums and products of config fields", "%s",
                 found);
}

static void skip_blank(struct eval *e) {
  while (*e->next == ' ')
    e->next++;
}

static bool name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
}

static enum k3_status read_name(struct eval *e, char name[MAX_NAME_NBYTES]) {
  size_t n = 0;
  while (name_char(e->next[n]))
    n++;
  if (n == 0 || n >= MAX_NAME_NBYTES)
    return fail_here(e, "an expression that cannot be read");
  memcpy(name, e->next, n);
  name[n] = '\0';
  e->next += n;
  return K3_OK;
}

static enum k3_status eval_alternatives(struct eval *e, uint64_t *value);

static enum k3_status eval_field(struct eval *e, const char *name, uint64_t *value) {
  for (size_t i = 0; i < e->recipe->n_dims; i++) {
    if (strcmp(e->recipe->dims[i].name, name) != 0)
      continue;
    if (e->nesting >= MAX_NESTING)
      return fail_here(e, "dims that name each other");
    struct eval inner = *e;
    inner.whole = inner.next = e->recipe->dims[i].value;
    inner.nesting++;
    enum k3_status status = eval_alternatives(&inner, value);
    e->missing = inner.missing;
    K3_TRY(status);
    return *inner.next == '\0' ? K3_OK : fail_here(&inner, "an expression that cannot be read");
  }
  if (!e->config)
    return fail_here(e, "no config.json to take the field from");
  e->missing = k3_config_kind_of(e->config, name) == K3_CONFIG_ABSENT;
  return k3_config_require_u64(e->config, name, value, e->err);
}

static enum k3_status eval_length(struct eval *e, uint64_t *value) {
  char name[MAX_NAME_NBYTES];
  e->next += strlen("len(");
  K3_TRY(read_name(e, name));
  if (*e->next++ != ')')
    return fail_here(e, "len( without )");
  if (!e->config)
    return fail_here(e, "no config.json to take the field from");
  uint64_t items[MAX_LIST_ITEMS];
  size_t n_items = 0;
  bool found = false;
  K3_TRY(k3_config_u64_list(e->config, name, items, MAX_LIST_ITEMS, &n_items, &found, e->err));
  e->missing = !found;
  if (!found)
    return k3_fail(e->err, K3_BAD_INPUT, K3_CFG20, k3_config_file(e->config), name, "a list of numbers", "the field is missing");
  *value = n_items;
  return K3_OK;
}

static enum k3_status eval_atom(struct eval *e, uint64_t *value) {
  skip_blank(e);
  if (*e->next == '{') {
    for (size_t i = 0; i < e->recipe->n_indexes && e->indexes; i++) {
      if (e->next[1] == e->recipe->indexes[i].letter && e->next[2] == '}') {
        *value = e->indexes[i];
        e->next += 3;
        return K3_OK;
      }
    }
    return fail_here(e, "an index that is not known here");
  }
  if (*e->next >= '0' && *e->next <= '9') {
    *value = 0;
    while (*e->next >= '0' && *e->next <= '9') {
      if (!k3_mul_u64(*value, 10, value) || !k3_add_u64(*value, (uint64_t)(*e->next++ - '0'), value))
        return fail_here(e, "a number beyond 2^64");
    }
    return K3_OK;
  }
  if (strncmp(e->next, "len(", 4) == 0)
    return eval_length(e, value);
  char name[MAX_NAME_NBYTES];
  K3_TRY(read_name(e, name));
  return eval_field(e, name, value);
}

static enum k3_status eval_product(struct eval *e, uint64_t *value) {
  K3_TRY(eval_atom(e, value));
  for (skip_blank(e); *e->next == '*'; skip_blank(e)) {
    uint64_t factor;
    e->next++;
    K3_TRY(eval_atom(e, &factor));
    if (!k3_mul_u64(*value, factor, value) || *value > INT64_MAX)
      return fail_here(e, "a product beyond 2^63");
  }
  return K3_OK;
}

static enum k3_status eval_sum(struct eval *e, uint64_t *value) {
  K3_TRY(eval_product(e, value));
  for (skip_blank(e); *e->next == '+'; skip_blank(e)) {
    uint64_t term;
    e->next++;
    K3_TRY(eval_product(e, &term));
    if (!k3_add_u64(*value, term, value) || *value > INT64_MAX)
      return fail_here(e, "a sum beyond 2^63");
  }
  return K3_OK;
}

// Up to the end of the text. What a discarded alternative lacked is not an error.
static enum k3_status eval_alternatives(struct eval *e, uint64_t *value) {
  struct k3_error *err = e->err;
  for (;;) {
    const char *bar = strchr(e->next, '|');
    struct k3_error missing = {0};
    struct eval one = *e;
    one.err = bar ? &missing : err;
    enum k3_status status = eval_sum(&one, value);
    if (status == K3_OK || !bar) {
      e->missing = one.missing;
      e->next = bar && *one.next == '|' ? e->next + strlen(e->next) : one.next;
      return status;
    }
    e->missing = one.missing;
    if (!one.missing) {  // there, but wrong
      if (err && err->status == K3_OK)
        *err = missing;
      return status;
    }
    e->next = bar + 1;
  }
}

enum k3_status k3_recipe_eval(const struct k3_recipe *recipe, const struct k3_config *config, const char *expression, const uint64_t *indexes,
                              uint64_t *value, struct k3_error *err) {
  struct eval e = {.recipe = recipe, .config = config, .whole = expression, .next = expression, .indexes = indexes, .err = err};
  K3_TRY(eval_alternatives(&e, value));
  return *e.next == '\0' ? K3_OK : fail_here(&e, "an expression that cannot be read");
}

enum k3_status k3_recipe_module_exists(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_module *module,
                                       bool *exists, struct k3_error *err) {
  (void)recipe;
  bool value = false;
  if (module->when_field && config) {
    if (k3_config_kind_of(config, module->when_field) == K3_CONFIG_OBJECT)
      value = true;
    else
      K3_TRY(k3_config_bool(config, module->when_field, &value, NULL, err));
  }
  *exists = !module->when_field || value == module->when_value;
  return K3_OK;
}

static enum k3_status layer_fits(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_layers *layers, uint64_t layer,
                                 bool *fits, struct k3_error *err) {
  uint64_t items[MAX_LIST_ITEMS], from, to;
  size_t n_items = 0;
  *fits = false;
  if (layers->kind == K3_LAYERS_RANGE) {
    K3_TRY(k3_recipe_eval(recipe, config, layers->from, NULL, &from, err));
    K3_TRY(k3_recipe_eval(recipe, config, layers->to, NULL, &to, err));
    *fits = layer >= from && layer < to;
  } else if (layers->text) {
    char path[MAX_NAME_NBYTES];
    const char *item = NULL;
    snprintf(path, sizeof path, "%s.%llu", layers->field, (unsigned long long)layer);
    K3_TRY(k3_config_string(config, path, &item, NULL, err));
    *fits = item && strcmp(item, layers->text) == 0;
  } else {
    K3_TRY(k3_config_u64_list(config, layers->field, items, MAX_LIST_ITEMS, &n_items, NULL, err));
    if (layers->kind == K3_LAYERS_MASK)
      *fits = layer < n_items && items[layer] == layers->number;
    for (size_t i = 0; layers->kind == K3_LAYERS_LISTED && i < n_items; i++)
      *fits |= items[i] == layer + layers->number;
  }
  return K3_OK;
}

enum k3_status k3_recipe_layer_exists(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_module *module,
                                      uint64_t layer, bool *exists, struct k3_error *err) {
  *exists = module->n_layers == 0;
  for (size_t i = 0; i < module->n_layers; i++) {
    const struct k3_recipe_layers *layers = &module->layers[i];
    if (layers->kind == K3_LAYERS_RANGE || (config && k3_config_kind_of(config, layers->field) != K3_CONFIG_ABSENT))
      return layer_fits(recipe, config, layers, layer, exists, err);
  }
  return K3_OK;
}

size_t k3_recipe_expand(const struct k3_recipe *recipe, const char *pattern, const uint64_t *indexes, char *dst, size_t capacity) {
  size_t n = 0;
  for (const char *c = pattern; *c;) {
    char digits[24] = {*c, '\0'};
    size_t step = 1;
    for (size_t i = 0; *c == '{' && i < recipe->n_indexes; i++) {
      if (c[1] == recipe->indexes[i].letter && c[2] == '}') {
        snprintf(digits, sizeof digits, "%llu", (unsigned long long)indexes[i]);
        step = 3;
      }
    }
    for (const char *d = digits; *d; d++, n++) {
      if (n + 1 < capacity)
        dst[n] = *d;
    }
    c += step;
  }
  if (capacity > 0)
    dst[n < capacity ? n : capacity - 1] = '\0';
  return n;
}
