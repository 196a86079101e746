// A private temporary folder for one test program, removed with its content at the end.
#ifndef K3_TESTS_UNIT_TEMP_FOLDER_H
#define K3_TESTS_UNIT_TEMP_FOLDER_H

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char temp_folder[256];

static inline int temp_folder_setup(void **state) {
  (void)state;
  const char *base = getenv("TMPDIR");
  snprintf(temp_folder, sizeof temp_folder, "%s/k3pack-test-XXXXXX", base && base[0] ? base : "/tmp");
  return mkdtemp(temp_folder) ? 0 : -1;
}

static inline int temp_remove_one(const char *path, const struct stat *st, int type, struct FTW *place) {
  (void)st, (void)type, (void)place;
  return remove(path);
}

static inline int temp_folder_teardown(void **state) {
  (void)state;
  return nftw(temp_folder, temp_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

// "folder/name", valid to the end of the program; at most 64 different names.
static inline const char *temp_path(const char *name) {
  static char paths[64][600];
  static size_t n_paths;
  char path[600];
  snprintf(path, sizeof path, "%s/%s", temp_folder, name);
  for (size_t i = 0; i < n_paths; i++) {
    if (strcmp(paths[i], path) == 0)
      return paths[i];
  }
  if (n_paths == 64)
    abort();
  return strcpy(paths[n_paths++], path);
}

// Number of entries of a folder, hidden ones included.
static inline int temp_n_entries(const char *path) {
  int n = -2;  // "." and ".."
  DIR *dir = opendir(path);
  while (dir && readdir(dir))
    n++;
  if (dir)
    closedir(dir);
  return n;
}

#endif
