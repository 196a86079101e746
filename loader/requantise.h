// Making quantised weights on the way into an image: which linear layers are encoded, the first pass that measures them, and the bytes of the encoded
// tensors. A plan whose `requant` is set has, for every encoded weight, shards of its parameters (weight or weight_packed, weight_scale,
// weight_global_scale) in place of the weight's own; everything else in the plan is as without.
//
// Second scales of NVFP4 are those of compressed-tensors: 2688 / amax, a divisor, one for all weights that an engine fuses. Everything is a function
// of the source's bytes and the options: neither threads nor instruction set nor segment boundaries change a bit.
#ifndef K3_LOADER_REQUANTISE_H
#define K3_LOADER_REQUANTISE_H

#include <pthread.h>

#include "base/progress.h"
#include "loader/plan.h"
#include "quant/scheme.h"
#include "quant/stats.h"

// Which weights share the second scale of NVFP4.
//   MODULE     the members of one fused tensor: q_a_proj and kv_a_proj_with_mqa of a layer, gate_proj and up_proj
//   COMPONENT  all tensors that fused tensors and views tie together. Every layer's kv_a_proj_with_mqa is also a part of context_kv_proj, so all
//   layers'
//              q_a_proj and kv_a_proj_with_mqa share one: an engine with one scale for a fused tensor then loads the file exactly
enum k3_requant_share { K3_SHARE_COMPONENT, K3_SHARE_MODULE };

struct k3_requant_options {
  enum k3_scheme scheme;  // FP8_CHANNEL, FP8_BLOCK, MXFP8, NVFP4 or MXFP4
  enum k3_requant_share share;
  bool pow2;  // NVFP4: second scales are powers of two (1/x is then exact)
  // Module patterns as in the `ignore` list of a quantization config: "re:..." is a regular expression anchored at the start, anything else a whole
  // name. They are held against a module's name in the source, the same without root, and the name of the tensor it is fused into.
  const char *const *ignore, *const *include;
  size_t n_ignore, n_include;
};

// One weight [n_rows, n_cols] that is encoded.
struct k3_requant_item {
  uint32_t linear;  // index into the plan's linears
  uint32_t tensor;  // of the checkpoint, or of the target
  uint32_t set;     // weights of one set share the second scale
  uint64_t n_rows, n_cols;
  float amax;      // of this weight
  float set_amax;  // of its set
  float second;    // NVFP4
  float *scales;   // FP8: its block scales; NULL for other schemes
  bool of_target;
  uint8_t src_dtype;
  struct k3_snr snr;                          // filled while the image is written
  struct k3_nvfp4_window window, own_window;  // NVFP4: under the set's amax, and under its own
};

struct k3_requant_part;
struct k3_requant {
  struct k3_requant_options options;
  struct k3_quant_scheme scheme;
  struct k3_requant_item *items;  // [n_items]; number + 1 is `encoded` of shards and pieces
  size_t n_items, items_capacity;
  uint32_t n_sets;
  uint32_t *item_of;            // [tensors of the checkpoint] item + 1; 0: copied
  struct k3_st_tensor *stored;  // [n_items, K3_REQUANT_MAX_PARAMS]
  struct k3_arena arena;
  const char **kept;  // [n_kept] weights that stay plain because their columns are no multiple of the group
  size_t n_kept, kept_capacity;
  bool allow_nonfinite;
  struct k3_requant_part *parts;  // statistics of pieces of the image, in any order
  size_t n_parts, parts_capacity;
  bool collecting;
  pthread_mutex_t mutex;  // guards parts
};

enum { K3_REQUANT_MAX_PARAMS = 3 };
// The parameters that every encoded weight becomes; returns their number.
size_t k3_requant_params(const struct k3_requant *requant, enum k3_param params[K3_REQUANT_MAX_PARAMS]);
// Such a tensor, described as if it stood in the source (its name is the weight's). `encoded`: item + 1.
const struct k3_st_tensor *k3_requant_stored(const struct k3_requant *requant, uint32_t encoded, enum k3_param param);

// Chooses the weights of a mapped plan (headers only, nothing is read) and replaces their shards. Taken is every linear layer of two dimensions in
// BF16, F16 or F32 whose columns are a multiple of the scheme's group, but kv_b_proj (decomposed at run time), lm_head, markov_w2 and routers, which
// only `include` adds; FUS01 when members of a fused tensor fall on different sides, CFG21 when a weight is quantised already; K3_BAD_ARGUMENT for a
// pattern that matches nothing or is malformed. The options' texts must outlive the plan.
enum k3_status k3_requant_select(struct k3_plan *plan, const struct k3_requant_options *options, struct k3_findings *findings, struct k3_error *err);

// The first pass: largest magnitudes (NVFP4) or block scales (FP8) of every chosen weight; MX schemes need none. In parallel over parts of tensors;
// memory is 1 MiB a thread, and 4 bytes a row (FP8) or tile (FP8 blocks) that stay with the plan. NaN or Inf in a weight is VAL02.
enum k3_status k3_requant_measure(struct k3_plan *plan, int n_threads, struct k3_progress *progress, struct k3_findings *findings,
                                  struct k3_error *err);

// Bytes [offset, offset + nbytes) of the tensor that `param` of an item becomes, to dst: source weights are read in parts of 256 Ki elements and
// encoded. Thread-safe. Adds to the statistics when requant->collecting. VAL02 for NaN or Inf that the first pass has not seen.
enum k3_status k3_requant_encode(const struct k3_plan *plan, size_t item, enum k3_param param, uint64_t offset, uint64_t nbytes, void *dst,
                                 struct k3_error *err);

// Sums the statistics up, in an order that does not depend on threads, and reports what the window of NVFP4 lost: FUS09 where a shared second scale
// pushed blocks out, SCL10 where a tensor's own range does.
void k3_requant_finish(struct k3_plan *plan, struct k3_findings *findings);

void k3_requant_free(struct k3_requant *requant);  // NULL is a no-op

#endif
