// Time as it passes, for measurements: seconds from an unnamed beginning.
#ifndef K3_BASE_CLOCK_H
#define K3_BASE_CLOCK_H

#include <time.h>

static inline double k3_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
