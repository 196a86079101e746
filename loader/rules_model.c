// Rules about single tensors of whole models: a head that config and files disagree about, and padding that must be zero.
#include <string.h>

#include "formats/config.h"
#include "loader/rules.h"

static bool ends(const struct k3_st_tensor *t, const char *with) {
  size_t n = strlen(with);
  return t->name_nbytes >= n && memcmp(t->name + t->name_nbytes - n, with, n) == 0 && (t->name_nbytes == n || t->name[t->name_nbytes - n - 1] == '.');
}

struct ends_of_model {
  const struct k3_st_tensor *embed, *head;
  uint64_t embed_number, head_number;
};

static struct ends_of_model find_ends(const struct k3_ckpt *ckpt) {
  struct ends_of_model found = {0};
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    if (!found.embed && ends(tensor, "embed_tokens.weight")) {
      found.embed = tensor;
      found.embed_number = t;
    } else if (!found.head && ends(tensor, "lm_head.weight")) {
      found.head = tensor;
      found.head_number = t;
    }
  }
  return found;
}

static bool same_bytes(const struct k3_ckpt *ckpt, const struct ends_of_model *model) {
  uint64_t nbytes = model->embed->end - model->embed->begin;
  unsigned char a[4096], b[4096];
  if (model->embed->dtype != model->head->dtype || nbytes != model->head->end - model->head->begin)
    return false;
  for (uint64_t at = 0; at < nbytes; at += sizeof a) {
    size_t n = nbytes - at < sizeof a ? (size_t)(nbytes - at) : sizeof a;
    if (k3_ckpt_read(ckpt, model->embed_number, at, a, n, NULL) != K3_OK || k3_ckpt_read(ckpt, model->head_number, at, b, n, NULL) != K3_OK ||
        memcmp(a, b, n) != 0)
      return false;
  }
  return true;
}

// A drafter borrows its head, so the field says nothing about its files.
static void check_tied(const struct k3_plan *plan, enum k3_judge engine, bool values, struct k3_findings *findings) {
  static const char *const paths[] = {"tie_word_embeddings", "text_config.tie_word_embeddings"};
  const struct k3_ckpt *ckpt = plan->ckpt;
  bool tied = false, said = false;
  const char *path = NULL;
  if (!ckpt->config || plan->recipe->n_borrowed_roots > 0)
    return;
  for (size_t i = 0; i < 2 && !said; i++) {
    path = paths[i];
    if (k3_config_bool(ckpt->config, path, &tied, &said, NULL) != K3_OK)
      said = false;
  }
  struct ends_of_model model = find_ends(ckpt);
  if (!said || !model.embed)
    return;
  if (!tied && !model.head && !k3_ckpt_promised(ckpt, "lm_head.weight"))
    k3_rules_report(findings, engine, K3_TEN14, k3_config_file(ckpt->config), path, "true, or an lm_head in the files",
                    "false, and no lm_head: engines look for one");
  if (tied && model.head && !(values && same_bytes(ckpt, &model)))
    k3_rules_report(findings, engine, K3_TEN14, k3_ckpt_file_of(ckpt, model.head_number)->path, model.head->name, "no head of its own, or false",
                    values ? "%s is true, and this head has other bytes than %s" : "%s is true, and there is a head besides %s", path,
                    model.embed->name);
}

// One value for every head; files of the release go on to the width of a head, with zeros.
static enum k3_status check_a_log(const struct k3_plan *plan, enum k3_judge engine, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_ckpt *ckpt = plan->ckpt;
  uint64_t n_heads = 0;
  if (k3_config_u64(ckpt->config, "linear_attn_config.num_heads", &n_heads, NULL, NULL) != K3_OK || n_heads == 0)
    return K3_OK;
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    float values[4096];
    uint64_t n = k3_st_n_elems(tensor), n_bad = 0, first = 0;
    if (tensor->dtype != K3_DTYPE_F32 || tensor->rank != 1 || n <= n_heads || n > 4096 || !ends(tensor, "A_log"))
      continue;
    K3_TRY(k3_ckpt_read(ckpt, t, 0, values, n * sizeof *values, err));
    for (uint64_t i = n_heads; i < n; i++) {
      if (values[i] != 0 && n_bad++ == 0)
        first = i;
    }
    if (n_bad > 0)
      k3_rules_report(findings, engine, K3_K3V04, k3_ckpt_file_of(ckpt, t)->path, tensor->name, "zeros behind the last head",
                      "%llu values behind the %llu heads are not zero, the first is element %llu", (unsigned long long)n_bad,
                      (unsigned long long)n_heads, (unsigned long long)first);
  }
  return K3_OK;
}

enum k3_status k3_rules_model(const struct k3_plan *plan, enum k3_judge engine, bool scales, bool values, struct k3_findings *findings,
                              struct k3_error *err) {
  check_tied(plan, engine, values, findings);
  if (!scales || !plan->ckpt->config || strcmp(plan->recipe->family, "kimi-k3") != 0)
    return K3_OK;
  return check_a_log(plan, engine, findings, err);
}
