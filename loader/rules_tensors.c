// How each module is stored, and what is wrong with its family of tensors (TEN). Dtype and geometry decide; the config settles what they leave open.
#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/name_set.h"
#include "loader/linears_parts.h"

typedef unsigned long long ull;

struct look {
  const struct k3_plan *plan;
  struct k3_linear *linear;
  struct k3_findings *findings;
  const struct k3_st_tensor *weight, *scale;
  const struct k3_quant_args *args;  // the config's, or NULL
};

static const char *path_of(const struct look *look, const struct k3_st_tensor *tensor) {
  const struct k3_ckpt *ckpt = k3_linear_ckpt(look->plan, look->linear);
  for (int p = 0; p < K3_PARAM_KNOWN_COUNT; p++) {
    uint32_t t = look->linear->tensors[p];
    if (t != K3_LINEAR_ABSENT && k3_ckpt_tensor(ckpt, t) == tensor)
      return k3_ckpt_file_of(ckpt, t)->path;
  }
  return ckpt->source;
}

#define REPORT(look, rule, subject, allowed, ...)                                                              \
  do {                                                                                                         \
    k3_findings_report((look)->findings, rule, path_of(look, subject), (subject)->name, allowed, __VA_ARGS__); \
    (look)->linear->is_sound = false;                                                                          \
  } while (0)

static const char *shape_text(const struct k3_st_tensor *tensor, char *dst, size_t capacity) {
  size_t n = (size_t)snprintf(dst, capacity, "[");
  for (unsigned i = 0; i < tensor->rank && n < capacity; i++)
    n += (size_t)snprintf(dst + n, capacity - n, "%s%llu", i ? ", " : "", (ull)tensor->shape[i]);
  if (n < capacity)
    snprintf(dst + n, capacity - n, "]");
  return dst;
}

static bool is_wide(unsigned dtype) {
  return dtype == K3_DTYPE_F32 || dtype == K3_DTYPE_BF16 || dtype == K3_DTYPE_F16;
}

static bool is_e8m0(unsigned dtype) {
  return dtype == K3_DTYPE_U8 || dtype == K3_DTYPE_F8_E8M0;
}

// A companion that must be there and is not; silent when the index promised it, since that has been reported.
static void report_missing(const struct look *look, const char *param, const char *why) {
  char name[1024];
  snprintf(name, sizeof name, "%.*s.%s", (int)look->linear->name_nbytes, look->linear->name, param);
  look->linear->is_sound = false;
  if (!k3_ckpt_promised(k3_linear_ckpt(look->plan, look->linear), name))
    k3_findings_report(look->findings, K3_TEN01, path_of(look, look->weight), name, "every companion of a quantised weight", "missing: %s", why);
}

// Rows and columns of a scale tensor in its normal form: [], [1], [1, 1] are 1 x 1; [N] is N x 1; [r, 1, c, 1] is r x c. False: no such form.
static bool grid_of(const struct k3_st_tensor *scale, uint64_t *rows, uint64_t *cols) {
  *rows = *cols = 1;
  if (k3_st_n_elems(scale) == 1)
    return true;
  if (scale->rank == 1)
    *rows = scale->shape[0];
  else if (scale->rank == 2 || (scale->rank == 4 && scale->shape[1] == 1 && scale->shape[3] == 1)) {
    *rows = scale->shape[0];
    *cols = scale->shape[scale->rank / 2];
  } else
    return false;
  return true;
}

// Whether the module before or behind this one has the scale that is missing here as weight_scale_inv: both FP8 and MXFP8 files may spell it so.
static bool neighbour_spells_inv(const struct look *look) {
  const struct k3_linear *first = look->plan->linears.items, *last = first + look->plan->linears.n_items - 1;
  return (look->linear > first && look->linear[-1].tensors[K3_PARAM_WEIGHT_SCALE_INV] != K3_LINEAR_ABSENT) ||
         (look->linear < last && look->linear[1].tensors[K3_PARAM_WEIGHT_SCALE_INV] != K3_LINEAR_ABSENT);
}

static uint64_t rounded(uint64_t value, uint64_t multiple) {
  return k3_ceil_div_u64(value, multiple) * multiple;
}

// Holds the scale tensor against the grid of the scheme.
static void check_grid(const struct look *look) {
  const struct k3_quant_scheme *scheme = &look->linear->scheme;
  uint64_t n_rows = look->linear->n_rows, n_cols = look->linear->n_cols, rows, cols, wanted_rows, wanted_cols;
  char found[160], allowed[160];
  k3_quant_scale_shape(scheme, n_rows, n_cols, &wanted_rows, &wanted_cols);
  bool blocks = scheme->scheme == K3_SCHEME_FP8_BLOCK;
  bool readable = grid_of(look->scale, &rows, &cols);
  // Only channel scales are written as a list, and only block grids in four dimensions.
  if (look->scale->rank == 1 && k3_st_n_elems(look->scale) != 1 && wanted_cols != 1)
    readable = false;
  if (look->scale->rank == 4 && !blocks)
    readable = false;
  if (readable && rows == wanted_rows && cols == wanted_cols)
    return;
  shape_text(look->scale, found, sizeof found);
  snprintf(allowed, sizeof allowed, "[%llu, %llu] for %s of [%llu, %llu]", (ull)wanted_rows, (ull)wanted_cols, k3_scheme_name(scheme->scheme),
           (ull)n_rows, (ull)n_cols);
  if (!readable) {
    REPORT(look, K3_TEN06, look->scale, allowed, "shape %s", found);
    return;
  }
  if (rows == wanted_cols && cols == wanted_rows) {
    REPORT(look, K3_TEN06, look->scale, allowed, "shape %s: transposed", found);
    return;
  }
  bool floor_rows = blocks && n_rows % scheme->block_rows != 0 && rows == n_rows / scheme->block_rows;
  bool floor_cols = blocks && n_cols % scheme->block_cols != 0 && cols == n_cols / scheme->block_cols;
  if ((floor_rows || rows == wanted_rows) && (floor_cols || cols == wanted_cols)) {
    REPORT(look, K3_TEN13, look->scale, allowed, "shape %s: the edge blocks have no scale (%llu %s, rounded down)", found,
           (ull)(floor_rows ? n_rows : n_cols), floor_rows ? "rows" : "columns");
    return;
  }
  bool padded = rows == rounded(wanted_rows, 128) && cols == rounded(wanted_cols, 4);
  const char *hint = padded                                           ? ": padded to tiles of 128 x 4, as after a swizzle"
                     : rows == wanted_rows && 2 * cols == wanted_cols ? ": half as many, the groups are twice as long"
                     : rows == wanted_rows && cols == 2 * wanted_cols ? ": twice as many, the groups are half as long"
                                                                      : "";
  if (rows != wanted_rows)
    REPORT(look, K3_TEN06, look->scale, allowed, "shape %s%s", found, hint);
  if (cols != wanted_cols && !(padded && rows != wanted_rows))
    REPORT(look, K3_TEN05, look->scale, allowed, "shape %s%s", found, hint);
}

static void check_whole_groups(const struct look *look) {
  const struct k3_quant_scheme *scheme = &look->linear->scheme;
  if (scheme->block_cols > 0 && look->linear->n_cols % scheme->block_cols != 0)
    REPORT(look, K3_TEN07, look->weight, "columns that are a multiple of the group", "%llu columns in groups of %u", (ull)look->linear->n_cols,
           scheme->block_cols);
}

// A second or input scale: one element, F32 by custom.
static void check_scalar(const struct look *look, enum k3_param param) {
  const struct k3_st_tensor *t = k3_linear_tensor(look->plan, look->linear, param);
  char found[160];
  if (!t)
    return;
  if (!is_wide(t->dtype))
    REPORT(look, K3_TEN04, t, "F32", "a scalar scale of dtype %s", k3_dtype_name((enum k3_dtype)t->dtype));
  else if (k3_st_n_elems(t) != 1)
    REPORT(look, K3_TEN06, t, "[] or [1]", "a scalar scale of shape %s", shape_text(t, found, sizeof found));
  else if (t->rank > 1 || t->dtype != K3_DTYPE_F32)
    k3_findings_report(look->findings, K3_TEN12, path_of(look, t), t->name, "F32 of shape [] or [1]", "%s of shape %s",
                       k3_dtype_name((enum k3_dtype)t->dtype), shape_text(t, found, sizeof found));
}

static bool config_fits(enum k3_scheme scheme, const struct k3_quant_args *a) {
  switch (scheme) {
    case K3_SCHEME_NVFP4: return a->is_float && a->num_bits == 4 && a->strategy == K3_STRATEGY_TENSOR_GROUP;
    case K3_SCHEME_MXFP4: return a->is_float && a->num_bits == 4 && a->strategy == K3_STRATEGY_GROUP && a->group_size == 32;
    case K3_SCHEME_MXFP8: return a->is_float && a->num_bits == 8 && a->strategy == K3_STRATEGY_GROUP && a->group_size == 32;
    case K3_SCHEME_INT_PACKED: return !a->is_float;
    default: return a->is_float && a->num_bits == 8;
  }
}

static void check_against_config(const struct look *look) {
  char said[160];
  if (look->args && !config_fits(look->linear->scheme.scheme, look->args))
    REPORT(look, K3_CFG11, look->weight, k3_quant_args_text(look->args, said, sizeof said), "the tensors hold %s, the config says something else",
           k3_scheme_name(look->linear->scheme.scheme));
}

// ---- the families ----

static void classify_fp4(const struct look *look) {
  struct k3_linear *linear = look->linear;
  bool as_nvfp4 = look->scale ? look->scale->dtype == K3_DTYPE_F8_E4M3
                              : k3_linear_second(linear) != K3_PARAM_KNOWN_COUNT || (look->args && look->args->strategy == K3_STRATEGY_TENSOR_GROUP);
  linear->n_cols *= 2;
  linear->scheme = k3_quant_scheme_default(as_nvfp4 ? K3_SCHEME_NVFP4 : K3_SCHEME_MXFP4);
  if (!look->scale) {
    report_missing(look, "weight_scale", "block scales of packed FP4");
  } else if (!as_nvfp4 && !is_e8m0(look->scale->dtype)) {
    REPORT(look, K3_TEN04, look->scale, "F8_E4M3 (NVFP4), U8 or F8_E8M0 (MXFP4)", "block scales of dtype %s beside packed FP4",
           k3_dtype_name((enum k3_dtype)look->scale->dtype));
    return;
  } else {
    linear->scheme.scale_dtype = (enum k3_dtype)look->scale->dtype;
    check_grid(look);
  }
  check_whole_groups(look);
  enum k3_param second = k3_linear_second(linear);
  linear->scheme.second = !as_nvfp4 ? K3_SECOND_NONE : second == K3_PARAM_WEIGHT_SCALE_2 ? K3_SECOND_MULTIPLY : K3_SECOND_DIVIDE;
  if (as_nvfp4 && second == K3_PARAM_KNOWN_COUNT)
    report_missing(look, linear->tensors[K3_PARAM_WEIGHT_PACKED] != K3_LINEAR_ABSENT ? "weight_global_scale" : "weight_scale_2",
                   "the second scale of NVFP4");
  if (!as_nvfp4 && second != K3_PARAM_KNOWN_COUNT)
    REPORT(look, K3_TEN02, k3_linear_tensor(look->plan, linear, second), "no second scale with MXFP4", "a second scale beside E8M0 block scales");
  check_against_config(look);
}

// FP8 with float scales: by the config's strategy, else by the shape.
static struct k3_quant_scheme fp8_scheme(const struct look *look) {
  const struct k3_quant_args *args = look->args && look->args->is_float && look->args->num_bits == 8 ? look->args : NULL;
  uint64_t rows, cols, n_rows = look->linear->n_rows, n_cols = look->linear->n_cols;
  bool inverse = k3_linear_scale(look->linear) == K3_PARAM_WEIGHT_SCALE_INV, readable = grid_of(look->scale, &rows, &cols);
  struct k3_quant_scheme scheme = k3_quant_scheme_default(K3_SCHEME_FP8_TENSOR);
  if (args) {
    scheme = k3_quant_scheme_default(args->strategy == K3_STRATEGY_TENSOR  ? K3_SCHEME_FP8_TENSOR
                                     : args->strategy == K3_STRATEGY_BLOCK ? K3_SCHEME_FP8_BLOCK
                                     : args->strategy == K3_STRATEGY_GROUP ? K3_SCHEME_FP8_GROUP
                                                                           : K3_SCHEME_FP8_CHANNEL);
    if (args->strategy == K3_STRATEGY_BLOCK) {
      scheme.block_rows = args->block_rows;
      scheme.block_cols = args->block_cols;
    } else if (args->strategy == K3_STRATEGY_GROUP) {
      scheme.block_cols = args->group_size;
    }
    return scheme;
  }
  bool one = k3_st_n_elems(look->scale) == 1, grid = readable && rows == k3_ceil_div_u64(n_rows, 128) && cols == k3_ceil_div_u64(n_cols, 128);
  if (inverse || look->scale->rank == 4 || (grid && !one))
    return k3_quant_scheme_default(K3_SCHEME_FP8_BLOCK);
  if (one)
    return scheme;
  if (readable && rows == n_rows && cols > 1 && n_cols % cols == 0) {
    scheme = k3_quant_scheme_default(K3_SCHEME_FP8_GROUP);
    scheme.block_cols = (uint32_t)(n_cols / cols);
    return scheme;
  }
  return k3_quant_scheme_default(readable && cols > 1 && rows != n_rows ? K3_SCHEME_FP8_BLOCK : K3_SCHEME_FP8_CHANNEL);
}

static void classify_fp8(const struct look *look) {
  struct k3_linear *linear = look->linear;
  uint64_t rows, cols;
  linear->scheme = k3_quant_scheme_default(K3_SCHEME_FP8_TENSOR);
  if (!look->scale) {
    bool block = look->args && look->args->strategy == K3_STRATEGY_BLOCK && look->plan->linears.config->dialect == K3_DIALECT_FP8;
    report_missing(look, block || neighbour_spells_inv(look) ? "weight_scale_inv" : "weight_scale", "an FP8 weight means nothing without its scale");
    return;
  }
  bool by_block = look->args && look->args->strategy == K3_STRATEGY_BLOCK;
  bool by_row = look->scale->rank == 2 && look->scale->shape[0] == linear->n_rows && look->scale->shape[1] == k3_ceil_div_u64(linear->n_cols, 32);
  bool named_grid = k3_linear_scale(linear) == K3_PARAM_WEIGHT_SCALE_INV && !(look->args && look->args->group_size == 32);
  if (is_e8m0(look->scale->dtype) && !by_block && (by_row || !named_grid)) {
    linear->scheme = k3_quant_scheme_default(K3_SCHEME_MXFP8);
    linear->scheme.scale_dtype = (enum k3_dtype)look->scale->dtype;
    check_grid(look);
    check_whole_groups(look);
    check_against_config(look);
    return;
  }
  if (!is_wide(look->scale->dtype) && !is_e8m0(look->scale->dtype)) {
    REPORT(look, K3_TEN04, look->scale, "F32, BF16 or F16; U8 or F8_E8M0 (MXFP8)", "scales of dtype %s beside an FP8 weight",
           k3_dtype_name((enum k3_dtype)look->scale->dtype));
    return;
  }
  if (look->args && look->args->e8m0 && look->args->group_size == 32 && is_wide(look->scale->dtype)) {
    REPORT(look, K3_TEN04, look->scale, "U8 or F8_E8M0", "the config says E8M0 scales, these are %s",
           k3_dtype_name((enum k3_dtype)look->scale->dtype));
    return;
  }
  linear->scheme = fp8_scheme(look);
  linear->scheme.scale_dtype = (enum k3_dtype)look->scale->dtype;
  // Another geometry than the config's, whole in itself: what a tool leaves behind that converts scales and not the config.
  bool readable = grid_of(look->scale, &rows, &cols);
  uint64_t wanted_rows, wanted_cols;
  k3_quant_scale_shape(&linear->scheme, linear->n_rows, linear->n_cols, &wanted_rows, &wanted_cols);
  if (by_block && readable && (rows != wanted_rows || cols != wanted_cols) && cols == 1 && (rows == 1 || rows == linear->n_rows)) {
    char found[160], said[160];
    REPORT(look, K3_CFG11, look->scale, k3_quant_args_text(look->args, said, sizeof said), "scales of shape %s: %s, the config says blocks",
           shape_text(look->scale, found, sizeof found), rows == 1 ? "per tensor" : "per channel");
    return;
  }
  check_grid(look);
  if (linear->scheme.scheme == K3_SCHEME_FP8_GROUP)
    check_whole_groups(look);
  if (linear->scheme.scheme == K3_SCHEME_FP8_TENSOR && look->scale->rank > 1 && linear->is_sound) {
    char found[160];
    k3_findings_report(look->findings, K3_TEN12, path_of(look, look->scale), look->scale->name, "[] or [1]", "a scalar scale of shape %s",
                       shape_text(look->scale, found, sizeof found));
  }
  check_against_config(look);
}

static void classify_int(const struct look *look) {
  struct k3_linear *linear = look->linear;
  const struct k3_quant_args *args = look->args && !look->args->is_float ? look->args : NULL;
  uint64_t n_words = linear->n_cols, rows, cols;
  linear->scheme = k3_quant_scheme_default(K3_SCHEME_INT_PACKED);
  linear->n_cols = 0;
  if (!look->scale) {
    report_missing(look, "weight_scale", "the scales of packed integers");
    return;
  }
  if (!is_wide(look->scale->dtype)) {
    REPORT(look, K3_TEN04, look->scale, "BF16, F16 or F32", "scales of dtype %s beside packed integers",
           k3_dtype_name((enum k3_dtype)look->scale->dtype));
    return;
  }
  linear->scheme.scale_dtype = (enum k3_dtype)look->scale->dtype;
  if (!grid_of(look->scale, &rows, &cols) || look->scale->rank == 4 || (rows != linear->n_rows && k3_st_n_elems(look->scale) != 1)) {
    char found[160];
    REPORT(look, K3_TEN06, look->scale, "a row of scales for every row of weights", "shape %s", shape_text(look->scale, found, sizeof found));
    return;
  }
  if (!args) {
    k3_findings_report(look->findings, K3_TEN09, path_of(look, look->weight), look->weight->name, "num_bits in a quantization config",
                       "%llu words and %llu scales a row fix only the product of bits and group", (ull)n_words, (ull)cols);
    return;
  }
  linear->scheme.n_bits = args->num_bits;
  linear->scheme.block_cols = args->strategy == K3_STRATEGY_GROUP ? args->group_size : 0;
  // With 3, 5, 6 or 7 bits the last word may be partly filled; then groups tell the columns, else weight_shape does.
  if (32 % args->num_bits == 0)
    linear->n_cols = n_words * (32 / args->num_bits);
  else if (linear->scheme.block_cols > 0)
    linear->n_cols = cols * linear->scheme.block_cols;
  if (linear->n_cols == 0)
    return;
  uint64_t whole = 4 * k3_ceil_div_u64(linear->n_cols, 32u / args->num_bits);
  linear->scheme.words_hold_whole =
      32 % args->num_bits != 0 && k3_quant_row_nbytes(&linear->scheme, linear->n_cols) != 4 * n_words && whole == 4 * n_words;
  if (k3_quant_row_nbytes(&linear->scheme, linear->n_cols) != 4 * n_words)
    REPORT(look, K3_TEN07, look->weight, "words that hold a row of codes", "%llu words for %llu codes of %u bits", (ull)n_words, (ull)linear->n_cols,
           args->num_bits);
  uint64_t wanted = linear->scheme.block_cols ? k3_ceil_div_u64(linear->n_cols, linear->scheme.block_cols) : 1;
  if (cols != wanted) {
    char found[160], allowed[160];
    snprintf(allowed, sizeof allowed, "%llu columns: %llu codes in groups of %u", (ull)wanted, (ull)linear->n_cols, linear->scheme.block_cols);
    REPORT(look, K3_TEN05, look->scale, allowed, "shape %s", shape_text(look->scale, found, sizeof found));
  }
}

static void classify_plain(const struct look *look) {
  struct k3_linear *linear = look->linear;
  linear->scheme = k3_quant_scheme_default(look->weight->dtype == K3_DTYPE_F16   ? K3_SCHEME_F16
                                           : look->weight->dtype == K3_DTYPE_F32 ? K3_SCHEME_F32
                                                                                 : K3_SCHEME_BF16);
  for (int p = K3_PARAM_WEIGHT_SCALE; p < K3_PARAM_BIAS; p++) {
    const struct k3_st_tensor *t = k3_linear_tensor(look->plan, linear, (enum k3_param)p);
    if (t)
      REPORT(look, K3_TEN02, t, "scales beside quantised weights only", "a companion beside a plain %s weight",
             k3_dtype_name((enum k3_dtype)look->weight->dtype));
  }
}

// Norms and look-up tables are read element by element, and no engine expects scales there.
static void check_never(const struct look *look) {
  const struct k3_linear *linear = look->linear;
  char text[1024];
  k3_linear_text(linear, text, sizeof text);
  size_t n = strlen(text);
  bool norm = n >= 4 && strcmp(text + n - 4, "norm") == 0;
  if (linear->module == UINT16_MAX && (look->weight->rank < 2 || norm || (!linear->is_linear && look->weight->rank == 2)))
    REPORT(look, K3_TEN15, look->weight, "a plain weight", "a quantised %s",
           look->weight->rank < 2 || norm ? "norm or vector" : "look-up table or router");
}

void k3_linear_classify(const struct k3_plan *plan, struct k3_linear *linear, struct k3_findings *findings) {
  enum k3_param weight_param = k3_linear_weight(linear), second = k3_linear_second(linear);
  struct look look = {.plan = plan,
                      .linear = linear,
                      .findings = findings,
                      .weight = k3_linear_tensor(plan, linear, weight_param),
                      .scale = k3_linear_tensor(plan, linear, k3_linear_scale(linear)),
                      .args = linear->says->group ? &linear->says->group->weights : NULL};
  const struct k3_st_tensor *w = look.weight;
  linear->n_rows = w->rank > 0 ? w->shape[0] : 1;
  linear->n_cols = w->rank > 1 ? w->shape[w->rank - 1u] : 1;
  linear->is_plain = false;
  if (linear->tensors[K3_PARAM_WEIGHT] != K3_LINEAR_ABSENT && linear->tensors[K3_PARAM_WEIGHT_PACKED] != K3_LINEAR_ABSENT)
    REPORT(&look, K3_TEN03, w, "one of the two", "both weight and weight_packed");
  if (linear->tensors[K3_PARAM_WEIGHT_GLOBAL_SCALE] != K3_LINEAR_ABSENT && linear->tensors[K3_PARAM_WEIGHT_SCALE_2] != K3_LINEAR_ABSENT)
    REPORT(&look, K3_TEN03, k3_linear_tensor(plan, linear, second), "one of the two", "both weight_global_scale and weight_scale_2");
  if (linear->tensors[K3_PARAM_WEIGHT_SCALE] != K3_LINEAR_ABSENT && linear->tensors[K3_PARAM_WEIGHT_SCALE_INV] != K3_LINEAR_ABSENT)
    REPORT(&look, K3_TEN03, look.scale, "one of the two", "both weight_scale and weight_scale_inv");
  if (w->rank > 2 && !is_wide(w->dtype)) {
    linear->scheme = k3_quant_scheme_default(K3_SCHEME_FP8_TENSOR);
    REPORT(&look, K3_CFG21, w, "one matrix of two dimensions per tensor", "a stack of quantised matrices in one tensor is not supported");
    return;
  }
  switch (w->dtype) {
    case K3_DTYPE_BF16:
    case K3_DTYPE_F16:
    case K3_DTYPE_F32:
      linear->is_plain = true;
      classify_plain(&look);
      return;
    case K3_DTYPE_U8: classify_fp4(&look); break;
    case K3_DTYPE_F8_E4M3: classify_fp8(&look); break;
    case K3_DTYPE_I32: classify_int(&look); break;
    default:
      if (linear->module == UINT16_MAX || linear->tensors[K3_PARAM_WEIGHT_SCALE] != K3_LINEAR_ABSENT)
        REPORT(&look, K3_TEN04, w, "F8_E4M3, U8 (packed FP4) or I32 (packed integers)", "a quantised weight of dtype %s",
               k3_dtype_name((enum k3_dtype)w->dtype));
      linear->is_sound = false;
      break;
  }
  if (w->dtype != K3_DTYPE_U8 && second != K3_PARAM_KNOWN_COUNT)
    REPORT(&look, K3_TEN02, k3_linear_tensor(plan, linear, second), "a second scale with NVFP4 only", "a second scale beside %s",
           k3_scheme_name(linear->scheme.scheme));
  else
    check_scalar(&look, second);
  check_scalar(&look, K3_PARAM_INPUT_GLOBAL_SCALE);
  check_scalar(&look, K3_PARAM_INPUT_SCALE);
  check_never(&look);
}

// ---- input scales ----

// Experts of one layer and projection: the module's name with its expert number taken out.
static size_t expert_pattern(const struct k3_linear *linear, char *dst, size_t capacity) {
  char text[1024];
  k3_linear_text(linear, text, sizeof text);
  char *at = strstr(text, ".experts.");
  if (!at)
    return 0;
  at += strlen(".experts.");
  size_t digits = strspn(at, "0123456789");
  if (digits == 0)
    return 0;
  int n = snprintf(dst, capacity, "%.*s*%s", (int)(at - text), text, at + digits);
  return n > 0 && (size_t)n < capacity ? (size_t)n : 0;
}

static bool needs_input_scale(const struct k3_linear *linear) {
  const struct k3_quant_args *in = linear->says->group ? &linear->says->group->inputs : NULL;
  return !linear->is_plain && in && in->num_bits > 0 && !in->dynamic && !(in->strategy == K3_STRATEGY_TOKEN);
}

struct experts {
  uint64_t hash;
  uint64_t n_with, n_without, first_without;
};

static void report_input(const struct k3_plan *plan, const struct k3_linear *linear, enum k3_rule rule, struct k3_findings *findings, uint64_t n_with,
                         uint64_t n_without) {
  char name[1100], module[1024];
  bool packed = linear->tensors[K3_PARAM_WEIGHT_PACKED] != K3_LINEAR_ABSENT;
  k3_linear_text(linear, module, sizeof module);
  snprintf(name, sizeof name, "%s.%s", module, packed ? "input_global_scale" : "input_scale");
  const struct k3_ckpt *ckpt = k3_linear_ckpt(plan, linear);
  if (k3_ckpt_promised(ckpt, name))
    return;
  const char *path = k3_ckpt_file_of(ckpt, linear->tensors[k3_linear_weight(linear)])->path;
  if (rule == K3_SCL17)
    k3_findings_report(findings, rule, path, name, "an input scale for every expert", "missing here and for %llu experts in all, present for %llu",
                       (ull)n_without, (ull)n_with);
  else
    k3_findings_report(findings, rule, path, name, "input scales where the config's activations have stored ones",
                       "missing: the activations of this module are quantised with a stored scale");
}

enum k3_status k3_linears_check_inputs(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_linears *linears = &plan->linears;
  struct experts *table = NULL;
  size_t n_slots = 64;
  while (n_slots < 2 * linears->n_items)
    n_slots *= 2;
  uint64_t n_inputs = 0;
  for (size_t i = 0; i < linears->n_items; i++)
    n_inputs += k3_linear_input(&linears->items[i]) != K3_PARAM_KNOWN_COUNT;
  if (n_inputs > 0 && !(table = k3_calloc(n_slots, sizeof *table, err)))
    return K3_NO_MEMORY;
  char pattern[1100];
  for (int pass = 0; pass < 2; pass++) {
    for (size_t i = 0; i < linears->n_items; i++) {
      const struct k3_linear *linear = &linears->items[i];
      bool has = k3_linear_input(linear) != K3_PARAM_KNOWN_COUNT;
      size_t n = table && !linear->is_plain ? expert_pattern(linear, pattern, sizeof pattern) : 0;
      struct experts *group = NULL;
      if (n > 0) {
        uint64_t hash = k3_name_hash(pattern, n) | 1;
        size_t slot = hash & (n_slots - 1);
        while (table[slot].hash != 0 && table[slot].hash != hash)
          slot = (slot + 1) & (n_slots - 1);
        group = &table[slot];
        group->hash = hash;
      }
      if (pass == 0 && group) {
        if (!has && group->n_without++ == 0)
          group->first_without = i;
        group->n_with += has;
      }
      if (pass == 0 || has)
        continue;
      if (group && group->n_with > 0) {
        if (group->first_without == i)
          report_input(plan, linear, K3_SCL17, findings, group->n_with, group->n_without);
      } else if (needs_input_scale(linear)) {
        report_input(plan, linear, K3_TEN01, findings, 0, 0);
      }
    }
  }
  k3_free(table);
  return K3_OK;
}
