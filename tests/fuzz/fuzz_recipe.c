// covers: formats/recipe.c formats/recipe_eval.c formats/recipe_model.c loader/mapper.c
// A recipe under a config: the input is the recipe's text, behind a zero byte the config's, behind another one names of tensors, one a line.
#include <jansson.h>

#include "formats/recipe.h"
#include "loader/mapper.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_NAMES = 64 };

static void evaluate_module(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_module *module,
                            const uint64_t *indexes) {
  uint64_t value;
  bool exists;
  char name[256];
  FUZZ_CHECK(module->name && module->into && module->n_params > 0);
  for (const struct k3_recipe_param *p = module->params; p; p = p->other) {
    for (unsigned i = 0; i < p->rank; i++)
      k3_recipe_eval(recipe, config, p->shape[i], indexes, &value, NULL);
  }
  if (module->shard)
    k3_recipe_eval(recipe, config, module->shard, indexes, &value, NULL);
  k3_recipe_module_exists(recipe, config, module, &exists, NULL);
  k3_recipe_layer_exists(recipe, config, module, 1, &exists, NULL);
  size_t n = k3_recipe_expand(recipe, module->into, indexes, name, sizeof name);
  FUZZ_CHECK(strlen(name) == (n < sizeof name ? n : sizeof name - 1));
}

static void evaluate(const struct k3_recipe *recipe, const struct k3_config *config) {
  uint64_t indexes[K3_RECIPE_MAX_INDEXES] = {1, 2, 3, 0}, value;
  for (size_t d = 0; d < recipe->n_dims; d++) {
    struct k3_error err = {0};
    enum k3_status status = k3_recipe_eval(recipe, config, recipe->dims[d].value, indexes, &value, &err);
    FUZZ_CHECK(status == K3_OK || (status != K3_NO_MEMORY && err.found[0]));
  }
  for (size_t m = 0; m < recipe->n_modules; m++)
    evaluate_module(recipe, config, &recipe->modules[m], indexes);
  char *model = config ? k3_recipe_model_json(recipe, config, NULL) : NULL;
  k3_free(model);
}

// Every parameter has a spelling, and is found again by it.
static void spell_params(const struct k3_recipe *recipe) {
  for (unsigned p = 0; p <= K3_PARAM_KNOWN_COUNT; p++) {
    enum k3_param again = K3_PARAM_KNOWN_COUNT;
    const char *name = k3_param_name((enum k3_param)p);
    bool known = k3_param_from_name(name, strlen(name), &again);
    FUZZ_CHECK(known == (p < K3_PARAM_KNOWN_COUNT) && (!known || again == p));
    if (known && recipe->n_modules > 0)
      FUZZ_CHECK(k3_param_image_name(&recipe->modules[0], p, p % 2)[0]);
  }
}

static void parse_without_memory(const uint8_t *data, const char *text, size_t n_recipe, const struct k3_config *config, size_t nbytes) {
  struct k3_recipe recipe;
  struct k3_error err = {0};
  struct k3_mapper mapper;
  fuzz_count_jansson();
  fuzz_fail_one(data, nbytes, 400);
  enum k3_status status = k3_recipe_parse(text, n_recipe, "recipe.json", &recipe, &err);
  FUZZ_CHECK((status == K3_OK) == (err.status == K3_OK));
  fuzz_fail_one(data, nbytes, 9);
  if (status == K3_OK) {
    if (k3_mapper_create(&recipe, config, &mapper, NULL) == K3_OK)
      k3_mapper_free(&mapper);
    for (uint64_t n = 1; config && n <= 24; n++) {
      k3_alloc_fail_at(n);
      k3_free(k3_recipe_model_json(&recipe, config, NULL));
    }
    k3_recipe_free(&recipe);
  }
  fuzz_fail_none();
  json_set_alloc_funcs(malloc, free);
}

static void map_names(const struct k3_recipe *recipe, const struct k3_config *config, const char *names, const char *end) {
  struct k3_mapper mapper;
  struct k3_error err = {0};
  if (k3_mapper_create(recipe, config, &mapper, &err) != K3_OK) {
    FUZZ_CHECK(err.status != K3_NO_MEMORY);
    return;
  }
  k3_mapper_set_root(&mapper, recipe->n_roots > 0 ? recipe->roots[recipe->n_roots - 1] : "");
  for (int i = 0; i < MAX_NAMES && names < end; i++) {
    const char *line = memchr(names, '\n', (size_t)(end - names)), *why = NULL;
    size_t n = (size_t)((line ? line : end) - names);
    char name[K3_ST_MAX_NAME_NBYTES + 1];  // names of tensors are terminated
    if (n < sizeof name && !memchr(names, '\0', n)) {
      struct k3_mapped mapped = {0};
      memcpy(name, names, n);
      name[n] = '\0';
      enum k3_mapper_answer answer = k3_mapper_resolve(&mapper, name, n, &mapped, &why);
      if (answer == K3_MAPPED) {
        struct k3_destination places[2];
        FUZZ_CHECK(mapped.module < recipe->n_modules);
        for (size_t x = 0; x < recipe->n_indexes; x++)
          FUZZ_CHECK(mapped.index[x] == 0 || mapped.index[x] < mapper.index_counts[x]);
        size_t n_places = k3_mapper_destinations(&mapper, &mapped, false, places);
        n_places = k3_mapper_destinations(&mapper, &mapped, true, places);
        FUZZ_CHECK(n_places >= 1 && n_places <= 2 && strlen(places[0].name) < sizeof places[0].name);
      }
      FUZZ_CHECK(answer != K3_MAPPED_IGNORE || why);
    }
    names = line ? line + 1 : end;
  }
  k3_mapper_free(&mapper);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  const char *text = fuzz_guarded(data, &nbytes), *end = text + nbytes;
  const char *zero = nbytes > 0 ? memchr(text, 0, nbytes) : NULL, *second = zero ? memchr(zero + 1, 0, (size_t)(end - zero - 1)) : NULL;
  struct k3_recipe recipe;
  struct k3_error err = {0};
  // Tables are as large as the config's counts say, not as the text is long; the mapper bounds them.
  k3_alloc_set_limit(64 << 20);
  if (k3_recipe_parse(text, (size_t)((zero ? zero : end) - text), "recipe.json", &recipe, &err) != K3_OK) {
    FUZZ_CHECK(err.status == K3_BAD_INPUT && err.found[0] && recipe.n_modules == 0);
    return 0;
  }
  struct k3_config *config = zero ? k3_config_parse(zero + 1, (size_t)((second ? second : end) - zero - 1), "config.json", NULL) : NULL;
  parse_without_memory(data, text, (size_t)((zero ? zero : end) - text), config, nbytes);
  evaluate(&recipe, config);
  evaluate(&recipe, NULL);
  spell_params(&recipe);
  map_names(&recipe, config, second ? second + 1 : end, end);
  k3_config_free(config);
  k3_recipe_free(&recipe);
  return 0;
}
