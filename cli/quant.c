#include "cli/quant.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const enum k3_scheme schemes[] = {K3_SCHEME_BF16,  K3_SCHEME_FP8_CHANNEL, K3_SCHEME_FP8_BLOCK,
                                         K3_SCHEME_MXFP8, K3_SCHEME_NVFP4,       K3_SCHEME_MXFP4};

bool k3_quant_asked(struct k3_cli *cli, const struct k3_quant_options *options, struct k3_requant_options *requant, int *exit_code) {
  *exit_code = 0;
  *requant = (struct k3_requant_options){.scheme = schemes[options->quant],
                                         .share = options->share == 1 ? K3_SHARE_MODULE : K3_SHARE_COMPONENT,
                                         .pow2 = options->scale_mode == 1,
                                         .ignore = options->ignore.items,
                                         .n_ignore = options->ignore.n_items,
                                         .include = options->include.items,
                                         .n_include = options->include.n_items};
  if (options->quant > 0 && requant->scheme != K3_SCHEME_NVFP4 && (options->share || options->scale_mode))
    *exit_code = k3_cli_usage(cli, "--share and --scale-mode are about second scales, which only --quant nvfp4 has");
  if (options->quant == 0 && (options->share || options->scale_mode || options->ignore.n_items || options->include.n_items))
    *exit_code = k3_cli_usage(cli, "--share, --scale-mode, --ignore and --include need --quant");
  return options->quant > 0;
}

static const char *source_name(const struct k3_plan *plan, const struct k3_requant_item *item) {
  return k3_ckpt_tensor(item->of_target ? plan->target : plan->ckpt, item->tensor)->name;
}

// All tensors together, and the worst one.
static const struct k3_requant_item *sum_up(const struct k3_requant *requant, struct k3_snr *total) {
  const struct k3_requant_item *worst = NULL;
  *total = (struct k3_snr){0};
  for (size_t i = 0; i < requant->n_items; i++) {
    const struct k3_requant_item *item = &requant->items[i];
    k3_snr_merge(total, &item->snr);
    if (!worst || k3_snr_relative_rmse(&item->snr) > k3_snr_relative_rmse(&worst->snr))
      worst = item;
  }
  return worst;
}

enum { MAX_LISTED = 200 };  // tensors that are printed one by one without --verbose

void k3_quant_report(struct k3_cli *cli, const struct k3_plan *plan) {
  const struct k3_requant *requant = plan->requant;
  char name[512];
  for (size_t i = 0; i < requant->n_kept && (i < 3 || cli->verbose); i++)
    k3_cli_note(cli, "stays plain: %s (columns no multiple of %u)", k3_cli_name_text(name, requant->kept[i]), requant->scheme.block_cols);
  if (requant->n_kept > 3 && !cli->verbose)
    k3_cli_note(cli, "stays plain: %zu weights in all", requant->n_kept);
  if (cli->quiet)
    return;
  bool is_listed = cli->verbose || requant->n_items <= MAX_LISTED;
  if (is_listed)
    printf("      SNR  relative RMSE  largest error  weight\n");
  for (size_t i = 0; is_listed && i < requant->n_items; i++) {
    const struct k3_requant_item *item = &requant->items[i];
    printf("%6.2f dB  %13.4f  %13.4g  %s\n", k3_snr_decibel(&item->snr), k3_snr_relative_rmse(&item->snr), item->snr.max_error,
           k3_cli_name_text(name, source_name(plan, item)));
  }
  struct k3_snr total;
  const struct k3_requant_item *worst = sum_up(requant, &total);
  printf("%zu weights to %s: SNR %.2f dB, relative RMSE %.4f; worst %.2f dB, %s%s\n", requant->n_items, k3_scheme_name(requant->scheme.scheme),
         k3_snr_decibel(&total), k3_snr_relative_rmse(&total), k3_snr_decibel(&worst->snr), k3_cli_name_text(name, source_name(plan, worst)),
         is_listed ? "" : " (--verbose lists them all)");
}

static void put_snr(struct k3_jsonw *json, const struct k3_snr *snr) {
  k3_jsonw_double(json, "snr_db", k3_snr_decibel(snr));
  k3_jsonw_double(json, "relative_rmse", k3_snr_relative_rmse(snr));
  k3_jsonw_double(json, "max_error", snr->max_error);
}

void k3_quant_report_json(struct k3_jsonw *json, const struct k3_plan *plan) {
  const struct k3_requant *requant = plan->requant;
  struct k3_snr total;
  sum_up(requant, &total);
  k3_jsonw_begin_object(json, "quant");
  k3_jsonw_string(json, "scheme", k3_scheme_name(requant->scheme.scheme));
  put_snr(json, &total);
  k3_jsonw_begin_array(json, "tensors");
  for (size_t i = 0; i < requant->n_items; i++) {
    const struct k3_requant_item *item = &requant->items[i];
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "tensor", source_name(plan, item));
    put_snr(json, &item->snr);
    if (requant->scheme.scheme == K3_SCHEME_NVFP4) {
      const struct k3_nvfp4_window *window = &item->window;
      k3_jsonw_float(json, "amax", item->amax);
      k3_jsonw_float(json, "second_scale", item->second);
      k3_jsonw_u64(json, "set", item->set);
      k3_jsonw_u64(json, "blocks", window->n_blocks);
      k3_jsonw_u64(json, "subnormal_blocks", window->n_subnormal + window->n_lowest);
      k3_jsonw_u64(json, "lost_blocks", window->n_lost);
    }
    k3_jsonw_end_object(json);
  }
  k3_jsonw_end_array(json);
  k3_jsonw_begin_array(json, "kept");
  for (size_t i = 0; i < requant->n_kept; i++)
    k3_jsonw_string(json, NULL, requant->kept[i]);
  k3_jsonw_end_array(json);
  k3_jsonw_end_object(json);
}
