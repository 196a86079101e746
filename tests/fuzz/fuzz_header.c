// covers: formats/safetensors_read.c formats/lfs.c
// The safetensors header. The input is read twice: as a whole file, and as eight bytes that give the size of the data area followed by the header
// text (so that mutations of the text need not keep a length right).
#include "formats/safetensors.h"
#include "tests/fuzz/fuzz.h"

struct copy {
  char *text;
  size_t n, capacity;
};

static enum k3_status append(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct copy *copy = ctx;
  K3_TRY(k3_grow(&copy->text, &copy->capacity, copy->n + nbytes, 1, err));
  memcpy(copy->text + copy->n, bytes, nbytes);
  copy->n += nbytes;
  return K3_OK;
}

static bool same_tensor(const struct k3_st_tensor *a, const struct k3_st_tensor *b) {
  return strcmp(a->name, b->name) == 0 && a->dtype == b->dtype && a->rank == b->rank && a->begin == b->begin && a->end == b->end &&
         (a->rank == 0 || memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0);
}

// What was accepted keeps the promises of the header file, and survives being written and read again.
static void check_header(const struct k3_st_header *header) {
  struct copy copy = {0};
  struct k3_st_writer writer;
  struct k3_st_header again;
  uint64_t h, sum = 0;
  k3_st_write_begin(&writer, append, &copy);
  for (size_t i = 0; i < header->n_metadata; i++) {
    FUZZ_CHECK(k3_st_metadata(header, header->metadata[i].key) != NULL);
    k3_st_write_metadata(&writer, header->metadata[i].key, header->metadata[i].value, NULL);
  }
  for (size_t i = 0; i < header->n_tensors; i++) {
    const struct k3_st_tensor *tensor = &header->tensors[i];
    FUZZ_CHECK(tensor->name_nbytes == strlen(tensor->name) && tensor->name_nbytes > 0);
    FUZZ_CHECK(k3_st_find(header, tensor->name, tensor->name_nbytes) == tensor);
    FUZZ_CHECK(tensor->end <= header->data_nbytes && tensor->begin <= tensor->end);
    FUZZ_CHECK((tensor->end - tensor->begin) * 8 == k3_st_n_elems(tensor) * k3_dtype_bits((enum k3_dtype)tensor->dtype));
    sum += tensor->end - tensor->begin;
    k3_st_write_tensor(&writer, tensor->name, (enum k3_dtype)tensor->dtype, tensor->shape, tensor->rank, tensor->begin, tensor->end, NULL);
  }
  FUZZ_CHECK(sum == header->data_nbytes);
  FUZZ_CHECK(k3_st_write_end(&writer, 0, &h, NULL) == K3_OK && h == copy.n);
  FUZZ_CHECK(k3_st_parse(copy.text, h, 8 + h + header->data_nbytes, "again", &again, NULL) == K3_OK);
  FUZZ_CHECK(again.n_tensors == header->n_tensors && again.n_metadata == header->n_metadata && !again.metadata_odd);
  for (size_t i = 0; i < header->n_tensors; i++)
    FUZZ_CHECK(same_tensor(&header->tensors[i], &again.tensors[i]));
  k3_st_header_free(&again);
  k3_free(copy.text);
}

static void parse(const char *text, uint64_t h, uint64_t file_nbytes) {
  struct k3_st_header header;
  struct k3_error err = {0};
  enum k3_status status = k3_st_parse(text, h, file_nbytes, "input", &header, &err);
  FUZZ_CHECK(status == K3_OK || (status == K3_BAD_INPUT && err.rule != K3_RULE_NONE && err.found[0] && !header.tensors));
  if (status == K3_OK)
    check_header(&header);
  k3_st_header_free(&header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  uint64_t h = 0, data_nbytes = 0;
  struct k3_error err = {0};
  const char *input = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  if (k3_st_header_length(input, nbytes, nbytes, "input", &h, &err) == K3_OK)
    parse(input + K3_ST_PREFIX_NBYTES, h, nbytes);
  else
    FUZZ_CHECK(err.rule == K3_CNT01 || err.rule == K3_CNT02);
  if (nbytes < K3_ST_PREFIX_NBYTES)
    return 0;
  memcpy(&data_nbytes, input, 8);
  h = nbytes - K3_ST_PREFIX_NBYTES;
  parse(input + K3_ST_PREFIX_NBYTES, h, K3_ST_PREFIX_NBYTES + h + (data_nbytes & 0xFFFFFFFFFFFFu));
  return 0;
}
