// A rank that is a process: it knows rank 0's hub alone.
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "runtime/comm_hub.h"

typedef unsigned long long ull;  // for %llu

enum { MAX_SIZE = 4096, FIRST_PAUSE_MS = 5, LAST_PAUSE_MS = 250 };
static const double GRACE_SECONDS = 5;  // for the hub, which has the bound itself and names the rank that is missing

struct comm_processes {
  struct k3_comm comm;
  struct k3_comm_hub *hub;  // of rank 0, else NULL
  int fd;                   // to the hub
  double bound_seconds;
  char place[300];  // where the hub is, for messages
  struct k3_seat seat;
  struct k3_error failure;  // once a step has failed
};

static struct comm_processes *self_of(struct k3_comm *comm) {
  return (struct comm_processes *)comm;
}

// Waits for an event until `due`. 0 when time is up.
static short wait_for(int fd, short events, double due) {
  for (;;) {
    struct pollfd p = {.fd = fd, .events = events};
    const double left = due - k3_clock();
    const int n = poll(&p, 1, left <= 0 ? 0 : left > 1e6 ? 1000000000 : (int)(left * 1e3) + 1);
    if (n > 0)
      return p.revents;
    if (n == 0 && left <= 0)
      return 0;
  }
}

// --- talking to the hub ----------------------------------------------------------------------------------------------------------------------------

enum outcome { DONE, GONE, LATE, ANSWERED };  // ANSWERED: the hub has spoken before all was sent

static double patience(const struct comm_processes *self) {
  return self->bound_seconds + (self->bound_seconds < GRACE_SECONDS ? self->bound_seconds : GRACE_SECONDS);
}

static enum outcome receive(struct comm_processes *self, void *dst, uint64_t nbytes) {
  double due = k3_clock() + patience(self);
  for (uint64_t done = 0; done < nbytes;) {
    ssize_t n = recv(self->fd, (unsigned char *)dst + done, nbytes - done, 0);
    if (n > 0) {
      done += (uint64_t)n;
      due = k3_clock() + patience(self);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      return GONE;
    } else if (errno == EAGAIN && !wait_for(self->fd, POLLIN, due)) {
      return LATE;
    }
  }
  return DONE;
}

static enum outcome give(struct comm_processes *self, const void *src, uint64_t nbytes) {
  double due = k3_clock() + patience(self);
  for (uint64_t done = 0; done < nbytes;) {
    const short events = wait_for(self->fd, POLLIN | POLLOUT, due);
    if (events == 0)
      return LATE;
    if (events & (POLLIN | POLLHUP | POLLERR))
      return ANSWERED;
    ssize_t n = send(self->fd, (const unsigned char *)src + done, nbytes - done, MSG_NOSIGNAL);
    if (n > 0) {
      done += (uint64_t)n;
      due = k3_clock() + patience(self);
    } else if (errno != EAGAIN && errno != EINTR) {
      return ANSWERED;  // with its reason, or the end of the connection
    }
  }
  return DONE;
}

static enum k3_status give_up(struct comm_processes *self, const struct k3_error *error, struct k3_error *err) {
  if (self->failure.status == K3_OK)
    self->failure = *error;
  if (err && err->status == K3_OK)
    *err = self->failure;
  return self->failure.status;
}

// Rank 0 itself is missing.
static enum k3_status blame_hub(struct comm_processes *self, enum outcome outcome, double waited, struct k3_error *err) {
  struct k3_error error = {0};
  char where[192] = "while the ranks were coming";
  if (self->seat.n_steps > 0)
    snprintf(where, sizeof where, "at %s of %s, step %llu", k3_comm_kind_name(self->seat.kind), self->seat.step, (ull)self->seat.n_steps);
  k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, self->seat.step[0] ? self->seat.step : NULL, NULL, "rank 0 %s: rank %d expected it %s (%.3g s)",
          outcome == GONE ? "is gone" : "is late or dead", self->comm.rank, where, waited);
  return give_up(self, &error, err);
}

// The next frame of the hub; a failure that it tells is this rank's.
static enum k3_status hear(struct comm_processes *self, enum k3_frame_type wanted, struct k3_frame *frame, struct k3_error *err) {
  unsigned char bytes[K3_FRAME_NBYTES], reason[K3_FRAME_ERROR_NBYTES];
  struct k3_error error = {0};
  const double begin = k3_clock();
  enum outcome outcome = receive(self, bytes, sizeof bytes);
  if (outcome != DONE)
    return blame_hub(self, outcome, k3_clock() - begin, err);
  const char *wrong = k3_frame_read(bytes, frame);
  if (!wrong && frame->version != K3_FRAME_VERSION) {
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "one build of k3pack on all ranks",
            "rank 0 speaks version %u of the ranks' protocol, rank %d %d", frame->version, self->comm.rank, K3_FRAME_VERSION);
    return give_up(self, &error, err);
  }
  if (!wrong && frame->type == K3_FRAME_FAILED && frame->n == K3_FRAME_ERROR_NBYTES) {
    outcome = receive(self, reason, sizeof reason);
    if (outcome != DONE)
      return blame_hub(self, outcome, k3_clock() - begin, err);
    k3_frame_read_error(reason, &error);
    return give_up(self, &error, err);
  }
  if (!wrong && frame->type != wanted)
    wrong = "a message out of turn";
  if (!wrong)
    return K3_OK;
  k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, "a MASTER_PORT that is free, the same on all ranks",
          "what listens at %s is no rank 0 of k3pack: it sent %s", self->place, wrong);
  return give_up(self, &error, err);
}

static enum k3_status step(struct comm_processes *self, enum k3_comm_kind kind, const char *name, const void *src, uint64_t n, void *dst,
                           uint64_t result_nbytes, struct k3_error *err) {
  struct k3_seat *seat = &self->seat;
  struct k3_frame frame = {.type = K3_FRAME_STEP, .rank = (uint32_t)self->comm.rank, .size = (uint32_t)self->comm.size, .kind = kind, .n = n};
  unsigned char bytes[K3_FRAME_NBYTES];
  uint64_t nbytes;
  if (self->failure.status != K3_OK)
    return give_up(self, &self->failure, err);
  if (!k3_frame_step_nbytes(kind, n, self->comm.size, &nbytes))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, "a smaller step", "%llu values are too many", (ull)n);
  seat->n_steps++;
  seat->kind = kind;
  snprintf(seat->step, sizeof seat->step, "%s", name);
  memcpy(frame.step, seat->step, sizeof frame.step);
  k3_frame_write(&frame, bytes);
  const double begin = k3_clock();
  enum outcome outcome = give(self, bytes, sizeof bytes);
  if (outcome == DONE)
    outcome = give(self, src, nbytes);
  if (outcome == LATE)
    return blame_hub(self, outcome, k3_clock() - begin, err);
  K3_TRY(hear(self, K3_FRAME_RESULT, &frame, err));
  if (outcome == ANSWERED || frame.kind != kind || frame.n != result_nbytes) {
    struct k3_error error = {0};
    k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, name, NULL, "rank 0 answered %s of %s, step %llu, with %llu bytes where %llu are due",
            k3_comm_kind_name(kind), name, (ull)seat->n_steps, (ull)frame.n, (ull)result_nbytes);
    return give_up(self, &error, err);
  }
  outcome = receive(self, dst, result_nbytes);
  return outcome == DONE ? K3_OK : blame_hub(self, outcome, k3_clock() - begin, err);
}

static enum k3_status all_reduce(struct k3_comm *comm, const char *name, float *values, uint64_t n, void *stream, struct k3_error *err) {
  (void)stream;
  return step(self_of(comm), K3_COMM_ALL_REDUCE, name, values, n, values, n * sizeof *values, err);
}

static enum k3_status reduce_scatter(struct k3_comm *comm, const char *name, const float *values, uint64_t n, float *dst, void *stream,
                                     struct k3_error *err) {
  (void)stream;
  return step(self_of(comm), K3_COMM_REDUCE_SCATTER, name, values, n, dst, n * sizeof *dst, err);
}

static enum k3_status all_gather(struct k3_comm *comm, const char *name, const void *src, uint64_t nbytes, void *dst, void *stream,
                                 struct k3_error *err) {
  (void)stream;
  return step(self_of(comm), K3_COMM_ALL_GATHER, name, src, nbytes, dst, nbytes * (uint64_t)comm->size, err);
}

// Says so to the hub, which tells the others; later steps of this rank fail.
static void leave(struct k3_comm *comm, const struct k3_error *why) {
  struct comm_processes *self = self_of(comm);
  struct k3_frame frame = {.type = K3_FRAME_LEAVE, .rank = (uint32_t)comm->rank, .size = (uint32_t)comm->size};
  unsigned char bytes[K3_FRAME_NBYTES + K3_FRAME_ERROR_NBYTES];
  struct k3_error error = {0};
  const bool tells = why && why->status != K3_OK;
  if (self->failure.status == K3_OK) {
    frame.n = tells ? K3_FRAME_ERROR_NBYTES : 0;
    k3_frame_write(&frame, bytes);
    if (tells)
      k3_frame_write_error(why, bytes + K3_FRAME_NBYTES);
    give(self, bytes, K3_FRAME_NBYTES + frame.n);
  }
  k3_fail(&error, K3_COMM, K3_RULE_NONE, NULL, NULL, NULL, "rank %d has left the others", comm->rank);
  give_up(self, &error, NULL);
}

static void destroy(struct k3_comm *comm) {
  if (!comm)
    return;
  struct comm_processes *self = self_of(comm);
  if (self->fd >= 0) {
    leave(comm, NULL);
    shutdown(self->fd, SHUT_WR);
    close(self->fd);
  }
  k3_comm_hub_join(self->hub);
  k3_free(self);
}

static const struct k3_comm_ops OPS = {
    .all_reduce = all_reduce, .reduce_scatter = reduce_scatter, .all_gather = all_gather, .abort = leave, .destroy = destroy};

// --- meeting ---------------------------------------------------------------------------------------------------------------------------------------

static enum k3_status resolve(const char *address, int port, bool listens, struct addrinfo **list, struct k3_error *err) {
  char text[16];
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | (listens ? AI_PASSIVE : 0)};
  snprintf(text, sizeof text, "%d", port);
  const int code = getaddrinfo(address, text, &hints, list);
  if (code == 0)
    return K3_OK;
  return k3_fail(err, K3_COMM, K3_RULE_NONE, NULL, NULL, "a name or number of the machine of rank 0", "MASTER_ADDR %s: %s", address,
                 gai_strerror(code));
}

static enum k3_status listen_at(const struct comm_processes *self, const char *address, int port, int *fd, struct k3_error *err) {
  struct addrinfo *list;
  const int on = 1;
  int code = 0;
  K3_TRY(resolve(address, port, true, &list, err));
  *fd = -1;
  for (const struct addrinfo *a = list; a && *fd < 0; a = a->ai_next) {
    *fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (*fd < 0) {
      code = errno;
      continue;
    }
    setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(*fd, a->ai_addr, a->ai_addrlen) != 0 || listen(*fd, self->comm.size) != 0) {
      code = errno;
      close(*fd);
      *fd = -1;
    }
  }
  freeaddrinfo(list);
  return *fd >= 0
             ? K3_OK
             : k3_fail(err, K3_COMM, K3_RULE_NONE, NULL, NULL,
                       "an address of rank 0's machine and a port that is free there; a launcher that keeps MASTER_PORT for itself needs another "
                       "one: env MASTER_PORT=29511 k3pack ...",
                       "rank 0 cannot listen at %s: %s", self->place, strerror(code));
}

// A connection to oneself, which a port of the range for outgoing ones can give while nobody listens.
static bool is_own(int fd) {
  struct sockaddr_storage here = {0}, there = {0};
  socklen_t n_here = sizeof here, n_there = sizeof there;
  return getsockname(fd, (struct sockaddr *)&here, &n_here) == 0 && getpeername(fd, (struct sockaddr *)&there, &n_there) == 0 && n_here == n_there &&
         memcmp(&here, &there, n_here) == 0;
}

// One attempt; 0 or what was wrong.
static int connect_once(const struct addrinfo *a, double due, int *fd) {
  int code = 0;
  socklen_t n = sizeof code;
  *fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
  if (*fd < 0)
    return errno;
  if (connect(*fd, a->ai_addr, a->ai_addrlen) != 0) {
    code = errno;
    if (code == EINPROGRESS) {
      code = ETIMEDOUT;
      if (wait_for(*fd, POLLOUT, due))
        getsockopt(*fd, SOL_SOCKET, SO_ERROR, &code, &n);
    }
  }
  if (code == 0 && is_own(*fd))
    code = ECONNREFUSED;
  if (code != 0) {
    close(*fd);
    *fd = -1;
  }
  return code;
}

static enum k3_status connect_to(struct comm_processes *self, const char *address, int port, struct k3_error *err) {
  const double due = k3_clock() + self->bound_seconds;
  struct addrinfo *list;
  int code = 0;
  for (long pause_ms = FIRST_PAUSE_MS;; pause_ms = 2 * pause_ms < LAST_PAUSE_MS ? 2 * pause_ms : LAST_PAUSE_MS) {
    K3_TRY(resolve(address, port, false, &list, err));  // each time: a name may begin to exist with the machine
    for (const struct addrinfo *a = list; a && self->fd < 0; a = a->ai_next)
      code = connect_once(a, due, &self->fd);
    freeaddrinfo(list);
    if (self->fd >= 0)
      break;
    if (k3_clock() + (double)pause_ms * 1e-3 >= due)
      return k3_fail(err, K3_COMM, K3_RULE_NONE, NULL, NULL, "a process with RANK=0 and the same MASTER_ADDR and MASTER_PORT",
                     "rank 0 did not come: rank %d tried %s for %.3g s: %s", self->comm.rank, self->place, self->bound_seconds, strerror(code));
    nanosleep(&(struct timespec){0, pause_ms * 1000000}, NULL);
  }
  const int on = 1;
  setsockopt(self->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const struct k3_frame hello = {.type = K3_FRAME_HELLO, .rank = (uint32_t)self->comm.rank, .size = (uint32_t)self->comm.size};
  unsigned char bytes[K3_FRAME_NBYTES];
  k3_frame_write(&hello, bytes);
  give(self, bytes, sizeof bytes);  // if that fails, so does what is heard next
  return K3_OK;
}

static enum k3_status start_hub(struct comm_processes *self, const char *address, int port, struct k3_error *err) {
  int listener, pair[2];
  K3_TRY(listen_at(self, address, port, &listener, err));
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    close(listener);
    return k3_fail_errno(err, errno, NULL, "cannot make a socket pair");
  }
  self->fd = pair[0];
  fcntl(self->fd, F_SETFL, fcntl(self->fd, F_GETFL) | O_NONBLOCK);
  return k3_comm_hub_start(listener, pair[1], self->comm.size, self->bound_seconds, self->place, &self->hub, err);
}

enum k3_status k3_comm_processes_create(int rank, int size, const char *address, int port, double bound_seconds, struct k3_comm **comm,
                                        struct k3_error *err) {
  struct k3_frame welcome;
  *comm = NULL;
  if (!address || size < 1 || size > MAX_SIZE || rank < 0 || rank >= size || !(bound_seconds > 0) || bound_seconds > 1e6 || port < 1 || port > 65535)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL,
                   "an address, a rank below its size of at most 4096, a port of 1 to 65535, a bound above 0",
                   "rank %d of %d, port %d, a bound of %g s", rank, size, port, bound_seconds);
  struct comm_processes *self = k3_calloc(1, sizeof *self, err);
  if (!self)
    return K3_NO_MEMORY;
  *self = (struct comm_processes){.comm = {&OPS, rank, size}, .fd = -1, .bound_seconds = bound_seconds};
  snprintf(self->place, sizeof self->place, "%s:%d", address, port);
  enum k3_status status = rank == 0 ? start_hub(self, address, port, err) : connect_to(self, address, port, err);
  if (status == K3_OK)
    status = hear(self, K3_FRAME_WELCOME, &welcome, err);
  if (status == K3_OK)
    *comm = &self->comm;
  else
    destroy(&self->comm);
  return status;
}
