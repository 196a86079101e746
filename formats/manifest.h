// The manifest of an image: compact JSON with sorted keys in the U8 tensor "__k3pack__", padded with spaces.
//   image_version 1, tool "k3pack <version>"
//   recipe   {"name", "sha256"}
//   model    {"family": "k3-dspark", ...}: formats/dspark_model.h
//   sources  [{"file", "size", "header": "__source__.<n>", "of": "source" | "target", "sha256" (optional)}]: the files that gave something
//   documents [{"file", "tensor": "__source__.<n>"}]: config.json, the index and the other JSON files of the source, verbatim
//   names    {"root": "", "image_root": "model.", "aliases": {"fc": "context_proj"}}: how a tensor that is merely copied got its name
//   tensors  [{"name", "role", "tp", "shards": [{"id", "source", "file", "row", "n_rows"}]}]: role is core (default), optional or borrowed; tp is
//            replicate (default), column, row or vocab; shards only for stacked tensors, rows in the tensor's own unit. A name without shards may
//            hold {i} (any number) and end in ".*" (any parameter). A regular run of shards is one entry {"each": ["e", first, end], "id": [start,
//            step], "source": "...{e}...", "row": [start, step], "n_rows"} for e = first .. end-1, at most 4096 of them; then "file" is absent: the
//            source headers tell it. The shards of a tensor are sorted by row
//   linears  [{"scheme", "group" | "block": [rows, cols], "second_scale": "divide" | "multiply", "from": "BF16", "modules": [...]}]: a module not
//            listed is plain; "from" is there when the source held plain weights of that dtype, which the conversion encoded.
//            A run of modules is one entry {"each": ["e", first, end], "module": "...{e}..."}
//   views    {"model.context_kv_proj.weight": [{"id", "tensor", "row", "n_rows"}]}: rows of stored tensors, no bytes of their own
//   reductions [{"producer": "model.layers.{i}.self_attn.o_proj", "norm": "model.layers.{i}.post_attention_layernorm"}]
//   split    absent in a whole image. {"tp": N, "ranks": [seal, ...]}: the shared file of a folder that `convert --tp N` wrote, with all rank
//            files' seals; {"tp": N, "rank": r}: such a rank file, whose shards name whole source tensors of which it holds the rank's slice
//   dropped  [{"tensor", "why"}]
//   digests  true | false, crc true | false
// A list that is empty may be absent. Keys that are not named here are ignored.
#ifndef K3_FORMATS_MANIFEST_H
#define K3_FORMATS_MANIFEST_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/error.h"
#include "formats/dspark_model.h"
#include "formats/safetensors.h"

enum {
  K3_MANIFEST_MAX_NBYTES = 16 << 20,  // of the text; that of half a million tensors takes less than 1 MB
  K3_MANIFEST_MAX_RUN = 4096,         // shards of one run, so that a small text cannot ask for much memory
  K3_MANIFEST_MAX_SHARDS = 4000000,   // of all tensors and linears together, runs expanded
  K3_MANIFEST_MAX_RANKS = 4096,
};

struct k3_manifest_source {
  const char *file;  // base name
  uint64_t nbytes;
  const char *header_tensor;  // "__source__.<n>": the first 8 + h bytes of the file
  bool of_target;             // from --target; export leaves it out
  const char *sha256;         // 64 hex digits, or NULL
};

struct k3_manifest_document {
  const char *file, *tensor;
};

struct k3_manifest_shard {
  uint64_t id;
  const char *source;    // name of the source tensor
  int64_t file;          // index into sources; -1: any, look the name up
  uint64_t row, n_rows;  // in the stacked tensor's own rows (first dimension)
};

enum k3_role { K3_ROLE_CORE, K3_ROLE_OPTIONAL, K3_ROLE_BORROWED };
enum k3_tp_rule { K3_TP_REPLICATE, K3_TP_COLUMN, K3_TP_ROW, K3_TP_VOCAB };

struct k3_manifest_tensor {
  const char *name;  // may be a pattern when n_shards is 0
  enum k3_role role;
  enum k3_tp_rule tp;
  struct k3_manifest_shard *shards;  // [n_shards], regular runs expanded; NULL: list_shards gives them
  size_t n_shards;
  size_t first;  // for list_shards alone: which they are
};

// For writing: fills dst [tensor->n_shards] when a tensor's shards are needed, so that half a million need not exist at once.
typedef void (*k3_manifest_shards_fn)(const void *ctx, const struct k3_manifest_tensor *tensor, struct k3_manifest_shard *dst);

struct k3_manifest_linear {
  const char *module;               // "model.layers.0.mlp.gate_up_proj"
  const char *scheme;               // "nvfp4", ...: the names of quant/scheme.h
  uint64_t block_rows, block_cols;  // 1 x group for group schemes, 128 x 128 for fp8-block, 0 x 0 otherwise
  bool second_scale_divides;        // true: compressed-tensors' weight_global_scale; false: ModelOpt's weight_scale_2, or no second scale
  const char *encoded_from;         // "BF16", ...: the source's dtype when the weight was encoded on the way into the image; NULL: kept
};

struct k3_manifest_view_shard {
  uint64_t id;
  const char *tensor;  // a stored tensor
  uint64_t row, n_rows;
};

struct k3_manifest_view {
  const char *name;
  struct k3_manifest_view_shard *shards;
  size_t n_shards;
};

struct k3_manifest_pair {
  const char *key, *value;
};

struct k3_manifest {
  const char *tool, *recipe_name, *recipe_sha256;
  const char *family;             // of the model: "k3-dspark", "generic", ...
  const char *model_json;         // the whole "model" object, compact JSON with sorted keys, terminated
  struct k3_dspark_model dspark;  // valid when family is "k3-dspark"
  const char *root, *image_root;
  struct k3_manifest_pair *aliases;
  size_t n_aliases;
  struct k3_manifest_source *sources;
  size_t n_sources;
  struct k3_manifest_document *documents;
  size_t n_documents;
  struct k3_manifest_tensor *tensors;  // sorted by name
  size_t n_tensors;
  struct k3_manifest_linear *linears;  // sorted by module
  size_t n_linears;
  struct k3_manifest_view *views;  // sorted by name
  size_t n_views;
  struct k3_manifest_pair *reductions;  // key: producer pattern, value: norm pattern
  size_t n_reductions;
  struct k3_manifest_pair *dropped;  // key: tensor, value: why
  size_t n_dropped;
  uint32_t tp_size;         // of a folder's file; 0: a whole image
  uint32_t tp_rank;         // of a rank file
  const char **rank_seals;  // [tp_size] of the shared file; NULL in rank files
  bool digests, crc;
  k3_manifest_shards_fn list_shards;  // of tensors without a list, with its ctx; a manifest that was read has none
  const void *list_ctx;
  struct k3_arena arena;  // owns every string and list above
};

// Parses the manifest text (white space behind it is fine). IMG01 for everything that is not as described above; a newer image_version is named. On
// failure *manifest is empty.
enum k3_status k3_manifest_parse(const char *text, size_t nbytes, const char *file, struct k3_manifest *manifest, struct k3_error *err);
// Checks a parsed manifest against the header of the same image. IMG03: a view names a tensor that is not stored, a view, or rows outside it, its
// shards differ in dtype or in shape behind the rows, or a stored tensor has its name. IMG01: a linear without a weight or with scales of another
// shape than its scheme says, a stacked tensor or a "__source__" tensor that is absent or smaller than the manifest says.
enum k3_status k3_manifest_check(const struct k3_manifest *manifest, const struct k3_st_header *header, const char *file, struct k3_error *err);
void k3_manifest_free(struct k3_manifest *manifest);

// Look-ups; they need a parsed manifest (lists sorted). Scheme entry of a module, or NULL when it is plain.
const struct k3_manifest_linear *k3_manifest_linear_of(const struct k3_manifest *manifest, const char *module);
const struct k3_manifest_view *k3_manifest_view_of(const struct k3_manifest *manifest, const char *name);
const struct k3_manifest_tensor *k3_manifest_tensor_of(const struct k3_manifest *manifest, const char *name);  // its own entry, no pattern
// Role and tensor-parallel rule of an image tensor, by its entry or by the longest pattern that fits; core and replicate when nothing names it.
void k3_manifest_role_of(const struct k3_manifest *manifest, const char *tensor, enum k3_role *role, enum k3_tp_rule *tp);

// The name in the image of a source tensor that is merely copied: the root goes, an alias becomes the recipe's module name, the image's root comes.
// Writes it terminated into dst and returns its length; 0 when the name does not begin with the root or does not fit.
size_t k3_manifest_copied_name(const struct k3_manifest *manifest, const char *source, char *dst, size_t capacity);

// Serialises (sorted keys, compact) into new memory, free with k3_free. Runs of 8 and more regular shards become one entry. Lists need not be sorted.
// model_json NULL: made from `dspark` for the family "k3-dspark", else the object holds the family alone (NULL: "generic"). NULL and *err on failure.
char *k3_manifest_to_json(const struct k3_manifest *manifest, struct k3_error *err);

#endif
