// Order, alignment and size of everything in the image.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/hash.h"
#include "base/version.h"
#include "loader/plan_parts.h"
#include "loader/requantise.h"
#include "loader/rules.h"

enum {
  PAGE_NBYTES = 4096,
  SMALL_NBYTES = 4096,     // tensors below stand together without padding
  LARGE_NBYTES = 1 << 20,  // tensors from here on begin at pages
  SMALL_ALIGN_NBYTES = 256,
};

// A tensor on its way into the plan.
struct draft {
  struct k3_plan_tensor t;
  uint32_t first_shard, n_shards;  // n_shards 0: tensor number first_shard of the checkpoint, copied
};

struct layout {
  struct k3_plan *plan;
  uint16_t *phase_of;  // [n_modules] block of the forward
  bool *loop;          // [n_modules] the phase runs over layers
  bool *view;          // [n_modules] some module of the stack has a view
  struct draft *drafts;
  size_t n_drafts, drafts_capacity;
  uint64_t offset;  // next free byte
  uint32_t n_pads;
};

static enum k3_status place(struct layout *l, struct k3_plan_tensor tensor, struct k3_error *err) {
  struct k3_plan *plan = l->plan;
  K3_TRY(k3_grow(&plan->tensors, &plan->tensors_capacity, plan->n_tensors + 1, sizeof *plan->tensors, err));
  tensor.offset = l->offset;
  if (!k3_add_u64(l->offset, tensor.nbytes, &l->offset) || l->offset > INT64_MAX)
    return k3_fail(err, K3_BAD_INPUT, K3_CNT05, NULL, tensor.name, "an image below 2^63 bytes", "the image would be too large for a file");
  plan->tensors[plan->n_tensors++] = tensor;
  return K3_OK;
}

static enum k3_status pad_to(struct layout *l, uint64_t multiple, struct k3_error *err) {
  uint64_t n_pad = (multiple - l->offset % multiple) % multiple;
  if (n_pad == 0)
    return K3_OK;
  return place(l, (struct k3_plan_tensor){.nbytes = n_pad, .dtype = K3_DTYPE_U8, .rank = 1, .kind = K3_PLAN_PAD, .first_piece = l->n_pads++}, err);
}

static uint64_t masked_index(const struct layout *l, const struct k3_mapped *mapped, int i) {
  return l->plan->mapper.stack_indexes[mapped->module] >> i & 1 ? mapped->index[i] : 0;
}

// Compares the image tensor that two shards belong to: in the order of the forward; a view's tensors layer after layer, parameter by parameter.
static int compare_tensor(const struct layout *l, const struct k3_plan_shard *a, const struct k3_plan_shard *b) {
  const struct k3_mapped *ma = &a->mapped, *mb = &b->mapped;
#define K3_COMPARE(x, y)         \
  do {                           \
    if ((x) != (y))              \
      return (x) < (y) ? -1 : 1; \
  } while (0)
  bool carry_a = ma->module == K3_MODULE_CARRY, carry_b = mb->module == K3_MODULE_CARRY;
  K3_COMPARE(carry_a, carry_b);
  if (carry_a)
    return (ma->tensor > mb->tensor) - (ma->tensor < mb->tensor);
  uint16_t sa = l->plan->mapper.stack_of[ma->module], sb = l->plan->mapper.stack_of[mb->module];
  enum k3_param pa = k3_plan_image_param(a), pb = k3_plan_image_param(b);
  K3_COMPARE(l->phase_of[ma->module], l->phase_of[mb->module]);
  if (l->view[sa]) {
    K3_COMPARE(sa, sb);
    K3_COMPARE(pa, pb);
  } else if (l->loop[sa]) {
    K3_COMPARE(ma->index[0], mb->index[0]);
  }
  K3_COMPARE(sa, sb);
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    K3_COMPARE(masked_index(l, ma, i), masked_index(l, mb, i));
  K3_COMPARE(pa, pb);
  return 0;
}

static int compare_shards(const void *left, const void *right, void *ctx) {
  const struct k3_plan_shard *a = left, *b = right;
  int order = compare_tensor(ctx, a, b);
  if (order != 0)
    return order;
  K3_COMPARE(a->id, b->id);
  return (a->mapped.tensor > b->mapped.tensor) - (a->mapped.tensor < b->mapped.tensor);
}

// Smaller than a page: wide elements first (so that everything is aligned to its width), a view's tensors next to each other, then by name.
static int compare_small(const void *left, const void *right) {
  const struct draft *a = left, *b = right;
  unsigned wa = k3_dtype_bits(a->t.dtype), wb = k3_dtype_bits(b->t.dtype);
  K3_COMPARE(wb, wa);
  K3_COMPARE(b->t.view_addressed, a->t.view_addressed);
  if (a->t.view_addressed) {
    K3_COMPARE(a->t.param, b->t.param);
    return (a->first_shard > b->first_shard) - (a->first_shard < b->first_shard);  // shards are in layer order
  }
  return strcmp(a->t.name, b->t.name);
}

static enum k3_status prepare_modules(struct layout *l, struct k3_error *err) {
  const struct k3_recipe *recipe = l->plan->recipe;
  const uint16_t *stack_of = l->plan->mapper.stack_of;
  size_t n = recipe->n_modules;
  l->phase_of = k3_calloc(n, sizeof *l->phase_of, err);
  l->loop = k3_calloc(n, sizeof *l->loop, err);
  l->view = k3_calloc(n, sizeof *l->view, err);
  if (!l->phase_of || !l->loop || !l->view)
    return K3_NO_MEMORY;
  for (size_t m = 0; m < n; m++) {
    l->view[stack_of[m]] |= recipe->modules[m].view != NULL;
    l->loop[m] = strstr(recipe->modules[m].into, "{i}") != NULL;
  }
  for (size_t m = 0; m < n; m++) {
    size_t first = stack_of[m];
    l->view[m] = l->view[first];
    if (first != m)
      l->phase_of[m] = l->phase_of[first];
    else if (m > 0 && l->loop[m] && l->loop[m - 1] && !l->view[m] && !l->view[stack_of[m - 1]])
      l->phase_of[m] = l->phase_of[m - 1];
    else
      l->phase_of[m] = (uint16_t)(m + 1);
  }
  return K3_OK;
}

static enum k3_status add_draft(struct layout *l, const struct draft *draft, struct k3_error *err) {
  K3_TRY(k3_grow(&l->drafts, &l->drafts_capacity, l->n_drafts + 1, sizeof *l->drafts, err));
  l->drafts[l->n_drafts++] = *draft;
  return K3_OK;
}

static const char *image_name(struct layout *l, const struct k3_plan_shard *shard, struct k3_error *err) {
  const struct k3_plan *plan = l->plan;
  const struct k3_st_tensor *source = k3_plan_source_of(plan, &shard->mapped);
  if (shard->mapped.module == K3_MODULE_CARRY)
    return source->name;
  const struct k3_recipe_module *module = &plan->recipe->modules[shard->mapped.module];
  uint64_t indexes[K3_RECIPE_MAX_INDEXES];
  for (int i = 0; i < K3_RECIPE_MAX_INDEXES; i++)
    indexes[i] = shard->mapped.index[i];
  char name[1024];
  size_t n = k3_recipe_expand(plan->recipe, module->into, indexes, name, sizeof name);
  if (n + 64 < sizeof name)
    n += (size_t)snprintf(name + n, sizeof name - n, ".%s", k3_param_image_name(module, shard->mapped.param, shard->packed));
  return k3_arena_strndup(&l->plan->arena, name, n, err);
}

// The bytes of one shard, wherever they go; its own normal shape, cut, in own [rank], of which the result is the rank.
static enum k3_status piece_of(const struct k3_plan *plan, const struct k3_plan_shard *shard, uint64_t own[K3_ST_MAX_RANK + 1], unsigned *rank,
                               struct k3_plan_piece *piece, struct k3_error *err) {
  const struct k3_st_tensor *t = k3_plan_stored_of(plan, shard);
  *rank = k3_plan_normal_shape(plan, shard, own);
  *piece = (struct k3_plan_piece){.row_nbytes = t->end - t->begin,
                                  .src_stride = t->end - t->begin,
                                  .n_rows = 1,
                                  .tensor = shard->mapped.tensor & 0x7FFFFFFFu,
                                  .of_target = shard->mapped.of_target,
                                  .encoded = shard->encoded};
  return k3_plan_apply_cut(shard, t, *rank, own, piece, err);
}

struct k3_plan_piece k3_plan_piece_at(const struct k3_plan *plan, const struct k3_plan_tensor *tensor, uint32_t i) {
  if (plan->pieces)
    return plan->pieces[tensor->first_piece + i];
  const struct k3_plan_shard *shard = &plan->shards[tensor->first_piece + i];
  uint64_t own[K3_ST_MAX_RANK + 1];
  unsigned rank;
  struct k3_plan_piece piece;
  piece_of(plan, shard, own, &rank, &piece, NULL);  // the layout has seen that its cut fits
  if (shard->row > 0)                               // rows of a stack have equally many bits
    piece.dst_offset = (uint64_t)((unsigned __int128)shard->row * tensor->nbytes / tensor->shape[0]);
  return piece;
}

// One image tensor from the shards [first, last): agreement in dtype and row shape, rows and bytes summed up.
static enum k3_status add_stack(struct layout *l, size_t first, size_t last, struct k3_findings *findings, struct k3_error *err) {
  struct k3_plan *plan = l->plan;
  struct k3_plan_shard *head = &plan->shards[first];
  const struct k3_st_tensor *source = k3_plan_stored_of(plan, head);
  bool stacked = head->mapped.module != K3_MODULE_CARRY && plan->recipe->modules[head->mapped.module].shard;
  uint64_t shape[K3_ST_MAX_RANK + 1], n_rows = 0, nbytes = 0;
  unsigned rank = k3_plan_normal_shape(plan, head, shape);
  for (size_t s = first; s < last; s++) {
    struct k3_plan_shard *shard = &plan->shards[s];
    const struct k3_st_tensor *t = k3_plan_stored_of(plan, shard);
    uint64_t own[K3_ST_MAX_RANK + 1];
    unsigned own_rank;
    struct k3_plan_piece piece;
    K3_TRY(piece_of(plan, shard, own, &own_rank, &piece, err));
    if (s == first)
      memcpy(shape, own, rank * sizeof *own);
    if (s > first && shard->id == plan->shards[s - 1].id) {
      k3_findings_report(findings, K3_MAP04, k3_plan_path_of(plan, &shard->mapped), t->name, "each shard id once", "shard %llu a second time",
                         (unsigned long long)shard->id);
      return K3_OK;
    }
    if (!k3_plan_shards_agree(plan, head, shard, findings))
      return K3_OK;
    shard->row = n_rows;
    shard->n_rows = rank > 0 ? own[0] : 1;
    if (!k3_add_u64(n_rows, shard->n_rows, &n_rows))
      return k3_fail(err, K3_BAD_INPUT, K3_CNT05, NULL, t->name, NULL, "more rows than a 64-bit number holds");
    if (!k3_add_u64(nbytes, piece.row_nbytes * piece.n_rows, &nbytes))
      return k3_fail(err, K3_BAD_INPUT, K3_CNT05, NULL, t->name, NULL, "more bytes than a 64-bit number holds");
  }
  if (stacked)
    shape[0] = n_rows;
  uint64_t *kept = k3_arena_alloc(&plan->arena, (rank ? rank : 1) * sizeof *kept, err);
  const char *name = kept ? image_name(l, head, err) : NULL;
  if (!name)
    return K3_NO_MEMORY;
  memcpy(kept, shape, rank * sizeof *kept);
  struct draft draft = {.first_shard = (uint32_t)first, .n_shards = (uint32_t)(last - first)};
  draft.t = (struct k3_plan_tensor){.name = name,
                                    .shape = kept,
                                    .nbytes = nbytes,
                                    .first_piece = (uint32_t)first,
                                    .n_pieces = (uint32_t)(last - first),
                                    .dtype = source->dtype,
                                    .rank = (uint8_t)rank,
                                    .kind = K3_PLAN_DATA,
                                    .param = (uint8_t)k3_plan_image_param(head),
                                    .view_addressed = head->mapped.module != K3_MODULE_CARRY && l->view[head->mapped.module]};
  return add_draft(l, &draft, err);
}

static enum k3_status draft_modules(struct layout *l, struct k3_findings *findings, struct k3_error *err) {
  struct k3_plan *plan = l->plan;
  K3_TRY(prepare_modules(l, err));
  K3_TRY(k3_plan_number_shards(plan, err));
  if (plan->n_shards > 1)
    qsort_r(plan->shards, plan->n_shards, sizeof *plan->shards, compare_shards, l);
  for (size_t first = 0, last; first < plan->n_shards; first = last) {
    last = first + 1;
    while (last < plan->n_shards && compare_tensor(l, &plan->shards[first], &plan->shards[last]) == 0)
      last++;
    K3_TRY(add_stack(l, first, last, findings, err));
  }
  return K3_OK;
}

static int compare_by_place(const void *left, const void *right, void *ctx) {
  const struct k3_ckpt *ckpt = ctx;
  uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
  const struct k3_ckpt_file *fa = k3_ckpt_file_of(ckpt, a), *fb = k3_ckpt_file_of(ckpt, b);
  if (fa != fb)
    return fa < fb ? -1 : 1;
  const struct k3_st_tensor *ta = &fa->header.tensors[a - fa->first_tensor], *tb = &fb->header.tensors[b - fb->first_tensor];
  K3_COMPARE(ta->begin, tb->begin);
  return strcmp(ta->name, tb->name);  // empty tensors share a place
}

// The tensors that an encoded weight becomes, under the names of its module's parameters. The lists have room.
static enum k3_status draft_encoded(struct layout *l, uint32_t tensor, uint32_t encoded, struct k3_error *err) {
  struct k3_plan *plan = l->plan;
  const struct k3_linear *linear = &plan->linears.items[plan->requant->items[encoded - 1].linear];
  enum k3_param params[K3_REQUANT_MAX_PARAMS];
  size_t n_params = k3_requant_params(plan->requant, params);
  for (size_t p = 0; p < n_params; p++) {
    const struct k3_st_tensor *t = k3_requant_stored(plan->requant, encoded, params[p]);
    char name[K3_ST_MAX_NAME_NBYTES + 64];
    size_t n = (size_t)snprintf(name, sizeof name, "%.*s.%s", (int)linear->name_nbytes, linear->name, k3_param_name(params[p]));
    struct draft draft = {.first_shard = tensor};
    draft.t = (struct k3_plan_tensor){.name = k3_arena_strndup(&plan->arena, name, n, err),
                                      .shape = t->shape,
                                      .nbytes = t->end,
                                      .first_piece = (uint32_t)plan->n_pieces,
                                      .n_pieces = 1,
                                      .dtype = t->dtype,
                                      .rank = t->rank,
                                      .kind = K3_PLAN_DATA,
                                      .param = (uint8_t)params[p]};
    if (!draft.t.name)
      return K3_NO_MEMORY;
    plan->pieces[plan->n_pieces++] =
        (struct k3_plan_piece){.row_nbytes = t->end, .src_stride = t->end, .n_rows = 1, .tensor = tensor & 0x7FFFFFFFu, .encoded = encoded};
    l->drafts[l->n_drafts++] = draft;
  }
  return K3_OK;
}

// Every tensor under its own name, in the order of its bytes, so that reading is sequential and the order of the header text does not matter.
static enum k3_status draft_copies(struct layout *l, struct k3_error *err) {
  struct k3_plan *plan = l->plan;
  uint32_t *order = k3_calloc(plan->ckpt->n_tensors, sizeof *order, err);
  if (!order)
    return K3_NO_MEMORY;
  for (uint64_t t = 0; t < plan->ckpt->n_tensors; t++)
    order[t] = (uint32_t)t;
  if (plan->ckpt->n_tensors > 1)
    qsort_r(order, plan->ckpt->n_tensors, sizeof *order, compare_by_place, (void *)(uintptr_t)plan->ckpt);
  size_t n_most = plan->ckpt->n_tensors + (plan->requant ? (K3_REQUANT_MAX_PARAMS - 1) * plan->requant->n_items : 0);
  enum k3_status status = k3_grow(&l->drafts, &l->drafts_capacity, n_most, sizeof *l->drafts, err);
  if (status == K3_OK)
    status = k3_grow(&plan->pieces, &plan->pieces_capacity, n_most, sizeof *plan->pieces, err);
  for (uint64_t i = 0; status == K3_OK && i < plan->ckpt->n_tensors; i++) {
    const struct k3_st_tensor *t = k3_ckpt_tensor(plan->ckpt, order[i]);
    struct draft draft = {.first_shard = order[i]};
    draft.t = (struct k3_plan_tensor){.name = t->name,
                                      .shape = t->shape,
                                      .nbytes = t->end - t->begin,
                                      .first_piece = (uint32_t)plan->n_pieces,
                                      .n_pieces = 1,
                                      .dtype = t->dtype,
                                      .rank = t->rank,
                                      .kind = K3_PLAN_DATA};
    uint32_t encoded = plan->requant ? plan->requant->item_of[order[i]] : 0;
    if (encoded) {
      status = draft_encoded(l, order[i], encoded, err);
      continue;
    }
    plan->pieces[plan->n_pieces++] =
        (struct k3_plan_piece){.row_nbytes = draft.t.nbytes, .src_stride = draft.t.nbytes, .n_rows = 1, .tensor = order[i] & 0x7FFFFFFFu};
    l->drafts[l->n_drafts++] = draft;
  }
  k3_free(order);
  return status;
}

static enum k3_status place_draft(struct layout *l, const struct draft *draft, struct k3_error *err) {
  for (uint32_t s = 0; s < draft->n_shards; s++)
    l->plan->shards[draft->first_shard + s].plan_tensor = (uint32_t)l->plan->n_tensors;
  return place(l, draft->t, err);
}

// The body: the small group, then all others in the order of the forward, then the sources; offsets relative to the body for now.
static enum k3_status place_body(struct layout *l, struct k3_error *err) {
  size_t n_small = 0;
  for (size_t d = 0; d < l->n_drafts; d++)
    n_small += l->drafts[d].t.nbytes < SMALL_NBYTES;
  struct draft *small = k3_calloc(n_small, sizeof *small, err);
  if (!small)
    return K3_NO_MEMORY;
  n_small = 0;
  for (size_t d = 0; d < l->n_drafts; d++) {
    if (l->drafts[d].t.nbytes < SMALL_NBYTES)
      small[n_small++] = l->drafts[d];
  }
  if (n_small > 1)
    qsort(small, n_small, sizeof *small, compare_small);
  enum k3_status status = K3_OK;
  for (size_t d = 0; status == K3_OK && d < n_small; d++)
    status = place_draft(l, &small[d], err);
  k3_free(small);
  for (size_t d = 0; status == K3_OK && d < l->n_drafts; d++) {
    if (l->drafts[d].t.nbytes < SMALL_NBYTES)
      continue;
    status = pad_to(l, l->drafts[d].t.nbytes >= LARGE_NBYTES ? PAGE_NBYTES : SMALL_ALIGN_NBYTES, err);
    if (status == K3_OK)
      status = place_draft(l, &l->drafts[d], err);
  }
  for (uint32_t s = 0; status == K3_OK && s < l->plan->n_sources; s++) {
    char text[32];
    int n = snprintf(text, sizeof text, K3_IMAGE_SOURCE_PREFIX "%u", s);
    const char *name = k3_arena_strndup(&l->plan->arena, text, (size_t)n, err);
    status =
        name ? place(
                   l,
                   (struct k3_plan_tensor){
                       .name = name, .nbytes = l->plan->sources[s].nbytes, .dtype = K3_DTYPE_U8, .rank = 1, .kind = K3_PLAN_SOURCE, .first_piece = s},
                   err)
             : K3_NO_MEMORY;
  }
  return status == K3_OK ? pad_to(l, PAGE_NBYTES, err) : status;
}

enum k3_status k3_plan_list_sources(struct k3_plan *plan, struct k3_error *err) {
  if (plan->sources || (plan->part.tp > 0 && plan->part.rank >= 0))  // of a folder, the shared file keeps them
    return K3_OK;
  size_t n = plan->ckpt->n_files + plan->ckpt->n_documents + (plan->target ? plan->target->n_files : 0);
  plan->sources = k3_calloc(n, sizeof *plan->sources, err);
  if (!plan->sources)
    return K3_NO_MEMORY;
  for (int of_target = 0; of_target <= 1; of_target++) {
    const struct k3_ckpt *ckpt = of_target ? plan->target : plan->ckpt;
    for (size_t f = 0; ckpt && f < ckpt->n_files; f++) {
      const struct k3_ckpt_file *file = &ckpt->files[f];
      bool used = !of_target;
      for (size_t s = 0; !used && s < plan->n_shards; s++)
        used = plan->shards[s].mapped.of_target && k3_ckpt_file_of(ckpt, plan->shards[s].mapped.tensor) == file;
      if (used)
        plan->sources[plan->n_sources++] = (struct k3_plan_source){
            file->path, file->name, file->fd, file->header.data_begin, file->id.nbytes, .is_header = true, .of_target = of_target == 1};
    }
  }
  for (size_t d = 0; d < plan->ckpt->n_documents; d++) {
    const struct k3_ckpt_document *document = &plan->ckpt->documents[d];
    plan->sources[plan->n_sources++] =
        (struct k3_plan_source){document->path, document->name, -1, document->nbytes, document->nbytes, false, false, ""};
  }
  return K3_OK;
}

static const char *tensor_name(const struct k3_plan_tensor *tensor, char buffer[32]) {
  if (tensor->kind != K3_PLAN_PAD)
    return tensor->name;
  snprintf(buffer, 32, K3_IMAGE_PAD_PREFIX "%u", tensor->first_piece);
  return buffer;
}

enum k3_status k3_plan_write_header(const struct k3_plan *plan, k3_st_sink_fn sink, void *ctx, uint64_t padded_nbytes, uint64_t *h,
                                    struct k3_error *err) {
  struct k3_st_writer writer;
  k3_st_write_begin(&writer, sink, ctx);
  K3_TRY(k3_st_write_metadata(&writer, "format", "pt", err));
  K3_TRY(k3_st_write_metadata(&writer, "k3pack", "1", err));
  K3_TRY(k3_st_write_metadata(&writer, "recipe", plan->recipe->name, err));
  K3_TRY(k3_st_write_metadata(&writer, "tool", K3_TOOL, err));
  for (size_t i = 0; i < plan->n_tensors; i++) {
    const struct k3_plan_tensor *t = &plan->tensors[i];
    char pad_name[32];
    uint64_t table_shape[2] = {t->kind == K3_PLAN_DIGESTS || t->kind == K3_PLAN_CRC ? plan->n_segments : t->nbytes,
                               t->kind == K3_PLAN_CRC ? 4 : K3_SHA256_NBYTES};
    K3_TRY(k3_st_write_tensor(&writer, tensor_name(t, pad_name), (enum k3_dtype)t->dtype, t->kind == K3_PLAN_DATA ? t->shape : table_shape, t->rank,
                              t->offset, t->offset + t->nbytes, err));
  }
  return k3_st_write_end(&writer, padded_nbytes, h, err);
}

// Above a quarter of the memory a conversion would turn the page cache over; then the pages it is done with are let go.
static bool is_huge(uint64_t nbytes) {
  long pages = sysconf(_SC_PHYS_PAGES), page_nbytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && page_nbytes > 0 && nbytes > (uint64_t)pages * (uint64_t)page_nbytes / 4;
}

enum k3_status k3_plan_layout(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  struct layout l = {.plan = plan};
  enum k3_status status;
  uint64_t errors_before = findings->n_errors;
  k3_rules_packable(plan, findings);
  if (findings->n_errors > errors_before)
    return K3_OK;
  K3_TRY_GOTO(status, out, k3_plan_list_sources(plan, err));
  K3_TRY_GOTO(status, out, plan->recipe->keep_names ? draft_copies(&l, err) : draft_modules(&l, findings, err));
  if (findings->n_errors > errors_before)
    goto out;
  K3_TRY_GOTO(status, out, place_body(&l, err));
  k3_free(l.drafts);
  l.drafts = NULL;
  K3_TRY_GOTO(status, out, k3_plan_write_manifest(plan, err));

  // Now the front, whose size depends on the body's; then everything moves behind it.
  size_t n_body = plan->n_tensors;
  uint64_t body_nbytes = l.offset;
  plan->n_segments = k3_ceil_div_u64(body_nbytes, K3_IMAGE_SEGMENT_NBYTES);
  l.offset = 0;
  struct k3_plan_tensor front = {
      .dtype = K3_DTYPE_U8, .rank = 1, .name = K3_IMAGE_MANIFEST_NAME, .kind = K3_PLAN_MANIFEST, .nbytes = plan->manifest_nbytes};
  K3_TRY_GOTO(status, out, place(&l, front, err));
  front = (struct k3_plan_tensor){
      .dtype = K3_DTYPE_U8, .rank = 2, .name = K3_IMAGE_DIGESTS_NAME, .kind = K3_PLAN_DIGESTS, .nbytes = plan->n_segments * K3_SHA256_NBYTES};
  K3_TRY_GOTO(status, out, place(&l, front, err));
  front = (struct k3_plan_tensor){.dtype = K3_DTYPE_U8, .rank = 2, .name = K3_IMAGE_CRC_NAME, .kind = K3_PLAN_CRC, .nbytes = plan->n_segments * 4};
  if (plan->options.crc)
    K3_TRY_GOTO(status, out, place(&l, front, err));
  l.offset += K3_SHA256_NBYTES;  // the seal ends at a page, so the pad stands before it
  uint64_t n_pad = (PAGE_NBYTES - l.offset % PAGE_NBYTES) % PAGE_NBYTES;
  l.offset -= K3_SHA256_NBYTES;
  front = (struct k3_plan_tensor){.dtype = K3_DTYPE_U8, .rank = 1, .kind = K3_PLAN_PAD, .nbytes = n_pad, .first_piece = l.n_pads++};
  if (n_pad > 0)
    K3_TRY_GOTO(status, out, place(&l, front, err));
  front = (struct k3_plan_tensor){.dtype = K3_DTYPE_U8, .rank = 1, .name = K3_IMAGE_SEAL_NAME, .kind = K3_PLAN_SEAL, .nbytes = K3_SHA256_NBYTES};
  K3_TRY_GOTO(status, out, place(&l, front, err));
  plan->body_offset = l.offset;

  size_t n_front = plan->n_tensors - n_body;
  struct k3_plan_tensor fronts[8];
  memcpy(fronts, plan->tensors + n_body, n_front * sizeof *fronts);
  memmove(plan->tensors + n_front, plan->tensors, n_body * sizeof *plan->tensors);
  memcpy(plan->tensors, fronts, n_front * sizeof *fronts);
  for (size_t i = n_front; i < plan->n_tensors; i++)
    plan->tensors[i].offset += plan->body_offset;
  for (size_t s = 0; s < plan->n_shards; s++)
    plan->shards[s].plan_tensor += (uint32_t)n_front;
  plan->data_nbytes = plan->body_offset + body_nbytes;
  plan->huge = is_huge(2 * plan->data_nbytes);  // what is read and what is written

  uint64_t h;
  K3_TRY_GOTO(status, out, k3_plan_write_header(plan, NULL, NULL, 0, &h, err));
  plan->header_nbytes = (h + K3_ST_PREFIX_NBYTES + PAGE_NBYTES - 1) / PAGE_NBYTES * PAGE_NBYTES - K3_ST_PREFIX_NBYTES;
  if (plan->header_nbytes > K3_ST_MAX_HEADER_NBYTES)
    k3_findings_report(findings, K3_CNT02, plan->ckpt->source, NULL, "a header of at most 100000000 bytes, as readers accept it",
                       "the image would need a header of %llu bytes", (unsigned long long)plan->header_nbytes);
out:
  k3_free(l.drafts);
  k3_free(l.phase_of);
  k3_free(l.loop);
  k3_free(l.view);
  return status;
}
