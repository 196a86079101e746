// Where the ranks of a run meet when they are processes: a thread of rank 0 with a socket to every rank, rank 0 included. It gathers them, adds up
// what they bring, and knows who is late, dead or elsewhere.
#ifndef K3_RUNTIME_COMM_HUB_H
#define K3_RUNTIME_COMM_HUB_H

#include "runtime/comm_frame.h"

struct k3_comm_hub;

// Starts the thread. It takes both descriptors, also on failure: `listener`, a listening socket, is closed when all ranks have come or time is up;
// `own` is the hub's end of a pair whose other end is rank 0's. Ends by itself when rank 0 has left and everything is delivered.
//   place          "127.0.0.1:29500", for messages; copied
//   bound_seconds  how long the ranks may take to come, and later a step may wait for one of them
enum k3_status k3_comm_hub_start(int listener, int own, int size, double bound_seconds, const char *place, struct k3_comm_hub **hub,
                                 struct k3_error *err);
// Waits for the thread's end, which comes after rank 0's socket is closed or has said that it leaves. NULL is a no-op.
void k3_comm_hub_join(struct k3_comm_hub *hub);

#endif
