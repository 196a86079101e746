// The rules that need every weight byte: one streaming pass over a checkpoint, in parallel over parts of its tensors.
#ifndef K3_LOADER_RULES_VALUES_H
#define K3_LOADER_RULES_VALUES_H

#include "base/progress.h"
#include "loader/rules.h"

// VAL01 .. VAL06, VAL08, VAL09 and CNT10, reported in the order of the tensors whatever the number of threads; for an image also IMG02 (its segments
// against their digests). Every byte of every tensor is read once, scales beside their weights a second time; the histogram of VAL03 and VAL06 is
// taken from one sixteenth of the codes of a large tensor.
//   ckpt       what is read; the tensors of a target model are not
//   plan       of that checkpoint: how its modules are stored. NULL, or without modules: every tensor by its dtype alone
//   n_threads  0: one per CPU; memory is 0.3 MB a thread and 0.2 KB a tensor
// Fails for lack of memory, or when a tensor cannot be read.
enum k3_status k3_rules_values(const struct k3_ckpt *ckpt, const struct k3_plan *plan, enum k3_judge engine, int n_threads,
                               struct k3_progress *progress, struct k3_findings *findings, struct k3_error *err);

#endif
