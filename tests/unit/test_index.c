// model.safetensors.index.json.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/index.h"
#include "unit.h"

static struct k3_error last;
static struct k3_index_summary summary;

struct seen {
  char text[4096];
  size_t n, n_calls, fail_at;
};

static enum k3_status see(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  struct seen *seen = ctx;
  assert_int_equal(tensor[tensor_nbytes], 0);
  assert_int_equal(file[file_nbytes], 0);
  if (++seen->n_calls == seen->fail_at)
    return k3_fail(err, K3_IO, K3_RULE_NONE, NULL, NULL, NULL, "stop");
  seen->n += (size_t)snprintf(seen->text + seen->n, sizeof seen->text - seen->n, "%s=%s;", tensor, file);
  return K3_OK;
}

static struct seen seen;

static enum k3_status parse(const char *text) {
  size_t n = strlen(text);
  char *copy = malloc(n ? n : 1);
  memcpy(copy, text, n);
  last = (struct k3_error){0};
  memset(&seen, 0, sizeof seen);
  enum k3_status status = k3_index_parse(copy, n, "model.safetensors.index.json", see, &seen, &summary, &last);
  free(copy);
  return status;
}

static void refuse(const char *text, const char *tensor, const char *said) {
  assert_int_equal(parse(text), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(last.rule)->id, "IDX10");
  assert_string_equal(last.file, "model.safetensors.index.json");
  assert_string_equal(last.tensor, tensor);
  if (!strstr(last.found, said))
    fail_msg("\"%s\" does not say \"%s\"", last.found, said);
}

static void entries_are_reported_in_order(void **state) {
  (void)state;
  assert_int_equal(
      parse("{\"metadata\":{\"total_size\":64,\"x\":[1]},\"weight_map\":{\"b\":\"2.safetensors\",\"\\u0061\":\"1\\u002esafetensors\"},\"y\":{}}"),
      K3_OK);
  assert_string_equal(seen.text, "b=2.safetensors;a=1.safetensors;");
  assert_int_equal(summary.n_entries, 2);
  assert_true(summary.has_total_size);
  assert_false(summary.odd_total_size);
  assert_int_equal(summary.total_size, 64);
  assert_int_equal(parse(" \n{ \"weight_map\" : { } }\n"), K3_OK);
  assert_int_equal(summary.n_entries, 0);
}

// Metadata absent or null is fine; a total_size that is no plain integer is noted, whatever it is.
static void metadata_variants(void **state) {
  (void)state;
  static const struct {
    const char *metadata;
    bool has, odd;
  } cases[] = {{"null", false, false},
               {"{}", false, false},
               {"{\"total_size\":0}", true, false},
               {"{\"total_size\":18446744073709551615}", true, false},
               {"{\"total_size\":96.0}", false, true},
               {"{\"total_size\":-1}", false, true},
               {"{\"total_size\":\"64\"}", false, true},
               {"{\"total_size\":null}", false, true},
               {"{\"total_size\":[{}]}", false, true},
               {"{\"total_size\":18446744073709551616}", false, true},
               {"[]", false, true},
               {"3", false, true}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char text[200];
    snprintf(text, sizeof text, "{\"metadata\":%s,\"weight_map\":{\"a\":\"f.safetensors\"}}", cases[i].metadata);
    assert_int_equal(parse(text), K3_OK);
    assert_int_equal(summary.has_total_size, cases[i].has);
    assert_int_equal(summary.odd_total_size, cases[i].odd);
    assert_string_equal(seen.text, "a=f.safetensors;");
  }
  refuse("{\"metadata\":{\"total_size\":01},\"weight_map\":{}}", "", "JSON error at byte 27");
  refuse("{\"metadata\":{\"total_size\":\"\\x\"},\"weight_map\":{}}", "", "JSON error");
}

static void what_is_no_index(void **state) {
  (void)state;
  refuse("", "", "empty");
  refuse("  \n", "", "empty");
  refuse("[]", "", "JSON error at byte 0");
  refuse("{}", "", "weight_map is absent");
  refuse("{\"weight_map\":[]}", "weight_map", "no object");
  refuse("{\"weight_map\":null}", "weight_map", "no object");
  refuse("{\"weight_map\":{\"a\":1}}", "a", "no text");
  refuse("{\"weight_map\":{\"a\":null}}", "a", "no text");
  refuse("{\"weight_map\":{\"a\":\"f\",}}", "", "JSON error at byte 23");
  refuse("{\"weight_map\":{\"a\":\"f\"}", "", "the text ends");
  refuse("{\"weight_map\":{\"a\":\"f\"}}{}", "", "JSON error");
  refuse("{\"weight_map\":{\"a\xFF\":\"f\"}}", "", "UTF-8");
  refuse("\xEF\xBB\xBF{}", "", "byte-order mark");
  refuse("{\"weight_map\":{\"\":\"f\"}}", "", "empty");
  refuse("{\"weight_map\":{\"a\\u0000b\":\"f\"}}", "a", "NUL");
  refuse("{\"weight_map\":{},\"weight_map\":{}}", "", "weight_map occurs twice");
  refuse("{\"metadata\":{},\"weight_map\":{},\"metadata\":{}}", "", "metadata occurs twice");
  refuse("{\"metadata\":{\"total_size\":1,\"total_size\":1},\"weight_map\":{}}", "", "total_size twice");
  assert_int_equal(parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT01);
  assert_non_null(strstr(last.found, "1234 bytes"));
}

// A tensor listed twice is refused, also when escapes hide it, whichever comes first, and even for the same file.
static void duplicates(void **state) {
  (void)state;
  refuse("{\"weight_map\":{\"abc\":\"f\",\"x\":\"f\",\"abc\":\"f\"}}", "abc", "twice");
  refuse("{\"weight_map\":{\"abc\":\"f\",\"\\u0061bc\":\"g\"}}", "abc", "twice");
  refuse("{\"weight_map\":{\"\\u0061bc\":\"f\",\"abc\":\"g\"}}", "abc", "twice");
  refuse("{\"weight_map\":{\"\\uD83D\\uDE00\":\"f\",\"\xF0\x9F\x98\x80\":\"g\"}}", "\xF0\x9F\x98\x80", "twice");
  assert_int_equal(parse("{\"weight_map\":{\"a\\\\\":\"f\",\"a\\\"b\":\"f\",\"a\":\"f\",\"ab\":\"f\"}}"), K3_OK);
  assert_int_equal(summary.n_entries, 4);
}

static void the_callback_can_stop(void **state) {
  (void)state;
  memset(&seen, 0, sizeof seen);
  seen.fail_at = 2;
  struct k3_error err = {0};
  static const char text[] = "{\"weight_map\":{\"a\":\"f\",\"b\":\"f\",\"c\":\"f\"}}";
  assert_int_equal(k3_index_parse(text, sizeof text - 1, "i", see, &seen, &summary, &err), K3_IO);
  assert_string_equal(err.found, "stop");
  assert_int_equal(seen.n_calls, 2);
}

static enum k3_status count(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  (void)tensor, (void)tensor_nbytes, (void)file, (void)file_nbytes, (void)err;
  ++*(size_t *)ctx;
  return K3_OK;
}

static void many_entries_and_failing_allocations(void **state) {
  (void)state;
  enum { N = 50000 };
  char *text = malloc(N * 64);
  size_t n = (size_t)sprintf(text, "{\"weight_map\":{"), n_seen = 0;
  for (int i = 0; i < N; i++)
    n += (size_t)sprintf(text + n, "%s\"layers.%d.w\":\"model-%05d.safetensors\"", i ? "," : "", i, i % 96);
  size_t n_open = n;
  n += (size_t)sprintf(text + n, "}}");
  uint64_t before = k3_alloc_count();
  assert_int_equal(k3_index_parse(text, n, "i", count, &n_seen, &summary, NULL), K3_OK);
  assert_int_equal(n_seen, N);
  assert_in_range(k3_alloc_count() - before, 1, 40);
  // One more entry that repeats the first, behind fifty thousand others.
  sprintf(text + n_open, ",\"layers.\\u0030.w\":\"x\"}}");
  struct k3_error err = {0};
  assert_int_equal(k3_index_parse(text, strlen(text), "i", count, &n_seen, &summary, &err), K3_BAD_INPUT);
  assert_string_equal(err.tensor, "layers.0.w");
  free(text);
  static const char small[] = "{\"weight_map\":{\"a\\n\":\"f\"}}";
  for (uint64_t at = 1;; at++) {
    k3_alloc_fail_at(at);
    enum k3_status status = k3_index_parse(small, sizeof small - 1, "i", count, &n_seen, &summary, NULL);
    k3_alloc_fail_at(0);
    if (status == K3_OK) {
      assert_true(at >= 4);
      break;
    }
    assert_int_equal(status, K3_NO_MEMORY);
  }
}

static void file_names(void **state) {
  (void)state;
  static const struct {
    const char *name;
    bool ok;
  } cases[] = {{"model.safetensors", true},
               {"model-00001-of-00002.safetensors", true},
               {"a.safetensors", true},
               {"..safetensors", true},  // a plain, if odd, name
               {".safetensors", false},
               {"", false},
               {".", false},
               {"..", false},
               {"../model.safetensors", false},
               {"/etc/model.safetensors", false},
               {"sub/model.safetensors", false},
               {"sub\\model.safetensors", false},
               {"model.safetensors/", false},
               {"model.safetensors.json", false},
               {"model.bin", false},
               {"model.SAFETENSORS", false},
               {"mo\ndel.safetensors", false},
               {"mo\x7F"
                "del.safetensors",
                false}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    assert_int_equal(k3_index_file_name_ok(cases[i].name, strlen(cases[i].name)), cases[i].ok);
  assert_false(k3_index_file_name_ok("a\0b.safetensors", 15));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(entries_are_reported_in_order),
      cmocka_unit_test(metadata_variants),
      cmocka_unit_test(what_is_no_index),
      cmocka_unit_test(duplicates),
      cmocka_unit_test(the_callback_can_stop),
      cmocka_unit_test(many_entries_and_failing_allocations),
      cmocka_unit_test(file_names),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
