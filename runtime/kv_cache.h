// The paged latent cache: checks of a caller's description.
#ifndef K3_RUNTIME_KV_CACHE_H
#define K3_RUNTIME_KV_CACHE_H

#include "runtime/engine.h"

// K3_BAD_ARGUMENT for another memory, an unknown dtype, scales that are not positive or not wanted, strides that overlap.
enum k3_status k3_cache_check(const struct k3_engine *engine, const struct k3_cache *cache, struct k3_error *err);

#endif
