// The whole forward on the CUDA backend against the CPU backend: append and draft, captured once for each batch size and replayed with other inputs
// in the same buffers, for every scheme and tensor-parallel size. In the simulator, which counts them, captures and replays are what they have to be.
// Prints one line per case; exit 1 when one differs.
//   test_forward [NAME...]   only the cases whose name contains one of the words
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/kernels/model.h"

enum { MAX_REQUESTS = 4, MAX_ROUNDS = 9, BLOCK_SIZE = 4, MAX_CONTEXT = 48, MAX_ROWS = 2 * MAX_CONTEXT };

static const struct test_scheme SCHEMES[] = {
    {"f32", K3_SCHEME_F32, K3_SECOND_NONE},
    {"bf16", K3_SCHEME_BF16, K3_SECOND_NONE},
    {"f16", K3_SCHEME_F16, K3_SECOND_NONE},
    {"fp8-tensor", K3_SCHEME_FP8_TENSOR, K3_SECOND_NONE},
    {"fp8-channel", K3_SCHEME_FP8_CHANNEL, K3_SECOND_NONE},
    {"fp8-block", K3_SCHEME_FP8_BLOCK, K3_SECOND_NONE},
    {"nvfp4-divide", K3_SCHEME_NVFP4, K3_SECOND_DIVIDE},
    {"nvfp4-multiply", K3_SCHEME_NVFP4, K3_SECOND_MULTIPLY},
    {"mxfp4", K3_SCHEME_MXFP4, K3_SECOND_NONE},
};

// The reduction plan: as K3's recipe has it, sums at once instead of in the next norm, or one norm's sum left out, which must show.
enum plan { DEFERRED, AT_ONCE, LEFT_OUT };

struct test_case {
  const char *name;
  unsigned variant;  // test_model_create
  enum k3_dtype cache, taps;
  int sizes[4];                   // tensor-parallel sizes, 0 ends
  bool split_taps;                // one array per tap
  unsigned requests[MAX_ROUNDS];  // of each round, 0 ends; none: two requests in each of three rounds
  enum plan plan;
};

// Difference of an output as a share of its size, both root mean squares: {pass, warn}. F32 differs by the order of its sums; a cache of fewer bits,
// or BF16 activations, may take a value to the other side of a rounding, and so everything after it.
static const float TOLERANCES[3][2] = {{2e-5f, 5e-6f}, {2e-4f, 1e-4f}, {0.05f, 0.035f}};

struct outputs {
  float *states, *rows, *hidden, *base_logits, *logits, *confidence;
  int64_t *ids;
};

// What one engine works on; device memory on a GPU.
struct arena {
  void *taps, *positions, *slots, *anchor_ids, *anchor_positions, *block_tables, *previous_ids;
  struct outputs out;
};

struct round_inputs {
  uint64_t n_rows, n_requests;
  unsigned char *taps;
  int64_t positions[MAX_ROWS], slots[MAX_ROWS], anchor_ids[MAX_REQUESTS], anchor_positions[MAX_REQUESTS], previous_ids[MAX_REQUESTS * 16];
};

struct scenario {
  const struct k3_dspark_model *m;
  const struct test_case *test;
  uint64_t max_blocks, n_blocks, max_requests;
  int n_rounds;
  unsigned n_shapes[2];  // different numbers of rows appended, of requests drafted for
  int32_t block_tables[MAX_REQUESTS * 64];
  struct round_inputs rounds[MAX_ROUNDS];
};

// Values of an output with so many context rows and requests.
static uint64_t n_values(const struct k3_dspark_model *m, uint64_t n_rows, uint64_t n_requests, unsigned which) {
  const uint64_t q = n_requests * m->block_width, E = m->kv_lora_rank + m->qk_rope_head_dim;
  const uint64_t sizes[] = {n_rows * m->hidden_size, m->n_layers * n_rows * E, q * m->hidden_size, q * m->vocab_size, q * m->vocab_size, q};
  return sizes[which];
}

static uint64_t n_outputs(const struct scenario *s, unsigned which) {
  return n_values(s->m, MAX_ROWS, s->max_requests, which);
}

static void make_scenario(struct scenario *s, const struct k3_dspark_model *m, const struct test_case *test, uint64_t seed) {
  memset(s, 0, sizeof *s);
  s->m = m;
  s->test = test;
  const bool buckets = test->requests[0] > 0;
  s->n_rounds = buckets ? 0 : 3;
  s->max_requests = buckets ? 0 : 2;
  for (int r = 0; buckets && r < MAX_ROUNDS && test->requests[r]; r++, s->n_rounds++)
    s->max_requests = test->requests[r] > s->max_requests ? test->requests[r] : s->max_requests;
  s->max_blocks = (MAX_CONTEXT + m->block_width + BLOCK_SIZE - 1) / BLOCK_SIZE;
  s->n_blocks = s->max_requests * s->max_blocks + 3;
  for (uint64_t i = 0; i < s->max_requests * s->max_blocks; i++)  // scattered, every block once
    s->block_tables[i] = (int32_t)((i * 7 + 3) % s->n_blocks);
  uint64_t committed[MAX_REQUESTS] = {0};
  const uint64_t width = m->n_taps * m->target_hidden_size, value_nbytes = k3_dtype_bits(test->taps) / 8;
  for (int r = 0; r < s->n_rounds; r++) {
    struct round_inputs *in = &s->rounds[r];
    const bool first = r == 0 && !buckets;
    // The first round is long enough for the library's product; the others repeat one shape, so that a graph is replayed.
    const uint64_t grow[MAX_REQUESTS] = {first ? 37 : 2, first ? 1 : 3, 1, 2};
    in->n_requests = buckets ? test->requests[r] : 2;
    for (uint64_t b = 0; b < in->n_requests; b++) {
      for (uint64_t i = 0; i < grow[b]; i++) {
        const uint64_t position = committed[b] + i;
        in->positions[in->n_rows] = (int64_t)position;
        in->slots[in->n_rows++] = s->block_tables[b * s->max_blocks + position / BLOCK_SIZE] * BLOCK_SIZE + (int64_t)(position % BLOCK_SIZE);
      }
      committed[b] += grow[b];
      in->anchor_ids[b] = (int64_t)(test_random(&seed) % m->vocab_size);
      in->anchor_positions[b] = (int64_t)committed[b];
    }
    in->taps = calloc(in->n_rows * width, value_nbytes);
    for (uint64_t i = 0; i < in->n_rows * width; i++) {
      const float value = test_normal(&seed);
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      if (test->taps == K3_DTYPE_F32)
        memcpy(in->taps + 4 * i, &value, 4);
      else
        memcpy(in->taps + 2 * i, (unsigned char *)&bits + 2, 2);
    }
    for (uint64_t i = 0; i < in->n_requests * m->block_width; i++)
      in->previous_ids[i] = (int64_t)(test_random(&seed) % m->vocab_size);
    bool is_new[2] = {true, true};
    for (int before = 0; before < r; before++) {
      is_new[0] &= s->rounds[before].n_rows != in->n_rows;
      is_new[1] &= s->rounds[before].n_requests != in->n_requests;
    }
    s->n_shapes[0] += is_new[0];
    s->n_shapes[1] += is_new[1];
  }
}

static void free_scenario(struct scenario *s) {
  for (int r = 0; r < s->n_rounds; r++)
    free(s->rounds[r].taps);
}

// --- one engine ------------------------------------------------------------------------------------------------------------------------------------

static enum k3_status alloc_arena(struct k3_engine *engine, const struct scenario *s, struct arena *arena, struct k3_error *err) {
  const uint64_t q = s->max_requests * s->m->block_width;
  struct {
    void *field;
    uint64_t nbytes;
  } list[] = {
      {&arena->taps, MAX_ROWS * s->m->n_taps * s->m->target_hidden_size * 4},
      {&arena->positions, MAX_ROWS * 8},
      {&arena->slots, MAX_ROWS * 8},
      {&arena->anchor_ids, s->max_requests * 8},
      {&arena->anchor_positions, s->max_requests * 8},
      {&arena->block_tables, sizeof s->block_tables},
      {&arena->previous_ids, q * 8},
      {&arena->out.ids, q * 8},
      {&arena->out.states, n_outputs(s, 0) * 4},
      {&arena->out.rows, n_outputs(s, 1) * 4},
      {&arena->out.hidden, n_outputs(s, 2) * 4},
      {&arena->out.base_logits, n_outputs(s, 3) * 4},
      {&arena->out.logits, n_outputs(s, 4) * 4},
      {&arena->out.confidence, n_outputs(s, 5) * 4},
  };
  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
    void *memory;
    K3_TRY(k3_memory_create(engine, list[i].nbytes, &memory, err));
    memcpy(list[i].field, &memory, sizeof memory);
  }
  return K3_OK;
}

static void free_arena(struct k3_engine *engine, struct arena *a) {
  void *list[] = {a->taps,    a->positions,  a->slots,    a->anchor_ids, a->anchor_positions, a->block_tables, a->previous_ids,
                  a->out.ids, a->out.states, a->out.rows, a->out.hidden, a->out.base_logits,  a->out.logits,   a->out.confidence};
  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
    k3_memory_free(engine, list[i]);
}

static enum k3_status run_round(struct k3_engine *engine, struct k3_session *session, struct k3_cache *cache, const struct scenario *s,
                                struct arena *a, int round, struct outputs *out, struct k3_error *err) {
  const struct round_inputs *in = &s->rounds[round];
  const struct k3_dspark_model *m = s->m;
  const enum k3_memory memory = engine->info.memory;
  const uint64_t width = m->n_taps * m->target_hidden_size, value_nbytes = k3_dtype_bits(s->test->taps) / 8, q = in->n_requests * m->block_width;
  K3_TRY(k3_memory_write(engine, a->taps, in->taps, in->n_rows * width * value_nbytes, err));
  K3_TRY(k3_memory_write(engine, a->positions, in->positions, in->n_rows * 8, err));
  K3_TRY(k3_memory_write(engine, a->slots, in->slots, in->n_rows * 8, err));
  K3_TRY(k3_memory_write(engine, a->anchor_ids, in->anchor_ids, in->n_requests * 8, err));
  K3_TRY(k3_memory_write(engine, a->anchor_positions, in->anchor_positions, in->n_requests * 8, err));
  K3_TRY(k3_memory_write(engine, a->block_tables, s->block_tables, sizeof s->block_tables, err));
  K3_TRY(k3_memory_write(engine, a->previous_ids, in->previous_ids, q * 8, err));
  struct k3_array taps[8];
  const uint64_t n_arrays = s->test->split_taps ? m->n_taps : 1;
  for (uint64_t t = 0; t < n_arrays; t++)
    taps[t] = (struct k3_array){(unsigned char *)a->taps + t * m->target_hidden_size * value_nbytes, memory, s->test->taps, width * value_nbytes};
  const struct k3_context context = {
      .n_rows = in->n_rows,
      .taps = taps,
      .n_tap_arrays = n_arrays,
      .positions = a->positions,
      .slots = a->slots,
      .states = {a->out.states, memory, K3_DTYPE_F32, 0},
      .rows = {a->out.rows, memory, K3_DTYPE_F32, 0},
  };
  K3_TRY(k3_session_append(session, cache, &context, NULL, err));
  const struct k3_draft draft = {
      .n_requests = in->n_requests,
      .anchor_ids = a->anchor_ids,
      .anchor_positions = a->anchor_positions,
      .block_tables = a->block_tables,
      .max_blocks = s->max_blocks,
      .previous_ids = a->previous_ids,
      .draft_ids = {a->out.ids, memory, K3_DTYPE_I64, 0},
      .confidence = {a->out.confidence, memory, K3_DTYPE_F32, 0},
      .hidden = {a->out.hidden, memory, K3_DTYPE_F32, 0},
      .base_logits = {a->out.base_logits, memory, K3_DTYPE_F32, 0},
      .logits = {a->out.logits, memory, K3_DTYPE_F32, 0},
  };
  K3_TRY(k3_session_draft(session, cache, &draft, NULL, err));
  void *const from[] = {a->out.states, a->out.rows, a->out.hidden, a->out.base_logits, a->out.logits, a->out.confidence};
  void *const to[] = {out->states, out->rows, out->hidden, out->base_logits, out->logits, out->confidence};
  for (unsigned i = 0; i < 6; i++)
    K3_TRY(k3_memory_read(engine, to[i], from[i], n_values(m, in->n_rows, in->n_requests, i) * 4, err));
  return k3_memory_read(engine, out->ids, a->out.ids, q * 8, err);
}

static enum k3_status run_engine(struct k3_engine *engine, const struct scenario *s, struct outputs *outs, struct k3_error *err) {
  struct arena arena = {0};
  struct k3_cache cache = {0};
  const struct k3_session_options options = {.max_requests = s->max_requests, .max_context_rows = 64, .max_keys = MAX_CONTEXT + 16, .n_threads = 1};
  static const float scales[] = {0.02f, 0.03f};
  struct k3_session *session = k3_session_create(engine, &options, err);
  enum k3_status status = session ? alloc_arena(engine, s, &arena, err) : err->status;
  const bool fp8 = s->test->cache == K3_DTYPE_F8_E4M3 || s->test->cache == K3_DTYPE_F8_E5M2;
  if (status == K3_OK)
    status = k3_cache_create(engine, s->test->cache, s->n_blocks, BLOCK_SIZE, fp8 ? scales : NULL, &cache, err);
  for (int r = 0; status == K3_OK && r < s->n_rounds; r++)
    status = run_round(engine, session, &cache, s, &arena, r, &outs[r], err);
  k3_cache_free(engine, &cache);
  free_arena(engine, &arena);
  k3_session_free(session);
  return status;
}

static void alloc_outputs(const struct scenario *s, struct outputs *out) {
  float **fields[] = {&out->states, &out->rows, &out->hidden, &out->base_logits, &out->logits, &out->confidence};
  for (unsigned i = 0; i < 6; i++)
    *fields[i] = calloc(n_outputs(s, i), sizeof(float));
  out->ids = calloc(s->max_requests * s->m->block_width, sizeof *out->ids);
}

static void free_outputs(struct outputs *out) {
  free(out->states), free(out->rows), free(out->hidden), free(out->base_logits), free(out->logits), free(out->confidence), free(out->ids);
}

struct rank {
  const struct test_model *model;
  const struct scenario *scenario;
  struct k3_comm *comm;
  int rank, size;
  struct outputs outs[MAX_ROUNDS];
  enum k3_status status;
  struct k3_error err;
};

// "executed from the reduction plan": whatever the plan says is done.
static void change_plan(struct k3_engine *engine, enum plan plan) {
  static const struct k3_flow nothing = {.name = "nothing"}, at_once = {.name = "at once", .partial = true, .reduce = K3_REDUCE_ALL};
  struct k3_reductions *r = &engine->reductions;
  for (uint64_t i = 0; plan == AT_ONCE && i < engine->model.n_layers; i++) {
    r->o_proj[i] = r->down[i] = &at_once;
    r->input_norm[i] = r->post_norm[i] = &nothing;
  }
  if (plan != DEFERRED)
    r->final_norm = &nothing;
}

static void *run_rank(void *ctx) {
  struct rank *r = ctx;
  struct k3_engine *engine = test_engine_create(r->model, "cuda", r->comm, r->rank, r->size, &r->err);
  if (engine && r->size > 1)
    change_plan(engine, r->scenario->test->plan);
  r->status = engine ? run_engine(engine, r->scenario, r->outs, &r->err) : r->err.status;
  if (r->status != K3_OK && r->comm)
    r->comm->ops->abort(r->comm, &r->err);
  test_engine_free(engine);
  return NULL;
}

// --- comparison ------------------------------------------------------------------------------------------------------------------------------------

// Root mean square of the difference, as a share of that of b; NaN shows.
static float difference(const float *a, const float *b, uint64_t n) {
  double square = 0, error = 0;
  for (uint64_t i = 0; i < n; i++) {
    square += (double)b[i] * (double)b[i];
    error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
  }
  return (float)sqrt(error / (square + 1e-30));
}

// An id may differ only where the CPU's logits of both are as good as equal.
static bool same_ids(const struct k3_dspark_model *m, uint64_t n_requests, const struct outputs *got, const struct outputs *want, float tolerance) {
  for (uint64_t i = 0; i < n_requests * m->block_width; i++) {
    const int64_t a = got->ids[i], b = want->ids[i];
    if (a == b)
      continue;
    if (a < 0 || a >= (int64_t)m->vocab_size ||
        want->logits[i * m->vocab_size + (uint64_t)b] - want->logits[i * m->vocab_size + (uint64_t)a] > 4 * tolerance)
      return false;
  }
  return true;
}

static bool compare(const char *name, const struct scenario *s, int size, int rank, const struct outputs *got, const struct outputs *want, bool f32) {
  static const char *const names[] = {"states", "rows", "hidden", "base_logits", "logits", "confidence"};
  const float *tolerance = TOLERANCES[!f32 ? 2 : s->test->cache == K3_DTYPE_F32 ? 0 : 1];
  bool ok = true;
  float worst = 0;
  for (int r = 0; r < s->n_rounds; r++) {
    const float *a[] = {got[r].states, got[r].rows, got[r].hidden, got[r].base_logits, got[r].logits, got[r].confidence};
    const float *b[] = {want[r].states, want[r].rows, want[r].hidden, want[r].base_logits, want[r].logits, want[r].confidence};
    for (unsigned i = 0; i < 6; i++) {
      const float d = difference(a[i], b[i], n_outputs(s, i));
      if (!(d <= tolerance[0])) {
        printf("FAILED %s tp %d rank %d round %d: %s differs by %g of its size\n", name, size, rank, r, names[i], (double)d);
        ok = false;
      }
      worst = d <= worst ? worst : d;
    }
    if (!same_ids(s->m, s->rounds[r].n_requests, &got[r], &want[r], tolerance[0])) {
      printf("FAILED %s tp %d rank %d round %d: other drafts\n", name, size, rank, r);
      ok = false;
    }
  }
  if (ok && rank == 0)
    printf("%-7s %s tp %d: within %.2g\n", worst > tolerance[1] ? "warn" : "ok", name, size, (double)worst);
  return ok;
}

// A sum that was left out is no rounding: what comes behind it is far away.
static bool shows(const char *name, const struct scenario *s, int size, int rank, const struct outputs *got, const struct outputs *want) {
  const float d = difference(got[0].hidden, want[0].hidden, n_values(s->m, 0, s->rounds[0].n_requests, 2));
  if (d > 0.1f) {
    if (rank == 0)
      printf("ok      %s tp %d: the final norm's input is not the sum, %.2g\n", name, size, (double)d);
    return true;
  }
  printf("FAILED %s tp %d rank %d: a sum that the plan does not have was made\n", name, size, rank);
  return false;
}

// What the simulator counts (tests/cuda_sim/runtime.cc). On a device all of it stays zero.
static struct counters { uint64_t is_simulated, captures, replays, kernels, in_no_capture; } * counters;

static void open_counters(void) {
  char path[64];
  FILE *file = tmpfile();  // open until the end
  void *memory = !file || ftruncate(fileno(file), 4096) != 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
  if (memory == MAP_FAILED)
    abort();
  snprintf(path, sizeof path, "/proc/self/fd/%d", fileno(file));
  setenv("SIM_COUNTERS", path, 1);
  counters = memory;
}

// "captures the step and replays it twice with other inputs": on every rank each shape was captured once, everything was replayed from a graph, and
// no kernel was launched outside one.
static bool check_counters(const char *name, const struct scenario *s, int size, const struct counters *before) {
  const uint64_t n = (uint64_t)size, captures = counters->captures - before->captures, replays = counters->replays - before->replays;
  const uint64_t want_captures = n * (s->n_shapes[0] + s->n_shapes[1]), want_replays = n * 2 * (uint64_t)s->n_rounds;
  if (!counters->is_simulated || (captures == want_captures && replays == want_replays && counters->in_no_capture == before->in_no_capture))
    return true;
  printf("FAILED %s tp %d: %llu captures, %llu replays, %llu kernels outside a graph instead of %llu, %llu, 0\n", name, size,
         (unsigned long long)captures, (unsigned long long)replays, (unsigned long long)(counters->in_no_capture - before->in_no_capture),
         (unsigned long long)want_captures, (unsigned long long)want_replays);
  return false;
}

static bool run_size(const char *name, const struct test_model *model, const struct scenario *s, int size, const struct outputs *want) {
  const struct counters before = *counters;
  struct k3_comm *comms[16] = {NULL};
  struct k3_error err = {0};
  char text[1024];
  struct rank ranks[16];
  pthread_t threads[16];
  bool ok = true;
  memset(ranks, 0, sizeof ranks);
  if (size > 1 && k3_comm_threads_create(size, 30, comms, &err) != K3_OK) {
    printf("FAILED %s: %s\n", name, k3_error_text(&err, text, sizeof text));
    return false;
  }
  for (int r = 0; r < size; r++) {
    ranks[r] = (struct rank){.model = model, .scenario = s, .comm = comms[r], .rank = r, .size = size};
    for (int i = 0; i < s->n_rounds; i++)
      alloc_outputs(s, &ranks[r].outs[i]);
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0)
      abort();
  }
  for (int r = 0; r < size; r++)
    pthread_join(threads[r], NULL);
  for (int r = 0; r < size; r++) {
    if (ranks[r].status != K3_OK) {
      printf("FAILED %s tp %d rank %d: %s\n", name, size, r, k3_error_text(&ranks[r].err, text, sizeof text));
      ok = false;
    } else {
      ok &= s->test->plan == LEFT_OUT ? shows(name, s, size, r, ranks[r].outs, want)
                                      : compare(name, s, size, r, ranks[r].outs, want, model->weights.all_f32);
    }
    for (int i = 0; i < s->n_rounds; i++)
      free_outputs(&ranks[r].outs[i]);
    if (comms[r])
      comms[r]->ops->destroy(comms[r]);
  }
  // An odd number of sums ends in the other half of the window than it began in, and so takes two graphs.
  return ok && (s->test->plan == LEFT_OUT || check_counters(name, s, size, &before));
}

static bool run_case(const struct test_scheme *scheme, const struct test_case *test, int max_size) {
  char name[128];
  struct test_model model;
  struct scenario s;
  struct outputs want[MAX_ROUNDS];
  struct k3_error err = {0};
  bool ok = true;
  snprintf(name, sizeof name, "%s %s", scheme->name, test->name);
  test_model_create(&model, scheme, test->variant, 1000 + test->variant);
  make_scenario(&s, &model.dims, test, 77);
  for (int i = 0; i < s.n_rounds; i++)
    alloc_outputs(&s, &want[i]);
  struct k3_engine *cpu = test_engine_create(&model, "cpu", NULL, 0, 1, &err);
  if (!cpu || run_engine(cpu, &s, want, &err) != K3_OK) {
    char text[1024];
    printf("FAILED %s on the CPU: %s\n", name, k3_error_text(&err, text, sizeof text));
    ok = false;
  }
  test_engine_free(cpu);
  for (int i = 0; ok && i < 4 && test->sizes[i]; i++)
    if (test->sizes[i] <= max_size)
      ok &= run_size(name, &model, &s, test->sizes[i], want);
  for (int i = 0; i < s.n_rounds; i++)
    free_outputs(&want[i]);
  free_scenario(&s);
  test_model_free(&model);
  fflush(stdout);
  return ok;
}

static bool wanted(const char *scheme, const char *test, int argc, char **argv) {
  bool any = argc < 2;
  char name[128];
  snprintf(name, sizeof name, "%s %s", scheme, test);
  for (int i = 1; i < argc; i++)
    any |= strstr(name, argv[i]) != NULL;
  return any;
}

int main(int argc, char **argv) {
  // Every scheme of the matrix at tp 1 and 2, BF16 and NVFP4 also at 4 and 8.
  static const struct test_case every = {"plain", 0, K3_DTYPE_BF16, K3_DTYPE_BF16, {1, 2}, false, {0}, DEFERRED};
  static const struct test_case wide = {"plain", 0, K3_DTYPE_BF16, K3_DTYPE_BF16, {1, 2, 4, 8}, false, {0}, DEFERRED};
  // With F32 activations the decoding of quantised weights shows to the last bits.
  static const struct test_case exact = {"with f32 activations", 16, K3_DTYPE_F32, K3_DTYPE_BF16, {1, 2}, false, {0}, DEFERRED};
  static const struct test_case others[] = {
      {"causal, tap norms, split taps, f32 taps, fp8 cache", 1 | 2, K3_DTYPE_F8_E4M3, K3_DTYPE_F32, {1}, true, {0}, DEFERRED},
      {"odd widths, e5m2 cache", 4 | 8, K3_DTYPE_F8_E5M2, K3_DTYPE_BF16, {1}, false, {0}, DEFERRED},
      {"tap norms, f32 cache", 2, K3_DTYPE_F32, K3_DTYPE_BF16, {1}, false, {0}, DEFERRED},
  };
  // Batch sizes that take turns: each has its graph, replayed twice with other inputs between the others'.
  static const struct test_case buckets = {"batch sizes in turns",      0,       K3_DTYPE_BF16, K3_DTYPE_BF16, {1, 2}, false,
                                           {1, 2, 4, 1, 2, 4, 1, 2, 4}, DEFERRED};
  // The plan is obeyed, not known: F32 shows every value.
  static const struct test_case plans[] = {
      {"sums at once", 0, K3_DTYPE_F32, K3_DTYPE_BF16, {2, 4}, false, {0}, AT_ONCE},
      {"a sum left out", 0, K3_DTYPE_F32, K3_DTYPE_BF16, {2}, false, {0}, LEFT_OUT},
  };
  const char *limit = getenv("K3_TEST_MAX_TP");
  const int max_size = limit ? atoi(limit) : 16;
  int n_failed = 0, n_run = 0;
  open_counters();
  for (size_t i = 0; i < sizeof SCHEMES / sizeof SCHEMES[0]; i++) {
    const struct test_scheme *scheme = &SCHEMES[i];
    const bool is_wide = scheme->scheme == K3_SCHEME_BF16 || strcmp(scheme->name, "nvfp4-divide") == 0;
    if (wanted(scheme->name, "plain", argc, argv)) {
      n_run++;
      n_failed += !run_case(scheme, is_wide ? &wide : &every, max_size);
    }
    if (!k3_scheme_is_plain(scheme->scheme) && wanted(scheme->name, exact.name, argc, argv)) {
      n_run++;
      n_failed += !run_case(scheme, &exact, max_size);
    }
    if ((scheme->scheme == K3_SCHEME_F32 || is_wide) && wanted(scheme->name, buckets.name, argc, argv)) {
      n_run++;
      n_failed += !run_case(scheme, &buckets, max_size);
    }
  }
  for (size_t i = 0; i < 2 * sizeof others / sizeof others[0]; i++) {
    const struct test_scheme *scheme = &SCHEMES[i % 2];  // F32, BF16
    if (wanted(scheme->name, others[i / 2].name, argc, argv)) {
      n_run++;
      n_failed += !run_case(scheme, &others[i / 2], max_size);
    }
  }
  for (size_t i = 0; i < 2 * sizeof plans / sizeof plans[0]; i++) {
    if (max_size > 1 && wanted(SCHEMES[i % 2].name, plans[i / 2].name, argc, argv)) {
      n_run++;
      n_failed += !run_case(&SCHEMES[i % 2], &plans[i / 2], max_size);
    }
  }
  printf("%d cases, %d failed\n", n_run, n_failed);
  return n_failed > 0 || n_run == 0;
}
