// The error of a failed call: caller-owned, fixed size, may be NULL everywhere. The first error wins: a struct that already holds one is left
// as it is, so that clean-up code cannot hide the cause. The same struct is a finding of `check` (base/findings.h).
#ifndef K3_BASE_ERROR_H
#define K3_BASE_ERROR_H

#include <stddef.h>

#include "base/api.h"
#include "base/rules.h"
#include "base/status.h"

struct k3_error {
  enum k3_status status;  // K3_OK: no error yet
  enum k3_rule rule;      // K3_RULE_NONE when no rule of the catalogue is concerned
  int os_errno;           // errno of a failed system call, else 0
  char file[256];         // the file concerned, or ""
  char tensor[256];       // the tensor (or field, or pattern) concerned, or ""
  char found[512];        // what was found
  char allowed[384];      // what is allowed, or what to do, or ""
};

#define K3_PRINTF(format_index, first_arg) __attribute__((format(printf, format_index, first_arg)))

// Fills *err unless it is NULL or already holds an error, and returns `status`.
//   rule     K3_RULE_NONE if no rule applies
//   file     path or NULL;  tensor  name or NULL: over-long ones are shortened, their length is said
//   allowed  plain text or NULL: what would have been right
//   found    printf format: what was found
enum k3_status k3_fail(struct k3_error *err, enum k3_status status, enum k3_rule rule, const char *file, const char *tensor,
                       const char *allowed, const char *found, ...) K3_PRINTF(7, 8);

// As k3_fail for a failed system call: appends strerror(errno_value), remembers it, and maps ENOSPC, EDQUOT and EFBIG to K3_NO_SPACE
// (rule OUT03) and everything else to K3_IO. `what` is a short phrase such as "cannot open".
enum k3_status k3_fail_errno(struct k3_error *err, int errno_value, const char *file, const char *what);

// As k3_fail for failed memory: names the number of bytes asked for.
enum k3_status k3_fail_memory(struct k3_error *err, size_t nbytes);

// One line "[RULE] file: tensor: found; allowed: ..." in dst, always terminated, cut at capacity. Control characters and bidirectional marks are
// written as \u00XX so that no name from a file can steer a terminal. Returns dst.
K3_API char *k3_error_text(const struct k3_error *err, char *dst, size_t capacity);

// Copies src to dst, escaping what must not reach a terminal (C0, DEL, C1, bidirectional controls, broken UTF-8) and shortening names above
// `max_nbytes` bytes to a head, an ellipsis, a tail and their length. dst is always terminated. Returns dst.
char *k3_printable(char *dst, size_t capacity, const char *src, size_t src_nbytes, size_t max_nbytes);

#endif
