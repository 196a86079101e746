// Proving an image: header, manifest, seal, and every segment against its digest.
#ifndef K3_LOADER_VERIFY_H
#define K3_LOADER_VERIFY_H

#include "base/findings.h"
#include "base/progress.h"
#include "loader/ckpt.h"

struct k3_verify_result {
  uint64_t nbytes, n_segments, n_bad_segments;
  bool has_digests, has_crc;
  char identity[65];  // the seal in hex; "" when the front is broken
};

// Reads the whole file once. Everything that does not hold becomes a finding (CNT, IMG01, IMG02, IMG03); a bad segment names its byte range and the
// first tensor in it. Fails only when the file cannot be read. n_threads 0: one per CPU; progress may be NULL.
enum k3_status k3_verify_image(const char *path, int n_threads, struct k3_progress *progress, struct k3_verify_result *result,
                               struct k3_findings *findings, struct k3_error *err);

// Holds the weights that the conversion encoded against the checkpoint they were made of: encoded again with the image's second scales (FP8: with
// scales measured again), they must give the image's bytes. What does not becomes an IMG02 finding. *n_equal: image tensors' parts that did. Weights
// of a target model are left out.
enum k3_status k3_verify_encoded(const struct k3_ckpt *image, const struct k3_ckpt *source, int n_threads, struct k3_progress *progress,
                                 uint64_t *n_equal, struct k3_findings *findings, struct k3_error *err);
// Whether a tensor of the image is a parameter of such a weight; *linear (may be NULL) receives its module's entry.
bool k3_manifest_encoded(const struct k3_manifest *manifest, const char *tensor, const struct k3_manifest_linear **linear);

#endif
