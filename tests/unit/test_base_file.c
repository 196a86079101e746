// Full reads and writes whatever the system calls return, and outputs that appear whole or not at all.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "base/alloc.h"
#include "base/fault.h"
#include "base/file.h"
#include "temp_folder.h"
#include "unit.h"

static void fill(unsigned char *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    bytes[i] = (unsigned char)(i * 131 + i / 251);
}

static void assert_content(const char *path, const void *want, size_t n) {
  void *data;
  size_t nbytes;
  assert_int_equal(k3_read_file(path, 1 << 20, &data, &nbytes, NULL), K3_OK);
  assert_int_equal(nbytes, n);
  assert_memory_equal(data, want, n);
  assert_int_equal(((char *)data)[n], 0);
  k3_free(data);
}

// Short counts: a chunk limit of 7 makes every transfer a hundred partial ones.
static void short_counts_are_continued(void **state) {
  (void)state;
  unsigned char bytes[1000], back[1000];
  fill(bytes, sizeof bytes);
  k3_io_set_chunk_limit(7);
  int fd = open(temp_path("short"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  assert_int_equal(k3_pwrite_full(fd, bytes, sizeof bytes, 5, "short", NULL), K3_OK);
  assert_int_equal(k3_pread_full(fd, back, sizeof back, 5, "short", NULL), K3_OK);
  assert_memory_equal(bytes, back, sizeof bytes);
  k3_io_set_chunk_limit(0);
  struct k3_error err = {0};
  assert_int_equal(k3_pread_full(fd, back, sizeof back, 6, "short", &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_CNT03);
  assert_non_null(strstr(err.found, "byte 1005, 1 bytes too early"));
  close(fd);
}

static void interrupted_calls_are_restarted(void **state) {
  (void)state;
  unsigned char bytes[100], back[100];
  fill(bytes, sizeof bytes);
  int fd = open(temp_path("eintr"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  k3_io_set_chunk_limit(10);
  for (uint64_t n = 1; n <= 10; n++) {
    k3_io_fail_at(n, EINTR);
    assert_int_equal(k3_pwrite_full(fd, bytes, sizeof bytes, 0, "eintr", NULL), K3_OK);
    k3_io_fail_at(n, EINTR);
    assert_int_equal(k3_pread_full(fd, back, sizeof back, 0, "eintr", NULL), K3_OK);
    assert_memory_equal(bytes, back, sizeof bytes);
  }
  struct k3_error err = {0};
  k3_io_fail_at(3, ENOSPC);
  assert_int_equal(k3_pwrite_full(fd, bytes, sizeof bytes, 0, "eintr", &err), K3_NO_SPACE);
  assert_int_equal(err.rule, K3_OUT03);
  k3_io_fail_at(3, EIO);
  assert_int_equal(k3_pread_full(fd, back, sizeof back, 0, "eintr", NULL), K3_IO);
  k3_io_fail_at(0, 0);
  k3_io_set_chunk_limit(0);
  close(fd);
}

static void only_regular_files_are_read(void **state) {
  (void)state;
  int fd;
  struct k3_error err = {0};
  assert_int_equal(k3_open_read(temp_folder, &fd, NULL, &err), K3_IO);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(err.found, "a folder"));
  assert_int_equal(mkfifo(temp_path("fifo"), 0600), 0);
  assert_int_equal(k3_open_read(temp_path("fifo"), &fd, NULL, NULL), K3_IO);  // and does not hang
  assert_int_equal(k3_open_read(temp_path("absent"), &fd, NULL, NULL), K3_IO);
  assert_int_equal(k3_open_read("/dev/null", &fd, NULL, NULL), K3_IO);
}

static void whole_files_and_mappings(void **state) {
  (void)state;
  assert_int_equal(k3_write_file(temp_path("whole"), "0123456789", 10, false, NULL), K3_OK);
  assert_content(temp_path("whole"), "0123456789", 10);
  void *data;
  size_t nbytes;
  struct k3_error err = {0};
  assert_int_equal(k3_read_file(temp_path("whole"), 9, &data, &nbytes, &err), K3_BAD_INPUT);
  assert_null(data);
  assert_non_null(strstr(err.found, "10 bytes, more than the limit of 9"));
  struct k3_mapping mapping, empty;
  assert_int_equal(k3_map_file(temp_path("whole"), &mapping, NULL), K3_OK);
  assert_int_equal(mapping.nbytes, 10);
  assert_memory_equal(mapping.data, "0123456789", 10);
  assert_int_equal(k3_write_file(temp_path("empty"), "", 0, false, NULL), K3_OK);
  assert_int_equal(k3_map_file(temp_path("empty"), &empty, NULL), K3_OK);
  assert_null(empty.data);
  assert_false(k3_file_id_equal(&mapping.id, &empty.id));
  k3_unmap(&mapping);
  k3_unmap(&mapping);
  k3_unmap(&empty);
}

static void an_output_appears_whole_or_not_at_all(void **state) {
  (void)state;
  const char *path = temp_path("out/image");
  assert_int_equal(k3_make_folder(temp_path("out"), NULL), K3_OK);
  struct k3_output output;
  assert_int_equal(k3_output_create(&output, path, false, NULL), K3_OK);
  assert_int_equal(k3_output_reserve(&output, 6, NULL), K3_OK);
  assert_int_equal(k3_pwrite_full(output.fd, "abcdef", 6, 0, path, NULL), K3_OK);
  assert_int_equal(access(path, F_OK), -1);
  k3_output_abort(&output);
  k3_output_abort(&output);
  assert_int_equal(temp_n_entries(temp_path("out")), 0);

  assert_int_equal(k3_output_create(&output, path, false, NULL), K3_OK);
  assert_int_equal(k3_pwrite_full(output.fd, "abcdef", 6, 0, path, NULL), K3_OK);
  assert_int_equal(k3_output_commit(&output, NULL), K3_OK);
  k3_output_abort(&output);
  assert_content(path, "abcdef", 6);
  assert_int_equal(temp_n_entries(temp_path("out")), 1);

  struct k3_error err = {0};
  assert_int_equal(k3_output_create(&output, path, false, &err), K3_EXISTS);
  assert_int_equal(err.rule, K3_OUT01);
  k3_output_abort(&output);
  assert_int_equal(k3_output_create(&output, path, true, NULL), K3_OK);
  assert_int_equal(k3_pwrite_full(output.fd, "new", 3, 0, path, NULL), K3_OK);
  assert_content(path, "abcdef", 6);  // until the commit
  assert_int_equal(k3_output_commit(&output, NULL), K3_OK);
  assert_content(path, "new", 3);
  assert_int_equal(k3_output_create(&output, temp_path("out"), true, NULL), K3_BAD_ARGUMENT);
}

// Whatever call fails: the old content stays, and no temporary file is left.
static void every_failing_call_leaves_the_old_output(void **state) {
  (void)state;
  assert_int_equal(k3_make_folder(temp_path("fail"), NULL), K3_OK);
  const char *path = temp_path("fail/image");
  assert_int_equal(k3_write_file(path, "old", 3, false, NULL), K3_OK);
  int n_failures = 0;
  for (uint64_t n = 1;; n++) {
    k3_io_fail_at(n, EIO);
    enum k3_status status = k3_write_file(path, "fresh", 5, true, NULL);
    k3_io_fail_at(0, 0);
    assert_int_equal(temp_n_entries(temp_path("fail")), 1);
    if (status == K3_OK)
      break;
    assert_int_equal(status, K3_IO);
    assert_content(path, "old", 3);
    n_failures++;
  }
  assert_in_range(n_failures, 4, 10);  // open, write, fsync, rename
  assert_content(path, "fresh", 5);
  n_failures = 0;
  for (uint64_t n = 1;; n++) {
    k3_alloc_fail_at(n);
    enum k3_status status = k3_write_file(path, "third", 5, true, NULL);
    k3_alloc_fail_at(0);
    assert_int_equal(temp_n_entries(temp_path("fail")), 1);
    if (status == K3_OK)
      break;
    assert_int_equal(status, K3_NO_MEMORY);
    n_failures++;
  }
  assert_in_range(n_failures, 3, 10);
  assert_content(path, "third", 5);
}

static enum k3_status write_pair(const char *const paths[2], const char *text, struct k3_error *err) {
  struct k3_output output[2] = {{.fd = -1}, {.fd = -1}}, *const both[2] = {&output[0], &output[1]};
  enum k3_status status = K3_OK;
  for (int i = 0; i < 2 && status == K3_OK; i++) {
    status = k3_output_create(&output[i], paths[i], true, err);
    if (status == K3_OK)
      status = k3_pwrite_full(output[i].fd, text, strlen(text), 0, paths[i], err);
  }
  if (status == K3_OK)
    status = k3_outputs_commit(both, 2, err);
  for (int i = 0; i < 2; i++)
    k3_output_abort(&output[i]);
  return status;
}

// Two outputs get their names both or neither, whichever call and whichever allocation fails; what they replace comes back. Where there was nothing,
// nothing is left.
static void outputs_appear_together(void **state) {
  (void)state;
  assert_int_equal(k3_make_folder(temp_path("pair"), NULL), K3_OK);
  char *first = strdup(temp_path("pair/a")), *second = strdup(temp_path("pair/b"));
  const char *const paths[2] = {first, second};
  for (int round = 0; round < 4; round++) {  // nothing there; both; the first alone; the second alone
    int n_failures = 0;
    for (uint64_t n = 1;; n++) {
      unlink(first), unlink(second);
      if (round == 1 || round == 2)
        assert_int_equal(k3_write_file(first, "old a", 5, true, NULL), K3_OK);
      if (round == 1 || round == 3)
        assert_int_equal(k3_write_file(second, "old b", 5, true, NULL), K3_OK);
      size_t n_before = temp_n_entries(temp_path("pair"));
      bool memory = n % 2 == 0;
      if (memory)
        k3_alloc_fail_at(n / 2);
      else
        k3_io_fail_at(n / 2 + 1, EIO);
      enum k3_status status = write_pair(paths, "new", NULL);
      k3_io_fail_at(0, 0);
      k3_alloc_fail_at(0);
      if (status == K3_OK) {
        assert_int_equal(temp_n_entries(temp_path("pair")), 2);
        assert_content(first, "new", 3);
        assert_content(second, "new", 3);
        if (n > 80)
          break;
        continue;
      }
      assert_int_equal(status, memory ? K3_NO_MEMORY : K3_IO);
      assert_int_equal(temp_n_entries(temp_path("pair")), n_before);
      if (round == 1 || round == 2)
        assert_content(first, "old a", 5);
      if (round == 1 || round == 3)
        assert_content(second, "old b", 5);
      n_failures++;
    }
    assert_in_range(n_failures, 20, 60);
  }
  free(first), free(second);
}

// Two processes writing to one place exclude each other by the lock; after the first is gone the second succeeds.
static void two_writers_exclude_each_other(void **state) {
  (void)state;
  const char *path = temp_path("shared-output");
  int ready[2], go[2];
  assert_int_equal(pipe(ready) | pipe(go), 0);
  pid_t child = fork();
  if (child == 0) {
    struct k3_output output;
    char byte = 0;
    int ok = k3_output_create(&output, path, false, NULL) == K3_OK;
    ok = write(ready[1], "r", 1) == 1 && ok;
    ok = read(go[0], &byte, 1) == 1 && ok;
    ok = k3_pwrite_full(output.fd, "child", 5, 0, path, NULL) == K3_OK && k3_output_commit(&output, NULL) == K3_OK && ok;
    _exit(ok ? 0 : 1);
  }
  char byte;
  assert_int_equal(read(ready[0], &byte, 1), 1);
  struct k3_output output;
  struct k3_error err = {0};
  assert_int_equal(k3_output_create(&output, path, true, &err), K3_EXISTS);
  assert_non_null(strstr(err.found, "another process"));
  k3_output_abort(&output);  // must not remove the other's file
  assert_int_equal(write(go[1], "g", 1), 1);
  int code;
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
  assert_content(path, "child", 5);
  assert_int_equal(k3_output_create(&output, path, true, NULL), K3_OK);
  assert_int_equal(k3_pwrite_full(output.fd, "parent", 6, 0, path, NULL), K3_OK);
  assert_int_equal(k3_output_commit(&output, NULL), K3_OK);
  assert_content(path, "parent", 6);
}

// A killed conversion leaves a temporary file that the next run takes over.
static void leftovers_of_a_killed_writer_are_taken_over(void **state) {
  (void)state;
  assert_int_equal(k3_make_folder(temp_path("killed"), NULL), K3_OK);
  const char *path = temp_path("killed/image");
  pid_t child = fork();
  if (child == 0) {
    struct k3_output output;
    if (k3_output_create(&output, path, false, NULL) == K3_OK && k3_pwrite_full(output.fd, "half written", 12, 0, path, NULL) == K3_OK)
      kill(getpid(), SIGKILL);
    _exit(1);
  }
  int code;
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_true(WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL);
  assert_int_equal(access(path, F_OK), -1);
  assert_int_equal(temp_n_entries(temp_path("killed")), 1);  // the leftover
  struct k3_output output;
  assert_int_equal(k3_output_create(&output, path, false, NULL), K3_OK);
  assert_int_equal(k3_pwrite_full(output.fd, "whole", 5, 0, path, NULL), K3_OK);
  assert_int_equal(k3_output_commit(&output, NULL), K3_OK);
  assert_content(path, "whole", 5);
  assert_int_equal(temp_n_entries(temp_path("killed")), 1);
}

// The temporary name must not lead through a link planted there.
static void a_planted_link_is_not_followed(void **state) {
  (void)state;
  assert_int_equal(k3_write_file(temp_path("victim"), "precious", 8, false, NULL), K3_OK);
  assert_int_equal(symlink(temp_path("victim"), temp_path(".planted.k3tmp")), 0);
  struct k3_output output;
  assert_int_equal(k3_output_create(&output, temp_path("planted"), false, NULL), K3_IO);
  assert_content(temp_path("victim"), "precious", 8);
}

// A file that is cut while it is mapped: an error that names it, the exit code for reading, and no unfinished output; not a crash.
static void a_mapped_file_that_is_cut_is_an_error(void **state) {
  (void)state;
  const char *path = temp_path("cut\x1b"), *out = temp_path("of the cut"), *temp = temp_path(".of the cut.k3tmp");
  unsigned char bytes[20000];
  char said[1000];
  int ends[2], status;
  fill(bytes, sizeof bytes);
  assert_int_equal(k3_write_file(path, bytes, sizeof bytes, true, NULL), K3_OK);
  assert_int_equal(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    struct k3_mapping mapping, other;
    struct k3_output output;
    bool ready = dup2(ends[1], STDERR_FILENO) == STDERR_FILENO && k3_map_file(path, &other, NULL) == K3_OK;
    k3_unmap(&other);
    k3_fault_install("program");
    ready &= k3_map_file(path, &mapping, NULL) == K3_OK && k3_output_create(&output, out, true, NULL) == K3_OK && access(temp, F_OK) == 0 &&
             truncate(path, 5000) == 0;
    if (!ready)
      _exit(99);
    _exit(((volatile const unsigned char *)mapping.data)[15000] ? 98 : 97);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  close(ends[1]);
  ssize_t n = read(ends[0], said, sizeof said - 1);
  close(ends[0]);
  assert_true(n > 0);
  said[n] = '\0';
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), k3_status_exit_code(K3_IO));
  assert_true(strncmp(said, "program: error: ", 16) == 0 && strstr(said, "cut\\u001B: the file was cut"));
  assert_true(access(temp, F_OK) != 0 && access(out, F_OK) != 0);
  assert_int_equal(unlink(path), 0);
}

static void paths_and_folders(void **state) {
  (void)state;
  char *joined = k3_path_join("dir", "name", NULL), *slash = k3_path_join("dir/", "name", NULL), *bare = k3_path_join("", "name", NULL);
  assert_string_equal(joined, "dir/name");
  assert_string_equal(slash, "dir/name");
  assert_string_equal(bare, "name");
  k3_free(joined);
  k3_free(slash);
  k3_free(bare);
  assert_string_equal(k3_path_base("/a/b.c"), "b.c");
  assert_string_equal(k3_path_base("b.c"), "b.c");
  assert_int_equal(k3_make_folder(temp_path("x/y/z"), NULL), K3_OK);
  assert_int_equal(k3_make_folder(temp_path("x/y/z"), NULL), K3_OK);
  assert_int_equal(k3_write_file(temp_path("x/file"), "", 0, false, NULL), K3_OK);
  assert_int_equal(k3_make_folder(temp_path("x/file/y"), NULL), K3_IO);
  assert_int_equal(k3_make_folder(temp_path("x/file"), NULL), K3_BAD_ARGUMENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(short_counts_are_continued),
      cmocka_unit_test(interrupted_calls_are_restarted),
      cmocka_unit_test(only_regular_files_are_read),
      cmocka_unit_test(whole_files_and_mappings),
      cmocka_unit_test(an_output_appears_whole_or_not_at_all),
      cmocka_unit_test(every_failing_call_leaves_the_old_output),
      cmocka_unit_test(outputs_appear_together),
      cmocka_unit_test(two_writers_exclude_each_other),
      cmocka_unit_test(leftovers_of_a_killed_writer_are_taken_over),
      cmocka_unit_test(a_planted_link_is_not_followed),
      cmocka_unit_test(paths_and_folders),
      cmocka_unit_test(a_mapped_file_that_is_cut_is_an_error),
  };
  return cmocka_run_group_tests(tests, temp_folder_setup, temp_folder_teardown);
}
