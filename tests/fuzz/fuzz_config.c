// covers: formats/config.c formats/json_tree.c formats/dspark_config.c
// config.json: the tree, the look-ups, and the drafter's geometry read from it.
#include <jansson.h>

#include "formats/config.h"
#include "formats/dspark_model.h"
#include "formats/json_tree.h"
#include "tests/fuzz/fuzz.h"

static char *written(const json_t *root) {
  struct k3_jsonw writer;
  k3_jsonw_open(&writer, false, NULL, NULL);
  k3_json_tree_write(&writer, NULL, root);
  char *text = k3_json_tree_take(&writer, NULL);
  FUZZ_CHECK(text);
  return text;
}

// The tree survives being written and read again.
static void check_tree(const struct k3_config *config) {
  struct k3_error err = {0};
  json_t *again;
  char *text = written((const json_t *)k3_config_root(config)), *second;
  FUZZ_CHECK(k3_json_tree_parse(text, strlen(text), K3_CFG19, "again", &again, &err) == K3_OK);
  second = written(again);
  FUZZ_CHECK(strcmp(text, second) == 0);
  json_decref(again);
  k3_free(text);
  k3_free(second);
}

static void check_lookups(const struct k3_config *config, const char *path) {
  enum k3_config_kind kind = k3_config_kind_of(config, path);
  uint64_t u64 = 7, list[4];
  double real = 7;
  bool flag = false, found;
  const char *text = "";
  size_t n;
  struct k3_error err = {0};
  enum k3_status status = k3_config_u64(config, path, &u64, &found, &err);
  FUZZ_CHECK(found == (kind != K3_CONFIG_ABSENT) && (status == K3_OK || err.rule == K3_CFG20) && u64 <= UINT64_C(1) << 53);
  FUZZ_CHECK(kind != K3_CONFIG_ABSENT || u64 == 7);
  FUZZ_CHECK((k3_config_real(config, path, &real, NULL, NULL) == K3_OK) ==
             (kind == K3_CONFIG_ABSENT || kind == K3_CONFIG_INT || kind == K3_CONFIG_REAL));
  FUZZ_CHECK((k3_config_bool(config, path, &flag, NULL, NULL) == K3_OK) == (kind == K3_CONFIG_ABSENT || kind == K3_CONFIG_BOOL));
  FUZZ_CHECK((k3_config_string(config, path, &text, NULL, NULL) == K3_OK) == (kind == K3_CONFIG_ABSENT || kind == K3_CONFIG_STRING));
  FUZZ_CHECK(strlen(text) < FUZZ_MAX_NBYTES);
  if (k3_config_u64_list(config, path, list, 4, &n, &found, NULL) == K3_OK && found)
    FUZZ_CHECK(kind == K3_CONFIG_LIST && n <= 4);
  char both[64];
  FUZZ_CHECK(k3_config_contradicts(config, path, both, sizeof both) == (both[0] != '\0') && (both[0] == '\0' || kind != K3_CONFIG_ABSENT));
  if (k3_config_require_u64(config, path, &u64, NULL) == K3_OK)
    FUZZ_CHECK(kind == K3_CONFIG_INT);
}

// What is accepted is sound, and survives the manifest.
static void check_model(const struct k3_config *config) {
  struct k3_dspark_model model, again;
  struct k3_findings findings = {0};
  enum k3_status status = k3_dspark_model_from_config(config, 0, &model, &findings);
  FUZZ_CHECK(status == K3_OK || status == K3_BAD_INPUT || status == K3_UNSUPPORTED);
  FUZZ_CHECK((status == K3_OK) == (findings.n_errors == 0));
  if (status == K3_OK) {
    uint64_t nbytes;
    FUZZ_CHECK(!__builtin_mul_overflow(model.n_heads * (model.qk_nope_head_dim + model.qk_rope_head_dim), model.q_lora_rank * 4, &nbytes));
    FUZZ_CHECK(model.mask_token_id < model.vocab_size && model.n_taps >= 1 && model.n_taps <= K3_DSPARK_MAX_TAPS);
    FUZZ_CHECK(model.target_layer_ids[model.n_taps - 1] < model.target_n_layers && model.qk_rope_head_dim % 2 == 0);
    char *text = k3_dspark_model_to_json(&model, NULL), *second;
    struct k3_error err = {0};
    FUZZ_CHECK(text && k3_dspark_model_from_json(text, strlen(text), "again", &again, &err) == K3_OK);
    second = k3_dspark_model_to_json(&again, NULL);
    FUZZ_CHECK(second && strcmp(text, second) == 0);
    k3_free(text);
    k3_free(second);
  }
  k3_findings_free(&findings);
}

static void *counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

// Once more, with an allocation that fails; which one depends on the input.
static void parse_without_memory(const char *text, size_t nbytes) {
  struct k3_error err = {0};
  json_set_alloc_funcs(counted_malloc, k3_free);
  k3_alloc_fail_at(1 + (nbytes * 7 + (nbytes ? (unsigned char)text[nbytes / 2] : 0)) % 64);
  struct k3_config *config = k3_config_parse(text, nbytes, "input", &err);
  k3_alloc_fail_at(0);
  FUZZ_CHECK((config != NULL) == (err.status == K3_OK));
  FUZZ_CHECK(config || err.status == K3_NO_MEMORY || err.status == K3_BAD_INPUT);
  k3_config_free(config);
  json_set_alloc_funcs(malloc, free);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  static const char *const paths[] = {"hidden_size", "a", "rope_parameters", "rope_parameters.factor", "target_layer_ids", "o.k.n", "", "."};
  struct k3_error err = {0};
  const char *text = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  parse_without_memory(text, nbytes);
  struct k3_config *config = k3_config_parse(text, nbytes, "input", &err);
  if (!config) {
    FUZZ_CHECK(err.status == K3_BAD_INPUT && (err.rule == K3_CFG19 || err.rule == K3_CNT01) && err.found[0]);
    return 0;
  }
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
    check_lookups(config, paths[i]);
  check_tree(config);
  check_model(config);
  k3_config_free(config);
  return 0;
}
