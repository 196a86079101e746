// A small drafter made in memory, without an image, so that tests of the CUDA backend need no parser and every allocation has its own edges.
#ifndef K3_TESTS_KERNELS_MODEL_H
#define K3_TESTS_KERNELS_MODEL_H

#include "runtime/engine.h"

// Schemes of the linears under test; with F32 everything is F32, activations too.
struct test_scheme {
  const char *name;
  enum k3_scheme scheme;
  enum k3_second_scale second;
};

// The whole model: host memory, tp 1.
struct test_model {
  struct k3_dspark_model dims;
  struct k3_weights weights;
  void **blocks;  // everything allocated
  size_t n_blocks, blocks_capacity;
  uint64_t seed;
};

uint64_t test_random(uint64_t *seed);  // 64 bits
float test_normal(uint64_t *seed);     // mean 0, deviation about 1

// Random weights of a scheme. `variant` bits: 1 causal, 2 taps with norms of their own, 4 widths that are no multiples of eight (plain schemes only),
// 8 no Markov row in the confidence head, 16 everything but the linears is F32, so that activations are, 32 latents as wide as those of K3.
void test_model_create(struct test_model *model, const struct test_scheme *scheme, unsigned variant, uint64_t seed);
void test_model_free(struct test_model *model);

// An engine of one rank over the model: "cpu", or "cuda" through the plug-in. The model must outlive it. NULL and *err on failure.
struct k3_engine *test_engine_create(const struct test_model *model, const char *backend, struct k3_comm *comm, int rank, int size,
                                     struct k3_error *err);
void test_engine_free(struct k3_engine *engine);

#endif
