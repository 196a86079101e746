// The way back: from an image to the files it was made of, byte for byte, or to a checkpoint of its quantised weights.
#ifndef K3_LOADER_EXPORT_H
#define K3_LOADER_EXPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/progress.h"
#include "formats/quant_config.h"

struct k3_export_options {
  bool replace;                  // files of that name in the folder are replaced
  int n_threads;                 // 0: one per CPU
  struct k3_progress *progress;  // may be NULL
};

struct k3_export_result {
  uint64_t n_files, nbytes;
  uint64_t n_left_out;  // source tensors that the image does not hold
  uint64_t n_rounded;   // second scales whose reciprocal had to be rounded
};

// Writes the checkpoint's safetensors files and JSON files into `folder` (created when absent; must hold none of these names unless `replace`).
// K3_UNSUPPORTED, naming them, when tensors were dropped or replaced on the way into the image: then the original bytes are not all there.
// The image's digests are checked first (a second read): K3_BAD_INPUT with IMG02 when a byte differs from what was written. On failure none of the
// files is there, and a folder that was created is removed.
enum k3_status k3_export_original(const char *image, const char *folder, const struct k3_export_options *options, struct k3_export_result *result,
                                  struct k3_error *err);

// Writes an image with quantised weights as a checkpoint of the dialect (COMPRESSED_TENSORS or MODELOPT): the source's files with its tensors under
// their names, unfused, each quantised weight as its parameters; config.json with a quantization_config whose patterns hold no layer numbers where
// that is possible (hf_quant_config.json too for MODELOPT); an index when there are several files; other JSON files verbatim. Weights that were
// quantised in the source are relabelled: only the direction of second scales differs, and 1/x is exact for powers of two and rounded once otherwise
// (n_rounded counts those). K3_UNSUPPORTED for a scheme that the dialect does not have, several schemes, no quantised weight at all.
enum k3_status k3_export_checkpoint(const char *image, const char *folder, enum k3_quant_dialect dialect, const struct k3_export_options *options,
                                    struct k3_export_result *result, struct k3_error *err);

#endif
