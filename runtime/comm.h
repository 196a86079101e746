// The ranks of tensor parallelism and what they do together: sums and gathers, each a step that all ranks take in the same order. A rank that dies,
// hangs or does something else ends in an error that names it, on every rank, within a bound: K3_COMM says rank, step, what was expected and what was
// seen.
#ifndef K3_RUNTIME_COMM_H
#define K3_RUNTIME_COMM_H

#include <stdint.h>

#include "base/api.h"
#include "base/error.h"

struct k3_comm;
struct k3_comm_ops {
  // values[i] = the FP32 sum over the ranks, added in rank order, so that every rank gets the same bits and no schedule changes them. In place.
  //   step    what is summed, for messages; all ranks give the same text
  //   values  [n], n alike on all ranks (0 is fine), in the memory of the backend
  //   stream  NULL on a CPU
  enum k3_status (*all_reduce)(struct k3_comm *comm, const char *step, float *values, uint64_t n, void *stream, struct k3_error *err);
  // dst[i] = the FP32 sum over the ranks of values[rank * n + i], added in rank order: each rank's part of what an all-reduce would give, bit for
  // bit.
  //   values  [size * n], left as it is but for what dst overlaps
  //   dst     [n]; may be values + rank * n, else it must not lie in values
  enum k3_status (*reduce_scatter)(struct k3_comm *comm, const char *step, const float *values, uint64_t n, float *dst, void *stream,
                                   struct k3_error *err);
  // dst receives the ranks' nbytes bytes one after another, in rank order. src must not lie in dst.
  enum k3_status (*all_gather)(struct k3_comm *comm, const char *step, const void *src, uint64_t nbytes, void *dst, void *stream,
                               struct k3_error *err);
  // This rank will take no further step; whoever waits for it fails with `why` (may be NULL) instead of waiting for the bound.
  void (*abort)(struct k3_comm *comm, const struct k3_error *why);
  void (*destroy)(struct k3_comm *comm);
};

// One rank's end. After a failed step every later one fails too.
struct k3_comm {
  const struct k3_comm_ops *ops;
  int rank, size;
};

// The ranks as threads of one process: comms[r] is for the thread of rank r, and that thread alone. Each ends with its own ops->destroy, in any
// order; a destroyed rank counts as one that has aborted. On failure comms is all NULL.
//   bound_seconds  how long a step waits for the others
K3_API enum k3_status k3_comm_threads_create(int size, double bound_seconds, struct k3_comm **comms, struct k3_error *err);

// One rank of several that are processes, on one machine or many: call it in each. Rank 0 listens at address:port until all have come, the others try
// until it does; sums and gathers pass through rank 0, added in rank order, so that their bits are those of ranks that are threads. Nothing that
// comes from a connection is believed unchecked, and connections of something else are dropped; whoever can reach the port can take a rank's place,
// so it belongs into a network that is trusted. All ranks must be of one byte order.
//   rank, size     this rank and how many there are; a rank with another size, a rank twice: K3_COMM on all
//   address, port  a name or number of the machine of rank 0, and a port that is free there
//   bound_seconds  how long the ranks may take to come, and later a step waits for the others
// On success *comm is to be ended with its ops->destroy; on failure it is NULL, and K3_COMM names who is missing or differs.
K3_API enum k3_status k3_comm_processes_create(int rank, int size, const char *address, int port, double bound_seconds, struct k3_comm **comm,
                                               struct k3_error *err);

#endif
