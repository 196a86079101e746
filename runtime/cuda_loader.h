// The CUDA backend is a plug-in, so that one program serves machines with and without CUDA: a shared library with one exported symbol, opened when
// it is asked for. Nothing outside runtime/cuda names CUDA.
#ifndef K3_RUNTIME_CUDA_LOADER_H
#define K3_RUNTIME_CUDA_LOADER_H

#include "runtime/backend.h"

struct k3_cuda_options {
  int device;                    // number of the GPU
  bool bf16;                     // activations are BF16, else F32
  int tp_rank, tp_size;          // 0 and 0 or 1: one rank
  struct k3_progress *progress;  // of starting CUDA, which takes longer than loading a small image; NULL: nobody watches
  struct k3_comm *comm;          // the ranks' communicator, for what is exchanged once (runtime/comm.h); NULL with one rank
};

// What the plug-in exports as `k3_cuda_plugin`. Program and plug-in share structs, so they must be of one build: `layout` says which.
#define K3_CUDA_PLUGIN_SYMBOL "k3_cuda_plugin"
#define K3_CUDA_PLUGIN_FILE   "libk3pack_cuda.so"
struct k3_cuda_plugin {
  uint64_t layout;  // k3_cuda_layout()
  // The backend on a device; NULL and *err on failure (K3_UNSUPPORTED: no driver, no such device, a device that is too old, too little memory).
  struct k3_backend *(*create)(const struct k3_cuda_options *options, struct k3_error *err);
};

// A number made of the sizes of all structs that cross the border.
uint64_t k3_cuda_layout(void);

// Opens the plug-in and creates the backend. Looked for in this order: the file that the variable K3PACK_CUDA_PLUGIN names, the program's own folder,
// the loader's usual places. K3_UNSUPPORTED with what to build or install when there is none, or when it is of another build. Thread-safe.
enum k3_status k3_cuda_backend_open(const struct k3_cuda_options *options, struct k3_backend **backend, struct k3_error *err);

#endif
