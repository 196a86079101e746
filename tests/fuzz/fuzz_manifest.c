// covers: formats/manifest_read.c formats/manifest_values.c formats/manifest_write.c formats/dspark_model.c
// The manifest of an image: what is accepted survives being written and read again.
#include "formats/manifest.h"
#include "tests/fuzz/fuzz.h"

static void check_lists(const struct k3_manifest *m) {
  enum k3_role role;
  enum k3_tp_rule tp;
  for (size_t i = 0; i < m->n_tensors; i++) {
    const struct k3_manifest_tensor *tensor = &m->tensors[i];
    uint64_t end = 0;
    FUZZ_CHECK(k3_manifest_tensor_of(m, tensor->name) == tensor);
    k3_manifest_role_of(m, tensor->name, &role, &tp);
    FUZZ_CHECK(role == tensor->role && tp == tensor->tp);
    for (size_t s = 0; s < tensor->n_shards; s++) {
      const struct k3_manifest_shard *shard = &tensor->shards[s];
      FUZZ_CHECK(shard->row >= end && strlen(shard->source) > 0 && shard->file >= -1 && shard->file < (int64_t)m->n_sources);
      end = shard->row + shard->n_rows;
    }
  }
  for (size_t i = 0; i < m->n_linears; i++)
    FUZZ_CHECK(k3_manifest_linear_of(m, m->linears[i].module) == &m->linears[i]);
  for (size_t i = 0; i < m->n_views; i++)
    FUZZ_CHECK(k3_manifest_view_of(m, m->views[i].name) == &m->views[i] && m->views[i].n_shards > 0);
  for (size_t i = 0; i < m->n_sources; i++)
    FUZZ_CHECK(!strchr(m->sources[i].file, '/') && strcmp(m->sources[i].file, "..") != 0);
  for (size_t i = 0; i < m->n_documents; i++)
    FUZZ_CHECK(!strchr(m->documents[i].file, '/') && strcmp(m->documents[i].file, "..") != 0);
  k3_manifest_role_of(m, "model.layers.7.self_attn.o_proj.weight", &role, &tp);
}

// Once more, with an allocation that fails; which one depends on the input.
static void parse_without_memory(const char *text, size_t nbytes) {
  struct k3_manifest m;
  struct k3_error err = {0};
  size_t salt = nbytes * 7 + (nbytes ? (unsigned char)text[nbytes / 2] : 0);
  k3_alloc_fail_at(1 + salt % 24);
  enum k3_status status = k3_manifest_parse(text, nbytes, "input", &m, &err);
  k3_alloc_fail_at(0);
  FUZZ_CHECK(status == err.status && (status == K3_OK || ((status == K3_NO_MEMORY || err.rule == K3_IMG01) && !m.arena.blocks)));
  if (status == K3_OK) {
    k3_alloc_fail_at(1 + salt / 24 % 24);
    char *written = k3_manifest_to_json(&m, &err);
    k3_alloc_fail_at(0);
    FUZZ_CHECK((written != NULL) == (err.status == K3_OK) && (written || err.status == K3_NO_MEMORY));
    k3_free(written);
  }
  k3_manifest_free(&m);
}

// The geometry that was read gives the object that it was read from, but for keys that nobody knows.
static void check_dspark(const struct k3_manifest *m) {
  struct k3_dspark_model again;
  char *text = k3_dspark_model_to_json(&m->dspark, NULL), *second;
  FUZZ_CHECK(text && k3_dspark_model_from_json(text, strlen(text), "again", &again, NULL) == K3_OK);
  second = k3_dspark_model_to_json(&again, NULL);
  FUZZ_CHECK(second && strcmp(text, second) == 0);
  k3_free(text);
  k3_free(second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  struct k3_manifest m, again;
  struct k3_error err = {0};
  const char *text = fuzz_guarded(data, &nbytes);
  // A run of 4096 shards takes some hundred bytes of text, and its expansion 40 bytes each besides the names.
  k3_alloc_set_limit(4096 * nbytes + (1 << 20));
  parse_without_memory(text, nbytes);
  if (k3_manifest_parse(text, nbytes, "input", &m, &err) != K3_OK) {
    FUZZ_CHECK(err.status == K3_BAD_INPUT && err.rule == K3_IMG01 && err.found[0] && !m.arena.blocks);
    return 0;
  }
  check_lists(&m);
  if (strcmp(m.family, "k3-dspark") == 0)
    check_dspark(&m);
  char *first = k3_manifest_to_json(&m, &err), *second;
  FUZZ_CHECK(first);
  if (strlen(first) <= K3_MANIFEST_MAX_NBYTES) {
    k3_alloc_set_limit(4096 * strlen(first) + (1 << 20));
    FUZZ_CHECK(k3_manifest_parse(first, strlen(first), "again", &again, &err) == K3_OK);
    FUZZ_CHECK(again.n_tensors == m.n_tensors && again.n_linears == m.n_linears && again.n_views == m.n_views);
    second = k3_manifest_to_json(&again, &err);
    FUZZ_CHECK(second && strcmp(first, second) == 0);
    k3_free(second);
    k3_manifest_free(&again);
  }
  k3_free(first);
  k3_manifest_free(&m);
  return 0;
}
