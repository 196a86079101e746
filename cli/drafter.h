// What run, compare and bench share: an engine on an image, and the outputs of one scenario.
#ifndef K3_CLI_DRAFTER_H
#define K3_CLI_DRAFTER_H

#include "cli/cli.h"
#include "cli/ranks.h"
#include "formats/scenario.h"

struct k3_drafter_options {
  int backend;  // index into K3_DRAFTER_BACKENDS
  uint64_t tp, block_width;
  double rank_timeout;  // seconds; 0: the default
  bool by_launcher;     // ranks may be processes (cli/ranks.h)
};

#define K3_DRAFTER_BACKENDS "cpu|cuda"

// Rows of an option table for the struct `drafter`.
#define K3_DRAFTER_OPTIONS(drafter)                                                                                                 \
  {"backend", 0, K3_OPT_CHOICE, K3_DRAFTER_BACKENDS, "what computes (default cpu)", &(drafter).backend},                            \
      {"tp", 0, K3_OPT_U64, "N", "tensor-parallel ranks (default 1)", &(drafter).tp},                                               \
      {"rank-timeout", 0, K3_OPT_REAL, "SECONDS", "how long a rank waits for the others (default 600)", &(drafter).rank_timeout}, { \
    "block", 0, K3_OPT_U64, "T", "block width; another one than the image's changes every prediction", &(drafter).block_width       \
  }

// Opens an image, or a folder that was cut for as many ranks, for drafting and warns about a block width that is not the image's. Fails with *ranks
// empty, also when embedding or head are absent. Free with k3_ranks_close; ranks->engines[0] describes the model.
enum k3_status k3_drafter_open(struct k3_cli *cli, const char *path, const struct k3_drafter_options *options, struct k3_ranks *ranks,
                               struct k3_error *err);

// X(field, rank-describing name of the output tensor): the outputs in the order in which they are computed.
#define K3_DRAFT_OUTPUTS(X) X(context_states) X(context_kv) X(hidden) X(base_logits) X(logits) X(draft_ids) X(confidence)
enum k3_draft_output {
#define K3_DRAFT_OUTPUT_ENUM(name) K3_DRAFT_##name,
  K3_DRAFT_OUTPUTS(K3_DRAFT_OUTPUT_ENUM)
#undef K3_DRAFT_OUTPUT_ENUM
      K3_N_DRAFT_OUTPUTS
};

// One scenario's results, all requests; arrays that were not asked for are NULL. Zero-initialise; free with k3_drafts_free.
struct k3_drafts {
  void *arrays[K3_N_DRAFT_OUTPUTS];  // F32, draft_ids I64
  char sums[32], sums_why[256];      // how sums over the ranks were completed (k3_session_sums)
};
// Shape of an output: its rank, *dims filled.
unsigned k3_draft_output_shape(enum k3_draft_output output, const struct k3_engine_info *info, const struct k3_scenario *scenario, uint64_t dims[3]);
const char *k3_draft_output_name(enum k3_draft_output output);

// Maps and checks a scenario file for an engine. `mapping` must outlive the scenario.
struct k3_mapping;
enum k3_status k3_drafter_scenario(const struct k3_engine *engine, const char *path, struct k3_mapping *mapping, struct k3_scenario *scenario,
                                   struct k3_error *err);
// Runs it: the outputs of the set `wanted` (bits 1 << output), rank 0's; when rank 0 is another process, draft_ids alone. Confidence is left out when
// the image has no head for it. K3_COMM when the ranks do not draft the same.
//   previous_ids  [B, T] what each slot is conditioned on instead of its own drafts (runtime.h), or NULL
enum k3_status k3_drafter_run(struct k3_cli *cli, struct k3_ranks *ranks, const struct k3_scenario *scenario, unsigned wanted,
                              const int64_t *previous_ids, struct k3_drafts *drafts, struct k3_error *err);
void k3_drafts_free(struct k3_drafts *drafts);

#endif
