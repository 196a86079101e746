// A locale whose decimal separator is a comma: an installed one, else one that is compiled here into temp_folder (tests/unit/temp_folder.h), which
// glibc finds by LOCPATH.
#ifndef K3_TESTS_UNIT_COMMA_LOCALE_H
#define K3_TESTS_UNIT_COMMA_LOCALE_H

#include <locale.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "temp_folder.h"

static inline bool comma_locale_try(const char *name) {
  return setlocale(LC_ALL, name) && strcmp(localeconv()->decimal_point, ",") == 0;
}

// Switches the process to it. False, in the C locale, when there is none. Undo with setlocale(LC_ALL, "C").
static inline bool comma_locale_set(void) {
  static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "nb_NO.UTF-8", "nl_NL.UTF-8", "de_DE"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (comma_locale_try(names[i]))
      return true;
  }
  char command[512];
  snprintf(command, sizeof command, "localedef -c -i de_DE -f UTF-8 '%s/de_DE.UTF-8' >/dev/null 2>&1", temp_folder);
  if (system(command) != 0)
    snprintf(command, sizeof command, "failed");
  setenv("LOCPATH", temp_folder, 1);
  if (comma_locale_try("de_DE.UTF-8"))
    return true;
  setlocale(LC_ALL, "C");
  return false;
}

#endif
