// The one file that names OpenSSL.
#include <openssl/evp.h>
#include <stdio.h>

#include "base/alloc.h"
#include "base/hash.h"

struct k3_sha256 {
  EVP_MD_CTX *ctx;
};

static enum k3_status fail_library(struct k3_error *err) {
  return k3_fail(err, K3_NO_MEMORY, K3_RULE_NONE, NULL, NULL, NULL, "libcrypto could not compute SHA-256");
}

enum k3_status k3_sha256(const void *src, size_t nbytes, uint8_t digest[K3_SHA256_NBYTES], struct k3_error *err) {
  return EVP_Digest(src, nbytes, digest, NULL, EVP_sha256(), NULL) == 1 ? K3_OK : fail_library(err);
}

struct k3_sha256 *k3_sha256_create(struct k3_error *err) {
  struct k3_sha256 *state = k3_calloc(1, sizeof *state, err);
  if (!state)
    return NULL;
  state->ctx = EVP_MD_CTX_new();
  if (!state->ctx || EVP_DigestInit_ex(state->ctx, EVP_sha256(), NULL) != 1) {
    fail_library(err);
    k3_sha256_free(state);
    return NULL;
  }
  return state;
}

enum k3_status k3_sha256_update(struct k3_sha256 *state, const void *src, size_t nbytes, struct k3_error *err) {
  return EVP_DigestUpdate(state->ctx, src, nbytes) == 1 ? K3_OK : fail_library(err);
}

enum k3_status k3_sha256_finish(struct k3_sha256 *state, uint8_t digest[K3_SHA256_NBYTES], struct k3_error *err) {
  return EVP_DigestFinal_ex(state->ctx, digest, NULL) == 1 ? K3_OK : fail_library(err);
}

void k3_sha256_free(struct k3_sha256 *state) {
  if (state) {
    EVP_MD_CTX_free(state->ctx);
    k3_free(state);
  }
}

void k3_hex(char dst[2 * K3_SHA256_NBYTES + 1], const uint8_t digest[K3_SHA256_NBYTES]) {
  for (int i = 0; i < K3_SHA256_NBYTES; i++)
    snprintf(dst + 2 * i, 3, "%02x", digest[i]);
}
