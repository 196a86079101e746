// What ranks that are processes say to one another (comm_processes.c, comm_hub.c): frames of one size, little-endian, some followed by bytes.
// Whatever comes from a socket is checked here before anything believes it.
#ifndef K3_RUNTIME_COMM_FRAME_H
#define K3_RUNTIME_COMM_FRAME_H

#include "runtime/comm_seats.h"

enum k3_frame_type {
  K3_FRAME_HELLO,    // a rank to rank 0's hub: rank, size
  K3_FRAME_WELCOME,  // the hub, when all have come
  K3_FRAME_STEP,     // a rank: kind, n, step; its values or bytes follow, and are read when all ranks are at the same step
  K3_FRAME_RESULT,   // the hub: n bytes follow
  K3_FRAME_FAILED,   // the hub: an error of K3_FRAME_ERROR_NBYTES follows
  K3_FRAME_LEAVE,    // a rank: n is 0, or K3_FRAME_ERROR_NBYTES with its reason following
  K3_N_FRAME_TYPES
};

struct k3_frame {
  enum k3_frame_type type;
  uint32_t version, rank, size;
  enum k3_comm_kind kind;
  uint64_t n;
  char step[K3_COMM_STEP_NBYTES];
};

enum {
  K3_FRAME_VERSION = 1,
  K3_FRAME_NBYTES = 8 + 5 * 4 + 8 + K3_COMM_STEP_NBYTES,
  K3_FRAME_ERROR_NBYTES = 8 + 256 + 256 + 512 + 384,
};

void k3_frame_write(const struct k3_frame *frame, unsigned char dst[K3_FRAME_NBYTES]);  // its version is this one
// NULL, or what is wrong with it: "no message of k3pack's ranks". A frame of another version has only its version checked.
const char *k3_frame_read(const unsigned char src[K3_FRAME_NBYTES], struct k3_frame *frame);
// Status, rule and texts; the status that is read is always an error.
void k3_frame_write_error(const struct k3_error *error, unsigned char dst[K3_FRAME_ERROR_NBYTES]);
void k3_frame_read_error(const unsigned char src[K3_FRAME_ERROR_NBYTES], struct k3_error *error);

// Bytes that a step of n brings from each of `size` ranks; false when no such step is possible.
bool k3_frame_step_nbytes(enum k3_comm_kind kind, uint64_t n, int size, uint64_t *nbytes);

#endif
