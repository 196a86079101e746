// The streaming JSON writer.
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/json_pull.h"
#include "formats/json_write.h"
#include "unit.h"

static void write_sample(struct k3_jsonw *w) {
  k3_jsonw_begin_object(w, NULL);
  k3_jsonw_string(w, "name", "a\"b");
  k3_jsonw_begin_array(w, "shape");
  k3_jsonw_u64(w, NULL, UINT64_MAX);
  k3_jsonw_i64(w, NULL, INT64_MIN);
  k3_jsonw_begin_object(w, NULL);
  k3_jsonw_end_object(w);
  k3_jsonw_end_array(w);
  k3_jsonw_bool(w, "ok", true);
  k3_jsonw_null(w, "none");
  k3_jsonw_string(w, "absent", NULL);
  k3_jsonw_begin_array(w, "empty");
  k3_jsonw_end_array(w);
  k3_jsonw_end_object(w);
}

static void compact_and_pretty(void **state) {
  (void)state;
  struct k3_jsonw w;
  k3_jsonw_open(&w, false, NULL, NULL);
  write_sample(&w);
  assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
  assert_string_equal(w.bytes,
                      "{\"name\":\"a\\\"b\",\"shape\":[18446744073709551615,-9223372036854775808,{}],\"ok\":true,\"none\":null,\"absent\":null,"
                      "\"empty\":[]}\n");
  assert_int_equal(w.n_bytes, strlen(w.bytes));
  k3_jsonw_close(&w);
  k3_jsonw_open(&w, true, NULL, NULL);
  write_sample(&w);
  assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
  assert_string_equal(w.bytes,
                      "{\n  \"name\": \"a\\\"b\",\n  \"shape\": [\n    18446744073709551615,\n    -9223372036854775808,\n    {}\n  ],\n"
                      "  \"ok\": true,\n  \"none\": null,\n  \"absent\": null,\n  \"empty\": []\n}\n");
  k3_jsonw_close(&w);
}

static void assert_written(const char *src, size_t nbytes, const char *want) {
  struct k3_jsonw w;
  k3_jsonw_open(&w, false, NULL, NULL);
  k3_jsonw_string_n(&w, NULL, src, nbytes);
  assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
  assert_string_equal(w.bytes, want);
  k3_jsonw_close(&w);
}

// No C0, C1 or bidirectional control character of an input reaches --json unescaped.
static void hostile_text_is_escaped(void **state) {
  (void)state;
  assert_written("\x1b[31m", 5, "\"\\u001B[31m\"\n");
  assert_written("a\0b", 3, "\"a\\u0000b\"\n");
  assert_written("\b\f\n\r\t\"\\/", 8, "\"\\b\\f\\n\\r\\t\\\"\\\\/\"\n");
  assert_written("\x7F", 1, "\"\\u007F\"\n");
  assert_written("\xC2\x9B", 2, "\"\\u009B\"\n");
  assert_written("\xE2\x80\xAE\xE2\x81\xA9\xE2\x80\xA8", 9, "\"\\u202E\\u2069\\u2028\"\n");
  assert_written("\xFF\xC3", 2, "\"\\uFFFD\\uFFFD\"\n");
  assert_written("h\xC3\xA9 \xF0\x9F\x98\x80", 8, "\"h\xC3\xA9 \xF0\x9F\x98\x80\"\n");
  assert_written("", 0, "\"\"\n");
  // Whatever goes in, our own strict reader takes what comes out, and the valid part is unchanged.
  for (unsigned i = 0; i < 0x10000; i++) {
    char src[2] = {(char)(i >> 8), (char)i};
    struct k3_jsonw w;
    k3_jsonw_open(&w, false, NULL, NULL);
    k3_jsonw_begin_object(&w, NULL);
    k3_jsonw_string_n(&w, "k", src, 2);
    k3_jsonw_end_object(&w);
    assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
    for (size_t k = 0; k + 1 < w.n_bytes; k++)
      assert_true((unsigned char)w.bytes[k] >= 0x20 && w.bytes[k] != 0x7F);
    struct k3_json json;
    struct k3_json_text text;
    bool more;
    k3_json_open(&json, w.bytes, w.n_bytes, "w", K3_CNT02, NULL);
    assert_int_equal(k3_json_enter_object(&json), K3_OK);
    assert_int_equal(k3_json_next_key(&json, &more, &text), K3_OK);
    assert_int_equal(k3_json_string(&json, &text), K3_OK);
    if (i < 0x8000 && (i & 0xFF) < 0x80) {
      assert_int_equal(text.nbytes, 2);
      assert_memory_equal(text.bytes, src, 2);
    }
    k3_json_close(&json);
    k3_jsonw_close(&w);
  }
}

static void numbers_are_shortest_and_exact(void **state) {
  (void)state;
  static const struct {
    double value;
    const char *text;
  } cases[] = {{0, "0\n"},
               {-0.0, "-0\n"},
               {1, "1\n"},
               {0.1, "0.1\n"},
               {1.0 / 3, "0.3333333333333333\n"},
               {1e300, "1e+300\n"},
               {5e-324, "5e-324\n"},
               {1e15 + 0.5, "1000000000000000.5\n"},
               {NAN, "\"NaN\"\n"},
               {INFINITY, "\"Infinity\"\n"},
               {-INFINITY, "\"-Infinity\"\n"}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_jsonw w;
    k3_jsonw_open(&w, false, NULL, NULL);
    k3_jsonw_double(&w, NULL, cases[i].value);
    assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
    if (isfinite(cases[i].value))
      assert_true(strtod(w.bytes, NULL) == cases[i].value);
    if (cases[i].value != 5e-324)
      assert_string_equal(w.bytes, cases[i].text);
    k3_jsonw_close(&w);
  }
  struct k3_jsonw w;
  k3_jsonw_open(&w, false, NULL, NULL);
  k3_jsonw_begin_array(&w, NULL);
  k3_jsonw_float(&w, NULL, 0.1f);
  k3_jsonw_float(&w, NULL, 16777216.0f);
  k3_jsonw_float(&w, NULL, -INFINITY);
  k3_jsonw_end_array(&w);
  assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
  assert_string_equal(w.bytes, "[0.1,16777216,\"-Infinity\"]\n");
  k3_jsonw_close(&w);
  uint64_t seed = 88172645463325252u;
  for (int i = 0; i < 20000; i++) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    double value;
    memcpy(&value, &seed, 8);
    if (!isfinite(value))
      continue;
    k3_jsonw_open(&w, false, NULL, NULL);
    k3_jsonw_double(&w, NULL, value);
    assert_int_equal(k3_jsonw_finish(&w, NULL), K3_OK);
    assert_true(strtod(w.bytes, NULL) == value);
    k3_jsonw_close(&w);
  }
}

static void the_decimal_point_does_not_follow_the_locale(void **state) {
  (void)state;
  static const char *const locales[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "nl_NL.UTF-8"};
  bool found = false;
  for (size_t i = 0; i < sizeof locales / sizeof locales[0] && !found; i++)
    found = setlocale(LC_NUMERIC, locales[i]) && strcmp(localeconv()->decimal_point, ".") != 0;
  struct k3_jsonw w;
  k3_jsonw_open(&w, false, NULL, NULL);
  k3_jsonw_double(&w, NULL, 2.5);
  enum k3_status status = k3_jsonw_finish(&w, NULL);
  setlocale(LC_NUMERIC, "C");
  assert_int_equal(status, K3_OK);
  assert_string_equal(w.bytes, "2.5\n");
  k3_jsonw_close(&w);
  if (!found)
    print_message("no locale with a decimal comma is installed: only the plain case was tested\n");
}

static void misuse_is_latched(void **state) {
  (void)state;
  for (int kind = 0; kind < 8; kind++) {
    struct k3_jsonw w;
    struct k3_error err = {0};
    k3_jsonw_open(&w, true, NULL, NULL);
    if (kind > 0)
      k3_jsonw_begin_object(&w, NULL);
    switch (kind) {
      case 1: k3_jsonw_u64(&w, NULL, 1); break;  // no key
      case 2: k3_jsonw_end_array(&w); break;
      case 3:
        k3_jsonw_end_object(&w);
        k3_jsonw_end_object(&w);
        break;
      case 4:
        k3_jsonw_end_object(&w);
        k3_jsonw_null(&w, NULL);
        break;
      case 5:
        k3_jsonw_begin_array(&w, "a");
        k3_jsonw_null(&w, "key");
        break;
      case 6: break;  // not closed
      case 7:
        for (int i = 0; i < K3_JSONW_MAX_DEPTH; i++)
          k3_jsonw_begin_object(&w, "a");
        break;
      default: break;  // nothing written
    }
    assert_int_equal(k3_jsonw_finish(&w, &err), K3_BAD_ARGUMENT);
    assert_int_equal(err.status, K3_BAD_ARGUMENT);
    k3_jsonw_close(&w);
  }
}

struct pieces {
  char text[300000];
  size_t n, n_calls, fail_at;
};

static enum k3_status take(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct pieces *pieces = ctx;
  if (++pieces->n_calls == pieces->fail_at)
    return k3_fail(err, K3_IO, K3_RULE_NONE, "out", NULL, NULL, "refused");
  assert_true(pieces->n + nbytes <= sizeof pieces->text);
  memcpy(pieces->text + pieces->n, bytes, nbytes);
  pieces->n += nbytes;
  return K3_OK;
}

static void write_many(struct k3_jsonw *w) {
  k3_jsonw_begin_array(w, NULL);
  for (int i = 0; i < 20000; i++)
    k3_jsonw_string(w, NULL, "0123456");
  k3_jsonw_end_array(w);
}

static void a_sink_gets_the_same_text_in_pieces(void **state) {
  (void)state;
  static struct pieces pieces;
  struct k3_jsonw whole, streamed;
  k3_jsonw_open(&whole, false, NULL, NULL);
  write_many(&whole);
  assert_int_equal(k3_jsonw_finish(&whole, NULL), K3_OK);
  k3_jsonw_open(&streamed, false, take, &pieces);
  write_many(&streamed);
  assert_true(streamed.capacity <= 2 * K3_JSONW_FLUSH_NBYTES);
  assert_int_equal(k3_jsonw_finish(&streamed, NULL), K3_OK);
  assert_int_equal(pieces.n, whole.n_bytes);
  assert_memory_equal(pieces.text, whole.bytes, whole.n_bytes);
  assert_true(pieces.n_calls > 3);
  k3_jsonw_close(&whole);
  k3_jsonw_close(&streamed);
  for (size_t fail_at = 1; fail_at <= 3; fail_at++) {
    memset(&pieces, 0, sizeof pieces);
    pieces.fail_at = fail_at;
    struct k3_error err = {0};
    k3_jsonw_open(&streamed, false, take, &pieces);
    write_many(&streamed);
    assert_int_equal(k3_jsonw_finish(&streamed, &err), K3_IO);
    assert_string_equal(err.found, "refused");
    assert_int_equal(pieces.n_calls, fail_at);  // not called again
    k3_jsonw_close(&streamed);
  }
}

static void failing_allocations_are_latched(void **state) {
  (void)state;
  for (uint64_t n = 1;; n++) {
    struct k3_jsonw w;
    struct k3_error err = {0};
    k3_alloc_fail_at(n);
    k3_jsonw_open(&w, true, NULL, NULL);
    write_sample(&w);
    enum k3_status status = k3_jsonw_finish(&w, &err);
    k3_alloc_fail_at(0);
    k3_jsonw_close(&w);
    if (status == K3_OK) {
      assert_true(n > 2);
      break;
    }
    assert_int_equal(status, K3_NO_MEMORY);
    assert_int_equal(err.status, K3_NO_MEMORY);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(compact_and_pretty),
      cmocka_unit_test(hostile_text_is_escaped),
      cmocka_unit_test(numbers_are_shortest_and_exact),
      cmocka_unit_test(the_decimal_point_does_not_follow_the_locale),
      cmocka_unit_test(misuse_is_latched),
      cmocka_unit_test(a_sink_gets_the_same_text_in_pieces),
      cmocka_unit_test(failing_allocations_are_latched),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
