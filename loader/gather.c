// Where the bytes of an image come from.
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "loader/requantise.h"
#include "loader/writer.h"

// Neighbouring pieces are often neighbours in their file too (a copied checkpoint is one long run), so reads are put together while they are.
struct run {
  int fd;
  const char *path;
  uint64_t from;
  unsigned char *to;
  size_t nbytes;
  bool drop_cache;
};

static enum k3_status flush_run(struct run *run, struct k3_error *err) {
  enum k3_status status = run->nbytes ? k3_pread_full(run->fd, run->to, run->nbytes, run->from, run->path, err) : K3_OK;
  if (run->nbytes > 0 && run->drop_cache)
    k3_drop_cache(run->fd, run->from, run->nbytes, false);
  run->nbytes = 0;
  return status;
}

static enum k3_status read_into(struct run *run, int fd, const char *path, uint64_t from, unsigned char *to, size_t nbytes, struct k3_error *err) {
  if (run->nbytes > 0 && run->fd == fd && run->from + run->nbytes == from && run->to + run->nbytes == to) {
    run->nbytes += nbytes;
    return K3_OK;
  }
  K3_TRY(flush_run(run, err));
  *run = (struct run){fd, path, from, to, nbytes, run->drop_cache};
  return K3_OK;
}

// Bytes [from, from + nbytes) of one piece.
static enum k3_status gather_piece(const struct k3_plan *plan, const struct k3_plan_piece *piece, uint64_t from, size_t nbytes, unsigned char *to,
                                   struct run *run, struct k3_error *err) {
  const struct k3_ckpt *ckpt = k3_plan_ckpt(plan, piece->of_target);
  const struct k3_ckpt_file *file = k3_ckpt_file_of(ckpt, piece->tensor);
  const struct k3_st_tensor *t = &file->header.tensors[piece->tensor - file->first_tensor];
  uint64_t base = file->header.data_begin + t->begin + piece->src_offset;
  while (nbytes > 0) {
    uint64_t row = from / piece->row_nbytes, in_row = from % piece->row_nbytes;
    size_t n = piece->row_nbytes - in_row < nbytes ? (size_t)(piece->row_nbytes - in_row) : nbytes;
    K3_TRY(read_into(run, file->fd, file->path, base + row * piece->src_stride + in_row, to, n, err));
    from += n;
    to += n;
    nbytes -= n;
  }
  return K3_OK;
}

// Bytes [from, from + nbytes) of one piece of an encoded weight.
static enum k3_status encode_piece(const struct k3_plan *plan, const struct k3_plan_piece *piece, enum k3_param param, uint64_t from, size_t nbytes,
                                   unsigned char *to, struct k3_error *err) {
  while (nbytes > 0) {
    uint64_t row = from / piece->row_nbytes, in_row = from % piece->row_nbytes;
    uint64_t left = piece->src_stride == piece->row_nbytes ? piece->row_nbytes * piece->n_rows - from : piece->row_nbytes - in_row;
    size_t n = left < nbytes ? (size_t)left : nbytes;
    K3_TRY(k3_requant_encode(plan, piece->encoded - 1, param, piece->src_offset + row * piece->src_stride + in_row, n, to, err));
    from += n;
    to += n;
    nbytes -= n;
  }
  return K3_OK;
}

static enum k3_status gather_data(const struct k3_plan *plan, const struct k3_plan_tensor *tensor, uint64_t from, size_t nbytes, unsigned char *to,
                                  struct run *run, struct k3_error *err) {
  uint32_t low = 0, high = tensor->n_pieces;  // last piece that begins at or before `from`
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (k3_plan_piece_at(plan, tensor, middle).dst_offset <= from)
      low = middle;
    else
      high = middle;
  }
  for (; nbytes > 0 && low < tensor->n_pieces; low++) {
    const struct k3_plan_piece piece = k3_plan_piece_at(plan, tensor, low);
    uint64_t length = piece.row_nbytes * piece.n_rows, at = from - piece.dst_offset;
    if (at >= length)
      continue;  // an empty shard
    size_t n = length - at < nbytes ? (size_t)(length - at) : nbytes;
    if (piece.encoded)
      K3_TRY(encode_piece(plan, &piece, (enum k3_param)tensor->param, at, n, to, err));
    else
      K3_TRY(gather_piece(plan, &piece, at, n, to, run, err));
    from += n;
    to += n;
    nbytes -= n;
  }
  return K3_OK;
}

static enum k3_status gather_source(const struct k3_plan_source *source, uint64_t from, size_t nbytes, unsigned char *to, struct run *run,
                                    struct k3_error *err) {
  if (source->fd >= 0)
    return read_into(run, source->fd, source->path, from, to, nbytes, err);
  int fd;
  struct k3_file_id id;
  K3_TRY(k3_open_read(source->path, &fd, &id, err));
  enum k3_status status = id.nbytes == source->nbytes ? k3_pread_full(fd, to, nbytes, from, source->path, err)
                                                      : k3_fail(err, K3_IO, K3_RULE_NONE, source->path, NULL,
                                                                "a file that nobody writes to meanwhile", "the file changed its size");
  close(fd);
  return status;
}

enum k3_status k3_plan_gather(const struct k3_plan *plan, uint64_t offset, size_t nbytes, void *dst, struct k3_error *err) {
  unsigned char *to = dst;
  struct run run = {.drop_cache = plan->huge};
  size_t low = 0, high = plan->n_tensors;  // first tensor that ends behind `offset`
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (plan->tensors[middle].offset + plan->tensors[middle].nbytes <= offset)
      low = middle + 1;
    else
      high = middle;
  }
  for (; nbytes > 0 && low < plan->n_tensors; low++) {
    const struct k3_plan_tensor *tensor = &plan->tensors[low];
    if (tensor->nbytes == 0)
      continue;
    uint64_t from = offset - tensor->offset;
    size_t n = tensor->nbytes - from < nbytes ? (size_t)(tensor->nbytes - from) : nbytes;
    switch ((enum k3_plan_kind)tensor->kind) {
      case K3_PLAN_DATA: K3_TRY(gather_data(plan, tensor, from, n, to, &run, err)); break;
      case K3_PLAN_SOURCE: K3_TRY(gather_source(&plan->sources[tensor->first_piece], from, n, to, &run, err)); break;
      default: memset(to, 0, n); break;
    }
    offset += n;
    to += n;
    nbytes -= n;
  }
  return flush_run(&run, err);
}
