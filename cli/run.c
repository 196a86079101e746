// The fused forward on a scenario file: open the image, check the scenario, append the context, draft, write what was asked for.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "cli/drafter.h"
#include "cli/run_layers.h"
#include "cli/verbs.h"
#include "formats/safetensors.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE --input IN -o OUT",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Runs the drafter of a packed image: target states become context rows, each request's anchor becomes a block of drafts. IN is a "
        "safetensors\n"
        "file with target_states, positions, request_ids, anchor_ids and anchor_positions. OUT receives the tensors that --emit names: "
        "context_states,\n"
        "context_kv, hidden, base_logits, logits, draft_ids, confidence, or all of them; confidence only where the image has a head for it.\n\n"
        "--layers runs decoder layers of a packed MiniMax-M3 or DeepSeek-V3.2 instead. IN then holds hidden_states, positions and request_ids (and,\n"
        "behind other layers, their residual); OUT receives hidden_states (what the last layer adds), residual (the stream before that), behind the\n"
        "model's last layer final_hidden_states, and a tensor taps.K for each --taps.\n\n"
        "--tp N computes on N ranks. They are threads of this process, or, where a launcher sets WORLD_SIZE above 1, one process each: RANK,\n"
        "LOCAL_RANK (which GPU), MASTER_ADDR and MASTER_PORT (where rank 0 listens until all have come) are read then, and rank 0 writes OUT. How "
        "GPUs\n"
        "add up is in --json and --verbose; K3PACK_SUMS=one-shot, two-shot or explicit asks for one way.",
    .examples =
        "  k3pack run drafter.k3p --input scenario.safetensors -o drafts.safetensors\n"
        "  k3pack run drafter.k3p --input scenario.safetensors -o all.safetensors --emit all --threads 4\n"
        "  k3pack run m3.k3p --layers 0..3 --input states.safetensors -o out.safetensors --tp 2\n"
        "  RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 k3pack run drafter.k3p --input scenario.safetensors -o drafts.safetensors\n"
        "  torchrun --no-python --nproc-per-node 8 env MASTER_PORT=29511 k3pack run drafter.k3p --input IN -o OUT --backend cuda",
};

// Parses "draft_ids,confidence" or "all" into a set of outputs. False names the word that is none.
static bool parse_emit(const char *list, unsigned *wanted, char *word, size_t capacity) {
  *wanted = 0;
  while (*list) {
    size_t n = strcspn(list, ",");
    snprintf(word, capacity, "%.*s", (int)n, list);
    unsigned found = strcmp(word, "all") == 0 ? (1u << K3_N_DRAFT_OUTPUTS) - 1 : 0;
    for (unsigned i = 0; i < K3_N_DRAFT_OUTPUTS; i++)
      if (strcmp(word, k3_draft_output_name(i)) == 0)
        found |= 1u << i;
    if (!found)
      return false;
    *wanted |= found;
    list += n + (list[n] == ',');
  }
  return *wanted != 0;
}

struct sink {
  int fd;
  uint64_t offset;
  const char *path;
};

static enum k3_status put(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct sink *sink = ctx;
  K3_TRY(k3_pwrite_full(sink->fd, bytes, nbytes, sink->offset, sink->path, err));
  sink->offset += nbytes;
  return K3_OK;
}

static uint64_t output_nbytes(unsigned output, const struct k3_engine_info *info, const struct k3_scenario *scenario, uint64_t dims[3],
                              unsigned *rank) {
  uint64_t nbytes = output == K3_DRAFT_draft_ids ? sizeof(int64_t) : sizeof(float);
  *rank = k3_draft_output_shape(output, info, scenario, dims);
  for (unsigned d = 0; d < *rank; d++)
    nbytes *= dims[d];
  return nbytes;
}

// 8-byte elements first, so that every tensor is aligned.
static enum k3_status write_header(const struct k3_engine_info *info, const struct k3_scenario *scenario, const struct k3_drafts *drafts,
                                   uint64_t padded, struct sink *sink, uint64_t *h, struct k3_error *err) {
  struct k3_st_writer writer;
  uint64_t begin = 0;
  k3_st_write_begin(&writer, sink ? put : NULL, sink);
  for (int pass = 0; pass < 2; pass++)
    for (unsigned i = 0; i < K3_N_DRAFT_OUTPUTS; i++) {
      uint64_t dims[3];
      unsigned rank;
      if (!drafts->arrays[i] || (i == K3_DRAFT_draft_ids) != (pass == 0))
        continue;
      uint64_t nbytes = output_nbytes(i, info, scenario, dims, &rank);
      K3_TRY(k3_st_write_tensor(&writer, k3_draft_output_name(i), i == K3_DRAFT_draft_ids ? K3_DTYPE_I64 : K3_DTYPE_F32, dims, rank, begin,
                                begin + nbytes, err));
      begin += nbytes;
    }
  return k3_st_write_end(&writer, padded, h, err);
}

static enum k3_status write_drafts(const char *path, bool force, const struct k3_engine_info *info, const struct k3_scenario *scenario,
                                   const struct k3_drafts *drafts, struct k3_error *err) {
  struct k3_output output = {.fd = -1};
  uint64_t h, padded;
  K3_TRY(write_header(info, scenario, drafts, 0, NULL, &h, err));
  padded = (h + 7) / 8 * 8;
  K3_TRY(k3_output_create(&output, path, force, err));
  struct sink sink = {output.fd, 0, path};
  unsigned char prefix[K3_ST_PREFIX_NBYTES];
  for (unsigned k = 0; k < sizeof prefix; k++)
    prefix[k] = (unsigned char)(padded >> 8 * k);
  enum k3_status status;
  K3_TRY_GOTO(status, out, put(&sink, prefix, sizeof prefix, err));
  K3_TRY_GOTO(status, out, write_header(info, scenario, drafts, padded, &sink, &h, err));
  for (int pass = 0; pass < 2; pass++)
    for (unsigned i = 0; i < K3_N_DRAFT_OUTPUTS; i++) {
      uint64_t dims[3];
      unsigned rank;
      if (drafts->arrays[i] && (i == K3_DRAFT_draft_ids) == (pass == 0))
        K3_TRY_GOTO(status, out, put(&sink, drafts->arrays[i], output_nbytes(i, info, scenario, dims, &rank), err));
    }
  status = k3_output_commit(&output, err);
out:
  k3_output_abort(&output);
  return status;
}

static void print_request(const struct k3_scenario *s, uint64_t b, const int64_t *ids, const float *confidence, uint64_t T) {
  printf("request %llu: anchor %lld at %lld ->", (unsigned long long)b, (long long)s->anchor_ids[b], (long long)s->anchor_positions[b]);
  for (uint64_t k = 0; k < T; k++)
    printf(" %lld", (long long)ids[b * T + k]);
  for (uint64_t k = 0; confidence && k < T; k++)
    printf("%s%.3f", k == 0 ? ", confidence " : " ", (double)confidence[b * T + k]);
  printf("\n");
}

static void json_request(struct k3_jsonw *json, const struct k3_scenario *s, uint64_t b, const int64_t *ids, const float *confidence, uint64_t T) {
  k3_jsonw_begin_object(json, NULL);
  k3_jsonw_i64(json, "anchor", s->anchor_ids[b]);
  if (confidence) {
    k3_jsonw_begin_array(json, "confidence");
    for (uint64_t k = 0; k < T; k++)
      k3_jsonw_float(json, NULL, confidence[b * T + k]);
    k3_jsonw_end_array(json);
  }
  k3_jsonw_begin_array(json, "drafts");
  for (uint64_t k = 0; k < T; k++)
    k3_jsonw_i64(json, NULL, ids[b * T + k]);
  k3_jsonw_end_array(json);
  k3_jsonw_i64(json, "position", s->anchor_positions[b]);
  k3_jsonw_end_object(json);
}

// With --verbose: what was started and loaded, and how the ranks added up.
static void say_how(struct k3_cli *cli, const struct k3_engine_info *info, int n_ranks, const struct k3_drafts *drafts) {
  char size[32];
  if (info->load_nbytes > 0)
    k3_cli_detail(cli, "started CUDA in %.3f s, then loaded %s in %.3f s, up to %u reads at a time", info->start_seconds,
                  k3_cli_size_text(size, info->load_nbytes), info->load_seconds, info->load_reads);
  if (n_ranks > 1)
    k3_cli_detail(cli, "sums over %d ranks: %s (%s)", n_ranks, drafts->sums, drafts->sums_why);
}

static void json_how(struct k3_jsonw *json, const struct k3_engine_info *info, int n_ranks, const struct k3_drafts *drafts) {
  if (info->load_nbytes > 0) {
    k3_jsonw_u64(json, "load_nbytes", info->load_nbytes);
    k3_jsonw_u64(json, "load_reads", info->load_reads);
    k3_jsonw_double(json, "load_seconds", info->load_seconds);
    k3_jsonw_double(json, "start_seconds", info->start_seconds);
  }
  k3_jsonw_begin_object(json, "sums");
  k3_jsonw_string(json, "how", drafts->sums);
  k3_jsonw_u64(json, "ranks", (uint64_t)n_ranks);
  k3_jsonw_string(json, "why", drafts->sums_why);
  k3_jsonw_end_object(json);
}

// The drafts on stdout, where they were asked for.
static int show(struct k3_cli *cli, const struct k3_engine_info *info, int n_ranks, const struct k3_scenario *s, const struct k3_drafts *drafts) {
  const int64_t *ids = drafts->arrays[K3_DRAFT_draft_ids];
  const float *confidence = drafts->arrays[K3_DRAFT_confidence];
  struct k3_jsonw json;
  say_how(cli, info, n_ranks, drafts);
  if (cli->json) {
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_string(&json, "image", info->identity);
    json_how(&json, info, n_ranks, drafts);
    k3_jsonw_begin_array(&json, "requests");
  }
  for (uint64_t b = 0; ids && b < s->n_requests; b++) {
    if (cli->json)
      json_request(&json, s, b, ids, confidence, info->block_width);
    else if (!cli->quiet)
      print_request(s, b, ids, confidence, info->block_width);
  }
  if (!cli->json)
    return 0;
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}

// Ranks in several processes must have been asked for the same.
static enum k3_status agree_on_work(struct k3_ranks *ranks, const struct k3_mapping *input, const char *emit, struct k3_error *err) {
  K3_TRY(k3_ranks_agree_on_bytes(ranks, "--input", input->data, input->nbytes, err));
  return k3_ranks_agree(ranks, "--emit", emit, err);
}

int k3_cmd_run(struct k3_cli *cli, int argc, char **argv) {
  static const char default_emit[] = "draft_ids,confidence";
  const char *input = NULL, *output = NULL, *emit = default_emit, *layers = NULL, *taps = NULL;
  struct k3_drafter_options drafter = {.tp = K3_RANKS_AS_LAUNCHED, .by_launcher = true};
  bool force = false, sequence_parallel = false;
  const struct k3_option options[] = {
      {"input", 'i', K3_OPT_TEXT, "IN", "the scenario", &input},
      {"output", 'o', K3_OPT_TEXT, "OUT", "where the results go", &output},
      {"emit", 0, K3_OPT_TEXT, "LIST", "outputs, separated by commas, or all (default draft_ids,confidence)", &emit},
      {"layers", 0, K3_OPT_TEXT, "I..J", "run these decoder layers instead of a drafter", &layers},
      {"taps", 0, K3_OPT_TEXT, "LIST", "with --layers: the residual stream after so many layers of the model, separated by commas", &taps},
      {"sequence-parallel", 0, K3_OPT_FLAG, NULL, "with --layers and --tp: norms and experts on each rank's own rows", &sequence_parallel},
      K3_DRAFTER_OPTIONS(drafter),
      {"force", 'f', K3_OPT_FLAG, NULL, "replace an existing output", &force},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  unsigned wanted;
  char word[64];
  if (!input || !output)
    return k3_cli_usage(cli, "%s is missing", input ? "-o OUT" : "--input IN");
  if (layers && (emit != default_emit || drafter.backend != 0 || drafter.block_width != 0))
    return k3_cli_usage(cli, "--layers runs on the CPU and goes with neither --emit nor --block");
  if (taps && !layers)
    return k3_cli_usage(cli, "--taps goes with --layers");
  if (sequence_parallel && !layers)
    return k3_cli_usage(cli, "--sequence-parallel goes with --layers");
  if (!parse_emit(emit, &wanted, word, sizeof word))
    return k3_cli_usage(cli, "--emit: there is no output \"%s\"", word);
  struct k3_file_id in_id, out_id, image_id;
  struct k3_error err = {0}, ignored = {0};
  int fd;
  if (k3_open_read(output, &fd, &out_id, &ignored) == K3_OK) {
    close(fd);
    bool is_input = false;
    if (k3_open_read(input, &fd, &in_id, &ignored) == K3_OK)
      is_input = close(fd) == 0 && k3_file_id_equal(&in_id, &out_id);
    if (k3_open_read(cli->operands[0], &fd, &image_id, &ignored) == K3_OK)
      is_input |= close(fd) == 0 && k3_file_id_equal(&image_id, &out_id);
    if (is_input)
      return k3_cli_usage(cli, "the output is one of the inputs");
  }
  if (layers)
    return k3_run_layers(cli, &(struct k3_run_layers){.image = cli->operands[0],
                                                      .input = input,
                                                      .output = output,
                                                      .layers = layers,
                                                      .taps = taps,
                                                      .ranks = {drafter.tp, drafter.rank_timeout, drafter.by_launcher},
                                                      .sequence_parallel = sequence_parallel,
                                                      .force = force});
  struct k3_mapping mapping = {0};
  struct k3_scenario scenario = {0};
  struct k3_drafts drafts = {0};
  struct k3_ranks ranks = {0};
  if (k3_drafter_open(cli, cli->operands[0], &drafter, &ranks, &err) == K3_OK &&
      k3_drafter_scenario(ranks.engines[0], input, &mapping, &scenario, &err) == K3_OK && agree_on_work(&ranks, &mapping, emit, &err) == K3_OK &&
      k3_drafter_run(cli, &ranks, &scenario, wanted, NULL, &drafts, &err) == K3_OK &&
      (ranks.first > 0 || write_drafts(output, force, k3_engine_info(ranks.engines[0]), &scenario, &drafts, &err) == K3_OK)) {
    exit_code = ranks.first > 0 ? 0 : show(cli, k3_engine_info(ranks.engines[0]), ranks.size, &scenario, &drafts);
  } else {
    k3_ranks_abort(&ranks, &err);
    exit_code = k3_cli_fail(cli, &err);
  }
  k3_drafts_free(&drafts);
  k3_scenario_free(&scenario);
  k3_unmap(&mapping);
  k3_ranks_close(&ranks);
  return exit_code;
}
