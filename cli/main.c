#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "cli/verbs.h"

#define K3_VERB_ENTRY(name, summary) {#name, summary, k3_cmd_##name},
const struct k3_verb k3_verbs[] = {K3_VERBS(K3_VERB_ENTRY)};
#undef K3_VERB_ENTRY
const size_t k3_n_verbs = sizeof k3_verbs / sizeof k3_verbs[0];

// A closed standard stream is opened on /dev/null, the wrong way round, so that no output file can get its number and every use of it fails.
static void occupy_standard_streams(void) {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
      return;
}

static int unknown_verb(struct k3_cli *cli, const char *typed) {
  char words[512], guess[64], shown[256];
  size_t n = 0;
  for (size_t i = 0; i < k3_n_verbs && n < sizeof words; i++)
    n += (size_t)snprintf(words + n, sizeof words - n, "%s%s", i ? "|" : "", k3_verbs[i].name);
  k3_printable(shown, sizeof shown, typed, strlen(typed), 60);
  const char *kind = *typed == '-' ? "option" : "verb";
  typed += strspn(typed, "-");
  if (k3_cli_suggest(typed, words, guess, sizeof guess))
    return k3_cli_usage(cli, "unknown %s %s; did you mean %s?", kind, shown, guess);
  return k3_cli_usage(cli, "unknown %s %s", kind, shown);
}

int main(int argc, char **argv) {
  occupy_standard_streams();
  k3_fault_install("k3pack");  // a mapped file that shrinks is a failed read: exit code 4
  signal(SIGXFSZ, SIG_IGN);  // a file beyond the size limit is a failed write: exit code 4, output untouched
  signal(SIGPIPE, SIG_IGN);  // a closed pipe is a failed write like any other: exit code 4
  struct k3_cli cli;
  char *help_words[] = {(char[]){"help"}, NULL};
  const char *verb = argc > 1 ? argv[1] : "";
  if (strcmp(verb, "--help") == 0 || strcmp(verb, "-h") == 0)
    verb = "help";
  else if (strcmp(verb, "--version") == 0 || strcmp(verb, "-V") == 0)
    verb = "version";
  for (size_t i = 0; i < k3_n_verbs; i++) {
    if (strcmp(verb, k3_verbs[i].name) != 0)
      continue;
    k3_cli_start(&cli, k3_verbs[i].name, argc, argv);
    return k3_cli_finish(&cli, k3_verbs[i].run(&cli, argc - 1, argv + 1));
  }
  k3_cli_start(&cli, "", argc, argv);
  if (argc > 1)
    return k3_cli_finish(&cli, unknown_verb(&cli, verb));
  // Without a word: the list of verbs, where it is not mistaken for a result, and the code for wrong usage.
  if (dup2(STDERR_FILENO, STDOUT_FILENO) == STDOUT_FILENO)
    k3_cmd_help(&cli, 1, help_words);
  k3_cli_finish(&cli, 0);
  return k3_status_exit_code(K3_BAD_ARGUMENT);
}
