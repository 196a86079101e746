// The quantization config: which form it has, two places that must agree, and what it says about a module.
#include "formats/quant_config.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "formats/json_tree.h"
#include "formats/quant_config_parts.h"

void k3_quant_complain(struct k3_quant_reader *reader, enum k3_rule rule, const char *subject, const char *allowed, const char *found, ...) {
  char text[512];
  va_list args;
  va_start(args, found);
  vsnprintf(text, sizeof text, found, args);
  va_end(args);
  k3_findings_report(reader->findings, rule, reader->file, subject, allowed, "%s", text);
  if (k3_rule_info(rule)->severity == K3_ERROR)
    reader->usable = false;
}

const char *k3_quant_keep(struct k3_quant_reader *reader, const char *text) {
  return k3_arena_strndup(&reader->quant->arena, text, strlen(text), reader->err);
}

struct k3_quant_group *k3_quant_add_group(struct k3_quant_reader *reader, const char *name) {
  struct k3_quant_config *quant = reader->quant;
  if (k3_grow(&quant->groups, &quant->groups_capacity, quant->n_groups + 1, sizeof *quant->groups, reader->err) != K3_OK)
    return NULL;
  struct k3_quant_group *group = &quant->groups[quant->n_groups];
  *group = (struct k3_quant_group){.name = k3_quant_keep(reader, name)};
  if (!group->name)
    return NULL;
  quant->n_groups++;
  return group;
}

// A class is written like a class: no dot, an upper-case letter first.
static bool looks_like_class(const char *text) {
  return text[0] >= 'A' && text[0] <= 'Z' && !strchr(text, '.');
}

static bool entry_is(const void *owner, uint32_t number, const char *name, size_t nbytes) {
  const struct k3_quant_entries *entries = owner;
  const char *text = entries->items[number].text;
  return strncmp(text, name, nbytes) == 0 && text[nbytes] == '\0';
}

enum k3_status k3_quant_add_entry(struct k3_quant_reader *reader, struct k3_quant_entries *entries, const char *text, enum k3_entry_style style) {
  enum k3_pattern_kind kind = K3_PATTERN_LITERAL;
  const char *body = text;
  if (style == K3_ENTRY_COMPRESSED_TENSORS && strncmp(text, "re:", 3) == 0) {
    kind = K3_PATTERN_REGEX;
    body = text + 3;
  } else if (style == K3_ENTRY_GLOB) {
    kind = K3_PATTERN_GLOB;
  } else if (style == K3_ENTRY_COMPONENTS) {
    kind = K3_PATTERN_COMPONENTS;
  }
  K3_TRY(k3_grow(&entries->items, &entries->capacity, entries->n_items + 1, sizeof *entries->items, reader->err));
  struct k3_quant_entry *entry = &entries->items[entries->n_items];
  *entry = (struct k3_quant_entry){
      .text = k3_quant_keep(reader, text), .tree = style == K3_ENTRY_TREE, .class_name = kind == K3_PATTERN_LITERAL && looks_like_class(text)};
  if (!entry->text)
    return K3_NO_MEMORY;
  struct k3_error bad = {0};
  entry->pattern = k3_pattern_compile(kind, body, reader->file, &bad);
  if (!entry->pattern && bad.status == K3_NO_MEMORY)
    return k3_fail_memory(reader->err, 0);
  if (!entry->pattern) {
    reader->usable = false;
    return k3_findings_add(reader->findings, K3_ERROR, &bad);
  }
  uint32_t number = (uint32_t)entries->n_items++, earlier;
  if (kind != K3_PATTERN_LITERAL) {
    K3_TRY(k3_grow(&entries->others, &entries->others_capacity, entries->n_others + 1, sizeof *entries->others, reader->err));
    entries->others[entries->n_others++] = number;
    return K3_OK;
  }
  K3_TRY(k3_name_set_add(&entries->literals, entry_is, entries, text, strlen(text), number, &earlier, reader->err));
  if (earlier != K3_NAME_NONE) {  // the same name twice says nothing new
    k3_pattern_free(entry->pattern);
    entries->n_items--;
  }
  return K3_OK;
}

enum k3_status k3_quant_add_entries(struct k3_quant_reader *reader, struct k3_quant_entries *entries, const json_t *list, const char *key,
                                    enum k3_entry_style style) {
  if (!list || json_is_null(list))
    return K3_OK;
  if (!json_is_array(list)) {
    k3_quant_complain(reader, K3_CFG20, key, "a list of texts", "no list");
    return K3_OK;
  }
  for (size_t i = 0; i < json_array_size(list); i++) {
    const json_t *item = json_array_get(list, i);
    if (!json_is_string(item))
      k3_quant_complain(reader, K3_CFG20, key, "a list of texts", "entry %zu is no text", i);
    else
      K3_TRY(k3_quant_add_entry(reader, entries, json_string_value(item), style));
  }
  return K3_OK;
}

// ---- which form ----

static const struct {
  const char *method, *what;
} FOREIGN[] = {
    {"exl3", "EXL3 weights"},
    {"exl2", "EXL2 weights"},
    {"awq", "AutoAWQ weights"},
    {"gptq", "GPTQ weights"},
    {"bitsandbytes", "bitsandbytes weights"},
    {"auto-round", "AutoRound weights in their own layout"},
    {"gguf", "GGUF weights"},
    {"hqq", "HQQ weights"},
    {"aqlm", "AQLM weights"},
    {"torchao", "torchao weights"},
    {"fbgemm_fp8", "FBGEMM weights"},
    {"w4afp8", "W4AFP8 experts"},
    {"petit_nvfp4", "Petit weights"},
};

static enum k3_status read_method(struct k3_quant_reader *reader, const json_t *object) {
  const char *method = k3_quant_text(object, "quant_method", NULL);
  struct k3_quant_config *quant = reader->quant;
  if (!method && json_object_get(object, "quant_algo"))
    method = "modelopt";
  if (!method && json_object_get(object, "config_groups"))
    method = "compressed-tensors";
  if (!method) {
    k3_quant_complain(reader, K3_CFG20, "quantization_config.quant_method", "the name of a method", "the field is missing");
    return K3_OK;
  }
  quant->method = k3_quant_keep(reader, method);
  if (!quant->method)
    return K3_NO_MEMORY;
  if (strcmp(method, "compressed-tensors") == 0) {
    quant->dialect = K3_DIALECT_COMPRESSED_TENSORS;
    return k3_quant_read_compressed_tensors(reader, object);
  }
  if (strncmp(method, "modelopt", 8) == 0) {
    quant->dialect = K3_DIALECT_MODELOPT;
    return k3_quant_read_modelopt(reader, object, false);
  }
  if (strcmp(method, "fp8") == 0) {
    quant->dialect = K3_DIALECT_FP8;
    return k3_quant_read_fp8(reader, object);
  }
  if (strcmp(method, "mxfp4") == 0 || strcmp(method, "mxfp8") == 0) {
    quant->dialect = K3_DIALECT_MX;
    return k3_quant_read_mx(reader, object);
  }
  if (strcmp(method, "quark") == 0) {
    quant->dialect = K3_DIALECT_MX;
    return k3_quant_read_quark(reader, object);
  }
  const char *what = "a method that k3pack does not know";
  for (size_t i = 0; i < sizeof FOREIGN / sizeof FOREIGN[0]; i++) {
    if (strcmp(FOREIGN[i].method, method) == 0)
      what = FOREIGN[i].what;
  }
  k3_quant_complain(reader, K3_CFG21, "quantization_config.quant_method", "compressed-tensors, modelopt, fp8, mxfp4, mxfp8 or quark", "\"%s\": %s", method,
                    what);
  return K3_OK;
}

// The object of config.json; two places with different content are CFG05.
static const json_t *find_object(const struct k3_config *config, struct k3_findings *findings, bool *usable) {
  static const char *const keys[] = {"quantization_config", "compression_config"};
  const json_t *root = k3_config_root(config), *found = NULL;
  const json_t *holders[] = {root, json_object_get(root, "text_config")};
  for (int k = 0; k < 2; k++) {
    for (int h = 0; h < 2; h++) {
      const json_t *object = json_object_get(holders[h], keys[k]);
      if (!object || json_is_null(object))
        continue;
      if (!json_is_object(object)) {
        k3_findings_report(findings, K3_CFG20, k3_config_file(config), keys[k], "an object", "a value of another kind");
        *usable = false;
      } else if (found && !json_equal(found, object)) {
        k3_findings_report(findings, K3_CFG05, k3_config_file(config), keys[k], "one quantization config, or twice the same",
                           "two quantization configs in one file, with different content");
        *usable = false;
      } else {
        found = object;
      }
    }
  }
  return found && json_object_size(found) > 0 ? found : NULL;
}

static bool same_entries(const struct k3_quant_entries *a, const struct k3_quant_entries *b, const char **odd) {
  for (int side = 0; side < 2; side++) {
    const struct k3_quant_entries *from = side ? b : a, *in = side ? a : b;
    for (size_t i = 0; i < from->n_items; i++) {
      bool found = false;
      for (size_t k = 0; k < in->n_items && !found; k++)
        found = strcmp(from->items[i].text, in->items[k].text) == 0;
      if (!found) {
        *odd = from->items[i].text;
        return false;
      }
    }
  }
  return true;
}

// hf_quant_config.json against config.json: what both say must be the same.
static void hold_together(const struct k3_quant_config *config, const struct k3_quant_config *hf, const char *hf_file, struct k3_findings *findings) {
  const char *odd = NULL;
  char mine[160], other[160];
  if (config->dialect != hf->dialect) {
    k3_findings_report(findings, K3_CFG05, hf_file, "quant_algo", "one method in both files", "%s says %s", config->file, config->method);
    return;
  }
  bool same_groups = config->n_groups == hf->n_groups;
  for (size_t g = 0; same_groups && g < hf->n_groups; g++)
    same_groups = k3_quant_args_equal(&config->groups[g].weights, &hf->groups[g].weights);
  if (!same_groups && config->n_groups > 0 && hf->n_groups > 0)
    k3_findings_report(findings, K3_CFG05, hf_file, "quant_algo", k3_quant_args_text(&config->groups[0].weights, mine, sizeof mine),
                       "%s, unlike config.json", k3_quant_args_text(&hf->groups[0].weights, other, sizeof other));
  else if (!same_groups)
    k3_findings_report(findings, K3_CFG05, hf_file, "quant_algo", "the same groups in both files", "%zu groups, config.json has %zu", hf->n_groups,
                       config->n_groups);
  if (!same_entries(&config->ignore, &hf->ignore, &odd))
    k3_findings_report(findings, K3_CFG05, hf_file, "exclude_modules", "the same list in config.json (ignore)",
                       "\"%s\" is in one of the two files only", odd);
  if (config->kv_scheme != hf->kv_scheme)
    k3_findings_report(findings, K3_CFG05, hf_file, "kv_cache_quant_algo",
                       config->kv_scheme ? "a quantised KV cache, as in config.json" : "none, as in config.json", "%s",
                       hf->kv_scheme ? "a quantised KV cache" : "no quantised KV cache");
}

static enum k3_status read_one(const json_t *object, const char *file, bool hf, struct k3_quant_config **result, struct k3_findings *findings,
                               struct k3_error *err) {
  struct k3_quant_config *quant = k3_calloc(1, sizeof *quant, err);
  if (!quant)
    return K3_NO_MEMORY;
  struct k3_quant_reader reader = {.quant = quant, .file = file, .findings = findings, .err = err, .usable = true};
  enum k3_status status = K3_NO_MEMORY;
  quant->file = k3_quant_keep(&reader, file);
  if (quant->file && hf) {
    quant->dialect = K3_DIALECT_MODELOPT;
    quant->method = "modelopt";
    status = k3_quant_read_modelopt(&reader, object, true);
  } else if (quant->file) {
    status = read_method(&reader, object);
  }
  for (size_t g = 0; g < quant->n_groups; g++)
    quant->has_static_inputs |= quant->groups[g].inputs.num_bits > 0 && (!quant->groups[g].inputs.dynamic || quant->groups[g].inputs.local);
  if (status == K3_OK && reader.usable)
    *result = quant;
  else
    k3_quant_config_free(quant);
  return status;
}

enum k3_status k3_quant_config_read(const struct k3_config *config, const struct k3_config *hf_quant, struct k3_quant_config **result,
                                    struct k3_findings *findings, struct k3_error *err) {
  bool usable = true;
  struct k3_quant_config *first = NULL, *second = NULL;
  const json_t *object = config ? find_object(config, findings, &usable) : NULL;
  enum k3_status status = K3_OK;
  *result = NULL;
  if (object && usable)
    K3_TRY_GOTO(status, out, read_one(object, k3_config_file(config), false, &first, findings, err));
  if (hf_quant) {
    const json_t *quantization = json_object_get(k3_config_root(hf_quant), "quantization");
    if (json_is_object(quantization))
      status = read_one(quantization, k3_config_file(hf_quant), true, &second, findings, err);
    else
      k3_findings_report(findings, K3_CFG20, k3_config_file(hf_quant), "quantization", "an object", "the field is missing or of another kind");
  }
  if (status == K3_OK && first && second)
    hold_together(first, second, k3_config_file(hf_quant), findings);
out:
  // config.json is what engines look at first; hf_quant_config.json stands in when it says nothing.
  if (status == K3_OK && usable && !(object && !first)) {
    *result = first ? first : second;
    if (first)
      k3_quant_config_free(second);
  } else {
    k3_quant_config_free(first);
    k3_quant_config_free(second);
  }
  return status;
}

static void free_entries(struct k3_quant_entries *entries) {
  for (size_t i = 0; i < entries->n_items; i++)
    k3_pattern_free(entries->items[i].pattern);
  k3_free(entries->items);
  k3_free(entries->others);
  k3_name_set_free(&entries->literals);
}

void k3_quant_config_free(struct k3_quant_config *quant) {
  if (!quant)
    return;
  for (size_t g = 0; g < quant->n_groups; g++)
    free_entries(&quant->groups[g].targets);
  free_entries(&quant->ignore);
  k3_free(quant->groups);
  k3_arena_free(&quant->arena);
  k3_free(quant);
}

// ---- what it says about a module ----

// Fused modules of engines and their members in the checkpoint.
static const struct {
  const char *fused, *members[3];
} FUSED[] = {
    {"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
    {"gate_up_proj", {"gate_proj", "up_proj", NULL}},
    {"fused_qkv_a_proj", {"q_a_proj", "kv_a_proj_with_mqa", NULL}},
    {"fused_qkv_a_proj_with_mqa", {"q_a_proj", "kv_a_proj_with_mqa", NULL}},
    {"w13", {"w1", "w3", NULL}},
};

enum { MAX_MODULE_NBYTES = 4096, BY_CLASS = 1, BY_PATTERN = 2, BY_NAME = 3 };

// The entry of exactly that name, counted; NULL when there is none.
static struct k3_quant_entry *literal(struct k3_quant_entries *entries, const char *name, size_t nbytes) {
  uint32_t number = k3_name_set_find(&entries->literals, entry_is, entries, name, nbytes);
  if (number == K3_NAME_NONE)
    return NULL;
  entries->items[number].n_matches++;
  return &entries->items[number];
}

// An entry that names the module: itself, a fused module that it is a member of, or its wrapper's "....linear".
static struct k3_quant_entry *named(struct k3_quant_entries *entries, const char *module, size_t nbytes) {
  char text[MAX_MODULE_NBYTES + 64];
  struct k3_quant_entry *entry = literal(entries, module, nbytes), *other;
  if (nbytes > MAX_MODULE_NBYTES)
    return entry;
  size_t at = nbytes;
  while (at > 0 && module[at - 1] != '.')
    at--;
  memcpy(text, module, nbytes);
  for (size_t f = 0; f < sizeof FUSED / sizeof FUSED[0]; f++) {
    for (int m = 0; m < 3 && FUSED[f].members[m]; m++) {
      const char *member = FUSED[f].members[m];
      if (strlen(member) != nbytes - at || memcmp(module + at, member, nbytes - at) != 0)
        continue;
      strcpy(text + at, FUSED[f].fused);
      other = literal(entries, text, at + strlen(FUSED[f].fused));
      entry = entry ? entry : other;
    }
  }
  memcpy(text, module, nbytes);
  strcpy(text + nbytes, ".linear");
  other = literal(entries, text, nbytes + strlen(".linear"));
  return entry ? entry : other;
}

// How well a list matches a module: 0 not at all, else BY_CLASS, BY_PATTERN or BY_NAME; *by: the best entry. Every entry that matches is counted.
static int match_entries(struct k3_quant_entries *entries, const char *module, size_t nbytes, bool linear, const struct k3_quant_entry **by) {
  int best = 0;
  struct k3_quant_entry *entry = entries->literals.n_used > 0 ? named(entries, module, nbytes) : NULL;
  if (entry) {
    best = BY_NAME;
    *by = entry;
  }
  for (size_t i = 0; i < entries->n_others; i++) {
    entry = &entries->items[entries->others[i]];
    enum k3_pattern_answer answer = k3_pattern_match(entry->pattern, module, nbytes);
    entry->too_much |= answer == K3_PATTERN_TOO_MUCH;
    if (answer != K3_PATTERN_YES)
      continue;
    entry->n_matches++;
    if (best < BY_PATTERN) {
      best = BY_PATTERN;
      *by = entry;
    }
  }
  if (entries->literals.n_used == 0)
    return best;
  for (size_t n = nbytes; best == 0 && n > 0; n--) {
    if (module[n - 1] != '.')
      continue;
    uint32_t number = k3_name_set_find(&entries->literals, entry_is, entries, module, n - 1);
    if (number != K3_NAME_NONE && entries->items[number].tree) {
      best = BY_PATTERN;
      *by = entry = &entries->items[number];
      entry->n_matches++;
    }
  }
  static const char *const classes[] = {"Linear", "LinearBase"};
  for (int c = 0; c < 2 && linear; c++) {
    entry = literal(entries, classes[c], strlen(classes[c]));
    if (entry && best == 0) {
      best = BY_CLASS;
      *by = entry;
    }
  }
  return best;
}

struct k3_quant_answer k3_quant_config_find(struct k3_quant_config *quant, const char *module, size_t nbytes, bool linear) {
  struct k3_quant_answer answer = {0};
  const struct k3_quant_entry *by = NULL;
  if (match_entries(&quant->ignore, module, nbytes, linear, &by) > 0)
    answer.ignored_by = by->text;
  int best = 0;
  for (size_t g = 0; g < quant->n_groups; g++) {
    struct k3_quant_group *group = &quant->groups[g];
    int rank = match_entries(&group->targets, module, nbytes, linear, &by);
    if (group->targets.n_items == 0 && linear && !quant->mixed)
      rank = BY_CLASS;
    if (rank > best) {
      best = rank;
      answer.group = group;
      answer.rival = NULL;
    } else if (rank == best && rank > 0 && !k3_quant_args_equal(&group->weights, &answer.group->weights)) {
      answer.rival = group;
    }
  }
  if (answer.ignored_by || !answer.group)
    return (struct k3_quant_answer){.says = K3_SAYS_PLAIN, .ignored_by = answer.ignored_by};
  answer.says = quant->dialect == K3_DIALECT_FP8 || quant->dialect == K3_DIALECT_MX ? K3_SAYS_EITHER : K3_SAYS_QUANTISED;
  return answer;
}

bool k3_quant_args_equal(const struct k3_quant_args *a, const struct k3_quant_args *b) {
  return a->num_bits == b->num_bits && a->is_float == b->is_float && a->strategy == b->strategy && a->group_size == b->group_size &&
         a->block_rows == b->block_rows && a->block_cols == b->block_cols && a->e8m0 == b->e8m0;
}

char *k3_quant_args_text(const struct k3_quant_args *args, char *dst, size_t capacity) {
  static const char *const strategies[] = {"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"};
  if (args->num_bits == 0) {
    snprintf(dst, capacity, "not quantised");
    return dst;
  }
  int n = snprintf(dst, capacity, "%s %u bits, %s", args->is_float ? "float" : "int", args->num_bits, strategies[args->strategy]);
  if (n < 0 || (size_t)n >= capacity)
    return dst;
  if (args->strategy == K3_STRATEGY_GROUP || args->strategy == K3_STRATEGY_TENSOR_GROUP)
    snprintf(dst + n, capacity - (size_t)n, " of %u", args->group_size);
  else if (args->strategy == K3_STRATEGY_BLOCK)
    snprintf(dst + n, capacity - (size_t)n, " of %u x %u", args->block_rows, args->block_cols);
  return dst;
}
