// Geometry of MiniMax-M3 and DeepSeek-V3.2 as their images carry it (the manifest's "model" object): what the decoder layers need besides weights.
#ifndef K3_FORMATS_MOE_MODEL_H
#define K3_FORMATS_MOE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "formats/dspark_model.h"

enum { K3_MOE_MAX_LAYERS = 1024, K3_MOE_MAX_EXPERTS = 1 << 14 };
enum k3_moe_family { K3_MOE_MINIMAX_M3, K3_MOE_DEEPSEEK_V32 };
enum k3_activation { K3_ACTIVATION_SILU, K3_ACTIVATION_SWIGLU_OAI };

struct k3_moe_model {
  enum k3_moe_family family;
  uint64_t hidden_size;                                          // H
  uint64_t n_layers;                                             // L, prediction layers not counted
  uint64_t n_heads;                                              // N
  uint64_t n_kv_heads, head_dim, rotary_dim;                     // grouped-query attention (MiniMax-M3): G, D, components 0 .. rotary_dim-1 turn
  uint64_t q_lora_rank, kv_lora_rank;                            // latent attention (DeepSeek-V3.2): Rq, Rk
  uint64_t qk_nope_head_dim, qk_rope_head_dim, v_head_dim;       // P, R, Vd
  uint64_t dense_size, expert_size, shared_size;                 // widths of a dense MLP, one expert, all shared experts together
  uint64_t n_experts, n_active, n_groups, n_active_groups;       // X, top-k; experts per group are X / n_groups
  bool is_moe[K3_MOE_MAX_LAYERS], is_sparse[K3_MOE_MAX_LAYERS];  // [L]: experts instead of an MLP; attention over selected keys only
  uint64_t max_dense_keys;  // a query that sees at most so many keys selects all of them, so that dense attention is exact
  uint64_t max_position_embeddings;
  double routed_scale, rms_norm_eps;
  bool renormalise;  // weights of the selected experts are divided by their sum
  bool gemma_norm;   // every norm multiplies by 1 + w
  enum k3_activation activation;
  double alpha, limit;  // of SwiGLU-OAI
  struct k3_rope rope;
};

// Reads a manifest's "model" object. K3_UNSUPPORTED with CFG21 for another family, IMG01 for what is missing, out of range or contradictory.
enum k3_status k3_moe_model_from_json(const char *text, size_t nbytes, const char *file, struct k3_moe_model *model, struct k3_error *err);

#endif
