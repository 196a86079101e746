// The mapper: from the name of a source tensor to its places in the image, as the recipe says. A stream of names goes in, each comes out with its
// destinations in order: first the (possibly stacked) tensor, then the view that shows the same bytes a second time.
#ifndef K3_LOADER_MAPPER_H
#define K3_LOADER_MAPPER_H

#include "formats/recipe.h"

// What the last component of a tensor's name means. The image uses one spelling for each; companions of a quantised weight travel with it.
enum k3_param {
  K3_PARAM_WEIGHT,
  K3_PARAM_WEIGHT_PACKED,
  K3_PARAM_WEIGHT_SCALE,
  K3_PARAM_WEIGHT_GLOBAL_SCALE,  // compressed-tensors: a divisor
  K3_PARAM_WEIGHT_SCALE_2,       // ModelOpt: a multiplier
  K3_PARAM_WEIGHT_SCALE_INV,     // DeepSeek: a multiplier, whatever its name says
  K3_PARAM_INPUT_SCALE,
  K3_PARAM_INPUT_GLOBAL_SCALE,
  K3_PARAM_WEIGHT_ZERO_POINT,
  K3_PARAM_WEIGHT_SHAPE,
  K3_PARAM_WEIGHT_G_IDX,
  K3_PARAM_BIAS,
  K3_PARAM_KNOWN_COUNT,
  K3_PARAM_OF_MODULE = 32,  // + k: module->params[k]
};
// Spelling of a known parameter in source files; static storage.
const char *k3_param_name(enum k3_param param);
// The known parameter of that exact spelling; false when there is none.
bool k3_param_from_name(const char *name, size_t nbytes, enum k3_param *param);

// A source tensor that found its module.
struct k3_mapped {
  uint32_t tensor;       // number in its checkpoint
  uint16_t module;       // index into recipe->modules
  uint8_t param;         // enum k3_param
  bool of_target;        // from the target's checkpoint
  uint32_t index[K3_RECIPE_MAX_INDEXES];  // values of the recipe's indexes; 0 where the name has none
};

struct k3_mapper {
  const struct k3_recipe *recipe;
  const struct k3_config *config;  // may be NULL for recipes without dims
  const char *root, *outer_root;   // prefix of the source names, and what stands before its last "model."
  uint64_t index_counts[K3_RECIPE_MAX_INDEXES];
  uint64_t optional_from[K3_RECIPE_MAX_INDEXES];  // UINT64_MAX: every instance is demanded
  bool *exists;                    // [n_modules], by their `when`
  uint8_t *layer_exists;           // [n_modules, index_counts[0]], by their `layers`
  uint16_t *stack_of;              // [n_modules], the lowest module with the same `into`: parts of one image tensor
  uint8_t *stack_indexes;          // [n_modules], a bit for every index that `into` uses
  struct k3_mapper_slot *slots;    // patterns of module names, open addressing
  uint32_t slot_mask;
  char root_buffer[128], outer_buffer[128];
};

// Prepares the patterns and counts of a recipe under a config. On failure *mapper needs no free.
enum k3_status k3_mapper_create(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_mapper *mapper, struct k3_error *err);
void k3_mapper_free(struct k3_mapper *mapper);

// Whether a module exists for a value of the first index (for modules without `layers`: always).
static inline bool k3_mapper_layer_exists(const struct k3_mapper *mapper, size_t module, uint64_t layer) {
  return mapper->recipe->modules[module].n_layers == 0 ||
         (layer < mapper->index_counts[0] && mapper->layer_exists[module * mapper->index_counts[0] + layer]);
}

// What stands before a module's name in the source.
static inline const char *k3_mapper_prefix(const struct k3_mapper *mapper, const struct k3_recipe_module *module) {
  return module->bare ? "" : module->outer ? mapper->outer_root : mapper->root;
}

// Sets the root that the source names carry ("", "model.", ...).
void k3_mapper_set_root(struct k3_mapper *mapper, const char *root);

enum k3_mapper_answer {
  K3_MAPPED,         // *mapped is filled (but for `tensor` and `of_target`)
  K3_MAPPED_CARRY,   // kept as it is, outside the modules
  K3_MAPPED_IGNORE,  // dropped by a rule of the recipe; *why says which
  K3_UNKNOWN_NAME,   // no module claims it (MAP01)
  K3_BEYOND_COUNT,   // an index is beyond the count of the config (MAP04)
  K3_ODD_NUMBER,     // a number is not in its canonical spelling (MAP07)
};
enum k3_mapper_answer k3_mapper_resolve(const struct k3_mapper *mapper, const char *name, size_t nbytes, struct k3_mapped *mapped, const char **why);

// A place in the image.
struct k3_destination {
  char name[512];    // image tensor or view, with the parameter's spelling in the image
  uint64_t shard;    // shard id; 0 when nothing is stacked
  bool stacked, view;
};
// The destinations of a mapped tensor in order: one, or two when its module has a view. Returns their number.
//   packed  its module's weight is packed FP4
size_t k3_mapper_destinations(const struct k3_mapper *mapper, const struct k3_mapped *mapped, bool packed, struct k3_destination destinations[2]);

// Spelling of a parameter in the image. Everything but these keeps its own: weight_scale_inv becomes weight_scale, weight_scale_2
// weight_global_scale, a packed ModelOpt weight weight_packed, its input_scale input_global_scale (the manifest holds the direction).
//   packed  the module's weight is packed FP4
const char *k3_param_image_name(const struct k3_recipe_module *module, unsigned param, bool packed);

#endif
