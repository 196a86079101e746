// config.json: what is refused, with its place, and the typed look-ups.
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "comma_locale.h"
#include "formats/config.h"
#include "formats/json_tree.h"
#include "unit.h"

static struct k3_error last;

// Parses a copy without a terminator, so that a sanitizer sees a read behind it.
static struct k3_config *parse_n(const char *text, size_t n) {
  char *copy = malloc(n ? n : 1);
  memcpy(copy, text, n);
  last = (struct k3_error){0};
  struct k3_config *config = k3_config_parse(copy, n, "some/config.json", &last);
  free(copy);
  return config;
}

static struct k3_config *parse(const char *text) {
  return parse_n(text, strlen(text));
}

static struct k3_config *must_parse(const char *text) {
  struct k3_config *config = parse(text);
  if (!config)
    fail_msg("refused: %s", last.found);
  return config;
}

static void refuse_n(const char *text, size_t n, const char *said) {
  struct k3_config *config = parse_n(text, n);
  assert_null(config);
  assert_int_equal(last.status, K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(last.rule)->id, "CFG19");
  assert_string_equal(last.file, "some/config.json");
  if (!strstr(last.found, said))
    fail_msg("\"%s\" does not say \"%s\"", last.found, said);
}

static void refuse(const char *text, const char *said) {
  refuse_n(text, strlen(text), said);
}

// A config that is not strict JSON is refused with line and column: bare Infinity, -Infinity, NaN, comments, trailing commas, a byte-order mark,
// twice the same key. The word in a text is no number.
// B106: what is no strict JSON is refused with its place; words inside texts are texts.
static void only_strict_json(void **state) {
  (void)state;
  refuse("", "empty");
  refuse("  \n", "line 2, column 1: the text ends");
  refuse("{\"time_step_limit\": [0.0, Infinity]}", "line 1, column 27: found 'I'");
  refuse("{\n \"a\": -Infinity}", "line 2, column 8");
  refuse("{\"a\": NaN}", "line 1, column 7: found 'N'");
  refuse("{\"a\": 1, // one\n \"b\": 2}", "line 1, column 10: found '/'");
  refuse("{\"a\": [1,]}", "line 1, column 10");
  refuse("{\"a\": 1,\n}", "line 2, column 1");
  refuse("{'a': 1}", "line 1, column 2");
  refuse("\xEF\xBB\xBF{\"a\": 1}", "line 1, column 1: a byte-order mark");
  refuse("{\"a\": 1,\n\"a\": 1}", "line 2, column 5: the key \"a\" for the second time");
  refuse("{\"a\": 1, \"\\u0061\": 1}", "second time");
  refuse("{\"o\": {\"a\": 1, \"a\": null}}", "second time");
  refuse("{\"a\": 1} {}", "line 1, column 10");
  refuse("{\"a\": 1", "line 1, column 8: the text ends");
  refuse("{\"a\": 01}", "line 1, column 8");
  refuse("{\"a\": +1}", "line 1, column 7");
  refuse("{\"a\": \"\xC3\"}", "line 1");
  refuse("{\"a\": \"\\u0000\"}", "NUL");
  refuse("{\"a\\u0000\": 1}", "NUL");
  refuse("{\"a\": 1e999}", "overflows");
  refuse("{\"a\": -1e999}", "overflows");
  refuse_n("{\"a\":\0 1}", 9, "line 1, column 6");
  refuse("[1]", "a list instead of an object");
  refuse("7", "7 instead of an object");
  struct k3_config *config = must_parse(" {\"a\": \"Infinity and -NaN\", \"b\": -0, \"c\": 1E5, \"d\": -0.25}\r\n");
  const char *text = NULL;
  double value = 1;
  assert_int_equal(k3_config_string(config, "a", &text, NULL, NULL), K3_OK);
  assert_string_equal(text, "Infinity and -NaN");
  assert_int_equal(k3_config_real(config, "b", &value, NULL, NULL), K3_OK);
  assert_true(value == 0 && signbit(value));
  assert_int_equal(k3_config_real(config, "c", &value, NULL, NULL), K3_OK);
  assert_true(value == 100000);
  assert_int_equal(k3_config_real(config, "d", &value, NULL, NULL), K3_OK);
  assert_true(value == -0.25);
  k3_config_free(config);
  k3_config_free(NULL);
}

static void a_git_lfs_pointer_is_named(void **state) {
  (void)state;
  assert_null(parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1251\n"));
  assert_string_equal(k3_rule_info(last.rule)->id, "CNT01");
  assert_non_null(strstr(last.found, "1251"));
}

// Deep nesting is refused or accepted, never a crash.
static void nesting_is_bounded(void **state) {
  (void)state;
  enum { DEPTH = 100000 };
  char *text = malloc(DEPTH + 8);
  memcpy(text, "{\"a\":", 5);
  memset(text + 5, '[', DEPTH);
  refuse_n(text, DEPTH + 5, "nested too deeply");
  memset(text + 5, '[', 63);
  memset(text + 68, ']', 63);
  text[131] = '}';
  struct k3_config *config = parse_n(text, 132);
  assert_non_null(config);
  assert_int_equal(k3_config_kind_of(config, "a"), K3_CONFIG_LIST);
  k3_config_free(config);
  free(text);
}

static const char sample[] =
    "{\"i\": 7, \"zero\": 0, \"big\": 9007199254740992, \"above\": 9007199254740993, \"neg\": -1, \"r\": 0.5, \"whole\": 7.0, \"t\": true, \"f\": "
    "false,"
    " \"s\": \"x\", \"n\": null, \"l\": [2, 23], \"bad\": [1, -2], \"mixed\": [1, \"a\"], \"empty\": [], \"o\": {\"k\": {\"deep\": 3}, \"n\": null},"
    " \"text_config\": {\"only_text\": 1, \"n\": 5, \"i\": 8, \"o\": {\"other\": 2}, \"dflash_config\": {\"x\": 4}},"
    " \"dflash_config\": {\"only_dflash\": 2, \"only_text\": 3}}";

static void lookups_have_types(void **state) {
  (void)state;
  struct k3_config *config = must_parse(sample);
  static const struct {
    const char *path;
    enum k3_config_kind kind;
  } kinds[] = {{"i", K3_CONFIG_INT},      {"r", K3_CONFIG_REAL},   {"t", K3_CONFIG_BOOL},    {"f", K3_CONFIG_BOOL},     {"s", K3_CONFIG_STRING},
               {"l", K3_CONFIG_LIST},     {"o", K3_CONFIG_OBJECT}, {"x", K3_CONFIG_ABSENT},  {"i.k", K3_CONFIG_ABSENT}, {"o.k.deep", K3_CONFIG_INT},
               {"o.n", K3_CONFIG_ABSENT}, {"", K3_CONFIG_ABSENT},  {"o.", K3_CONFIG_ABSENT}, {".i", K3_CONFIG_ABSENT}};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
    assert_int_equal(k3_config_kind_of(config, kinds[i].path), kinds[i].kind);
  uint64_t value = 99;
  bool found = true;
  assert_int_equal(k3_config_u64(config, "absent", &value, &found, NULL), K3_OK);
  assert_false(found);
  assert_int_equal(value, 99);
  assert_int_equal(k3_config_u64(config, "big", &value, &found, NULL), K3_OK);
  assert_true(found && value == UINT64_C(1) << 53);
  assert_int_equal(k3_config_u64(config, "zero", &value, NULL, NULL), K3_OK);
  assert_int_equal(value, 0);
  static const char *const no_u64[][2] = {{"above", "9007199254740993"}, {"neg", "-1"},   {"r", "0.5"},      {"whole", "7.0"}, {"t", "true"},
                                          {"s", "the text \"x\""},       {"l", "a list"}, {"o", "an object"}};
  for (size_t i = 0; i < sizeof no_u64 / sizeof no_u64[0]; i++) {
    struct k3_error err = {0};
    assert_int_equal(k3_config_u64(config, no_u64[i][0], &value, &found, &err), K3_BAD_INPUT);
    assert_string_equal(k3_rule_info(err.rule)->id, "CFG20");
    assert_string_equal(err.tensor, no_u64[i][0]);
    assert_string_equal(err.file, "some/config.json");
    assert_string_equal(err.found, no_u64[i][1]);
    assert_string_equal(err.allowed, "an integer from 0 to 2^53");
  }
  assert_int_equal(k3_config_require_u64(config, "i", &value, NULL), K3_OK);
  assert_int_equal(value, 7);
  assert_int_equal(k3_config_require_u64(config, "absent", &value, &last), K3_BAD_INPUT);
  assert_int_equal(k3_config_require_u64(config, "s", &value, NULL), K3_BAD_INPUT);
  double real = 0;
  assert_int_equal(k3_config_real(config, "i", &real, NULL, NULL), K3_OK);
  assert_true(real == 7);
  assert_int_equal(k3_config_real(config, "r", &real, NULL, NULL), K3_OK);
  assert_true(real == 0.5);
  assert_int_equal(k3_config_real(config, "s", &real, NULL, NULL), K3_BAD_INPUT);
  assert_int_equal(k3_config_real(config, "t", &real, NULL, NULL), K3_BAD_INPUT);
  bool flag = false;
  assert_int_equal(k3_config_bool(config, "t", &flag, NULL, NULL), K3_OK);
  assert_true(flag);
  assert_int_equal(k3_config_bool(config, "f", &flag, NULL, NULL), K3_OK);
  assert_false(flag);
  assert_int_equal(k3_config_bool(config, "zero", &flag, NULL, NULL), K3_BAD_INPUT);
  const char *text = "kept";
  assert_int_equal(k3_config_string(config, "n", &text, &found, NULL), K3_BAD_INPUT);  // null on top, 5 below text_config
  assert_string_equal(text, "kept");
  assert_int_equal(k3_config_string(config, "i", &text, NULL, NULL), K3_BAD_INPUT);
  assert_string_equal(k3_config_file(config), "some/config.json");
  assert_true(json_object_size((const json_t *)k3_config_root(config)) > 10);
  k3_config_free(config);
}

static void lists_of_integers(void **state) {
  (void)state;
  struct k3_config *config = must_parse(sample);
  uint64_t values[2] = {0};
  size_t n = 77;
  bool found;
  assert_int_equal(k3_config_u64_list(config, "l", values, 2, &n, &found, NULL), K3_OK);
  assert_true(found && n == 2 && values[0] == 2 && values[1] == 23);
  assert_int_equal(k3_config_u64_list(config, "empty", values, 2, &n, &found, NULL), K3_OK);
  assert_true(found && n == 0);
  n = 77;
  assert_int_equal(k3_config_u64_list(config, "absent", values, 2, &n, &found, NULL), K3_OK);
  assert_true(!found && n == 77);
  last = (struct k3_error){0};
  assert_int_equal(k3_config_u64_list(config, "l", values, 1, &n, &found, &last), K3_BAD_INPUT);
  assert_non_null(strstr(last.found, "2 entries, at most 1"));
  last = (struct k3_error){0};
  assert_int_equal(k3_config_u64_list(config, "bad", values, 2, &n, &found, &last), K3_BAD_INPUT);
  assert_string_equal(last.found, "entry 1 is -2");
  assert_int_equal(k3_config_u64_list(config, "mixed", values, 2, &n, &found, NULL), K3_BAD_INPUT);
  assert_int_equal(k3_config_u64_list(config, "i", values, 2, &n, &found, NULL), K3_BAD_INPUT);
  k3_config_free(config);
}

// As it is, then below text_config, then below dflash_config; null counts as absent.
static void nested_places_are_searched_in_order(void **state) {
  (void)state;
  struct k3_config *config = must_parse(sample);
  static const struct {
    const char *path;
    uint64_t value;
  } cases[] = {{"i", 7},
               {"only_text", 1},
               {"only_dflash", 2},
               {"n", 5},
               {"o.other", 2},
               {"dflash_config.only_text", 3},
               {"text_config.i", 8},
               {"dflash_config.x", 4}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    uint64_t value = 0;
    assert_int_equal(k3_config_require_u64(config, cases[i].path, &value, NULL), K3_OK);
    assert_int_equal(value, cases[i].value);
  }
  k3_config_free(config);
}

// An integer that fits 64 bits nowhere harms only those who ask for it.
static void huge_integers_matter_only_when_used(void **state) {
  (void)state;
  struct k3_config *config = must_parse(
      "{\"model_max_length\": 1000000000000000019884624838656, \"min\": -9223372036854775808, \"max\": 9223372036854775807,"
      " \"below\": -9223372036854775809, \"a\": {\"l\": [1, 2.5, -3]}, \"i\": 7}");
  uint64_t value = 0, values[3];
  size_t n;
  double real = 0;
  last = (struct k3_error){0};
  assert_int_equal(k3_config_u64(config, "model_max_length", &value, NULL, &last), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(last.rule)->id, "CFG20");
  assert_int_equal(k3_config_real(config, "model_max_length", &real, NULL, NULL), K3_OK);
  assert_true(real == 1e30);
  const json_t *root = (const json_t *)k3_config_root(config);
  assert_true(json_integer_value(json_object_get(root, "min")) == INT64_MIN && json_integer_value(json_object_get(root, "max")) == INT64_MAX);
  assert_true(json_real_value(json_object_get(root, "below")) == -9223372036854775808.0);
  assert_int_equal(k3_config_kind_of(config, "i"), K3_CONFIG_INT);
  assert_int_equal(k3_config_require_u64(config, "i", &value, NULL), K3_OK);
  assert_int_equal(value, 7);
  last = (struct k3_error){0};
  assert_int_equal(k3_config_u64_list(config, "a.l", values, 3, &n, NULL, &last), K3_BAD_INPUT);
  assert_string_equal(last.found, "entry 1 is 2.5");
  k3_config_free(config);
}

// B107: the same numbers under a locale with a decimal comma, read and written.
static void numbers_do_not_follow_the_locale(void **state) {
  (void)state;
  static const char text[] = "{\"factor\":40,\"l\":[0.5,1.25],\"mscale\":0.707,\"rms_norm_eps\":1e-05}";
  bool comma = comma_locale_set();
  if (comma)
    assert_true(strtod("0,5", NULL) == 0.5);
  struct k3_config *config = must_parse(text);
  double eps = 0, mscale = 0;
  uint64_t factor = 0;
  assert_int_equal(k3_config_real(config, "rms_norm_eps", &eps, NULL, NULL), K3_OK);
  assert_int_equal(k3_config_real(config, "mscale", &mscale, NULL, NULL), K3_OK);
  assert_int_equal(k3_config_u64(config, "factor", &factor, NULL, NULL), K3_OK);
  last = (struct k3_error){0};
  assert_int_equal(k3_config_u64(config, "mscale", &factor, NULL, &last), K3_BAD_INPUT);
  struct k3_jsonw writer;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_json_tree_write(&writer, NULL, (const json_t *)k3_config_root(config));
  char *written = k3_json_tree_take(&writer, NULL);
  setlocale(LC_ALL, "C");
  assert_true(eps == 1e-05 && mscale == 0.707 && factor == 40);
  assert_non_null(strstr(last.found, "0.7"));
  assert_string_equal(written, text);
  k3_free(written);
  k3_config_free(config);
  if (!comma) {
    print_message("SKIPPED: no locale with a decimal comma is installed, and localedef made none: only the C locale was tested\n");
    skip();
  }
}

static void *counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

// Every allocation fails once, jansson's included: the answer is K3_NO_MEMORY, and nothing leaks.
static void memory_may_fail_anywhere(void **state) {
  (void)state;
  static const char *const texts[] = {sample, "{\"a\": [100000000000000000000, 1.0, {\"b\": 2.0}]}"};
  json_set_alloc_funcs(counted_malloc, k3_free);
  for (size_t t = 0; t < 2; t++) {
    bool done = false;
    for (uint64_t n = 1; !done; n++) {
      k3_alloc_fail_at(n);
      uint64_t before = k3_alloc_count();
      struct k3_config *config = parse(texts[t]);
      done = k3_alloc_count() - before < n;
      k3_alloc_fail_at(0);
      if (!config)
        if (last.status != K3_NO_MEMORY)
          fail_msg("n %d: %s", (int)n, last.found);
      assert_true(!done || config);
      k3_config_free(config);
      assert_true(n < 1000);
    }
  }
  json_set_alloc_funcs(malloc, free);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(only_strict_json),
      cmocka_unit_test(a_git_lfs_pointer_is_named),
      cmocka_unit_test(nesting_is_bounded),
      cmocka_unit_test(lookups_have_types),
      cmocka_unit_test(lists_of_integers),
      cmocka_unit_test(nested_places_are_searched_in_order),
      cmocka_unit_test(huge_integers_matter_only_when_used),
      cmocka_unit_test(numbers_do_not_follow_the_locale),
      cmocka_unit_test(memory_may_fail_anywhere),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
