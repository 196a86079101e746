#include "formats/lfs.h"

#include <stdio.h>
#include <string.h>

#include "base/arith.h"

bool k3_lfs_is_pointer(const void *text, size_t nbytes, uint64_t *promised_nbytes) {
  static const char head[] = "version https://git-lfs", size_key[] = "\nsize ";
  *promised_nbytes = 0;
  size_t n_head = nbytes < sizeof head - 1 ? nbytes : sizeof head - 1;
  if (n_head < 8 || memcmp(text, head, n_head) != 0)
    return false;
  const char *bytes = text;
  const char *line = memmem(bytes, nbytes, size_key, sizeof size_key - 1);
  if (!line)
    return true;
  uint64_t value = 0;
  for (const char *p = line + sizeof size_key - 1; p < bytes + nbytes && *p >= '0' && *p <= '9'; p++) {
    if (!k3_mul_u64(value, 10, &value) || !k3_add_u64(value, (uint64_t)(*p - '0'), &value))
      return true;
  }
  *promised_nbytes = value;
  return true;
}

enum k3_status k3_lfs_fail(const char *file, uint64_t promised_nbytes, struct k3_error *err) {
  char promise[64] = "";
  if (promised_nbytes > 0)
    snprintf(promise, sizeof promise, " for a file of %llu bytes", (unsigned long long)promised_nbytes);
  return k3_fail(err, K3_BAD_INPUT, K3_CNT01, file, NULL, "the file itself; `git lfs pull` fetches it", "a Git LFS pointer%s", promise);
}
