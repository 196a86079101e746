// MiniMax-M3, DeepSeek-V3.2 and Kimi K3 at full geometry, as sparse files: what the published checkpoints count, what checking and planning them
// costs, and that an absent tensor among half a million is named. A build with sanitizers or without optimisation takes the smallest of them alone,
// unless K3PACK_FULL=1 asks for all.
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "base/hash.h"
#include "loader/split.h"
#include "moe_rig.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
enum { SLOW_BUILD = 1 };
#else
enum { SLOW_BUILD = 0 };
#endif

struct published {
  const char *preset;
  uint64_t n_tensors, n_files, nbytes;
  uint64_t n_elems;       // as stored; 0: not checked
  uint32_t tp, other_tp;  // ranks that it can be cut for, and that it cannot
  const char *why_not;
};
static const struct published PUBLISHED[] = {
    {"minimax-m3", 23416, 64, UINT64_C(854172958720), UINT64_C(427040140160), 64, 48, "64 heads"},
    {"minimax-m3-mxfp8", 45838, 32, UINT64_C(443742085120), 0, 32, 64, "one scale for every 32"},
    {"deepseek-v3.2", 92425, 163, UINT64_C(689469018240), UINT64_C(685396921376), 16, 32, "one scale for every 128"},
    {"kimi-k3", 497220, 96, UINT64_C(1560860324864), 0, 32, 64, "96 heads"},
    {"minimax-m3-nvfp4", 89614, 32, 0, 0, 32, 64, "one scale for every 32"},
    {"minimax-m3-mxfp4", 45304, 49, 0, 0, 32, 64, "one scale for every 32"},
};
enum { N_PUBLISHED = sizeof PUBLISHED / sizeof PUBLISHED[0] };

static bool left_out(const struct published *p) {
  if (!SLOW_BUILD || getenv("K3PACK_FULL") || p == PUBLISHED)
    return false;
  print_message("LEFT OUT in this slow build: %s (K3PACK_FULL=1 runs it)\n", p->preset);
  return true;
}

// Runs the program with its output thrown away; exit code, CPU seconds and peak memory.
static int run(char *const *argv, double *cpu_s, double *wall_s, uint64_t *rss_nbytes) {
  struct timespec begin, end;
  struct rusage usage;
  int status;
  malloc_trim(0);  // what this process holds when it forks counts as the child's
  clock_gettime(CLOCK_MONOTONIC, &begin);
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    execv(argv[0], argv);
    _exit(127);
  }
  while (wait4(pid, &status, 0, &usage) < 0)
    assert_int_equal(errno, EINTR);
  clock_gettime(CLOCK_MONOTONIC, &end);
  *cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  *wall_s = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
  *rss_nbytes = (uint64_t)usage.ru_maxrss * 1024;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A convolution [12288, 1, 4] is cut by heads as its projection is: rank 5 of 32 has the rows of heads 15, 16 and 17.
static void cut_convolutions(const struct k3_plan *whole) {
  struct k3_plan part;
  struct k3_findings findings = {0};
  struct k3_error err = {0};
  if (k3_split_part(whole, 32, 5, NULL, &part, &findings, &err) != K3_OK)
    fail_msg("%s", err.found);
  unsigned n = 0;
  for (size_t t = 0; t < part.n_tensors; t++) {
    if (!part.tensors[t].name || !strstr(part.tensors[t].name, "_conv1d.weight"))
      continue;
    const struct k3_plan_piece piece = k3_plan_piece_at(&part, &part.tensors[t], 0);
    assert_true(part.tensors[t].rank == 3 && part.tensors[t].shape[0] == 384 && part.tensors[t].shape[2] == 4);
    assert_true(piece.n_rows == 1 && piece.row_nbytes == 384 * 16 && piece.src_offset == 5 * 384 * 16);
    n++;
  }
  assert_int_equal(n, 3 * 69);
  assert_int_equal(findings.n_errors, 0);
  k3_findings_free(&findings);
  k3_split_part_free(&part);
}

// "Full-geometry synthesis reproduces the golden numbers exactly: ... `check --depth headers` accepts each inside the time and memory bars,
// `convert --dry-run` plans each". The bars are for half a million tensors: 2 s (of one CPU: the machine may be busy) and 200 MB to check, 64 MiB and
// 300 bytes a tensor to plan.
static void full_geometry(void **state) {
  (void)state;
  const char *program = getenv("K3PACK");
  if (!program)
    print_message("K3PACK is not set: the program's time and memory are not measured\n");
  for (size_t i = 0; i < N_PUBLISHED; i++) {
    const struct published *p = &PUBLISHED[i];
    if (left_out(p))
      continue;
    const char *folder = temp_path(p->preset);
    struct k3_synth_report report = moe_synth(folder, p->preset);
    assert_int_equal(report.n_tensors, p->n_tensors);
    assert_int_equal(report.n_files, p->n_files);
    if (p->nbytes)
      assert_int_equal(report.weights_nbytes, p->nbytes);
    if (p->n_elems)
      assert_int_equal(report.n_params, p->n_elems);
    struct moe_check check;
    moe_check(folder, &check);
    if (check.findings.n_errors)
      moe_print(&check);
    assert_int_equal(check.findings.n_errors, 0);
    assert_int_equal(check.summary.n_tensors, p->n_tensors);
    assert_int_equal(check.summary.n_tensors_expected, p->n_tensors);
    assert_false(check.summary.fell_back);
    assert_int_equal(check.ckpt.tensors_nbytes, report.weights_nbytes);
    // M3V13, DSV13, K3V13, X11: heads and whole scale groups on every rank; key heads may be repeated.
    struct k3_error err = {0};
    assert_int_equal(k3_split_check(&check.plan, p->tp, &err), K3_OK);
    assert_int_equal(k3_split_check(&check.plan, p->other_tp, &err), K3_UNSUPPORTED);
    assert_int_equal(err.rule, K3_PCK05);
    assert_non_null(strstr(err.found, p->why_not));
    err = (struct k3_error){0};
    if (strcmp(p->preset, "kimi-k3") == 0)
      cut_convolutions(&check.plan);
    assert_int_equal(k3_plan_layout(&check.plan, &check.findings, &err), K3_OK);
    assert_true(strlen(check.plan.manifest) < 1000000);  // "the manifest stays under 1 MB"
    moe_close(&check);
    if (!program)
      continue;
    double cpu_s, wall_s;
    uint64_t rss;
    char *image = k3_path_join(temp_folder, "image.k3p", NULL);
    char *const check_argv[] = {(char *)(uintptr_t)program, "check", (char *)(uintptr_t)folder, "--depth", "headers", "--quiet", NULL};
    cpu_s = 2;
    for (int attempt = 0; attempt < 3 && cpu_s >= 2; attempt++)  // on a busy machine even the CPU's clock runs slow
      assert_int_equal(run(check_argv, &cpu_s, &wall_s, &rss), 0);
    print_message("%s: check %.2f s of CPU, %.2f s, %.0f MB\n", p->preset, cpu_s, wall_s, (double)rss / 1e6);
    assert_true(SLOW_BUILD || (cpu_s < 2 && rss < 200000000));
    char *const plan_argv[] = {(char *)(uintptr_t)program, "convert", (char *)(uintptr_t)folder, "-o", image, "--dry-run", "--quiet", NULL};
    assert_int_equal(run(plan_argv, &cpu_s, &wall_s, &rss), 0);
    print_message("%s: convert --dry-run %.2f s of CPU, %.2f s, %.0f MB\n", p->preset, cpu_s, wall_s, (double)rss / 1e6);
    assert_true(SLOW_BUILD || rss < ((uint64_t)64 << 20) + 240 * p->n_tensors);  // of the 300 that are allowed
    k3_free(image);
  }
}

// Header lengths of Kimi K3's shards and digests of the headers that the published framing rules give.
static void kimi_k3_framing(void **state) {
  (void)state;
  if (left_out(&PUBLISHED[3]))
    return;
  static const struct {
    int shard;
    uint64_t header_nbytes, data_nbytes;
    const char *sha256;
  } rows[] = {{1, 2920, 2341213184, "bfd47268eb1556d004cc0d8a8ce63935a73e812c87333cfa56d46312b1c692c8"},
              {2, 818696, UINT64_C(16990092800), "b91d17c110908e42f20e36949c0267fa43248364201a81a6db57dace3bf29776"},
              {4, 817608, UINT64_C(16566684160), NULL},
              {11, 824104, UINT64_C(16990092800), NULL},
              {93, 823008, UINT64_C(16566684160), NULL},
              {94, 576, 4697663488, "f28a4f196abb0804a3f8a5b2c125f646f598359c5b92266442761216e47dd2bf"},
              {95, 296, 92289024, NULL},
              {96, 19416, 802428928, "d48df5b82c7f4dbab9b9402c30d0391d17257e04d356079f07c0900c3214312b"}};
  uint64_t files_nbytes = 0;
  for (int shard = 1; shard <= 96; shard++) {
    char name[64];
    snprintf(name, sizeof name, "model-%05d-of-000096.safetensors", shard);
    char *path = k3_path_join(temp_path("kimi-k3"), name, NULL);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    files_nbytes += (uint64_t)st.st_size;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
      if (rows[i].shard != shard)
        continue;
      assert_int_equal(st.st_size, 8 + rows[i].header_nbytes + rows[i].data_nbytes);
      char *text = malloc(8 + rows[i].header_nbytes), hex[65];
      int fd = open(path, O_RDONLY);
      uint8_t digest[K3_SHA256_NBYTES];
      assert_int_equal(k3_pread_full(fd, text, 8 + rows[i].header_nbytes, 0, path, NULL), K3_OK);
      assert_int_equal(k3_sha256(text + 8, rows[i].header_nbytes, digest, NULL), K3_OK);
      k3_hex(hex, digest);
      if (rows[i].sha256)
        assert_string_equal(hex, rows[i].sha256);
      close(fd);
      free(text);
    }
    k3_free(path);
  }
  assert_int_equal(files_nbytes, UINT64_C(1560936091448));
  struct stat st;
  char *index = k3_path_join(temp_path("kimi-k3"), "model.safetensors.index.json", NULL);
  assert_int_equal(stat(index, &st), 0);
  assert_int_equal(st.st_size, 59764096 + 1);  // and a line feed
  k3_free(index);
}

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return *seed >> 33;
}

enum { BATCH = 20 };  // as many findings of one rule are kept

static void check_batch(const struct published *p, const struct k3_ckpt *whole, const uint64_t *tensors, size_t n, bool with_index) {
  uint8_t *drop = calloc(whole->n_tensors, 1);
  for (size_t i = 0; i < n; i++)
    drop[tensors[i]] = 1;
  struct moe_check check;
  moe_drop(whole, temp_path("absent"), drop, with_index);
  moe_check(temp_path("absent"), &check);
  for (size_t i = 0; i < n; i++) {
    const char *name = k3_ckpt_tensor(whole, tensors[i])->name;
    if (!moe_named(&check, name)) {
      moe_print(&check);
      fail_msg("%s: %s is absent, and nobody says so", p->preset, name);
    }
  }
  if (strcmp(p->preset, "kimi-k3") == 0)
    assert_int_equal(check.findings.n_by_rule[K3_K3V18], 1);
  moe_close(&check);
  free(drop);
}

// Two tensors of one module would hide each other: with its weight and its scale gone, the module is absent as a whole.
static bool same_module(const struct k3_ckpt *ckpt, uint64_t a, uint64_t b) {
  const char *x = k3_ckpt_tensor(ckpt, a)->name, *y = k3_ckpt_tensor(ckpt, b)->name;
  size_t n = (size_t)(strrchr(x, '.') - x);
  return strncmp(x, y, n + 1) == 0 && !strchr(y + n + 1, '.');
}

// K3V18, 3.8 #1, 3.8 #4, "deleting one of each family and 20 random ones is noticed by name".
static void absent_tensors_are_named(void **state) {
  (void)state;
  for (size_t i = 0; i < N_PUBLISHED; i++) {
    const struct published *p = &PUBLISHED[i];
    if (left_out(p))
      continue;
    struct k3_ckpt whole;
    struct k3_findings findings = {0};
    uint64_t batch[BATCH], seed = 20260 + i;
    size_t n = 0, n_seen = 0;
    static char seen[256][512];
    assert_int_equal(k3_ckpt_open(temp_path(p->preset), NULL, &whole, &findings, NULL), K3_OK);
    while (n < BATCH) {
      uint64_t t = next_random(&seed) % whole.n_tensors;
      bool clash = false;
      for (size_t k = 0; k < n; k++)
        clash |= same_module(&whole, batch[k], t);
      if (!clash)
        batch[n++] = t;
    }
    check_batch(p, &whole, batch, n, true);
    check_batch(p, &whole, batch, n, false);
    // One of each family, beginning anywhere, so that it is seldom the first layer and expert.
    n = 0;
    uint64_t begin = next_random(&seed) % whole.n_tensors;
    for (uint64_t k = 0; k < whole.n_tensors; k++) {
      uint64_t t = (begin + k) % whole.n_tensors;
      char family[512];
      bool known = false;
      moe_family(k3_ckpt_tensor(&whole, t)->name, family);
      for (size_t s = 0; s < n_seen && !known; s++)
        known = strcmp(seen[s], family) == 0;
      for (size_t s = 0; s < n && !known; s++)
        known = same_module(&whole, batch[s], t);  // a later tensor of this family takes its place
      if (known)
        continue;
      memcpy(seen[n_seen++], family, sizeof family);
      batch[n++] = t;
      if (n == BATCH) {
        check_batch(p, &whole, batch, n, false);
        n = 0;
      }
    }
    if (n > 0)
      check_batch(p, &whole, batch, n, false);
    print_message("%s: %zu families\n", p->preset, n_seen);
    k3_ckpt_close(&whole);
    k3_findings_free(&findings);
    assert_int_equal(nftw(temp_path("absent"), temp_remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(full_geometry),
      cmocka_unit_test(kimi_k3_framing),
      cmocka_unit_test(absent_tensors_are_named),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
