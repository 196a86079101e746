// For tests/peers/diff_safetensors.py: reads records "u32 length (little-endian), file content" from stdin and prints one line for each:
//   ok <odd> <name in hex>:<dtype>:<d,d,..>:<begin>:<end> ...     or     <rule> <what was found>
#include <stdio.h>
#include <stdlib.h>

#include "formats/safetensors.h"

static void print_header(const struct k3_st_header *header) {
  printf("ok %d", header->metadata_odd);
  for (size_t i = 0; i < header->n_tensors; i++) {
    const struct k3_st_tensor *tensor = &header->tensors[i];
    putchar(' ');
    for (uint32_t k = 0; k < tensor->name_nbytes; k++)
      printf("%02x", (unsigned char)tensor->name[k]);
    printf(":%s:", k3_dtype_name((enum k3_dtype)tensor->dtype));
    for (unsigned k = 0; k < tensor->rank; k++)
      printf("%s%llu", k ? "," : "", (unsigned long long)tensor->shape[k]);
    printf(":%llu:%llu", (unsigned long long)tensor->begin, (unsigned long long)tensor->end);
  }
  putchar('\n');
}

int main(void) {
  unsigned char size[4];
  while (fread(size, 1, 4, stdin) == 4) {
    size_t nbytes = size[0] | size[1] << 8 | size[2] << 16 | (size_t)size[3] << 24;
    char *file = malloc(nbytes + 1);
    struct k3_st_header header = {0};
    struct k3_error err = {0};
    uint64_t h;
    if (!file || fread(file, 1, nbytes, stdin) != nbytes)
      return 1;
    enum k3_status status = k3_st_header_length(file, nbytes, nbytes, "f", &h, &err);
    if (status == K3_OK)
      status = k3_st_parse(file + K3_ST_PREFIX_NBYTES, h, nbytes, "f", &header, &err);
    if (status == K3_OK)
      print_header(&header);
    else
      printf("%s %s\n", k3_rule_info(err.rule)->id, err.found);
    k3_st_header_free(&header);
    free(file);
  }
  return 0;
}
