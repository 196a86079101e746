#include "runtime/comm_hub.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"

typedef unsigned long long ull;  // for %llu

enum { N_STRANGERS = 8, DISCARD_NBYTES = 1 << 16 };  // connections beyond the ranks' that may be open while they come; bytes read to be forgotten
static const double LINGER_SECONDS = 5;              // for ranks that come after the run has failed: they are told why

// What is being read from a rank.
enum reading { A_FRAME, ITS_VALUES, ITS_REASON, NOTHING };

struct peer {
  int fd;  // -1: not here, or no longer
  enum reading reading;
  unsigned char in[K3_FRAME_NBYTES + K3_FRAME_ERROR_NBYTES];
  size_t n_in;
  double begin;       // of its waiting at the current step
  uint64_t n_values;  // bytes of its values that have been read
  // What is being sent: `out`, then the result from `result_sent` on, then the failure.
  unsigned char out[K3_FRAME_NBYTES];
  size_t out_sent, out_nbytes;
  const unsigned char *result;
  uint64_t result_sent;
  size_t failure_sent;
  bool wants_result, wants_failure;
  bool came;  // or was told that it is too late
};

struct k3_comm_hub {
  pthread_t thread;
  int listener, size;
  double bound_seconds, begin;
  char place[300];
  int strangers[N_STRANGERS + 1];  // connections that have not said who they are; -1: none
  unsigned char greetings[N_STRANGERS + 1][K3_FRAME_NBYTES];
  size_t n_greeted[N_STRANGERS + 1];
  uint64_t n_refused;  // connections that spoke something else
  bool complete;       // all ranks have come
  bool failed;
  double lingers_until;   // when it failed before that
  struct k3_error error;  // the first failure, told to everyone
  unsigned char failure[K3_FRAME_NBYTES + K3_FRAME_ERROR_NBYTES];
  bool rank_0_left;
  double left_at;
  unsigned char *values;  // [size, step_nbytes] of the current step
  uint64_t step_nbytes;
  bool reading_values;
  uint64_t result_nbytes;  // to each rank
  struct peer *peers;      // [size]
  struct k3_seat *seats;   // [size]
  struct pollfd *polls;
};

static void close_fd(int *fd) {
  if (*fd >= 0)
    close(*fd);
  *fd = -1;
}

static void stop_listening(struct k3_comm_hub *hub) {
  close_fd(&hub->listener);
  for (int i = 0; i <= N_STRANGERS; i++)
    close_fd(&hub->strangers[i]);
}

// Notes the first failure; it is sent to every rank that is here.
static void set_failed(struct k3_comm_hub *hub, const struct k3_error *error) {
  if (hub->failed)
    return;
  hub->failed = true;
  hub->error = *error;
  if (!hub->complete && hub->lingers_until == 0)
    hub->lingers_until = k3_clock() + (hub->bound_seconds < LINGER_SECONDS ? hub->bound_seconds : LINGER_SECONDS);
  const struct k3_frame frame = {.type = K3_FRAME_FAILED, .n = K3_FRAME_ERROR_NBYTES};
  k3_frame_write(&frame, hub->failure);
  k3_frame_write_error(error, hub->failure + K3_FRAME_NBYTES);
  for (int r = 0; r < hub->size; r++)
    hub->peers[r].wants_failure = hub->peers[r].fd >= 0;
}

static bool has_output(const struct peer *peer) {
  return peer->fd >= 0 && (peer->out_sent < peer->out_nbytes || peer->wants_result || peer->wants_failure);
}

// --- the ranks come --------------------------------------------------------------------------------------------------------------------------------

// "ranks 1 and 3"
static void list_missing(const struct k3_comm_hub *hub, char *dst, size_t capacity) {
  int n = 0, seen = 0;
  size_t used;
  for (int r = 0; r < hub->size; r++)
    n += hub->peers[r].fd < 0;
  used = (size_t)snprintf(dst, capacity, "rank%s", n > 1 ? "s" : "");
  for (int r = 0; r < hub->size && used < capacity; r++)
    if (hub->peers[r].fd < 0) {
      used += (size_t)snprintf(dst + used, capacity - used, "%s%d", seen == 0 ? " " : seen + 1 == n ? " and " : ", ", r);
      seen++;
    }
}

static void fail_late(struct k3_comm_hub *hub) {
  struct k3_error error = {0};
  hub->lingers_until = k3_clock();
  char missing[256], strangers[64] = "";
  list_missing(hub, missing, sizeof missing);
  if (hub->n_refused > 0)
    snprintf(strangers, sizeof strangers, "; %llu connections were of something else", (ull)hub->n_refused);
  k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "a process for each of WORLD_SIZE ranks with the same MASTER_ADDR and MASTER_PORT",
          "%s of %d did not come to %s within %.3g s%s", missing, hub->size, hub->place, hub->bound_seconds, strangers);
  set_failed(hub, &error);
}

// What a connection says it is: a rank of this run, something else, or a rank that this run cannot have, of which everybody is told.
static void greet(struct k3_comm_hub *hub, int i) {
  struct k3_frame frame;
  struct k3_error error = {0};
  int fd = hub->strangers[i];
  hub->strangers[i] = -1;
  if (k3_frame_read(hub->greetings[i], &frame) != NULL || (frame.version == K3_FRAME_VERSION && frame.type != K3_FRAME_HELLO)) {
    close(fd);
    hub->n_refused++;
    return;
  }
  if (frame.version != K3_FRAME_VERSION)
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "one build of k3pack on all ranks",
            "a rank speaks version %u of the ranks' protocol, rank 0 %d", frame.version, K3_FRAME_VERSION);
  else if (frame.size != (uint32_t)hub->size)
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "one WORLD_SIZE for all ranks", "rank %u was started with WORLD_SIZE %u, rank 0 with %d",
            frame.rank, frame.size, hub->size);
  else if (frame.rank >= (uint32_t)hub->size)
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "a rank below WORLD_SIZE", "a process says it is rank %u of %d", frame.rank, hub->size);
  else if (hub->peers[frame.rank].fd >= 0)
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "a RANK of its own for each process", "two processes say they are rank %u", frame.rank);
  if (frame.version == K3_FRAME_VERSION && frame.rank < (uint32_t)hub->size) {
    hub->peers[frame.rank].came = true;
    if (error.status == K3_OK && !hub->failed) {
      hub->peers[frame.rank].fd = fd;
      return;
    }
  }
  if (error.status != K3_OK)
    set_failed(hub, &error);
  // Its buffer is empty, so this needs no wait; who does not get it sees the connection end.
  (void)!send(fd, hub->failure, sizeof hub->failure, MSG_NOSIGNAL | MSG_DONTWAIT);
  close(fd);
}

static void set_options(int fd) {
  const int on = 1;
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // not of a socket pair, which needs none
}

static void accept_one(struct k3_comm_hub *hub) {
  int fd = accept4(hub->listener, NULL, NULL, SOCK_CLOEXEC), i = 0;
  if (fd < 0) {
    // Out of descriptors, or a connection that is over already: not to be asked again at once.
    nanosleep(&(struct timespec){0, 10000000}, NULL);
    return;
  }
  while (i <= N_STRANGERS && hub->strangers[i] >= 0)
    i++;
  if (i > N_STRANGERS) {  // the one that has been silent for longest is none of ours
    close_fd(&hub->strangers[i = 0]);
    hub->n_refused++;
    for (; i < N_STRANGERS; i++) {
      hub->strangers[i] = hub->strangers[i + 1];
      memcpy(hub->greetings[i], hub->greetings[i + 1], sizeof hub->greetings[i]);
      hub->n_greeted[i] = hub->n_greeted[i + 1];
    }
  }
  set_options(fd);
  hub->strangers[i] = fd;
  hub->n_greeted[i] = 0;
}

static void hear_stranger(struct k3_comm_hub *hub, int i) {
  ssize_t n = recv(hub->strangers[i], hub->greetings[i] + hub->n_greeted[i], K3_FRAME_NBYTES - hub->n_greeted[i], 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR))
    return;
  if (n <= 0) {
    close_fd(&hub->strangers[i]);
    hub->n_refused++;
    return;
  }
  hub->n_greeted[i] += (size_t)n;
  if (hub->n_greeted[i] == K3_FRAME_NBYTES)
    greet(hub, i);
}

static void check_complete(struct k3_comm_hub *hub) {
  if (hub->complete || hub->failed)
    return;
  for (int r = 0; r < hub->size; r++)
    if (hub->peers[r].fd < 0)
      return;
  hub->complete = true;
  stop_listening(hub);
  const struct k3_frame welcome = {.type = K3_FRAME_WELCOME, .size = (uint32_t)hub->size};
  for (int r = 0; r < hub->size; r++) {
    k3_frame_write(&welcome, hub->peers[r].out);
    hub->peers[r].out_nbytes = K3_FRAME_NBYTES;
  }
}

// --- a step ----------------------------------------------------------------------------------------------------------------------------------------

static void fail_memory(struct k3_comm_hub *hub, const struct k3_error *why) {
  struct k3_error error = {0};
  k3_comm_stopped(0, why, &error);
  set_failed(hub, &error);
}

// All ranks stand at one step: their values may come.
static void begin_values(struct k3_comm_hub *hub) {
  struct k3_error error = {0};
  const struct k3_seat *first = &hub->seats[0];
  if (!k3_seats_agree(hub->seats, hub->size, &error)) {
    set_failed(hub, &error);
    return;
  }
  k3_frame_step_nbytes(first->kind, first->n, hub->size, &hub->step_nbytes);  // was checked when it came
  k3_free(hub->values);
  hub->values = k3_calloc((size_t)hub->size, hub->step_nbytes, &error);
  if (!hub->values) {
    fail_memory(hub, &error);
    return;
  }
  hub->reading_values = true;
  for (int r = 0; r < hub->size; r++) {
    hub->peers[r].reading = ITS_VALUES;
    hub->peers[r].n_values = 0;
  }
}

// Everything has come: sums in rank order, or each rank's part of them, or all of it as it stands.
static void finish_values(struct k3_comm_hub *hub) {
  const struct k3_seat *first = &hub->seats[0];
  const uint64_t size = (uint64_t)hub->size, n = hub->step_nbytes / sizeof(float);
  hub->result_nbytes = hub->step_nbytes * size;
  if (first->kind != K3_COMM_ALL_GATHER) {
    float *sums = (float *)hub->values;
    for (uint64_t r = 1; r < size; r++)
      for (uint64_t i = 0; i < n; i++)
        sums[i] += sums[r * n + i];
    hub->result_nbytes = hub->step_nbytes;
  }
  const bool scatters = first->kind == K3_COMM_REDUCE_SCATTER;
  if (scatters)
    hub->result_nbytes /= size;
  hub->reading_values = false;
  const struct k3_frame frame = {.type = K3_FRAME_RESULT, .kind = first->kind, .n = hub->result_nbytes};
  for (int r = 0; r < hub->size; r++) {
    struct peer *peer = &hub->peers[r];
    k3_frame_write(&frame, peer->out);
    peer->out_nbytes = K3_FRAME_NBYTES;
    peer->out_sent = 0;
    peer->result = hub->values + (scatters ? (uint64_t)r * hub->result_nbytes : 0);
    peer->result_sent = 0;
    peer->wants_result = true;
    peer->reading = A_FRAME;
    peer->n_in = 0;
  }
}

static void check_values(struct k3_comm_hub *hub) {
  for (int r = 0; r < hub->size; r++)
    if (hub->peers[r].n_values < hub->step_nbytes)
      return;
  finish_values(hub);
}

// Whoever is waiting for a rank that is gone, or has waited long enough, brings it to light. Returns when the next one will have.
static double check_waiting(struct k3_comm_hub *hub) {
  double next = 1e300;
  for (int r = 0; r < hub->size && !hub->failed && hub->complete; r++) {
    bool gone = false;
    const uint64_t n_arrived = hub->seats[r].n_arrived;
    const double waited = k3_clock() - hub->peers[r].begin;
    if (hub->peers[r].reading != NOTHING || k3_seats_arrived(hub->seats, hub->size, n_arrived, &gone))
      continue;
    struct k3_error error = {0};
    if ((gone || waited >= hub->bound_seconds) && k3_seats_blame(hub->seats, hub->size, r, gone, waited, &error))
      set_failed(hub, &error);
    const double due = hub->peers[r].begin + hub->bound_seconds;
    next = due < next ? due : next;
  }
  // While values come, those that do not are waited for since the last one was heard of.
  for (int r = 0; r < hub->size && !hub->failed && hub->reading_values; r++) {
    struct peer *peer = &hub->peers[r];
    const double due = peer->begin + hub->bound_seconds;
    if (peer->n_values == hub->step_nbytes)
      continue;
    if (hub->seats[r].gone || k3_clock() >= due) {
      struct k3_error error = {0};
      k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, hub->seats[r].step, NULL, "rank %d %s: %llu of its %llu bytes for %s of %s, step %llu, have come",
              r, hub->seats[r].gone ? "is gone" : "is late or dead", (ull)peer->n_values, (ull)hub->step_nbytes,
              k3_comm_kind_name(hub->seats[r].kind), hub->seats[r].step, (ull)hub->seats[r].n_steps);
      set_failed(hub, &error);
    }
    next = due < next ? due : next;
  }
  return next;
}

// --- a rank's socket -------------------------------------------------------------------------------------------------------------------------------

static void leave(struct k3_comm_hub *hub, int rank, const struct k3_error *why) {
  struct k3_error error = {0};
  hub->seats[rank].gone = true;
  hub->peers[rank].reading = A_FRAME;
  if (rank == 0 && !hub->rank_0_left) {
    hub->rank_0_left = true;
    hub->left_at = k3_clock();
  }
  if (why) {
    k3_comm_stopped(rank, why, &error);
    set_failed(hub, &error);
  } else if (!hub->complete && !hub->failed) {
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, NULL, "rank %d is gone: it left %s before all %d ranks had come", rank, hub->place, hub->size);
    set_failed(hub, &error);
  }
}

static void hang_up(struct k3_comm_hub *hub, int rank) {
  struct peer *peer = &hub->peers[rank];
  close_fd(&peer->fd);
  peer->wants_result = peer->wants_failure = false;
  peer->out_nbytes = peer->out_sent = 0;
  if (!hub->seats[rank].gone)
    leave(hub, rank, NULL);
}

static void hear_frame(struct k3_comm_hub *hub, int rank) {
  struct peer *peer = &hub->peers[rank];
  struct k3_seat *seat = &hub->seats[rank];
  struct k3_frame frame;
  struct k3_error error = {0};
  uint64_t nbytes;
  const char *wrong = k3_frame_read(peer->in, &frame);
  if (!wrong && (frame.version != K3_FRAME_VERSION || (!hub->complete && frame.type != K3_FRAME_LEAVE) || has_output(peer)))
    wrong = "a message out of turn";
  if (!wrong && frame.type == K3_FRAME_LEAVE && (frame.n == 0 || frame.n == K3_FRAME_ERROR_NBYTES)) {
    if (frame.n == 0)
      leave(hub, rank, NULL);
    else
      peer->reading = ITS_REASON;
    return;
  }
  if (!wrong && frame.type != K3_FRAME_STEP)
    wrong = "a message out of turn";
  if (!wrong && !k3_frame_step_nbytes(frame.kind, frame.n, hub->size, &nbytes))
    wrong = "a step of impossible size";
  if (wrong) {
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "the messages of k3pack's ranks", "rank %d sent %s", rank, wrong);
    set_failed(hub, &error);
    return;
  }
  seat->n_arrived++;
  seat->n_steps++;
  seat->kind = frame.kind;
  seat->n = frame.n;
  memcpy(seat->step, frame.step, sizeof seat->step);
  peer->begin = k3_clock();
  peer->reading = NOTHING;
  bool gone = false;
  if (k3_seats_arrived(hub->seats, hub->size, seat->n_arrived, &gone))
    begin_values(hub);
}

// A failed run's ranks are heard only to learn that they have left.
static void discard(struct k3_comm_hub *hub, int rank) {
  unsigned char bytes[DISCARD_NBYTES];
  ssize_t n = recv(hub->peers[rank].fd, bytes, sizeof bytes, 0);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
    hang_up(hub, rank);
}

static void hear(struct k3_comm_hub *hub, int rank) {
  struct peer *peer = &hub->peers[rank];
  if (hub->failed || hub->seats[rank].gone) {
    discard(hub, rank);
    return;
  }
  const size_t wanted = K3_FRAME_NBYTES + (peer->reading == ITS_REASON ? K3_FRAME_ERROR_NBYTES : 0);
  unsigned char *dst = peer->reading == ITS_VALUES ? hub->values + (uint64_t)rank * hub->step_nbytes + peer->n_values : peer->in + peer->n_in;
  const uint64_t left = peer->reading == ITS_VALUES ? hub->step_nbytes - peer->n_values : wanted - peer->n_in;
  ssize_t n = recv(peer->fd, dst, left, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR))
    return;
  if (n <= 0) {
    hang_up(hub, rank);
  } else if (peer->reading == ITS_VALUES) {
    peer->n_values += (uint64_t)n;
    peer->begin = k3_clock();
  } else {
    peer->n_in += (size_t)n;
    if (peer->n_in < wanted)
      return;
    if (peer->reading == ITS_REASON) {
      struct k3_error why;
      k3_frame_read_error(peer->in + K3_FRAME_NBYTES, &why);
      leave(hub, rank, &why);
    } else {
      hear_frame(hub, rank);
    }
    if (peer->reading != ITS_REASON)
      peer->n_in = 0;
  }
}

static void tell(struct k3_comm_hub *hub, int rank) {
  struct peer *peer = &hub->peers[rank];
  while (has_output(peer)) {
    const bool frame = peer->out_sent < peer->out_nbytes, result = !frame && peer->wants_result;
    const unsigned char *src = frame ? peer->out + peer->out_sent : result ? peer->result + peer->result_sent : hub->failure + peer->failure_sent;
    const uint64_t left = frame    ? peer->out_nbytes - peer->out_sent
                          : result ? hub->result_nbytes - peer->result_sent
                                   : sizeof hub->failure - peer->failure_sent;
    ssize_t n = left > 0 ? send(peer->fd, src, left, MSG_NOSIGNAL) : 0;
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
      return;
    if (n < 0) {
      hang_up(hub, rank);
      return;
    }
    if (frame) {
      peer->out_sent += (size_t)n;
    } else if (result) {
      peer->result_sent += (uint64_t)n;
      peer->wants_result = peer->result_sent < hub->result_nbytes;
    } else {
      peer->failure_sent += (size_t)n;
      peer->wants_failure = peer->failure_sent < sizeof hub->failure;
    }
  }
}

// --- the thread ------------------------------------------------------------------------------------------------------------------------------------

static int watch(struct k3_comm_hub *hub) {
  int n = 0;
  for (int r = 0; r < hub->size; r++) {
    const struct peer *peer = &hub->peers[r];
    const bool listens = peer->reading != NOTHING && (peer->reading != ITS_VALUES || peer->n_values < hub->step_nbytes);
    // One that waits is not asked: what it has still to say comes before its end.
    const short events = (short)((listens || hub->failed ? POLLIN | POLLRDHUP : 0) | (has_output(peer) ? POLLOUT : 0));
    hub->polls[n++] = (struct pollfd){.fd = peer->fd, .events = events};
  }
  for (int i = 0; i <= N_STRANGERS; i++)
    hub->polls[n++] = (struct pollfd){.fd = hub->strangers[i], .events = POLLIN};
  hub->polls[n++] = (struct pollfd){.fd = hub->listener, .events = POLLIN};
  return n;
}

// Whether ranks are still waited for, to be taken or to be told that the run has failed.
static bool is_open(const struct k3_comm_hub *hub) {
  bool all = true;
  for (int r = 0; r < hub->size; r++)
    all &= hub->peers[r].came;
  return !hub->complete && !all && (!hub->failed || k3_clock() < hub->lingers_until);
}

// Rank 0 has left, and nobody waits for a word any more.
static bool is_done(const struct k3_comm_hub *hub) {
  bool delivered = !is_open(hub);
  for (int r = 0; r < hub->size; r++)
    delivered &= !has_output(&hub->peers[r]);
  return hub->rank_0_left && (delivered || k3_clock() > hub->left_at + hub->bound_seconds);
}

static void *serve(void *arg) {
  struct k3_comm_hub *hub = arg;
  check_complete(hub);  // of one
  for (;;) {
    double due = check_waiting(hub);
    if (!hub->complete && !hub->failed) {
      const double end = hub->begin + hub->bound_seconds;
      if (k3_clock() >= end)
        fail_late(hub);
      due = end < due ? end : due;
    }
    if (!is_open(hub))
      stop_listening(hub);
    else if (hub->failed)
      due = hub->lingers_until < due ? hub->lingers_until : due;
    if (hub->rank_0_left)
      due = hub->left_at + hub->bound_seconds < due ? hub->left_at + hub->bound_seconds : due;
    const double left = due - k3_clock();
    if (is_done(hub))
      break;
    const int n = watch(hub), timeout = left > 1e6 ? -1 : left <= 0 ? 1 : (int)(left * 1e3) + 1;
    if (poll(hub->polls, (nfds_t)n, timeout) < 0)
      continue;
    for (int r = 0; r < hub->size; r++) {
      const short events = hub->polls[r].revents;
      if (events & POLLOUT)
        tell(hub, r);
      if (hub->peers[r].fd >= 0 && events & (POLLIN | POLLRDHUP | POLLHUP | POLLERR)) {
        if (hub->peers[r].reading == NOTHING && !hub->failed)
          hang_up(hub, r);  // its connection is broken, or this would not be heard while it waits
        else
          hear(hub, r);
      }
    }
    for (int i = 0; i <= N_STRANGERS; i++)
      if (hub->strangers[i] >= 0 && hub->polls[hub->size + i].fd == hub->strangers[i] && hub->polls[hub->size + i].revents)
        hear_stranger(hub, i);
    if (hub->listener >= 0 && hub->polls[n - 1].revents)
      accept_one(hub);
    check_complete(hub);
    if (hub->reading_values && !hub->failed)
      check_values(hub);
  }
  stop_listening(hub);
  for (int r = 0; r < hub->size; r++)
    if (hub->peers[r].fd >= 0) {
      shutdown(hub->peers[r].fd, SHUT_WR);
      close_fd(&hub->peers[r].fd);
    }
  return NULL;
}

static void release(struct k3_comm_hub *hub) {
  stop_listening(hub);
  k3_free(hub->values);
  k3_free(hub->peers);
  k3_free(hub->seats);
  k3_free(hub->polls);
  k3_free(hub);
}

enum k3_status k3_comm_hub_start(int listener, int own, int size, double bound_seconds, const char *place, struct k3_comm_hub **result,
                                 struct k3_error *err) {
  struct k3_comm_hub *hub = k3_calloc(1, sizeof *hub, err);
  *result = NULL;
  if (!hub) {
    close(listener);
    close(own);
    return K3_NO_MEMORY;
  }
  *hub = (struct k3_comm_hub){.listener = listener, .size = size, .bound_seconds = bound_seconds, .begin = k3_clock()};
  snprintf(hub->place, sizeof hub->place, "%s", place);
  for (int i = 0; i <= N_STRANGERS; i++)
    hub->strangers[i] = -1;
  set_options(own);
  fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
  hub->peers = k3_calloc((size_t)size, sizeof *hub->peers, err);
  hub->seats = k3_calloc((size_t)size, sizeof *hub->seats, err);
  hub->polls = k3_calloc((size_t)size + N_STRANGERS + 2, sizeof *hub->polls, err);
  if (!hub->peers || !hub->seats || !hub->polls) {
    close(own);
    release(hub);
    return K3_NO_MEMORY;
  }
  for (int r = 0; r < size; r++)
    hub->peers[r] = (struct peer){.fd = r == 0 ? own : -1, .came = r == 0};
  const int code = pthread_create(&hub->thread, NULL, serve, hub);
  if (code != 0) {
    close(own);
    release(hub);
    return k3_fail_errno(err, code, NULL, "cannot start a thread for the ranks");
  }
  *result = hub;
  return K3_OK;
}

void k3_comm_hub_join(struct k3_comm_hub *hub) {
  if (!hub)
    return;
  pthread_join(hub->thread, NULL);
  release(hub);
}
