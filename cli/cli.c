#include "cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum { HELP_COLUMN = 30, HELP_WIDTH = 110, MAX_THREADS = 1024, MAX_TYPED = 60 };

// What one call of k3_cli_parse works on.
struct parser {
  struct k3_cli *cli;
  int argc;
  char **argv;
  const struct k3_option *tables[2];  // the verb's options and those of every verb
};

static unsigned min3(unsigned a, unsigned b, unsigned c) {
  unsigned m = a < b ? a : b;
  return m < c ? m : c;
}

// How many slips turn one short word into the other: a letter too many, missing, wrong, or swapped with its neighbour. The larger length for long
// words, which no suggestion survives.
static unsigned edit_distance(const char *a, size_t n_a, const char *b, size_t n_b) {
  enum { MAX = 40 };
  if (n_a > MAX || n_b > MAX)
    return (unsigned)(n_a > n_b ? n_a : n_b);
  unsigned rows[3][MAX + 1];  // of i - 2, i - 1 and i, in turns
  for (unsigned j = 0; j <= n_b; j++)
    rows[0][j] = j;
  for (unsigned i = 1; i <= n_a; i++) {
    unsigned *row = rows[i % 3];
    const unsigned *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
    row[0] = i;
    for (unsigned j = 1; j <= n_b; j++) {
      row[j] = min3(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1]));
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && above2[j - 2] + 1 < row[j])
        row[j] = above2[j - 2] + 1;
    }
  }
  return rows[n_a % 3][n_b];
}

const char *k3_cli_suggest(const char *typed, const char *words, char *dst, size_t capacity) {
  size_t n_typed = strlen(typed);
  unsigned best = 3;  // two typing errors at most, and fewer than half of the letters
  const char *found = NULL;
  size_t n_found = 0;
  for (const char *word = words; *word; word += *word == '|') {
    size_t n = strcspn(word, "|");
    unsigned distance = edit_distance(typed, n_typed, word, n);
    bool prefix = n_typed >= 3 && n > n_typed && memcmp(typed, word, n_typed) == 0;
    if (prefix && best > 1)
      distance = 1;
    if (distance < best && (prefix || 2 * distance < n)) {
      best = distance;
      found = word;
      n_found = n;
    }
    word += n;
  }
  if (!found || n_found >= capacity)
    return NULL;
  memcpy(dst, found, n_found);
  dst[n_found] = '\0';
  return dst;
}

// Prints `text` wrapped, the first line going on at `column`, the others indented to it.
static void print_wrapped(const char *text, int column) {
  int at = column;
  for (const char *word = text; *word;) {
    int n = (int)strcspn(word, " ");
    if (at > column && at + 1 + n > HELP_WIDTH) {
      printf("\n%*s", column, "");
      at = column;
    } else if (at > column) {
      putchar(' ');
      at++;
    }
    printf("%.*s", n, word);
    at += n;
    word += n;
    word += strspn(word, " ");
  }
  putchar('\n');
}

static void print_option(const struct k3_option *option) {
  char left[160];
  int n;
  if (option->short_name)
    n = snprintf(left, sizeof left, "  -%c, --%s", option->short_name, option->name);
  else
    n = snprintf(left, sizeof left, "      --%s", option->name);
  if (option->argument)
    n += snprintf(left + n, sizeof left - (size_t)n, " %s", option->argument);
  if (n + 2 > HELP_COLUMN)
    printf("%s\n%*s", left, HELP_COLUMN, "");
  else
    printf("%-*s", HELP_COLUMN, left);
  print_wrapped(option->help, HELP_COLUMN);
}

static void print_help(const struct parser *parser, const struct k3_cli_help *help) {
  bool any = parser->tables[0]->name;
  printf("usage: k3pack %s%s%s%s\n\n%s\n", parser->cli->verb, *help->operands ? " " : "", help->operands, any ? " [options]" : "", help->about);
  if (help->examples)
    printf("\nexamples:\n%s\n", help->examples);
  for (int t = !any; t < 2; t++) {
    printf(t == 0 ? "\noptions:\n" : "\noptions of every verb:\n");
    for (const struct k3_option *option = parser->tables[t]; option->name; option++)
      print_option(option);
  }
}

// The option with this name (n bytes), or with this letter when name is NULL; NULL when there is none.
static const struct k3_option *find_option(const struct parser *parser, const char *name, size_t n, char letter) {
  for (int t = 0; t < 2; t++)
    for (const struct k3_option *option = parser->tables[t]; option->name; option++)
      if (name ? strlen(option->name) == n && memcmp(option->name, name, n) == 0 : option->short_name == letter)
        return option;
  return NULL;
}

static int unknown_option(const struct parser *parser, const char *typed, size_t n_typed) {
  char words[2048], shown[6 * MAX_TYPED], guess[64], key[MAX_TYPED];
  size_t n = 0;
  for (int t = 0; t < 2; t++)
    for (const struct k3_option *option = parser->tables[t]; option->name && n < sizeof words; option++)
      n += (size_t)snprintf(words + n, sizeof words - n, "%s%s", n ? "|" : "", option->name);
  k3_printable(shown, sizeof shown, typed, n_typed, MAX_TYPED);
  size_t n_dashes = strspn(typed, "-");
  snprintf(key, sizeof key, "%.*s", (int)(n_typed - n_dashes < MAX_TYPED ? n_typed - n_dashes : 0), typed + n_dashes);
  if (k3_cli_suggest(key, words, guess, sizeof guess))
    return k3_cli_usage(parser->cli, "unknown option %s; did you mean --%s?", shown, guess);
  return k3_cli_usage(parser->cli, "unknown option %s", shown);
}

static int add_to_list(struct k3_cli *cli, struct k3_cli_list *list, const char *text, int argc) {
  struct k3_error err = {0};
  if (!list->items) {
    // No option occurs more often than argv has words, and no verb has more list options than the frame has room for.
    list->items = k3_calloc((size_t)argc, sizeof *list->items, &err);
    if (!list->items)
      return k3_cli_fail(cli, &err);
    cli->lists[cli->n_lists++] = list;
  }
  list->items[list->n_items++] = text;
  return 0;
}

static bool parse_u64(const char *text, uint64_t *value) {
  char *end;
  errno = 0;
  unsigned long long parsed = strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end || errno)
    return false;
  *value = parsed;
  return true;
}

static bool parse_real(const char *text, double *value) {
  char *end;
  double parsed = strtod(text, &end);
  if (end == text || *end || parsed - parsed != 0)  // NaN and infinities are no tolerances
    return false;
  *value = parsed;
  return true;
}

// Stores `text` (NULL for a flag) in the option's variable. 0, or the exit code after a message.
static int set_value(struct k3_cli *cli, const struct k3_option *option, const char *text, int argc) {
  char shown[MAX_TYPED * 2], guess[64];
  if (text)
    k3_printable(shown, sizeof shown, text, strlen(text), MAX_TYPED);
  switch (option->kind) {
    case K3_OPT_FLAG: *(bool *)option->value = true; return 0;
    case K3_OPT_TEXT:  // a variable of the shell that is not set must not become the current folder
      if (!*text && strcmp(option->argument, "PREFIX") != 0)
        return k3_cli_usage(cli, "--%s takes %s, not an empty text", option->name, option->argument);
      *(const char **)option->value = text;
      return 0;
    case K3_OPT_LIST: return add_to_list(cli, option->value, text, argc);
    case K3_OPT_U64:
      return parse_u64(text, option->value) ? 0 : k3_cli_usage(cli, "--%s takes a whole number from 0, not \"%s\"", option->name, shown);
    case K3_OPT_REAL: return parse_real(text, option->value) ? 0 : k3_cli_usage(cli, "--%s takes a number, not \"%s\"", option->name, shown);
    case K3_OPT_CHOICE: break;
  }
  int index = 0;
  size_t n_text = strlen(text);
  for (const char *word = option->argument; *word; index++) {
    size_t n = strcspn(word, "|");
    if (n == n_text && memcmp(word, text, n) == 0) {
      *(int *)option->value = index;
      return 0;
    }
    word += n + (word[n] == '|');
  }
  if (k3_cli_suggest(text, option->argument, guess, sizeof guess))
    return k3_cli_usage(cli, "--%s takes %s, not \"%s\"; did you mean %s?", option->name, option->argument, shown, guess);
  return k3_cli_usage(cli, "--%s takes %s, not \"%s\"", option->name, option->argument, shown);
}

// Takes one option whose value, if any, stands in `attached` (NULL: in the next word, to which *i moves).
static int take_option(const struct parser *parser, const struct k3_option *option, const char *attached, int *i) {
  if (option->kind == K3_OPT_FLAG) {
    if (attached)
      return k3_cli_usage(parser->cli, "--%s takes no value", option->name);
  } else if (!attached) {
    if (*i + 1 >= parser->argc)
      return k3_cli_usage(parser->cli, "--%s needs a value: %s", option->name, option->argument);
    attached = parser->argv[++*i];
  }
  return set_value(parser->cli, option, attached, parser->argc);
}

// Parses the option or the cluster of one-letter options in argv[*i] and moves *i to the last word taken.
static int parse_word(const struct parser *parser, int *i) {
  const char *word = parser->argv[*i];
  if (word[1] == '-') {
    size_t n = strcspn(word + 2, "=");
    const struct k3_option *option = find_option(parser, word + 2, n, 0);
    return option ? take_option(parser, option, word[2 + n] ? word + 2 + n + 1 : NULL, i) : unknown_option(parser, word, 2 + n);
  }
  for (const char *letter = word + 1; *letter; letter++) {
    const struct k3_option *option = find_option(parser, NULL, 0, *letter);
    if (!option)
      return unknown_option(parser, word, strlen(word));
    bool flag = option->kind == K3_OPT_FLAG;
    int code = take_option(parser, option, !flag && letter[1] ? letter + 1 : NULL, i);
    if (code != 0 || !flag)
      return code;
  }
  return 0;
}

const char *k3_cli_number(const char *text, uint64_t *value) {
  char *end;
  if (*text < '0' || *text > '9' || strlen(text) > 1024)
    return NULL;
  errno = 0;
  *value = strtoull(text, &end, 10);
  return errno ? NULL : end;
}

bool k3_cli_numbers(const char *text, uint64_t *values, size_t max, size_t *n) {
  *n = 0;
  while (text && *text) {
    if (*n == max || !(text = k3_cli_number(text, &values[*n])) || (*text && *text != ','))
      return false;
    for (size_t i = 0; i < *n; i++)
      if (values[i] == values[*n])
        return false;
    ++*n;
    text += *text == ',';
  }
  return true;
}

static bool any_empty(char *const *texts, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (!texts[i][0])
      return true;
  }
  return false;
}

bool k3_cli_parse(struct k3_cli *cli, int argc, char **argv, const struct k3_cli_help *help, const struct k3_option *options, int *exit_code) {
  bool wants_help = false, json = false;
  uint64_t n_threads = 0;
  const struct k3_option common[] = {
      {"json", 0, K3_OPT_FLAG, NULL, "machine-readable results on stdout", &json},
      {"quiet", 'q', K3_OPT_FLAG, NULL, "errors only, no progress", &cli->quiet},
      {"verbose", 'v', K3_OPT_FLAG, NULL, "say more, on stderr", &cli->verbose},
      {"threads", 0, K3_OPT_U64, "N", "threads to work with (default: one per CPU); results do not depend on it", &n_threads},
      {"help", 'h', K3_OPT_FLAG, NULL, "print this text", &wants_help},
      {0},
  };
  const struct parser parser = {cli, argc, argv, {options, common}};
  char **operands = argv + 1;
  size_t n_operands = 0;
  bool options_ended = false;
  *exit_code = 0;
  for (int i = 1; i < argc && *exit_code == 0; i++) {
    if (options_ended || argv[i][0] != '-' || argv[i][1] == '\0')
      operands[n_operands++] = argv[i];  // in place: never ahead of i
    else if (strcmp(argv[i], "--") == 0)
      options_ended = true;
    else
      *exit_code = parse_word(&parser, &i);
  }
  if (*exit_code != 0)
    return false;
  cli->json = json;  // the word may have been an option's value
  if (wants_help) {
    print_help(&parser, help);
    return false;
  }
  char shown[6 * MAX_TYPED];
  if (n_operands < help->n_min) {
    *exit_code = k3_cli_usage(cli, "too few arguments; usage: k3pack %s %s", cli->verb, help->operands);
  } else if (n_operands > help->n_max) {
    k3_printable(shown, sizeof shown, operands[help->n_max], strlen(operands[help->n_max]), MAX_TYPED);
    *exit_code = k3_cli_usage(cli, "unexpected argument \"%s\"; usage: k3pack %s %s", shown, cli->verb, help->operands);
  } else if (any_empty(operands, n_operands)) {
    *exit_code = k3_cli_usage(cli, "an argument is an empty text; usage: k3pack %s %s", cli->verb, help->operands);
  } else if (n_threads > MAX_THREADS) {
    *exit_code = k3_cli_usage(cli, "--threads takes at most %d", MAX_THREADS);
  }
  if (cli->quiet)
    cli->progress.fn = NULL;
  cli->n_threads = (int)n_threads;
  cli->operands = operands;
  cli->n_operands = n_operands;
  return *exit_code == 0;
}
