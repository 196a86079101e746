// The linear layers of a checkpoint and how each is stored: from the dtypes, shapes and companions of its tensors, with the quantization config as a
// second witness. The tensors decide how bytes are read; what contradicts them is a finding.
#ifndef K3_LOADER_LINEARS_H
#define K3_LOADER_LINEARS_H

#include <stdbool.h>
#include <stdint.h>

#include "formats/quant_config.h"
#include "loader/ckpt.h"
#include "loader/mapper.h"
#include "quant/scheme.h"

enum { K3_LINEAR_ABSENT = UINT32_MAX };

// Formats that are recognised by their tensors and not supported.
enum k3_foreign {
  K3_FOREIGN_NONE,
  K3_FOREIGN_DEEPSEEK_V4,
  K3_FOREIGN_GPT_OSS,
  K3_FOREIGN_EXL3,
  K3_FOREIGN_AWQ_SCALE,
  K3_FOREIGN_ROTATION,
  K3_FOREIGN_SPARSE,
  K3_FOREIGN_INT8
};

// One module that holds a weight of two dimensions or more (a norm has one and is none). There may be a quarter of a million: wide fields first.
struct k3_linear {
  const char *name;          // [name_nbytes] stored name without parameter, part of a tensor's name
  const char *encoded_from;  // dtype of the source when the weight is encoded on the way (loader/requantise.h), scheme the new one; else NULL
  const struct k3_quant_answer *says;  // what the config says; PLAIN without one. Thousands of experts share one
  uint64_t n_rows, n_cols;             // of the weight, unpacked; n_cols 0: cannot be told
  struct k3_quant_scheme scheme;
  uint32_t tensors[K3_PARAM_KNOWN_COUNT];  // numbers in its checkpoint, K3_LINEAR_ABSENT
  uint32_t index[K3_RECIPE_MAX_INDEXES];
  uint32_t name_nbytes;
  uint16_t module;  // of the recipe; UINT16_MAX under "generic"
  bool of_target;
  bool is_linear;  // what configs call "Linear": no embedding, no lookup
  bool is_plain;   // BF16, F16, F32: scheme is that
  bool is_sound;   // shapes and dtypes of all companions are right
};

struct k3_linears {
  struct k3_linear *items;  // [n_items], by module and indexes, or in the order of the tensors
  size_t n_items, capacity;
  uint64_t n_quantised;            // items that are not plain
  struct k3_quant_config *config;  // NULL: none, or not usable
  bool config_present;             // there is one, usable or not
  bool target_quantised;
};

struct k3_plan;

// Fills plan->linears from the mapped shards (or, under "generic", from the names), reads the quantization config, classifies every module and
// reports the rules TEN01 .. TEN07, TEN09, TEN12, TEN13, TEN15, and CFG11 and CFG21 where tensors show them. plan->shards[].linear is set.
// K3_NO_MEMORY only.
enum k3_status k3_plan_classify(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);
void k3_linears_free(struct k3_linears *linears);

// The tensor of a parameter, or NULL; the parameter that holds the weight, the block scale, the second scale, the scale of the input;
// K3_PARAM_KNOWN_COUNT for none.
const struct k3_st_tensor *k3_linear_tensor(const struct k3_plan *plan, const struct k3_linear *linear, enum k3_param param);
enum k3_param k3_linear_weight(const struct k3_linear *linear);
enum k3_param k3_linear_scale(const struct k3_linear *linear);
enum k3_param k3_linear_second(const struct k3_linear *linear);
enum k3_param k3_linear_input(const struct k3_linear *linear);

// "layers.0.mlp.up_proj" in dst, which it returns.
char *k3_linear_text(const struct k3_linear *linear, char *dst, size_t capacity);

// Scales of a KV cache ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.v_scale", "kv_scale", ...) in the name of a tensor: 'k', 'v', 'q',
// 'b' for both; 0 for none. *stem_nbytes: length of the attention module's name, the same for all spellings.
char k3_kv_scale_of(const char *name, size_t nbytes, size_t *stem_nbytes);

#endif
