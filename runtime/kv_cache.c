#include "runtime/kv_cache.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"

static bool is_fp8(enum k3_dtype dtype) {
  return dtype == K3_DTYPE_F8_E4M3 || dtype == K3_DTYPE_F8_E5M2;
}

static enum k3_status check_dtype(const struct k3_engine *engine, enum k3_dtype dtype, const float *scales, struct k3_error *err) {
  if (dtype != K3_DTYPE_F32 && dtype != K3_DTYPE_BF16 && !is_fp8(dtype))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", "F32, BF16, F8_E4M3 or F8_E5M2", "its dtype is %s", k3_dtype_name(dtype));
  if (scales && !is_fp8(dtype))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", "scales with FP8 only", "a cache of %s has scales", k3_dtype_name(dtype));
  for (uint64_t i = 0; scales && i < engine->info.n_layers; i++)
    if (!(scales[i] > 0) || !isfinite(scales[i]))
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", "positive and finite", "the scale of layer %llu is %g", (unsigned long long)i,
                     (double)scales[i]);
  return K3_OK;
}

enum k3_status k3_cache_check(const struct k3_engine *engine, const struct k3_cache *cache, struct k3_error *err) {
  if (cache->memory != engine->info.memory || !cache->layers)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", "base addresses in the memory that the backend works on",
                   cache->layers ? "it lies in the other memory" : "it has no layers");
  K3_TRY(check_dtype(engine, cache->dtype, cache->scales, err));
  uint64_t row_nbytes = engine->info.row_width * k3_dtype_bits(cache->dtype) / 8, block_nbytes = 0;
  bool fits = cache->block_size > 0 && cache->row_nbytes >= row_nbytes && k3_mul_u64(cache->block_size, cache->row_nbytes, &block_nbytes) &&
              cache->block_nbytes >= block_nbytes;
  return fits ? K3_OK
              : k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", "rows and blocks that do not overlap",
                        "blocks of %llu rows at %llu bytes, rows at %llu bytes where a row has %llu", (unsigned long long)cache->block_size,
                        (unsigned long long)cache->block_nbytes, (unsigned long long)cache->row_nbytes, (unsigned long long)row_nbytes);
}

enum k3_status k3_cache_create(struct k3_engine *engine, enum k3_dtype dtype, uint64_t n_blocks, uint64_t block_size, const float *scales,
                               struct k3_cache *cache, struct k3_error *err) {
  *cache = (struct k3_cache){0};
  K3_TRY(check_dtype(engine, dtype, scales, err));
  const uint64_t n_layers = engine->info.n_layers, row_nbytes = engine->info.row_width * k3_dtype_bits(dtype) / 8;
  uint64_t block_nbytes, layer_nbytes, total;
  if (block_size == 0 || !k3_mul_u64(block_size, row_nbytes, &block_nbytes) || !k3_mul_u64(n_blocks, block_nbytes, &layer_nbytes) ||
      !k3_mul_u64(n_layers, layer_nbytes, &total) || total > SIZE_MAX)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "cache", NULL, "%llu blocks of %llu rows", (unsigned long long)n_blocks,
                   (unsigned long long)block_size);
  void **layers = k3_calloc(n_layers, sizeof *layers, err);
  float *own_scales = scales ? k3_calloc(n_layers, sizeof *own_scales, err) : NULL;
  void *memory = NULL;
  enum k3_status status = layers && (own_scales || !scales) ? engine->backend->ops->alloc(engine->backend, total, &memory, err) : K3_NO_MEMORY;
  if (status != K3_OK) {
    k3_free(layers);
    k3_free(own_scales);
    return status;
  }
  for (uint64_t i = 0; i < n_layers; i++)
    layers[i] = (unsigned char *)memory + i * layer_nbytes;
  if (scales)
    memcpy(own_scales, scales, n_layers * sizeof *scales);
  *cache = (struct k3_cache){engine->info.memory, dtype, layers, own_scales, n_blocks, block_size, block_nbytes, row_nbytes};
  return K3_OK;
}

void k3_cache_free(struct k3_engine *engine, struct k3_cache *cache) {
  if (cache->layers) {
    engine->backend->ops->release(engine->backend, cache->layers[0]);  // one allocation holds all layers
    k3_free((void *)cache->layers);
    k3_free((void *)cache->scales);
  }
  *cache = (struct k3_cache){0};
}
