#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

// Longest name printed whole; the reports of issue trackers stay readable and a table of 64 KB names cannot flood a terminal.
enum { MAX_NAME_NBYTES = 200 };

K3_PRINTF(7, 0)
static void vfill(struct k3_error *err, enum k3_status status, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                  const char *found, va_list args) {
  err->status = status;
  err->rule = rule;
  err->os_errno = 0;
  k3_printable(err->file, sizeof err->file, file ? file : "", file ? strlen(file) : 0, MAX_NAME_NBYTES);
  k3_printable(err->tensor, sizeof err->tensor, tensor ? tensor : "", tensor ? strlen(tensor) : 0, MAX_NAME_NBYTES);
  k3_printable(err->allowed, sizeof err->allowed, allowed ? allowed : "", allowed ? strlen(allowed) : 0, SIZE_MAX);  // may name a module
  char raw[sizeof err->found];
  vsnprintf(raw, sizeof raw, found, args);
  k3_printable(err->found, sizeof err->found, raw, strlen(raw), SIZE_MAX);
}

enum k3_status k3_fail(struct k3_error *err, enum k3_status status, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                       const char *found, ...) {
  if (err && err->status == K3_OK) {
    va_list args;
    va_start(args, found);
    vfill(err, status, rule, file, tensor, allowed, found, args);
    va_end(args);
  }
  return status;
}

enum k3_status k3_fail_errno(struct k3_error *err, int errno_value, const char *file, const char *what) {
  bool no_space = errno_value == ENOSPC || errno_value == EDQUOT || errno_value == EFBIG;
  enum k3_status status = errno_value == ENOMEM ? K3_NO_MEMORY : no_space ? K3_NO_SPACE : K3_IO;
  char reason[128];
  const char *text = strerror_r(errno_value, reason, sizeof reason);
  k3_fail(err, status, no_space ? K3_OUT03 : K3_RULE_NONE, file, NULL, NULL, "%s: %s", what, text);
  if (err && err->os_errno == 0 && err->status == status)
    err->os_errno = errno_value;
  return status;
}

enum k3_status k3_fail_memory(struct k3_error *err, size_t nbytes) {
  return k3_fail(err, K3_NO_MEMORY, K3_RULE_NONE, NULL, NULL, NULL, "out of memory: %zu bytes asked for", nbytes);
}

char *k3_error_text(const struct k3_error *err, char *dst, size_t capacity) {
  const char *id = k3_rule_info(err->rule)->id;
  snprintf(dst, capacity, "%s%s%s%s%s%s%s%s%s%s", id, id[0] ? ": " : "", err->file, err->file[0] ? ": " : "", err->tensor, err->tensor[0] ? ": " : "",
           err->found, err->allowed[0] ? " (allowed: " : "", err->allowed, err->allowed[0] ? ")" : "");
  return dst;
}

// Appends src to dst[*n ..], escaped; stops before it would not fit.
static void append_escaped(char *dst, size_t capacity, size_t *n, const char *src, size_t src_nbytes) {
  for (size_t i = 0; i < src_nbytes;) {
    uint32_t cp = 0;
    size_t width = k3_utf8_decode(src + i, src_nbytes - i, &cp);
    char escaped[12];
    const char *piece = src + i;
    size_t piece_nbytes = width;
    if (width == 0) {
      piece_nbytes = (size_t)snprintf(escaped, sizeof escaped, "\\x%02X", (unsigned char)src[i]);
      piece = escaped;
      width = 1;
    } else if (k3_utf8_is_hostile(cp)) {
      piece_nbytes = (size_t)snprintf(escaped, sizeof escaped, "\\u%04X", (unsigned)cp);
      piece = escaped;
    }
    if (*n + piece_nbytes >= capacity)
      break;
    memcpy(dst + *n, piece, piece_nbytes);
    *n += piece_nbytes;
    i += width;
  }
  dst[*n] = '\0';
}

char *k3_printable(char *dst, size_t capacity, const char *src, size_t src_nbytes, size_t max_nbytes) {
  size_t n = 0;
  if (capacity == 0)
    return dst;
  dst[0] = '\0';
  if (src_nbytes <= max_nbytes) {
    append_escaped(dst, capacity, &n, src, src_nbytes);
    return dst;
  }
  char tail[400];
  size_t tail_n = 0, n_tail = max_nbytes / 4 < 32 ? max_nbytes / 4 : 32;
  char length_note[48];
  int note_n = snprintf(length_note, sizeof length_note, " [%zu bytes]", src_nbytes);
  append_escaped(tail, sizeof tail, &tail_n, src + src_nbytes - n_tail, n_tail);
  size_t head = max_nbytes > 80 ? max_nbytes - 80 : max_nbytes / 2;
  append_escaped(dst, capacity > tail_n + 64 ? capacity - tail_n - (size_t)note_n - 4 : capacity, &n, src, head);
  snprintf(dst + n, capacity - n, "...%s%s", tail, length_note);
  return dst;
}
