// "A failing-allocation loop and a failing-read/write loop over open, check, convert, run": every allocation, read and write in turn, verify and
// export too. No crash, no leak (of memory under a leak checker, of descriptors here), no output left, and an answer that is either an error or the
// right one.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/file.h"
#include "base/hash.h"
#include "cli/verbs.h"
#include "loader/check.h"
#include "loader/digests.h"
#include "loader/export.h"
#include "loader/requantise.h"
#include "loader/rules_baseline.h"
#include "loader/synth.h"
#include "loader/verify.h"
#include "loader/writer.h"
#include "temp_folder.h"
#include "unit.h"

// ---- the operations ----

struct op {
  const char *name;
  enum k3_status (*run)(struct k3_error *err);
  bool writes;         // into the folder "out", which must be empty after a failure
  bool interruptible;  // maps no image: a mapping is never interrupted
};

static uint64_t n_errors_found;  // of the last check

static enum k3_status check(const char *source, const char *target, enum k3_depth depth, const char *baseline, bool digests, struct k3_error *err) {
  struct k3_ckpt ckpt = {0}, other = {0}, plain = {0};
  struct k3_findings findings = {0};
  struct k3_recipe recipe = {0};
  struct k3_plan plan = {0};
  struct k3_check_summary summary;
  struct k3_check_options options = {.generic_fallback = true, .depth = depth, .n_threads = 1, .plan = {.digests = true}};
  enum k3_status status = k3_ckpt_open(source, NULL, &ckpt, &findings, err);
  if (status == K3_OK && target)
    status = k3_ckpt_open(target, NULL, &other, &findings, err);
  if (status == K3_OK)
    status = k3_check_run(&ckpt, target ? &other : NULL, &options, &recipe, &plan, &summary, &findings, err);
  if (status == K3_OK && baseline) {
    struct k3_baseline_summary result;
    status = k3_ckpt_open(baseline, NULL, &plain, &findings, err);
    if (status == K3_OK)
      status = k3_rules_baseline(&plan, &plain, K3_JUDGE_K3PACK, 1, NULL, &result, &findings, err);
  }
  if (status == K3_OK && digests) {
    struct k3_digests result;
    status = k3_digests_check(&ckpt, &recipe, 1, NULL, &result, &findings, err);
  }
  n_errors_found = findings.n_errors;
  if (status == K3_OK && findings.out_of_memory)
    status = K3_NO_MEMORY;
  k3_plan_free(&plan);
  k3_recipe_free(&recipe);
  k3_ckpt_close(&ckpt);
  k3_ckpt_close(&other);
  k3_ckpt_close(&plain);
  k3_findings_free(&findings);
  return status;
}

static enum k3_status run_check(struct k3_error *err) {
  return check(temp_path("draft"), temp_path("target"), K3_DEPTH_VALUES, NULL, true, err);
}

static enum k3_status run_check_quantised(struct k3_error *err) {
  return check(temp_path("fp4"), NULL, K3_DEPTH_VALUES, temp_path("spread"), false, err);
}

static enum k3_status run_check_image(struct k3_error *err) {
  return check(temp_path("image.k3p"), NULL, K3_DEPTH_VALUES, NULL, false, err);
}

static enum k3_status convert(const char *draft, const char *with, const char *image, bool encode, struct k3_error *err) {
  struct k3_ckpt ckpt = {0}, target = {0};
  struct k3_findings findings = {0};
  struct k3_recipe recipe = {0};
  struct k3_plan plan = {0};
  struct k3_check_summary summary;
  struct k3_writer_result result;
  struct k3_check_options options = {.depth = K3_DEPTH_SCALES, .n_threads = 1, .plan = {.digests = true, .crc = true, .encode = encode}};
  struct k3_requant_options quant = {.scheme = K3_SCHEME_NVFP4};
  enum k3_status status = k3_ckpt_open(draft, NULL, &ckpt, &findings, err);
  if (status == K3_OK && with)
    status = k3_ckpt_open(with, NULL, &target, &findings, err);
  if (status == K3_OK)
    status = k3_check_run(&ckpt, with ? &target : NULL, &options, &recipe, &plan, &summary, &findings, err);
  if (status == K3_OK && findings.n_errors > 0)
    status = K3_BAD_INPUT;
  if (status == K3_OK)
    status = k3_plan_compare_borrowed(&plan, 1, NULL, &findings, err);
  if (status == K3_OK && encode)
    status = k3_requant_select(&plan, &quant, &findings, err);
  if (status == K3_OK && encode)
    status = k3_requant_measure(&plan, 1, NULL, &findings, err);
  if (status == K3_OK)
    status = k3_plan_layout(&plan, &findings, err);
  if (status == K3_OK) {
    struct k3_writer_options writer = {.path = image, .n_threads = 1};
    status = k3_writer_run(&plan, &writer, &result, &findings, err);
  }
  k3_plan_free(&plan);
  k3_recipe_free(&recipe);
  k3_ckpt_close(&ckpt);
  k3_ckpt_close(&target);
  k3_findings_free(&findings);
  return status;
}

static enum k3_status run_convert(struct k3_error *err) {
  return convert(temp_path("draft"), temp_path("target"), temp_path("out/image.k3p"), false, err);
}

static enum k3_status run_convert_quant(struct k3_error *err) {
  return convert(temp_path("draft"), temp_path("target"), temp_path("out/image.k3p"), true, err);
}

static enum k3_status run_verify(struct k3_error *err) {
  struct k3_verify_result result;
  struct k3_findings findings = {0};
  enum k3_status status = k3_verify_image(temp_path("image.k3p"), 1, NULL, &result, &findings, err);
  n_errors_found = findings.n_errors;
  if (status == K3_OK && findings.out_of_memory)
    status = K3_NO_MEMORY;
  k3_findings_free(&findings);
  return status;
}

static enum k3_status run_export(struct k3_error *err) {
  struct k3_export_options options = {.n_threads = 1};
  struct k3_export_result result;
  return k3_export_original(temp_path("image.k3p"), temp_path("out"), &options, &result, err);
}

// `run` is the verb itself, since it is the verb that reads a scenario and writes the results. A fault must give the exit code for reading, writing
// and memory, never that of malformed input.
static enum k3_status run_verb(char **argv, struct k3_error *err) {
  struct k3_cli cli;
  int argc = 0, null = open("/dev/null", O_WRONLY), saved = dup(STDERR_FILENO);
  while (argv[argc])
    argc++;
  assert_true(null >= 0 && saved >= 0 && dup2(null, STDERR_FILENO) == STDERR_FILENO);
  k3_cli_start(&cli, "run", 0, NULL);
  int code = k3_cli_finish(&cli, k3_cmd_run(&cli, argc, argv));
  assert_true(dup2(saved, STDERR_FILENO) == STDERR_FILENO && close(saved) == 0 && close(null) == 0);
  if (code == 0)
    return K3_OK;
  assert_int_equal(code, k3_status_exit_code(K3_IO));
  return k3_fail(err, K3_IO, K3_RULE_NONE, NULL, NULL, NULL, "exit code %d", code);
}

#define ARG(text) (char *)(uintptr_t)(text)  // the verb changes the order of its arguments, not the texts

static enum k3_status run_drafter(const char *n_ranks, struct k3_error *err) {
  char *argv[] = {ARG("run"),       ARG(temp_path("image.k3p")),
                  ARG("--input"),   ARG("fixtures/demo/scenario.safetensors"),
                  ARG("-o"),        ARG(temp_path("out/drafts")),
                  ARG("--emit"),    ARG("all"),
                  ARG("--tp"),      ARG(n_ranks),
                  ARG("--threads"), ARG("1"),
                  ARG("--quiet"),   NULL};
  return run_verb(argv, err);
}

static enum k3_status run_run(struct k3_error *err) {
  return run_drafter("1", err);
}

static enum k3_status run_run_ranks(struct k3_error *err) {
  return run_drafter("2", err);
}

static enum k3_status run_run_layers(struct k3_error *err) {
  char *argv[] = {ARG("run"),       ARG(temp_path("layers.k3p")),
                  ARG("--input"),   ARG(temp_path("states")),
                  ARG("-o"),        ARG(temp_path("out/states")),
                  ARG("--layers"),  ARG("0..1"),
                  ARG("--taps"),    ARG("1"),
                  ARG("--threads"), ARG("1"),
                  ARG("--quiet"),   NULL};
  return run_verb(argv, err);
}

static const struct op OPS[] = {
    {"check", run_check, false, true},
    {"check, quantised", run_check_quantised, false, true},
    {"check, image", run_check_image, false, false},
    {"convert", run_convert, true, true},
    {"convert --quant", run_convert_quant, true, true},
    {"verify", run_verify, false, false},
    {"export", run_export, true, false},
    {"run", run_run, true, false},
    {"run --tp 2", run_run_ranks, true, false},
    {"run --layers", run_run_layers, true, false},
};
enum { N_OPS = sizeof OPS / sizeof OPS[0] };

// ---- the world ----

static void *counted_malloc(size_t nbytes) {
  return k3_calloc(1, nbytes, NULL);
}

static void synth(const char *folder, const char *preset, enum k3_scheme scheme, bool spread) {
  struct k3_synth_options options = {.preset = preset, .scheme = scheme, .spread = spread, .dtype = K3_DTYPE_BF16, .n_shards = 2, .n_threads = 1};
  struct k3_synth_report report;
  assert_int_equal(k3_synth_write(temp_path(folder), &options, &report, NULL), K3_OK);
}

// Input of `run --layers`: n rows of one request, `width` values of 0 and 1 each.
static void write_states(const char *path, unsigned width, unsigned n) {
  FILE *file = fopen(path, "wb");
  char header[512];
  unsigned n_hidden = n * width * 4;
  int h = snprintf(header, sizeof header,
                   "{\"hidden_states\":{\"dtype\":\"F32\",\"shape\":[%u,%u],\"data_offsets\":[0,%u]},\"positions\":{\"dtype\":\"I64\",\"shape\":[%u],"
                   "\"data_offsets\":[%u,%u]},\"request_ids\":{\"dtype\":\"I64\",\"shape\":[%u],\"data_offsets\":[%u,%u]}}",
                   n, width, n_hidden, n, n_hidden, n_hidden + 8 * n, n, n_hidden + 8 * n, n_hidden + 16 * n);
  uint64_t length = (uint64_t)h, zero = 0;
  assert_non_null(file);
  fwrite(&length, 8, 1, file);
  fwrite(header, length, 1, file);
  for (unsigned i = 0; i < n * width; i++)
    fwrite(&(float){(float)(i * 7 % 5 == 0)}, 4, 1, file);
  for (uint64_t i = 0; i < n; i++)
    fwrite(&i, 8, 1, file);
  for (unsigned i = 0; i < n; i++)
    fwrite(&zero, 8, 1, file);
  assert_int_equal(fclose(file), 0);
}

static int setup(void **state) {
  if (access("/dev/shm", W_OK) == 0)
    setenv("TMPDIR", "/dev/shm", 0);  // thousands of outputs are flushed to disk
  if (temp_folder_setup(state) != 0)
    return -1;
  synth("draft", "tiny", K3_SCHEME_BF16, false);
  synth("spread", "tiny", K3_SCHEME_BF16, true);
  synth("target", "tiny-target", K3_SCHEME_BF16, false);
  synth("fp4", "tiny", K3_SCHEME_NVFP4, true);
  assert_int_equal(mkdir(temp_path("out"), 0777), 0);
  synth("layers", "m3-tiny", K3_SCHEME_BF16, false);
  assert_int_equal(convert(temp_path("draft"), temp_path("target"), temp_path("image.k3p"), false, NULL), K3_OK);
  assert_int_equal(convert(temp_path("layers"), NULL, temp_path("layers.k3p"), false, NULL), K3_OK);
  write_states(temp_path("states"), 64, 3);
  // jansson's allocations fail like the library's own.
  json_set_alloc_funcs(counted_malloc, k3_free);
  return 0;
}

static int n_descriptors(void) {
  return temp_n_entries("/proc/self/fd");
}

static void clear_out(void) {
  const char *out = temp_path("out");
  nftw(out, temp_remove_one, 16, FTW_DEPTH | FTW_PHYS);
  assert_int_equal(mkdir(out, 0777), 0);
}

// SHA-256 over all files that an operation left.
static void digest_out(char hex[65]) {
  struct dirent **names;
  uint8_t digest[K3_SHA256_NBYTES];
  struct k3_sha256 *sha = k3_sha256_create(NULL);
  int n = scandir(temp_path("out"), &names, NULL, alphasort);
  for (int i = 0; i < n; i++) {
    char path[1024];
    void *data;
    size_t nbytes;
    snprintf(path, sizeof path, "%.600s/%.300s", temp_path("out"), names[i]->d_name);
    if (names[i]->d_name[0] != '.') {
      assert_int_equal(k3_read_file(path, 1 << 30, &data, &nbytes, NULL), K3_OK);
      assert_int_equal(k3_sha256_update(sha, data, nbytes, NULL), K3_OK);
      k3_free(data);
    }
    free(names[i]);
  }
  free(names);
  assert_int_equal(k3_sha256_finish(sha, digest, NULL), K3_OK);
  k3_sha256_free(sha);
  k3_hex(hex, digest);
}

struct right {
  char digest[65];
  uint64_t n_errors;
};

static struct right right_answer(const struct op *op) {
  struct right right;
  struct k3_error err = {0};
  clear_out();
  if (op->run(&err) != K3_OK)
    fail_msg("%s without faults: %s", op->name, err.found);
  right.n_errors = n_errors_found;
  digest_out(right.digest);
  clear_out();
  return right;
}

// Runs once with a fault armed; returns the status after all that must hold either way.
static enum k3_status run_with_fault(const struct op *op, const struct right *right, const char *kind, uint64_t n) {
  struct k3_error err = {0};
  int before = n_descriptors();
  enum k3_status status = op->run(&err);
  k3_alloc_fail_at(0);
  k3_io_fail_at(0, 0);
  if (n_descriptors() != before)
    fail_msg("%s, %s %llu: %d descriptors, %d before", op->name, kind, (unsigned long long)n, n_descriptors(), before);
  if (status == K3_OK) {
    char digest[65];
    digest_out(digest);
    if (n_errors_found != right->n_errors || strcmp(digest, right->digest) != 0)
      fail_msg("%s, %s %llu: said to have succeeded, with another result (%llu errors instead of %llu)", op->name, kind, (unsigned long long)n,
               (unsigned long long)n_errors_found, (unsigned long long)right->n_errors);
  } else if (temp_n_entries(temp_path("out")) != 0) {
    fail_msg("%s, %s %llu: failed (%s) and left something", op->name, kind, (unsigned long long)n, err.found);
  }
  if (op->writes)
    clear_out();
  return status;
}

// ---- the loops ----

static void every_allocation_fails(void **state) {
  (void)state;
  for (int o = 0; o < N_OPS; o++) {
    const struct op *op = &OPS[o];
    uint64_t from = k3_alloc_count(), n_failed = 0;
    struct right right = right_answer(op);
    struct k3_error unused = {0};
    from = k3_alloc_count();
    op->run(&unused);
    uint64_t n_allocs = k3_alloc_count() - from;
    clear_out();
    assert_true(n_allocs > 3);
    for (uint64_t n = 1; n <= n_allocs; n++) {
      k3_alloc_fail_at(n);
      n_failed += run_with_fault(op, &right, "allocation", n) != K3_OK;
    }
    printf("%s: %llu allocations, %llu failures passed on\n", op->name, (unsigned long long)n_allocs, (unsigned long long)n_failed);
    assert_true(n_failed * 10 >= n_allocs * 9);  // only what can be done without may be tolerated
  }
}

static void every_read_and_write_fails(void **state) {
  (void)state;
  static const int kinds[] = {EIO, ENOSPC};
  enum { ENOUGH = 8 };  // so many successes in a row: the fault was not reached any more
  for (int o = 0; o < N_OPS; o++) {
    const struct op *op = &OPS[o];
    struct right right = right_answer(op);
    for (int k = 0; k < 2; k++) {
      uint64_t n_failed = 0, n = 1;
      for (uint64_t n_good = 0; n_good < ENOUGH; n++) {
        k3_io_fail_at(n, kinds[k]);
        bool failed = run_with_fault(op, &right, strerror(kinds[k]), n) != K3_OK;
        n_failed += failed;
        n_good = failed ? 0 : n_good + 1;
        assert_true(n < 100000);
      }
      printf("%s: %llu reads and writes failed, one in each run\n", op->name, (unsigned long long)n_failed);
      assert_true(n_failed >= 1);
    }
  }
}

// An interrupted call is none at all, and short counts are gone on with.
static void interruptions_change_nothing(void **state) {
  (void)state;
  for (int o = 0; o < N_OPS; o++) {
    if (!OPS[o].interruptible)
      continue;
    struct right right = right_answer(&OPS[o]);
    for (uint64_t n = 1; n <= 60; n++) {
      k3_io_fail_at(n, EINTR);
      if (run_with_fault(&OPS[o], &right, "EINTR", n) != K3_OK)
        fail_msg("%s: an interruption of call %llu was taken for a failure", OPS[o].name, (unsigned long long)n);
    }
    k3_io_set_chunk_limit(4099);
    assert_int_equal(run_with_fault(&OPS[o], &right, "short counts", 0), K3_OK);
    k3_io_set_chunk_limit(0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_allocation_fails),
      cmocka_unit_test(every_read_and_write_fails),
      cmocka_unit_test(interruptions_change_nothing),
  };
  return cmocka_run_group_tests(tests, setup, temp_folder_teardown);
}
