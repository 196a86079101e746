#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/inspect_parts.h"

bool k3_inspect_model(const struct k3_ckpt *ckpt, struct k3_dspark_model *model) {
  if (ckpt->image.bytes) {
    *model = ckpt->image.manifest.dspark;
    return strcmp(ckpt->image.manifest.family, "k3-dspark") == 0;
  }
  const char *type = "";
  if (!ckpt->config || k3_config_string(ckpt->config, "model_type", &type, NULL, NULL) != K3_OK || strcmp(type, "k3_dspark") != 0)
    return false;
  struct k3_findings findings = {0};  // check prints them; here they only mean that there is no geometry to show
  bool good = k3_dspark_model_from_config(ckpt->config, 0, model, &findings) == K3_OK;
  k3_findings_free(&findings);
  return good;
}

void k3_inspect_print_model(const struct k3_dspark_model *m) {
  printf("model: hidden %" PRIu64 ", %" PRIu64 " layers, %" PRIu64 " heads of %" PRIu64 " + %" PRIu64 ", value %" PRIu64 ", ranks %" PRIu64
         " and %" PRIu64 ", MLP %" PRIu64 ", vocabulary %" PRIu64 ", Markov rank %" PRIu64 ",\n",
         m->hidden_size, m->n_layers, m->n_heads, m->qk_nope_head_dim, m->qk_rope_head_dim, m->v_head_dim, m->q_lora_rank, m->kv_lora_rank,
         m->intermediate_size, m->vocab_size, m->markov_rank);
  printf("       block of %" PRIu64 " rows (%s), %" PRIu64 " taps of %" PRIu64 " (", m->block_width, m->causal ? "causal" : "each sees all",
         m->n_taps, m->target_hidden_size);
  for (uint64_t i = 0; i < m->n_taps; i++)
    printf("%s%" PRIu64, i ? ", " : "", m->target_layer_ids[i]);
  printf("), stream %s, mask token %" PRIu64 ", %s confidence head\n", m->target_stream, m->mask_token_id, m->confidence_head ? "a" : "no");
}

void k3_inspect_json_model(struct k3_jsonw *json, const struct k3_dspark_model *m) {
  const struct {
    const char *key;
    uint64_t value;
  } numbers[] = {
      {"hidden_size", m->hidden_size},
      {"target_hidden_size", m->target_hidden_size},
      {"num_hidden_layers", m->n_layers},
      {"num_attention_heads", m->n_heads},
      {"qk_nope_head_dim", m->qk_nope_head_dim},
      {"qk_rope_head_dim", m->qk_rope_head_dim},
      {"v_head_dim", m->v_head_dim},
      {"q_lora_rank", m->q_lora_rank},
      {"kv_lora_rank", m->kv_lora_rank},
      {"intermediate_size", m->intermediate_size},
      {"vocab_size", m->vocab_size},
      {"markov_rank", m->markov_rank},
      {"block_width", m->block_width},
      {"mask_token_id", m->mask_token_id},
      {"max_position_embeddings", m->max_position_embeddings},
  };
  k3_jsonw_begin_object(json, "model");
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    k3_jsonw_u64(json, numbers[i].key, numbers[i].value);
  k3_jsonw_begin_array(json, "target_layer_ids");
  for (uint64_t i = 0; i < m->n_taps; i++)
    k3_jsonw_u64(json, NULL, m->target_layer_ids[i]);
  k3_jsonw_end_array(json);
  k3_jsonw_double(json, "rms_norm_eps", m->rms_norm_eps);
  k3_jsonw_string(json, "target_stream", m->target_stream);
  k3_jsonw_bool(json, "causal", m->causal);
  k3_jsonw_bool(json, "fc_norm", m->fc_norm);
  k3_jsonw_bool(json, "confidence_head", m->confidence_head);
  k3_jsonw_end_object(json);
}
