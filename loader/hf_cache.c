// Where the HuggingFace cache keeps a snapshot: <hub>/models--<org>--<name>/{refs/<revision>, snapshots/<commit>/, blobs/<digest>}.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "loader/ckpt_parts.h"

static char *hub_folder(struct k3_error *err) {
  const char *hub = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
  if (hub && hub[0])
    return k3_strndup(hub, strlen(hub), err);
  if (home && home[0])
    return k3_path_join(home, "hub", err);
  return k3_path_join(user ? user : "", ".cache/huggingface/hub", err);
}

static bool is_folder(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// One path component of letters, digits, '.', '_' and '-', not "." or "..".
static bool plain_component(const char *text, size_t nbytes) {
  static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (nbytes == 0 || (nbytes == 1 && text[0] == '.') || (nbytes == 2 && text[0] == '.' && text[1] == '.'))
    return false;
  for (size_t i = 0; i < nbytes; i++) {
    if (!memchr(allowed, text[i], sizeof allowed - 1))
      return false;
  }
  return true;
}

// Commit that refs/<revision> names, or the revision itself when there is no such ref.
static char *resolve_revision(const char *repo, const char *revision, struct k3_error *err) {
  char *refs = k3_path_join(repo, "refs", err), *path = refs ? k3_path_join(refs, revision, err) : NULL, *commit = NULL;
  void *text = NULL;
  size_t nbytes = 0;
  if (path && k3_read_file(path, 256, &text, &nbytes, NULL) == K3_OK) {
    size_t n = strcspn(text, " \t\r\n");
    if (plain_component(text, n))
      commit = k3_strndup(text, n, err);
  }
  if (path && !commit)
    commit = k3_strndup(revision, strlen(revision), err);
  k3_free(text);
  k3_free(path);
  k3_free(refs);
  return commit;
}

enum k3_status k3_hf_snapshot(const char *source, char **folder, struct k3_error *err) {
  const char *name = source + strlen("hf:"), *at = strchr(name, '@'), *slash = strchr(name, '/');
  const char *revision = at ? at + 1 : "main";
  size_t name_nbytes = at ? (size_t)(at - name) : strlen(name);
  *folder = NULL;
  if (!slash || (at && slash > at) || !plain_component(name, (size_t)(slash - name)) ||
      !plain_component(slash + 1, name_nbytes - (size_t)(slash + 1 - name)) || !plain_component(revision, strlen(revision)))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, source, NULL, "hf:org/name or hf:org/name@revision", "not a name of the HuggingFace cache");

  enum k3_status status = K3_NO_MEMORY;
  char *commit = NULL, *snapshots = NULL, *snapshot = NULL, *repo = NULL;
  char *hub = hub_folder(err);
  char *repo_name = k3_asprintf(err, "models--%.*s--%.*s", (int)(slash - name), name, (int)(name_nbytes - (size_t)(slash + 1 - name)), slash + 1);
  if (hub && repo_name)
    repo = k3_path_join(hub, repo_name, err);
  if (repo)
    commit = resolve_revision(repo, revision, err);
  if (commit)
    snapshots = k3_path_join(repo, "snapshots", err);
  if (snapshots)
    snapshot = k3_path_join(snapshots, commit, err);
  if (snapshot && is_folder(snapshot)) {
    *folder = snapshot;
    snapshot = NULL;
    status = K3_OK;
  } else if (snapshot) {
    status = k3_fail(err, K3_IO, K3_RULE_NONE, source, NULL, "a downloaded snapshot; k3pack downloads nothing itself", "not in the cache: no folder %s",
                     is_folder(repo) ? snapshot : repo);
  }
  k3_free(snapshot);
  k3_free(snapshots);
  k3_free(commit);
  k3_free(repo);
  k3_free(repo_name);
  k3_free(hub);
  return status;
}
