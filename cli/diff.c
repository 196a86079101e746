#include "loader/diff.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "A B",
    .n_min = 2,
    .n_max = 2,
    .about =
        "Compares two checkpoints, two images, or a checkpoint and an image, tensor by tensor: which differ, the first differing element, the\n"
        "largest error, cosine and signal-to-noise ratio of B against A. A checkpoint and an image are compared under the checkpoint's names: the\n"
        "image knows which rows of which stacked tensor each tensor became. Answers 1 when something differs.",
    .examples =
        "  k3pack diff old/ new/                       two checkpoints, bit by bit\n"
        "  k3pack diff model/ model.k3p                a checkpoint and its image\n"
        "  k3pack diff a.k3p b.k3p --tolerance 1e-3    differences up to 0.001 are fine",
};

static const char *const kind_names[] = {"only in A", "only in B", "shape", "dtype", "values", "model"};

// "[2112, 64]" of a shape, or of a position in it.
static char *shape_text(char *dst, size_t capacity, const uint64_t *shape, unsigned rank) {
  size_t n = (size_t)snprintf(dst, capacity, "[");
  for (unsigned i = 0; i < rank && n < capacity; i++)
    n += (size_t)snprintf(dst + n, capacity - n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
  if (n < capacity)
    snprintf(dst + n, capacity - n, "]");
  return dst;
}

static void position(uint64_t at, const uint64_t *shape, unsigned rank, uint64_t *index) {
  for (unsigned i = rank; i-- > 0; at /= shape[i])
    index[i] = at % shape[i];
}

static void print_values(const struct k3_diff_item *item) {
  char text[512];
  uint64_t index[K3_ST_MAX_RANK];
  if (!item->numeric) {
    printf("bytes differ");
    return;
  }
  if (item->n_different == 0) {
    printf("every value is equal");
    return;
  }
  position(item->first, item->shape, item->rank, index);
  printf("%llu of %llu elements differ, first %s: %.9g and %.9g", (unsigned long long)item->n_different, (unsigned long long)item->n_elems,
         shape_text(text, sizeof text, index, item->rank), item->first_a, item->first_b);
  if (item->first_a == item->first_b || isnan(item->first_a) || isnan(item->first_b))
    printf(" (bits 0x%llx and 0x%llx)", (unsigned long long)item->first_bits_a, (unsigned long long)item->first_bits_b);
  printf("; max error %.6g", item->max_error);
  if (item->max_error > 0) {
    position(item->max_at, item->shape, item->rank, index);
    printf(" at %s", shape_text(text, sizeof text, index, item->rank));
  }
  printf(", cosine %.9f, SNR %.2f dB", item->cosine, item->snr_db);
  if (item->n_not_number > 0)
    printf("; %llu are NaN or Inf on one side only", (unsigned long long)item->n_not_number);
}

static void print_item(const struct k3_diff_item *item) {
  char name[512], shape[512], other[512];
  k3_cli_name_text(name, item->name);
  shape_text(shape, sizeof shape, item->shape, item->rank);
  switch (item->kind) {
    case K3_DIFF_ONLY_A:
    case K3_DIFF_ONLY_B:
      printf("%s: only in %s (%s %s)", name, item->kind == K3_DIFF_ONLY_A ? "A" : "B", k3_dtype_name((item->a ? item->a : item->b)->dtype), shape);
      break;
    case K3_DIFF_SHAPE:
      printf("%s: %s %s and %s %s", name, k3_dtype_name(item->a->dtype), shape_text(shape, sizeof shape, item->a->shape, item->a->rank),
             k3_dtype_name(item->b->dtype), shape_text(other, sizeof other, item->b->shape, item->b->rank));
      break;
    case K3_DIFF_DTYPE:
      printf("%s: %s and %s %s: ", name, k3_dtype_name(item->a->dtype), k3_dtype_name(item->b->dtype), shape);
      print_values(item);
      break;
    case K3_DIFF_VALUES:
      printf("%s: %s %s: ", name, k3_dtype_name(item->a->dtype), shape);
      print_values(item);
      break;
    case K3_DIFF_MODEL: printf("the geometry of the model (key \"model\" of the manifests) differs"); break;
  }
  printf("%s\n", item->exceeds ? "" : " (within the tolerance)");
}

static void json_item(struct k3_jsonw *json, const struct k3_diff_item *item) {
  uint64_t index[K3_ST_MAX_RANK];
  k3_jsonw_begin_object(json, NULL);
  k3_jsonw_string(json, "name", item->name);
  k3_jsonw_string(json, "kind", kind_names[item->kind]);
  k3_jsonw_bool(json, "exceeds", item->exceeds);
  if (item->a)
    k3_jsonw_string(json, "dtype_a", k3_dtype_name(item->a->dtype));
  if (item->b)
    k3_jsonw_string(json, "dtype_b", k3_dtype_name(item->b->dtype));
  if (item->numeric) {
    k3_jsonw_u64(json, "elements", item->n_elems);
    k3_jsonw_u64(json, "different", item->n_different);
    if (item->n_different > 0) {
      position(item->first, item->shape, item->rank, index);
      k3_jsonw_begin_array(json, "first");
      for (unsigned i = 0; i < item->rank; i++)
        k3_jsonw_u64(json, NULL, index[i]);
      k3_jsonw_end_array(json);
      k3_jsonw_double(json, "first_a", item->first_a);
      k3_jsonw_double(json, "first_b", item->first_b);
    }
    k3_jsonw_double(json, "max_error", item->max_error);
    k3_jsonw_double(json, "cosine", item->cosine);
    k3_jsonw_double(json, "snr_db", item->snr_db);
    k3_jsonw_u64(json, "not_number_on_one_side", item->n_not_number);
  }
  k3_jsonw_end_object(json);
}

static int report(struct k3_cli *cli, const struct k3_diff_options *options, const struct k3_diff_result *result) {
  uint64_t n_exceeding = result->n_items - result->n_within;
  int exit_code = n_exceeding > 0 ? k3_status_exit_code(K3_DIFFERENT) : 0;
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "equal", n_exceeding == 0);
    k3_jsonw_string(&json, "names", result->by_source_name ? "source" : "own");
    if (options->has_tolerance)
      k3_jsonw_double(&json, "tolerance", options->tolerance);
    k3_jsonw_u64(&json, "tensors_a", result->n_a);
    k3_jsonw_u64(&json, "tensors_b", result->n_b);
    k3_jsonw_u64(&json, "equal_tensors", result->n_equal);
    k3_jsonw_u64(&json, "within_tolerance", result->n_within);
    k3_jsonw_begin_array(&json, "differences");
    for (size_t i = 0; i < result->n_items; i++)
      json_item(&json, &result->items[i]);
    k3_jsonw_end_array(&json);
    return k3_cli_json_end(cli, &json, exit_code);
  }
  if (cli->quiet)
    return exit_code;
  for (size_t i = 0; i < result->n_items; i++)
    if (result->items[i].exceeds || cli->verbose)
      print_item(&result->items[i]);
  if (result->by_source_name)
    k3_cli_detail(cli, "compared under the names of the checkpoint");
  printf("%s: %llu tensors in A, %llu in B; %llu equal to the bit",
         n_exceeding       ? "different"
         : result->n_items ? "within the tolerance"
                           : "equal",
         (unsigned long long)result->n_a, (unsigned long long)result->n_b, (unsigned long long)result->n_equal);
  if (options->has_tolerance)
    printf(", %llu within %.6g", (unsigned long long)result->n_within, options->tolerance);
  printf(", %llu different\n", (unsigned long long)n_exceeding);
  return exit_code;
}

int k3_cmd_diff(struct k3_cli *cli, int argc, char **argv) {
  struct k3_diff_options diff = {.progress = &cli->progress, .tolerance = (double)NAN};
  const struct k3_option options[] = {
      {"tolerance", 0, K3_OPT_REAL, "X", "absolute differences of at most X are no difference (default: every bit counts)", &diff.tolerance},
      {0},
  };
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  diff.has_tolerance = !isnan(diff.tolerance);
  if (diff.has_tolerance && diff.tolerance < 0)
    return k3_cli_usage(cli, "--tolerance takes a number from 0");
  diff.n_threads = cli->n_threads;
  struct k3_ckpt a = {0}, b = {0};
  struct k3_diff_result result = {0};
  struct k3_error err = {0};
  if (k3_ckpt_open(cli->operands[0], NULL, &a, NULL, &err) == K3_OK && k3_ckpt_open(cli->operands[1], NULL, &b, NULL, &err) == K3_OK &&
      k3_diff(&a, &b, &diff, &result, &err) == K3_OK)
    exit_code = report(cli, &diff, &result);
  else
    exit_code = k3_cli_fail(cli, &err);
  k3_diff_free(&result);
  k3_ckpt_close(&b);
  k3_ckpt_close(&a);
  return exit_code;
}
