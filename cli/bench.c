// Times loading and every step of the forward on invented inputs, with the weight bytes each step reads and its share of what the memory gives.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "cli/drafter.h"
#include "cli/verbs.h"
#include "formats/json_write.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Opens an image and times appending context and drafting on invented inputs: each step's best time of --runs passes, the weight bytes it "
        "reads,\n"
        "and the share of the bandwidth that a plain read with the same threads reaches. The first pass, which also brings the image into memory, "
        "is\n"
        "reported apart and not counted.",
    .examples =
        "  k3pack bench drafter.k3p --context 1024 --requests 4\n"
        "  k3pack bench drafter.k3p --json --threads 1",
};

enum { MAX_STEPS = 32, BLOCK_SIZE = 64, BANDWIDTH_NBYTES = 256 << 20 };

// Times of the steps with one name, summed over one pass; the best pass counts.
struct step {
  const char *name;
  uint64_t n_calls, nbytes;
  double pass_seconds, best_seconds;
};

struct clock {
  struct step steps[MAX_STEPS];
  size_t n_steps;
  double last;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void step_done(void *ctx, const char *name, uint64_t nbytes) {
  struct clock *c = ctx;
  double time = now();
  size_t i = 0;
  while (i < c->n_steps && strcmp(c->steps[i].name, name) != 0)
    i++;
  if (i == MAX_STEPS)
    return;
  if (i == c->n_steps)
    c->steps[c->n_steps++] = (struct step){.name = name, .best_seconds = 1e300};
  c->steps[i].pass_seconds += time - c->last;
  c->steps[i].n_calls++;
  c->steps[i].nbytes += nbytes;
  c->last = now();
}

static void begin_pass(struct clock *c) {
  for (size_t i = 0; i < c->n_steps; i++)
    c->steps[i].n_calls = c->steps[i].nbytes = 0, c->steps[i].pass_seconds = 0;
  c->last = now();
}

static void end_pass(struct clock *c, bool counts) {
  for (size_t i = 0; counts && i < c->n_steps; i++)
    if (c->steps[i].pass_seconds < c->steps[i].best_seconds)
      c->steps[i].best_seconds = c->steps[i].pass_seconds;
}

// A plain read: sums of 64-bit words in 1 MiB pieces.
struct read_ctx {
  const uint64_t *words;
  uint64_t *sums;
};

static enum k3_status read_piece(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  (void)err;
  const struct read_ctx *r = ctx;
  const uint64_t *words = r->words + item * ((1 << 20) / sizeof(uint64_t));
  uint64_t sums[8] = {0};
  for (size_t i = 0; i < (1 << 20) / sizeof(uint64_t); i += 8)
    for (int k = 0; k < 8; k++)
      sums[k] += words[i + (size_t)k];
  for (int k = 0; k < 8; k++)
    r->sums[worker * 8] += sums[k];
  return K3_OK;
}

static enum k3_status measure_bandwidth(int n_threads, double *bytes_per_second, struct k3_error *err) {
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  uint64_t *words = pool ? k3_alloc_aligned(BANDWIDTH_NBYTES, 4096, err) : NULL;
  uint64_t *sums = words ? k3_calloc((size_t)k3_pool_n_threads(pool), 64, err) : NULL;
  enum k3_status status = sums ? K3_OK : K3_NO_MEMORY;
  double best = 1e300;
  if (sums)
    memset(words, 1, BANDWIDTH_NBYTES);
  for (int run = 0; run < 5 && status == K3_OK; run++) {
    struct read_ctx ctx = {words, sums};
    double start = now();
    status = k3_pool_run(pool, BANDWIDTH_NBYTES >> 20, read_piece, &ctx, err);
    best = now() - start < best ? now() - start : best;
  }
  *bytes_per_second = BANDWIDTH_NBYTES / best;
  k3_free(sums);
  k3_free(words);
  k3_pool_free(pool);
  return status;
}

struct inputs {
  uint64_t n_rows, n_requests, max_blocks;
  struct k3_array taps;
  int64_t *positions, *slots, *anchor_ids, *anchor_positions, *draft_ids;
  int32_t *tables;
};

static enum k3_status make_inputs(const struct k3_engine_info *info, struct inputs *in, uint64_t context, uint64_t requests, struct k3_error *err) {
  const uint64_t width = info->n_taps * info->target_hidden_size;
  in->n_requests = requests;
  in->n_rows = context * requests;
  in->max_blocks = (context + info->block_width + BLOCK_SIZE - 1) / BLOCK_SIZE;
  in->taps = (struct k3_array){.data = k3_calloc(in->n_rows * width, 2, err), .dtype = K3_DTYPE_BF16};
  in->positions = k3_calloc(in->n_rows, 8, err);
  in->slots = k3_calloc(in->n_rows, 8, err);
  in->anchor_ids = k3_calloc(requests, 8, err);
  in->anchor_positions = k3_calloc(requests, 8, err);
  in->draft_ids = k3_calloc(requests * info->block_width, 8, err);
  in->tables = k3_calloc(requests * in->max_blocks, 4, err);
  if (!in->taps.data || !in->positions || !in->slots || !in->anchor_ids || !in->anchor_positions || !in->draft_ids || !in->tables)
    return K3_NO_MEMORY;
  uint64_t random = 1;
  for (uint64_t i = 0; i < in->n_rows * width; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    ((uint16_t *)in->taps.data)[i] = (uint16_t)(0x3f00 | (random >> 48 & 0x80ff));  // +-0.5 .. 1.99
  }
  for (uint64_t b = 0; b < requests; b++) {
    in->anchor_ids[b] = (int64_t)(b % info->vocab_size);
    in->anchor_positions[b] = (int64_t)context;
    for (uint64_t i = 0; i < in->max_blocks; i++)
      in->tables[b * in->max_blocks + i] = (int32_t)(b * in->max_blocks + i);
    for (uint64_t p = 0; p < context; p++) {
      in->positions[b * context + p] = (int64_t)p;
      in->slots[b * context + p] = (int64_t)(b * in->max_blocks * BLOCK_SIZE + p);
    }
  }
  return K3_OK;
}

static void free_inputs(struct inputs *in) {
  void *arrays[] = {in->taps.data, in->positions, in->slots, in->anchor_ids, in->anchor_positions, in->draft_ids, in->tables};
  for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
    k3_free(arrays[i]);
}

struct result {
  double open_seconds, bandwidth, first_append, first_draft, append, draft;  // seconds; bytes per second
};

static enum k3_status measure(struct k3_session *session, const struct k3_cache *cache, const struct inputs *in, uint64_t n_runs, struct clock *c,
                              struct result *result, struct k3_error *err) {
  const struct k3_context context = {.n_rows = in->n_rows, .taps = &in->taps, .n_tap_arrays = 1, .positions = in->positions, .slots = in->slots};
  const struct k3_draft draft = {.n_requests = in->n_requests,
                                 .anchor_ids = in->anchor_ids,
                                 .anchor_positions = in->anchor_positions,
                                 .block_tables = in->tables,
                                 .max_blocks = in->max_blocks,
                                 .draft_ids = {.data = in->draft_ids, .dtype = K3_DTYPE_I64}};
  result->append = result->draft = 1e300;
  for (uint64_t run = 0; run <= n_runs; run++) {
    begin_pass(c);
    double start = now();
    K3_TRY(k3_session_append(session, cache, &context, NULL, err));
    double middle = now();
    c->last = middle;
    K3_TRY(k3_session_draft(session, cache, &draft, NULL, err));
    double end = now();
    end_pass(c, run > 0);
    if (run == 0) {
      result->first_append = middle - start;
      result->first_draft = end - middle;
      continue;
    }
    result->append = middle - start < result->append ? middle - start : result->append;
    result->draft = end - middle < result->draft ? end - middle : result->draft;
  }
  return K3_OK;
}

static int report(struct k3_cli *cli, const struct k3_engine_info *info, const struct inputs *in, const struct clock *c, const struct result *r) {
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_double(&json, "append_seconds", r->append);
    k3_jsonw_double(&json, "bandwidth", r->bandwidth);
    k3_jsonw_u64(&json, "context_nbytes", info->context_nbytes);
    k3_jsonw_u64(&json, "context_rows", in->n_rows);
    k3_jsonw_u64(&json, "draft_nbytes", info->draft_nbytes);
    k3_jsonw_double(&json, "draft_seconds", r->draft);
    k3_jsonw_double(&json, "first_append_seconds", r->first_append);
    k3_jsonw_double(&json, "first_draft_seconds", r->first_draft);
    k3_jsonw_double(&json, "open_seconds", r->open_seconds);
    k3_jsonw_u64(&json, "requests", in->n_requests);
    k3_jsonw_begin_array(&json, "steps");
    for (size_t i = 0; i < c->n_steps; i++) {
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_u64(&json, "calls", c->steps[i].n_calls);
      k3_jsonw_u64(&json, "nbytes", c->steps[i].nbytes);
      k3_jsonw_double(&json, "seconds", c->steps[i].best_seconds);
      k3_jsonw_string(&json, "step", c->steps[i].name);
      k3_jsonw_end_object(&json);
    }
    k3_jsonw_end_array(&json);
    return k3_cli_json_end(cli, &json, 0);
  }
  char size[32];
  printf("open %.3f s; plain read %.2f GB/s\n", r->open_seconds, r->bandwidth / 1e9);
  printf("append %llu rows: %.3f ms (first pass %.3f ms)\n", (unsigned long long)in->n_rows, 1e3 * r->append, 1e3 * r->first_append);
  printf("draft %llu x %llu rows: %.3f ms (first pass %.3f ms), %s of weights, %.2f GB/s, %.0f%% of the plain read\n",
         (unsigned long long)in->n_requests, (unsigned long long)info->block_width, 1e3 * r->draft, 1e3 * r->first_draft,
         k3_cli_size_text(size, info->draft_nbytes), (double)info->draft_nbytes / r->draft / 1e9,
         100 * (double)info->draft_nbytes / r->draft / r->bandwidth);
  printf("  %-16s %6s %12s %12s %10s %7s\n", "step", "calls", "ms", "weights", "GB/s", "share");
  for (size_t i = 0; i < c->n_steps; i++) {
    const struct step *step = &c->steps[i];
    printf("  %-16s %6llu %12.3f %12s", step->name, (unsigned long long)step->n_calls, 1e3 * step->best_seconds,
           k3_cli_size_text(size, step->nbytes));
    if (step->nbytes > 0)
      printf(" %10.2f %6.0f%%", (double)step->nbytes / step->best_seconds / 1e9, 100 * (double)step->nbytes / step->best_seconds / r->bandwidth);
    printf("\n");
  }
  return 0;
}

int k3_cmd_bench(struct k3_cli *cli, int argc, char **argv) {
  struct k3_drafter_options drafter = {.tp = 1};
  uint64_t context = 64, requests = 1, n_runs = 3;
  const struct k3_option options[] = {
      K3_DRAFTER_OPTIONS(drafter),
      {"context", 0, K3_OPT_U64, "N", "context rows of each request (default 64)", &context},
      {"requests", 0, K3_OPT_U64, "B", "requests drafted at once (default 1)", &requests},
      {"runs", 0, K3_OPT_U64, "N", "counted passes (default 3)", &n_runs},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (drafter.tp > 1)
    return k3_cli_usage(cli, "bench measures one rank; --tp is for run");
  if (requests < 1 || requests > 1 << 16 || context > 1 << 24 || n_runs < 1)
    return k3_cli_usage(cli, "--requests takes 1 to 65536, --context up to 16777216, --runs at least 1");
  struct k3_error err = {0};
  struct inputs in = {0};
  struct k3_cache cache = {0};
  struct clock c = {0};
  struct result result = {0};
  struct k3_session *session = NULL;
  double start = now();
  struct k3_ranks ranks = {0};
  struct k3_engine *engine = k3_drafter_open(cli, cli->operands[0], &drafter, &ranks, &err) == K3_OK ? ranks.engines[0] : NULL;
  result.open_seconds = now() - start;
  const struct k3_engine_info *info = engine ? k3_engine_info(engine) : NULL;
  bool ok = info != NULL;
  if (ok && context > info->max_positions - info->block_width) {
    exit_code = k3_cli_usage(cli, "--context %llu and a block of %llu are beyond the model's limit of %llu", (unsigned long long)context,
                             (unsigned long long)info->block_width, (unsigned long long)info->max_positions);
    k3_ranks_close(&ranks);
    return exit_code;
  }
  ok = ok && make_inputs(info, &in, context, requests, &err) == K3_OK &&
       k3_cache_create(engine, info->activation_dtype, requests * in.max_blocks, BLOCK_SIZE, NULL, &cache, &err) == K3_OK;
  if (ok) {
    const struct k3_session_options session_options = {.max_requests = requests,
                                                       .max_keys = in.max_blocks * BLOCK_SIZE,
                                                       .n_threads = cli->n_threads,
                                                       .progress = &cli->progress,
                                                       .step_done = step_done,
                                                       .step_ctx = &c};
    session = k3_session_create(engine, &session_options, &err);
  }
  ok = session && measure_bandwidth(cli->n_threads, &result.bandwidth, &err) == K3_OK &&
       measure(session, &cache, &in, n_runs, &c, &result, &err) == K3_OK;
  exit_code = ok ? report(cli, info, &in, &c, &result) : k3_cli_fail(cli, &err);
  k3_session_free(session);
  if (engine)
    k3_cache_free(engine, &cache);
  k3_ranks_close(&ranks);
  free_inputs(&in);
  return exit_code;
}
