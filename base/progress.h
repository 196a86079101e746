// Progress of long work: the workers count bytes, whoever watches draws a line. The library prints nothing itself.
#ifndef K3_BASE_PROGRESS_H
#define K3_BASE_PROGRESS_H

#include <stdint.h>

// Called with bytes (or items) done and in total, at most about ten times a second and once at the end; may run on any thread, one at a time.
typedef void (*k3_progress_fn)(void *ctx, const char *what, uint64_t done, uint64_t total);

// Zero-initialise with the callback (NULL: nobody watches). The counters are updated atomically.
struct k3_progress {
  k3_progress_fn fn;
  void *ctx;
  const char *what;
  uint64_t total;
  _Atomic uint64_t done;
  _Atomic int64_t next_call_ns;
};

void k3_progress_start(struct k3_progress *progress, const char *what, uint64_t total);  // NULL progress: no-op
void k3_progress_add(struct k3_progress *progress, uint64_t n);
void k3_progress_finish(struct k3_progress *progress);

#endif
