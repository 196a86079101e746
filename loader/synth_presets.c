// The presets: which tensors, of which geometry, under which config.
#include <string.h>

#include "loader/synth_moe.h"

// The drafter. Symbols: H hidden, Ht target's hidden, A taps, L layers, N heads, P and R the query's parts without and with position, Vd value head,
// Rq and Rk low ranks, I MLP, V vocabulary, M Markov rank.
static const struct k3_synth_row draft_layers[] = {
    {"layers.{i}.input_layernorm.weight", "H", K3_SYNTH_NORM, NULL},
    {"layers.{i}.self_attn.q_a_proj.weight", "Rq,H", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.self_attn.q_a_layernorm.weight", "Rq", K3_SYNTH_NORM, NULL},
    {"layers.{i}.self_attn.q_b_proj.weight", "N*P+N*R,Rq", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.self_attn.kv_a_proj_with_mqa.weight", "Rk+R,H", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.self_attn.kv_a_layernorm.weight", "Rk", K3_SYNTH_NORM, NULL},
    {"layers.{i}.self_attn.kv_b_proj.weight", "N*P+N*Vd,Rk", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.self_attn.o_proj.weight", "H,N*Vd", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.post_attention_layernorm.weight", "H", K3_SYNTH_NORM, NULL},
    {"layers.{i}.mlp.gate_proj.weight", "I,H", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.mlp.up_proj.weight", "I,H", K3_SYNTH_MATRIX, NULL},
    {"layers.{i}.mlp.down_proj.weight", "H,I", K3_SYNTH_MATRIX, NULL},
    {0},
};
static const struct k3_synth_row draft_rest[] = {
    {"embed_tokens.weight", "V,H", K3_SYNTH_MATRIX, NULL},
    {"context_proj.weight", "H,A*Ht", K3_SYNTH_MATRIX, NULL},
    {"context_norm.weight", "H", K3_SYNTH_NORM, NULL},
    {"final_norm.weight", "H", K3_SYNTH_NORM, NULL},
    {0},
};
// The same tensors as another trainer spells them, with a head of its own.
static const struct k3_synth_row draft_rest_aliases[] = {
    {"embed_tokens.weight", "V,H", K3_SYNTH_MATRIX, NULL},
    {"fc.weight", "H,A*Ht", K3_SYNTH_MATRIX, "context_proj.weight"},
    {"hidden_norm.weight", "H", K3_SYNTH_NORM, "context_norm.weight"},
    {"norm.weight", "H", K3_SYNTH_NORM, "final_norm.weight"},
    {"lm_head.weight", "V,H", K3_SYNTH_MATRIX, NULL},
    {0},
};
static const struct k3_synth_row draft_heads[] = {
    {"markov_head.markov_w1.weight", "V,M", K3_SYNTH_MATRIX, NULL},
    {"markov_head.markov_w2.weight", "V,M", K3_SYNTH_MATRIX, NULL},
    {"confidence_head.proj.weight", "1,H+M", K3_SYNTH_MATRIX, NULL},
    {"confidence_head.proj.bias", "1", K3_SYNTH_BIAS, NULL},
    {0},
};
static const struct k3_synth_row draft_tap_norms[] = {
    {"fc_norm.{t}.weight", "Ht", K3_SYNTH_NORM, NULL},
    {0},
};
static const struct k3_synth_row *const draft_tables[] = {draft_layers, draft_rest, draft_heads, NULL};
static const struct k3_synth_row *const draft_tables_tap_norms[] = {draft_layers, draft_rest, draft_heads, draft_tap_norms, NULL};
static const struct k3_synth_row *const draft_tables_aliases[] = {draft_layers, draft_rest_aliases, draft_heads, NULL};

// As much of the target as a drafter borrows from, and a little more, so that not every shard is wanted.
static const struct k3_synth_row target_rows[] = {
    {"language_model.model.embed_tokens.weight", "V,H", K3_SYNTH_MATRIX, "embed_tokens.weight"},
    {"language_model.lm_head.weight", "V,H", K3_SYNTH_MATRIX, "lm_head.weight"},
    {"language_model.model.norm.weight", "H", K3_SYNTH_NORM, NULL},
    {"language_model.model.layers.{i}.input_layernorm.weight", "H", K3_SYNTH_NORM, NULL},
    {"language_model.model.layers.{i}.post_attention_layernorm.weight", "H", K3_SYNTH_NORM, NULL},
    {"language_model.model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", "Rk+R,H", K3_SYNTH_MATRIX, NULL},
    {0},
};
static const struct k3_synth_row *const target_tables[] = {target_rows, NULL};

// Half a million tensors in 96 files: names and shapes of a mixture of experts, and nothing but holes behind them.
static const struct k3_synth_row many_rows[] = {
    {"model.layers.{i}.input_layernorm.weight", "H", K3_SYNTH_NORM, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", "I,H", K3_SYNTH_MATRIX, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w1.expert_scale", "I,56", K3_SYNTH_MATRIX, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", "H,I", K3_SYNTH_MATRIX, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w2.expert_scale", "H,48", K3_SYNTH_MATRIX, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", "I,H", K3_SYNTH_MATRIX, NULL},
    {"model.layers.{i}.block_sparse_moe.experts.{e}.w3.expert_scale", "I,56", K3_SYNTH_MATRIX, NULL},
    {0},
};
static const struct k3_synth_row *const many_tables[] = {many_rows, NULL};

// theta, factor, M0: the rotary base, the YaRN factor and the length it was trained at; depth: layers of the target.
static const struct k3_synth_symbol tiny[] = {
    {"H", 64},  {"Ht", 64}, {"A", 3},   {"L", 3},  {"N", 4},         {"P", 16},     {"R", 8},   {"Vd", 16},   {"Rq", 32},
    {"Rk", 32}, {"I", 128}, {"V", 512}, {"M", 16}, {"theta", 10000}, {"factor", 4}, {"M0", 64}, {"depth", 8}, {0},
};
// Every rank of 16 gets a head, and whole blocks of 128 rows and columns.
static const struct k3_synth_symbol heads[] = {
    {"H", 64},  {"Ht", 64},  {"A", 2},   {"L", 2},  {"N", 16},        {"P", 128},    {"R", 128}, {"Vd", 128},  {"Rq", 64},
    {"Rk", 64}, {"I", 2048}, {"V", 512}, {"M", 16}, {"theta", 10000}, {"factor", 4}, {"M0", 64}, {"depth", 8}, {0},
};
static const struct k3_synth_symbol small[] = {
    {"H", 1024}, {"Ht", 1024}, {"A", 3},    {"L", 2},  {"N", 8},         {"P", 128},     {"R", 64},    {"Vd", 128},   {"Rq", 384},
    {"Rk", 256}, {"I", 2048},  {"V", 4096}, {"M", 64}, {"theta", 50000}, {"factor", 32}, {"M0", 4096}, {"depth", 30}, {0},
};
static const struct k3_synth_symbol published[] = {
    {"H", 7168}, {"Ht", 7168}, {"A", 5},      {"L", 5},   {"N", 64},        {"P", 128},     {"R", 64},     {"Vd", 128},   {"Rq", 1536},
    {"Rk", 512}, {"I", 14336}, {"V", 163840}, {"M", 256}, {"theta", 50000}, {"factor", 32}, {"M0", 32768}, {"depth", 93}, {0},
};
static const struct k3_synth_symbol many[] = {{"L", 93}, {"X", 897}, {"H", 3584}, {"I", 3072}, {"V", 163840}, {0}};

// In the spelling of Python's json.dumps(indent=2), as the published file has it.
static const char draft_config[] =
    "{\n"
    "  \"architectures\": [\n"
    "    \"K3DSparkModel\"\n"
    "  ],\n"
    "  \"model_type\": \"k3_dspark\",\n"
    "  \"hidden_size\": ${H},\n"
    "  \"intermediate_size\": ${I},\n"
    "  \"num_hidden_layers\": ${L},\n"
    "  \"num_attention_heads\": ${N},\n"
    "  \"num_key_value_heads\": ${N},\n"
    "  \"q_lora_rank\": ${Rq},\n"
    "  \"kv_lora_rank\": ${Rk},\n"
    "  \"qk_nope_head_dim\": ${P},\n"
    "  \"qk_rope_head_dim\": ${R},\n"
    "  \"v_head_dim\": ${Vd},\n"
    "  \"mla_use_nope\": false,\n"
    "  \"mla_use_output_gate\": false,\n"
    "  \"vocab_size\": ${V},\n"
    "  \"draft_vocab_size\": ${V},\n"
    "  \"rms_norm_eps\": 1e-05,\n"
    "  \"max_position_embeddings\": ${M0*factor},\n"
    "  \"rope_theta\": ${theta}.0,\n"
    "  \"rope_parameters\": {\n"
    "    \"rope_type\": \"yarn\",\n"
    "    \"factor\": ${factor}.0,\n"
    "    \"original_max_position_embeddings\": ${M0},\n"
    "    \"rope_theta\": ${theta}.0,\n"
    "    \"beta_fast\": 32,\n"
    "    \"beta_slow\": 1,\n"
    "    \"mscale\": 1.0,\n"
    "    \"mscale_all_dim\": 1.0\n"
    "  },\n"
    "  \"num_target_layers\": ${A},\n"
    "  \"target_hidden_size\": ${Ht},\n"
    "  \"target_num_hidden_layers\": ${depth},\n"
    "  \"target_layer_ids\": [\n"
    "    ${taps}\n"
    "  ],\n"
    "  \"mask_token_id\": ${V-3},\n"
    "  \"bos_token_id\": ${V-256},\n"
    "  \"eos_token_id\": ${V-254},\n"
    "  \"pad_token_id\": ${V-1},\n"
    "  \"markov_rank\": ${M},\n"
    "  \"markov_head_type\": \"vanilla\",\n"
    "  \"enable_confidence_head\": true,\n"
    "  \"confidence_head_with_markov\": true,\n"
    "  \"tie_word_embeddings\": false,\n"
    "  \"_torchspec_version\": \"0.1.0\",\n"
    "  \"torch_dtype\": \"${dtype}\"${extra}\n"
    "}\n";

static const char target_config[] =
    "{\n"
    "  \"architectures\": [\n"
    "    \"KimiK3ForConditionalGeneration\"\n"
    "  ],\n"
    "  \"model_type\": \"kimi_k3\",\n"
    "  \"text_config\": {\n"
    "    \"model_type\": \"kimi_linear\",\n"
    "    \"hidden_size\": ${H},\n"
    "    \"num_hidden_layers\": ${depth},\n"
    "    \"kv_lora_rank\": ${Rk},\n"
    "    \"qk_rope_head_dim\": ${R},\n"
    "    \"vocab_size\": ${V},\n"
    "    \"rms_norm_eps\": 1e-05,\n"
    "    \"max_position_embeddings\": ${M0*factor},\n"
    "    \"bos_token_id\": ${V-256},\n"
    "    \"eos_token_id\": ${V-254},\n"
    "    \"pad_token_id\": ${V-1},\n"
    "    \"tie_word_embeddings\": false\n"
    "  },\n"
    "  \"torch_dtype\": \"${dtype}\"${extra}\n"
    "}\n";

static const char many_config[] =
    "{\n"
    "  \"model_type\": \"k3pack_many_tensors\",\n"
    "  \"num_hidden_layers\": ${L},\n"
    "  \"num_experts\": ${X},\n"
    "  \"torch_dtype\": \"${dtype}\"${extra}\n"
    "}\n";

static const char causal[] = ",\n  \"dflash_config\": {\n    \"causal\": true\n  }";
static const char tap_norms[] = ",\n  \"fc_norm\": true,\n  \"aux_hidden_stream\": \"attn_res\"";

#define DRAFT_META  .meta_key = "torchspec_version", .meta_value = "0.1.0"
#define TARGET_META .meta_key = "format", .meta_value = "pt"
static const struct k3_synth_preset presets[] = {
    {"tiny", "a drafter of 3 layers and hidden size 64, made in milliseconds", draft_tables, tiny, draft_config, "1,\n    3,\n    6", "", 1, false,
     DRAFT_META},
    {"tiny-target", "its target's embedding, head and some more, in 3 shards", target_tables, tiny, target_config, "", "", 3, false, TARGET_META},
    {"tiny-causal", "tiny with a block whose rows see only earlier ones", draft_tables, tiny, draft_config, "1,\n    3,\n    6", causal, 1, false,
     DRAFT_META},
    {"tiny-tap-norms", "tiny with an RMSNorm for every tap (fc_norm)", draft_tables_tap_norms, tiny, draft_config, "1,\n    3,\n    6", tap_norms, 1,
     false, DRAFT_META},
    {"tiny-aliases", "tiny with fc, hidden_norm, norm and a head of its own, in 3 shards", draft_tables_aliases, tiny, draft_config,
     "1,\n    3,\n    6", "", 3, false, DRAFT_META},
    {"tiny-heads", "2 layers of 16 wide heads and a head of its own: whatever the scheme, 16 ranks can share it", draft_tables_aliases, heads,
     draft_config, "2,\n    5", "", 1, false, DRAFT_META},
    {"k3-dspark-small", "a drafter of 2 layers and hidden size 1024, for numeric tests", draft_tables, small, draft_config, "2,\n    14,\n    26", "",
     1, false, DRAFT_META},
    {"k3-dspark-small-target", "its target's embedding, head and some more, in 3 shards", target_tables, small, target_config, "", "", 3, false,
     TARGET_META},
    {"k3-dspark", "the published drafter's geometry: 68 tensors, 7.1 GB", draft_tables, published, draft_config,
     "2,\n    23,\n    47,\n    71,\n    89", "", 1, false, DRAFT_META},
    {"k3-dspark-target", "its target's embedding, head and some more, in 4 shards, 4.7 GB", target_tables, published, target_config, "", "", 4, false,
     TARGET_META},
    {"many-tensors", "half a million tensors in 96 sparse shards, for measuring headers", many_tables, many, many_config, "", "", 96, true,
     TARGET_META},
};

enum { N_PRESETS = sizeof presets / sizeof presets[0] };

static const struct k3_synth_preset *preset_at(size_t index) {
  if (index < N_PRESETS)
    return &presets[index];
  return index - N_PRESETS < K3_SYNTH_N_MOE_PRESETS ? &K3_SYNTH_MOE_PRESETS[index - N_PRESETS] : NULL;
}

const char *k3_synth_preset_name(size_t index, const char **about) {
  const struct k3_synth_preset *preset = preset_at(index);
  if (preset && about)
    *about = preset->about;
  return preset ? preset->name : NULL;
}

const struct k3_synth_preset *k3_synth_preset_find(const char *name) {
  const struct k3_synth_preset *preset = NULL;
  for (size_t i = 0; (preset = preset_at(i)) && strcmp(preset->name, name) != 0; i++)
    ;
  return preset;
}
