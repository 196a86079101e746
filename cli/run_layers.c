#include "cli/run_layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/file.h"
#include "base/hash.h"
#include "formats/layer_states.h"
#include "loader/split.h"
#include "runtime/moe.h"

enum { MAX_RANKS = K3_MAX_RANKS, MAX_TAPS = 64 };

// A whole image, or a folder's shared file and the files of its ranks.
struct model_file {
  struct k3_mapping mapping, rank_mappings[MAX_RANKS];
  struct k3_image image, ranks[MAX_RANKS];
  bool is_folder;
};

struct run {
  struct k3_cli *cli;
  const struct k3_run_layers *options;
  struct model_file model;
  struct k3_mapping states_mapping;
  struct k3_layer_states states;
  void *aligned_hidden, *aligned_residual;  // copies when the file has them at odd addresses
  uint64_t first_layer, n_layers, taps[MAX_TAPS];
  size_t n_taps;
  struct k3_ranks ranks;
  // Rank 0's outputs, [n, H].
  float *hidden, *residual, *final, *tapped[MAX_TAPS];
  bool has_final;
  uint64_t n_deferred, n_immediate, n_scattered, n_gathered;
};

// ---- arguments ----

// "I..J" or "I".
static bool parse_layers(const char *text, uint64_t *first, uint64_t *n) {
  uint64_t last;
  const char *end = k3_cli_number(text, first);
  last = *first;
  if (end && strncmp(end, "..", 2) == 0)
    end = k3_cli_number(end + 2, &last);
  *n = last - *first + 1;
  return end && *end == '\0' && last >= *first && *n > 0;
}

// ---- files ----

static enum k3_status open_image(const char *path, struct k3_mapping *mapping, struct k3_image *image, struct k3_error *err) {
  K3_TRY(k3_map_file(path, mapping, err));
  enum k3_status status = k3_image_open(mapping->data, mapping->nbytes, path, image, err);
  if (status != K3_OK)
    k3_unmap(mapping);
  return status;
}

// The rank's file must be the one that the shared file names.
static enum k3_status open_rank_file(struct model_file *model, const char *folder, uint32_t rank, uint32_t tp, struct k3_error *err) {
  char name[64], seal[65];
  char *path = k3_path_join(folder, k3_split_rank_name(name, rank, tp), err);
  enum k3_status status = path ? open_image(path, &model->rank_mappings[rank], &model->ranks[rank], err) : K3_NO_MEMORY;
  if (status == K3_OK) {
    k3_hex(seal, model->ranks[rank].identity);
    if (strcmp(seal, model->image.manifest.rank_seals[rank]) != 0)
      status = k3_fail(err, K3_BAD_INPUT, K3_IMG02, path, NULL, model->image.manifest.rank_seals[rank],
                       "its seal is %s, the shared file names another", seal);
  }
  k3_free(path);
  return status;
}

static enum k3_status open_model(struct run *run, struct k3_error *err) {
  struct model_file *model = &run->model;
  const char *path = run->options->image;
  const uint32_t tp = (uint32_t)run->ranks.size;
  K3_TRY(k3_may_be_image(path, err));
  model->is_folder = k3_is_split_folder(path);
  char *shared = model->is_folder ? k3_path_join(path, K3_SPLIT_SHARED_NAME, err) : NULL;
  if (model->is_folder && !shared)
    return K3_NO_MEMORY;
  enum k3_status status = open_image(shared ? shared : path, &model->mapping, &model->image, err);
  k3_free(shared);
  K3_TRY(status);
  const struct k3_manifest *manifest = &model->image.manifest;
  if (!model->is_folder && manifest->tp_size > 0)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, path, NULL, "the folder that holds it", "one file of an image that was cut for %u ranks",
                   manifest->tp_size);
  if (model->is_folder && (manifest->tp_size != tp || !manifest->rank_seals))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, path, NULL, "as many ranks as the folder was cut for, or a whole image",
                   "%u ranks, the folder is cut for %u", tp, manifest->tp_size);
  for (uint32_t r = 0; model->is_folder && r < tp; r++)
    K3_TRY(open_rank_file(model, path, r, tp, err));
  return K3_OK;
}

static void close_model(struct model_file *model) {
  for (int r = 0; r < MAX_RANKS; r++) {
    if (model->ranks[r].bytes)
      k3_image_close(&model->ranks[r]);
    k3_unmap(&model->rank_mappings[r]);
  }
  if (model->image.bytes)
    k3_image_close(&model->image);
  k3_unmap(&model->mapping);
}

static enum k3_status align(const struct k3_layer_states *s, const void *data, enum k3_dtype dtype, void **copy, struct k3_error *err) {
  const uint64_t elem_nbytes = k3_dtype_bits(dtype) / 8;
  if (!data || (uintptr_t)data % elem_nbytes == 0)
    return K3_OK;
  *copy = k3_calloc(s->n_rows * s->width, elem_nbytes, err);
  if (!*copy)
    return K3_NO_MEMORY;
  memcpy(*copy, data, s->n_rows * s->width * elem_nbytes);
  return K3_OK;
}

static enum k3_status open_states(struct run *run, struct k3_error *err) {
  struct k3_layer_states *s = &run->states;
  K3_TRY(k3_map_file(run->options->input, &run->states_mapping, err));
  K3_TRY(k3_layer_states_parse(run->states_mapping.data, run->states_mapping.nbytes, run->options->input, s, err));
  K3_TRY(align(s, s->hidden, s->hidden_dtype, &run->aligned_hidden, err));
  return align(s, s->residual, s->residual_dtype, &run->aligned_residual, err);
}

// ---- running ----

static int threads_of_rank(const struct run *run) {
  long n = run->cli->n_threads > 0 ? run->cli->n_threads : sysconf(_SC_NPROCESSORS_ONLN);
  return run->ranks.n == 1 ? run->cli->n_threads : n > run->ranks.n ? (int)(n / run->ranks.n) : 1;
}

static enum k3_status run_rank(void *ctx, int i, struct k3_engine *none, struct k3_error *err) {
  struct run *run = ctx;
  const int rank = run->ranks.first + i;
  const struct k3_layer_states *s = &run->states;
  (void)none;
  const struct k3_weights_source source = {.image = &run->model.image, .slices = run->model.is_folder ? &run->model.ranks[rank] : NULL};
  const struct k3_moe_options options = {.first_layer = run->first_layer,
                                         .n_layers = run->n_layers,
                                         .tp_rank = (uint32_t)rank,
                                         .tp_size = (uint32_t)run->ranks.size,
                                         .comm = run->ranks.comms ? run->ranks.comms[i] : NULL,
                                         .tap = K3_TAP_BEHIND_NORM,
                                         .sequence_parallel = run->options->sequence_parallel,
                                         .taps = run->taps,
                                         .n_taps = run->n_taps,
                                         .n_threads = threads_of_rank(run),
                                         .progress = rank == 0 ? &run->cli->progress : NULL};
  struct k3_moe *moe = k3_moe_open(&source, &options, err);
  if (!moe)
    return err->status;
  enum k3_status status = K3_OK;
  if (s->width != moe->model.hidden_size)
    status = k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, run->options->input, "hidden_states", "the model's hidden size",
                     "%llu columns where the model has %llu", (unsigned long long)s->width, (unsigned long long)moe->model.hidden_size);
  struct k3_moe_rows rows = {
      .n_rows = s->n_rows,
      .hidden = {run->aligned_hidden ? run->aligned_hidden : (void *)(uintptr_t)s->hidden, K3_MEMORY_HOST, s->hidden_dtype, 0},
      .residual = {run->aligned_residual ? run->aligned_residual : (void *)(uintptr_t)s->residual, K3_MEMORY_HOST, s->residual_dtype, 0},
      .positions = s->positions,
      .request_ids = s->request_ids};
  if (rank == 0) {
    run->has_final = moe->final_norm.data != NULL;
    run->n_deferred = moe->plan.n_deferred;
    run->n_immediate = moe->plan.n_immediate;
    run->n_scattered = moe->plan.n_scattered;
    run->n_gathered = moe->plan.n_gathered;
    rows.out_hidden = run->hidden;
    rows.out_residual = run->residual;
    rows.out_final = run->final;
    rows.out_taps = run->tapped;
  }
  if (status == K3_OK)
    status = k3_moe_run(moe, &rows, err);
  k3_moe_free(moe);
  return status;
}

static enum k3_status alloc_outputs(struct run *run, struct k3_error *err) {
  uint64_t n;
  if (!k3_mul_u64(run->states.n_rows, run->states.width, &n))
    return k3_fail_memory(err, SIZE_MAX);
  run->hidden = k3_calloc(n, sizeof(float), err);
  run->residual = k3_calloc(n, sizeof(float), err);
  run->final = k3_calloc(n, sizeof(float), err);
  bool complete = run->hidden && run->residual && run->final;
  for (size_t t = 0; complete && t < run->n_taps; t++) {
    run->tapped[t] = k3_calloc(n, sizeof(float), err);
    complete = run->tapped[t] != NULL;
  }
  return complete ? K3_OK : K3_NO_MEMORY;
}

// Ranks in several processes must have been asked for the same.
static enum k3_status agree_on_work(struct run *run, struct k3_error *err) {
  char seal[65], work[128];
  k3_hex(seal, run->model.image.identity);
  snprintf(work, sizeof work, "layers %s, taps %s%s", run->options->layers, run->options->taps ? run->options->taps : "none",
           run->options->sequence_parallel ? ", sequence parallel" : "");
  K3_TRY(k3_ranks_agree(&run->ranks, "the image's seal", seal, err));
  K3_TRY(k3_ranks_agree_on_bytes(&run->ranks, "--input", run->states_mapping.data, run->states_mapping.nbytes, err));
  return k3_ranks_agree(&run->ranks, "--layers", work, err);
}

// ---- the output file ----

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

// Output i: its name and values, in the order of the file. False behind the last one.
static bool output_at(const struct run *run, size_t i, char name[64], const float **values) {
  size_t n_fixed = run->has_final ? 3 : 2;
  if (i < n_fixed) {
    snprintf(name, 64, "%s", i == 0 ? "hidden_states" : i == 1 ? "residual" : "final_hidden_states");
    *values = i == 0 ? run->hidden : i == 1 ? run->residual : run->final;
    return true;
  }
  if (i - n_fixed >= run->n_taps)
    return false;
  snprintf(name, 64, "taps.%llu", (unsigned long long)run->taps[i - n_fixed]);
  *values = run->tapped[i - n_fixed];
  return true;
}

static enum k3_status write_header(const struct run *run, uint64_t padded, struct sink *sink, uint64_t *h, struct k3_error *err) {
  struct k3_st_writer writer;
  const uint64_t shape[2] = {run->states.n_rows, run->states.width}, nbytes = shape[0] * shape[1] * sizeof(float);
  char name[64];
  const float *values;
  k3_st_write_begin(&writer, sink ? put : NULL, sink);
  for (size_t i = 0; output_at(run, i, name, &values); i++)
    K3_TRY(k3_st_write_tensor(&writer, name, K3_DTYPE_F32, shape, 2, i * nbytes, (i + 1) * nbytes, err));
  return k3_st_write_end(&writer, padded, h, err);
}

static enum k3_status write_output(const struct run *run, struct k3_error *err) {
  const struct k3_run_layers *options = run->options;
  struct k3_output output = {.fd = -1};
  uint64_t h;
  char name[64];
  const float *values;
  K3_TRY(write_header(run, 0, NULL, &h, err));
  const uint64_t padded = (h + 7) / 8 * 8;
  K3_TRY(k3_output_create(&output, options->output, options->force, err));
  struct sink sink = {output.fd, 0, options->output};
  unsigned char prefix[K3_ST_PREFIX_NBYTES];
  for (unsigned k = 0; k < sizeof prefix; k++)
    prefix[k] = (unsigned char)(padded >> 8 * k);
  enum k3_status status;
  K3_TRY_GOTO(status, out, put(&sink, prefix, sizeof prefix, err));
  K3_TRY_GOTO(status, out, write_header(run, padded, &sink, &h, err));
  for (size_t i = 0; output_at(run, i, name, &values); i++)
    K3_TRY_GOTO(status, out, put(&sink, values, run->states.n_rows * run->states.width * sizeof *values, err));
  status = k3_output_commit(&output, err);
out:
  k3_output_abort(&output);
  return status;
}

static int show(struct run *run) {
  struct k3_cli *cli = run->cli;
  const unsigned long long first = run->first_layer, last = run->first_layer + run->n_layers - 1, n = run->states.n_rows;
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", true);
    k3_jsonw_u64(&json, "first_layer", first);
    k3_jsonw_u64(&json, "last_layer", last);
    k3_jsonw_u64(&json, "rows", n);
    k3_jsonw_u64(&json, "tp", (uint64_t)run->ranks.size);
    k3_jsonw_u64(&json, "reductions_deferred", run->n_deferred);
    k3_jsonw_u64(&json, "reductions_immediate", run->n_immediate);
    k3_jsonw_u64(&json, "reductions_scattered", run->n_scattered);
    k3_jsonw_u64(&json, "gathers", run->n_gathered);
    return k3_cli_json_end(cli, &json, 0);
  }
  if (cli->quiet)
    return 0;
  printf("layers %llu..%llu on %llu rows, %llu ranks: %llu sums deferred into norms, %llu at once", first, last, n,
         (unsigned long long)run->ranks.size, (unsigned long long)run->n_deferred, (unsigned long long)run->n_immediate);
  if (run->n_scattered > 0)
    printf(", %llu scattered by rows and gathered %llu times", (unsigned long long)run->n_scattered, (unsigned long long)run->n_gathered);
  printf("\n");
  return 0;
}

int k3_run_layers(struct k3_cli *cli, const struct k3_run_layers *options) {
  struct k3_error err = {0};
  struct run *run = k3_calloc(1, sizeof *run, &err);
  if (!run)
    return k3_cli_fail(cli, &err);
  run->cli = cli;
  run->options = options;
  int exit_code = 0;
  if (!parse_layers(options->layers, &run->first_layer, &run->n_layers))
    exit_code = k3_cli_usage(cli, "--layers takes I..J or I, not \"%s\"", options->layers);
  else if (!k3_cli_numbers(options->taps, run->taps, MAX_TAPS, &run->n_taps))
    exit_code = k3_cli_usage(cli, "--taps takes different numbers of layers, separated by commas, not \"%s\"", options->taps);
  else if (k3_ranks_meet(&options->ranks, &run->ranks, &err) == K3_OK && open_model(run, &err) == K3_OK && open_states(run, &err) == K3_OK &&
           alloc_outputs(run, &err) == K3_OK && agree_on_work(run, &err) == K3_OK && k3_ranks_run(&run->ranks, run_rank, run, &err) == K3_OK &&
           (run->ranks.first > 0 || write_output(run, &err) == K3_OK)) {
    exit_code = run->ranks.first > 0 ? 0 : show(run);
  } else {
    k3_ranks_abort(&run->ranks, &err);
    exit_code = k3_cli_fail(cli, &err);
  }
  k3_ranks_close(&run->ranks);
  void *arrays[] = {run->aligned_hidden, run->aligned_residual, run->hidden, run->residual, run->final};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
    k3_free(arrays[i]);
  for (size_t t = 0; t < run->n_taps; t++)
    k3_free(run->tapped[t]);
  k3_layer_states_free(&run->states);
  k3_unmap(&run->states_mapping);
  close_model(&run->model);
  k3_free(run);
  return exit_code;
}
