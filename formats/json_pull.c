#include "formats/json_pull.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/utf8.h"

void k3_json_open(struct k3_json *json, const char *text, size_t nbytes, const char *file, enum k3_rule rule, struct k3_error *err) {
  *json = (struct k3_json){.begin = text, .next = text, .end = text + nbytes, .file = file, .rule = rule, .err = err};
}

void k3_json_close(struct k3_json *json) {
  k3_free(json->scratch);
  *json = (struct k3_json){0};
}

uint64_t k3_json_offset(const struct k3_json *json) {
  return (uint64_t)(json->next - json->begin);
}

// A syntax error at `at`.
static enum k3_status fail_at(struct k3_json *json, const char *at, const char *found, const char *expected) {
  json->next = at;
  return k3_fail(json->err, K3_BAD_INPUT, json->rule, json->file, NULL, expected, "JSON error at byte %llu: %s",
                 (unsigned long long)k3_json_offset(json), found);
}

enum k3_status k3_json_fail(struct k3_json *json, const char *expected) {
  char found[40];
  if (json->next == json->end)
    return fail_at(json, json->next, "the text ends", expected);
  unsigned char byte = (unsigned char)*json->next;
  if (json->end - json->next >= 3 && memcmp(json->next, "\xEF\xBB\xBF", 3) == 0)
    return fail_at(json, json->next, "a byte-order mark", expected);
  snprintf(found, sizeof found, byte > 0x20 && byte < 0x7F ? "found '%c'" : "found byte 0x%02X", byte);
  return fail_at(json, json->next, found, expected);
}

char k3_json_peek(struct k3_json *json) {
  while (json->next < json->end && (*json->next == ' ' || *json->next == '\n' || *json->next == '\r' || *json->next == '\t'))
    json->next++;
  return json->next < json->end ? *json->next : '\0';
}

static enum k3_status enter(struct k3_json *json, char bracket, const char *expected) {
  if (k3_json_peek(json) != bracket)
    return k3_json_fail(json, expected);
  if (json->depth == K3_JSON_MAX_DEPTH)
    return fail_at(json, json->next, "nested too deeply", "at most 64 levels");
  json->depth++;
  json->next++;
  json->fresh = true;
  return K3_OK;
}

// Moves to the next entry of a container: past a comma, or past its closing bracket.
static enum k3_status advance(struct k3_json *json, char bracket, bool *more, const char *expected) {
  char next = k3_json_peek(json);
  *more = false;
  if (next == bracket) {
    json->next++;
    json->depth--;
    json->fresh = false;
    return K3_OK;
  }
  if (!json->fresh) {
    if (next != ',')
      return k3_json_fail(json, expected);
    json->next++;
  }
  json->fresh = false;
  *more = true;
  return K3_OK;
}

enum k3_status k3_json_enter_object(struct k3_json *json) {
  return enter(json, '{', "an object");
}

enum k3_status k3_json_enter_array(struct k3_json *json) {
  return enter(json, '[', "an array");
}

enum k3_status k3_json_next_key(struct k3_json *json, bool *more, struct k3_json_text *key) {
  K3_TRY(advance(json, '}', more, "',' or '}'"));
  if (!*more)
    return K3_OK;
  if (k3_json_peek(json) != '"')
    return k3_json_fail(json, "a key in quotes");
  K3_TRY(k3_json_string(json, key));
  if (k3_json_peek(json) != ':')
    return k3_json_fail(json, "':'");
  json->next++;
  return K3_OK;
}

enum k3_status k3_json_next_item(struct k3_json *json, bool *more) {
  return advance(json, ']', more, "',' or ']'");
}

// First byte in [p, end) that is a quote, a backslash, a control character or no ASCII; end if there is none. Eight bytes at a time: every byte with
// one of these properties, and no byte before the first of them, gets its top bit set (a borrow can only come from such a byte).
static const char *skip_plain(const char *p, const char *end) {
  const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
  while (end - p >= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    uint64_t special = (word | (word - ones * 0x20) | ((word ^ ones * '"') - ones) | ((word ^ ones * '\\') - ones)) & tops;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (special)
      return p + __builtin_ctzll(special) / 8;
#else
    if (special)
      break;
#endif
    p += 8;
  }
  while (p < end && (unsigned char)*p >= 0x20 && (unsigned char)*p < 0x80 && *p != '"' && *p != '\\')
    p++;
  return p;
}

// Four hex digits; 0x10000 if they are not.
static uint32_t hex4(const char *p, const char *end) {
  uint32_t value = 0;
  if (end - p < 4)
    return 0x10000;
  for (int i = 0; i < 4; i++) {
    char c = p[i];
    uint32_t digit = c >= '0' && c <= '9' ? (uint32_t)(c - '0') : (c | 32) >= 'a' && (c | 32) <= 'f' ? (uint32_t)((c | 32) - 'a' + 10) : 16;
    if (digit == 16)
      return 0x10000;
    value = value << 4 | digit;
  }
  return value;
}

// Decodes the escape at p (its backslash; p < end). Returns how many bytes of text it took, 0 if it is none, and what it stands for as UTF-8.
static size_t decode_escape(const char *p, const char *end, char utf8[4], size_t *n_utf8) {
  static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  if (end - p < 2)
    return 0;
  const char *letter = p[1] ? strchr(letters, p[1]) : NULL;
  if (letter) {
    utf8[0] = meanings[letter - letters];
    *n_utf8 = 1;
    return 2;
  }
  uint32_t unit = p[1] == 'u' ? hex4(p + 2, end) : 0x10000;
  if (unit > 0xFFFF || (unit >= 0xDC00 && unit <= 0xDFFF))
    return 0;
  if (unit < 0xD800 || unit > 0xDFFF) {
    *n_utf8 = k3_utf8_encode(unit, utf8);
    return 6;
  }
  if (end - p < 12 || p[6] != '\\' || p[7] != 'u')
    return 0;
  uint32_t low = hex4(p + 8, end);
  if (low < 0xDC00 || low > 0xDFFF)
    return 0;
  *n_utf8 = k3_utf8_encode(0x10000 + ((unit - 0xD800) << 10 | (low - 0xDC00)), utf8);
  return 12;
}

// A string whose first backslash is at p: copies it to the scratch buffer piece by piece.
static enum k3_status unescape(struct k3_json *json, const char *p, struct k3_json_text *text) {
  size_t n = 0;
  const char *plain = json->raw;  // [plain, p) is to be copied as it is
  for (;;) {
    p = skip_plain(p, json->end);
    unsigned char byte = p < json->end ? (unsigned char)*p : 0;
    if (byte >= 0x80) {
      uint32_t code_point;
      size_t width = k3_utf8_decode(p, (size_t)(json->end - p), &code_point);
      if (width == 0)
        return fail_at(json, p, "bytes that are no UTF-8", "UTF-8");
      p += width;
      continue;
    }
    char utf8[4];
    size_t n_utf8 = 0, n_taken = byte == '\\' ? decode_escape(p, json->end, utf8, &n_utf8) : 0;
    if (byte != '"' && n_taken == 0) {
      if (byte == '\\')
        return fail_at(json, p, "an escape that is none, or half of a surrogate pair", "\\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX");
      json->next = p;
      return k3_json_fail(json, "the rest of a string");
    }
    size_t n_plain = (size_t)(p - plain);
    K3_TRY(k3_grow(&json->scratch, &json->scratch_nbytes, n + n_plain + n_utf8 + 1, 1, json->err));
    memcpy(json->scratch + n, plain, n_plain);
    memcpy(json->scratch + n + n_plain, utf8, n_utf8);
    n += n_plain + n_utf8;
    if (byte == '"') {
      *text = (struct k3_json_text){json->scratch, n};
      json->next = p + 1;
      return K3_OK;
    }
    p += n_taken;
    plain = p;
  }
}

enum k3_status k3_json_string(struct k3_json *json, struct k3_json_text *text) {
  if (k3_json_peek(json) != '"')
    return k3_json_fail(json, "a string");
  const char *p = json->raw = json->next + 1;
  for (;;) {
    p = skip_plain(p, json->end);
    if (p == json->end || (unsigned char)*p < 0x20) {
      json->next = p;
      return k3_json_fail(json, "the rest of a string");
    }
    if (*p == '"') {
      *text = (struct k3_json_text){json->raw, (size_t)(p - json->raw)};
      json->next = p + 1;
      return K3_OK;
    }
    if (*p == '\\')
      return unescape(json, p, text);
    uint32_t code_point;
    size_t width = k3_utf8_decode(p, (size_t)(json->end - p), &code_point);
    if (width == 0)
      return fail_at(json, p, "bytes that are no UTF-8", "UTF-8");
    p += width;
  }
}

bool k3_json_raw_equal(const char *raw, const char *end, const char *bytes, size_t nbytes) {
  size_t i = 0;
  while (raw < end && *raw != '"') {
    char utf8[4] = {*raw};
    size_t n_utf8 = 1, n_taken = 1;
    if (*raw == '\\')
      n_taken = decode_escape(raw, end, utf8, &n_utf8);
    if (nbytes - i < n_utf8 || memcmp(bytes + i, utf8, n_utf8) != 0)
      return false;
    raw += n_taken;
    i += n_utf8;
  }
  return i == nbytes;
}

static bool is_digit(const char *p, const char *end) {
  return p < end && *p >= '0' && *p <= '9';
}

// A number by the grammar of RFC 8259, whatever its value.
static enum k3_status skip_number(struct k3_json *json) {
  const char *p = json->next, *end = json->end;
  p += *p == '-';
  if (!is_digit(p, end))
    goto bad;
  if (*p == '0' && is_digit(p + 1, end)) {
    p++;
    goto bad;
  }
  while (is_digit(p, end))
    p++;
  if (p < end && *p == '.') {
    if (!is_digit(++p, end))
      goto bad;
    while (is_digit(p, end))
      p++;
  }
  if (p < end && (*p | 32) == 'e') {
    p++;
    p += p < end && (*p == '+' || *p == '-');
    if (!is_digit(p, end))
      goto bad;
    while (is_digit(p, end))
      p++;
  }
  json->next = p;
  return K3_OK;
bad:
  json->next = p;
  return k3_json_fail(json, "a number");
}

static enum k3_status word(struct k3_json *json, const char *expected) {
  size_t n = strlen(expected);
  if ((size_t)(json->end - json->next) < n || memcmp(json->next, expected, n) != 0)
    return k3_json_fail(json, expected);
  json->next += n;
  return K3_OK;
}

enum k3_status k3_json_null(struct k3_json *json) {
  k3_json_peek(json);
  return word(json, "null");
}

enum k3_status k3_json_u64(struct k3_json *json, enum k3_rule number_rule, const char *tensor, uint64_t *value) {
  k3_json_peek(json);
  const char *start = json->next, *p = start;
  uint64_t sum = 0;
  bool fits = true;
  for (; is_digit(p, json->end); p++)
    fits = fits && !__builtin_mul_overflow(sum, 10, &sum) && !__builtin_add_overflow(sum, (uint64_t)(*p - '0'), &sum);
  bool spelled_otherwise = p < json->end && (*p == '.' || (*p | 32) == 'e');
  if (p > start && fits && !spelled_otherwise && (*start != '0' || p == start + 1)) {
    json->next = p;
    *value = sum;
    return K3_OK;
  }
  K3_TRY(k3_json_skip(json));  // what is no JSON at all is reported as such
  size_t n = (size_t)(json->next - start);
  char found[48];
  k3_printable(found, sizeof found, start, n < 32 ? n : 32, 32);
  return k3_fail(json->err, K3_BAD_INPUT, number_rule, json->file, tensor, "a plain integer from 0 to 18446744073709551615", "%s%s at byte %llu",
                 found, n > 32 ? "..." : "", (unsigned long long)(start - json->begin));
}

// The recursion of the two ends at K3_JSON_MAX_DEPTH.
static enum k3_status skip_object(struct k3_json *json) {
  struct k3_json_text key;
  bool more;
  K3_TRY(k3_json_enter_object(json));
  for (;;) {
    K3_TRY(k3_json_next_key(json, &more, &key));
    if (!more)
      return K3_OK;
    K3_TRY(k3_json_skip(json));
  }
}

static enum k3_status skip_array(struct k3_json *json) {
  bool more;
  K3_TRY(k3_json_enter_array(json));
  for (;;) {
    K3_TRY(k3_json_next_item(json, &more));
    if (!more)
      return K3_OK;
    K3_TRY(k3_json_skip(json));
  }
}

enum k3_status k3_json_skip(struct k3_json *json) {
  struct k3_json_text text;
  switch (k3_json_peek(json)) {
    case '"': return k3_json_string(json, &text);
    case 't': return word(json, "true");
    case 'f': return word(json, "false");
    case 'n': return word(json, "null");
    case '{': return skip_object(json);
    case '[': return skip_array(json);
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9': return skip_number(json);
    default: return k3_json_fail(json, "a value");
  }
}

enum k3_status k3_json_finish(struct k3_json *json) {
  k3_json_peek(json);
  return json->next == json->end ? K3_OK : k3_json_fail(json, "the end of the text");
}
