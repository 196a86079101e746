// The strict pull reader: RFC 8259, UTF-8, exact integers, byte offsets in errors.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_pull.h"
#include "unit.h"

// Copies the text to an exactly sized block, so that AddressSanitizer sees every over-read.
static char *exact_copy(const char *text, size_t n) {
  char *copy = malloc(n ? n : 1);
  memcpy(copy, text, n);
  return copy;
}

// Does the whole text pass as one JSON value? The byte offset of the failure, or -1.
static long failure_at(const char *text, size_t n) {
  char *copy = exact_copy(text, n);
  struct k3_json json;
  struct k3_error err = {0};
  k3_json_open(&json, copy, n, "f", K3_CNT02, &err);
  enum k3_status status = k3_json_skip(&json);
  if (status == K3_OK)
    status = k3_json_finish(&json);
  long at = -1;
  if (status != K3_OK) {
    assert_int_equal(status, K3_BAD_INPUT);
    assert_int_equal(err.rule, K3_CNT02);
    const char *said = strstr(err.found, "at byte ");
    assert_non_null(said);
    at = atol(said + 8);
    assert_int_equal(at, k3_json_offset(&json));
  }
  k3_json_close(&json);
  free(copy);
  return at;
}

#define ACCEPTED(text)        assert_int_equal(failure_at(text, sizeof(text) - 1), -1)
#define REFUSED(text, offset) assert_int_equal(failure_at(text, sizeof(text) - 1), offset)

static void grammar(void **state) {
  (void)state;
  ACCEPTED("{}");
  ACCEPTED(" \t\r\n[ 1 , 2.5 , -0 , 1e5 , 1E+5, 0.1e-7, true, false, null, \"\", {\"a\":[]} ] ");
  ACCEPTED("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83D\\uDE00\"");
  ACCEPTED("0");
  ACCEPTED("-0.0");
  REFUSED("", 0);
  REFUSED("  ", 2);
  REFUSED("{", 1);
  REFUSED("{}{}", 2);
  REFUSED("{} x", 3);
  REFUSED("[1,]", 3);
  REFUSED("{\"a\":1,}", 7);
  REFUSED("[1 2]", 3);
  REFUSED("{\"a\" 1}", 5);
  REFUSED("{a:1}", 1);
  REFUSED("{1:1}", 1);
  REFUSED("[}", 1);
  REFUSED("[1}", 2);
  REFUSED("{\"a\":1]", 6);
  REFUSED("[,1]", 1);
  REFUSED("'a'", 0);
  REFUSED("// c\n1", 0);
  REFUSED("NaN", 0);
  REFUSED("Infinity", 0);
  REFUSED("nul", 0);
  REFUSED("True", 0);
  REFUSED("01", 1);
  REFUSED("-", 1);
  REFUSED("-01", 2);
  REFUSED("+1", 0);
  REFUSED(".5", 0);
  REFUSED("1.", 2);
  REFUSED("1.e5", 2);
  REFUSED("1e", 2);
  REFUSED("1e+", 3);
  REFUSED("0x10", 1);
  REFUSED("\xEF\xBB\xBF{}", 0);
  REFUSED("{}\0", 2);
  REFUSED("\"abc", 4);
  REFUSED("\"a\nb\"", 2);
  REFUSED("\"a\0b\"", 2);
  REFUSED("\"\x1F\"", 1);
}

static void escapes(void **state) {
  (void)state;
  REFUSED("\"\\", 1);
  REFUSED("\"\\x41\"", 1);
  REFUSED("\"\\u12\"", 1);
  REFUSED("\"\\u12g4\"", 1);
  REFUSED("\"ab\\uD800\"", 3);
  REFUSED("\"\\uD800x\"", 1);
  REFUSED("\"\\uD800\\n\"", 1);
  REFUSED("\"\\uD800\\u0041\"", 1);
  REFUSED("\"\\uD800\\uD800\"", 1);
  REFUSED("\"\\uDC00\"", 1);
  REFUSED("\"\\uDC00\\uD800\"", 1);
  REFUSED("\"\\uD83D\\uDE0\"", 1);
}

static void utf8_is_checked_with_and_without_escapes(void **state) {
  (void)state;
  ACCEPTED("\"h\xC3\xA9llo \xE2\x82\xAC \xF0\x9F\x98\x80 \xF4\x8F\xBF\xBF\"");
  REFUSED("\"a\xFF\"", 2);
  REFUSED("\"0123456789abcdef\xC3(\"", 17);
  REFUSED("\"\xC0\x80\"", 1);
  REFUSED("\"\xED\xA0\x80\"", 1);
  REFUSED("\"\xF4\x90\x80\x80\"", 1);
  REFUSED("\"\xE2\x82\"", 1);
  REFUSED("\"\xE2\x82", 1);
  REFUSED("\"\\n\xFF\"", 3);
  REFUSED("\"\\n\xE2\x82\"", 3);
  ACCEPTED("\"\\n\xE2\x82\xAC\"");
}

static void depth_is_bounded(void **state) {
  (void)state;
  char text[2 * K3_JSON_MAX_DEPTH + 2];
  memset(text, '[', K3_JSON_MAX_DEPTH + 1);
  memset(text + K3_JSON_MAX_DEPTH + 1, ']', K3_JSON_MAX_DEPTH + 1);
  assert_int_equal(failure_at(text, sizeof text), K3_JSON_MAX_DEPTH);
  assert_int_equal(failure_at(text + 1, 2 * K3_JSON_MAX_DEPTH), -1);
  static char deep[1000000];
  memset(deep, '[', sizeof deep);
  assert_int_equal(failure_at(deep, sizeof deep), K3_JSON_MAX_DEPTH);
  for (size_t i = 0; i + 5 <= sizeof deep; i += 5)
    memcpy(deep + i, "{\"a\":", 5);
  assert_int_equal(failure_at(deep, sizeof deep), 5 * K3_JSON_MAX_DEPTH);
}

// Every special byte at every place of the eight-byte steps of the scanner.
static void strings_end_where_they_end(void **state) {
  (void)state;
  for (size_t n = 0; n < 40; n++) {
    for (size_t at = 0; at <= n; at++) {
      char text[64], want[64];
      memset(text, 'x', sizeof text);
      text[0] = '"';
      text[1 + n] = '"';
      size_t n_want = n;
      memset(want, 'x', sizeof want);
      if (at < n) {
        text[1 + at] = '\\';
        if (at + 1 == n)
          continue;
        text[2 + at] = 't';
        want[at] = '\t';
        n_want = n - 1;
      }
      char *copy = exact_copy(text, n + 2);
      struct k3_json json;
      struct k3_json_text value;
      k3_json_open(&json, copy, n + 2, "f", K3_CNT02, NULL);
      assert_int_equal(k3_json_string(&json, &value), K3_OK);
      assert_int_equal(value.nbytes, n_want);
      assert_memory_equal(value.bytes, want, n_want);
      assert_int_equal(value.bytes == copy + 1, at == n);  // no copy without escapes
      assert_true(k3_json_raw_equal(json.raw, json.end, want, n_want));
      assert_false(k3_json_raw_equal(json.raw, json.end, want, n_want + 1));
      if (n_want > 0)
        assert_false(k3_json_raw_equal(json.raw, json.end, want, n_want - 1));
      assert_int_equal(k3_json_finish(&json), K3_OK);
      k3_json_close(&json);
      free(copy);
      for (int byte = 0; byte < 0x20 && at < n; byte++) {
        text[1 + at] = (char)byte;
        assert_int_equal(failure_at(text, n + 2), 1 + (long)at);
      }
    }
  }
}

static void unescaped_content(void **state) {
  (void)state;
  static const char text[] = "\"a\\u0041\\u00e9\\u20ac\\uD83D\\uDE00\\u0000\\\"\\\\\\/\\b\\f\\n\\r\\tz\"";
  static const char want[] = "aA\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\0\"\\/\b\f\n\r\tz";
  struct k3_json json;
  struct k3_json_text value;
  k3_json_open(&json, text, sizeof text - 1, "f", K3_CNT02, NULL);
  assert_int_equal(k3_json_string(&json, &value), K3_OK);
  assert_int_equal(value.nbytes, sizeof want - 1);
  assert_memory_equal(value.bytes, want, sizeof want - 1);
  assert_true(k3_json_raw_equal(json.raw, json.end, want, sizeof want - 1));
  k3_json_close(&json);
  // A quote behind a backslash does not end the name it is compared with.
  static const char tricky[] = "\"a\\\"b\"";
  assert_false(k3_json_raw_equal(tricky + 1, tricky + sizeof tricky - 1, "a\\", 2));
  assert_true(k3_json_raw_equal(tricky + 1, tricky + sizeof tricky - 1, "a\"b", 3));
}

// Integers up to 2^64-1 are read exactly; every other spelling of a number is refused as such; what is no JSON is refused as that.
static void integers_are_exact(void **state) {
  (void)state;
  static const struct {
    const char *text;
    enum k3_rule rule;  // NONE: accepted
    uint64_t value;
  } cases[] = {
      {"0", K3_RULE_NONE, 0},
      {"7]", K3_RULE_NONE, 7},
      {"9007199254740993", K3_RULE_NONE, UINT64_C(9007199254740993)},
      {"18446744073709551615", K3_RULE_NONE, UINT64_MAX},
      {"18446744073709551616", K3_CNT05, 0},
      {"28446744073709551615", K3_CNT05, 0},
      {"99999999999999999999999999999999999999999999999", K3_CNT05, 0},
      {"-1", K3_CNT05, 0},
      {"-0", K3_CNT05, 0},
      {"1.0", K3_CNT05, 0},
      {"1e0", K3_CNT05, 0},
      {"1E2", K3_CNT05, 0},
      {"\"1\"", K3_CNT05, 0},
      {"true", K3_CNT05, 0},
      {"null", K3_CNT05, 0},
      {"{}", K3_CNT05, 0},
      {"[1]", K3_CNT05, 0},
      {"01", K3_CNT02, 0},
      {"00", K3_CNT02, 0},
      {"-01", K3_CNT02, 0},
      {"1.", K3_CNT02, 0},
      {"\"1", K3_CNT02, 0},
      {"x", K3_CNT02, 0},
      {"", K3_CNT02, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_json json;
    struct k3_error err = {0};
    uint64_t value = 12345;
    char *copy = exact_copy(cases[i].text, strlen(cases[i].text));
    k3_json_open(&json, copy, strlen(cases[i].text), "f", K3_CNT02, &err);
    enum k3_status status = k3_json_u64(&json, K3_CNT05, "w", &value);
    assert_int_equal(status, cases[i].rule == K3_RULE_NONE ? K3_OK : K3_BAD_INPUT);
    assert_int_equal(err.rule, cases[i].rule);
    if (status == K3_OK)
      assert_true(value == cases[i].value);
    if (err.rule == K3_CNT05)
      assert_string_equal(err.tensor, "w");
    k3_json_close(&json);
    free(copy);
  }
}

static void objects_and_arrays_are_walked(void **state) {
  (void)state;
  static const char text[] = " { \"a\" : [ 1 , [ ] , { } ] , \"b\" : null } ";
  struct k3_json json;
  struct k3_json_text key;
  bool more;
  uint64_t value;
  k3_json_open(&json, text, sizeof text - 1, "f", K3_CNT02, NULL);
  assert_int_equal(k3_json_peek(&json), '{');
  assert_int_equal(k3_json_enter_object(&json), K3_OK);
  assert_int_equal(k3_json_next_key(&json, &more, &key), K3_OK);
  assert_true(more && key.nbytes == 1 && key.bytes[0] == 'a');
  assert_int_equal(k3_json_enter_array(&json), K3_OK);
  assert_int_equal(k3_json_next_item(&json, &more), K3_OK);
  assert_int_equal(k3_json_u64(&json, K3_CNT05, NULL, &value), K3_OK);
  assert_true(more && value == 1);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(k3_json_next_item(&json, &more), K3_OK);
    assert_true(more);
    assert_int_equal(k3_json_skip(&json), K3_OK);
  }
  assert_int_equal(k3_json_next_item(&json, &more), K3_OK);
  assert_false(more);
  assert_int_equal(k3_json_next_key(&json, &more, &key), K3_OK);
  assert_true(more && key.bytes[0] == 'b');
  assert_int_equal(k3_json_null(&json), K3_OK);
  assert_int_equal(k3_json_next_key(&json, &more, &key), K3_OK);
  assert_false(more);
  assert_int_equal(json.depth, 0);
  assert_int_equal(k3_json_finish(&json), K3_OK);
  assert_int_equal(k3_json_peek(&json), 0);
  k3_json_close(&json);
}

static void a_failing_allocation_is_reported(void **state) {
  (void)state;
  struct k3_json json;
  struct k3_error err = {0};
  k3_json_open(&json, "\"\\n\"", 4, "f", K3_CNT02, &err);
  k3_alloc_fail_at(1);
  assert_int_equal(k3_json_skip(&json), K3_NO_MEMORY);
  assert_int_equal(err.status, K3_NO_MEMORY);
  k3_json_close(&json);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(grammar),
      cmocka_unit_test(escapes),
      cmocka_unit_test(utf8_is_checked_with_and_without_escapes),
      cmocka_unit_test(depth_is_bounded),
      cmocka_unit_test(strings_end_where_they_end),
      cmocka_unit_test(unescaped_content),
      cmocka_unit_test(integers_are_exact),
      cmocka_unit_test(objects_and_arrays_are_walked),
      cmocka_unit_test(a_failing_allocation_is_reported),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
