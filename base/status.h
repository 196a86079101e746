// Status codes of every fallible k3pack call. One X-macro gives the code, its name, the exit code of the command line and its text.
#ifndef K3_BASE_STATUS_H
#define K3_BASE_STATUS_H

#include "base/api.h"

// X(code, exit code, text). K3_OK is 0; the others are grouped by tens and their numbers are stable.
#define K3_STATUS_MAP(X)                                                \
  X(K3_OK, 0, 0, "ok")                                                  \
  X(K3_DIFFERENT, 1, 1, "the answer is no")                             \
  X(K3_BAD_ARGUMENT, 10, 2, "wrong usage")                              \
  X(K3_EXISTS, 11, 2, "the output exists")                              \
  X(K3_BAD_INPUT, 20, 3, "the input is malformed or incomplete")        \
  X(K3_IO, 30, 4, "reading or writing failed")                          \
  X(K3_NO_SPACE, 31, 4, "not enough space")                             \
  X(K3_NO_MEMORY, 40, 4, "out of memory")                               \
  X(K3_UNSUPPORTED, 50, 5, "not supported here")                        \
  X(K3_COMM, 60, 4, "a rank is dead, late or disagrees")                \
  X(K3_CANCELLED, 61, 4, "cancelled because another worker failed")

enum k3_status {
#define K3_STATUS_ENUM(name, value, exit_code, text) name = value,
  K3_STATUS_MAP(K3_STATUS_ENUM)
#undef K3_STATUS_ENUM
};

// Name of the code, such as "K3_BAD_INPUT"; static storage. Unknown codes give "K3_?".
K3_API const char *k3_status_name(enum k3_status status);
// One-line English text; static storage.
K3_API const char *k3_status_text(enum k3_status status);
// Exit code of the command line: 0 done, 1 "no", 2 usage, 3 bad input, 4 I/O, 5 not supported.
int k3_status_exit_code(enum k3_status status);

// Returns from the calling function when a call did not succeed. The callee has already filled its error.
#define K3_TRY(call)                              \
  do {                                            \
    enum k3_status k3_try_status_ = (call);       \
    if (k3_try_status_ != K3_OK)                  \
      return k3_try_status_;                      \
  } while (0)

// The same for functions that own something: stores the status and jumps to the one clean-up label.
#define K3_TRY_GOTO(status_var, label, call)      \
  do {                                            \
    (status_var) = (call);                        \
    if ((status_var) != K3_OK)                    \
      goto label;                                 \
  } while (0)

#endif
