#include "runtime/comm_frame.h"

#include <string.h>

static const unsigned char MAGIC[8] = {'K', '3', 'P', 'A', 'C', 'K', 'R', 'K'};
static const uint64_t MAX_NBYTES = UINT64_C(1) << 40;

static unsigned char *put(unsigned char *dst, uint64_t value, int nbytes) {
  for (int i = 0; i < nbytes; i++)
    dst[i] = (unsigned char)(value >> 8 * i);
  return dst + nbytes;
}

static uint64_t get(const unsigned char **src, int nbytes) {
  uint64_t value = 0;
  for (int i = 0; i < nbytes; i++)
    value |= (uint64_t)(*src)[i] << 8 * i;
  *src += nbytes;
  return value;
}

// Texts are cut to their field, its last byte is zero.
static unsigned char *put_text(unsigned char *dst, const char *text, size_t field) {
  memset(dst, 0, field);
  memcpy(dst, text, strnlen(text, field - 1));
  return dst + field;
}

static void get_text(const unsigned char **src, char *dst, size_t field) {
  memcpy(dst, *src, field - 1);
  dst[field - 1] = 0;
  *src += field;
}

void k3_frame_write(const struct k3_frame *frame, unsigned char dst[K3_FRAME_NBYTES]) {
  memcpy(dst, MAGIC, sizeof MAGIC);
  dst = put(dst + sizeof MAGIC, K3_FRAME_VERSION, 4);
  dst = put(dst, frame->type, 4);
  dst = put(dst, frame->rank, 4);
  dst = put(dst, frame->size, 4);
  dst = put(dst, frame->kind, 4);
  dst = put(dst, frame->n, 8);
  put_text(dst, frame->step, sizeof frame->step);
}

const char *k3_frame_read(const unsigned char src[K3_FRAME_NBYTES], struct k3_frame *frame) {
  if (memcmp(src, MAGIC, sizeof MAGIC) != 0)
    return "no message of k3pack's ranks";
  src += sizeof MAGIC;
  *frame = (struct k3_frame){.version = (uint32_t)get(&src, 4)};
  if (frame->version != K3_FRAME_VERSION)
    return NULL;
  const uint64_t type = get(&src, 4);
  frame->rank = (uint32_t)get(&src, 4);
  frame->size = (uint32_t)get(&src, 4);
  const uint64_t kind = get(&src, 4);
  frame->n = get(&src, 8);
  get_text(&src, frame->step, sizeof frame->step);
  if (type >= K3_N_FRAME_TYPES)
    return "a message of a type that there is not";
  if (kind > K3_COMM_ALL_GATHER)
    return "a step of a kind that there is not";
  frame->type = (enum k3_frame_type)type;
  frame->kind = (enum k3_comm_kind)kind;
  return NULL;
}

void k3_frame_write_error(const struct k3_error *error, unsigned char dst[K3_FRAME_ERROR_NBYTES]) {
  dst = put(dst, error->status, 4);
  dst = put(dst, error->rule, 4);
  dst = put_text(dst, error->file, 256);
  dst = put_text(dst, error->tensor, 256);
  dst = put_text(dst, error->found, 512);
  put_text(dst, error->allowed, 384);
}

void k3_frame_read_error(const unsigned char src[K3_FRAME_ERROR_NBYTES], struct k3_error *error) {
  _Static_assert(sizeof error->file == 256 && sizeof error->tensor == 256 && sizeof error->found == 512 && sizeof error->allowed == 384,
                 "the texts of an error have the sizes of the protocol");
  *error = (struct k3_error){.status = K3_COMM};
  const uint64_t status = get(&src, 4), rule = get(&src, 4);
#define IS_STATUS(name, value, exit_code, text) || (status == (value) && (value) > 1)
  if (false K3_STATUS_MAP(IS_STATUS))
    error->status = (enum k3_status)status;
#undef IS_STATUS
  error->rule = rule < K3_RULE_COUNT ? (enum k3_rule)rule : K3_RULE_NONE;
  get_text(&src, error->file, sizeof error->file);
  get_text(&src, error->tensor, sizeof error->tensor);
  get_text(&src, error->found, sizeof error->found);
  get_text(&src, error->allowed, sizeof error->allowed);
}

bool k3_frame_step_nbytes(enum k3_comm_kind kind, uint64_t n, int size, uint64_t *nbytes) {
  const uint64_t n_parts = kind == K3_COMM_REDUCE_SCATTER ? (uint64_t)size : 1, of_one = kind == K3_COMM_ALL_GATHER ? 1 : n_parts * sizeof(float);
  *nbytes = n * of_one;
  return n <= MAX_NBYTES / of_one;
}
