// Where the partial sums of tensor parallelism are completed. A row-parallel product leaves on every rank a part of the sum; an all-reduce completes
// it, at once or, cheaper, inside the RMSNorm that adds it to the residual stream ("deferred"). From a model's branches and the parallel setting
// comes a list of steps in order of execution, each of which says what it reduces; the list is verified before anything runs, and executed as it
// stands.
//
// Rules, by the names they have in the output (as served by vLLM's DeepSeek-V3.2, MiniMax-M3 and K3 drafter models and its fused MoE layers):
//   D1  one rank: nothing is partial
//   D2  the attention's output is completed by the post-attention norm of its layer, always
//   D3  a dense MLP's output by the next layer's input norm or the final norm, unless D6 or D9 forbid it
//   D4  an MoE's output likewise, but not with all-to-all kernels (they return whole sums), not sequence parallel, not with zero experts (their
//       replicated output is added behind the sum)
//   D5  a kernel that returns whole sums has nothing left to defer
//   D6  several pipeline stages: every MLP and MoE is reduced at once, or the partial sums cross the border, where rank r sends to rank r
//   D7  the first norm of a stream reduces nothing, unless the embedding itself was left partial
//   D8  the final norm completes the last layer's sum iff that layer deferred it
//   D9  what something else than a norm reads (the output of an MTP block, a tap between layers) is completed first
//   D10 sequence parallel MoE, with one stage only: reduce-scatter behind the attention, norms and MoE on a rank's own rows, all-gather of what the
//       next attention reads
//   D11 an addend that every rank holds (a bias) is added behind the sum or on one rank only
#ifndef K3_FORMATS_REDUCTION_PLAN_H
#define K3_FORMATS_REDUCTION_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "formats/manifest.h"

enum k3_sum_kind { K3_SUM_ATTENTION, K3_SUM_DENSE, K3_SUM_MOE };
enum k3_addend { K3_ADDEND_NONE, K3_ADDEND_ONCE, K3_ADDEND_EVERY_RANK };  // ONCE: behind the sum, or on one rank

// One branch of a model: a row-parallel product and the norm that adds it to the residual stream.
struct k3_sum {
  const char *producer;  // module name; several products that one norm takes together (routed and shared experts) are one branch
  const char *norm;      // NULL: something else reads it (an MTP block's output)
  const char *starts;    // name of the norm that begins a stream with this branch's layer (layer 0, an MTP block), else NULL
  uint64_t layer;
  enum k3_sum_kind kind;
  bool all_to_all, sequence_parallel, zero_expert;  // of an MoE
  bool returns_whole;                               // the kernel itself reduces
  enum k3_addend addend;
};

// A model as a list of branches in order of execution: attention, MLP, attention, ...
struct k3_stack {
  struct k3_sum *sums;
  size_t n_sums;
  uint64_t n_layers;      // that pipeline stages share; layers of MTP blocks come behind
  struct k3_arena arena;  // owns list and names when it came from a manifest
};

enum k3_border_rule { K3_BORDER_REDUCE, K3_BORDER_CARRY };       // D6: the first or the second way
enum k3_tap_rule { K3_TAP_BETWEEN_LAYERS, K3_TAP_BEHIND_NORM };  // a tap adds up stream and branch itself; or it copies the norm's residual

struct k3_parallel {
  uint32_t tp, pp;         // 1 or more
  bool embedding_partial;  // the embedding is vocabulary-parallel and left un-reduced for the first norm
  enum k3_border_rule border;
  enum k3_tap_rule tap;
  const uint64_t *taps;  // [n_taps] layers whose completed output is handed out
  size_t n_taps;
};

enum k3_flow_kind { K3_FLOW_START, K3_FLOW_PRODUCE, K3_FLOW_NORM, K3_FLOW_TAP, K3_FLOW_BORDER, K3_FLOW_OUTPUT };
enum k3_reduce { K3_REDUCE_NONE, K3_REDUCE_ALL, K3_REDUCE_SCATTER };
enum k3_gather { K3_GATHER_NONE, K3_GATHER_INPUT, K3_GATHER_OUTPUT };  // of a norm between sharded rows: stream and branch, or only what it puts out

// One step of the stream. START: an embedding or an MTP block's input begins it. OUTPUT: something that is no norm takes the branch.
struct k3_flow {
  enum k3_flow_kind kind;
  const char *name;  // module; "" for borders and taps
  const char *norm;  // PRODUCE: who adds the branch
  uint64_t layer;
  uint32_t stage;
  enum k3_sum_kind sum;  // PRODUCE
  const char *rule;      // "D3": why it is as it is
  // What the model does.
  bool partial;    // START, PRODUCE: comes out as a part of a sum over the ranks
  bool may_defer;  // PRODUCE: a norm may complete it
  bool on_rows;    // PRODUCE: works on a rank's own rows
  enum k3_addend addend;
  // What the plan orders.
  enum k3_reduce reduce;  // START, PRODUCE: at once; NORM: of the branch before it is added; TAP: of its own copy
  enum k3_gather gather;  // NORM; a TAP and an OUTPUT gather with INPUT
};

struct k3_reduction_plan {
  struct k3_parallel parallel;  // taps NULL
  struct k3_flow *steps;        // [n_steps]
  size_t n_steps;
  uint64_t n_deferred, n_immediate, n_scattered, n_gathered;
};

// Whether the image has a module of that name (any of its tensors); `ctx` is the caller's.
typedef bool (*k3_module_exists_fn)(void *ctx, const char *module);

// The stack of a manifest's reductions map: for every {i} the producers that exist, in the map's order, and the first of a norm's alternatives
// (separated by " | ") that exists. A branch whose first alternative lies in its own layer is an attention, one with ".experts" or "moe" in its name
// an MoE. IMG01 when no alternative exists. On failure *stack is empty. The manifest's strings are copied.
// Prediction (MTP) blocks are the layers behind the model's own, and those that {k} counts. Each is a stream of its own; of its norms only those count
// that are the block's ({i} or {k}), and where none is, something else reads what it puts out.
//   n_layers  the layers of the model itself, K3_ALL_LAYERS if nothing else carries layer names
#define K3_ALL_LAYERS UINT64_MAX
enum k3_status k3_stack_from_map(const struct k3_manifest_pair *map, size_t n_map, uint64_t n_layers, k3_module_exists_fn exists, void *ctx,
                                 struct k3_stack *stack, struct k3_error *err);
// That number in a manifest's model; K3_ALL_LAYERS when it has none.
uint64_t k3_manifest_n_layers(const struct k3_manifest *manifest);
void k3_stack_free(struct k3_stack *stack);

// Derives the plan and verifies it. The names stay the stack's. K3_BAD_ARGUMENT: a setting of 0, more stages than layers, a tap that is no layer. On
// failure *plan is empty.
enum k3_status k3_reduction_plan_make(const struct k3_stack *stack, const struct k3_parallel *parallel, struct k3_reduction_plan *plan,
                                      struct k3_error *err);
void k3_reduction_plan_free(struct k3_reduction_plan *plan);

// Follows the stream through the steps. err->tensor names the step:
//   RED01  a partial sum, or one rank's rows, reach something that takes them for the whole (a norm, a tap, an output, the next branch)
//   RED02  a sum is completed twice, or an addend is counted once per rank
//   RED03  a deferral where none is allowed: across a border with K3_BORDER_REDUCE, or of a branch that may not be deferred
enum k3_status k3_reduction_plan_verify(const struct k3_reduction_plan *plan, struct k3_error *err);

// The step of that module, or NULL.
const struct k3_flow *k3_reduction_plan_step(const struct k3_reduction_plan *plan, enum k3_flow_kind kind, const char *name);
// What happens to a branch: "deferred", "immediate", "scattered", "whole" (nothing to reduce). i: index of a PRODUCE step.
const char *k3_reduction_plan_action(const struct k3_reduction_plan *plan, size_t i);

#endif
