// A recipe: one JSON table from which renaming, stacking, views, shapes, tensor-parallel rules, roles and reductions of a model family are derived.
//   name      "k3-dspark"
//   about     one sentence for people
//   family    how the runtime reads the image: "k3-dspark", "minimax-m3", "deepseek-v3.2", "kimi-k3", or absent (a container of weights)
//   match     [{"config": {"model_type": "k3_dspark"}}, {"tensors": ["fc.weight", "x.*"]}]: one is enough; names under every root and alias
//   roots     prefixes of the source names, exactly one of which a checkpoint uses; image_root: the prefix in the image
//   aliases   {"fc": "context_proj"}: module names of other exporters, or whole tensor names; both sides have the same "{x}" in the same order
//   dims      {"E": "kv_lora_rank + qk_rope_head_dim"}: sums and products of config fields, numbers, len(list field) and dims named before;
//             " | " separates alternatives, of which the first whose fields exist counts ("num_experts_per_token | num_experts_per_tok | 8")
//   indexes   {"i": "L"}: how far the index of a name such as layers.{i} runs: 0 .. L-1
//   optional_from {"i": "Lt"}: from that index on, instances are demanded only where some tensor of that index is there (prediction modules)
//   require   names of checks in C, by family: the same names
//   borrowed  {"roots": ["language_model.model.", ...]}: where a target model keeps what this one borrows
//   carry     ["vision_tower."]: prefixes of whole names that are kept as they are
//   ignore    [{"name": "layers.{i}.self_attn.rotary_emb.inv_freq", "why": "..."}]: dropped, listed in the manifest
//   model     the manifest's model object; "$a.b | c" in it stands for the first config field that exists (none: no key), "=expression" for a number
//   releases  [{"name": "org/name", "revision": "<commit>", "files": {"config.json": {"nbytes": 1251, "sha256": "<64 hex digits>"}}}]: what was
//             published, so that `check` can say which release a folder is
//   modules   in the order in which the forward needs them:
//     name        "layers.{i}.self_attn.q_a_proj", without root
//     shape       ["Rq", "H"]: of `weight`; expressions as in dims. A list of such lists: any of them
//     params      {"bias": [], "e_score_correction_bias": ["X"]}: further plain parameters with their shapes; "weight" comes from `shape`
//     dtypes      ["F32"]: allowed for plain parameters (default BF16, F16, F32)
//     linear      true (default for rank 2): may be stored quantised, with companions
//     into        image module (absolute); default image_root + name. shard: its place there, a number or an expression of indexes ("2*{e}")
//     view        {"name": "model.context_kv_proj", "shard": "{i}"}: the same rows a second time, without a byte
//     role        "core" (default), "optional", "borrowed"
//     tp          "replicate" (default), "column", "row", "vocab"
//     reduce_into image module of the norm that completes a row-parallel product's sums: "{i+1}" is the next layer, " | " as in dims; "output" where
//                 something else than a norm reads it
//     outer       true: also accepted (and stored) outside the root, as lm_head is
//     bare        true: the name is whole, no root stands before it (vision towers); `into` is then the same name
//     when        {"fc_norm": true}: the module exists only if the config field (absent counts as false, an object as true) has this value
//     layers      {"from": "X", "to": "L"} | {"listed": "field", "base": 1} | {"mask": "field", "is": 1 or "text"}: the i it exists for; or a list
#ifndef K3_FORMATS_RECIPE_H
#define K3_FORMATS_RECIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/error.h"
#include "formats/config.h"
#include "formats/manifest.h"

enum { K3_RECIPE_MAX_INDEXES = 4, K3_RECIPE_MAX_RANK = 5 };

struct k3_recipe_index {
  char letter;                // 'i' of "{i}"
  const char *count;          // expression
  const char *optional_from;  // expression, or NULL: every instance is demanded
};

struct k3_recipe_param {
  const char *name;                          // "weight", "bias", ...
  const char *shape[K3_RECIPE_MAX_RANK];     // expressions
  unsigned rank;
  struct k3_recipe_param *other;  // another accepted shape, or NULL
};

struct k3_recipe_layers {
  enum { K3_LAYERS_RANGE, K3_LAYERS_LISTED, K3_LAYERS_MASK } kind;
  const char *from, *to;  // RANGE
  const char *field;      // LISTED, MASK
  const char *text;       // MASK of texts, else NULL
  uint64_t number;        // base of LISTED, value of MASK
};

struct k3_recipe_module {
  const char *name;
  const char *into;              // absolute, never NULL
  const char *shard;             // expression of indexes, NULL when nothing is stacked
  const char *view, *view_shard; // NULL: none
  const char *reduce_into;       // NULL: none
  struct k3_recipe_param *params;
  size_t n_params;
  uint32_t dtypes;               // bit per enum k3_dtype
  enum k3_role role;
  enum k3_tp_rule tp;
  bool linear, outer, bare;
  const char *when_field;        // NULL: always
  bool when_value;
  struct k3_recipe_layers *layers;  // [n_layers] alternatives; none: all layers
  size_t n_layers;
};

struct k3_recipe_match {
  const char *config_field, *config_value;  // NULL: not by config
  const char **tensors;                     // [n_tensors], all must be there
  size_t n_tensors;
};

struct k3_recipe_named {
  const char *name, *value;  // alias -> name, dim -> expression, ignored name -> why
};

struct k3_recipe_release_file {
  const char *name, *sha256;  // sha256: 64 lower-case hex digits
  uint64_t nbytes;
};

struct k3_recipe_release {
  const char *name, *revision;
  struct k3_recipe_release_file *files;  // [n_files], at least one
  size_t n_files;
};

struct k3_recipe {
  const char *name, *family, *about;
  char sha256[65];  // of the recipe's text
  struct k3_recipe_match *matches;
  size_t n_matches;
  const char **roots;
  size_t n_roots;
  const char *image_root, *model;  // model: JSON text, or NULL
  struct k3_recipe_named *aliases, *dims, *ignore;
  size_t n_aliases, n_dims, n_ignore;
  struct k3_recipe_index indexes[K3_RECIPE_MAX_INDEXES];
  const char **require, **borrowed_roots, **carry;
  size_t n_indexes, n_require, n_borrowed_roots, n_carry;
  struct k3_recipe_module *modules;
  struct k3_recipe_release *releases;
  size_t n_modules, n_releases;
  bool keep_names;  // "generic": every tensor is copied under its own name, there are no modules
  struct k3_arena arena;
};

// Parses a recipe text. K3_BAD_INPUT (no rule) naming the key that is wrong; *recipe is then empty and needs no free.
enum k3_status k3_recipe_parse(const char *text, size_t nbytes, const char *file, struct k3_recipe *recipe, struct k3_error *err);
void k3_recipe_free(struct k3_recipe *recipe);

// Value of an expression under a config: names are dims of the recipe, then config fields; "{x}" are the given indexes.
//   indexes  [n_indexes of the recipe], may be NULL when the expression has none
// CFG20 for a missing field or a product beyond 2^63.
enum k3_status k3_recipe_eval(const struct k3_recipe *recipe, const struct k3_config *config, const char *expression, const uint64_t *indexes,
                              uint64_t *value, struct k3_error *err);

// Whether a module exists under a config, and for layer i. Absent fields count as false or as an empty list; of several rules for layers the first
// whose field exists counts.
enum k3_status k3_recipe_module_exists(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_module *module,
                                       bool *exists, struct k3_error *err);
enum k3_status k3_recipe_layer_exists(const struct k3_recipe *recipe, const struct k3_config *config, const struct k3_recipe_module *module,
                                      uint64_t layer, bool *exists, struct k3_error *err);

// The manifest's "model" object (compact JSON, sorted keys), with the family; free with k3_free. NULL and *err on failure.
char *k3_recipe_model_json(const struct k3_recipe *recipe, const struct k3_config *config, struct k3_error *err);

// Writes a pattern with "{x}" replaced into dst (terminated, cut at capacity); returns the length it would need.
size_t k3_recipe_expand(const struct k3_recipe *recipe, const char *pattern, const uint64_t *indexes, char *dst, size_t capacity);

#endif
