// Weights to the device: one arena, filled in the order of the image by two pinned buffers that take turns. While one is copied to the device,
// threads fill the other, so several reads are in flight and neither the disk nor the bus waits. A tensor is met only when its address is replaced.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/pool.h"
#include "runtime/cuda/cuda.h"

#if !defined(K3_CUDA_ITEM_NBYTES)
#define K3_CUDA_ITEM_NBYTES (4 << 20)  // the simulator takes less, so that small images turn the ring too
#endif

enum {
  ALIGNMENT = 256,        // of the arena; addresses keep their remainder
  MAX_GAP_NBYTES = 4096,  // pieces closer than that are read as one
  N_BUFFERS = 2,
  N_READERS = 4,
  ITEM_NBYTES = K3_CUDA_ITEM_NBYTES,  // one reader's work at a time
  ITEMS_PER_BUFFER = 4,
};

// Bytes that some weight uses: n_rows pieces of row_nbytes at a pitch, one piece when a rank takes whole rows. They stand without the pitch in the
// arena.
struct run {
  const unsigned char *begin;
  uint64_t row_nbytes, pitch, n_rows;
  uint64_t offset;  // in the arena
};

struct placing {
  struct k3_cuda_backend *backend;
  struct k3_weights *weights;
  struct run *runs;
  size_t n_runs, capacity;
  bool collecting;  // first pass: runs are added; second: addresses are replaced
  unsigned char *arena;
  struct k3_error *err;
};

static uint64_t run_nbytes(const struct run *run) {
  return run->row_nbytes * run->n_rows;
}

static enum k3_status add_run(struct placing *p, const void *begin, uint64_t row_nbytes, uint64_t pitch, uint64_t n_rows) {
  if (row_nbytes == pitch || n_rows == 1) {
    row_nbytes *= n_rows;
    pitch = row_nbytes;
    n_rows = 1;
  }
  K3_TRY(k3_grow(&p->runs, &p->capacity, p->n_runs + 1, sizeof *p->runs, p->err));
  p->runs[p->n_runs++] = (struct run){begin, row_nbytes, pitch, n_rows, 0};
  return K3_OK;
}

// Where bytes that were collected lie now.
static const void *moved(const struct placing *p, const void *address, uint64_t row_nbytes, uint64_t pitch, uint64_t n_rows) {
  const unsigned char *begin = address;
  size_t low = 0, high = p->n_runs;
  const bool strided = row_nbytes != pitch && n_rows > 1;
  while (high - low > 1) {  // the last run that begins at or before it
    size_t middle = low + (high - low) / 2;
    if (p->runs[middle].begin <= begin)
      low = middle;
    else
      high = middle;
  }
  // Runs of one beginning stand together: the strided one that was asked for, or the plain one that holds it.
  for (size_t i = low + 1; i-- > 0;) {
    const struct run *run = &p->runs[i];
    if (strided ? run->begin == begin && run->row_nbytes == row_nbytes && run->pitch == pitch
                : run->n_rows == 1 && run->begin <= begin && (uint64_t)(begin - run->begin) < run->row_nbytes)
      return p->arena + run->offset + (begin - run->begin);
  }
  return NULL;
}

// One parameter of a weight: collected, or replaced by where it lies now.
static enum k3_status visit(struct placing *p, const void **address, uint64_t row_nbytes, uint64_t pitch, uint64_t n_rows) {
  if (!*address || row_nbytes == 0 || n_rows == 0)
    return K3_OK;
  if (p->collecting)
    return add_run(p, *address, row_nbytes, pitch, n_rows);
  *address = moved(p, *address, row_nbytes, pitch, n_rows);
  return K3_OK;
}

static enum k3_status visit_vector(struct placing *p, struct k3_vector *vector) {
  const uint64_t nbytes = vector->n * k3_dtype_bits(vector->dtype) / 8;
  return visit(p, &vector->data, nbytes, nbytes, 1);
}

static bool is_on_device(const void *address) {
  struct cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, address) == cudaSuccess)
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  cudaGetLastError();
  return false;
}

// A rank that takes columns gets them without the others': code rows and scale rows are cut alike.
static enum k3_status visit_matrix(struct placing *p, struct k3_matrix *matrix) {
  for (unsigned i = 0; i < matrix->n_shards; i++) {
    struct k3_matrix_shard *shard = &matrix->shards[i];
    struct k3_quant_matrix *codes = &shard->codes;
    const struct k3_quant_scheme *scheme = &codes->scheme;
    if (p->collecting ? is_on_device(codes->weight)
                      : !moved(p, (const unsigned char *)codes->weight + k3_quant_row_nbytes(scheme, shard->first_col),
                               k3_quant_row_nbytes(scheme, matrix->n_cols), k3_quant_row_nbytes(scheme, codes->n_cols), shard->n_rows))
      continue;  // lent by the caller
    const uint64_t pitch = k3_quant_row_nbytes(scheme, codes->n_cols), row_nbytes = k3_quant_row_nbytes(scheme, matrix->n_cols);
    uint64_t scale_rows, scale_cols, part_rows, part_cols;
    k3_quant_scale_shape(scheme, shard->n_rows, codes->n_cols, &scale_rows, &scale_cols);
    k3_quant_scale_shape(scheme, shard->n_rows, matrix->n_cols, &part_rows, &part_cols);
    const uint64_t scale_nbytes = k3_dtype_bits(scheme->scale_dtype) / 8,
                   first_scale = scheme->block_cols ? shard->first_col / scheme->block_cols : 0;
    const void *weight = (const unsigned char *)codes->weight + k3_quant_row_nbytes(scheme, shard->first_col);
    const void *scale = codes->scale ? (const unsigned char *)codes->scale + first_scale * scale_nbytes : NULL;
    K3_TRY(visit(p, &weight, row_nbytes, pitch, shard->n_rows));
    K3_TRY(visit(p, &scale, part_cols * scale_nbytes, scale_cols * scale_nbytes, scale_rows));
    if (p->collecting)
      continue;
    codes->weight = weight;
    codes->scale = scale;
    codes->n_cols = matrix->n_cols;
    shard->first_col = 0;
  }
  return K3_OK;
}

// Every weight but context_kv, whose shards are the layers' own.
static enum k3_status visit_all(struct placing *p) {
  struct k3_weights *w = p->weights;
  const uint64_t n_layers = w->context_kv.n_shards, n_taps = w->tap_norms ? w->context_proj.n_cols / w->tap_norms[0].n : 0;
  struct k3_matrix *const matrices[] = {&w->embedding, &w->context_proj, &w->markov_w1, &w->markov_w2, &w->confidence, &w->head};
  struct k3_vector *const vectors[] = {&w->context_norm, &w->final_norm, &w->confidence_bias};
  for (size_t i = 0; i < sizeof matrices / sizeof matrices[0]; i++)
    K3_TRY(visit_matrix(p, matrices[i]));
  for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++)
    K3_TRY(visit_vector(p, vectors[i]));
  for (uint64_t i = 0; i < n_taps; i++)
    K3_TRY(visit_vector(p, &w->tap_norms[i]));
  for (uint64_t i = 0; i < n_layers; i++) {
    struct k3_layer_weights *layer = &w->layers[i];
    struct k3_matrix *const of_layer[] = {&layer->qkv_a, &layer->q_b, &layer->kv_b, &layer->o_proj, &layer->gate_up, &layer->down};
    struct k3_vector *const norms[] = {&layer->input_norm, &layer->q_a_norm, &layer->kv_a_norm, &layer->post_norm};
    for (size_t k = 0; k < sizeof of_layer / sizeof of_layer[0]; k++)
      K3_TRY(visit_matrix(p, of_layer[k]));
    for (size_t k = 0; k < sizeof norms / sizeof norms[0]; k++)
      K3_TRY(visit_vector(p, norms[k]));
  }
  return K3_OK;
}

static int compare_runs(const void *a, const void *b) {
  const struct run *x = a, *y = b;
  if (x->begin != y->begin)
    return x->begin < y->begin ? -1 : 1;
  return x->n_rows != y->n_rows ? (x->n_rows < y->n_rows ? -1 : 1) : 0;
}

// How far the next bytes may be away to be read along: within an image, whose gaps are readable too.
static uint64_t max_gap(const struct placing *p, const unsigned char *begin) {
  const struct k3_image *const images[] = {p->weights->source.image, p->weights->source.slices};
  for (size_t i = 0; i < sizeof images / sizeof images[0]; i++)
    if (images[i] && begin >= images[i]->bytes && begin < images[i]->bytes + images[i]->nbytes)
      return MAX_GAP_NBYTES;
  return 0;
}

// Sorted by address, neighbours made one, places in the arena given. Returns the arena's size.
static uint64_t lay_out(struct placing *p) {
  size_t n = 0;
  uint64_t offset = 0;
  qsort(p->runs, p->n_runs, sizeof *p->runs, compare_runs);
  for (size_t i = 0; i < p->n_runs; i++) {
    const struct run *run = &p->runs[i];
    struct run *last = n > 0 ? &p->runs[n - 1] : NULL;
    const unsigned char *end = run->begin + run->row_nbytes;
    if (last && last->n_rows == 1 && run->n_rows == 1 && run->begin <= last->begin + last->row_nbytes + max_gap(p, last->begin)) {
      if (end > last->begin + last->row_nbytes)
        last->row_nbytes = last->pitch = (uint64_t)(end - last->begin);
    } else if (!last || last->begin != run->begin || last->n_rows != run->n_rows || last->pitch != run->pitch) {
      p->runs[n++] = *run;
    }
  }
  p->n_runs = n;
  for (size_t i = 0; i < n; i++) {
    struct run *run = &p->runs[i];
    const uint64_t remainder = run->n_rows == 1 ? (uintptr_t)run->begin % ALIGNMENT : 0;
    offset = (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + remainder;
    run->offset = offset;
    offset += run_nbytes(run);
  }
  return offset;
}

// Part of a run: `nbytes` of its bytes without the pitch, from byte `first`.
struct item {
  const struct run *run;
  uint64_t first, nbytes;
  size_t at;  // in the buffer
};

struct filling {
  const struct placing *placing;
  atomic_bool *checked[2];  // segments of image and slices whose CRC-32 somebody checks or has checked; NULL where there is none
  atomic_uint n_reading, most_reading;
  struct item items[ITEMS_PER_BUFFER];
  unsigned n_items;
  unsigned char *buffer;
  struct k3_progress *progress;
};

// Brings pages in with one call where the kernel can; a fault per page costs more than the copy.
static void populate(const unsigned char *begin, uint64_t nbytes) {
#ifdef MADV_POPULATE_READ
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)begin & ~(page - 1);
  madvise((void *)from, (uintptr_t)begin + nbytes - from, MADV_POPULATE_READ);
#else
  (void)begin, (void)nbytes;
#endif
}

// Checks the segments that hold these bytes against their CRC-32, each once, when the bytes are of an image that has one.
static enum k3_status check_crc(const struct k3_image *image, atomic_bool *checked, const unsigned char *begin, uint64_t nbytes,
                                struct k3_error *err) {
  if (!checked || begin < image->bytes + image->body_begin || begin >= image->bytes + image->nbytes)
    return K3_OK;
  const uint64_t first = (uint64_t)(begin - image->bytes) - image->body_begin, body_nbytes = image->nbytes - image->body_begin;
  for (uint64_t i = first / K3_IMAGE_SEGMENT_NBYTES; i <= (first + nbytes - 1) / K3_IMAGE_SEGMENT_NBYTES && i < image->n_segments; i++) {
    if (atomic_exchange(&checked[i], true))
      continue;
    const uint64_t at = i * K3_IMAGE_SEGMENT_NBYTES, left = body_nbytes - at;
    const unsigned char *stored = image->crcs + 4 * i;
    const uint32_t expected = stored[0] | (uint32_t)stored[1] << 8 | (uint32_t)stored[2] << 16 | (uint32_t)stored[3] << 24;
    const uint32_t found = k3_crc32(image->bytes + image->body_begin + at, left < K3_IMAGE_SEGMENT_NBYTES ? left : K3_IMAGE_SEGMENT_NBYTES);
    if (found != expected)
      return k3_fail(err, K3_BAD_INPUT, K3_IMG02, NULL, NULL, "the bytes that convert has written", "segment %llu has CRC-32 %08x, %08x is stored",
                     (unsigned long long)i, found, expected);
  }
  return K3_OK;
}

static void begin_reading(struct filling *f) {
  const unsigned n = atomic_fetch_add(&f->n_reading, 1) + 1;
  for (unsigned most = atomic_load(&f->most_reading); n > most && !atomic_compare_exchange_weak(&f->most_reading, &most, n);)
    ;
}

static enum k3_status fill_item(void *ctx, int worker, uint64_t i, struct k3_error *err) {
  (void)worker;
  struct filling *f = ctx;
  const struct item *item = &f->items[i];
  const struct run *run = item->run;
  const struct k3_weights_source *source = &f->placing->weights->source;
  const uint64_t first_row = item->first / run->row_nbytes, last_row = (item->first + item->nbytes - 1) / run->row_nbytes;
  const unsigned char *begin = run->begin + first_row * run->pitch + (run->n_rows == 1 ? item->first : 0);
  const uint64_t span = run->n_rows == 1 ? item->nbytes : (last_row - first_row) * run->pitch + run->row_nbytes;
  begin_reading(f);
  populate(begin, span);
  K3_TRY(check_crc(source->image, f->checked[0], begin, span, err));
  K3_TRY(check_crc(source->slices, f->checked[1], begin, span, err));
  unsigned char *dst = f->buffer + item->at;
  for (uint64_t done = 0; done < item->nbytes;) {
    const uint64_t row = (item->first + done) / run->row_nbytes, in_row = (item->first + done) % run->row_nbytes;
    uint64_t n = run->row_nbytes - in_row;
    n = n < item->nbytes - done ? n : item->nbytes - done;
    memcpy(dst + done, run->begin + row * run->pitch + in_row, n);
    done += n;
  }
  k3_progress_add(f->progress, item->nbytes);
  atomic_fetch_sub(&f->n_reading, 1);
  return K3_OK;
}

struct ring {
  unsigned char *buffers[N_BUFFERS];
  cudaEvent_t copied[N_BUFFERS];
  struct k3_pool *pool;
};

static void close_ring(struct ring *ring) {
  for (int i = 0; i < N_BUFFERS; i++) {
    if (ring->copied[i])
      cudaEventDestroy(ring->copied[i]);
    cudaFreeHost(ring->buffers[i]);
  }
  k3_pool_free(ring->pool);
}

static enum k3_status open_ring(struct ring *ring, size_t buffer_nbytes, struct k3_error *err) {
  *ring = (struct ring){0};
  for (int i = 0; i < N_BUFFERS; i++) {
    K3_TRY(k3_cuda_check(cudaMallocHost((void **)&ring->buffers[i], buffer_nbytes), "taking pinned memory", err));
    K3_TRY(k3_cuda_check(cudaEventCreateWithFlags(&ring->copied[i], cudaEventDisableTiming), "creating an event", err));
  }
  ring->pool = k3_pool_create(N_READERS, err);
  return ring->pool ? K3_OK : K3_NO_MEMORY;
}

// The next items of the runs, as many as a buffer holds. False when there are none left.
static bool next_items(const struct placing *p, size_t *run, uint64_t *first, struct filling *f) {
  size_t at = 0;
  f->n_items = 0;
  while (*run < p->n_runs && f->n_items < ITEMS_PER_BUFFER) {
    const uint64_t left = run_nbytes(&p->runs[*run]) - *first;
    const uint64_t n = left < ITEM_NBYTES ? left : ITEM_NBYTES;
    f->items[f->n_items++] = (struct item){&p->runs[*run], *first, n, at};
    at += n;
    *first += n;
    if (*first == run_nbytes(&p->runs[*run])) {
      *first = 0;
      ++*run;
    }
  }
  return f->n_items > 0;
}

static enum k3_status turn_ring(struct filling *filling, struct ring *ring, struct k3_error *err) {
  const struct placing *p = filling->placing;
  size_t run = 0;
  uint64_t first = 0;
  for (unsigned turn = 0; next_items(p, &run, &first, filling); turn++) {
    const unsigned b = turn % N_BUFFERS;
    filling->buffer = ring->buffers[b];
    K3_TRY(k3_cuda_check(cudaEventSynchronize(ring->copied[b]), "waiting for a copy", err));
    K3_TRY(k3_pool_run(ring->pool, filling->n_items, fill_item, filling, err));
    for (unsigned i = 0; i < filling->n_items; i++) {
      const struct item *item = &filling->items[i];
      K3_TRY(k3_cuda_check(cudaMemcpyAsync(p->arena + item->run->offset + item->first, filling->buffer + item->at, item->nbytes,
                                           cudaMemcpyHostToDevice, p->backend->stream),
                           "copying weights", err));
    }
    K3_TRY(k3_cuda_check(cudaEventRecord(ring->copied[b], p->backend->stream), "recording an event", err));
  }
  return K3_OK;
}

static enum k3_status pump(struct placing *p, struct ring *ring, struct k3_progress *progress, unsigned *most_reading, struct k3_error *err) {
  struct filling filling = {.placing = p, .progress = progress};
  const struct k3_image *const images[] = {p->weights->source.image, p->weights->source.slices};
  enum k3_status status = K3_OK;
  for (int i = 0; i < 2 && status == K3_OK; i++) {
    if (!images[i] || !images[i]->crcs)
      continue;
    filling.checked[i] = k3_calloc(images[i]->n_segments, sizeof *filling.checked[i], err);
    status = filling.checked[i] ? K3_OK : K3_NO_MEMORY;
  }
  if (status == K3_OK)
    status = turn_ring(&filling, ring, err);
  // Also after a failure: the buffers are freed next.
  const enum k3_status copied = k3_cuda_check(cudaStreamSynchronize(p->backend->stream), "copying weights", status == K3_OK ? err : NULL);
  *most_reading = atomic_load(&filling.most_reading);
  k3_free(filling.checked[0]);
  k3_free(filling.checked[1]);
  return status == K3_OK ? copied : status;
}

enum k3_status k3_cuda_place(struct k3_backend *base, struct k3_weights *weights, struct k3_progress *progress, struct k3_load *load,
                             struct k3_error *err) {
  struct placing p = {.backend = (struct k3_cuda_backend *)base, .weights = weights, .collecting = true, .err = err};
  struct ring ring = {0};
  void *arena = NULL;
  K3_TRY(k3_cuda_use(p.backend, err));
  enum k3_status status = k3_grow(&p.backend->arenas, &p.backend->arenas_capacity, p.backend->n_arenas + 1, sizeof *p.backend->arenas, err);
  K3_TRY_GOTO(status, out, status);
  K3_TRY_GOTO(status, out, visit_all(&p));
  const uint64_t nbytes = lay_out(&p);
  K3_TRY_GOTO(status, out, k3_cuda_alloc(nbytes, &arena, err));
  p.backend->arenas[p.backend->n_arenas++] = arena;
  p.arena = arena;
  const uint64_t whole = (uint64_t)ITEM_NBYTES * ITEMS_PER_BUFFER;
  K3_TRY_GOTO(status, out, open_ring(&ring, nbytes < whole ? nbytes + 1 : whole, err));
  k3_progress_start(progress, "loading weights", nbytes);
  K3_TRY_GOTO(status, out, pump(&p, &ring, progress, &load->most_reads, err));
  k3_progress_finish(progress);
  load->nbytes = nbytes;
  p.collecting = false;
  status = visit_all(&p);
out:
  close_ring(&ring);
  k3_free(p.runs);
  return status;
}
