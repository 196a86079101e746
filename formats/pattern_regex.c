// Regular expressions: Python's re.match on the subset of its syntax that PCRE2 reads alike. The pattern is walked once before it is compiled, and
// everything outside the subset is refused by name.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/pattern.h"

enum {
  MAX_NBYTES = 4096,  // of a pattern
  MAX_GROUP_DEPTH = 64,
  MATCH_LIMIT = 200000,  // steps of one match
  HEAP_LIMIT_KIB = 4096,
};

struct k3_regex {
  pcre2_code *code;
  pcre2_match_data *data;
  pcre2_match_context *limits;
};

struct walk {
  const char *text, *next, *file;
  struct k3_error *err;
};

static enum k3_status refuse(const struct walk *w, const char *what) {
  return k3_fail(w->err, K3_BAD_INPUT, K3_CFG10, w->file, w->text, "the common subset of Python's re and PCRE2", "%s at byte %zu", what,
                 (size_t)(w->next - w->text));
}

// '\' and what follows; *repeatable: a quantifier may follow.
static enum k3_status walk_escape(struct walk *w, bool in_class, bool *repeatable) {
  char c = w->next[1];
  *repeatable = true;
  if (c == '\0')
    return refuse(w, "a lone backslash");
  bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  bool digit = c >= '0' && c <= '9';
  if (digit)
    return refuse(w, "a back-reference or octal escape");
  if (letter && !strchr("dDwWsSnrtfv", c)) {
    if (in_class || !strchr("bBA", c))
      return refuse(w, "an escape that is not supported");
    *repeatable = false;
  }
  if (c == 'v')  // vertical tab to Python, vertical white space to PCRE2
    return refuse(w, "an escape that is not supported");
  if ((unsigned char)c >= 0x80)
    return refuse(w, "an escaped letter outside ASCII");
  w->next += 2;
  return K3_OK;
}

static enum k3_status walk_class(struct walk *w) {
  w->next++;
  if (*w->next == '^')
    w->next++;
  bool first = true, range_open = false, after_set = false;
  for (; *w->next != ']' || first; first = false) {
    if (*w->next == '\0')
      return refuse(w, "a class that is not closed");
    if (*w->next == '[')  // a POSIX class to PCRE2, a possible nested set to Python
      return refuse(w, "a '[' within a class");
    if (*w->next == '-' && !first && w->next[1] != ']') {
      if (range_open || after_set)
        return refuse(w, "a range that cannot be read");
      range_open = true;
      w->next++;
      continue;
    }
    bool set = *w->next == '\\' && w->next[1] && strchr("dDwWsS", w->next[1]);
    if (set && range_open)
      return refuse(w, "a range that ends in a set");
    bool repeatable;
    if (*w->next == '\\')
      K3_TRY(walk_escape(w, true, &repeatable));
    else
      w->next++;
    after_set = set || range_open;
    range_open = false;
  }
  w->next++;
  return K3_OK;
}

// "(?...": only what both read alike.
static enum k3_status walk_group_head(struct walk *w, bool *assertion) {
  static const char *const heads[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!"};
  *assertion = false;
  if (w->next[1] == '*')
    return refuse(w, "a verb of PCRE2");
  if (w->next[1] != '?') {
    w->next++;
    return K3_OK;
  }
  for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
    if (strncmp(w->next, heads[i], strlen(heads[i])) == 0) {
      w->next += strlen(heads[i]);
      *assertion = i > 0;
      return K3_OK;
    }
  }
  if (strncmp(w->next, "(?P<", 4) == 0) {
    size_t n = strspn(w->next + 4, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
    if (n == 0 || n > 32 || w->next[4 + n] != '>' || (w->next[4] >= '0' && w->next[4] <= '9'))
      return refuse(w, "a group name that cannot be read");
    w->next += 5 + n;
    return K3_OK;
  }
  return refuse(w, "a group of a kind that is not supported");
}

// A quantifier at w->next; *found false when there is none.
static enum k3_status walk_quantifier(struct walk *w, bool repeatable, bool *found) {
  size_t n = 0;
  *found = false;
  if (*w->next == '*' || *w->next == '+' || *w->next == '?') {
    n = 1;
  } else if (*w->next == '{') {
    size_t low = strspn(w->next + 1, "0123456789"), comma = w->next[1 + low] == ',', high = strspn(w->next + 1 + low + comma, "0123456789");
    if (w->next[1 + low + comma + high] != '}' || (low == 0 && high == 0 && !comma))
      return K3_OK;  // a '{' that is a letter, to both
    if (low == 0)
      return refuse(w, "{,n}, which is a quantifier to Python alone");
    n = 2 + low + comma + high;
  }
  if (n == 0)
    return K3_OK;
  if (!repeatable)
    return refuse(w, "a quantifier with nothing to repeat");
  w->next += n;
  if (*w->next == '?')
    w->next++;
  bool another;
  if (*w->next == '*' || *w->next == '+' || *w->next == '?')
    return refuse(w, "a quantifier behind a quantifier");
  struct walk ahead = *w;
  ahead.err = NULL;
  if (*w->next == '{' && (walk_quantifier(&ahead, true, &another) != K3_OK || another))
    return refuse(w, "a quantifier behind a quantifier");
  *found = true;
  return K3_OK;
}

static enum k3_status walk(struct walk *w) {
  bool assertion[MAX_GROUP_DEPTH], repeatable = false, found;
  unsigned depth = 0;
  if (strlen(w->text) > MAX_NBYTES)
    return refuse(w, "a pattern of more than 4096 bytes");
  if (strncmp(w->next, "(?i)", 4) == 0)
    w->next += 4;
  while (*w->next) {
    K3_TRY(walk_quantifier(w, repeatable, &found));
    if (found) {
      repeatable = false;
      continue;
    }
    switch (*w->next) {
      case '\\': K3_TRY(walk_escape(w, false, &repeatable)); break;
      case '[':
        K3_TRY(walk_class(w));
        repeatable = true;
        break;
      case '(':
        if (depth == MAX_GROUP_DEPTH)
          return refuse(w, "groups nested too deeply");
        K3_TRY(walk_group_head(w, &assertion[depth++]));
        repeatable = false;
        break;
      case ')':
        if (depth == 0)
          return refuse(w, "a ')' without '('");
        repeatable = !assertion[--depth];
        w->next++;
        break;
      case '|':
      case '^':
      case '$':
        repeatable = false;
        w->next++;
        break;
      default:
        repeatable = true;
        for (w->next++; ((unsigned char)*w->next & 0xC0) == 0x80;)  // the rest of a code point
          w->next++;
        break;
    }
  }
  return depth == 0 ? K3_OK : refuse(w, "a group that is not closed");
}

struct k3_regex *k3_regex_compile(const char *text, const char *file, struct k3_error *err) {
  struct walk w = {text, text, file, err};
  if (walk(&w) != K3_OK)
    return NULL;
  struct k3_regex *regex = k3_calloc(1, sizeof *regex, err);
  pcre2_compile_context *context = pcre2_compile_context_create(NULL);
  if (!regex || !context) {
    pcre2_compile_context_free(context);
    k3_free(regex);
    k3_fail_memory(err, sizeof *regex);
    return NULL;
  }
  int code;
  PCRE2_SIZE offset;
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  regex->code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code,
                              &offset, context);
  pcre2_compile_context_free(context);
  if (!regex->code) {
    char message[160];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
    k3_fail(err, K3_BAD_INPUT, K3_CFG10, file, text, "a regular expression", "%s at byte %zu", message, (size_t)offset);
    k3_regex_free(regex);
    return NULL;
  }
  pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE);  // without it matching is slower, not different
  regex->data = pcre2_match_data_create(1, NULL);
  regex->limits = pcre2_match_context_create(NULL);
  if (!regex->data || !regex->limits) {
    k3_fail_memory(err, 0);
    k3_regex_free(regex);
    return NULL;
  }
  pcre2_set_match_limit(regex->limits, MATCH_LIMIT);
  pcre2_set_heap_limit(regex->limits, HEAP_LIMIT_KIB);
  return regex;
}

enum k3_pattern_answer k3_regex_match(struct k3_regex *regex, const char *name, size_t nbytes) {
  int n = pcre2_match(regex->code, (PCRE2_SPTR)name, nbytes, 0, 0, regex->data, regex->limits);
  if (n >= 0)
    return K3_PATTERN_YES;
  return n == PCRE2_ERROR_NOMATCH ? K3_PATTERN_NO : K3_PATTERN_TOO_MUCH;
}

void k3_regex_free(struct k3_regex *regex) {
  if (!regex)
    return;
  pcre2_match_context_free(regex->limits);
  pcre2_match_data_free(regex->data);
  pcre2_code_free(regex->code);
  k3_free(regex);
}
