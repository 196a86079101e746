// Stands before the toolkit's header of the same name on the include path of the simulator build.
#pragma once
#include_next <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_sim.h"
