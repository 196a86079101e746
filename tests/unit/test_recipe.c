// Recipes that users write themselves: what is refused, and that the message names the key.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "formats/recipe.h"

static void refused(const char *text, const char *key) {
  struct k3_recipe recipe;
  struct k3_error err = {0};
  assert_int_equal(k3_recipe_parse(text, strlen(text), "r.json", &recipe, &err), K3_BAD_INPUT);
  char message[2048];
  k3_error_text(&err, message, sizeof message);
  if (!strstr(message, key))
    fail_msg("%s does not name %s", message, key);
}

// A recipe of one module with these keys after its shape, and these keys beside the modules.
static const char *one_module(const char *of_module, const char *of_recipe) {
  static char text[20000];
  int n = snprintf(text, sizeof text,
                   "{\"name\": \"r\", \"dims\": {\"H\": \"hidden_size\"}, \"indexes\": {\"i\": \"4\"}%s, \"modules\": [{%s\"shape\": [\"H\"]}]}",
                   of_recipe, of_module);
  assert_in_range(n, 1, (int)sizeof text - 1);
  return text;
}

static const char *of_length(const char *format, size_t n_bytes) {
  static char text[16000], name[12000];
  assert_true(n_bytes < sizeof name);
  memset(name, 'x', n_bytes);
  name[n_bytes] = '\0';
  const char *at = strstr(format, "$");
  snprintf(text, sizeof text, "%.*s%s%s", (int)(at - format), format, name, at + 1);
  return text;
}

static void accepted(const char *text) {
  struct k3_recipe recipe;
  struct k3_error err = {0};
  assert_int_equal(k3_recipe_parse(text, strlen(text), "r.json", &recipe, &err), K3_OK);
  k3_recipe_free(&recipe);
}

static void names_have_a_limit(void **state) {
  (void)state;
  accepted(one_module("\"name\": \"a\", ", ""));
  accepted(one_module(of_length("\"name\": \"$\", ", 160), ""));
  refused(one_module(of_length("\"name\": \"$\", ", 161), ""), "modules.name");
  refused(one_module("\"name\": \"\", ", ""), "modules.name");
  accepted(one_module(of_length("\"name\": \"a\", \"into\": \"$\", ", 160), ""));
  refused(one_module(of_length("\"name\": \"a\", \"into\": \"$\", ", 5000), ""), "into");
  refused(one_module("\"name\": \"a\", \"into\": \"{i}{i}{i}{i}{i}{i}{i}{i}{i}\", ", ""), "into");
  refused(one_module(of_length("\"name\": \"a\", \"params\": {\"$\": [\"H\"]}, ", 65), ""), "params");
  refused(one_module("\"name\": \"a\", ", of_length(", \"image_root\": \"$\"", 65)), "image_root");
  refused(one_module("\"name\": \"a\", ", of_length(", \"roots\": [\"$\"]", 65)), "roots");
  accepted(one_module("\"name\": \"a\", ", of_length(", \"roots\": [\"$\"]", 64)));
}

// Names of the format's own tensors: a stacked tensor under one of them would look like a pad or a seal.
// B11: no rule of a recipe makes a tensor called __metadata__.
static void the_formats_own_names_are_reserved(void **state) {
  (void)state;
  refused(one_module("\"name\": \"a\", \"into\": \"__pad__.0\", ", ""), "into");
  refused(one_module("\"name\": \"__k3pack__\", ", ""), "modules.name");
  refused(one_module("\"name\": \"a\", ", ", \"image_root\": \"__seal__.\""), "image_root");
}

static void misspelt_keys_are_named(void **state) {
  (void)state;
  refused(one_module("\"name\": \"a\", \"shrad\": 1, ", ""), "shrad");
  refused(one_module("\"name\": \"a\", ", ", \"modles\": []"), "modles");
}

static void a_view_has_one_name(void **state) {
  (void)state;
  accepted(one_module("\"name\": \"l.{i}.a\", \"view\": {\"name\": \"v\", \"shard\": \"{i}\"}, ", ""));
  refused(one_module("\"name\": \"l.{i}.a\", \"view\": {\"name\": \"v.{i}\", \"shard\": \"{i}\"}, ", ""), "view.name");
}

static void lists_have_a_limit(void **state) {
  (void)state;
  char text[4000] = ", \"roots\": [\"a.\"";
  size_t n = strlen(text);
  for (int i = 1; i < 256; i++)
    n += (size_t)snprintf(text + n, sizeof text - n, ", \"b.\"");
  char more[4016];
  snprintf(more, sizeof more, "%s, \"c.\"]", text);
  snprintf(text + n, sizeof text - n, "]");
  accepted(one_module("\"name\": \"a\", ", text));
  refused(one_module("\"name\": \"a\", ", more), "roots");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(names_have_a_limit),      cmocka_unit_test(the_formats_own_names_are_reserved),
      cmocka_unit_test(misspelt_keys_are_named), cmocka_unit_test(a_view_has_one_name),
      cmocka_unit_test(lists_have_a_limit),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
