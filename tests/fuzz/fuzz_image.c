// covers: formats/image.c formats/manifest_check.c
// A whole image. The input is opened as it is (where the seal stops nearly everything), and as a recipe for a file: one byte with the number of data
// pages, the text of the header up to a NUL, the text of the manifest. The header is padded to a page, the manifest put into its place and the seal
// made right, so that mutations reach the checks behind it.
#include "base/hash.h"
#include "formats/image.h"
#include "tests/fuzz/fuzz.h"

enum { PAGE = 4096, MAX_PAGES = 16 };

static void check_image(const struct k3_image *image) {
  const unsigned char *end = image->bytes + image->nbytes;
  for (size_t i = 0; i < image->header.n_tensors; i++) {
    const struct k3_st_tensor *tensor;
    const unsigned char *bytes = k3_image_data(image, image->header.tensors[i].name, &tensor);
    enum k3_role role = (enum k3_role)99;
    enum k3_tp_rule tp = (enum k3_tp_rule)99;
    k3_manifest_role_of(&image->manifest, tensor->name, &role, &tp);
    FUZZ_CHECK(role <= K3_ROLE_BORROWED && tp <= K3_TP_VOCAB && !k3_manifest_linear_of(&image->manifest, "no such\nmodule"));
    FUZZ_CHECK(bytes >= image->bytes && bytes <= end && tensor->end - tensor->begin <= (uint64_t)(end - bytes));
  }
  for (size_t v = 0; v < image->manifest.n_views; v++) {
    for (size_t s = 0; s < image->manifest.views[v].n_shards; s++) {
      const struct k3_manifest_view_shard *shard = &image->manifest.views[v].shards[s];
      const struct k3_st_tensor *tensor;
      FUZZ_CHECK(k3_image_data(image, shard->tensor, &tensor) && tensor->rank > 0 && shard->row + shard->n_rows <= tensor->shape[0]);
    }
    FUZZ_CHECK(!k3_image_data(image, image->manifest.views[v].name, NULL));
  }
  FUZZ_CHECK(image->body_begin % PAGE == 0 && image->nbytes % PAGE == 0 && image->body_begin <= image->nbytes);
  for (uint64_t s = 0; s <= image->n_segments; s++) {
    enum k3_status status = k3_image_check_segment(image, s, NULL), crc_status = k3_image_check_segment_crc(image, s, NULL);
    FUZZ_CHECK((status == K3_BAD_ARGUMENT) == (s == image->n_segments) && (crc_status == K3_BAD_ARGUMENT) == (s == image->n_segments));
  }
}

static void open_image(const void *bytes, size_t nbytes) {
  struct k3_image image;
  struct k3_error err = {0};
  k3_alloc_set_limit(4096 * nbytes + (1 << 20));
  if (k3_image_open(bytes, nbytes, "input", &image, &err) == K3_OK)
    check_image(&image);
  else
    FUZZ_CHECK(err.status == K3_BAD_INPUT && err.rule != K3_RULE_NONE && err.found[0] && !image.bytes);
  k3_image_close(&image);
}

// Puts the manifest and the seal where the header says they belong, as far as they fit.
static void fill(unsigned char *file, size_t nbytes, size_t data, const char *manifest, size_t n_manifest) {
  struct k3_st_header header;
  if (k3_st_parse((const char *)file + 8, data - 8, nbytes, "input", &header, NULL) != K3_OK)
    return;
  const struct k3_st_tensor *place = k3_st_find(&header, "__k3pack__", 10), *seal = k3_st_find(&header, "__seal__", 8);
  if (place) {
    size_t n = place->end - place->begin;
    memset(file + data + place->begin, ' ', n);
    memcpy(file + data + place->begin, manifest, n < n_manifest ? n : n_manifest);
  }
  if (seal && seal->end - seal->begin == 32)
    FUZZ_CHECK(k3_sha256(file, data + seal->begin, file + data + seal->begin, NULL) == K3_OK);
  k3_st_header_free(&header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  const char *input = fuzz_guarded(data, &nbytes);
  open_image(input, nbytes);
  if (nbytes < 2)
    return 0;
  const char *header = input + 1, *nul = memchr(header, '\0', nbytes - 1), *end = input + nbytes;
  size_t h = (size_t)((nul ? nul : end) - header), begin = (8 + h + PAGE - 1) / PAGE * PAGE,
         file_nbytes = begin + PAGE * (size_t)(*input & (MAX_PAGES - 1));
  unsigned char *file = calloc(1, file_nbytes);
  FUZZ_CHECK(file);
  memset(file + 8, ' ', begin - 8);
  memcpy(file + 8, header, h);
  for (int i = 0; i < 8; i++)
    file[i] = (unsigned char)((uint64_t)(begin - 8) >> 8 * i);
  k3_alloc_set_limit(4096 * nbytes + (1 << 20));
  fill(file, file_nbytes, begin, nul ? nul + 1 : end, nul ? (size_t)(end - nul - 1) : 0);
  open_image(file, file_nbytes);
  free(file);
  return 0;
}
