// Look-ups in a manifest, and the check against the header of its image.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/image.h"
#include "formats/manifest.h"

typedef unsigned long long ull;  // for %llu

// ---- look-ups ----

// For lists whose entries begin with their name.
static int compare_name(const void *name, const void *entry) {
  return strcmp(name, *(const char *const *)entry);
}

static const void *find(const char *name, const void *list, size_t n, size_t elem_nbytes) {
  return n > 0 ? bsearch(name, list, n, elem_nbytes, compare_name) : NULL;
}

const struct k3_manifest_linear *k3_manifest_linear_of(const struct k3_manifest *manifest, const char *module) {
  return find(module, manifest->linears, manifest->n_linears, sizeof *manifest->linears);
}

const struct k3_manifest_view *k3_manifest_view_of(const struct k3_manifest *manifest, const char *name) {
  return find(name, manifest->views, manifest->n_views, sizeof *manifest->views);
}

const struct k3_manifest_tensor *k3_manifest_tensor_of(const struct k3_manifest *manifest, const char *name) {
  return find(name, manifest->tensors, manifest->n_tensors, sizeof *manifest->tensors);
}

// Does the pattern ("{i}" any number, ".*" at the end any last component) cover the name?
static bool covers(const char *pattern, const char *name) {
  while (*pattern) {
    if (strcmp(pattern, ".*") == 0)
      return name[0] == '.' && name[1] != '\0' && !strchr(name + 1, '.');
    const char *brace_end = *pattern == '{' ? strchr(pattern, '}') : NULL;
    if (brace_end) {
      size_t n_digits = strspn(name, "0123456789");
      if (n_digits == 0)
        return false;
      name += n_digits;
      pattern = brace_end + 1;
    } else if (*pattern++ != *name++) {
      return false;
    }
  }
  return *name == '\0';
}

void k3_manifest_role_of(const struct k3_manifest *manifest, const char *tensor, enum k3_role *role, enum k3_tp_rule *tp) {
  const struct k3_manifest_tensor *entry = k3_manifest_tensor_of(manifest, tensor);
  size_t longest = 0;
  for (size_t i = 0; !entry && i < manifest->n_tensors; i++) {
    const struct k3_manifest_tensor *pattern = &manifest->tensors[i];
    size_t nbytes = strlen(pattern->name);
    if (pattern->n_shards > 0 || nbytes <= longest || !covers(pattern->name, tensor))
      continue;
    longest = nbytes;
    *role = pattern->role;
    *tp = pattern->tp;
  }
  if (entry || longest == 0) {
    *role = entry ? entry->role : K3_ROLE_CORE;
    *tp = entry ? entry->tp : K3_TP_REPLICATE;
  }
}

// ---- against the header ----

struct checker {
  const struct k3_manifest *m;
  const struct k3_st_header *header;
  const char *file;
  struct k3_error *err;
};

#define FAIL(checker, rule, where, allowed, ...) k3_fail((checker)->err, K3_BAD_INPUT, rule, (checker)->file, where, allowed, __VA_ARGS__)

static const struct k3_st_tensor *stored(const struct checker *checker, const char *name) {
  return k3_st_find(checker->header, name, strlen(name));
}

// Rows of a tensor; a scalar is one row.
static uint64_t n_rows_of(const struct k3_st_tensor *tensor) {
  return tensor->rank > 0 ? tensor->shape[0] : 1;
}

// A "__source__" tensor: bytes, at least min and at most max of them.
static enum k3_status check_source(const struct checker *checker, const char *name, const char *of_file, uint64_t min, uint64_t max) {
  const struct k3_st_tensor *tensor = stored(checker, name);
  if (!tensor)
    return FAIL(checker, K3_IMG01, name, NULL, "the manifest keeps %s here, but there is no such tensor", of_file);
  if (tensor->dtype != K3_DTYPE_U8 || tensor->rank != 1 || tensor->shape[0] < min || tensor->shape[0] > max)
    return FAIL(checker, K3_IMG01, name, NULL, "not a list of bytes that can hold what the manifest keeps of %s", of_file);
  return K3_OK;
}

static enum k3_status check_sources(const struct checker *checker) {
  const struct k3_manifest *m = checker->m;
  for (size_t i = 0; i < m->n_sources; i++)
    K3_TRY(check_source(checker, m->sources[i].header_tensor, m->sources[i].file, K3_ST_PREFIX_NBYTES + 2, m->sources[i].nbytes));
  for (size_t i = 0; i < m->n_documents; i++)
    K3_TRY(check_source(checker, m->documents[i].tensor, m->documents[i].file, 0, UINT64_MAX));
  return K3_OK;
}

static enum k3_status check_stacks(const struct checker *checker) {
  for (size_t i = 0; i < checker->m->n_tensors; i++) {
    const struct k3_manifest_tensor *entry = &checker->m->tensors[i];
    if (entry->n_shards == 0)
      continue;
    const struct k3_manifest_shard *last = &entry->shards[entry->n_shards - 1];
    const struct k3_st_tensor *tensor = stored(checker, entry->name);
    if (!tensor)
      return FAIL(checker, K3_IMG01, entry->name, NULL, "the manifest lists the shards of this tensor, but it is not stored");
    if (last->row + last->n_rows > n_rows_of(tensor))
      return FAIL(checker, K3_IMG01, entry->name, NULL, "the shards end at row %llu, the tensor has %llu rows", (ull)(last->row + last->n_rows),
                  (ull)n_rows_of(tensor));
  }
  return K3_OK;
}

static enum k3_status check_view_shard(const struct checker *checker, const struct k3_manifest_view *view, size_t i) {
  const struct k3_manifest_view_shard *shard = &view->shards[i];
  const struct k3_st_tensor *tensor = stored(checker, shard->tensor), *first = stored(checker, view->shards[0].tensor);
  if (k3_manifest_view_of(checker->m, shard->tensor))
    return FAIL(checker, K3_IMG03, view->name, "a stored tensor", "shard %llu points at %s", (ull)shard->id,
                strcmp(shard->tensor, view->name) == 0 ? "the view itself" : "another view");
  if (!tensor || strncmp(shard->tensor, "__", 2) == 0)
    return FAIL(checker, K3_IMG03, view->name, "a stored tensor", "shard %llu points at %s, which is no weight of this image", (ull)shard->id,
                shard->tensor);
  if (tensor->rank == 0 || shard->row + shard->n_rows > tensor->shape[0])
    return FAIL(checker, K3_IMG03, view->name, NULL, "shard %llu takes rows %llu to %llu of %s, which has %llu", (ull)shard->id, (ull)shard->row,
                (ull)(shard->row + shard->n_rows), shard->tensor, (ull)n_rows_of(tensor));
  if (tensor->dtype != first->dtype)
    return FAIL(checker, K3_IMG03, view->name, "one dtype", "shard %llu is %s, the first one %s", (ull)shard->id,
                k3_dtype_name((enum k3_dtype)tensor->dtype), k3_dtype_name((enum k3_dtype)first->dtype));
  bool same = tensor->rank == first->rank;
  for (unsigned d = 1; same && d < tensor->rank; d++)
    same = tensor->shape[d] == first->shape[d];
  if (!same)
    return FAIL(checker, K3_IMG03, view->name, "rows of one shape", "the rows of shard %llu have another shape than those of the first",
                (ull)shard->id);
  uint64_t n_row_elems = 1;
  for (unsigned d = 1; d < tensor->rank; d++)
    n_row_elems *= tensor->shape[d];  // the product with shape[0] > 0 fits
  if (n_row_elems % 8 * k3_dtype_bits((enum k3_dtype)tensor->dtype) % 8 != 0)
    return FAIL(checker, K3_IMG03, view->name, "rows of whole bytes", "the rows of %s do not begin at bytes", shard->tensor);
  return K3_OK;
}

static enum k3_status check_views(const struct checker *checker) {
  for (size_t v = 0; v < checker->m->n_views; v++) {
    const struct k3_manifest_view *view = &checker->m->views[v];
    if (stored(checker, view->name))
      return FAIL(checker, K3_IMG03, view->name, "a name of its own", "a view and a stored tensor have this name");
    for (size_t i = 0; i < view->n_shards; i++)
      K3_TRY(check_view_shard(checker, view, i));
  }
  return K3_OK;
}

// Tensor module.param of the image, or NULL; *viewed: it is a view.
static const struct k3_st_tensor *param_of(const struct checker *checker, const char *module, const char *param, bool *viewed) {
  char name[K3_ST_MAX_NAME_NBYTES + 64];
  if ((size_t)snprintf(name, sizeof name, "%s.%s", module, param) >= sizeof name)
    return NULL;
  *viewed = *viewed || k3_manifest_view_of(checker->m, name);
  return stored(checker, name);
}

// The scales of a scheme with blocks along K: one per block and row, or per block of rows.
static enum k3_status check_scales(const struct checker *checker, const struct k3_manifest_linear *linear, const struct k3_st_tensor *weight,
                                   bool packed) {
  bool viewed = false;
  const struct k3_st_tensor *scale = param_of(checker, linear->module, "weight_scale", &viewed);
  if (!scale || weight->rank < 2 || linear->block_cols == 0)
    return K3_OK;
  // A word holds several integers, and how many columns the last one of a row leaves out is not told; a grid in four dimensions is kept as its
  // source.
  if (weight->dtype == K3_DTYPE_I32 || scale->rank == 4)
    return K3_OK;
  unsigned last = weight->rank - 1u;
  uint64_t k = weight->shape[last] * (packed && weight->dtype == K3_DTYPE_U8 ? 2 : 1);  // two 4-bit codes a byte
  uint64_t n_blocks = k / linear->block_cols + (k % linear->block_cols != 0);
  bool agree = scale->rank == weight->rank && scale->shape[last] == n_blocks;
  // The grid of a fused module is the grids of its members one below the other, so with blocks of rows it may have more rows than N / block.
  for (unsigned d = 0; agree && linear->block_rows == 1 && d < last; d++)
    agree = scale->shape[d] == weight->shape[d];
  if (!agree)
    return FAIL(checker, K3_IMG01, linear->module, NULL, "the scales do not have the shape that %s with blocks of %llu x %llu needs", linear->scheme,
                (ull)linear->block_rows, (ull)linear->block_cols);
  return K3_OK;
}

static enum k3_status check_linears(const struct checker *checker) {
  for (size_t i = 0; i < checker->m->n_linears; i++) {
    const struct k3_manifest_linear *linear = &checker->m->linears[i];
    bool viewed = false;
    const struct k3_st_tensor *packed = param_of(checker, linear->module, "weight_packed", &viewed),
                              *plain = param_of(checker, linear->module, "weight", &viewed);
    if (!packed && !plain && !viewed)
      return FAIL(checker, K3_IMG01, linear->module, "a tensor .weight or .weight_packed",
                  "the manifest gives a scheme for a module without a weight");
    bool fp4 = packed || strcmp(linear->scheme, "nvfp4") == 0 || strcmp(linear->scheme, "mxfp4") == 0;
    if (packed || plain)
      K3_TRY(check_scales(checker, linear, packed ? packed : plain, fp4));
  }
  return K3_OK;
}

enum k3_status k3_manifest_check(const struct k3_manifest *manifest, const struct k3_st_header *header, const char *file, struct k3_error *err) {
  const struct checker checker = {manifest, header, file, err};
  K3_TRY(check_sources(&checker));
  K3_TRY(check_stacks(&checker));
  K3_TRY(check_views(&checker));
  return check_linears(&checker);
}
