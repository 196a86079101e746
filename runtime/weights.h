// All weights of a drafter, bound from an image: addresses and shapes, no copies.
#ifndef K3_RUNTIME_WEIGHTS_H
#define K3_RUNTIME_WEIGHTS_H

#include "base/alloc.h"
#include "formats/image.h"
#include "runtime/matrix.h"
#include "runtime/runtime.h"

// Where a rank's weights come from: a whole image, of which the rank takes its slices (the manifest's tp rules say of what), or the two files of a
// folder that was cut for that many ranks.
struct k3_weights_source {
  const struct k3_image *image;   // whole, or a folder's shared file
  const struct k3_image *slices;  // the rank's own file; NULL with a whole image
  uint32_t tp_rank, tp_size;
};

// With several ranks these are the rank's own slices: q_b, kv_b and o_proj of its heads, gate_up and down of its part of I, head of its part of V.
struct k3_layer_weights {
  struct k3_vector input_norm, q_a_norm, kv_a_norm, post_norm;  // [H], [Rq], [Rk], [H]
  struct k3_matrix qkv_a;                                       // [Rq+E, H], shards q_a and kv_a
  struct k3_matrix q_b;                                         // [N*D, Rq]
  struct k3_matrix kv_b;                                        // [N*(P+Vd), Rk]
  struct k3_matrix o_proj;                                      // [H, N*Vd]
  struct k3_matrix gate_up;                                     // [2I, H], shards gate and up
  struct k3_matrix down;                                        // [H, I]
};

struct k3_weights {
  struct k3_matrix embedding;                 // [V, H], maybe absent
  struct k3_matrix context_proj;              // [H, A*Ht]
  struct k3_vector context_norm, final_norm;  // [H]
  struct k3_vector *tap_norms;                // [A] of Ht, or NULL
  struct k3_layer_weights *layers;            // [L]
  struct k3_matrix context_kv;                // [L*E, H]: shard i is layer i's kv_a, the same bytes
  const struct k3_vector **kv_norms;          // [L]: the layers' kv_a_norm
  struct k3_matrix markov_w1, markov_w2;      // [V, r]
  struct k3_matrix confidence;                // [1, H (+ r)], maybe absent
  struct k3_vector confidence_bias;           // [1]
  struct k3_matrix head;                      // [V, H], maybe absent
  bool all_f32;                               // every floating tensor that is neither scale nor quantised code is F32
  struct k3_weights_source source;            // what was bound; images NULL when nothing was
  struct k3_arena arena;                      // owns the lists above
};

// Binds every tensor of the model, checking presence, shape and dtype (IMG01 naming the tensor), and the view of the context projection against the
// layers' own rows (IMG03). PCK05 when a slice would cut a head or a block of scales. The images must outlive the weights. Embedding and head may be
// absent. On failure *weights is empty.
//   embed_tokens, lm_head  borrowed ones (data NULL: the image's), [V, H]; never cut
enum k3_status k3_weights_bind(const struct k3_weights_source *source, const struct k3_dspark_model *model, const struct k3_array *embed_tokens,
                               const struct k3_array *lm_head, struct k3_weights *weights, struct k3_error *err);
// Makes context_kv of the layers' current addresses; after a backend has moved the weights.
void k3_weights_link_context(struct k3_weights *weights, const struct k3_dspark_model *model);
void k3_weights_free(struct k3_weights *weights);

// Bytes that one append and one draft read.
uint64_t k3_weights_context_nbytes(const struct k3_weights *weights);
uint64_t k3_weights_draft_nbytes(const struct k3_weights *weights, const struct k3_dspark_model *model);

#endif
