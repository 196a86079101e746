// covers: formats/json_pull.c
// The pull reader against jansson, and the writer against the reader.
#include <jansson.h>

#include "formats/json_pull.h"
#include "formats/json_write.h"
#include "tests/fuzz/fuzz.h"

// Walks a value by the calls a parser uses, comparing every string with its raw spelling.
static enum k3_status walk(struct k3_json *json) {
  struct k3_json_text text;
  bool more;
  uint64_t value;
  switch (k3_json_peek(json)) {
    case '{':
      K3_TRY(k3_json_enter_object(json));
      for (;;) {
        K3_TRY(k3_json_next_key(json, &more, &text));
        if (!more)
          return K3_OK;
        FUZZ_CHECK(k3_json_raw_equal(json->raw, json->end, text.bytes, text.nbytes));
        K3_TRY(walk(json));
      }
    case '[':
      K3_TRY(k3_json_enter_array(json));
      for (;;) {
        K3_TRY(k3_json_next_item(json, &more));
        if (!more)
          return K3_OK;
        K3_TRY(walk(json));
      }
    case '"':
      K3_TRY(k3_json_string(json, &text));
      FUZZ_CHECK(k3_json_raw_equal(json->raw, json->end, text.bytes, text.nbytes));
      FUZZ_CHECK(!k3_json_raw_equal(json->raw, json->end, text.bytes, text.nbytes + 1));
      return K3_OK;
    case '0' ... '9': {
      // A number that is no plain integer has been skipped when it is refused, so the walk can go on.
      struct k3_error number = {0}, *err = json->err;
      json->err = &number;
      enum k3_status status = k3_json_u64(json, K3_CNT05, "w", &value);
      json->err = err;
      if (number.rule == K3_CNT05)
        return K3_OK;
      if (status != K3_OK && err->status == K3_OK)
        *err = number;
      return status;
    }
    default: return k3_json_skip(json);
  }
}

static enum k3_status read_all(const char *text, size_t nbytes, enum k3_status (*read)(struct k3_json *), struct k3_error *err) {
  struct k3_json json;
  k3_json_open(&json, text, nbytes, "input", K3_CNT02, err);
  enum k3_status status = read(&json);
  if (status == K3_OK)
    status = k3_json_finish(&json);
  FUZZ_CHECK(status == K3_OK || (status == K3_BAD_INPUT && err->rule == K3_CNT02 && k3_json_offset(&json) <= nbytes));
  k3_json_close(&json);
  return status;
}

static void compare_with_jansson(const char *text, size_t nbytes) {
  struct k3_error err = {0}, walk_err = {0};
  json_error_t their_error;
  enum k3_status status = read_all(text, nbytes, k3_json_skip, &err);
  FUZZ_CHECK(read_all(text, nbytes, walk, &walk_err) == status);
  FUZZ_CHECK(strcmp(err.found, walk_err.found) == 0);
  json_t *theirs = json_loadb(text, nbytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, &their_error);
  // They bound numbers by their types, we bound the depth, and they take a zero byte outside a string for the end of the text; apart from that both
  // read RFC 8259.
  if (status == K3_OK && !theirs)
    FUZZ_CHECK(json_error_code(&their_error) == json_error_numeric_overflow);
  if (status != K3_OK && theirs)
    FUZZ_CHECK(strstr(err.found, "nested too deeply") || strstr(err.found, "found byte 0x00"));
  json_decref(theirs);
}

static void write_and_read(const char *bytes, size_t nbytes) {
  struct k3_jsonw writer;
  struct k3_error err = {0};
  k3_jsonw_open(&writer, nbytes % 2, NULL, NULL);
  k3_jsonw_begin_array(&writer, NULL);
  k3_jsonw_string_n(&writer, NULL, bytes, nbytes);
  k3_jsonw_end_array(&writer);
  FUZZ_CHECK(k3_jsonw_finish(&writer, &err) == K3_OK);
  FUZZ_CHECK(read_all(writer.bytes, writer.n_bytes, walk, &err) == K3_OK);
  k3_jsonw_close(&writer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
  const char *text = fuzz_guarded(data, &nbytes);
  fuzz_cap_allocations(nbytes);
  compare_with_jansson(text, nbytes);
  write_and_read(text, nbytes);
  return 0;
}
