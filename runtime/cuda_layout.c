#include "runtime/cuda_loader.h"
#include "runtime/weights.h"

uint64_t k3_cuda_layout(void) {
  static const size_t sizes[] = {
#define K3_STEP_SIZE(step) sizeof(struct k3_##step),
      K3_BACKEND_STEPS(K3_STEP_SIZE)
#undef K3_STEP_SIZE
          sizeof(struct k3_exec_options),
      sizeof(struct k3_backend_ops),
      sizeof(struct k3_backend),
      sizeof(struct k3_cuda_options),
      sizeof(struct k3_matrix_shard),
      sizeof(struct k3_matrix),
      sizeof(struct k3_vector),
      sizeof(struct k3_cache),
      sizeof(struct k3_layer_weights),
      sizeof(struct k3_weights),
      sizeof(struct k3_error),
      sizeof(struct k3_progress),
  };
  uint64_t layout = 1;  // of the interface; raised when a struct changes its meaning and not its size
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    layout = (layout ^ sizes[i]) * 0x100000001b3u;
  return layout;
}
