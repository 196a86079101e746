#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rules_advice.h"
#include "cli/cli.h"

enum { FINDINGS_SHOWN_PER_RULE = 3, PLAIN_LINE_SECONDS = 10 };

// The progress line. The library calls back from any thread, so what is on the screen is guarded.
static struct {
  pthread_mutex_t mutex;
  bool terminal, drawn;
  double begin, last_line;
  const char *what;
} screen = {.mutex = PTHREAD_MUTEX_INITIALIZER};

// With the mutex held.
static void clear_line(void) {
  if (screen.drawn)
    fputs("\r\033[K", stderr);
  screen.drawn = false;
}

static void draw_progress(void *ctx, const char *what, uint64_t done, uint64_t total) {
  (void)ctx;
  double now = k3_clock();
  pthread_mutex_lock(&screen.mutex);
  if (screen.what != what) {
    screen.what = what;
    screen.begin = screen.last_line = now;
  }
  double seconds = now - screen.begin, share = total ? (double)done / (double)total : 1;
  char left[32] = "", of[32], n_done[32];
  if (done < total && done > 0 && seconds > 1)
    snprintf(left, sizeof left, ", %.0f s left", seconds / share - seconds);
  k3_cli_size_text(n_done, done);
  k3_cli_size_text(of, total);
  if (screen.terminal) {
    clear_line();
    if (done < total) {
      fprintf(stderr, "%s: %3.0f%%  %s of %s%s", what, 100 * share, n_done, of, left);
      screen.drawn = true;
    }
    fflush(stderr);
  } else if (now - screen.last_line >= PLAIN_LINE_SECONDS) {
    screen.last_line = now;
    fprintf(stderr, "%s: %.0f%%, %s of %s%s\n", what, 100 * share, n_done, of, left);
  }
  pthread_mutex_unlock(&screen.mutex);
}

// One line on stderr in one piece, the progress line out of its way.
static void say(const struct k3_cli *cli, const char *color, const char *kind, const char *text) {
  char safe[4096];
  k3_printable(safe, sizeof safe, text, strlen(text), sizeof safe);  // operands of the command line are in it too
  pthread_mutex_lock(&screen.mutex);
  clear_line();
  fprintf(stderr, "k3pack%s%s: %s%s%s%s\n", *cli->verb ? " " : "", cli->verb, cli->color ? color : "", kind, cli->color && *kind ? "\033[0m" : "",
          safe);
  pthread_mutex_unlock(&screen.mutex);
}

#define SAY(cli, color, kind, format)                          \
  do {                                                         \
    char say_text_[2048];                                      \
    va_list say_args_;                                         \
    va_start(say_args_, format);                               \
    vsnprintf(say_text_, sizeof say_text_, format, say_args_); \
    va_end(say_args_);                                         \
    say(cli, color, kind, say_text_);                          \
  } while (0)

void k3_cli_warn(struct k3_cli *cli, const char *format, ...) {
  if (!cli->quiet)
    SAY(cli, "\033[33m", "warning: ", format);
}

void k3_cli_note(struct k3_cli *cli, const char *format, ...) {
  if (!cli->quiet)
    SAY(cli, "", "", format);
}

void k3_cli_detail(struct k3_cli *cli, const char *format, ...) {
  if (cli->verbose)
    SAY(cli, "", "", format);
}

void k3_cli_json_error(struct k3_jsonw *writer, const struct k3_error *err) {
  if (err->rule != K3_RULE_NONE)
    k3_jsonw_string(writer, "rule", k3_rule_info(err->rule)->id);
  if (*err->file)
    k3_jsonw_string(writer, "file", err->file);
  if (*err->tensor)
    k3_jsonw_string(writer, "tensor", err->tensor);
  k3_jsonw_string(writer, "found", err->found);
  if (*err->allowed)
    k3_jsonw_string(writer, "allowed", err->allowed);
}

// {"ok": false, "error": {...}} under --json, unless something was written already.
static int json_failure(struct k3_cli *cli, const struct k3_error *err) {
  int exit_code = k3_status_exit_code(err->status);
  if (!cli->json || cli->json_begun)
    return exit_code;
  struct k3_jsonw writer;
  k3_cli_json_begin(cli, &writer);
  k3_jsonw_bool(&writer, "ok", false);
  k3_jsonw_begin_object(&writer, "error");
  k3_jsonw_string(&writer, "status", k3_status_name(err->status));
  k3_cli_json_error(&writer, err);
  k3_jsonw_end_object(&writer);
  return k3_cli_json_end(cli, &writer, exit_code);
}

int k3_cli_fail(struct k3_cli *cli, const struct k3_error *err) {
  if (err->status == K3_OK)
    return k3_status_exit_code(K3_OK);
  char text[sizeof err->file + sizeof err->tensor + sizeof err->found + sizeof err->allowed + 64];
  say(cli, "\033[31m", "error: ", k3_error_text(err, text, sizeof text));
  return json_failure(cli, err);
}

int k3_cli_usage(struct k3_cli *cli, const char *format, ...) {
  struct k3_error err = {.status = K3_BAD_ARGUMENT};
  va_list args;
  va_start(args, format);
  vsnprintf(err.found, sizeof err.found, format, args);
  va_end(args);
  SAY(cli, "\033[31m", "error: ", format);
  fprintf(stderr, "`k3pack %s%s--help` explains.\n", cli->verb, *cli->verb ? " " : "");
  return json_failure(cli, &err);
}

static void print_rule(const struct k3_cli *cli, const struct k3_findings *findings, const struct k3_finding *first) {
  enum k3_rule rule = first->error.rule;
  const char *severity = k3_severity_name(first->severity), *color = first->severity == K3_ERROR ? "\033[31m" : "\033[33m";
  uint64_t n = findings->n_by_rule[rule], n_shown = 0;
  bool colored = cli->color && first->severity != K3_INFO;
  fprintf(stderr, "%s%s%s %s: %s", colored ? color : "", severity, colored ? "\033[0m" : "", k3_rule_info(rule)->id, k3_rule_info(rule)->summary);
  if (n > 1)
    fprintf(stderr, " (%llu times)", (unsigned long long)n);
  fputc('\n', stderr);
  uint64_t n_wanted = cli->verbose ? K3_FINDINGS_KEPT_PER_RULE : FINDINGS_SHOWN_PER_RULE;
  for (const struct k3_finding *item = first; item < findings->items + findings->n_items && n_shown < n_wanted; item++) {
    if (item->error.rule != rule || item->severity != first->severity)
      continue;
    struct k3_error error = item->error;
    error.rule = K3_RULE_NONE;  // the heading has it
    char text[sizeof error.file + sizeof error.tensor + sizeof error.found + sizeof error.allowed + 64];
    fprintf(stderr, "  %s\n", k3_error_text(&error, text, sizeof text));
    n_shown++;
  }
  if (n > n_shown)
    fprintf(stderr, "  ... and %llu more%s\n", (unsigned long long)(n - n_shown), cli->verbose ? "" : " (--verbose shows the first 20)");
  if (first->severity != K3_INFO && k3_rule_advice(rule)->remedy[0])
    fprintf(stderr, "  what to do: %s\n", k3_rule_advice(rule)->remedy);
}

void k3_cli_print_findings(struct k3_cli *cli, const struct k3_findings *findings) {
  uint64_t n_notes = 0;
  pthread_mutex_lock(&screen.mutex);
  clear_line();
  for (int severity = K3_ERROR; severity >= K3_INFO; severity--) {
    bool shown = severity == K3_ERROR || (severity == K3_WARNING && !cli->quiet) || cli->verbose;
    bool printed[K3_RULE_COUNT] = {false};
    for (size_t i = 0; i < findings->n_items; i++) {
      const struct k3_finding *item = &findings->items[i];
      n_notes += item->severity == K3_INFO && severity == K3_INFO;
      if (!shown || (int)item->severity != severity || printed[item->error.rule])
        continue;
      printed[item->error.rule] = true;
      print_rule(cli, findings, item);
    }
  }
  if (n_notes > 0 && !cli->verbose && !cli->quiet)
    fprintf(stderr, "%llu note%s (--verbose shows them)\n", (unsigned long long)n_notes, n_notes == 1 ? "" : "s");
  if (findings->out_of_memory)
    fprintf(stderr, "memory ran out: not every finding could be kept\n");
  pthread_mutex_unlock(&screen.mutex);
}

void k3_cli_json_findings(struct k3_jsonw *writer, const struct k3_findings *findings) {
  k3_jsonw_u64(writer, "errors", findings->n_errors);
  k3_jsonw_u64(writer, "warnings", findings->n_warnings);
  k3_jsonw_begin_object(writer, "counts");
  for (int rule = K3_RULE_NONE + 1; rule < K3_RULE_COUNT; rule++)
    if (findings->n_by_rule[rule] > 0)
      k3_jsonw_u64(writer, k3_rule_info((enum k3_rule)rule)->id, findings->n_by_rule[rule]);
  k3_jsonw_end_object(writer);
  k3_jsonw_begin_array(writer, "findings");
  for (size_t i = 0; i < findings->n_items; i++) {
    k3_jsonw_begin_object(writer, NULL);
    k3_jsonw_string(writer, "severity", k3_severity_name(findings->items[i].severity));
    k3_cli_json_error(writer, &findings->items[i].error);
    if (k3_rule_advice(findings->items[i].error.rule)->remedy[0])
      k3_jsonw_string(writer, "remedy", k3_rule_advice(findings->items[i].error.rule)->remedy);
    k3_jsonw_end_object(writer);
  }
  k3_jsonw_end_array(writer);
}

static enum k3_status write_stdout(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  (void)ctx;
  if (fwrite(bytes, 1, nbytes, stdout) == nbytes)
    return K3_OK;
  return k3_fail_errno(err, errno, "standard output", "cannot write");
}

void k3_cli_json_begin(struct k3_cli *cli, struct k3_jsonw *writer) {
  cli->json_begun = true;
  k3_jsonw_open(writer, true, write_stdout, NULL);
  k3_jsonw_begin_object(writer, NULL);
}

int k3_cli_json_end(struct k3_cli *cli, struct k3_jsonw *writer, int exit_code) {
  struct k3_error err = {0};
  k3_jsonw_end_object(writer);
  enum k3_status status = k3_jsonw_finish(writer, &err);
  k3_jsonw_close(writer);
  // What stdio could not write shows in k3_cli_finish, once.
  return status == K3_OK || ferror(stdout) ? exit_code : k3_cli_fail(cli, &err);
}

char *k3_cli_name_text(char dst[512], const char *name) {
  return k3_printable(dst, 512, name, strlen(name), 200);
}

char *k3_cli_size_text(char dst[32], uint64_t nbytes) {
  static const char units[] = "kMGTPE";
  if (nbytes < 1000) {
    snprintf(dst, 32, "%llu B", (unsigned long long)nbytes);
    return dst;
  }
  double value = (double)nbytes / 1000;
  int unit = 0;
  for (; value >= 999.995 && units[unit + 1]; unit++)
    value /= 1000;
  snprintf(dst, 32, "%.2f %cB", value, units[unit]);
  return dst;
}

void k3_cli_start(struct k3_cli *cli, const char *verb, int argc, char **argv) {
  *cli = (struct k3_cli){.verb = verb};
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    cli->json |= strcmp(argv[i], "--json") == 0;
  const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
  screen.terminal = isatty(STDERR_FILENO) && terminal && strcmp(terminal, "dumb") != 0;
  cli->color = screen.terminal && !(no_color && *no_color);
  cli->progress.fn = draw_progress;
}

int k3_cli_finish(struct k3_cli *cli, int exit_code) {
  pthread_mutex_lock(&screen.mutex);
  clear_line();
  pthread_mutex_unlock(&screen.mutex);
  errno = 0;
  if (fflush(stdout) != 0 || ferror(stdout)) {
    // Whoever closed the pipe (`| head`) has what it wanted; everyone else must hear of it. An earlier flush may have failed, so errno cannot tell.
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    bool broken_pipe = errno == EPIPE || (poll(&out, 1, 0) == 1 && (out.revents & POLLERR));
    if (!broken_pipe)
      fprintf(stderr, "k3pack %s: error: cannot write to standard output%s%s\n", cli->verb, errno ? ": " : "", errno ? strerror(errno) : "");
    exit_code = k3_status_exit_code(K3_IO);
  }
  for (size_t i = 0; i < cli->n_lists; i++)
    k3_free(cli->lists[i]->items);
  cli->n_lists = 0;
  return exit_code;
}
