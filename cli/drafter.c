#include "cli/drafter.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/file.h"
#include "cli/staging.h"
#include "loader/split.h"

enum { BLOCK_SIZE = 64, MAX_REQUESTS = 16 };  // rows of a cache block; requests drafted at a time

static const char *const OUTPUT_NAMES[] = {
#define OUTPUT_NAME(name) #name,
    K3_DRAFT_OUTPUTS(OUTPUT_NAME)
#undef OUTPUT_NAME
};

const char *k3_draft_output_name(enum k3_draft_output output) {
  return OUTPUT_NAMES[output];
}

unsigned k3_draft_output_shape(enum k3_draft_output output, const struct k3_engine_info *info, const struct k3_scenario *scenario, uint64_t dims[3]) {
  const uint64_t n = scenario->n_rows, B = scenario->n_requests, T = info->block_width;
  switch (output) {
    case K3_DRAFT_context_states: dims[0] = n, dims[1] = info->hidden_size; return 2;
    case K3_DRAFT_context_kv: dims[0] = info->n_layers, dims[1] = n, dims[2] = info->row_width; return 3;
    case K3_DRAFT_hidden: dims[0] = B, dims[1] = T, dims[2] = info->hidden_size; return 3;
    case K3_DRAFT_base_logits:
    case K3_DRAFT_logits: dims[0] = B, dims[1] = T, dims[2] = info->vocab_size; return 3;
    default: dims[0] = B, dims[1] = T; return 2;
  }
}

enum k3_status k3_drafter_open(struct k3_cli *cli, const char *path, const struct k3_drafter_options *options, struct k3_ranks *ranks,
                               struct k3_error *err) {
  struct k3_engine_options engine_options = {
      .backend = options->backend == 0 ? "cpu" : "cuda",
      .block_width = options->block_width,
      .progress = &cli->progress,
  };
  const struct k3_ranks_options how = {options->tp, options->rank_timeout, options->by_launcher};
  K3_TRY(k3_may_be_image(path, err));
  K3_TRY(k3_ranks_open(path, &engine_options, &how, ranks, err));
  const struct k3_engine_info *info = k3_engine_info(ranks->engines[0]);
  if (!info->has_embedding || !info->has_head) {
    k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, path, info->has_embedding ? "lm_head.weight" : "model.embed_tokens.weight",
            "convert the drafter again with --target MODEL, which packs the target's", "the image does not hold it: it is borrowed from the target");
    k3_ranks_close(ranks);
    return K3_BAD_INPUT;
  }
  if (info->block_width != info->image_block_width)
    k3_cli_warn(cli, "blocks of %llu rows where the image was made for %llu: every prediction changes", (unsigned long long)info->block_width,
                (unsigned long long)info->image_block_width);
  return K3_OK;
}

enum k3_status k3_drafter_scenario(const struct k3_engine *engine, const char *path, struct k3_mapping *mapping, struct k3_scenario *scenario,
                                   struct k3_error *err) {
  const struct k3_engine_info *info = k3_engine_info(engine);
  const struct k3_scenario_shape shape = {info->n_taps * info->target_hidden_size, info->block_width, info->vocab_size, info->max_positions};
  K3_TRY(k3_map_file(path, mapping, err));
  return k3_scenario_parse(mapping->data, mapping->nbytes, path, &shape, scenario, err);
}

// The cache blocks of all requests, one after another.
struct paging {
  int32_t *tables;      // [B, max_blocks]
  uint64_t max_blocks;  // of one request
  uint64_t n_blocks;
  int64_t *slots;        // [n] of the context rows
  void *aligned_states;  // a copy of the states when the file has them at an odd address
};

static enum k3_status lay_out(const struct k3_scenario *s, uint64_t block_width, struct paging *paging, struct k3_error *err) {
  for (uint64_t b = 0; b < s->n_requests; b++) {
    uint64_t n = k3_ceil_div_u64((uint64_t)s->anchor_positions[b] + block_width, BLOCK_SIZE);
    paging->max_blocks = n > paging->max_blocks ? n : paging->max_blocks;
    paging->n_blocks += n;
  }
  uint64_t n_entries;
  if (paging->n_blocks > INT32_MAX || !k3_mul_u64(s->n_requests, paging->max_blocks, &n_entries))
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "anchor_positions", "a shorter context", "%llu cache blocks are too many",
                   (unsigned long long)paging->n_blocks);
  paging->tables = k3_calloc(n_entries, sizeof *paging->tables, err);
  paging->slots = k3_calloc(s->n_rows, sizeof *paging->slots, err);
  if (!paging->tables || !paging->slots)
    return K3_NO_MEMORY;
  int32_t next = 0;
  for (uint64_t b = 0; b < s->n_requests; b++)
    for (uint64_t i = 0; i < k3_ceil_div_u64((uint64_t)s->anchor_positions[b] + block_width, BLOCK_SIZE); i++)
      paging->tables[b * paging->max_blocks + i] = next++;
  for (uint64_t row = 0; row < s->n_rows; row++) {
    uint64_t position = (uint64_t)s->positions[row];
    int64_t block = paging->tables[(uint64_t)s->request_ids[row] * paging->max_blocks + position / BLOCK_SIZE];
    paging->slots[row] = block * BLOCK_SIZE + (int64_t)(position % BLOCK_SIZE);
  }
  return K3_OK;
}

static enum k3_status align_states(const struct k3_scenario *s, uint64_t state_width, struct paging *paging, struct k3_error *err) {
  const uint64_t elem_nbytes = k3_dtype_bits(s->state_dtype) / 8;
  if ((uintptr_t)s->target_states % elem_nbytes == 0)
    return K3_OK;
  paging->aligned_states = k3_calloc(s->n_rows * state_width, elem_nbytes, err);
  if (!paging->aligned_states)
    return K3_NO_MEMORY;
  memcpy(paging->aligned_states, s->target_states, s->n_rows * state_width * elem_nbytes);
  return K3_OK;
}

static enum k3_status alloc_outputs(const struct k3_engine_info *info, const struct k3_scenario *s, unsigned wanted, struct k3_drafts *drafts,
                                    struct k3_error *err) {
  for (unsigned i = 0; i < K3_N_DRAFT_OUTPUTS; i++) {
    if (!(wanted >> i & 1) || (i == K3_DRAFT_confidence && !info->has_confidence))
      continue;
    uint64_t dims[3], n = 1;
    unsigned rank = k3_draft_output_shape(i, info, s, dims);
    for (unsigned d = 0; d < rank; d++)
      if (!k3_mul_u64(n, dims[d], &n))
        return k3_fail_memory(err, SIZE_MAX);
    drafts->arrays[i] = k3_calloc(n, i == K3_DRAFT_draft_ids ? sizeof(int64_t) : sizeof(float), err);
    if (!drafts->arrays[i])
      return K3_NO_MEMORY;
  }
  return K3_OK;
}

// Rows from `row` on of an output with `width` elements a row, or an absent array.
static struct k3_array part_of(const struct k3_drafts *drafts, enum k3_draft_output output, uint64_t row, uint64_t width) {
  bool is_ids = output == K3_DRAFT_draft_ids;
  struct k3_array array = {.dtype = is_ids ? K3_DTYPE_I64 : K3_DTYPE_F32};
  if (drafts->arrays[output])
    array.data = (unsigned char *)drafts->arrays[output] + row * width * (is_ids ? sizeof(int64_t) : sizeof(float));
  return array;
}

static enum k3_status run_requests(struct k3_session *session, struct k3_staging *staging, const struct k3_engine_info *info,
                                   const struct k3_cache *cache, const struct k3_scenario *s, const struct paging *paging,
                                   const int64_t *previous_ids, struct k3_drafts *drafts, struct k3_error *err) {
  const uint64_t T = info->block_width;
  for (uint64_t b = 0; b < s->n_requests; b += MAX_REQUESTS) {
    const uint64_t n = s->n_requests - b < MAX_REQUESTS ? s->n_requests - b : MAX_REQUESTS;
    struct k3_draft draft = {
        .n_requests = n,
        .max_blocks = paging->max_blocks,
        .draft_ids = part_of(drafts, K3_DRAFT_draft_ids, b, T),
        .confidence = part_of(drafts, K3_DRAFT_confidence, b, T),
        .hidden = part_of(drafts, K3_DRAFT_hidden, b * T, info->hidden_size),
        .base_logits = part_of(drafts, K3_DRAFT_base_logits, b * T, info->vocab_size),
        .logits = part_of(drafts, K3_DRAFT_logits, b * T, info->vocab_size),
    };
    const void *ids, *positions, *tables, *previous;
    K3_TRY(k3_staging_input(staging, s->anchor_ids + b, n * sizeof *s->anchor_ids, &ids, err));
    K3_TRY(k3_staging_input(staging, s->anchor_positions + b, n * sizeof *s->anchor_positions, &positions, err));
    K3_TRY(k3_staging_input(staging, paging->tables + b * paging->max_blocks, n * paging->max_blocks * sizeof *paging->tables, &tables, err));
    K3_TRY(k3_staging_input(staging, previous_ids ? previous_ids + b * T : NULL, n * T * sizeof *previous_ids, &previous, err));
    draft.anchor_ids = ids;
    draft.anchor_positions = positions;
    draft.block_tables = tables;
    draft.previous_ids = previous;
    K3_TRY(k3_staging_output(staging, &draft.draft_ids, n * T * sizeof(int64_t), err));
    K3_TRY(k3_staging_output(staging, &draft.confidence, n * T * sizeof(float), err));
    K3_TRY(k3_staging_output(staging, &draft.hidden, n * T * info->hidden_size * sizeof(float), err));
    K3_TRY(k3_staging_output(staging, &draft.base_logits, n * T * info->vocab_size * sizeof(float), err));
    K3_TRY(k3_staging_output(staging, &draft.logits, n * T * info->vocab_size * sizeof(float), err));
    K3_TRY(k3_session_draft(session, cache, &draft, NULL, err));
    K3_TRY(k3_staging_fetch(staging, err));
  }
  return K3_OK;
}

static enum k3_status append_context(struct k3_session *session, struct k3_staging *staging, const struct k3_engine_info *info,
                                     const struct k3_cache *cache, const struct k3_scenario *s, const struct paging *paging, struct k3_drafts *drafts,
                                     struct k3_error *err) {
  const uint64_t states_nbytes = s->n_rows * info->n_taps * info->target_hidden_size * k3_dtype_bits(s->state_dtype) / 8;
  const void *states, *positions, *slots;
  K3_TRY(k3_staging_input(staging, paging->aligned_states ? paging->aligned_states : s->target_states, states_nbytes, &states, err));
  K3_TRY(k3_staging_input(staging, s->positions, s->n_rows * sizeof *s->positions, &positions, err));
  K3_TRY(k3_staging_input(staging, paging->slots, s->n_rows * sizeof *paging->slots, &slots, err));
  const struct k3_array taps = {(void *)states, info->memory, s->state_dtype, 0};
  struct k3_context context = {
      .n_rows = s->n_rows,
      .taps = &taps,
      .n_tap_arrays = 1,
      .positions = positions,
      .slots = slots,
      .states = part_of(drafts, K3_DRAFT_context_states, 0, info->hidden_size),
      .rows = part_of(drafts, K3_DRAFT_context_kv, 0, info->row_width),
  };
  K3_TRY(k3_staging_output(staging, &context.states, s->n_rows * info->hidden_size * sizeof(float), err));
  K3_TRY(k3_staging_output(staging, &context.rows, info->n_layers * s->n_rows * info->row_width * sizeof(float), err));
  K3_TRY(k3_session_append(session, cache, &context, NULL, err));
  return k3_staging_fetch(staging, err);
}

// One scenario on all ranks.
struct run {
  struct k3_cli *cli;
  const struct k3_ranks *ranks;
  const struct k3_scenario *scenario;
  const struct paging *paging;
  const int64_t *previous_ids;
  struct k3_drafts *drafts;  // [ranks->n]
};

// Threads of one rank: the ranks share what there is.
static int threads_of_rank(const struct run *run) {
  long n = run->cli->n_threads > 0 ? run->cli->n_threads : sysconf(_SC_NPROCESSORS_ONLN);
  return run->ranks->n == 1 ? run->cli->n_threads : n > run->ranks->n ? (int)(n / run->ranks->n) : 1;
}

static enum k3_status run_rank(void *ctx, int i, struct k3_engine *engine, struct k3_error *err) {
  const struct run *run = ctx;
  const struct k3_engine_info *info = k3_engine_info(engine);
  const struct k3_scenario *s = run->scenario;
  const struct paging *paging = run->paging;
  struct k3_drafts *drafts = &run->drafts[i];
  struct k3_cache cache = {0};
  struct k3_staging staging = {.engine = engine};
  struct k3_session *session = NULL;
  enum k3_status status;
  K3_TRY_GOTO(status, out, k3_cache_create(engine, info->activation_dtype, paging->n_blocks, BLOCK_SIZE, NULL, &cache, err));
  struct k3_session_options options = {
      .max_requests = s->n_requests < MAX_REQUESTS ? s->n_requests : MAX_REQUESTS,
      .max_keys = paging->max_blocks * BLOCK_SIZE,
      .n_threads = threads_of_rank(run),
      .progress = run->ranks->first + i == 0 ? &run->cli->progress : NULL,
  };
  session = k3_session_create(engine, &options, err);
  status = session ? K3_OK : K3_NO_MEMORY;
  if (!session)
    goto out;
  const char *how, *why;
  k3_session_sums(session, &how, &why);
  snprintf(drafts->sums, sizeof drafts->sums, "%s", how);
  snprintf(drafts->sums_why, sizeof drafts->sums_why, "%s", why);
  K3_TRY_GOTO(status, out, append_context(session, &staging, info, &cache, s, paging, drafts, err));
  status = run_requests(session, &staging, info, &cache, s, paging, run->previous_ids, drafts, err);
out:
  k3_staging_free(&staging);
  k3_session_free(session);
  k3_cache_free(engine, &cache);
  return status;
}

// The ranks take the same steps, so the others draft too when rank 0 needs logits; what they draft must be the same.
static const unsigned OF_LOGITS = 1u << K3_DRAFT_draft_ids | 1u << K3_DRAFT_base_logits | 1u << K3_DRAFT_logits | 1u << K3_DRAFT_confidence;

static enum k3_status alloc_rank_outputs(const struct k3_engine_info *info, const struct run *run, unsigned wanted, struct k3_error *err) {
  for (int i = 0; i < run->ranks->n; i++) {
    const bool first = run->ranks->first + i == 0;
    K3_TRY(alloc_outputs(info, run->scenario, first ? wanted : wanted & OF_LOGITS ? 1u << K3_DRAFT_draft_ids : 0, &run->drafts[i], err));
  }
  return K3_OK;
}

static enum k3_status compare_ids(const int64_t *ids, const int64_t *others, int rank, uint64_t n, struct k3_error *err) {
  for (uint64_t i = 0; i < n; i++) {
    if (others[i] != ids[i])
      return k3_fail(err, K3_COMM, K3_RULE_NONE, NULL, "draft_ids", "the same drafts on every rank", "rank %d drafts %lld where rank 0 drafts %lld",
                     rank, (long long)others[i], (long long)ids[i]);
  }
  return K3_OK;
}

static enum k3_status compare_ranks(const struct k3_engine_info *info, const struct run *run, struct k3_ranks *ranks, unsigned wanted,
                                    struct k3_error *err) {
  const int64_t *ids = run->drafts[0].arrays[K3_DRAFT_draft_ids];
  const uint64_t n = run->scenario->n_requests * info->block_width;
  if (!(wanted >> K3_DRAFT_draft_ids & 1))
    return K3_OK;
  if (!k3_ranks_are_processes(ranks)) {
    for (int r = 1; r < ranks->n; r++)
      K3_TRY(compare_ids(ids, run->drafts[r].arrays[K3_DRAFT_draft_ids], r, n, err));
    return K3_OK;
  }
  int64_t *all = k3_calloc(n * (uint64_t)ranks->size, sizeof *all, err);
  enum k3_status status = all ? k3_ranks_gather(ranks, "draft_ids", ids, n * sizeof *ids, all, err) : K3_NO_MEMORY;
  for (int r = 1; r < ranks->size && status == K3_OK; r++)
    status = compare_ids(all, all + (uint64_t)r * n, r, n, err);
  k3_free(all);
  return status;
}

enum k3_status k3_drafter_run(struct k3_cli *cli, struct k3_ranks *ranks, const struct k3_scenario *s, unsigned wanted, const int64_t *previous_ids,
                              struct k3_drafts *drafts, struct k3_error *err) {
  const struct k3_engine_info *info = k3_engine_info(ranks->engines[0]);
  struct paging paging = {0};
  struct run run = {cli, ranks, s, &paging, previous_ids, NULL};
  enum k3_status status;
  *drafts = (struct k3_drafts){0};
  run.drafts = k3_calloc((size_t)ranks->n, sizeof *run.drafts, err);
  if (!run.drafts)
    return K3_NO_MEMORY;
  K3_TRY_GOTO(status, out, lay_out(s, info->block_width, &paging, err));
  K3_TRY_GOTO(status, out, align_states(s, info->n_taps * info->target_hidden_size, &paging, err));
  K3_TRY_GOTO(status, out, alloc_rank_outputs(info, &run, wanted, err));
  K3_TRY_GOTO(status, out, k3_ranks_run(ranks, run_rank, &run, err));
  K3_TRY_GOTO(status, out, compare_ranks(info, &run, ranks, wanted, err));
  *drafts = run.drafts[0];
  run.drafts[0] = (struct k3_drafts){0};
out:
  for (int r = 0; r < ranks->n; r++)
    k3_drafts_free(&run.drafts[r]);
  k3_free(run.drafts);
  k3_free(paging.tables);
  k3_free(paging.slots);
  k3_free(paging.aligned_states);
  return status;
}

void k3_drafts_free(struct k3_drafts *drafts) {
  for (unsigned i = 0; i < K3_N_DRAFT_OUTPUTS; i++)
    k3_free(drafts->arrays[i]);
  *drafts = (struct k3_drafts){0};
}
