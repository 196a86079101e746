// The ranks of a tensor-parallel run as threads of this process: an engine and a communicator each.
#ifndef K3_CLI_RANKS_H
#define K3_CLI_RANKS_H

#include "runtime/comm.h"
#include "runtime/runtime.h"

struct k3_ranks {
  int n;
  struct k3_engine **engines;  // [n]
  struct k3_comm **comms;      // [n]; NULL with one rank
};

// Opens an image, or a folder that was cut for n ranks, on n ranks; `options` are those of each but for rank, size and communicator. On failure
// *ranks is empty; the error is that of the rank that failed of itself.
//   bound_seconds  how long a rank waits for the others
enum k3_status k3_ranks_open(const char *path, const struct k3_engine_options *options, int n, double bound_seconds, struct k3_ranks *ranks,
                             struct k3_error *err);
void k3_ranks_close(struct k3_ranks *ranks);  // an empty struct is fine

// Calls fn(ctx, rank, engine, err) on a thread for each rank (rank 0 on the caller's) and waits for all.
typedef enum k3_status (*k3_rank_fn)(void *ctx, int rank, struct k3_engine *engine, struct k3_error *err);
enum k3_status k3_ranks_run(struct k3_ranks *ranks, k3_rank_fn fn, void *ctx, struct k3_error *err);

#endif
