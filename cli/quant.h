// What convert says about encoding: the options of --quant and the account of what it cost.
#ifndef K3_CLI_QUANT_H
#define K3_CLI_QUANT_H

#include "cli/cli.h"
#include "loader/requantise.h"

struct k3_quant_options {
  int quant, share, scale_mode;  // choices, see the table
  struct k3_cli_list ignore, include;
};

// Rows of an option table for the struct `quant`.
#define K3_QUANT_OPTIONS(options)                                                                                                                     \
  {"quant",                                                                                                                                           \
   0,                                                                                                                                                 \
   K3_OPT_CHOICE,                                                                                                                                     \
   "keep|fp8|fp8-block|mxfp8|nvfp4|mxfp4",                                                                                                            \
   "encode the linear layers (fp8: a scale per row; fp8-block: per tile of 128 x 128); default keep",                                                 \
   &(options).quant},                                                                                                                                 \
      {"share",                                                                                                                                       \
       0,                                                                                                                                             \
       K3_OPT_CHOICE,                                                                                                                                 \
       "component|module",                                                                                                                            \
       "which weights share the second scale of nvfp4: all that fused tensors and views tie together (default; any engine loads that exactly), or "   \
       "the members of one fused tensor",                                                                                                             \
       &(options).share},                                                                                                                             \
      {"scale-mode",         0, K3_OPT_CHOICE, "default|pow2", "pow2: second scales of nvfp4 are powers of two, so that their reciprocals are exact", \
       &(options).scale_mode},                                                                                                                        \
      {"ignore",                                                                                                                                      \
       0,                                                                                                                                             \
       K3_OPT_LIST,                                                                                                                                   \
       "PATTERN",                                                                                                                                     \
       "modules to leave plain, as in the ignore list of a quantization config: a whole name, or re: and a regular expression; may be repeated",      \
       &(options).ignore},                                                                                                                            \
  {                                                                                                                                                   \
    "include", 0, K3_OPT_LIST, "PATTERN",                                                                                                             \
        "linear layers to encode although they are left plain by default: kv_b_proj, lm_head, markov_w2, routers, the confidence head; may be "       \
        "repeated",                                                                                                                                   \
        &(options).include                                                                                                                            \
  }

// False for --quant keep. On wrong usage (another of these options with keep) prints a message and stores the exit code.
bool k3_quant_asked(struct k3_cli *cli, const struct k3_quant_options *options, struct k3_requant_options *requant, int *exit_code);

// The account: a line and, with --verbose, one per tensor; or the member "quant" of the JSON object.
void k3_quant_report(struct k3_cli *cli, const struct k3_plan *plan);
void k3_quant_report_json(struct k3_jsonw *json, const struct k3_plan *plan);

#endif
