#include "loader/synth.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "DIR --preset NAME",
    .n_max = 1,
    .about =
        "Writes a synthetic checkpoint into DIR: names, shapes and config.json of a real model, random weights of a plausible size. Equal options "
        "give\n"
        "equal bytes on every machine. `k3pack synth` alone lists the presets.",
    .examples =
        "  k3pack synth demo --preset tiny                       a drafter that converts in milliseconds\n"
        "  k3pack synth demo --preset tiny --shards 3 --force    the same weights in three shards with an index\n"
        "  k3pack synth demo-target --preset tiny-target         the target model that it borrows from\n"
        "  k3pack synth demo-fp4 --preset tiny --quant nvfp4     quantised, every matrix with a second scale of its own\n"
        "  k3pack synth k3 --preset k3-dspark                    the published geometry, 7.1 GB",
};

static const enum k3_dtype dtypes[] = {K3_DTYPE_BF16, K3_DTYPE_F16, K3_DTYPE_F32};

static const enum k3_scheme schemes[] = {K3_SCHEME_BF16,  K3_SCHEME_FP8_CHANNEL, K3_SCHEME_FP8_TENSOR, K3_SCHEME_FP8_BLOCK,
                                         K3_SCHEME_MXFP8, K3_SCHEME_NVFP4,       K3_SCHEME_MXFP4};

static int list_presets(struct k3_cli *cli) {
  const char *name, *about;
  if (!cli->json) {
    for (size_t i = 0; (name = k3_synth_preset_name(i, &about)); i++)
      printf("%-24s %s\n", name, about);
    return 0;
  }
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_begin_array(&json, "presets");
  for (size_t i = 0; (name = k3_synth_preset_name(i, &about)); i++) {
    k3_jsonw_begin_object(&json, NULL);
    k3_jsonw_string(&json, "name", name);
    k3_jsonw_string(&json, "about", about);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}

int k3_cmd_synth(struct k3_cli *cli, int argc, char **argv) {
  struct k3_synth_options synth = {.progress = &cli->progress};
  int dtype = 0, scheme = 0, dialect = 0, share = 0;
  const struct k3_option options[] = {
      {"preset", 0, K3_OPT_TEXT, "NAME", "which model", &synth.preset},
      {"shards", 0, K3_OPT_U64, "N", "number of safetensors files (default: the preset's); above 1 with an index", &synth.n_shards},
      {"seed", 0, K3_OPT_U64, "N", "of the random weights (default 0)", &synth.seed},
      {"dtype", 0, K3_OPT_CHOICE, "bf16|f16|f32", "of the weights (default bf16)", &dtype},
      {"root", 0, K3_OPT_TEXT, "PREFIX", "put in front of every name, such as model.", &synth.root},
      {"quant", 0, K3_OPT_CHOICE, "none|fp8|fp8-tensor|fp8-block|mxfp8|nvfp4|mxfp4", "quantise the projections (fp8: a scale per row)", &scheme},
      {"dialect", 0, K3_OPT_CHOICE, "compressed-tensors|modelopt|deepseek", "whose spelling quantised tensors and config have", &dialect},
      {"share", 0, K3_OPT_CHOICE, "none|module|component",
       "second scales: each matrix its own (default), one for a fused module, one for all q_a and kv_a of all layers", &share},
      {"spread", 0, K3_OPT_FLAG, NULL, "members of a fused module differ in magnitude by up to 8 times: the plain twin of a quantised checkpoint",
       &synth.spread},
      {"sparse", 0, K3_OPT_FLAG, NULL, "real headers, holes instead of weights: any size in no time and no space", &synth.sparse},
      {"force", 'f', K3_OPT_FLAG, NULL, "replace the checkpoint that DIR holds", &synth.replace},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (cli->n_operands == 0 && !synth.preset)
    return list_presets(cli);
  if (cli->n_operands == 0 || !synth.preset)
    return k3_cli_usage(cli, cli->n_operands == 0 ? "no folder to write into" : "--preset is missing; `k3pack synth` lists the presets");
  synth.dtype = dtypes[dtype];
  synth.scheme = schemes[scheme];
  synth.dialect = (enum k3_synth_dialect)dialect;
  synth.share = (enum k3_synth_share)share;
  synth.n_threads = cli->n_threads;
  struct k3_synth_report report = {0};
  struct k3_error err = {0};
  if (k3_synth_write(cli->operands[0], &synth, &report, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_string(&json, "folder", cli->operands[0]);
    k3_jsonw_string(&json, "preset", synth.preset);
    k3_jsonw_u64(&json, "seed", synth.seed);
    k3_jsonw_u64(&json, "files", report.n_files);
    k3_jsonw_u64(&json, "tensors", report.n_tensors);
    k3_jsonw_u64(&json, "parameters", report.n_params);
    k3_jsonw_u64(&json, "weights_nbytes", report.weights_nbytes);
    k3_jsonw_u64(&json, "files_nbytes", report.files_nbytes);
    return k3_cli_json_end(cli, &json, 0);
  }
  char size[32], name[512];
  if (!cli->quiet)
    printf("%s: %llu file%s, %llu tensors, %llu parameters, %s\n", k3_printable(name, sizeof name, cli->operands[0], strlen(cli->operands[0]), 400),
           (unsigned long long)report.n_files, report.n_files == 1 ? "" : "s", (unsigned long long)report.n_tensors,
           (unsigned long long)report.n_params, k3_cli_size_text(size, report.files_nbytes));
  return 0;
}
