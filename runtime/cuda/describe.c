#include "runtime/cuda/cuda.h"

enum k3_cuda_float k3_cuda_float_of(enum k3_dtype dtype) {
  switch (dtype) {
    case K3_DTYPE_BF16: return K3_CUDA_FLOAT_BF16;
    case K3_DTYPE_F16: return K3_CUDA_FLOAT_F16;
    case K3_DTYPE_F8_E4M3: return K3_CUDA_FLOAT_E4M3;
    case K3_DTYPE_F8_E5M2: return K3_CUDA_FLOAT_E5M2;
    case K3_DTYPE_F8_E8M0:
    case K3_DTYPE_U8: return K3_CUDA_FLOAT_E8M0;
    default: return K3_CUDA_FLOAT_F32;
  }
}

// Kind of a scheme and the bytes of eight of its columns; false for one that no kernel reads.
static bool kind_of(enum k3_scheme scheme, enum k3_cuda_kind *kind, uint32_t *group_nbytes) {
  switch (scheme) {
    case K3_SCHEME_BF16: *kind = K3_CUDA_BF16, *group_nbytes = 16; return true;
    case K3_SCHEME_F16: *kind = K3_CUDA_F16, *group_nbytes = 16; return true;
    case K3_SCHEME_F32: *kind = K3_CUDA_F32, *group_nbytes = 16; return true;
    case K3_SCHEME_FP8_TENSOR:
    case K3_SCHEME_FP8_CHANNEL:
    case K3_SCHEME_FP8_BLOCK: *kind = K3_CUDA_FP8, *group_nbytes = 8; return true;
    case K3_SCHEME_NVFP4:
    case K3_SCHEME_MXFP4: *kind = K3_CUDA_FP4, *group_nbytes = 4; return true;
    default: return false;
  }
}

static float factor_of(const struct k3_matrix_shard *shard) {
  switch (shard->codes.scheme.second) {
    case K3_SECOND_DIVIDE: return 1 / shard->second;
    case K3_SECOND_MULTIPLY: return shard->second;
    default: return 1;
  }
}

enum k3_status k3_cuda_describe_matrix(const struct k3_matrix *matrix, unsigned first_shard, struct k3_cuda_matrix *dst, struct k3_error *err) {
  const struct k3_matrix_shard *first = &matrix->shards[first_shard];
  const struct k3_quant_scheme *scheme = &first->codes.scheme;
  enum k3_cuda_kind kind;
  uint32_t group_nbytes;
  if (!kind_of(scheme->scheme, &kind, &group_nbytes))
    return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, NULL, NULL, "BF16, F16, F32, FP8 per tensor, channel or block, NVFP4, MXFP4; or --backend cpu",
                   "the CUDA backend does not read %s weights", k3_scheme_name(scheme->scheme));
  const uint64_t row_nbytes = k3_quant_row_nbytes(scheme, first->codes.n_cols);
  if (matrix->n_rows > UINT32_MAX || matrix->n_cols > UINT32_MAX || row_nbytes > UINT32_MAX)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, NULL, "a matrix of %llu rows and %llu columns", (unsigned long long)matrix->n_rows,
                   (unsigned long long)matrix->n_cols);
  dst->n_cols = (uint32_t)matrix->n_cols;
  dst->first_col = (uint32_t)first->first_col;
  dst->row_nbytes = (uint32_t)row_nbytes;
  dst->block_rows = scheme->block_rows;
  dst->block_cols = scheme->block_cols;
  dst->scale_cols = scheme->block_cols ? (uint32_t)((first->codes.n_cols + scheme->block_cols - 1) / scheme->block_cols) : 1;
  dst->kind = (uint8_t)kind;
  dst->scale_dtype = (uint8_t)k3_cuda_float_of(scheme->scale_dtype);
  bool aligned = dst->n_cols % 8 == 0 && dst->first_col % 8 == 0 && scheme->block_cols % 8 == 0 && row_nbytes % group_nbytes == 0;
  for (unsigned i = first_shard; i < matrix->n_shards && dst->n_shards < K3_CUDA_MAX_SHARDS; i++) {
    const struct k3_matrix_shard *shard = &matrix->shards[i];
    const struct k3_quant_scheme *other = &shard->codes.scheme;
    if (other->scheme != scheme->scheme || other->block_rows != scheme->block_rows || other->block_cols != scheme->block_cols ||
        other->scale_dtype != scheme->scale_dtype || shard->first_col != first->first_col || shard->codes.n_cols != first->codes.n_cols)
      return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, NULL, NULL, "siblings of one scheme; or --backend cpu", "stacked siblings of different schemes");
    struct k3_cuda_shard *to = &dst->shards[dst->n_shards++];
    to->weight = shard->codes.weight;
    to->scale = shard->codes.scale;
    to->row = (uint32_t)(shard->row - first->row);
    to->n_rows = (uint32_t)shard->n_rows;
    to->factor = factor_of(shard);
    dst->n_rows += to->n_rows;
    aligned &= (uintptr_t)to->weight % group_nbytes == 0;
  }
  dst->aligned = aligned;
  return K3_OK;
}

void k3_cuda_describe_vector(const struct k3_vector *vector, struct k3_cuda_vector *dst) {
  dst->data = vector->data;
  dst->dtype = k3_cuda_float_of(vector->dtype);
}

void k3_cuda_describe_cache(const struct k3_cache *cache, uint64_t layer, struct k3_cuda_cache *dst) {
  dst->base = cache->layers[layer];
  dst->n_slots = cache->n_blocks * cache->block_size;
  dst->block_nbytes = cache->block_nbytes;
  dst->row_nbytes = cache->row_nbytes;
  dst->block_size = (uint32_t)cache->block_size;
  dst->dtype = k3_cuda_float_of(cache->dtype);
  dst->scale = cache->scales ? cache->scales[layer] : 1;
}

void k3_cuda_describe_rope(const struct k3_rope_table *rope, struct k3_cuda_rope *dst) {
  dst->inv_freq = rope->inv_freq;
  dst->n_pairs = (uint32_t)rope->n_pairs;
  dst->amplitude = rope->amplitude;
}
