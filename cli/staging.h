// Host arrays for an engine that works on a device: inputs are copied there before a call, outputs back after it. On a CPU everything is used where
// it lies and nothing is copied.
#ifndef K3_CLI_STAGING_H
#define K3_CLI_STAGING_H

#include "runtime/runtime.h"

struct k3_staged {
  void *memory, *host;
  size_t nbytes;
  bool is_output;
};

// Zero-initialise with the engine; free with k3_staging_free.
struct k3_staging {
  struct k3_engine *engine;
  struct k3_staged *items;
  size_t n_items, capacity;
};

// Where the engine finds nbytes of the host: *memory. NULL stays NULL.
enum k3_status k3_staging_input(struct k3_staging *staging, const void *host, size_t nbytes, const void **memory, struct k3_error *err);
// Makes an output array of the host one of the engine's memory. An absent one (data NULL) stays absent.
enum k3_status k3_staging_output(struct k3_staging *staging, struct k3_array *array, size_t nbytes, struct k3_error *err);
// Brings all outputs to the host and lets go of everything that was staged so far.
enum k3_status k3_staging_fetch(struct k3_staging *staging, struct k3_error *err);
void k3_staging_free(struct k3_staging *staging);

#endif
