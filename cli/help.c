#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const char opening[] =
    "k3pack turns a safetensors checkpoint into a packed image that a runtime loads with sequential reads: tensors renamed and stacked by a recipe,\n"
    "the cross-layer projection as a view without bytes of its own, every byte under a digest. An image is itself a valid safetensors file.\n"
    "\n"
    "usage: k3pack VERB [options] ...\n";

static const char closing[] =
    "SRC is a folder of HuggingFace files, one .safetensors file, an image, or hf:org/name[@revision] from the local cache.\n"
    "Results go to stdout, progress and findings to stderr; --json makes the results machine-readable.\n"
    "\n"
    "exit codes: 0 done and clean; 1 the answer is \"no\" (check, verify, diff); 2 wrong usage; 3 the input is malformed or incomplete;\n"
    "            4 reading or writing failed; 5 not supported here\n";

static const struct k3_cli_help help = {
    .operands = "[VERB]",
    .n_max = 1,
    .about = "Prints the list of verbs, or what one of them does.",
    .examples = "  k3pack help convert",
};

int k3_cmd_help(struct k3_cli *cli, int argc, char **argv) {
  static const struct k3_option options[] = {{0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (cli->n_operands == 1) {
    for (size_t i = 0; i < k3_n_verbs; i++) {
      if (strcmp(cli->operands[0], k3_verbs[i].name) != 0)
        continue;
      char wants_help[] = "--help", *words[] = {cli->operands[0], wants_help, NULL};
      cli->verb = k3_verbs[i].name;
      return k3_verbs[i].run(cli, 2, words);
    }
    char shown[256];
    return k3_cli_usage(cli, "there is no verb %s", k3_printable(shown, sizeof shown, cli->operands[0], strlen(cli->operands[0]), 60));
  }
  printf("%s\n", opening);
  for (size_t i = 0; i < k3_n_verbs; i++)
    printf("  %-10s %s\n", k3_verbs[i].name, k3_verbs[i].summary);
  printf("\n`k3pack VERB --help` explains a verb, with examples.\n%s", closing);
  return 0;
}
