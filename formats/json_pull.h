// A strict pull reader for JSON whose shape is known: safetensors headers and shard indexes with half a million entries, read in one pass without a
// tree. RFC 8259 only: UTF-8 checked, no byte-order mark, no comments, no NaN, numbers exact. Errors say the byte offset.
#ifndef K3_FORMATS_JSON_PULL_H
#define K3_FORMATS_JSON_PULL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum { K3_JSON_MAX_DEPTH = 64 };

// Holds no memory but the scratch buffer for strings with escapes; release with k3_json_close.
struct k3_json {
  const char *begin, *next, *end;
  const char *file;      // for messages
  enum k3_rule rule;     // rule of every syntax error (CNT02 for headers, IDX10 for indexes)
  struct k3_error *err;  // may be NULL
  unsigned depth;
  bool fresh;     // a container was just entered: no comma before its first entry
  char *scratch;  // unescaped string, valid until the next string is read
  size_t scratch_nbytes;
  const char *raw;  // first byte of the last string as it stands in the text, behind its quote
};

// A string value; points into the text when it has no escapes, else into the scratch buffer.
struct k3_json_text {
  const char *bytes;
  size_t nbytes;
};

void k3_json_open(struct k3_json *json, const char *text, size_t nbytes, const char *file, enum k3_rule rule, struct k3_error *err);
void k3_json_close(struct k3_json *json);

// Next non-blank byte without consuming it ('{', '[', '"', 't', 'f', 'n', '-', digit), 0 at the end.
char k3_json_peek(struct k3_json *json);
uint64_t k3_json_offset(const struct k3_json *json);

// Objects: enter, then key until *more is false (which consumes '}'), each key followed by reading or skipping its value.
enum k3_status k3_json_enter_object(struct k3_json *json);
enum k3_status k3_json_next_key(struct k3_json *json, bool *more, struct k3_json_text *key);
// Arrays: enter, then item until *more is false (which consumes ']'), each followed by reading or skipping the item.
enum k3_status k3_json_enter_array(struct k3_json *json);
enum k3_status k3_json_next_item(struct k3_json *json, bool *more);

enum k3_status k3_json_string(struct k3_json *json, struct k3_json_text *text);
// A plain non-negative integer up to 2^64-1: no sign, no leading zero, no fraction, no exponent. Another spelling of a number gives `number_rule`
// (K3_CNT05 for shapes), anything that is not JSON gives json->rule.
enum k3_status k3_json_u64(struct k3_json *json, enum k3_rule number_rule, const char *tensor, uint64_t *value);
enum k3_status k3_json_null(struct k3_json *json);
// Skips one value of any kind, checking its syntax.
enum k3_status k3_json_skip(struct k3_json *json);
// Only white space may be left.
enum k3_status k3_json_finish(struct k3_json *json);

// Is a string of the text (raw: behind its opening quote; read successfully before; end: end of the text) equal to these
// bytes after unescaping? Needs no memory.
bool k3_json_raw_equal(const char *raw, const char *end, const char *bytes, size_t nbytes);

// Reports a syntax error at the present offset: what was found there, and what was expected.
enum k3_status k3_json_fail(struct k3_json *json, const char *expected);

#endif
