// `check --rules`: the catalogue in words.
#ifndef K3_CLI_RULES_H
#define K3_CLI_RULES_H

#include "cli/cli.h"

// Prints the rules named (none: all of them) with severity per engine, cost, why they matter and what to do. Returns the exit code.
int k3_cli_print_rules(struct k3_cli *cli, char **ids, size_t n_ids);

#endif
