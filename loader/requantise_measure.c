// The first pass: what must be known of a whole tensor, or of several, before its first byte is encoded.
#include <math.h>
#include <string.h>

#include "base/pool.h"
#include "loader/requantise_parts.h"
#include "quant/encode.h"

enum { UNIT_ELEMS = 4 << 20 };

// Whole rows of one weight; for tiles of rows, whole bands.
struct unit {
  uint32_t item;
  uint64_t first_row, n_rows;
  float amax;
};

struct measure {
  const struct k3_plan *plan;
  struct k3_requant *requant;
  struct unit *units;
  size_t n_units, capacity;
  unsigned char **buffers;  // [n_threads] of one chunk in F32
  struct k3_progress *progress;
};

static enum k3_status measure_unit(void *ctx, int worker, uint64_t number, struct k3_error *err) {
  struct measure *m = ctx;
  struct unit *unit = &m->units[number];
  const struct k3_requant_item *item = &m->requant->items[unit->item];
  enum k3_dtype dtype = (enum k3_dtype)item->src_dtype;
  uint64_t elem_nbytes = k3_dtype_bits(dtype) / 8, begin = unit->first_row * item->n_cols, end = begin + unit->n_rows * item->n_cols;
  uint64_t first_region, end_region;
  k3_requant_run(m->requant, item, begin, &first_region);
  k3_requant_run(m->requant, item, end - 1, &end_region);
  for (uint64_t at = begin; at < end;) {
    uint64_t n = end - at < K3_REQUANT_CHUNK_ELEMS ? end - at : K3_REQUANT_CHUNK_ELEMS;
    const unsigned char *src = m->buffers[worker];
    K3_TRY(k3_ckpt_read(k3_requant_ckpt(m->plan, item), item->tensor, at * elem_nbytes, m->buffers[worker], (size_t)(n * elem_nbytes), err));
    for (uint64_t done = 0, n_run; done < n; done += n_run) {
      uint64_t region;
      n_run = k3_requant_run(m->requant, item, at + done, &region);
      n_run = n_run < n - done ? n_run : n - done;
      float amax = k3_quant_amax(dtype, src + done * elem_nbytes, (size_t)n_run);
      unit->amax = k3_amax_merge(unit->amax, amax);
      if (item->scales)
        item->scales[region] = k3_amax_merge(item->scales[region], amax);
    }
    at += n;
    k3_progress_add(m->progress, n * elem_nbytes);
  }
  for (uint64_t region = first_region; item->scales && region <= end_region; region++)
    item->scales[region] = k3_fp8_scale(item->scales[region], m->requant->scheme.scale_dtype);
  return K3_OK;
}

static enum k3_status list_units(struct measure *m, struct k3_error *err) {
  struct k3_requant *requant = m->requant;
  uint64_t band = requant->scheme.scheme == K3_SCHEME_FP8_BLOCK ? requant->scheme.block_rows : 1;
  for (uint32_t i = 0; i < requant->n_items; i++) {
    struct k3_requant_item *item = &requant->items[i];
    uint64_t scale_rows, scale_cols, step = (UNIT_ELEMS / item->n_cols + band - 1) / band * band;
    step = step ? step : band;
    if (requant->scheme.scheme != K3_SCHEME_NVFP4) {
      k3_quant_scale_shape(&requant->scheme, item->n_rows, item->n_cols, &scale_rows, &scale_cols);
      item->scales = k3_calloc(scale_rows * scale_cols, sizeof *item->scales, err);
      if (!item->scales)
        return K3_NO_MEMORY;
    }
    for (uint64_t row = 0; row < item->n_rows; row += step) {
      K3_TRY(k3_grow(&m->units, &m->capacity, m->n_units + 1, sizeof *m->units, err));
      m->units[m->n_units++] = (struct unit){i, row, item->n_rows - row < step ? item->n_rows - row : step, 0};
    }
  }
  return K3_OK;
}

static enum k3_status run(struct measure *m, int n_threads, struct k3_error *err) {
  uint64_t nbytes = 0;
  for (size_t i = 0; i < m->requant->n_items; i++)
    nbytes += m->requant->items[i].n_rows * m->requant->items[i].n_cols * k3_dtype_bits((enum k3_dtype)m->requant->items[i].src_dtype) / 8;
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  n_threads = pool ? k3_pool_n_threads(pool) : 0;
  m->buffers = pool ? k3_calloc((size_t)n_threads, sizeof *m->buffers, err) : NULL;
  enum k3_status status = m->buffers ? K3_OK : K3_NO_MEMORY;
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    m->buffers[i] = k3_alloc_aligned(K3_REQUANT_CHUNK_ELEMS * sizeof(float), 4096, err);
    status = m->buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK) {
    k3_progress_start(m->progress, "measuring", nbytes);
    status = k3_pool_run(pool, m->n_units, measure_unit, m, err);
    k3_progress_finish(m->progress);
  }
  for (int i = 0; m->buffers && i < n_threads; i++)
    k3_free(m->buffers[i]);
  k3_free(m->buffers);
  k3_pool_free(pool);
  return status;
}

static enum k3_status set_seconds(struct k3_requant *requant, struct k3_error *err) {
  float *amax = k3_calloc(requant->n_sets, sizeof *amax, err);
  if (!amax)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < requant->n_items; i++)
    amax[requant->items[i].set] = k3_amax_merge(amax[requant->items[i].set], requant->items[i].amax);
  for (size_t i = 0; i < requant->n_items; i++) {
    struct k3_requant_item *item = &requant->items[i];
    item->set_amax = amax[item->set];
    item->second = requant->options.pow2 ? 1.0f / k3_nvfp4_pow2_multiplier(item->set_amax) : k3_nvfp4_divisor(item->set_amax);
  }
  k3_free(amax);
  return K3_OK;
}

enum k3_status k3_requant_measure(struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_findings *findings,
                                  struct k3_error *err) {
  struct k3_requant *requant = plan->requant;
  struct measure m = {.plan = plan, .requant = requant, .progress = progress};
  if (requant->scheme.scheme == K3_SCHEME_MXFP8 || requant->scheme.scheme == K3_SCHEME_MXFP4)
    return K3_OK;
  enum k3_status status = list_units(&m, err);
  if (status == K3_OK)
    status = run(&m, n_threads, err);
  for (size_t i = 0; status == K3_OK && i < m.n_units; i++)
    requant->items[m.units[i].item].amax = k3_amax_merge(requant->items[m.units[i].item].amax, m.units[i].amax);
  for (size_t i = 0; status == K3_OK && i < requant->n_items; i++) {
    const struct k3_requant_item *item = &requant->items[i];
    const struct k3_ckpt *ckpt = k3_requant_ckpt(plan, item);
    if (!isfinite(item->amax))
      k3_findings_report(findings, K3_VAL02, k3_ckpt_file_of(ckpt, item->tensor)->path, k3_ckpt_tensor(ckpt, item->tensor)->name,
                         "finite weights: a NaN or Inf spoils the scale it shares", "NaN or Inf in a weight that is to be encoded");
  }
  if (status == K3_OK && requant->allow_nonfinite)
    k3_findings_allow(findings, K3_VAL02);
  if (status == K3_OK && requant->scheme.scheme == K3_SCHEME_NVFP4)
    status = set_seconds(requant, err);
  k3_free(m.units);
  return status;
}
