#include "base/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/alloc.h"
#include "base/cpu.h"

struct k3_pool {
  int n_threads;
  pthread_t *threads;  // [n_threads - 1]
  int n_started;
  pthread_mutex_t mutex;
  pthread_cond_t work_ready, work_done;
  // Guarded by mutex:
  uint64_t generation;  // counts runs; a worker joins each run once
  int n_busy;
  bool stopping;
  uint64_t failed_item;
  struct k3_error first_error;
  // The current run:
  k3_pool_fn fn;
  void *ctx;
  uint64_t n_items;
  _Atomic uint64_t next_item;
  _Atomic bool failed;
};

struct worker_start {
  struct k3_pool *pool;
  int worker;
};

static void do_items(struct k3_pool *pool, int worker) {
  while (!atomic_load_explicit(&pool->failed, memory_order_relaxed)) {
    uint64_t item = atomic_fetch_add_explicit(&pool->next_item, 1, memory_order_relaxed);
    if (item >= pool->n_items)
      return;
    struct k3_error err = {0};
    enum k3_status status = pool->fn(pool->ctx, worker, item, &err);
    if (status == K3_OK)
      continue;
    err.status = status;
    pthread_mutex_lock(&pool->mutex);
    if (!atomic_load(&pool->failed) || item < pool->failed_item) {
      pool->failed_item = item;
      pool->first_error = err;
    }
    atomic_store(&pool->failed, true);
    pthread_mutex_unlock(&pool->mutex);
  }
}

static void *worker_main(void *arg) {
  struct worker_start start = *(struct worker_start *)arg;
  struct k3_pool *pool = start.pool;
  k3_free(arg);
  uint64_t seen = 0;
  pthread_mutex_lock(&pool->mutex);
  for (;;) {
    while (!pool->stopping && pool->generation == seen)
      pthread_cond_wait(&pool->work_ready, &pool->mutex);
    if (pool->stopping)
      break;
    seen = pool->generation;
    pthread_mutex_unlock(&pool->mutex);
    do_items(pool, start.worker);
    pthread_mutex_lock(&pool->mutex);
    if (--pool->n_busy == 0)
      pthread_cond_signal(&pool->work_done);
  }
  pthread_mutex_unlock(&pool->mutex);
  return NULL;
}

struct k3_pool *k3_pool_create(int n_threads, struct k3_error *err) {
  if (n_threads < 1)
    n_threads = k3_cpu_count();
  struct k3_pool *pool = k3_calloc(1, sizeof *pool, err);
  if (!pool)
    return NULL;
  pool->n_threads = n_threads;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work_ready, NULL);
  pthread_cond_init(&pool->work_done, NULL);
  pool->threads = k3_calloc((size_t)n_threads, sizeof *pool->threads, err);
  for (int worker = 1; pool->threads && worker < n_threads; worker++) {
    struct worker_start *start = k3_calloc(1, sizeof *start, err);
    if (!start)
      break;
    *start = (struct worker_start){pool, worker};
    if (pthread_create(&pool->threads[worker - 1], NULL, worker_main, start) != 0) {
      k3_free(start);
      k3_fail(err, K3_NO_MEMORY, K3_RULE_NONE, NULL, NULL, "a smaller --threads", "cannot start thread %d of %d", worker + 1, n_threads);
      break;
    }
    pool->n_started++;
  }
  if (pool->n_started != n_threads - 1 || !pool->threads) {
    k3_pool_free(pool);
    return NULL;
  }
  return pool;
}

int k3_pool_n_threads(const struct k3_pool *pool) {
  return pool->n_threads;
}

enum k3_status k3_pool_run(struct k3_pool *pool, uint64_t n_items, k3_pool_fn fn, void *ctx, struct k3_error *err) {
  if (n_items == 0)
    return K3_OK;
  pthread_mutex_lock(&pool->mutex);
  pool->fn = fn;
  pool->ctx = ctx;
  pool->n_items = n_items;
  pool->next_item = 0;
  pool->failed = false;
  pool->first_error = (struct k3_error){0};
  bool wake = n_items > 1 && pool->n_started > 0;
  if (wake) {
    pool->n_busy = pool->n_started;
    pool->generation++;
    pthread_cond_broadcast(&pool->work_ready);
  }
  pthread_mutex_unlock(&pool->mutex);
  do_items(pool, 0);
  pthread_mutex_lock(&pool->mutex);
  while (pool->n_busy > 0)
    pthread_cond_wait(&pool->work_done, &pool->mutex);
  bool failed = pool->failed;
  pthread_mutex_unlock(&pool->mutex);
  if (!failed)
    return K3_OK;
  if (err && err->status == K3_OK)
    *err = pool->first_error;
  return pool->first_error.status;
}

void k3_pool_free(struct k3_pool *pool) {
  if (!pool)
    return;
  pthread_mutex_lock(&pool->mutex);
  pool->stopping = true;
  pthread_cond_broadcast(&pool->work_ready);
  pthread_mutex_unlock(&pool->mutex);
  for (int i = 0; i < pool->n_started; i++)
    pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->work_done);
  pthread_cond_destroy(&pool->work_ready);
  pthread_mutex_destroy(&pool->mutex);
  k3_free(pool->threads);
  k3_free(pool);
}
