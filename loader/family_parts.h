// Between the files of the family rules; nobody else includes this.
#ifndef K3_LOADER_FAMILY_PARTS_H
#define K3_LOADER_FAMILY_PARTS_H

#include "loader/family.h"
#include "loader/plan_parts.h"

struct k3_family {
  const char *name;
  void (*check_config)(const struct k3_config *config, struct k3_findings *findings);
  void (*check_tensors)(const struct k3_plan *plan, struct k3_findings *findings);
  enum k3_status (*check_values)(const struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err);  // NULL: none
};

extern const struct k3_family K3_FAMILY_MINIMAX_M3, K3_FAMILY_DEEPSEEK_V32, K3_FAMILY_KIMI_K3;

// Reports a contradiction of config.json (CFG20).
#define K3_FAMILY_CONTRADICTION(findings, config, field, allowed, ...) \
  k3_findings_report(findings, K3_CFG20, k3_config_file(config), field, allowed, __VA_ARGS__)

// An integer field, `fallback` when it is absent or no integer (shapes need the required ones, so their absence is reported elsewhere).
static inline uint64_t k3_family_u64(const struct k3_config *config, const char *path, uint64_t fallback) {
  uint64_t value = fallback;
  return k3_config_u64(config, path, &value, NULL, NULL) == K3_OK ? value : fallback;
}

// The first of two spellings of an integer field that exists.
static inline uint64_t k3_family_u64_of(const struct k3_config *config, const char *path, const char *other, uint64_t fallback) {
  return k3_family_u64(config, path, k3_family_u64(config, other, fallback));
}

// A field that the released models have with one value, which is built into what engines make of the family; absent is fine.
struct k3_family_constant {
  const char *field, *why;   // why: what another value would mean
  enum k3_config_kind kind;  // K3_CONFIG_STRING, K3_CONFIG_BOOL, or a number
  const char *text;          // of a string, else NULL
  bool truth;
  double number;
};
#define K3_CONSTANT_TEXT(name, value, reason) \
  { .field = name, .why = reason, .kind = K3_CONFIG_STRING, .text = value }
#define K3_CONSTANT_BOOL(name, value, reason) \
  { .field = name, .why = reason, .kind = K3_CONFIG_BOOL, .truth = value }
#define K3_CONSTANT_NUMBER(name, value, reason) \
  { .field = name, .why = reason, .kind = K3_CONFIG_REAL, .number = value }

// Reports fields with another value than that (CFG20).
void k3_family_expect(const struct k3_config *config, const struct k3_family_constant *constants, size_t n, struct k3_findings *findings);

// Reports plain linears that no entry of a short 8-bit quantization config ("fp8", "mxfp8") excludes (CFG02): such a config leaves the choice to the
// tensors, but an engine of the family looks for scales. `plain`: the module that is stored plain without saying so, or NULL.
void k3_family_check_plain(const struct k3_plan *plan, const char *plain, struct k3_findings *findings);

// Number of items of a list, UINT64_MAX when the field is absent.
uint64_t k3_family_list_length(const struct k3_config *config, const char *path);

// The tensor of a module without companions under its recipe name and first index; UINT64_MAX when there is none.
uint64_t k3_family_tensor(const struct k3_plan *plan, const char *module, uint64_t index);

// Whether two tensors of the checkpoint hold the same bytes.
enum k3_status k3_family_same_bytes(const struct k3_plan *plan, uint64_t a, uint64_t b, bool *same, struct k3_error *err);

// Number of prediction modules of which some tensor is there: values from `first` on of the recipe's index number `index`.
uint64_t k3_family_n_present(const struct k3_plan *plan, size_t index, uint64_t first);

#endif
