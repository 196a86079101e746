#include "runtime/comm_seats.h"

#include <stdio.h>
#include <string.h>

typedef unsigned long long ull;  // for %llu

const char *k3_comm_kind_name(enum k3_comm_kind kind) {
  return kind == K3_COMM_ALL_REDUCE ? "all-reduce" : kind == K3_COMM_REDUCE_SCATTER ? "reduce-scatter" : "all-gather";
}

bool k3_seats_arrived(const struct k3_seat *seats, int size, uint64_t n_arrived, bool *gone) {
  bool all = true;
  for (int r = 0; r < size; r++) {
    bool here = seats[r].n_arrived >= n_arrived;
    all &= here;
    *gone |= !here && seats[r].gone;
  }
  return all;
}

bool k3_seats_blame(const struct k3_seat *seats, int size, int rank, bool gone, double waited, struct k3_error *error) {
  const struct k3_seat *mine = &seats[rank], *late = NULL;
  int who = 0;
  for (int r = 0; r < size; r++) {
    const struct k3_seat *seat = &seats[r];
    if (seat->n_arrived < mine->n_arrived && (!late || (seat->gone && !late->gone))) {
      late = seat;
      who = r;
    }
  }
  if (!late)
    return false;
  char seen[192];
  if (late->n_steps == 0)
    snprintf(seen, sizeof seen, "at no step yet");
  else
    snprintf(seen, sizeof seen, "at %s of %s, step %llu", k3_comm_kind_name(late->kind), late->step, (ull)late->n_steps);
  k3_fail(error, K3_COMM, K3_RULE_NONE, NULL, mine->step, NULL, "rank %d %s: rank %d expected it at %s of %s, step %llu%s%.3g%s; it was seen %s", who,
          gone ? "is gone" : "is late or dead", rank, k3_comm_kind_name(mine->kind), mine->step, (ull)mine->n_steps, gone ? " (" : ", and waited ",
          waited, gone ? " s)" : " s", seen);
  return true;
}

bool k3_seats_agree(const struct k3_seat *seats, int size, struct k3_error *error) {
  const struct k3_seat *first = &seats[0];
  for (int r = 0; r < size; r++) {
    const struct k3_seat *other = &seats[r];
    if (other->kind == first->kind && other->n == first->n && strcmp(other->step, first->step) == 0)
      continue;
    k3_fail(error, K3_COMM, K3_RULE_NONE, NULL, first->step, NULL,
            "step %llu: expected %s of %s with %llu values as on rank 0, seen %s of %s with %llu on rank %d", (ull)first->n_steps,
            k3_comm_kind_name(first->kind), first->step, (ull)first->n, k3_comm_kind_name(other->kind), other->step, (ull)other->n, r);
    return false;
  }
  return true;
}

void k3_comm_stopped(int rank, const struct k3_error *why, struct k3_error *error) {
  char text[384];
  k3_fail(error, K3_COMM, why->rule, why->file[0] ? why->file : NULL, why->tensor[0] ? why->tensor : NULL, NULL, "rank %d stopped: %s", rank,
          k3_printable(text, sizeof text, why->found, strlen(why->found), sizeof text - 1));
}
