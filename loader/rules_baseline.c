#include "loader/rules_baseline.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "loader/linears_parts.h"
#include "loader/nonfinite.h"
#include "quant/decode.h"
#include "quant/encode.h"
#include "quant/stats.h"

typedef unsigned long long ull;

// Rows of a part begin at an edge of every scheme's blocks. Guesses are tried on the first rows: they are wrong by a lot or right.
enum { PART_ROWS = 128, TRY_ROWS = 256 };

static const char *const ROOTS[] = {"", "model.", "language_model.model.", "model.language_model.", "draft_model.", "base_model.model.model."};

struct twin {
  uint32_t linear, source;  // module of the plan, tensor of the baseline
  uint64_t first_part, n_parts;
};

struct part {
  struct k3_snr snr;
  uint64_t n_other;  // codes that encoding would not give
};

struct compare {
  const struct k3_plan *plan;
  const struct k3_ckpt *baseline;
  struct twin *twins;
  size_t n_twins;
  struct part *parts;
  uint64_t n_parts;
  struct k3_progress *progress;
};

// ---- twins ----

static bool find_in_baseline(const struct k3_ckpt *baseline, const char *module, size_t nbytes, uint64_t *tensor) {
  char name[K3_ST_MAX_NAME_NBYTES + 64];
  for (size_t cut = 0; cut < sizeof ROOTS / sizeof ROOTS[0]; cut++) {
    size_t n_cut = strlen(ROOTS[cut]);
    if (nbytes < n_cut || memcmp(module, ROOTS[cut], n_cut) != 0)
      continue;
    for (size_t root = 0; root < sizeof ROOTS / sizeof ROOTS[0]; root++) {
      int n = snprintf(name, sizeof name, "%s%.*s.weight", ROOTS[root], (int)(nbytes - n_cut), module + n_cut);
      if (k3_ckpt_find(baseline, name, (size_t)n, tensor))
        return true;
    }
  }
  return false;
}

static enum k3_status find_twins(struct compare *c, struct k3_baseline_summary *summary, struct k3_error *err) {
  const struct k3_linears *linears = &c->plan->linears;
  c->twins = k3_calloc(linears->n_items, sizeof *c->twins, err);
  if (!c->twins)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < linears->n_items; i++) {
    const struct k3_linear *linear = &linears->items[i];
    uint64_t source = 0;
    if (linear->is_plain || linear->of_target || !linear->is_sound || linear->n_cols == 0 || linear->scheme.scheme == K3_SCHEME_INT_PACKED)
      continue;
    if (linear->scheme.block_rows > 0 && PART_ROWS % linear->scheme.block_rows != 0)
      continue;  // parts would begin inside a block
    const struct k3_st_tensor *t =
        find_in_baseline(c->baseline, linear->name, linear->name_nbytes, &source) ? k3_ckpt_tensor(c->baseline, source) : NULL;
    if (!t || !k3_is_plain_float((enum k3_dtype)t->dtype) || t->rank != 2 || t->shape[0] != linear->n_rows || t->shape[1] != linear->n_cols) {
      summary->n_absent++;
      continue;
    }
    uint64_t n_parts = (linear->n_rows + PART_ROWS - 1) / PART_ROWS;
    c->twins[c->n_twins++] = (struct twin){(uint32_t)i, (uint32_t)source, c->n_parts, n_parts};
    c->n_parts += n_parts;
  }
  c->parts = k3_calloc(c->n_parts, sizeof *c->parts, err);
  return c->parts ? K3_OK : K3_NO_MEMORY;
}

// ---- rows ----

// Rows of a quantised weight with their scales, and the same rows of the baseline.
struct rows {
  struct k3_quant_matrix matrix;
  float second;
  bool has_second;
  unsigned char *weight, *scale, *source;
  float *decoded;
  enum k3_dtype source_dtype;
};

static void free_rows(struct rows *rows) {
  k3_free(rows->weight);
  k3_free(rows->scale);
  k3_free(rows->source);
  k3_free(rows->decoded);
}

static enum k3_status read_rows(const struct compare *c, const struct twin *twin, uint64_t first, uint64_t n_rows, bool all_scales, struct rows *rows,
                                struct k3_error *err) {
  const struct k3_linear *linear = &c->plan->linears.items[twin->linear];
  const struct k3_st_tensor *second = k3_linear_tensor(c->plan, linear, k3_linear_second(linear));
  const struct k3_st_tensor *source = k3_ckpt_tensor(c->baseline, twin->source);
  uint64_t row_nbytes = k3_quant_row_nbytes(&linear->scheme, linear->n_cols), scale_rows, scale_cols, elem_nbytes = k3_dtype_bits(source->dtype) / 8;
  uint64_t block = linear->scheme.block_rows ? linear->scheme.block_rows : linear->n_rows, first_scale = all_scales ? 0 : first / block, n_scales;
  k3_quant_scale_shape(&linear->scheme, linear->n_rows, linear->n_cols, &scale_rows, &scale_cols);
  n_scales = all_scales ? scale_rows : (first + n_rows - 1) / block + 1 - first_scale;
  uint64_t scale_nbytes = scale_cols * (k3_dtype_bits(linear->scheme.scale_dtype) / 8);
  rows->source_dtype = (enum k3_dtype)source->dtype;
  rows->weight = k3_calloc(n_rows, row_nbytes, err);
  rows->scale = k3_calloc(n_scales, scale_nbytes, err);
  rows->source = k3_calloc(n_rows, linear->n_cols * elem_nbytes, err);
  rows->decoded = k3_calloc(2 * linear->n_cols, sizeof(float), err);
  if (!rows->weight || !rows->scale || !rows->source || !rows->decoded)
    return K3_NO_MEMORY;
  K3_TRY(k3_ckpt_read(c->plan->ckpt, linear->tensors[k3_linear_weight(linear)], first * row_nbytes, rows->weight, n_rows * row_nbytes, err));
  K3_TRY(
      k3_ckpt_read(c->plan->ckpt, linear->tensors[k3_linear_scale(linear)], first_scale * scale_nbytes, rows->scale, n_scales * scale_nbytes, err));
  K3_TRY(k3_ckpt_read(c->baseline, twin->source, first * linear->n_cols * elem_nbytes, rows->source, n_rows * linear->n_cols * elem_nbytes, err));
  if (second) {
    unsigned char bytes[4] = {0};
    K3_TRY(k3_ckpt_read(c->plan->ckpt, linear->tensors[k3_linear_second(linear)], 0, bytes, k3_dtype_bits(second->dtype) / 8, err));
    rows->second = k3_quant_load_scale((enum k3_dtype)second->dtype, bytes, 0);
    rows->has_second = true;
  }
  rows->matrix =
      (struct k3_quant_matrix){.scheme = linear->scheme, .n_rows = n_rows, .n_cols = linear->n_cols, .weight = rows->weight, .scale = rows->scale};
  return K3_OK;
}

// ---- requantisation ----

// Distance of two FP4 or FP8 codes in steps, zeros of both signs being one value.
static int code_distance(unsigned a, unsigned b, unsigned sign) {
  int x = (int)(a & (sign - 1)), y = (int)(b & (sign - 1));
  return abs((a & sign ? -x : x) - (b & sign ? -y : y));
}

static uint64_t n_other_codes(const uint8_t *stored, const uint8_t *made, uint64_t nbytes, bool fp4) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < nbytes; i++) {
    if (stored[i] == made[i])
      continue;
    if (fp4)
      n += (uint64_t)(code_distance(stored[i] & 15, made[i] & 15, 8) > 1) + (uint64_t)(code_distance(stored[i] >> 4, made[i] >> 4, 8) > 1);
    else
      n += code_distance(stored[i], made[i], 0x80) > 1;
  }
  return n;
}

// Codes that encoding these rows again would not give. A block whose scale byte differs by one step is not compared: its codes follow the scale.
static enum k3_status requantise(const struct rows *rows, uint64_t *n_other, struct k3_error *err) {
  const struct k3_quant_scheme *scheme = &rows->matrix.scheme;
  bool nvfp4 = scheme->scheme == K3_SCHEME_NVFP4, fp4 = nvfp4 || scheme->scheme == K3_SCHEME_MXFP4, bytes = fp4 || scheme->scheme == K3_SCHEME_MXFP8;
  uint64_t n_rows = rows->matrix.n_rows, n_cols = rows->matrix.n_cols, row_nbytes = k3_quant_row_nbytes(scheme, n_cols), scale_rows, scale_cols;
  if (scheme->scheme == K3_SCHEME_FP8_GROUP || !(rows->has_second || !nvfp4))
    return K3_OK;
  k3_quant_scale_shape(scheme, n_rows, n_cols, &scale_rows, &scale_cols);
  struct k3_quant_encoder encoder = {.scheme = *scheme,
                                     .src_dtype = rows->source_dtype,
                                     .nvfp4_mode = scheme->second == K3_SECOND_MULTIPLY ? K3_NVFP4_MODELOPT : K3_NVFP4_COMPRESSED_TENSORS,
                                     .mx_mode = K3_MX_DEFAULT,
                                     .scale = rows->second};
  if (scheme->scheme == K3_SCHEME_FP8_TENSOR)
    encoder.scale = k3_quant_load_scale(scheme->scale_dtype, rows->scale, 0);
  uint8_t *weight = k3_calloc(n_rows, row_nbytes, err), *scale = k3_calloc(scale_rows * scale_cols, 4, err);
  enum k3_status status = weight && scale ? K3_OK : K3_NO_MEMORY;
  if (status == K3_OK)
    k3_quant_encode_rows(&encoder, rows->source, n_rows, n_cols, weight, scale);
  if (status == K3_OK && bytes) {
    uint64_t block_nbytes = row_nbytes / scale_cols;
    for (uint64_t i = 0; i < scale_rows * scale_cols; i++) {
      int step = abs((int)rows->scale[i] - (int)scale[i]);
      const uint8_t *stored = rows->weight + i * block_nbytes, *made = weight + i * block_nbytes;
      bool dead = true;
      for (uint64_t b = 0; b < block_nbytes; b++)
        dead &= ((stored[b] | made[b]) & (fp4 ? 0x77 : 0x7F)) == 0;
      if (!dead)
        *n_other += step > 1 ? block_nbytes : step == 0 ? n_other_codes(stored, made, block_nbytes, fp4) : 0;
    }
  } else if (status == K3_OK) {
    *n_other += n_other_codes(rows->weight, weight, n_rows * row_nbytes, false);
  }
  k3_free(weight);
  k3_free(scale);
  return status;
}

static enum k3_status compare_part(void *ctx, int worker, uint64_t number, struct k3_error *err) {
  struct compare *c = ctx;
  size_t low = 0, high = c->n_twins;
  (void)worker;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (c->twins[middle].first_part <= number)
      low = middle;
    else
      high = middle;
  }
  const struct twin *twin = &c->twins[low];
  const struct k3_linear *linear = &c->plan->linears.items[twin->linear];
  uint64_t first = (number - twin->first_part) * PART_ROWS, n_rows = linear->n_rows - first < PART_ROWS ? linear->n_rows - first : PART_ROWS;
  struct rows rows = {0};
  struct part *part = &c->parts[number];
  enum k3_status status = read_rows(c, twin, first, n_rows, false, &rows, err);
  for (uint64_t row = 0; status == K3_OK && row < n_rows; row++) {
    size_t row_nbytes = linear->n_cols * (k3_dtype_bits(rows.source_dtype) / 8);
    k3_quant_decode_row(&rows.matrix, row, 0, linear->n_cols, rows.has_second ? &rows.second : NULL, rows.decoded);
    k3_snr_add(&part->snr, rows.source_dtype, rows.source + row * row_nbytes, rows.decoded, linear->n_cols);
  }
  if (status == K3_OK)
    status = requantise(&rows, &part->n_other, err);
  k3_progress_add(c->progress, 1);
  free_rows(&rows);
  return status;
}

// ---- guesses ----

enum guess { AS_IT_IS, SWAPPED_NIBBLES, INVERTED_SECOND, INTERLEAVED, DEINTERLEAVED, TRANSPOSED_SCALES, N_GUESSES };

static const char *const GUESS_TEXT[N_GUESSES] = {
    "as it is",
    "with the two nibbles of every byte swapped",
    "with the reciprocal of the second scale",
    "with the rows of the two halves interleaved",
    "with interleaved rows taken apart into two halves",
    "with the grid of scales transposed",
};

// Scales that were stored column by column, put into place.
static enum k3_status transpose_scales(struct rows *rows, uint64_t n_rows, uint64_t n_cols, struct k3_error *err) {
  size_t elem_nbytes = k3_dtype_bits(rows->matrix.scheme.scale_dtype) / 8;
  unsigned char *other = k3_calloc(n_rows * n_cols, elem_nbytes, err);
  if (!other)
    return K3_NO_MEMORY;
  for (uint64_t r = 0; r < n_rows; r++) {
    for (uint64_t col = 0; col < n_cols; col++)
      memcpy(other + (r * n_cols + col) * elem_nbytes, rows->scale + (col * n_rows + r) * elem_nbytes, elem_nbytes);
  }
  k3_free(rows->scale);
  rows->scale = other;
  rows->matrix.scale = other;
  return K3_OK;
}

static enum k3_status rmse_of_guess(const struct compare *c, const struct twin *twin, enum guess guess, double *rmse, struct k3_error *err) {
  const struct k3_linear *linear = &c->plan->linears.items[twin->linear];
  bool fp4 = linear->scheme.scheme == K3_SCHEME_NVFP4 || linear->scheme.scheme == K3_SCHEME_MXFP4;
  bool moves_rows = guess == INTERLEAVED || guess == DEINTERLEAVED;
  uint64_t n_rows = moves_rows || linear->n_rows < TRY_ROWS ? linear->n_rows : TRY_ROWS, half = linear->n_rows / 2, scale_rows, scale_cols;
  struct rows rows = {0};
  struct k3_snr snr = {0};
  *rmse = INFINITY;
  k3_quant_scale_shape(&linear->scheme, linear->n_rows, linear->n_cols, &scale_rows, &scale_cols);
  if ((guess == SWAPPED_NIBBLES && !fp4) || (guess == INVERTED_SECOND && linear->scheme.second == K3_SECOND_NONE) ||
      (moves_rows && (linear->n_rows % 2 != 0 || linear->n_rows > 65536)) || (guess == TRANSPOSED_SCALES && (scale_rows < 2 || scale_cols < 2)))
    return K3_OK;
  enum k3_status status = read_rows(c, twin, 0, n_rows, true, &rows, err);
  if (status == K3_OK && guess == TRANSPOSED_SCALES)
    status = transpose_scales(&rows, scale_rows, scale_cols, err);
  if (guess == INVERTED_SECOND)
    rows.second = 1 / rows.second;
  for (uint64_t row = 0; status == K3_OK && row < n_rows && (!moves_rows || row < TRY_ROWS); row++) {
    uint64_t of = guess == INTERLEAVED     ? (row % 2 ? half + row / 2 : row / 2)
                  : guess == DEINTERLEAVED ? (row < half ? 2 * row : 2 * (row - half) + 1)
                                           : row;
    size_t source_nbytes = linear->n_cols * (k3_dtype_bits(rows.source_dtype) / 8);
    k3_quant_decode_row(&rows.matrix, row, 0, linear->n_cols, rows.has_second ? &rows.second : NULL, rows.decoded);
    for (uint64_t i = 0; guess == SWAPPED_NIBBLES && i + 1 < linear->n_cols; i += 2) {
      float even = rows.decoded[i];
      rows.decoded[i] = rows.decoded[i + 1];
      rows.decoded[i + 1] = even;
    }
    k3_snr_add(&snr, rows.source_dtype, rows.source + of * source_nbytes, rows.decoded, linear->n_cols);
  }
  if (status == K3_OK && snr.n_elems > 0)
    *rmse = k3_snr_relative_rmse(&snr);
  free_rows(&rows);
  return status;
}

static enum k3_status report_twin(const struct compare *c, const struct twin *twin, enum k3_judge engine, struct k3_baseline_summary *summary,
                                  struct k3_findings *findings, struct k3_error *err) {
  const struct k3_linear *linear = &c->plan->linears.items[twin->linear];
  uint32_t t = linear->tensors[k3_linear_weight(linear)];
  const char *path = k3_ckpt_file_of(c->plan->ckpt, t)->path, *name = k3_ckpt_tensor(c->plan->ckpt, t)->name;
  bool fp4 = linear->scheme.scheme == K3_SCHEME_NVFP4 || linear->scheme.scheme == K3_SCHEME_MXFP4;
  double limit = fp4 ? 0.20 : 0.06;
  struct part all = {0};
  for (uint64_t p = twin->first_part; p < twin->first_part + twin->n_parts; p++) {
    k3_snr_merge(&all.snr, &c->parts[p].snr);
    all.n_other += c->parts[p].n_other;
  }
  double rmse = k3_snr_relative_rmse(&all.snr);
  summary->n_compared++;
  if (!(rmse <= summary->worst_rmse))
    summary->worst_rmse = rmse;
  if (rmse <= limit) {
    if (all.n_other > 0)
      k3_rules_report(findings, engine, K3_VAL10, path, name, "the codes that encoding the baseline gives",
                      "%llu of %llu codes are others (relative RMSE %.4f)", (ull)all.n_other, (ull)(linear->n_rows * linear->n_cols), rmse);
    return K3_OK;
  }
  enum guess best = AS_IT_IS;
  for (int g = SWAPPED_NIBBLES; g < N_GUESSES; g++) {
    double with;
    K3_TRY(rmse_of_guess(c, twin, (enum guess)g, &with, err));
    if (with <= limit && best == AS_IT_IS)
      best = (enum guess)g;
  }
  char allowed[64];
  snprintf(allowed, sizeof allowed, "at most %.2f for %s", limit, k3_scheme_name(linear->scheme.scheme));
  if (best != AS_IT_IS)
    k3_rules_report(findings, engine, K3_VAL07, path, name, allowed, "relative RMSE %.3g against the baseline; it fits %s", rmse, GUESS_TEXT[best]);
  else
    k3_rules_report(findings, engine, K3_VAL07, path, name, allowed,
                    "relative RMSE %.3g against the baseline; nothing that is easily mistaken explains it", rmse);
  return K3_OK;
}

enum k3_status k3_rules_baseline(const struct k3_plan *plan, const struct k3_ckpt *baseline, enum k3_judge engine, int n_threads,
                                 struct k3_progress *progress, struct k3_baseline_summary *summary, struct k3_findings *findings,
                                 struct k3_error *err) {
  struct compare c = {.plan = plan, .baseline = baseline, .progress = progress};
  struct k3_pool *pool = NULL;
  enum k3_status status;
  *summary = (struct k3_baseline_summary){0};
  K3_TRY_GOTO(status, out, find_twins(&c, summary, err));
  status = K3_NO_MEMORY;
  if (!(pool = k3_pool_create(n_threads, err)))
    goto out;
  k3_progress_start(progress, "comparing", c.n_parts);
  status = k3_pool_run(pool, c.n_parts, compare_part, &c, err);
  k3_progress_finish(progress);
  for (size_t i = 0; status == K3_OK && i < c.n_twins; i++)
    status = report_twin(&c, &c.twins[i], engine, summary, findings, err);
out:
  k3_pool_free(pool);
  k3_free(c.twins);
  k3_free(c.parts);
  return status;
}
