#include "loader/export.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE -o DIR",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Writes the original checkpoint back: every safetensors file, its index, config.json and the other JSON files, byte for byte. Where that is\n"
        "not possible (tensors were dropped or replaced on the way in) it refuses and says which.",
    .examples = "  k3pack export drafter.k3p -o drafter-again/",
};

int k3_cmd_export(struct k3_cli *cli, int argc, char **argv) {
  const char *folder = NULL;
  struct k3_export_options export = {.progress = &cli->progress};
  int format = 0;
  const struct k3_option options[] = {
      {"output", 'o', K3_OPT_TEXT, "DIR", "the folder to write", &folder},
      {"format", 0, K3_OPT_CHOICE, "original", "what to write (default original)", &format},
      {"force", 'f', K3_OPT_FLAG, NULL, "replace files of these names in DIR", &export.replace},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (!folder)
    return k3_cli_usage(cli, "name the folder to write with -o DIR");
  struct k3_error err = {0};
  struct k3_export_result result;
  export.n_threads = cli->n_threads;
  if (k3_export_original(cli->operands[0], folder, &export, &result, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_string(&json, "folder", folder);
    k3_jsonw_u64(&json, "files", result.n_files);
    k3_jsonw_u64(&json, "nbytes", result.nbytes);
    return k3_cli_json_end(cli, &json, 0);
  }
  char size[32], name[512];
  if (!cli->quiet)
    printf("%s: %llu files, %s\n", k3_printable(name, sizeof name, folder, strlen(folder), 400), (unsigned long long)result.n_files,
           k3_cli_size_text(size, result.nbytes));
  return 0;
}
