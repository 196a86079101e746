// A stand-alone engine: runs a fuzz target over the files and folders given, as they are, cut off at every byte, and with every byte changed in two
// ways (small files only; none with --whole, which measures what the files themselves cover). Needs no fuzzer, so it is part of `make test`. Prints
// the number of inputs; exit code 1 when there were none.
#include <ftw.h>
#include <stdbool.h>

#include "tests/fuzz/fuzz.h"

enum { MAX_MUTATED_NBYTES = 600 };

static unsigned long n_files, n_runs;
static bool whole_only;

static void run(const uint8_t *data, size_t nbytes) {
  LLVMFuzzerTestOneInput(data, nbytes);
  n_runs++;
}

static int replay_file(const char *path, const struct stat *st, int type, struct FTW *place) {
  (void)place;
  if (type != FTW_F || st->st_size > FUZZ_MAX_NBYTES)
    return 0;
  FILE *file = fopen(path, "rb");
  size_t nbytes = (size_t)st->st_size;
  uint8_t *data = malloc(nbytes + 1);
  FUZZ_CHECK(file && data);
  nbytes = fread(data, 1, nbytes, file);
  fclose(file);
  n_files++;
  run(data, nbytes);
  for (size_t i = 0; i < nbytes && nbytes <= MAX_MUTATED_NBYTES && !whole_only; i++) {
    run(data, i);
    uint8_t saved = data[i];
    data[i] ^= 1;
    run(data, nbytes);
    data[i] = "\"\\{}[],:09-eu\xC3\xFF"[(i * 7 + saved) % 15];
    run(data, nbytes);
    data[i] = saved;
  }
  free(data);
  return 0;
}

int main(int argc, char **argv) {
  whole_only = argc > 1 && strcmp(argv[1], "--whole") == 0;
  for (int i = whole_only ? 2 : 1; i < argc; i++)
    nftw(argv[i], replay_file, 16, FTW_PHYS);
  printf("%lu files, %lu runs\n", n_files, n_runs);
  return n_files > 0 ? 0 : 1;
}
