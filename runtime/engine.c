#include "runtime/engine.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/hash.h"
#include "runtime/cuda_loader.h"

static enum k3_status check_options(const struct k3_engine_options *options, struct k3_error *err) {
  if (options->backend && strcmp(options->backend, "cpu") != 0 && strcmp(options->backend, "cuda") != 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "cpu or cuda", "there is no backend \"%s\"", options->backend);
  const int size = options->tp_size > 0 ? options->tp_size : 1, comm_size = options->comm ? options->comm->size : 1;
  const int comm_rank = options->comm ? options->comm->rank : 0;
  if (options->tp_size < 0 || options->tp_rank < 0 || options->tp_rank >= size || size != comm_size || options->tp_rank != comm_rank)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a rank below the size, and a communicator of the same",
                   "rank %d of %d with a communicator for rank %d of %d", options->tp_rank, options->tp_size, comm_rank, comm_size);
  return K3_OK;
}

static enum k3_status check_digests(const struct k3_image *image, struct k3_progress *progress, struct k3_error *err) {
  k3_progress_start(progress, "checking digests", image->nbytes - image->body_begin);
  for (uint64_t i = 0; i < image->n_segments; i++) {
    enum k3_status status = k3_image_check_segment(image, i, err);
    if (status != K3_OK)  // a difference is bad input here: the engine was asked to run it
      return status == K3_DIFFERENT ? K3_BAD_INPUT : status;
    k3_progress_add(progress, K3_IMAGE_SEGMENT_NBYTES);
  }
  k3_progress_finish(progress);
  return K3_OK;
}

static enum k3_status prepare_rope(struct k3_engine *engine, struct k3_error *err) {
  const struct k3_dspark_model *m = &engine->model;
  const uint64_t n_pairs = m->qk_rope_head_dim / 2;
  float *host = k3_calloc(n_pairs, sizeof *host, err);
  void *memory = NULL;
  enum k3_status status = host ? engine->backend->ops->alloc(engine->backend, n_pairs * sizeof *host, &memory, err) : K3_NO_MEMORY;
  if (status == K3_OK) {
    engine->inv_freq = memory;
    for (uint64_t i = 0; i < n_pairs; i++)
      host[i] = (float)k3_rope_inv_freq(&m->rope, m->qk_rope_head_dim, i);
    status = engine->backend->ops->upload(engine->backend, memory, host, n_pairs * sizeof *host, err);
  }
  k3_free(host);
  engine->rope = (struct k3_rope_table){engine->inv_freq, n_pairs, (float)k3_rope_amplitude(&m->rope)};
  engine->softmax_scale = (float)k3_rope_softmax_scale(&m->rope, m->qk_nope_head_dim + m->qk_rope_head_dim);
  return status;
}

// Whether one of the engine's images has a module.
static bool module_exists(void *ctx, const char *module) {
  const struct k3_engine *engine = ctx;
  const struct k3_image *images[] = {engine->image, engine->slices.bytes ? &engine->slices : NULL};
  static const char *const params[] = {"weight", "weight_packed"};
  char name[1100];
  for (unsigned p = 0; p < 2; p++) {
    int n = snprintf(name, sizeof name, "%s.%s", module, params[p]);
    for (unsigned i = 0; i < 2 && n > 0 && (size_t)n < sizeof name; i++) {
      if (images[i] && k3_image_data(images[i], name, NULL))
        return true;
    }
  }
  return false;
}

// The plan's step of a module of the forward. An image whose map leaves a sum out runs on one rank only.
static enum k3_status find_step(struct k3_engine *engine, enum k3_flow_kind kind, const char *name, const struct k3_flow **step,
                                struct k3_error *err) {
  static const struct k3_flow nothing = {.name = "", .rule = "D1"};
  *step = k3_reduction_plan_step(&engine->reductions.plan, kind, name);
  if (*step || engine->tp_size > 1) {
    return *step ? K3_OK
                 : k3_fail(err, K3_BAD_INPUT, K3_RED01, NULL, name, "an image whose manifest says which norm completes which sum",
                           "the reduction plan does not know this step");
  }
  *step = &nothing;
  return K3_OK;
}

// Derives the plan from the manifest's map, verifies it, and finds the forward's steps in it.
static enum k3_status plan_reductions(struct k3_engine *engine, struct k3_error *err) {
  struct k3_reductions *r = &engine->reductions;
  const struct k3_manifest *manifest = &engine->image->manifest;
  const uint64_t n_layers = engine->model.n_layers;
  const struct k3_parallel parallel = {.tp = engine->tp_size, .pp = 1};
  K3_TRY(k3_stack_from_map(manifest->reductions, manifest->n_reductions, n_layers, module_exists, engine, &r->stack, err));
  K3_TRY(k3_reduction_plan_make(&r->stack, &parallel, &r->plan, err));
  struct {
    const struct k3_flow ***list;
    enum k3_flow_kind kind;
    const char *module;
  } places[] = {{&r->input_norm, K3_FLOW_NORM, "input_layernorm"},
                {&r->post_norm, K3_FLOW_NORM, "post_attention_layernorm"},
                {&r->o_proj, K3_FLOW_PRODUCE, "self_attn.o_proj"},
                {&r->down, K3_FLOW_PRODUCE, "mlp.down_proj"}};
  for (unsigned p = 0; p < sizeof places / sizeof places[0]; p++) {
    const struct k3_flow **list = k3_arena_alloc(&engine->arena, n_layers * sizeof *list, err);
    if (!list)
      return K3_NO_MEMORY;
    *places[p].list = list;
    for (uint64_t i = 0; i < n_layers; i++) {
      char name[128];
      snprintf(name, sizeof name, "model.layers.%llu.%s", (unsigned long long)i, places[p].module);
      K3_TRY(find_step(engine, places[p].kind, name, &list[i], err));
    }
  }
  K3_TRY(find_step(engine, K3_FLOW_START, "embedding", &r->embedding, err));
  return find_step(engine, K3_FLOW_NORM, "model.final_norm", &r->final_norm, err);
}

static void describe(struct k3_engine *engine) {
  const struct k3_dspark_model *m = &engine->model;
  const struct k3_weights *w = &engine->weights;
  engine->info = (struct k3_engine_info){
      .hidden_size = m->hidden_size,
      .target_hidden_size = m->target_hidden_size,
      .n_taps = m->n_taps,
      .n_layers = m->n_layers,
      .row_width = m->kv_lora_rank + m->qk_rope_head_dim,
      .latent_rank = m->kv_lora_rank,
      .vocab_size = m->vocab_size,
      .block_width = m->block_width,
      .image_block_width = engine->image->manifest.dspark.block_width,
      .max_positions = m->max_position_embeddings,
      .mask_token_id = m->mask_token_id,
      .memory = engine->backend->memory,
      .activation_dtype = w->all_f32 ? K3_DTYPE_F32 : K3_DTYPE_BF16,
      .has_embedding = w->embedding.n_shards > 0,
      .has_head = w->head.n_shards > 0,
      .has_confidence = m->confidence_head,
      .context_nbytes = k3_weights_context_nbytes(w),
      .draft_nbytes = k3_weights_draft_nbytes(w, m),
  };
  k3_hex(engine->info.identity, engine->image->identity);
}

static enum k3_status create_backend(struct k3_engine *engine, const struct k3_engine_options *options, struct k3_error *err) {
  const bool bf16 = !engine->weights.all_f32;
  if (options->backend && strcmp(options->backend, "cuda") == 0)
    return k3_cuda_backend_open(&(struct k3_cuda_options){.device = options->device,
                                                          .bf16 = bf16,
                                                          .progress = options->progress,
                                                          .tp_rank = options->tp_rank,
                                                          .tp_size = options->tp_size,
                                                          .comm = options->comm},
                                &engine->backend, err);
  engine->backend = k3_cpu_backend_create(bf16, err);
  return engine->backend ? K3_OK : K3_NO_MEMORY;
}

static enum k3_status open_image(struct k3_engine *engine, const struct k3_engine_options *options, struct k3_error *err) {
  const struct k3_manifest *manifest = &engine->image->manifest;
  if (!manifest->family || strcmp(manifest->family, "k3-dspark") != 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, NULL, NULL, "an image converted with the recipe k3-dspark",
                   "the image holds a model of the family \"%s\"", manifest->family ? manifest->family : "");
  engine->model = manifest->dspark;
  if (options->block_width)
    engine->model.block_width = options->block_width;
  if (engine->model.block_width > engine->model.max_position_embeddings)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "at most the model's limit", "the block width is %llu",
                   (unsigned long long)engine->model.block_width);
  if (options->check_digests)
    K3_TRY(check_digests(engine->image, options->progress, err));
  if (options->check_digests && engine->slices.bytes)
    K3_TRY(check_digests(&engine->slices, options->progress, err));
  if ((manifest->tp_size > 0) != (engine->slices.bytes != NULL))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "the folder that holds it", "one file of an image that was cut for %u ranks",
                   manifest->tp_size);
  const struct k3_weights_source source = {engine->image, engine->slices.bytes ? &engine->slices : NULL, engine->tp_rank, engine->tp_size};
  K3_TRY(k3_weights_bind(&source, &engine->model, &options->embed_tokens, &options->lm_head, &engine->weights, err));
  engine->n_heads = engine->weights.layers[0].q_b.n_rows / (engine->model.qk_nope_head_dim + engine->model.qk_rope_head_dim);
  const double start = k3_clock();
  K3_TRY(create_backend(engine, options, err));
  const double started = k3_clock();
  struct k3_load load = {0};
  if (engine->backend->ops->place) {
    K3_TRY(engine->backend->ops->place(engine->backend, &engine->weights, options->progress, &load, err));
    k3_weights_link_context(&engine->weights, &engine->model);
  }
  const double loaded = k3_clock();
  K3_TRY(prepare_rope(engine, err));
  K3_TRY(plan_reductions(engine, err));
  describe(engine);
  engine->info.start_seconds = started - start;
  engine->info.load_seconds = load.nbytes ? loaded - started : 0;
  engine->info.load_nbytes = load.nbytes;
  engine->info.load_reads = load.most_reads;
  return K3_OK;
}

static const struct k3_engine_options DEFAULTS;

static struct k3_engine *create(const struct k3_engine_options *options, struct k3_error *err) {
  if (check_options(options, err) != K3_OK)
    return NULL;
  struct k3_engine *engine = k3_calloc(1, sizeof *engine, err);
  if (!engine)
    return NULL;
  engine->tp_size = options->tp_size > 1 ? (uint32_t)options->tp_size : 1;
  engine->tp_rank = (uint32_t)options->tp_rank;
  engine->comm = options->comm;
  return engine;
}

struct k3_engine *k3_engine_open_image(const struct k3_image *image, const struct k3_engine_options *options, struct k3_error *err) {
  options = options ? options : &DEFAULTS;
  struct k3_engine *engine = create(options, err);
  if (!engine)
    return NULL;
  engine->image = image;
  if (open_image(engine, options, err) != K3_OK) {
    k3_engine_free(engine);
    return NULL;
  }
  return engine;
}

static enum k3_status map_image(const char *path, struct k3_mapping *mapping, struct k3_image *image, struct k3_error *err) {
  K3_TRY(k3_map_file(path, mapping, err));
  enum k3_status status = k3_image_open(mapping->data, mapping->nbytes, path, image, err);
  if (status != K3_OK)
    k3_unmap(mapping);
  return status;
}

// The rank's own file of a folder, which must be the one that the shared file names.
static enum k3_status map_slices(struct k3_engine *engine, const char *folder, struct k3_error *err) {
  const struct k3_manifest *manifest = &engine->image->manifest;
  char name[64], seal[2 * K3_SHA256_NBYTES + 1];
  if (manifest->tp_size != engine->tp_size || !manifest->rank_seals)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, folder, NULL, "as many ranks as the folder was cut for, or a whole image",
                   "%u ranks, the folder is cut for %u", engine->tp_size, manifest->tp_size);
  snprintf(name, sizeof name, "rank-%u-of-%u.safetensors", engine->tp_rank, engine->tp_size);
  char *path = k3_path_join(folder, name, err);
  if (!path)
    return K3_NO_MEMORY;
  enum k3_status status = map_image(path, &engine->slices_mapping, &engine->slices, err);
  if (status == K3_OK) {
    k3_hex(seal, engine->slices.identity);
    if (strcmp(seal, manifest->rank_seals[engine->tp_rank]) != 0)
      status = k3_fail(err, K3_BAD_INPUT, K3_IMG02, path, NULL, manifest->rank_seals[engine->tp_rank],
                       "its seal is %s, the shared file names another", seal);
  }
  k3_free(path);
  return status;
}

static bool is_folder(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

struct k3_engine *k3_engine_open(const char *image_path, const struct k3_engine_options *options, struct k3_error *err) {
  options = options ? options : &DEFAULTS;
  struct k3_engine *engine = create(options, err);
  if (!engine)
    return NULL;
  const bool folder = is_folder(image_path);
  char *shared = folder ? k3_path_join(image_path, "shared.safetensors", err) : NULL;
  enum k3_status status = folder && !shared ? K3_NO_MEMORY : map_image(shared ? shared : image_path, &engine->mapping, &engine->opened, err);
  if (status == K3_OK) {
    engine->image = &engine->opened;
    status = folder ? map_slices(engine, image_path, err) : K3_OK;
  }
  if (status == K3_OK)
    status = open_image(engine, options, err);
  k3_free(shared);
  if (status == K3_OK)
    return engine;
  if (err && status == K3_BAD_INPUT && !err->file[0])
    snprintf(err->file, sizeof err->file, "%s", image_path);
  k3_engine_free(engine);
  return NULL;
}

void k3_engine_free(struct k3_engine *engine) {
  if (!engine)
    return;
  if (engine->backend) {
    if (engine->inv_freq)
      engine->backend->ops->release(engine->backend, engine->inv_freq);
    engine->backend->ops->destroy(engine->backend);
  }
  k3_weights_free(&engine->weights);
  k3_reduction_plan_free(&engine->reductions.plan);
  k3_stack_free(&engine->reductions.stack);
  k3_arena_free(&engine->arena);
  if (engine->slices.bytes) {
    k3_image_close(&engine->slices);
    k3_unmap(&engine->slices_mapping);
  }
  if (engine->image == &engine->opened) {
    k3_image_close(&engine->opened);
    k3_unmap(&engine->mapping);
  }
  k3_free(engine);
}

const struct k3_engine_info *k3_engine_info(const struct k3_engine *engine) {
  return &engine->info;
}

enum k3_status k3_memory_create(struct k3_engine *engine, size_t nbytes, void **memory, struct k3_error *err) {
  *memory = NULL;
  return engine->backend->ops->alloc(engine->backend, nbytes, memory, err);
}

void k3_memory_free(struct k3_engine *engine, void *memory) {
  if (memory)
    engine->backend->ops->release(engine->backend, memory);
}

enum k3_status k3_memory_write(struct k3_engine *engine, void *dst, const void *host_src, size_t nbytes, struct k3_error *err) {
  return engine->backend->ops->upload(engine->backend, dst, host_src, nbytes, err);
}

enum k3_status k3_memory_read(struct k3_engine *engine, void *host_dst, const void *src, size_t nbytes, struct k3_error *err) {
  return engine->backend->ops->download(engine->backend, host_dst, src, nbytes, err);
}
