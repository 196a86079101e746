// Patterns over module names, against what Python says about them (fixtures/patterns, written by fixtures/gen/gen_patterns.py), and what is refused.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/file.h"
#include "formats/pattern.h"
#include "unit.h"

// "line\nbreak" is the one name with a line feed.
static size_t unescape(char *name) {
  char *at = strstr(name, "\\n");
  if (at) {
    *at = '\n';
    memmove(at + 1, at + 2, strlen(at + 2) + 1);
  }
  return strlen(name);
}

static void compare_with_python(const char *path, enum k3_pattern_kind kind, int n_min) {
  void *text;
  size_t nbytes;
  int n = 0, n_yes = 0;
  assert_int_equal(k3_read_file(path, 1 << 20, &text, &nbytes, NULL), K3_OK);
  struct k3_pattern *pattern = NULL;
  char *next_line = text;
  while (next_line && *next_line) {
    char *line = next_line;
    next_line = strchr(line, '\n');
    if (next_line)
      *next_line++ = '\0';
    char *name = strchr(line, '\t'), *answer = strrchr(line, '\t');
    assert_true(name && answer && name < answer);
    *name++ = *answer++ = '\0';
    struct k3_error err = {0};
    if (!pattern || strcmp(k3_pattern_text(pattern), line) != 0) {
      k3_pattern_free(pattern);
      pattern = k3_pattern_compile(kind, line, "expected", &err);
      if (!pattern)
        fail_msg("%s: Python takes \"%s\", refused here: %s", path, line, err.found);
    }
    size_t n_name = unescape(name);
    enum k3_pattern_answer wanted = answer[0] == '1' ? K3_PATTERN_YES : K3_PATTERN_NO;
    if (k3_pattern_match(pattern, name, n_name) != wanted)
      fail_msg("%s: \"%s\" on \"%s\" is %s to Python", path, line, name, answer[0] == '1' ? "a match" : "none");
    n++;
    n_yes += wanted == K3_PATTERN_YES;
  }
  k3_pattern_free(pattern);
  k3_free(text);
  assert_true(n >= n_min && n_yes >= n / 20 && n_yes <= n * 9 / 10);
}

static void regexes_match_as_in_python(void **state) {
  (void)state;
  compare_with_python("fixtures/patterns/regex.tsv", K3_PATTERN_REGEX, 2000);
}

static void globs_match_as_in_python(void **state) {
  (void)state;
  compare_with_python("fixtures/patterns/glob.tsv", K3_PATTERN_GLOB, 1300);
}

// What PCRE2 and Python read differently, or only one of them reads, is an error that names the pattern.
static void other_syntax_is_refused(void **state) {
  (void)state;
  static const char *const bad[] = {
      "(",          ")",        "a)",      "[a",      "[]",         "[",     "a**",     "a*+",       "a++",     "a?+",
      "a{2}{3}",    "a{2}+",    "a{,3}",   "*a",      "+",          "?",     "^*",      "$+",        "\\b*",    "|*",
      "(*a)",       "(?R)",     "(?1)",    "(a)\\1",  "\\0",        "\\x41", "\\u0041", "\\N",       "\\R",     "\\h",
      "\\K",        "\\Qa\\E",  "\\pL",    "\\Z",     "\\z",        "\\G",   "[[:a:]]", "[a[b]",     "[\\d-z]", "[a-\\d]",
      "[a-b-c]",    "(?<n>a)",  "(?P=n)",  "(?P>n)",  "(?>a)",      "(?|a)", "(?#c)",   "(?x)a",     "(?s)a",   "a(?i)b",
      "(?-i:a)",    "(?i:a)",   "(?(1)a)", "(*UTF)a", "(*COMMIT)a", "(?C)a", "a\\",     "(?P<1a>x)", "(?P<>x)", "(?=a)*",
      "(?!a)+",     "(?<=a*)b", "[z-a]",   "a{3,2}",  "\\v",        "[\\b]", "(?",      "(?P",       "(?P<a",   "(?P<a>x)(?P<a>y)",
      "\\\xC3\xA9",
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    struct k3_error err = {0};
    struct k3_pattern *pattern = k3_pattern_compile(K3_PATTERN_REGEX, bad[i], "config.json", &err);
    if (pattern || err.rule != K3_CFG10 || strcmp(err.tensor, bad[i]) != 0 || err.status != K3_BAD_INPUT)
      fail_msg("\"%s\" should be refused as CFG10 under its own name", bad[i]);
  }
}

static void a_match_that_takes_too_long_is_given_up(void **state) {
  (void)state;
  struct k3_pattern *pattern = k3_pattern_compile(K3_PATTERN_REGEX, "(?:a+)+(?:a+)+(?:a+)+b", NULL, NULL);
  char name[400];
  memset(name, 'a', sizeof name);
  memcpy(name + sizeof name - 2, "cb", 2);  // the b is there, so that looking for it does not settle the matter
  assert_non_null(pattern);
  assert_int_equal(k3_pattern_match(pattern, name, sizeof name), K3_PATTERN_TOO_MUCH);
  assert_int_equal(k3_pattern_match(pattern, "aaab", 4), K3_PATTERN_YES);  // and the pattern is as good as before
  k3_pattern_free(pattern);
  // A glob of many stars takes length times length at most.
  memset(name, 'a', sizeof name);
  char stars[256];
  for (size_t i = 0; i < 254; i += 2)
    memcpy(stars + i, "*a", 2);
  memcpy(stars + 252, "*b", 3);
  assert_false(k3_glob_match(stars, name, sizeof name));
}

static void components_are_matched_whole(void **state) {
  (void)state;
  static const struct {
    const char *pattern, *name;
    bool yes;
  } cases[] = {
      {"layers.1", "model.layers.1.mlp", true},
      {"layers.1", "model.layers.10.mlp", false},
      {"layers.1", "model.layers.1", true},
      {"layers.1", "layers.1", true},
      {"layers.1", "xlayers.1", false},
      {"lm_head", "language_model.lm_head", true},
      {"head", "lm_head", false},
      {"mlp", "model.mlp.x", true},
      {"", "a", false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_pattern *pattern = k3_pattern_compile(K3_PATTERN_COMPONENTS, cases[i].pattern, NULL, NULL);
    assert_non_null(pattern);
    if ((k3_pattern_match(pattern, cases[i].name, strlen(cases[i].name)) == K3_PATTERN_YES) != cases[i].yes)
      fail_msg("\"%s\" in \"%s\"", cases[i].pattern, cases[i].name);
    k3_pattern_free(pattern);
  }
}

static void names_need_no_terminator_and_memory_may_fail(void **state) {
  (void)state;
  for (int kind = K3_PATTERN_LITERAL; kind <= K3_PATTERN_REGEX; kind++) {
    struct k3_pattern *pattern = k3_pattern_compile((enum k3_pattern_kind)kind, "abc", NULL, NULL);
    char *name = k3_strndup("abcd", 4, NULL);
    assert_int_equal(k3_pattern_match(pattern, name, 3), K3_PATTERN_YES);
    assert_int_equal(k3_pattern_match(pattern, name, 2), K3_PATTERN_NO);
    k3_free(name);
    k3_pattern_free(pattern);
    for (uint64_t n = 1; n <= 2; n++) {
      struct k3_error err = {0};
      k3_alloc_fail_at(n);
      assert_null(k3_pattern_compile((enum k3_pattern_kind)kind, "abc", NULL, &err));
      assert_int_equal(err.status, K3_NO_MEMORY);
      k3_alloc_fail_at(0);
    }
  }
  k3_pattern_free(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(regexes_match_as_in_python),   cmocka_unit_test(globs_match_as_in_python),
      cmocka_unit_test(other_syntax_is_refused),      cmocka_unit_test(a_match_that_takes_too_long_is_given_up),
      cmocka_unit_test(components_are_matched_whole), cmocka_unit_test(names_need_no_terminator_and_memory_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
