// The way back: from an image to the files it was made of, byte for byte.
#ifndef K3_LOADER_EXPORT_H
#define K3_LOADER_EXPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/progress.h"

struct k3_export_options {
  bool replace;                  // files of that name in the folder are replaced
  int n_threads;                 // 0: one per CPU
  struct k3_progress *progress;  // may be NULL
};

struct k3_export_result {
  uint64_t n_files, nbytes;
};

// Writes the checkpoint's safetensors files and JSON files into `folder` (created when absent; must hold none of these names unless `replace`).
// K3_UNSUPPORTED, naming them, when tensors were dropped or replaced on the way into the image: then the original bytes are not all there.
// On failure none of the files is there, and a folder that was created is removed.
enum k3_status k3_export_original(const char *image, const char *folder, const struct k3_export_options *options, struct k3_export_result *result,
                                  struct k3_error *err);

#endif
