// The fixtures of fixtures/reject against the parsers alone: each container fault is found, by the rule and with the subject that `expect` names, and
// the clean twins pass. (tests/cli/test_reject.sh runs the program on the same folders.)
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/file.h"
#include "formats/index.h"
#include "formats/safetensors.h"
#include "unit.h"

enum { LINES_NBYTES = 2048, INDEX_CAP = 1 << 20 };

static void add_line(char *lines, enum k3_rule rule, const char *subject) {
  size_t n = strlen(lines);
  snprintf(lines + n, LINES_NBYTES - n, "%s %s %s\n", k3_rule_info(rule)->id, k3_severity_name(k3_rule_info(rule)->severity), subject);
}

static void add_error(char *lines, const struct k3_error *err) {
  add_line(lines, err->rule, err->tensor[0] ? err->tensor : k3_path_base(err->file));
}

static void findings_of_container(const char *path, char *lines) {
  struct k3_mapping file;
  struct k3_st_header header = {0};
  struct k3_error err = {0};
  uint64_t h;
  assert_int_equal(k3_map_file(path, &file, NULL), K3_OK);
  enum k3_status status = k3_st_header_length(file.data, file.nbytes, file.nbytes, path, &h, &err);
  if (status == K3_OK)
    status = k3_st_parse((const char *)file.data + K3_ST_PREFIX_NBYTES, h, file.nbytes, path, &header, &err);
  if (status != K3_OK) {
    assert_int_equal(status, K3_BAD_INPUT);
    add_error(lines, &err);
  }
  if (header.metadata_odd)
    add_line(lines, K3_CNT08, "__metadata__");
  if (header.n_misaligned > 0)
    add_line(lines, K3_CNT11, k3_path_base(path));
  k3_st_header_free(&header);
  k3_unmap(&file);
}

static enum k3_status ignore(void *ctx, const char *tensor, size_t tensor_nbytes, const char *file, size_t file_nbytes, struct k3_error *err) {
  (void)ctx, (void)tensor, (void)tensor_nbytes, (void)file, (void)file_nbytes, (void)err;
  return K3_OK;
}

// Does `expect` hold an error that the index alone shows?
static void check_index(const char *path, const char *expect) {
  void *text;
  size_t nbytes;
  struct k3_index_summary summary;
  struct k3_error err = {0};
  char lines[LINES_NBYTES] = "";
  assert_int_equal(k3_read_file(path, INDEX_CAP, &text, &nbytes, NULL), K3_OK);
  if (k3_index_parse(text, nbytes, path, ignore, NULL, &summary, &err) != K3_OK)
    add_error(lines, &err);
  k3_free(text);
  bool wanted = strstr(expect, "IDX10 ") || strstr(expect, "CNT01 error model.safetensors.index.json");
  if (strcmp(lines, wanted ? expect : "") != 0)
    fail_msg("%s: found \"%s\", expected \"%s\"", path, lines, expect);
}

static char *read_text(const char *path) {
  void *text;
  size_t nbytes;
  assert_int_equal(k3_read_file(path, INDEX_CAP, &text, &nbytes, NULL), K3_OK);
  return text;
}

static void parsers_find_what_is_expected(void **state) {
  (void)state;
  int n_files = 0, n_clean = 0, n_indexes = 0;
  DIR *dir = opendir("fixtures/reject");
  assert_non_null(dir);
  for (struct dirent *entry; (entry = readdir(dir));) {
    char path[512], expect_path[512], lines[LINES_NBYTES] = "";
    if (entry->d_name[0] == '.')
      continue;
    snprintf(expect_path, sizeof expect_path, "fixtures/reject/%s/expect", entry->d_name);
    if (access(expect_path, F_OK) != 0)
      continue;
    char *expect = read_text(expect_path);
    snprintf(path, sizeof path, "fixtures/reject/%s/input.safetensors", entry->d_name);
    if (access(path, F_OK) == 0) {
      findings_of_container(path, lines);
      // Fixtures of other rules (what a model holds, not how) are clean here.
      bool container = strncmp(expect, "CNT", 3) == 0;
      if (strcmp(lines, container ? expect : "") != 0)
        fail_msg("%s: found \"%s\", expected \"%s\"", path, lines, expect);
      n_files++;
      n_clean += expect[0] == '\0';
    }
    snprintf(path, sizeof path, "fixtures/reject/%s/input/model.safetensors.index.json", entry->d_name);
    if (access(path, F_OK) == 0) {
      check_index(path, expect);
      n_indexes++;
    }
    k3_free(expect);
  }
  closedir(dir);
  // A walk that finds nothing would pass as well.
  assert_true(n_files >= 70);
  assert_true(n_clean >= 15);
  assert_true(n_indexes >= 30);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(parsers_find_what_is_expected)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
