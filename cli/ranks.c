#include "cli/ranks.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"

struct job {
  struct k3_ranks *ranks;
  k3_rank_fn fn;
  void *ctx;
  int rank;
  bool started;
  pthread_t thread;
  enum k3_status status;
  struct k3_error err;
};

static void *run_rank(void *arg) {
  struct job *job = arg;
  job->status = job->fn(job->ctx, job->rank, job->ranks->engines[job->rank], &job->err);
  // A rank that stops early is told to the others, which would wait for it.
  if (job->status != K3_OK && job->ranks->comms)
    job->ranks->comms[job->rank]->ops->abort(job->ranks->comms[job->rank], &job->err);
  return NULL;
}

// The cause, not what the other ranks saw of it.
static enum k3_status first_error(const struct job *jobs, int n, struct k3_error *err) {
  const struct job *first = NULL;
  for (int r = 0; r < n; r++) {
    if (jobs[r].status != K3_OK && (!first || (first->status == K3_COMM && jobs[r].status != K3_COMM)))
      first = &jobs[r];
  }
  if (first && err && err->status == K3_OK)
    *err = first->err;
  return first ? first->status : K3_OK;
}

enum k3_status k3_ranks_run(struct k3_ranks *ranks, k3_rank_fn fn, void *ctx, struct k3_error *err) {
  struct job *jobs = k3_calloc((size_t)ranks->n, sizeof *jobs, err);
  if (!jobs)
    return K3_NO_MEMORY;
  for (int r = 0; r < ranks->n; r++)
    jobs[r] = (struct job){.ranks = ranks, .fn = fn, .ctx = ctx, .rank = r};
  for (int r = 1; r < ranks->n; r++) {
    int code = pthread_create(&jobs[r].thread, NULL, run_rank, &jobs[r]);
    jobs[r].started = code == 0;
    if (code != 0) {
      jobs[r].status = k3_fail_errno(&jobs[r].err, code, NULL, "cannot start a thread for a rank");
      ranks->comms[r]->ops->abort(ranks->comms[r], &jobs[r].err);
    }
  }
  run_rank(&jobs[0]);
  for (int r = 1; r < ranks->n; r++) {
    if (jobs[r].started)
      pthread_join(jobs[r].thread, NULL);
  }
  enum k3_status status = first_error(jobs, ranks->n, err);
  k3_free(jobs);
  return status;
}

// --- a launcher's variables ------------------------------------------------------------------------------------------------------------------------

// A number that a launcher gives; false when the variable is absent.
static enum k3_status read_number(const char *name, long most, bool *given, int *value, struct k3_error *err) {
  const char *text = getenv(name);
  char *end;
  *given = text && *text;
  if (!*given)
    return K3_OK;
  errno = 0;
  const long number = strtol(text, &end, 10);
  if (errno != 0 || *end || *text < '0' || *text > '9' || number > most)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a number", "%s is \"%s\"", name, text);
  *value = (int)number;
  return K3_OK;
}

struct launch {
  int rank, size, local_rank, port;
  const char *address;
};

// size 1 when no launcher has started several.
static enum k3_status read_launch(struct launch *launch, struct k3_error *err) {
  static const char remedy[] = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a launcher; without WORLD_SIZE, or with 1, this process runs alone";
  bool has_size, has_rank, has_local, has_port;
  *launch = (struct launch){.size = 1, .address = getenv("MASTER_ADDR")};
  K3_TRY(read_number("WORLD_SIZE", 1 << 20, &has_size, &launch->size, err));
  if (!has_size || launch->size == 1) {
    launch->size = 1;
    return K3_OK;
  }
  K3_TRY(read_number("RANK", 1 << 20, &has_rank, &launch->rank, err));
  K3_TRY(read_number("LOCAL_RANK", 1 << 20, &has_local, &launch->local_rank, err));
  K3_TRY(read_number("MASTER_PORT", 65535, &has_port, &launch->port, err));
  const char *missing = !has_rank ? "RANK" : !launch->address || !*launch->address ? "MASTER_ADDR" : !has_port ? "MASTER_PORT" : NULL;
  if (missing)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, remedy, "WORLD_SIZE is %d and %s is not set", launch->size, missing);
  if (launch->size == 0 || launch->rank >= launch->size || launch->port == 0)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, remedy, "RANK is %d, WORLD_SIZE %d, MASTER_PORT %d", launch->rank, launch->size,
                   launch->port);
  if (!has_local)
    launch->local_rank = launch->rank;
  return K3_OK;
}

enum k3_status k3_ranks_meet(const struct k3_ranks_options *options, struct k3_ranks *ranks, struct k3_error *err) {
  const double bound = options->bound_seconds != 0 ? options->bound_seconds : K3_RANKS_BOUND_SECONDS;
  struct launch launch = {.size = 1};
  *ranks = (struct k3_ranks){0};
  if (options->by_launcher)
    K3_TRY(read_launch(&launch, err));
  if (launch.size > 1 && options->tp != K3_RANKS_AS_LAUNCHED && options->tp != (uint64_t)launch.size)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "no --tp, or WORLD_SIZE ranks: each is a process",
                   "--tp %llu, and a launcher has started %d processes (WORLD_SIZE)", (unsigned long long)options->tp, launch.size);
  const uint64_t size = options->tp != K3_RANKS_AS_LAUNCHED ? options->tp : (uint64_t)launch.size;
  if (size < 1 || size > K3_MAX_RANKS)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "1 to 64", "%llu ranks", (unsigned long long)size);
  if (!(bound > 0) || bound > 1e6)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "above 0, at most 1000000", "--rank-timeout %g", bound);
  *ranks = (struct k3_ranks){.n = launch.size > 1 ? 1 : (int)size, .first = launch.rank, .size = (int)size, .device = launch.local_rank};
  ranks->engines = k3_calloc((size_t)ranks->n, sizeof *ranks->engines, err);
  enum k3_status status = ranks->engines ? K3_OK : K3_NO_MEMORY;
  if (status == K3_OK && size > 1) {
    ranks->comms = k3_calloc((size_t)ranks->n, sizeof *ranks->comms, err);
    if (!ranks->comms)
      status = K3_NO_MEMORY;
    else if (launch.size > 1)
      status = k3_comm_processes_create(launch.rank, launch.size, launch.address, launch.port, bound, ranks->comms, err);
    else
      status = k3_comm_threads_create(ranks->n, bound, ranks->comms, err);
  }
  if (status != K3_OK)
    k3_ranks_close(ranks);
  return status;
}

enum k3_status k3_ranks_gather(struct k3_ranks *ranks, const char *what, const void *src, uint64_t nbytes, void *dst, struct k3_error *err) {
  return ranks->comms[0]->ops->all_gather(ranks->comms[0], what, src, nbytes, dst, NULL, err);
}

enum k3_status k3_ranks_agree(struct k3_ranks *ranks, const char *what, const char *text, struct k3_error *err) {
  enum { NBYTES = 128 };
  char mine[NBYTES] = "", all[K3_MAX_RANKS][NBYTES];
  if (!k3_ranks_are_processes(ranks))
    return K3_OK;
  snprintf(mine, sizeof mine, "%s", text);
  K3_TRY(k3_ranks_gather(ranks, what, mine, sizeof mine, all, err));
  for (int r = 1; r < ranks->size; r++)
    if (memcmp(all[r], all[0], NBYTES) != 0)
      return k3_fail(err, K3_COMM, K3_RULE_NONE, NULL, NULL, "the same on every rank", "%s: rank %d has %.*s where rank 0 has %.*s", what, r,
                     NBYTES - 1, all[r], NBYTES - 1, all[0]);
  return K3_OK;
}

enum k3_status k3_ranks_agree_on_bytes(struct k3_ranks *ranks, const char *what, const void *src, uint64_t nbytes, struct k3_error *err) {
  uint8_t digest[K3_SHA256_NBYTES];
  char text[2 * K3_SHA256_NBYTES + 1];
  if (!k3_ranks_are_processes(ranks))
    return K3_OK;
  K3_TRY(k3_sha256(src, nbytes, digest, err));
  k3_hex(text, digest);
  return k3_ranks_agree(ranks, what, text, err);
}

void k3_ranks_abort(struct k3_ranks *ranks, const struct k3_error *why) {
  for (int i = 0; i < ranks->n && ranks->comms && k3_ranks_are_processes(ranks); i++)
    ranks->comms[i]->ops->abort(ranks->comms[i], why);
}

// --- engines ---------------------------------------------------------------------------------------------------------------------------------------

struct opening {
  const char *path;
  struct k3_engine_options options;
  struct k3_ranks *ranks;
};

static enum k3_status open_rank(void *ctx, int i, struct k3_engine *none, struct k3_error *err) {
  const struct opening *opening = ctx;
  const struct k3_ranks *ranks = opening->ranks;
  struct k3_engine_options options = opening->options;
  (void)none;
  options.device += ranks->device + i;  // a GPU for each
  options.tp_rank = ranks->first + i;
  options.tp_size = ranks->size;
  options.comm = ranks->comms ? ranks->comms[i] : NULL;
  if (options.tp_rank > 0)
    options.progress = NULL;
  ranks->engines[i] = k3_engine_open(opening->path, &options, err);
  return ranks->engines[i] ? K3_OK : err->status;
}

// What engines of other processes must have in common with these.
static enum k3_status agree_on_image(struct k3_ranks *ranks, struct k3_error *err) {
  const struct k3_engine_info *info = k3_engine_info(ranks->engines[0]);
  char text[128];
  snprintf(text, sizeof text, "%s (blocks of %llu, memory %d)", info->identity, (unsigned long long)info->block_width, (int)info->memory);
  return k3_ranks_agree(ranks, "the image's seal", text, err);
}

enum k3_status k3_ranks_open(const char *path, const struct k3_engine_options *options, const struct k3_ranks_options *how, struct k3_ranks *ranks,
                             struct k3_error *err) {
  struct opening opening = {path, *options, ranks};
  K3_TRY(k3_ranks_meet(how, ranks, err));
  enum k3_status status = k3_ranks_run(ranks, open_rank, &opening, err);
  if (status == K3_OK)
    status = agree_on_image(ranks, err);
  if (status != K3_OK)
    k3_ranks_close(ranks);
  return status;
}

void k3_ranks_close(struct k3_ranks *ranks) {
  for (int r = 0; r < ranks->n && ranks->engines; r++)
    k3_engine_free(ranks->engines[r]);
  for (int r = 0; r < ranks->n && ranks->comms; r++) {
    if (ranks->comms[r])
      ranks->comms[r]->ops->destroy(ranks->comms[r]);
  }
  k3_free(ranks->engines);
  k3_free(ranks->comms);
  *ranks = (struct k3_ranks){0};
}
