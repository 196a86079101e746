// Synthetic mixtures of experts for tests: written, cut down tensor by tensor, checked.
#ifndef K3_TESTS_UNIT_MOE_RIG_H
#define K3_TESTS_UNIT_MOE_RIG_H

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "formats/safetensors.h"
#include "loader/check.h"
#include "loader/synth.h"
#include "temp_folder.h"
#include "unit.h"

static inline struct k3_synth_report moe_synth(const char *folder, const char *preset) {
  struct k3_synth_options options = {.preset = preset, .dtype = K3_DTYPE_BF16, .replace = true, .n_threads = 2};
  struct k3_synth_report report = {0};
  struct k3_error err = {0};
  if (k3_synth_write(folder, &options, &report, &err) != K3_OK)
    fail_msg("synth %s: %s", preset, err.found);
  return report;
}

// A checkpoint under check; free with moe_close.
struct moe_check {
  struct k3_ckpt ckpt;
  struct k3_recipe recipe;
  struct k3_plan plan;
  struct k3_check_summary summary;
  struct k3_findings findings;
};

static inline void moe_check(const char *folder, struct moe_check *check) {
  struct k3_error err = {0};
  struct k3_check_options options = {.depth = K3_DEPTH_HEADERS, .generic_fallback = true};
  memset(check, 0, sizeof *check);
  assert_int_equal(k3_ckpt_open(folder, NULL, &check->ckpt, &check->findings, &err), K3_OK);
  if (k3_check_run(&check->ckpt, NULL, &options, &check->recipe, &check->plan, &check->summary, &check->findings, &err) != K3_OK)
    fail_msg("check: %s", err.found);
}

static inline void moe_close(struct moe_check *check) {
  k3_plan_free(&check->plan);
  k3_recipe_free(&check->recipe);
  k3_findings_free(&check->findings);
  k3_ckpt_close(&check->ckpt);
}

static inline void moe_print(const struct moe_check *check) {
  for (size_t i = 0; i < check->findings.n_items; i++) {
    char text[2048];
    print_message("%s\n", k3_error_text(&check->findings.items[i].error, text, sizeof text));
  }
}

// An error that names the tensor, or, where only its companions are left, one of them.
static inline bool moe_named(const struct moe_check *check, const char *tensor) {
  size_t n_module = (size_t)(strrchr(tensor, '.') - tensor);
  bool weight = strcmp(tensor + n_module, ".weight") == 0 || strcmp(tensor + n_module, ".weight_packed") == 0;
  for (size_t i = 0; i < check->findings.n_items; i++) {
    const struct k3_finding *finding = &check->findings.items[i];
    if (finding->severity != K3_ERROR)
      continue;
    if (strcmp(finding->error.tensor, tensor) == 0)
      return true;
    if (weight && finding->error.rule == K3_TEN02 && strncmp(finding->error.tensor, tensor, n_module + 1) == 0)
      return true;
  }
  return false;
}

struct moe_sink {
  int fd;
  uint64_t offset;
};

static inline enum k3_status moe_write(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct moe_sink *sink = ctx;
  enum k3_status status = k3_pwrite_full(sink->fd, bytes, nbytes, sink->offset, "shard", err);
  sink->offset += nbytes;
  return status;
}

static inline void moe_link(const char *from, const char *to_folder, const char *name) {
  char *to = k3_path_join(to_folder, name, NULL);
  unlink(to);
  assert_int_equal(symlink(from, to), 0);
  k3_free(to);
}

// A shard without the tensors that drop [n_tensors of the file] marks; its data is holes.
static inline void moe_write_shard(const char *path, const struct k3_st_header *header, const uint8_t *drop) {
  struct k3_st_writer writer;
  uint64_t h, padded = 0, end = 0;
  unlink(path);
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  assert_true(fd >= 0);
  struct moe_sink sink = {fd, 8};
  for (int pass = 0; pass < 2; pass++) {
    k3_st_write_begin(&writer, pass ? moe_write : NULL, &sink);
    end = 0;
    for (size_t i = 0; i < header->n_tensors; i++) {
      const struct k3_st_tensor *t = &header->tensors[i];
      if (drop[i])
        continue;
      assert_int_equal(k3_st_write_tensor(&writer, t->name, t->dtype, t->shape, t->rank, end, end + t->end - t->begin, NULL), K3_OK);
      end += t->end - t->begin;
    }
    assert_int_equal(k3_st_write_end(&writer, padded, &h, NULL), K3_OK);
    padded = (h + 7) / 8 * 8;
  }
  uint8_t prefix[8];
  for (int i = 0; i < 8; i++)
    prefix[i] = (uint8_t)(padded >> 8 * i);
  assert_int_equal(k3_pwrite_full(fd, prefix, 8, 0, path, NULL), K3_OK);
  assert_int_equal(ftruncate(fd, (off_t)(8 + padded + end)), 0);
  close(fd);
}

// Makes `folder` the checkpoint `whole` without some tensors (marked by their numbers): links to its files, new files for the shards concerned.
static inline void moe_drop(const struct k3_ckpt *whole, const char *folder, const uint8_t *drop, bool with_index) {
  mkdir(folder, 0700);
  for (size_t f = 0; f < whole->n_files; f++) {
    const struct k3_ckpt_file *file = &whole->files[f];
    bool any = false;
    for (size_t i = 0; i < file->header.n_tensors; i++)
      any |= drop[file->first_tensor + i];
    char *path = k3_path_join(folder, file->name, NULL);
    if (any)
      moe_write_shard(path, &file->header, drop + file->first_tensor);
    else
      moe_link(file->path, folder, file->name);
    k3_free(path);
  }
  for (size_t d = 0; d < whole->n_documents; d++)
    moe_link(whole->documents[d].path, folder, whole->documents[d].name);
  char *index = k3_path_join(folder, "model.safetensors.index.json", NULL);
  if (!with_index)
    unlink(index);
  k3_free(index);
}

// "layers.#.self_attn.q_proj.weight": what tensors of one family have in common.
static inline void moe_family(const char *name, char family[512]) {
  char *to = family;
  for (const char *c = name; *c && to < family + 500;) {
    size_t n = c == name || c[-1] == '.' ? strspn(c, "0123456789") : 0;
    *to++ = n ? '#' : *c;
    c += n ? n : 1;
  }
  *to = '\0';
}

#endif
