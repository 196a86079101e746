// The story of a conversion: open the checkpoint, find the recipe, build the plan, check, stream, seal.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/quant.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "loader/split.h"
#include "loader/writer.h"

static const struct k3_cli_help help = {
    .operands = "SRC -o IMAGE",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Packs a checkpoint into an image: tensors renamed and stacked by a recipe, views that share bytes, every segment under a digest, one seal\n"
        "over all. Refuses a checkpoint in which anything is missing, extra, torn or contradictory (`check` lists all of it). On failure there is no\n"
        "output, and an old output is untouched.",
    .examples =
        "  k3pack convert drafter/ -o drafter.k3p --target kimi-k3/       with the embedding and head that the drafter borrows\n"
        "  k3pack convert drafter/ -o drafter.k3p --dry-run               only the plan: which tensor goes where\n"
        "  k3pack convert drafter/ -o drafter-nvfp4.k3p --quant nvfp4     linear layers encoded, exact for every engine\n"
        "  k3pack convert hf:Inferact/Kimi-K3-DSpark -o drafter.k3p       from the local HuggingFace cache\n"
        "  k3pack convert drafter/ -o drafter-tp8/ --tp 8                 a folder: shared.safetensors and one file for each rank\n"
        "  k3pack convert any/ -o any.k3p --recipe generic                any checkpoint, all names kept",
};

// Exit code for a checkpoint that findings refuse: 5 when it is recognised but not supported, else 3. Files that cannot be read are not recognised.
static int refusal_code(const struct k3_findings *findings) {
  for (int rule = 1; rule < K3_RULE_COUNT; rule++) {
    const char *id = k3_rule_info((enum k3_rule)rule)->id;
    if (findings->n_errors_by_rule[rule] > 0 && (strncmp(id, "CNT", 3) == 0 || strncmp(id, "IDX", 3) == 0))
      return k3_status_exit_code(K3_BAD_INPUT);
  }
  return findings->n_errors_by_rule[K3_CFG21] > 0 ? k3_status_exit_code(K3_UNSUPPORTED) : k3_status_exit_code(K3_BAD_INPUT);
}

static int refuse(struct k3_cli *cli, const struct k3_findings *findings) {
  int exit_code = refusal_code(findings);
  k3_cli_print_findings(cli, findings);
  if (!cli->json)
    return exit_code;
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_bool(&json, "ok", false);
  k3_cli_json_findings(&json, findings);
  return k3_cli_json_end(cli, &json, exit_code);
}

static int compare_by_source(const void *left, const void *right) {
  const struct k3_mapped *a = &(*(const struct k3_plan_shard *const *)left)->mapped, *b = &(*(const struct k3_plan_shard *const *)right)->mapped;
  if (a->of_target != b->of_target)
    return a->of_target ? 1 : -1;
  if (a->tensor != b->tensor)
    return a->tensor < b->tensor ? -1 : 1;
  return (a->param > b->param) - (a->param < b->param);
}

// Where one source tensor goes. A view's second destination shows the same bytes of the image.
static void show_destinations(const struct k3_plan *plan, const struct k3_plan_shard *shard, struct k3_jsonw *json) {
  const struct k3_ckpt *ckpt = k3_plan_ckpt(plan, shard->mapped.of_target);
  const struct k3_st_tensor *source = k3_ckpt_tensor(ckpt, shard->mapped.tensor);
  const struct k3_plan_tensor *tensor = &plan->tensors[shard->plan_tensor];
  struct k3_destination places[2] = {0};
  size_t n_places = 1;
  if (shard->mapped.module < plan->recipe->n_modules)
    n_places = k3_mapper_destinations(&plan->mapper, &shard->mapped, shard->packed, places);
  else
    snprintf(places[0].name, sizeof places[0].name, "%s", tensor->name);
  uint64_t n_rows = tensor->rank ? tensor->shape[0] : 1;
  uint64_t offset = 8 + plan->header_nbytes + tensor->offset + (n_rows ? tensor->nbytes / n_rows * shard->row : 0);
  char name[512];
  if (json) {
    k3_jsonw_begin_object(json, NULL);
    k3_jsonw_string(json, "source", source->name);
    k3_jsonw_string(json, "file", k3_ckpt_file_of(ckpt, shard->mapped.tensor)->name);
    k3_jsonw_bool(json, "of_target", shard->mapped.of_target);
    k3_jsonw_begin_array(json, "destinations");
  } else {
    printf("%s%s\n", k3_cli_name_text(name, source->name), shard->mapped.of_target ? " (of the target)" : "");
  }
  for (size_t i = 0; i < n_places; i++) {
    if (json) {
      k3_jsonw_begin_object(json, NULL);
      k3_jsonw_string(json, places[i].view ? "view" : "tensor", places[i].name);
      if (places[i].stacked)
        k3_jsonw_u64(json, "shard", places[i].shard);
      k3_jsonw_u64(json, "row", shard->row);
      k3_jsonw_u64(json, "n_rows", shard->n_rows);
      k3_jsonw_u64(json, "offset", offset);
      k3_jsonw_u64(json, "nbytes", n_rows ? tensor->nbytes / n_rows * shard->n_rows : 0);
      k3_jsonw_end_object(json);
    } else if (places[i].stacked) {
      printf("  -> %s shard %llu%s\n", k3_cli_name_text(name, places[i].name), (unsigned long long)places[i].shard, places[i].view ? " (view: the same bytes)" : "");
    } else {
      printf("  -> %s\n", k3_cli_name_text(name, places[i].name));
    }
  }
  if (json) {
    k3_jsonw_end_array(json);
    k3_jsonw_end_object(json);
  }
}

static int show_plan(struct k3_cli *cli, struct k3_source *source) {
  const struct k3_plan *plan = &source->plan;
  const struct k3_plan_shard **order = calloc(plan->n_shards + 1, sizeof *order);
  if (!order)
    return k3_cli_usage(cli, "out of memory");
  for (size_t s = 0; s < plan->n_shards; s++)
    order[s] = &plan->shards[s];
  qsort(order, plan->n_shards, sizeof *order, compare_by_source);
  struct k3_jsonw json;
  if (cli->json) {
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_string(&json, "recipe", plan->recipe->name);
    k3_jsonw_u64(&json, "image_nbytes", k3_plan_file_nbytes(plan));
    k3_jsonw_u64(&json, "header_nbytes", plan->header_nbytes);
    k3_jsonw_u64(&json, "segments", plan->n_segments);
    k3_jsonw_begin_array(&json, "tensors");
  }
  for (size_t s = 0; s < plan->n_shards; s++)
    show_destinations(plan, order[s], cli->json ? &json : NULL);
  for (uint64_t t = 0; plan->recipe->keep_names && t < plan->ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(plan->ckpt, t);
    if (cli->json) {
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_string(&json, "source", tensor->name);
      k3_jsonw_begin_array(&json, "destinations");
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_string(&json, "tensor", tensor->name);
      k3_jsonw_u64(&json, "nbytes", tensor->end - tensor->begin);
      k3_jsonw_end_object(&json);
      k3_jsonw_end_array(&json);
      k3_jsonw_end_object(&json);
    } else {
      char name[512];
      printf("%s\n", k3_cli_name_text(name, tensor->name));
    }
  }
  free(order);
  if (!cli->json) {
    char size[32], name[512];
    printf("recipe %s, image of %s, nothing written\n", k3_cli_name_text(name, plan->recipe->name), k3_cli_size_text(size, k3_plan_file_nbytes(plan)));
    return 0;
  }
  k3_jsonw_end_array(&json);
  k3_jsonw_begin_array(&json, "dropped");
  for (size_t i = 0; i < plan->n_dropped; i++) {
    k3_jsonw_begin_object(&json, NULL);
    k3_jsonw_string(&json, "tensor", plan->dropped[i].tensor);
    k3_jsonw_string(&json, "why", plan->dropped[i].why);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  k3_cli_json_findings(&json, &source->findings);
  return k3_cli_json_end(cli, &json, 0);
}

static int report(struct k3_cli *cli, const struct k3_source *source, const char *image, const struct k3_writer_result *result) {
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_string(&json, "image", image);
    k3_jsonw_string(&json, "identity", result->identity);
    k3_jsonw_string(&json, "recipe", source->recipe.name);
    k3_jsonw_u64(&json, "image_nbytes", result->file_nbytes);
    k3_jsonw_u64(&json, "source_nbytes", result->gathered_nbytes);
    k3_jsonw_u64(&json, "dropped", source->plan.n_dropped);
    if (source->plan.requant)
      k3_quant_report_json(&json, &source->plan);
    k3_cli_json_findings(&json, &source->findings);
    return k3_cli_json_end(cli, &json, 0);
  }
  if (!cli->quiet) {
    char size[32], name[512], recipe[512];
    printf("%s: %s, recipe %s, seal %s\n", k3_printable(name, sizeof name, image, strlen(image), 400), k3_cli_size_text(size, result->file_nbytes),
           k3_cli_name_text(recipe, source->recipe.name), result->identity);
    if (source->plan.requant)
      k3_quant_report(cli, &source->plan);
  }
  return 0;
}

// What the image will not hold, and what someone who runs it should know now.
static void say_notes(struct k3_cli *cli, const struct k3_plan *plan) {
  char name[512];
  for (size_t i = 0; i < plan->n_dropped && i < 3; i++)
    k3_cli_note(cli, "dropped: %s (%s)", k3_cli_name_text(name, plan->dropped[i].tensor), plan->dropped[i].why);
  if (plan->n_dropped > 3)
    k3_cli_note(cli, "dropped: %zu tensors in all; the manifest lists them", plan->n_dropped);
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    bool present = false;
    for (size_t s = 0; s < plan->n_shards; s++)
      present |= plan->shards[s].mapped.module == m;
    if (plan->recipe->modules[m].role == K3_ROLE_BORROWED && !present)
      k3_cli_note(cli, "%s is borrowed from the target and not in the image; --target packs it",
                  k3_cli_name_text(name, plan->recipe->modules[m].name));
  }
}

// Chooses what is encoded and measures it. The answer is in the findings.
static enum k3_status prepare_quant(struct k3_cli *cli, const struct k3_requant_options *quant, bool dry_run, struct k3_source *source,
                                    struct k3_error *err) {
  K3_TRY(k3_requant_select(&source->plan, quant, &source->findings, err));
  if (!source->plan.requant || dry_run)
    return K3_OK;
  source->plan.requant->collecting = true;
  return k3_requant_measure(&source->plan, cli->n_threads, &cli->progress, &source->findings, err);
}

static int convert(struct k3_cli *cli, const char *image, const struct k3_requant_options *quant, bool replace, bool dry_run, uint64_t tp,
                   struct k3_source *source) {
  struct k3_error err = {0};
  struct k3_plan *plan = &source->plan;
  if (source->findings.n_errors > 0)
    return refuse(cli, &source->findings);
  if (!dry_run && k3_plan_compare_borrowed(plan, cli->n_threads, &cli->progress, &source->findings, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (quant && prepare_quant(cli, quant, dry_run, source, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (source->findings.n_errors > 0)
    return refuse(cli, &source->findings);
  if (plan->options.source_digest && !dry_run && k3_plan_digest_sources(plan, cli->n_threads, &cli->progress, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  struct k3_writer_options options = {.path = image, .replace = replace, .n_threads = cli->n_threads, .progress = &cli->progress};
  struct k3_writer_result result;
  if (tp > 0 && !dry_run) {
    if (k3_split_write(plan, (uint32_t)tp, &options, &result, &source->findings, &err) != K3_OK)
      return k3_cli_fail(cli, &err);
    if (plan->requant)
      k3_requant_finish(plan, &source->findings);
    k3_cli_print_findings(cli, &source->findings);
    say_notes(cli, plan);
    return report(cli, source, image, &result);
  }
  if (k3_plan_layout(plan, &source->findings, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (source->findings.n_errors > 0)
    return refuse(cli, &source->findings);
  if (dry_run) {
    k3_cli_print_findings(cli, &source->findings);
    return show_plan(cli, source);
  }
  if (k3_writer_run(plan, &options, &result, &source->findings, &err) != K3_OK)
    return k3_cli_fail(cli, &err);
  if (plan->requant)
    k3_requant_finish(plan, &source->findings);
  k3_cli_print_findings(cli, &source->findings);
  say_notes(cli, plan);
  return report(cli, source, image, &result);
}

int k3_cmd_convert(struct k3_cli *cli, int argc, char **argv) {
  struct k3_source_options from = {0};
  struct k3_check_options check = {.depth = K3_DEPTH_SCALES, .plan = {.digests = true}};
  const char *image = NULL;
  bool dry_run = false, replace = false, no_digests = false;
  struct k3_quant_options quant = {0};
  struct k3_requant_options requant;
  uint64_t tp = 0;
  const struct k3_option options[] = {
      {"output", 'o', K3_OPT_TEXT, "IMAGE", "the image to write", &image},
      K3_SOURCE_OPTIONS(from),
      K3_QUANT_OPTIONS(quant),
      {"dry-run", 'n', K3_OPT_FLAG, NULL, "print the plan (every source tensor with its destinations) from headers alone, write nothing", &dry_run},
      {"tp", 0, K3_OPT_U64, "N", "write a folder for N tensor-parallel ranks: what they share, and a file with the slices of each", &tp},
      {"force", 'f', K3_OPT_FLAG, NULL, "replace an existing output", &replace},
      {"source-digest", 0, K3_OPT_FLAG, NULL, "record the SHA-256 of every source file (reads the sources a second time)", &check.plan.source_digest},
      {"no-digests", 0, K3_OPT_FLAG, NULL, "leave the segment digests out: faster, but verify can then prove the front only", &no_digests},
      {"crc", 0, K3_OPT_FLAG, NULL, "add a CRC-32 of every segment, cheap enough to check while loading", &check.plan.crc},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (dry_run)
    check.depth = K3_DEPTH_HEADERS;  // the plan follows from headers alone, and is to be had in no time at any size
  if (!image && !dry_run)
    return k3_cli_usage(cli, "name the output with -o IMAGE, or look at the plan with --dry-run");
  if (tp > K3_MANIFEST_MAX_RANKS)
    return k3_cli_usage(cli, "--tp takes at most %d ranks", K3_MANIFEST_MAX_RANKS);
  if (tp > 0 && dry_run)
    return k3_cli_usage(cli, "--dry-run shows the whole image; --tp cuts it afterwards");
  bool encode = k3_quant_asked(cli, &quant, &requant, &exit_code);
  if (exit_code != 0)
    return exit_code;
  check.plan.digests = !no_digests;
  check.plan.encode = encode;
  struct k3_source source;
  if (k3_source_open(cli, cli->operands[0], &from, &check, &source, &exit_code)) {
    if (source.ckpt.image.bytes)
      exit_code = k3_cli_usage(cli, "%s is a packed image already", cli->operands[0]);
    else
      exit_code = convert(cli, image, encode ? &requant : NULL, replace, dry_run, tp, &source);
  }
  k3_source_close(&source);
  return exit_code;
}
