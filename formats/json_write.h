// A small streaming JSON writer. Its text is ASCII-safe where it matters: whatever a name from a file holds, no control character, no bidirectional
// mark and no broken UTF-8 leaves the writer. Independent of the locale.
//
//   struct k3_jsonw w;
//   k3_jsonw_open(&w, true, NULL, NULL);
//   k3_jsonw_begin_object(&w, NULL);
//   k3_jsonw_string(&w, "file", path);
//   k3_jsonw_begin_array(&w, "shape");
//   k3_jsonw_u64(&w, NULL, 3);
//   k3_jsonw_end_array(&w);
//   k3_jsonw_end_object(&w);
//   status = k3_jsonw_finish(&w, err);   // w.bytes, w.n_bytes: the text, terminated
//   k3_jsonw_close(&w);
//
// The calls in between return nothing: the first failure (memory, sink, misuse such as an end without a begin) is kept, what follows is ignored, and
// k3_jsonw_finish reports it.
#ifndef K3_FORMATS_JSON_WRITE_H
#define K3_FORMATS_JSON_WRITE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

enum { K3_JSONW_MAX_DEPTH = 64, K3_JSONW_FLUSH_NBYTES = 32 << 10 };

// Takes the bytes in order, in pieces of any size.
typedef enum k3_status (*k3_jsonw_sink_fn)(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err);

struct k3_jsonw {
  k3_jsonw_sink_fn sink;  // NULL: the whole text stays in `bytes`
  void *ctx;
  bool pretty, has_top;
  unsigned depth;
  struct {
    bool is_object, any;
  } level[K3_JSONW_MAX_DEPTH];
  char *bytes;  // the text, or with a sink the part not handed over yet
  size_t n_bytes, capacity;
  struct k3_error error;  // status K3_OK: none so far
};

// pretty: two spaces of indentation and one entry a line, else no white space at all. `sink` may be NULL.
void k3_jsonw_open(struct k3_jsonw *writer, bool pretty, k3_jsonw_sink_fn sink, void *ctx);
// Ends the text with a line feed, hands the rest to the sink and returns the first failure. Fails with K3_BAD_ARGUMENT unless exactly one value was
// written and every begin has its end. Without a sink, bytes[0 .. n_bytes-1] is then the text, with a terminating zero behind it, until close.
enum k3_status k3_jsonw_finish(struct k3_jsonw *writer, struct k3_error *err);
void k3_jsonw_close(struct k3_jsonw *writer);  // frees the buffer; also right after a failure

// Every value takes its key: a terminated text inside an object, NULL inside an array and for the top value.
void k3_jsonw_begin_object(struct k3_jsonw *writer, const char *key);
void k3_jsonw_end_object(struct k3_jsonw *writer);
void k3_jsonw_begin_array(struct k3_jsonw *writer, const char *key);
void k3_jsonw_end_array(struct k3_jsonw *writer);

// Text is escaped: ", \, C0, DEL, C1, U+2028, U+2029 and bidirectional marks as \uXXXX (or the two-character form), each broken UTF-8 byte as \uFFFD.
// NULL gives null.
void k3_jsonw_string(struct k3_jsonw *writer, const char *key, const char *text);
void k3_jsonw_string_n(struct k3_jsonw *writer, const char *key, const char *bytes, size_t nbytes);
void k3_jsonw_u64(struct k3_jsonw *writer, const char *key, uint64_t value);
void k3_jsonw_i64(struct k3_jsonw *writer, const char *key, int64_t value);
// The shortest of up to 17 (9) digits that reads back as the same double (float). JSON has no other numbers: NaN and infinities become the texts
// "NaN", "Infinity", "-Infinity".
void k3_jsonw_double(struct k3_jsonw *writer, const char *key, double value);
void k3_jsonw_float(struct k3_jsonw *writer, const char *key, float value);
void k3_jsonw_bool(struct k3_jsonw *writer, const char *key, bool value);
void k3_jsonw_null(struct k3_jsonw *writer, const char *key);

#endif
