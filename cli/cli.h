// The frame of every verb: options, messages, findings, JSON and progress. Results go to stdout (plain printf; main checks that they arrived),
// everything else to stderr. A verb looks like this:
//
//   int k3_cmd_verify(struct k3_cli *cli, int argc, char **argv) {
//     const char *source = NULL;
//     const struct k3_option options[] = {{"source", 0, K3_OPT_TEXT, "SRC", "compare with this checkpoint too", &source}, {0}};
//     static const struct k3_cli_help help = {.operands = "IMAGE", .n_min = 1, .n_max = 1, .about = "...", .examples = "..."};
//     int exit_code;
//     if (!k3_cli_parse(cli, argc, argv, &help, options, &exit_code))
//       return exit_code;
//     struct k3_error err = {0};
//     if (k3_verify(cli->operands[0], source, cli->n_threads, &cli->progress, &err) != K3_OK)
//       return k3_cli_fail(cli, &err);
//     ...
//   }
// and has its line in cli/verbs.h.
#ifndef K3_CLI_CLI_H
#define K3_CLI_CLI_H

#include <stdbool.h>
#include <stdint.h>

#include "base/findings.h"
#include "base/progress.h"
#include "formats/json_write.h"

struct k3_cli {
  const char *verb;           // "convert"
  bool json, quiet, verbose;  // --json, --quiet, --verbose
  int n_threads;              // --threads; 0: one per CPU
  char **operands;            // [n_operands], what is left of argv
  size_t n_operands;
  struct k3_progress progress;  // hand &cli->progress to the library; it draws what --quiet and the terminal allow

  // The frame's own:
  bool color;  // of stderr
  bool json_begun;
  struct k3_cli_list *lists[8];
  size_t n_lists;
};

// FLAG: bool. TEXT: const char *. U64: uint64_t. REAL: double, finite. CHOICE: int, the index in `argument`, whose words are separated by '|'.
// LIST: struct k3_cli_list, every occurrence adds one text. The variables hold their defaults before k3_cli_parse; the last occurrence wins.
enum k3_option_kind { K3_OPT_FLAG, K3_OPT_TEXT, K3_OPT_U64, K3_OPT_REAL, K3_OPT_CHOICE, K3_OPT_LIST };

struct k3_cli_list {
  const char **items;  // [n_items]; owned by the frame
  size_t n_items;
};

struct k3_option {
  const char *name;  // "output" for --output; NULL ends the table
  char short_name;   // 'o' for -o; 0: none
  enum k3_option_kind kind;
  const char *argument;  // "IMAGE", or "keep|fp8"; NULL for a flag
  const char *help;      // one or two sentences; wrapped when printed
  void *value;           // the variable
};

struct k3_cli_help {
  const char *operands;  // "SRC -o IMAGE"
  size_t n_min, n_max;   // number of operands
  const char *about;     // what the verb does, a few wrapped lines
  const char *examples;  // lines of the form "  k3pack convert ..."
};

// Parses argv (argv[0] is the verb): --name VALUE, --name=VALUE, -nVALUE, options and operands in any order, "--" ends the options. --help, --json,
// --quiet, --verbose and --threads belong to every verb. False: nothing is left to do, the verb returns *exit_code (0 after --help, 2 after a
// message about wrong usage).
bool k3_cli_parse(struct k3_cli *cli, int argc, char **argv, const struct k3_cli_help *help, const struct k3_option *options, int *exit_code);

// The word among `words` (separated by '|') that `typed` was probably meant to be, or NULL when none is close. dst holds it.
const char *k3_cli_suggest(const char *typed, const char *words, char *dst, size_t capacity);

// Prints "k3pack VERB: error: [RULE] file: tensor: found; allowed: ..." and returns the exit code of err->status. Under --json, when no JSON was
// begun, stdout gets {"ok": false, "error": {...}}. An empty error prints nothing and returns 0.
int k3_cli_fail(struct k3_cli *cli, const struct k3_error *err);
// The same for wrong usage: prints the message and where the help is; returns 2. Under --json likewise, with the message as "found".
int k3_cli_usage(struct k3_cli *cli, const char *format, ...) K3_PRINTF(2, 3);
// Reads a decimal number at `text` and returns what follows it; NULL when no digit is there.
const char *k3_cli_number(const char *text, uint64_t *value);
// "0,2,4" into values [max]: different numbers, at most max of them. text NULL: none. False when it is something else.
bool k3_cli_numbers(const char *text, uint64_t *values, size_t max, size_t *n);
// A line on stderr: a warning or a note, unless --quiet; a detail, only with --verbose. Texts from files pass k3_printable first.
void k3_cli_warn(struct k3_cli *cli, const char *format, ...) K3_PRINTF(2, 3);
void k3_cli_note(struct k3_cli *cli, const char *format, ...) K3_PRINTF(2, 3);
void k3_cli_detail(struct k3_cli *cli, const char *format, ...) K3_PRINTF(2, 3);

// Prints findings to stderr, grouped by rule, errors first: the first three of each rule and a count (all that were kept with --verbose). --quiet
// leaves the errors; notes (K3_INFO) are only counted unless --verbose.
void k3_cli_print_findings(struct k3_cli *cli, const struct k3_findings *findings);
// Adds "errors", "warnings", "findings": [{severity, rule, file, tensor, found, allowed, remedy}] and "counts": {rule: n} to the object being written.
void k3_cli_json_findings(struct k3_jsonw *writer, const struct k3_findings *findings);
// Adds the members of one error to the object being written.
void k3_cli_json_error(struct k3_jsonw *writer, const struct k3_error *err);

// One JSON value on stdout: begin opens the top object, end closes it. End returns `exit_code`, or 4 after a message when writing failed.
void k3_cli_json_begin(struct k3_cli *cli, struct k3_jsonw *writer);
int k3_cli_json_end(struct k3_cli *cli, struct k3_jsonw *writer, int exit_code);

// A name from an input as it may be printed: hostile characters escaped, above 200 bytes shortened with its length. In dst, which it returns.
char *k3_cli_name_text(char dst[512], const char *name);
// "7.12 GB" (decimal units; plain bytes below 1000) in dst, which it returns.
char *k3_cli_size_text(char dst[32], uint64_t nbytes);

// For main: prepares the struct, --json included, since what is wrong with the words before it must be said as JSON too; flushes stdout, frees, and returns exit_code, or 4 after a message when output was lost.
void k3_cli_start(struct k3_cli *cli, const char *verb, int argc, char **argv);
int k3_cli_finish(struct k3_cli *cli, int exit_code);

#endif
