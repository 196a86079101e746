// Between the files that build a plan; nobody else includes this.
#ifndef K3_LOADER_PLAN_PARTS_H
#define K3_LOADER_PLAN_PARTS_H

#include "loader/plan.h"

// Module number of a tensor that is carried outside the modules.
enum { K3_MODULE_CARRY = UINT16_MAX };

// Shapes and dtypes of every mapped tensor against recipe and config (MAP05, MAP08).
enum k3_status k3_plan_check_shapes(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);

// Whether a shard fits the first one of its stack in dtype and row shape; MAP08 or MAP05 otherwise.
bool k3_plan_shards_agree(const struct k3_plan *plan, const struct k3_plan_shard *head, const struct k3_plan_shard *shard, struct k3_findings *findings);
// The same for every stack of a mapped plan, before the layout, and that no two shards of a stack or a view have one id (MAP04).
enum k3_status k3_plan_check_stacks(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);
// Evaluates the id of every shard of a stack.
enum k3_status k3_plan_number_shards(struct k3_plan *plan, struct k3_error *err);

// Fills plan->sources, once.
enum k3_status k3_plan_list_sources(struct k3_plan *plan, struct k3_error *err);

// Fills plan->manifest from the laid-out shards.
enum k3_status k3_plan_write_manifest(struct k3_plan *plan, struct k3_error *err);

// The header text of the image, through `sink` (NULL: only counted); padded to padded_nbytes unless that is 0.
enum k3_status k3_plan_write_header(const struct k3_plan *plan, k3_st_sink_fn sink, void *ctx, uint64_t padded_nbytes, uint64_t *h,
                                    struct k3_error *err);

// Number of the target's tensor that a borrowed module may take, under any known root; false when there is none.
bool k3_plan_find_borrowed(const struct k3_plan *plan, const char *module, uint64_t *tensor);
// Number of the draft's own tensor of a borrowed module (also when the target's took its place); false when it has none.
bool k3_plan_find_own(const struct k3_plan *plan, size_t module, uint64_t *tensor);

// Notes a source tensor that is not in the image; both texts must outlive the plan.
enum k3_status k3_plan_drop(struct k3_plan *plan, const char *tensor, const char *why, struct k3_error *err);

// The parameter as the image spells it: companions of the two dialects fall together.
enum k3_param k3_plan_image_param(const struct k3_plan_shard *shard);

// Shape of a source tensor in the image's normal form: scalars [1], channel scales [N, 1], four-dimensional block grids [rows, cols]. Returns the rank.
unsigned k3_plan_normal_shape(const struct k3_plan *plan, const struct k3_plan_shard *shard, uint64_t shape[K3_ST_MAX_RANK]);

// Applies a shard's cut to its normal shape and to the piece that copies it whole.
enum k3_status k3_plan_apply_cut(const struct k3_plan_shard *shard, const struct k3_st_tensor *source, unsigned rank, uint64_t *shape,
                                 struct k3_plan_piece *piece, struct k3_error *err);

static inline const struct k3_st_tensor *k3_plan_source_of(const struct k3_plan *plan, const struct k3_mapped *mapped) {
  return k3_ckpt_tensor(k3_plan_ckpt(plan, mapped->of_target), mapped->tensor);
}

// What a shard holds: its source tensor, or the tensor that this becomes when it is encoded.
const struct k3_st_tensor *k3_plan_stored_of(const struct k3_plan *plan, const struct k3_plan_shard *shard);

static inline const char *k3_plan_path_of(const struct k3_plan *plan, const struct k3_mapped *mapped) {
  return k3_ckpt_file_of(k3_plan_ckpt(plan, mapped->of_target), mapped->tensor)->path;
}

#endif
