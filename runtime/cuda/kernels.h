// The backend's kernels as C sees them: one params struct and one launch function each. Kernels are CUDA C++ (*.cu); the host code around them is C.
// Every address is device memory; activations are BF16 where `bf16` is set, else F32. A launch returns the error of queueing it, nothing is waited
// for. Letters in shapes are those of runtime/steps.h: n rows, H hidden, L layers, N heads, P/R/Vd widths per head, Rq and Rk latent ranks, E = Rk +
// R.
#ifndef K3_RUNTIME_CUDA_KERNELS_H
#define K3_RUNTIME_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_CUDA_MAX_SHARDS = 8, K3_CUDA_MAX_LAYERS = 8, K3_CUDA_MAX_TAPS = 8 };  // of one launch; what has more takes several
enum k3_cuda_kind { K3_CUDA_BF16, K3_CUDA_F16, K3_CUDA_F32, K3_CUDA_FP8, K3_CUDA_FP4, K3_CUDA_N_KINDS };
enum k3_cuda_float { K3_CUDA_FLOAT_F32, K3_CUDA_FLOAT_BF16, K3_CUDA_FLOAT_F16, K3_CUDA_FLOAT_E4M3, K3_CUDA_FLOAT_E5M2, K3_CUDA_FLOAT_E8M0 };

struct k3_cuda_shard {
  const void *weight, *scale;  // the shard's first row; its own scale grid
  uint32_t row, n_rows;
  float factor;  // of every product with this shard: its second scale, applied as its direction says
};

// A matrix by value: all shards are of one scheme, each has its own second scale.
struct k3_cuda_matrix {
  uint32_t n_rows, n_cols, first_col;           // first_col: where the matrix begins in the stored columns
  uint32_t row_nbytes;                          // of a stored row
  uint32_t scale_cols, block_rows, block_cols;  // of the scale grid; block 0: the whole extent
  uint8_t kind, scale_dtype;                    // enum k3_cuda_kind, enum k3_cuda_float
  uint8_t aligned;                              // eight columns at a time, each group inside one block
  uint8_t n_shards;
  struct k3_cuda_shard shards[K3_CUDA_MAX_SHARDS];
};

struct k3_cuda_vector {
  const void *data;
  uint32_t dtype;  // F32, BF16 or F16 of enum k3_cuda_float
};

struct k3_cuda_rope {
  const float *inv_freq;
  uint32_t n_pairs;
  float amplitude;
};

struct k3_cuda_cache {  // of one layer
  void *base;
  uint64_t n_slots, block_nbytes, row_nbytes;
  uint32_t block_size, dtype;  // dtype: enum k3_cuda_float
  float scale;
};

// linear.cu: y[r, o] = scale * sum_c x[r, c] * W[o, c]. With shard_stride the result is one matrix per shard, shard_stride elements apart. Batches
// are products with neighbouring rows of W, one after another: of batch b rows first_row + b * batch_rows + o.
struct k3_cuda_linear {
  struct k3_cuda_matrix w;
  const void *x;
  void *y;
  uint64_t x_stride, y_stride, shard_stride;             // elements from row to row, and from shard to shard (0: columns of one row)
  uint64_t x_batch, y_batch;                             // elements from batch to batch
  uint32_t n_rows, first_shard;                          // rows of x; number of w.shards[0] among all shards
  uint32_t n_outputs, n_batches, first_row, batch_rows;  // rows of W
  float scale;
  bool bf16, y_is_f32;  // of x; y is F32 whatever x is
  bool gated;           // W = [gate | up], n_outputs rows each: y = silu(gate) * up, where k3_cuda_linear_can_gate
};
bool k3_cuda_linear_can_gate(const struct k3_cuda_linear *p);
cudaError_t k3_cuda_launch_linear(const struct k3_cuda_linear *p, cudaStream_t stream);
// dst[o, c] = W[first_row + o, c] as BF16, a panel for the library's product. Without the second scale, which is a factor of the product: what is
// left of FP4 weights, code times block scale, BF16 holds exactly.
struct k3_cuda_dequantise {
  struct k3_cuda_matrix w;
  void *dst;
  uint32_t first_row, n_rows;
};
cudaError_t k3_cuda_launch_dequantise(const struct k3_cuda_dequantise *p, cudaStream_t stream);

// rows.cu
struct k3_cuda_join {  // the caller's taps as activations [n, A * Ht], each tap normed when it has a gain
  const void *taps[K3_CUDA_MAX_TAPS];
  uint64_t row_nbytes[K3_CUDA_MAX_TAPS];
  struct k3_cuda_vector gains[K3_CUDA_MAX_TAPS];
  uint32_t dtypes[K3_CUDA_MAX_TAPS];
  uint64_t first_row;
  uint32_t n_rows, n_taps, first_tap, tap_width, width;  // width = A * Ht of all taps
  float eps;
  void *out;
  bool bf16;
};
cudaError_t k3_cuda_launch_join(const struct k3_cuda_join *p, cudaStream_t stream);

// residual += partial (when there is one); out = rms(residual) * gain, also as F32.
struct k3_cuda_add_norm {
  void *residual;
  const void *partial;
  void *out;
  float *out_f32;
  uint64_t out_row_nbytes;
  struct k3_cuda_vector gain;
  uint32_t n_rows, width;
  float eps;
  bool bf16;
};
cudaError_t k3_cuda_launch_add_norm(const struct k3_cuda_add_norm *p, cudaStream_t stream);

// What a kernel finds wrong in what the host cannot see, told in one word of host memory: why << 32 | number of the row or request. 0: nothing.
enum k3_cuda_refusal { K3_CUDA_BAD_POSITION = 1, K3_CUDA_BAD_SLOT, K3_CUDA_BAD_ANCHOR, K3_CUDA_TOO_MANY_KEYS, K3_CUDA_BAD_TABLE };

// Latent norm, rotation and insert. Context rows: kv [layers, n, E], every layer at once. Block rows: one layer, kv = projected rows behind Rq
// columns of query latents, which are normed into q_a.
struct k3_cuda_insert {
  void *kv;
  uint64_t kv_stride, layer_stride;  // elements
  void *q_a;                         // NULL: context rows
  struct k3_cuda_vector q_gain, gains[K3_CUDA_MAX_LAYERS];
  struct k3_cuda_cache caches[K3_CUDA_MAX_LAYERS];
  struct k3_cuda_rope rope;
  const int64_t *positions, *slots;
  uint64_t *refused;  // of context rows
  uint64_t slots_layer_stride, max_positions;
  float *out_f32;
  uint64_t out_row_nbytes, out_layer_nbytes;
  uint32_t n_rows, n_layers, q_rank, latent_rank;
  float eps;
  bool bf16;
};
cudaError_t k3_cuda_launch_insert(const struct k3_cuda_insert *p, cudaStream_t stream);

struct k3_cuda_begin {
  struct k3_cuda_matrix embedding;
  struct k3_cuda_cache cache;
  const int64_t *anchor_ids, *anchor_positions;
  const int32_t *block_tables;
  uint64_t *refused;
  int64_t *positions, *slots, *n_keys;
  void *residual;
  uint64_t max_positions, max_keys, max_blocks, n_blocks, vocab_size, mask_token_id;
  uint32_t n_requests, block_width;
  uint32_t first_id;  // rank's first row of the vocabulary: other ids give zeros
  bool bf16;
};
cudaError_t k3_cuda_launch_begin(const struct k3_cuda_begin *p, cudaStream_t stream);

struct k3_cuda_gate {  // out = silu(gate) * up, of rows [gate | up]
  const void *gate_up;
  void *out;
  uint32_t n_rows, width;
  bool bf16;
};
cudaError_t k3_cuda_launch_gate(const struct k3_cuda_gate *p, cudaStream_t stream);

struct k3_cuda_export {  // rows to F32
  const void *in;
  float *out;
  uint64_t out_row_nbytes;
  uint32_t n_rows, width;
  bool in_is_bf16;
};
cudaError_t k3_cuda_launch_export(const struct k3_cuda_export *p, cudaStream_t stream);

// attention.cu
struct k3_cuda_absorb {  // [nope * W_UK | rotated] of each head
  struct k3_cuda_matrix kv_b;
  const void *q;
  void *out;
  const int64_t *positions;
  struct k3_cuda_rope rope;
  uint32_t n_rows, n_heads, nope_width, v_width, latent_rank;
  bool bf16;
};
cudaError_t k3_cuda_launch_absorb(const struct k3_cuda_absorb *p, cudaStream_t stream);

struct k3_cuda_attention {
  struct k3_cuda_cache cache;
  const void *query;  // [B*T, N, E]
  const int32_t *block_tables;
  const int64_t *n_keys, *anchor_positions;
  float *partial_latents;  // [B, splits, T*N, Rk], not yet divided by their sums; unset where a split has no key
  float *partial_sums;     // [B, splits, T*N, 2]: highest score, sum of exponentials
  void *latents;           // [B*T, N, Rk]
  uint64_t max_blocks;
  uint32_t n_requests, block_width, n_heads, n_splits, latent_rank, rope_width;
  float scale;
  bool causal, bf16;
};
// Two launches: scores and sums of each split of the keys; their combination.
cudaError_t k3_cuda_launch_attention(const struct k3_cuda_attention *p, cudaStream_t stream);
// Rows of the T*N of a request that one block works on, which decides how many splits are worth it; n_splits itself is not looked at.
uint32_t k3_cuda_attention_rows(const struct k3_cuda_attention *p);
// Keys of which one block keeps scores at a time.
enum { K3_CUDA_KEY_TILE = 32 };

// head.cu: one slot k of every request.
struct k3_cuda_maximum {
  float value;
  uint32_t id;
};
struct k3_cuda_markov {
  struct k3_cuda_matrix w1, w2, confidence;
  struct k3_cuda_vector confidence_bias;
  const float *base_logits;
  const int64_t *anchor_ids, *previous_ids;
  const void *hidden;
  int64_t *out_ids;
  float *out_confidence, *out_logits;
  uint64_t out_row_nbytes;
  struct k3_cuda_maximum *maxima;  // [B, vocabulary chunks]
  uint32_t *tickets;               // [B], of which one per group of requests is used; zero before and after
  uint32_t n_requests, block_width, slot, vocab_size, rank, hidden_size;
  float scale;
  bool bf16, confidence_with_markov;
};
enum { K3_CUDA_VOCAB_CHUNK = 256 };
cudaError_t k3_cuda_launch_markov(const struct k3_cuda_markov *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
