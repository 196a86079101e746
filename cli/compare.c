// Two drafters on one scenario: what B, a quantised one for instance, will cost in acceptance against A.
#include "runtime/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/file.h"
#include "cli/drafter.h"
#include "cli/verbs.h"

enum { N_WORST = 5 };

static const struct k3_cli_help help = {
    .operands = "A B --input IN",
    .n_min = 2,
    .n_max = 2,
    .about =
        "Runs two images on one scenario and compares what they draft, slot by slot: KL(A||B), the overlap 1 - 0.5 * ||p - q||1 of their\n"
        "distributions, how often the likeliest token is the same, and how the confidence moves. Every slot is conditioned on A's tokens, so that "
        "both\n"
        "answer the same question. Whatever the target, the acceptance of A and B differs by at most 1 - overlap; with target_logits in IN the\n"
        "acceptance itself is given, of single slots and as tokens of a block.",
    .examples =
        "  k3pack compare drafter.k3p drafter-nvfp4.k3p --input scenario.safetensors\n"
        "  k3pack compare drafter.k3p drafter-fp8.k3p --input scenario.safetensors --json",
};

// Means over the requests of one slot, or over everything.
struct line {
  double kl, overlap, agreement, confidence_a, confidence_b, moved, acceptance_a, acceptance_b;  // moved: mean |difference| of the confidences
};

struct worst {
  uint64_t request;
  double overlap, kl, agreement;
};

struct comparison {
  const struct k3_engine_info *info;
  uint64_t n_requests, block_width;
  bool confidence, target;
  const struct k3_slot_difference *slots;  // [n_requests, block_width]
  const float *confidence_a, *confidence_b;
  double tokens_a, tokens_b;  // accepted of a block, mean over requests
  struct line *lines;         // [block_width], then one for all
  struct worst *requests;     // [n_requests], the smallest overlap first
};

static void add(struct line *line, const struct comparison *c, uint64_t i) {
  const struct k3_slot_difference *slot = &c->slots[i];
  line->kl += slot->kl;
  line->overlap += slot->overlap;
  line->agreement += slot->agree;
  line->acceptance_a += slot->acceptance_a;
  line->acceptance_b += slot->acceptance_b;
  if (c->confidence) {
    line->confidence_a += (double)c->confidence_a[i];
    line->confidence_b += (double)c->confidence_b[i];
    line->moved += fabs((double)c->confidence_b[i] - (double)c->confidence_a[i]);
  }
}

static void divide(struct line *line, double n) {
  double *fields[] = {&line->kl,           &line->overlap, &line->agreement,    &line->confidence_a,
                      &line->confidence_b, &line->moved,   &line->acceptance_a, &line->acceptance_b};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
    *fields[i] /= n;
}

static int compare_worst(const void *left, const void *right) {
  const struct worst *a = left, *b = right;
  if (a->overlap != b->overlap)
    return a->overlap < b->overlap ? -1 : 1;
  return (a->request > b->request) - (a->request < b->request);
}

static void sum_up(struct comparison *c) {
  uint64_t width = c->block_width;
  for (uint64_t b = 0; b < c->n_requests; b++) {
    struct line own = {0};
    double accepted_a = 1, accepted_b = 1;
    for (uint64_t k = 0; k < width; k++) {
      const struct k3_slot_difference *slot = &c->slots[b * width + k];
      add(&own, c, b * width + k);
      add(&c->lines[k], c, b * width + k);
      add(&c->lines[width], c, b * width + k);
      accepted_a *= slot->acceptance_a;
      accepted_b *= slot->acceptance_b;
      c->tokens_a += accepted_a;
      c->tokens_b += accepted_b;
    }
    divide(&own, (double)width);
    c->requests[b] = (struct worst){b, own.overlap, own.kl, own.agreement};
  }
  for (uint64_t k = 0; k <= width; k++)
    divide(&c->lines[k], (double)(k < width ? c->n_requests : c->n_requests * width));
  c->tokens_a /= (double)c->n_requests;
  c->tokens_b /= (double)c->n_requests;
  if (c->n_requests > 1)
    qsort(c->requests, c->n_requests, sizeof *c->requests, compare_worst);
}

static void print_line(const struct comparison *c, const char *name, const struct line *line) {
  printf("%5s %10.3g %9.5f %8.1f%%", name, line->kl, line->overlap, 100 * line->agreement);
  if (c->confidence)
    printf(" %8.4f %8.4f %+8.4f", line->confidence_a, line->confidence_b, line->confidence_b - line->confidence_a);
  if (c->target)
    printf(" %9.5f %9.5f %+9.5f", line->acceptance_a, line->acceptance_b, line->acceptance_b - line->acceptance_a);
  printf("\n");
}

static void print_all(const struct comparison *c) {
  char name[32];
  printf("%llu requests, %llu slots each, conditioned on A's tokens\n", (unsigned long long)c->n_requests, (unsigned long long)c->block_width);
  printf("%5s %10s %9s %9s", "slot", "KL(A||B)", "overlap", "agree");
  if (c->confidence)
    printf(" %8s %8s %8s", "conf. A", "conf. B", "shift");
  if (c->target)
    printf(" %9s %9s %9s", "accept A", "accept B", "change");
  printf("\n");
  for (uint64_t k = 0; k < c->block_width; k++) {
    snprintf(name, sizeof name, "%llu", (unsigned long long)k + 1);
    print_line(c, name, &c->lines[k]);
  }
  print_line(c, "all", &c->lines[c->block_width]);
  printf("worst requests by overlap:");
  for (uint64_t b = 0; b < c->n_requests && b < N_WORST; b++)
    printf("%s %llu (%.5f)", b ? "," : "", (unsigned long long)c->requests[b].request, c->requests[b].overlap);
  printf("\n");
  if (c->target)
    printf("tokens accepted of a block of %llu: %.4f with A, %.4f with B\n", (unsigned long long)c->block_width, c->tokens_a, c->tokens_b);
  else
    printf("without target_logits: whatever the target, acceptance per slot changes by at most 1 - overlap, here %.5f\n",
           1 - c->lines[c->block_width].overlap);
}

static void put_line(struct k3_jsonw *json, const struct comparison *c, const struct line *line) {
  k3_jsonw_double(json, "kl", line->kl);
  k3_jsonw_double(json, "overlap", line->overlap);
  k3_jsonw_double(json, "agreement", line->agreement);
  if (c->confidence) {
    k3_jsonw_double(json, "confidence_a", line->confidence_a);
    k3_jsonw_double(json, "confidence_b", line->confidence_b);
    k3_jsonw_double(json, "confidence_shift", line->confidence_b - line->confidence_a);
    k3_jsonw_double(json, "confidence_moved", line->moved);
  }
  if (c->target) {
    k3_jsonw_double(json, "acceptance_a", line->acceptance_a);
    k3_jsonw_double(json, "acceptance_b", line->acceptance_b);
  }
}

static int put_all(struct k3_cli *cli, const struct comparison *c, const char *identity_a, const char *identity_b) {
  struct k3_jsonw json;
  k3_cli_json_begin(cli, &json);
  k3_jsonw_bool(&json, "ok", true);
  k3_jsonw_string(&json, "identity_a", identity_a);
  k3_jsonw_string(&json, "identity_b", identity_b);
  k3_jsonw_u64(&json, "requests", c->n_requests);
  k3_jsonw_u64(&json, "block_width", c->block_width);
  k3_jsonw_string(&json, "conditioned_on", "A");
  k3_jsonw_begin_array(&json, "slots");
  for (uint64_t k = 0; k < c->block_width; k++) {
    k3_jsonw_begin_object(&json, NULL);
    put_line(&json, c, &c->lines[k]);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  k3_jsonw_begin_object(&json, "total");
  put_line(&json, c, &c->lines[c->block_width]);
  if (c->target) {
    k3_jsonw_double(&json, "tokens_a", c->tokens_a);
    k3_jsonw_double(&json, "tokens_b", c->tokens_b);
  } else {
    k3_jsonw_double(&json, "acceptance_change_at_most", 1 - c->lines[c->block_width].overlap);
  }
  k3_jsonw_end_object(&json);
  k3_jsonw_begin_array(&json, "worst");
  for (uint64_t b = 0; b < c->n_requests && b < N_WORST; b++) {
    k3_jsonw_begin_object(&json, NULL);
    k3_jsonw_u64(&json, "request", c->requests[b].request);
    k3_jsonw_double(&json, "overlap", c->requests[b].overlap);
    k3_jsonw_double(&json, "kl", c->requests[b].kl);
    k3_jsonw_double(&json, "agreement", c->requests[b].agreement);
    k3_jsonw_end_object(&json);
  }
  k3_jsonw_end_array(&json);
  return k3_cli_json_end(cli, &json, 0);
}

// Everything that is held open meanwhile.
struct both {
  struct k3_mapping mapping;
  struct k3_scenario scenario;
  struct k3_ranks a, b;
  struct k3_drafts drafts_a, drafts_b;
  struct k3_slot_difference *slots;
  struct line *lines;
  struct worst *requests;
};

static enum k3_status open_both(struct k3_cli *cli, const struct k3_drafter_options *options, const char *input, struct both *both,
                                struct k3_error *err) {
  K3_TRY(k3_drafter_open(cli, cli->operands[0], options, &both->a, err));
  K3_TRY(k3_drafter_open(cli, cli->operands[1], options, &both->b, err));
  const struct k3_engine_info *a = k3_engine_info(both->a.engines[0]), *b = k3_engine_info(both->b.engines[0]);
  if (a->vocab_size != b->vocab_size || a->block_width != b->block_width || a->n_taps * a->target_hidden_size != b->n_taps * b->target_hidden_size)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, cli->operands[1], NULL, "two images of one model",
                   "vocabulary %llu, block %llu, taps %llu of %llu; %s has %llu, %llu, %llu of %llu", (unsigned long long)b->vocab_size,
                   (unsigned long long)b->block_width, (unsigned long long)b->n_taps, (unsigned long long)b->target_hidden_size, cli->operands[0],
                   (unsigned long long)a->vocab_size, (unsigned long long)a->block_width, (unsigned long long)a->n_taps,
                   (unsigned long long)a->target_hidden_size);
  const struct k3_engine *strict = a->max_positions < b->max_positions ? both->a.engines[0] : both->b.engines[0];
  K3_TRY(k3_drafter_scenario(strict, input, &both->mapping, &both->scenario, err));
  if (both->scenario.n_requests == 0)
    return k3_fail(err, K3_BAD_INPUT, K3_RULE_NONE, input, NULL, "at least one request", "a scenario without requests compares nothing");
  return K3_OK;
}

static enum k3_status run_both(struct k3_cli *cli, struct both *both, struct comparison *c, struct k3_error *err) {
  const struct k3_engine_info *info = k3_engine_info(both->a.engines[0]);
  const unsigned logits = 1u << K3_DRAFT_logits | 1u << K3_DRAFT_confidence;
  uint64_t n_slots = both->scenario.n_requests * info->block_width;
  K3_TRY(k3_drafter_run(cli, &both->a, &both->scenario, logits | 1u << K3_DRAFT_draft_ids, NULL, &both->drafts_a, err));
  K3_TRY(k3_drafter_run(cli, &both->b, &both->scenario, logits, both->drafts_a.arrays[K3_DRAFT_draft_ids], &both->drafts_b, err));
  both->slots = k3_calloc(n_slots, sizeof *both->slots, err);
  both->lines = k3_calloc(info->block_width + 1, sizeof *both->lines, err);
  both->requests = k3_calloc(both->scenario.n_requests, sizeof *both->requests, err);
  if (!both->slots || !both->lines || !both->requests)
    return K3_NO_MEMORY;
  *c = (struct comparison){.info = info,
                           .n_requests = both->scenario.n_requests,
                           .block_width = info->block_width,
                           .target = both->scenario.target_logits != NULL,
                           .slots = both->slots,
                           .confidence_a = both->drafts_a.arrays[K3_DRAFT_confidence],
                           .confidence_b = both->drafts_b.arrays[K3_DRAFT_confidence],
                           .lines = both->lines,
                           .requests = both->requests};
  c->confidence = c->confidence_a && c->confidence_b;
  K3_TRY(k3_compare_slots(both->drafts_a.arrays[K3_DRAFT_logits], both->drafts_b.arrays[K3_DRAFT_logits], both->scenario.target_logits, n_slots,
                          info->vocab_size, cli->n_threads, both->slots, err));
  sum_up(c);
  return K3_OK;
}

int k3_cmd_compare(struct k3_cli *cli, int argc, char **argv) {
  const char *input = NULL;
  struct k3_drafter_options drafter = {.tp = 1};
  const struct k3_option options[] = {{"input", 'i', K3_OPT_TEXT, "IN", "the scenario", &input}, K3_DRAFTER_OPTIONS(drafter), {0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  if (!input)
    return k3_cli_usage(cli, "--input IN is missing");
  struct both both = {0};
  struct comparison c;
  struct k3_error err = {0};
  if (open_both(cli, &drafter, input, &both, &err) != K3_OK || run_both(cli, &both, &c, &err) != K3_OK) {
    exit_code = k3_cli_fail(cli, &err);
  } else if (cli->json) {
    exit_code = put_all(cli, &c, k3_engine_info(both.a.engines[0])->identity, k3_engine_info(both.b.engines[0])->identity);
  } else if (!cli->quiet) {
    print_all(&c);
  }
  k3_free(both.slots);
  k3_free(both.lines);
  k3_free(both.requests);
  k3_drafts_free(&both.drafts_a);
  k3_drafts_free(&both.drafts_b);
  k3_scenario_free(&both.scenario);
  k3_unmap(&both.mapping);
  k3_ranks_close(&both.a);
  k3_ranks_close(&both.b);
  return exit_code;
}
