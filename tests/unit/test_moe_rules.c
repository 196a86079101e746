// The rules of MiniMax-M3, DeepSeek-V3.2 and Kimi K3: configs and tensors spoiled one at a time, and the cases that people really met.
#include <time.h>

#include "loader/plan_parts.h"
#include "loader/split.h"
#include "moe_rig.h"

// ---- configs ----

static char *read_text(const char *folder, const char *name) {
  char *path = k3_path_join(folder, name, NULL);
  void *data;
  size_t nbytes;
  assert_int_equal(k3_read_file(path, 1 << 20, &data, &nbytes, NULL), K3_OK);
  char *text = k3_strndup(data, nbytes, NULL);
  k3_free(data);
  k3_free(path);
  return text;
}

static void clear(const char *folder) {
  struct stat st;
  if (stat(folder, &st) == 0)
    assert_int_equal(nftw(folder, temp_remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

// Links `folder` to the checkpoint `whole`, but for config.json, in which `from` (which must occur) becomes `to`.
static void with_config(const struct k3_ckpt *whole, const char *folder, const char *from, const char *to) {
  uint8_t *nothing = calloc(whole->n_tensors, 1);
  clear(folder);
  moe_drop(whole, folder, nothing, true);
  free(nothing);
  char *text = read_text(whole->folder, "config.json"), *at = strstr(text, from), *path = k3_path_join(folder, "config.json", NULL);
  if (!at)
    fail_msg("config.json has no %s", from);
  unlink(path);
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  fprintf(file, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
  fclose(file);
  k3_free(text);
  k3_free(path);
}

static const struct k3_finding *finding_of(const struct moe_check *check, const char *rule, const char *part) {
  for (size_t i = 0; i < check->findings.n_items; i++) {
    const struct k3_finding *f = &check->findings.items[i];
    if (strcmp(k3_rule_info(f->error.rule)->id, rule) == 0 && (strstr(f->error.tensor, part) || strstr(f->error.found, part)))
      return f;
  }
  return NULL;
}

static void open_preset(const char *preset, struct k3_ckpt *whole, struct k3_findings *findings) {
  moe_synth(temp_path(preset), preset);
  *findings = (struct k3_findings){0};
  assert_int_equal(k3_ckpt_open(temp_path(preset), NULL, whole, findings, NULL), K3_OK);
  assert_int_equal(findings->n_errors, 0);
}

struct config_case {
  const char *preset, *from, *to, *rule, *part;
};
static const struct config_case CONFIG_CASES[] = {
    // MiniMax-M3. M3V01, X06: list lengths.
    {"m3-tiny", "\"moe_layer_freq\": [\n      0,", "\"moe_layer_freq\": [", "CFG20", "moe_layer_freq"},
    {"m3-tiny", "\"sparse_attention_freq\": [\n        0,", "\"sparse_attention_freq\": [", "CFG20", "sparse_attention_freq"},
    {"m3-tiny", "\"sparse_disable_index_value\": [\n        0,", "\"sparse_disable_index_value\": [", "CFG20", "sparse_disable_index_value"},
    {"m3-tiny", "\"moe_layer_freq\"", "\"moe_layers\"", "CFG20", "which layers hold experts is open"},
    {"m3-tiny-native", "\"mlp_layer_types\": [\n      \"dense\",", "\"mlp_layer_types\": [", "CFG20", "mlp_layer_types"},
    // M3V03: index heads. M3V04: what is rotated.
    {"m3-tiny", "\"sparse_num_index_heads\": 2", "\"sparse_num_index_heads\": 1", "CFG20", "sparse_num_index_heads"},
    {"m3-tiny", "\"sparse_index_dim\": 16", "\"sparse_index_dim\": 8", "CFG20", "sparse_index_dim"},
    {"m3-tiny", "\"rotary_dim\": 8", "\"rotary_dim\": 16", "CFG20", "rotary_dim"},
    {"m3-tiny", "\"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\": 0.3", "CFG20", "rotary_dim"},
    {"m3-tiny-native", "\"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\": 1.5", "CFG20", "rotary_dim"},
    // M3V05: the activation. M3V06: the norm (1.9 #3: other constants stand in tests/cli/test_moe_faults.sh).
    {"m3-tiny", "\"hidden_act\": \"swigluoai\"", "\"hidden_act\": \"silu\"", "CFG20", "hidden_act"},
    {"m3-tiny-native", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "CFG20", "hidden_act"},
    {"m3-tiny", "\"use_gemma_norm\": true", "\"use_gemma_norm\": false", "CFG20", "use_gemma_norm"},
    {"m3-tiny", "\"use_gemma_norm\": true,", "", "CFG20", "use_gemma_norm"},
    // M3V12, 1.9 #8: a route scale of 1 halves the routed branch. M3V11, 1.9 #14: prediction modules declared, none there.
    {"m3-tiny", "\"routed_scaling_factor\": 2", "\"routed_scaling_factor\": 1", "M3V12", "routed_scaling_factor"},
    {"m3-tiny", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 2", "M3V12", "num_experts_per_tok"},
    {"m3-tiny", "\"num_mtp_modules\": 1", "\"num_mtp_modules\": 1", "M3V11", "1 prediction modules are declared, 0 are in the files"},
    // X02: one field, two values.
    {"m3-tiny", "\"model_type\": \"minimax_m3_vl\",", "\"model_type\": \"minimax_m3_vl\", \"hidden_size\": 65,", "CFG20",
     "65 at the top, 64 in text_config"},
    // DeepSeek-V3.2. DSV04: groups of the router.
    {"v32-tiny", "\"n_group\": 4", "\"n_group\": 3", "CFG20", "n_group"},
    {"v32-tiny", "\"n_group\": 4", "\"n_group\": 8", "CFG20", "n_group"},
    {"v32-tiny", "\"topk_group\": 2", "\"topk_group\": 5", "CFG20", "topk_group"},
    {"v32-tiny", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 5", "CFG20", "topk_group"},
    // DSV07: the indexer's width. DSV10: YaRN.
    {"v32-tiny", "\"index_head_dim\": 32", "\"index_head_dim\": 8", "CFG20", "index_head_dim"},
    {"v32-tiny", "\"index_head_dim\": 32", "\"index_head_dim\": 48", "CFG20", "index_head_dim"},
    {"v32-tiny", "\"mscale_all_dim\": 1", "\"mscale_all\": 1", "CFG20", "mscale_all_dim"},
    {"v32-tiny", "\"factor\": 4,", "", "CFG20", "rope_scaling.factor"},
    // DSV09: a layer beyond the counts. X08: declared and absent. DSV11: rows of the latent projections.
    {"v32-tiny", "\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0", "MAP04", "model.layers.3."},
    {"v32-tiny", "\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 2", "X08", "2 prediction layers are declared, 1 are in the files"},
    {"v32-tiny", "\"v_head_dim\": 16", "\"v_head_dim\": 8", "MAP05", "kv_b_proj"},
    {"v32-tiny", "\"qk_rope_head_dim\": 16", "\"qk_rope_head_dim\": 8", "MAP05", "kv_a_proj_with_mqa"},
    // Kimi K3. K3V01, 3.8 #15: the lists of layers count from one.
    {"k3-tiny", "\"kda_layers\": [\n        1,\n        2,\n        3", "\"kda_layers\": [\n        0,\n        1,\n        2", "CFG20",
     "as if counted from 0"},
    {"k3-tiny", "\"kda_layers\": [\n        1,", "\"kda_layers\": [", "CFG20", "layer 1 is listed nowhere"},
    {"k3-tiny", "\"full_attn_layers\": [\n        4,", "\"full_attn_layers\": [\n        3,\n        4,", "CFG20", "layer 3 is listed twice"},
    {"k3-tiny", "\"full_attn_layers\"", "\"mla_layers\"", "CFG20", "full_attn_layers"},
    {"k3-tiny", "\"full_attn_layers\": [\n        4,\n        5", "\"full_attn_layers\": [\n        4,\n        6", "CFG20", "layer 6"},
    // K3V15: spellings. K3V16: no rotation. K3V09, 3.8 #11: shared experts doubled twice. K3V11: the latent norm. K3V05: experts beyond the count.
    {"k3-tiny", "\"num_experts_per_token\": 2", "\"num_experts_per_token\": 2, \"num_experts_per_tok\": 3", "CFG20", "num_experts_per_tok"},
    {"k3-tiny", "\"num_experts_per_token\"", "\"num_experts_per_tok\"", "K3V15", "num_experts_per_tok"},
    {"k3-tiny", "\"num_experts\": 4", "\"num_local_experts\": 4", "K3V15", "num_local_experts"},
    {"k3-tiny", "\"mla_use_nope\": true", "\"mla_use_nope\": false", "CFG20", "mla_use_nope"},
    {"k3-tiny", "\"mla_use_nope\": true", "\"rope_theta\": 10000, \"mla_use_nope\": true", "CFG20", "rope_theta"},
    {"k3-tiny", "\"num_shared_experts\": 2", "\"num_shared_experts\": 4", "MAP05", "shared_experts.gate_proj"},
    {"k3-tiny", "\"moe_layer_freq\": 1", "\"moe_layer_freq\": 2", "CFG20", "moe_layer_freq"},
    {"k3-tiny", "\"latent_moe_use_norm\": true", "\"latent_moe_use_norm\": false", "MAP01", "routed_expert_norm"},
    {"k3-tiny", "\"num_experts\": 4", "\"num_experts\": 5", "MAP04", "experts.4.w1"},
    {"k3-tiny", "\"num_experts\": 4", "\"num_experts\": 3", "MAP04", "experts.3.w1"},
};

static void spoiled_configs_are_noticed(void **state) {
  (void)state;
  struct k3_ckpt whole = {0};
  struct k3_findings findings = {0};
  const char *opened = "";
  for (size_t i = 0; i < sizeof CONFIG_CASES / sizeof CONFIG_CASES[0]; i++) {
    const struct config_case *c = &CONFIG_CASES[i];
    if (strcmp(opened, c->preset) != 0) {
      k3_ckpt_close(&whole);
      k3_findings_free(&findings);
      open_preset(opened = c->preset, &whole, &findings);
    }
    struct moe_check check;
    const char *folder = temp_path("spoiled");
    with_config(&whole, folder, c->from, c->to);
    moe_check(folder, &check);
    const struct k3_finding *found = finding_of(&check, c->rule, c->part);
    if (!found) {
      moe_print(&check);
      fail_msg("%s: %s -> %s: no %s about %s", c->preset, c->from, c->to, c->rule, c->part);
    }
    assert_int_equal(found->severity, k3_rule_info(found->error.rule)->severity);
    moe_close(&check);
  }
  k3_ckpt_close(&whole);
  k3_findings_free(&findings);
}

// K3V02: a layer's kind by its names: lists that are a partition, but of other layers ("lists that, taken as zero-based, shift everything by one").
static void shifted_lists_contradict_the_names(void **state) {
  (void)state;
  struct k3_ckpt whole;
  struct k3_findings findings;
  open_preset("k3-tiny", &whole, &findings);
  with_config(&whole, temp_path("spoiled"),
              "\"kda_layers\": [\n        1,\n        2,\n        3\n      ],\n      \"full_attn_layers\": [\n        4,\n        5",
              "\"kda_layers\": [\n        1,\n        2,\n        5\n      ],\n      \"full_attn_layers\": [\n        3,\n        4");
  struct moe_check check;
  moe_check(temp_path("spoiled"), &check);
  assert_non_null(finding_of(&check, "CFG20", "the config lists its layer as"));
  moe_close(&check);
  k3_ckpt_close(&whole);
  k3_findings_free(&findings);
}

// ---- tensors ----

// A tensor on its way into a spoiled copy.
struct edit {
  char name[512];
  enum k3_dtype dtype;
  uint64_t shape[K3_ST_MAX_RANK];
  unsigned rank;
};
struct mutation {
  const char *preset;
  const char *tensor;  // its name ends in this
  const char *rename;  // replaced by this end, or NULL
  int dtype;           // another dtype, or -1
  int cols;            // another last dimension, or 0
  int rank;            // another rank: 1 drops a leading or middle 1, -1: none
  bool extra;          // the renamed tensor is there besides the old one
  const char *rule, *part;
};

static uint64_t bytes_of(const struct edit *e) {
  uint64_t n = k3_dtype_bits(e->dtype) / 8;
  for (unsigned d = 0; d < e->rank; d++)
    n *= e->shape[d];
  return n;
}

// Writes the one shard anew, with the mutation applied.
static void mutate(const struct k3_ckpt *whole, const char *folder, const struct mutation *m) {
  uint8_t *nothing = calloc(whole->n_tensors, 1);
  clear(folder);
  moe_drop(whole, folder, nothing, false);
  free(nothing);
  bool any = false;
  for (size_t f = 0; f < whole->n_files && !any; f++) {
    const struct k3_ckpt_file *file = &whole->files[f];
    struct edit *edits = calloc(file->header.n_tensors + 1, sizeof *edits);
    size_t n = 0;
    for (size_t i = 0; i < file->header.n_tensors; i++) {
      const struct k3_st_tensor *t = &file->header.tensors[i];
      struct edit *e = &edits[n++];
      snprintf(e->name, sizeof e->name, "%s", t->name);
      e->dtype = (enum k3_dtype)t->dtype;
      e->rank = t->rank;
      memcpy(e->shape, t->shape, t->rank * sizeof *e->shape);
      size_t n_name = strlen(t->name), n_end = strlen(m->tensor);
      if (any || n_name < n_end || strcmp(t->name + n_name - n_end, m->tensor) != 0)
        continue;
      any = true;
      if (m->extra)
        edits[n] = *e, e = &edits[n++];
      if (m->rename)
        snprintf(e->name + n_name - n_end, sizeof e->name - (n_name - n_end), "%s", m->rename);
      if (m->dtype >= 0)
        e->dtype = (enum k3_dtype)m->dtype;
      if (m->cols)
        e->shape[e->rank - 1] = (uint64_t)m->cols;
      if (m->rank == 1) {  // drops the dimension of one
        unsigned at = e->rank == 3 ? 1 : 0;
        memmove(e->shape + at, e->shape + at + 1, (e->rank - at - 1) * sizeof *e->shape);
        e->rank--;
      }
    }
    char *path = k3_path_join(folder, file->name, NULL);
    if (any) {
      unlink(path);
      int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
      struct moe_sink sink = {fd, 8};
      struct k3_st_writer writer;
      uint64_t h, padded = 0, end = 0;
      for (int pass = 0; pass < 2; pass++) {
        k3_st_write_begin(&writer, pass ? moe_write : NULL, &sink);
        end = 0;
        for (size_t i = 0; i < n; i++) {
          assert_int_equal(
              k3_st_write_tensor(&writer, edits[i].name, edits[i].dtype, edits[i].shape, edits[i].rank, end, end + bytes_of(&edits[i]), NULL), K3_OK);
          end += bytes_of(&edits[i]);
        }
        assert_int_equal(k3_st_write_end(&writer, padded, &h, NULL), K3_OK);
        padded = (h + 7) / 8 * 8;
      }
      uint8_t prefix[8];
      for (int i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(padded >> 8 * i);
      assert_int_equal(k3_pwrite_full(fd, prefix, 8, 0, path, NULL), K3_OK);
      assert_int_equal(ftruncate(fd, (off_t)(8 + padded + end)), 0);
      close(fd);
    }
    k3_free(path);
    free(edits);
  }
  if (!any)
    fail_msg("%s has no %s", m->preset, m->tensor);
}

#define SAME  -1, 0, -1, false
#define EXTRA -1, 0, -1, true
static const struct mutation MUTATIONS[] = {
    // X05, B46: one expert of a stack missing or of another shape or dtype, one too many, a tensor twice by its two spellings.
    {"m3-tiny", "layers.2.block_sparse_moe.experts.1.w2.weight", "layers.2.block_sparse_moe.experts.4.w2.weight", SAME, "MAP04",
     "experts.4.w2.weight"},
    {"m3-tiny", "layers.2.block_sparse_moe.experts.1.w2.weight", "layers.2.block_sparse_moe.experts.4.w2.weight", SAME, "MAP04",
     "shard 1 of model.layers.2.block_sparse_moe.experts.w2 is missing"},
    {"m3-tiny", "layers.2.block_sparse_moe.experts.1.w2.weight", NULL, -1, 64, -1, false, "MAP05", "experts.1.w2.weight"},
    {"m3-tiny", "layers.2.block_sparse_moe.experts.1.w1.weight", "layers.2.block_sparse_moe.experts.1.gate_proj.weight", EXTRA, "MAP03",
     "experts.1."},
    {"m3-tiny", "layers.1.self_attn.q_proj.weight", "layers.01.self_attn.q_proj.weight", SAME, "MAP07", "layers.01."},
    {"m3-tiny", "layers.1.self_attn.q_proj.weight", "layers.10.self_attn.q_proj.weight", SAME, "MAP02", "layers.1.self_attn.q_proj"},
    // M3V02, M3V07, M3V14 and M3V08. The indexer of MiniMax-M3: one key head, both names in a dense layer, a bias in the other place, a router that
    // lost bits.
    {"m3-tiny", "layers.2.self_attn.index_k_proj.weight", "layers.0.self_attn.index_k_proj.weight", SAME, "MAP01", "index_k_proj"},
    {"m3-tiny", "layers.2.block_sparse_moe.gate.weight", "layers.0.block_sparse_moe.gate.weight", SAME, "MAP01", "block_sparse_moe.gate"},
    {"m3-tiny", "layers.2.block_sparse_moe.e_score_correction_bias", "layers.2.block_sparse_moe.gate.e_score_correction_bias", SAME, "M3V07",
     "renamed"},
    {"m3-tiny", "layers.2.block_sparse_moe.gate.weight", NULL, K3_DTYPE_BF16, 0, -1, false, "M3V07", "gate.weight"},
    {"m3-tiny", "layers.2.block_sparse_moe.e_score_correction_bias", NULL, K3_DTYPE_BF16, 0, -1, false, "M3V07", "e_score_correction_bias"},
    {"m3-tiny", "embeddings.patch_embedding.weight", NULL, K3_DTYPE_BF16, 0, -1, false, "M3V14", "patch_embedding"},
    {"m3-tiny-mxfp8", "layers.2.self_attn.o_proj.weight_scale_inv", NULL, -1, 8, -1, false, "TEN05", "o_proj"},
    {"m3-tiny", "block_sparse_moe.shared_experts.up_proj.weight", "block_sparse_moe.experts.4.w3.weight", SAME, "MAP04", "experts.4.w3"},
    // DSV05, 2.6 #7, DSV03, DSV02, DSV14, DSV09. DeepSeek-V3.2: the bias in BF16 loses decisions, the indexer's weights quantised, scales that are no
    // grid, a dump of an engine.
    {"v32-tiny", "layers.1.mlp.gate.e_score_correction_bias", NULL, K3_DTYPE_BF16, 0, -1, false, "MAP08", "e_score_correction_bias"},
    {"v32-tiny", "layers.1.self_attn.indexer.weights_proj.weight", NULL, K3_DTYPE_F8_E4M3, 0, -1, false, "MAP08", "weights_proj"},
    {"v32-tiny", "layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv", NULL, -1, 2, -1, false, "TEN05", "kv_a_proj_with_mqa"},
    {"v32-tiny", "layers.1.self_attn.q_a_proj.weight", "layers.1.self_attn.fused_qkv_a_proj.weight", SAME, "CFG21", "dump"},
    {"v32-tiny", "layers.3.enorm.weight", "layers.4.enorm.weight", SAME, "MAP04", "layers.4.enorm"},
    {"v32-tiny", "layers.2.self_attn.indexer.wk.weight", "layers.2.self_attn.rotary_emb.inv_freq", SAME, "TEN02", "indexer.wk"},
    // K3V02, K3V08, K3V03, K3V12 (3.8 #1), K3V04, K3V06, K3V05. Kimi K3: a gate gone, a low-rank gate besides, experts in the layer without, the
    // other spellings of exports.
    {"k3-tiny", "layers.3.self_attn.g_proj.weight", "layers.3.self_attn.g_a_proj.weight", SAME, "MAP02", "layers.3.self_attn.g_proj"},
    {"k3-tiny", "layers.1.self_attn.g_proj.weight", "layers.1.self_attn.g_a_proj.weight", EXTRA, "MAP01", "g_a_proj"},
    {"k3-tiny", "layers.1.block_sparse_moe.gate.weight", "layers.0.block_sparse_moe.gate.weight", SAME, "MAP01", "layers.0.block_sparse_moe.gate"},
    {"k3-tiny", "layers.1.block_sparse_moe.gate.e_score_correction_bias", "layers.1.block_sparse_moe.e_score_correction_bias", SAME, "K3V08",
     "renamed"},
    {"k3-tiny", "layers.1.block_sparse_moe.gate.e_score_correction_bias", NULL, K3_DTYPE_BF16, 0, -1, false, "MAP08", "e_score_correction_bias"},
    {"k3-tiny", "layers.1.mlp_res_proj.weight", NULL, -1, 0, 1, false, "K3V12", "mlp_res_proj"},
    {"k3-tiny", "layers.1.self_attn.q_conv1d.weight", NULL, -1, 0, 1, false, "K3V12", "q_conv1d"},
    {"k3-tiny", "layers.1.self_attn.q_conv1d.weight", NULL, K3_DTYPE_BF16, 0, -1, false, "MAP08", "q_conv1d"},
    {"k3-tiny", "layers.1.self_attn.A_log", NULL, -1, 5, -1, false, "MAP05", "A_log"},
    {"k3-tiny", "layers.1.self_attn.A_log", NULL, K3_DTYPE_BF16, 0, -1, false, "MAP08", "A_log"},
    {"k3-tiny", "experts.2.w1.weight_packed", NULL, -1, 32, -1, false, "MAP05", "experts.2.w1.weight_packed"},
    {"k3-tiny", "experts.2.w2.weight_scale", NULL, -1, 4, -1, false, "TEN05", "experts.2.w2"},
    {"k3-tiny", "experts.2.w2.weight_scale", "experts.2.w2.weight_scaling", SAME, "TEN01", "experts.2.w2.weight_scale"},
    {"k3-tiny", "language_model.model.norm.weight", "model.norm.weight", SAME, "MAP06", "model.norm"},
};

static void spoiled_tensors_are_noticed(void **state) {
  (void)state;
  struct k3_ckpt whole = {0};
  struct k3_findings findings = {0};
  const char *opened = "";
  for (size_t i = 0; i < sizeof MUTATIONS / sizeof MUTATIONS[0]; i++) {
    const struct mutation *m = &MUTATIONS[i];
    if (strcmp(opened, m->preset) != 0) {
      k3_ckpt_close(&whole);
      k3_findings_free(&findings);
      open_preset(opened = m->preset, &whole, &findings);
    }
    struct moe_check check;
    mutate(&whole, temp_path("spoiled"), m);
    moe_check(temp_path("spoiled"), &check);
    const struct k3_finding *found = finding_of(&check, m->rule, m->part);
    if (!found) {
      moe_print(&check);
      fail_msg("%s: %s: no %s about %s", m->preset, m->tensor, m->rule, m->part);
    }
    assert_int_equal(found->severity, k3_rule_info(found->error.rule)->severity);
    moe_close(&check);
  }
  k3_ckpt_close(&whole);
  k3_findings_free(&findings);
}

// K3V04, 3.8 #2: A_log may hold one value for each head instead of a padded buffer.
static void a_log_of_the_heads_alone_is_accepted(void **state) {
  (void)state;
  struct k3_ckpt whole;
  struct k3_findings findings;
  static const struct mutation m = {"k3-tiny", "layers.1.self_attn.A_log", NULL, -1, 3, -1, false, NULL, NULL};
  open_preset("k3-tiny", &whole, &findings);
  mutate(&whole, temp_path("spoiled"), &m);
  struct moe_check check;
  moe_check(temp_path("spoiled"), &check);
  assert_int_equal(check.findings.n_by_rule[K3_MAP05], 0);
  moe_close(&check);
  k3_ckpt_close(&whole);
  k3_findings_free(&findings);
}

// ---- what is kept ----

// X07, 2.6 #3, 3.8 #5: "FP32 router bias squeezed into BF16": every tensor keeps its dtype; those that must be F32 are F32 in the image.
static void wide_tensors_stay_wide(void **state) {
  (void)state;
  static const char *const presets[] = {"m3-tiny", "v32-tiny", "k3-tiny"};
  static const char *const wide[] = {"e_score_correction_bias", "A_log", "dt_bias", "conv1d", ".o_norm.", "patch_embedding", "indexer.k_norm"};
  for (size_t p = 0; p < 3; p++) {
    struct moe_check check;
    struct k3_error err = {0};
    size_t n_wide = 0;
    moe_synth(temp_path(presets[p]), presets[p]);
    moe_check(temp_path(presets[p]), &check);
    assert_int_equal(k3_plan_layout(&check.plan, &check.findings, &err), K3_OK);
    for (size_t i = 0; i < check.plan.n_tensors; i++) {
      const struct k3_plan_tensor *t = &check.plan.tensors[i];
      bool is_wide = false;
      for (size_t w = 0; t->kind == K3_PLAN_DATA && w < sizeof wide / sizeof wide[0]; w++)
        is_wide |= strstr(t->name, wide[w]) != NULL;
      if (p == 0 && t->kind == K3_PLAN_DATA && strstr(t->name, "block_sparse_moe.gate.weight"))
        is_wide = true;
      n_wide += is_wide;
      if (is_wide)
        assert_int_equal(t->dtype, K3_DTYPE_F32);
      if (t->kind == K3_PLAN_DATA)
        assert_int_equal(t->dtype, k3_ckpt_tensor(&check.ckpt, k3_plan_piece_at(&check.plan, t, 0).tensor)->dtype);
    }
    assert_true(n_wide >= 6);
    moe_close(&check);
  }
}

// X04, X05: experts stand in numeric order, whatever the order of their names; gate before up.
static void experts_in_numeric_order(void **state) {
  (void)state;
  struct k3_recipe recipe;
  struct k3_mapper mapper;
  struct k3_error err = {0};
  static const char config_text[] =
      "{\"hidden_size\": 8, \"num_hidden_layers\": 12, \"first_k_dense_replace\": 1, \"n_routed_experts\": 256, \"num_nextn_predict_layers\": 0}";
  struct k3_config *config = k3_config_parse(config_text, strlen(config_text), "config.json", &err);
  assert_int_equal(k3_recipe_load("deepseek-v3.2", &recipe, &err), K3_OK);
  assert_int_equal(k3_mapper_create(&recipe, config, &mapper, &err), K3_OK);
  k3_mapper_set_root(&mapper, "model.");
  static const struct {
    const char *name, *into;
    uint64_t shard;
  } rows[] = {{"model.layers.1.mlp.experts.2.gate_proj.weight", "model.layers.1.mlp.experts.w13.weight", 4},
              {"model.layers.1.mlp.experts.2.up_proj.weight_scale_inv", "model.layers.1.mlp.experts.w13.weight_scale", 5},
              {"model.layers.10.mlp.experts.10.gate_proj.weight", "model.layers.10.mlp.experts.w13.weight", 20},
              {"model.layers.11.mlp.experts.255.up_proj.weight", "model.layers.11.mlp.experts.w13.weight", 511},
              {"model.layers.1.mlp.experts.100.down_proj.weight", "model.layers.1.mlp.experts.w2.weight", 100},
              {"model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.mlp.shared_experts.gate_up_proj.weight", 1},
              {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "model.layers.1.self_attn.fused_qkv_a_proj.weight", 1}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    struct k3_mapped mapped;
    struct k3_destination destinations[2];
    const char *why;
    assert_int_equal(k3_mapper_resolve(&mapper, rows[i].name, strlen(rows[i].name), &mapped, &why), K3_MAPPED);
    assert_int_equal(k3_mapper_destinations(&mapper, &mapped, false, destinations), 1);
    assert_string_equal(destinations[0].name, rows[i].into);
    assert_int_equal(destinations[0].shard, rows[i].shard);
  }
  // Parts of names do not count: neither "gate" in "gate_proj" nor "experts" in "shared_experts", nor a dense name in a layer with experts.
  static const char *const strangers[] = {"model.layers.1.mlp.gate_proj.weight", "model.layers.0.mlp.gate.weight",
                                          "model.layers.1.mlp.experts.gate_proj.weight", "model.layers.1.mlp.shared_experts.0.up_proj.weight",
                                          "model.layers.1.self_attn.q_proj.weight"};
  for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++) {
    struct k3_mapped mapped;
    const char *why;
    assert_int_equal(k3_mapper_resolve(&mapper, strangers[i], strlen(strangers[i]), &mapped, &why), K3_UNKNOWN_NAME);
  }
  k3_mapper_free(&mapper);
  k3_recipe_free(&recipe);
  k3_config_free(config);
}

// What a drafter borrows is found in each of the models, under its root, and only the shards that hold it are opened.
static void borrowed_parts_are_found(void **state) {
  (void)state;
  static const char *const targets[] = {"k3-tiny", "m3-tiny", "v32-tiny"};
  static const size_t n_files[] = {1, 1, 2};
  struct k3_recipe recipe;
  struct k3_error err = {0};
  assert_int_equal(k3_recipe_load("k3-dspark", &recipe, &err), K3_OK);
  for (size_t i = 0; i < 3; i++) {
    struct k3_ckpt target;
    struct k3_findings findings = {0};
    struct k3_ckpt_options options = {.wanted = k3_plan_borrowed_name, .wanted_ctx = &recipe};
    moe_synth(temp_path(targets[i]), targets[i]);
    assert_int_equal(k3_ckpt_open(temp_path(targets[i]), &options, &target, &findings, &err), K3_OK);
    assert_int_equal(findings.n_errors, 0);
    assert_true(target.n_files <= n_files[i]);
    struct k3_plan plan = {.target = &target, .recipe = &recipe};
    uint64_t embed, head;
    assert_true(k3_plan_find_borrowed(&plan, "embed_tokens", &embed));
    assert_true(k3_plan_find_borrowed(&plan, "lm_head", &head));
    assert_int_not_equal(embed, head);
    assert_non_null(strstr(k3_ckpt_tensor(&target, embed)->name, "embed_tokens.weight"));
    assert_null(strstr(k3_ckpt_tensor(&target, embed)->name, "layers."));  // not the prediction layer's copy
    assert_non_null(strstr(k3_ckpt_tensor(&target, head)->name, "lm_head.weight"));
    k3_ckpt_close(&target);
    k3_findings_free(&findings);
  }
  k3_recipe_free(&recipe);
}

// M3V13, DSV13, K3V13, X11: heads, KV heads and whole scale groups on every rank (the published geometry: test_moe_full.c).
static void tensor_parallel_widths(void **state) {
  (void)state;
  static const struct {
    const char *preset;
    uint32_t tp;
    const char *why_not;  // NULL: it fits
  } rows[] = {
      {"m3-tiny", 2, NULL},
      {"m3-tiny", 8, NULL},  // 2 key heads, 4 ranks with the same one
      {"m3-tiny", 3, "8 heads"},
      {"m3-tiny", 16, "8 heads"},
      {"m3-tiny-mxfp8", 2, "one scale for every 32"},
      {"m3-tiny-mxfp4", 2, "one scale for every 32"},
      {"v32-tiny", 3, "2 heads"},
      {"v32-tiny", 2, "one scale for every 32"},
      {"v32-tiny-128", 2, "one scale for every 128"},
      {"k3-tiny", 2, "3 heads"},
      {"k3-tiny", 3, "64 rows"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    struct moe_check check;
    struct k3_error err = {0};
    moe_synth(temp_path("widths"), rows[i].preset);
    moe_check(temp_path("widths"), &check);
    assert_int_equal(check.findings.n_errors, 0);
    enum k3_status status = k3_split_check(&check.plan, rows[i].tp, &err);
    if (rows[i].why_not ? status != K3_UNSUPPORTED || err.rule != K3_PCK05 || !strstr(err.found, rows[i].why_not) : status != K3_OK)
      fail_msg("%s, tp %u: %s", rows[i].preset, rows[i].tp, err.found);
    moe_close(&check);
  }
}

// Checks every byte; one of a tensor's bytes is changed before, or all of another tensor's are copied over it.
static void check_values(const char *preset, const char *tensor, const char *copied, struct moe_check *check) {
  const char *folder = temp_path(preset);
  moe_synth(folder, preset);
  struct k3_error err = {0};
  struct k3_check_options options = {.depth = K3_DEPTH_VALUES, .generic_fallback = true, .n_threads = 1};
  memset(check, 0, sizeof *check);
  assert_int_equal(k3_ckpt_open(folder, NULL, &check->ckpt, &check->findings, &err), K3_OK);
  uint64_t to, from;
  if (tensor) {
    assert_true(k3_ckpt_find(&check->ckpt, tensor, strlen(tensor), &to));
    const struct k3_ckpt_file *file = k3_ckpt_file_of(&check->ckpt, to);
    const struct k3_st_tensor *t = k3_ckpt_tensor(&check->ckpt, to);
    size_t nbytes = (size_t)(t->end - t->begin);
    unsigned char *bytes = malloc(nbytes);
    if (copied)
      assert_true(k3_ckpt_find(&check->ckpt, copied, strlen(copied), &from));
    assert_int_equal(k3_ckpt_read(&check->ckpt, copied ? from : to, 0, bytes, nbytes, &err), K3_OK);
    bytes[nbytes - 2] ^= copied ? 0 : 1;
    int fd = open(file->path, O_WRONLY);
    assert_int_equal(k3_pwrite_full(fd, bytes, nbytes, file->header.data_begin + t->begin, file->path, &err), K3_OK);
    close(fd);
    free(bytes);
  }
  assert_int_equal(k3_check_run(&check->ckpt, NULL, &options, &check->recipe, &check->plan, &check->summary, &check->findings, &err), K3_OK);
}

// DSV08, K3V14: copies in the prediction layer that are none, and two big matrices of one content.
static void copies_are_compared(void **state) {
  (void)state;
  struct moe_check check;
  check_values("v32-tiny", NULL, NULL, &check);
  assert_int_equal(check.findings.n_by_rule[K3_DSV08], 0);
  moe_close(&check);
  check_values("v32-tiny", "model.layers.3.shared_head.head.weight", NULL, &check);
  assert_int_equal(check.findings.n_by_rule[K3_DSV08], 1);
  assert_non_null(finding_of(&check, "DSV08", "shared_head.head"));
  moe_close(&check);
  check_values("k3-tiny", NULL, NULL, &check);
  assert_int_equal(check.findings.n_by_rule[K3_K3V14], 0);
  moe_close(&check);
  check_values("k3-tiny", "language_model.lm_head.weight", "language_model.model.embed_tokens.weight", &check);
  assert_int_equal(check.findings.n_by_rule[K3_K3V14], 1);
  moe_close(&check);
}

static double cpu_of_opening(size_t n_tensors) {
  char *path = k3_path_join(temp_folder, "flat.safetensors", NULL);
  unlink(path);
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  struct moe_sink sink = {fd, 8};
  struct k3_st_writer writer;
  uint64_t h, padded = 0;
  for (int pass = 0; pass < 2; pass++) {
    k3_st_write_begin(&writer, pass ? moe_write : NULL, &sink);
    for (size_t i = 0; i < n_tensors; i++) {
      char name[96];
      snprintf(name, sizeof name, "model.layers.%zu.block_sparse_moe.experts.%zu.w1.weight", i / 896, i % 896);
      uint64_t one = 1;
      k3_st_write_tensor(&writer, name, K3_DTYPE_U8, &one, 1, i, i + 1, NULL);
    }
    assert_int_equal(k3_st_write_end(&writer, padded, &h, NULL), K3_OK);
    padded = (h + 7) / 8 * 8;
  }
  uint8_t prefix[8];
  for (int i = 0; i < 8; i++)
    prefix[i] = (uint8_t)(padded >> 8 * i);
  assert_int_equal(k3_pwrite_full(fd, prefix, 8, 0, path, NULL), K3_OK);
  assert_int_equal(ftruncate(fd, (off_t)(8 + padded + n_tensors)), 0);
  close(fd);
  double best = 1e9;
  for (int run = 0; run < 3; run++) {
    clock_t begin = clock();
    struct moe_check check;
    struct k3_error err = {0};
    moe_check(path, &check);
    assert_int_equal(check.ckpt.n_tensors, n_tensors);
    assert_int_equal(k3_plan_layout(&check.plan, &check.findings, &err), K3_OK);
    moe_close(&check);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    best = seconds < best ? seconds : best;
  }
  k3_free(path);
  return best;
}

// B53: "time close to linear (doubling the count at most about doubles the time)", by the CPU's clock and the best of three.
static void time_is_linear_in_the_count(void **state) {
  (void)state;
  double t20 = cpu_of_opening(20000), t40 = cpu_of_opening(40000), t80 = cpu_of_opening(80000);
  print_message("20,000 tensors %.3f s, 40,000 %.3f s, 80,000 %.3f s\n", t20, t40, t80);
  assert_true(t80 < 8 * t20 + 0.05);  // quadratic would be 16 times
  assert_true(t80 < 3 * t40 + 0.05);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(spoiled_configs_are_noticed), cmocka_unit_test(shifted_lists_contradict_the_names),
      cmocka_unit_test(spoiled_tensors_are_noticed), cmocka_unit_test(a_log_of_the_heads_alone_is_accepted),
      cmocka_unit_test(wide_tensors_stay_wide),      cmocka_unit_test(experts_in_numeric_order),
      cmocka_unit_test(borrowed_parts_are_found),    cmocka_unit_test(tensor_parallel_widths),
      cmocka_unit_test(copies_are_compared),         cmocka_unit_test(time_is_linear_in_the_count),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
