// What the files of the synthesiser share: the list of tensors that a preset gives, and the values of one tensor.
//
// A new model is a table of struct k3_synth_row and a config function; a new size of it is one more row of the preset table (loader/synth_presets.c).
#ifndef K3_LOADER_SYNTH_PARTS_H
#define K3_LOADER_SYNTH_PARTS_H

#include "base/alloc.h"
#include "base/pool.h"
#include "loader/synth.h"

// How a tensor's values are drawn. Every floating one is center + scale * a standard normal deviate.
enum k3_synth_fill {
  K3_SYNTH_MATRIX,  // center 0, scale 1 / sqrt(number of columns): products keep their variance
  K3_SYNTH_NORM,    // center 1, scale 1/16
  K3_SYNTH_BIAS,    // center 0, scale 1/16
  // Parts of quantised matrices, drawn so that the decoded values have the variance of K3_SYNTH_MATRIX for n_cols columns.
  K3_SYNTH_FP8_CODES,    // E4M3
  K3_SYNTH_FP4_CODES,    // two E2M1 a byte
  K3_SYNTH_FP8_SCALES,   // of FP8 codes: powers of two, in the tensor's dtype (F32, or U8 as E8M0)
  K3_SYNTH_FP4_SCALES,   // of FP4 codes: U8 as E8M0
  K3_SYNTH_NVFP4_SCALES, // E4M3, between 128 and 448
  K3_SYNTH_NVFP4_SECOND, // F32, a multiplier
  K3_SYNTH_ONES,
  K3_SYNTH_HEADS,  // center 0, scale 1, in the first n_cols elements; zeros behind them
};

enum { K3_SYNTH_MAX_RANK = 5 };

struct k3_synth_matrix;

// What a tensor of a quantised matrix holds.
enum k3_synth_part { K3_SYNTH_PLAIN, K3_SYNTH_CODES, K3_SYNTH_BLOCK_SCALES, K3_SYNTH_SECOND_SCALE, K3_SYNTH_INPUT_SCALE };

struct k3_synth_tensor {
  const char *name;
  const char *key;  // what its values depend on besides the seed: the name without root, so that a target's embedding equals the draft's copy
  uint64_t shape[K3_SYNTH_MAX_RANK];
  uint64_t n_elems, nbytes;
  uint64_t begin;  // relative to the data area of its file
  uint64_t shard;
  uint64_t n_cols;  // of the matrix that a quantised part belongs to; 0: the last dimension
  float gain;  // factor of every value; 0 counts as 1
  struct k3_synth_matrix *matrix;  // NULL: plain
  uint8_t rank, dtype, fill;
  uint8_t part;  // enum k3_synth_part
};

struct k3_synth_list {
  struct k3_synth_tensor *tensors;  // [n_tensors], sorted by name
  size_t n_tensors, capacity;
  struct k3_arena arena;  // names, matrices
  struct k3_synth_matrix *matrices;  // linked
};

// One family of tensors. {i} in the name runs over the layers (symbol L), {e} over the experts (X), {t} over the taps (A).
struct k3_synth_row {
  const char *name;
  const char *shape;  // dimensions separated by ',', each an expression of symbols, numbers, '*', '+' and '-': "N*P+N*R,Rq"
  enum k3_synth_fill fill;
  const char *key;  // NULL: the name
};

// A named number of the geometry; the tables end with an empty one.
struct k3_synth_symbol {
  const char *name;
  uint64_t value;
};

struct k3_synth_preset {
  const char *name, *about;
  const struct k3_synth_row *const *tables;  // ends with NULL; each table ends with an empty row
  const struct k3_synth_symbol *symbols;
  const char *config;                 // config.json: ${expression} stands for a number, ${dtype}, ${taps} and ${extra} for the texts
  const char *taps;                   // items of the list of tapped layers
  const char *extra;                  // more keys, each with a comma in front
  uint64_t n_shards;                  // unless the caller says otherwise
  bool sparse;                        // always written as holes: too large for anything else
  const char *meta_key, *meta_value;  // the pair of __metadata__, or NULL
  const struct k3_synth_moe *moe;     // a mixture of experts (loader/synth_moe.h) instead of tables and config; NULL: none
};

// Preset of that name, or NULL.
const struct k3_synth_preset *k3_synth_preset_find(const char *name);
// The text of config.json in new memory (free with k3_free).
char *k3_synth_config(const struct k3_synth_preset *preset, enum k3_dtype dtype, struct k3_error *err);
// Fills *list (empty before) with the preset's tensors, sorted by name, begin and shard 0. Free with k3_synth_list_free, also after failure.
enum k3_status k3_synth_list_make(const struct k3_synth_preset *preset, const char *root, enum k3_dtype dtype, struct k3_synth_list *list,
                                  struct k3_error *err);
void k3_synth_list_free(struct k3_synth_list *list);
// Value of one expression of a preset's symbols, up to ',', '}' or the end, to which *text moves.
uint64_t k3_synth_evaluate(const struct k3_synth_preset *preset, const char **text);

// The 65,537 values at which the standard normal distribution passes (k + 1/2) / 65536, the first and last repeated for the interpolation. Made once
// by k3_synth_normal_make with sums, products and quotients alone, so that every machine gets the same bits.
struct k3_synth_normal {
  float value[65537];
};
void k3_synth_normal_make(struct k3_synth_normal *normal);

// Writes bytes [offset, offset + nbytes) of a tensor to dst. Any split of a tensor into calls gives the same bytes. Thread-safe.
void k3_synth_values(const struct k3_synth_normal *normal, const struct k3_synth_tensor *tensor, uint64_t seed, uint64_t offset, void *dst,
                     size_t nbytes);

// ---- quantised checkpoints (loader/synth_quant.c) ----

// Replaces every projection of the list by its quantised tensors. K3_BAD_ARGUMENT when the dialect does not have the scheme.
enum k3_status k3_synth_quantise(struct k3_synth_list *list, const struct k3_synth_options *options, struct k3_error *err);
// Measures all matrices and fixes the scales that whole matrices have. Between k3_synth_quantise and the first k3_synth_quant_values.
enum k3_status k3_synth_measure(struct k3_synth_list *list, const struct k3_synth_normal *normal, const struct k3_synth_options *options,
                                struct k3_pool *pool, struct k3_error *err);
// As k3_synth_values for a tensor with a matrix; allocates a band of the matrix meanwhile.
enum k3_status k3_synth_quant_values(const struct k3_synth_normal *normal, const struct k3_synth_tensor *tensor, uint64_t seed, uint64_t offset,
                                     void *dst, size_t nbytes, struct k3_error *err);
// Magnitude of a tensor among its siblings: what --spread multiplies its values by.
float k3_synth_gain(const char *key);
// `config` (freed) with a quantization_config at its end, in new memory; *hf_quant: the text of hf_quant_config.json, or NULL. NULL on failure.
char *k3_synth_quant_config(char *config, const struct k3_synth_list *list, const struct k3_synth_options *options, char **hf_quant,
                            struct k3_error *err);

#endif
