#include "loader/export.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"
#include "loader/split.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE -o DIR",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Writes the original checkpoint back: every safetensors file, its index, config.json and the other JSON files, byte for byte. Where that is\n"
        "not possible (tensors were dropped, replaced or encoded on the way in) it refuses and says which. An image with quantised weights can also "
        "be\n"
        "written as a checkpoint that engines load: tensors under the names of the source, config files with the quantisation.",
    .examples =
        "  k3pack export drafter.k3p -o drafter-again/\n"
        "  k3pack export drafter-nvfp4.k3p -o drafter-nvfp4/ --format compressed-tensors\n",
};

int k3_cmd_export(struct k3_cli *cli, int argc, char **argv) {
  const char *folder = NULL;
  struct k3_export_options export = {.progress = &cli->progress};
  int format = 0;
  const struct k3_option options[] = {
      {"output", 'o', K3_OPT_TEXT, "DIR", "the folder to write", &folder},
      {"format", 0, K3_OPT_CHOICE, "original|compressed-tensors|modelopt", "what to write (default original)", &format},
      {"force", 'f', K3_OPT_FLAG, NULL, "replace files of these names in DIR, and remove the weights of an older checkpoint there", &export.replace},
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
  const char *image = cli->operands[0];
  enum k3_status status = k3_may_be_image(image, &err);
  if (status == K3_OK && format == 0)
    status = k3_export_original(image, folder, &export, &result, &err);
  else if (status == K3_OK)
    status = k3_export_checkpoint(image, folder, format == 1 ? K3_DIALECT_COMPRESSED_TENSORS : K3_DIALECT_MODELOPT, &export, &result, &err);
  if (status != K3_OK)
    return k3_cli_fail(cli, &err);
  if (result.n_left_out > 0)
    k3_cli_note(cli, "%llu tensors of the source are not in the image, and so not in the checkpoint", (unsigned long long)result.n_left_out);
  if (result.n_rounded > 0)
    k3_cli_note(cli, "%llu second scales are reciprocals, rounded once; `convert --scale-mode pow2` makes them exact",
                (unsigned long long)result.n_rounded);
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_string(&json, "folder", folder);
    k3_jsonw_u64(&json, "files", result.n_files);
    k3_jsonw_u64(&json, "nbytes", result.nbytes);
    k3_jsonw_u64(&json, "left_out", result.n_left_out);
    k3_jsonw_u64(&json, "rounded", result.n_rounded);
    return k3_cli_json_end(cli, &json, 0);
  }
  char size[32], name[512];
  if (!cli->quiet)
    printf("%s: %llu files, %s\n", k3_printable(name, sizeof name, folder, strlen(folder), 400), (unsigned long long)result.n_files,
           k3_cli_size_text(size, result.nbytes));
  return 0;
}
