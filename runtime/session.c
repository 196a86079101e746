#include <string.h>

#include "base/arith.h"
#include "runtime/engine.h"
#include "runtime/kv_cache.h"

enum { DEFAULT_CONTEXT_ROWS = 256 };

static uint64_t max_u64(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

// Takes the session's buffers from the backend. The list is the only place that knows their sizes.
static enum k3_status alloc_buffers(struct k3_session *s, struct k3_error *err) {
  const struct k3_backend *backend = s->engine->backend;
  const struct k3_dspark_model *m = &s->engine->model;
  const uint64_t n = s->options.max_context_rows, q = s->options.max_requests * m->block_width, act = backend->act_nbytes;
  const uint64_t E = m->kv_lora_rank + m->qk_rope_head_dim, D = m->qk_nope_head_dim + m->qk_rope_head_dim, N = s->engine->n_heads;
  const uint64_t n_head_rows = s->engine->weights.head.n_rows;  // fewer than V: the rank's part
  struct {
    void *field;
    uint64_t n_rows, width, elem_nbytes;
  } buffers[] = {
      {&s->joined, n, m->n_taps * m->target_hidden_size, act},
      {&s->projected, n, m->hidden_size, act},
      {&s->context, n, m->hidden_size, act},
      {&s->kv_rows, n, m->n_layers * E, act},
      {&s->residual, q, m->hidden_size, act},
      {&s->normed, q, m->hidden_size, act},
      {&s->branch, q, m->hidden_size, act},
      {&s->latents, q, m->q_lora_rank + E, act},
      {&s->q_a, q, m->q_lora_rank, act},
      {&s->q, q, N * D, act},
      {&s->query, q, N * E, act},
      {&s->latent, q, N * m->kv_lora_rank, act},
      {&s->heads, q, N * m->v_head_dim, act},
      {&s->gate_up, q, 2 * m->intermediate_size, act},
      {&s->gated, q, m->intermediate_size, act},
      {&s->base_logits, q, m->vocab_size, sizeof(float)},
      {&s->logits_part, q, n_head_rows < m->vocab_size ? n_head_rows : 0, sizeof(float)},
      {&s->logits_parts, q, n_head_rows < m->vocab_size ? m->vocab_size : 0, sizeof(float)},
      {&s->positions, q, 1, sizeof(int64_t)},
      {&s->slots, q, 1, sizeof(int64_t)},
      {&s->n_keys, s->options.max_requests, 1, sizeof(int64_t)},
      {&s->ids, q, 1, sizeof(int64_t)},
  };
  for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
    uint64_t nbytes;
    if (!k3_mul_u64(buffers[i].width, buffers[i].elem_nbytes, &nbytes) || !k3_mul_u64(nbytes, buffers[i].n_rows, &nbytes) || nbytes > SIZE_MAX)
      return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a smaller session", "%llu rows of %llu values are too many",
                     (unsigned long long)buffers[i].n_rows, (unsigned long long)buffers[i].width);
    void *memory;
    if (nbytes == 0)
      continue;
    K3_TRY(backend->ops->alloc(s->engine->backend, nbytes, &memory, err));
    memcpy(buffers[i].field, &memory, sizeof memory);
  }
  return K3_OK;
}

static uint64_t widest_row(const struct k3_dspark_model *m) {
  uint64_t width = max_u64(m->n_taps * m->target_hidden_size, m->hidden_size + m->markov_rank);
  return max_u64(max_u64(width, m->n_heads * m->v_head_dim), max_u64(m->intermediate_size, m->q_lora_rank));
}

struct k3_session *k3_session_create(struct k3_engine *engine, const struct k3_session_options *options, struct k3_error *err) {
  const struct k3_dspark_model *m = &engine->model;
  struct k3_session *session = k3_calloc(1, sizeof *session, err);
  if (!session)
    return NULL;
  session->engine = engine;
  session->options = *options;
  struct k3_session_options *o = &session->options;
  o->max_requests = max_u64(o->max_requests, 1);
  o->max_context_rows = o->max_context_rows ? o->max_context_rows : DEFAULT_CONTEXT_ROWS;
  if (o->max_keys == 0 || o->max_keys > m->max_position_embeddings)
    o->max_keys = m->max_position_embeddings;
  struct k3_exec_options exec = {
      .max_requests = o->max_requests,
      .max_keys = o->max_keys,
      .block_width = m->block_width,
      .row_width = m->kv_lora_rank + m->qk_rope_head_dim,
      .max_cols = widest_row(m),
      .vocab_size = m->vocab_size,
      .markov_rank = m->markov_rank,
      .n_threads = o->n_threads,
      .comm = engine->comm,
      .progress = o->progress,
  };
  if (!k3_mul_u64(o->max_requests, m->block_width, &exec.max_rows)) {
    k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, "a smaller session", "%llu requests are too many", (unsigned long long)o->max_requests);
  } else {
    exec.max_rows = max_u64(exec.max_rows, o->max_context_rows);
    if (engine->backend->ops->exec_create(engine->backend, &exec, &session->exec, err) == K3_OK && alloc_buffers(session, err) == K3_OK)
      return session;
  }
  k3_session_free(session);
  return NULL;
}

void k3_session_free(struct k3_session *s) {
  if (!s)
    return;
  struct k3_backend *backend = s->engine->backend;
  void *buffers[] = {s->joined,    s->projected, s->context, s->kv_rows, s->residual, s->normed, s->branch,      s->latents,     s->q_a,
                     s->q,         s->query,     s->latent,  s->heads,   s->gate_up,  s->gated,  s->base_logits, s->logits_part, s->logits_parts,
                     s->positions, s->slots,     s->n_keys,  s->ids};
  for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
    if (buffers[i])
      backend->ops->release(backend, buffers[i]);
  if (s->exec)
    backend->ops->exec_destroy(s->exec);
  k3_free(s->mark_steps);
  k3_free(s);
}

void k3_session_sums(const struct k3_session *session, const char **how, const char **why) {
  const struct k3_engine *engine = session->engine;
  *how = engine->tp_size > 1 ? "host" : "none";
  *why = engine->tp_size > 1 ? "the CPU backend" : "one rank";
  if (engine->backend->ops->sums)
    engine->backend->ops->sums(session->exec, how, why);
}

// An array of the caller: its memory, dtype and row length. `name` is the field.
static enum k3_status check_array(const struct k3_session *s, const struct k3_array *array, const char *name, bool taps, enum k3_dtype dtype,
                                  uint64_t n_cols, struct k3_error *err) {
  if (array->memory != s->engine->info.memory)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, "the memory that the backend works on", "the array lies in the other memory");
  if (taps ? array->dtype != K3_DTYPE_F32 && array->dtype != K3_DTYPE_BF16 : array->dtype != dtype)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, taps ? "F32 or BF16" : k3_dtype_name(dtype), "its dtype is %s",
                   k3_dtype_name(array->dtype));
  uint64_t dense = n_cols * k3_dtype_bits(array->dtype) / 8;
  if (array->row_nbytes != 0 && array->row_nbytes < dense)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, "rows that do not overlap", "rows of %llu bytes stand at %llu bytes",
                   (unsigned long long)dense, (unsigned long long)array->row_nbytes);
  return K3_OK;
}

static enum k3_status check_output(const struct k3_session *s, const struct k3_array *array, const char *name, enum k3_dtype dtype, uint64_t n_cols,
                                   bool dense, struct k3_error *err) {
  if (!array->data)
    return K3_OK;
  K3_TRY(check_array(s, array, name, false, dtype, n_cols, err));
  if (dense && array->row_nbytes != 0 && array->row_nbytes != n_cols * k3_dtype_bits(dtype) / 8)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, name, "a dense array", "its rows stand apart");
  return K3_OK;
}

static enum k3_status check_stream(const struct k3_session *s, const void *stream, struct k3_error *err) {
  if (stream && s->engine->info.memory == K3_MEMORY_HOST)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "stream", "NULL", "the CPU backend has no streams");
  return K3_OK;
}

// A rank that fails within a step tells the others, who would wait for it.
static enum k3_status tell(struct k3_session *s, enum k3_status status, struct k3_error *err) {
  struct k3_comm *comm = s->engine->comm;
  if (status != K3_OK && comm)
    comm->ops->abort(comm, err);
  return status;
}

static enum k3_status begin(struct k3_session *s, void *stream, struct k3_error *err) {
  const struct k3_backend_ops *ops = s->engine->backend->ops;
  if (s->measure.cold && ops->chill)
    K3_TRY(ops->chill(s->exec, stream, err));
  if (ops->begin)
    K3_TRY(ops->begin(s->exec, stream, err));
  return k3_measure_begin(s, err);
}

static enum k3_status end(struct k3_session *s, void *stream, struct k3_error *err) {
  const struct k3_backend_ops *ops = s->engine->backend->ops;
  K3_TRY(k3_measure_end(s, err));
  return ops->end ? ops->end(s->exec, stream, err) : K3_OK;
}

enum k3_status k3_session_append(struct k3_session *s, const struct k3_cache *cache, const struct k3_context *context, void *stream,
                                 struct k3_error *err) {
  const struct k3_engine_info *info = &s->engine->info;
  K3_TRY(check_stream(s, stream, err));
  K3_TRY(k3_cache_check(s->engine, cache, err));
  if (context->n_rows == 0)
    return K3_OK;
  if (!context->taps || !context->positions || !context->slots || (context->n_tap_arrays != 1 && context->n_tap_arrays != info->n_taps))
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "taps", "taps (1 array or one per tap), positions and slots",
                   "%llu tap arrays for %llu taps, or something is absent", (unsigned long long)context->n_tap_arrays,
                   (unsigned long long)info->n_taps);
  uint64_t width = info->target_hidden_size * (context->n_tap_arrays == 1 ? info->n_taps : 1);
  for (uint64_t i = 0; i < context->n_tap_arrays; i++)
    K3_TRY(check_array(s, &context->taps[i], "taps", true, 0, width, err));
  K3_TRY(check_output(s, &context->states, "states", K3_DTYPE_F32, info->hidden_size, false, err));
  K3_TRY(check_output(s, &context->rows, "rows", K3_DTYPE_F32, info->row_width, false, err));
  uint64_t pass = s->options.max_context_rows, n_passes = k3_ceil_div_u64(context->n_rows, pass);
  k3_progress_start(s->options.progress, "context", n_passes * info->context_nbytes);
  enum k3_status status = begin(s, stream, err);
  for (uint64_t first = 0; status == K3_OK && first < context->n_rows; first += pass)
    status = k3_forward_context(s, cache, context, first, context->n_rows - first < pass ? context->n_rows - first : pass, err);
  if (status == K3_OK)
    status = end(s, stream, err);
  K3_TRY(tell(s, status, err));
  k3_progress_finish(s->options.progress);
  return K3_OK;
}

static enum k3_status check_draft(const struct k3_session *s, const struct k3_draft *draft, struct k3_error *err) {
  const struct k3_engine_info *info = &s->engine->info;
  if (draft->n_requests > s->options.max_requests)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "n_requests", "at most the session's max_requests", "%llu requests, room for %llu",
                   (unsigned long long)draft->n_requests, (unsigned long long)s->options.max_requests);
  if (!draft->anchor_ids || !draft->anchor_positions || !draft->block_tables)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "draft", "anchor_ids, anchor_positions and block_tables", "one of them is absent");
  static const char remedy[] = "convert with --target, or lend the target's (k3_engine_options)";
  if (!info->has_embedding)
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "model.embed_tokens.weight", remedy,
                   "the image has no embedding: it is borrowed from the target");
  bool needs_head = draft->draft_ids.data || draft->confidence.data || draft->base_logits.data || draft->logits.data;
  if (needs_head && !info->has_head)
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, NULL, "lm_head.weight", remedy, "the image has no head: it is borrowed from the target");
  if (draft->confidence.data && !info->has_confidence)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, "confidence", "no confidence output", "the image has no confidence head");
  K3_TRY(check_output(s, &draft->draft_ids, "draft_ids", K3_DTYPE_I64, info->block_width, true, err));
  K3_TRY(check_output(s, &draft->confidence, "confidence", K3_DTYPE_F32, info->block_width, true, err));
  K3_TRY(check_output(s, &draft->hidden, "hidden", K3_DTYPE_F32, info->hidden_size, false, err));
  K3_TRY(check_output(s, &draft->base_logits, "base_logits", K3_DTYPE_F32, info->vocab_size, false, err));
  return check_output(s, &draft->logits, "logits", K3_DTYPE_F32, info->vocab_size, false, err);
}

enum k3_status k3_session_draft(struct k3_session *s, const struct k3_cache *cache, const struct k3_draft *draft, void *stream,
                                struct k3_error *err) {
  K3_TRY(check_stream(s, stream, err));
  K3_TRY(k3_cache_check(s->engine, cache, err));
  if (draft->n_requests == 0)
    return K3_OK;
  K3_TRY(check_draft(s, draft, err));
  k3_progress_start(s->options.progress, "draft", s->engine->info.draft_nbytes);
  enum k3_status status = begin(s, stream, err);
  if (status == K3_OK)
    status = k3_forward_block(s, cache, draft, err);
  if (status == K3_OK)
    status = end(s, stream, err);
  K3_TRY(tell(s, status, err));
  k3_progress_finish(s->options.progress);
  return K3_OK;
}
