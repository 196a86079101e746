// What the numbers of one tensor look like. A view is looked at as one tensor of all its shards' rows.
#ifndef K3_LOADER_STATS_H
#define K3_LOADER_STATS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/progress.h"
#include "loader/ckpt.h"

enum { K3_STATS_MAX_FIRST = 4096 };

struct k3_stats {
  const char *name;
  enum k3_dtype dtype;
  uint64_t shape[K3_ST_MAX_RANK];
  unsigned rank;
  bool is_view;
  uint64_t n_elems, nbytes;
  bool numeric;  // the members below are filled (loader/element.h)
  uint64_t n_nan, n_inf, n_zero;
  double min, max, mean, std, max_abs;  // of the finite elements; 0 when there are none
  double first[K3_STATS_MAX_FIRST];     // [n_first], row-major from the beginning
  size_t n_first;
};

// Reads the tensor (or, of an image, the view) called `name` whole, 4 MiB at a time.
//   n_first  how many of the first elements to keep, at most K3_STATS_MAX_FIRST
// K3_BAD_ARGUMENT when there is no such tensor, with the nearest name; K3_IO.
enum k3_status k3_stats_of(const struct k3_ckpt *ckpt, const char *name, size_t n_first, struct k3_progress *progress, struct k3_stats *stats,
                           struct k3_error *err);

#endif
