#include "loader/verify.h"

#include <stdio.h>
#include <string.h>

#include "cli/verbs.h"
#include "loader/diff.h"
#include "loader/split.h"

static const struct k3_cli_help help = {
    .operands = "IMAGE|FOLDER",
    .n_min = 1,
    .n_max = 1,
    .about =
        "Recomputes every digest of an image and its seal. The seal names the whole image: two images with one seal are equal. Exit code 1 when\n"
        "anything does not match. A folder that `convert --tp` wrote is verified file by file; the shared file names the seals of all others.",
    .examples =
        "  k3pack verify drafter.k3p\n"
        "  k3pack verify drafter.k3p --source drafter/      also compares every tensor with the checkpoint it was made of",
};

// Compares the image with a checkpoint; differences become findings, so that one list says everything.
static enum k3_status compare_with(struct k3_cli *cli, const char *image_path, const char *source_path, struct k3_findings *findings,
                                   uint64_t *n_equal, struct k3_error *err) {
  struct k3_ckpt image = {0}, source = {0};
  struct k3_diff_result result = {0};
  struct k3_diff_options options = {.n_threads = cli->n_threads, .progress = &cli->progress};
  enum k3_status status = k3_ckpt_open(image_path, NULL, &image, NULL, err);
  if (status == K3_OK)
    status = k3_ckpt_open(source_path, NULL, &source, NULL, err);
  if (status == K3_OK)
    status = k3_diff(&source, &image, &options, &result, err);
  for (size_t i = 0; status == K3_OK && i < result.n_items; i++) {
    const struct k3_diff_item *item = &result.items[i];
    static const char *const kinds[] = {"only in the checkpoint", "only in the image", "another shape", "another dtype", "other bytes", "another model"};
    // What the image has beyond its source, from a target for one, is no fault of the copy.
    // What was encoded on the way is compared below.
    bool encoded = item->b && k3_manifest_encoded(&image.image.manifest, item->b->name, NULL);
    if (item->kind != K3_DIFF_ONLY_B && item->exceeds && !encoded)
      k3_findings_report(findings, K3_IMG02, source_path, item->name, "the image's bytes", "%s", kinds[item->kind]);
  }
  uint64_t n_encoded = 0;
  if (status == K3_OK)
    status = k3_verify_encoded(&image, &source, cli->n_threads, &cli->progress, &n_encoded, findings, err);
  *n_equal = result.n_equal + n_encoded;
  k3_diff_free(&result);
  k3_ckpt_close(&source);
  k3_ckpt_close(&image);
  return status;
}

int k3_cmd_verify(struct k3_cli *cli, int argc, char **argv) {
  const char *source = NULL;
  const struct k3_option options[] = {{"source", 's', K3_OPT_TEXT, "SRC", "compare every tensor with this checkpoint too", &source}, {0}};
  int exit_code;
  if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
    return exit_code;
  struct k3_error err = {0}, no_image = {0};
  struct k3_findings findings = {0};
  struct k3_verify_result result = {0};
  uint64_t n_equal = 0;
  const char *image = cli->operands[0];
  bool split = k3_is_split_folder(image);
  uint32_t tp = 0;
  if (split && source)
    return k3_cli_usage(cli, "--source compares whole images; verify the folder alone");
  enum k3_status status;
  if (k3_may_be_image(image, &no_image) != K3_OK)
    status = k3_findings_add(&findings, K3_ERROR, &no_image);  // an answer like any other
  else
    status = split ? k3_verify_split(image, cli->n_threads, &cli->progress, &result, &tp, &findings, &err)
                   : k3_verify_image(image, cli->n_threads, &cli->progress, &result, &findings, &err);
  if (status == K3_OK && source && findings.n_errors == 0)
    status = compare_with(cli, image, source, &findings, &n_equal, &err);
  if (status != K3_OK) {
    k3_findings_free(&findings);
    return k3_cli_fail(cli, &err);
  }
  bool good = findings.n_errors == 0;
  k3_cli_print_findings(cli, &findings);
  if (cli->json) {
    struct k3_jsonw json;
    k3_cli_json_begin(cli, &json);
    k3_jsonw_bool(&json, "ok", good);
    k3_jsonw_string(&json, "identity", result.identity);
    k3_jsonw_u64(&json, "nbytes", result.nbytes);
    k3_jsonw_u64(&json, "segments", result.n_segments);
    k3_jsonw_u64(&json, "bad_segments", result.n_bad_segments);
    k3_jsonw_bool(&json, "digests", result.has_digests);
    k3_jsonw_bool(&json, "crc", result.has_crc);
    if (split)
      k3_jsonw_u64(&json, "tp", tp);
    if (source)
      k3_jsonw_u64(&json, "equal_to_source", n_equal);
    k3_cli_json_findings(&json, &findings);
    exit_code = k3_cli_json_end(cli, &json, good ? 0 : 1);
  } else {
    exit_code = good ? 0 : 1;
    char name[512], other[512];
    k3_printable(name, sizeof name, image, strlen(image), 400);
    if (good && split && !cli->quiet)
      printf("%s: shared file and %u rank files, ", name, tp);
    else if (good && !cli->quiet)
      printf("%s: ", name);
    if (good && !cli->quiet) {
      if (result.has_digests)
        printf("%llu segments match, seal %s\n", (unsigned long long)result.n_segments, result.identity);
      else
        printf("seal %s matches; written without digests, so the tensors' bytes are not proven%s\n", result.identity,
               result.has_crc ? " beyond their CRC-32" : "");
      if (source)
        printf("%s: %llu tensors equal to %s\n", name, (unsigned long long)n_equal,
               k3_printable(other, sizeof other, source, strlen(source), 400));
    }
  }
  k3_findings_free(&findings);
  return exit_code;
}
