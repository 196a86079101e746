// Writes a synthetic checkpoint: lays the tensors out in files, writes the headers, then every 4 MiB of weights as one unit of work.
#include "loader/synth.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/file.h"
#include "base/pool.h"
#include "formats/json_write.h"
#include "formats/safetensors.h"
#include "loader/old_weights.h"
#include "loader/synth_moe.h"

enum { CHUNK_NBYTES = 4 << 20, MAX_SHARDS = 99999 };

#define INDEX_NAME "model.safetensors.index.json"
#define HF_QUANT_NAME "hf_quant_config.json"

struct shard {
  char name[64];
  struct k3_synth_tensor **tensors;  // [n_tensors], in the order of their bytes
  size_t n_tensors;
  uint64_t data_begin, data_nbytes;
  uint64_t first_chunk;
  struct k3_output output;
};

struct job {
  const char *folder;
  const struct k3_synth_options *options;
  const struct k3_synth_preset *preset;
  struct k3_synth_list list;
  struct k3_synth_tensor **order;  // [n_tensors], shard after shard
  struct shard *shards;            // [n_shards]
  uint64_t n_shards, n_chunks;
  struct k3_output index, config, hf_quant;
  struct k3_synth_normal *normal;
  unsigned char *scratch;  // [n_threads, CHUNK_NBYTES]
};

static int by_width_then_name(const void *a, const void *b) {
  const struct k3_synth_tensor *x = *(struct k3_synth_tensor *const *)a, *y = *(struct k3_synth_tensor *const *)b;
  int difference = (int)k3_dtype_bits(y->dtype) - (int)k3_dtype_bits(x->dtype);
  return difference ? difference : strcmp(x->name, y->name);
}

static int by_shard(const void *a, const void *b) {
  const struct k3_synth_tensor *x = *(struct k3_synth_tensor *const *)a, *y = *(struct k3_synth_tensor *const *)b;
  return x->shard != y->shard ? (x->shard < y->shard ? -1 : 1) : by_width_then_name(a, b);
}

// Shards take the tensors in the order of their names, about equally many bytes each, or as the model places them; within a shard wide elements come
// first, as the reference writer has it.
static enum k3_status lay_out(struct job *job, struct k3_error *err) {
  struct k3_synth_list *list = &job->list;
  uint64_t n_shards = job->options->n_shards ? job->options->n_shards : job->preset->n_shards, total = 0;
  if (n_shards > list->n_tensors || n_shards > MAX_SHARDS)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "no more than there are tensors, at most 99999", "%llu shards for %zu tensors",
                   (unsigned long long)n_shards, list->n_tensors);
  job->order = k3_calloc(list->n_tensors, sizeof *job->order, err);
  job->shards = k3_calloc(n_shards, sizeof *job->shards, err);
  if (!job->order || !job->shards)
    return K3_NO_MEMORY;
  job->n_shards = n_shards;
  for (uint64_t s = 0; s < n_shards; s++)
    job->shards[s].output.fd = -1;
  for (size_t i = 0; i < list->n_tensors; i++) {
    job->order[i] = &list->tensors[i];
    if (!k3_add_u64(total, list->tensors[i].nbytes, &total))
      return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, job->preset->name, NULL, "the tensors have more than 2^64 bytes");
  }
  size_t next = 0;
  bool placed = job->preset->moe && job->preset->moe->places && n_shards == job->preset->n_shards;
  if (placed)
    qsort(job->order, list->n_tensors, sizeof *job->order, by_shard);
  for (uint64_t s = 0; s < n_shards; s++) {
    struct shard *shard = &job->shards[s];
    if (n_shards == 1)
      snprintf(shard->name, sizeof shard->name, "model.safetensors");
    else
      snprintf(shard->name, sizeof shard->name, "model-%05llu-of-%0*llu.safetensors", (unsigned long long)s + 1,
               job->preset->moe ? job->preset->moe->n_count_digits : 5, (unsigned long long)n_shards);
    shard->tensors = job->order + next;
    uint64_t wanted = total / (n_shards - s), n_left = n_shards - s - 1;
    while (placed && next < list->n_tensors && job->order[next]->shard == s) {
      shard->data_nbytes += job->order[next++]->nbytes;
      shard->n_tensors++;
    }
    while (!placed && next < list->n_tensors - n_left && (n_left == 0 || shard->n_tensors == 0 || shard->data_nbytes + job->order[next]->nbytes / 2 < wanted)) {
      job->order[next]->shard = s;
      shard->data_nbytes += job->order[next++]->nbytes;
      shard->n_tensors++;
    }
    total -= shard->data_nbytes;
    qsort(shard->tensors, shard->n_tensors, sizeof *shard->tensors, by_width_then_name);
    uint64_t begin = 0;
    for (size_t i = 0; i < shard->n_tensors; i++) {
      shard->tensors[i]->begin = begin;
      begin += shard->tensors[i]->nbytes;
    }
    shard->first_chunk = job->n_chunks;
    job->n_chunks += k3_ceil_div_u64(shard->data_nbytes, CHUNK_NBYTES);
  }
  return K3_OK;
}

// Where a header or an index goes as it is made.
struct file_sink {
  const struct k3_output *output;
  uint64_t offset;
};

static enum k3_status write_piece(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct file_sink *sink = ctx;
  K3_TRY(k3_pwrite_full(sink->output->fd, bytes, nbytes, sink->offset, sink->output->temp_path, err));
  sink->offset += nbytes;
  return K3_OK;
}

// Header of a shard: counted with sink NULL, written with one. Padded so that the data begins at a multiple of 8.
static enum k3_status put_header(const struct job *job, const struct shard *shard, struct file_sink *sink, uint64_t padded, uint64_t *h,
                                 struct k3_error *err) {
  struct k3_st_writer writer;
  k3_st_write_begin(&writer, sink ? write_piece : NULL, sink);
  if (job->preset->meta_key)
    K3_TRY(k3_st_write_metadata(&writer, job->preset->meta_key, job->preset->meta_value, err));
  for (size_t i = 0; i < shard->n_tensors; i++) {
    const struct k3_synth_tensor *t = shard->tensors[i];
    K3_TRY(k3_st_write_tensor(&writer, t->name, t->dtype, t->shape, t->rank, t->begin, t->begin + t->nbytes, err));
  }
  return k3_st_write_end(&writer, padded, h, err);
}

static enum k3_status begin_shard(const struct job *job, struct shard *shard, bool sparse, struct k3_error *err) {
  uint64_t h = 0, padded;
  K3_TRY(put_header(job, shard, NULL, 0, &h, err));
  k3_round_up_u64(h, 8, &padded);  // h is at most 10^8
  shard->data_begin = K3_ST_PREFIX_NBYTES + padded;
  char *path = k3_path_join(job->folder, shard->name, err);
  enum k3_status status = path ? k3_output_create(&shard->output, path, job->options->replace, err) : K3_NO_MEMORY;
  k3_free(path);
  K3_TRY(status);
  uint64_t nbytes = shard->data_begin + shard->data_nbytes;
  if (!sparse)
    K3_TRY(k3_output_reserve(&shard->output, nbytes, err));
  else if (ftruncate(shard->output.fd, (off_t)nbytes) != 0)
    return k3_fail_errno(err, errno, shard->output.temp_path, "cannot set the size of");
  unsigned char prefix[K3_ST_PREFIX_NBYTES];
  for (int i = 0; i < K3_ST_PREFIX_NBYTES; i++)
    prefix[i] = (unsigned char)(padded >> 8 * i);
  struct file_sink sink = {&shard->output, 0};
  K3_TRY(write_piece(&sink, prefix, sizeof prefix, err));
  return put_header(job, shard, &sink, padded, &h, err);
}

// One chunk of one shard's data: the parts of the tensors that lie in it.
static enum k3_status write_chunk(void *ctx, int worker, uint64_t item, struct k3_error *err) {
  const struct job *job = ctx;
  size_t low = 0, high = job->n_shards;  // last shard whose first chunk is <= item; a shard has at least one byte, so at least one chunk
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (job->shards[middle].first_chunk <= item)
      low = middle;
    else
      high = middle;
  }
  const struct shard *shard = &job->shards[low];
  uint64_t begin = (item - shard->first_chunk) * CHUNK_NBYTES, end = begin + CHUNK_NBYTES;
  end = end < shard->data_nbytes ? end : shard->data_nbytes;
  low = 0, high = shard->n_tensors;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (shard->tensors[middle]->begin <= begin)
      low = middle;
    else
      high = middle;
  }
  unsigned char *scratch = job->scratch + (size_t)worker * CHUNK_NBYTES;
  for (uint64_t at = begin; at < end; low++) {
    const struct k3_synth_tensor *t = shard->tensors[low];
    uint64_t stop = t->begin + t->nbytes < end ? t->begin + t->nbytes : end;
    if (t->matrix)
      K3_TRY(k3_synth_quant_values(job->normal, t, job->options->seed, at - t->begin, scratch + (at - begin), stop - at, err));
    else
      k3_synth_values(job->normal, t, job->options->seed, at - t->begin, scratch + (at - begin), stop - at);
    at = stop;
  }
  K3_TRY(k3_pwrite_full(shard->output.fd, scratch, end - begin, shard->data_begin + begin, shard->output.temp_path, err));
  k3_progress_add(job->options->progress, end - begin);
  return K3_OK;
}

static enum k3_status write_weights(struct job *job, struct k3_error *err) {
  uint64_t total = 0;
  for (uint64_t s = 0; s < job->n_shards; s++)
    total += job->shards[s].data_nbytes;
  struct k3_pool *pool = k3_pool_create(job->options->n_threads, err);
  if (!pool)
    return err && err->status ? err->status : K3_NO_MEMORY;
  enum k3_status status = K3_NO_MEMORY;
  job->normal = k3_alloc_aligned(sizeof *job->normal, 64, err);
  job->scratch = k3_alloc_aligned((size_t)k3_pool_n_threads(pool) * CHUNK_NBYTES, 4096, err);
  if (job->normal && job->scratch) {
    k3_synth_normal_make(job->normal);
    status = k3_synth_measure(&job->list, job->normal, job->options, pool, err);
    k3_progress_start(job->options->progress, "writing", total);
    if (status == K3_OK)
      status = k3_pool_run(pool, job->n_chunks, write_chunk, job, err);
    k3_progress_finish(job->options->progress);
  }
  k3_pool_free(pool);
  return status;
}

static enum k3_status text_file(struct job *job, const char *name, struct k3_output *output, const void *text, size_t nbytes, struct k3_error *err) {
  char *path = k3_path_join(job->folder, name, err);
  enum k3_status status = path ? k3_output_create(output, path, job->options->replace, err) : K3_NO_MEMORY;
  k3_free(path);
  K3_TRY(status);
  return k3_pwrite_full(output->fd, text, nbytes, 0, output->temp_path, err);
}

static enum k3_status write_index(struct job *job, struct k3_error *err) {
  uint64_t total = 0;
  for (uint64_t s = 0; s < job->n_shards; s++)
    total += job->shards[s].data_nbytes;
  K3_TRY(text_file(job, INDEX_NAME, &job->index, "", 0, err));
  struct file_sink sink = {&job->index, 0};
  struct k3_jsonw json;
  k3_jsonw_open(&json, true, write_piece, &sink);
  k3_jsonw_begin_object(&json, NULL);
  k3_jsonw_begin_object(&json, "metadata");
  k3_jsonw_u64(&json, "total_size", total);
  k3_jsonw_end_object(&json);
  k3_jsonw_begin_object(&json, "weight_map");
  for (size_t i = 0; i < job->list.n_tensors; i++)
    k3_jsonw_string(&json, job->list.tensors[i].name, job->shards[job->list.tensors[i].shard].name);
  k3_jsonw_end_object(&json);
  k3_jsonw_end_object(&json);
  enum k3_status status = k3_jsonw_finish(&json, err);
  k3_jsonw_close(&json);
  return status;
}

// The outputs in the order of their names' appearance, those that say what is there last; together with old_weights.h this makes two checkpoints never one.
static enum k3_status give_names(struct job *job, struct k3_error *err) {
  struct k3_output **outputs = k3_calloc(job->n_shards + 3, sizeof *outputs, err);
  struct k3_names names = {0};
  size_t n = 0;
  if (!outputs)
    return K3_NO_MEMORY;
  for (uint64_t s = 0; s < job->n_shards; s++)
    outputs[n++] = &job->shards[s].output;
  struct k3_output *const others[] = {&job->index, &job->hf_quant, &job->config};
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    if (others[i]->fd >= 0)
      outputs[n++] = others[i];
  }
  enum k3_status status = K3_OK;
  for (size_t i = 0; i < n && status == K3_OK; i++) {
    const char *name = k3_path_base(outputs[i]->final_path);
    status = k3_names_add(&names, name, strlen(name), err);
  }
  k3_names_sort(&names);
  if (status == K3_OK)
    status = k3_outputs_commit(outputs, n, err);
  if (status == K3_OK && job->options->replace)
    status = k3_old_weights_remove(job->folder, &names, err);
  k3_names_free(&names);
  k3_free(outputs);
  return status;
}

static enum k3_status write_all(struct job *job, struct k3_error *err) {
  bool sparse = job->options->sparse || job->preset->sparse;
  for (uint64_t s = 0; s < job->n_shards; s++)
    K3_TRY(begin_shard(job, &job->shards[s], sparse, err));
  if (job->n_shards > 1)
    K3_TRY(write_index(job, err));
  char *config = k3_synth_config(job->preset, job->options->dtype, err), *hf_quant = NULL;
  if (config && job->list.matrices)
    config = k3_synth_quant_config(config, &job->list, job->options, &hf_quant, err);
  if (!config)
    return K3_NO_MEMORY;
  enum k3_status status = text_file(job, "config.json", &job->config, config, strlen(config), err);
  if (status == K3_OK && hf_quant)
    status = text_file(job, HF_QUANT_NAME, &job->hf_quant, hf_quant, strlen(hf_quant), err);
  k3_free(hf_quant);
  k3_free(config);
  K3_TRY(status);
  if (!sparse)
    K3_TRY(write_weights(job, err));
  return give_names(job, err);
}

static void fill_report(const struct job *job, struct k3_synth_report *report) {
  *report = (struct k3_synth_report){.n_files = job->n_shards, .n_tensors = job->list.n_tensors};
  for (size_t i = 0; i < job->list.n_tensors; i++)
    report->n_params += job->list.tensors[i].n_elems;
  for (uint64_t s = 0; s < job->n_shards; s++) {
    report->weights_nbytes += job->shards[s].data_nbytes;
    report->files_nbytes += job->shards[s].data_begin + job->shards[s].data_nbytes;
  }
}

static enum k3_status unknown_preset(const char *name, struct k3_error *err) {
  char names[240] = "";
  size_t n = 0;
  const char *known;
  for (size_t i = 0; (known = k3_synth_preset_name(i, NULL)) && n + strlen(known) + 2 < sizeof names; i++)
    n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i ? ", " : "", known);
  return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, names, "there is no preset \"%s\"; `k3pack synth` lists them all, such as these", name);
}

// The mixtures of experts come in the forms in which they are published, each a preset of its own.
static enum k3_status no_such_form(const struct k3_synth_preset *preset, const char *scheme, struct k3_error *err) {
  char names[384] = "";
  size_t n = 0;
  for (size_t i = 0; i < K3_SYNTH_N_MOE_PRESETS && n < sizeof names; i++) {
    const struct k3_synth_preset *other = &K3_SYNTH_MOE_PRESETS[i];
    if (other->moe->family == preset->moe->family && other->sparse == preset->sparse)
      n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", other->name);
  }
  return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, names, "there is no --quant %s of %s: its published forms are presets", scheme,
                 preset->name);
}

enum k3_status k3_synth_write(const char *folder, const struct k3_synth_options *options, struct k3_synth_report *report, struct k3_error *err) {
  struct job job = {.folder = folder, .options = options, .preset = k3_synth_preset_find(options->preset), .index.fd = -1, .config.fd = -1, .hf_quant.fd = -1};
  if (!job.preset)
    return unknown_preset(options->preset, err);
  if (job.preset->moe && !k3_scheme_is_plain(options->scheme))
    return no_such_form(job.preset, k3_scheme_name(options->scheme), err);
  if (options->dtype != K3_DTYPE_BF16 && options->dtype != K3_DTYPE_F16 && options->dtype != K3_DTYPE_F32)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "BF16, F16, F32", "weights of dtype %s", k3_dtype_name(options->dtype));
  struct stat st;
  bool folder_is_new = stat(folder, &st) != 0;
  enum k3_status status;
  K3_TRY_GOTO(status, out, k3_synth_list_make(job.preset, options->root, options->dtype, &job.list, err));
  for (size_t i = 0; i < job.list.n_tensors; i++)
    job.list.tensors[i].gain = options->spread || !k3_scheme_is_plain(options->scheme) ? k3_synth_gain(job.list.tensors[i].key) : 1;
  if (!k3_scheme_is_plain(options->scheme))
    K3_TRY_GOTO(status, out, k3_synth_quantise(&job.list, options, err));
  K3_TRY_GOTO(status, out, lay_out(&job, err));
  K3_TRY_GOTO(status, out, k3_old_weights_refuse(folder, options->replace, &(struct k3_names){0}, err));
  K3_TRY_GOTO(status, out, k3_make_folder(folder, err));
  K3_TRY_GOTO(status, out, write_all(&job, err));
  if (report)
    fill_report(&job, report);
out:
  for (uint64_t s = 0; s < job.n_shards; s++)
    k3_output_abort(&job.shards[s].output);
  k3_output_abort(&job.index);
  k3_output_abort(&job.config);
  k3_output_abort(&job.hf_quant);
  if (status != K3_OK && folder_is_new)
    rmdir(folder);
  k3_free(job.scratch);
  k3_free(job.normal);
  k3_free(job.shards);
  k3_free(job.order);
  k3_synth_list_free(&job.list);
  return status;
}
