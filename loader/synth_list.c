// From a preset's tables to the list of its tensors.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "loader/synth_moe.h"

enum { MAX_NAME_NBYTES = 512 };

static uint64_t symbol_value(const struct k3_synth_preset *preset, const char *name, size_t n_name) {
  for (const struct k3_synth_symbol *symbol = preset->symbols; symbol->name; symbol++)
    if (strlen(symbol->name) == n_name && memcmp(symbol->name, name, n_name) == 0)
      return symbol->value;
  return 0;
}

// One expression, up to ',', '}' or the end, to which *text moves. The tables are ours: a bad one is a bug, which the tests of the presets see.
uint64_t k3_synth_evaluate(const struct k3_synth_preset *preset, const char **text) {
  uint64_t sum = 0;
  for (char sign = '+';; sign = *(*text)++) {
    uint64_t product = 1;
    for (bool more = true; more; *text += more) {
      size_t n = strcspn(*text, "*+-,}");
      product *= **text >= '0' && **text <= '9' ? strtoull(*text, NULL, 10) : symbol_value(preset, *text, n);
      *text += n;
      more = **text == '*';
    }
    sum = sign == '-' ? sum - product : sum + product;
    if (**text != '+' && **text != '-')
      return sum;
  }
}

static enum k3_status parse_shape(const struct k3_synth_preset *preset, const struct k3_synth_row *row, struct k3_synth_tensor *tensor,
                                  struct k3_error *err) {
  const char *text = row->shape;
  tensor->n_elems = 1;
  for (bool more = true; more; text += more) {
    uint64_t dim = k3_synth_evaluate(preset, &text);
    if (tensor->rank == K3_SYNTH_MAX_RANK || !k3_mul_u64(tensor->n_elems, dim, &tensor->n_elems) || tensor->n_elems == 0)
      return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, row->name, "1 to 4 dimensions above 0", "preset %s gives the shape %s", preset->name,
                     row->shape);
    tensor->shape[tensor->rank++] = dim;
    more = *text == ',';
  }
  return K3_OK;
}

// "layers.{i}.x" with {i} replaced by `layer`, {e} by `expert`, {t} by `tap`.
static void expand(char dst[MAX_NAME_NBYTES], const char *root, const char *pattern, uint64_t layer, uint64_t expert, uint64_t tap) {
  size_t n = (size_t)snprintf(dst, MAX_NAME_NBYTES, "%s", root);
  while (*pattern && n < MAX_NAME_NBYTES - 1) {
    if (pattern[0] == '{' && pattern[1] && pattern[2] == '}') {
      uint64_t number = pattern[1] == 'i' ? layer : pattern[1] == 'e' ? expert : tap;
      n += (size_t)snprintf(dst + n, MAX_NAME_NBYTES - n, "%llu", (unsigned long long)number);
      pattern += 3;
    } else {
      dst[n++] = *pattern++;
      dst[n] = '\0';
    }
  }
}

static enum k3_status add_row(struct k3_synth_list *list, const struct k3_synth_preset *preset, const struct k3_synth_row *row, const char *root,
                              enum k3_dtype dtype, struct k3_error *err) {
  struct k3_synth_tensor proto = {.dtype = (uint8_t)dtype, .fill = (uint8_t)row->fill};
  K3_TRY(parse_shape(preset, row, &proto, err));
  if (!k3_mul_u64(proto.n_elems, k3_dtype_bits(dtype) / 8, &proto.nbytes))
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, row->name, NULL, "the tensor is larger than 2^64 bytes");
  uint64_t n_layers = strstr(row->name, "{i}") ? symbol_value(preset, "L", 1) : 1;
  uint64_t n_experts = strstr(row->name, "{e}") ? symbol_value(preset, "X", 1) : 1;
  uint64_t n_taps = strstr(row->name, "{t}") ? symbol_value(preset, "A", 1) : 1;
  for (uint64_t n = 0; n < n_layers * n_experts * n_taps; n++) {
    uint64_t layer = n / (n_experts * n_taps), expert = n / n_taps % n_experts, tap = n % n_taps;
    char name[MAX_NAME_NBYTES], key[MAX_NAME_NBYTES];
    expand(name, root, row->name, layer, expert, tap);
    expand(key, "", row->key ? row->key : row->name, layer, expert, tap);
    K3_TRY(k3_grow(&list->tensors, &list->capacity, list->n_tensors + 1, sizeof *list->tensors, err));
    struct k3_synth_tensor *tensor = &list->tensors[list->n_tensors];
    *tensor = proto;
    tensor->name = k3_arena_strndup(&list->arena, name, strlen(name), err);
    tensor->key = k3_arena_strndup(&list->arena, key, strlen(key), err);
    if (!tensor->name || !tensor->key)
      return K3_NO_MEMORY;
    list->n_tensors++;
  }
  return K3_OK;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const struct k3_synth_tensor *)a)->name, ((const struct k3_synth_tensor *)b)->name);
}

enum k3_status k3_synth_list_make(const struct k3_synth_preset *preset, const char *root, enum k3_dtype dtype, struct k3_synth_list *list,
                                  struct k3_error *err) {
  if (preset->moe)
    K3_TRY(k3_synth_moe_list(preset, root ? root : "", dtype, list, err));
  for (const struct k3_synth_row *const *table = preset->tables; !preset->moe && *table; table++)
    for (const struct k3_synth_row *row = *table; row->name; row++)
      K3_TRY(add_row(list, preset, row, root ? root : "", dtype, err));
  qsort(list->tensors, list->n_tensors, sizeof *list->tensors, by_name);
  return K3_OK;
}

char *k3_synth_config(const struct k3_synth_preset *preset, enum k3_dtype dtype, struct k3_error *err) {
  enum { MAX_CONFIG_NBYTES = 8192 };
  if (preset->moe)
    return k3_synth_moe_config(preset, dtype, err);
  char *config = k3_calloc(MAX_CONFIG_NBYTES, 1, err);
  size_t n = 0;
  for (const char *text = preset->config; config && *text && n < MAX_CONFIG_NBYTES - 1;) {
    if (text[0] != '$' || text[1] != '{') {
      config[n++] = *text++;
      continue;
    }
    text += 2;
    const char *dtype_text = dtype == K3_DTYPE_F32 ? "float32" : dtype == K3_DTYPE_F16 ? "float16" : "bfloat16";
    const char *words[][2] = {{"dtype}", dtype_text}, {"taps}", preset->taps}, {"extra}", preset->extra}};
    const char *replacement = NULL;
    for (size_t i = 0; i < 3 && !replacement; i++)
      if (strncmp(text, words[i][0], strlen(words[i][0])) == 0)
        replacement = words[i][1];
    if (replacement) {
      text += strcspn(text, "}");
      n += (size_t)snprintf(config + n, MAX_CONFIG_NBYTES - n, "%s", replacement);
    } else {
      n += (size_t)snprintf(config + n, MAX_CONFIG_NBYTES - n, "%llu", (unsigned long long)k3_synth_evaluate(preset, &text));
    }
    text++;  // behind '}'
  }
  return config;
}

void k3_synth_list_free(struct k3_synth_list *list) {
  k3_free(list->tensors);
  k3_arena_free(&list->arena);
  *list = (struct k3_synth_list){0};
}
