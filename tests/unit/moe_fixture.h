// The models of fixtures/gen/moe_case.py, made in memory: same names, same formula of the weights (described there), packed as an image holds them.
// Golden outputs lie in fixtures/moe/<case>.safetensors.
#ifndef K3_TESTS_UNIT_MOE_FIXTURE_H
#define K3_TESTS_UNIT_MOE_FIXTURE_H

#include <pthread.h>

#include "dspark_fixture.h"
#include "runtime/moe.h"

enum { MOE_MAX_TENSORS = 160, MOE_MAX_RANKS = 8 };

struct moe_case {
  const char *name, *json;  // the manifest's model
  bool bf16;
  uint64_t n_requests, lengths[3];
};

#define M3_JSON(H, L, D, R, theta, I, Ie, Is, X, K, layers, limit)                                                                              \
  "{\"family\":\"minimax-m3\",\"activation\":{\"alpha\":1.702,\"limit\":7,\"name\":\"swiglu-oai\"},\"norm\":{\"flavour\":\"gemma\"},"           \
  "\"num_attention_heads\":8,\"num_key_value_heads\":2,\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-6,\"routed_scaling_factor\":2,"     \
  "\"rotation\":{\"self_attn.q_proj\":{\"layout\":\"half-split\"}},\"index\":{\"block_size\":4,\"topk_blocks\":" #limit "},\"hidden_size\":" #H \
  ",\"num_hidden_layers\":" #L ",\"head_dim\":" #D ",\"rope\":{\"theta\":" #theta ",\"rotary_dim\":" #R "},\"dense_intermediate_size\":" #I     \
  ",\"intermediate_size\":" #Ie ",\"shared_intermediate_size\":" #Is ",\"num_experts\":" #X ",\"num_experts_per_token\":" #K                    \
  ",\"moe_layers\":" layers ",\"sparse_layers\":" layers "}"
#define V32_JSON(H, L, N, P, R, Vd, Rq, Rk, I, Ie, S, X, K, rope)                                                                               \
  "{\"family\":\"deepseek-v3.2\",\"activation\":{\"name\":\"silu\"},\"norm\":{\"flavour\":\"plain\"},\"index\":{\"topk\":8},"                   \
  "\"max_position_embeddings\":128,\"rms_norm_eps\":1e-6,\"routed_scaling_factor\":2.5,\"norm_topk_prob\":true,\"n_group\":4,\"topk_group\":2," \
  "\"first_k_dense_replace\":1,\"num_nextn_predict_layers\":1,\"rotation\":{\"self_attn.q_b_proj\":{\"layout\":\"interleaved\"},"               \
  "\"self_attn.kv_a_proj_with_mqa\":{\"layout\":\"interleaved\"},\"self_attn.indexer.wk\":{\"layout\":\"half-split\"},"                         \
  "\"self_attn.indexer.wq_b\":{\"layout\":\"half-split\"}},\"hidden_size\":" #H ",\"num_hidden_layers\":" #L ",\"num_attention_heads\":" #N     \
  ",\"qk_nope_head_dim\":" #P ",\"qk_rope_head_dim\":" #R ",\"v_head_dim\":" #Vd ",\"q_lora_rank\":" #Rq ",\"kv_lora_rank\":" #Rk               \
  ",\"intermediate_size\":" #I ",\"moe_intermediate_size\":" #Ie ",\"num_shared_experts\":" #S ",\"num_experts\":" #X                           \
  ",\"num_experts_per_token\":" #K                                                                                                              \
  ",\"rope\":{\"theta\":10000,\"scaling\":{\"type\":\"yarn\",\"beta_fast\":32,\"beta_slow\":1,\"mscale\":1,"                                    \
  "\"mscale_all_dim\":1," rope "}}}"
#define M3_TINY  M3_JSON(64, 4, 16, 8, 10000, 96, 32, 32, 4, 2, "[0,1,1,1]", 2)
#define M3_WIDE  M3_JSON(1024, 2, 32, 16, 5000000, 160, 96, 64, 8, 3, "[0,1]", 2)
#define V32_TINY V32_JSON(96, 3, 8, 16, 16, 16, 48, 40, 104, 40, 1, 8, 2, "\"factor\":4,\"original_max_position_embeddings\":32")
#define V32_WIDE V32_JSON(1024, 2, 4, 32, 16, 24, 192, 128, 160, 96, 2, 16, 3, "\"factor\":40,\"original_max_position_embeddings\":4096")

static const struct moe_case M3_F32 = {"m3_f32", M3_TINY, false, 3, {8, 3, 1}}, M3_BF16 = {"m3_bf16", M3_TINY, true, 2, {4, 1}},
                             V32_F32 = {"v32_f32", V32_TINY, false, 3, {8, 3, 1}}, V32_BF16 = {"v32_bf16", V32_TINY, true, 2, {4, 1}},
                             M3_WIDE_F32 = {"m3_wide_f32", M3_WIDE, false, 1, {2}}, M3_WIDE_BF16 = {"m3_wide_bf16", M3_WIDE, true, 1, {2}},
                             V32_WIDE_F32 = {"v32_wide_f32", V32_WIDE, false, 1, {2}}, V32_WIDE_BF16 = {"v32_wide_bf16", V32_WIDE, true, 1, {2}};

// Rules and reductions as the recipes give them; sorted by name.
static struct k3_manifest_tensor M3_RULES[] = {
    {"model.layers.{i}.block_sparse_moe.experts.w13.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.block_sparse_moe.experts.w2.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.block_sparse_moe.shared_experts.down_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.block_sparse_moe.shared_experts.gate_up_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.mlp.down_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.mlp.gate_up_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.k_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.o_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.self_attn.q_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.v_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
};
static struct k3_manifest_tensor V32_RULES[] = {
    {"model.layers.{i}.mlp.down_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.mlp.experts.w13.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.mlp.experts.w2.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.mlp.gate_up_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.mlp.shared_experts.down_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.mlp.shared_experts.gate_up_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.kv_b_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
    {"model.layers.{i}.self_attn.o_proj.*", K3_ROLE_CORE, K3_TP_ROW, NULL, 0, 0},
    {"model.layers.{i}.self_attn.q_b_proj.*", K3_ROLE_CORE, K3_TP_COLUMN, NULL, 0, 0},
};
#define NEXT_NORM "model.layers.{i+1}.input_layernorm | model.norm"
static struct k3_manifest_pair M3_REDUCTIONS[] = {
    {"model.layers.{i}.self_attn.o_proj", "model.layers.{i}.post_attention_layernorm"},
    {"model.layers.{i}.mlp.down_proj", NEXT_NORM},
    {"model.layers.{i}.block_sparse_moe.experts.w2", NEXT_NORM},
    {"model.layers.{i}.block_sparse_moe.shared_experts.down_proj", NEXT_NORM},
};
static struct k3_manifest_pair V32_REDUCTIONS[] = {
    {"model.layers.{i}.self_attn.o_proj", "model.layers.{i}.post_attention_layernorm"},
    {"model.layers.{i}.mlp.down_proj", NEXT_NORM},
    {"model.layers.{i}.mlp.experts.w2", NEXT_NORM},
    {"model.layers.{i}.mlp.shared_experts.down_proj", NEXT_NORM},
};

#define MOE_NAME(buffer, ...) assert_true(snprintf(buffer, sizeof(buffer), __VA_ARGS__) < (int)sizeof(buffer))

enum moe_kind { MOE_PLAIN, MOE_LINEAR, MOE_WIDE, MOE_ROUTER, MOE_NORM, MOE_OFFSET, MOE_BIAS, MOE_LOW_BIAS };

struct moe_fixture {
  const struct moe_case *c;
  struct k3_moe_model m;
  uint64_t seed;
  unsigned char *bytes;
  uint64_t nbytes;
  struct {
    char name[160];
    enum k3_dtype dtype;
    unsigned rank;
    uint64_t shape[2], begin, nbytes;
  } tensors[MOE_MAX_TENSORS];
  size_t n_tensors;
  struct k3_image image;
  struct golden golden;
};

static inline double moe_value(const struct moe_fixture *f, const char *name, uint64_t i, enum moe_kind kind, uint64_t n_cols) {
  const int bits = f->c->bf16 ? 8 : 16;
  double u = (double)fixture_bits(name, i, f->seed, bits) / (double)(1 << (bits - 1));
  if (kind == MOE_NORM || kind == MOE_OFFSET)
    return (f->c->bf16 ? floor(u * 16) / 16 : u) / 4 + (kind == MOE_NORM ? 1 : 0);
  if (kind == MOE_BIAS || kind == MOE_LOW_BIAS)
    return u / 4 - (kind == MOE_LOW_BIAS ? 1.25 : 0);
  if (kind == MOE_PLAIN)
    return u;
  return ldexp(u * (kind == MOE_WIDE ? 8 : kind == MOE_ROUTER ? 4 : 1), -(63 - __builtin_clzll(n_cols)) / 2);
}

static inline void moe_store(unsigned char *dst, enum k3_dtype dtype, uint64_t i, double value) {
  float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, 4);
  if (dtype == K3_DTYPE_F32)
    memcpy(dst + 4 * i, &bits, 4);
  else
    dst[2 * i] = (unsigned char)(bits >> 16), dst[2 * i + 1] = (unsigned char)(bits >> 24);  // exact in BF16
}

// Begins a tensor; sources are added with moe_part, their rows one after another. n_cols 0: a vector.
static inline void moe_begin(struct moe_fixture *f, const char *name, bool is_f32, uint64_t n_rows, uint64_t n_cols) {
  assert_true(f->n_tensors < MOE_MAX_TENSORS);
  size_t t = f->n_tensors++;
  MOE_NAME(f->tensors[t].name, "%s", name);
  f->tensors[t].dtype = is_f32 || !f->c->bf16 ? K3_DTYPE_F32 : K3_DTYPE_BF16;
  f->tensors[t].rank = n_cols ? 2 : 1;
  f->tensors[t].shape[0] = n_rows, f->tensors[t].shape[1] = n_cols;
  f->tensors[t].begin = f->nbytes;
  f->tensors[t].nbytes = 0;
  uint64_t nbytes = n_rows * (n_cols ? n_cols : 1) * k3_dtype_bits(f->tensors[t].dtype) / 8;
  f->bytes = realloc(f->bytes, f->nbytes + nbytes);
  assert_non_null(f->bytes);
}

static inline void moe_part(struct moe_fixture *f, const char *source, enum moe_kind kind, uint64_t n_rows) {
  size_t t = f->n_tensors - 1;
  const uint64_t n_cols = f->tensors[t].rank == 2 ? f->tensors[t].shape[1] : 1, n = n_rows * n_cols;
  for (uint64_t i = 0; i < n; i++)
    moe_store(f->bytes + f->nbytes, f->tensors[t].dtype, i, moe_value(f, source, i, kind, n_cols));
  f->tensors[t].nbytes += n * k3_dtype_bits(f->tensors[t].dtype) / 8;
  f->nbytes += n * k3_dtype_bits(f->tensors[t].dtype) / 8;
}

static inline void moe_one(struct moe_fixture *f, const char *source, enum moe_kind kind, bool is_f32, uint64_t n_rows, uint64_t n_cols) {
  char name[192];
  MOE_NAME(name, "model.%s", source);
  moe_begin(f, name, is_f32, n_rows, n_cols);
  moe_part(f, source, kind, n_rows);
}

static inline void moe_stack(struct moe_fixture *f, const char *base, const char *into, unsigned n_parts, const char *const *parts,
                             enum moe_kind kind, uint64_t n_rows, uint64_t n_cols) {
  char name[192];
  MOE_NAME(name, "model.%s%s.weight", base, into);
  moe_begin(f, name, false, n_parts * n_rows, n_cols);
  for (unsigned i = 0; i < n_parts; i++) {
    MOE_NAME(name, "%s%s.weight", base, parts[i]);
    moe_part(f, name, kind, n_rows);
  }
}

static inline void moe_mlp(struct moe_fixture *f, const char *base, enum moe_kind gate, uint64_t width) {
  static const char *const parts[] = {"gate_proj", "up_proj"};
  char name[192];
  moe_stack(f, base, "gate_up_proj", 2, parts, gate, width, f->m.hidden_size);
  MOE_NAME(name, "%sdown_proj.weight", base);
  moe_one(f, name, MOE_LINEAR, false, f->m.hidden_size, width);
}

static inline void moe_experts(struct moe_fixture *f, const char *base, bool is_m3) {
  const uint64_t X = f->m.n_experts, H = f->m.hidden_size;
  char name[192], base_shared[160], (*texts)[32] = calloc(3 * X, sizeof *texts);
  const char **w13 = calloc(2 * X, sizeof *w13), **w2 = calloc(X, sizeof *w2);
  assert_true(texts && w13 && w2);
  for (uint64_t e = 0; e < X; e++) {
    const char *names[3] = {is_m3 ? "w1" : "gate_proj", is_m3 ? "w3" : "up_proj", is_m3 ? "w2" : "down_proj"};
    for (int k = 0; k < 3; k++)
      MOE_NAME(texts[3 * e + (uint64_t)k], "experts.%llu.%s", (unsigned long long)e, names[k]);
    w13[2 * e] = texts[3 * e], w13[2 * e + 1] = texts[3 * e + 1], w2[e] = texts[3 * e + 2];
  }
  MOE_NAME(name, "%sgate.weight", base);
  moe_one(f, name, MOE_ROUTER, is_m3, X, H);
  MOE_NAME(name, "%s%se_score_correction_bias", base, is_m3 ? "" : "gate.");
  moe_one(f, name, is_m3 ? MOE_BIAS : MOE_LOW_BIAS, true, X, 0);
  moe_stack(f, base, "experts.w13", (unsigned)(2 * X), w13, is_m3 ? MOE_WIDE : MOE_LINEAR, f->m.expert_size, H);
  moe_stack(f, base, "experts.w2", (unsigned)X, w2, MOE_LINEAR, H, f->m.expert_size);
  MOE_NAME(base_shared, "%sshared_experts.", base);
  moe_mlp(f, base_shared, is_m3 ? MOE_WIDE : MOE_LINEAR, f->m.shared_size);
  free(texts), free(w13), free(w2);
}

static inline void moe_layer(struct moe_fixture *f, uint64_t i) {
  const struct k3_moe_model *m = &f->m;
  const bool is_m3 = m->family == K3_MOE_MINIMAX_M3;
  const enum moe_kind norm = is_m3 ? MOE_OFFSET : MOE_NORM;
  const uint64_t H = m->hidden_size, N = m->n_heads, D = m->head_dim, P = m->qk_nope_head_dim, R = m->qk_rope_head_dim;
  char name[160], base[96];
#define LAYER_NAME(suffix) (MOE_NAME(name, "layers.%llu." suffix, (unsigned long long)i), name)
  moe_one(f, LAYER_NAME("input_layernorm.weight"), norm, false, H, 0);
  moe_one(f, LAYER_NAME("post_attention_layernorm.weight"), norm, false, H, 0);
  if (is_m3) {
    moe_one(f, LAYER_NAME("self_attn.q_proj.weight"), MOE_LINEAR, false, N * D, H);
    moe_one(f, LAYER_NAME("self_attn.k_proj.weight"), MOE_LINEAR, false, m->n_kv_heads * D, H);
    moe_one(f, LAYER_NAME("self_attn.v_proj.weight"), MOE_LINEAR, false, m->n_kv_heads * D, H);
    moe_one(f, LAYER_NAME("self_attn.o_proj.weight"), MOE_LINEAR, false, H, N * D);
    moe_one(f, LAYER_NAME("self_attn.q_norm.weight"), norm, false, D, 0);
    moe_one(f, LAYER_NAME("self_attn.k_norm.weight"), norm, false, D, 0);
  } else {
    char into[160];
    MOE_NAME(into, "model.layers.%llu.self_attn.fused_qkv_a_proj.weight", (unsigned long long)i);
    moe_begin(f, into, false, m->q_lora_rank + m->kv_lora_rank + R, H);
    moe_part(f, LAYER_NAME("self_attn.q_a_proj.weight"), MOE_LINEAR, m->q_lora_rank);
    moe_part(f, LAYER_NAME("self_attn.kv_a_proj_with_mqa.weight"), MOE_LINEAR, m->kv_lora_rank + R);
    moe_one(f, LAYER_NAME("self_attn.q_a_layernorm.weight"), norm, false, m->q_lora_rank, 0);
    moe_one(f, LAYER_NAME("self_attn.kv_a_layernorm.weight"), norm, false, m->kv_lora_rank, 0);
    moe_one(f, LAYER_NAME("self_attn.q_b_proj.weight"), MOE_LINEAR, false, N * (P + R), m->q_lora_rank);
    moe_one(f, LAYER_NAME("self_attn.kv_b_proj.weight"), MOE_LINEAR, false, N * (P + m->v_head_dim), m->kv_lora_rank);
    moe_one(f, LAYER_NAME("self_attn.o_proj.weight"), MOE_LINEAR, false, H, N * m->v_head_dim);
    if (i == m->n_layers)
      moe_one(f, LAYER_NAME("shared_head.norm.weight"), norm, false, H, 0);
  }
#undef LAYER_NAME
  const bool is_moe = i >= m->n_layers || m->is_moe[i];
  MOE_NAME(base, "layers.%llu.%s", (unsigned long long)i, is_moe && is_m3 ? "block_sparse_moe." : "mlp.");
  if (is_moe)
    moe_experts(f, base, is_m3);
  else
    moe_mlp(f, base, is_m3 ? MOE_WIDE : MOE_LINEAR, m->dense_size);
}

static inline void moe_seal(struct moe_fixture *f) {
  char *text = NULL;
  struct k3_st_writer writer;
  uint64_t h;
  k3_st_write_begin(&writer, fixture_sink, &text);
  for (size_t t = 0; t < f->n_tensors; t++)
    assert_int_equal(k3_st_write_tensor(&writer, f->tensors[t].name, f->tensors[t].dtype, f->tensors[t].shape, f->tensors[t].rank,
                                        f->tensors[t].begin, f->tensors[t].begin + f->tensors[t].nbytes, NULL),
                     K3_OK);
  assert_int_equal(k3_st_write_end(&writer, 0, &h, NULL), K3_OK);
  assert_int_equal(k3_st_parse(text, h, 8 + h + f->nbytes, "fixture", &f->image.header, NULL), K3_OK);
  free(text);
  f->bytes = realloc(f->bytes, f->nbytes + 8 + h);
  assert_non_null(f->bytes);
  memmove(f->bytes + 8 + h, f->bytes, f->nbytes);
  f->image.bytes = f->bytes;
  f->image.nbytes = f->nbytes + 8 + h;
}

static inline void moe_open(struct moe_fixture *f, const struct moe_case *c) {
  struct k3_error err = {0};
  char path[256], text[1024];
  uint64_t h;
  memset(f, 0, sizeof *f);
  f->c = c;
  if (k3_moe_model_from_json(c->json, strlen(c->json), NULL, &f->m, &err) != K3_OK)
    fail_msg("%s", k3_error_text(&err, text, sizeof text));
  snprintf(path, sizeof path, "fixtures/moe/%s.safetensors", c->name);
  assert_int_equal(k3_map_file(path, &f->golden.mapping, NULL), K3_OK);
  assert_int_equal(k3_st_header_length(f->golden.mapping.data, 8, f->golden.mapping.nbytes, path, &h, NULL), K3_OK);
  assert_int_equal(k3_st_parse((const char *)f->golden.mapping.data + 8, h, f->golden.mapping.nbytes, path, &f->golden.header, NULL), K3_OK);
  double *seed = golden_values(&f->golden, "seed");
  f->seed = (uint64_t)*seed;
  free(seed);
  const bool is_m3 = f->m.family == K3_MOE_MINIMAX_M3;
  moe_one(f, "norm.weight", is_m3 ? MOE_OFFSET : MOE_NORM, false, f->m.hidden_size, 0);
  for (uint64_t i = 0; i < f->m.n_layers + (is_m3 ? 0 : 1); i++)
    moe_layer(f, i);
  moe_seal(f);
  struct k3_manifest *manifest = &f->image.manifest;
  manifest->model_json = c->json;
  manifest->tensors = is_m3 ? M3_RULES : V32_RULES;
  manifest->n_tensors = is_m3 ? sizeof M3_RULES / sizeof M3_RULES[0] : sizeof V32_RULES / sizeof V32_RULES[0];
  manifest->reductions = is_m3 ? M3_REDUCTIONS : V32_REDUCTIONS;
  manifest->n_reductions = 4;
}

static inline void moe_close(struct moe_fixture *f) {
  golden_close(&f->golden);
  k3_st_header_free(&f->image.header);
  free(f->bytes);
}

#endif
