// Synthetic checkpoints: the names, shapes and config of a real model with random weights, for tests, demonstrations and measurements.
// The bytes depend on preset, seed, dtype, root, shard count and the quantisation alone, not on threads, compiler or machine.
#ifndef K3_LOADER_SYNTH_H
#define K3_LOADER_SYNTH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/error.h"
#include "base/progress.h"
#include "quant/scheme.h"

// Whose spelling a quantised checkpoint has: names and shapes of the companions, and the quantization config.
enum k3_synth_dialect { K3_SYNTH_COMPRESSED_TENSORS, K3_SYNTH_MODELOPT, K3_SYNTH_DEEPSEEK };
// Who shares a second scale (NVFP4) or a per-tensor scale (FP8): nobody; the members of a fused module (q_a with kv_a, gate with up); moreover all
// layers' q_a and kv_a, which the cross-layer projection ties together.
enum k3_synth_share { K3_SYNTH_SHARE_NONE, K3_SYNTH_SHARE_MODULE, K3_SYNTH_SHARE_COMPONENT };

struct k3_synth_options {
  const char *preset;  // name of a row of k3_synth_preset_name
  uint64_t n_shards;   // 0: the preset's own number; 1: model.safetensors alone, without an index
  uint64_t seed;
  enum k3_dtype dtype;           // of the weights: BF16, F16 or F32
  const char *root;              // put in front of every tensor name, "" or NULL: nothing
  bool sparse;                   // headers are real, the weights are holes of the file (zeros)
  bool spread;                   // members of a fused module differ in magnitude by up to 8 times, in both orders; always so when quantised
  enum k3_scheme scheme;         // of the projections: a plain scheme for none, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, MXFP8, NVFP4 or MXFP4
  enum k3_synth_dialect dialect;
  enum k3_synth_share share;
  bool replace;                  // an existing checkpoint in the folder is replaced, files of it that are not written anew are removed
  int n_threads;                 // 0: one per CPU
  struct k3_progress *progress;  // may be NULL; counts bytes
};

struct k3_synth_report {
  uint64_t n_files, n_tensors, n_params;
  uint64_t weights_nbytes;  // sum of the tensors
  uint64_t files_nbytes;    // of the safetensors files
};

// Name and one line of description of preset number `index`; NULL behind the last one. Static storage. about may be NULL.
const char *k3_synth_preset_name(size_t index, const char **about);

// Writes the safetensors files, the index when there are several, and config.json into `folder`, which is created when absent. Every file appears
// whole or not at all, and none before all of them are complete. Memory: 4 MiB a thread and about 300 bytes a tensor.
// A quantised checkpoint holds the encoded values of the plain one with `spread`; kv_b_proj, heads, embeddings and norms stay plain.
// K3_BAD_ARGUMENT: no such preset (allowed names them), a scheme for a mixture of experts, whose forms are presets, another dtype, more shards than tensors, a scheme that the dialect does not have. K3_EXISTS with OUT01: the folder holds a checkpoint
// and `replace` is false. K3_IO, K3_NO_SPACE. On failure the folder is as before, unless old files were being
// replaced and the disk failed while the complete new ones got their names. report may be NULL.
enum k3_status k3_synth_write(const char *folder, const struct k3_synth_options *options, struct k3_synth_report *report, struct k3_error *err);

#endif
