// covers: formats/moe_model.c
// The geometry of decoder layers, as a manifest's "model" object carries it.
#include <jansson.h>
#include <math.h>

#include "formats/dspark_fields.h"
#include "formats/moe_model.h"
#include "tests/fuzz/fuzz.h"

static bool within(double value, double min, double max) {
  return value >= min && value <= max;
}

// Sizes that the layers multiply stay within 64 bits, and no number is what a loop or a division cannot take.
static void check(const struct k3_moe_model *m) {
  const uint64_t width = UINT64_C(1) << 24;
  uint64_t n;
  FUZZ_CHECK(m->n_layers >= 1 && m->n_layers <= K3_MOE_MAX_LAYERS && m->hidden_size >= 1 && m->hidden_size <= width);
  FUZZ_CHECK(m->n_heads >= 1 && m->n_active >= 1 && m->n_active <= m->n_experts && m->n_experts <= K3_MOE_MAX_EXPERTS);
  FUZZ_CHECK(m->n_groups >= 1 && m->n_experts % m->n_groups == 0 && m->n_active_groups >= 1 && m->n_active_groups <= m->n_groups);
  FUZZ_CHECK(m->n_active_groups * (m->n_experts / m->n_groups) >= m->n_active);
  FUZZ_CHECK(m->dense_size >= 1 && m->dense_size <= width && m->expert_size >= 1 && m->expert_size <= width && m->shared_size >= 1);
  FUZZ_CHECK(m->max_dense_keys >= 1 && m->max_position_embeddings >= 1 && m->max_position_embeddings <= K3_DSPARK_MAX_POSITIONS);
  FUZZ_CHECK(!__builtin_mul_overflow(2 * m->n_experts * m->expert_size, m->hidden_size, &n) && !__builtin_mul_overflow(2, m->shared_size, &n));
  FUZZ_CHECK(within(m->rope.theta, 1, 1e15) && within(m->rope.factor, 1e-6, 1e6) && within(m->rope.beta_slow, 1e-6, m->rope.beta_fast));
  FUZZ_CHECK(within(m->rms_norm_eps, 1e-30, 1) && within(m->routed_scale, 1e-6, 1e6));
  if (m->family == K3_MOE_MINIMAX_M3) {
    FUZZ_CHECK(m->n_kv_heads >= 1 && m->n_heads % m->n_kv_heads == 0 && m->rotary_dim <= m->head_dim && m->rotary_dim % 2 == 0);
    FUZZ_CHECK(m->gemma_norm && within(m->alpha, 1e-6, 1e6) && within(m->limit, 1e-6, 1e30));
  } else {
    FUZZ_CHECK(m->family == K3_MOE_DEEPSEEK_V32 && m->qk_rope_head_dim % 2 == 0 && !m->gemma_norm);
    FUZZ_CHECK(!__builtin_mul_overflow(m->n_heads * (m->qk_nope_head_dim + m->v_head_dim), m->kv_lora_rank, &n));
    FUZZ_CHECK(!__builtin_mul_overflow(m->n_heads * (m->qk_nope_head_dim + m->qk_rope_head_dim), m->q_lora_rank, &n));
    FUZZ_CHECK(!m->rope.yarn || m->rope.original_max_position >= 1);
  }
}

static void parse_without_memory(const uint8_t *data, const char *text, size_t nbytes) {
  static struct k3_moe_model model;
  struct k3_error err = {0};
  fuzz_count_jansson();
  fuzz_fail_one(data, nbytes, 64);
  enum k3_status status = k3_moe_model_from_json(text, nbytes, "input", &model, &err);
  fuzz_fail_none();
  json_set_alloc_funcs(malloc, free);
  FUZZ_CHECK(status == err.status && (status == K3_OK || status == K3_BAD_INPUT || status == K3_UNSUPPORTED || status == K3_NO_MEMORY));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  static struct k3_moe_model model;
  struct k3_error err = {0};
  const char *text = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  parse_without_memory(data, text, nbytes);
  enum k3_status status = k3_moe_model_from_json(text, nbytes, "input", &model, &err);
  FUZZ_CHECK(status == K3_OK ? err.status == K3_OK : err.found[0] != 0);
  if (status == K3_OK)
    check(&model);
  else
    FUZZ_CHECK((status == K3_BAD_INPUT && err.rule != K3_RULE_NONE) || (status == K3_UNSUPPORTED && err.rule == K3_CFG21));
  return 0;
}
