#include "loader/recipes.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "[NAME]",
    .n_max = 1,
    .about =
        "Lists the recipes that are compiled in, or prints one: the JSON table from which renaming, stacking, views, shapes and rules of a model "
        "family\n"
        "are derived. A copy of it, changed, is what --recipe FILE takes.",
    .examples =
        "  k3pack recipes                         the names\n"
        "  k3pack recipes k3-dspark > my.json     a start for a recipe of your own",
};

static int print_one(struct k3_cli *cli, const char *name) {
  char names[256] = "", shown[256], guess[64];
  size_t n = 0;
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++) {
    if (strcmp(file->name, name) == 0) {
      fwrite(file->text, 1, file->nbytes, stdout);
      return 0;
    }
    if (n < sizeof names)
      n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n ? "|" : "", file->name);
  }
  k3_printable(shown, sizeof shown, name, strlen(name), 60);
  if (k3_cli_suggest(name, names, guess, sizeof guess))
    return k3_cli_usage(cli, "there is no recipe %s; did you mean %s?", shown, guess);
  return k3_cli_usage(cli, "there is no recipe %s", shown);
}

int k3_cmd_recipes(struct k3_cli *cli, int argc, char **argv) {
  static const struct k3_option options[] = {{0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (cli->n_operands == 1)
    return print_one(cli, cli->operands[0]);
  struct k3_jsonw json;
  if (cli->json) {
    k3_cli_json_begin(cli, &json);
    k3_jsonw_begin_array(&json, "recipes");
  }
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++) {
    struct k3_recipe recipe;
    struct k3_error err = {0};
    if (k3_recipe_load(file->name, &recipe, &err) != K3_OK) {
      if (cli->json)
        k3_jsonw_close(&json);
      return k3_cli_fail(cli, &err);
    }
    if (cli->json) {
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_string(&json, "name", recipe.name);
      k3_jsonw_string(&json, "family", recipe.family);
      k3_jsonw_string(&json, "sha256", recipe.sha256);
      k3_jsonw_u64(&json, "modules", recipe.n_modules);
      k3_jsonw_end_object(&json);
    } else if (recipe.keep_names) {
      printf("%-16s every tensor under its own name\n", recipe.name);
    } else {
      printf("%-16s %zu module patterns\n", recipe.name, recipe.n_modules);
    }
    k3_recipe_free(&recipe);
  }
  if (!cli->json)
    return 0;
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}
