#include "loader/stats.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "loader/element.h"

enum { READ_ELEMS = 1 << 19, WIDEN_ELEMS = 1024 };

// What is gathered over all pieces. The mean is subtracted at the end, in double, which is enough for weights; sums are taken in the order of
// elements.
struct gathering {
  struct k3_stats *stats;
  size_t n_first;
  double sum, sum2;
  uint64_t n_finite;
};

static void gather(struct gathering *g, const double *values, size_t n) {
  struct k3_stats *stats = g->stats;
  for (size_t i = 0; i < n; i++) {
    double x = values[i];
    if (stats->n_first < g->n_first)
      stats->first[stats->n_first++] = x;
    if (!isfinite(x)) {
      stats->n_nan += isnan(x);
      stats->n_inf += isinf(x) != 0;
      continue;
    }
    if (g->n_finite++ == 0)
      stats->min = stats->max = x;
    stats->min = x < stats->min ? x : stats->min;
    stats->max = x > stats->max ? x : stats->max;
    stats->n_zero += x == 0;
    g->sum += x;
    g->sum2 += x * x;
  }
}

// Elements [first, first + n) of a tensor.
static enum k3_status read_piece(struct gathering *g, const struct k3_ckpt *ckpt, uint64_t tensor, uint64_t first, uint64_t n, void *scratch,
                                 struct k3_progress *progress, struct k3_error *err) {
  enum k3_dtype dtype = k3_ckpt_tensor(ckpt, tensor)->dtype;
  unsigned bits = k3_dtype_bits(dtype);
  double values[WIDEN_ELEMS];
  for (uint64_t end = first + n; first < end;) {
    size_t n_now = end - first < READ_ELEMS ? (size_t)(end - first) : READ_ELEMS;
    K3_TRY(k3_ckpt_read(ckpt, tensor, first * bits / 8, scratch, (n_now * bits + 7) / 8, err));
    for (size_t at = 0; at < n_now; at += WIDEN_ELEMS) {
      size_t n_values = n_now - at < WIDEN_ELEMS ? n_now - at : WIDEN_ELEMS;
      k3_elements_widen(dtype, (const char *)scratch + at * bits / 8, n_values, values);
      gather(g, values, n_values);
    }
    first += n_now;
    k3_progress_add(progress, n_now * bits / 8);
  }
  return K3_OK;
}

// Number of equal characters at the beginning and at the end: enough to find the name that a slip of the finger meant among many alike.
static size_t likeness(const char *a, const char *b) {
  size_t n_a = strlen(a), n_b = strlen(b), n = 0, limit = n_a < n_b ? n_a : n_b;
  while (n < limit && a[n] == b[n])
    n++;
  size_t head = n;
  while (n < limit && a[n_a - 1 - (n - head)] == b[n_b - 1 - (n - head)])
    n++;
  return n;
}

static enum k3_status no_such_tensor(const struct k3_ckpt *ckpt, const char *name, struct k3_error *err) {
  const char *nearest = "";
  size_t best = 0;
  for (uint64_t i = 0; i < ckpt->n_tensors; i++) {
    const char *other = k3_ckpt_tensor(ckpt, i)->name;
    size_t n = likeness(name, other);
    if (n > best) {
      best = n;
      nearest = other;
    }
  }
  return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, ckpt->source, name, NULL,
                 best ? "there is no such tensor; the nearest name is %s" : "there is no such tensor%s", nearest);
}

static enum k3_status gather_view(struct gathering *g, const struct k3_ckpt *ckpt, const struct k3_manifest_view *view, void *scratch,
                                  struct k3_progress *progress, struct k3_error *err) {
  for (size_t s = 0; s < view->n_shards; s++) {
    const struct k3_manifest_view_shard *shard = &view->shards[s];
    uint64_t tensor;
    if (!k3_ckpt_find(ckpt, shard->tensor, strlen(shard->tensor), &tensor))
      return k3_fail(err, K3_BAD_INPUT, K3_IMG03, ckpt->source, view->name, NULL, "shard %llu is in %s, which the image does not hold",
                     (unsigned long long)shard->id, shard->tensor);
    const struct k3_st_tensor *t = k3_ckpt_tensor(ckpt, tensor);
    uint64_t n_rows = t->rank ? t->shape[0] : 1, row_elems = n_rows ? k3_st_n_elems(t) / n_rows : 0;
    K3_TRY(read_piece(g, ckpt, tensor, shard->row * row_elems, shard->n_rows * row_elems, scratch, progress, err));
  }
  return K3_OK;
}

// Shape and dtype of a view: those of its shards, with all their rows.
static void describe_view(const struct k3_ckpt *ckpt, const struct k3_manifest_view *view, struct k3_stats *stats) {
  stats->is_view = true;
  for (size_t s = 0; s < view->n_shards; s++) {
    const struct k3_st_tensor *t = k3_st_find(&ckpt->files[0].header, view->shards[s].tensor, strlen(view->shards[s].tensor));
    if (!t)
      continue;
    stats->dtype = t->dtype;
    stats->rank = t->rank;
    for (unsigned i = 1; i < t->rank; i++)
      stats->shape[i] = t->shape[i];
    stats->shape[0] += view->shards[s].n_rows;
  }
}

enum k3_status k3_stats_of(const struct k3_ckpt *ckpt, const char *name, size_t n_first, struct k3_progress *progress, struct k3_stats *stats,
                           struct k3_error *err) {
  *stats = (struct k3_stats){.name = name};
  uint64_t tensor = 0;
  bool found = k3_ckpt_find(ckpt, name, strlen(name), &tensor);
  const struct k3_manifest_view *view = !found && ckpt->image.bytes ? k3_manifest_view_of(&ckpt->image.manifest, name) : NULL;
  if (!found && !view)
    return no_such_tensor(ckpt, name, err);
  if (view) {
    describe_view(ckpt, view, stats);
  } else {
    const struct k3_st_tensor *t = k3_ckpt_tensor(ckpt, tensor);
    stats->dtype = t->dtype;
    stats->rank = t->rank;
    memcpy(stats->shape, t->shape, t->rank * sizeof *t->shape);
  }
  stats->n_elems = 1;
  for (unsigned i = 0; i < stats->rank; i++)
    stats->n_elems *= stats->shape[i];
  stats->nbytes = (stats->n_elems * k3_dtype_bits(stats->dtype) + 7) / 8;
  stats->numeric = k3_element_is_number(stats->dtype);
  if (!stats->numeric)
    return K3_OK;
  struct gathering g = {.stats = stats, .n_first = n_first < K3_STATS_MAX_FIRST ? n_first : K3_STATS_MAX_FIRST};
  void *scratch = k3_alloc_aligned((size_t)READ_ELEMS * 8, 4096, err);
  if (!scratch)
    return K3_NO_MEMORY;
  k3_progress_start(progress, "reading", stats->nbytes);
  enum k3_status status =
      view ? gather_view(&g, ckpt, view, scratch, progress, err) : read_piece(&g, ckpt, tensor, 0, stats->n_elems, scratch, progress, err);
  k3_progress_finish(progress);
  k3_free(scratch);
  if (status == K3_OK && g.n_finite > 0) {
    double n = (double)g.n_finite, variance = g.sum2 / n - g.sum / n * (g.sum / n);
    stats->mean = g.sum / n;
    stats->std = sqrt(variance > 0 ? variance : 0);
    stats->max_abs = fabs(stats->min) > fabs(stats->max) ? fabs(stats->min) : fabs(stats->max);
  }
  return status;
}
