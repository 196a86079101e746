// Synthetic mixtures of experts: MiniMax-M3, DeepSeek-V3.2 and Kimi K3, in every storage form in which they are published.
#ifndef K3_LOADER_SYNTH_MOE_H
#define K3_LOADER_SYNTH_MOE_H

#include "formats/json_write.h"
#include "loader/synth_parts.h"

enum k3_synth_family { K3_SYNTH_M3, K3_SYNTH_V32, K3_SYNTH_K3 };

// How the quantised modules are stored.
enum k3_synth_form {
  K3_SYNTH_FORM_PLAIN,
  K3_SYNTH_FORM_MXFP8,      // every projection: `weight` E4M3, `weight_scale_inv` U8 [N, K/32]
  K3_SYNTH_FORM_FP8_BLOCK,  // every projection: `weight` E4M3, `weight_scale_inv` F32, one per block
  K3_SYNTH_FORM_MXFP4,      // routed experts: `weight_packed`, `weight_scale` U8
  K3_SYNTH_FORM_QUARK,      // routed experts: `weight` U8, `weight_scale` U8
  K3_SYNTH_FORM_NVFP4,      // routed experts: `weight` U8, `weight_scale` E4M3, `weight_scale_2`, `input_scale`; the rest by family: MXFP8 with
                            // `weight_scale`, or FP8 with 4-D block scales in attention
};

struct k3_synth_moe {
  enum k3_synth_family family;
  enum k3_synth_form form;
  bool vision, mtp;
  bool native;         // MiniMax-M3 in the transformers-native spelling of names and config
  bool places;         // tensors choose their shard
  int n_count_digits;  // of the shard count in file names
};

enum { K3_SYNTH_N_MOE_PRESETS = 19 };
extern const struct k3_synth_preset K3_SYNTH_MOE_PRESETS[K3_SYNTH_N_MOE_PRESETS];

// Appends the preset's tensors, their shards set where the model places them.
enum k3_status k3_synth_moe_list(const struct k3_synth_preset *preset, const char *root, enum k3_dtype dtype, struct k3_synth_list *list,
                                 struct k3_error *err);
// The text of config.json in new memory (free with k3_free).
char *k3_synth_moe_config(const struct k3_synth_preset *preset, enum k3_dtype dtype, struct k3_error *err);
// Value of a symbol of a preset; 0 when it has none of that name.
uint64_t k3_synth_symbol_value(const struct k3_synth_preset *preset, const char *name);

#endif
