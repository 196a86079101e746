// Encoded tensors as bytes of an image: any part of them equals that part of the whole, sets of shared scales, and what happens without memory.
#include <stdlib.h>

#include "base/alloc.h"
#include "loader/check.h"
#include "loader/requantise.h"
#include "loader/synth.h"
#include "loader/writer.h"
#include "temp_folder.h"
#include "unit.h"

static const enum k3_scheme SCHEMES[] = {K3_SCHEME_FP8_CHANNEL, K3_SCHEME_FP8_BLOCK, K3_SCHEME_MXFP8, K3_SCHEME_NVFP4, K3_SCHEME_MXFP4};
enum { N_SCHEMES = sizeof SCHEMES / sizeof *SCHEMES };

struct laid_out {
  struct k3_ckpt ckpt;
  struct k3_recipe recipe;
  struct k3_plan plan;
  struct k3_check_summary summary;
  struct k3_findings findings;
};

static const char *draft(enum k3_dtype dtype) {
  const char *folder = temp_path(k3_dtype_name(dtype));
  struct k3_synth_options options = {.preset = "tiny", .dtype = dtype, .spread = true, .seed = 4, .replace = true, .n_threads = 1};
  struct k3_synth_report report;
  assert_int_equal(k3_synth_write(folder, &options, &report, NULL), K3_OK);
  return folder;
}

static enum k3_status try_lay_out(struct laid_out *l, const char *folder, const struct k3_requant_options *options, struct k3_error *err) {
  struct k3_check_options check = {.depth = K3_DEPTH_HEADERS, .plan = {.digests = true, .encode = true}};
  *l = (struct laid_out){0};
  K3_TRY(k3_ckpt_open(folder, NULL, &l->ckpt, &l->findings, err));
  K3_TRY(k3_check_run(&l->ckpt, NULL, &check, &l->recipe, &l->plan, &l->summary, &l->findings, err));
  K3_TRY(k3_requant_select(&l->plan, options, &l->findings, err));
  K3_TRY(k3_requant_measure(&l->plan, 2, NULL, &l->findings, err));
  return k3_plan_layout(&l->plan, &l->findings, err);
}

static void close_all(struct laid_out *l) {
  k3_plan_free(&l->plan);
  k3_recipe_free(&l->recipe);
  k3_ckpt_close(&l->ckpt);
  k3_findings_free(&l->findings);
}

static void lay_out(struct laid_out *l, const char *folder, enum k3_scheme scheme, enum k3_requant_share share) {
  struct k3_error err = {0};
  struct k3_requant_options options = {.scheme = scheme, .share = share};
  assert_int_equal(try_lay_out(l, folder, &options, &err), K3_OK);
  assert_int_equal(l->findings.n_errors, 0);
  assert_non_null(l->plan.requant);
}

// "Encoding happens inside the gather of a segment": wherever a segment's edge falls, in a code, a block, a scale or a row, the bytes are the same.
static void any_part_equals_that_part_of_the_whole(void **state) {
  (void)state;
  static const enum k3_dtype dtypes[] = {K3_DTYPE_BF16, K3_DTYPE_F16, K3_DTYPE_F32};
  for (size_t d = 0; d < 3; d++) {
    const char *folder = draft(dtypes[d]);
    for (size_t s = 0; s < N_SCHEMES; s++) {
      struct laid_out l;
      lay_out(&l, folder, SCHEMES[s], K3_SHARE_COMPONENT);
      uint64_t from = l.plan.body_offset, n = l.plan.data_nbytes - from;
      unsigned char *whole = malloc(n), *part = malloc(n);
      assert_int_equal(k3_plan_gather(&l.plan, from, n, whole, NULL), K3_OK);
      uint32_t seed = (uint32_t)s + 1;
      for (int i = 0; i < 300; i++) {
        seed = seed * 1664525u + 1013904223u;
        uint64_t begin = seed % n, length = 1 + (seed >> 7) % 3000;
        length = length < n - begin ? length : n - begin;
        assert_int_equal(k3_plan_gather(&l.plan, from + begin, length, part, NULL), K3_OK);
        assert_memory_equal(part, whole + begin, length);
      }
      free(whole);
      free(part);
      close_all(&l);
    }
  }
}

// Byte by byte, and with the account: every element is counted once, however the bytes are cut.
static void the_account_does_not_depend_on_the_cut(void **state) {
  (void)state;
  const char *folder = draft(K3_DTYPE_BF16);
  for (size_t s = 0; s < N_SCHEMES; s++) {
    struct laid_out one, many;
    lay_out(&one, folder, SCHEMES[s], K3_SHARE_MODULE);
    lay_out(&many, folder, SCHEMES[s], K3_SHARE_MODULE);
    one.plan.requant->collecting = many.plan.requant->collecting = true;
    uint64_t from = one.plan.body_offset, n = one.plan.data_nbytes - from;
    unsigned char *bytes = malloc(n);
    assert_int_equal(k3_plan_gather(&one.plan, from, n, bytes, NULL), K3_OK);
    for (uint64_t at = 0; at < n; at += 4099)
      assert_int_equal(k3_plan_gather(&many.plan, from + at, n - at < 4099 ? n - at : 4099, bytes, NULL), K3_OK);
    k3_requant_finish(&one.plan, &one.findings);
    k3_requant_finish(&many.plan, &many.findings);
    for (size_t i = 0; i < one.plan.requant->n_items; i++) {
      const struct k3_requant_item *a = &one.plan.requant->items[i], *b = &many.plan.requant->items[i];
      assert_int_equal(a->snr.n_elems, a->n_rows * a->n_cols);
      assert_int_equal(b->snr.n_elems, a->snr.n_elems);
      assert_true(a->snr.noise > 0 && a->snr.max_error == b->snr.max_error);
      assert_true(b->snr.noise > a->snr.noise * (1 - 1e-12) && b->snr.noise < a->snr.noise * (1 + 1e-12));
      if (SCHEMES[s] == K3_SCHEME_NVFP4)
        assert_int_equal(a->window.n_blocks, a->snr.n_elems / 16);
    }
    free(bytes);
    close_all(&one);
    close_all(&many);
  }
}

// "--share component (default: the whole K3 q_a/kv_a component across layers) or --share module (per fused module)".
static void sets_that_share_a_second_scale(void **state) {
  (void)state;
  const char *folder = draft(K3_DTYPE_BF16);
  for (int share = K3_SHARE_COMPONENT; share <= K3_SHARE_MODULE; share++) {
    struct laid_out l;
    lay_out(&l, folder, K3_SCHEME_NVFP4, (enum k3_requant_share)share);
    const struct k3_requant *requant = l.plan.requant;
    float layer_second[3] = {0}, largest = 0;
    for (size_t i = 0; i < requant->n_items; i++) {
      const struct k3_requant_item *item = &requant->items[i];
      const char *name = k3_ckpt_tensor(&l.ckpt, item->tensor)->name;
      assert_true(item->set_amax >= item->amax);
      if (!strstr(name, "_a_proj"))
        continue;
      float *second = &layer_second[name[7] - '0'];  // "layers.0."
      assert_true(*second == 0 || *second == item->second);
      *second = item->second;
      largest = item->amax > largest ? item->amax : largest;
    }
    bool all_equal = layer_second[0] == layer_second[1] && layer_second[1] == layer_second[2];
    assert_true(layer_second[0] > 0 && all_equal == (share == K3_SHARE_COMPONENT));
    if (share == K3_SHARE_COMPONENT)
      assert_true(layer_second[0] == 1.0f / largest * 2688.0f);
    // 22 weights: 3 layers of two fused pairs and three single ones, and context_proj.
    assert_int_equal(requant->n_items, 22);
    assert_int_equal(requant->n_sets, share == K3_SHARE_COMPONENT ? 14 : 16);
    close_all(&l);
  }
}

// After every allocation in turn fails: K3_NO_MEMORY, and nothing is lost.
static void failing_memory(void **state) {
  (void)state;
  const char *folder = draft(K3_DTYPE_BF16);
  static const char *const ignore[] = {"re:.*o_proj"}, *const include[] = {"re:.*kv_b_proj"};
  struct k3_requant_options options = {.scheme = K3_SCHEME_FP8_CHANNEL, .ignore = ignore, .n_ignore = 1, .include = include, .n_include = 1};
  uint64_t n_failed = 0;
  bool reached = true;
  for (uint64_t n = 1; reached; n += n < 400 ? 7 : 1) {
    struct laid_out l;
    struct k3_error err = {0};
    uint64_t before = k3_alloc_count();
    k3_alloc_fail_at(n);
    enum k3_status status = try_lay_out(&l, folder, &options, &err);
    k3_alloc_fail_at(0);
    reached = status != K3_OK || k3_alloc_count() - before >= n;
    assert_true(status == K3_OK || status == K3_NO_MEMORY);
    n_failed += status == K3_NO_MEMORY;
    close_all(&l);
  }
  assert_true(n_failed > 100);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(any_part_equals_that_part_of_the_whole),
      cmocka_unit_test(the_account_does_not_depend_on_the_cut),
      cmocka_unit_test(sets_that_share_a_second_scale),
      cmocka_unit_test(failing_memory),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
