// Errors, findings, statuses and rules; what may reach a terminal.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/findings.h"
#include "base/utf8.h"
#include "unit.h"

static void first_error_wins(void **state) {
  (void)state;
  struct k3_error err = {0};
  assert_int_equal(k3_fail(&err, K3_BAD_INPUT, K3_CNT04, "a.safetensors", "w", "no hole", "%d bytes", 7), K3_BAD_INPUT);
  assert_int_equal(k3_fail(&err, K3_IO, K3_CNT01, "b", "x", NULL, "later"), K3_IO);  // the call's own status all the same
  assert_int_equal(err.status, K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_CNT04);
  assert_string_equal(err.file, "a.safetensors");
  assert_string_equal(err.tensor, "w");
  assert_string_equal(err.found, "7 bytes");
  assert_string_equal(err.allowed, "no hole");
  assert_int_equal(k3_fail(NULL, K3_IO, K3_RULE_NONE, NULL, NULL, NULL, "nobody listens"), K3_IO);
  char line[512];
  assert_string_equal(k3_error_text(&err, line, sizeof line), "CNT04: a.safetensors: w: 7 bytes (allowed: no hole)");
}

static void errno_maps_to_status(void **state) {
  (void)state;
  static const struct {
    int value;
    enum k3_status status;
    enum k3_rule rule;
  } cases[] = {{ENOSPC, K3_NO_SPACE, K3_OUT03}, {EDQUOT, K3_NO_SPACE, K3_OUT03}, {EFBIG, K3_NO_SPACE, K3_OUT03},
               {EACCES, K3_IO, K3_RULE_NONE},   {ENOENT, K3_IO, K3_RULE_NONE},   {ENOMEM, K3_NO_MEMORY, K3_RULE_NONE}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_error err = {0};
    assert_int_equal(k3_fail_errno(&err, cases[i].value, "f", "cannot do it"), cases[i].status);
    assert_int_equal(err.rule, cases[i].rule);
    assert_int_equal(err.os_errno, cases[i].value);
    assert_non_null(strstr(err.found, strerror(cases[i].value)));
  }
}

// No byte below 0x20, no DEL, no C1, no bidirectional control, only UTF-8.
static void assert_harmless(const char *text) {
  size_t n = strlen(text);
  for (size_t i = 0; i < n;) {
    uint32_t cp = 0;
    size_t width = k3_utf8_decode(text + i, n - i, &cp);
    assert_int_not_equal(width, 0);
    assert_false(cp < 0x20 || (cp >= 0x7F && cp < 0xA0) || cp == 0x061C || cp == 0x200E || cp == 0x200F || (cp >= 0x202A && cp <= 0x202E) ||
                 (cp >= 0x2066 && cp <= 0x2069));
    i += width;
  }
}

// No C0, C1 or bidirectional control character of an input reaches a terminal unescaped.
static void hostile_names_are_escaped(void **state) {
  (void)state;
  char dst[200];
  static const struct {
    const char *src, *shown;
  } cases[] = {
      {"plain.weight", "plain.weight"},
      {"\x1b[31mred", "\\u001B[31mred"},
      {"a\nb\tc\r", "a\\u000Ab\\u0009c\\u000D"},
      {"\x7f", "\\u007F"},
      {"\xC2\x9B"
       "5n",
       "\\u009B5n"},
      {"\xE2\x80\xAEgnp", "\\u202Egnp"},
      {"\xE2\x81\xA6x\xE2\x81\xA9", "\\u2066x\\u2069"},
      {"\xEF\xBB\xBFx", "\\uFEFFx"},
      {"\xFFx", "\\xFFx"},
      {"\xC3", "\\xC3"},
      {"\xC0\x80", "\\xC0\\x80"},
      {"\xED\xA0\x80", "\\xED\\xA0\\x80"},
      {"h\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "h\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    assert_string_equal(k3_printable(dst, sizeof dst, cases[i].src, strlen(cases[i].src), SIZE_MAX), cases[i].shown);
  assert_string_equal(k3_printable(dst, sizeof dst, "a\0b", 3, SIZE_MAX), "a\\u0000b");
  // Every two-byte string, alone and in an error.
  for (unsigned i = 1; i < 0x10000; i++) {
    char src[3] = {(char)(i >> 8), (char)i, 0};
    assert_harmless(k3_printable(dst, sizeof dst, src, 2, SIZE_MAX));
  }
  struct k3_error err = {0};
  k3_fail(&err, K3_BAD_INPUT, K3_CNT12, "\x1b]0;owned\x07", "\xE2\x80\xAE", NULL, "a name \x1b[2J");
  char line[1024];
  assert_harmless(k3_error_text(&err, line, sizeof line));
}

// Names over 200 bytes are shortened, with their length.
static void long_names_are_shortened(void **state) {
  (void)state;
  static char name[70000];
  memset(name, 'n', sizeof name);
  memcpy(name + sizeof name - 8, "weight_a", 8);
  struct k3_error err = {0};
  char exact[201];
  memset(exact, 'x', 200);
  exact[200] = '\0';
  k3_fail(&err, K3_BAD_INPUT, K3_CNT12, NULL, exact, NULL, "x");
  assert_string_equal(err.tensor, exact);
  char dst[256];
  k3_printable(dst, sizeof dst, name, sizeof name, 200);
  assert_true(strlen(dst) < 200);
  assert_non_null(strstr(dst, "..."));
  assert_non_null(strstr(dst, "weight_a [70000 bytes]"));
  // Any capacity and any limit: terminated, and nothing outside is written or read.
  for (size_t capacity = 0; capacity < 120; capacity++) {
    for (size_t limit = 0; limit < 100; limit += 7) {
      char area[140];
      memset(area, '#', sizeof area);
      char src[100];
      memset(src, 0x1B, sizeof src);
      k3_printable(area, capacity, src, sizeof src, limit);
      if (capacity > 0)
        assert_true(strlen(area) < capacity);
      assert_int_equal(area[capacity], '#');
    }
  }
}

static void utf8_decodes_and_encodes_every_code_point(void **state) {
  (void)state;
  uint32_t cp = 0;
  for (uint32_t want = 0; want <= 0x10FFFF; want++) {
    if (want >= 0xD800 && want <= 0xDFFF)
      continue;
    char bytes[4];
    size_t n = k3_utf8_encode(want, bytes);
    assert_int_equal(n, want < 0x80 ? 1 : want < 0x800 ? 2 : want < 0x10000 ? 3 : 4);
    assert_int_equal(k3_utf8_decode(bytes, n, &cp), n);
    assert_int_equal(cp, want);
    if (n > 1)
      assert_int_equal(k3_utf8_decode(bytes, n - 1, &cp), 0);
  }
  static const char *const broken[] = {"\x80",         "\xBF",         "\xC0\x80",         "\xC1\xBF",         "\xE0\x80\x80",     "\xE0\x9F\xBF",
                                       "\xED\xA0\x80", "\xED\xBF\xBF", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFE",
                                       "\xFF",         "\xC3("};
  for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++)
    assert_int_equal(k3_utf8_decode(broken[i], strlen(broken[i]), &cp), 0);
}

static void statuses_and_rules_are_one_to_one(void **state) {
  (void)state;
  assert_int_equal(k3_status_exit_code(K3_OK), 0);
  assert_int_equal(k3_status_exit_code(K3_DIFFERENT), 1);
  assert_int_equal(k3_status_exit_code(K3_BAD_ARGUMENT), 2);
  assert_int_equal(k3_status_exit_code(K3_EXISTS), 2);
  assert_int_equal(k3_status_exit_code(K3_BAD_INPUT), 3);
  assert_int_equal(k3_status_exit_code(K3_IO), 4);
  assert_int_equal(k3_status_exit_code(K3_NO_SPACE), 4);
  assert_int_equal(k3_status_exit_code(K3_UNSUPPORTED), 5);
  assert_string_equal(k3_status_name(K3_BAD_INPUT), "K3_BAD_INPUT");
  for (int rule = 1; rule < K3_RULE_COUNT; rule++) {
    const struct k3_rule_info *info = k3_rule_info((enum k3_rule)rule);
    assert_in_range(strlen(info->id), 3, 5);  // letters of the family, two digits
    assert_true(strlen(info->summary) > 10);
    assert_int_equal(k3_rule_from_id(info->id), rule);
  }
  assert_string_equal(k3_rule_info(K3_RULE_NONE)->id, "");
  assert_int_equal(k3_rule_from_id("CNT99"), K3_RULE_NONE);
  assert_int_equal(k3_rule_from_id(""), K3_RULE_NONE);
}

static void findings_keep_the_first_and_count_all(void **state) {
  (void)state;
  struct k3_findings findings = {0};
  for (int i = 0; i < 100; i++)
    assert_int_equal(k3_findings_report(&findings, K3_MAP01, "f", NULL, NULL, "number %d", i), K3_OK);
  assert_int_equal(k3_findings_report(&findings, K3_IDX05, "g", NULL, NULL, "ignored"), K3_OK);
  assert_int_equal(findings.n_items, K3_FINDINGS_KEPT_PER_RULE + 1);
  assert_int_equal(findings.n_by_rule[K3_MAP01], 100);
  assert_int_equal(findings.n_errors, 100);
  assert_int_equal(findings.n_warnings, 1);
  assert_string_equal(findings.items[3].error.found, "number 3");
  assert_int_equal(findings.items[K3_FINDINGS_KEPT_PER_RULE].severity, K3_WARNING);
  k3_findings_free(&findings);
  assert_null(findings.items);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(first_error_wins),
      cmocka_unit_test(errno_maps_to_status),
      cmocka_unit_test(hostile_names_are_escaped),
      cmocka_unit_test(long_names_are_shortened),
      cmocka_unit_test(utf8_decodes_and_encodes_every_code_point),
      cmocka_unit_test(statuses_and_rules_are_one_to_one),
      cmocka_unit_test(findings_keep_the_first_and_count_all),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
