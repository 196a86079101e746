// Presets and config.json of the mixtures of experts.
#include <stdio.h>
#include <string.h>

#include "formats/json_tree.h"
#include "loader/synth_moe.h"

// MiniMax-M3. H hidden, L layers, F dense ones among them, N and G heads and KV heads of D, Rd rotated components, I, Ie, Is widths of dense, routed
// and shared MLPs, X experts, K of them used, Xn index heads of Xd, Xb tokens a block, Xk blocks kept, M prediction modules (Mc: declared), V
// vocabulary; Vh, Vl, Vi, Vp, Vt the vision tower.
static const struct k3_synth_symbol m3[] = {
    {"H", 6144},    {"L", 60},    {"F", 3},   {"N", 64},   {"G", 4},     {"D", 128}, {"Rd", 64}, {"I", 12288}, {"Ie", 3072},  {"Is", 3072},
    {"X", 128},     {"K", 4},     {"Xn", 4},  {"Xd", 128}, {"Xb", 128},  {"Xk", 16}, {"M", 0},   {"Mc", 7},    {"V", 200064}, {"theta", 5000000},
    {"P", 1048576}, {"Vh", 1280}, {"Vl", 32}, {"Vn", 16},  {"Vi", 5120}, {"Vp", 14}, {"Vt", 2},  {0},
};
static const struct k3_synth_symbol m3_tiny[] = {
    {"H", 64},   {"L", 4},   {"F", 1},  {"N", 8},   {"G", 2},   {"D", 16}, {"Rd", 8}, {"I", 96}, {"Ie", 32}, {"Is", 32},
    {"X", 4},    {"K", 2},   {"Xn", 2}, {"Xd", 16}, {"Xb", 4},  {"Xk", 2}, {"M", 0},  {"Mc", 1}, {"V", 128}, {"theta", 10000},
    {"P", 4096}, {"Vh", 32}, {"Vl", 2}, {"Vn", 4},  {"Vi", 64}, {"Vp", 2}, {"Vt", 2}, {0},
};
static const struct k3_synth_symbol m3_tiny_mtp[] = {
    {"H", 64},   {"L", 4},   {"F", 1},  {"N", 8},   {"G", 2},   {"D", 16}, {"Rd", 8}, {"I", 96}, {"Ie", 32}, {"Is", 32},
    {"X", 4},    {"K", 2},   {"Xn", 2}, {"Xd", 16}, {"Xb", 4},  {"Xk", 2}, {"M", 1},  {"Mc", 1}, {"V", 128}, {"theta", 10000},
    {"P", 4096}, {"Vh", 32}, {"Vl", 2}, {"Vn", 4},  {"Vi", 64}, {"Vp", 2}, {"Vt", 2}, {0},
};

// DeepSeek-V3.2. D dense layers, M prediction layers, P, R, Vd parts of a head, Rq, Rk low ranks, B block of the scales, Gr groups of which Gk are
// kept, Xt tokens kept by the indexer; the rest as above.
static const struct k3_synth_symbol v32[] = {
    {"H", 7168},  {"L", 61},   {"D", 3},     {"M", 1},      {"N", 128}, {"P", 128},     {"R", 64},    {"Vd", 128},
    {"Rq", 1536}, {"Rk", 512}, {"I", 18432}, {"Ie", 2048},  {"X", 256}, {"K", 8},       {"Gr", 8},    {"Gk", 4},
    {"Xn", 64},   {"Xd", 128}, {"Xt", 2048}, {"V", 129280}, {"B", 128}, {"factor", 40}, {"M0", 4096}, {0},
};
#define V32_TINY(B)                                                                                                                              \
  {"H", 96}, {"L", 3}, {"D", 1}, {"M", 1}, {"N", 2}, {"P", 16}, {"R", 16}, {"Vd", 16}, {"Rq", 48}, {"Rk", 40}, {"I", 104}, {"Ie", 40}, {"X", 8}, \
      {"K", 2}, {"Gr", 4}, {"Gk", 2}, {"Xn", 2}, {"Xd", 32}, {"Xt", 8}, {"V", 160}, {"B", B}, {"factor", 4}, {"M0", 32}, {                       \
    0                                                                                                                                            \
  }
static const struct k3_synth_symbol v32_tiny_32[] = {V32_TINY(32)}, v32_tiny_128[] = {V32_TINY(128)};

// Kimi K3. Ts special tokens end the vocabulary, An KDA heads of Ad, Ac taps of their convolutions, Z latent width, S shared experts, Bk layers a
// block of the residual attention; Vq, Vg width of the vision attention and side of its position grid; the rest as above.
static const struct k3_synth_symbol k3[] = {
    {"H", 7168},     {"L", 93},    {"D", 1},     {"N", 96},    {"P", 128},   {"R", 64},    {"Vd", 128}, {"Rq", 1536}, {"Rk", 512}, {"An", 96},
    {"Ad", 128},     {"Ac", 4},    {"I", 33792}, {"Ie", 3072}, {"Z", 3584},  {"X", 896},   {"K", 16},   {"S", 2},     {"Bk", 12},  {"V", 163840},
    {"Pm", 1048576}, {"Vh", 1024}, {"Vl", 27},   {"Vn", 12},   {"Vi", 4096}, {"Vq", 1536}, {"Vp", 14},  {"Vg", 64},   {"Ts", 256}, {0},
};
static const struct k3_synth_symbol k3_tiny[] = {
    {"H", 64},    {"L", 5},   {"D", 1},  {"N", 3},   {"P", 8},   {"R", 4},   {"Vd", 8}, {"Rq", 16}, {"Rk", 16}, {"An", 3},
    {"Ad", 8},    {"Ac", 4},  {"I", 96}, {"Ie", 64}, {"Z", 32},  {"X", 4},   {"K", 2},  {"S", 2},   {"Bk", 2},  {"V", 128},
    {"Pm", 4096}, {"Vh", 12}, {"Vl", 1}, {"Vn", 2},  {"Vi", 32}, {"Vq", 24}, {"Vp", 2}, {"Vg", 4},  {"Ts", 32}, {0},
};

#define MOE(...)                        \
  .moe = &(const struct k3_synth_moe) { \
    __VA_ARGS__                         \
  }
#define PT .meta_key = "format", .meta_value = "pt"
const struct k3_synth_preset K3_SYNTH_MOE_PRESETS[K3_SYNTH_N_MOE_PRESETS] = {
    {"minimax-m3", "MiniMax-M3 in BF16, 854 GB of holes", .symbols = m3, .n_shards = 64, .sparse = true, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_PLAIN, .vision = true, .n_count_digits = 5)},
    {"minimax-m3-mxfp8", "its MXFP8 form, 444 GB of holes", .symbols = m3, .n_shards = 32, .sparse = true, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_MXFP8, .vision = true, .n_count_digits = 5)},
    {"minimax-m3-nvfp4", "its mixed form: NVFP4 experts, the rest MXFP8", .symbols = m3, .n_shards = 32, .sparse = true, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_NVFP4, .vision = true, .n_count_digits = 5)},
    {"minimax-m3-mxfp4", "its form with MXFP4 experts", .symbols = m3, .n_shards = 49, .sparse = true, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_QUARK, .vision = true, .n_count_digits = 5)},
    {"deepseek-v3.2", "DeepSeek-V3.2 in FP8 with its prediction layer, 689 GB of holes", .symbols = v32, .n_shards = 163, .sparse = true,
     MOE(K3_SYNTH_V32, K3_SYNTH_FORM_FP8_BLOCK, .mtp = true, .n_count_digits = 6)},
    {"kimi-k3", "Kimi K3 with MXFP4 experts: 497,220 tensors, 1.56 TB of holes", .symbols = k3, .n_shards = 96, .sparse = true,
     MOE(K3_SYNTH_K3, K3_SYNTH_FORM_MXFP4, .vision = true, .places = true, .n_count_digits = 6)},
    {"kimi-k3-nvfp4", "its mixed form: NVFP4 experts, FP8 attention", .symbols = k3, .n_shards = 96, .sparse = true,
     MOE(K3_SYNTH_K3, K3_SYNTH_FORM_NVFP4, .vision = true, .places = true, .n_count_digits = 6)},
    {"m3-tiny", "MiniMax-M3 in small: 4 layers, 4 experts, vision", .symbols = m3_tiny, .n_shards = 1, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_PLAIN, .vision = true, .n_count_digits = 5)},
    {"m3-tiny-text", "m3-tiny without vision", .symbols = m3_tiny, .n_shards = 1, PT, MOE(K3_SYNTH_M3, K3_SYNTH_FORM_PLAIN, .n_count_digits = 5)},
    {"m3-tiny-native", "m3-tiny in the transformers-native spelling", .symbols = m3_tiny, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_PLAIN, .vision = true, .native = true, .n_count_digits = 5)},
    {"m3-tiny-mtp", "m3-tiny with one prediction module", .symbols = m3_tiny_mtp, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_PLAIN, .vision = true, .mtp = true, .n_count_digits = 5)},
    {"m3-tiny-mxfp8", "m3-tiny in MXFP8", .symbols = m3_tiny, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_MXFP8, .vision = true, .n_count_digits = 5)},
    {"m3-tiny-mtp-mxfp8", "m3-tiny-mtp in MXFP8", .symbols = m3_tiny_mtp, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_MXFP8, .vision = true, .mtp = true, .n_count_digits = 5)},
    {"m3-tiny-nvfp4", "m3-tiny with NVFP4 experts, the rest MXFP8", .symbols = m3_tiny, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_NVFP4, .vision = true, .n_count_digits = 5)},
    {"m3-tiny-mxfp4", "m3-tiny with MXFP4 experts in Quark's spelling", .symbols = m3_tiny, .n_shards = 2, PT,
     MOE(K3_SYNTH_M3, K3_SYNTH_FORM_QUARK, .vision = true, .n_count_digits = 5)},
    {"v32-tiny", "DeepSeek-V3.2 in small: 3 layers and a prediction layer, 32 x 32 blocks", .symbols = v32_tiny_32, .n_shards = 2,
     MOE(K3_SYNTH_V32, K3_SYNTH_FORM_FP8_BLOCK, .mtp = true, .n_count_digits = 6)},
    {"v32-tiny-128", "v32-tiny with 128 x 128 blocks", .symbols = v32_tiny_128, .n_shards = 2,
     MOE(K3_SYNTH_V32, K3_SYNTH_FORM_FP8_BLOCK, .mtp = true, .n_count_digits = 6)},
    {"k3-tiny", "Kimi K3 in small: 5 layers of all kinds, MXFP4 experts, vision, 8 shards", .symbols = k3_tiny, .n_shards = 8,
     MOE(K3_SYNTH_K3, K3_SYNTH_FORM_MXFP4, .vision = true, .places = true, .n_count_digits = 6)},
    {"k3-tiny-nvfp4", "k3-tiny with NVFP4 experts and FP8 attention", .symbols = k3_tiny, .n_shards = 8,
     MOE(K3_SYNTH_K3, K3_SYNTH_FORM_NVFP4, .vision = true, .places = true, .n_count_digits = 6)},
};

struct writer {
  struct k3_jsonw json;
  const struct k3_synth_preset *preset;
};

static uint64_t number(const struct writer *w, const char *expression) {
  const char *text = expression;
  return k3_synth_evaluate(w->preset, &text);
}

struct field {
  const char *key, *expression;
};

static void put_fields(struct writer *w, const struct field *fields) {
  for (; fields->key; fields++)
    k3_jsonw_u64(&w->json, fields->key, number(w, fields->expression));
}

static void put_texts(struct writer *w, const char *key, const char *const *texts) {
  k3_jsonw_begin_array(&w->json, key);
  for (; *texts; texts++)
    k3_jsonw_string(&w->json, NULL, *texts);
  k3_jsonw_end_array(&w->json);
}

// A list over the layers: `first` values of the one, then the other; words when there are any.
static void put_layers(struct writer *w, const char *key, const char *dense, const char *sparse) {
  uint64_t n_layers = number(w, "L"), n_dense = number(w, "F");
  k3_jsonw_begin_array(&w->json, key);
  for (uint64_t i = 0; i < n_layers; i++) {
    if (dense)
      k3_jsonw_string(&w->json, NULL, i < n_dense ? dense : sparse);
    else
      k3_jsonw_u64(&w->json, NULL, i >= n_dense);
  }
  k3_jsonw_end_array(&w->json);
}

static void put_pair(struct writer *w, const char *key, uint64_t a, uint64_t b) {
  k3_jsonw_begin_array(&w->json, key);
  k3_jsonw_u64(&w->json, NULL, a);
  k3_jsonw_u64(&w->json, NULL, b);
  k3_jsonw_end_array(&w->json);
}

// ModelOpt's map of a mixed checkpoint: experts by the module that holds them all, other projections one by one.
static void put_mixed(struct writer *w, const char *prefix, const char *const *attention, const char *algo, uint64_t first_expert_layer) {
  k3_jsonw_begin_object(&w->json, "quantization_config");
  k3_jsonw_string(&w->json, "quant_method", "modelopt");
  k3_jsonw_string(&w->json, "quant_algo", "MIXED_PRECISION");
  k3_jsonw_begin_object(&w->json, "quantized_layers");
  for (uint64_t i = 0; i < number(w, "L"); i++) {
    char name[256];
    for (const char *const *module = attention; *module; module++) {
      const char *at = *module;
      char kind = at[0];  // 'a' all layers, 'd' dense, 's' with experts, 'l' latent, 'k' linear attention
      bool experts = i >= first_expert_layer, latent = i % 4 == 3 || i + 1 == number(w, "L");
      if ((kind == 'd' && experts) || (kind == 's' && !experts) || (kind == 'l' && !latent) || (kind == 'k' && latent))
        continue;
      snprintf(name, sizeof name, "%s%llu.%s", prefix, (unsigned long long)i, at + 2);
      k3_jsonw_begin_object(&w->json, name);
      k3_jsonw_string(&w->json, "quant_algo", algo);
      k3_jsonw_end_object(&w->json);
    }
    if (i < first_expert_layer)
      continue;
    snprintf(name, sizeof name, "%s%llu.block_sparse_moe.experts", prefix, (unsigned long long)i);
    k3_jsonw_begin_object(&w->json, name);
    k3_jsonw_string(&w->json, "quant_algo", "NVFP4");
    k3_jsonw_u64(&w->json, "group_size", 16);
    k3_jsonw_end_object(&w->json);
  }
  k3_jsonw_end_object(&w->json);
  static const char *const excluded[] = {"language_model.lm_head", NULL};
  put_texts(w, "ignore", excluded);
  k3_jsonw_end_object(&w->json);
}

static void put_quark_tensor(struct writer *w, const char *key, bool dynamic) {
  k3_jsonw_begin_object(&w->json, key);
  k3_jsonw_string(&w->json, "dtype", "fp4");
  k3_jsonw_string(&w->json, "qscheme", "per_group");
  k3_jsonw_i64(&w->json, "ch_axis", -1);
  k3_jsonw_u64(&w->json, "group_size", 32);
  k3_jsonw_string(&w->json, "scale_format", "e8m0");
  k3_jsonw_bool(&w->json, "is_dynamic", dynamic);
  k3_jsonw_end_object(&w->json);
}

// Everything but the routed experts is left out.
static void put_quark(struct writer *w) {
  static const char *const excluded[] = {"language_model.lm_head",
                                         "*self_attn*",
                                         "*mlp.gate_proj",
                                         "*mlp.up_proj",
                                         "*mlp.down_proj",
                                         "*shared_experts*",
                                         "*vision_tower*",
                                         "*block_sparse_moe.gate",
                                         "*multi_modal_projector*",
                                         "*patch_merge_mlp*",
                                         NULL};
  k3_jsonw_string(&w->json, "quant_method", "quark");
  k3_jsonw_string(&w->json, "quant_mode", "eager_mode");
  k3_jsonw_null(&w->json, "algo_config");
  put_texts(w, "exclude", excluded);
  k3_jsonw_begin_object(&w->json, "global_quant_config");
  put_quark_tensor(w, "weight", false);
  put_quark_tensor(w, "input_tensors", true);
  k3_jsonw_null(&w->json, "output_tensors");
  k3_jsonw_null(&w->json, "bias");
  k3_jsonw_end_object(&w->json);
  k3_jsonw_begin_object(&w->json, "layer_quant_config");
  k3_jsonw_end_object(&w->json);
  k3_jsonw_begin_object(&w->json, "export");
  k3_jsonw_string(&w->json, "pack_method", "reorder");
  k3_jsonw_string(&w->json, "weight_format", "real_quantized");
  k3_jsonw_end_object(&w->json);
}

static void put_m3_quantization(struct writer *w) {
  static const char *const ignored[] = {
      "language_model.lm_head", "language_model.model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp", NULL};
  static const char *const modules[] = {"a:self_attn.q_proj",
                                        "a:self_attn.k_proj",
                                        "a:self_attn.v_proj",
                                        "a:self_attn.o_proj",
                                        "s:self_attn.index_q_proj",
                                        "s:self_attn.index_k_proj",
                                        "d:mlp.gate_proj",
                                        "d:mlp.up_proj",
                                        "d:mlp.down_proj",
                                        "s:block_sparse_moe.shared_experts.gate_proj",
                                        "s:block_sparse_moe.shared_experts.up_proj",
                                        "s:block_sparse_moe.shared_experts.down_proj",
                                        NULL};
  switch (w->preset->moe->form) {
    case K3_SYNTH_FORM_MXFP8:
      k3_jsonw_begin_object(&w->json, "quantization_config");
      k3_jsonw_string(&w->json, "quant_method", "mxfp8");
      put_pair(w, "weight_block_size", 1, 32);
      put_texts(w, "ignored_layers", ignored);
      k3_jsonw_end_object(&w->json);
      break;
    case K3_SYNTH_FORM_QUARK:
      k3_jsonw_begin_object(&w->json, "quantization_config");
      put_quark(w);
      k3_jsonw_end_object(&w->json);
      break;
    case K3_SYNTH_FORM_NVFP4: put_mixed(w, "language_model.model.layers.", modules, "MXFP8", number(w, "F")); break;
    case K3_SYNTH_FORM_PLAIN:
    case K3_SYNTH_FORM_FP8_BLOCK:
    case K3_SYNTH_FORM_MXFP4: break;
  }
}

static void put_m3_text(struct writer *w) {
  bool native = w->preset->moe->native;
  static const struct field common[] = {{"hidden_size", "H"},
                                        {"num_hidden_layers", "L"},
                                        {"num_attention_heads", "N"},
                                        {"num_key_value_heads", "G"},
                                        {"head_dim", "D"},
                                        {"vocab_size", "V"},
                                        {"intermediate_size", "Ie"},
                                        {"dense_intermediate_size", "I"},
                                        {"shared_intermediate_size", "Is"},
                                        {"n_shared_experts", "1"},
                                        {"num_local_experts", "X"},
                                        {"num_experts_per_tok", "K"},
                                        {"max_position_embeddings", "P"},
                                        {"num_mtp_modules", "Mc"},
                                        {"num_nextn_predict_layers", "1"},
                                        {0}};
  static const struct field index_native[] = {{"index_n_heads", "Xn"},     {"index_head_dim", "Xd"},    {"index_block_size", "Xb"},
                                              {"index_topk_blocks", "Xk"}, {"index_local_blocks", "1"}, {0}};
  static const struct field index[] = {{"sparse_index_dim", "Xd"},
                                       {"sparse_num_index_heads", "Xn"},
                                       {"sparse_topk_blocks", "Xk"},
                                       {"sparse_block_size", "Xb"},
                                       {"sparse_init_block", "0"},
                                       {"sparse_local_block", "1"},
                                       {0}};
  k3_jsonw_string(&w->json, "model_type", native ? "minimax_m3_vl_text" : "minimax_m3");
  put_fields(w, common);
  k3_jsonw_string(&w->json, "scoring_func", "sigmoid");
  k3_jsonw_bool(&w->json, "use_routing_bias", true);
  k3_jsonw_double(&w->json, "routed_scaling_factor", 2.0);
  k3_jsonw_string(&w->json, "hidden_act", native ? "silu" : "swigluoai");
  k3_jsonw_double(&w->json, "swiglu_alpha", 1.702);
  k3_jsonw_double(&w->json, "swiglu_limit", 7.0);
  k3_jsonw_double(&w->json, "rms_norm_eps", 1e-6);
  k3_jsonw_bool(&w->json, "tie_word_embeddings", false);
  double factor = (double)number(w, "Rd") / (double)number(w, "D");
  if (native) {
    put_layers(w, "mlp_layer_types", "dense", "sparse");
    put_layers(w, "layer_types", "full_attention", "minimax_m3_sparse");
    put_fields(w, index_native);
    k3_jsonw_begin_object(&w->json, "rope_parameters");
    k3_jsonw_u64(&w->json, "rope_theta", number(w, "theta"));
    k3_jsonw_double(&w->json, "partial_rotary_factor", factor);
    k3_jsonw_string(&w->json, "rope_type", "default");
    k3_jsonw_end_object(&w->json);
    return;
  }
  put_layers(w, "moe_layer_freq", NULL, NULL);
  k3_jsonw_bool(&w->json, "use_gemma_norm", true);
  k3_jsonw_bool(&w->json, "use_qk_norm", true);
  k3_jsonw_string(&w->json, "qk_norm_type", "per_head");
  k3_jsonw_bool(&w->json, "attention_output_gate", false);
  k3_jsonw_u64(&w->json, "rope_theta", number(w, "theta"));
  k3_jsonw_u64(&w->json, "rotary_dim", number(w, "Rd"));
  k3_jsonw_double(&w->json, "partial_rotary_factor", factor);
  k3_jsonw_begin_object(&w->json, "sparse_attention_config");
  k3_jsonw_bool(&w->json, "use_sparse_attention", true);
  put_fields(w, index);
  k3_jsonw_string(&w->json, "sparse_score_type", "max");
  put_layers(w, "sparse_attention_freq", NULL, NULL);
  put_layers(w, "sparse_disable_index_value", NULL, NULL);
  k3_jsonw_end_object(&w->json);
}

static void put_m3(struct writer *w) {
  static const char *const vl[] = {"MiniMaxM3SparseForConditionalGeneration", NULL}, *const text[] = {"MiniMaxM3SparseForCausalLM", NULL};
  static const struct field vision[] = {
      {"hidden_size", "Vh"}, {"num_hidden_layers", "Vl"}, {"num_attention_heads", "Vn"}, {"intermediate_size", "Vi"},
      {"patch_size", "Vp"},  {"num_channels", "3"},       {"image_size", "144*Vp"},      {0}};
  static const struct field merge[] = {{"spatial_merge_size", "2"}, {"temporal_patch_size", "Vt"}, {0}};
  bool has_vision = w->preset->moe->vision;
  put_texts(w, "architectures", has_vision ? vl : text);
  if (!has_vision) {
    put_m3_text(w);
    put_m3_quantization(w);
    return;
  }
  k3_jsonw_string(&w->json, "model_type", "minimax_m3_vl");
  k3_jsonw_begin_object(&w->json, "text_config");
  put_m3_text(w);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_begin_object(&w->json, "vision_config");
  put_fields(w, vision);
  k3_jsonw_begin_object(&w->json, "img_token_compression_config");
  put_fields(w, merge);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_u64(&w->json, "projector_hidden_size", number(w, "H"));
  put_m3_quantization(w);
}

static void put_v32(struct writer *w) {
  static const char *const architectures[] = {"DeepseekV32ForCausalLM", NULL};
  static const struct field fields[] = {{"hidden_size", "H"},
                                        {"num_hidden_layers", "L"},
                                        {"num_nextn_predict_layers", "M"},
                                        {"intermediate_size", "I"},
                                        {"moe_intermediate_size", "Ie"},
                                        {"num_attention_heads", "N"},
                                        {"num_key_value_heads", "N"},
                                        {"vocab_size", "V"},
                                        {"q_lora_rank", "Rq"},
                                        {"kv_lora_rank", "Rk"},
                                        {"qk_nope_head_dim", "P"},
                                        {"qk_rope_head_dim", "R"},
                                        {"v_head_dim", "Vd"},
                                        {"n_routed_experts", "X"},
                                        {"n_shared_experts", "1"},
                                        {"num_experts_per_tok", "K"},
                                        {"n_group", "Gr"},
                                        {"topk_group", "Gk"},
                                        {"first_k_dense_replace", "D"},
                                        {"moe_layer_freq", "1"},
                                        {"index_n_heads", "Xn"},
                                        {"index_head_dim", "Xd"},
                                        {"index_topk", "Xt"},
                                        {"max_position_embeddings", "M0*factor"},
                                        {"rope_theta", "10000"},
                                        {"bos_token_id", "0"},
                                        {"eos_token_id", "1"},
                                        {0}};
  static const struct field yarn[] = {{"factor", "factor"},
                                      {"original_max_position_embeddings", "M0"},
                                      {"beta_fast", "32"},
                                      {"beta_slow", "1"},
                                      {"mscale", "1"},
                                      {"mscale_all_dim", "1"},
                                      {0}};
  put_texts(w, "architectures", architectures);
  k3_jsonw_string(&w->json, "model_type", "deepseek_v32");
  put_fields(w, fields);
  k3_jsonw_string(&w->json, "scoring_func", "sigmoid");
  k3_jsonw_string(&w->json, "topk_method", "noaux_tc");
  k3_jsonw_bool(&w->json, "norm_topk_prob", true);
  k3_jsonw_double(&w->json, "routed_scaling_factor", 2.5);
  k3_jsonw_string(&w->json, "hidden_act", "silu");
  k3_jsonw_double(&w->json, "rms_norm_eps", 1e-6);
  k3_jsonw_bool(&w->json, "tie_word_embeddings", false);
  k3_jsonw_begin_object(&w->json, "rope_scaling");
  k3_jsonw_string(&w->json, "type", "yarn");
  put_fields(w, yarn);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_begin_object(&w->json, "quantization_config");
  k3_jsonw_string(&w->json, "quant_method", "fp8");
  k3_jsonw_string(&w->json, "fmt", "e4m3");
  k3_jsonw_string(&w->json, "activation_scheme", "dynamic");
  k3_jsonw_string(&w->json, "scale_fmt", "ue8m0");
  put_pair(w, "weight_block_size", number(w, "B"), number(w, "B"));
  k3_jsonw_end_object(&w->json);
}

// The lists count from one.
static void put_k3_lists(struct writer *w) {
  static const char *const keys[] = {"kda_layers", "full_attn_layers"};
  uint64_t n_layers = number(w, "L");
  for (int latent = 0; latent <= 1; latent++) {
    k3_jsonw_begin_array(&w->json, keys[latent]);
    for (uint64_t i = 0; i < n_layers; i++) {
      if ((i % 4 == 3 || i + 1 == n_layers) == (latent == 1))
        k3_jsonw_u64(&w->json, NULL, i + 1);
    }
    k3_jsonw_end_array(&w->json);
  }
}

static void put_k3_quantization(struct writer *w) {
  static const char *const ignore[] = {"re:.*self_attn.*",
                                       "re:.*shared_experts.*",
                                       "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                                       "re:.*lm_head.*",
                                       "re:.*vision_tower.*",
                                       "re:.*mm_projector.*",
                                       NULL};
  static const char *const attention[] = {"k:self_attn.q_proj",    "k:self_attn.k_proj",
                                          "k:self_attn.v_proj",    "l:self_attn.q_a_proj",
                                          "l:self_attn.q_b_proj",  "l:self_attn.kv_a_proj_with_mqa",
                                          "l:self_attn.kv_b_proj", "a:self_attn.g_proj",
                                          "a:self_attn.o_proj",    NULL};
  if (w->preset->moe->form == K3_SYNTH_FORM_NVFP4) {
    put_mixed(w, "language_model.model.layers.", attention, "FP8_PB_WO", number(w, "D"));
    return;
  }
  static const char *const targets[] = {"Linear", NULL};
  k3_jsonw_begin_object(&w->json, "quantization_config");
  k3_jsonw_string(&w->json, "quant_method", "compressed-tensors");
  k3_jsonw_string(&w->json, "format", "mxfp4-pack-quantized");
  k3_jsonw_string(&w->json, "quantization_status", "compressed");
  k3_jsonw_begin_object(&w->json, "config_groups");
  k3_jsonw_begin_object(&w->json, "group_0");
  put_texts(w, "targets", targets);
  k3_jsonw_begin_object(&w->json, "weights");
  k3_jsonw_u64(&w->json, "num_bits", 4);
  k3_jsonw_string(&w->json, "type", "float");
  k3_jsonw_string(&w->json, "strategy", "group");
  k3_jsonw_u64(&w->json, "group_size", 32);
  k3_jsonw_bool(&w->json, "symmetric", true);
  k3_jsonw_bool(&w->json, "dynamic", false);
  k3_jsonw_string(&w->json, "observer", "minmax");
  k3_jsonw_string(&w->json, "scale_dtype", "torch.uint8");
  k3_jsonw_end_object(&w->json);
  k3_jsonw_null(&w->json, "input_activations");
  k3_jsonw_null(&w->json, "output_activations");
  k3_jsonw_end_object(&w->json);
  k3_jsonw_end_object(&w->json);
  put_texts(w, "ignore", ignore);
  k3_jsonw_end_object(&w->json);
}

static void put_k3(struct writer *w) {
  static const char *const architectures[] = {"KimiK3ForConditionalGeneration", NULL};
  static const struct field fields[] = {{"hidden_size", "H"},
                                        {"num_hidden_layers", "L"},
                                        {"intermediate_size", "I"},
                                        {"vocab_size", "V"},
                                        {"num_attention_heads", "N"},
                                        {"num_key_value_heads", "N"},
                                        {"q_lora_rank", "Rq"},
                                        {"kv_lora_rank", "Rk"},
                                        {"qk_nope_head_dim", "P"},
                                        {"qk_rope_head_dim", "R"},
                                        {"v_head_dim", "Vd"},
                                        {"num_experts", "X"},
                                        {"num_experts_per_token", "K"},
                                        {"num_shared_experts", "S"},
                                        {"moe_intermediate_size", "Ie"},
                                        {"routed_expert_hidden_size", "Z"},
                                        {"num_expert_group", "1"},
                                        {"topk_group", "1"},
                                        {"first_k_dense_replace", "D"},
                                        {"moe_layer_freq", "1"},
                                        {"attn_res_block_size", "Bk"},
                                        {"max_position_embeddings", "Pm"},
                                        {"num_nextn_predict_layers", "0"},
                                        {"bos_token_id", "V-Ts"},
                                        {"eos_token_id", "V-Ts+2"},
                                        {"pad_token_id", "V-1"},
                                        {0}};
  static const struct field linear[] = {{"num_heads", "An"}, {"head_dim", "Ad"}, {"short_conv_kernel_size", "Ac"}, {0}};
  static const struct field vision[] = {{"patch_size", "Vp"},       {"init_pos_emb_height", "Vg"},    {"init_pos_emb_width", "Vg"},
                                        {"init_pos_emb_time", "4"}, {"vt_num_attention_heads", "Vn"}, {"vt_num_hidden_layers", "Vl"},
                                        {"vt_hidden_size", "Vh"},   {"vt_intermediate_size", "Vi"},   {"qkv_hidden_size", "Vq"},
                                        {"mm_hidden_size", "Vh"},   {"text_hidden_size", "H"},        {0}};
  put_texts(w, "architectures", architectures);
  k3_jsonw_string(&w->json, "model_type", "kimi_k3");
  k3_jsonw_begin_object(&w->json, "text_config");
  k3_jsonw_string(&w->json, "model_type", "kimi_linear");
  put_fields(w, fields);
  k3_jsonw_begin_object(&w->json, "linear_attn_config");
  put_k3_lists(w);
  put_fields(w, linear);
  k3_jsonw_bool(&w->json, "use_full_rank_gate", true);
  k3_jsonw_double(&w->json, "gate_lower_bound", -5.0);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_bool(&w->json, "mla_use_nope", true);
  k3_jsonw_bool(&w->json, "mla_use_output_gate", true);
  k3_jsonw_bool(&w->json, "latent_moe_use_norm", true);
  k3_jsonw_bool(&w->json, "moe_renormalize", true);
  k3_jsonw_bool(&w->json, "use_grouped_topk", true);
  k3_jsonw_string(&w->json, "moe_router_activation_func", "sigmoid");
  k3_jsonw_string(&w->json, "topk_method", "noaux_tc");
  k3_jsonw_double(&w->json, "routed_scaling_factor", 1.0);
  k3_jsonw_string(&w->json, "hidden_act", "situ");
  k3_jsonw_double(&w->json, "activation_situ_beta", 4.0);
  k3_jsonw_double(&w->json, "activation_situ_linear_beta", 25.0);
  k3_jsonw_double(&w->json, "rms_norm_eps", 1e-5);
  k3_jsonw_bool(&w->json, "tie_word_embeddings", false);
  put_k3_quantization(w);
  k3_jsonw_end_object(&w->json);
  k3_jsonw_begin_object(&w->json, "vision_config");
  put_fields(w, vision);
  put_pair(w, "merge_kernel_size", 2, 2);
  k3_jsonw_string(&w->json, "merge_type", "sd2_tpool");
  k3_jsonw_string(&w->json, "mm_projector_type", "patchmergerv2");
  k3_jsonw_end_object(&w->json);
  k3_jsonw_u64(&w->json, "media_placeholder_token_id", number(w, "V-Ts+21"));
}

char *k3_synth_moe_config(const struct k3_synth_preset *preset, enum k3_dtype dtype, struct k3_error *err) {
  struct writer w = {.preset = preset};
  k3_jsonw_open(&w.json, true, NULL, NULL);
  k3_jsonw_begin_object(&w.json, NULL);
  switch (preset->moe->family) {
    case K3_SYNTH_M3: put_m3(&w); break;
    case K3_SYNTH_V32: put_v32(&w); break;
    case K3_SYNTH_K3: put_k3(&w); break;
  }
  k3_jsonw_string(&w.json, "torch_dtype", dtype == K3_DTYPE_F32 ? "float32" : dtype == K3_DTYPE_F16 ? "float16" : "bfloat16");
  k3_jsonw_end_object(&w.json);
  return k3_json_tree_take(&w.json, err);
}
