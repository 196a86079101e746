// How far two drafters' distributions lie apart, slot by slot: pure functions on logits, in F64 whatever they are given.
//   p, q       softmax of A's and of B's logits
//   KL(A||B)   sum p log(p / q), in nats
//   overlap    1 - 0.5 * sum |p - q|: the probability that a token drafted by one is accepted with the other for a target. By the triangle inequality
//   the
//              acceptance of A and of B against any target differ by at most 1 - overlap
//   acceptance 1 - 0.5 * sum |p - t| against the target's softmax t: the probability that the target accepts a token drafted from p
// (speculative sampling; Leviathan et al. 2023, Chen et al. 2023)
#ifndef K3_RUNTIME_COMPARE_H
#define K3_RUNTIME_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct k3_slot_difference {
  double kl, overlap;
  double acceptance_a, acceptance_b;  // with a target
  bool agree;                         // the largest logit is the same token; ties go to the lowest id
};

// One slot. a, b, target [n_vocab] F32 in host memory; `target` may be unaligned, or NULL. Each needs one finite logit (else the numbers are NaN).
// Equal logits give KL 0 and overlap 1 exactly.
void k3_compare_slot(const float *a, const float *b, const void *target, uint64_t n_vocab, struct k3_slot_difference *difference);

// n_slots slots, one after another, on n_threads threads (0: one per CPU); the result does not depend on them. target NULL: none.
enum k3_status k3_compare_slots(const float *a, const float *b, const void *target, uint64_t n_slots, uint64_t n_vocab, int n_threads,
                                struct k3_slot_difference *differences, struct k3_error *err);

// Expected number of accepted tokens of a block from its slots' acceptances, accepted one after another: a1 + a1 a2 + a1 a2 a3 + ...
double k3_expected_tokens(const double *acceptance, uint64_t n_slots);

#endif
