// Scenario files: what a good one gives, and every way of being malformed, with the tensor and the request in the message.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/scenario.h"
#include "unit.h"

enum { WIDTH = 3, N = 5, B = 3, T = 2, V = 4 };
static const struct k3_scenario_shape SHAPE = {WIDTH, T, V, 8};

// The parts of a file; a test changes one and writes it.
struct parts {
  const char *states_dtype, *positions_dtype, *logits_dtype;
  uint64_t states_width, n_positions, n_request_ids, n_anchor_positions;
  bool no_anchor_ids, logits;
  int64_t positions[N], request_ids[N], anchor_ids[B], anchor_positions[B];
};

static const struct parts GOOD = {.states_dtype = "F32",
                                  .positions_dtype = "I64",
                                  .logits_dtype = "F32",
                                  .states_width = WIDTH,
                                  .n_positions = N,
                                  .n_request_ids = N,
                                  .n_anchor_positions = B,
                                  // Request 0 has positions 0 .. 2, request 1 none, request 2 positions 0 and 1; rows in any order.
                                  .positions = {1, 1, 0, 2, 0},
                                  .request_ids = {2, 0, 0, 0, 2},
                                  .anchor_ids = {3, 0, 1},
                                  .anchor_positions = {3, 0, 2}};

struct file {
  unsigned char bytes[4096];
  char header[2048];
  size_t n_data, n_header;
};

static void add(struct file *f, const char *name, const char *dtype, const char *shape, const void *data, size_t nbytes) {
  f->n_header += (size_t)snprintf(f->header + f->n_header, sizeof f->header - f->n_header,
                                  "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", f->n_header > 1 ? "," : "", name, dtype,
                                  shape, f->n_data, f->n_data + nbytes);
  if (data)
    memcpy(f->bytes + 2048 + f->n_data, data, nbytes);
  f->n_data += nbytes;
}

static enum k3_status parse(const struct parts *p, struct k3_scenario *scenario, struct k3_error *err) {
  struct file *f = calloc(1, sizeof *f);
  char shape[64];
  assert_non_null(f);
  f->header[f->n_header++] = '{';
  snprintf(shape, sizeof shape, "%d,%llu", N, (unsigned long long)p->states_width);
  add(f, "target_states", p->states_dtype, shape, NULL,
      N * p->states_width * (strcmp(p->states_dtype, "BF16") == 0 || strcmp(p->states_dtype, "F16") == 0 ? 2 : 4));
  snprintf(shape, sizeof shape, "%llu", (unsigned long long)p->n_positions);
  add(f, "positions", p->positions_dtype, shape, p->positions, p->n_positions * (strcmp(p->positions_dtype, "I64") == 0 ? 8 : 4));
  snprintf(shape, sizeof shape, "%llu", (unsigned long long)p->n_request_ids);
  add(f, "request_ids", "I64", shape, p->request_ids, p->n_request_ids * 8);
  if (!p->no_anchor_ids)
    add(f, "anchor_ids", "I64", "3", p->anchor_ids, sizeof p->anchor_ids);
  snprintf(shape, sizeof shape, "%llu", (unsigned long long)p->n_anchor_positions);
  add(f, "anchor_positions", "I64", shape, p->anchor_positions, p->n_anchor_positions * 8);
  if (p->logits)
    add(f, "target_logits", p->logits_dtype, "3,2,4", NULL, B * T * V * 4);
  f->header[f->n_header++] = '}';
  // The data follow the header at once, so the I64 tensors are misaligned as often as not.
  unsigned char *file = calloc(1, 8 + f->n_header + f->n_data);
  assert_non_null(file);
  for (int k = 0; k < 8; k++)
    file[k] = (unsigned char)((uint64_t)f->n_header >> 8 * k);
  memcpy(file + 8, f->header, f->n_header);
  memcpy(file + 8 + f->n_header, f->bytes + 2048, f->n_data);
  enum k3_status status = k3_scenario_parse(file, 8 + f->n_header + f->n_data, "in.safetensors", &SHAPE, scenario, err);
  free(file);
  free(f);
  return status;
}

static void test_good(void **state) {
  (void)state;
  struct k3_scenario s;
  struct k3_error err = {0};
  struct parts p = GOOD;
  p.states_dtype = "BF16";
  p.logits = true;
  assert_int_equal(parse(&p, &s, &err), K3_OK);
  assert_int_equal(s.n_rows, N);
  assert_int_equal(s.n_requests, B);
  assert_int_equal(s.state_dtype, K3_DTYPE_BF16);
  assert_non_null(s.target_logits);
  assert_memory_equal(s.positions, GOOD.positions, sizeof GOOD.positions);
  assert_memory_equal(s.request_ids, GOOD.request_ids, sizeof GOOD.request_ids);
  assert_memory_equal(s.anchor_ids, GOOD.anchor_ids, sizeof GOOD.anchor_ids);
  assert_memory_equal(s.anchor_positions, GOOD.anchor_positions, sizeof GOOD.anchor_positions);
  k3_scenario_free(&s);
  p = GOOD;
  assert_int_equal(parse(&p, &s, &err), K3_OK);
  assert_null(s.target_logits);
  k3_scenario_free(&s);
}

// Every malformed scenario is K3_BAD_INPUT and names tensor and request.
static void expect(const struct parts *p, const char *tensor, const char *found) {
  struct k3_scenario s;
  struct k3_error err = {0};
  assert_int_equal(parse(p, &s, &err), K3_BAD_INPUT);
  if (strcmp(err.tensor, tensor) != 0 || !strstr(err.found, found))
    fail_msg("\"%s: %s\" does not speak of %s: %s", err.tensor, err.found, tensor, found);
  assert_string_equal(err.file, "in.safetensors");
  assert_null(s.positions);
}

static void test_malformed(void **state) {
  (void)state;
  struct parts p;
#define BROKEN(change, tensor, found) (p = GOOD, (change), expect(&p, tensor, found))
  BROKEN(p.states_dtype = "F16", "target_states", "F16");
  BROKEN(p.states_width = WIDTH + 1, "target_states", "4 columns");
  BROKEN(p.positions_dtype = "I32", "positions", "I32");
  BROKEN(p.n_positions = N - 1, "positions", "4 entries");
  BROKEN(p.n_request_ids = N - 1, "request_ids", "4 entries");
  BROKEN(p.no_anchor_ids = true, "anchor_ids", "missing");
  BROKEN(p.n_anchor_positions = 2, "anchor_positions", "2 entries");
  BROKEN((p.logits = true, p.logits_dtype = "I32"), "target_logits", "I32");
  BROKEN(p.request_ids[1] = 3, "request_ids", "request 3");
  BROKEN(p.request_ids[1] = -1, "request_ids", "request -1");
  BROKEN(p.anchor_ids[2] = V, "anchor_ids", "request 2");
  BROKEN(p.anchor_ids[0] = -1, "anchor_ids", "request 0");
  BROKEN(p.anchor_positions[1] = -1, "anchor_positions", "request 1");
  BROKEN(p.anchor_positions[1] = 7, "anchor_positions", "request 1");  // 7 + T is above the limit of 8
  BROKEN(p.anchor_positions[1] = INT64_MAX, "anchor_positions", "request 1");
  BROKEN(p.anchor_positions[0] = 4, "positions", "request 0: the context row of position 3 is missing");
  BROKEN(p.anchor_positions[1] = 6, "positions", "request 1: the context row of position 0 is missing");  // 6 + T is the limit
  BROKEN(p.anchor_positions[2] = 1, "positions", "request 2: row 0 has position 1");                      // a row at the anchor
  BROKEN(p.positions[3] = 7, "positions", "request 0: row 3 has position 7");
  BROKEN(p.positions[3] = -2, "positions", "request 0: row 3 has position -2");
  BROKEN(p.positions[3] = 1, "positions", "request 0: position 1 occurs twice");
  BROKEN((p.positions[0] = 0, p.anchor_positions[2] = 1), "positions", "request 2: position 0 occurs twice");
#undef BROKEN
}

static void test_not_a_container(void **state) {
  (void)state;
  struct k3_scenario s;
  struct k3_error err = {0};
  assert_int_equal(k3_scenario_parse("abc", 3, "x", &SHAPE, &s, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_CNT02);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_good),
      cmocka_unit_test(test_malformed),
      cmocka_unit_test(test_not_a_container),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
