// The ranks of a tensor-parallel run, an engine and a communicator each: threads of this process, or one rank of this process and the others in
// processes that a launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
#ifndef K3_CLI_RANKS_H
#define K3_CLI_RANKS_H

#include "runtime/comm.h"
#include "runtime/runtime.h"

struct k3_ranks {
  int n;                       // ranks of this process
  int first, size;             // which they are, first .. first + n - 1, of how many
  int device;                  // number of the first one's GPU
  struct k3_engine **engines;  // [n]
  struct k3_comm **comms;      // [n]; NULL with one rank
};

struct k3_ranks_options {
  uint64_t tp;           // ranks; K3_RANKS_AS_LAUNCHED: as many as a launcher has started, or one
  double bound_seconds;  // how long a rank waits for the others; 0: K3_RANKS_BOUND_SECONDS
  bool by_launcher;      // one rank of this process where WORLD_SIZE is 2 or more
};
enum { K3_MAX_RANKS = 64, K3_RANKS_BOUND_SECONDS = 600 };
#define K3_RANKS_AS_LAUNCHED UINT64_MAX

// Brings the ranks together, with no engines yet. K3_BAD_ARGUMENT when --tp or a launcher's variables make no sense; K3_COMM names the ranks that did
// not come. On failure *ranks is empty.
enum k3_status k3_ranks_meet(const struct k3_ranks_options *options, struct k3_ranks *ranks, struct k3_error *err);

// Meets and opens an image, or a folder that was cut for so many ranks; `options` are those of each engine but for rank, size and communicator. On
// failure *ranks is empty; the error is that of the rank that failed of itself. Ranks in other processes must have opened the same image: K3_COMM.
enum k3_status k3_ranks_open(const char *path, const struct k3_engine_options *options, const struct k3_ranks_options *how, struct k3_ranks *ranks,
                             struct k3_error *err);
// What all processes must have alike, such as an image's seal: `text` is compared with theirs. K3_COMM names a rank that has another one, and both.
// Nothing to do when all ranks are of this process.
enum k3_status k3_ranks_agree(struct k3_ranks *ranks, const char *what, const char *text, struct k3_error *err);
// The bytes of every rank's process one after another, [size, nbytes] at dst; collective.
enum k3_status k3_ranks_gather(struct k3_ranks *ranks, const char *what, const void *src, uint64_t nbytes, void *dst, struct k3_error *err);
static inline bool k3_ranks_are_processes(const struct k3_ranks *ranks) {
  return ranks->size > ranks->n;
}
// The same with the SHA-256 of bytes, such as an input's.
enum k3_status k3_ranks_agree_on_bytes(struct k3_ranks *ranks, const char *what, const void *src, uint64_t nbytes, struct k3_error *err);
// This process ends with *why: ranks in others are told instead of being left to wonder.
void k3_ranks_abort(struct k3_ranks *ranks, const struct k3_error *why);
void k3_ranks_close(struct k3_ranks *ranks);  // an empty struct is fine

// Calls fn(ctx, i, engine, err) on a thread for each rank of this process (the first on the caller's) and waits for all; i: 0 .. n - 1.
typedef enum k3_status (*k3_rank_fn)(void *ctx, int i, struct k3_engine *engine, struct k3_error *err);
enum k3_status k3_ranks_run(struct k3_ranks *ranks, k3_rank_fn fn, void *ctx, struct k3_error *err);

#endif
