// Quantised synthetic checkpoints hold the encoded values of their plain twin: decoded, they differ from it by what the scheme's rounding costs on
// normally distributed weights, and by no more.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "loader/check.h"
#include "loader/synth_parts.h"
#include "quant/decode.h"
#include "quant/stats.h"
#include "temp_folder.h"
#include "unit.h"

static void *whole_tensor(const struct k3_ckpt *ckpt, uint32_t t) {
  const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
  void *bytes = test_malloc(tensor->end - tensor->begin + 1);
  assert_int_equal(k3_ckpt_read(ckpt, t, 0, bytes, tensor->end - tensor->begin, NULL), K3_OK);
  return bytes;
}

// Relative RMSE of a module against the plain twin's weight.
static double rmse_of(const struct k3_plan *plan, const struct k3_linear *linear, const struct k3_ckpt *twin) {
  char name[512];
  uint64_t t;
  k3_linear_text(linear, name, sizeof name);
  strcat(name, ".weight");
  assert_true(k3_ckpt_find(twin, name, strlen(name), &t));
  void *original = whole_tensor(twin, (uint32_t)t), *weight = whole_tensor(plan->ckpt, linear->tensors[k3_linear_weight(linear)]),
       *scale = whole_tensor(plan->ckpt, linear->tensors[k3_linear_scale(linear)]);
  struct k3_quant_matrix matrix = {.scheme = linear->scheme, .n_rows = linear->n_rows, .n_cols = linear->n_cols, .weight = weight, .scale = scale};
  float second = 1, *row = test_calloc(linear->n_cols, sizeof *row);
  if (k3_linear_second(linear) != K3_PARAM_KNOWN_COUNT)
    assert_int_equal(k3_ckpt_read(plan->ckpt, linear->tensors[k3_linear_second(linear)], 0, &second, 4, NULL), K3_OK);
  struct k3_snr snr = {0};
  assert_int_equal(k3_quant_matrix_check(&matrix, name, NULL), K3_OK);
  for (uint64_t r = 0; r < linear->n_rows; r++) {
    k3_quant_decode_row(&matrix, r, 0, linear->n_cols, linear->scheme.second == K3_SECOND_NONE ? NULL : &second, row);
    k3_snr_add(&snr, K3_DTYPE_BF16, (const char *)original + r * linear->n_cols * 2, row, linear->n_cols);
  }
  test_free(row);
  test_free(scale);
  test_free(weight);
  test_free(original);
  return k3_snr_relative_rmse(&snr);
}

static void quantised_values_are_those_of_the_twin(void **state) {
  (void)state;
  static const struct {
    enum k3_scheme scheme;
    enum k3_synth_dialect dialect;
    double expected;  // on Gaussian weights
  } rows[] = {
      {K3_SCHEME_NVFP4, K3_SYNTH_COMPRESSED_TENSORS, 0.095}, {K3_SCHEME_NVFP4, K3_SYNTH_MODELOPT, 0.095},
      {K3_SCHEME_MXFP4, K3_SYNTH_COMPRESSED_TENSORS, 0.112}, {K3_SCHEME_MXFP4, K3_SYNTH_MODELOPT, 0.118},
      {K3_SCHEME_MXFP8, K3_SYNTH_DEEPSEEK, 0.027},           {K3_SCHEME_FP8_CHANNEL, K3_SYNTH_COMPRESSED_TENSORS, 0.027},
      {K3_SCHEME_FP8_TENSOR, K3_SYNTH_MODELOPT, 0.027},      {K3_SCHEME_FP8_BLOCK, K3_SYNTH_DEEPSEEK, 0.027},
  };
  struct k3_ckpt twin;
  struct k3_findings findings = {0};
  assert_int_equal(
      k3_synth_write(temp_path("twin"), &(struct k3_synth_options){.preset = "k3-dspark-small", .dtype = K3_DTYPE_BF16, .spread = true}, NULL, NULL),
      K3_OK);
  assert_int_equal(k3_ckpt_open(temp_path("twin"), NULL, &twin, &findings, NULL), K3_OK);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    struct k3_ckpt ckpt;
    struct k3_recipe recipe;
    struct k3_plan plan;
    struct k3_check_summary summary;
    struct k3_check_options check = {.recipe = "generic", .depth = K3_DEPTH_HEADERS};
    struct k3_synth_options options = {
        .preset = "k3-dspark-small", .dtype = K3_DTYPE_BF16, .scheme = rows[i].scheme, .dialect = rows[i].dialect, .replace = true};
    assert_int_equal(k3_synth_write(temp_path("quantised"), &options, NULL, NULL), K3_OK);
    assert_int_equal(k3_ckpt_open(temp_path("quantised"), NULL, &ckpt, &findings, NULL), K3_OK);
    assert_int_equal(k3_check_run(&ckpt, NULL, &check, &recipe, &plan, &summary, &findings, NULL), K3_OK);
    assert_int_equal(findings.n_errors, 0);
    uint64_t n = 0;
    // One layer is enough: 320 rows of kv_a end inside a block of 128.
    for (size_t l = 0; l < plan.linears.n_items; l++) {
      const struct k3_linear *linear = &plan.linears.items[l];
      if (linear->is_plain || strncmp(linear->name, "layers.1.self_attn.", 19) != 0)
        continue;
      double rmse = rmse_of(&plan, linear, &twin);
      if (fabs(rmse - rows[i].expected) > 0.03 * rows[i].expected + 0.0006)
        fail_msg("%.*s in %s: relative RMSE %.4f instead of %.4f", (int)linear->name_nbytes, linear->name, k3_scheme_name(rows[i].scheme), rmse,
                 rows[i].expected);
      n++;
    }
    assert_int_equal(n, 4);
    k3_plan_free(&plan);
    k3_recipe_free(&recipe);
    k3_ckpt_close(&ckpt);
  }
  k3_ckpt_close(&twin);
  k3_findings_free(&findings);
}

// Any split of a quantised tensor into pieces gives the same bytes.
static void pieces_of_any_size(void **state) {
  (void)state;
  static const enum k3_scheme schemes[] = {K3_SCHEME_FP8_BLOCK, K3_SCHEME_FP8_CHANNEL, K3_SCHEME_NVFP4, K3_SCHEME_MXFP8};
  static struct k3_synth_normal normal;
  k3_synth_normal_make(&normal);
  struct k3_pool *pool = k3_pool_create(1, NULL);
  for (size_t s = 0; s < sizeof schemes / sizeof schemes[0]; s++) {
    struct k3_synth_options options = {.preset = "k3-dspark-small", .dtype = K3_DTYPE_BF16, .scheme = schemes[s], .dialect = K3_SYNTH_MODELOPT};
    struct k3_synth_list list = {0};
    assert_int_equal(k3_synth_list_make(k3_synth_preset_find(options.preset), "", K3_DTYPE_BF16, &list, NULL), K3_OK);
    assert_int_equal(k3_synth_quantise(&list, &options, NULL), K3_OK);
    assert_int_equal(k3_synth_measure(&list, &normal, &options, pool, NULL), K3_OK);
    for (size_t i = 0; i < list.n_tensors; i++) {
      const struct k3_synth_tensor *t = &list.tensors[i];
      if (!t->matrix || !strstr(t->name, "layers.0.self_attn.kv_a"))
        continue;
      unsigned char *whole = test_malloc(t->nbytes), *parts = test_malloc(t->nbytes);
      assert_int_equal(k3_synth_quant_values(&normal, t, 7, 0, whole, t->nbytes, NULL), K3_OK);
      uint64_t step = t->nbytes / 7 + 1;
      for (uint64_t at = 0; at < t->nbytes; at += step)
        assert_int_equal(k3_synth_quant_values(&normal, t, 7, at, parts + at, t->nbytes - at < step ? t->nbytes - at : step, NULL), K3_OK);
      assert_memory_equal(whole, parts, t->nbytes);
      test_free(whole);
      test_free(parts);
    }
    k3_synth_list_free(&list);
  }
  k3_pool_free(pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(quantised_values_are_those_of_the_twin), cmocka_unit_test(pieces_of_any_size)};
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
