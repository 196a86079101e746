#include <stdio.h>
#include <string.h>

#include "formats/manifest.h"

size_t k3_manifest_copied_name(const struct k3_manifest *manifest, const char *source, char *dst, size_t capacity) {
  size_t n_root = strlen(manifest->root);
  if (strncmp(source, manifest->root, n_root) != 0)
    return 0;
  const char *name = source + n_root, *dot = strrchr(name, '.'), *module = NULL;
  size_t n_module = dot ? (size_t)(dot - name) : strlen(name);
  for (size_t i = 0; i < manifest->n_aliases && !module; i++) {
    if (strlen(manifest->aliases[i].key) == n_module && memcmp(manifest->aliases[i].key, name, n_module) == 0)
      module = manifest->aliases[i].value;
  }
  int n = module ? snprintf(dst, capacity, "%s%s%s", manifest->image_root, module, name + n_module)
                 : snprintf(dst, capacity, "%s%s", manifest->image_root, name);
  return n > 0 && (size_t)n < capacity ? (size_t)n : 0;
}
