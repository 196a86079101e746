// Ranks that are threads of one process and reach into each other's buffers.
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "runtime/comm_seats.h"

struct group {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int size, n_alive;
  double bound_seconds;
  bool failed;
  struct k3_error error;   // of the first failure, told to everyone
  struct k3_seat seats[];  // [size]
};

struct comm_threads {
  struct k3_comm comm;
  struct group *group;
};

static struct comm_threads *self_of(struct k3_comm *comm) {
  return (struct comm_threads *)comm;
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

// Somebody is missing at this rank's step.
static void blame(struct group *group, int rank, bool gone, double waited) {
  struct k3_error error = {0};
  if (k3_seats_blame(group->seats, group->size, rank, gone, waited, &error))
    set_failed(group, &error);
}

// Enters the next barrier and waits for the others; the mutex is held. Since nobody passes a barrier before everyone is there, what the seats hold
// stays as it is until the last one has left the step.
static enum k3_status meet(struct group *group, int rank, struct k3_error *err) {
  const double begin = k3_clock();
  struct timespec deadline;
  clock_gettime(CLOCK_MONOTONIC, &deadline);
  deadline.tv_sec += (time_t)group->bound_seconds;
  deadline.tv_nsec += (long)((group->bound_seconds - (double)(time_t)group->bound_seconds) * 1e9);
  if (deadline.tv_nsec >= 1000000000L) {
    deadline.tv_nsec -= 1000000000L;
    deadline.tv_sec++;
  }
  uint64_t n_arrived = ++group->seats[rank].n_arrived;
  pthread_cond_broadcast(&group->changed);
  bool gone = false, late = false;
  while (!group->failed && !k3_seats_arrived(group->seats, group->size, n_arrived, &gone)) {
    if (gone || late)
      blame(group, rank, gone, k3_clock() - begin);
    else
      late = pthread_cond_timedwait(&group->changed, &group->mutex, &deadline) != 0;
  }
  return group->failed ? give_error(group, err) : K3_OK;
}

// All ranks must be at the same step.
static enum k3_status check_agreement(struct group *group, struct k3_error *err) {
  struct k3_error error = {0};
  if (!group->failed && !k3_seats_agree(group->seats, group->size, &error))
    set_failed(group, &error);
  return group->failed ? give_error(group, err) : K3_OK;
}

static enum k3_status begin_step(struct comm_threads *self, enum k3_comm_kind kind, const char *step, const void *data, uint64_t n,
                                 struct k3_error *err) {
  struct group *group = self->group;
  struct k3_seat *seat = &group->seats[self->comm.rank];
  pthread_mutex_lock(&group->mutex);
  seat->n_steps++;
  seat->kind = kind;
  snprintf(seat->step, sizeof seat->step, "%s", step);
  seat->data = data;
  seat->n = n;
  enum k3_status status = group->failed ? give_error(group, err) : meet(group, self->comm.rank, err);
  if (status == K3_OK)
    status = check_agreement(group, err);
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
  while (!k3_seats_arrived(group->seats, group->size, n_arrived, &gone))
    pthread_cond_wait(&group->changed, &group->mutex);
  pthread_mutex_unlock(&group->mutex);
}

// Rank r sums the r-th part of the values and stores it for everyone: no element is touched by two ranks.
static enum k3_status all_reduce(struct k3_comm *comm, const char *step, float *values, uint64_t n, void *stream, struct k3_error *err) {
  struct comm_threads *self = self_of(comm);
  (void)stream;
  K3_TRY(begin_step(self, K3_COMM_ALL_REDUCE, step, values, n, err));
  const struct k3_seat *seats = self->group->seats;
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
  K3_TRY(begin_step(self, K3_COMM_REDUCE_SCATTER, step, values, n, err));
  const struct k3_seat *seats = self->group->seats;
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
  K3_TRY(begin_step(self, K3_COMM_ALL_GATHER, step, src, nbytes, err));
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
    k3_comm_stopped(comm->rank, why, &error);
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
