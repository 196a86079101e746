#include "cli/staging.h"

#include "base/alloc.h"

static bool is_on_host(const struct k3_staging *staging) {
  return k3_engine_info(staging->engine)->memory == K3_MEMORY_HOST;
}

// A new piece of the engine's memory, last in the list.
static enum k3_status add(struct k3_staging *staging, void *host, size_t nbytes, bool is_output, void **memory, struct k3_error *err) {
  K3_TRY(k3_grow(&staging->items, &staging->capacity, staging->n_items + 1, sizeof *staging->items, err));
  K3_TRY(k3_memory_create(staging->engine, nbytes, memory, err));
  staging->items[staging->n_items++] = (struct k3_staged){*memory, host, nbytes, is_output};
  return K3_OK;
}

enum k3_status k3_staging_input(struct k3_staging *staging, const void *host, size_t nbytes, const void **memory, struct k3_error *err) {
  *memory = host;
  if (!host || is_on_host(staging))
    return K3_OK;
  void *copy;
  K3_TRY(add(staging, NULL, nbytes, false, &copy, err));
  *memory = copy;
  return k3_memory_write(staging->engine, copy, host, nbytes, err);
}

enum k3_status k3_staging_output(struct k3_staging *staging, struct k3_array *array, size_t nbytes, struct k3_error *err) {
  array->memory = k3_engine_info(staging->engine)->memory;
  if (!array->data || is_on_host(staging))
    return K3_OK;
  return add(staging, array->data, nbytes, true, &array->data, err);
}

enum k3_status k3_staging_fetch(struct k3_staging *staging, struct k3_error *err) {
  enum k3_status status = K3_OK;
  for (size_t i = 0; i < staging->n_items && status == K3_OK; i++)
    if (staging->items[i].is_output)
      status = k3_memory_read(staging->engine, staging->items[i].host, staging->items[i].memory, staging->items[i].nbytes, err);
  for (size_t i = 0; i < staging->n_items; i++)
    k3_memory_free(staging->engine, staging->items[i].memory);
  staging->n_items = 0;
  return status;
}

void k3_staging_free(struct k3_staging *staging) {
  for (size_t i = 0; i < staging->n_items; i++)
    k3_memory_free(staging->engine, staging->items[i].memory);
  k3_free(staging->items);
  *staging = (struct k3_staging){0};
}
