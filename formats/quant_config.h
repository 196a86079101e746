// What a checkpoint's config says about quantisation, in any of the forms in use:
//   compressed-tensors  config.json "quantization_config" (or below text_config, or "compression_config"): config_groups (schemes or presets), ignore
//   ModelOpt            hf_quant_config.json "quantization", and/or config.json with quant_method "modelopt": quant_algo, exclude_modules (ignore),
//                       quantized_layers of MIXED_PRECISION
//   fp8                 quant_method "fp8" (DeepSeek): weight_block_size, modules_to_not_convert or ignored_layers; [1, 32] is MXFP8
//   mxfp8, mxfp4        quant_method of that name, modules_to_not_convert
//   Quark               quant_method "quark": global_quant_config, layer_quant_config, exclude; MXFP4 only
// A module that nothing names is not quantised; only under "fp8", "mxfp8", "mxfp4" and "quark" the stored tensors decide about modules that no list names.
#ifndef K3_FORMATS_QUANT_CONFIG_H
#define K3_FORMATS_QUANT_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/findings.h"
#include "base/name_set.h"
#include "formats/config.h"
#include "formats/pattern.h"

enum k3_quant_dialect { K3_DIALECT_COMPRESSED_TENSORS, K3_DIALECT_MODELOPT, K3_DIALECT_FP8, K3_DIALECT_MX };
enum k3_quant_strategy {
  K3_STRATEGY_TENSOR,
  K3_STRATEGY_CHANNEL,
  K3_STRATEGY_GROUP,
  K3_STRATEGY_BLOCK,
  K3_STRATEGY_TOKEN,
  K3_STRATEGY_TENSOR_GROUP,
  K3_STRATEGY_ATTN_HEAD
};

// How weights or activations are quantised. num_bits 0: not at all.
struct k3_quant_args {
  uint8_t num_bits;
  bool is_float, symmetric;
  bool dynamic;                     // scales are made at run time: none are stored
  bool local;                       // dynamic block scales below a stored second scale
  bool e8m0;                        // block scales are powers of two (scale_dtype uint8, scale_fmt ue8m0)
  uint8_t strategy;                 // enum k3_quant_strategy
  uint32_t group_size;              // GROUP and TENSOR_GROUP
  uint32_t block_rows, block_cols;  // BLOCK
};

// One entry of a list of targets or ignored modules.
struct k3_quant_entry {
  const char *text;  // as it is written
  struct k3_pattern *pattern;
  bool class_name;     // may also be a class such as "Linear"
  bool tree;           // also stands for the modules below it
  uint64_t n_matches;  // counted by k3_quant_config_find
  bool too_much;       // a match was given up
};

struct k3_quant_entries {
  struct k3_quant_entry *items;
  size_t n_items, capacity;
  struct k3_name_set literals;  // numbers of the entries that are names: a mixed-precision map may list tens of thousands
  uint32_t *others;             // [n_others] the patterns
  size_t n_others, others_capacity;
};

struct k3_quant_group {
  const char *name;    // "group_0", or the algorithm
  const char *format;  // "nvfp4-pack-quantized", ..., or NULL
  struct k3_quant_args weights, inputs;
  struct k3_quant_entries targets;
};

struct k3_quant_config {
  enum k3_quant_dialect dialect;
  const char *method, *format, *file;  // file: the one a finding names
  struct k3_quant_group *groups;       // [n_groups]
  size_t n_groups, groups_capacity;
  struct k3_quant_entries ignore;
  bool mixed;              // ModelOpt MIXED_PRECISION, or compressed-tensors "mixed-precision"
  bool kv_scheme;          // a quantised KV cache is declared
  bool ue8m0;              // scale_fmt "ue8m0"
  bool has_static_inputs;  // some group's activations have stored scales
  struct k3_arena arena;
};

// Reads the quantization config of config.json (may be NULL) and hf_quant_config.json (may be NULL). *result stays NULL when there is none, or when
// what there is cannot be used (then a finding says why): CFG05 the two contradict, CFG06 a key of the other family, CFG10 a pattern, CFG11
// arguments, CFG13 a bare MIXED_PRECISION, CFG20 a field of the wrong type, CFG21 a method, format, sparsity, rotation or AWQ that is recognised and
// not supported. Fails only for lack of memory. Free with k3_quant_config_free (NULL is a no-op).
enum k3_status k3_quant_config_read(const struct k3_config *config, const struct k3_config *hf_quant, struct k3_quant_config **result,
                                    struct k3_findings *findings, struct k3_error *err);
void k3_quant_config_free(struct k3_quant_config *quant);

enum k3_quant_says {
  K3_SAYS_PLAIN,      // ignored, or nothing names it
  K3_SAYS_QUANTISED,  // answer->group
  K3_SAYS_EITHER,     // the method leaves it to the tensors; answer->group says how if so
};

struct k3_quant_answer {
  enum k3_quant_says says;
  const struct k3_quant_group *group;  // NULL for PLAIN
  const struct k3_quant_group *rival;  // another group that matches equally well with other arguments, or NULL
  const char *ignored_by;              // text of the entry, or NULL
};

// What the config says about a module of the checkpoint.
//   module  its stored name (unfused, with root), nbytes long
//   linear  it is a linear layer (what the class name "Linear" means), not an embedding or a norm
// Order: ignore wins; then exact names, then patterns, then class names. An entry that names a fused module (qkv_proj, gate_up_proj,
// fused_qkv_a_proj, w13) stands for its members. Counts matches in the entries, so not for several threads at once.
struct k3_quant_answer k3_quant_config_find(struct k3_quant_config *quant, const char *module, size_t nbytes, bool linear);

bool k3_quant_args_equal(const struct k3_quant_args *a, const struct k3_quant_args *b);
// "float 4 bits, tensor_group of 16" in dst, which it returns.
char *k3_quant_args_text(const struct k3_quant_args *args, char *dst, size_t capacity);

#endif
