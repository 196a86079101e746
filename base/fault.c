#include "base/fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

enum { MAX_MAPPINGS = 160, MAX_OUTPUTS = 160, PATH_NBYTES = 1024 };

// A signal handler can take no lock, so a slot is claimed and given back by one atomic, and holds its texts itself.
enum slot_state { FREE, CHANGING, WATCHED };

static struct mapping_slot {
  atomic_int state;
  uintptr_t begin, end;
  char shown[400];
} mappings[MAX_MAPPINGS];

static struct output_slot {
  atomic_int state;
  char path[PATH_NBYTES];
} outputs[MAX_OUTPUTS];

static const char *program_name = "";

static bool claim(atomic_int *state) {
  int expected = FREE;
  return atomic_compare_exchange_strong(state, &expected, CHANGING);
}

void k3_fault_watch_mapping(const void *data, uint64_t nbytes, const char *path) {
  for (int i = 0; i < MAX_MAPPINGS; i++) {
    struct mapping_slot *slot = &mappings[i];
    if (!claim(&slot->state))
      continue;
    slot->begin = (uintptr_t)data;
    slot->end = slot->begin + nbytes;
    k3_printable(slot->shown, sizeof slot->shown, path, strlen(path), 200);
    atomic_store(&slot->state, WATCHED);
    return;
  }
}

void k3_fault_forget_mapping(const void *data) {
  for (int i = 0; i < MAX_MAPPINGS; i++) {
    if (atomic_load(&mappings[i].state) == WATCHED && mappings[i].begin == (uintptr_t)data) {
      atomic_store(&mappings[i].state, FREE);
      return;
    }
  }
}

void k3_fault_watch_output(const char *temp_path) {
  for (int i = 0; strlen(temp_path) < PATH_NBYTES && i < MAX_OUTPUTS; i++) {
    if (!claim(&outputs[i].state))
      continue;
    strcpy(outputs[i].path, temp_path);
    atomic_store(&outputs[i].state, WATCHED);
    return;
  }
}

void k3_fault_forget_output(const char *temp_path) {
  for (int i = 0; i < MAX_OUTPUTS; i++) {
    if (atomic_load(&outputs[i].state) == WATCHED && strcmp(outputs[i].path, temp_path) == 0) {
      atomic_store(&outputs[i].state, FREE);
      return;
    }
  }
}

static void say(const char *text) {
  for (size_t n = strlen(text); n > 0;) {
    ssize_t written = write(STDERR_FILENO, text, n);
    if (written <= 0)
      return;
    text += written;
    n -= (size_t)written;
  }
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
  (void)context;
  const struct mapping_slot *hit = NULL;
  for (int i = 0; i < MAX_MAPPINGS && !hit; i++) {
    uintptr_t at = (uintptr_t)info->si_addr;
    if (atomic_load(&mappings[i].state) == WATCHED && at >= mappings[i].begin && at < mappings[i].end)
      hit = &mappings[i];
  }
  if (!hit) {
    signal(number, SIG_DFL);  // the access is repeated and crashes, as it should
    return;
  }
  for (int i = 0; i < MAX_OUTPUTS; i++) {
    if (atomic_load(&outputs[i].state) == WATCHED)
      unlink(outputs[i].path);
  }
  say(program_name);
  say(": error: ");
  say(hit->shown);
  say(": the file was cut short while it was read, or its disk failed (allowed: a file that nobody writes to meanwhile)\n");
  _exit(k3_status_exit_code(K3_IO));
}

void k3_fault_install(const char *program) {
  struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
  program_name = program;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, NULL);
}
