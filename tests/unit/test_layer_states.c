// The input of `run --layers`: what is read, and what is refused by name.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/layer_states.h"
#include "unit.h"

// A file of the given header (tensor entries without the braces) and n_data bytes 0, 1, 2, ... Exactly as large as it must be, so that a sanitizer
// sees every byte read behind it.
static unsigned char *file_of(const char *entries, size_t n_data, size_t *nbytes) {
  char header[1024];
  int n = snprintf(header, sizeof header, "{%s}", entries);
  assert_true(n > 0 && (size_t)n < sizeof header);
  *nbytes = 8 + (size_t)n + n_data;
  unsigned char *bytes = calloc(1, *nbytes);
  assert_non_null(bytes);
  bytes[0] = (unsigned char)n, bytes[1] = (unsigned char)(n >> 8);
  memcpy(bytes + 8, header, (size_t)n);
  for (size_t i = 0; i < n_data; i++)
    bytes[8 + (size_t)n + i] = (unsigned char)i;
  return bytes;
}

#define HIDDEN    "\"hidden_states\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define POSITIONS "\"positions\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[24,40]}"
#define IDS       "\"request_ids\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[40,56]}"

static void states_are_read(void **state) {
  (void)state;
  struct k3_layer_states s;
  size_t nbytes;
  unsigned char *bytes =
      file_of(HIDDEN "," POSITIONS "," IDS ",\"residual\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[56,68]}", 68, &nbytes);
  assert_int_equal(k3_layer_states_parse(bytes, nbytes, "states", &s, NULL), K3_OK);
  assert_true(s.n_rows == 2 && s.width == 3 && s.hidden_dtype == K3_DTYPE_F32 && s.residual_dtype == K3_DTYPE_BF16);
  assert_ptr_equal(s.hidden, bytes + nbytes - 68);
  assert_ptr_equal(s.residual, bytes + nbytes - 12);
  assert_true(s.positions[0] == 0x1f1e1d1c1b1a1918 && s.request_ids[1] == 0x3736353433323130);
  k3_layer_states_free(&s);
  free(bytes);
  // The residual may be absent.
  bytes = file_of(HIDDEN "," POSITIONS "," IDS, 56, &nbytes);
  assert_int_equal(k3_layer_states_parse(bytes, nbytes, "states", &s, NULL), K3_OK);
  assert_null(s.residual);
  k3_layer_states_free(&s);
  free(bytes);
}

static void refusals_name_the_tensor(void **state) {
  (void)state;
  static const struct {
    const char *entries;
    size_t n_data;
    const char *tensor;
  } cases[] = {
      {"\"positions\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[0,16]},\"request_ids\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":["
       "16,32]}",
       32, "hidden_states"},
      {HIDDEN "," POSITIONS, 40, "request_ids"},
      {HIDDEN ",\"request_ids\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[24,40]}", 40, "positions"},
      {"\"hidden_states\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0,24]}," POSITIONS "," IDS, 56, "hidden_states"},
      {"\"hidden_states\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[0,24]}," POSITIONS "," IDS, 56, "hidden_states"},
      {HIDDEN ",\"positions\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[24,40]}," IDS, 56, "positions"},
      {HIDDEN ",\"positions\":{\"dtype\":\"I64\",\"shape\":[1,2],\"data_offsets\":[24,40]}," IDS, 56, "positions"},
      {HIDDEN "," POSITIONS ",\"request_ids\":{\"dtype\":\"I64\",\"shape\":[3],\"data_offsets\":[40,64]}", 64, "request_ids"},
      {HIDDEN "," POSITIONS ",\"request_ids\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[40,48]}", 48, "request_ids"},
      {HIDDEN "," POSITIONS "," IDS ",\"residual\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[56,72]}", 72, "residual"},
      {HIDDEN "," POSITIONS "," IDS ",\"residual\":{\"dtype\":\"F32\",\"shape\":[1,3],\"data_offsets\":[56,68]}", 68, "residual"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct k3_layer_states s;
    struct k3_error err = {0};
    size_t nbytes;
    unsigned char *bytes = file_of(cases[i].entries, cases[i].n_data, &nbytes);
    enum k3_status status = k3_layer_states_parse(bytes, nbytes, "states", &s, &err);
    if (status != K3_BAD_INPUT || strcmp(err.tensor, cases[i].tensor) != 0)
      fail_msg("case %zu: status %d, %s: %s", i, (int)status, err.tensor, err.found);
    assert_true(!s.hidden && !s.positions && !s.request_ids);
    free(bytes);
  }
  // A file that ends early is a broken container.
  size_t nbytes;
  struct k3_layer_states s;
  struct k3_error err = {0};
  unsigned char *bytes = file_of(HIDDEN "," POSITIONS "," IDS, 55, &nbytes);
  assert_int_equal(k3_layer_states_parse(bytes, nbytes, "states", &s, &err), K3_BAD_INPUT);
  assert_true(err.rule != K3_RULE_NONE);
  free(bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(states_are_read),
      cmocka_unit_test(refusals_name_the_tensor),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
