// A pool of threads that share out numbered work items. The items are handed out in order, so an item's result must not depend on who does it:
// that is what makes every output of k3pack independent of the number of threads.
#ifndef K3_BASE_POOL_H
#define K3_BASE_POOL_H

#include <stdint.h>

#include "base/error.h"

struct k3_pool;

// Does item `item`; `worker` (0 .. n_threads-1) names the calling thread, for scratch space. *err is the worker's own, empty on entry.
typedef enum k3_status (*k3_pool_fn)(void *ctx, int worker, uint64_t item, struct k3_error *err);

// Starts n_threads - 1 threads (the caller of k3_pool_run is the other one); n_threads < 1 means one per CPU. NULL and *err on failure.
struct k3_pool *k3_pool_create(int n_threads, struct k3_error *err);
int k3_pool_n_threads(const struct k3_pool *pool);
// Calls fn for the items 0 .. n_items-1 and returns when all are done. After the first failure no further item is started and the error with the
// lowest item number among those seen is reported. Allocates nothing. One run at a time per pool.
enum k3_status k3_pool_run(struct k3_pool *pool, uint64_t n_items, k3_pool_fn fn, void *ctx, struct k3_error *err);
void k3_pool_free(struct k3_pool *pool);  // NULL is a no-op

#endif
