#include "formats/json_write.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/utf8.h"

void k3_jsonw_open(struct k3_jsonw *writer, bool pretty, k3_jsonw_sink_fn sink, void *ctx) {
  *writer = (struct k3_jsonw){.sink = sink, .ctx = ctx, .pretty = pretty};
}

static void misuse(struct k3_jsonw *writer, const char *what) {
  k3_fail(&writer->error, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, NULL, "JSON writer: %s", what);
}

static void flush(struct k3_jsonw *writer) {
  if (writer->error.status == K3_OK && writer->n_bytes > 0)
    writer->error.status = writer->sink(writer->ctx, writer->bytes, writer->n_bytes, &writer->error);
  writer->n_bytes = 0;
}

// Appends nbytes; a terminator always fits behind them.
static void put(struct k3_jsonw *writer, const char *bytes, size_t nbytes) {
  if (writer->error.status != K3_OK)
    return;
  if (writer->sink && writer->n_bytes + nbytes > K3_JSONW_FLUSH_NBYTES)
    flush(writer);
  if (k3_grow(&writer->bytes, &writer->capacity, writer->n_bytes + nbytes + 1, 1, &writer->error) != K3_OK)
    return;
  memcpy(writer->bytes + writer->n_bytes, bytes, nbytes);
  writer->n_bytes += nbytes;
}

static void put_text(struct k3_jsonw *writer, const char *text) {
  put(writer, text, strlen(text));
}

static void put_line(struct k3_jsonw *writer) {
  if (!writer->pretty)
    return;
  put(writer, "\n", 1);
  for (unsigned i = 0; i < writer->depth; i++)
    put(writer, "  ", 2);
}

// The short escape of a character, or 0.
static char short_escape(uint32_t code_point) {
  switch (code_point) {
    case '"': return '"';
    case '\\': return '\\';
    case '\b': return 'b';
    case '\f': return 'f';
    case '\n': return 'n';
    case '\r': return 'r';
    case '\t': return 't';
    default: return 0;
  }
}

static void put_quoted(struct k3_jsonw *writer, const char *bytes, size_t nbytes) {
  put(writer, "\"", 1);
  size_t plain = 0;  // bytes[plain .. i) go out as they are
  for (size_t i = 0; i < nbytes;) {
    uint32_t code_point = 0xFFFD;
    size_t width = k3_utf8_decode(bytes + i, nbytes - i, &code_point);
    bool broken = width == 0;
    char letter = short_escape(code_point), escaped[8];
    if (!broken && !letter && !k3_utf8_is_hostile(code_point)) {
      i += width;
      continue;
    }
    put(writer, bytes + plain, i - plain);
    if (letter)
      snprintf(escaped, sizeof escaped, "\\%c", letter);
    else
      snprintf(escaped, sizeof escaped, "\\u%04X", (unsigned)code_point & 0xFFFF);  // every hostile character is below U+10000
    put_text(writer, escaped);
    i += broken ? 1 : width;
    plain = i;
  }
  put(writer, bytes + plain, nbytes - plain);
  put(writer, "\"", 1);
}

// What stands before a value: comma, line, key. False when nothing may follow.
static bool before_value(struct k3_jsonw *writer, const char *key) {
  if (writer->error.status != K3_OK)
    return false;
  if (writer->depth == 0) {
    if (writer->has_top || key)
      misuse(writer, key ? "a key outside an object" : "a second top value");
    writer->has_top = true;
    return writer->error.status == K3_OK;
  }
  if (writer->level[writer->depth - 1].is_object != (key != NULL)) {
    misuse(writer, key ? "a key inside an array" : "a value without a key inside an object");
    return false;
  }
  if (writer->level[writer->depth - 1].any)
    put(writer, ",", 1);
  writer->level[writer->depth - 1].any = true;
  put_line(writer);
  if (key) {
    put_quoted(writer, key, strlen(key));
    put_text(writer, writer->pretty ? ": " : ":");
  }
  return true;
}

static void begin(struct k3_jsonw *writer, const char *key, bool is_object) {
  if (!before_value(writer, key))
    return;
  if (writer->depth == K3_JSONW_MAX_DEPTH) {
    misuse(writer, "nested too deeply");
    return;
  }
  writer->level[writer->depth].is_object = is_object;
  writer->level[writer->depth].any = false;
  writer->depth++;
  put(writer, is_object ? "{" : "[", 1);
}

static void end(struct k3_jsonw *writer, bool is_object) {
  if (writer->error.status != K3_OK)
    return;
  if (writer->depth == 0 || writer->level[writer->depth - 1].is_object != is_object) {
    misuse(writer, "an end without its begin");
    return;
  }
  bool any = writer->level[--writer->depth].any;
  if (any)
    put_line(writer);
  put(writer, is_object ? "}" : "]", 1);
}

void k3_jsonw_begin_object(struct k3_jsonw *writer, const char *key) {
  begin(writer, key, true);
}

void k3_jsonw_end_object(struct k3_jsonw *writer) {
  end(writer, true);
}

void k3_jsonw_begin_array(struct k3_jsonw *writer, const char *key) {
  begin(writer, key, false);
}

void k3_jsonw_end_array(struct k3_jsonw *writer) {
  end(writer, false);
}

void k3_jsonw_string(struct k3_jsonw *writer, const char *key, const char *text) {
  if (text)
    k3_jsonw_string_n(writer, key, text, strlen(text));
  else
    k3_jsonw_null(writer, key);
}

void k3_jsonw_string_n(struct k3_jsonw *writer, const char *key, const char *bytes, size_t nbytes) {
  if (before_value(writer, key))
    put_quoted(writer, bytes, nbytes);
}

static void put_word(struct k3_jsonw *writer, const char *key, const char *word) {
  if (before_value(writer, key))
    put_text(writer, word);
}

void k3_jsonw_u64(struct k3_jsonw *writer, const char *key, uint64_t value) {
  char digits[24];
  snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
  put_word(writer, key, digits);
}

void k3_jsonw_i64(struct k3_jsonw *writer, const char *key, int64_t value) {
  char digits[24];
  snprintf(digits, sizeof digits, "%lld", (long long)value);
  put_word(writer, key, digits);
}

// Replaces the locale's decimal separator, which may have several bytes, by a point.
static void make_point(char *digits) {
  const char *separator = localeconv()->decimal_point;
  size_t n = strlen(separator);
  char *at = n > 0 && strcmp(separator, ".") != 0 ? strstr(digits, separator) : NULL;
  if (at) {
    *at = '.';
    memmove(at + 1, at + n, strlen(at + n) + 1);
  }
}

static bool put_special(struct k3_jsonw *writer, const char *key, double value) {
  if (isfinite(value))
    return false;
  k3_jsonw_string(writer, key, isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
  return true;
}

void k3_jsonw_double(struct k3_jsonw *writer, const char *key, double value) {
  char digits[48];
  if (put_special(writer, key, value))
    return;
  for (int precision = 15; precision <= 17; precision++) {
    snprintf(digits, sizeof digits, "%.*g", precision, value);
    if (strtod(digits, NULL) == value)
      break;
  }
  make_point(digits);
  put_word(writer, key, digits);
}

void k3_jsonw_float(struct k3_jsonw *writer, const char *key, float value) {
  char digits[48];
  if (put_special(writer, key, (double)value))
    return;
  for (int precision = 6; precision <= 9; precision++) {
    snprintf(digits, sizeof digits, "%.*g", precision, (double)value);
    if (strtof(digits, NULL) == value)
      break;
  }
  make_point(digits);
  put_word(writer, key, digits);
}

void k3_jsonw_bool(struct k3_jsonw *writer, const char *key, bool value) {
  put_word(writer, key, value ? "true" : "false");
}

void k3_jsonw_null(struct k3_jsonw *writer, const char *key) {
  put_word(writer, key, "null");
}

enum k3_status k3_jsonw_finish(struct k3_jsonw *writer, struct k3_error *err) {
  if (writer->error.status == K3_OK && (writer->depth > 0 || !writer->has_top))
    misuse(writer, "the text is not complete");
  put(writer, "\n", 1);
  if (writer->sink)
    flush(writer);
  if (writer->error.status == K3_OK)
    writer->bytes[writer->n_bytes] = '\0';
  else if (err && err->status == K3_OK)
    *err = writer->error;
  return writer->error.status;
}

void k3_jsonw_close(struct k3_jsonw *writer) {
  k3_free(writer->bytes);
  *writer = (struct k3_jsonw){0};
}
