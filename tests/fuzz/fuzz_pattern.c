// covers: formats/pattern.c formats/pattern_glob.c formats/pattern_regex.c
// Patterns: the first byte chooses the kind, the text up to the first line feed is the pattern, the rest the name.
#include "formats/pattern.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  if (nbytes == 0)
    return 0;
  enum k3_pattern_kind kind = (enum k3_pattern_kind)(data[0] % 4);
  const char *text = fuzz_guarded(data + 1, (nbytes--, &nbytes));
  const char *line = memchr(text, '\n', nbytes), *name = line ? line + 1 : text + nbytes;
  size_t n_pattern = line ? (size_t)(line - text) : nbytes, n_name = nbytes - n_pattern - (line != NULL);
  if (n_pattern > 4200 || n_name > 600)
    return 0;
  // A pattern from a config is terminated and holds no zero.
  char pattern_text[4201];
  memcpy(pattern_text, text, n_pattern);
  pattern_text[n_pattern] = '\0';
  struct k3_error err = {0};
  fuzz_cap_allocations(nbytes);
  fuzz_fail_one(data, n_pattern + n_name, 6);
  k3_pattern_free(k3_pattern_compile(kind, pattern_text, "input", NULL));
  fuzz_fail_none();
  struct k3_pattern *pattern = k3_pattern_compile(kind, pattern_text, "input", &err);
  if (!pattern) {
    FUZZ_CHECK(kind == K3_PATTERN_REGEX && err.status == K3_BAD_INPUT && err.rule == K3_CFG10 && err.found[0]);
    return 0;
  }
  FUZZ_CHECK(strcmp(k3_pattern_text(pattern), pattern_text) == 0 && k3_pattern_kind_of(pattern) == kind);
  enum k3_pattern_answer answer = k3_pattern_match(pattern, name, n_name);
  FUZZ_CHECK(answer == K3_PATTERN_NO || answer == K3_PATTERN_YES || kind == K3_PATTERN_REGEX);
  FUZZ_CHECK(k3_pattern_match(pattern, name, n_name) == answer);
  if (kind == K3_PATTERN_LITERAL)
    FUZZ_CHECK((answer == K3_PATTERN_YES) == (strlen(pattern_text) == n_name && memcmp(pattern_text, name, n_name) == 0));
  k3_pattern_free(pattern);
  return 0;
}
