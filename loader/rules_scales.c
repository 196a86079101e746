// What the values of scales say (SCL), and the small integer tensors beside packed weights (TEN08, TEN10, TEN17). Modules are read in parallel, what
// was found is reported afterwards in their order.
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/pool.h"
#include "loader/linears_parts.h"
#include "loader/rules.h"
#include "quant/decode.h"
#include "quant/number.h"

typedef unsigned long long ull;

enum { CHUNK_ELEMS = 1 << 16, MAX_LOOKS = 4096, BATCH = 4096, E4M3_224 = 0x76, E4M3_256 = 0x78, E4M3_MIN_NORMAL = 0x08 };

// How often something was seen among the scales of one module, and where first.
struct tally {
  uint64_t n, first;
};

// Everything that one pass over a module's scales collects.
struct seen {
  struct tally nan, infinite, negative, placeholder, epsilon, outlier, subnormal, odd_exponent, zero_over_codes, zero_over_zeros, no_power_of_two;
  uint64_t n, n_tiny_integers, n_exponent_like, n_powers_of_two;  // E8M0 bytes 0 and 1; floats that are integers 64 .. 190; powers of two
  bool any_one, any_codes;
  bool all_ones;  // every byte is 0xFF
  float max, min_nonzero;
};

struct job {
  const struct k3_plan *plan;
  enum k3_judge engine;
  struct k3_scale_facts *facts;
  struct seen *seen;  // [BATCH] of the modules first, first + 1, ...
  size_t first;
};

static void count(struct tally *tally, uint64_t at) {
  if (tally->n++ == 0)
    tally->first = at;
}

// ---- codes under a scale ----

// Whether any weight of the region that scale (row, col) belongs to is not zero.
static enum k3_status region_has_codes(const struct k3_plan *plan, const struct k3_linear *linear, uint64_t scale_row, uint64_t scale_col, bool *any,
                                       struct k3_error *err) {
  const struct k3_quant_scheme *scheme = &linear->scheme;
  uint64_t row_nbytes = k3_quant_row_nbytes(scheme, linear->n_cols), block_rows = scheme->block_rows ? scheme->block_rows : linear->n_rows;
  uint64_t block_cols = scheme->block_cols ? scheme->block_cols : linear->n_cols;
  bool fp4 = scheme->scheme == K3_SCHEME_NVFP4 || scheme->scheme == K3_SCHEME_MXFP4;
  uint64_t col = scale_col * block_cols, n_cols = linear->n_cols - col < block_cols ? linear->n_cols - col : block_cols;
  uint64_t begin = fp4 ? col / 2 : col, nbytes = fp4 ? n_cols / 2 : n_cols;
  uint8_t buffer[4096], sign_less = fp4 ? 0x77 : 0x7F;
  *any = false;
  for (uint64_t row = scale_row * block_rows; row < linear->n_rows && row < (scale_row + 1) * block_rows && !*any; row++) {
    for (uint64_t at = 0; at < nbytes && !*any; at += sizeof buffer) {
      size_t n = nbytes - at < sizeof buffer ? (size_t)(nbytes - at) : sizeof buffer;
      K3_TRY(k3_ckpt_read(k3_linear_ckpt(plan, linear), linear->tensors[k3_linear_weight(linear)], row * row_nbytes + begin + at, buffer, n, err));
      for (size_t i = 0; i < n; i++)
        *any |= (buffer[i] & sign_less) != 0;
    }
  }
  return K3_OK;
}

// ---- one scale ----

// What writers put in place of a zero scale. A live region may have such a scale by chance, so the codes decide.
static bool is_epsilon(enum k3_dtype dtype, float value) {
  return value == (dtype == K3_DTYPE_BF16 ? 0x1p-7f : dtype == K3_DTYPE_F16 ? 0x1p-10f : 0x1p-23f) || value == 1e-12f;
}

static bool is_power_of_two(float value) {
  int exponent;
  return value > 0 && frexpf(value, &exponent) == 0.5f;
}

static bool is_placeholder(enum k3_dtype dtype, float value) {
  return value == -FLT_MAX || (dtype == K3_DTYPE_BF16 && value == k3_f32_from_bf16(0xFF7F)) || (dtype == K3_DTYPE_F16 && value == -65504.0f);
}

static void see_value(struct seen *seen, float value) {
  seen->max = value > seen->max ? value : seen->max;
  if (value > 0 && (seen->min_nonzero == 0 || value < seen->min_nonzero))
    seen->min_nonzero = value;
}

// Sees a float scale; *look: its codes matter.
static void see_float(struct seen *seen, enum k3_dtype dtype, float value, uint64_t at, bool *look) {
  *look = value == 0 || is_epsilon(dtype, value);
  if (isnan(value)) {
    count(&seen->nan, at);
  } else if (isinf(value)) {
    count(&seen->infinite, at);
  } else if (is_placeholder(dtype, value)) {
    count(&seen->placeholder, at);
  } else if (value < 0) {
    count(&seen->negative, at);
  } else if (value > 0) {
    see_value(seen, value);
    if (is_power_of_two(value))
      seen->n_powers_of_two++;
    else
      count(&seen->no_power_of_two, at);
    seen->n_exponent_like += value >= 64 && value <= 190 && value == truncf(value);
  }
}

static void see_byte(struct seen *seen, bool e8m0, uint8_t byte, uint64_t at, bool *look) {
  *look = false;
  if (e8m0) {
    if (byte == 255) {
      count(&seen->nan, at);
      return;
    }
    seen->n_tiny_integers += byte <= 1;
    seen->any_one |= byte == 1;
    *look = byte < 64;  // an all-zero block may have any exponent
    if (byte > 190)
      count(&seen->odd_exponent, at);
    see_value(seen, k3_f32_from_e8m0(byte));
    return;
  }
  if ((byte & 0x7F) == 0x7F)
    count(&seen->nan, at);
  else if (byte & 0x80)
    count(&seen->negative, at);
  else if (byte == 0)
    *look = true;
  else {
    if (byte < E4M3_MIN_NORMAL)
      count(&seen->subnormal, at);
    see_value(seen, k3_f32_from_e4m3(byte));
  }
}

static enum k3_status see_scales(const struct k3_plan *plan, const struct k3_linear *linear, struct seen *seen, struct k3_error *err) {
  enum k3_param param = k3_linear_scale(linear);
  const struct k3_st_tensor *t = k3_linear_tensor(plan, linear, param);
  enum k3_dtype dtype = (enum k3_dtype)t->dtype;
  bool e8m0 = dtype == K3_DTYPE_U8 || dtype == K3_DTYPE_F8_E8M0, bytes = e8m0 || dtype == K3_DTYPE_F8_E4M3;
  uint64_t n = k3_st_n_elems(t), elem_nbytes = k3_dtype_bits(dtype) / 8, scale_rows, scale_cols;
  k3_quant_scale_shape(&linear->scheme, linear->n_rows, linear->n_cols, &scale_rows, &scale_cols);
  uint8_t *buffer = k3_calloc(CHUNK_ELEMS, elem_nbytes, err);
  if (!buffer)
    return K3_NO_MEMORY;
  enum k3_status status = K3_OK;
  seen->n = n;
  seen->all_ones = n > 0;
  // Codes are looked at under the first suspicious scales only; a file full of them needs no more witnesses.
  uint64_t n_looks = 0;
  for (uint64_t from = 0; status == K3_OK && from < n; from += CHUNK_ELEMS) {
    size_t n_here = n - from < CHUNK_ELEMS ? (size_t)(n - from) : CHUNK_ELEMS;
    status = k3_ckpt_read(k3_linear_ckpt(plan, linear), linear->tensors[param], from * elem_nbytes, buffer, n_here * elem_nbytes, err);
    for (size_t i = 0; status == K3_OK && i < n_here * elem_nbytes; i++)
      seen->all_ones &= buffer[i] == 0xFF;
    for (size_t i = 0; status == K3_OK && i < n_here; i++) {
      bool look;
      if (bytes)
        see_byte(seen, e8m0, buffer[i], from + i, &look);
      else
        see_float(seen, dtype, k3_load_float(dtype, buffer, i), from + i, &look);
      if (!look || linear->n_cols == 0 || linear->scheme.scheme == K3_SCHEME_INT_PACKED || n_looks >= MAX_LOOKS)
        continue;
      bool any;
      n_looks++;
      status = region_has_codes(plan, linear, (from + i) / scale_cols, (from + i) % scale_cols, &any, err);
      seen->any_codes |= any;
      if (e8m0 && any) {
        count(&seen->odd_exponent, from + i);
      } else if (!bytes && k3_load_float(dtype, buffer, i) != 0) {
        if (!any)
          count(&seen->epsilon, from + i);
      } else if (!e8m0) {
        count(any ? &seen->zero_over_codes : &seen->zero_over_zeros, from + i);
      }
    }
  }
  k3_free(buffer);
  return status;
}

static int compare_floats(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

// Float scales more than 2^12 away from the median of their tensor.
static enum k3_status see_outliers(const struct k3_plan *plan, const struct k3_linear *linear, struct seen *seen, struct k3_error *err) {
  enum k3_param param = k3_linear_scale(linear);
  const struct k3_st_tensor *t = k3_linear_tensor(plan, linear, param);
  enum k3_dtype dtype = (enum k3_dtype)t->dtype;
  uint64_t n = k3_st_n_elems(t), elem_nbytes = k3_dtype_bits(dtype) / 8;
  if (n < 8 || n > 1 << 20 || (dtype != K3_DTYPE_F32 && dtype != K3_DTYPE_BF16 && dtype != K3_DTYPE_F16))
    return K3_OK;
  float *values = k3_calloc(2 * n, sizeof *values, err);
  if (!values)
    return K3_NO_MEMORY;
  unsigned char *raw = (unsigned char *)(values + n);
  enum k3_status status = k3_ckpt_read(k3_linear_ckpt(plan, linear), linear->tensors[param], 0, raw, n * elem_nbytes, err);
  if (status == K3_OK) {
    for (uint64_t i = 0; i < n; i++)
      values[i] = fabsf(k3_load_float(dtype, raw, i));
    qsort(values, n, sizeof *values, compare_floats);
    float median = values[n / 2];
    for (uint64_t i = 0; median > 0 && i < n; i++) {
      float value = fabsf(k3_load_float(dtype, raw, i));
      if (value > 0 && !is_epsilon(dtype, value) && (value > median * 4096 || value < median / 4096))
        count(&seen->outlier, i);
    }
  }
  k3_free(values);
  return status;
}

static enum k3_status read_scalar(const struct k3_plan *plan, const struct k3_linear *linear, enum k3_param param, bool *found, float *value,
                                  struct k3_error *err) {
  const struct k3_st_tensor *t = k3_linear_tensor(plan, linear, param);
  unsigned char bytes[4];
  *found = t != NULL;
  if (!t)
    return K3_OK;
  K3_TRY(k3_ckpt_read(k3_linear_ckpt(plan, linear), linear->tensors[param], 0, bytes, k3_dtype_bits(t->dtype) / 8, err));
  *value = k3_load_float((enum k3_dtype)t->dtype, bytes, 0);
  return K3_OK;
}

static enum k3_status read_one(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  const struct job *job = ctx;
  const struct k3_linear *linear = &job->plan->linears.items[job->first + item];
  struct k3_scale_facts *facts = &job->facts[job->first + item];
  struct seen *seen = &job->seen[item];
  (void)worker;
  *seen = (struct seen){0};
  if (linear->is_plain || !linear->is_sound)
    return K3_OK;
  K3_TRY(see_scales(job->plan, linear, seen, err));
  K3_TRY(see_outliers(job->plan, linear, seen, err));
  K3_TRY(read_scalar(job->plan, linear, k3_linear_second(linear), &facts->has_second, &facts->second, err));
  K3_TRY(read_scalar(job->plan, linear, k3_linear_input(linear), &facts->has_input, &facts->input, err));
  facts->factor = 1;
  if (facts->has_second)
    facts->factor = linear->scheme.second == K3_SECOND_DIVIDE ? 1 / facts->second : facts->second;
  facts->max_scale = seen->max;
  facts->min_scale = seen->min_nonzero;
  facts->read = seen->nan.n + seen->infinite.n + seen->negative.n + seen->placeholder.n == 0 && isfinite(facts->factor) && facts->factor > 0;
  return K3_OK;
}

// ---- what is reported ----

struct report {
  const struct k3_plan *plan;
  enum k3_judge engine;
  struct k3_findings *findings;
};

static void report_tensor(const struct report *r, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *allowed,
                          const char *found, ...) K3_PRINTF(6, 7);
static void report_tensor(const struct report *r, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *allowed,
                          const char *found, ...) {
  char text[400];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  const struct k3_ckpt *ckpt = k3_linear_ckpt(r->plan, linear);
  uint32_t t = linear->tensors[param];
  k3_rules_report(r->findings, r->engine, rule, k3_ckpt_file_of(ckpt, t)->path, k3_ckpt_tensor(ckpt, t)->name, allowed, "%s", text);
}

// The milder form of a rule that is an error otherwise.
static void warn_tensor(const struct report *r, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *allowed,
                        const char *found, ...) K3_PRINTF(6, 7);
static void warn_tensor(const struct report *r, const struct k3_linear *linear, enum k3_param param, enum k3_rule rule, const char *allowed,
                        const char *found, ...) {
  const struct k3_ckpt *ckpt = k3_linear_ckpt(r->plan, linear);
  uint32_t t = linear->tensors[param];
  struct k3_error finding = {0};
  char text[400];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  k3_fail(&finding, K3_BAD_INPUT, rule, k3_ckpt_file_of(ckpt, t)->path, k3_ckpt_tensor(ckpt, t)->name, allowed, "%s", text);
  k3_findings_add(r->findings, K3_WARNING, &finding);
}

static void report_tally(const struct report *r, const struct k3_linear *linear, enum k3_rule rule, const struct tally *tally, uint64_t n,
                         const char *allowed, const char *what) {
  if (tally->n > 0)
    report_tensor(r, linear, k3_linear_scale(linear), rule, allowed, "%llu of %llu scales %s, the first is number %llu", (ull)tally->n, (ull)n, what,
                  (ull)tally->first);
}

// A second or input scale.
static void report_scalar(const struct report *r, const struct k3_linear *linear, enum k3_param param, float value) {
  enum k3_dtype dtype = (enum k3_dtype)k3_linear_tensor(r->plan, linear, param)->dtype;
  const char *allowed = "a positive finite number";
  if (isnan(value))
    report_tensor(r, linear, param, K3_SCL01, allowed, "NaN");
  else if (isinf(value))
    report_tensor(r, linear, param, K3_SCL02, allowed, "%sInf", value < 0 ? "-" : "");
  else if (is_placeholder(dtype, value))
    report_tensor(r, linear, param, K3_SCL07, allowed, "the smallest float, which loaders put where nothing was loaded");
  else if (value == 0)
    report_tensor(r, linear, param, K3_SCL03, allowed, "zero");
  else if (value < 0)
    report_tensor(r, linear, param, K3_SCL05, allowed, "%g", (double)value);
}

// The direction of a second scale, from the size of the weights that it makes. The largest weight is about 6 times the largest scaled block scale.
static void report_direction(const struct report *r, const struct k3_linear *linear, const struct k3_scale_facts *facts) {
  bool nvfp4 = linear->scheme.scheme == K3_SCHEME_NVFP4;
  float amax = (nvfp4 ? 6.0f : 448.0f) * facts->max_scale * facts->factor;
  enum k3_param param = nvfp4 ? k3_linear_second(linear) : k3_linear_scale(linear);
  if (!facts->read || facts->max_scale == 0)
    return;
  if (amax < 1e-4f || amax > 1e3f)
    report_tensor(r, linear, param, K3_SCL08, "weights between 0.0001 and 1000", "with it the largest weight is about %g: %s", (double)amax,
                  nvfp4 ? "multiplied where it divides, or the reverse" : "a reciprocal, or not the scale of these weights");
  else if (nvfp4 && linear->scheme.second == K3_SECOND_DIVIDE && facts->second < 1)
    warn_tensor(r, linear, param, K3_SCL08, "a divisor above 1 (2688 / amax)", "%g: does it multiply?", (double)facts->second);
  else if (nvfp4 && linear->scheme.second == K3_SECOND_MULTIPLY && facts->second > 1)
    warn_tensor(r, linear, param, K3_SCL08, "a multiplier below 1 (amax / 2688)", "%g: does it divide?", (double)facts->second);
}

// A zero scale over nothing but zeros loses nothing: the same rule, a warning.
static void report_dead_blocks(const struct report *r, const struct k3_linear *linear, const struct seen *seen) {
  if (seen->zero_over_zeros.n > 0)
    warn_tensor(r, linear, k3_linear_scale(linear), K3_SCL04, "a scale above zero", "%llu of %llu scales are zero, over codes that are zero too",
                (ull)seen->zero_over_zeros.n, (ull)seen->n);
}

static void report_floats(const struct report *r, const struct k3_linear *linear, const struct seen *seen) {
  bool integers = linear->scheme.scheme == K3_SCHEME_INT_PACKED, blocks = linear->scheme.scheme == K3_SCHEME_FP8_BLOCK;
  const struct k3_st_tensor *t = k3_linear_tensor(r->plan, linear, k3_linear_scale(linear));
  bool declared = r->plan->linears.config && r->plan->linears.config->ue8m0;
  report_tally(r, linear, K3_SCL02, &seen->infinite, seen->n, "finite scales", "are infinite");
  report_tally(r, linear, K3_SCL07, &seen->placeholder, seen->n, "scales that were loaded", "are the smallest float, a loader's placeholder");
  report_tally(r, linear, integers ? K3_SCL06 : K3_SCL05, &seen->negative, seen->n, "positive scales", "are negative");
  report_tally(r, linear, K3_SCL04, &seen->zero_over_codes, seen->n, "a scale above zero over weights that are not zero",
               "are zero over codes that are not");
  report_dead_blocks(r, linear, seen);
  report_tally(r, linear, K3_SCL13, &seen->epsilon, seen->n, "scales of live regions", "are an epsilon: their region was zero");
  report_tally(r, linear, K3_SCL14, &seen->outlier, seen->n, "scales within 2^12 of the median", "lie far from the median");
  if (blocks && t->dtype == K3_DTYPE_F32 && declared)
    report_tally(r, linear, K3_SCL11, &seen->no_power_of_two, seen->n, "powers of two, since the config says ue8m0", "are no powers of two");
  if (blocks && t->dtype == K3_DTYPE_F32 && seen->n >= 2 && seen->n_exponent_like == seen->n)
    report_tensor(r, linear, k3_linear_scale(linear), K3_SCL15, "scales", "only integers from 64 to 190: exponent bytes stored as numbers");
}

static void report_bytes(const struct report *r, const struct k3_linear *linear, const struct seen *seen) {
  if (linear->scheme.scheme == K3_SCHEME_NVFP4) {
    report_tally(r, linear, K3_SCL05, &seen->negative, seen->n, "block scales without sign", "have the sign bit set");
    report_tally(r, linear, K3_SCL04, &seen->zero_over_codes, seen->n, "a scale above zero over codes that are not zero",
                 "are zero over codes that are not");
    report_dead_blocks(r, linear, seen);
    report_tally(r, linear, K3_SCL10, &seen->subnormal, seen->n, "block scales of at least 2^-6", "are subnormal, which some kernels flush to zero");
    return;
  }
  // Converted numbers: 2^k cast to an integer leaves zeros and a few ones.
  bool converted = seen->n >= 4 && seen->any_one && seen->any_codes && seen->n_tiny_integers * 100 >= seen->n * 99;
  if (converted)
    report_tensor(r, linear, k3_linear_scale(linear), K3_SCL15, "exponent bytes", "almost only 0 and 1: numbers cast to integers, not exponents");
  else
    report_tally(r, linear, K3_SCL12, &seen->odd_exponent, seen->n, "exponents from 64 to 190 over weights that are not zero",
                 "are outside the plausible window");
}

// ---- integers beside packed weights ----

static enum k3_status check_integers(const struct report *r, struct k3_linear *linear, struct k3_error *err) {
  const struct k3_ckpt *ckpt = k3_linear_ckpt(r->plan, linear);
  const struct k3_st_tensor *shape = k3_linear_tensor(r->plan, linear, K3_PARAM_WEIGHT_SHAPE);
  const struct k3_st_tensor *index = k3_linear_tensor(r->plan, linear, K3_PARAM_WEIGHT_G_IDX);
  const struct k3_st_tensor *zeros = k3_linear_tensor(r->plan, linear, K3_PARAM_WEIGHT_ZERO_POINT);
  bool packed = linear->scheme.scheme == K3_SCHEME_INT_PACKED;
  if (shape && (shape->dtype == K3_DTYPE_I64 || shape->dtype == K3_DTYPE_I32) && k3_st_n_elems(shape) == 2) {
    unsigned char bytes[16];
    int64_t rows, cols;
    size_t width = shape->dtype == K3_DTYPE_I64 ? 8 : 4;
    K3_TRY(k3_ckpt_read(ckpt, linear->tensors[K3_PARAM_WEIGHT_SHAPE], 0, bytes, 2 * width, err));
    if (width == 8) {
      memcpy(&rows, bytes, 8);
      memcpy(&cols, bytes + 8, 8);
    } else {
      int32_t narrow[2];
      memcpy(narrow, bytes, 8);
      rows = narrow[0];
      cols = narrow[1];
    }
    // The last word of a row may be padded, so with odd widths the columns are a bound.
    bool fits = rows == (int64_t)linear->n_rows && cols > 0 &&
                (linear->n_cols == 0 || cols == (int64_t)linear->n_cols ||
                 (packed && cols < (int64_t)linear->n_cols &&
                  k3_quant_row_nbytes(&linear->scheme, (uint64_t)cols) == k3_quant_row_nbytes(&linear->scheme, linear->n_cols)));
    if (!fits)
      report_tensor(r, linear, K3_PARAM_WEIGHT_SHAPE, K3_TEN08, "the shape of the packed weight", "[%lld, %lld], the tensor holds [%llu, %llu]",
                    (long long)rows, (long long)cols, (ull)linear->n_rows, (ull)linear->n_cols);
  } else if (shape) {
    report_tensor(r, linear, K3_PARAM_WEIGHT_SHAPE, K3_TEN08, "two numbers of I64 or I32", "%s of %llu elements",
                  k3_dtype_name((enum k3_dtype)shape->dtype), (ull)k3_st_n_elems(shape));
  }
  if (index && packed) {
    uint64_t n = k3_st_n_elems(index), n_groups = linear->scheme.block_cols ? k3_ceil_div_u64(linear->n_cols, linear->scheme.block_cols) : 1;
    int32_t *groups = index->dtype == K3_DTYPE_I32 && n <= 1 << 20 ? k3_calloc(n + n_groups, sizeof *groups, err) : NULL;
    if (!groups && index->dtype == K3_DTYPE_I32 && n <= 1 << 20)
      return K3_NO_MEMORY;
    enum k3_status status = groups ? k3_ckpt_read(ckpt, linear->tensors[K3_PARAM_WEIGHT_G_IDX], 0, groups, n * 4, err) : K3_OK;
    bool fits = groups && linear->n_cols == n;
    for (uint64_t i = 0; status == K3_OK && fits && i < n; i++) {
      fits = groups[i] >= 0 && (uint64_t)groups[i] < n_groups;
      if (fits)
        groups[n + (uint64_t)groups[i]]++;
    }
    for (uint64_t g = 1; status == K3_OK && fits && g < n_groups; g++)
      fits = groups[n + g] == groups[n];
    k3_free(groups);
    K3_TRY(status);
    if (!fits)
      report_tensor(r, linear, K3_PARAM_WEIGHT_G_IDX, K3_TEN10, "the group of every column, equally many in each",
                    "an index of another length, out of range, or uneven");
  }
  bool symmetric = !packed || (linear->says->group && linear->says->group->weights.symmetric);
  if (zeros && symmetric) {
    uint64_t nbytes = zeros->end - zeros->begin, from = 0;
    unsigned char buffer[4096];
    bool all_zero = true;
    for (; all_zero && from < nbytes; from += sizeof buffer) {
      size_t n = nbytes - from < sizeof buffer ? (size_t)(nbytes - from) : sizeof buffer;
      K3_TRY(k3_ckpt_read(ckpt, linear->tensors[K3_PARAM_WEIGHT_ZERO_POINT], from, buffer, n, err));
      for (size_t i = 0; i < n; i++)
        all_zero &= buffer[i] == 0;
    }
    if (!all_zero)
      report_tensor(r, linear, K3_PARAM_WEIGHT_ZERO_POINT, K3_TEN17, "no zero points, or zeros", "zero points in a symmetric scheme");
  }
  return K3_OK;
}

static enum k3_status report_one(const struct report *r, size_t i, const struct job *job, struct k3_error *err) {
  struct k3_linear *linear = &job->plan->linears.items[i];
  const struct seen *seen = &job->seen[i - job->first];
  const struct k3_scale_facts *facts = &job->facts[i];
  if (linear->is_plain || !linear->is_sound)
    return K3_OK;
  enum k3_dtype dtype = (enum k3_dtype)k3_linear_tensor(r->plan, linear, k3_linear_scale(linear))->dtype;
  if (seen->all_ones)
    report_tensor(r, linear, k3_linear_scale(linear), K3_SCL07, "scales that were written", "every byte is 0xFF");
  else
    report_tally(r, linear, K3_SCL01, &seen->nan, seen->n, "finite scales", "are NaN");
  if (k3_dtype_bits(dtype) == 8)
    report_bytes(r, linear, seen);
  else
    report_floats(r, linear, seen);
  if (facts->has_second)
    report_scalar(r, linear, k3_linear_second(linear), facts->second);
  if (facts->has_input)
    report_scalar(r, linear, k3_linear_input(linear), facts->input);
  if (linear->scheme.scheme == K3_SCHEME_NVFP4 || (k3_dtype_bits(dtype) > 8 && linear->scheme.scheme != K3_SCHEME_INT_PACKED))
    report_direction(r, linear, facts);
  return check_integers(r, linear, err);
}

// SCL09, but for modules that share their second scale: siblings cannot all be tight. SCL18: files of the "4/6" recipe, whose largest block scale is
// 256 everywhere.
static enum k3_status report_tightness(const struct report *r, const struct k3_scale_facts *facts, struct k3_error *err) {
  const struct k3_linears *linears = &r->plan->linears;
  const struct k3_linear *first = NULL;
  uint64_t n = 0, n_256 = 0;
  float *seconds = k3_calloc(linears->n_items, sizeof *seconds, err);
  if (!seconds)
    return K3_NO_MEMORY;
  for (size_t i = 0; i < linears->n_items; i++) {
    const struct k3_linear *linear = &linears->items[i];
    if (linear->scheme.scheme != K3_SCHEME_NVFP4 || !facts[i].read || linear->is_plain)
      continue;
    first = first ? first : linear;
    n_256 += facts[i].max_scale == 256.0f;
    seconds[n++] = facts[i].second;
  }
  if (n > 1)
    qsort(seconds, n, sizeof *seconds, compare_floats);
  for (size_t i = 0; i < linears->n_items; i++) {
    const struct k3_linear *linear = &linears->items[i];
    const struct k3_scale_facts *f = &facts[i];
    if (linear->scheme.scheme != K3_SCHEME_NVFP4 || !f->read || linear->is_plain || f->max_scale == 0 || f->max_scale >= 224)
      continue;
    const float *at = bsearch(&f->second, seconds, n, sizeof *seconds, compare_floats);
    bool shared = (at > seconds && at[-1] == f->second) || (at + 1 < seconds + n && at[1] == f->second);
    if (!shared)
      report_tensor(r, linear, k3_linear_second(linear), K3_SCL09, "a largest block scale of at least 224",
                    "the largest block scale is %g: the second scale was made for larger weights", (double)f->max_scale);
  }
  k3_free(seconds);
  if (n >= 2 && n_256 == n)
    report_tensor(r, first, k3_linear_scale(first), K3_SCL18, "block scales up to 448",
                  "the largest block scale is 256 in all %llu modules (a 4/6 recipe)", (ull)n);
  return K3_OK;
}

// SCL16 and NaN: the scales of the KV cache, which belong to no linear layer.
static enum k3_status check_kv(const struct report *r, struct k3_error *err) {
  const struct k3_ckpt *ckpt = r->plan->ckpt;
  uint64_t n = 0, n_ones = 0, first = 0;
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    enum k3_dtype dtype = (enum k3_dtype)tensor->dtype;
    size_t stem;
    uint64_t n_elems = k3_st_n_elems(tensor);
    if (!k3_kv_scale_of(tensor->name, tensor->name_nbytes, &stem) || n_elems > 4096 ||
        (dtype != K3_DTYPE_F32 && dtype != K3_DTYPE_BF16 && dtype != K3_DTYPE_F16))
      continue;
    unsigned char bytes[4 * 4096];
    K3_TRY(k3_ckpt_read(ckpt, t, 0, bytes, tensor->end - tensor->begin, err));
    bool nan = false, not_positive = false, ones = true;
    for (uint64_t i = 0; i < n_elems; i++) {
      float value = k3_load_float(dtype, bytes, i);
      nan |= isnan(value);
      not_positive |= value <= 0 || isinf(value);
      ones &= value == 1.0f;
    }
    if (nan || not_positive)
      k3_rules_report(r->findings, r->engine, nan ? K3_SCL01 : K3_SCL16, k3_ckpt_file_of(ckpt, t)->path, tensor->name, "a positive finite number",
                      nan ? "NaN" : "a scale of the KV cache that is not positive and finite");
    if (n++ == 0)
      first = t;
    n_ones += ones;
  }
  if (n > 0 && n_ones == n)
    k3_rules_report(r->findings, r->engine, K3_SCL16, k3_ckpt_file_of(ckpt, first)->path, k3_ckpt_tensor(ckpt, first)->name, "calibrated scales",
                    "all %llu scales of the KV cache are exactly 1: not calibrated", (ull)n);
  return K3_OK;
}

enum k3_status k3_rules_scales(const struct k3_plan *plan, enum k3_judge engine, int n_threads, struct k3_scale_facts *facts,
                               struct k3_findings *findings, struct k3_error *err) {
  struct job job = {plan, engine, facts, NULL, 0};
  struct report report = {plan, engine, findings};
  K3_TRY(check_kv(&report, err));
  if (plan->linears.n_quantised == 0)
    return K3_OK;
  enum k3_status status = K3_NO_MEMORY;
  struct k3_pool *pool = NULL;
  job.seen = k3_calloc(BATCH, sizeof *job.seen, err);
  if (!job.seen || !(pool = k3_pool_create(n_threads, err)))
    goto out;
  for (; job.first < plan->linears.n_items; job.first += BATCH) {
    size_t n = plan->linears.n_items - job.first < BATCH ? plan->linears.n_items - job.first : BATCH;
    K3_TRY_GOTO(status, out, k3_pool_run(pool, n, read_one, &job, err));
    for (size_t i = job.first; i < job.first + n; i++)
      K3_TRY_GOTO(status, out, report_one(&report, i, &job, err));
  }
  status = report_tightness(&report, facts, err);
out:
  k3_pool_free(pool);
  k3_free(job.seen);
  return status;
}
