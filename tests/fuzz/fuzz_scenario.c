// covers: formats/scenario.c
// Scenario files: whatever is accepted has every position of every request once, and ids inside the model.
#include "formats/scenario.h"
#include "tests/fuzz/fuzz.h"

static const struct k3_scenario_shape SHAPE = {3, 2, 4, 8};

static void check(const struct k3_scenario *s) {
  uint64_t total = 0;
  for (uint64_t b = 0; b < s->n_requests; b++) {
    FUZZ_CHECK(s->anchor_ids[b] >= 0 && s->anchor_ids[b] < 4);
    FUZZ_CHECK(s->anchor_positions[b] >= 0 && s->anchor_positions[b] <= 6);
    total += (uint64_t)s->anchor_positions[b];
  }
  FUZZ_CHECK(total == s->n_rows);
  for (uint64_t i = 0; i < s->n_rows; i++) {
    FUZZ_CHECK(s->request_ids[i] >= 0 && (uint64_t)s->request_ids[i] < s->n_requests);
    FUZZ_CHECK(s->positions[i] >= 0 && s->positions[i] < s->anchor_positions[s->request_ids[i]]);
    for (uint64_t j = 0; j < i; j++)
      FUZZ_CHECK(s->positions[i] != s->positions[j] || s->request_ids[i] != s->request_ids[j]);
  }
  uint64_t width = s->state_dtype == K3_DTYPE_F32 ? 4 : 2;
  FUZZ_CHECK(s->state_dtype == K3_DTYPE_F32 || s->state_dtype == K3_DTYPE_BF16);
  volatile unsigned char byte = 0;
  for (uint64_t i = 0; i < s->n_rows * 3 * width; i++)
    byte ^= ((const unsigned char *)s->target_states)[i];
  for (uint64_t i = 0; s->target_logits && i < s->n_requests * 2 * 4 * 4; i++)
    byte ^= ((const unsigned char *)s->target_logits)[i];
  (void)byte;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  struct k3_error err = {0};
  struct k3_scenario scenario;
  const char *bytes = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  k3_alloc_fail_at(1 + nbytes % 16);
  enum k3_status status = k3_scenario_parse(bytes, nbytes, "input", &SHAPE, &scenario, &err);
  k3_alloc_fail_at(0);
  FUZZ_CHECK(status == K3_OK || status == K3_BAD_INPUT || status == K3_NO_MEMORY);
  k3_scenario_free(&scenario);
  err = (struct k3_error){0};
  status = k3_scenario_parse(bytes, nbytes, "input", &SHAPE, &scenario, &err);
  FUZZ_CHECK(status == K3_OK ? err.status == K3_OK : err.status == K3_BAD_INPUT && err.found[0]);
  if (status == K3_OK)
    check(&scenario);
  k3_scenario_free(&scenario);
  return 0;
}
