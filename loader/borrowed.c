// The draft's own embedding and head against the target's: rule MAP10.
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "loader/plan_parts.h"
#include "loader/writer.h"

enum { BLOCK_NBYTES = 2 << 20 };

struct comparison {
  const struct k3_plan *plan;
  uint64_t own, other;  // tensor numbers in the checkpoint and in the target
  uint64_t row_nbytes, n_rows, rows_per_item;
  unsigned char **buffers;  // [n_threads] of two blocks
  struct k3_progress *progress;
  _Atomic uint64_t n_different;
};

static enum k3_status compare_rows(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  struct comparison *c = ctx;
  uint64_t first = item * c->rows_per_item, n = c->n_rows - first < c->rows_per_item ? c->n_rows - first : c->rows_per_item;
  size_t nbytes = (size_t)(n * c->row_nbytes);
  unsigned char *own = c->buffers[worker], *other = own + c->rows_per_item * c->row_nbytes;
  K3_TRY(k3_ckpt_read(c->plan->ckpt, c->own, first * c->row_nbytes, own, nbytes, err));
  K3_TRY(k3_ckpt_read(c->plan->target, c->other, first * c->row_nbytes, other, nbytes, err));
  k3_progress_add(c->progress, 2 * nbytes);
  if (memcmp(own, other, nbytes) == 0)
    return K3_OK;
  uint64_t n_different = 0;
  for (uint64_t row = 0; row < n; row++)
    n_different += memcmp(own + row * c->row_nbytes, other + row * c->row_nbytes, (size_t)c->row_nbytes) != 0;
  c->n_different += n_different;
  return K3_OK;
}

static enum k3_status compare_tensors(struct comparison *c, int n_threads, struct k3_error *err) {
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  if (!pool)
    return K3_NO_MEMORY;
  n_threads = k3_pool_n_threads(pool);
  c->rows_per_item = BLOCK_NBYTES / c->row_nbytes + 1;
  c->buffers = k3_calloc((size_t)n_threads, sizeof *c->buffers, err);
  enum k3_status status = c->buffers ? K3_OK : K3_NO_MEMORY;
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    c->buffers[i] = k3_alloc_aligned((size_t)(2 * c->rows_per_item * c->row_nbytes), 4096, err);
    status = c->buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK) {
    k3_progress_start(c->progress, "comparing with the target", 2 * c->n_rows * c->row_nbytes);
    status = k3_pool_run(pool, (c->n_rows + c->rows_per_item - 1) / c->rows_per_item, compare_rows, c, err);
    k3_progress_finish(c->progress);
  }
  for (int i = 0; c->buffers && i < n_threads; i++)
    k3_free(c->buffers[i]);
  k3_free(c->buffers);
  k3_pool_free(pool);
  return status;
}

static void report(const struct k3_plan *plan, const struct k3_st_tensor *own, const struct k3_st_tensor *other, uint64_t n_different,
                   struct k3_findings *findings) {
  bool target_wins = plan->options.embed_from_target;
  const char *remedy = target_wins ? "--embed draft takes the draft's" : "--embed target takes the target's";
  const char *winner = target_wins ? "the target's is packed" : "the draft's own is packed";
  if (own->dtype != other->dtype || own->rank != other->rank || memcmp(own->shape, other->shape, own->rank * sizeof *own->shape) != 0)
    k3_findings_report(findings, K3_MAP10, plan->ckpt->source, own->name, remedy, "another dtype or shape than the target's %s; %s", other->name, winner);
  else if (n_different > 0)
    k3_findings_report(findings, K3_MAP10, plan->ckpt->source, own->name, remedy, "%llu of %llu rows differ from the target's %s; %s",
                       (unsigned long long)n_different, (unsigned long long)own->shape[0], other->name, winner);
}

// Number of the tensor called `module`.weight in the target, under any known root.
bool k3_plan_find_borrowed(const struct k3_plan *plan, const char *module, uint64_t *tensor) {
  for (size_t r = 0; plan->target && r < plan->recipe->n_borrowed_roots; r++) {
    char name[256];
    int n = snprintf(name, sizeof name, "%s%s.weight", plan->recipe->borrowed_roots[r], module);
    if (n > 0 && (size_t)n < sizeof name && k3_ckpt_find(plan->target, name, (size_t)n, tensor))
      return true;
  }
  return false;
}

enum k3_status k3_plan_compare_borrowed(const struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_findings *findings,
                                        struct k3_error *err) {
  for (size_t m = 0; m < plan->recipe->n_modules; m++) {
    uint64_t own, other;
    const char *module = plan->recipe->modules[m].name;
    if (plan->recipe->modules[m].role != K3_ROLE_BORROWED || !k3_plan_find_own(plan, m, &own) || !k3_plan_find_borrowed(plan, module, &other))
      continue;
    const struct k3_st_tensor *a = k3_ckpt_tensor(plan->ckpt, own), *b = k3_ckpt_tensor(plan->target, other);
    struct comparison c = {.plan = plan, .own = own, .other = other, .progress = progress};
    bool comparable = a->dtype == b->dtype && a->rank == 2 && b->rank == 2 && memcmp(a->shape, b->shape, 2 * sizeof *a->shape) == 0 && a->end > a->begin;
    if (comparable) {
      c.n_rows = a->shape[0];
      c.row_nbytes = (a->end - a->begin) / c.n_rows;
      K3_TRY(compare_tensors(&c, n_threads, err));
    }
    report(plan, a, b, c.n_different, findings);
  }
  return K3_OK;
}
