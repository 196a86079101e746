// Synthetic checkpoints: the names, shapes and config of a real model with random weights, for tests, demonstrations and measurements.
// The bytes depend on preset, seed, dtype, root and shard count alone, not on threads, compiler or machine.
#ifndef K3_LOADER_SYNTH_H
#define K3_LOADER_SYNTH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/error.h"
#include "base/progress.h"

struct k3_synth_options {
  const char *preset;  // name of a row of k3_synth_preset_name
  uint64_t n_shards;   // 0: the preset's own number; 1: model.safetensors alone, without an index
  uint64_t seed;
  enum k3_dtype dtype;           // of the weights: BF16, F16 or F32
  const char *root;              // put in front of every tensor name, "" or NULL: nothing
  bool sparse;                   // headers are real, the weights are holes of the file (zeros)
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
// K3_BAD_ARGUMENT: no such preset (allowed names them), another dtype, more shards than tensors. K3_EXISTS with OUT01: the folder holds a checkpoint
// and `replace` is false. K3_IO, K3_NO_SPACE. On failure the folder is as before, unless old files were being
// replaced and the disk failed while the complete new ones got their names. report may be NULL.
enum k3_status k3_synth_write(const char *folder, const struct k3_synth_options *options, struct k3_synth_report *report, struct k3_error *err);

#endif
