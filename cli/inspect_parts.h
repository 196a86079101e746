// Between the files of inspect: the geometry of a drafter as text and as JSON.
#ifndef K3_CLI_INSPECT_PARTS_H
#define K3_CLI_INSPECT_PARTS_H

#include "cli/cli.h"
#include "loader/ckpt.h"

// The geometry of a drafter: an image's from its manifest, a checkpoint's from a config.json that makes sense. False when there is none.
bool k3_inspect_model(const struct k3_ckpt *ckpt, struct k3_dspark_model *model);
void k3_inspect_print_model(const struct k3_dspark_model *model);
void k3_inspect_json_model(struct k3_jsonw *json, const struct k3_dspark_model *model);

struct k3_inspect_parallel {
  uint64_t tp, pp;
  bool sequence_parallel;  // asked for
  const char *taps;        // "2,30,58": streams after so many layers; or NULL
};
// --reductions: derives, verifies and prints the reduction plan of an image, or of a checkpoint as its recipe would pack it. Returns the exit code.
int k3_inspect_reductions(struct k3_cli *cli, const struct k3_ckpt *ckpt, const struct k3_inspect_parallel *asked);

#endif
