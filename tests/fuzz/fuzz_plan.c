// covers: formats/reduction_plan.c formats/reduction_verify.c
// A reduction plan. The input: tp, pp, flags, taps (a bit a layer), number of layers; a map "producer TAB norm" a line, up to a zero byte; two bytes
// for every branch (what it is), up to a 0xFF; then changes to the finished plan, two bytes each, after which the verifier must still end.
#include "formats/reduction_plan.h"
#include "tests/fuzz/fuzz.h"

enum { N_SETTINGS = 5, MAX_MAP = 16, MAX_TAPS = 8, MAX_CHANGES = 64 };

struct model {
  uint64_t n_layers;
  unsigned n_asked;
};

// Modules of layers below a count exist, but those with an 'x'; after a thousand questions none, since a number in a name may be no layer.
static bool exists(void *ctx, const char *module) {
  struct model *model = ctx;
  const char *digits = strpbrk(module, "0123456789");
  return model->n_asked++ < 1000 && !strchr(module, 'x') && (!digits || strtoull(digits, NULL, 10) < model->n_layers);
}

static size_t read_map(char *text, struct k3_manifest_pair *map) {
  size_t n = 0;
  for (char *line = strtok(text, "\n"); line && n < MAX_MAP; line = strtok(NULL, "\n")) {
    char *tab = strchr(line, '\t');
    if (!tab)
      continue;
    *tab = '\0';
    map[n++] = (struct k3_manifest_pair){.key = line, .value = tab + 1};
  }
  return n;
}

static void describe(struct k3_sum *sum, unsigned a, unsigned b) {
  if (a & 1)
    sum->kind = (enum k3_sum_kind)(b % 3);
  sum->all_to_all = a & 2;
  sum->sequence_parallel = a & 4;
  sum->zero_expert = a & 8;
  sum->returns_whole = a & 16;
  sum->addend = (enum k3_addend)(a >> 5 & 3 ? (a >> 5 & 3) - 1 : 0);
  if (b & 0x80)
    sum->norm = NULL;
}

static void change(struct k3_flow *step, unsigned how) {
  switch (how % 12) {
    case 0: step->reduce = (enum k3_reduce)(how / 12 % 3); break;
    case 1: step->gather = (enum k3_gather)(how / 12 % 3); break;
    case 2: step->partial = !step->partial; break;
    case 3: step->may_defer = !step->may_defer; break;
    case 4: step->on_rows = !step->on_rows; break;
    case 5: step->kind = (enum k3_flow_kind)(how / 12 % 6); break;
    case 6: step->addend = K3_ADDEND_EVERY_RANK; break;
    case 7: step->norm = "elsewhere"; break;
    case 8: step->name = ""; break;
    case 9: step->name = NULL; break;
    case 10: step->norm = NULL; break;
    default: step->kind = K3_FLOW_NORM; break;
  }
}

static void check_plan(struct k3_reduction_plan *plan, const uint8_t *changes, const uint8_t *end) {
  // No line of a map holds a line feed, so no step has that name.
  FUZZ_CHECK(k3_reduction_plan_verify(plan, NULL) == K3_OK && !k3_reduction_plan_step(plan, K3_FLOW_NORM, "no such\nmodule"));
  for (size_t i = 0; i < plan->n_steps; i++) {
    FUZZ_CHECK(k3_reduction_plan_action(plan, i)[0]);
    if (plan->steps[i].name && i < MAX_CHANGES)
      FUZZ_CHECK(k3_reduction_plan_step(plan, plan->steps[i].kind, plan->steps[i].name));
  }
  for (int i = 0; i < MAX_CHANGES && plan->n_steps > 0 && end - changes >= 2; i++, changes += 2) {
    struct k3_error err = {0};
    change(&plan->steps[changes[0] % plan->n_steps], changes[1]);
    enum k3_status status = k3_reduction_plan_verify(plan, &err);
    FUZZ_CHECK(status == K3_OK || (status == K3_BAD_INPUT && (err.rule == K3_RED01 || err.rule == K3_RED02 || err.rule == K3_RED03) && err.found[0]));
  }
}

// The number of layers that a manifest's model has, from whatever text.
static void count_layers(const char *text) {
  struct k3_manifest manifest = {.family = "other", .model_json = text};
  uint64_t n = k3_manifest_n_layers(&manifest);
  FUZZ_CHECK(n > 0);
  manifest.family = "k3-dspark";
  FUZZ_CHECK(k3_manifest_n_layers(&manifest) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  if (nbytes < N_SETTINGS + 1 || nbytes > 65536)
    return 0;
  struct model model = {data[4] % 16, 0};
  uint64_t taps[MAX_TAPS];
  struct k3_parallel parallel = {.tp = data[0] % 9,
                                 .pp = data[1] % 5,
                                 .embedding_partial = data[2] & 1,
                                 .border = data[2] & 2 ? K3_BORDER_CARRY : K3_BORDER_REDUCE,
                                 .tap = data[2] & 4 ? K3_TAP_BEHIND_NORM : K3_TAP_BETWEEN_LAYERS,
                                 .taps = taps};
  for (unsigned t = 0; t < MAX_TAPS; t++) {
    if (data[3] >> t & 1)
      taps[parallel.n_taps++] = t;
  }
  const uint8_t *text = data + N_SETTINGS, *zero = memchr(text, 0, nbytes - N_SETTINGS), *end = data + nbytes, *after = zero ? zero + 1 : end;
  char *copy = k3_strndup((const char *)text, (size_t)((zero ? zero : end) - text), NULL);
  FUZZ_CHECK(copy);
  count_layers(copy);
  struct k3_manifest_pair map[MAX_MAP];
  size_t n_map = read_map(copy, map);
  struct k3_stack stack;
  struct k3_reduction_plan plan;
  struct k3_error err = {0};
  k3_alloc_set_limit(16 << 20);
  if (k3_stack_from_map(map, n_map, data[2] & 8 ? K3_ALL_LAYERS : data[2] >> 4, exists, &model, &stack, &err) == K3_OK) {
    for (size_t s = 0; s < stack.n_sums && end - after >= 2 && *after != 0xFF; s++, after += 2)
      describe(&stack.sums[s], after[0], after[1]);
    while (after < end && *after != 0xFF)
      after++;
    enum k3_status status = k3_reduction_plan_make(&stack, &parallel, &plan, &err);
    if (status == K3_OK)
      check_plan(&plan, after < end ? after + 1 : end, end);
    else
      FUZZ_CHECK((status == K3_BAD_ARGUMENT || status == K3_BAD_INPUT) && err.found[0]);
    if (status == K3_OK)
      k3_reduction_plan_free(&plan);
    k3_stack_free(&stack);
  } else {
    FUZZ_CHECK(err.status == K3_BAD_INPUT && err.rule == K3_IMG01);
  }
  k3_free(copy);
  return 0;
}
