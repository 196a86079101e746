#include "base/utf8.h"

size_t k3_utf8_decode(const char *src, size_t nbytes, uint32_t *code_point) {
  static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
  const unsigned char *bytes = (const unsigned char *)src;
  size_t n = bytes[0] < 0x80 ? 1 : bytes[0] < 0xC2 ? 0 : bytes[0] < 0xE0 ? 2 : bytes[0] < 0xF0 ? 3 : bytes[0] < 0xF5 ? 4 : 0;
  if (n == 0 || n > nbytes)
    return 0;
  uint32_t cp = n == 1 ? bytes[0] : bytes[0] & (0x7Fu >> n);
  for (size_t i = 1; i < n; i++) {
    if ((bytes[i] & 0xC0) != 0x80)
      return 0;
    cp = cp << 6 | (bytes[i] & 0x3F);
  }
  if (cp < smallest[n] || (cp >= 0xD800 && cp <= 0xDFFF) || cp > 0x10FFFF)
    return 0;
  *code_point = cp;
  return n;
}

size_t k3_utf8_encode(uint32_t code_point, char dst[4]) {
  if (code_point < 0x80) {
    dst[0] = (char)code_point;
    return 1;
  }
  if (code_point < 0x800) {
    dst[0] = (char)(0xC0 | code_point >> 6);
    dst[1] = (char)(0x80 | (code_point & 0x3F));
    return 2;
  }
  if (code_point < 0x10000) {
    dst[0] = (char)(0xE0 | code_point >> 12);
    dst[1] = (char)(0x80 | (code_point >> 6 & 0x3F));
    dst[2] = (char)(0x80 | (code_point & 0x3F));
    return 3;
  }
  dst[0] = (char)(0xF0 | code_point >> 18);
  dst[1] = (char)(0x80 | (code_point >> 12 & 0x3F));
  dst[2] = (char)(0x80 | (code_point >> 6 & 0x3F));
  dst[3] = (char)(0x80 | (code_point & 0x3F));
  return 4;
}

bool k3_utf8_is_hostile(uint32_t cp) {
  return cp < 0x20 || (cp >= 0x7F && cp <= 0x9F) || cp == 0x061C || cp == 0x200E || cp == 0x200F || (cp >= 0x2028 && cp <= 0x202E) ||
         (cp >= 0x2066 && cp <= 0x2069) || cp == 0xFEFF;
}
