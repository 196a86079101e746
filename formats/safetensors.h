// The safetensors container: 8 bytes little-endian header length h, h bytes of JSON, then tensor bytes that tile the rest without a hole.
//   {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}
// Offsets are relative to byte 8 + h. Source: README of the safetensors project. The reader takes a buffer, never a file, and is strict: whatever it
// accepts, the reference reader accepts, except where the README and that reader differ and the stricter reading is named at k3_st_parse.
#ifndef K3_FORMATS_SAFETENSORS_H
#define K3_FORMATS_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/name_set.h"

enum {
  K3_ST_PREFIX_NBYTES = 8,
  K3_ST_MAX_HEADER_NBYTES = 100000000,  // the reference reader's cap
  K3_ST_MAX_RANK = 16,
  K3_ST_MAX_NAME_NBYTES = 4096,
};
#define K3_ST_MAX_DIM (UINT64_C(1) << 40)  // a larger dimension has no honest use, whatever stands beside it

struct k3_st_tensor {
  const char *name;       // terminated, unescaped UTF-8
  const uint64_t *shape;  // [rank]
  uint64_t begin, end;    // bytes, relative to the data area
  uint32_t name_nbytes;
  uint8_t dtype;  // enum k3_dtype
  uint8_t rank;
};

struct k3_st_pair {
  const char *key, *value;  // terminated
};

// A parsed header. Everything it points to lives in its arena and dies with k3_st_header_free. Read-only after parsing: any thread may look things
// up.
struct k3_st_header {
  struct k3_st_tensor *tensors;  // [n_tensors], in the order of the header text
  size_t n_tensors;
  struct k3_st_pair *metadata;  // [n_metadata], pairs of strings only
  size_t n_metadata;
  uint64_t data_begin;       // 8 + h
  uint64_t data_nbytes;      // sum of all spans = file size - data_begin
  bool metadata_odd;         // __metadata__ held something that is not a string (rule CNT08, a warning); null is fine
  uint64_t n_misaligned;     // tensors whose first byte is not a multiple of their element size (rule CNT11)
  struct k3_name_set names;  // indexes into tensors
  struct k3_arena arena;
};

// Length h of the header from the first bytes of a file. file_nbytes is the real file size, n_prefix how many bytes `prefix` holds: 8 are enough
// (fewer only when the file has no more), with 200 the message about a Git LFS pointer also says which size it promises. K3_BAD_INPUT with CNT01
// (such a pointer) or CNT02.
enum k3_status k3_st_header_length(const void *prefix, size_t n_prefix, uint64_t file_nbytes, const char *file, uint64_t *h, struct k3_error *err);

// Parses a header text of h bytes (the JSON, without the 8-byte prefix).
//   file_nbytes  real size of the file, to check that the tensors end exactly there
//   file         for messages
// Checks: JSON (CNT02; wherever it breaks, that is reported before anything else), then entry by entry duplicate keys after unescaping (CNT07: names,
// dtype, shape, data_offsets, keys of __metadata__), names (CNT12), dtype (CNT06), shape and byte count (CNT05), last tiling (CNT04 for gap, overlap,
// trailing bytes, CNT03 when the file is too short). Stricter than the reference reader: no white space before the first '{' (trailing space, tab,
// CR, LF are fine), no name twice even with equal spans, no dimension above 2^40 whatever stands beside it, at most 16 dimensions, names of 1 to 4096
// bytes without control characters. More lenient: __metadata__ that holds something else than texts is noted (metadata_odd), unless it looks like a
// tensor, which is CNT12. On failure *header is empty and needs no free.
enum k3_status k3_st_parse(const char *text, uint64_t h, uint64_t file_nbytes, const char *file, struct k3_st_header *header, struct k3_error *err);
void k3_st_header_free(struct k3_st_header *header);

// Tensor of that exact name, or NULL.
const struct k3_st_tensor *k3_st_find(const struct k3_st_header *header, const char *name, size_t name_nbytes);
// Number of elements; the parser has made sure that it fits.
uint64_t k3_st_n_elems(const struct k3_st_tensor *tensor);
// Value of a metadata key, or NULL.
const char *k3_st_metadata(const struct k3_st_header *header, const char *key);

// Writes one header in pieces, so that a header of 75 MB needs no buffer of that size. Usage: begin, metadata* , tensor*, end. Names and values are
// escaped as JSON. `sink` receives the bytes in order, in pieces of up to 8 KiB; its failure is returned by every later call. With sink NULL the
// writer only counts.
typedef enum k3_status (*k3_st_sink_fn)(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err);
struct k3_st_writer {
  k3_st_sink_fn sink;
  void *ctx;
  uint64_t n_bytes;  // so far, without the 8-byte prefix
  bool any_entry, in_metadata;
  enum k3_status status;  // of the first failure
  size_t n_buffered;
  char buffer[8192];
};
void k3_st_write_begin(struct k3_st_writer *writer, k3_st_sink_fn sink, void *ctx);
// All metadata first. K3_BAD_ARGUMENT is not returned: the caller has checked the names (CNT12: not "__metadata__", not empty).
enum k3_status k3_st_write_metadata(struct k3_st_writer *writer, const char *key, const char *value, struct k3_error *err);
enum k3_status k3_st_write_tensor(struct k3_st_writer *writer, const char *name, enum k3_dtype dtype, const uint64_t *shape, unsigned rank,
                                  uint64_t begin, uint64_t end, struct k3_error *err);
// Closes the object and pads with spaces up to padded_nbytes (0: no padding). *h receives the length of the header text. K3_BAD_ARGUMENT when
// padded_nbytes is too small, K3_UNSUPPORTED when the header is longer than its reader takes.
enum k3_status k3_st_write_end(struct k3_st_writer *writer, uint64_t padded_nbytes, uint64_t *h, struct k3_error *err);

#endif
