// covers: formats/index.c
// The shard index.
#include "formats/index.h"
#include "tests/fuzz/fuzz.h"

static enum k3_status see(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  (void)err;
  FUZZ_CHECK(strlen(tensor) == tensor_nbytes && tensor_nbytes > 0);
  FUZZ_CHECK(file[file_nbytes] == '\0');
  if (k3_index_file_name_ok(file, file_nbytes))
    FUZZ_CHECK(strlen(file) == file_nbytes && !strchr(file, '/') && strcmp(file, "..") != 0);
  ++*(uint64_t *)ctx;
  return K3_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  struct k3_index_summary summary;
  struct k3_error err = {0};
  uint64_t n_seen = 0;
  const char *text = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  enum k3_status status = k3_index_parse(text, nbytes, "input", see, &n_seen, &summary, &err);
  FUZZ_CHECK(n_seen == summary.n_entries);
  FUZZ_CHECK(!(summary.has_total_size && summary.odd_total_size));
  FUZZ_CHECK(status == K3_OK || (status == K3_BAD_INPUT && (err.rule == K3_IDX10 || err.rule == K3_CNT01) && err.found[0]));
  if (status == K3_OK) {
    struct k3_index_summary again;
    uint64_t n_again = 0;
    FUZZ_CHECK(k3_index_parse_again(text, nbytes, "input", see, &n_again, &again, NULL) == K3_OK);
    FUZZ_CHECK(n_again == n_seen && again.n_entries == summary.n_entries && again.total_size == summary.total_size);
  }
  return 0;
}
