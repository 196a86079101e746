#include "runtime/engine.h"

#include <string.h>

#include "base/hash.h"
#include "runtime/cuda_loader.h"

static enum k3_status check_options(const struct k3_engine_options *options, struct k3_error *err) {
  if (options->backend && strcmp(options->backend, "cpu") != 0 && strcmp(options->backend, "cuda") != 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "cpu or cuda", "there is no backend \"%s\"", options->backend);
  if (options->tp_size > 1)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "tensor-parallel size 1", "tensor-parallel size %d", options->tp_size);
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

// One rank: nothing is partial.
static enum k3_status plan_reductions(struct k3_engine *engine, struct k3_error *err) {
  struct k3_reductions *plan = &engine->reductions;
  bool **lists[] = {&plan->input_norm, &plan->post_norm, &plan->o_proj, &plan->down};
  for (unsigned i = 0; i < sizeof lists / sizeof lists[0]; i++) {
    *lists[i] = k3_arena_alloc(&engine->arena, engine->model.n_layers * sizeof **lists[i], err);
    if (!*lists[i])
      return K3_NO_MEMORY;
    memset(*lists[i], 0, engine->model.n_layers * sizeof **lists[i]);
  }
  return K3_OK;
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
    return k3_cuda_backend_open(&(struct k3_cuda_options){.device = options->device, .bf16 = bf16}, &engine->backend, err);
  engine->backend = k3_cpu_backend_create(bf16, err);
  return engine->backend ? K3_OK : K3_NO_MEMORY;
}

static enum k3_status open_image(struct k3_engine *engine, const struct k3_engine_options *options, struct k3_error *err) {
  const struct k3_manifest *manifest = &engine->image->manifest;
  if (!manifest->family || strcmp(manifest->family, "k3-dspark") != 0)
    return k3_fail(err, K3_UNSUPPORTED, K3_CFG21, NULL, NULL, "an image converted with the recipe k3-dspark", "the image holds a model of the family \"%s\"",
                   manifest->family ? manifest->family : "");
  engine->model = manifest->dspark;
  if (options->block_width)
    engine->model.block_width = options->block_width;
  if (engine->model.block_width > engine->model.max_position_embeddings)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "at most the model's limit", "the block width is %llu",
                   (unsigned long long)engine->model.block_width);
  if (options->check_digests)
    K3_TRY(check_digests(engine->image, options->progress, err));
  K3_TRY(k3_weights_bind(engine->image, &engine->model, &options->embed_tokens, &options->lm_head, &engine->weights, err));
  K3_TRY(create_backend(engine, options, err));
  if (engine->backend->ops->place) {
    K3_TRY(engine->backend->ops->place(engine->backend, &engine->weights, options->progress, err));
    k3_weights_link_context(&engine->weights, &engine->model);
  }
  K3_TRY(prepare_rope(engine, err));
  K3_TRY(plan_reductions(engine, err));
  describe(engine);
  return K3_OK;
}

struct k3_engine *k3_engine_open_image(const struct k3_image *image, const struct k3_engine_options *options, struct k3_error *err) {
  static const struct k3_engine_options defaults = {0};
  options = options ? options : &defaults;
  if (check_options(options, err) != K3_OK)
    return NULL;
  struct k3_engine *engine = k3_calloc(1, sizeof *engine, err);
  if (!engine)
    return NULL;
  engine->image = image;
  if (open_image(engine, options, err) != K3_OK) {
    k3_engine_free(engine);
    return NULL;
  }
  return engine;
}

struct k3_engine *k3_engine_open(const char *image_path, const struct k3_engine_options *options, struct k3_error *err) {
  struct k3_mapping mapping = {0};
  struct k3_image image;
  if (k3_map_file(image_path, &mapping, err) != K3_OK)
    return NULL;
  if (k3_image_open(mapping.data, mapping.nbytes, image_path, &image, err) != K3_OK) {
    k3_unmap(&mapping);
    return NULL;
  }
  struct k3_engine *engine = k3_engine_open_image(&image, options, err);
  if (!engine) {
    k3_image_close(&image);
    k3_unmap(&mapping);
    return NULL;
  }
  engine->mapping = mapping;
  engine->opened = image;
  engine->image = &engine->opened;
  return engine;
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
  k3_arena_free(&engine->arena);
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
