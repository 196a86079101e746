// Where each rank stands among the others, and the messages about ranks that are missing or elsewhere: alike for ranks that are threads and ranks
// that are processes.
#ifndef K3_RUNTIME_COMM_SEATS_H
#define K3_RUNTIME_COMM_SEATS_H

#include <stdbool.h>

#include "runtime/comm.h"

enum k3_comm_kind { K3_COMM_ALL_REDUCE, K3_COMM_REDUCE_SCATTER, K3_COMM_ALL_GATHER };
enum { K3_COMM_STEP_NBYTES = 128 };  // a step's text, longer ones are cut

// What a rank has published: where it stands and what it brings.
struct k3_seat {
  uint64_t n_arrived;  // meetings entered
  uint64_t n_steps;    // collectives begun
  enum k3_comm_kind kind;
  char step[K3_COMM_STEP_NBYTES];  // a copy, since a rank that leaves takes its own texts along; "" before the first
  const void *data;                // of threads: what others read
  uint64_t n;                      // values of a sum (of its part), bytes of an all-gather
  bool gone;
};

const char *k3_comm_kind_name(enum k3_comm_kind kind);
// Whether every rank has entered its meeting n_arrived; *gone is set (never cleared) when one that has not is gone.
bool k3_seats_arrived(const struct k3_seat *seats, int size, uint64_t n_arrived, bool *gone);
// Fills *error with who is missing where `rank` waits, `waited` seconds by now, and where that one was seen last. False when nobody is.
bool k3_seats_blame(const struct k3_seat *seats, int size, int rank, bool gone, double waited, struct k3_error *error);
// Whether all ranks are at the same step; fills *error with the first that is elsewhere.
bool k3_seats_agree(const struct k3_seat *seats, int size, struct k3_error *error);
// What the others hear of a rank that stopped with `why`.
void k3_comm_stopped(int rank, const struct k3_error *why, struct k3_error *error);

#endif
