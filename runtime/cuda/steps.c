// The fused steps as launches.
#include "runtime/cuda/cuda.h"

// Who multiplies: up to so many rows our own kernel, which reads the weights where they lie; above, the library, for quantised weights on BF16
// panels. Set by the bytes that a weight costs, not yet by measurement on a device:
//   BF16  own: 2 for every 32 rows, and x again for every 16 or 32 outputs, which from 16 rows on no longer fits in the L1; the library: 2
//   F16   the library reads BF16 only: a panel, 2 to read, 2 to write, 2 to read; F32 likewise
//   FP8   own: 1 for every 32 rows; panel: 1 + 2 + 2
//   FP4   own: 0.56 for up to 64 rows; panel: 0.56 + 2 + 2
// With F32 activations it is our own kernel always.
static const uint32_t MAX_OWN_ROWS[K3_CUDA_N_KINDS] = {
    [K3_CUDA_BF16] = 16, [K3_CUDA_F16] = 16, [K3_CUDA_F32] = 16, [K3_CUDA_FP8] = 64, [K3_CUDA_FP4] = 64};

// A zeroed launch of a kind, or return.
#define RECORD(variable, exec, name)                                                                    \
  struct k3_cuda_##name *variable = k3_cuda_record(exec, K3_CUDA_LAUNCH_##name, sizeof *variable, err); \
  if (!variable)                                                                                        \
  return K3_NO_MEMORY

// y = scale * x * w^T.
struct product {
  const struct k3_matrix *w;
  const void *x;
  void *y;
  uint64_t n_rows, x_stride, y_stride, shard_stride;  // as in struct k3_cuda_linear
  bool y_is_f32;
  float scale;
};

static bool fits_library(const struct k3_exec *exec, const struct product *p, const struct k3_cuda_matrix *w) {
  const size_t y_nbytes = p->y_is_f32 ? 4 : 2;
  return exec->backend->base.bf16 && p->n_rows > MAX_OWN_ROWS[w->kind] && w->aligned && (uintptr_t)p->x % 16 == 0 && p->x_stride % 8 == 0 &&
         (uintptr_t)p->y % 16 == 0 && p->y_stride * y_nbytes % 16 == 0 && p->shard_stride * y_nbytes % 16 == 0;
}

// One product of the library: `w` is BF16 of w_stride columns.
static enum k3_status record_gemm(struct k3_exec *exec, const struct product *p, const void *w, uint64_t w_stride, uint32_t n_outputs,
                                  uint32_t n_cols, void *y, struct k3_error *err) {
  RECORD(gemm, exec, gemm);
  gemm->library = exec->backend->gemm;
  gemm->w = w;
  gemm->w_stride = w_stride;
  gemm->x = p->x;
  gemm->x_stride = p->x_stride;
  gemm->y = y;
  gemm->y_stride = p->y_stride;
  gemm->n_rows = (uint32_t)p->n_rows;
  gemm->n_outputs = n_outputs;
  gemm->n_cols = n_cols;
  gemm->n_batches = 1;
  gemm->scale = p->scale;
  gemm->y_is_f32 = p->y_is_f32;
  return K3_OK;
}

// All shards of a BF16 matrix at one stride, as the layers' rows of the context projection are, are one batch.
static bool is_batch(const struct k3_matrix *w, const struct k3_cuda_matrix *described, uint64_t *w_batch) {
  if (w->n_shards < 2)
    return false;
  const ptrdiff_t stride = (const char *)w->shards[1].codes.weight - (const char *)w->shards[0].codes.weight;
  for (unsigned i = 1; i < w->n_shards; i++)
    if ((const char *)w->shards[i].codes.weight - (const char *)w->shards[i - 1].codes.weight != stride || w->shards[i].n_rows != w->shards[0].n_rows)
      return false;
  *w_batch = (uint64_t)stride / 2;
  return described->kind == K3_CUDA_BF16 && stride > 0 && stride % 16 == 0;
}

// One size for all products of a session: at least eight rows of the widest matrix, no more than its largest matrix can need.
static size_t panel_nbytes(const struct k3_exec *exec) {
  const uint64_t row_nbytes = 2 * exec->options.max_cols, most = exec->options.vocab_size + 8 * exec->options.max_cols;
  uint64_t n_rows = K3_CUDA_MAX_PANEL_NBYTES / row_nbytes;
  n_rows = n_rows < most ? n_rows : most;
  return (n_rows < 8 ? 8 : n_rows) * row_nbytes;
}

static enum k3_status record_library(struct k3_exec *exec, const struct product *p, struct k3_error *err) {
  struct k3_cuda_matrix whole = {0};
  const size_t y_nbytes = p->y_is_f32 ? 4 : 2;
  uint64_t w_batch;
  K3_TRY(k3_cuda_describe_matrix(p->w, 0, &whole, err));
  if (p->shard_stride && is_batch(p->w, &whole, &w_batch)) {
    const uint16_t *first = whole.shards[0].weight;
    K3_TRY(record_gemm(exec, p, first + whole.first_col, whole.row_nbytes / 2, whole.shards[0].n_rows, whole.n_cols, p->y, err));
    struct k3_cuda_gemm *gemm = (struct k3_cuda_gemm *)(exec->launches + exec->last_launch);
    gemm->n_batches = p->w->n_shards;
    gemm->w_batch = w_batch;
    gemm->y_batch = p->shard_stride;
    return K3_OK;
  }
  uint64_t panel_rows = panel_nbytes(exec) / (2 * p->w->n_cols) & ~(uint64_t)7;
  for (unsigned i = 0; i < p->w->n_shards; i++) {
    const struct k3_matrix_shard *shard = &p->w->shards[i];
    char *y = (char *)p->y + (p->shard_stride ? i * p->shard_stride : shard->row) * y_nbytes;
    if (whole.kind == K3_CUDA_BF16) {
      K3_TRY(record_gemm(exec, p, (const uint16_t *)shard->codes.weight + whole.first_col, whole.row_nbytes / 2, (uint32_t)shard->n_rows,
                         whole.n_cols, y, err));
      continue;
    }
    for (uint64_t row = 0; row < shard->n_rows; row += panel_rows) {
      const uint64_t n = shard->n_rows - row < panel_rows ? shard->n_rows - row : panel_rows;
      K3_TRY(k3_cuda_grow(&exec->panel, &exec->panel_nbytes, panel_nbytes(exec), err));
      RECORD(panel, exec, dequantise);
      K3_TRY(k3_cuda_describe_matrix(&(struct k3_matrix){shard->n_rows, p->w->n_cols, (struct k3_matrix_shard *)shard, 1}, 0, &panel->w, err));
      panel->dst = exec->panel;
      panel->first_row = (uint32_t)row;
      panel->n_rows = (uint32_t)n;
      struct product scaled = *p;
      scaled.scale *= panel->w.shards[0].factor;
      K3_TRY(record_gemm(exec, &scaled, exec->panel, p->w->n_cols, (uint32_t)n, (uint32_t)p->w->n_cols, y + row * y_nbytes, err));
    }
  }
  return K3_OK;
}

static enum k3_status record_product(struct k3_exec *exec, const struct product *p, struct k3_error *err) {
  const bool bf16 = exec->backend->base.bf16;
  struct k3_cuda_matrix whole = {0};
  K3_TRY(k3_cuda_describe_matrix(p->w, 0, &whole, err));
  if (fits_library(exec, p, &whole))
    return record_library(exec, p, err);
  for (unsigned first = 0; first < p->w->n_shards; first += K3_CUDA_MAX_SHARDS) {
    RECORD(linear, exec, linear);
    K3_TRY(k3_cuda_describe_matrix(p->w, first, &linear->w, err));
    // Inputs are read eight at a time as the weights are.
    if ((uintptr_t)p->x % 16 != 0 || p->x_stride % 8 != 0)
      linear->w.aligned = 0;
    linear->x = p->x;
    linear->y = p->shard_stride ? p->y : (char *)p->y + p->w->shards[first].row * (bf16 && !p->y_is_f32 ? 2 : 4);
    linear->x_stride = p->x_stride;
    linear->y_stride = p->y_stride;
    linear->shard_stride = p->shard_stride;
    linear->n_rows = (uint32_t)p->n_rows;
    linear->n_outputs = linear->w.n_rows;
    linear->n_batches = 1;
    linear->first_shard = first;
    linear->scale = p->scale;
    linear->bf16 = bf16;
    linear->y_is_f32 = p->y_is_f32 || !bf16;
  }
  return K3_OK;
}

static enum k3_status record_rows(struct k3_exec *exec, const struct k3_matrix *w, const void *x, uint64_t n_rows, void *y, struct k3_error *err) {
  const struct product product = {w, x, y, n_rows, w->n_cols, w->n_rows, 0, false, 1};
  return record_product(exec, &product, err);
}

// Where the next sum over the ranks lies in the window. Halves take turns, so that nobody writes where another may still read.
static uint64_t sum_offset(const struct k3_exec *exec) {
  return exec->n_sums % 2 * exec->half_nbytes;
}

// Bytes of a rank's part up to which every rank reads all of it from every rank: by a model of the links (about 340 GB/s one way, 4 us for one wait
// more) reading twice in parts costs as much there. Not measured yet.
static const struct {
  int max_ranks;
  uint64_t nbytes;
} MAX_ONE_SHOT[] = {{2, 5 << 20}, {4, 768 << 10}, {8, 256 << 10}, {K3_CUDA_MAX_RANKS, 64 << 10}};

static enum k3_cuda_shots shots_of(const struct k3_exec *exec, uint64_t n_values) {
  unsigned i = 0;
  if (k3_cuda_peers_why_not(exec->peers))
    return K3_CUDA_DONE;
  if (exec->sums != K3_CUDA_SUMS_AUTO)
    return exec->sums == K3_CUDA_SUMS_TWO_SHOT ? K3_CUDA_TWO_SHOT : K3_CUDA_ONE_SHOT;
  while (MAX_ONE_SHOT[i].max_ranks < exec->backend->tp_size)
    i++;
  return n_values * sizeof(float) <= MAX_ONE_SHOT[i].nbytes ? K3_CUDA_ONE_SHOT : K3_CUDA_TWO_SHOT;
}

// The sum of what the ranks left in the window: one kernel, or the library's all-reduce and then that kernel. Its other params are the caller's.
static struct k3_cuda_reduce *record_sum(struct k3_exec *exec, uint64_t n_rows, uint64_t width, struct k3_error *err) {
  const enum k3_cuda_shots shots = shots_of(exec, n_rows * width);
  if (shots == K3_CUDA_DONE) {
    struct k3_cuda_all_reduce *whole = k3_cuda_record(exec, K3_CUDA_LAUNCH_all_reduce, sizeof *whole, err);
    if (!whole)
      return NULL;
    whole->peers = exec->peers;
    whole->window_offset = sum_offset(exec);
    whole->n = n_rows * width;
  }
  struct k3_cuda_reduce *sum = k3_cuda_record(exec, K3_CUDA_LAUNCH_reduce, sizeof *sum, err);
  if (!sum)
    return NULL;
  sum->peers = exec->peers;
  sum->shots = shots;
  sum->window_offset = sum_offset(exec);
  sum->n_rows = (uint32_t)n_rows;
  sum->width = (uint32_t)width;
  sum->bf16 = exec->backend->base.bf16;
  exec->n_sums++;
  return sum;
}

// A product that may be one rank's part of a sum: left in the window for the norm that completes it, or summed at once into y.
static enum k3_status record_part(struct k3_exec *exec, const struct k3_matrix *w, const void *x, uint64_t n_rows, void *y, bool reduce, bool partial,
                                  struct k3_error *err) {
  if (!exec->peers || (!reduce && !partial))
    return record_rows(exec, w, x, n_rows, y, err);
  void *window = (char *)k3_cuda_peers_window(exec->peers) + sum_offset(exec);
  const struct product product = {w, x, window, n_rows, w->n_cols, w->n_rows, 0, true, 1};
  K3_TRY(record_product(exec, &product, err));
  if (!reduce)
    return K3_OK;
  struct k3_cuda_reduce *sum = record_sum(exec, n_rows, w->n_rows, err);
  if (!sum)
    return K3_NO_MEMORY;
  sum->out = y;
  return K3_OK;
}

// --- context ---------------------------------------------------------------------------------------------------------------------------------------

// The caller's taps as rows of activations: where they are that already, nothing is copied.
static enum k3_status record_join(struct k3_exec *exec, const struct k3_combine *p, const void **rows, uint64_t *stride, struct k3_error *err) {
  const bool bf16 = exec->backend->base.bf16;
  const uint64_t elem_nbytes = exec->backend->base.act_nbytes, width = p->n_taps * p->tap_width;
  const struct k3_array *first = &p->taps[0];
  const uint64_t first_nbytes = first->row_nbytes ? first->row_nbytes : width * k3_dtype_bits(first->dtype) / 8;
  if (p->n_tap_arrays == 1 && !p->tap_norms && first->dtype == (bf16 ? K3_DTYPE_BF16 : K3_DTYPE_F32) && first_nbytes % elem_nbytes == 0) {
    *rows = (const char *)first->data + p->first_row * first_nbytes;
    *stride = first_nbytes / elem_nbytes;
    return K3_OK;
  }
  for (uint64_t tap = 0; tap < p->n_taps; tap += K3_CUDA_MAX_TAPS) {
    RECORD(join, exec, join);
    join->first_tap = (uint32_t)tap;
    join->n_taps = (uint32_t)(p->n_taps - tap < K3_CUDA_MAX_TAPS ? p->n_taps - tap : K3_CUDA_MAX_TAPS);
    for (uint32_t i = 0; i < join->n_taps; i++) {
      const bool one = p->n_tap_arrays == 1;
      const struct k3_array *array = &p->taps[one ? 0 : tap + i];
      const uint64_t value_nbytes = k3_dtype_bits(array->dtype) / 8;
      join->taps[i] = (const char *)array->data + (one ? (tap + i) * p->tap_width * value_nbytes : 0);
      join->row_nbytes[i] = array->row_nbytes ? array->row_nbytes : (one ? width : p->tap_width) * value_nbytes;
      join->dtypes[i] = k3_cuda_float_of(array->dtype);
      if (p->tap_norms)
        k3_cuda_describe_vector(&p->tap_norms[tap + i], &join->gains[i]);
    }
    join->first_row = p->first_row;
    join->n_rows = (uint32_t)p->n_rows;
    join->tap_width = (uint32_t)p->tap_width;
    join->width = (uint32_t)width;
    join->eps = p->eps;
    join->out = p->joined;
    join->bf16 = bf16;
  }
  *rows = p->joined;
  *stride = width;
  return K3_OK;
}

enum k3_status k3_cuda_combine(struct k3_exec *exec, const struct k3_combine *p, struct k3_error *err) {
  const uint64_t H = p->proj->n_rows;
  const void *rows;
  uint64_t stride;
  exec->max_rows = exec->max_rows < p->first_row + p->n_rows ? p->first_row + p->n_rows : exec->max_rows;
  K3_TRY(record_join(exec, p, &rows, &stride, err));
  const struct product product = {p->proj, rows, p->projected, p->n_rows, stride, H, 0, false, 1};
  K3_TRY(record_product(exec, &product, err));
  RECORD(norm, exec, add_norm);
  norm->residual = p->projected;
  norm->out = p->out;
  norm->out_f32 = p->out_f32;
  norm->out_row_nbytes = p->out_row_nbytes;
  k3_cuda_describe_vector(p->norm, &norm->gain);
  norm->n_rows = (uint32_t)p->n_rows;
  norm->width = (uint32_t)H;
  norm->eps = p->eps;
  norm->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

enum k3_status k3_cuda_context_insert(struct k3_exec *exec, const struct k3_context_insert *p, struct k3_error *err) {
  const uint64_t E = p->latent_rank + p->rope_width, layer_stride = p->n_rows * E;
  // Layer-major, as the cache wants it: the product of layer i's rows is matrix i.
  const struct product product = {p->kv, p->context, p->kv_rows, p->n_rows, p->kv->n_cols, E, layer_stride, false, 1};
  K3_TRY(record_product(exec, &product, err));
  for (uint64_t first = 0; first < p->n_layers; first += K3_CUDA_MAX_LAYERS) {
    RECORD(insert, exec, insert);
    insert->kv = (char *)p->kv_rows + first * layer_stride * exec->backend->base.act_nbytes;
    insert->kv_stride = E;
    insert->layer_stride = layer_stride;
    insert->n_layers = (uint32_t)(p->n_layers - first < K3_CUDA_MAX_LAYERS ? p->n_layers - first : K3_CUDA_MAX_LAYERS);
    for (uint32_t i = 0; i < insert->n_layers; i++) {
      k3_cuda_describe_vector(p->norms[first + i], &insert->gains[i]);
      k3_cuda_describe_cache(p->cache, first + i, &insert->caches[i]);
    }
    k3_cuda_describe_rope(p->rope, &insert->rope);
    insert->positions = p->positions;
    insert->slots = p->slots + first * p->slots_layer_stride;
    insert->slots_layer_stride = p->slots_layer_stride;
    insert->refused = exec->refused;
    insert->max_positions = p->max_positions;
    insert->out_row_nbytes = p->out_row_nbytes;
    insert->out_layer_nbytes = p->out_layer_rows * p->out_row_nbytes;
    insert->out_f32 = p->out_f32 ? (float *)((char *)p->out_f32 + first * insert->out_layer_nbytes) : NULL;
    insert->n_rows = (uint32_t)p->n_rows;
    insert->latent_rank = (uint32_t)p->latent_rank;
    insert->eps = p->eps;
    insert->bf16 = exec->backend->base.bf16;
  }
  return K3_OK;
}

// --- block -----------------------------------------------------------------------------------------------------------------------------------------

enum k3_status k3_cuda_block_begin(struct k3_exec *exec, const struct k3_block_begin *p, struct k3_error *err) {
  if (p->reduce)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, p->name, "an embedding that every rank has whole",
                   "a sum over the ranks after the embedding");
  RECORD(begin, exec, begin);
  K3_TRY(k3_cuda_describe_matrix(p->embedding, 0, &begin->embedding, err));
  k3_cuda_describe_cache(p->cache, 0, &begin->cache);
  begin->anchor_ids = p->anchor_ids;
  begin->anchor_positions = p->anchor_positions;
  begin->block_tables = p->block_tables;
  begin->refused = exec->refused;
  begin->positions = p->positions;
  begin->slots = p->slots;
  begin->n_keys = p->n_keys;
  begin->residual = p->residual;
  begin->max_positions = p->max_positions;
  begin->max_keys = exec->options.max_keys;
  begin->max_blocks = p->max_blocks;
  begin->n_blocks = p->cache->n_blocks;
  begin->vocab_size = p->vocab_size;
  begin->mask_token_id = p->mask_token_id;
  begin->n_requests = (uint32_t)p->n_requests;
  begin->block_width = (uint32_t)p->block_width;
  begin->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

enum k3_status k3_cuda_reduce_add_norm(struct k3_exec *exec, const struct k3_reduce_add_norm *p, struct k3_error *err) {
  if (p->reduce && exec->peers) {
    if (!p->partial)
      return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, p->name, "a sum of a branch", "a sum over the ranks of the residual itself");
    struct k3_cuda_reduce *sum = record_sum(exec, p->n_rows, p->width, err);
    if (!sum)
      return K3_NO_MEMORY;
    sum->residual = p->residual;
    sum->out = p->out;
    k3_cuda_describe_vector(p->norm, &sum->gain);
    sum->eps = p->eps;
    return K3_OK;
  }
  RECORD(norm, exec, add_norm);
  norm->residual = p->residual;
  norm->partial = p->partial;
  norm->out = p->out;
  k3_cuda_describe_vector(p->norm, &norm->gain);
  norm->n_rows = (uint32_t)p->n_rows;
  norm->width = (uint32_t)p->width;
  norm->eps = p->eps;
  norm->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

enum k3_status k3_cuda_latents(struct k3_exec *exec, const struct k3_latents *p, struct k3_error *err) {
  const uint64_t width = p->q_rank + p->latent_rank + p->rope_width;
  K3_TRY(record_rows(exec, p->proj, p->in, p->n_rows, p->projected, err));
  RECORD(insert, exec, insert);
  insert->kv = p->projected;
  insert->kv_stride = width;
  insert->q_a = p->q_a;
  k3_cuda_describe_vector(p->q_norm, &insert->q_gain);
  k3_cuda_describe_vector(p->kv_norm, &insert->gains[0]);
  k3_cuda_describe_cache(p->cache, p->layer, &insert->caches[0]);
  k3_cuda_describe_rope(p->rope, &insert->rope);
  insert->positions = p->positions;
  insert->slots = p->slots;
  insert->max_positions = UINT64_MAX >> 1;  // the block's own positions are clamped already
  insert->n_rows = (uint32_t)p->n_rows;
  insert->n_layers = 1;
  insert->q_rank = (uint32_t)p->q_rank;
  insert->latent_rank = (uint32_t)p->latent_rank;
  insert->eps = p->eps;
  insert->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

enum k3_status k3_cuda_query(struct k3_exec *exec, const struct k3_query *p, struct k3_error *err) {
  K3_TRY(record_rows(exec, p->q_b, p->q_a, p->n_rows, p->q, err));
  RECORD(absorb, exec, absorb);
  K3_TRY(k3_cuda_describe_matrix(p->kv_b, 0, &absorb->kv_b, err));
  k3_cuda_describe_rope(p->rope, &absorb->rope);
  absorb->q = p->q;
  absorb->out = p->out;
  absorb->positions = p->positions;
  absorb->n_rows = (uint32_t)p->n_rows;
  absorb->n_heads = (uint32_t)p->n_heads;
  absorb->nope_width = (uint32_t)p->nope_width;
  absorb->v_width = (uint32_t)p->v_width;
  absorb->latent_rank = (uint32_t)p->latent_rank;
  absorb->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

// Splits of the keys: as many as fill the device once, no split without a tile of keys.
static uint32_t n_splits_of(const struct k3_exec *exec, const struct k3_cuda_attention *p, uint64_t n_requests) {
  enum { MAX_SPLITS = 64 };  // the combination reads them all
  const uint64_t n_tiles = (exec->options.max_keys + K3_CUDA_KEY_TILE - 1) / K3_CUDA_KEY_TILE, n_per_block = k3_cuda_attention_rows(p);
  const uint64_t n_blocks = ((uint64_t)p->block_width * p->n_heads + n_per_block - 1) / n_per_block * n_requests;
  uint64_t n = (uint64_t)exec->backend->n_processors / n_blocks;
  n = n < n_tiles ? n : n_tiles;
  return n < 1 ? 1 : n < MAX_SPLITS ? (uint32_t)n : MAX_SPLITS;
}

// Parts of the largest batch that the session may have: scratch that grew with the batch would leave older graphs with an address of the past.
static uint64_t max_parts(const struct k3_exec *exec, const struct k3_cuda_attention *p) {
  uint64_t most = 0;
  for (uint64_t n = 1; n <= exec->options.max_requests; n++) {
    const uint64_t n_parts = n * n_splits_of(exec, p, n);
    most = n_parts > most ? n_parts : most;
  }
  return most * p->block_width * p->n_heads;
}

static enum k3_status record_attention(struct k3_exec *exec, const struct k3_attend *p, struct k3_error *err) {
  RECORD(attention, exec, attention);
  k3_cuda_describe_cache(p->cache, p->layer, &attention->cache);
  attention->query = p->query;
  attention->block_tables = p->block_tables;
  attention->n_keys = p->n_keys;
  attention->anchor_positions = p->anchor_positions;
  attention->latents = p->latent;
  attention->max_blocks = p->max_blocks;
  attention->n_requests = (uint32_t)p->n_requests;
  attention->block_width = (uint32_t)p->block_width;
  attention->n_heads = (uint32_t)p->n_heads;
  attention->latent_rank = (uint32_t)p->latent_rank;
  attention->rope_width = (uint32_t)p->rope_width;
  attention->scale = p->scale;
  attention->causal = p->causal;
  attention->bf16 = exec->backend->base.bf16;
  attention->n_splits = n_splits_of(exec, attention, p->n_requests);
  const size_t n_parts = max_parts(exec, attention);
  K3_TRY(k3_cuda_grow(&exec->partial_latents, &exec->partial_latents_nbytes, n_parts * p->latent_rank * sizeof(float), err));
  K3_TRY(k3_cuda_grow(&exec->partial_sums, &exec->partial_sums_nbytes, n_parts * 2 * sizeof(float), err));
  attention->partial_latents = exec->partial_latents;
  attention->partial_sums = exec->partial_sums;
  return K3_OK;
}

enum k3_status k3_cuda_attend(struct k3_exec *exec, const struct k3_attend *p, struct k3_error *err) {
  const uint64_t N = p->n_heads;
  K3_TRY(record_attention(exec, p, err));
  RECORD(values, exec, linear);  // W_UV, a product for each head
  K3_TRY(k3_cuda_describe_matrix(p->kv_b, 0, &values->w, err));
  if (p->latent_rank % 8 != 0)
    values->w.aligned = 0;
  values->x = p->latent;
  values->y = p->out;
  values->x_stride = N * p->latent_rank;
  values->y_stride = N * p->v_width;
  values->x_batch = p->latent_rank;
  values->y_batch = p->v_width;
  values->n_rows = (uint32_t)(p->n_requests * p->block_width);
  values->n_outputs = (uint32_t)p->v_width;
  values->n_batches = (uint32_t)N;
  values->first_row = (uint32_t)p->nope_width;
  values->batch_rows = (uint32_t)(p->nope_width + p->v_width);
  values->scale = 1;
  values->bf16 = exec->backend->base.bf16;
  values->y_is_f32 = !values->bf16;
  return K3_OK;
}

enum k3_status k3_cuda_project(struct k3_exec *exec, const struct k3_project *p, struct k3_error *err) {
  return record_part(exec, p->proj, p->in, p->n_rows, p->out, p->reduce, p->partial, err);
}

// silu(gate) * up where the product is our own kernel's; false: nothing was recorded.
static enum k3_status record_gated(struct k3_exec *exec, const struct k3_mlp *p, bool *recorded, struct k3_error *err) {
  const struct product product = {p->gate_up, p->in, p->gated, p->n_rows, p->gate_up->n_cols, p->width, 0, false, 1};
  struct k3_cuda_linear linear = {.bf16 = exec->backend->base.bf16};
  K3_TRY(k3_cuda_describe_matrix(p->gate_up, 0, &linear.w, err));
  *recorded =
      linear.w.n_rows == 2 * p->width && (uintptr_t)p->in % 16 == 0 && !fits_library(exec, &product, &linear.w) && k3_cuda_linear_can_gate(&linear);
  if (!*recorded)
    return K3_OK;
  K3_TRY(record_product(exec, &product, err));
  struct k3_cuda_linear *last = (struct k3_cuda_linear *)(exec->launches + exec->last_launch);
  last->n_outputs = (uint32_t)p->width;
  last->gated = true;
  return K3_OK;
}

static enum k3_status record_gate(struct k3_exec *exec, const struct k3_mlp *p, struct k3_error *err) {
  K3_TRY(record_rows(exec, p->gate_up, p->in, p->n_rows, p->gate_up_rows, err));
  RECORD(gate, exec, gate);
  gate->gate_up = p->gate_up_rows;
  gate->out = p->gated;
  gate->n_rows = (uint32_t)p->n_rows;
  gate->width = (uint32_t)p->width;
  gate->bf16 = exec->backend->base.bf16;
  return K3_OK;
}

enum k3_status k3_cuda_mlp(struct k3_exec *exec, const struct k3_mlp *p, struct k3_error *err) {
  bool recorded;
  K3_TRY(record_gated(exec, p, &recorded, err));
  if (!recorded)
    K3_TRY(record_gate(exec, p, err));
  return record_part(exec, p->down, p->gated, p->n_rows, p->out, p->reduce, p->partial, err);
}

// --- heads -----------------------------------------------------------------------------------------------------------------------------------------

enum k3_status k3_cuda_logits(struct k3_exec *exec, const struct k3_logits *p, struct k3_error *err) {
  if (!exec->peers || p->head->n_rows == p->vocab_size) {
    const struct product product = {p->head, p->hidden, p->out, p->n_rows, p->head->n_cols, p->vocab_size, 0, true, p->scale};
    return record_product(exec, &product, err);
  }
  const uint64_t offset = 2 * exec->half_nbytes;
  float *part = (float *)((char *)k3_cuda_peers_window(exec->peers) + offset);
  const struct product product = {p->head, p->hidden, part, p->n_rows, p->head->n_cols, p->head->n_rows, 0, true, 1};
  K3_TRY(record_product(exec, &product, err));
  const bool reach = !k3_cuda_peers_why_not(exec->peers);
  if (!reach) {
    // Of the largest batch, so that no address changes between graphs.
    const size_t nbytes = exec->options.max_requests * exec->options.block_width * p->vocab_size * sizeof(float);
    K3_TRY(k3_cuda_grow(&exec->gathered, &exec->gathered_nbytes, nbytes, err));
    RECORD(parts, exec, all_gather);
    parts->peers = exec->peers;
    parts->window_offset = offset;
    parts->n = p->n_rows * p->head->n_rows;
    parts->dst = exec->gathered;
  }
  RECORD(gather, exec, gather);
  gather->parts = reach ? NULL : exec->gathered;
  gather->peers = exec->peers;
  gather->window_offset = offset;
  gather->out = p->out;
  gather->n_rows = (uint32_t)p->n_rows;
  gather->part_width = (uint32_t)p->head->n_rows;
  gather->scale = p->scale;
  return K3_OK;
}

enum k3_status k3_cuda_markov(struct k3_exec *exec, const struct k3_markov *p, struct k3_error *err) {
  for (uint64_t k = 0; k < p->block_width; k++) {
    RECORD(slot, exec, markov);
    K3_TRY(k3_cuda_describe_matrix(p->w1, 0, &slot->w1, err));
    K3_TRY(k3_cuda_describe_matrix(p->w2, 0, &slot->w2, err));
    if (p->out_confidence) {
      K3_TRY(k3_cuda_describe_matrix(p->confidence, 0, &slot->confidence, err));
      k3_cuda_describe_vector(p->confidence_bias, &slot->confidence_bias);
    }
    slot->base_logits = p->base_logits;
    slot->anchor_ids = p->anchor_ids;
    slot->previous_ids = p->previous_ids;
    slot->hidden = p->hidden;
    slot->out_ids = p->out_ids;
    slot->out_confidence = p->out_confidence;
    slot->out_logits = p->out_logits;
    slot->out_row_nbytes = p->out_row_nbytes;
    slot->maxima = exec->maxima;
    slot->tickets = exec->tickets;
    slot->n_requests = (uint32_t)p->n_requests;
    slot->block_width = (uint32_t)p->block_width;
    slot->slot = (uint32_t)k;
    slot->vocab_size = (uint32_t)p->vocab_size;
    slot->rank = (uint32_t)p->rank;
    slot->hidden_size = (uint32_t)p->hidden_size;
    slot->scale = p->scale;
    slot->bf16 = exec->backend->base.bf16;
    slot->confidence_with_markov = p->confidence_with_markov;
  }
  return K3_OK;
}

enum k3_status k3_cuda_export(struct k3_exec *exec, const struct k3_export *p, struct k3_error *err) {
  RECORD(out, exec, export);
  out->in = p->in;
  out->out = p->out;
  out->out_row_nbytes = p->out_row_nbytes;
  out->n_rows = (uint32_t)p->n_rows;
  out->width = (uint32_t)p->width;
  out->in_is_bf16 = exec->backend->base.bf16 && !p->in_is_f32;
  return K3_OK;
}
