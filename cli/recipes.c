#include "loader/recipes.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"

static const struct k3_cli_help help = {
    .operands = "[NAME]",
    .n_max = 1,
    .about =
        "Lists the recipes, or prints one. A recipe is a JSON table: names, shapes, stacking, views, roles and reductions of a model family. A copy of\n"
        "one, changed, is a recipe of your own for --recipe FILE; formats/recipe.h describes every key.",
    .examples =
        "  k3pack recipes\n"
        "  k3pack recipes k3-dspark > mine.json",
};

int k3_cmd_recipes(struct k3_cli *cli, int argc, char **argv) {
  static const struct k3_option options[] = {{0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; cli->n_operands == 1 && file->name; file++) {
    if (strcmp(file->name, cli->operands[0]) == 0) {
      fwrite(file->text, 1, file->nbytes, stdout);
      return 0;
    }
  }
  if (cli->n_operands == 1)
    return k3_cli_usage(cli, "there is no recipe %s", cli->operands[0]);
  struct k3_jsonw json;
  struct k3_recipe recipe;
  struct k3_error err = {0};
  if (cli->json) {
    k3_cli_json_begin(cli, &json);
    k3_jsonw_begin_array(&json, "recipes");
  }
  for (const struct k3_recipe_file *file = K3_RECIPE_FILES; file->name; file++) {
    if (k3_recipe_load(file->name, &recipe, &err) != K3_OK)
      return k3_cli_fail(cli, &err);
    if (cli->json) {
      k3_jsonw_begin_object(&json, NULL);
      k3_jsonw_string(&json, "name", recipe.name);
      k3_jsonw_string(&json, "family", recipe.family);
      k3_jsonw_string(&json, "sha256", recipe.sha256);
      k3_jsonw_u64(&json, "modules", recipe.n_modules);
      k3_jsonw_end_object(&json);
    } else {
      printf("%-16s %3zu modules  %s\n", recipe.name, recipe.n_modules, recipe.about);
    }
    k3_recipe_free(&recipe);
  }
  if (!cli->json)
    return 0;
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}
