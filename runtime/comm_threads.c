// Ranks that are threads of one process and reach into each other's buffers.
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "runtime/comm.h"

typedef unsigned long long ull;  // for %llu

enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };

// What a rank has published: where it stands and what it brings.
struct seat {
  uint64_t n_arrived;  // barriers entered
  uint64_t n_steps;    // collectives begun
  enum kind kind;
  char step[128];  // a copy, since a rank that leaves takes its own texts along; "" before the first
  const void *data;
  uint64_t n;
  bool gone;
};

struct group {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int size, n_alive;
  double bound_seconds;
  bool failed;
  struct k3_error error;  // of the first failure, told to everyone
  struct seat seats[];    // [size]
};

struct comm_threads {
  struct k3_comm comm;
  struct group *group;
};

static struct comm_threads *self_of(struct k3_comm *comm) {
  return (struct comm_threads *)comm;
}

static const char *kind_name(enum kind kind) {
  return kind == ALL_REDUCE ? "all-reduce" : kind == REDUCE_SCATTER ? "reduce-scatter" : "all-gather";
}

// Notes the first failure; the mutex is held.
static void set_failed(struct group *group, const struct k3_error *error) {
  if (!group->failed)
    group->error = *error;
  group->failed = true;
  pthread_cond_broadcast(&group->changed);
}

static enum k3_status give_error(const struct group *group, struct k3_error *err) {
  if (err && err->status == K3_OK)
    *err = group->error;
  return group->error.status;
}

// Somebody is missing at this rank's step: the message says who, and where it was seen last.
static void blame(struct group *group, int rank, bool gone, double waited) {
  const struct seat *mine = &group->seats[rank], *late = NULL;
  int who = 0;
  for (int r = 0; r < group->size; r++) {
    const struct seat *seat = &group->seats[r];
    if (seat->n_arrived < mine->n_arrived && (!late || (seat->gone && !late->gone))) {
      late = seat;
      who = r;
    }
  }
  if (!late)
    return;
  struct k3_error error = {0};
  char seen[192];
  if (late->n_steps == 0)
    snprintf(seen, sizeof seen, "at no step yet");
  else
    snprintf(seen, sizeof seen, "at %s of %s, step %llu", kind_name(late->kind), late->step, (ull)late->n_steps);
  k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, mine->step, NULL, "rank %d %s: rank %d expected it at %s of %s, step %llu%s%.3g%s; it was seen %s",
          who, gone ? "is gone" : "is late or dead", rank, kind_name(mine->kind), mine->step, (ull)mine->n_steps, gone ? " (" : ", and waited ",
          waited, gone ? " s)" : " s", seen);
  set_failed(group, &error);
}

static double seconds_since(const struct timespec *begin) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)(now.tv_sec - begin->tv_sec) + (double)(now.tv_nsec - begin->tv_nsec) * 1e-9;
}

static bool all_arrived(const struct group *group, uint64_t n_arrived, bool *gone) {
  bool all = true;
  for (int r = 0; r < group->size; r++) {
    bool here = group->seats[r].n_arrived >= n_arrived;
    all &= here;
    *gone |= !here && group->seats[r].gone;
  }
  return all;
}

// Enters the next barrier and waits for the others; the mutex is held. Since nobody passes a barrier before everyone is there, what the seats hold
// stays as it is until the last one has left the step.
static enum k3_status meet(struct group *group, int rank, struct k3_error *err) {
  struct timespec begin, deadline;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  deadline = begin;
  deadline.tv_sec += (time_t)group->bound_seconds;
  deadline.tv_nsec += (long)((group->bound_seconds - (double)(time_t)group->bound_seconds) * 1e9);
  if (deadline.tv_nsec >= 1000000000L) {
    deadline.tv_nsec -= 1000000000L;
    deadline.tv_sec++;
  }
  uint64_t n_arrived = ++group->seats[rank].n_arrived;
  pthread_cond_broadcast(&group->changed);
  bool gone = false, late = false;
  while (!group->failed && !all_arrived(group, n_arrived, &gone)) {
    if (gone || late)
      blame(group, rank, gone, seconds_since(&begin));
    else
      late = pthread_cond_timedwait(&group->changed, &group->mutex, &deadline) != 0;
  }
  return group->failed ? give_error(group, err) : K3_OK;
}

// All ranks must be at the same step.
static enum k3_status check_agreement(struct group *group, int rank, struct k3_error *err) {
  const struct seat *mine = &group->seats[rank], *first = &group->seats[0];
  for (int r = 0; r < group->size && !group->failed; r++) {
    const struct seat *other = &group->seats[r];
    if (other->kind == first->kind && other->n == first->n && strcmp(other->step, first->step) == 0)
      continue;
    struct k3_error error = {0};
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, first->step, NULL,
            "step %llu: expected %s of %s with %llu values as on rank 0, seen %s of %s with %llu on rank %d", (ull)mine->n_steps,
            kind_name(first->kind), first->step, (ull)first->n, kind_name(other->kind), other->step, (ull)other->n, r);
    set_failed(group, &error);
  }
  return group->failed ? give_error(group, err) : K3_OK;
}

static enum k3_status begin_step(struct comm_threads *self, enum kind kind, const char *step, const void *data, uint64_t n, struct k3_error *err) {
  struct group *group = self->group;
  struct seat *seat = &group->seats[self->comm.rank];
  pthread_mutex_lock(&group->mutex);
  seat->n_steps++;
  seat->kind = kind;
  snprintf(seat->step, sizeof seat->step, "%s", step);
  seat->data = data;
  seat->n = n;
  enum k3_status status = group->failed ? give_error(group, err) : meet(group, self->comm.rank, err);
  if (status == K3_OK)
    status = check_agreement(group, self->comm.rank, err);
  pthread_mutex_unlock(&group->mutex);
  return status;
}

// Nobody goes on before all have read and written what they need. Everyone is between the two barriers of the step, where nothing can fail or stop,
// so this wait needs no bound; and it must not end early, since others may be writing into this rank's buffer.
static void end_step(struct comm_threads *self) {
  struct group *group = self->group;
  bool gone = false;
  pthread_mutex_lock(&group->mutex);
  uint64_t n_arrived = ++group->seats[self->comm.rank].n_arrived;
  pthread_cond_broadcast(&group->changed);
  while (!all_arrived(group, n_arrived, &gone))
    pthread_cond_wait(&group->changed, &group->mutex);
  pthread_mutex_unlock(&group->mutex);
}

// Rank r sums the r-th part of the values and stores it for everyone: no element is touched by two ranks.
static enum k3_status all_reduce(struct k3_comm *comm, const char *step, float *values, uint64_t n, void *stream, struct k3_error *err) {
  struct comm_threads *self = self_of(comm);
  (void)stream;
  K3_TRY(begin_step(self, ALL_REDUCE, step, values, n, err));
  const struct seat *seats = self->group->seats;
  uint64_t size = (uint64_t)comm->size, rank = (uint64_t)comm->rank;
  uint64_t begin = n / size * rank + (n % size * rank) / size, end = n / size * (rank + 1) + (n % size * (rank + 1)) / size;
  for (uint64_t i = begin; i < end; i++) {
    float sum = ((const float *)seats[0].data)[i];
    for (uint64_t r = 1; r < size; r++)
      sum += ((const float *)seats[r].data)[i];
    for (uint64_t r = 0; r < size; r++)
      ((float *)(uintptr_t)seats[r].data)[i] = sum;
  }
  end_step(self);
  return K3_OK;
}

// Part r of every rank's values is read by rank r alone, which is why its own may be overwritten.
static enum k3_status reduce_scatter(struct k3_comm *comm, const char *step, const float *values, uint64_t n, float *dst, void *stream,
                                     struct k3_error *err) {
  struct comm_threads *self = self_of(comm);
  (void)stream;
  K3_TRY(begin_step(self, REDUCE_SCATTER, step, values, n, err));
  const struct seat *seats = self->group->seats;
  const uint64_t size = (uint64_t)comm->size, first = (uint64_t)comm->rank * n;
  for (uint64_t i = 0; i < n; i++) {
    float sum = ((const float *)seats[0].data)[first + i];
    for (uint64_t r = 1; r < size; r++)
      sum += ((const float *)seats[r].data)[first + i];
    dst[i] = sum;
  }
  end_step(self);
  return K3_OK;
}

static enum k3_status all_gather(struct k3_comm *comm, const char *step, const void *src, uint64_t nbytes, void *dst, void *stream,
                                 struct k3_error *err) {
  struct comm_threads *self = self_of(comm);
  (void)stream;
  K3_TRY(begin_step(self, ALL_GATHER, step, src, nbytes, err));
  for (int r = 0; r < comm->size && nbytes > 0; r++)
    memcpy((unsigned char *)dst + (uint64_t)r * nbytes, self->group->seats[r].data, nbytes);
  end_step(self);
  return K3_OK;
}

static void leave(struct k3_comm *comm, const struct k3_error *why) {
  struct group *group = self_of(comm)->group;
  pthread_mutex_lock(&group->mutex);
  if (why && why->status != K3_OK && !group->failed) {
    struct k3_error error = {0};
    char text[384];
    k3_fail(&error, K3_COMM, why->rule, why->file[0] ? why->file : NULL, why->tensor[0] ? why->tensor : NULL, NULL, "rank %d stopped: %s", comm->rank,
            k3_printable(text, sizeof text, why->found, strlen(why->found), sizeof text - 1));
    set_failed(group, &error);
  }
  group->seats[comm->rank].gone = true;
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

static void destroy(struct k3_comm *comm) {
  if (!comm)
    return;
  struct group *group = self_of(comm)->group;
  leave(comm, NULL);
  pthread_mutex_lock(&group->mutex);
  bool last = --group->n_alive == 0;
  pthread_mutex_unlock(&group->mutex);
  if (last) {
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->mutex);
    k3_free(group);
  }
  k3_free(comm);
}

static const struct k3_comm_ops OPS = {
    .all_reduce = all_reduce, .reduce_scatter = reduce_scatter, .all_gather = all_gather, .abort = leave, .destroy = destroy};

enum k3_status k3_comm_threads_create(int size, double bound_seconds, struct k3_comm **comms, struct k3_error *err) {
  pthread_condattr_t attributes;
  if (size < 1 || size > 4096 || !(bound_seconds > 0) || bound_seconds > 1e6)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "1 to 4096 ranks, a bound above 0", "%d ranks, a bound of %g s", size,
                   bound_seconds);
  for (int r = 0; r < size; r++)
    comms[r] = NULL;
  struct group *group = k3_calloc(1, sizeof *group + (size_t)size * sizeof *group->seats, err);
  if (!group)
    return K3_NO_MEMORY;
  group->size = group->n_alive = size;
  group->bound_seconds = bound_seconds;
  pthread_mutex_init(&group->mutex, NULL);
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&group->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  for (int r = 0; r < size; r++) {
    struct comm_threads *self = k3_calloc(1, sizeof *self, err);
    if (!self) {
      while (r-- > 0) {
        k3_free(comms[r]);
        comms[r] = NULL;
      }
      pthread_cond_destroy(&group->changed);
      pthread_mutex_destroy(&group->mutex);
      k3_free(group);
      return K3_NO_MEMORY;
    }
    *self = (struct comm_threads){{&OPS, r, size}, group};
    comms[r] = &self->comm;
  }
  return K3_OK;
}
