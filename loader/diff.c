#include "loader/diff.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "loader/diff_parts.h"
#include "loader/element.h"

// Work is cut into units of this many elements, and done a window of units at a time: sums are added in the order of the units, so that they do not
// depend on who computed them.
enum { UNIT_ELEMS = 1 << 19, WINDOW_UNITS = 256, WIDEN_ELEMS = 1024 };

struct pair {
  struct k3_diff_entry a, b;
  enum k3_dtype dtype_a, dtype_b;
  bool numeric;  // both types are numbers
  bool bits_differ;
  size_t item;  // of the result, once they differ
};

struct sums {
  uint64_t n_different, first, first_bits_a, first_bits_b, max_at, n_not_number;
  double first_a, first_b, max_error, aa, bb, ab, dd;
  bool exceeds;
};

struct unit {
  struct pair *pair;
  uint64_t first_elem;
  size_t n_elems;
  bool bits_differ;
  struct sums sums;
};

struct comparison {
  struct k3_diff_side a, b;
  const struct k3_diff_options *options;
  struct pair *pairs;
  size_t n_pairs;
  struct k3_pool *pool;
  unsigned char *scratch;  // [n_threads, 2, UNIT_ELEMS * 8 bytes]
  struct unit *window;     // [WINDOW_UNITS]
  struct k3_diff_result *result;
};

static enum k3_status read_elems(const struct k3_ckpt *ckpt, const struct k3_diff_entry *entry, enum k3_dtype dtype, uint64_t first, size_t n,
                                 void *dst, struct k3_error *err) {
  unsigned bits = k3_dtype_bits(dtype);
  return k3_ckpt_read(ckpt, entry->tensor, (entry->first_elem + first) * bits / 8, dst, (n * bits + 7) / 8, err);
}

static unsigned char *buffer(const struct comparison *c, int worker, int which) {
  return c->scratch + ((size_t)worker * 2 + (size_t)which) * UNIT_ELEMS * 8;
}

static enum k3_status read_unit(const struct comparison *c, int worker, const struct unit *unit, struct k3_error *err) {
  const struct pair *pair = unit->pair;
  K3_TRY(read_elems(c->a.ckpt, &pair->a, pair->dtype_a, unit->first_elem, unit->n_elems, buffer(c, worker, 0), err));
  K3_TRY(read_elems(c->b.ckpt, &pair->b, pair->dtype_b, unit->first_elem, unit->n_elems, buffer(c, worker, 1), err));
  k3_progress_add(c->options->progress, unit->n_elems * k3_dtype_bits(pair->dtype_a) / 8);
  return K3_OK;
}

// First pass: are the bits equal?
static enum k3_status compare_bits(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  const struct comparison *c = ctx;
  struct unit *unit = &c->window[item];
  K3_TRY(read_unit(c, worker, unit, err));
  unit->bits_differ = memcmp(buffer(c, worker, 0), buffer(c, worker, 1), (unit->n_elems * k3_dtype_bits(unit->pair->dtype_a) + 7) / 8) != 0;
  return K3_OK;
}

static void note_difference(struct sums *sums, uint64_t at, uint64_t bits_a, uint64_t bits_b, double a, double b) {
  if (sums->n_different++ == 0) {
    sums->first = at;
    sums->first_bits_a = bits_a, sums->first_bits_b = bits_b;
    sums->first_a = a, sums->first_b = b;
  }
}

// Second pass, for what differs: where, and by how much.
static enum k3_status compare_values(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  const struct comparison *c = ctx;
  struct unit *unit = &c->window[item];
  K3_TRY(read_unit(c, worker, unit, err));
  const unsigned char *bytes_a = buffer(c, worker, 0), *bytes_b = buffer(c, worker, 1);
  enum k3_dtype dtype_a = unit->pair->dtype_a, dtype_b = unit->pair->dtype_b;
  bool same_type = dtype_a == dtype_b;
  unsigned bits_a = k3_dtype_bits(dtype_a), bits_b = k3_dtype_bits(dtype_b);
  struct sums sums = {0};
  double a[WIDEN_ELEMS], b[WIDEN_ELEMS];
  for (size_t begin = 0; begin < unit->n_elems; begin += WIDEN_ELEMS) {  // a multiple of whole bytes for every type
    size_t n = unit->n_elems - begin < WIDEN_ELEMS ? unit->n_elems - begin : WIDEN_ELEMS;
    const unsigned char *src_a = bytes_a + begin * bits_a / 8, *src_b = bytes_b + begin * bits_b / 8;
    k3_elements_widen(dtype_a, src_a, n, a);
    k3_elements_widen(dtype_b, src_b, n, b);
    for (size_t i = 0; i < n; i++) {
      double error = fabs(a[i] - b[i]);
      bool finite = isfinite(a[i]) && isfinite(b[i]);
      if (error != 0 || same_type) {  // NaN != 0 holds as well
        uint64_t code_a = k3_element_bits(dtype_a, src_a, i), code_b = k3_element_bits(dtype_b, src_b, i);
        bool both_nan = isnan(a[i]) && isnan(b[i]), both_inf = isinf(a[i]) && a[i] == b[i];
        if (same_type ? code_a != code_b : !both_nan && !both_inf)
          note_difference(&sums, unit->first_elem + begin + i, code_a, code_b, a[i], b[i]);
        if (!finite && !both_nan && !both_inf) {
          sums.n_not_number++;
          sums.exceeds = true;
        }
      }
      if (!finite)
        continue;
      if (error > sums.max_error) {
        sums.max_error = error;
        sums.max_at = unit->first_elem + begin + i;
      }
      sums.aa += a[i] * a[i];
      sums.bb += b[i] * b[i];
      sums.ab += a[i] * b[i];
      sums.dd += error * error;
    }
  }
  unit->sums = sums;
  return K3_OK;
}

static void add_sums(struct k3_diff_item *item, const struct sums *unit, struct sums *total) {
  if (unit->n_different > 0 && item->n_different == 0) {
    item->first = unit->first;
    item->first_bits_a = unit->first_bits_a, item->first_bits_b = unit->first_bits_b;
    item->first_a = unit->first_a, item->first_b = unit->first_b;
  }
  item->n_different += unit->n_different;
  item->n_not_number += unit->n_not_number;
  if (unit->max_error > item->max_error) {
    item->max_error = unit->max_error;
    item->max_at = unit->max_at;
  }
  total->aa += unit->aa, total->bb += unit->bb, total->ab += unit->ab, total->dd += unit->dd;
}

static void finish_item(const struct comparison *c, struct k3_diff_item *item, const struct sums *total) {
  item->cosine = total->aa > 0 && total->bb > 0 ? total->ab / (sqrt(total->aa) * sqrt(total->bb)) : (double)NAN;
  item->snr_db = total->dd == 0 ? (double)INFINITY : total->aa == 0 ? (double)NAN : 10 * log10(total->aa / total->dd);
  if (c->options->has_tolerance)
    item->exceeds = item->max_error > c->options->tolerance || item->n_not_number > 0;
}

// One pass over the pairs: the first one over all that may be equal, the second (values) over those that are not.
static enum k3_status run_pass(struct comparison *c, bool values, struct k3_error *err) {
  struct sums total = {0};
  const struct pair *last = NULL;
  size_t n_window = 0;
  uint64_t at = 0;
  for (size_t p = 0; p <= c->n_pairs;) {
    struct pair *pair = p < c->n_pairs ? &c->pairs[p] : NULL;
    bool selected = pair && (values ? pair->bits_differ && pair->numeric : !pair->bits_differ);
    if (selected && at < pair->a.n_elems) {
      uint64_t n = pair->a.n_elems - at < UNIT_ELEMS ? pair->a.n_elems - at : UNIT_ELEMS;
      c->window[n_window++] = (struct unit){.pair = pair, .first_elem = at, .n_elems = (size_t)n};
      at += n;
    } else {
      p++;
      at = 0;
    }
    if (n_window == 0 || (n_window < WINDOW_UNITS && p <= c->n_pairs))
      continue;
    K3_TRY(k3_pool_run(c->pool, n_window, values ? compare_values : compare_bits, c, err));
    for (size_t i = 0; i < n_window; i++) {
      struct unit *unit = &c->window[i];
      if (!values) {
        unit->pair->bits_differ |= unit->bits_differ;
        continue;
      }
      if (last && last != unit->pair)
        finish_item(c, &c->result->items[last->item], &total);
      if (last != unit->pair)
        total = (struct sums){0};
      last = unit->pair;
      add_sums(&c->result->items[last->item], &unit->sums, &total);
    }
    n_window = 0;
  }
  if (last)
    finish_item(c, &c->result->items[last->item], &total);
  return K3_OK;
}

static enum k3_status add_item(struct comparison *c, struct k3_diff_item item, struct k3_error *err) {
  struct k3_diff_result *result = c->result;
  K3_TRY(k3_grow(&result->items, &result->capacity, result->n_items + 1, sizeof *result->items, err));
  item.exceeds = true;
  result->items[result->n_items++] = item;
  return K3_OK;
}

static const struct k3_st_tensor *tensor_of(const struct k3_diff_side *side, const struct k3_diff_entry *entry) {
  return k3_ckpt_tensor(side->ckpt, entry->tensor);
}

// Equal shapes; between an image and its source dimensions of 1 do not count: the image has scalars of siblings as rows, scales of channels as columns
// and block grids without the ones that a dialect puts between.
static bool same_shape(const struct k3_diff_entry *a, const struct k3_diff_entry *b, bool loose) {
  unsigned i = 0, j = 0;
  for (;; i++, j++) {
    while (loose && i < a->rank && a->shape[i] == 1)
      i++;
    while (loose && j < b->rank && b->shape[j] == 1)
      j++;
    if (i == a->rank || j == b->rank)
      return i == a->rank && j == b->rank;
    if (a->shape[i] != b->shape[j])
      return false;
  }
}

// Merges the two sorted lists: what stands on one side only, or in another shape, is an item; the rest are pairs.
static enum k3_status pair_up(struct comparison *c, struct k3_error *err) {
  c->pairs = k3_calloc(c->a.n_entries < c->b.n_entries ? c->a.n_entries : c->b.n_entries, sizeof *c->pairs, err);
  if (!c->pairs)
    return K3_NO_MEMORY;
  for (size_t i = 0, j = 0; i < c->a.n_entries || j < c->b.n_entries;) {
    const struct k3_diff_entry *a = i < c->a.n_entries ? &c->a.entries[i] : NULL, *b = j < c->b.n_entries ? &c->b.entries[j] : NULL;
    int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name);
    i += order <= 0;
    j += order >= 0;
    const struct k3_st_tensor *tensor_a = order <= 0 ? tensor_of(&c->a, a) : NULL, *tensor_b = order >= 0 ? tensor_of(&c->b, b) : NULL;
    struct k3_diff_item item = {.name = order <= 0 ? a->name : b->name, .a = tensor_a, .b = tensor_b};
    item.shape = order <= 0 ? a->shape : b->shape;
    item.rank = order <= 0 ? a->rank : b->rank;
    item.n_elems = order <= 0 ? a->n_elems : b->n_elems;
    if (order != 0) {
      item.kind = order < 0 ? K3_DIFF_ONLY_A : K3_DIFF_ONLY_B;
      K3_TRY(add_item(c, item, err));
    } else if (!same_shape(a, b, c->result->by_source_name)) {
      item.kind = K3_DIFF_SHAPE;
      K3_TRY(add_item(c, item, err));
    } else {
      struct pair *pair = &c->pairs[c->n_pairs++];
      *pair = (struct pair){.a = *a, .b = *b, .dtype_a = tensor_a->dtype, .dtype_b = tensor_b->dtype};
      pair->numeric = k3_element_is_number(pair->dtype_a) && k3_element_is_number(pair->dtype_b);
      pair->bits_differ = pair->dtype_a != pair->dtype_b;
    }
  }
  return K3_OK;
}

static enum k3_status list_differing_pairs(struct comparison *c, struct k3_error *err) {
  for (size_t p = 0; p < c->n_pairs; p++) {
    struct pair *pair = &c->pairs[p];
    if (!pair->bits_differ) {
      c->result->n_equal++;
      continue;
    }
    pair->item = c->result->n_items;
    K3_TRY(add_item(c,
                    (struct k3_diff_item){.kind = pair->dtype_a == pair->dtype_b ? K3_DIFF_VALUES : K3_DIFF_DTYPE,
                                          .name = pair->a.name,
                                          .a = tensor_of(&c->a, &pair->a),
                                          .b = tensor_of(&c->b, &pair->b),
                                          .shape = pair->a.shape,
                                          .rank = pair->a.rank,
                                          .numeric = pair->numeric,
                                          .n_elems = pair->a.n_elems},
                    err));
  }
  return K3_OK;
}

static int by_entry_name(const void *a, const void *b) {
  return strcmp(((const struct k3_diff_entry *)a)->name, ((const struct k3_diff_entry *)b)->name);
}

static int by_item_name(const void *a, const void *b) {
  return strcmp(((const struct k3_diff_item *)a)->name, ((const struct k3_diff_item *)b)->name);
}

// qsort of a list that may be empty, and then NULL.
static void sort(void *items, size_t n, size_t nbytes, int (*order)(const void *, const void *)) {
  if (n > 1)
    qsort(items, n, nbytes, order);
}

static enum k3_status compare(struct comparison *c, struct k3_error *err) {
  struct k3_diff_result *result = c->result;
  bool image_a = c->a.ckpt->image.bytes, image_b = c->b.ckpt->image.bytes;
  result->by_source_name = image_a != image_b;
  K3_TRY(image_a && !image_b ? k3_diff_source_names(&c->a, c->b.ckpt, err) : k3_diff_own_names(&c->a, err));
  K3_TRY(image_b && !image_a ? k3_diff_source_names(&c->b, c->a.ckpt, err) : k3_diff_own_names(&c->b, err));
  result->n_a = c->a.n_entries;
  result->n_b = c->b.n_entries;
  sort(c->a.entries, c->a.n_entries, sizeof *c->a.entries, by_entry_name);
  sort(c->b.entries, c->b.n_entries, sizeof *c->b.entries, by_entry_name);
  K3_TRY(pair_up(c, err));
  if (image_a && image_b && strcmp(c->a.ckpt->image.manifest.model_json, c->b.ckpt->image.manifest.model_json) != 0)
    K3_TRY(add_item(c, (struct k3_diff_item){.kind = K3_DIFF_MODEL, .name = ""}, err));

  c->pool = k3_pool_create(c->options->n_threads, err);
  c->window = k3_calloc(WINDOW_UNITS, sizeof *c->window, err);
  c->scratch = c->pool ? k3_alloc_aligned((size_t)k3_pool_n_threads(c->pool) * 2 * UNIT_ELEMS * 8, 4096, err) : NULL;
  if (!c->pool || !c->window || !c->scratch)
    return K3_NO_MEMORY;
  uint64_t nbytes = 0;  // of A; what is read a second time, for its values, comes on top
  for (size_t p = 0; p < c->n_pairs; p++)
    nbytes += c->pairs[p].a.n_elems * k3_dtype_bits(c->pairs[p].dtype_a) / 8;
  k3_progress_start(c->options->progress, "comparing", nbytes);
  K3_TRY(run_pass(c, false, err));
  K3_TRY(list_differing_pairs(c, err));
  K3_TRY(run_pass(c, true, err));
  k3_progress_finish(c->options->progress);
  for (size_t i = 0; i < result->n_items; i++)
    result->n_within += !result->items[i].exceeds;
  sort(result->items, result->n_items, sizeof *result->items, by_item_name);
  return K3_OK;
}

enum k3_status k3_diff(const struct k3_ckpt *a, const struct k3_ckpt *b, const struct k3_diff_options *options, struct k3_diff_result *result,
                       struct k3_error *err) {
  *result = (struct k3_diff_result){0};
  struct comparison c = {.a.ckpt = a, .b.ckpt = b, .a.arena = &result->arena, .b.arena = &result->arena, .options = options, .result = result};
  enum k3_status status = compare(&c, err);
  k3_free(c.scratch);
  k3_free(c.window);
  k3_pool_free(c.pool);
  k3_free(c.pairs);
  k3_free(c.a.entries);
  k3_free(c.b.entries);
  if (status != K3_OK)
    k3_diff_free(result);
  return status;
}

void k3_diff_free(struct k3_diff_result *result) {
  k3_free(result->items);
  k3_arena_free(&result->arena);
  *result = (struct k3_diff_result){0};
}
