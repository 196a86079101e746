// The input of `run --layers`: one safetensors file with the hidden states that go into a decoder layer.
//   hidden_states [n, H] BF16 or F32
//   residual      [n, H] BF16 or F32, optional: the stream that hidden_states is yet to be added to, as the layers before gave both
//   positions     [n] I64   each request's are 0, 1, .. without a gap (the layers check that)
//   request_ids   [n] I64   0 or more; rows in any order
// Other tensors are ignored.
#ifndef K3_FORMATS_LAYER_STATES_H
#define K3_FORMATS_LAYER_STATES_H

#include <stdint.h>

#include "base/dtype.h"
#include "base/error.h"

struct k3_layer_states {
  uint64_t n_rows, width;
  const void *hidden, *residual;  // in the file's bytes, not aligned to more than one byte; residual may be NULL
  enum k3_dtype hidden_dtype, residual_dtype;
  int64_t *positions, *request_ids;  // [n], own copies
};

// Parses and checks a whole file. The container rules (CNT), or a plain K3_BAD_INPUT that names the tensor: missing, of another shape or dtype. On
// failure *states is empty.
//   bytes  stay mapped as long as the states live
enum k3_status k3_layer_states_parse(const void *bytes, uint64_t nbytes, const char *file, struct k3_layer_states *states, struct k3_error *err);
void k3_layer_states_free(struct k3_layer_states *states);

#endif
