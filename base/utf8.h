// UTF-8, one code point at a time.
#ifndef K3_BASE_UTF8_H
#define K3_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Number of bytes of the well-formed sequence at src (1..4) and its code point; 0 when it is malformed, overlong, a surrogate, above U+10FFFF or cut
// at nbytes; *code_point is then left alone. nbytes > 0. Source: RFC 3629.
size_t k3_utf8_decode(const char *src, size_t nbytes, uint32_t *code_point);
// Writes 1..4 bytes to dst and returns their number. code_point <= 0x10FFFF and no surrogate.
size_t k3_utf8_encode(uint32_t code_point, char dst[4]);
// True for what must not reach a terminal as it is: C0, DEL, C1, line and paragraph separators, bidirectional controls, the byte-order mark.
bool k3_utf8_is_hostile(uint32_t code_point);

#endif
