// What a manifest says about the folder that its image is a file of.
#include <stdio.h>
#include <string.h>

#include "formats/manifest.h"
#include "unit.h"

#define SEAL_A "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define SEAL_B "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"

static enum k3_status parse(const char *split, struct k3_manifest *manifest, struct k3_error *err) {
  char text[2048];
  snprintf(
      text, sizeof text,
      "{\"crc\":false,\"digests\":true,\"image_version\":1,\"model\":{\"family\":\"generic\"},\"names\":{\"aliases\":{},\"image_root\":\"\",\"root\":"
      "\"\"},\"recipe\":{\"name\":\"r\"}%s%s,\"tool\":\"t\"}",
      split ? ",\"split\":" : "", split ? split : "");
  return k3_manifest_parse(text, strlen(text), "image", manifest, err);
}

static void shared_and_rank_files_come_back(void **state) {
  (void)state;
  static const char *const splits[] = {NULL, "{\"ranks\":[\"" SEAL_A "\",\"" SEAL_B "\"],\"tp\":2}", "{\"rank\":1,\"tp\":2}",
                                       "{\"rank\":0,\"tp\":1}"};
  for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
    struct k3_manifest manifest;
    struct k3_error err = {0};
    char text[1024];
    if (parse(splits[i], &manifest, &err) != K3_OK)
      fail_msg("%s", k3_error_text(&err, text, sizeof text));
    assert_int_equal(manifest.tp_size, i == 0 ? 0 : i == 3 ? 1 : 2);
    assert_int_equal(manifest.tp_rank, i == 2 ? 1 : 0);
    assert_int_equal(manifest.rank_seals != NULL, i == 1);
    if (i == 1) {
      assert_string_equal(manifest.rank_seals[0], SEAL_A);
      assert_string_equal(manifest.rank_seals[1], SEAL_B);
    }
    char *written = k3_manifest_to_json(&manifest, NULL);
    assert_non_null(written);
    assert_true(splits[i] ? strstr(written, splits[i]) != NULL : strstr(written, "split") == NULL);
    k3_free(written);
    k3_manifest_free(&manifest);
  }
}

static void odd_splits_are_refused(void **state) {
  (void)state;
  static const char *const splits[] = {
      "[]",
      "{}",
      "{\"tp\":0,\"rank\":0}",
      "{\"tp\":2}",
      "{\"tp\":2,\"rank\":2}",
      "{\"tp\":2,\"rank\":-1}",
      "{\"tp\":5000,\"rank\":0}",
      "{\"tp\":2,\"ranks\":[\"" SEAL_A "\"]}",
      "{\"tp\":1,\"ranks\":[\"" SEAL_A "\",\"" SEAL_B "\"]}",
      "{\"tp\":1,\"ranks\":[\"0123\"]}",
      "{\"tp\":1,\"ranks\":[\"0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef\"]}",
      "{\"tp\":1,\"ranks\":[7]}",
      "{\"tp\":1,\"ranks\":{}}",
  };
  for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
    struct k3_manifest manifest;
    struct k3_error err = {0};
    if (parse(splits[i], &manifest, &err) == K3_OK)
      fail_msg("accepted: %s", splits[i]);
    assert_int_equal(err.rule, K3_IMG01);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(shared_and_rank_files_come_back),
      cmocka_unit_test(odd_splits_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
