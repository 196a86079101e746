#include "cli/ranks.h"

#include <errno.h>
#include <pthread.h>

#include "base/alloc.h"

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

struct opening {
  const char *path;
  struct k3_engine_options options;
  struct k3_ranks *ranks;
};

static enum k3_status open_rank(void *ctx, int rank, struct k3_engine *none, struct k3_error *err) {
  const struct opening *opening = ctx;
  struct k3_engine_options options = opening->options;
  (void)none;
  options.device += rank;  // a GPU for each
  options.tp_rank = rank;
  options.tp_size = opening->ranks->n;
  options.comm = opening->ranks->comms ? opening->ranks->comms[rank] : NULL;
  if (rank > 0)
    options.progress = NULL;
  opening->ranks->engines[rank] = k3_engine_open(opening->path, &options, err);
  return opening->ranks->engines[rank] ? K3_OK : err->status;
}

enum k3_status k3_ranks_open(const char *path, const struct k3_engine_options *options, int n, double bound_seconds, struct k3_ranks *ranks,
                             struct k3_error *err) {
  struct opening opening = {path, *options, ranks};
  enum k3_status status = K3_OK;
  *ranks = (struct k3_ranks){.n = n};
  ranks->engines = k3_calloc((size_t)n, sizeof *ranks->engines, err);
  if (!ranks->engines)
    return K3_NO_MEMORY;
  if (n > 1) {
    ranks->comms = k3_calloc((size_t)n, sizeof *ranks->comms, err);
    status = ranks->comms ? k3_comm_threads_create(n, bound_seconds, ranks->comms, err) : K3_NO_MEMORY;
  }
  if (status == K3_OK)
    status = k3_ranks_run(ranks, open_rank, &opening, err);
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
