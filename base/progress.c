#include "base/progress.h"

#include <stdatomic.h>
#include <time.h>

enum { INTERVAL_NS = 100000000 };

static int64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
}

void k3_progress_start(struct k3_progress *progress, const char *what, uint64_t total) {
  if (!progress)
    return;
  progress->what = what;
  progress->total = total;
  atomic_store(&progress->done, 0);
  atomic_store(&progress->next_call_ns, now_ns() + INTERVAL_NS);
}

void k3_progress_add(struct k3_progress *progress, uint64_t n) {
  if (!progress)
    return;
  uint64_t done = atomic_fetch_add(&progress->done, n) + n;
  if (!progress->fn || !progress->what)  // nobody watches, or nobody said what would be done
    return;
  int64_t now = now_ns(), due = atomic_load(&progress->next_call_ns);
  // Who moves the due time on makes the call, so there is one at a time in practice and no lock.
  if (now >= due && atomic_compare_exchange_strong(&progress->next_call_ns, &due, now + INTERVAL_NS))
    progress->fn(progress->ctx, progress->what, done, progress->total);
}

void k3_progress_finish(struct k3_progress *progress) {
  if (progress && progress->fn)
    progress->fn(progress->ctx, progress->what, progress->total, progress->total);
}
