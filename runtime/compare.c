#include "runtime/compare.h"

#include <math.h>

#include "base/dtype.h"
#include "base/pool.h"

// A distribution as it is needed: probabilities are exp(logit - peak) / sum.
struct softmax {
  double peak, log_sum;
  uint64_t argmax;
};

static struct softmax prepare(const void *logits, uint64_t n) {
  struct softmax s = {-INFINITY, 0, 0};
  double sum = 0;
  for (uint64_t i = 0; i < n; i++) {
    double logit = k3_load_f32(logits, i);
    if (logit > s.peak) {
      s.peak = logit;
      s.argmax = i;
    }
  }
  for (uint64_t i = 0; i < n; i++)
    sum += exp(k3_load_f32(logits, i) - s.peak);
  s.log_sum = log(sum);
  return s;
}

static double log_probability(const struct softmax *s, const void *logits, uint64_t i) {
  return k3_load_f32(logits, i) - s->peak - s->log_sum;
}

void k3_compare_slot(const float *a, const float *b, const void *target, uint64_t n_vocab, struct k3_slot_difference *difference) {
  const struct softmax sa = prepare(a, n_vocab), sb = prepare(b, n_vocab), st = target ? prepare(target, n_vocab) : sa;
  double kl = 0, distance = 0, distance_a = 0, distance_b = 0;
  for (uint64_t i = 0; i < n_vocab; i++) {
    double log_p = log_probability(&sa, a, i), log_q = log_probability(&sb, b, i), p = exp(log_p), q = exp(log_q);
    kl += p > 0 ? p * (log_p - log_q) : 0;
    distance += fabs(p - q);
    if (target) {
      double t = exp(log_probability(&st, target, i));
      distance_a += fabs(p - t);
      distance_b += fabs(q - t);
    }
  }
  *difference = (struct k3_slot_difference){.kl = kl, .overlap = 1 - 0.5 * distance, .agree = sa.argmax == sb.argmax};
  if (target) {
    difference->acceptance_a = 1 - 0.5 * distance_a;
    difference->acceptance_b = 1 - 0.5 * distance_b;
  }
}

struct job {
  const float *a, *b;
  const unsigned char *target;
  uint64_t n_vocab;
  struct k3_slot_difference *differences;
};

static enum k3_status compare_one(void *ctx, int worker, uint64_t slot, struct k3_error *err) {
  const struct job *job = ctx;
  (void)worker;
  (void)err;
  k3_compare_slot(job->a + slot * job->n_vocab, job->b + slot * job->n_vocab, job->target ? job->target + slot * job->n_vocab * sizeof(float) : NULL,
                  job->n_vocab, &job->differences[slot]);
  return K3_OK;
}

enum k3_status k3_compare_slots(const float *a, const float *b, const void *target, uint64_t n_slots, uint64_t n_vocab, int n_threads,
                                struct k3_slot_difference *differences, struct k3_error *err) {
  struct job job = {a, b, target, n_vocab, differences};
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  if (!pool)
    return K3_NO_MEMORY;
  enum k3_status status = k3_pool_run(pool, n_slots, compare_one, &job, err);
  k3_pool_free(pool);
  return status;
}

double k3_expected_tokens(const double *acceptance, uint64_t n_slots) {
  double expected = 0, survival = 1;
  for (uint64_t k = 0; k < n_slots; k++) {
    survival *= acceptance[k];
    expected += survival;
  }
  return expected;
}
