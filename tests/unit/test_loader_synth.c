// Synthetic checkpoints: the published layout to the byte, values of the right distribution, and bytes that depend on nothing but the options.
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "formats/safetensors.h"
#include "loader/check.h"
#include "loader/synth_parts.h"
#include "loader/writer.h"
#include "temp_folder.h"
#include "unit.h"

static enum k3_status synth(const char *folder, struct k3_synth_options options, struct k3_synth_report *report, struct k3_error *err) {
  if (!options.dtype)
    options.dtype = K3_DTYPE_BF16;
  return k3_synth_write(folder, &options, report, err);
}

static char *in_folder(const char *folder, const char *name) {
  char *path = k3_path_join(folder, name, NULL);
  assert_non_null(path);
  return path;
}

static void file_sha256(const char *folder, const char *name, char hex[65]) {
  char *path = in_folder(folder, name);
  void *data;
  size_t nbytes;
  uint8_t digest[32];
  assert_int_equal(k3_read_file(path, 64 << 20, &data, &nbytes, NULL), K3_OK);
  assert_int_equal(k3_sha256(data, nbytes, digest, NULL), K3_OK);
  k3_hex(hex, digest);
  k3_free(data);
  k3_free(path);
}

// "synth --preset k3-dspark writes the published geometry: 68 tensors, a header of exactly 7,520 bytes, a file of exactly 7,124,633,450 bytes".
static void published_layout(void **state) {
  (void)state;
  struct k3_synth_report report;
  const char *folder = temp_path("published");
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "k3-dspark", .sparse = true}, &report, NULL), K3_OK);
  assert_int_equal(report.n_tensors, 68);
  assert_int_equal(report.n_params, UINT64_C(3562312961));
  assert_int_equal(report.files_nbytes, UINT64_C(7124633450));
  char *path = in_folder(folder, "model.safetensors");
  int fd;
  struct k3_file_id id;
  assert_int_equal(k3_open_read(path, &fd, &id, NULL), K3_OK);
  assert_int_equal(id.nbytes, UINT64_C(7124633450));
  unsigned char bytes[7528];
  assert_int_equal(k3_pread_full(fd, bytes, sizeof bytes, 0, path, NULL), K3_OK);
  uint64_t h;
  assert_int_equal(k3_st_header_length(bytes, 200, id.nbytes, path, &h, NULL), K3_OK);
  assert_int_equal(h, 7520);
  assert_int_equal(bytes[8 + 7514], '}');  // 7,515 characters and five spaces
  assert_memory_equal(bytes + 8 + 7515, "     ", 5);
  struct k3_st_header header;
  assert_int_equal(k3_st_parse((char *)bytes + 8, h, id.nbytes, path, &header, NULL), K3_OK);
  assert_int_equal(header.n_tensors, 68);
  assert_string_equal(k3_st_metadata(&header, "torchspec_version"), "0.1.0");
  const struct k3_st_tensor *head = k3_st_find(&header, "confidence_head.proj.weight", 27);
  assert_non_null(head);
  assert_int_equal(head->begin, 2);  // behind its bias: sorted names
  assert_int_equal(head->shape[1], 7424);
  const struct k3_st_tensor *o_proj = k3_st_find(&header, "layers.4.self_attn.o_proj.weight", 32);
  assert_non_null(o_proj);
  assert_int_equal(o_proj->shape[1], 8192);
  k3_st_header_free(&header);
  close(fd);
  k3_free(path);
  path = in_folder(folder, "config.json");
  assert_int_equal(k3_open_read(path, &fd, &id, NULL), K3_OK);
  assert_int_equal(id.nbytes, 1251);  // as published
  close(fd);
  k3_free(path);
}

// The table against the C library's error function: the distribution at value[k] is (k + 1/2) / 65536.
static void normal_quantiles(void **state) {
  (void)state;
  static struct k3_synth_normal normal;
  k3_synth_normal_make(&normal);
  for (int k = 32768; k < 65536; k++) {
    double above = 0.5 * erfc(normal.value[k] / sqrt(2)), wanted = 1 - (k + 0.5) / 65536;
    assert_true(fabs(above - wanted) < 1e-6 * wanted + 3e-8);
    assert_true(normal.value[65535 - k] == -normal.value[k]);
  }
  assert_true(normal.value[65536] == normal.value[65535]);
}

// Any split of a tensor gives the same bytes, and the moments are those that the header promises.
static void values_do_not_depend_on_the_split(void **state) {
  (void)state;
  static struct k3_synth_normal normal;
  k3_synth_normal_make(&normal);
  static unsigned char whole[40000], parts[40000];
  const enum k3_dtype dtypes[] = {K3_DTYPE_BF16, K3_DTYPE_F16, K3_DTYPE_F32};
  for (int d = 0; d < 3; d++) {
    struct k3_synth_tensor t = {.name = "x", .key = "x", .shape = {100, 100}, .n_elems = 10000, .rank = 2, .dtype = (uint8_t)dtypes[d]};
    size_t elem_nbytes = k3_dtype_bits(dtypes[d]) / 8;
    t.nbytes = 10000 * elem_nbytes;
    k3_synth_values(&normal, &t, 7, 0, whole, t.nbytes);
    for (size_t at = 0, step = 1; at < t.nbytes; step = step * 3 % 4001) {
      size_t n = step < t.nbytes - at ? step : t.nbytes - at;
      k3_synth_values(&normal, &t, 7, at, parts + at, n);
      at += n;
    }
    assert_memory_equal(whole, parts, t.nbytes);
    double sum = 0, sum2 = 0;
    for (size_t i = 0; i < 10000; i++) {
      double x = k3_load_float(dtypes[d], whole, i);
      sum += x, sum2 += x * x;
    }
    assert_true(fabs(sum / 10000) < 0.004);                    // 4 standard errors of a mean with deviation 1/10
    assert_true(fabs(sqrt(sum2 / 10000) - 0.1) < 0.1 * 0.03);  // 1 / sqrt(100 columns)
    k3_synth_values(&normal, &t, 8, 0, parts, t.nbytes);
    assert_memory_not_equal(whole, parts, t.nbytes);  // another seed
  }
}

// One set of options, one set of bytes: whatever the threads, the compiler and the machine.
static void bytes_are_stable(void **state) {
  (void)state;
  char one[65], four[65];
  for (int n_threads = 1; n_threads <= 4; n_threads += 3)
    assert_int_equal(
        synth(temp_path("stable"), (struct k3_synth_options){.preset = "k3-dspark-small", .n_threads = n_threads, .replace = true}, NULL, NULL),
        K3_OK);
  file_sha256(temp_path("stable"), "model.safetensors", four);
  assert_int_equal(synth(temp_path("stable"), (struct k3_synth_options){.preset = "k3-dspark-small", .n_threads = 1, .replace = true}, NULL, NULL),
                   K3_OK);
  file_sha256(temp_path("stable"), "model.safetensors", one);
  assert_string_equal(one, four);
  assert_int_equal(synth(temp_path("tiny"), (struct k3_synth_options){.preset = "tiny"}, NULL, NULL), K3_OK);
  file_sha256(temp_path("tiny"), "model.safetensors", one);
  assert_string_equal(one, "46fe523a445756d90b34e52744ddbe8d143912c90bfcc475d37d79bcb560e386");
}

// The target's embedding equals the draft's copy, as in the published pair; its head is another tensor.
static void target_shares_the_embedding(void **state) {
  (void)state;
  struct k3_synth_list draft = {0}, target = {0};
  assert_int_equal(k3_synth_list_make(k3_synth_preset_find("tiny-aliases"), "model.", K3_DTYPE_BF16, &draft, NULL), K3_OK);
  assert_int_equal(k3_synth_list_make(k3_synth_preset_find("tiny-target"), NULL, K3_DTYPE_BF16, &target, NULL), K3_OK);
  int n_equal = 0;
  for (size_t i = 0; i < draft.n_tensors; i++)
    for (size_t j = 0; j < target.n_tensors; j++)
      if (strcmp(draft.tensors[i].key, target.tensors[j].key) == 0) {
        n_equal++;
        assert_int_equal(draft.tensors[i].nbytes, target.tensors[j].nbytes);
        assert_memory_equal(draft.tensors[i].name, "model.", 6);
        assert_memory_equal(target.tensors[j].name, "language_model.", 15);
      }
  assert_int_equal(n_equal, 2);  // embedding and head
  k3_synth_list_free(&draft);
  k3_synth_list_free(&target);
}

// Shards: every tensor once, in the file that the index names, about equal sizes; another layout replaces the first one whole.
static void shards_and_replacement(void **state) {
  (void)state;
  const char *folder = temp_path("shards");
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "tiny", .n_shards = 3}, NULL, NULL), K3_OK);
  assert_int_equal(temp_n_entries(folder), 5);
  struct k3_error err = {0};
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "tiny"}, NULL, &err), K3_EXISTS);
  assert_int_equal(err.rule, K3_OUT01);
  assert_int_equal(temp_n_entries(folder), 5);
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "tiny", .replace = true}, NULL, NULL), K3_OK);
  assert_int_equal(temp_n_entries(folder), 2);  // no shard and no index of the first one is left
  err = (struct k3_error){0};
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "tiny", .n_shards = 45, .replace = true}, NULL, &err), K3_BAD_ARGUMENT);
  err = (struct k3_error){0};
  assert_int_equal(synth(temp_path("none"), (struct k3_synth_options){.preset = "tinny"}, NULL, &err), K3_BAD_ARGUMENT);
  assert_non_null(strstr(err.allowed, "tiny-target"));
}

// A write that fails leaves the folder as it was: absent, or with its old files.
static void failure_leaves_nothing(void **state) {
  (void)state;
  const char *folder = temp_path("fails");
  for (uint64_t n = 1;; n++) {
    struct k3_error err = {0};
    k3_io_fail_at(n, 28 /* ENOSPC */);
    enum k3_status status = synth(folder, (struct k3_synth_options){.preset = "tiny", .n_shards = 2, .n_threads = 1}, NULL, &err);
    k3_io_fail_at(0, 0);
    if (status == K3_OK)
      break;
    assert_int_equal(status, K3_NO_SPACE);
    assert_int_equal(err.rule, K3_OUT03);
    assert_int_equal(temp_n_entries(folder), -2);  // no such folder
  }
}

// Replaced between check and use: a source that is written to after it was opened gives no image.
static void a_source_that_changes_is_noticed(void **state) {
  (void)state;
  const char *folder = temp_path("changes");
  assert_int_equal(synth(folder, (struct k3_synth_options){.preset = "tiny"}, NULL, NULL), K3_OK);
  char *weights = in_folder(folder, "model.safetensors"), *image = strdup(temp_path("of-changed.k3p"));
  for (int changed = 1; changed >= 0; changed--) {
    struct k3_ckpt ckpt;
    struct k3_findings findings = {0};
    struct k3_recipe recipe;
    struct k3_plan plan;
    struct k3_check_summary summary;
    struct k3_error err = {0};
    const struct k3_check_options check = {.depth = K3_DEPTH_HEADERS, .n_threads = 1};
    assert_int_equal(k3_ckpt_open(folder, NULL, &ckpt, &findings, NULL), K3_OK);
    assert_int_equal(k3_check_run(&ckpt, NULL, &check, &recipe, &plan, &summary, &findings, NULL), K3_OK);
    assert_int_equal(findings.n_errors, 0);
    assert_int_equal(k3_plan_layout(&plan, &findings, NULL), K3_OK);
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    if (changed)
      assert_int_equal(utimensat(AT_FDCWD, weights, times, 0), 0);
    const struct k3_writer_options options = {.path = image, .n_threads = 1};
    struct k3_writer_result result;
    assert_int_equal(k3_writer_run(&plan, &options, &result, &findings, &err), changed ? K3_IO : K3_OK);
    if (changed) {
      assert_string_equal(err.found, "the file changed while it was read");
      assert_int_equal(access(image, F_OK), -1);
    }
    k3_plan_free(&plan);
    k3_recipe_free(&recipe);
    k3_findings_free(&findings);
    k3_ckpt_close(&ckpt);
  }
  free(image);
  k3_free(weights);
}

static void failing_memory(void **state) {
  (void)state;
  for (uint64_t n = 1; n < 1000; n++) {
    k3_alloc_fail_at(n);
    enum k3_status status =
        synth(temp_path("memory"), (struct k3_synth_options){.preset = "tiny", .n_shards = 2, .n_threads = 2, .replace = true}, NULL, NULL);
    k3_alloc_fail_at(0);
    if (status == K3_OK)
      return;
    assert_int_equal(status, K3_NO_MEMORY);
  }
  fail_msg("never succeeded");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(published_layout),
      cmocka_unit_test(normal_quantiles),
      cmocka_unit_test(values_do_not_depend_on_the_split),
      cmocka_unit_test(bytes_are_stable),
      cmocka_unit_test(target_shares_the_embedding),
      cmocka_unit_test(shards_and_replacement),
      cmocka_unit_test(failure_leaves_nothing),
      cmocka_unit_test(failing_memory),
      cmocka_unit_test(a_source_that_changes_is_noticed),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
