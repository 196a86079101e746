// Which bytes a folder holds: SHA-256 of its files against the names that the HuggingFace cache gives its blobs, and against published releases. Nothing
// is asked of a network.
#ifndef K3_LOADER_DIGESTS_H
#define K3_LOADER_DIGESTS_H

#include "base/findings.h"
#include "base/progress.h"
#include "formats/recipe.h"
#include "loader/ckpt.h"

struct k3_release_match {
  const struct k3_recipe_release *release;  // NULL: none of the recipe's
  bool proved;                              // every file has the digest; else names and sizes alone
};

struct k3_digests {
  uint64_t n_files, n_proved;  // files read; those whose blob has the digest as its name
  struct k3_release_match match;
};

// Reads every file in use and every JSON document once, in parallel over files. A blob of a cache whose name is a SHA-256 (64 hex digits) and whose bytes
// have another is IMG02; files outside a cache, and blobs with another kind of name, are compared with releases only. Fails for lack of memory or when a
// file cannot be read.
enum k3_status k3_digests_check(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe, int n_threads, struct k3_progress *progress,
                                struct k3_digests *result, struct k3_findings *findings, struct k3_error *err);

// By the names and sizes of the files alone; reads nothing.
struct k3_release_match k3_release_by_size(const struct k3_ckpt *ckpt, const struct k3_recipe *recipe);

#endif
