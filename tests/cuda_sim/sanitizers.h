// The sanitizers' interfaces to fibres and memory, behind one set of names that are no-ops in a plain build.
#pragma once
#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIM_ASAN 1
#endif
#if __has_feature(memory_sanitizer)
#define SIM_MSAN 1
#endif
#endif
// TSan must not see the simulator's own bookkeeping, so this side is compiled without it and told by SIM_TSAN that it is linked.

#if defined(SIM_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIM_MSAN)
#include <sanitizer/msan_interface.h>
#endif
#if defined(SIM_TSAN)
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fibre);
void __tsan_switch_to_fiber(void *fibre, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
}
#endif
#if defined(SIM_ASAN) || defined(SIM_MSAN) || defined(SIM_TSAN)
#define SIM_SYMBOLIZER 1
extern "C" void __sanitizer_symbolize_pc(void *pc, const char *format, char *out, size_t nbytes);
#endif

namespace cuda_sim {

inline void acquire(void *address) {
  (void)address;
#if defined(SIM_TSAN)
  __tsan_acquire(address);
#endif
}

inline void release(void *address) {
  (void)address;
#if defined(SIM_TSAN)
  __tsan_release(address);
#endif
}

// What happens to memory in here starts its history anew for TSan: reuse by another block is then no race.
struct Unseen {
#if defined(SIM_TSAN)
  Unseen() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Unseen() {
  }
  ~Unseen() {
  }
#endif
};

// Memory whose content is not to be relied on: NaN bytes, or poison under MSan.
void make_undefined(void *bytes, size_t nbytes);

}  // namespace cuda_sim
