// covers: formats/quant_config.c formats/quant_config_ct.c formats/quant_config_modelopt.c formats/quant_config_quark.c
// The quantization config: the input is config.json; behind a zero byte may follow hf_quant_config.json.
#include <jansson.h>

#include "formats/quant_config.h"
#include "tests/fuzz/fuzz.h"

static const char *const MODULES[] = {"lm_head", "model.layers.0.self_attn.q_a_proj", "layers.1.mlp.gate_proj", "model.layers.3.experts.17.w1",
                                      "norm"};

// Once more, with an allocation that fails.
static void read_without_memory(const uint8_t *data, size_t nbytes, const struct k3_config *config, const struct k3_config *hf) {
  struct k3_error err = {0};
  struct k3_findings findings = {0};
  struct k3_quant_config *quant = NULL;
  fuzz_count_jansson();
  fuzz_fail_one(data, nbytes, 40);
  enum k3_status status = k3_quant_config_read(config, hf, &quant, &findings, &err);
  fuzz_fail_none();
  json_set_alloc_funcs(malloc, free);
  FUZZ_CHECK(status == K3_OK || status == K3_NO_MEMORY);
  k3_quant_config_free(quant);
  k3_findings_free(&findings);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  const char *text = fuzz_guarded(data, &nbytes), *zero = nbytes > 0 ? memchr(text, 0, nbytes) : NULL;
  size_t n_config = zero ? (size_t)(zero - text) : nbytes;
  struct k3_error err = {0};
  struct k3_findings findings = {0};
  struct k3_quant_config *quant = NULL;
  fuzz_cap_allocations(nbytes);
  struct k3_config *config = k3_config_parse(text, n_config, "config.json", NULL);
  struct k3_config *hf = zero ? k3_config_parse(zero + 1, nbytes - n_config - 1, "hf_quant_config.json", NULL) : NULL;
  if (config || hf) {
    read_without_memory(data, nbytes, config, hf);
    FUZZ_CHECK(k3_quant_config_read(config, hf, &quant, &findings, &err) == K3_OK);
    for (size_t i = 0; i < findings.n_items; i++)
      FUZZ_CHECK(findings.items[i].error.rule != K3_RULE_NONE && findings.items[i].error.found[0]);
  }
  for (size_t m = 0; quant && m < sizeof MODULES / sizeof MODULES[0]; m++) {
    struct k3_quant_answer answer = k3_quant_config_find(quant, MODULES[m], strlen(MODULES[m]), m != 4);
    FUZZ_CHECK((answer.says == K3_SAYS_PLAIN) == (answer.group == NULL));
    char said[160];
    if (answer.group)
      FUZZ_CHECK(k3_quant_args_text(&answer.group->weights, said, sizeof said)[0]);
  }
  k3_quant_config_free(quant);
  k3_findings_free(&findings);
  k3_config_free(config);
  k3_config_free(hf);
  return 0;
}
