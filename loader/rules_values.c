// One pass over weight bytes. Parts of tensors are scanned in any order and their counts added up, so the order does not matter; findings are made
// afterwards, tensor by tensor.
#include "loader/rules_values.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "loader/linears_parts.h"
#include "loader/nonfinite.h"
#include "loader/values_scan.h"

typedef unsigned long long ull;

enum {
  PART_NBYTES = 256 << 10,  // stays in the second-level cache between reading and counting
  TAIL_NBYTES = 1 << 20,
  SAMPLE_NBYTES = 512,
  SAMPLE_EVERY = 16,
  MIN_CODES = 8192,  // below, a histogram proves nothing
  E4M3_256 = 0x78,
};

enum kind { KIND_SKIP, KIND_FLOATS, KIND_FP8, KIND_NVFP4, KIND_MXFP4, KIND_INT, KIND_PAD, KIND_OTHER };

// One tensor and what was counted in it.
struct subject {
  uint32_t tensor, linear;  // linear: K3_LINEAR_ABSENT for none
  uint32_t histogram;       // of packed FP4
  uint8_t kind, dtype;
  uint8_t largest_scale;  // E4M3 code
  bool weight, any;       // a weight of two dimensions; a byte that is not zero (FP4, FP8: a code)
  uint64_t first_part, part_nbytes;
  uint64_t row_nbytes;        // 0: rows are longer than a part and not counted
  uint64_t n_bad, first_bad;  // NaN (and Inf), or bytes of padding that are not zero
  uint64_t n_largest, n_zero_blocks, n_low_blocks, n_dead_rows;
};

struct histogram {
  uint32_t n[2][16];  // even and odd columns
};

struct pass {
  const struct k3_ckpt *ckpt;
  const struct k3_plan *plan;
  const struct k3_values_scan *scan;
  struct subject *subjects;
  size_t n_subjects;
  struct histogram *histograms;
  uint64_t n_parts;
  unsigned char **buffers;  // [n_threads], PART_NBYTES and the scales of one part
  struct k3_progress *progress;
  pthread_mutex_t mutex;  // guards the counts of subjects and histograms
};

// ---- what a tensor is ----

static bool begins(const struct k3_st_tensor *t, const char *with) {
  return strncmp(t->name, with, strlen(with)) == 0;
}

static bool ends(const struct k3_st_tensor *t, const char *with) {
  size_t n = strlen(with);
  return t->name_nbytes >= n && memcmp(t->name + t->name_nbytes - n, with, n) == 0;
}

static enum kind kind_by_dtype(const struct k3_st_tensor *t) {
  size_t stem;
  if (begins(t, K3_IMAGE_PAD_PREFIX))
    return KIND_PAD;
  // Scales, of weights and caches, have rules of their own.
  bool scale =
      ends(t, "_scale") || ends(t, "_scale_inv") || ends(t, "_scale_2") || ends(t, ".scale") || k3_kv_scale_of(t->name, t->name_nbytes, &stem);
  if (scale || begins(t, "__"))
    return KIND_SKIP;
  if (k3_is_plain_float((enum k3_dtype)t->dtype))
    return KIND_FLOATS;
  return t->dtype == K3_DTYPE_F8_E4M3 ? KIND_FP8 : KIND_OTHER;
}

static enum kind kind_of_linear(const struct k3_linear *linear, const struct k3_st_tensor *t) {
  if (!linear->is_sound)
    return kind_by_dtype(t);
  switch (linear->scheme.scheme) {
    case K3_SCHEME_NVFP4: return KIND_NVFP4;
    case K3_SCHEME_MXFP4: return KIND_MXFP4;
    case K3_SCHEME_INT_PACKED: return KIND_INT;
    default: return kind_by_dtype(t);
  }
}

static bool is_fp4(const struct subject *s) {
  return s->kind == KIND_NVFP4 || s->kind == KIND_MXFP4;
}

// Which module each tensor is the weight of. Companions of quantised weights are left to the rules about scales.
static void mark_linears(const struct pass *pass, uint32_t *linear_of, uint8_t *companion) {
  for (size_t i = 0; pass->plan && i < pass->plan->linears.n_items; i++) {
    const struct k3_linear *linear = &pass->plan->linears.items[i];
    if (linear->of_target)
      continue;
    for (int p = 0; p < K3_PARAM_KNOWN_COUNT; p++) {
      uint32_t t = linear->tensors[p];
      if (t == K3_LINEAR_ABSENT)
        continue;
      if (p == (int)k3_linear_weight(linear))
        linear_of[t] = (uint32_t)i;
      else if (p >= K3_PARAM_WEIGHT_SCALE && p < K3_PARAM_BIAS)
        companion[t] = 1;
    }
  }
}

static enum k3_status list_subjects(struct pass *pass, struct k3_error *err) {
  uint64_t n = pass->ckpt->n_tensors;
  uint32_t n_histograms = 0, *linear_of = k3_calloc(n, sizeof *linear_of, err);
  uint8_t *companion = k3_calloc(n, 1, err);
  enum k3_status status = K3_NO_MEMORY;
  pass->subjects = k3_calloc(n, sizeof *pass->subjects, err);
  if (!linear_of || !companion || !pass->subjects)
    goto out;
  memset(linear_of, 0xFF, n * sizeof *linear_of);
  mark_linears(pass, linear_of, companion);
  for (uint64_t t = 0; t < n; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(pass->ckpt, t);
    uint64_t nbytes = tensor->end - tensor->begin;
    struct subject s = {.tensor = (uint32_t)t, .linear = linear_of[t], .dtype = tensor->dtype, .first_part = pass->n_parts};
    const struct k3_linear *linear = s.linear != K3_LINEAR_ABSENT ? &pass->plan->linears.items[s.linear] : NULL;
    s.kind = (uint8_t)(companion[t] ? KIND_SKIP : linear ? kind_of_linear(linear, tensor) : kind_by_dtype(tensor));
    s.weight = tensor->rank >= 2 && (ends(tensor, "weight") || ends(tensor, "weight_packed"));
    if (s.kind == KIND_SKIP || nbytes == 0)
      continue;
    s.row_nbytes = linear && linear->n_rows > 0 && nbytes % linear->n_rows == 0 ? nbytes / linear->n_rows : 0;
    if (s.row_nbytes > PART_NBYTES)
      s.row_nbytes = 0;
    s.part_nbytes = s.row_nbytes ? PART_NBYTES / s.row_nbytes * s.row_nbytes : PART_NBYTES;
    if (is_fp4(&s))
      s.histogram = n_histograms++;
    pass->n_parts += (nbytes + s.part_nbytes - 1) / s.part_nbytes;
    pass->subjects[pass->n_subjects++] = s;
  }
  pass->histograms = k3_calloc(n_histograms, sizeof *pass->histograms, err);
  status = pass->histograms ? K3_OK : K3_NO_MEMORY;
out:
  k3_free(linear_of);
  k3_free(companion);
  return status;
}

// ---- one part ----

// First element of n that the count of a part is about.
static uint64_t first_bad(const struct subject *s, const uint8_t *bytes, uint64_t n_elems) {
  uint64_t elem_nbytes = s->kind == KIND_PAD ? 1 : k3_dtype_bits((enum k3_dtype)s->dtype) / 8;
  for (uint64_t i = 0; i < n_elems; i++) {
    const uint8_t *at = bytes + i * elem_nbytes;
    bool bad = s->kind == KIND_PAD   ? *at != 0
               : s->kind == KIND_FP8 ? (*at & 0x7F) == 0x7F
                                     : k3_count_nonfinite((enum k3_dtype)s->dtype, at, elem_nbytes) > 0;
    if (bad)
      return i;
  }
  return n_elems;
}

// Rows whose codes are zeros of either sign.
static void count_rows(struct subject *part, const uint8_t *bytes, size_t nbytes, uint8_t mask) {
  for (size_t row = 0; part->row_nbytes && row + part->row_nbytes <= nbytes; row += part->row_nbytes) {
    size_t i = 0;
    while (i < part->row_nbytes && (bytes[row + i] & mask) == 0)
      i++;
    part->n_dead_rows += i == part->row_nbytes;
  }
}

static void count_codes(struct histogram *histogram, const uint8_t *bytes, size_t nbytes, bool all) {
  uint32_t n_byte[256] = {0};
  for (size_t from = 0; from < nbytes; from += all ? SAMPLE_NBYTES : SAMPLE_NBYTES * SAMPLE_EVERY) {
    size_t n = nbytes - from < SAMPLE_NBYTES ? nbytes - from : SAMPLE_NBYTES;
    for (size_t i = 0; i < n; i++)
      n_byte[bytes[from + i]]++;
  }
  for (int b = 0; b < 256; b++) {
    histogram->n[0][b & 15] += n_byte[b];
    histogram->n[1][b >> 4] += n_byte[b];
  }
}

// Bits of the last words of packed rows that belong to no code.
static enum k3_status count_padding(const struct pass *pass, struct subject *part, const uint8_t *bytes, size_t nbytes, uint64_t row,
                                    struct k3_error *err) {
  const struct k3_linear *linear = &pass->plan->linears.items[part->linear];
  const struct k3_st_tensor *shape = k3_linear_tensor(pass->plan, linear, K3_PARAM_WEIGHT_SHAPE);
  int64_t dims[2];
  if (!shape || shape->dtype != K3_DTYPE_I64 || k3_st_n_elems(shape) != 2 || !part->row_nbytes)
    return K3_OK;
  K3_TRY(k3_ckpt_read(pass->ckpt, linear->tensors[K3_PARAM_WEIGHT_SHAPE], 0, dims, sizeof dims, err));
  uint64_t n_bits = dims[1] > 0 ? (uint64_t)dims[1] * linear->scheme.n_bits : 0;
  if (n_bits == 0 || linear->scheme.words_hold_whole || n_bits >= 8 * part->row_nbytes)
    return K3_OK;
  for (size_t at = 0; at + part->row_nbytes <= nbytes; at += part->row_nbytes, row++) {
    uint64_t byte = n_bits / 8;
    bool bad = (bytes[at + byte] >> (n_bits % 8)) != 0 || !k3_scan_all_zero(bytes + at + byte + 1, part->row_nbytes - byte - 1);
    if (bad && part->n_bad++ == 0)
      part->first_bad = row;
  }
  return K3_OK;
}

static enum k3_status count_fp4(const struct pass *pass, struct subject *part, struct histogram *histogram, unsigned char *bytes, size_t nbytes,
                                uint64_t offset, bool all, struct k3_error *err) {
  const struct k3_linear *linear = &pass->plan->linears.items[part->linear];
  struct k3_scan_fp4 scan = {0};
  size_t n_blocks = nbytes / (part->kind == KIND_NVFP4 ? 8 : 16);
  unsigned char *scales = bytes + PART_NBYTES;
  if (part->kind == KIND_NVFP4) {
    // Rows are whole blocks, so blocks and scales have one numbering through the whole tensor.
    K3_TRY(k3_ckpt_read(pass->ckpt, linear->tensors[k3_linear_scale(linear)], offset / 8, scales, n_blocks, err));
    pass->scan->nvfp4(bytes, scales, n_blocks, &scan);
    for (size_t i = 0; i < n_blocks; i++) {
      uint8_t magnitude = scales[i] & 0x7F;
      part->largest_scale = magnitude > part->largest_scale ? magnitude : part->largest_scale;
    }
  } else {
    pass->scan->mxfp4(bytes, n_blocks, &scan);
  }
  part->n_zero_blocks = scan.n_zero;
  part->n_low_blocks = scan.n_low;
  part->any = scan.n_zero < n_blocks;
  count_rows(part, bytes, nbytes, 0x77);
  count_codes(histogram, bytes, nbytes, all);
  return K3_OK;
}

static enum k3_status count_part(const struct pass *pass, struct subject *part, struct histogram *histogram, unsigned char *bytes, size_t nbytes,
                                 uint64_t offset, uint64_t tensor_nbytes, struct k3_error *err) {
  enum k3_dtype dtype = (enum k3_dtype)part->dtype;
  uint64_t elem_nbytes = part->kind == KIND_PAD || part->kind == KIND_OTHER ? 1 : k3_dtype_bits(dtype) / 8, n = nbytes / elem_nbytes;
  switch ((enum kind)part->kind) {
    case KIND_NVFP4:
    case KIND_MXFP4: return count_fp4(pass, part, histogram, bytes, nbytes, offset, tensor_nbytes <= PART_NBYTES, err);
    case KIND_INT:
      part->any = !k3_scan_all_zero(bytes, nbytes);
      return count_padding(pass, part, bytes, nbytes, part->row_nbytes ? offset / part->row_nbytes : 0, err);
    case KIND_FP8: {
      struct k3_scan_fp8 scan = {0};
      pass->scan->e4m3(bytes, nbytes, &scan);
      part->n_bad = scan.n_nan;
      part->n_largest = scan.n_largest;
      part->any = !k3_scan_all_zero(bytes, nbytes);
      count_rows(part, bytes, nbytes, 0x7F);
      break;
    }
    case KIND_FLOATS:
      part->n_bad =
          dtype == K3_DTYPE_F32 ? pass->scan->nonfinite_32(bytes, n) : pass->scan->nonfinite_16(bytes, n, dtype == K3_DTYPE_BF16 ? 0x7F80 : 0x7C00);
      part->any = !k3_scan_all_zero(bytes, nbytes);
      break;
    case KIND_PAD:
      part->any = !k3_scan_all_zero(bytes, nbytes);
      part->n_bad = part->any;
      break;
    default: part->any = !k3_scan_all_zero(bytes, nbytes); break;
  }
  if (part->n_bad > 0)
    part->first_bad = offset / elem_nbytes + first_bad(part, bytes, n);
  return K3_OK;
}

static enum k3_status scan_part(void *ctx, int worker, uint64_t number, struct k3_error *err) {
  struct pass *pass = ctx;
  size_t low = 0, high = pass->n_subjects;  // last subject whose first part is <= number
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (pass->subjects[middle].first_part <= number)
      low = middle;
    else
      high = middle;
  }
  struct subject *s = &pass->subjects[low];
  // The fields that were set before the threads started; the counts of this part begin at zero.
  struct subject part = {.tensor = s->tensor, .linear = s->linear, .kind = s->kind, .dtype = s->dtype, .row_nbytes = s->row_nbytes};
  struct histogram histogram = {{{0}}};
  const struct k3_st_tensor *t = k3_ckpt_tensor(pass->ckpt, s->tensor);
  uint64_t offset = (number - s->first_part) * s->part_nbytes, left = t->end - t->begin - offset;
  size_t nbytes = left < s->part_nbytes ? (size_t)left : (size_t)s->part_nbytes;
  K3_TRY(k3_ckpt_read(pass->ckpt, s->tensor, offset, pass->buffers[worker], nbytes, err));
  K3_TRY(count_part(pass, &part, &histogram, pass->buffers[worker], nbytes, offset, t->end - t->begin, err));
  pthread_mutex_lock(&pass->mutex);
  if (part.n_bad > 0 && (s->n_bad == 0 || part.first_bad < s->first_bad))
    s->first_bad = part.first_bad;
  s->n_bad += part.n_bad;
  s->any |= part.any;
  s->n_largest += part.n_largest;
  s->n_zero_blocks += part.n_zero_blocks;
  s->n_low_blocks += part.n_low_blocks;
  s->n_dead_rows += part.n_dead_rows;
  s->largest_scale = part.largest_scale > s->largest_scale ? part.largest_scale : s->largest_scale;
  for (int i = 0; is_fp4(s) && i < 32; i++)
    pass->histograms[s->histogram].n[i / 16][i % 16] += histogram.n[i / 16][i % 16];
  pthread_mutex_unlock(&pass->mutex);
  k3_progress_add(pass->progress, nbytes);
  return K3_OK;
}

// ---- what is reported ----

struct report {
  const struct pass *pass;
  enum k3_judge engine;
  struct k3_findings *findings;
};

#define REPORT(r, rule, s, allowed, ...)                                                                 \
  k3_rules_report((r)->findings, (r)->engine, rule, k3_ckpt_file_of((r)->pass->ckpt, (s)->tensor)->path, \
                  k3_ckpt_tensor((r)->pass->ckpt, (s)->tensor)->name, allowed, __VA_ARGS__)

static void report_histogram(const struct report *r, const struct subject *s) {
  const struct histogram *h = &r->pass->histograms[s->histogram];
  double n[2] = {0}, positive = 0, negative = 0, six = 0, distance = 0;
  for (int i = 0; i < 32; i++) {
    double k = h->n[i / 16][i % 16];
    n[i / 16] += k;
    six += i % 8 == 7 ? k : 0;
    if (i % 8 != 0)
      *(i % 16 < 8 ? &positive : &negative) += k;
  }
  double all = n[0] + n[1], minus_zero = (double)h->n[0][8] + h->n[1][8], zero = (double)h->n[0][0] + h->n[1][0];
  if (all < MIN_CODES)
    return;
  for (int c = 0; c < 16; c++)
    distance += fabs(h->n[0][c] / n[0] - h->n[1][c] / n[1]) / 2;
  if (six > 0.25 * all)
    REPORT(r, K3_VAL03, s, "about 11% for weights of a bell shape", "%.0f%% of the codes are +-6", 100 * six / all);
  if (fabs(positive - negative) > 0.05 * (positive + negative))
    REPORT(r, K3_VAL06, s, "about as many positive as negative codes", "%.1f%% of the codes are positive, %.1f%% negative", 100 * positive / all,
           100 * negative / all);
  // Some producers write every exact zero as code 8.
  if (minus_zero > 0.1 * all && zero > 0)
    REPORT(r, K3_VAL06, s, "few negative zeros", "%.0f%% of the codes are 8, a negative zero", 100 * minus_zero / all);
  if (distance > 0.1)
    REPORT(r, K3_VAL06, s, "even and odd columns that look alike", "%.0f%% of the codes of even and odd columns differ: another order of nibbles?",
           100 * distance);
}

static void report_quantised(const struct report *r, const struct subject *s) {
  const struct k3_linear *linear = s->linear != K3_LINEAR_ABSENT ? &r->pass->plan->linears.items[s->linear] : NULL;
  const struct k3_st_tensor *t = k3_ckpt_tensor(r->pass->ckpt, s->tensor);
  uint64_t n = k3_st_n_elems(t), scale_rows = 1, scale_cols = 1;
  if (s->kind == KIND_FP8 && linear && linear->is_sound) {
    k3_quant_scale_shape(&linear->scheme, linear->n_rows, linear->n_cols, &scale_rows, &scale_cols);
    if (s->n_largest > 4 * scale_rows * scale_cols && s->n_largest > n / 1024)
      REPORT(r, K3_VAL03, s, "about one +-448 for every scale", "%llu of %llu codes are +-448, under %llu scales", (ull)s->n_largest, (ull)n,
             (ull)(scale_rows * scale_cols));
  }
  if (is_fp4(s)) {
    uint64_t n_blocks = 2 * n / (s->kind == KIND_NVFP4 ? 16 : 32);
    // With a largest block scale of 256 the recipe chooses between 4 and 6 for the largest code.
    if (s->kind == KIND_NVFP4 && s->n_low_blocks > 0 && s->largest_scale != E4M3_256)
      REPORT(r, K3_VAL04, s, "+-6 in every block, whose scale is made for it", "%llu of %llu blocks never use the largest code", (ull)s->n_low_blocks,
             (ull)n_blocks);
    if (s->kind == KIND_MXFP4 && s->n_low_blocks > 0)
      REPORT(r, K3_VAL05, s, "+-3, +-4 or +-6 in every block", "%llu of %llu blocks use no code above +-2", (ull)s->n_low_blocks, (ull)n_blocks);
    report_histogram(r, s);
    if (s->any && s->n_zero_blocks > 0)
      REPORT(r, K3_VAL08, s, NULL, "%llu of %llu blocks are zero, %llu whole rows", (ull)s->n_zero_blocks, (ull)n_blocks, (ull)s->n_dead_rows);
  } else if (s->kind == KIND_FP8 && s->any && s->n_dead_rows > 0) {
    REPORT(r, K3_VAL08, s, NULL, "%llu rows of weights are zero", (ull)s->n_dead_rows);
  }
}

static void report_subject(const struct report *r, const struct subject *s) {
  if (s->kind == KIND_FP8 && s->n_bad > 0)
    REPORT(r, K3_VAL01, s, "finite weights", "%llu NaN codes, the first is element %llu", (ull)s->n_bad, (ull)s->first_bad);
  if (s->kind == KIND_FLOATS && s->n_bad > 0)
    REPORT(r, K3_VAL02, s, "finite weights", "%llu NaN or Inf, the first is element %llu", (ull)s->n_bad, (ull)s->first_bad);
  if (s->kind == KIND_INT && s->n_bad > 0)
    REPORT(r, K3_VAL09, s, "zero bits behind the last code of a row", "%llu rows are padded with something else, the first is row %llu",
           (ull)s->n_bad, (ull)s->first_bad);
  if (s->kind == KIND_PAD && s->n_bad > 0)
    REPORT(r, K3_VAL09, s, "zeros", "padding of the image that is not zero, from byte %llu on", (ull)s->first_bad);
  report_quantised(r, s);
  if (s->weight && !s->any)
    REPORT(r, K3_CNT10, s, "weights that were trained, or no such tensor", "every byte is zero");
}

// A download that broke off leaves a hole, which reads as zeros, at the end of a file of the right size.
static enum k3_status check_tails(const struct report *r, struct k3_error *err) {
  unsigned char *tail = k3_calloc(TAIL_NBYTES, 1, err);
  enum k3_status status = tail ? K3_OK : K3_NO_MEMORY;
  for (size_t f = 0; status == K3_OK && f < r->pass->ckpt->n_files; f++) {
    const struct k3_ckpt_file *file = &r->pass->ckpt->files[f];
    if (file->id.nbytes < TAIL_NBYTES || file->header.data_begin == 0)
      continue;
    status = k3_pread_full(file->fd, tail, TAIL_NBYTES, file->id.nbytes - TAIL_NBYTES, file->path, err);
    if (status == K3_OK && k3_scan_all_zero(tail, TAIL_NBYTES))
      k3_rules_report(r->findings, r->engine, K3_CNT10, file->path, NULL, "weights up to the end; download the file again",
                      "the last MiB is zero: a hole that an unfinished download left?");
  }
  k3_free(tail);
  return status;
}

struct segments {
  const struct k3_image *image;
  struct k3_findings *findings;
  pthread_mutex_t *mutex;
  struct k3_progress *progress;
};

static enum k3_status check_segment(void *ctx, int worker, uint64_t segment, struct k3_error *err) {
  struct segments *s = ctx;
  struct k3_error bad = {0};
  (void)worker;
  enum k3_status status = k3_image_check_segment(s->image, segment, &bad);
  k3_progress_add(s->progress, K3_IMAGE_SEGMENT_NBYTES);
  if (status == K3_OK)
    return K3_OK;
  if (status != K3_DIFFERENT)
    return k3_fail(err, status, bad.rule, bad.file, NULL, NULL, "%s", bad.found);
  pthread_mutex_lock(s->mutex);
  status = k3_findings_add(s->findings, K3_ERROR, &bad);
  pthread_mutex_unlock(s->mutex);
  return status;
}

static enum k3_status read_all(struct pass *pass, struct k3_pool *pool, struct k3_findings *findings, struct k3_error *err) {
  int n_threads = k3_pool_n_threads(pool);
  const struct k3_image *image = pass->ckpt->image.bytes ? &pass->ckpt->image : NULL;
  pass->buffers = k3_calloc((size_t)n_threads, sizeof *pass->buffers, err);
  if (!pass->buffers)
    return K3_NO_MEMORY;
  for (int i = 0; i < n_threads; i++) {
    pass->buffers[i] = k3_alloc_aligned(PART_NBYTES + PART_NBYTES / 8, 64, err);
    if (!pass->buffers[i])
      return K3_NO_MEMORY;
  }
  k3_progress_start(pass->progress, "checking", pass->ckpt->tensors_nbytes + (image ? image->n_segments * K3_IMAGE_SEGMENT_NBYTES : 0));
  enum k3_status status = k3_pool_run(pool, pass->n_parts, scan_part, pass, err);
  if (status == K3_OK && image && image->digests) {
    struct segments segments = {image, findings, &pass->mutex, pass->progress};
    status = k3_pool_run(pool, image->n_segments, check_segment, &segments, err);
  }
  k3_progress_finish(pass->progress);
  return status;
}

enum k3_status k3_rules_values(const struct k3_ckpt *ckpt, const struct k3_plan *plan, enum k3_judge engine, int n_threads,
                               struct k3_progress *progress, struct k3_findings *findings, struct k3_error *err) {
  struct pass pass = {.ckpt = ckpt, .plan = plan, .scan = k3_values_scan(), .progress = progress, .mutex = PTHREAD_MUTEX_INITIALIZER};
  struct report report = {&pass, engine, findings};
  struct k3_pool *pool = NULL;
  enum k3_status status;
  K3_TRY_GOTO(status, out, list_subjects(&pass, err));
  status = K3_NO_MEMORY;
  if (!(pool = k3_pool_create(n_threads, err)))
    goto out;
  K3_TRY_GOTO(status, out, read_all(&pass, pool, findings, err));
  for (size_t i = 0; i < pass.n_subjects; i++)
    report_subject(&report, &pass.subjects[i]);
  status = check_tails(&report, err);
out:
  for (int i = 0; pass.buffers && i < k3_pool_n_threads(pool); i++)
    k3_free(pass.buffers[i]);
  k3_pool_free(pool);
  k3_free(pass.buffers);
  k3_free(pass.histograms);
  k3_free(pass.subjects);
  return status;
}
