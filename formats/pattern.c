#include "formats/pattern.h"

#include <string.h>

#include "base/alloc.h"

struct k3_pattern {
  enum k3_pattern_kind kind;
  char *text;
  size_t nbytes;
  struct k3_regex *regex;
};

struct k3_pattern *k3_pattern_compile(enum k3_pattern_kind kind, const char *text, const char *file, struct k3_error *err) {
  struct k3_pattern *pattern = k3_calloc(1, sizeof *pattern, err);
  if (!pattern)
    return NULL;
  pattern->kind = kind;
  pattern->nbytes = strlen(text);
  pattern->text = k3_strndup(text, pattern->nbytes, err);
  if (pattern->text && kind == K3_PATTERN_REGEX)
    pattern->regex = k3_regex_compile(text, file, err);
  if (pattern->text && (kind != K3_PATTERN_REGEX || pattern->regex))
    return pattern;
  k3_pattern_free(pattern);
  return NULL;
}

void k3_pattern_free(struct k3_pattern *pattern) {
  if (!pattern)
    return;
  k3_regex_free(pattern->regex);
  k3_free(pattern->text);
  k3_free(pattern);
}

const char *k3_pattern_text(const struct k3_pattern *pattern) {
  return pattern->text;
}

enum k3_pattern_kind k3_pattern_kind_of(const struct k3_pattern *pattern) {
  return pattern->kind;
}

static bool components_match(const struct k3_pattern *pattern, const char *name, size_t nbytes) {
  for (size_t at = 0; pattern->nbytes > 0 && at + pattern->nbytes <= nbytes; at++) {
    bool begins = at == 0 || name[at - 1] == '.', ends = at + pattern->nbytes == nbytes || name[at + pattern->nbytes] == '.';
    if (begins && ends && memcmp(name + at, pattern->text, pattern->nbytes) == 0)
      return true;
  }
  return false;
}

enum k3_pattern_answer k3_pattern_match(struct k3_pattern *pattern, const char *name, size_t nbytes) {
  bool yes = false;
  switch (pattern->kind) {
    case K3_PATTERN_REGEX: return k3_regex_match(pattern->regex, name, nbytes);
    case K3_PATTERN_GLOB: yes = k3_glob_match(pattern->text, name, nbytes); break;
    case K3_PATTERN_COMPONENTS: yes = components_match(pattern, name, nbytes); break;
    case K3_PATTERN_LITERAL: yes = pattern->nbytes == nbytes && memcmp(pattern->text, name, nbytes) == 0; break;
  }
  return yes ? K3_PATTERN_YES : K3_PATTERN_NO;
}
