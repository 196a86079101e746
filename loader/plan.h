// The plan of a conversion: every tensor of the image, where it stands, and which bytes of which source it is made of. Built from headers and JSON alone,
// before the first weight is read; everything that can be wrong by then is a finding.
#ifndef K3_LOADER_PLAN_H
#define K3_LOADER_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/findings.h"
#include "formats/dspark_model.h"
#include "formats/recipe.h"
#include "loader/ckpt.h"
#include "loader/linears.h"
#include "loader/mapper.h"

enum k3_plan_kind {
  K3_PLAN_MANIFEST,
  K3_PLAN_DIGESTS,
  K3_PLAN_CRC,
  K3_PLAN_SEAL,
  K3_PLAN_PAD,     // zeros
  K3_PLAN_DATA,    // gathered from pieces
  K3_PLAN_SOURCE,  // a piece of a source file, verbatim: its header, or a whole JSON file
};

// One tensor of the image, in file order.
struct k3_plan_tensor {
  const char *name;       // NULL for a pad, whose name follows from its number
  const uint64_t *shape;  // [rank]; for bytes: shape NULL, rank 1
  uint64_t offset, nbytes;  // relative to the data area
  uint32_t first_piece, n_pieces;  // DATA: k3_plan_piece_at; for PAD first_piece is the number, for SOURCE the index of the source
  uint8_t dtype, rank, kind;
  uint8_t param;          // enum k3_param of DATA
  bool view_addressed;
};

// Bytes of a DATA tensor: n_rows rows of row_nbytes each, src_stride apart in the source tensor, without a gap in the image. A whole copy is one row.
// Of a weight that is encoded, the "source tensor" is the encoded one.
struct k3_plan_piece {
  uint64_t dst_offset;  // in the image tensor
  uint64_t src_offset;  // of the first row, in the source tensor
  uint64_t row_nbytes, src_stride;
  uint32_t n_rows;
  uint32_t tensor : 31, of_target : 1;
  uint32_t encoded;  // 1 + number of the encoded weight (loader/requantise.h); 0: bytes are copied
};

// The slice of a source tensor that a rank holds, in rows or columns of its normal shape. Axis 0: all of it.
struct k3_plan_cut {
  uint32_t first;
  uint32_t n : 30, axis : 2;  // axis: 1 rows, 2 columns
};

// Which file of a folder a plan is of (loader/split.h); tp 0: a whole image.
struct k3_plan_part {
  uint32_t tp;
  int32_t rank;                    // -1: the shared file
  const char *const *rank_seals;   // [tp] hex, for the shared file
};

// Where a mapped tensor went: for --dry-run and the manifest. There are half a million of them, so they are kept small.
struct k3_plan_shard {
  struct k3_mapped mapped;
  uint32_t plan_tensor : 31, packed : 1;  // packed: the weight of its module instance is packed FP4
  uint32_t linear;           // index into linears.items, K3_LINEAR_ABSENT when it belongs to none
  uint64_t id, row, n_rows;  // of the stacked tensor, in rows of its first dimension
  uint32_t encoded;          // 1 + number of the encoded weight of which this is a parameter; 0: copied
  struct k3_plan_cut cut;
};

// A verbatim part of a source: bytes [0, nbytes) of a file.
struct k3_plan_source {
  const char *path, *name;
  int fd;                // of a shard; -1: a JSON file, opened when it is read
  uint64_t nbytes, file_nbytes;
  bool is_header, of_target;
  char sha256[65];       // with --source-digest: of the whole file, filled before the layout; else ""
};

struct k3_plan_options {
  uint64_t block_width;       // 0: the config's, else the recipe family's default
  bool embed_from_target;     // --embed target
  bool digests, crc, source_digest;
  bool encode;                // weights will be encoded: linear layers are listed even where none is quantised
  uint8_t allowed_rules[K3_RULE_COUNT];  // --allow: nonzero turns an error of that rule into a warning
};

struct k3_requant;

struct k3_plan {
  const struct k3_ckpt *ckpt, *target;  // target may be NULL
  const struct k3_recipe *recipe;
  struct k3_mapper mapper;
  struct k3_plan_options options;
  struct k3_plan_part part;
  struct k3_dspark_model dspark;       // valid for family "k3-dspark"
  struct k3_plan_tensor *tensors;      // [n_tensors]
  size_t n_tensors, tensors_capacity;
  struct k3_plan_piece *pieces;        // of generic; NULL with shards, each of which is a piece
  size_t n_pieces, pieces_capacity;
  struct k3_plan_shard *shards;        // of modules, sorted by image tensor; empty for generic
  size_t n_shards, shards_capacity;
  struct k3_linears linears;           // of generic too
  struct k3_requant *requant;          // weights that are encoded on the way; NULL: none
  struct k3_plan_source *sources;
  size_t n_sources;
  char *manifest;                      // compact JSON
  uint64_t manifest_nbytes;            // padded size in the image
  uint64_t header_nbytes;              // h: length of the padded header text
  uint64_t body_offset;                // data-relative end of the seal, where the first segment begins
  uint64_t n_segments;
  bool huge;                           // so large that pages read or written once should leave the page cache
  uint64_t data_nbytes;                // end of the last tensor; the file has 8 + header_nbytes + data_nbytes bytes
  struct { const char *tensor, *why; } *dropped;
  size_t n_dropped, dropped_capacity;
  // What check's closing line says.
  uint64_t n_expected, n_present;              // tensors: those that must be there, those that are
  uint64_t n_view_shards, n_view_shards_expected;
  struct k3_arena arena;
};

// Maps and checks a checkpoint under a recipe (MAP, CFG20, CFG21 rules; MAP10 only notes that both have an embedding) and fills plan->shards. What is
// wrong is added to `findings`; fails only for lack of memory or a broken recipe. `target` may be NULL. The plan borrows all its arguments.
enum k3_status k3_plan_map(const struct k3_ckpt *ckpt, const struct k3_ckpt *target, const struct k3_recipe *recipe,
                           const struct k3_plan_options *options, struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);
// Lays the image out: order, alignment, pads, manifest, header length. Only after a mapping without error-level findings.
enum k3_status k3_plan_layout(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);
void k3_plan_free(struct k3_plan *plan);  // an empty struct is fine

// Piece i of a DATA tensor, after the layout; they follow each other in the order of dst_offset.
struct k3_plan_piece k3_plan_piece_at(const struct k3_plan *plan, const struct k3_plan_tensor *tensor, uint32_t i);

// The names that a target model's embedding or head may have, for k3_ckpt_options.wanted; ctx is the recipe.
bool k3_plan_borrowed_name(void *ctx, const char *tensor);

// Source tensor of a piece or shard.
static inline const struct k3_ckpt *k3_plan_ckpt(const struct k3_plan *plan, bool of_target) {
  return of_target ? plan->target : plan->ckpt;
}

// Bytes of the whole image file.
static inline uint64_t k3_plan_file_nbytes(const struct k3_plan *plan) {
  return K3_ST_PREFIX_NBYTES + plan->header_nbytes + plan->data_nbytes;
}

#endif
