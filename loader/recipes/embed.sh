#!/bin/sh
# Prints a C file that holds the given recipe files as byte arrays, and the table K3_RECIPE_FILES that loader/recipes.c searches.
echo '// Made from loader/recipes/*.json; do not edit.'
echo '#include "loader/recipes.h"'
rows=
for file; do
  id=$(basename "$file" .json | tr -c 'A-Za-z0-9\n' _)
  echo "static const char TEXT_$id[] = {"
  od -An -v -tu1 "$file" | sed 's/ *\([0-9][0-9]*\)/\1,/g'
  echo '0};'
  rows="$rows    {\"$(basename "$file" .json)\", TEXT_$id, sizeof TEXT_$id - 1},
"
done
echo 'const struct k3_recipe_file K3_RECIPE_FILES[] = {'
printf '%s' "$rows"
echo '    {0}};'
