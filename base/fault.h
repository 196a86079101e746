// Mapped files that are cut, or whose disk fails, while they are read: the kernel then sends SIGBUS where a read would have failed. A program (not a
// library, which leaves signals to its host) turns it into an error message that names the file, removes unfinished outputs and ends.
#ifndef K3_BASE_FAULT_H
#define K3_BASE_FAULT_H

#include <stdint.h>

// Ends the process with the exit code of K3_IO on a fault within a watched mapping, with one message on stderr; any other SIGBUS stays a crash.
//   program  in front of the message; outlives the process
void k3_fault_install(const char *program);

// For base/file.c. What does not fit the table is not watched: a fault is then a crash, an output stays until the next run takes it over.
void k3_fault_watch_mapping(const void *data, uint64_t nbytes, const char *path);
void k3_fault_forget_mapping(const void *data);
void k3_fault_watch_output(const char *temp_path);
void k3_fault_forget_output(const char *temp_path);

#endif
