// Ranks as threads, and ranks as processes (here threads of this one that meet over sockets alone): sums in rank order, gathers, and errors that name
// the rank that is dead, late or elsewhere.
#include <arpa/inet.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "runtime/comm.h"
#include "unit.h"

enum { MAX_RANKS = 16, N = 1003 };

struct rank {
  pthread_t thread;
  struct k3_comm *comm;
  enum k3_status status;
  struct k3_error err;
  float values[N];
  float parts[N], part[N / MAX_RANKS];
  int gathered[MAX_RANKS];
  double seconds;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool over_sockets;

static int use_threads(void **state) {
  (void)state;
  over_sockets = false;
  return 0;
}

static int use_sockets(void **state) {
  (void)state;
  over_sockets = true;
  return 0;
}

static int free_port(void) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t n = sizeof a;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(fd, (struct sockaddr *)&a, n), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
  close(fd);
  return ntohs(a.sin_port);
}

struct meeting {
  struct rank *self;
  int rank, size, port;
  double bound;
  void *(*body)(void *);
};

static void *meet(void *arg) {
  struct meeting *m = arg;
  m->self->status = k3_comm_processes_create(m->rank, m->size, "127.0.0.1", m->port, m->bound, &m->self->comm, &m->self->err);
  return m->self->status == K3_OK ? m->body(m->self) : NULL;
}

static void run(struct rank *ranks, int size, double bound, void *(*body)(void *)) {
  struct k3_comm *comms[MAX_RANKS] = {NULL};
  struct meeting meetings[MAX_RANKS];
  const int port = over_sockets ? free_port() : 0;
  if (!over_sockets)
    assert_int_equal(k3_comm_threads_create(size, bound, comms, NULL), K3_OK);
  for (int r = 0; r < size; r++) {
    ranks[r].comm = comms[r];
    ranks[r].status = K3_OK;
    ranks[r].err = (struct k3_error){0};
    meetings[r] = (struct meeting){&ranks[r], r, size, port, bound, body};
    assert_int_equal(pthread_create(&ranks[r].thread, NULL, over_sockets ? meet : body, over_sockets ? (void *)&meetings[r] : (void *)&ranks[r]), 0);
  }
  for (int r = 0; r < size; r++)
    pthread_join(ranks[r].thread, NULL);
  for (int r = size; r-- > 0;) {
    assert_non_null(ranks[r].comm);
    ranks[r].comm->ops->destroy(ranks[r].comm);
  }
}

static float value_of(int rank, int i) {
  return (float)((rank * 7919 + i * 104729) % 1000003) * (i % 3 ? 1e-3f : 1e4f) * (rank % 2 ? -1.0f : 1.0f);
}

static void *sum_and_gather(void *arg) {
  struct rank *self = arg;
  for (int round = 0; round < 20 && self->status == K3_OK; round++) {
    int mine = self->comm->rank + 100 * round;
    for (int i = 0; i < N; i++)
      self->values[i] = value_of(self->comm->rank, i + round);
    if (self->comm->rank == round % self->comm->size) {  // everybody is late once
      struct timespec pause = {0, 200000};
      nanosleep(&pause, NULL);
    }
    self->status = self->comm->ops->all_reduce(self->comm, "values", self->values, round % 2 ? N : 3, NULL, &self->err);
    for (int i = 0; i < N; i++)
      self->parts[i] = value_of(self->comm->rank, i + round);
    float *own = self->parts + self->comm->rank * (N / MAX_RANKS);
    if (self->status == K3_OK)  // into its own values and beside them
      self->status = self->comm->ops->reduce_scatter(self->comm, "parts", self->parts, N / MAX_RANKS, round % 2 ? own : self->part, NULL, &self->err);
    if (self->status == K3_OK && round % 2)
      memcpy(self->part, own, sizeof self->part);
    if (self->status == K3_OK)
      self->status = self->comm->ops->all_gather(self->comm, "ranks", &mine, sizeof mine, self->gathered, NULL, &self->err);
  }
  return NULL;
}

// Sums are those of a loop in rank order, to the bit, on every rank.
static void sums_are_in_rank_order(void **state) {
  (void)state;
  static struct rank ranks[MAX_RANKS];
  for (int size = 1; size <= MAX_RANKS; size = size < 4 ? size + 1 : size * 2) {
    run(ranks, size, 20, sum_and_gather);
    for (int r = 0; r < size; r++) {
      assert_int_equal(ranks[r].status, K3_OK);
      for (int i = 0; i < N; i++) {
        float sum = value_of(0, i + 19);
        for (int q = 1; q < size; q++)
          sum += value_of(q, i + 19);
        assert_memory_equal(&ranks[r].values[i], &sum, sizeof sum);
        if (i / (N / MAX_RANKS) == r)  // a scattered sum is the rank's part of the whole one
          assert_memory_equal(&ranks[r].part[i % (N / MAX_RANKS)], &sum, sizeof sum);
      }
      for (int q = 0; q < size; q++)
        assert_int_equal(ranks[r].gathered[q], q + 1900);
    }
  }
}

static void *rank_2_never_comes(void *arg) {
  struct rank *self = arg;
  double begin = now();
  self->status = self->comm->ops->all_reduce(self->comm, "first", self->values, 8, NULL, &self->err);
  if (self->comm->rank == 2) {
    struct timespec pause = {2, 0};  // hung, as far as the others can tell
    nanosleep(&pause, NULL);
  } else {
    self->status = self->comm->ops->all_reduce(self->comm, "second", self->values, 8, NULL, &self->err);
    self->seconds = now() - begin;
  }
  return NULL;
}

// A late rank ends in an error that names it, the step, what was expected and what was seen, on every rank and within the bound.
static void late_rank_is_named_within_the_bound(void **state) {
  (void)state;
  static struct rank ranks[4];
  run(ranks, 4, 0.6, rank_2_never_comes);
  assert_int_equal(ranks[2].status, K3_OK);
  for (int r = 0; r < 4; r++) {
    if (r == 2)
      continue;
    assert_int_equal(ranks[r].status, K3_COMM);
    assert_non_null(strstr(ranks[r].err.found, "rank 2 is late or dead"));
    assert_non_null(strstr(ranks[r].err.found, "all-reduce of second, step 2"));
    assert_non_null(strstr(ranks[r].err.found, "seen at all-reduce of first, step 1"));
    assert_true(ranks[r].seconds < 1.9);  // rank 2 itself sleeps for 2 s
  }
  print_message("%s\n", ranks[0].err.found);
}

static void *rank_1_dies(void *arg) {
  struct rank *self = arg;
  double begin = now();
  if (self->comm->rank == 1) {
    struct k3_error why = {0};
    k3_fail(&why, K3_BAD_INPUT, K3_IMG01, NULL, "some.weight", NULL, "the tensor is not in the image");
    self->comm->ops->abort(self->comm, &why);
  } else {
    self->status = self->comm->ops->all_gather(self->comm, "logits", self->values, 4, self->gathered, NULL, &self->err);
    if (self->status != K3_OK)  // and it stays so
      self->status = self->comm->ops->all_reduce(self->comm, "values", self->values, 4, NULL, &self->err);
  }
  self->seconds = now() - begin;
  return NULL;
}

// A dead rank is told at once, with its own reason, long before the bound.
static void dead_rank_is_named_at_once(void **state) {
  (void)state;
  static struct rank ranks[3];
  run(ranks, 3, 60, rank_1_dies);
  for (int r = 0; r < 3; r += 2) {
    assert_int_equal(ranks[r].status, K3_COMM);
    assert_non_null(strstr(ranks[r].err.found, "rank 1 stopped: the tensor is not in the image"));
    assert_string_equal(ranks[r].err.tensor, "some.weight");
    assert_true(ranks[r].seconds < 10);
  }
}

static void *rank_0_returns(void *arg) {
  struct rank *self = arg;
  if (self->comm->rank == 0)
    self->comm->ops->abort(self->comm, NULL);
  else
    self->status = self->comm->ops->all_reduce(self->comm, "values", self->values, 4, NULL, &self->err);
  return NULL;
}

static void rank_that_left_is_named_at_once(void **state) {
  (void)state;
  static struct rank ranks[2];
  run(ranks, 2, 60, rank_0_returns);
  assert_int_equal(ranks[1].status, K3_COMM);
  assert_non_null(strstr(ranks[1].err.found, "rank 0 is gone"));
  if (!over_sockets)  // there the one that knew has gone
    assert_non_null(strstr(ranks[1].err.found, "seen at no step yet"));
}

static void *rank_1_goes_astray(void *arg) {
  struct rank *self = arg;
  bool astray = self->comm->rank == 1;
  self->status = self->comm->ops->all_reduce(self->comm, astray ? "layers.3" : "layers.2", self->values, 8, NULL, &self->err);
  return NULL;
}

static void *rank_1_brings_less(void *arg) {
  struct rank *self = arg;
  self->status = self->comm->ops->all_reduce(self->comm, "layers.2", self->values, self->comm->rank == 1 ? 7 : 8, NULL, &self->err);
  return NULL;
}

static void ranks_at_different_steps_are_told_apart(void **state) {
  (void)state;
  static struct rank ranks[3];
  void *(*const bodies[])(void *) = {rank_1_goes_astray, rank_1_brings_less};
  static const char *const seen[] = {"seen all-reduce of layers.3 with 8 on rank 1", "seen all-reduce of layers.2 with 7 on rank 1"};
  for (int b = 0; b < 2; b++) {
    run(ranks, 3, 20, bodies[b]);
    for (int r = 0; r < 3; r++) {
      assert_int_equal(ranks[r].status, K3_COMM);
      assert_non_null(strstr(ranks[r].err.found, "expected all-reduce of layers.2 with 8 values"));
      assert_non_null(strstr(ranks[r].err.found, seen[b]));
    }
  }
}

static void odd_settings_are_refused(void **state) {
  (void)state;
  struct k3_comm *comms[2];
  assert_int_equal(k3_comm_threads_create(0, 1, comms, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_comm_threads_create(2, 0, comms, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_comm_processes_create(2, 2, "127.0.0.1", 1, 1, comms, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_comm_processes_create(0, 2, "127.0.0.1", 0, 1, comms, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_comm_processes_create(0, 2, "127.0.0.1", 1, 0, comms, NULL), K3_BAD_ARGUMENT);
  assert_int_equal(k3_comm_processes_create(0, 2, NULL, 1, 1, comms, NULL), K3_BAD_ARGUMENT);
  assert_null(comms[0]);
}

int main(void) {
#define BOTH_WAYS(test) cmocka_unit_test_setup(test, use_threads), cmocka_unit_test_setup(test, use_sockets)
  const struct CMUnitTest tests[] = {
      BOTH_WAYS(sums_are_in_rank_order),          BOTH_WAYS(late_rank_is_named_within_the_bound),     BOTH_WAYS(dead_rank_is_named_at_once),
      BOTH_WAYS(rank_that_left_is_named_at_once), BOTH_WAYS(ranks_at_different_steps_are_told_apart), cmocka_unit_test(odd_settings_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
