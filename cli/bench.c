// Times loading, both calls of the forward and every step on invented inputs, with the bytes each moves and its share of what the memory gives.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "cli/drafter.h"
#include "cli/staging.h"
#include "cli/verbs.h"
#include "formats/json_write.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Opens an image and times appending context and drafting on invented inputs, whole and step by step: the median of --runs passes with the\n"
        "10th and 90th percentile, the bytes moved (weights, inputs and outputs, rows of the cache), and the share of the bandwidth that the\n"
        "memory gives: a plain read with the same threads, or a copy within the GPU. The first pass, which also brings the image into memory, is\n"
        "reported apart.\n"
        "On a GPU times are taken between the steps in the stream: replays of one CUDA graph, a step's graph holding that step alone (of all\n"
        "layers), each once with its caches overwritten before (cold) and once as the last replay left them (warm). An append of more than 64\n"
        "rows is no graph but single launches. Loading is timed twice, the second time from the page cache, and starting CUDA is reported apart.",
    .examples =
        "  k3pack bench drafter.k3p --context 1024 --requests 4\n"
        "  k3pack bench drafter.k3p --backend cuda --requests 8 --json\n"
        "  k3pack bench drafter.k3p --json --threads 1",
};

enum { MAX_FIGURES = 20, BLOCK_SIZE = 64, CPU_RUNS = 3, GPU_RUNS = 30 };
enum { COLD, WARM, N_STATES };  // of a device's caches; a CPU's times are all WARM
static const char *const STATE_NAMES[N_STATES] = {"cold", "warm"};

// Times of a whole call, or of the steps of one name in it.
struct figure {
  const char *name;
  uint64_t n_calls, weight_nbytes, nbytes;
  double *seconds[N_STATES];  // [n_runs] each
};

struct bench {
  struct k3_session *session;
  const struct k3_engine_info *info;
  const struct k3_cache *cache;
  struct k3_array states;
  struct k3_context context;
  struct k3_draft draft;
  uint64_t n_runs, kv_nbytes;  // of the cache, read by one draft's attention
  struct figure append, steps[MAX_FIGURES], whole;
  size_t n_steps, n_append_steps;
  double open_seconds, reopen_load_seconds, bandwidth, first_append, first_draft;
};

static enum k3_status call(struct bench *b, bool is_draft, struct k3_error *err) {
  return is_draft ? k3_session_draft(b->session, b->cache, &b->draft, NULL, err) : k3_session_append(b->session, b->cache, &b->context, NULL, err);
}

static enum k3_status new_figure(struct bench *b, struct figure *f, const char *name, struct k3_error *err) {
  *f = (struct figure){.name = name, .n_calls = 1};
  for (int state = 0; state < N_STATES; state++)
    if (!(f->seconds[state] = k3_calloc(b->n_runs, sizeof(double), err)))
      return K3_NO_MEMORY;
  return K3_OK;
}

// The first pass: brings the image into memory (and captures graphs), and tells which steps there are and what they move.
static enum k3_status first_pass(struct bench *b, struct k3_error *err) {
  const double start = k3_clock();
  K3_TRY(call(b, false, err));
  b->first_append = k3_clock() - start;
  K3_TRY(call(b, true, err));
  b->first_draft = k3_clock() - start - b->first_append;
  K3_TRY(new_figure(b, &b->append, "append", err));
  K3_TRY(new_figure(b, &b->whole, "draft", err));
  k3_session_measure(b->session, &(struct k3_measure){.calls = true});
  for (int is_draft = 0; is_draft < 2; is_draft++) {
    struct figure *sum = is_draft ? &b->whole : &b->append;
    struct k3_call_time times;
    if (!is_draft && b->context.n_rows == 0)
      continue;
    K3_TRY(call(b, is_draft, err));
    K3_TRY(k3_session_times(b->session, &times, err));
    for (size_t i = 0; i < times.n_steps && b->n_steps < MAX_FIGURES; i++) {
      struct figure *f = &b->steps[b->n_steps++];
      K3_TRY(new_figure(b, f, times.steps[i].step, err));
      f->n_calls = times.steps[i].n_calls;
      f->weight_nbytes = times.steps[i].weight_nbytes;
      f->nbytes = f->weight_nbytes + times.steps[i].activation_nbytes + (strcmp(f->name, "attend") == 0 ? b->kv_nbytes : 0);
      sum->weight_nbytes += f->weight_nbytes;
      sum->nbytes += f->nbytes;
    }
    b->n_append_steps = is_draft ? b->n_append_steps : b->n_steps;
  }
  return K3_OK;
}

// On a CPU: passes with every step timed.
static enum k3_status measure_passes(struct bench *b, struct k3_error *err) {
  k3_session_measure(b->session, &(struct k3_measure){.steps = true});
  for (uint64_t run = 0; run < b->n_runs; run++) {
    for (int is_draft = 0; is_draft < 2; is_draft++) {
      struct k3_call_time times;
      if (!is_draft && b->context.n_rows == 0)
        continue;
      K3_TRY(call(b, is_draft, err));
      K3_TRY(k3_session_times(b->session, &times, err));
      (is_draft ? &b->whole : &b->append)->seconds[WARM][run] = times.seconds;
      for (size_t i = 0; i < times.n_steps; i++)
        b->steps[(is_draft ? b->n_append_steps : 0) + i].seconds[WARM][run] = times.steps[i].seconds;
    }
  }
  return K3_OK;
}

// On a device: replays of one call, whole (step NULL) or of one step alone. The first, which captures, is not counted.
static enum k3_status measure_replays(struct bench *b, struct figure *f, const char *step, bool is_draft, struct k3_error *err) {
  for (int state = 0; state < N_STATES; state++) {
    k3_session_measure(b->session, &(struct k3_measure){.calls = true, .cold = state == COLD, .only_step = step});
    for (uint64_t run = 0; run <= b->n_runs; run++) {
      struct k3_call_time times;
      K3_TRY(call(b, is_draft, err));
      K3_TRY(k3_session_times(b->session, &times, err));
      if (run > 0)
        f->seconds[state][run - 1] = times.seconds;
    }
  }
  return K3_OK;
}

static enum k3_status measure(struct bench *b, struct k3_error *err) {
  K3_TRY(first_pass(b, err));
  K3_TRY(k3_session_bandwidth(b->session, &b->bandwidth, err));
  if (b->info->memory == K3_MEMORY_HOST)
    return measure_passes(b, err);
  if (b->context.n_rows > 0)
    K3_TRY(measure_replays(b, &b->append, NULL, false, err));
  K3_TRY(measure_replays(b, &b->whole, NULL, true, err));
  for (size_t i = 0; i < b->n_steps; i++)
    K3_TRY(measure_replays(b, &b->steps[i], b->steps[i].name, i >= b->n_append_steps, err));
  return K3_OK;
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

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct spread {
  double median, p10, p90;
};

// The value that a share `q` of the sorted values does not exceed, between two values in proportion.
static double quantile(const double *values, uint64_t n, double q) {
  const double at = q * (double)(n - 1);
  const uint64_t i = (uint64_t)at;
  return i + 1 < n ? values[i] + (at - (double)i) * (values[i + 1] - values[i]) : values[n - 1];
}

static struct spread spread_of(double *seconds, uint64_t n) {
  qsort(seconds, n, sizeof *seconds, ascending);
  return (struct spread){quantile(seconds, n, 0.5), quantile(seconds, n, 0.1), quantile(seconds, n, 0.9)};
}

static void write_figure(const struct bench *b, struct k3_jsonw *json, const char *key, const struct figure *f) {
  k3_jsonw_begin_object(json, key);
  k3_jsonw_u64(json, "calls", f->n_calls);
  for (int state = b->info->memory == K3_MEMORY_HOST ? WARM : COLD; state < N_STATES; state++) {
    const struct spread s = spread_of(f->seconds[state], b->n_runs);
    k3_jsonw_begin_object(json, STATE_NAMES[state]);
    k3_jsonw_double(json, "median_seconds", s.median);
    k3_jsonw_double(json, "p10_seconds", s.p10);
    k3_jsonw_double(json, "p90_seconds", s.p90);
    k3_jsonw_end_object(json);
  }
  k3_jsonw_u64(json, "nbytes", f->nbytes);
  k3_jsonw_string(json, "step", f->name);
  k3_jsonw_u64(json, "weight_nbytes", f->weight_nbytes);
  k3_jsonw_end_object(json);
}

static int report_json(struct k3_cli *cli, const struct bench *b) {
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  write_figure(b, &json, "append", &b->append);
  k3_jsonw_string(&json, "backend", b->info->memory == K3_MEMORY_HOST ? "cpu" : "cuda");
  k3_jsonw_double(&json, "bandwidth", b->bandwidth);
  k3_jsonw_u64(&json, "block_width", b->info->block_width);
  k3_jsonw_u64(&json, "context_nbytes", b->info->context_nbytes);
  k3_jsonw_u64(&json, "context_rows", b->context.n_rows);
  write_figure(b, &json, "draft", &b->whole);
  k3_jsonw_u64(&json, "draft_nbytes", b->info->draft_nbytes);
  k3_jsonw_double(&json, "first_append_seconds", b->first_append);
  k3_jsonw_double(&json, "first_draft_seconds", b->first_draft);
  k3_jsonw_u64(&json, "load_nbytes", b->info->load_nbytes);
  k3_jsonw_double(&json, "load_seconds", b->info->load_seconds);
  k3_jsonw_double(&json, "open_seconds", b->open_seconds);
  k3_jsonw_double(&json, "reload_seconds", b->reopen_load_seconds);
  k3_jsonw_u64(&json, "requests", b->draft.n_requests);
  k3_jsonw_u64(&json, "runs", b->n_runs);
  k3_jsonw_double(&json, "start_seconds", b->info->start_seconds);
  k3_jsonw_begin_array(&json, "steps");
  for (size_t i = 0; i < b->n_steps; i++)
    write_figure(b, &json, NULL, &b->steps[i]);
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}

static void print_figure(const struct bench *b, const struct figure *f) {
  char size[32];
  printf("  %-16s %6llu %12s", f->name, (unsigned long long)f->n_calls, k3_cli_size_text(size, f->nbytes));
  for (int state = b->info->memory == K3_MEMORY_HOST ? WARM : COLD; state < N_STATES; state++) {
    const struct spread s = spread_of(f->seconds[state], b->n_runs);
    const double rate = s.median > 0 ? (double)f->nbytes / s.median : 0;
    printf(" %11.1f %11.1f %11.1f %9.2f %6.0f%%", 1e6 * s.median, 1e6 * s.p10, 1e6 * s.p90, rate / 1e9, 100 * rate / b->bandwidth);
  }
  printf("\n");
}

static int report(struct k3_cli *cli, const struct bench *b) {
  const bool on_host = b->info->memory == K3_MEMORY_HOST;
  const struct k3_engine_info *info = b->info;
  char size[32];
  if (cli->json)
    return report_json(cli, b);
  if (on_host)
    printf("open %.3f s; plain read %.2f GB/s\n", b->open_seconds, b->bandwidth / 1e9);
  else
    printf("start of CUDA %.3f s; load %s in %.3f s, %.2f GB/s (again, from the page cache: %.3f s, %.2f GB/s); copy within the GPU %.2f GB/s\n",
           info->start_seconds, k3_cli_size_text(size, info->load_nbytes), info->load_seconds, (double)info->load_nbytes / info->load_seconds / 1e9,
           b->reopen_load_seconds, (double)info->load_nbytes / b->reopen_load_seconds / 1e9, b->bandwidth / 1e9);
  printf("append of %llu rows (first pass %.3f ms), draft of %llu x %llu rows (first pass %.3f ms)\n", (unsigned long long)b->context.n_rows,
         1e3 * b->first_append, (unsigned long long)b->draft.n_requests, (unsigned long long)info->block_width, 1e3 * b->first_draft);
  printf("  %-16s %6s %12s", "step", "calls", "bytes");
  for (int state = on_host ? WARM : COLD; state < N_STATES; state++)
    printf(" %8s us %11s %11s %9s %7s", on_host ? "median" : STATE_NAMES[state], "p10", "p90", "GB/s", "share");
  printf("\n");
  if (b->context.n_rows > 0)
    print_figure(b, &b->append);
  print_figure(b, &b->whole);
  for (size_t i = 0; i < b->n_steps; i++)
    print_figure(b, &b->steps[i]);
  return 0;
}

static void free_figures(struct bench *b) {
  for (int state = 0; state < N_STATES; state++) {
    k3_free(b->append.seconds[state]);
    k3_free(b->whole.seconds[state]);
    for (size_t i = 0; i < b->n_steps; i++)
      k3_free(b->steps[i].seconds[state]);
  }
}

// Brings the inputs to the engine's memory and measures.
static enum k3_status bench_session(struct bench *b, struct k3_staging *staging, const struct inputs *in, struct k3_error *err) {
  const struct k3_engine_info *info = b->info;
  const uint64_t width = info->n_taps * info->target_hidden_size;
  const void *taps, *positions, *slots, *ids, *anchors, *tables;
  K3_TRY(k3_staging_input(staging, in->taps.data, in->n_rows * width * 2, &taps, err));
  K3_TRY(k3_staging_input(staging, in->positions, in->n_rows * sizeof *in->positions, &positions, err));
  K3_TRY(k3_staging_input(staging, in->slots, in->n_rows * sizeof *in->slots, &slots, err));
  K3_TRY(k3_staging_input(staging, in->anchor_ids, in->n_requests * sizeof *in->anchor_ids, &ids, err));
  K3_TRY(k3_staging_input(staging, in->anchor_positions, in->n_requests * sizeof *in->anchor_positions, &anchors, err));
  K3_TRY(k3_staging_input(staging, in->tables, in->n_requests * in->max_blocks * sizeof *in->tables, &tables, err));
  b->states = (struct k3_array){(void *)taps, info->memory, K3_DTYPE_BF16, 0};
  b->context = (struct k3_context){.n_rows = in->n_rows, .taps = &b->states, .n_tap_arrays = 1, .positions = positions, .slots = slots};
  b->draft = (struct k3_draft){.n_requests = in->n_requests,
                               .anchor_ids = ids,
                               .anchor_positions = anchors,
                               .block_tables = tables,
                               .max_blocks = in->max_blocks,
                               .draft_ids = {.data = in->draft_ids, .dtype = K3_DTYPE_I64}};
  K3_TRY(k3_staging_output(staging, &b->draft.draft_ids, in->n_requests * info->block_width * sizeof *in->draft_ids, err));
  return measure(b, err);
}

// A device's second load of the image, which is in the page cache then.
static enum k3_status reopen(struct k3_cli *cli, const struct k3_drafter_options *drafter, struct k3_ranks *ranks, double *load_seconds,
                             struct k3_error *err) {
  struct k3_ranks again = {0};
  if (k3_engine_info(ranks->engines[0])->memory == K3_MEMORY_HOST)
    return K3_OK;
  K3_TRY(k3_drafter_open(cli, cli->operands[0], drafter, &again, err));
  *load_seconds = k3_engine_info(again.engines[0])->load_seconds;
  k3_ranks_close(&again);
  return K3_OK;
}

int k3_cmd_bench(struct k3_cli *cli, int argc, char **argv) {
  struct k3_drafter_options drafter = {.tp = 1};
  uint64_t context = 64, requests = 1, n_runs = 0;
  const struct k3_option options[] = {
      K3_DRAFTER_OPTIONS(drafter),
      {"context", 0, K3_OPT_U64, "N", "context rows of each request (default 64)", &context},
      {"requests", 0, K3_OPT_U64, "B", "requests drafted at once (default 1)", &requests},
      {"runs", 0, K3_OPT_U64, "N", "counted passes (default 3, on a GPU 30)", &n_runs},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (drafter.tp > 1)
    return k3_cli_usage(cli, "bench measures one rank; --tp is for run");
  if (requests < 1 || requests > 1 << 16 || context > 1 << 24 || n_runs > 1 << 20)
    return k3_cli_usage(cli, "--requests takes 1 to 65536, --context up to 16777216, --runs up to 1048576");
  struct k3_error err = {0};
  struct inputs in = {0};
  struct k3_cache cache = {0};
  struct k3_ranks ranks = {0};
  const double start = k3_clock();
  struct k3_engine *engine = k3_drafter_open(cli, cli->operands[0], &drafter, &ranks, &err) == K3_OK ? ranks.engines[0] : NULL;
  struct bench b = {.open_seconds = k3_clock() - start, .info = engine ? k3_engine_info(engine) : NULL, .cache = &cache};
  struct k3_staging staging = {.engine = engine};
  bool ok = engine != NULL;
  if (ok && context > b.info->max_positions - b.info->block_width) {
    exit_code = k3_cli_usage(cli, "--context %llu and a block of %llu are beyond the model's limit of %llu", (unsigned long long)context,
                             (unsigned long long)b.info->block_width, (unsigned long long)b.info->max_positions);
    k3_ranks_close(&ranks);
    return exit_code;
  }
  if (ok) {
    b.n_runs = n_runs ? n_runs : b.info->memory == K3_MEMORY_HOST ? CPU_RUNS : GPU_RUNS;
    b.kv_nbytes = b.info->n_layers * requests * (context + b.info->block_width) * b.info->row_width * k3_dtype_bits(b.info->activation_dtype) / 8;
  }
  ok = ok && reopen(cli, &drafter, &ranks, &b.reopen_load_seconds, &err) == K3_OK && make_inputs(b.info, &in, context, requests, &err) == K3_OK &&
       k3_cache_create(engine, b.info->activation_dtype, requests * in.max_blocks, BLOCK_SIZE, NULL, &cache, &err) == K3_OK;
  if (ok) {
    const struct k3_session_options session_options = {
        .max_requests = requests, .max_keys = in.max_blocks * BLOCK_SIZE, .n_threads = cli->n_threads, .progress = &cli->progress};
    b.session = k3_session_create(engine, &session_options, &err);
  }
  ok = b.session && bench_session(&b, &staging, &in, &err) == K3_OK;
  exit_code = ok ? report(cli, &b) : k3_cli_fail(cli, &err);
  free_figures(&b);
  k3_staging_free(&staging);
  k3_session_free(b.session);
  if (engine)
    k3_cache_free(engine, &cache);
  k3_ranks_close(&ranks);
  free_inputs(&in);
  return exit_code;
}
