// What comes to the ranks' port and is no rank of this run: strangers, torn and impossible messages, other versions and sizes, ranks that never come.
// A stranger is dropped, everything else ends on all ranks in an error that names the rank. Messages are written here byte by byte.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
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

enum { HELLO, WELCOME, STEP, RESULT, FAILED, LEAVE };
enum { FRAME = 164, REASON = 1416 };

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void put(unsigned char *dst, uint64_t value, int nbytes) {
  for (int i = 0; i < nbytes; i++)
    dst[i] = (unsigned char)(value >> 8 * i);
}

static void frame(unsigned char dst[FRAME], unsigned version, unsigned type, unsigned rank, unsigned size, unsigned kind, uint64_t n,
                  const char *step) {
  memset(dst, 0, FRAME);
  memcpy(dst, "K3PACKRK", 8);
  put(dst + 8, version, 4);
  put(dst + 12, type, 4);
  put(dst + 16, rank, 4);
  put(dst + 20, size, 4);
  put(dst + 24, kind, 4);
  put(dst + 28, n, 8);
  memcpy(dst + 36, step, strlen(step));
}

static struct sockaddr_in place(int port) {
  return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_port = htons((uint16_t)port)};
}

static int free_port(void) {
  struct sockaddr_in a = place(0);
  socklen_t n = sizeof a;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(fd, (struct sockaddr *)&a, n), 0);
  assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
  close(fd);
  return ntohs(a.sin_port);
}

// A connection to the port, when somebody listens within 10 s.
static int reach(int port) {
  const struct sockaddr_in a = place(port);
  for (double end = now() + 10; now() < end;) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0)
      return fd;
    close(fd);
    nanosleep(&(struct timespec){0, 2000000}, NULL);
  }
  fail_msg("nobody listens");
  return -1;
}

static void say(int fd, const void *bytes, size_t nbytes) {
  assert_int_equal(send(fd, bytes, nbytes, MSG_NOSIGNAL), (ssize_t)nbytes);
}

// Bytes until the connection ends or nbytes are there.
static size_t listen_to(int fd, unsigned char *dst, size_t nbytes) {
  size_t done = 0;
  for (ssize_t n; done < nbytes && (n = recv(fd, dst + done, nbytes - done, 0)) > 0;)
    done += (size_t)n;
  return done;
}

// The text of the failure that the hub tells a connection.
static const char *told(int fd) {
  static unsigned char bytes[FRAME + REASON];
  size_t n;
  do
    n = listen_to(fd, bytes, FRAME);
  while (n == FRAME && bytes[12] == WELCOME);
  assert_int_equal(n, FRAME);
  assert_int_equal(bytes[12], FAILED);
  assert_int_equal(listen_to(fd, bytes + FRAME, REASON), REASON);
  return (const char *)bytes + FRAME + 8 + 256 + 256;
}

struct rank {
  pthread_t thread;
  int rank, size, port;
  double bound, seconds;
  uint64_t n;
  int n_more_steps;
  enum k3_status status;
  struct k3_error err;
};

// One honest rank, which takes one step, or more.
static void *run_rank(void *arg) {
  struct rank *self = arg;
  struct k3_comm *comm;
  const double begin = now();
  self->status = k3_comm_processes_create(self->rank, self->size, "127.0.0.1", self->port, self->bound, &comm, &self->err);
  if (self->status == K3_OK) {
    float *values = calloc(self->n + 1, sizeof *values);
    self->status = comm->ops->all_reduce(comm, "layers.0", values, self->n, NULL, &self->err);
    for (int i = 0; i < self->n_more_steps && self->status == K3_OK; i++)
      self->status = comm->ops->all_reduce(comm, "layers.0", values, self->n, NULL, &self->err);
    free(values);
    comm->ops->destroy(comm);
  }
  self->seconds = now() - begin;
  return NULL;
}

static void start(struct rank *self, int rank, int size, int port, double bound) {
  *self = (struct rank){.rank = rank, .size = size, .port = port, .bound = bound, .n = 16};
  assert_int_equal(pthread_create(&self->thread, NULL, run_rank, self), 0);
}

static void expect(struct rank *self, const char *text) {
  pthread_join(self->thread, NULL);
  assert_int_equal(self->status, text ? K3_COMM : K3_OK);
  if (text && !strstr(self->err.found, text))
    fail_msg("rank %d: \"%s\" where \"%s\" is due", self->rank, self->err.found, text);
}

// "a rank that dies or never comes is named on every other one within the timeout": here those that never come.
static void missing_ranks_are_named(void **state) {
  (void)state;
  struct rank ranks[2];
  const int port = free_port();
  start(&ranks[0], 0, 4, port, 1);
  start(&ranks[1], 2, 4, port, 1);
  for (int i = 0; i < 2; i++) {
    expect(&ranks[i], "ranks 1 and 3 of 4 did not come to 127.0.0.1:");
    assert_true(ranks[i].seconds < 8);
  }
  start(&ranks[1], 1, 2, free_port(), 0.3);
  expect(&ranks[1], "rank 0 did not come: rank 1 tried 127.0.0.1:");
}

static void other_sizes_and_ranks_are_named(void **state) {
  (void)state;
  struct rank ranks[2];
  int port = free_port();
  start(&ranks[0], 0, 2, port, 30);
  start(&ranks[1], 1, 3, port, 30);
  for (int i = 0; i < 2; i++)
    expect(&ranks[i], "rank 1 was started with WORLD_SIZE 3, rank 0 with 2");
  port = free_port();
  start(&ranks[0], 0, 3, port, 4);  // rank 0 stays so long to tell rank 2, which may still come
  unsigned char hello[FRAME];
  frame(hello, 1, HELLO, 1, 3, 0, 0, "");
  int first = reach(port), second = reach(port);
  say(first, hello, FRAME);
  say(second, hello, FRAME);
  assert_non_null(strstr(told(first), "two processes say they are rank 1"));
  assert_non_null(strstr(told(second), "two processes say they are rank 1"));
  close(first);
  close(second);
  expect(&ranks[0], "two processes say they are rank 1");
  port = free_port();
  start(&ranks[0], 0, 2, port, 4);
  frame(hello, 1, HELLO, 7, 2, 0, 0, "");
  first = reach(port);
  say(first, hello, FRAME);
  expect(&ranks[0], "a process says it is rank 7 of 2");
  close(first);
}

static void other_version_is_named(void **state) {
  (void)state;
  struct rank rank, late;
  const int port = free_port();
  start(&rank, 0, 2, port, 30);
  unsigned char hello[FRAME];
  frame(hello, 9, HELLO, 1, 2, 0, 0, "");
  int fd = reach(port);
  say(fd, hello, FRAME);
  assert_non_null(strstr(told(fd), "version 9"));
  close(fd);
  start(&late, 1, 2, port, 30);  // one that comes when it is over is told too
  expect(&late, "a rank speaks version 9 of the ranks' protocol, rank 0 1");
  expect(&rank, "a rank speaks version 9 of the ranks' protocol, rank 0 1");
  assert_true(rank.seconds < 20);
}

// A run comes together in spite of whoever else connects: a web client, a silent one, one that ends in the middle of a greeting, a whole crowd.
static void strangers_are_dropped(void **state) {
  (void)state;
  struct rank ranks[2];
  int crowd[20], port = free_port();
  unsigned char hello[FRAME];
  frame(hello, 1, HELLO, 1, 2, 0, 0, "");
  start(&ranks[0], 0, 2, port, 30);
  char request[FRAME + 1];
  snprintf(request, sizeof request, "GET / HTTP/1.1\r\nHost: %0*d\r\n\r\n", FRAME - 28, 0);
  int web = reach(port), torn = reach(port);
  say(web, request, FRAME);
  say(torn, hello, FRAME - 1);
  shutdown(torn, SHUT_WR);
  frame(hello, 1, STEP, 1, 2, 0, 4, "");
  int early = reach(port);
  say(early, hello, FRAME);
  unsigned char nothing[1];
  assert_int_equal(listen_to(web, nothing, 1), 0);
  assert_int_equal(listen_to(torn, nothing, 1), 0);
  assert_int_equal(listen_to(early, nothing, 1), 0);
  for (int i = 0; i < 20; i++)
    crowd[i] = reach(port);
  start(&ranks[1], 1, 2, port, 30);
  for (int i = 0; i < 2; i++)
    expect(&ranks[i], NULL);
  close(web), close(torn), close(early);
  for (int i = 0; i < 20; i++)
    close(crowd[i]);
}

// "listens only as long as needed": once all are there, nobody else is heard.
static void nobody_listens_once_all_are_there(void **state) {
  (void)state;
  const int port = free_port();
  const struct sockaddr_in a = place(port);
  struct rank rank;
  start(&rank, 0, 2, port, 30);
  unsigned char bytes[FRAME];
  int fd = reach(port);
  frame(bytes, 1, HELLO, 1, 2, 0, 0, "");
  say(fd, bytes, FRAME);
  assert_int_equal(listen_to(fd, bytes, FRAME), FRAME);
  assert_int_equal(bytes[12], WELCOME);
  int late = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(connect(late, (const struct sockaddr *)&a, sizeof a), -1);
  close(late);
  close(fd);
  expect(&rank, "rank 1 is gone");
}

// Rank 1 of 2 greets, says `bytes` and leaves; what rank 0 makes of it.
static void rank_1_says(const void *bytes, size_t nbytes, const char *text) {
  const int port = free_port();
  struct rank rank;
  start(&rank, 0, 2, port, 30);
  unsigned char hello[FRAME];
  frame(hello, 1, HELLO, 1, 2, 0, 0, "");
  int fd = reach(port);
  say(fd, hello, FRAME);
  assert_int_equal(listen_to(fd, hello, FRAME), FRAME);
  say(fd, bytes, nbytes);
  if (text)
    shutdown(fd, SHUT_WR);
  expect(&rank, text);
  close(fd);
}

static void torn_and_impossible_messages_are_errors(void **state) {
  (void)state;
  unsigned char bytes[FRAME + REASON + 64];
  memset(bytes, 0, sizeof bytes);
  rank_1_says(bytes, FRAME, "rank 1 sent no message of k3pack's ranks");
  frame(bytes, 1, 77, 1, 2, 0, 16, "layers.0");
  rank_1_says(bytes, FRAME, "rank 1 sent a message of a type that there is not");
  frame(bytes, 1, STEP, 1, 2, 5, 16, "layers.0");
  rank_1_says(bytes, FRAME, "rank 1 sent a step of a kind that there is not");
  frame(bytes, 1, RESULT, 1, 2, 0, 16, "layers.0");
  rank_1_says(bytes, FRAME, "rank 1 sent a message out of turn");
  frame(bytes, 2, STEP, 1, 2, 0, 16, "layers.0");
  rank_1_says(bytes, FRAME, "rank 1 sent a message out of turn");
  frame(bytes, 1, LEAVE, 1, 2, 0, 5, "");
  rank_1_says(bytes, FRAME, "rank 1 sent a message out of turn");
  const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX / 4 + 2, UINT64_C(1) << 62};
  for (int i = 0; i < 3; i++) {  // no memory is taken for what a rank only announces
    frame(bytes, 1, STEP, 1, 2, 0, sizes[i], "layers.0");
    rank_1_says(bytes, FRAME, "rank 1 sent a step of impossible size");
  }
  frame(bytes, 1, STEP, 1, 2, 0, 17, "layers.0");
  rank_1_says(bytes, FRAME, "expected all-reduce of layers.0 with 16 values as on rank 0, seen all-reduce of layers.0 with 17 on rank 1");
  memset(bytes, 'x', FRAME);
  frame(bytes, 1, STEP, 1, 2, 0, 16, "");
  memset(bytes + 36, 'y', 128);  // a text without an end
  rank_1_says(bytes, FRAME, "seen all-reduce of yyyy");
  frame(bytes, 1, STEP, 1, 2, 0, 16, "layers.0");
  rank_1_says(bytes, FRAME - 1, "rank 1 is gone");
  rank_1_says(bytes, FRAME + 63, "rank 1 is gone: 63 of its 64 bytes for all-reduce of layers.0, step 1, have come");
  rank_1_says(bytes, FRAME + 64, NULL);
  frame(bytes, 1, LEAVE, 1, 2, 0, REASON, "");
  memset(bytes + FRAME, 'z', REASON);  // status, rule and all texts without an end
  rank_1_says(bytes, FRAME + REASON, "rank 1 stopped: zzzz");
}

// A rank that asks for the next step before it has read what this one gave.
static void step_before_the_answer_is_read(void **state) {
  (void)state;
  enum { N = 4 << 20 };
  const int port = free_port();
  struct rank rank = {.rank = 0, .size = 2, .port = port, .bound = 30, .n = N, .n_more_steps = 1};
  assert_int_equal(pthread_create(&rank.thread, NULL, run_rank, &rank), 0);
  unsigned char bytes[FRAME], *values = calloc(N, sizeof(float));
  int fd = reach(port);
  frame(bytes, 1, HELLO, 1, 2, 0, 0, "");
  say(fd, bytes, FRAME);
  assert_int_equal(listen_to(fd, bytes, FRAME), FRAME);
  frame(bytes, 1, STEP, 1, 2, 0, N, "layers.0");
  say(fd, bytes, FRAME);
  say(fd, values, N * sizeof(float));
  say(fd, bytes, FRAME);  // again
  assert_true(listen_to(fd, bytes, FRAME) == FRAME && bytes[12] == RESULT);
  expect(&rank, "rank 1 sent a message out of turn");  // the sum that it was still being sent stays as it is
  free(values);
  close(fd);
}

struct impostor {
  int listener;
  unsigned char bytes[FRAME + REASON];
  size_t nbytes;
};

static void *answer(void *arg) {
  struct impostor *i = arg;
  unsigned char hello[FRAME];
  int fd = accept(i->listener, NULL, NULL);
  listen_to(fd, hello, FRAME);
  say(fd, i->bytes, i->nbytes);
  close(fd);
  return NULL;
}

// The same from the other side: what listens at the port is no rank 0.
static void other_rank_0_is_an_error(void **state) {
  (void)state;
  const struct {
    unsigned version, type;
    uint64_t n;
    size_t nbytes;
    const char *text;
  } cases[] = {
      {1, WELCOME, 0, 0, "rank 0 is gone: rank 1 expected it while the ranks were coming"},
      {1, WELCOME, 0, FRAME - 1, "rank 0 is gone"},
      {4, WELCOME, 0, FRAME, "rank 0 speaks version 4 of the ranks' protocol, rank 1 1"},
      {1, RESULT, 0, FRAME, "is no rank 0 of k3pack: it sent a message out of turn"},
      {1, 99, 0, FRAME, "is no rank 0 of k3pack: it sent a message of a type that there is not"},
      {1, FAILED, 3, FRAME, "is no rank 0 of k3pack: it sent a message out of turn"},
      {1, FAILED, REASON, FRAME + 5, "rank 0 is gone"},
      {0, 0, 0, FRAME, "is no rank 0 of k3pack: it sent no message of k3pack's ranks"},
  };
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
    struct sockaddr_in a = place(0);
    socklen_t n = sizeof a;
    struct impostor impostor = {.listener = socket(AF_INET, SOCK_STREAM, 0), .nbytes = cases[c].nbytes};
    pthread_t thread;
    struct rank rank;
    frame(impostor.bytes, cases[c].version, cases[c].type, 0, 2, 0, cases[c].n, "");
    if (cases[c].version == 0)
      memcpy(impostor.bytes, "HTTP/1.1", 8);
    assert_int_equal(bind(impostor.listener, (struct sockaddr *)&a, n), 0);
    assert_int_equal(listen(impostor.listener, 1), 0);
    assert_int_equal(getsockname(impostor.listener, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(pthread_create(&thread, NULL, answer, &impostor), 0);
    start(&rank, 1, 2, ntohs(a.sin_port), 10);
    expect(&rank, cases[c].text);
    pthread_join(thread, NULL);
    close(impostor.listener);
  }
  // And a port that something else holds.
  struct rank rank;
  struct sockaddr_in a = place(0);
  socklen_t n = sizeof a;
  int taken = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(taken, (struct sockaddr *)&a, n), 0);
  assert_int_equal(listen(taken, 1), 0);
  assert_int_equal(getsockname(taken, (struct sockaddr *)&a, &n), 0);
  start(&rank, 0, 2, ntohs(a.sin_port), 10);
  expect(&rank, "rank 0 cannot listen at 127.0.0.1:");
  assert_non_null(strstr(rank.err.allowed, "env MASTER_PORT="));
  close(taken);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(missing_ranks_are_named),
      cmocka_unit_test(other_sizes_and_ranks_are_named),
      cmocka_unit_test(other_version_is_named),
      cmocka_unit_test(strangers_are_dropped),
      cmocka_unit_test(nobody_listens_once_all_are_there),
      cmocka_unit_test(torn_and_impossible_messages_are_errors),
      cmocka_unit_test(step_before_the_answer_is_read),
      cmocka_unit_test(other_rank_0_is_an_error),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
