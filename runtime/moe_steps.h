// The steps of a decoder layer of MiniMax-M3 and DeepSeek-V3.2, beside those of runtime/steps.h, whose conventions hold: pointers are backend memory
// unless they say host, activations are of the backend's own type, `reduce` sums over the ranks, `partial` marks a part of such a sum.
// Letters: n rows, H hidden, N query heads and G key heads of this rank, X experts, K of them per token.
//
// Rows come sorted by request and position, so that the keys of row i are the rows first_keys[i] .. i.
#ifndef K3_RUNTIME_MOE_STEPS_H
#define K3_RUNTIME_MOE_STEPS_H

#include "formats/moe_model.h"
#include "runtime/steps.h"

struct k3_load_rows {  // out[i] = in[order[i]]
  uint64_t n_rows, width;
  const struct k3_array *in;  // [n, width] F32 or BF16
  const uint64_t *order;      // host [n]
  void *out;                  // [n, width]
};

struct k3_store_rows {  // out[order[i]] = in[i] (+ also[i])
  uint64_t n_rows, width;
  const void *in, *also;  // [n, width]; also may be NULL
  bool reduce;            // a copy of `also` is summed over the ranks first
  const char *name;
  const uint64_t *order;  // host [n]
  void *copy;             // scratch [n, width], with reduce
  float *out;             // host [n, width]; NULL: the sum only
};

// Rows shared out to the ranks: rank r has the rows r * n_each .. of values [size * n_each, width], of which the last may be padding.
// The rank's own rows become the complete sum of all ranks' values; the others are unspecified.
struct k3_scatter_rows {
  uint64_t n_each, width;
  void *values;
  const char *name;
};

// Every rank's own rows, found at their place in each rank's `values`, are put at their place in all of them.
struct k3_gather_rows {
  uint64_t n_each, width;
  void *values;
  const char *name;
  void *own;  // scratch [n_each, width]
};

// residual += branch (summed over the ranks first when reduce is set); out = rms(residual) * w, or * (1 + w). branch NULL: norm only, of which reduce
// sums the residual itself. The branch is left complete in its place.
struct k3_moe_norm {
  uint64_t n_rows, width;
  void *branch, *residual;  // [n, H]
  bool reduce, gemma;
  const char *name;
  const struct k3_vector *weight;  // [H]
  float eps;
  void *out;  // [n, H]
};

// Grouped-query heads: q, k, v = in * W^T; q and k are normed per head, then components i and i + rotary / 2 turn by position * inv_freq[i].
struct k3_gqa {
  uint64_t n_rows, n_heads, n_kv_heads, head_dim;
  const void *in;  // [n, H]
  const struct k3_matrix *q_proj, *k_proj, *v_proj;
  const struct k3_vector *q_norm, *k_norm;  // [head_dim]
  float eps;
  bool gemma;
  const struct k3_rope_table *rope;  // rotary / 2 pairs
  const int64_t *positions;          // [n]
  void *q, *k, *v;                   // out [n, N * D], [n, G * D], [n, G * D]
};

// Latent heads, expanded: [q_a | c | kr] = in * qkv_a^T; q = norm(q_a) * q_b^T; per head [key | value] = norm(c) * kv_b^T; the last R components of
// q and kr turn in interleaved pairs, kr is shared by all heads.
struct k3_mla {
  uint64_t n_rows, n_heads, nope_width, rope_width, v_width, q_rank, latent_rank;
  const void *in;  // [n, H]
  const struct k3_matrix *qkv_a, *q_b, *kv_b;
  const struct k3_vector *q_norm, *kv_norm;
  float eps;
  const struct k3_rope_table *rope;
  const int64_t *positions;                   // [n]
  void *projected, *q_a, *latent, *expanded;  // scratch [n, Rq+Rk+R], [n, Rq], [n, Rk], [n, N*(P+Vd)]
  void *q, *k, *v;                            // out [n, N*(P+R)], [n, N*(P+R)], [n, N*Vd]
};

// Softmax attention over all visible keys; query head h uses key head h / (N / G).
struct k3_attend_rows {
  uint64_t n_rows, n_heads, n_kv_heads, key_width, v_width;
  const void *q, *k, *v;      // [n, N*Dk], [n, G*Dk], [n, G*Dv]
  const int64_t *first_keys;  // [n]
  float scale;
  void *out;  // [n, N*Dv]
};

// s = sigmoid(in * gate^T); choice = s + bias; of the groups those with the largest sum of their two best choices stay, the others are out of the
// question; the K best choices win; weights = scale * s (/ sum of the winners' s). The bias never enters a weight. All in F32. Ties: lower number.
struct k3_route {
  uint64_t n_rows, n_active, n_groups, n_active_groups;
  const void *in;                // [n, H]
  const struct k3_matrix *gate;  // [X, H]
  const struct k3_vector *bias;  // [X]
  float scale;
  bool renormalise;
  const char *name;  // of the router, for messages
  float *logits;     // scratch [n, X]
  int32_t *experts;  // out [n, K]
  float *weights;    // out [n, K]
};

// What the gated MLPs below have in common: act(gate, up) with silu(g) * u, or g = min(g, limit), u = clamp(u, -limit, limit),
// g * sigmoid(alpha * g) * (u + 1).
struct k3_gate {
  enum k3_activation activation;
  float alpha, limit;
};

struct k3_gated_mlp {  // out = act(in * gate_up^T) * down^T
  uint64_t n_rows;
  const void *in;                          // [n, H]
  const struct k3_matrix *gate_up, *down;  // [2I, H], [H, I]
  struct k3_gate gate;
  bool reduce, partial;
  const char *name;
  void *gate_up_rows, *gated;  // scratch [n, 2I], [n, I]
  void *out;                   // [n, H]
};

// out = sum over a token's experts of weight * MLP_e(in), in the order of the experts' numbers, + the shared MLP, unscaled.
struct k3_experts {
  uint64_t n_rows, n_experts, n_active;
  const void *in;                          // [n, H]
  const struct k3_matrix *gate_up, *down;  // host lists [X]: [2I, H], [H, I]
  const struct k3_matrix *shared_gate_up, *shared_down;
  struct k3_gate gate;
  const int32_t *experts;  // [n, K]
  const float *weights;    // [n, K]
  bool reduce, partial;
  const char *name;
  void *gathered, *gate_up_rows, *gated, *contribution;  // scratch [n, H], [n, 2*max(I)], [n, max(I)], [n, H]
  void *out;                                             // [n, H]
};

struct k3_exec;
#define K3_MOE_STEPS(X) \
  X(load_rows) X(store_rows) X(scatter_rows) X(gather_rows) X(moe_norm) X(gqa) X(mla) X(attend_rows) X(route) X(gated_mlp) X(experts)
struct k3_moe_ops {
#define K3_MOE_STEP(step) enum k3_status (*step)(struct k3_exec * exec, const struct k3_##step *params, struct k3_error *err);
  K3_MOE_STEPS(K3_MOE_STEP)
#undef K3_MOE_STEP
};

// The CPU's; works on the exec of its backend (runtime/backend.h) created with block_width 1 and max_keys the longest request.
extern const struct k3_moe_ops k3_cpu_moe_ops;

#endif
