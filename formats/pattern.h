// Patterns over module names, as quantization configs use them. A pattern is compiled once and matched against many names.
//   regex       Python's re.match(text, name): anchored at the start, not at the end. The subset that config files use: literals, '.', classes,
//               \d \w \s \b and their opposites, quantifiers (lazy ones too), groups (?:...) (?P<n>...), look-ahead and look-behind, '|', '^', '$',
//               \A and a leading (?i). Whatever Python and PCRE2 read differently is refused, never silently different.
//   glob        Python's fnmatch.fnmatchcase(name, text): the whole name; '*', '?', [abc], [a-z], [!abc]
//   literal     the whole name
//   components  whole components of the name, anywhere in it: "layers.1" is in "model.layers.1.mlp" and not in "model.layers.10.mlp"
#ifndef K3_FORMATS_PATTERN_H
#define K3_FORMATS_PATTERN_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

enum k3_pattern_kind { K3_PATTERN_LITERAL, K3_PATTERN_COMPONENTS, K3_PATTERN_GLOB, K3_PATTERN_REGEX };
enum k3_pattern_answer {
  K3_PATTERN_NO,
  K3_PATTERN_YES,
  K3_PATTERN_TOO_MUCH,  // a regex that needs more steps on this name than is allowed: to be reported, not to be taken for a "no"
};

struct k3_pattern;

// Compiles `text` (terminated UTF-8, without the "re:" of compressed-tensors). CFG10 with the pattern as subject when a regex is not in the subset or
// not well formed. NULL and *err on failure; free with k3_pattern_free (NULL is a no-op).
struct k3_pattern *k3_pattern_compile(enum k3_pattern_kind kind, const char *text, const char *file, struct k3_error *err);
void k3_pattern_free(struct k3_pattern *pattern);
const char *k3_pattern_text(const struct k3_pattern *pattern);
enum k3_pattern_kind k3_pattern_kind_of(const struct k3_pattern *pattern);

// Matches a name of nbytes bytes (UTF-8, not terminated). Not for several threads at once on one pattern.
enum k3_pattern_answer k3_pattern_match(struct k3_pattern *pattern, const char *name, size_t nbytes);

// The pieces, each behind one file.
struct k3_regex;
struct k3_regex *k3_regex_compile(const char *text, const char *file, struct k3_error *err);  // formats/pattern_regex.c, the only user of PCRE2
enum k3_pattern_answer k3_regex_match(struct k3_regex *regex, const char *name, size_t nbytes);
void k3_regex_free(struct k3_regex *regex);
bool k3_glob_match(const char *pattern, const char *name, size_t nbytes);  // formats/pattern_glob.c; time at most length times length

#endif
