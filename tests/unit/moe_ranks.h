// The decoder layers of a fixture run on one or several ranks, as threads, with outputs of all of them.
#ifndef K3_TESTS_UNIT_MOE_RANKS_H
#define K3_TESTS_UNIT_MOE_RANKS_H

#include "moe_fixture.h"

enum { MOE_MAX_TAPS = 8 };

struct moe_outputs {
  float *hidden, *residual, *final, *taps[MOE_MAX_TAPS];  // [n, H]
};

struct moe_ranks {
  const struct moe_fixture *f;
  int n;
  uint64_t n_rows;
  float *states, *residual_in;  // residual_in: NULL unless a test sets it; owned by the test
  int64_t *positions, *request_ids;
  struct k3_comm *comms[MOE_MAX_RANKS];
  struct k3_moe *moe[MOE_MAX_RANKS];
  struct moe_outputs out[MOE_MAX_RANKS];
  enum k3_status status[MOE_MAX_RANKS];
  struct k3_error errs[MOE_MAX_RANKS];
};

static inline float *moe_array(uint64_t n) {
  float *array = calloc(n + 1, sizeof *array);
  assert_non_null(array);
  return array;
}

// Rows of all requests, shuffled as the generator shuffles them.
static inline void moe_scenario(struct moe_ranks *r, const uint64_t *lengths, uint64_t n_requests) {
  const uint64_t H = r->f->m.hidden_size;
  for (uint64_t b = 0; b < n_requests; b++)
    r->n_rows += lengths[b];
  r->states = moe_array(r->n_rows * H);
  r->positions = calloc(r->n_rows + 1, sizeof(int64_t));
  r->request_ids = calloc(r->n_rows + 1, sizeof(int64_t));
  uint64_t *order = calloc(r->n_rows + 1, sizeof *order), at = 0;
  int64_t *keys = calloc(r->n_rows + 1, sizeof *keys);
  assert_true(r->positions && r->request_ids && order && keys);
  for (uint64_t i = 0; i < r->n_rows; i++) {
    keys[i] = fixture_bits("order", i, r->f->seed, 32);
    uint64_t j = i;
    for (; j > 0 && keys[order[j - 1]] > keys[i]; j--)
      order[j] = order[j - 1];
    order[j] = i;
  }
  int64_t *positions = calloc(r->n_rows + 1, sizeof *positions), *ids = calloc(r->n_rows + 1, sizeof *ids);
  assert_true(positions && ids);
  for (uint64_t b = 0; b < n_requests; b++)
    for (uint64_t p = 0; p < lengths[b]; p++, at++)
      positions[at] = (int64_t)p, ids[at] = (int64_t)b;
  for (uint64_t i = 0; i < r->n_rows; i++)
    r->positions[i] = positions[order[i]], r->request_ids[i] = ids[order[i]];
  for (uint64_t i = 0; i < r->n_rows * H; i++)
    r->states[i] = (float)moe_value(r->f, "hidden_states", i, MOE_PLAIN, H);
  free(order), free(keys), free(positions), free(ids);
}

// Opens n ranks; `options` but for rank, size and communicator. n_layers 0: all layers.
static inline void moe_ranks_open(struct moe_ranks *r, const struct moe_fixture *f, int n, const struct k3_moe_options *options) {
  struct k3_error err = {0};
  char text[1024];
  memset(r, 0, sizeof *r);
  r->f = f;
  r->n = n;
  moe_scenario(r, f->c->lengths, f->c->n_requests);
  if (n > 1)
    assert_int_equal(k3_comm_threads_create(n, 60, r->comms, NULL), K3_OK);
  for (int i = 0; i < n; i++) {
    struct k3_moe_options o = options ? *options : (struct k3_moe_options){.n_threads = 1};
    o.n_layers = o.n_layers ? o.n_layers : f->m.n_layers;
    o.n_threads = o.n_threads ? o.n_threads : 1;
    o.tp_rank = (uint32_t)i, o.tp_size = (uint32_t)n, o.comm = r->comms[i];
    r->moe[i] = k3_moe_open(&(struct k3_weights_source){.image = &f->image}, &o, &err);
    if (!r->moe[i])
      fail_msg("%s", k3_error_text(&err, text, sizeof text));
    struct moe_outputs *out = &r->out[i];
    out->hidden = moe_array(r->n_rows * f->m.hidden_size);
    out->residual = moe_array(r->n_rows * f->m.hidden_size);
    out->final = moe_array(r->n_rows * f->m.hidden_size);
    for (int t = 0; t < MOE_MAX_TAPS; t++)
      out->taps[t] = moe_array(r->n_rows * f->m.hidden_size);
  }
}

static inline void moe_ranks_close(struct moe_ranks *r) {
  for (int i = 0; i < r->n; i++) {
    k3_moe_free(r->moe[i]);
    free(r->out[i].hidden), free(r->out[i].residual), free(r->out[i].final);
    for (int t = 0; t < MOE_MAX_TAPS; t++)
      free(r->out[i].taps[t]);
    if (r->comms[i])
      r->comms[i]->ops->destroy(r->comms[i]);
  }
  free(r->states), free(r->positions), free(r->request_ids);
}

struct moe_thread {
  struct moe_ranks *ranks;
  int rank;
};

static inline void *moe_run_rank(void *arg) {
  struct moe_thread *thread = arg;
  struct moe_ranks *r = thread->ranks;
  const struct moe_outputs *out = &r->out[thread->rank];
  const struct k3_moe_rows rows = {.n_rows = r->n_rows,
                                   .hidden = {r->states, K3_MEMORY_HOST, K3_DTYPE_F32, 0},
                                   .residual = {r->residual_in, K3_MEMORY_HOST, K3_DTYPE_F32, 0},
                                   .positions = r->positions,
                                   .request_ids = r->request_ids,
                                   .out_hidden = out->hidden,
                                   .out_residual = out->residual,
                                   .out_final = out->final,
                                   .out_taps = out->taps};
  r->status[thread->rank] = k3_moe_run(r->moe[thread->rank], &rows, &r->errs[thread->rank]);
  return NULL;
}

static inline void moe_ranks_try(struct moe_ranks *r) {
  pthread_t threads[MOE_MAX_RANKS];
  struct moe_thread args[MOE_MAX_RANKS];
  for (int i = 0; i < r->n; i++) {
    args[i] = (struct moe_thread){r, i};
    assert_int_equal(pthread_create(&threads[i], NULL, moe_run_rank, &args[i]), 0);
  }
  for (int i = 0; i < r->n; i++)
    pthread_join(threads[i], NULL);
}

static inline void moe_ranks_run(struct moe_ranks *r) {
  char text[1024];
  moe_ranks_try(r);
  for (int i = 0; i < r->n; i++)
    if (r->status[i] != K3_OK)
      fail_msg("rank %d: %s", i, k3_error_text(&r->errs[i], text, sizeof text));
}

// |a - b| / |b| over n values.
static inline double moe_relative(const float *a, const float *b, uint64_t n) {
  double sum = 0, total = 0;
  for (uint64_t i = 0; i < n; i++) {
    sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    total += (double)b[i] * (double)b[i];
  }
  return sqrt(sum / total);
}

// The same, to a golden tensor.
static inline double moe_off(const struct moe_fixture *f, const char *name, const float *values, uint64_t n) {
  double *truth = golden_values(&f->golden, name), sum = 0, total = 0;
  if (!truth)
    fail_msg("no golden %s", name);
  for (uint64_t i = 0; i < n; i++) {
    sum += ((double)values[i] - truth[i]) * ((double)values[i] - truth[i]);
    total += truth[i] * truth[i];
  }
  free(truth);
  return sqrt(sum / total);
}

#endif
