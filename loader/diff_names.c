#include <string.h>

#include "base/alloc.h"
#include "loader/diff_parts.h"

static enum k3_status add_entry(struct k3_diff_side *side, struct k3_diff_entry entry, struct k3_error *err) {
  K3_TRY(k3_grow(&side->entries, &side->capacity, side->n_entries + 1, sizeof *side->entries, err));
  side->entries[side->n_entries++] = entry;
  return K3_OK;
}

static struct k3_diff_entry whole(const char *name, uint64_t tensor, const struct k3_st_tensor *t) {
  return (struct k3_diff_entry){name, tensor, 0, k3_st_n_elems(t), t->shape, t->rank};
}

static bool is_internal(const char *name) {
  return name[0] == '_' && name[1] == '_';
}

enum k3_status k3_diff_own_names(struct k3_diff_side *side, struct k3_error *err) {
  for (uint64_t i = 0; i < side->ckpt->n_tensors; i++) {
    const struct k3_st_tensor *t = k3_ckpt_tensor(side->ckpt, i);
    if (!(side->ckpt->image.bytes && is_internal(t->name)))
      K3_TRY(add_entry(side, whole(t->name, i, t), err));
  }
  return K3_OK;
}

// Rows [shard->row, shard->row + shard->n_rows) of an image tensor, under the name of the tensor they were made from.
static enum k3_status add_rows(struct k3_diff_side *side, uint64_t tensor, const struct k3_manifest_shard *shard, struct k3_error *err) {
  const struct k3_st_tensor *t = k3_ckpt_tensor(side->ckpt, tensor);
  uint64_t n_rows = t->rank ? t->shape[0] : 1, n_elems = k3_st_n_elems(t);
  // The image's opening has checked that the rows lie inside.
  uint64_t row_elems = n_rows ? n_elems / n_rows : 0;
  if (shard->row * row_elems * k3_dtype_bits(t->dtype) % 8 != 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, t->name, NULL, "row %llu begins inside a byte", (unsigned long long)shard->row);
  unsigned rank = t->rank ? t->rank : 1;
  uint64_t *shape = k3_arena_alloc(side->arena, rank * sizeof *shape, err);
  if (!shape)
    return K3_NO_MEMORY;
  shape[0] = shard->n_rows;
  for (unsigned i = 1; i < rank; i++)
    shape[i] = t->shape[i];
  struct k3_diff_entry entry = {shard->source, tensor, shard->row * row_elems, shard->n_rows * row_elems, shape, (uint8_t)rank};
  return add_entry(side, entry, err);
}

// Number of the image tensor that a checkpoint's tensor was copied to, under its own name or the image's.
static bool find_copy(const struct k3_diff_side *image, const char *name, uint64_t *tensor) {
  char placed[2 * K3_ST_MAX_NAME_NBYTES];
  if (k3_ckpt_find(image->ckpt, name, strlen(name), tensor))
    return true;
  size_t n = k3_manifest_copied_name(&image->ckpt->image.manifest, name, placed, sizeof placed);
  return n > 0 && k3_ckpt_find(image->ckpt, placed, n, tensor);
}

enum k3_status k3_diff_source_names(struct k3_diff_side *image, const struct k3_ckpt *checkpoint, struct k3_error *err) {
  const struct k3_manifest *manifest = &image->ckpt->image.manifest;
  bool *taken = k3_calloc(image->ckpt->n_tensors, sizeof *taken, err);
  enum k3_status status = taken ? K3_OK : K3_NO_MEMORY;
  for (size_t i = 0; status == K3_OK && i < manifest->n_tensors; i++) {
    const struct k3_manifest_tensor *entry = &manifest->tensors[i];
    uint64_t tensor;
    if (entry->n_shards == 0 || !k3_ckpt_find(image->ckpt, entry->name, strlen(entry->name), &tensor))
      continue;
    taken[tensor] = true;
    for (size_t s = 0; status == K3_OK && s < entry->n_shards; s++) {
      const struct k3_manifest_shard *shard = &entry->shards[s];
      bool of_target = shard->file >= 0 && (size_t)shard->file < manifest->n_sources && manifest->sources[shard->file].of_target;
      if (!of_target)
        status = add_rows(image, tensor, shard, err);
    }
  }
  for (uint64_t i = 0; status == K3_OK && i < checkpoint->n_tensors; i++) {
    const struct k3_st_tensor *t = k3_ckpt_tensor(checkpoint, i);
    uint64_t tensor;
    if (!find_copy(image, t->name, &tensor) || taken[tensor])
      continue;
    taken[tensor] = true;
    status = add_entry(image, whole(t->name, tensor, k3_ckpt_tensor(image->ckpt, tensor)), err);
  }
  for (uint64_t i = 0; status == K3_OK && i < image->ckpt->n_tensors; i++) {
    const struct k3_st_tensor *t = k3_ckpt_tensor(image->ckpt, i);
    if (!taken[i] && !is_internal(t->name))
      status = add_entry(image, whole(t->name, i, t), err);
  }
  k3_free(taken);
  return status;
}
