// Shell globs over whole names, as Python's fnmatch.fnmatchcase reads them.
#include <string.h>

#include "base/utf8.h"
#include "formats/pattern.h"

// Next code point of a text; a broken byte counts as itself.
static size_t next_point(const char *text, size_t nbytes, uint32_t *point) {
  size_t n = k3_utf8_decode(text, nbytes, point);
  if (n > 0)
    return n;
  *point = (unsigned char)text[0];
  return 1;
}

// Length of the class that begins behind '[' at `set`, up to and with its ']'; 0 when it is not closed, and '[' is then a letter.
static size_t class_nbytes(const char *set) {
  size_t n = 0;
  if (set[n] == '!')
    n++;
  if (set[n] == ']')  // a ']' in the first place is a member
    n++;
  while (set[n] && set[n] != ']')
    n++;
  return set[n] ? n + 1 : 0;
}

static bool class_holds(const char *set, size_t nbytes, uint32_t wanted) {
  const char *end = set + nbytes - 1;  // its ']'
  bool negated = *set == '!', found = false;
  for (set += negated; set < end;) {
    uint32_t low, high;
    set += next_point(set, (size_t)(end - set), &low);
    high = low;
    if (set + 1 < end && *set == '-')
      set += 1 + next_point(set + 1, (size_t)(end - set) - 1, &high);
    found |= low <= wanted && wanted <= high;  // "z-a" holds nothing
  }
  return found != negated;
}

bool k3_glob_match(const char *pattern, const char *name, size_t nbytes) {
  const char *end = name + nbytes, *star = NULL, *star_name = NULL;
  for (;;) {
    uint32_t point = 0, wanted;
    size_t n_name = name < end ? next_point(name, (size_t)(end - name), &point) : 0, n_class;
    if (*pattern == '*') {
      star = ++pattern;
      star_name = name;
      continue;
    }
    bool fits = false;
    size_t n_pattern = 0;
    if (*pattern == '\0') {
      if (name == end)
        return true;
    } else if (name < end && *pattern == '?') {
      fits = true;
      n_pattern = 1;
    } else if (name < end && *pattern == '[' && (n_class = class_nbytes(pattern + 1)) > 0) {
      fits = class_holds(pattern + 1, n_class, point);
      n_pattern = 1 + n_class;
    } else if (name < end) {
      n_pattern = next_point(pattern, strlen(pattern), &wanted);
      fits = wanted == point;
    }
    if (fits) {
      pattern += n_pattern;
      name += n_name;
      continue;
    }
    // The last star takes one character more; earlier stars need not.
    if (!star || star_name == end)
      return false;
    star_name += next_point(star_name, (size_t)(end - star_name), &point);
    name = star_name;
    pattern = star;
  }
}
