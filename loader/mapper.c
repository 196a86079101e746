#include "loader/mapper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/arith.h"

static const char *const PARAM_NAMES[K3_PARAM_KNOWN_COUNT] = {
    "weight",      "weight_packed",      "weight_scale",      "weight_global_scale", "weight_scale_2", "weight_scale_inv",
    "input_scale", "input_global_scale", "weight_zero_point", "weight_shape",        "weight_g_idx",   "bias",
};

enum { MAX_PATTERN_NBYTES = 512, MAX_NUMBERS = 8 };

// Pattern of a name: numbers and "{x}" are '#'. Modules that share one (alternatives by `when`) take a slot each.
struct k3_mapper_slot {
  const char *pattern;  // NULL: free
  const char *why;      // an ignore rule instead of a module
  const char *alias;    // the pattern that this one stands for, instead of a module
  uint32_t n_pattern;
  uint16_t module;
};

const char *k3_param_name(enum k3_param param) {
  return param < K3_PARAM_KNOWN_COUNT ? PARAM_NAMES[param] : "?";
}

bool k3_param_from_name(const char *name, size_t nbytes, enum k3_param *param) {
  for (int i = 0; i < K3_PARAM_KNOWN_COUNT; i++) {
    if (strlen(PARAM_NAMES[i]) == nbytes && memcmp(PARAM_NAMES[i], name, nbytes) == 0) {
      *param = (enum k3_param)i;
      return true;
    }
  }
  return false;
}

static uint32_t hash_text(const char *text, size_t nbytes) {
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < nbytes; i++)
    h = (h ^ (unsigned char)text[i]) * 16777619u;
  return h ^ h >> 15;
}

// Next slot of that pattern at or behind *slot; NULL when there is none (left).
static const struct k3_mapper_slot *find_slot(const struct k3_mapper *mapper, const char *pattern, size_t nbytes, uint32_t *slot) {
  for (;; (*slot)++) {
    const struct k3_mapper_slot *s = &mapper->slots[*slot & mapper->slot_mask];
    if (!s->pattern)
      return NULL;
    if (s->n_pattern == nbytes && memcmp(s->pattern, pattern, nbytes) == 0)
      return s;
  }
}

static void add_slot(struct k3_mapper *mapper, const char *pattern, uint16_t module, const char *why, const char *alias) {
  uint32_t slot = hash_text(pattern, strlen(pattern)) & mapper->slot_mask;
  while (mapper->slots[slot].pattern)
    slot = (slot + 1) & mapper->slot_mask;
  mapper->slots[slot] = (struct k3_mapper_slot){pattern, why, alias, (uint32_t)strlen(pattern), module};
}

static bool is_index(const char *c) {
  return c[0] == '{' && c[1] != '\0' && c[2] == '}';
}

// Copies a recipe name with every "{x}" and every whole number as '#'; the result lives behind the slots.
static const char *pattern_of(char **next, const char *name) {
  char *pattern = *next, *to = pattern;
  for (const char *c = name; *c;) {
    size_t n_digits = c == name || c[-1] == '.' ? strspn(c, "0123456789") : 0;
    bool number = n_digits > 0 && (c[n_digits] == '.' || c[n_digits] == '\0');
    *to++ = is_index(c) || number ? '#' : *c;
    c += is_index(c) ? 3 : number ? n_digits : 1;
  }
  *to++ = '\0';
  *next = to;
  return pattern;
}

// Fills the layer lists of the modules once, so that no name has to look into the config.
static enum k3_status list_layers(struct k3_mapper *mapper, struct k3_error *err) {
  const struct k3_recipe *recipe = mapper->recipe;
  uint64_t n_layers = mapper->index_counts[0];
  mapper->layer_exists = k3_calloc(recipe->n_modules, n_layers ? n_layers : 1, err);
  if (!mapper->layer_exists)
    return K3_NO_MEMORY;
  for (size_t m = 0; m < recipe->n_modules; m++) {
    const struct k3_recipe_module *module = &recipe->modules[m];
    bool known = false;  // modules that share a list stand together
    if (m > 0 && module->n_layers > 0 && module->n_layers == recipe->modules[m - 1].n_layers) {
      known = true;
      for (size_t i = 0; i < module->n_layers; i++) {
        const struct k3_recipe_layers *a = &module->layers[i], *b = &recipe->modules[m - 1].layers[i];
        known = known && a->kind == b->kind && a->kind != K3_LAYERS_RANGE && a->number == b->number && strcmp(a->field, b->field) == 0 &&
                (a->text ? b->text && strcmp(a->text, b->text) == 0 : !b->text);
      }
    }
    if (known)
      memcpy(mapper->layer_exists + m * n_layers, mapper->layer_exists + (m - 1) * n_layers, n_layers);
    for (uint64_t layer = 0; !known && module->n_layers > 0 && layer < n_layers; layer++) {
      bool exists;
      K3_TRY(k3_recipe_layer_exists(recipe, mapper->config, module, layer, &exists, err));
      mapper->layer_exists[m * n_layers + layer] = exists;
    }
  }
  return K3_OK;
}

enum { MAX_LAYERS = 4096, MAX_INSTANCES = 1 << 20 };

// What a model must have is counted one by one, so a config may not promise more than any model has.
static enum k3_status check_instances(const struct k3_mapper *mapper, struct k3_error *err) {
  const struct k3_recipe *recipe = mapper->recipe;
  const char *file = mapper->config ? k3_config_file(mapper->config) : NULL;
  for (size_t m = 0; m < recipe->n_modules; m++) {
    uint64_t n = 1;
    for (size_t i = 0; i < recipe->n_indexes; i++) {
      const char text[] = {'{', recipe->indexes[i].letter, '}', '\0'};
      if (!strstr(recipe->modules[m].name, text))
        continue;
      if (!k3_mul_u64(n, mapper->index_counts[i], &n) || n > MAX_INSTANCES)
        return k3_fail(err, K3_BAD_INPUT, K3_CFG20, file, recipe->indexes[i].count, "at most 1048576 modules of one kind",
                       "%llu, which makes too many of %s", (unsigned long long)mapper->index_counts[i], recipe->modules[m].name);
    }
  }
  return K3_OK;
}

static enum k3_status read_counts(struct k3_mapper *mapper, struct k3_error *err) {
  const struct k3_recipe *recipe = mapper->recipe;
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    mapper->optional_from[i] = UINT64_MAX;
  for (size_t i = 0; i < recipe->n_indexes; i++) {
    K3_TRY(k3_recipe_eval(recipe, mapper->config, recipe->indexes[i].count, NULL, &mapper->index_counts[i], err));
    if (recipe->indexes[i].optional_from)
      K3_TRY(k3_recipe_eval(recipe, mapper->config, recipe->indexes[i].optional_from, NULL, &mapper->optional_from[i], err));
  }
  if (mapper->index_counts[0] > MAX_LAYERS)
    return k3_fail(err, K3_BAD_INPUT, K3_CFG20, mapper->config ? k3_config_file(mapper->config) : NULL, recipe->indexes[0].count,
                   "at most 4096 layers", "%llu", (unsigned long long)mapper->index_counts[0]);
  return check_instances(mapper, err);
}

static void find_stacks(struct k3_mapper *mapper) {
  const struct k3_recipe *recipe = mapper->recipe;
  for (size_t m = 0; m < recipe->n_modules; m++) {
    size_t first = 0;
    while (strcmp(recipe->modules[first].into, recipe->modules[m].into) != 0)
      first++;
    mapper->stack_of[m] = (uint16_t)first;
    for (size_t i = 0; i < recipe->n_indexes; i++) {
      char text[4] = {'{', recipe->indexes[i].letter, '}', '\0'};
      mapper->stack_indexes[m] |= (uint8_t)(strstr(recipe->modules[m].into, text) ? 1u << i : 0u);
    }
  }
}

enum k3_status k3_mapper_create(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_mapper *mapper, struct k3_error *err) {
  *mapper = (struct k3_mapper){.recipe = recipe, .config = config, .root = "", .outer_root = ""};
  size_t n_entries = recipe->n_modules + recipe->n_ignore + recipe->n_aliases, n_slots = 16, n_text = 1;
  while (n_slots < 2 * n_entries)
    n_slots *= 2;
  for (size_t i = 0; i < recipe->n_modules; i++)
    n_text += strlen(recipe->modules[i].name) + 1;
  for (size_t i = 0; i < recipe->n_ignore; i++)
    n_text += strlen(recipe->ignore[i].name) + 1;
  for (size_t i = 0; i < recipe->n_aliases; i++)
    n_text += strlen(recipe->aliases[i].name) + strlen(recipe->aliases[i].value) + 2;
  mapper->slots = k3_calloc(n_slots * sizeof *mapper->slots + n_text, 1, err);
  mapper->exists = k3_calloc(recipe->n_modules, sizeof *mapper->exists, err);
  mapper->stack_of = k3_calloc(recipe->n_modules, sizeof *mapper->stack_of, err);
  mapper->stack_indexes = k3_calloc(recipe->n_modules, sizeof *mapper->stack_indexes, err);
  enum k3_status status = mapper->slots && mapper->exists && mapper->stack_of && mapper->stack_indexes ? K3_OK : K3_NO_MEMORY;
  if (status != K3_OK)
    goto out;
  mapper->slot_mask = (uint32_t)(n_slots - 1);
  char *next = (char *)(mapper->slots + n_slots);
  for (size_t i = 0; i < recipe->n_modules; i++) {
    add_slot(mapper, pattern_of(&next, recipe->modules[i].name), (uint16_t)i, NULL, NULL);
    K3_TRY_GOTO(status, out, k3_recipe_module_exists(recipe, config, &recipe->modules[i], &mapper->exists[i], err));
  }
  for (size_t i = 0; i < recipe->n_ignore; i++)
    add_slot(mapper, pattern_of(&next, recipe->ignore[i].name), 0, recipe->ignore[i].value, NULL);
  for (size_t i = 0; i < recipe->n_aliases; i++) {
    const char *pattern = pattern_of(&next, recipe->aliases[i].name);
    add_slot(mapper, pattern, 0, NULL, pattern_of(&next, recipe->aliases[i].value));
  }
  find_stacks(mapper);
  K3_TRY_GOTO(status, out, read_counts(mapper, err));
  status = list_layers(mapper, err);
out:
  if (status != K3_OK)
    k3_mapper_free(mapper);
  return status;
}

void k3_mapper_free(struct k3_mapper *mapper) {
  k3_free(mapper->slots);
  k3_free(mapper->exists);
  k3_free(mapper->layer_exists);
  k3_free(mapper->stack_of);
  k3_free(mapper->stack_indexes);
  *mapper = (struct k3_mapper){0};
}

void k3_mapper_set_root(struct k3_mapper *mapper, const char *root) {
  snprintf(mapper->root_buffer, sizeof mapper->root_buffer, "%s", root);
  snprintf(mapper->outer_buffer, sizeof mapper->outer_buffer, "%s", root);
  size_t n = strlen(mapper->outer_buffer), tail = strlen("model.");
  if (n >= tail && strcmp(mapper->outer_buffer + n - tail, "model.") == 0 && (n == tail || mapper->outer_buffer[n - tail - 1] == '.'))
    mapper->outer_buffer[n - tail] = '\0';
  mapper->root = mapper->root_buffer;
  mapper->outer_root = mapper->outer_buffer;
}

// A name without root, cut into module and parameter, its numbers taken out.
struct split_name {
  char pattern[MAX_PATTERN_NBYTES];
  size_t n_pattern;
  uint64_t numbers[MAX_NUMBERS];
  size_t n_numbers;
  const char *param;
  size_t n_param;
  bool odd_number;
};

// Reads a component that begins with a digit or sign: a canonical number, an odd spelling of one ("007", "+1"), or no number at all ("3d_conv").
static bool read_number(const char *text, size_t nbytes, uint64_t *value, bool *odd) {
  size_t i = nbytes > 1 && (text[0] == '+' || text[0] == '-') ? 1 : 0;
  *odd = i == 1 || (nbytes - i > 1 && text[i] == '0') || nbytes - i > 9;
  *value = 0;
  for (; i < nbytes; i++) {
    if (text[i] < '0' || text[i] > '9')
      return false;
    *value = *value * 10 + (uint64_t)(text[i] - '0');
    if (*value > UINT32_MAX)
      *value = UINT32_MAX;
  }
  return true;
}

static bool split(const char *name, size_t nbytes, struct split_name *s) {
  s->n_pattern = s->n_numbers = 0;
  s->odd_number = false;
  const char *end = name + nbytes, *last_dot = NULL;
  for (const char *c = name; c < end; c++)
    last_dot = *c == '.' ? c : last_dot;
  if (!last_dot || last_dot == name || last_dot + 1 == end)
    return false;
  s->param = last_dot + 1;
  s->n_param = (size_t)(end - s->param);
  for (const char *from = name; from < last_dot;) {
    const char *dot = memchr(from, '.', (size_t)(last_dot - from)), *to = dot ? dot : last_dot;
    size_t n = (size_t)(to - from);
    uint64_t value;
    bool odd = false;
    if (s->n_pattern + n + 2 >= MAX_PATTERN_NBYTES)
      return false;
    if (s->n_pattern > 0)
      s->pattern[s->n_pattern++] = '.';
    if (n > 0 && read_number(from, n, &value, &odd) && s->n_numbers < MAX_NUMBERS) {
      s->numbers[s->n_numbers++] = value;
      s->odd_number |= odd;
      s->pattern[s->n_pattern++] = '#';
    } else {
      memcpy(s->pattern + s->n_pattern, from, n);
      s->n_pattern += n;
    }
    from = to + 1;
  }
  s->pattern[s->n_pattern] = '\0';
  return true;
}

// Replaces the pattern by what it is an alias of: the module's, or the whole tensor's with its last component behind it.
static bool apply_alias(const struct k3_mapper *mapper, struct split_name *s) {
  char whole[MAX_PATTERN_NBYTES];
  int n_whole = snprintf(whole, sizeof whole, "%s.%.*s", s->pattern, (int)s->n_param, s->param);
  for (int with_param = 0; with_param <= 1; with_param++) {
    const char *pattern = with_param ? whole : s->pattern;
    size_t n = with_param ? (size_t)n_whole : s->n_pattern;
    if (n_whole <= 0 || (size_t)n_whole >= sizeof whole)
      return false;
    uint32_t slot = hash_text(pattern, n);
    for (const struct k3_mapper_slot *found; (found = find_slot(mapper, pattern, n, &slot)); slot++) {
      if (!found->alias)
        continue;
      const char *dot = with_param ? strrchr(found->alias, '.') : found->alias + strlen(found->alias);
      if (!dot || (size_t)(dot - found->alias) >= sizeof s->pattern)
        return false;
      s->n_pattern = (size_t)(dot - found->alias);
      memcpy(s->pattern, found->alias, s->n_pattern);
      s->pattern[s->n_pattern] = '\0';
      if (with_param) {
        s->param = dot + 1;
        s->n_param = strlen(dot + 1);
      }
      return true;
    }
  }
  return false;
}

// The parameter of a module that the last component names; false when the module has none such.
static bool param_of(const struct k3_recipe_module *module, const struct split_name *s, uint8_t *param) {
  for (size_t k = 0; k < module->n_params; k++) {
    const char *name = module->params[k].name;
    if (strcmp(name, "weight") != 0 && strlen(name) == s->n_param && memcmp(name, s->param, s->n_param) == 0) {
      *param = (uint8_t)(K3_PARAM_OF_MODULE + k);
      return true;
    }
  }
  enum k3_param known;
  if (!k3_param_from_name(s->param, s->n_param, &known) || known == K3_PARAM_BIAS)
    return false;
  bool has_weight = strcmp(module->params[0].name, "weight") == 0;
  *param = (uint8_t)known;
  return has_weight && (known == K3_PARAM_WEIGHT || module->linear);
}

// Values of the recipe's indexes from the numbers of the name, in the order of the "{x}" of the module's name, whose own numbers must be equal.
static enum k3_mapper_answer read_indexes(const struct k3_mapper *mapper, const struct k3_recipe_module *module, const struct split_name *s,
                                          struct k3_mapped *mapped) {
  size_t at = 0;
  enum k3_mapper_answer answer = K3_MAPPED;
  memset(mapped->index, 0, sizeof mapped->index);
  for (const char *c = module->name; *c && at < s->n_numbers; c++) {
    if (is_index(c)) {
      for (size_t i = 0; i < mapper->recipe->n_indexes; i++) {
        if (mapper->recipe->indexes[i].letter != c[1])
          continue;
        if (s->numbers[at] >= mapper->index_counts[i])
          answer = K3_BEYOND_COUNT;
        mapped->index[i] = (uint32_t)s->numbers[at];
      }
      at++;
    } else if (c[0] >= '0' && c[0] <= '9' && (c == module->name || c[-1] == '.')) {
      char *end;
      uint64_t number = strtoull(c, &end, 10);
      if (*end != '.' && *end != '\0')
        continue;
      if (number != s->numbers[at++])
        return K3_UNKNOWN_NAME;
      c = end - 1;
    }
  }
  return answer;
}

enum where { UNDER_ROOT, OUTSIDE, BARE };

static enum k3_mapper_answer find_module(const struct k3_mapper *mapper, const struct split_name *s, enum where where, struct k3_mapped *mapped) {
  enum k3_mapper_answer answer = K3_UNKNOWN_NAME;
  uint32_t slot = hash_text(s->pattern, s->n_pattern);
  for (const struct k3_mapper_slot *found; (found = find_slot(mapper, s->pattern, s->n_pattern, &slot)); slot++) {
    const struct k3_recipe_module *module = &mapper->recipe->modules[found->module];
    if (found->why || found->alias || !mapper->exists[found->module] || (where == OUTSIDE && !module->outer) || (where == BARE) != module->bare ||
        !param_of(module, s, &mapped->param))
      continue;
    if (s->odd_number)
      return K3_ODD_NUMBER;
    mapped->module = found->module;
    answer = read_indexes(mapper, module, s, mapped);
    if (answer == K3_MAPPED && k3_mapper_layer_exists(mapper, found->module, mapped->index[0]))
      return K3_MAPPED;
    if (answer == K3_MAPPED)
      answer = K3_UNKNOWN_NAME;
  }
  return answer;
}

static enum k3_mapper_answer resolve_under(const struct k3_mapper *mapper, const char *name, size_t nbytes, const char *root, enum where where,
                                           struct k3_mapped *mapped, const char **why) {
  size_t n_root = strlen(root);
  struct split_name s;
  if (nbytes <= n_root || memcmp(name, root, n_root) != 0 || !split(name + n_root, nbytes - n_root, &s))
    return K3_UNKNOWN_NAME;
  enum k3_mapper_answer answer = find_module(mapper, &s, where, mapped);
  if (answer == K3_UNKNOWN_NAME && mapper->recipe->n_aliases > 0 && apply_alias(mapper, &s))
    answer = find_module(mapper, &s, where, mapped);
  if (answer != K3_UNKNOWN_NAME)
    return answer;
  // An ignore rule names whole tensors, so its last component belongs to the pattern.
  char whole[MAX_PATTERN_NBYTES];
  int n = snprintf(whole, sizeof whole, "%s.%.*s", s.pattern, (int)s.n_param, s.param);
  uint32_t slot = hash_text(whole, n > 0 && (size_t)n < sizeof whole ? (size_t)n : 0);
  for (const struct k3_mapper_slot *found; n > 0 && (size_t)n < sizeof whole && (found = find_slot(mapper, whole, (size_t)n, &slot)); slot++) {
    if (found->why) {
      *why = found->why;
      return K3_MAPPED_IGNORE;
    }
  }
  return K3_UNKNOWN_NAME;
}

enum k3_mapper_answer k3_mapper_resolve(const struct k3_mapper *mapper, const char *name, size_t nbytes, struct k3_mapped *mapped, const char **why) {
  enum k3_mapper_answer answer = resolve_under(mapper, name, nbytes, mapper->root, UNDER_ROOT, mapped, why);
  if (answer == K3_UNKNOWN_NAME && strcmp(mapper->root, mapper->outer_root) != 0)
    answer = resolve_under(mapper, name, nbytes, mapper->outer_root, OUTSIDE, mapped, why);
  if (answer == K3_UNKNOWN_NAME)
    answer = resolve_under(mapper, name, nbytes, "", BARE, mapped, why);
  for (size_t i = 0; answer == K3_UNKNOWN_NAME && i < mapper->recipe->n_carry; i++) {
    if (strncmp(name, mapper->recipe->carry[i], strlen(mapper->recipe->carry[i])) == 0)
      answer = K3_MAPPED_CARRY;
  }
  return answer;
}

const char *k3_param_image_name(const struct k3_recipe_module *module, unsigned param, bool packed) {
  if (param >= K3_PARAM_OF_MODULE)
    return module->params[param - K3_PARAM_OF_MODULE].name;
  switch (param) {
    case K3_PARAM_WEIGHT: return packed ? "weight_packed" : "weight";
    case K3_PARAM_WEIGHT_SCALE_2: return "weight_global_scale";
    case K3_PARAM_WEIGHT_SCALE_INV: return "weight_scale";
    case K3_PARAM_INPUT_SCALE: return packed ? "input_global_scale" : "input_scale";
    default: return PARAM_NAMES[param];
  }
}

// Value of a shard expression; recipes are checked when they are loaded, so it cannot fail here.
static uint64_t shard_of(const struct k3_mapper *mapper, const char *expression, const struct k3_mapped *mapped) {
  uint64_t indexes[K3_RECIPE_MAX_INDEXES], value = 0;
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = mapped->index[i];
  k3_recipe_eval(mapper->recipe, mapper->config, expression, indexes, &value, NULL);
  return value;
}

static void name_destination(const struct k3_mapper *mapper, const char *module_pattern, const char *param, const struct k3_mapped *mapped,
                             struct k3_destination *destination) {
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (size_t i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = mapped->index[i];
  size_t n = k3_recipe_expand(mapper->recipe, module_pattern, indexes, destination->name, sizeof destination->name);
  if (n < sizeof destination->name)
    snprintf(destination->name + n, sizeof destination->name - n, ".%s", param);
}

size_t k3_mapper_destinations(const struct k3_mapper *mapper, const struct k3_mapped *mapped, bool packed, struct k3_destination destinations[2]) {
  const struct k3_recipe_module *module = &mapper->recipe->modules[mapped->module];
  const char *param = k3_param_image_name(module, mapped->param, packed);
  destinations[0] = (struct k3_destination){.stacked = module->shard != NULL};
  name_destination(mapper, module->into, param, mapped, &destinations[0]);
  if (module->shard)
    destinations[0].shard = shard_of(mapper, module->shard, mapped);
  if (!module->view)
    return 1;
  destinations[1] = (struct k3_destination){.stacked = true, .view = true, .shard = shard_of(mapper, module->view_shard, mapped)};
  name_destination(mapper, module->view, param, mapped, &destinations[1]);
  return 2;
}
