// Git LFS pointers: the small text that stands in a clone for a file that was not downloaded.
#ifndef K3_FORMATS_LFS_H
#define K3_FORMATS_LFS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

// True when the text (any number of leading bytes of a file, at least 8) begins as such a pointer does. *promised_nbytes becomes the size of the real
// file, 0 when that line is not at hand.
bool k3_lfs_is_pointer(const void *text, size_t nbytes, uint64_t *promised_nbytes);
// Fills *err with rule CNT01 and what to do; returns K3_BAD_INPUT.
enum k3_status k3_lfs_fail(const char *file, uint64_t promised_nbytes, struct k3_error *err);

#endif
