// The input of `run`: one safetensors file with the target states of some requests and the anchors to draft from.
//   target_states    [n, A*Ht] BF16 or F32   taps of one token each, ascending tap order; n may be 0
//   positions        [n] I64                 absolute position of each row
//   request_ids      [n] I64                 0 .. B-1; rows in any order
//   anchor_ids       [B] I64                 newly sampled token of each request
//   anchor_positions [B] I64                 m: the anchor's position; the request's rows are exactly the positions 0 .. m-1
//   target_logits    [B, T, V] F32, optional what the target says for each slot
// Other tensors are ignored.
#ifndef K3_FORMATS_SCENARIO_H
#define K3_FORMATS_SCENARIO_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/error.h"

// What the model expects.
struct k3_scenario_shape {
  uint64_t state_width;    // A * Ht
  uint64_t block_width;    // T
  uint64_t vocab_size;     // V
  uint64_t max_positions;  // m + T may not exceed it
};

struct k3_scenario {
  uint64_t n_rows, n_requests;  // n, B
  const void *target_states;    // in the file's bytes; not aligned to more than one byte
  enum k3_dtype state_dtype;
  const void *target_logits;               // likewise, or NULL
  int64_t *positions, *request_ids;        // [n], own copies
  int64_t *anchor_ids, *anchor_positions;  // [B]
};

// Parses and checks a whole file. The container rules (CNT) or a plain K3_BAD_INPUT that names the tensor and the request: a tensor is missing or of
// another shape or dtype, an id or position is out of range, a context row is missing, doubled or not below the anchor. On failure *scenario is
// empty.
//   bytes  stay mapped as long as the scenario lives
enum k3_status k3_scenario_parse(const void *bytes, uint64_t nbytes, const char *file, const struct k3_scenario_shape *shape,
                                 struct k3_scenario *scenario, struct k3_error *err);
void k3_scenario_free(struct k3_scenario *scenario);

#endif
