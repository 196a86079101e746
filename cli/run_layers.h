// run --layers: decoder layers of a packed MiniMax-M3 or DeepSeek-V3.2 on given hidden states.
#ifndef K3_CLI_RUN_LAYERS_H
#define K3_CLI_RUN_LAYERS_H

#include "cli/cli.h"
#include "cli/ranks.h"

struct k3_run_layers {
  const char *image, *input, *output;
  const char *layers;  // "I..J" or "I"
  const char *taps;    // "0,2,4", or NULL
  struct k3_ranks_options ranks;
  bool sequence_parallel;
  bool force;
};

// The exit code.
int k3_run_layers(struct k3_cli *cli, const struct k3_run_layers *options);

#endif
