// The rules about quantised checkpoints that need more than one module's tensors: the config against the tensors, the values of the scales, and what
// happens when engines fuse modules. TEN rules are found while modules are classified (loader/linears.h).
#ifndef K3_LOADER_RULES_H
#define K3_LOADER_RULES_H

#include "loader/plan.h"

// Whose judgement counts, the engine that the checkpoint is for: the severity of a finding is what that engine would suffer.
enum k3_judge { K3_JUDGE_K3PACK, K3_JUDGE_VLLM, K3_JUDGE_SGLANG, K3_JUDGE_TRTLLM };

// Severity of a rule for an engine. Only FUS01 .. FUS09, CFG07 .. CFG09 and CFG15 .. CFG18 differ from the catalogue.
enum k3_severity k3_rule_severity(enum k3_rule rule, enum k3_judge engine);

// As k3_findings_report, with the severity for that engine.
void k3_rules_report(struct k3_findings *findings, enum k3_judge engine, enum k3_rule rule, const char *file, const char *tensor, const char *allowed,
                     const char *found, ...) K3_PRINTF(7, 8);

// CFG01 .. CFG04, CFG07 .. CFG10, CFG12, CFG13, CFG15 .. CFG18, MAP03 of KV scales. Headers and JSON only.
// Fails for lack of memory only.
enum k3_status k3_rules_config(const struct k3_plan *plan, enum k3_judge engine, struct k3_findings *findings, struct k3_error *err);

// What the scales of one module say, for the rules that compare modules.
struct k3_scale_facts {
  bool read;  // the scales were read and are finite
  bool has_second, has_input;
  float second, input;         // as stored
  float factor;                // second scale as a multiplier; the per-tensor scale of fp8-tensor; else 1
  float max_scale, min_scale;  // of the block scales; min of those that are not zero
};

// SCL01 .. SCL16, SCL18, TEN08, TEN10, TEN17. Reads scale tensors on n_threads threads (0: one per CPU); weights only under a zero or suspicious
// scale.
//   facts  [plan->linears.n_items], filled
// Fails for lack of memory, or when a tensor cannot be read.
enum k3_status k3_rules_scales(const struct k3_plan *plan, enum k3_judge engine, int n_threads, struct k3_scale_facts *facts,
                               struct k3_findings *findings, struct k3_error *err);

// FUS01, FUS05; with facts also FUS02, FUS03, FUS04, FUS06, FUS09. Fusion sets come from the recipe: the members of a stacked tensor, and all stacks
// that a view ties together. Under "generic" nothing is fused by k3pack, so there only other engines' fused modules count, known by name.
//   facts  NULL: headers only
enum k3_status k3_rules_fusion(const struct k3_plan *plan, enum k3_judge engine, const struct k3_scale_facts *facts, struct k3_findings *findings,
                               struct k3_error *err);

// TEN14 (with `values` equal bytes are looked for) and, with `scales`, K3V04. Fails when a tensor cannot be read.
enum k3_status k3_rules_model(const struct k3_plan *plan, enum k3_judge engine, bool scales, bool values, struct k3_findings *findings,
                              struct k3_error *err);

// CFG21 for schemes that can be read but not packed under this recipe: packed integers and FP8 in groups go with "generic" only.
void k3_rules_packable(const struct k3_plan *plan, struct k3_findings *findings);

#endif
