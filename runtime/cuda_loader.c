#include "runtime/cuda_loader.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/file.h"

static const char REMEDY[] =
    "`make cuda` beside the program (CUDA 13 with nvcc; `make cuda` says what it misses), and an NVIDIA driver for CUDA 13; or --backend cpu";

// The plug-in in the program's own folder, in new memory; NULL when the folder cannot be told.
static char *beside_program(void) {
  char path[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  if (n <= 0)
    return NULL;
  path[n] = 0;
  char *slash = strrchr(path, '/');
  if (slash)
    *slash = 0;
  return k3_path_join(path, K3_CUDA_PLUGIN_FILE, NULL);
}

static void *open_plugin(void) {
  const char *named = getenv("K3PACK_CUDA_PLUGIN");
  if (named && *named)  // whoever names a file wants no other
    return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  char *path = beside_program();
  void *handle = path && access(path, R_OK) == 0 ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : dlopen(K3_CUDA_PLUGIN_FILE, RTLD_NOW | RTLD_LOCAL);
  k3_free(path);
  return handle;
}

enum k3_status k3_cuda_backend_open(const struct k3_cuda_options *options, struct k3_backend **backend, struct k3_error *err) {
  // The handle stays open: the CUDA runtime registers its own clean-up at the program's end and does not survive being unloaded before.
  void *handle = open_plugin();
  const char *why = handle ? NULL : dlerror();
  const struct k3_cuda_plugin *plugin = handle ? dlsym(handle, K3_CUDA_PLUGIN_SYMBOL) : NULL;
  if (!plugin)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, K3_CUDA_PLUGIN_FILE, NULL, REMEDY, "the CUDA plug-in cannot be opened: %s",
                   why ? why : "it exports no " K3_CUDA_PLUGIN_SYMBOL);
  if (plugin->layout != k3_cuda_layout())
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, K3_CUDA_PLUGIN_FILE, NULL, "program and plug-in of one build: `make all cuda`",
                   "the CUDA plug-in is of another build");
  *backend = plugin->create(options, err);
  return *backend ? K3_OK : err ? err->status : K3_UNSUPPORTED;
}
