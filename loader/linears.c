// Which linear layers a checkpoint has, and which tensors belong to each.
#include "loader/linears.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "loader/linears_parts.h"

const struct k3_st_tensor *k3_linear_tensor(const struct k3_plan *plan, const struct k3_linear *linear, enum k3_param param) {
  if (param >= K3_PARAM_KNOWN_COUNT || linear->tensors[param] == K3_LINEAR_ABSENT)
    return NULL;
  return k3_ckpt_tensor(k3_linear_ckpt(plan, linear), linear->tensors[param]);
}

static enum k3_param first_of(const struct k3_linear *linear, enum k3_param a, enum k3_param b) {
  return linear->tensors[a] != K3_LINEAR_ABSENT ? a : linear->tensors[b] != K3_LINEAR_ABSENT ? b : K3_PARAM_KNOWN_COUNT;
}

enum k3_param k3_linear_weight(const struct k3_linear *linear) {
  return first_of(linear, K3_PARAM_WEIGHT_PACKED, K3_PARAM_WEIGHT);
}

enum k3_param k3_linear_scale(const struct k3_linear *linear) {
  return first_of(linear, K3_PARAM_WEIGHT_SCALE, K3_PARAM_WEIGHT_SCALE_INV);
}

enum k3_param k3_linear_second(const struct k3_linear *linear) {
  return first_of(linear, K3_PARAM_WEIGHT_GLOBAL_SCALE, K3_PARAM_WEIGHT_SCALE_2);
}

enum k3_param k3_linear_input(const struct k3_linear *linear) {
  return first_of(linear, K3_PARAM_INPUT_GLOBAL_SCALE, K3_PARAM_INPUT_SCALE);
}

char *k3_linear_text(const struct k3_linear *linear, char *dst, size_t capacity) {
  snprintf(dst, capacity, "%.*s", (int)linear->name_nbytes, linear->name);
  return dst;
}

// ---- names ----

static bool ends_with(const char *name, size_t nbytes, const char *end) {
  size_t n = strlen(end);
  return nbytes >= n && memcmp(name + nbytes - n, end, n) == 0;
}

char k3_kv_scale_of(const char *name, size_t nbytes, size_t *stem_nbytes) {
  // Longer spellings first: each is cut off as a whole, so that all spellings of one layer have one stem.
  static const struct {
    const char *end;
    char which;
  } spellings[] = {
      {".k_proj.output_scale", 'k'},
      {".v_proj.output_scale", 'v'},
      {".k_proj.k_scale", 'k'},
      {".v_proj.v_scale", 'v'},
      {".q_proj.q_scale", 'q'},
      {".attn.k_scale", 'k'},
      {".attn.v_scale", 'v'},
      {".attn.q_scale", 'q'},
      {".kv_scale", 'b'},
      {".kv_cache_scale", 'b'},
      {".k_scale", 'k'},
      {".v_scale", 'v'},
      {".q_scale", 'q'},
  };
  for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
    if (ends_with(name, nbytes, spellings[i].end)) {
      *stem_nbytes = nbytes - strlen(spellings[i].end);
      return spellings[i].which;
    }
  }
  return 0;
}

enum k3_foreign k3_foreign_of(const struct k3_st_tensor *tensor) {
  const char *name = tensor->name;
  size_t n = tensor->name_nbytes;
  if (ends_with(name, n, ".scale") && tensor->dtype == K3_DTYPE_F8_E8M0)
    return K3_FOREIGN_DEEPSEEK_V4;
  if (tensor->dtype == K3_DTYPE_U8 &&
      (ends_with(name, n, "_blocks") || ends_with(name, n, "_scales") || ends_with(name, n, ".blocks") || ends_with(name, n, ".scales")))
    return K3_FOREIGN_GPT_OSS;
  if (ends_with(name, n, ".trellis") || ends_with(name, n, ".suh") || ends_with(name, n, ".svh"))
    return K3_FOREIGN_EXL3;
  if (ends_with(name, n, ".pre_quant_scale") || ends_with(name, n, ".qweight") || ends_with(name, n, ".qzeros"))
    return K3_FOREIGN_AWQ_SCALE;
  if (ends_with(name, n, ".weight_quantizer.svdquant_lora_a") || ends_with(name, n, ".weight_quantizer.svdquant_lora_b"))
    return K3_FOREIGN_ROTATION;
  if (ends_with(name, n, ".weight.compressed") || ends_with(name, n, ".compressed") || ends_with(name, n, ".bitmask"))
    return K3_FOREIGN_SPARSE;
  return K3_FOREIGN_NONE;
}

static void report_foreign(const struct k3_plan *plan, struct k3_findings *findings) {
  static const char *const what[] = {
      "",
      "DeepSeek-V4 weights (`.scale` of E8M0 beside FP8 or packed FP4)",
      "gpt-oss blocks (`*_blocks` and `*_scales`, rows of gate and up interleaved)",
      "EXL3 weights (a trellis)",
      "AWQ weights, or AWQ scales that multiply the activations",
      "a low-rank correction beside every weight (SVDQuant)",
      "sparse weights",
      "INT8 weights",
  };
  uint64_t n[K3_FOREIGN_INT8 + 1] = {0}, first[K3_FOREIGN_INT8 + 1] = {0};
  for (uint64_t t = 0; t < plan->ckpt->n_tensors; t++) {
    enum k3_foreign kind = k3_foreign_of(k3_ckpt_tensor(plan->ckpt, t));
    if (kind != K3_FOREIGN_NONE && n[kind]++ == 0)
      first[kind] = t;
  }
  for (size_t i = 0; i < plan->linears.n_items; i++) {
    const struct k3_linear *linear = &plan->linears.items[i];
    const struct k3_st_tensor *weight = k3_linear_tensor(plan, linear, k3_linear_weight(linear));
    if (weight && weight->dtype == K3_DTYPE_I8 && n[K3_FOREIGN_DEEPSEEK_V4] == 0 && !linear->of_target && n[K3_FOREIGN_INT8]++ == 0)
      first[K3_FOREIGN_INT8] = linear->tensors[k3_linear_weight(linear)];
  }
  for (int kind = K3_FOREIGN_NONE + 1; kind <= K3_FOREIGN_INT8; kind++) {
    if (n[kind] > 0)
      k3_findings_report(findings, K3_CFG21, k3_ckpt_file_of(plan->ckpt, first[kind])->path, k3_ckpt_tensor(plan->ckpt, first[kind])->name,
                         "weights in BF16, FP8, MXFP8, NVFP4, MXFP4 or packed integers", "%s: recognised, not supported (%llu %s)", what[kind],
                         (unsigned long long)n[kind], n[kind] == 1 ? "tensor" : "tensors");
  }
}

// What configs call "Linear" in a checkpoint without recipe: two dimensions, and no table that rows are looked up in.
static bool linear_by_name(const char *module, size_t nbytes, unsigned rank) {
  static const char *const tables[] = {"embed_tokens",   "wte",        "wpe",       "markov_w1", "word_embeddings",
                                       "tok_embeddings", "embeddings", "embedding", "embed"};
  size_t at = nbytes;
  while (at > 0 && module[at - 1] != '.')
    at--;
  const char *last = module + at;
  size_t n = nbytes - at;
  for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
    if (strlen(tables[i]) == n && memcmp(last, tables[i], n) == 0)
      return false;
  }
  // A mixture's router has a weight of its own class.
  return rank == 2 && !ends_with(last, n, "norm") && !(n == 4 && memcmp(last, "gate", 4) == 0) && !(n == 6 && memcmp(last, "router", 6) == 0);
}

// ---- collecting ----

static struct k3_linear *add_linear(struct k3_plan *plan, const char *name, size_t nbytes, struct k3_error *err) {
  struct k3_linears *linears = &plan->linears;
  if (k3_grow(&linears->items, &linears->capacity, linears->n_items + 1, sizeof *linears->items, err) != K3_OK)
    return NULL;
  struct k3_linear *linear = &linears->items[linears->n_items++];
  static const struct k3_quant_answer plain = {.says = K3_SAYS_PLAIN};
  *linear =
      (struct k3_linear){.says = &plain, .name = name, .name_nbytes = (uint32_t)nbytes, .module = UINT16_MAX, .is_plain = true, .is_sound = true};
  for (int p = 0; p < K3_PARAM_KNOWN_COUNT; p++)
    linear->tensors[p] = K3_LINEAR_ABSENT;
  return linear;
}

static size_t module_nbytes(const struct k3_st_tensor *tensor) {
  size_t n = tensor->name_nbytes;
  while (n > 0 && tensor->name[n - 1] != '.')
    n--;
  return n > 0 ? n - 1 : 0;
}

// Under a recipe: the shards are sorted by instance.
static enum k3_status collect_shards(struct k3_plan *plan, struct k3_error *err) {
  for (size_t first = 0, last; first < plan->n_shards; first = last) {
    const struct k3_mapped *key = &plan->shards[first].mapped;
    last = first + 1;
    while (last < plan->n_shards && plan->shards[last].mapped.module == key->module &&
           memcmp(plan->shards[last].mapped.index, key->index, sizeof key->index) == 0)
      last++;
    const struct k3_st_tensor *weight = NULL;
    for (size_t s = first; s < last && !weight; s++) {
      unsigned param = plan->shards[s].mapped.param;
      if (param == K3_PARAM_WEIGHT || param == K3_PARAM_WEIGHT_PACKED)
        weight = k3_ckpt_tensor(k3_plan_ckpt(plan, plan->shards[s].mapped.of_target), plan->shards[s].mapped.tensor);
    }
    if (key->module == UINT16_MAX || !weight || weight->rank < 2)
      continue;
    struct k3_linear *linear = add_linear(plan, weight->name, module_nbytes(weight), err);
    if (!linear)
      return K3_NO_MEMORY;
    linear->module = key->module;
    linear->is_linear = plan->recipe->modules[key->module].linear;
    linear->of_target = key->of_target;
    memcpy(linear->index, key->index, sizeof linear->index);
    for (size_t s = first; s < last; s++) {
      struct k3_plan_shard *shard = &plan->shards[s];
      shard->linear = (uint32_t)(plan->linears.n_items - 1);
      if (shard->mapped.param < K3_PARAM_KNOWN_COUNT && linear->tensors[shard->mapped.param] == K3_LINEAR_ABSENT &&
          shard->mapped.of_target == linear->of_target)
        linear->tensors[shard->mapped.param] = shard->mapped.tensor;
    }
  }
  return K3_OK;
}

static bool quantised_dtype(unsigned dtype) {
  return dtype == K3_DTYPE_U8 || dtype == K3_DTYPE_I8 || dtype == K3_DTYPE_I32 || dtype == K3_DTYPE_F4 ||
         (k3_dtype_is_float((enum k3_dtype)dtype) && k3_dtype_bits((enum k3_dtype)dtype) <= 8);
}

// Without recipe: by the last component of every name. Only parameters that occur at all are looked up for every weight.
static enum k3_status collect_names(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_ckpt *ckpt = plan->ckpt;
  uint64_t n_of[K3_PARAM_KNOWN_COUNT] = {0}, n_quantised = 0;
  char name[K3_ST_MAX_NAME_NBYTES + 32];
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    size_t n = module_nbytes(tensor);
    enum k3_param param;
    if (n == 0 || !k3_param_from_name(tensor->name + n + 1, tensor->name_nbytes - n - 1, &param))
      continue;
    n_of[param]++;
    n_quantised += (param == K3_PARAM_WEIGHT || param == K3_PARAM_WEIGHT_PACKED) && quantised_dtype(tensor->dtype);
  }
  uint64_t n_companions = 0;
  for (int p = K3_PARAM_WEIGHT_SCALE; p < K3_PARAM_BIAS; p++)
    n_companions += n_of[p];
  if (n_companions + n_quantised == 0 && !plan->linears.config && !plan->options.encode)
    return K3_OK;
  for (uint64_t t = 0; t < ckpt->n_tensors; t++) {
    const struct k3_st_tensor *tensor = k3_ckpt_tensor(ckpt, t);
    size_t n = module_nbytes(tensor);
    enum k3_param param;
    uint64_t other;
    if (n == 0 || !k3_param_from_name(tensor->name + n + 1, tensor->name_nbytes - n - 1, &param) || param == K3_PARAM_BIAS)
      continue;
    memcpy(name, tensor->name, n + 1);
    bool weight = param == K3_PARAM_WEIGHT || param == K3_PARAM_WEIGHT_PACKED;
    if (!weight) {
      strcpy(name + n + 1, "weight");
      bool has_weight = k3_ckpt_find(ckpt, name, n + 7, &other) || k3_ckpt_promised(ckpt, name);
      strcpy(name + n + 1, "weight_packed");
      has_weight = has_weight || k3_ckpt_find(ckpt, name, n + 14, &other) || k3_ckpt_promised(ckpt, name);
      if (!has_weight)
        k3_findings_report(findings, K3_TEN02, k3_ckpt_file_of(ckpt, t)->path, tensor->name, "a weight beside it", "a companion without its weight");
      continue;
    }
    strcpy(name + n + 1, "weight_packed");
    if (param == K3_PARAM_WEIGHT && n_of[K3_PARAM_WEIGHT_PACKED] > 0 && k3_ckpt_find(ckpt, name, n + 14, &other))
      continue;  // the module comes with its packed weight
    bool companion = false;
    uint32_t tensors[K3_PARAM_KNOWN_COUNT];
    for (int p = 0; p < K3_PARAM_KNOWN_COUNT; p++) {
      size_t n_param = strlen(k3_param_name((enum k3_param)p));
      tensors[p] = K3_LINEAR_ABSENT;
      if (n_of[p] == 0)
        continue;
      memcpy(name + n + 1, k3_param_name((enum k3_param)p), n_param);
      if (p == (int)param)
        tensors[p] = (uint32_t)t;
      else if (k3_ckpt_find(ckpt, name, n + 1 + n_param, &other))
        tensors[p] = (uint32_t)other;
      companion |= p >= K3_PARAM_WEIGHT_SCALE && p < K3_PARAM_BIAS && tensors[p] != K3_LINEAR_ABSENT;
    }
    if (tensor->rank < 2 && !companion && !quantised_dtype(tensor->dtype))
      continue;
    if (!companion && !quantised_dtype(tensor->dtype) && !k3_dtype_is_float((enum k3_dtype)tensor->dtype))
      continue;
    struct k3_linear *linear = add_linear(plan, tensor->name, n, err);
    if (!linear)
      return K3_NO_MEMORY;
    memcpy(linear->tensors, tensors, sizeof tensors);
    linear->is_linear = linear_by_name(tensor->name, n, tensor->rank);
  }
  return K3_OK;
}

// ---- the config ----

static enum k3_status read_config(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  const struct k3_ckpt *ckpt = plan->ckpt;
  struct k3_config *hf = NULL;
  enum k3_status status = K3_OK;
  for (size_t d = 0; d < ckpt->n_documents && status == K3_OK; d++) {
    if (strcmp(ckpt->documents[d].name, "hf_quant_config.json") != 0)
      continue;
    void *text;
    size_t nbytes;
    struct k3_error bad = {0};
    K3_TRY(k3_read_file(ckpt->documents[d].path, ckpt->documents[d].nbytes, &text, &nbytes, err));
    hf = k3_config_parse(text, nbytes, ckpt->documents[d].path, &bad);
    k3_free(text);
    if (!hf && bad.status == K3_NO_MEMORY)
      status = k3_fail_memory(err, 0);
    else if (!hf && bad.rule != K3_RULE_NONE)
      k3_findings_add(findings, K3_ERROR, &bad);
    plan->linears.config_present = true;
  }
  plan->linears.config_present |= ckpt->config && (k3_config_kind_of(ckpt->config, "quantization_config") != K3_CONFIG_ABSENT ||
                                                   k3_config_kind_of(ckpt->config, "compression_config") != K3_CONFIG_ABSENT);
  if (status == K3_OK)
    status = k3_quant_config_read(ckpt->config, hf, &plan->linears.config, findings, err);
  k3_config_free(hf);
  return status;
}

static bool same_answer(const struct k3_quant_answer *a, const struct k3_quant_answer *b) {
  return a->says == b->says && a->group == b->group && a->rival == b->rival && a->ignored_by == b->ignored_by;
}

enum k3_status k3_plan_classify(struct k3_plan *plan, struct k3_findings *findings, struct k3_error *err) {
  for (size_t s = 0; s < plan->n_shards; s++)
    plan->shards[s].linear = K3_LINEAR_ABSENT;
  K3_TRY(read_config(plan, findings, err));
  K3_TRY(plan->recipe->keep_names ? collect_names(plan, findings, err) : collect_shards(plan, err));
  report_foreign(plan, findings);
  bool foreign = findings->n_errors_by_rule[K3_CFG21] > 0;
  const struct k3_quant_answer *said = NULL;
  for (size_t i = 0; i < plan->linears.n_items; i++) {
    struct k3_linear *linear = &plan->linears.items[i];
    if (plan->linears.config && !linear->of_target) {
      const struct k3_quant_answer answer = k3_quant_config_find(plan->linears.config, linear->name, linear->name_nbytes, linear->is_linear);
      if (!said || !same_answer(said, &answer)) {
        struct k3_quant_answer *kept = k3_arena_alloc(&plan->arena, sizeof *kept, err);
        if (!kept)
          return K3_NO_MEMORY;
        *kept = answer;
        said = kept;
      }
      linear->says = said;
    }
    // What stands beside weights of a foreign format follows rules of its own.
    if (!foreign)
      k3_linear_classify(plan, linear, findings);
    plan->linears.n_quantised += !linear->is_plain;
  }
  return foreign ? K3_OK : k3_linears_check_inputs(plan, findings, err);
}

void k3_linears_free(struct k3_linears *linears) {
  k3_quant_config_free(linears->config);
  k3_free(linears->items);
  *linears = (struct k3_linears){0};
}
