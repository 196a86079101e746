// The weights of an earlier checkpoint in a folder that gets a new one: whoever reads the folder later must not find parts of both.
#ifndef K3_LOADER_OLD_WEIGHTS_H
#define K3_LOADER_OLD_WEIGHTS_H

#include "loader/ckpt_parts.h"

// Before anything is written. K3_EXISTS with OUT01 when the folder holds safetensors files, an index or hf_quant_config.json and `replace` is false;
// with `replace`, only when one of them is neither about to be replaced (names, sorted) nor called as checkpoints are ("model...": somebody else's file is
// never removed, and would spoil the new checkpoint). A folder that is not there is fine.
enum k3_status k3_old_weights_refuse(const char *folder, bool replace, const struct k3_names *names, struct k3_error *err);

// After the new files have their names (sorted): removes the old ones that are not among them.
enum k3_status k3_old_weights_remove(const char *folder, const struct k3_names *names, struct k3_error *err);

#endif
