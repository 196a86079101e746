// Recipe text -> struct k3_recipe, and the expressions in it.
#include "formats/recipe.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/hash.h"
#include "formats/json_tree.h"

// What every reader below needs.
struct parse {
  struct k3_recipe *recipe;
  const char *file;
  struct k3_error *err;
};

enum {
  MAX_NAME_NBYTES = 160,  // of module, view and parameter names, so that a name with its root and its indexes fits into the loader's buffers
  MAX_NAME_INDEXES = 8,
  MAX_ROOT_NBYTES = 64,
  MAX_LIST = 256,
};

static enum k3_status bad(struct parse *p, const char *key, const char *allowed) {
  return k3_fail(p->err, K3_BAD_INPUT, K3_RULE_NONE, p->file, key, allowed, "not what a recipe may hold here");
}

static enum k3_status keep_text(struct parse *p, const char *key, const json_t *value, const char **text) {
  if (!json_is_string(value))
    return bad(p, key, "a text");
  *text = k3_arena_strndup(&p->recipe->arena, json_string_value(value), json_string_length(value), p->err);
  return *text ? K3_OK : K3_NO_MEMORY;
}

static bool is_name(const char *name) {
  size_t n_indexes = 0;
  for (const char *c = name; *c; c++)
    n_indexes += *c == '{';
  return *name && strlen(name) <= MAX_NAME_NBYTES && n_indexes <= MAX_NAME_INDEXES && strncmp(name, "__", 2) != 0;
}

static enum k3_status keep_name(struct parse *p, const char *key, const json_t *value, const char **text) {
  K3_TRY(keep_text(p, key, value, text));
  return is_name(*text) ? K3_OK : bad(p, key, "a name of 1 to 160 bytes with at most eight indexes, without \"__\" in front");
}

// Expressions may be written as numbers.
static enum k3_status keep_expression(struct parse *p, const char *key, const json_t *value, const char **text) {
  if (!json_is_integer(value))
    return keep_text(p, key, value, text);
  char digits[24];
  int n = snprintf(digits, sizeof digits, "%lld", (long long)json_integer_value(value));
  *text = k3_arena_strndup(&p->recipe->arena, digits, (size_t)n, p->err);
  return *text ? K3_OK : K3_NO_MEMORY;
}

static enum k3_status keep_array(struct parse *p, size_t n_items, size_t item_nbytes, void *array_ptr) {
  void *items = k3_arena_alloc(&p->recipe->arena, (n_items ? n_items : 1) * item_nbytes, p->err);
  if (!items)
    return K3_NO_MEMORY;
  memset(items, 0, n_items * item_nbytes);
  memcpy(array_ptr, &items, sizeof items);
  return K3_OK;
}

static enum k3_status read_texts(struct parse *p, const json_t *root, const char *key, const char ***texts, size_t *n_texts) {
  const json_t *list = json_object_get(root, key);
  if (!list)
    return K3_OK;
  if (!json_is_array(list) || json_array_size(list) > MAX_LIST)
    return bad(p, key, "a list of at most 256 texts");
  K3_TRY(keep_array(p, json_array_size(list), sizeof **texts, texts));
  for (size_t i = 0; i < json_array_size(list); i++)
    K3_TRY(keep_text(p, key, json_array_get(list, i), &(*texts)[i]));
  *n_texts = json_array_size(list);
  return K3_OK;
}

static enum k3_status read_named(struct parse *p, const json_t *root, const char *key, struct k3_recipe_named **named, size_t *n_named) {
  json_t *object = json_object_get(root, key);
  if (!object)
    return K3_OK;
  if (!json_is_object(object))
    return bad(p, key, "an object of texts");
  K3_TRY(keep_array(p, json_object_size(object), sizeof **named, named));
  const char *name;
  json_t *value;
  size_t n = 0;
  json_object_foreach(object, name, value) {
    (*named)[n].name = k3_arena_strndup(&p->recipe->arena, name, strlen(name), p->err);
    if (!(*named)[n].name)
      return K3_NO_MEMORY;
    K3_TRY(keep_expression(p, name, value, &(*named)[n].value));
    n++;
  }
  *n_named = n;
  return K3_OK;
}

static enum k3_status read_ignore(struct parse *p, const json_t *root) {
  const json_t *list = json_object_get(root, "ignore");
  if (!list)
    return K3_OK;
  if (!json_is_array(list))
    return bad(p, "ignore", "a list of {name, why}");
  K3_TRY(keep_array(p, json_array_size(list), sizeof *p->recipe->ignore, &p->recipe->ignore));
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *item = json_array_get(list, i);
    K3_TRY(keep_text(p, "ignore.name", json_object_get(item, "name"), &p->recipe->ignore[i].name));
    K3_TRY(keep_text(p, "ignore.why", json_object_get(item, "why"), &p->recipe->ignore[i].value));
  }
  p->recipe->n_ignore = json_array_size(list);
  return K3_OK;
}

static enum k3_status read_matches(struct parse *p, const json_t *root) {
  const json_t *list = json_object_get(root, "match");
  if (!list)
    return K3_OK;
  if (!json_is_array(list))
    return bad(p, "match", "a list");
  K3_TRY(keep_array(p, json_array_size(list), sizeof *p->recipe->matches, &p->recipe->matches));
  p->recipe->n_matches = json_array_size(list);
  for (size_t i = 0; i < p->recipe->n_matches; i++) {
    struct k3_recipe_match *match = &p->recipe->matches[i];
    const json_t *item = json_array_get(list, i);
    json_t *config = json_object_get(item, "config");
    const char *field;
    json_t *value;
    json_object_foreach(config, field, value) {
      match->config_field = k3_arena_strndup(&p->recipe->arena, field, strlen(field), p->err);
      if (!match->config_field)
        return K3_NO_MEMORY;
      K3_TRY(keep_text(p, field, value, &match->config_value));
    }
    K3_TRY(read_texts(p, item, "tensors", &match->tensors, &match->n_tensors));
    if (!match->config_field && match->n_tensors == 0)
      return bad(p, "match", "{\"config\": {field: text}} or {\"tensors\": [names]}");
  }
  return K3_OK;
}

static enum k3_status read_indexes(struct parse *p, const json_t *root) {
  json_t *object = json_object_get(root, "indexes");
  const char *name;
  json_t *value;
  json_object_foreach(object, name, value) {
    if (strlen(name) != 1 || p->recipe->n_indexes == K3_RECIPE_MAX_INDEXES)
      return bad(p, "indexes", "at most four one-letter names");
    struct k3_recipe_index *index = &p->recipe->indexes[p->recipe->n_indexes++];
    index->letter = name[0];
    K3_TRY(keep_expression(p, name, value, &index->count));
  }
  return K3_OK;
}

static enum k3_status read_optional(struct parse *p, const json_t *root) {
  json_t *object = json_object_get(root, "optional_from");
  const char *name;
  json_t *value;
  json_object_foreach(object, name, value) {
    size_t i = 0;
    while (i < p->recipe->n_indexes && (p->recipe->indexes[i].letter != name[0] || name[1] != '\0'))
      i++;
    if (i == p->recipe->n_indexes)
      return bad(p, "optional_from", "letters of indexes");
    K3_TRY(keep_expression(p, name, value, &p->recipe->indexes[i].optional_from));
  }
  return K3_OK;
}

static enum k3_status read_model(struct parse *p, const json_t *root) {
  const json_t *model = json_object_get(root, "model");
  if (!model)
    return K3_OK;
  if (!json_is_object(model))
    return bad(p, "model", "an object");
  char *text = json_dumps(model, JSON_COMPACT | JSON_SORT_KEYS);
  if (!text)
    return k3_fail_memory(p->err, 0);
  p->recipe->model = k3_arena_strndup(&p->recipe->arena, text, strlen(text), p->err);
  free(text);
  return p->recipe->model ? K3_OK : K3_NO_MEMORY;
}

static enum k3_status read_release(struct parse *p, const json_t *item, struct k3_recipe_release *release) {
  json_t *files = json_object_get(item, "files"), *file;
  const char *name;
  K3_TRY(keep_text(p, "releases.name", json_object_get(item, "name"), &release->name));
  K3_TRY(keep_text(p, "releases.revision", json_object_get(item, "revision"), &release->revision));
  if (json_object_size(files) == 0)
    return bad(p, "releases.files", "an object of {nbytes, sha256}");
  K3_TRY(keep_array(p, json_object_size(files), sizeof *release->files, &release->files));
  json_object_foreach(files, name, file) {
    struct k3_recipe_release_file *kept = &release->files[release->n_files++];
    const json_t *nbytes = json_object_get(file, "nbytes");
    K3_TRY(keep_text(p, "releases.files.sha256", json_object_get(file, "sha256"), &kept->sha256));
    if (strlen(kept->sha256) != 64 || strspn(kept->sha256, "0123456789abcdef") != 64 || !json_is_integer(nbytes) || json_integer_value(nbytes) < 0)
      return bad(p, "releases.files", "nbytes, and sha256 in 64 lower-case hex digits");
    kept->nbytes = (uint64_t)json_integer_value(nbytes);
    kept->name = k3_arena_strndup(&p->recipe->arena, name, strlen(name), p->err);
    if (!kept->name)
      return K3_NO_MEMORY;
  }
  return K3_OK;
}

static enum k3_status read_releases(struct parse *p, const json_t *root) {
  const json_t *list = json_object_get(root, "releases");
  if (!list)
    return K3_OK;
  if (!json_is_array(list))
    return bad(p, "releases", "a list of {name, revision, files}");
  K3_TRY(keep_array(p, json_array_size(list), sizeof *p->recipe->releases, &p->recipe->releases));
  p->recipe->n_releases = json_array_size(list);
  for (size_t i = 0; i < p->recipe->n_releases; i++)
    K3_TRY(read_release(p, json_array_get(list, i), &p->recipe->releases[i]));
  return K3_OK;
}

static enum k3_status read_shape(struct parse *p, const json_t *list, struct k3_recipe_param *param) {
  if (json_is_array(json_array_get(list, 0))) {
    for (size_t i = json_array_size(list); i-- > 0;) {
      struct k3_recipe_param *next = param->other, *at = param;
      if (i > 0) {
        K3_TRY(keep_array(p, 1, sizeof *at, &at));
        *at = (struct k3_recipe_param){.name = param->name, .other = next};
        param->other = at;
      }
      if (json_is_array(json_array_get(json_array_get(list, i), 0)))
        return bad(p, param->name, "a list of lists of expressions");
      K3_TRY(read_shape(p, json_array_get(list, i), at));
    }
    return K3_OK;
  }
  if (!json_is_array(list) || json_array_size(list) > K3_RECIPE_MAX_RANK)
    return bad(p, param->name, "a list of at most five expressions");
  param->rank = (unsigned)json_array_size(list);
  for (unsigned i = 0; i < param->rank; i++)
    K3_TRY(keep_expression(p, param->name, json_array_get(list, i), &param->shape[i]));
  return K3_OK;
}

static enum k3_status read_params(struct parse *p, const json_t *item, struct k3_recipe_module *module) {
  json_t *shape = json_object_get(item, "shape"), *params = json_object_get(item, "params");
  K3_TRY(keep_array(p, (shape != NULL) + json_object_size(params), sizeof *module->params, &module->params));
  if (shape) {
    module->params[0].name = "weight";
    K3_TRY(read_shape(p, shape, &module->params[0]));
    module->n_params = 1;
  }
  const char *name;
  json_t *value;
  json_object_foreach(params, name, value) {
    struct k3_recipe_param *param = &module->params[module->n_params++];
    if (strlen(name) > MAX_ROOT_NBYTES)
      return bad(p, "params", "parameter names of at most 64 bytes");
    param->name = k3_arena_strndup(&p->recipe->arena, name, strlen(name), p->err);
    if (!param->name)
      return K3_NO_MEMORY;
    K3_TRY(read_shape(p, value, param));
  }
  if (module->n_params == 0)
    return bad(p, module->name, "a shape, or params");
  const json_t *linear = json_object_get(item, "linear");
  module->linear = linear ? json_is_true(linear) : shape && module->params[0].rank == 2;
  return K3_OK;
}

static enum k3_status read_dtypes(struct parse *p, const json_t *item, struct k3_recipe_module *module) {
  const json_t *list = json_object_get(item, "dtypes");
  module->dtypes = 1u << K3_DTYPE_BF16 | 1u << K3_DTYPE_F16 | 1u << K3_DTYPE_F32;
  if (!list)
    return K3_OK;
  module->dtypes = 0;
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *name = json_array_get(list, i);
    enum k3_dtype dtype;
    if (!json_is_string(name) || !k3_dtype_from_name(json_string_value(name), json_string_length(name), &dtype))
      return bad(p, "dtypes", "dtype names of safetensors");
    module->dtypes |= 1u << dtype;
  }
  return module->dtypes ? K3_OK : bad(p, "dtypes", "a list of dtype names");
}

static enum k3_status read_layer_rule(struct parse *p, const json_t *item, struct k3_recipe_layers *layers) {
  if (json_object_get(item, "from")) {
    layers->kind = K3_LAYERS_RANGE;
    K3_TRY(keep_expression(p, "layers.from", json_object_get(item, "from"), &layers->from));
    return keep_expression(p, "layers.to", json_object_get(item, "to"), &layers->to);
  }
  bool listed = json_object_get(item, "listed") != NULL;
  layers->kind = listed ? K3_LAYERS_LISTED : K3_LAYERS_MASK;
  K3_TRY(keep_text(p, "layers", json_object_get(item, listed ? "listed" : "mask"), &layers->field));
  const json_t *number = json_object_get(item, listed ? "base" : "is");
  if (!listed && json_is_string(number))
    return keep_text(p, "layers.is", number, &layers->text);
  if (!json_is_integer(number) || json_integer_value(number) < 0)
    return bad(p, "layers", "base or is: a number");
  layers->number = (uint64_t)json_integer_value(number);
  return K3_OK;
}

static enum k3_status read_layers(struct parse *p, const json_t *item, struct k3_recipe_module *module) {
  const json_t *layers = json_object_get(item, "layers");
  if (!layers)
    return K3_OK;
  bool list = json_is_array(layers);
  module->n_layers = list ? json_array_size(layers) : 1;
  K3_TRY(keep_array(p, module->n_layers, sizeof *module->layers, &module->layers));
  for (size_t i = 0; i < module->n_layers; i++)
    K3_TRY(read_layer_rule(p, list ? json_array_get(layers, i) : layers, &module->layers[i]));
  return K3_OK;
}

static enum k3_status read_choice(struct parse *p, const json_t *item, const char *key, const char *const *words, int n_words, int *choice) {
  const json_t *value = json_object_get(item, key);
  if (!value)
    return K3_OK;
  for (int i = 0; json_is_string(value) && i < n_words; i++) {
    if (strcmp(words[i], json_string_value(value)) == 0) {
      *choice = i;
      return K3_OK;
    }
  }
  return bad(p, key, "one of the words in the description of recipes");
}

// A misspelt key would otherwise be a rule that silently does not hold.
static enum k3_status known_keys(struct parse *p, const json_t *object, const char *const *known, size_t n_known) {
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)(uintptr_t)object, key, value) {
    size_t i = 0;
    while (i < n_known && strcmp(key, known[i]) != 0)
      i++;
    if (i == n_known)
      return bad(p, key, "a key of the description of recipes (k3pack recipes --help)");
  }
  return K3_OK;
}

static enum k3_status read_module(struct parse *p, const json_t *item, struct k3_recipe_module *module) {
  static const char *const known[] = {"name", "shape", "params", "dtypes",      "linear", "into", "shard", "view",
                                      "role", "tp",    "outer",  "reduce_into", "bare",   "when", "layers"};
  static const char *const roles[] = {"core", "optional", "borrowed"}, *const rules[] = {"replicate", "column", "row", "vocab"};
  K3_TRY(known_keys(p, item, known, sizeof known / sizeof known[0]));
  K3_TRY(keep_name(p, "modules.name", json_object_get(item, "name"), &module->name));
  K3_TRY(read_params(p, item, module));
  K3_TRY(read_dtypes(p, item, module));
  K3_TRY(read_layers(p, item, module));
  module->bare = json_is_true(json_object_get(item, "bare"));
  if (json_object_get(item, "into")) {
    K3_TRY(keep_name(p, "into", json_object_get(item, "into"), &module->into));
  } else {
    char *into = k3_asprintf(p->err, "%s%s", module->bare ? "" : p->recipe->image_root, module->name);
    module->into = into ? k3_arena_strndup(&p->recipe->arena, into, strlen(into), p->err) : NULL;
    k3_free(into);
    if (!module->into)
      return K3_NO_MEMORY;
  }
  if (json_object_get(item, "shard"))
    K3_TRY(keep_expression(p, "shard", json_object_get(item, "shard"), &module->shard));
  const json_t *view = json_object_get(item, "view");
  if (view) {
    K3_TRY(keep_name(p, "view.name", json_object_get(view, "name"), &module->view));
    if (strchr(module->view, '{'))
      return bad(p, "view.name", "a name without indexes: the shards have them");
    K3_TRY(keep_expression(p, "view.shard", json_object_get(view, "shard"), &module->view_shard));
  }
  if (json_object_get(item, "reduce_into"))
    K3_TRY(keep_text(p, "reduce_into", json_object_get(item, "reduce_into"), &module->reduce_into));
  int role = 0, rule = 0;
  K3_TRY(read_choice(p, item, "role", roles, 3, &role));
  K3_TRY(read_choice(p, item, "tp", rules, 4, &rule));
  module->role = (enum k3_role)role;
  module->tp = (enum k3_tp_rule)rule;
  module->outer = json_is_true(json_object_get(item, "outer"));
  json_t *when = json_object_get(item, "when"), *value;
  const char *field;
  json_object_foreach(when, field, value) {
    module->when_field = k3_arena_strndup(&p->recipe->arena, field, strlen(field), p->err);
    module->when_value = json_is_true(value);
    if (!module->when_field)
      return K3_NO_MEMORY;
  }
  return K3_OK;
}

static enum k3_status read_recipe(struct parse *p, const json_t *root) {
  static const char *const known[] = {"name",     "family", "match",  "roots",   "image_root", "aliases",    "dims",          "indexes", "require",
                                      "borrowed", "carry",  "ignore", "modules", "about",      "keep_names", "optional_from", "model",   "releases"};
  struct k3_recipe *recipe = p->recipe;
  K3_TRY(known_keys(p, root, known, sizeof known / sizeof known[0]));
  K3_TRY(keep_text(p, "name", json_object_get(root, "name"), &recipe->name));
  recipe->family = recipe->name;
  recipe->about = "";
  if (json_object_get(root, "about"))
    K3_TRY(keep_text(p, "about", json_object_get(root, "about"), &recipe->about));
  if (json_object_get(root, "family"))
    K3_TRY(keep_text(p, "family", json_object_get(root, "family"), &recipe->family));
  recipe->image_root = "";
  if (json_object_get(root, "image_root"))
    K3_TRY(keep_text(p, "image_root", json_object_get(root, "image_root"), &recipe->image_root));
  if (strlen(recipe->image_root) > MAX_ROOT_NBYTES || strncmp(recipe->image_root, "__", 2) == 0)
    return bad(p, "image_root", "at most 64 bytes, without \"__\" in front");
  recipe->keep_names = json_is_true(json_object_get(root, "keep_names"));
  K3_TRY(read_texts(p, root, "roots", &recipe->roots, &recipe->n_roots));
  for (size_t i = 0; i < recipe->n_roots; i++) {
    if (strlen(recipe->roots[i]) > MAX_ROOT_NBYTES)
      return bad(p, "roots", "prefixes of at most 64 bytes");
  }
  K3_TRY(read_texts(p, root, "require", &recipe->require, &recipe->n_require));
  K3_TRY(read_texts(p, root, "carry", &recipe->carry, &recipe->n_carry));
  const json_t *borrowed = json_object_get(root, "borrowed");
  if (borrowed)
    K3_TRY(read_texts(p, borrowed, "roots", &recipe->borrowed_roots, &recipe->n_borrowed_roots));
  K3_TRY(read_named(p, root, "aliases", &recipe->aliases, &recipe->n_aliases));
  K3_TRY(read_named(p, root, "dims", &recipe->dims, &recipe->n_dims));
  K3_TRY(read_ignore(p, root));
  K3_TRY(read_matches(p, root));
  K3_TRY(read_indexes(p, root));
  K3_TRY(read_optional(p, root));
  K3_TRY(read_model(p, root));
  K3_TRY(read_releases(p, root));
  const json_t *modules = json_object_get(root, "modules");
  if (!modules && recipe->keep_names)
    return K3_OK;
  if (!json_is_array(modules) || json_array_size(modules) == 0 || json_array_size(modules) > 4096)
    return bad(p, "modules", "a list of 1 to 4096 modules");
  K3_TRY(keep_array(p, json_array_size(modules), sizeof *recipe->modules, &recipe->modules));
  recipe->n_modules = json_array_size(modules);
  for (size_t i = 0; i < recipe->n_modules; i++)
    K3_TRY(read_module(p, json_array_get(modules, i), &recipe->modules[i]));
  return K3_OK;
}

enum k3_status k3_recipe_parse(const char *text, size_t nbytes, const char *file, struct k3_recipe *recipe, struct k3_error *err) {
  *recipe = (struct k3_recipe){0};
  json_t *root = NULL;
  K3_TRY(k3_json_tree_parse(text, nbytes, K3_RULE_NONE, file, &root, err));
  struct parse p = {recipe, file, err};
  uint8_t digest[K3_SHA256_NBYTES];
  enum k3_status status = k3_sha256(text, nbytes, digest, err);
  if (status == K3_OK) {
    k3_hex(recipe->sha256, digest);
    status = read_recipe(&p, root);
  }
  json_decref(root);
  if (status != K3_OK)
    k3_recipe_free(recipe);
  return status;
}

void k3_recipe_free(struct k3_recipe *recipe) {
  k3_arena_free(&recipe->arena);
  *recipe = (struct k3_recipe){0};
}
