// SHA-256 (OpenSSL libcrypto) and CRC-32 (zlib).
#ifndef K3_BASE_HASH_H
#define K3_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

enum { K3_SHA256_NBYTES = 32 };

// SHA-256 of one buffer. Thread-safe. K3_NO_MEMORY when the library fails.
enum k3_status k3_sha256(const void *src, size_t nbytes, uint8_t digest[K3_SHA256_NBYTES], struct k3_error *err);

// Streaming SHA-256; the handle is owned by the caller. create gives NULL and *err on failure; free takes NULL.
struct k3_sha256;
struct k3_sha256 *k3_sha256_create(struct k3_error *err);
enum k3_status k3_sha256_update(struct k3_sha256 *state, const void *src, size_t nbytes, struct k3_error *err);
enum k3_status k3_sha256_finish(struct k3_sha256 *state, uint8_t digest[K3_SHA256_NBYTES], struct k3_error *err);
void k3_sha256_free(struct k3_sha256 *state);

// CRC-32 (IEEE 802.3, as zlib, gzip and PNG compute it) of a buffer of any size.
uint32_t k3_crc32(const void *src, size_t nbytes);

// 64 lower-case hex digits and a terminator.
void k3_hex(char dst[2 * K3_SHA256_NBYTES + 1], const uint8_t digest[K3_SHA256_NBYTES]);

#endif
