// The fused steps of the forward, as params structs whose fields carry their shapes. Pointers are backend memory unless they say host. Activations
// (void *) are of the backend's own element type: float in the CPU backend, BF16 or F32 on a GPU. With BF16 every value that a step leaves in an
// activation is rounded to BF16, and so is every intermediate that the comment names in its formula; sums are FP32; logits and confidences FP32
// always. Letters: n rows (B * T in a block), H hidden, L layers, N heads, P/R/Vd widths per head, D = P + R, Rq and Rk latent ranks, E = Rk + R.
#ifndef K3_RUNTIME_STEPS_H
#define K3_RUNTIME_STEPS_H

#include "runtime/matrix.h"
#include "runtime/rope.h"
#include "runtime/runtime.h"

// u = taps (each with its own norm when tap_norms is there), out = rms(u * proj^T) * norm.
struct k3_combine {
  uint64_t n_rows, n_taps, tap_width;  // n, A, Ht
  const struct k3_array *taps;         // host list: 1 array [n, A*Ht] or A arrays [n, Ht]
  uint64_t n_tap_arrays, first_row;    // rows first_row .. first_row + n - 1 of the arrays
  const struct k3_vector *tap_norms;   // [A] of Ht, or NULL
  const struct k3_matrix *proj;        // [H, A*Ht]
  const struct k3_vector *norm;        // [H]
  float eps;
  void *joined, *projected;  // scratch [n, A*Ht], [n, H]
  void *out;                 // [n, H]
  float *out_f32;            // optional [n, H] at out_row_nbytes
  uint64_t out_row_nbytes;
};

// All layers at once: kv = context * kv^T, latent = rms, key = rope, both into the cache.
struct k3_context_insert {
  uint64_t n_rows, n_layers, latent_rank, rope_width;  // n, L, Rk, R
  const void *context;                                 // [n, H]
  const struct k3_matrix *kv;                          // [L*E, H], shard i is layer i
  const struct k3_vector *const *norms;                // host list [L] of Rk
  float eps;
  const struct k3_rope_table *rope;
  const int64_t *positions, *slots;  // [n], [L or 1, n]
  uint64_t slots_layer_stride, max_positions;
  const struct k3_cache *cache;
  void *kv_rows;   // scratch [n, L*E]
  float *out_f32;  // optional [L, out_layer_rows, E], first row of this call
  uint64_t out_row_nbytes, out_layer_rows;
};

// The query block: row 0 of each request is the anchor, the others the mask token; ids -> embedding, positions, slots, number of keys.
struct k3_block_begin {
  uint64_t n_requests, block_width, max_positions, vocab_size, max_blocks, mask_token_id;  // B, T
  const int64_t *anchor_ids, *anchor_positions;                                            // [B]
  const int32_t *block_tables;                                                             // [B, max_blocks]
  const struct k3_cache *cache;                                                            // block size, number of blocks
  const struct k3_matrix *embedding;                                                       // [V, H]
  bool reduce;                          // the embedding is a partial sum over the ranks that is completed here
  const char *name;                     // of the step, for messages about ranks
  int64_t *positions, *slots, *n_keys;  // out [B*T], [B*T] (-1: at or above the limit), [B]
  void *residual;                       // out [B*T, H]
};

// residual += partial (summed over the ranks first when reduce is set, then rounded); out = rms(residual) * norm. partial NULL: norm only, of which
// reduce sums the residual itself.
struct k3_reduce_add_norm {
  uint64_t n_rows, width;  // n, H
  void *partial;           // [n, H] or NULL; summed in place
  bool reduce;
  const char *name;              // of the step, for messages about ranks
  void *residual;                // [n, H] in and out
  const struct k3_vector *norm;  // [H]
  float eps;
  void *out;  // [n, H]
};

// [q_a | latent | key] = in * proj^T; q_a = rms; latent = rms, key = rope, both into the cache rows of the block.
struct k3_latents {
  uint64_t n_rows, q_rank, latent_rank, rope_width, layer;
  const void *in;                            // [n, H]
  const struct k3_matrix *proj;              // [Rq+E, H]
  const struct k3_vector *q_norm, *kv_norm;  // [Rq], [Rk]
  float eps;
  const struct k3_rope_table *rope;
  const int64_t *positions, *slots;  // [n]
  const struct k3_cache *cache;
  void *projected;  // scratch [n, Rq+E]
  void *q_a;        // out [n, Rq]
};

// q = q_a * q_b^T per head [nope | rope]; out = [nope * W_UK | rotated], the query in latent space.
struct k3_query {
  uint64_t n_rows, q_rank, n_heads, nope_width, rope_width, v_width, latent_rank;
  const void *q_a;                     // [n, Rq]
  const struct k3_matrix *q_b, *kv_b;  // [N*D, Rq], [N*(P+Vd), Rk]: per head P key rows (W_UK), then Vd value rows (W_UV)
  const struct k3_rope_table *rope;
  const int64_t *positions;  // [n]
  void *q;                   // scratch [n, N, D]
  void *out;                 // [n, N, E]
};

// Softmax attention in latent space over the first n_keys[b] cache rows of each request, then W_UV.
struct k3_attend {
  uint64_t n_requests, block_width, n_heads, nope_width, rope_width, v_width, latent_rank, layer, max_blocks;
  const void *query;  // [B*T, N, E]
  const struct k3_matrix *kv_b;
  const struct k3_cache *cache;
  const int32_t *block_tables;               // [B, max_blocks]
  const int64_t *n_keys, *anchor_positions;  // [B]
  float scale;
  bool causal;   // row t sees keys below anchor + t + 1 only; else all n_keys
  void *latent;  // scratch [B*T, N, Rk]
  void *out;     // [B*T, N*Vd]
};

// With `partial` set, what comes out is one rank's part of a sum: a backend keeps it as exact as it can (the CPU does not round it to BF16).
struct k3_project {  // out = in * proj^T
  uint64_t n_rows;
  const void *in;  // [n, cols of proj]
  const struct k3_matrix *proj;
  bool reduce;       // sum over the ranks at once (a reduction that may not be deferred)
  bool partial;      // out is a part of a sum over the ranks
  const char *name;  // of the step, for messages about ranks
  void *out;         // [n, rows of proj]
};

// out = (silu(gate) * up) * down^T with [gate | up] = in * gate_up^T.
struct k3_mlp {
  uint64_t n_rows, width;                  // n, I
  const void *in;                          // [n, H]
  const struct k3_matrix *gate_up, *down;  // [2I, H], [H, I]
  bool reduce, partial;                    // as in k3_project
  const char *name;
  void *gate_up_rows, *gated;  // scratch [n, 2I], [n, I]
  void *out;                   // [n, H]
};

struct k3_logits {
  uint64_t n_rows, vocab_size;
  const void *hidden;            // [n, H]
  const struct k3_matrix *head;  // [V, H], or the rank's [V / ranks, H] in order of the ranks, whose results are gathered
  float *part, *parts;           // scratch [n, V / ranks], [ranks, n, V / ranks] for that; NULL with one rank
  const char *name;
  float scale;
  float *out;  // [n, V]
};

// For k = 0 .. T-1: logits = base + scale * w1[previous] * w2^T, id = first maximum, previous = id.
struct k3_markov {
  uint64_t n_requests, block_width, vocab_size, rank, hidden_size;
  const float *base_logits;         // [B*T, V]
  const struct k3_matrix *w1, *w2;  // [V, r]
  float scale;
  const int64_t *anchor_ids;           // [B]
  const int64_t *previous_ids;         // optional [B, T]
  const void *hidden;                  // [B*T, H]
  const struct k3_matrix *confidence;  // [1, H (+ r)]; NULL: none
  const struct k3_vector *confidence_bias;
  bool confidence_with_markov;
  int64_t *out_ids;       // [B, T]
  float *out_confidence;  // [B, T] or NULL
  float *out_logits;      // [B*T, V] at out_row_nbytes, or NULL
  uint64_t out_row_nbytes;
};

struct k3_export {  // activations (or floats) -> F32 rows of the caller
  uint64_t n_rows, width;
  const void *in;
  bool in_is_f32;  // in holds floats, not activations
  float *out;
  uint64_t out_row_nbytes;
};

#endif
