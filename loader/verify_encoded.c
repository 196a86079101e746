// The weights that a conversion encoded, against the checkpoint: encoded again, they must give the image's bytes.
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "loader/nonfinite.h"
#include "loader/requantise.h"
#include "loader/verify.h"

enum { PIECE_NBYTES = 4 << 20 };

// A parameter of an encoded weight as the image holds it.
struct part {
  size_t item;
  enum k3_param param;
  const char *tensor;          // of the image
  const unsigned char *bytes;  // the rows of this weight
  uint64_t nbytes;
  uint64_t n_bad_from;  // lowest offset of a piece that differs; UINT64_MAX: none
};

struct piece {
  size_t part;
  uint64_t offset, nbytes;
};

struct encoded {
  const struct k3_ckpt *image;
  struct k3_plan plan;
  struct k3_requant *requant;
  struct part *parts;
  size_t n_parts, parts_capacity;
  struct piece *pieces;
  size_t n_pieces, pieces_capacity;
  unsigned char **buffers;  // [n_threads]
  struct k3_progress *progress;
  uint64_t nbytes;
};

bool k3_manifest_encoded(const struct k3_manifest *manifest, const char *tensor, const struct k3_manifest_linear **linear) {
  const char *dot = strrchr(tensor, '.');
  char module[2 * K3_ST_MAX_NAME_NBYTES];
  enum k3_param param;
  if (!dot || !k3_param_from_name(dot + 1, strlen(dot + 1), &param) || param > K3_PARAM_WEIGHT_GLOBAL_SCALE)
    return false;
  snprintf(module, sizeof module, "%.*s", (int)(dot - tensor), tensor);
  const struct k3_manifest_linear *found = k3_manifest_linear_of(manifest, module);
  if (linear)
    *linear = found;
  return found && found->encoded_from;
}

// The rows that a source tensor has in module.param of the image; NULL when it has none.
static const unsigned char *rows_of(const struct encoded *e, const char *module, enum k3_param param, const char *source, const char **tensor,
                                    uint64_t *nbytes) {
  char name[2 * K3_ST_MAX_NAME_NBYTES];
  snprintf(name, sizeof name, "%s.%s", module, k3_param_name(param));
  const struct k3_manifest_tensor *entry = k3_manifest_tensor_of(&e->image->image.manifest, name);
  const struct k3_st_tensor *stored;
  const unsigned char *bytes = k3_image_data(&e->image->image, name, &stored);
  for (size_t s = 0; entry && bytes && s < entry->n_shards; s++) {
    const struct k3_manifest_shard *shard = &entry->shards[s];
    uint64_t n_rows = stored->rank ? stored->shape[0] : 1, row_nbytes = n_rows ? (stored->end - stored->begin) / n_rows : 0;
    if (strcmp(shard->source, source) != 0 || shard->row + shard->n_rows > n_rows)
      continue;
    *tensor = stored->name;
    *nbytes = shard->n_rows * row_nbytes;
    return bytes + shard->row * row_nbytes;
  }
  return NULL;
}

static enum k3_status add_part(struct encoded *e, struct part part, struct k3_error *err) {
  K3_TRY(k3_grow(&e->parts, &e->parts_capacity, e->n_parts + 1, sizeof *e->parts, err));
  for (uint64_t offset = 0; offset < part.nbytes; offset += PIECE_NBYTES) {
    K3_TRY(k3_grow(&e->pieces, &e->pieces_capacity, e->n_pieces + 1, sizeof *e->pieces, err));
    e->pieces[e->n_pieces++] = (struct piece){e->n_parts, offset, part.nbytes - offset < PIECE_NBYTES ? part.nbytes - offset : PIECE_NBYTES};
  }
  e->nbytes += part.nbytes;
  e->parts[e->n_parts++] = part;
  return K3_OK;
}

// One weight: what the source must hold for it, and where the image keeps it.
static enum k3_status add_weight(struct encoded *e, const char *module, enum k3_param weight, const char *source, struct k3_findings *findings,
                                 struct k3_error *err) {
  struct k3_requant *requant = e->requant;
  uint64_t number;
  const struct k3_st_tensor *t = k3_ckpt_find(e->plan.ckpt, source, strlen(source), &number) ? k3_ckpt_tensor(e->plan.ckpt, number) : NULL;
  const char *path = t ? k3_ckpt_file_of(e->plan.ckpt, number)->path : e->plan.ckpt->source;
  if (!t || t->rank != 2 || !k3_is_plain_float((enum k3_dtype)t->dtype)) {
    k3_findings_report(findings, K3_IMG02, path, source, "the weight that was encoded", t ? "another shape or dtype" : "only in the image");
    return K3_OK;
  }
  struct k3_requant_item item = {.tensor = (uint32_t)number, .n_rows = t->shape[0], .n_cols = t->shape[1], .src_dtype = t->dtype};
  enum k3_param params[K3_REQUANT_MAX_PARAMS];
  size_t n_params = k3_requant_params(requant, params);
  uint64_t scale_rows, scale_cols;
  k3_quant_scale_shape(&requant->scheme, item.n_rows, item.n_cols, &scale_rows, &scale_cols);
  const uint64_t expected[] = {item.n_rows * k3_quant_row_nbytes(&requant->scheme, item.n_cols),
                               scale_rows * scale_cols * k3_dtype_bits(requant->scheme.scale_dtype) / 8, 4};
  for (size_t p = 0; p < n_params; p++) {
    struct part part = {.item = requant->n_items, .param = params[p], .n_bad_from = UINT64_MAX};
    part.bytes = rows_of(e, module, params[p], source, &part.tensor, &part.nbytes);
    if (!part.bytes || part.nbytes != expected[p] || weight != params[0] || item.n_cols == 0 || item.n_rows == 0) {
      k3_findings_report(findings, K3_IMG02, path, source, "the weight that was encoded", "another shape than the image's %s", module);
      return K3_OK;
    }
    if (params[p] == K3_PARAM_WEIGHT_GLOBAL_SCALE)
      item.second = k3_load_f32(part.bytes, 0);
    K3_TRY(add_part(e, part, err));
  }
  K3_TRY(k3_grow(&requant->items, &requant->items_capacity, requant->n_items + 1, sizeof *requant->items, err));
  requant->items[requant->n_items++] = item;
  return K3_OK;
}

static enum k3_status list(struct encoded *e, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_manifest *manifest = &e->image->image.manifest;
  for (size_t i = 0; i < manifest->n_tensors; i++) {
    const struct k3_manifest_tensor *entry = &manifest->tensors[i];
    const struct k3_manifest_linear *linear;
    const char *dot = strrchr(entry->name, '.');
    bool packed = dot && strcmp(dot, ".weight_packed") == 0;
    enum k3_scheme scheme;
    if (entry->n_shards == 0 || !k3_manifest_encoded(manifest, entry->name, &linear) || !(packed || strcmp(dot, ".weight") == 0))
      continue;
    if (!k3_scheme_from_name(linear->scheme, &scheme) || (e->requant->n_items > 0 && scheme != e->requant->scheme.scheme))
      return k3_fail(err, K3_UNSUPPORTED, K3_IMG01, e->image->source, linear->module, "one known scheme for all encoded weights", "scheme %s",
                     linear->scheme);
    e->requant->scheme = k3_quant_scheme_default(scheme);
    for (size_t s = 0; s < entry->n_shards; s++) {
      const struct k3_manifest_shard *shard = &entry->shards[s];
      if (shard->file >= 0 && (size_t)shard->file < manifest->n_sources && manifest->sources[shard->file].of_target)
        continue;
      K3_TRY(add_weight(e, linear->module, packed ? K3_PARAM_WEIGHT_PACKED : K3_PARAM_WEIGHT, shard->source, findings, err));
    }
  }
  return K3_OK;
}

static enum k3_status compare_piece(void *ctx, int worker, uint64_t number, struct k3_error *err) {
  struct encoded *e = ctx;
  const struct piece *piece = &e->pieces[number];
  struct part *part = &e->parts[piece->part];
  K3_TRY(k3_requant_encode(&e->plan, part->item, part->param, piece->offset, piece->nbytes, e->buffers[worker], err));
  if (memcmp(e->buffers[worker], part->bytes + piece->offset, (size_t)piece->nbytes) != 0) {
    pthread_mutex_lock(&e->requant->mutex);
    part->n_bad_from = piece->offset < part->n_bad_from ? piece->offset : part->n_bad_from;
    pthread_mutex_unlock(&e->requant->mutex);
  }
  k3_progress_add(e->progress, piece->nbytes);
  return K3_OK;
}

static enum k3_status compare_all(struct encoded *e, int n_threads, struct k3_error *err) {
  struct k3_pool *pool = k3_pool_create(n_threads, err);
  n_threads = pool ? k3_pool_n_threads(pool) : 0;
  e->buffers = pool ? k3_calloc((size_t)n_threads, sizeof *e->buffers, err) : NULL;
  enum k3_status status = e->buffers ? K3_OK : K3_NO_MEMORY;
  for (int i = 0; status == K3_OK && i < n_threads; i++) {
    e->buffers[i] = k3_alloc_aligned(PIECE_NBYTES, 4096, err);
    status = e->buffers[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK) {
    k3_progress_start(e->progress, "encoding again", e->nbytes);
    status = k3_pool_run(pool, e->n_pieces, compare_piece, e, err);
    k3_progress_finish(e->progress);
  }
  for (int i = 0; e->buffers && i < n_threads; i++)
    k3_free(e->buffers[i]);
  k3_free(e->buffers);
  k3_pool_free(pool);
  return status;
}

enum k3_status k3_verify_encoded(const struct k3_ckpt *image, const struct k3_ckpt *source, int n_threads, struct k3_progress *progress,
                                 uint64_t *n_equal, struct k3_findings *findings, struct k3_error *err) {
  struct encoded e = {.image = image, .plan = {.ckpt = source}, .progress = progress};
  *n_equal = 0;
  e.requant = k3_calloc(1, sizeof *e.requant, err);
  if (!e.requant)
    return K3_NO_MEMORY;
  e.requant->allow_nonfinite = true;
  pthread_mutex_init(&e.requant->mutex, NULL);
  e.plan.requant = e.requant;
  enum k3_status status = list(&e, findings, err);
  struct k3_findings unused = {0};  // NaN and Inf are not what is asked here
  bool fp8 = e.requant->scheme.scheme != K3_SCHEME_NVFP4;
  if (status == K3_OK && fp8 && e.requant->n_items > 0)
    status = k3_requant_measure(&e.plan, n_threads, progress, &unused, err);
  k3_findings_free(&unused);
  if (status == K3_OK && e.n_pieces > 0)
    status = compare_all(&e, n_threads, err);
  for (size_t p = 0; status == K3_OK && p < e.n_parts; p++) {
    const struct part *part = &e.parts[p];
    const struct k3_requant_item *item = &e.requant->items[part->item];
    if (part->n_bad_from != UINT64_MAX)
      k3_findings_report(findings, K3_IMG02, k3_ckpt_file_of(source, item->tensor)->path, k3_ckpt_tensor(source, item->tensor)->name,
                         "the weight that was encoded", "encoded again it gives other bytes than %s (in the piece from byte %llu of its rows)",
                         part->tensor, (unsigned long long)part->n_bad_from);
    else
      ++*n_equal;
  }
  k3_requant_free(e.requant);
  k3_free(e.parts);
  k3_free(e.pieces);
  return status;
}
