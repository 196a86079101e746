#include "base/version.h"

#include <stdio.h>

#include "base/cpu.h"
#include "cli/verbs.h"
#include "formats/image.h"

static const struct k3_cli_help help = {
    .operands = "",
    .about = "Prints the version, the version of the image format, and what this machine offers.",
    .examples = "  k3pack version --json",
};

int k3_cmd_version(struct k3_cli *cli, int argc, char **argv) {
  static const struct k3_option options[] = {{0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (cli->json) {
    struct k3_jsonw writer;
    k3_cli_json_begin(cli, &writer);
    k3_jsonw_string(&writer, "version", K3_VERSION);
    k3_jsonw_u64(&writer, "image_version", K3_IMAGE_VERSION);
    k3_jsonw_string(&writer, "simd", k3_simd_name(k3_cpu_simd()));
    k3_jsonw_u64(&writer, "cpus", (uint64_t)k3_cpu_count());
    return k3_cli_json_end(cli, &writer, 0);
  }
  printf("k3pack %s\n", K3_VERSION);
  if (cli->verbose)
    printf("image version %d, simd %s, %d CPUs\n", K3_IMAGE_VERSION, k3_simd_name(k3_cpu_simd()), k3_cpu_count());
  return 0;
}
