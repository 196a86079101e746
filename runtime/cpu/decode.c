#include "quant/decode.h"

#include "quant/number.h"
#include "runtime/cpu/cpu.h"

void k3_cpu_decode(const struct k3_matrix_shard *shard, uint64_t row_in_shard, uint64_t col, uint64_t n, float *dst) {
  k3_quant_decode_row(&shard->codes, row_in_shard, shard->first_col + col, n, &shard->second, dst);
}

void k3_cpu_decode_row(const struct k3_matrix *matrix, uint64_t row, float *dst) {
  const struct k3_matrix_shard *shard = k3_matrix_shard_of(matrix, row);
  k3_cpu_decode(shard, row - shard->row, 0, matrix->n_cols, dst);
}

void k3_cpu_round_bf16(float *values, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    // A NaN would carry into the exponent; it becomes the quiet NaN of its sign.
    bits = (bits & 0x7fffffff) > 0x7f800000 ? (bits & 0xffff0000) | 0x00400000 : rounded;
    memcpy(&values[i], &bits, sizeof bits);
  }
}

static unsigned char *cache_row(const struct k3_cache *cache, uint64_t layer, uint64_t slot) {
  return (unsigned char *)cache->layers[layer] + slot / cache->block_size * cache->block_nbytes + slot % cache->block_size * cache->row_nbytes;
}

void k3_cpu_cache_read(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, float *dst) {
  const unsigned char *row = cache_row(cache, layer, slot);
  if (cache->dtype == K3_DTYPE_F32 || cache->dtype == K3_DTYPE_BF16) {
    k3_quant_widen(cache->dtype, row, n, dst);
    return;
  }
  float scale = cache->scales ? cache->scales[layer] : 1;
  for (uint64_t i = 0; i < n; i++)
    dst[i] = (cache->dtype == K3_DTYPE_F8_E4M3 ? k3_f32_from_e4m3(row[i]) : k3_f32_from_e5m2(row[i])) * scale;
}

void k3_cpu_cache_write(const struct k3_cache *cache, uint64_t layer, uint64_t slot, uint64_t n, const float *src) {
  unsigned char *row = cache_row(cache, layer, slot);
  if (cache->dtype == K3_DTYPE_F32) {
    memcpy(row, src, n * sizeof *src);
  } else if (cache->dtype == K3_DTYPE_BF16) {
    for (uint64_t i = 0; i < n; i++) {
      uint16_t bits = k3_bf16_from_f32(src[i]);
      memcpy(row + 2 * i, &bits, sizeof bits);
    }
  } else {
    float scale = cache->scales ? cache->scales[layer] : 1;
    for (uint64_t i = 0; i < n; i++)
      row[i] = cache->dtype == K3_DTYPE_F8_E4M3 ? k3_e4m3_from_f32(src[i] / scale) : k3_e5m2_from_f32(src[i] / scale);
  }
}
