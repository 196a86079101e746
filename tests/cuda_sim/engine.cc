// One grid on one CPU core: blocks one after another, the threads of a block as fibres that run until they wait. Every OS thread (a rank) has an
// engine of its own. Sanitizers are told of every switch; TSan is never told that a switch orders anything, so that only barriers and fences do.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <deque>
#include <memory>
#include <vector>

#include "cuda_sim_internal.h"

// Saves the callee-saved registers on the current stack, leaves its pointer in *save and goes on where `load` was saved.
extern "C" void cuda_sim_switch(void **save, void *load);
asm(R"(
  .text
  .globl cuda_sim_switch
  .type cuda_sim_switch, @function
cuda_sim_switch:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
  .size cuda_sim_switch, . - cuda_sim_switch
)");

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace cuda_sim {

constexpr size_t kStackNbytes = 256 << 10, kGuardNbytes = 4096;
constexpr unsigned kWarp = 32;
// Blocks take turns on two sets of fibres, so that nothing but the kernel's own fences orders neighbouring blocks for TSan.
#if defined(SIM_TSAN)
constexpr size_t kSets = 2;
#else
constexpr size_t kSets = 1;
#endif

enum class State { ready, in_warp_op, at_barrier, polling, done };

struct Fibre {
  void *stack_pointer = nullptr;
  unsigned char *stack = nullptr;  // nullptr: the OS thread's own
  size_t stack_nbytes = 0;
  void *race_fibre = nullptr, *fake_stack = nullptr;  // TSan's and ASan's
  uint3 index = {};
  unsigned number = 0;  // in the block
  State state = State::done;
  uint32_t mask = 0;
  WarpOp op = WarpOp::sync;
  void *payload = nullptr;
  const void *where = nullptr;            // caller of the operation it waits in
  const char *what = nullptr;             // of a polling one
  bool fenced = false;                    // a fence has passed
  std::vector<const void *> since_fence;  // atomics since the last one
  struct Copy {
    void *shared;
    const void *global;
  };
  std::vector<Copy> copies;  // under way
  size_t n_copied = 0;
  bool has_waited = false;  // for the kernels before
};

struct SharedPiece {
  const void *tag;
  void *memory;
};

struct Engine {
  std::deque<Fibre> fibres[kSets];
  Fibre host;
  Fibre *current = nullptr;
  std::vector<Fibre *> block;  // by thread number
  std::vector<Fibre *> ring;   // of those that can run, oldest at ring_head; as long as the block
  size_t ring_head = 0, n_ready = 0;
  size_t n_live = 0, n_at_barrier = 0;
  const std::function<void()> *body = nullptr;
  uint64_t *order = nullptr;  // addresses for TSan, fresh for every block: the barrier's, then one per warp
  uint64_t grid_begin = 0, grid_end = 0;
  std::vector<SharedPiece> shared;
  size_t dynamic_nbytes = 0;
  bool may_overlap = false;  // launched so that it may run beside the kernel before
  void *dynamic = nullptr;
  char error[2048] = "";
  bool timed_out = false;
  double deadline = 0;
  unsigned long n_polls = 0;
};

// Found through a pointer of its own: the wrapper of a thread_local object with a constructor is too slow for every switch.
static Engine *engine() {
  static thread_local std::unique_ptr<Engine> owner;
  static thread_local Engine *mine = nullptr;
  if (!mine) {
    owner.reset(new Engine);
    mine = owner.get();
  }
  return mine;
}

const Settings &settings() {
  static const Settings values = [] {
    const char *seed = getenv("SIM_SEED"), *lazy = getenv("SIM_LAZY"), *timeout = getenv("SIM_TIMEOUT");
    return Settings{seed ? strtoul(seed, nullptr, 10) : 0, lazy && *lazy == '1', timeout ? atof(timeout) : 10.0};
  }();
  return values;
}

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void make_undefined(void *bytes, size_t nbytes) {
#if defined(SIM_MSAN)
  __msan_poison(bytes, nbytes);
#else
  memset(bytes, 0xff, nbytes);
#endif
}

void check_initialised(const void *bytes, size_t nbytes) {
  (void)bytes, (void)nbytes;
#if defined(SIM_MSAN)
  __msan_check_mem_is_initialized(bytes, nbytes);
#endif
}

static void describe_address(const void *address, const char *format, char *text, size_t nbytes) {
#if defined(SIM_SYMBOLIZER)
  __sanitizer_symbolize_pc(const_cast<void *>(address), format, text, nbytes);
#else
  (void)format;
  Dl_info info;
  if (dladdr(address, &info) && info.dli_sname)
    snprintf(text, nbytes, "%s", info.dli_sname);
  else
    snprintf(text, nbytes, "%p", address);
#endif
}

// --- switching -------------------------------------------------------------------------------------------------------------------------------------

static void jump(Engine *e, Fibre *to) {
  Fibre *from = e->current;
  if (from == to)
    return;
  e->current = to;
  threadIdx = to->index;
#if defined(SIM_ASAN)
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_nbytes);
#endif
#if defined(SIM_MSAN)
  __msan_start_switch_fiber(to->stack, to->stack_nbytes);
#endif
#if defined(SIM_TSAN)
  __tsan_switch_to_fiber(to->race_fibre, 1);  // 1: the switch orders nothing
#endif
  cuda_sim_switch(&from->stack_pointer, to->stack_pointer);
#if defined(SIM_ASAN)
  __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
#if defined(SIM_MSAN)
  __msan_finish_switch_fiber(nullptr, nullptr);
#endif
}

// Leaves the current fibre, which is queued already or will be woken by another; back to the host when nobody can run.
static void run_next(Engine *e) {
  if (e->n_ready == 0) {
    jump(e, &e->host);
    return;
  }
  Fibre *fibre = e->ring[e->ring_head];
  e->ring_head = (e->ring_head + 1) % e->ring.size();
  e->n_ready--;
  jump(e, fibre);
}

static void wake(Engine *e, Fibre *fibre) {
  fibre->state = State::ready;
  e->ring[(e->ring_head + e->n_ready++) % e->ring.size()] = fibre;
}

static void fail(Engine *e, const char *text) {
  if (!e->error[0])
    snprintf(e->error, sizeof e->error, "%s", text);
}

void trap(const char *what) {
  Engine *e = engine();
  char text[256];
  snprintf(text, sizeof text, "cuda_sim: trap: %s, thread %u of block (%u,%u,%u)\n", what, e->current->number, blockIdx.x, blockIdx.y, blockIdx.z);
  fail(e, text);
  jump(e, &e->host);
  abort();  // nobody comes back to a block that was given up
}

__attribute__((noinline)) static void fibre_main() {
#if defined(SIM_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
#if defined(SIM_MSAN)
  __msan_finish_switch_fiber(nullptr, nullptr);
#endif
  for (;;) {  // a fibre serves one thread after another
    Engine *e = engine();
    acquire(&e->grid_begin);
    (*e->body)();
    release(&e->grid_end);
    e->current->state = State::done;
    e->n_live--;
    if (e->n_live > 0 && e->n_at_barrier > 0)
      fail(e, "cuda_sim: a thread has exited while others wait at __syncthreads\n");
    if (e->may_overlap && !e->current->has_waited)
      fail(e, "cuda_sim: a thread has exited without waiting for the kernels before\n");
    if (!e->current->copies.empty())
      fail(e, "cuda_sim: a thread has exited with copies under way\n");
    if (e->error[0])
      jump(e, &e->host);
    else
      run_next(e);
  }
}

static void prepare(Fibre *fibre) {
  if (!fibre->stack) {
    void *memory = mmap(nullptr, kGuardNbytes + kStackNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardNbytes, PROT_NONE) != 0) {
      perror("cuda_sim: stack of a fibre");
      abort();
    }
    fibre->stack = static_cast<unsigned char *>(memory) + kGuardNbytes;
    fibre->stack_nbytes = kStackNbytes;
#if defined(SIM_TSAN)
    fibre->race_fibre = __tsan_create_fiber(0);
#endif
  }
#if defined(SIM_ASAN)
  __asan_unpoison_memory_region(fibre->stack, fibre->stack_nbytes);
#endif
#if defined(SIM_MSAN)
  __msan_unpoison(fibre->stack, fibre->stack_nbytes);
#endif
  void **top = reinterpret_cast<void **>(fibre->stack + fibre->stack_nbytes - 64);
  *--top = nullptr;  // return address of fibre_main, which does not return; with it the stack is aligned as at a call
  *--top = reinterpret_cast<void *>(fibre_main);
  for (int i = 0; i < 6; i++)
    *--top = nullptr;  // the saved registers
  fibre->stack_pointer = top;
}

// --- memory of a block -----------------------------------------------------------------------------------------------------------------------------

static void *private_memory(size_t nbytes) {
  const Unseen unseen;
  void *memory = nullptr;
  if (posix_memalign(&memory, 16, nbytes ? nbytes : 1) != 0)
    abort();
  make_undefined(memory, nbytes);
  return memory;
}

static void private_free(void *memory) {
  const Unseen unseen;
  free(memory);
}

void *shared_memory(const void *tag, size_t nbytes) {
  Engine *e = engine();
  for (const SharedPiece &piece : e->shared)
    if (piece.tag == tag)
      return piece.memory;
  const Unseen unseen;
  e->shared.push_back({tag, private_memory(nbytes)});
  return e->shared.back().memory;
}

void *dynamic_shared_memory() {
  Engine *e = engine();
  if (!e->dynamic)
    e->dynamic = private_memory(e->dynamic_nbytes);
  return e->dynamic;
}

// --- waiting ---------------------------------------------------------------------------------------------------------------------------------------

__attribute__((noinline)) void block_barrier() {
  Engine *e = engine();
  Fibre *fibre = e->current;
  fibre->where = __builtin_return_address(0);
  if (e->n_live != e->block.size())
    trap("__syncthreads after other threads have exited");
  release(&e->order[0]);
  fibre->state = State::at_barrier;
  if (++e->n_at_barrier < e->n_live) {
    run_next(e);
  } else {
    e->n_at_barrier = 0;
    for (Fibre *other : e->block)
      if (other != fibre)
        wake(e, other);
    fibre->state = State::ready;
  }
  acquire(&e->order[0]);
}

static float bf16_half(uint32_t word, unsigned half) {
  return __uint_as_float((half ? word >> 16 : word) << 16);
}

// The fragment layout is that of the PTX manual's m16n8k16: group g = lane / 4 and t = lane % 4 hold rows g, g + 8 and columns 2t, 2t + 1 (+ 8).
static void multiply_tiles(Fibre *const *lanes) {
  float a[16][16], b[16][8];
  for (unsigned l = 0; l < kWarp; l++) {
    const MmaPayload *payload = static_cast<const MmaPayload *>(lanes[l]->payload);
    const unsigned g = l / 4, t = l % 4;
    for (unsigned half = 0; half < 2; half++) {
      for (unsigned i = 0; i < 4; i++)
        a[g + i % 2 * 8][2 * t + half + i / 2 * 8] = bf16_half(payload->a[i], half);
      for (unsigned i = 0; i < 2; i++)
        b[2 * t + half + i * 8][g] = bf16_half(payload->b[i], half);
    }
  }
  for (unsigned l = 0; l < kWarp; l++) {
    MmaPayload *payload = static_cast<MmaPayload *>(lanes[l]->payload);
    for (unsigned i = 0; i < 4; i++) {
      const unsigned row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
      float sum = payload->d[i];
      for (unsigned k = 0; k < 16; k++)
        sum += a[row][k] * b[k][col];
      payload->d[i] = sum;
    }
  }
}

static void compute_warp_op(WarpOp op, uint32_t mask, Fibre *const *lanes) {
  const Unseen unseen;  // the lanes' payloads are on their stacks; memcpy would count as the kernel's own access
  if (op == WarpOp::shuffle) {
    for (unsigned l = 0; l < kWarp; l++) {
      if (!(mask >> l & 1))
        continue;
      ShufflePayload *payload = static_cast<ShufflePayload *>(lanes[l]->payload);
      if (payload->source >= kWarp || !(mask >> payload->source & 1))
        trap("a shuffle reads a lane that is not in the mask");
      memcpy(payload->out, static_cast<ShufflePayload *>(lanes[payload->source]->payload)->in, payload->nbytes);
    }
  } else if (op == WarpOp::ballot) {
    uint32_t votes = 0;
    for (unsigned l = 0; l < kWarp; l++)
      if (mask >> l & 1)
        votes |= (*static_cast<uint32_t *>(lanes[l]->payload) & 1) << l;
    for (unsigned l = 0; l < kWarp; l++)
      if (mask >> l & 1)
        *static_cast<uint32_t *>(lanes[l]->payload) = votes;
  } else if (op == WarpOp::gather) {
    if (mask != ~0u)
      trap("a gather needs all 32 lanes");
    for (unsigned l = 0; l < kWarp; l++)
      for (unsigned from = 0; from < kWarp; from++)
        static_cast<GatherPayload *>(lanes[l]->payload)->out[from] = static_cast<GatherPayload *>(lanes[from]->payload)->in;
  } else if (op == WarpOp::mma) {
    if (mask != ~0u)
      trap("mma needs all 32 lanes");
    multiply_tiles(lanes);
  }
}

__attribute__((noinline)) void warp_op(uint32_t mask, WarpOp op, void *payload) {
  Engine *e = engine();
  Fibre *fibre = e->current;
  const unsigned warp = fibre->number / kWarp, lane_number = fibre->number % kWarp;
  Fibre *const *lanes = &e->block[warp * kWarp];
  const size_t n_lanes = e->block.size() - warp * kWarp;
  if (!(mask >> lane_number & 1))
    trap("a lane is not in its own mask");
  if (n_lanes < kWarp && mask >> n_lanes)
    trap("a mask names lanes that the block does not have");
  fibre->where = __builtin_return_address(0);
  fibre->mask = mask;
  fibre->op = op;
  fibre->payload = payload;
  fibre->state = State::in_warp_op;
  if (op == WarpOp::sync)
    release(&e->order[1 + warp]);
  bool complete = true;
  for (unsigned l = kWarp; l-- > 0 && complete;)  // from the top: lanes mostly come in ascending order
    if (mask >> l & 1)
      complete = lanes[l]->state == State::in_warp_op && lanes[l]->mask == mask && lanes[l]->op == op;
  if (!complete) {
    run_next(e);
  } else {
    compute_warp_op(op, mask, lanes);
    for (unsigned l = 0; l < kWarp; l++)
      if (mask >> l & 1 && lanes[l] != fibre)
        wake(e, lanes[l]);
    fibre->state = State::ready;
  }
  if (op == WarpOp::sync)  // shuffles and votes order no memory
    acquire(&e->order[1 + warp]);
}

__attribute__((noinline)) void poll(const char *what) {
  Engine *e = engine();
  Fibre *fibre = e->current;
  fibre->what = what;
  fibre->where = __builtin_return_address(0);
  if (++e->n_polls % 256 == 0) {
    sched_yield();
    const double time = now();
    if (e->deadline == 0) {
      e->deadline = time + settings().timeout_seconds;
    } else if (time > e->deadline) {
      for (Fibre *other : e->block)
        if (other->state == State::ready)
          other->state = State::polling;
      e->timed_out = true;
      jump(e, &e->host);
    }
  }
  wake(e, fibre);
  run_next(e);
}

void wait_for_kernels() {
  engine()->current->has_waited = true;
}

// --- copies ----------------------------------------------------------------------------------------------------------------------------------------

void queue_copy(void *shared, const void *global) {
  const Unseen unseen;
  engine()->current->copies.push_back({shared, global});
}

bool next_copy(void **shared, const void **global) {
  const Unseen unseen;
  Fibre *fibre = engine()->current;
  if (fibre->n_copied == fibre->copies.size()) {
    fibre->copies.clear();
    fibre->n_copied = 0;
    return false;
  }
  *shared = fibre->copies[fibre->n_copied].shared;
  *global = fibre->copies[fibre->n_copied++].global;
  return true;
}

// --- fences ----------------------------------------------------------------------------------------------------------------------------------------
// TSan ignores fences. By the rules of PTX and C++ alike, an atomic after a fence releases, and a fence after an atomic acquires; so the atomic's
// address carries the edge.

void fence() {
  Fibre *fibre = engine()->current;
  fibre->fenced = true;
  for (const void *address : fibre->since_fence)
    acquire(const_cast<void *>(address));
  fibre->since_fence.clear();
}

void before_atomic(const void *address) {
  if (engine()->current->fenced)
    release(const_cast<void *>(address));
}

void after_atomic(const void *address) {
#if defined(SIM_TSAN)
  const Unseen unseen;
  engine()->current->since_fence.push_back(address);
#else
  (void)address;
#endif
}

// --- a grid ----------------------------------------------------------------------------------------------------------------------------------------

static void report(Engine *e, const void *kernel) {
  char text[sizeof e->error], name[256];
  describe_address(kernel, "%f", name, sizeof name);
  size_t used = static_cast<size_t>(snprintf(text, sizeof text, "cuda_sim: %s in %s, block (%u,%u,%u)\n",
                                             e->timed_out ? "a wait timed out" : "deadlock", name, blockIdx.x, blockIdx.y, blockIdx.z));
  static const char *const names[] = {"ready", "waits in a warp operation", "waits at a barrier", "polls", "has exited"};
  for (size_t first = 0, last; first < e->block.size() && used < sizeof text - 512; first = last) {
    const Fibre *fibre = e->block[first];
    for (last = first; last < e->block.size() && e->block[last]->state == fibre->state && e->block[last]->where == fibre->where;)
      last++;
    char where[256] = "";
    if (fibre->state != State::done && fibre->where)
      describe_address(static_cast<const char *>(fibre->where) - 1, "%f %S", where, sizeof where);
    used +=
        static_cast<size_t>(snprintf(text + used, sizeof text - used, "  threads %zu-%zu: %s %s %s\n", first, last - 1,
                                     names[static_cast<int>(fibre->state)], fibre->state == State::polling && fibre->what ? fibre->what : "", where));
  }
  fail(e, text);
}

static void queue_threads(Engine *e, uint64_t *random) {
  const Unseen unseen;
  std::vector<Fibre *> order(e->block);
  if (settings().seed != 0) {
    for (size_t i = order.size(); i > 1; i--) {
      *random = *random * 6364136223846793005u + 1442695040888963407u;
      std::swap(order[i - 1], order[(*random >> 33) % i]);
    }
  }
  for (Fibre *fibre : order)
    wake(e, fibre);
}

// The fibres of a block that was given up are started anew; nothing on their stacks is unwound.
static void abandon(Engine *e) {
  for (Fibre *fibre : e->block) {
#if defined(SIM_TSAN)
    __tsan_switch_to_fiber(fibre->race_fibre, 1);
    release(&e->grid_end);
    __tsan_switch_to_fiber(e->host.race_fibre, 1);
    __tsan_destroy_fiber(fibre->race_fibre);
    fibre->race_fibre = __tsan_create_fiber(0);
#endif
    prepare(fibre);
  }
}

static void run_block(Engine *e, size_t set, const void *kernel, uint64_t *random) {
  const size_t n_threads = static_cast<size_t>(blockDim.x) * blockDim.y * blockDim.z;
  e->ring.resize(n_threads);
  e->ring_head = e->n_ready = 0;
  e->n_live = n_threads;
  e->n_at_barrier = 0;
  e->deadline = 0;
  const size_t n_orders = 1 + (n_threads + kWarp - 1) / kWarp;
  e->order = static_cast<uint64_t *>(private_memory(n_orders * sizeof *e->order));
  e->block.resize(n_threads);
  for (unsigned i = 0; i < n_threads; i++) {
    Fibre *fibre = &e->fibres[set][i];
    e->block[i] = fibre;
    fibre->number = i;
    fibre->fenced = false;
    fibre->has_waited = false;
    fibre->since_fence.clear();
    fibre->index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  }
  queue_threads(e, random);
  run_next(e);  // comes back when no fibre can run
  if (e->n_live > 0 || e->error[0]) {
    if (!e->error[0])
      report(e, kernel);
    abandon(e);
  }
  private_free(e->order);
  for (const SharedPiece &piece : e->shared)
    private_free(piece.memory);
  e->shared.clear();
  if (e->dynamic)
    private_free(e->dynamic);
  e->dynamic = nullptr;
}

static void find_own_stack(Fibre *host) {
  pthread_attr_t attributes;
  void *lowest;
  size_t nbytes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &lowest, &nbytes);
  pthread_attr_destroy(&attributes);
  host->stack = static_cast<unsigned char *>(lowest);
  host->stack_nbytes = nbytes;
#if defined(SIM_TSAN)
  host->race_fibre = __tsan_get_current_fiber();
#endif
}

cudaError_t run_grid(const cudaLaunchConfig_t &config, bool overlaps, const void *kernel, const std::function<void()> &body) {
  Engine *e = engine();
  const dim3 grid = config.gridDim, block = config.blockDim;
  const size_t n_threads = static_cast<size_t>(block.x) * block.y * block.z, n_blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
  if (!e->host.stack)
    find_own_stack(&e->host);
  for (std::deque<Fibre> &set : e->fibres) {
    while (set.size() < n_threads) {
      set.emplace_back();
      prepare(&set.back());
    }
  }
  e->current = &e->host;
  e->body = &body;
  e->dynamic_nbytes = config.dynamicSmemBytes;
  e->may_overlap = overlaps;
  e->error[0] = 0;
  e->timed_out = false;
  blockDim = block;
  gridDim = grid;
  release(&e->grid_begin);
  uint64_t random = settings().seed;
  for (size_t i = 0; i < n_blocks && !e->error[0]; i++) {
    const size_t at = settings().seed % 2 ? n_blocks - 1 - i : i;
    blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y), static_cast<unsigned>(at / grid.x / grid.y)};
    run_block(e, i % kSets, kernel, &random);
  }
  acquire(&e->grid_end);
  if (!e->error[0])
    return cudaSuccess;
  fputs(e->error, stderr);
  return cudaErrorLaunchFailure;
}

}  // namespace cuda_sim
