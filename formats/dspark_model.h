// Geometry of a Kimi K3 DSpark drafter: what the runtime needs to know besides the weights. Read from config.json while converting, carried in the
// image's manifest (key "model"), read back from there by the runtime.
#ifndef K3_FORMATS_DSPARK_MODEL_H
#define K3_FORMATS_DSPARK_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/findings.h"
#include "formats/config.h"

enum { K3_DSPARK_MAX_TAPS = 64, K3_DSPARK_MAX_LAYERS = 1024 };

// YaRN (or plain) rotary embedding; defaults are those of the DeepSeek-style implementation.
struct k3_rope {
  bool yarn;             // false: plain frequencies, factor 1
  double theta, factor;  // base; scaling factor s
  uint64_t original_max_position;
  double beta_fast, beta_slow, mscale, mscale_all_dim;  // mscale_all_dim 0: no softmax correction
};

struct k3_dspark_model {
  uint64_t hidden_size;         // H
  uint64_t target_hidden_size;  // Ht
  uint64_t n_taps;              // A = number of target_layer_ids
  uint64_t target_layer_ids[K3_DSPARK_MAX_TAPS];
  uint64_t target_n_layers;
  uint64_t n_layers;                 // L
  uint64_t n_heads;                  // N
  uint64_t qk_nope_head_dim;         // P
  uint64_t qk_rope_head_dim;         // R, even
  uint64_t v_head_dim;               // Vd
  uint64_t q_lora_rank;              // Rq
  uint64_t kv_lora_rank;             // Rk; E = Rk + R
  uint64_t intermediate_size;        // I
  uint64_t vocab_size;               // V
  uint64_t markov_rank;              // r
  uint64_t block_width;              // T: query rows (and drafts) per request
  uint64_t mask_token_id;            // < V
  uint64_t max_position_embeddings;  // positions are below this
  double rms_norm_eps;
  double logit_scale;  // 1 when absent
  struct k3_rope rope;
  bool causal;                  // block rows see only earlier block rows; false: all of them
  bool fc_norm;                 // every tap has an RMSNorm of its own before the taps are joined
  bool confidence_head;         // the image holds one
  bool confidence_with_markov;  // its input is [hidden ; markov_w1 row], else hidden alone
  char target_stream[16];       // which target tensor is tapped: "prefix" or "attn_res"
};

// Fills *model from a config.json. Everything missing or contradictory is reported as CFG20 (several findings may come), a variant that the forward
// does not cover as CFG21. block_width 0 means: take the config's, else 7. Returns K3_BAD_INPUT or K3_UNSUPPORTED when an error-level finding was
// added; *model is then unspecified.
enum k3_status k3_dspark_model_from_config(const struct k3_config *config, uint64_t block_width, struct k3_dspark_model *model,
                                           struct k3_findings *findings);

// The manifest's "model" object as compact JSON with sorted keys, in new memory (free with k3_free); NULL and *err on failure. The rope block is
// carried number by number.
char *k3_dspark_model_to_json(const struct k3_dspark_model *model, struct k3_error *err);
// Reads it back and checks every field's range, so that products of any two of them cannot overflow 64 bits (IMG01).
enum k3_status k3_dspark_model_from_json(const char *text, size_t nbytes, const char *file, struct k3_dspark_model *model, struct k3_error *err);

#endif
