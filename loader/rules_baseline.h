// A quantised checkpoint against the plain weights it was made from.
#ifndef K3_LOADER_RULES_BASELINE_H
#define K3_LOADER_RULES_BASELINE_H

#include "base/progress.h"
#include "loader/rules.h"

struct k3_baseline_summary {
  uint64_t n_compared, n_absent;  // quantised weights with a plain twin of their shape in the baseline; without one
  double worst_rmse;              // relative RMSE of the worst tensor
};

// VAL07: relative RMSE above 0.20 (FP4) or 0.06 (FP8); rows of a tensor that is too far off are decoded again with nibbles swapped, with the second
// scale's reciprocal, with the rows of two halves interleaved (both ways) and with the scale grid transposed, and the finding names the change that
// fits. VAL10: bytes that encoding the baseline with the stored second scale would not give, beyond neighbouring codes, the sign of zero and one step
// of the block scale. A weight's twin is BASE.weight of the same name, under the same root or another ("model.", "language_model.model.", ...); its
// shape must be equal.
//   baseline  the plain checkpoint
//   summary   filled
// Fails for lack of memory, or when a tensor cannot be read.
enum k3_status k3_rules_baseline(const struct k3_plan *plan, const struct k3_ckpt *baseline, enum k3_judge engine, int n_threads,
                                 struct k3_progress *progress, struct k3_baseline_summary *summary, struct k3_findings *findings,
                                 struct k3_error *err);

#endif
