// The bytes of encoded tensors, and what encoding cost.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "loader/requantise_parts.h"
#include "quant/decode.h"
#include "quant/encode.h"

enum { DECODED_ELEMS = 4096 };

struct job {
  const struct k3_requant *requant;
  const struct k3_requant_item *item;
  uint64_t elem_nbytes;
  unsigned char *src;     // [K3_REQUANT_CHUNK_ELEMS] in the source's dtype
  unsigned char *codes;   // [K3_REQUANT_CHUNK_ELEMS] bytes
  unsigned char *scales;  // [K3_REQUANT_CHUNK_ELEMS / 16]
};

// Encodes the chunk in job->src: elements at .. at + n - 1 of the weight.
static void encode_chunk(const struct job *job, uint64_t at, uint64_t n) {
  const struct k3_requant_item *item = job->item;
  enum k3_dtype dtype = (enum k3_dtype)item->src_dtype;
  switch (job->requant->scheme.scheme) {
    case K3_SCHEME_NVFP4:
      k3_quant_encode_nvfp4(K3_NVFP4_COMPRESSED_TENSORS, item->second, dtype, job->src, (size_t)n / 16, job->scales, job->codes);
      break;
    case K3_SCHEME_MXFP4: k3_quant_encode_mxfp4(K3_MX_DEFAULT, dtype, job->src, (size_t)n / 32, job->scales, job->codes); break;
    case K3_SCHEME_MXFP8: k3_quant_encode_mxfp8(K3_MX_DEFAULT, dtype, job->src, (size_t)n / 32, job->scales, job->codes); break;
    default:
      for (uint64_t done = 0, n_run; done < n; done += n_run) {
        uint64_t region;
        n_run = k3_requant_run(job->requant, item, at + done, &region);
        n_run = n_run < n - done ? n_run : n - done;
        k3_quant_encode_e4m3(dtype, job->src + done * job->elem_nbytes, (size_t)n_run, item->scales[region], job->codes + done);
      }
  }
}

// Adds elements [from, to) of the chunk at `at` with n elements to the statistics.
static void measure_chunk(const struct job *job, uint64_t at, uint64_t n, uint64_t from, uint64_t to, struct k3_requant_part *part) {
  const struct k3_requant_item *item = job->item;
  enum k3_dtype dtype = (enum k3_dtype)item->src_dtype;
  bool nvfp4 = job->requant->scheme.scheme == K3_SCHEME_NVFP4;
  struct k3_quant_matrix matrix = {.scheme = job->requant->scheme, .n_rows = 1, .n_cols = n, .weight = job->codes, .scale = job->scales};
  if (item->scales)
    matrix.scheme = k3_quant_scheme_default(K3_SCHEME_FP8_TENSOR);
  float decoded[DECODED_ELEMS];
  for (uint64_t done = from, n_run; done < to; done += n_run) {
    uint64_t region;
    n_run = k3_requant_run(job->requant, item, at + done, &region);
    n_run = n_run < to - done ? n_run : to - done;
    n_run = n_run < DECODED_ELEMS ? n_run : DECODED_ELEMS;
    if (item->scales)
      matrix.scale = &item->scales[region];
    k3_quant_decode_row(&matrix, 0, done, (size_t)n_run, nvfp4 ? &item->second : NULL, decoded);
    k3_snr_add(&part->snr, dtype, job->src + done * job->elem_nbytes, decoded, (size_t)n_run);
  }
  if (nvfp4) {
    uint64_t first = (from + 15) / 16, end = (to + 15) / 16;
    const unsigned char *blocks = job->src + first * 16 * job->elem_nbytes;
    k3_nvfp4_window_add(&part->window, item->set_amax, dtype, blocks, (size_t)(end - first));
    if (item->amax != item->set_amax)
      k3_nvfp4_window_add(&part->own_window, item->amax, dtype, blocks, (size_t)(end - first));
  }
}

// Bytes [offset, offset + nbytes) of a list of F32, little-endian.
static void copy_floats(const float *values, uint64_t offset, uint64_t nbytes, unsigned char *dst) {
  while (nbytes > 0) {
    unsigned char bytes[4];
    uint64_t in_value = offset % 4, n = 4 - in_value < nbytes ? 4 - in_value : nbytes;
    k3_quant_store_float(K3_DTYPE_F32, bytes, 0, values[offset / 4]);
    memcpy(dst, bytes + in_value, (size_t)n);
    offset += n;
    dst += n;
    nbytes -= n;
  }
}

static enum k3_status add_part(struct k3_requant *requant, const struct k3_requant_part *part, struct k3_error *err) {
  pthread_mutex_lock(&requant->mutex);
  enum k3_status status = k3_grow(&requant->parts, &requant->parts_capacity, requant->n_parts + 1, sizeof *requant->parts, err);
  if (status == K3_OK)
    requant->parts[requant->n_parts++] = *part;
  pthread_mutex_unlock(&requant->mutex);
  return status;
}

static enum k3_status read_chunk(const struct k3_plan *plan, const struct job *job, uint64_t at, uint64_t n, bool last_use, struct k3_error *err) {
  const struct k3_ckpt *ckpt = k3_requant_ckpt(plan, job->item);
  const struct k3_ckpt_file *file = k3_ckpt_file_of(ckpt, job->item->tensor);
  K3_TRY(k3_ckpt_read(ckpt, job->item->tensor, at * job->elem_nbytes, job->src, (size_t)(n * job->elem_nbytes), err));
  if (plan->huge && last_use)
    k3_drop_cache(file->fd, file->header.data_begin + k3_ckpt_tensor(ckpt, job->item->tensor)->begin + at * job->elem_nbytes, n * job->elem_nbytes,
                  false);
  return K3_OK;
}

enum k3_status k3_requant_encode(const struct k3_plan *plan, size_t number, enum k3_param param, uint64_t offset, uint64_t nbytes, void *dst,
                                 struct k3_error *err) {
  struct k3_requant *requant = plan->requant;
  const struct k3_requant_item *item = &requant->items[number];
  bool codes = param == K3_PARAM_WEIGHT || param == K3_PARAM_WEIGHT_PACKED;
  if (param == K3_PARAM_WEIGHT_GLOBAL_SCALE || (!codes && item->scales)) {
    copy_floats(param == K3_PARAM_WEIGHT_GLOBAL_SCALE ? &item->second : item->scales, offset, nbytes, dst);
    return K3_OK;
  }
  // Blocks never cross a row's end, so the weight is one run of them.
  uint64_t block = item->scales ? 1 : requant->scheme.block_cols, elems_per_byte = !codes ? block : param == K3_PARAM_WEIGHT_PACKED ? 2 : 1;
  uint64_t begin = offset * elems_per_byte, end = (offset + nbytes) * elems_per_byte;
  struct job job = {.requant = requant, .item = item, .elem_nbytes = k3_dtype_bits((enum k3_dtype)item->src_dtype) / 8};
  struct k3_requant_part part = {.item = number, .first_elem = begin};
  job.src = k3_alloc_aligned(K3_REQUANT_CHUNK_ELEMS * (job.elem_nbytes + 1) + K3_REQUANT_CHUNK_ELEMS / 16, 4096, err);
  if (!job.src)
    return K3_NO_MEMORY;
  job.codes = job.src + K3_REQUANT_CHUNK_ELEMS * job.elem_nbytes;
  job.scales = job.codes + K3_REQUANT_CHUNK_ELEMS;
  enum k3_status status = K3_OK;
  for (uint64_t at = begin / block * block, n; status == K3_OK && at < end; at += n) {
    n = (end - at + block - 1) / block * block;
    n = n < K3_REQUANT_CHUNK_ELEMS ? n : K3_REQUANT_CHUNK_ELEMS;
    K3_TRY_GOTO(status, out, read_chunk(plan, &job, at, n, !codes || item->scales, err));
    if (codes && !item->scales && !requant->allow_nonfinite && !isfinite(k3_quant_amax((enum k3_dtype)item->src_dtype, job.src, (size_t)n))) {
      const struct k3_ckpt *ckpt = k3_requant_ckpt(plan, item);
      status = k3_fail(err, K3_BAD_INPUT, K3_VAL02, k3_ckpt_file_of(ckpt, item->tensor)->path, k3_ckpt_tensor(ckpt, item->tensor)->name,
                       "finite weights: a NaN or Inf spoils the scale it shares (--allow VAL02)", "NaN or Inf in a weight that is to be encoded");
      goto out;
    }
    encode_chunk(&job, at, n);
    uint64_t from = begin > at ? begin - at : 0, to = end - at < n ? end - at : n;
    memcpy((unsigned char *)dst + (at + from - begin) / elems_per_byte, (codes ? job.codes : job.scales) + from / elems_per_byte,
           (size_t)((to - from) / elems_per_byte));
    if (requant->collecting && codes)
      measure_chunk(&job, at, n, from, to, &part);
  }
  if (requant->collecting && codes && nbytes > 0)
    status = add_part(requant, &part, err);
out:
  k3_free(job.src);
  return status;
}

// ---- the account ----

static int compare_parts(const void *left, const void *right) {
  const struct k3_requant_part *a = left, *b = right;
  if (a->item != b->item)
    return a->item < b->item ? -1 : 1;
  return (a->first_elem > b->first_elem) - (a->first_elem < b->first_elem);
}

static uint64_t n_outside(const struct k3_nvfp4_window *window) {
  return window->n_subnormal + window->n_lowest + window->n_lost;
}

// Warnings: here is the last chance to choose otherwise, whatever engine the image is for.
static void report_window(const struct k3_plan *plan, const struct k3_requant_item *item, struct k3_findings *findings) {
  const struct k3_nvfp4_window *window = &item->window;
  uint64_t n = n_outside(window), n_own = n_outside(&item->own_window);
  const struct k3_ckpt *ckpt = k3_requant_ckpt(plan, item);
  const char *path = k3_ckpt_file_of(ckpt, item->tensor)->path, *name = k3_ckpt_tensor(ckpt, item->tensor)->name;
  double ratio = (double)item->set_amax / (double)window->smallest_amax;
  struct k3_error warning = {0};
  if (n > n_own)
    k3_fail(&warning, K3_BAD_INPUT, K3_FUS09, path, name,
            "blocks within 28672 of the largest weight that shares the scale (--share module shares less; --ignore leaves weights out)",
            "the shared second scale leaves %llu of %llu blocks subnormal (%llu of them lost; with its own scale %llu), worst ratio %.4g",
            (unsigned long long)n, (unsigned long long)window->n_blocks, (unsigned long long)window->n_lost, (unsigned long long)n_own, ratio);
  else if (n > 0)
    k3_fail(&warning, K3_BAD_INPUT, K3_SCL10, path, name, "blocks within 28672 of the tensor's largest weight",
            "%llu of %llu blocks get a subnormal scale (%llu of them are lost), worst ratio %.4g", (unsigned long long)n,
            (unsigned long long)window->n_blocks, (unsigned long long)window->n_lost, ratio);
  if (n > 0)
    k3_findings_add(findings, K3_WARNING, &warning);
}

void k3_requant_finish(struct k3_plan *plan, struct k3_findings *findings) {
  struct k3_requant *requant = plan->requant;
  if (requant->n_parts > 1)
    qsort(requant->parts, requant->n_parts, sizeof *requant->parts, compare_parts);
  for (size_t i = 0; i < requant->n_parts; i++) {
    const struct k3_requant_part *part = &requant->parts[i];
    struct k3_requant_item *item = &requant->items[part->item];
    k3_snr_merge(&item->snr, &part->snr);
    k3_nvfp4_window_merge(&item->window, &part->window);
    k3_nvfp4_window_merge(&item->own_window, item->amax != item->set_amax ? &part->own_window : &part->window);
  }
  for (size_t i = 0; i < requant->n_items; i++)
    report_window(plan, &requant->items[i], findings);
  requant->n_parts = 0;
}
