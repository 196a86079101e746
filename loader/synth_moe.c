// The tensors of the three mixtures of experts: a row for every family of names, multiplied by layers, experts and storage forms.
#include "loader/synth_moe.h"

#include <stdio.h>
#include <string.h>

#include "base/arith.h"

enum { MAX_NAME_NBYTES = 512 };

// Which layers a row of "layers.{i}." exists for.
enum layers { ALL, DENSE, EXPERTS, PREDICT, LINEAR, LATENT };
// What a row is: how it is stored follows from this and the form.
enum part { ROUTED, SHARED, ATTENTION, MLP, INPUT, PLAIN, FLOAT32 };  // INPUT: a projection of the prediction module

struct row {
  const char *name, *shape;
  uint8_t layers, part, fill;
};

#define MATRIX K3_SYNTH_MATRIX
#define NORM   K3_SYNTH_NORM
#define BIAS   K3_SYNTH_BIAS

// A sparse layer of MiniMax-M3 behind PREFIX; norms hold what is added to 1.
#define M3_ATTENTION(PREFIX, LAYERS)                                                                                                    \
  {PREFIX "input_layernorm.weight", "H", LAYERS, PLAIN, BIAS}, {PREFIX "post_attention_layernorm.weight", "H", LAYERS, PLAIN, BIAS},    \
      {PREFIX "self_attn.q_proj", "N*D,H", LAYERS, ATTENTION, MATRIX}, {PREFIX "self_attn.k_proj", "G*D,H", LAYERS, ATTENTION, MATRIX}, \
      {PREFIX "self_attn.v_proj", "G*D,H", LAYERS, ATTENTION, MATRIX}, {PREFIX "self_attn.o_proj", "H,N*D", LAYERS, ATTENTION, MATRIX}, \
      {PREFIX "self_attn.q_norm.weight", "D", LAYERS, PLAIN, BIAS}, {                                                                   \
    PREFIX "self_attn.k_norm.weight", "D", LAYERS, PLAIN, BIAS                                                                          \
  }
#define M3_SPARSE(PREFIX, LAYERS)                                                                                                                \
  {PREFIX "self_attn.index_q_proj", "Xn*Xd,H", LAYERS, ATTENTION, MATRIX}, {PREFIX "self_attn.index_k_proj", "Xd,H", LAYERS, ATTENTION, MATRIX}, \
      {PREFIX "self_attn.index_q_norm.weight", "Xd", LAYERS, PLAIN, BIAS}, {PREFIX "self_attn.index_k_norm.weight", "Xd", LAYERS, PLAIN, BIAS},  \
      {PREFIX "block_sparse_moe.gate.weight", "X,H", LAYERS, FLOAT32, MATRIX},                                                                   \
      {PREFIX "block_sparse_moe.e_score_correction_bias", "X", LAYERS, FLOAT32, BIAS},                                                           \
      {PREFIX "block_sparse_moe.experts.{e}.w1", "Ie,H", LAYERS, ROUTED, MATRIX},                                                                \
      {PREFIX "block_sparse_moe.experts.{e}.w2", "H,Ie", LAYERS, ROUTED, MATRIX},                                                                \
      {PREFIX "block_sparse_moe.experts.{e}.w3", "Ie,H", LAYERS, ROUTED, MATRIX},                                                                \
      {PREFIX "block_sparse_moe.shared_experts.gate_proj", "Is,H", LAYERS, SHARED, MATRIX},                                                      \
      {PREFIX "block_sparse_moe.shared_experts.up_proj", "Is,H", LAYERS, SHARED, MATRIX}, {                                                      \
    PREFIX "block_sparse_moe.shared_experts.down_proj", "H,Is", LAYERS, SHARED, MATRIX                                                           \
  }

static const struct row m3_text[] = {
    {"language_model.model.embed_tokens.weight", "V,H", ALL, PLAIN, MATRIX},
    {"language_model.lm_head.weight", "V,H", ALL, PLAIN, MATRIX},
    {"language_model.model.norm.weight", "H", ALL, PLAIN, BIAS},
    M3_ATTENTION("language_model.model.layers.{i}.", ALL),
    M3_SPARSE("language_model.model.layers.{i}.", EXPERTS),
    {"language_model.model.layers.{i}.mlp.gate_proj", "I,H", DENSE, MLP, MATRIX},
    {"language_model.model.layers.{i}.mlp.up_proj", "I,H", DENSE, MLP, MATRIX},
    {"language_model.model.layers.{i}.mlp.down_proj", "H,I", DENSE, MLP, MATRIX},
    {0},
};
static const struct row m3_mtp[] = {
    {"language_model.model.mtp.layers.{k}.enorm.weight", "H", ALL, PLAIN, BIAS},
    {"language_model.model.mtp.layers.{k}.hnorm.weight", "H", ALL, PLAIN, BIAS},
    {"language_model.model.mtp.layers.{k}.final_layernorm.weight", "H", ALL, PLAIN, BIAS},
    {"language_model.model.mtp.layers.{k}.eh_proj", "H,2*H", ALL, INPUT, MATRIX},
    M3_ATTENTION("language_model.model.mtp.layers.{k}.transformer_layer.", ALL),
    M3_SPARSE("language_model.model.mtp.layers.{k}.transformer_layer.", ALL),
    {0},
};
#define M3_VISION "vision_tower.vision_model.encoder.layers.{v}."
static const struct row m3_vision[] = {
    {"vision_tower.vision_model.embeddings.patch_embedding.weight", "Vh,3,Vt,Vp,Vp", ALL, FLOAT32, MATRIX},
    {"vision_tower.vision_model.pre_layrnorm.weight", "Vh", ALL, PLAIN, NORM},
    {"vision_tower.vision_model.pre_layrnorm.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "layer_norm1.weight", "Vh", ALL, PLAIN, NORM},
    {M3_VISION "layer_norm1.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "layer_norm2.weight", "Vh", ALL, PLAIN, NORM},
    {M3_VISION "layer_norm2.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "self_attn.q_proj.weight", "Vh,Vh", ALL, PLAIN, MATRIX},
    {M3_VISION "self_attn.q_proj.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "self_attn.k_proj.weight", "Vh,Vh", ALL, PLAIN, MATRIX},
    {M3_VISION "self_attn.k_proj.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "self_attn.v_proj.weight", "Vh,Vh", ALL, PLAIN, MATRIX},
    {M3_VISION "self_attn.v_proj.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "self_attn.out_proj.weight", "Vh,Vh", ALL, PLAIN, MATRIX},
    {M3_VISION "self_attn.out_proj.bias", "Vh", ALL, PLAIN, BIAS},
    {M3_VISION "mlp.fc1.weight", "Vi,Vh", ALL, PLAIN, MATRIX},
    {M3_VISION "mlp.fc1.bias", "Vi", ALL, PLAIN, BIAS},
    {M3_VISION "mlp.fc2.weight", "Vh,Vi", ALL, PLAIN, MATRIX},
    {M3_VISION "mlp.fc2.bias", "Vh", ALL, PLAIN, BIAS},
    {"multi_modal_projector.linear_1.weight", "H,Vh", ALL, PLAIN, MATRIX},
    {"multi_modal_projector.linear_1.bias", "H", ALL, PLAIN, BIAS},
    {"multi_modal_projector.linear_2.weight", "H,H", ALL, PLAIN, MATRIX},
    {"multi_modal_projector.linear_2.bias", "H", ALL, PLAIN, BIAS},
    {"patch_merge_mlp.linear_1.weight", "H,4*H", ALL, PLAIN, MATRIX},
    {"patch_merge_mlp.linear_1.bias", "H", ALL, PLAIN, BIAS},
    {"patch_merge_mlp.linear_2.weight", "H,H", ALL, PLAIN, MATRIX},
    {"patch_merge_mlp.linear_2.bias", "H", ALL, PLAIN, BIAS},
    {0},
};

static const struct row v32_rows[] = {
    {"model.embed_tokens.weight", "V,H", ALL, PLAIN, MATRIX},
    {"lm_head.weight", "V,H", ALL, PLAIN, MATRIX},
    {"model.norm.weight", "H", ALL, PLAIN, NORM},
    {"model.layers.{i}.input_layernorm.weight", "H", ALL, PLAIN, NORM},
    {"model.layers.{i}.post_attention_layernorm.weight", "H", ALL, PLAIN, NORM},
    {"model.layers.{i}.self_attn.q_a_proj", "Rq,H", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.q_a_layernorm.weight", "Rq", ALL, PLAIN, NORM},
    {"model.layers.{i}.self_attn.q_b_proj", "N*P+N*R,Rq", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.kv_a_proj_with_mqa", "Rk+R,H", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.kv_a_layernorm.weight", "Rk", ALL, PLAIN, NORM},
    {"model.layers.{i}.self_attn.kv_b_proj", "N*P+N*Vd,Rk", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.o_proj", "H,N*Vd", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.indexer.wq_b", "Xn*Xd,Rq", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.indexer.wk", "Xd,H", ALL, ATTENTION, MATRIX},
    {"model.layers.{i}.self_attn.indexer.k_norm.weight", "Xd", ALL, FLOAT32, NORM},
    {"model.layers.{i}.self_attn.indexer.k_norm.bias", "Xd", ALL, FLOAT32, BIAS},
    {"model.layers.{i}.self_attn.indexer.weights_proj.weight", "Xn,H", ALL, PLAIN, MATRIX},
    {"model.layers.{i}.mlp.gate_proj", "I,H", DENSE, MLP, MATRIX},
    {"model.layers.{i}.mlp.up_proj", "I,H", DENSE, MLP, MATRIX},
    {"model.layers.{i}.mlp.down_proj", "H,I", DENSE, MLP, MATRIX},
    {"model.layers.{i}.mlp.gate.weight", "X,H", EXPERTS, PLAIN, MATRIX},
    {"model.layers.{i}.mlp.gate.e_score_correction_bias", "X", EXPERTS, FLOAT32, BIAS},
    {"model.layers.{i}.mlp.experts.{e}.gate_proj", "Ie,H", EXPERTS, ROUTED, MATRIX},
    {"model.layers.{i}.mlp.experts.{e}.up_proj", "Ie,H", EXPERTS, ROUTED, MATRIX},
    {"model.layers.{i}.mlp.experts.{e}.down_proj", "H,Ie", EXPERTS, ROUTED, MATRIX},
    {"model.layers.{i}.mlp.shared_experts.gate_proj", "Ie,H", EXPERTS, SHARED, MATRIX},
    {"model.layers.{i}.mlp.shared_experts.up_proj", "Ie,H", EXPERTS, SHARED, MATRIX},
    {"model.layers.{i}.mlp.shared_experts.down_proj", "H,Ie", EXPERTS, SHARED, MATRIX},
    {"model.layers.{i}.enorm.weight", "H", PREDICT, PLAIN, NORM},
    {"model.layers.{i}.hnorm.weight", "H", PREDICT, PLAIN, NORM},
    {"model.layers.{i}.eh_proj.weight", "H,2*H", PREDICT, PLAIN, MATRIX},
    {"model.layers.{i}.embed_tokens.weight", "V,H", PREDICT, PLAIN, MATRIX},
    {"model.layers.{i}.shared_head.norm.weight", "H", PREDICT, PLAIN, NORM},
    {"model.layers.{i}.shared_head.head.weight", "V,H", PREDICT, PLAIN, MATRIX},
    {0},
};

#define K3_LAYER "language_model.model.layers.{i}."
static const struct row k3_text[] = {
    {"language_model.model.embed_tokens.weight", "V,H", ALL, PLAIN, MATRIX},
    {"language_model.lm_head.weight", "V,H", ALL, PLAIN, MATRIX},
    {"language_model.model.norm.weight", "H", ALL, PLAIN, NORM},
    {"language_model.model.output_attn_res_norm.weight", "H", ALL, PLAIN, NORM},
    {"language_model.model.output_attn_res_proj.weight", "1,H", ALL, PLAIN, MATRIX},
    {K3_LAYER "input_layernorm.weight", "H", ALL, PLAIN, NORM},
    {K3_LAYER "self_attention_res_norm.weight", "H", ALL, PLAIN, NORM},
    {K3_LAYER "post_attention_layernorm.weight", "H", ALL, PLAIN, NORM},
    {K3_LAYER "mlp_res_norm.weight", "H", ALL, PLAIN, NORM},
    {K3_LAYER "self_attention_res_proj.weight", "1,H", ALL, PLAIN, MATRIX},
    {K3_LAYER "mlp_res_proj.weight", "1,H", ALL, PLAIN, MATRIX},
    {K3_LAYER "self_attn.A_log", "Ad", LINEAR, FLOAT32, K3_SYNTH_HEADS},
    {K3_LAYER "self_attn.dt_bias", "An*Ad", LINEAR, FLOAT32, BIAS},
    {K3_LAYER "self_attn.q_conv1d.weight", "An*Ad,1,Ac", LINEAR, FLOAT32, MATRIX},
    {K3_LAYER "self_attn.k_conv1d.weight", "An*Ad,1,Ac", LINEAR, FLOAT32, MATRIX},
    {K3_LAYER "self_attn.v_conv1d.weight", "An*Ad,1,Ac", LINEAR, FLOAT32, MATRIX},
    {K3_LAYER "self_attn.o_norm.weight", "Ad", LINEAR, FLOAT32, NORM},
    {K3_LAYER "self_attn.q_proj", "An*Ad,H", LINEAR, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.k_proj", "An*Ad,H", LINEAR, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.v_proj", "An*Ad,H", LINEAR, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.g_proj", "An*Ad,H", LINEAR, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.f_a_proj.weight", "Ad,H", LINEAR, PLAIN, MATRIX},
    {K3_LAYER "self_attn.f_b_proj.weight", "An*Ad,Ad", LINEAR, PLAIN, MATRIX},
    {K3_LAYER "self_attn.b_proj.weight", "An,H", LINEAR, PLAIN, MATRIX},
    {K3_LAYER "self_attn.o_proj", "H,An*Ad", LINEAR, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.q_a_proj", "Rq,H", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.q_a_layernorm.weight", "Rq", LATENT, PLAIN, NORM},
    {K3_LAYER "self_attn.q_b_proj", "N*P+N*R,Rq", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.kv_a_proj_with_mqa", "Rk+R,H", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.kv_a_layernorm.weight", "Rk", LATENT, PLAIN, NORM},
    {K3_LAYER "self_attn.kv_b_proj", "N*P+N*Vd,Rk", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.g_proj", "N*Vd,H", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "self_attn.o_proj", "H,N*Vd", LATENT, ATTENTION, MATRIX},
    {K3_LAYER "mlp.gate_proj.weight", "I,H", DENSE, PLAIN, MATRIX},
    {K3_LAYER "mlp.up_proj.weight", "I,H", DENSE, PLAIN, MATRIX},
    {K3_LAYER "mlp.down_proj.weight", "H,I", DENSE, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.gate.weight", "X,H", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.gate.e_score_correction_bias", "X", EXPERTS, FLOAT32, BIAS},
    {K3_LAYER "block_sparse_moe.routed_expert_down_proj.weight", "Z,H", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.routed_expert_norm.weight", "Z", EXPERTS, PLAIN, NORM},
    {K3_LAYER "block_sparse_moe.routed_expert_up_proj.weight", "H,Z", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.shared_experts.gate_proj.weight", "S*Ie,H", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.shared_experts.up_proj.weight", "S*Ie,H", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.shared_experts.down_proj.weight", "H,S*Ie", EXPERTS, PLAIN, MATRIX},
    {K3_LAYER "block_sparse_moe.experts.{e}.w1", "Ie,Z", EXPERTS, ROUTED, MATRIX},
    {K3_LAYER "block_sparse_moe.experts.{e}.w2", "Z,Ie", EXPERTS, ROUTED, MATRIX},
    {K3_LAYER "block_sparse_moe.experts.{e}.w3", "Ie,Z", EXPERTS, ROUTED, MATRIX},
    {0},
};
static const struct row k3_vision[] = {
    {"mm_projector.proj.0.weight", "4*Vh,4*Vh", ALL, PLAIN, MATRIX},
    {"mm_projector.proj.2.weight", "H,4*Vh", ALL, PLAIN, MATRIX},
    {"mm_projector.post_norm.weight", "H", ALL, PLAIN, NORM},
    {"vision_tower.patch_embed.proj.weight", "Vh,3,Vp,Vp", ALL, PLAIN, MATRIX},
    {"vision_tower.patch_embed.pos_emb.weight", "Vg,Vg,Vh", ALL, PLAIN, MATRIX},
    {"vision_tower.encoder.final_layernorm.weight", "Vh", ALL, PLAIN, NORM},
    {"vision_tower.encoder.blocks.{v}.norm0.weight", "Vh", ALL, PLAIN, NORM},
    {"vision_tower.encoder.blocks.{v}.norm1.weight", "Vh", ALL, PLAIN, NORM},
    {"vision_tower.encoder.blocks.{v}.wqkv.weight", "3*Vq,Vh", ALL, PLAIN, MATRIX},
    {"vision_tower.encoder.blocks.{v}.wo.weight", "Vh,Vq", ALL, PLAIN, MATRIX},
    {"vision_tower.encoder.blocks.{v}.mlp.fc0.weight", "Vi,Vh", ALL, PLAIN, MATRIX},
    {"vision_tower.encoder.blocks.{v}.mlp.fc1.weight", "Vh,Vi", ALL, PLAIN, MATRIX},
    {0},
};

struct builder {
  const struct k3_synth_preset *preset;
  const char *root;
  enum k3_dtype dtype;
  struct k3_synth_list *list;
  uint64_t n_layers, n_dense, n_experts, n_predict, block_rows, block_cols, n_heads;
};

uint64_t k3_synth_symbol_value(const struct k3_synth_preset *preset, const char *name) {
  const char *text = name;
  return k3_synth_evaluate(preset, &text);
}

// Every fourth layer of Kimi K3, and the last one, is a latent (MLA) one.
static bool layer_fits(const struct builder *b, enum layers layers, uint64_t i) {
  bool latent = i % 4 == 3 || i + 1 == b->n_layers;
  switch (layers) {
    case DENSE: return i < b->n_dense;
    case EXPERTS: return i >= b->n_dense;
    case PREDICT: return i >= b->n_layers;
    case LINEAR: return !latent;
    case LATENT: return latent;
    case ALL: break;
  }
  return true;
}

// A part of a module's stored form: its suffix, what it holds, how its shape follows from [N, K].
enum extent { SAME, HALF, PER_16, PER_32, BLOCKS, BLOCKS_4D, SCALAR };
struct piece {
  const char *suffix;
  uint8_t dtype, fill, extent;
};
static const struct piece plain[] = {{".weight", K3_DTYPE_BF16, MATRIX, SAME}, {0}};
static const struct piece mxfp8_inv[] = {
    {".weight", K3_DTYPE_F8_E4M3, K3_SYNTH_FP8_CODES, SAME}, {".weight_scale_inv", K3_DTYPE_U8, K3_SYNTH_FP8_SCALES, PER_32}, {0}};
static const struct piece mxfp8[] = {
    {".weight", K3_DTYPE_F8_E4M3, K3_SYNTH_FP8_CODES, SAME}, {".weight_scale", K3_DTYPE_U8, K3_SYNTH_FP8_SCALES, PER_32}, {0}};
static const struct piece fp8_block[] = {
    {".weight", K3_DTYPE_F8_E4M3, K3_SYNTH_FP8_CODES, SAME}, {".weight_scale_inv", K3_DTYPE_F32, K3_SYNTH_FP8_SCALES, BLOCKS}, {0}};
static const struct piece fp8_block_4d[] = {
    {".weight", K3_DTYPE_F8_E4M3, K3_SYNTH_FP8_CODES, SAME}, {".weight_scale", K3_DTYPE_F32, K3_SYNTH_FP8_SCALES, BLOCKS_4D}, {0}};
static const struct piece mxfp4[] = {
    {".weight_packed", K3_DTYPE_U8, K3_SYNTH_FP4_CODES, HALF}, {".weight_scale", K3_DTYPE_U8, K3_SYNTH_FP4_SCALES, PER_32}, {0}};
static const struct piece quark[] = {
    {".weight", K3_DTYPE_U8, K3_SYNTH_FP4_CODES, HALF}, {".weight_scale", K3_DTYPE_U8, K3_SYNTH_FP4_SCALES, PER_32}, {0}};
static const struct piece nvfp4[] = {{".weight", K3_DTYPE_U8, K3_SYNTH_FP4_CODES, HALF},
                                     {".weight_scale", K3_DTYPE_F8_E4M3, K3_SYNTH_NVFP4_SCALES, PER_16},
                                     {".weight_scale_2", K3_DTYPE_F32, K3_SYNTH_NVFP4_SECOND, SCALAR},
                                     {".input_scale", K3_DTYPE_F32, K3_SYNTH_ONES, SCALAR},
                                     {0}};

static const struct piece *pieces_of(const struct k3_synth_moe *moe, enum part part) {
  switch (moe->form) {
    case K3_SYNTH_FORM_MXFP8: return mxfp8_inv;
    case K3_SYNTH_FORM_FP8_BLOCK: return fp8_block;
    case K3_SYNTH_FORM_MXFP4: return part == ROUTED ? mxfp4 : plain;
    case K3_SYNTH_FORM_QUARK: return part == ROUTED ? quark : plain;
    case K3_SYNTH_FORM_NVFP4: return part == ROUTED ? nvfp4 : moe->family == K3_SYNTH_M3 ? mxfp8 : part == ATTENTION ? fp8_block_4d : plain;
    case K3_SYNTH_FORM_PLAIN: break;
  }
  return plain;
}

static enum k3_status parse_shape(const struct builder *b, const char *text, struct k3_synth_tensor *t, struct k3_error *err) {
  t->rank = 0;
  for (bool more = true; more; text += more) {
    if (t->rank == K3_SYNTH_MAX_RANK)
      return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, b->preset->name, "up to five dimensions", "the shape %s", text);
    t->shape[t->rank++] = k3_synth_evaluate(b->preset, &text);
    more = *text == ',';
  }
  return K3_OK;
}

static void shape_piece(const struct builder *b, const struct piece *piece, struct k3_synth_tensor *t) {
  uint64_t n_rows = t->shape[0], n_cols = t->shape[1];
  t->n_cols = piece->fill == MATRIX ? 0 : n_cols;
  switch ((enum extent)piece->extent) {
    case SAME: break;
    case HALF: t->shape[1] = n_cols / 2; break;
    case PER_16: t->shape[1] = n_cols / 16; break;
    case PER_32: t->shape[1] = n_cols / 32; break;
    case BLOCKS_4D:
    case BLOCKS:
      t->shape[0] = k3_ceil_div_u64(n_rows, b->block_rows);
      t->shape[1] = k3_ceil_div_u64(n_cols, b->block_cols);
      if (piece->extent == BLOCKS_4D) {
        t->shape[2] = t->shape[1];
        t->shape[1] = t->shape[3] = 1;
        t->rank = 4;
      }
      break;
    case SCALAR: t->rank = 0; break;
  }
}

// The transformers-native spelling of a MiniMax-M3 name.
static void respell(char name[MAX_NAME_NBYTES]) {
  static const char *const pairs[][2] = {{".index_q_proj", ".indexer.q_proj"},
                                         {".index_k_proj", ".indexer.k_proj"},
                                         {".index_q_norm", ".indexer.q_norm"},
                                         {".index_k_norm", ".indexer.k_norm"},
                                         {".w1", ".gate_proj"},
                                         {".w2", ".down_proj"},
                                         {".w3", ".up_proj"}};
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    char *at = strstr(name, pairs[i][0]), rest[MAX_NAME_NBYTES];
    if (!at)
      continue;
    snprintf(rest, sizeof rest, "%s", at + strlen(pairs[i][0]));
    snprintf(at, MAX_NAME_NBYTES - (size_t)(at - name), "%s%s", pairs[i][1], rest);
  }
}

static enum k3_status add_tensor(struct builder *b, const struct k3_synth_tensor *proto, const char *pattern, const char *suffix,
                                 const uint64_t index[4], struct k3_error *err) {
  struct k3_synth_list *list = b->list;
  char name[MAX_NAME_NBYTES];
  size_t n = (size_t)snprintf(name, sizeof name, "%s", b->root), n_root = n;
  static const char letters[] = "iekv";
  for (const char *c = pattern; *c && n < sizeof name - 24;) {
    const char *letter = *c == '{' ? strchr(letters, c[1]) : NULL;
    if (letter)
      n += (size_t)snprintf(name + n, sizeof name - n, "%llu", (unsigned long long)index[letter - letters]);
    else
      name[n++] = *c;
    c += letter ? 3 : 1;
  }
  snprintf(name + n, sizeof name - n, "%s", suffix);
  if (b->preset->moe->native)
    respell(name);
  K3_TRY(k3_grow(&list->tensors, &list->capacity, list->n_tensors + 1, sizeof *list->tensors, err));
  struct k3_synth_tensor *t = &list->tensors[list->n_tensors];
  *t = *proto;
  t->name = k3_arena_strndup(&list->arena, name, strlen(name), err);
  if (!t->name)
    return K3_NO_MEMORY;
  t->key = t->name + n_root;
  // The prediction layer of DeepSeek-V3.2 holds copies of the embedding and the head.
  if (strcmp(pattern, "model.layers.{i}.embed_tokens.weight") == 0)
    t->key = "model.embed_tokens.weight";
  else if (strcmp(pattern, "model.layers.{i}.shared_head.head.weight") == 0)
    t->key = "lm_head.weight";
  t->n_elems = 1;
  for (unsigned d = 0; d < t->rank; d++) {
    if (!k3_mul_u64(t->n_elems, t->shape[d], &t->n_elems) || t->n_elems == 0)
      return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, name, "dimensions above 0", "preset %s has no shape for it", b->preset->name);
  }
  t->nbytes = t->n_elems * (k3_dtype_bits(t->dtype) / 8);
  list->n_tensors++;
  return K3_OK;
}

// Every layer in a shard of its own, then the globals, the projector and the vision tower.
static uint64_t shard_of(const struct builder *b, const struct row *row, uint64_t layer) {
  if (strstr(row->name, "{i}"))
    return layer;
  return b->n_layers + (strncmp(row->name, "mm_projector", 12) == 0 ? 1 : strncmp(row->name, "vision_tower", 12) == 0 ? 2 : 0);
}

static enum k3_status add_row(struct builder *b, const struct row *row, struct k3_error *err) {
  const struct k3_synth_moe *moe = b->preset->moe;
  bool quantised = row->part != PLAIN && row->part != FLOAT32;
  const struct piece *pieces = pieces_of(moe, (enum part)row->part);
  struct piece single[2] = {{"", row->part == FLOAT32 ? K3_DTYPE_F32 : K3_DTYPE_BF16, row->fill, SAME}, {0}};
  if (!quantised)
    pieces = single;
  uint64_t counts[4] = {strstr(row->name, "{i}") ? b->n_layers + b->n_predict : 1, strstr(row->name, "{e}") ? b->n_experts : 1,
                        strstr(row->name, "{k}") ? k3_synth_symbol_value(b->preset, "M") : 1,
                        strstr(row->name, "{v}") ? k3_synth_symbol_value(b->preset, "Vl") : 1};
  struct k3_synth_tensor matrix = {0};
  K3_TRY(parse_shape(b, row->shape, &matrix, err));
  uint64_t index[4];
  for (index[0] = 0; index[0] < counts[0]; index[0]++) {
    if (strstr(row->name, "{i}") && !layer_fits(b, (enum layers)row->layers, index[0]))
      continue;
    matrix.shard = moe->places ? shard_of(b, row, index[0]) : 0;
    for (index[1] = 0; index[1] < counts[1]; index[1]++) {
      for (index[2] = 0; index[2] < counts[2]; index[2]++) {
        for (index[3] = 0; index[3] < counts[3]; index[3]++) {
          for (const struct piece *piece = pieces; piece->suffix; piece++) {
            struct k3_synth_tensor t = matrix;
            t.dtype = piece->dtype == K3_DTYPE_BF16 ? (uint8_t)b->dtype : piece->dtype;
            t.fill = piece->fill;
            if (quantised)
              shape_piece(b, piece, &t);
            else if (row->fill == K3_SYNTH_HEADS)
              t.n_cols = b->n_heads;
            K3_TRY(add_tensor(b, &t, row->name, piece->suffix, index, err));
          }
        }
      }
    }
  }
  return K3_OK;
}

enum k3_status k3_synth_moe_list(const struct k3_synth_preset *preset, const char *root, enum k3_dtype dtype, struct k3_synth_list *list,
                                 struct k3_error *err) {
  const struct k3_synth_moe *moe = preset->moe;
  bool v32 = moe->family == K3_SYNTH_V32;
  struct builder b = {preset,
                      root,
                      dtype,
                      list,
                      k3_synth_symbol_value(preset, "L"),
                      k3_synth_symbol_value(preset, "D"),
                      k3_synth_symbol_value(preset, "X"),
                      v32 ? k3_synth_symbol_value(preset, "M") : 0,
                      128,
                      128,
                      0};
  if (v32)
    b.block_rows = b.block_cols = k3_synth_symbol_value(preset, "B");
  if (moe->family == K3_SYNTH_M3)
    b.n_dense = k3_synth_symbol_value(preset, "F");
  if (moe->family == K3_SYNTH_K3)
    b.n_heads = k3_synth_symbol_value(preset, "An");
  static const struct row *const text[] = {m3_text, v32_rows, k3_text}, *const vision[] = {m3_vision, NULL, k3_vision};
  const struct row *const tables[] = {text[moe->family], moe->vision ? vision[moe->family] : NULL,
                                      moe->mtp && moe->family == K3_SYNTH_M3 ? m3_mtp : NULL};
  for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
    for (const struct row *row = tables[i]; row && row->name; row++)
      K3_TRY(add_row(&b, row, err));
  }
  return K3_OK;
}
