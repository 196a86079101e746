// The verbs of the program: X(name, one line of help). The name gives the function k3_cmd_<name> and the file cli/<name>.c.
#ifndef K3_CLI_VERBS_H
#define K3_CLI_VERBS_H

#include "cli/cli.h"

#define K3_VERBS(X)                                                       \
  X(convert, "packs a checkpoint into an image")                          \
  X(check, "says everything that is wrong with a checkpoint")             \
  X(verify, "recomputes every digest of an image and its seal")           \
  X(export, "writes the original files back, byte for byte")              \
  X(inspect, "shows tensors, shapes, types, files, shards and views")     \
  X(diff, "says which tensors differ, where and by how much")             \
  X(run, "drafts: the fused forward on a scenario file")                  \
  X(compare, "says what one drafter costs in acceptance against another") \
  X(bench, "times loading and every step of the forward")                 \
  X(synth, "writes a synthetic checkpoint with exact names and shapes")   \
  X(recipes, "lists the recipes, or prints one")                          \
  X(version, "prints the version and what this build can do")             \
  X(help, "prints this text, or the help of a verb")

struct k3_verb {
  const char *name, *summary;
  int (*run)(struct k3_cli *cli, int argc, char **argv);
};
extern const struct k3_verb k3_verbs[];
extern const size_t k3_n_verbs;

#define K3_VERB_DECLARE(name, summary) int k3_cmd_##name(struct k3_cli *cli, int argc, char **argv);
K3_VERBS(K3_VERB_DECLARE)
#undef K3_VERB_DECLARE

#endif
