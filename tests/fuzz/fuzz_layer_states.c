// covers: formats/layer_states.c
// Hidden states for decoder layers. The input is read twice: as a whole file, and as the text of a header up to a zero byte with the data behind it
// (so that mutations of the text need not keep a length right).
#include "formats/layer_states.h"
#include "tests/fuzz/fuzz.h"

static void check(const struct k3_layer_states *s, const char *bytes, size_t nbytes) {
  const void *rows[] = {s->hidden, s->residual};
  const enum k3_dtype dtypes[] = {s->hidden_dtype, s->residual_dtype};
  FUZZ_CHECK(s->hidden && s->positions && s->request_ids && s->n_rows <= nbytes / sizeof(int64_t));
  for (int r = 0; r < 2; r++) {
    const char *row = rows[r];
    if (!row)
      continue;
    FUZZ_CHECK(dtypes[r] == K3_DTYPE_F32 || dtypes[r] == K3_DTYPE_BF16);
    uint64_t n;
    FUZZ_CHECK(!__builtin_mul_overflow(s->n_rows, s->width * (dtypes[r] == K3_DTYPE_F32 ? 4 : 2), &n));
    FUZZ_CHECK(row >= bytes && row <= bytes + nbytes && n <= (uint64_t)(bytes + nbytes - row));
    volatile char byte = 0;
    for (uint64_t i = 0; i < n; i++)
      byte ^= row[i];
    (void)byte;
  }
  volatile int64_t id = 0;
  for (uint64_t i = 0; i < s->n_rows; i++)
    id ^= s->positions[i] ^ s->request_ids[i];
  (void)id;
}

static void parse(const uint8_t *data, size_t nbytes) {
  struct k3_layer_states states;
  struct k3_error err = {0};
  const char *bytes = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  fuzz_fail_one(data, nbytes, 8);
  enum k3_status status = k3_layer_states_parse(bytes, nbytes, "input", &states, &err);
  fuzz_fail_none();
  FUZZ_CHECK(status == err.status &&
             (status == K3_OK || ((status == K3_BAD_INPUT || status == K3_NO_MEMORY) && !states.hidden && !states.positions)));
  k3_layer_states_free(&states);
  err = (struct k3_error){0};
  status = k3_layer_states_parse(bytes, nbytes, "input", &states, &err);
  if (status == K3_OK)
    check(&states, bytes, nbytes);
  else
    FUZZ_CHECK(status == K3_BAD_INPUT && err.status == K3_BAD_INPUT && err.found[0] && !states.hidden && !states.positions && !states.request_ids);
  k3_layer_states_free(&states);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  parse(data, nbytes);
  const uint8_t *zero = nbytes > 0 ? memchr(data, 0, nbytes) : NULL;
  size_t h = zero ? (size_t)(zero - data) : nbytes, n_data = zero ? nbytes - h - 1 : 0;
  uint8_t *file = malloc(8 + h + n_data);
  FUZZ_CHECK(file);
  for (int i = 0; i < 8; i++)
    file[i] = (uint8_t)((uint64_t)h >> 8 * i);
  if (h > 0)
    memcpy(file + 8, data, h);
  if (n_data > 0)
    memcpy(file + 8 + h, zero + 1, n_data);
  parse(file, 8 + h + n_data);
  free(file);
  return 0;
}
