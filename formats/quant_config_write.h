// The statements about quantisation that a checkpoint carries, written: "quantization_config" of config.json in either dialect, and ModelOpt's
// hf_quant_config.json. One scheme for all quantised linear layers.
//   compressed-tensors  NVFP4 and MXFP4 are weight-only unless scales of the inputs are stored (NVFP4); MXFP8 and FP8 ask for dynamic scales of the
//                       inputs, per token (channel), per group of 128 (blocks) or 32 (MXFP8), which need nothing stored
//   modelopt            NVFP4 or W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN
#ifndef K3_FORMATS_QUANT_CONFIG_WRITE_H
#define K3_FORMATS_QUANT_CONFIG_WRITE_H

#include "formats/quant_config.h"

struct k3_quant_statement {
  enum k3_quant_dialect dialect;  // COMPRESSED_TENSORS or MODELOPT
  const char *scheme;             // "nvfp4", "mxfp4", "mxfp8", "fp8-tensor", "fp8-channel", "fp8-block"
  bool stored_inputs;             // scales of the inputs stand beside the weights
  const char *const *ignore;      // [n_ignore] patterns of the dialect: names and "re:...", or globs
  size_t n_ignore;
};

// Whether a dialect can say the scheme.
bool k3_quant_statement_possible(enum k3_quant_dialect dialect, const char *scheme);

// config.json with the statement as its "quantization_config": everything else is kept, keys come sorted, statements of the text it had (also those
// below text_config, and "compression_config") are replaced. config NULL: an object of that one key. Indented text in new memory, free with k3_free.
// NULL and *err on failure.
char *k3_quant_config_text(const char *config, size_t nbytes, const struct k3_quant_statement *statement, struct k3_error *err);
// hf_quant_config.json, for MODELOPT; likewise.
char *k3_hf_quant_config_text(const struct k3_quant_statement *statement, struct k3_error *err);

#endif
