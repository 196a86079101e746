#include "loader/old_weights.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

static bool ends_with(const char *name, const char *suffix) {
  size_t n = strlen(name), n_suffix = strlen(suffix);
  return n >= n_suffix && strcmp(name + n - n_suffix, suffix) == 0;
}

static bool is_weights(const char *name) {
  return name[0] != '.' &&
         (ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") || strcmp(name, "hf_quant_config.json") == 0);
}

// A name as checkpoints have it: model.safetensors, model-00001-of-00003.safetensors, the index, the second config.
static bool is_usual(const char *name) {
  return strcmp(name, "hf_quant_config.json") == 0 || strncmp(name, "model.safetensors", strlen("model.safetensors")) == 0 ||
         (strncmp(name, "model-", strlen("model-")) == 0 && strstr(name, "-of-"));
}

// A file in the place of the folder is for k3_make_folder to refuse.
static enum k3_status open_folder(const char *folder, DIR **dir, struct k3_error *err) {
  *dir = opendir(folder);
  return *dir || errno == ENOENT || errno == ENOTDIR ? K3_OK : k3_fail_errno(err, errno, folder, "cannot list");
}

enum k3_status k3_old_weights_refuse(const char *folder, bool replace, const struct k3_names *names, struct k3_error *err) {
  DIR *dir;
  enum k3_status status = open_folder(folder, &dir, err);
  for (struct dirent *entry; dir && status == K3_OK && (entry = readdir(dir));) {
    if (!is_weights(entry->d_name))
      continue;
    if (!replace)
      status = k3_fail(err, K3_EXISTS, K3_OUT01, folder, NULL, "an empty folder, or --force", "the folder holds %s", entry->d_name);
    else if (!is_usual(entry->d_name) && !k3_names_has(names, entry->d_name))
      status = k3_fail(err, K3_EXISTS, K3_OUT01, folder, entry->d_name, "another folder, or move the file away",
                       "the folder holds weights that are no part of a checkpoint called model, and --force does not remove them");
  }
  if (dir)
    closedir(dir);
  return status;
}

enum k3_status k3_old_weights_remove(const char *folder, const struct k3_names *names, struct k3_error *err) {
  DIR *dir;
  enum k3_status status = open_folder(folder, &dir, err);
  for (struct dirent *entry; dir && status == K3_OK && (entry = readdir(dir));) {
    if (is_weights(entry->d_name) && is_usual(entry->d_name) && !k3_names_has(names, entry->d_name) && unlinkat(dirfd(dir), entry->d_name, 0) != 0)
      status = k3_fail_errno(err, errno, folder, "cannot remove an old file of");
  }
  if (dir)
    closedir(dir);
  return status;
}
