// The safetensors container: what is accepted, what is refused and by which rule, and the writer.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "formats/safetensors.h"
#include "unit.h"

static struct k3_error last;  // of the last refused header
static struct k3_st_header header;

static enum k3_status parse_n(const char *text, size_t h, uint64_t data_nbytes) {
  char *copy = malloc(h ? h : 1);  // exactly sized, so that AddressSanitizer sees every over-read
  memcpy(copy, text, h);
  last = (struct k3_error){0};
  enum k3_status status = k3_st_parse(copy, h, 8 + h + data_nbytes, "f.safetensors", &header, &last);
  free(copy);  // a parsed header owns what it points to
  assert_int_equal(status == K3_OK, last.status == K3_OK);
  if (status != K3_OK) {
    assert_null(header.tensors);
    assert_string_equal(last.file, "f.safetensors");
  }
  return status;
}

static enum k3_status parse(const char *text, uint64_t data_nbytes) {
  return parse_n(text, strlen(text), data_nbytes);
}

static void accept(const char *text, uint64_t data_nbytes) {
  assert_int_equal(parse(text, data_nbytes), K3_OK);
}

static void accept_and_free(const char *text, uint64_t data_nbytes) {
  accept(text, data_nbytes);
  k3_st_header_free(&header);
}

// Refused by that rule, naming that tensor ("" for none) and saying that.
static void refuse_saying(const char *text, uint64_t data_nbytes, enum k3_rule rule, const char *tensor, const char *said) {
  assert_int_equal(parse(text, data_nbytes), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(last.rule)->id, k3_rule_info(rule)->id);
  assert_string_equal(last.tensor, tensor);
  if (!strstr(last.found, said))
    fail_msg("\"%s\" does not say \"%s\"", last.found, said);
}

static void refuse(const char *text, uint64_t data_nbytes, enum k3_rule rule) {
  assert_int_equal(parse(text, data_nbytes), K3_BAD_INPUT);
  assert_string_equal(k3_rule_info(last.rule)->id, k3_rule_info(rule)->id);
}

#define F32_AT(name, begin, end) "\"" name "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" #begin "," #end "]}"

static void a_header_is_read(void **state) {
  (void)state;
  accept(
      "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\\u00e9\"},\"a.weight\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
      "\"scalar\":{\"shape\":[],\"data_offsets\":[12,16],\"dtype\":\"F32\"},\"empty\":{\"dtype\":\"I64\",\"shape\":[5,0],\"data_offsets\":[16,16]}}",
      16);
  assert_int_equal(header.n_tensors, 3);
  assert_int_equal(header.n_metadata, 2);
  assert_string_equal(k3_st_metadata(&header, "format"), "pt");
  assert_string_equal(k3_st_metadata(&header, "k"), "v\xC3\xA9");
  assert_null(k3_st_metadata(&header, "absent"));
  assert_false(header.metadata_odd);
  assert_int_equal(header.data_nbytes, 16);
  const struct k3_st_tensor *tensor = k3_st_find(&header, "a.weight", 8);
  assert_ptr_equal(tensor, &header.tensors[0]);
  assert_string_equal(tensor->name, "a.weight");
  assert_int_equal(tensor->name_nbytes, 8);
  assert_int_equal(tensor->dtype, K3_DTYPE_BF16);
  assert_int_equal(tensor->rank, 2);
  assert_int_equal(tensor->shape[0], 2);
  assert_int_equal(tensor->shape[1], 3);
  assert_int_equal(tensor->begin, 0);
  assert_int_equal(tensor->end, 12);
  assert_int_equal(k3_st_n_elems(tensor), 6);
  assert_int_equal(k3_st_n_elems(k3_st_find(&header, "scalar", 6)), 1);
  assert_int_equal(k3_st_n_elems(k3_st_find(&header, "empty", 5)), 0);
  assert_null(k3_st_find(&header, "a.weigh", 7));
  assert_null(k3_st_find(&header, "a.weight2", 9));
  assert_null(k3_st_find(&header, "", 0));
  k3_st_header_free(&header);
  k3_st_header_free(&header);
}

// ---- the length in front ----

static enum k3_status length_of(const void *prefix, size_t n_prefix, uint64_t file_nbytes, uint64_t *h) {
  last = (struct k3_error){0};
  return k3_st_header_length(prefix, n_prefix, file_nbytes, "f.safetensors", h, &last);
}

static void length_bounds(void **state) {
  (void)state;
  uint64_t h = 1;
  // An empty file, or fewer than eight bytes: the message gives the size.
  for (size_t n = 0; n < 8; n++) {
    char said[32];
    snprintf(said, sizeof said, "a file of %zu bytes", n);
    assert_int_equal(length_of("\2\0\0\0\0\0\0", n, n, &h), K3_BAD_INPUT);
    assert_int_equal(last.rule, K3_CNT02);
    assert_string_equal(last.found, said);
    assert_int_equal(h, 0);
  }
  assert_int_equal(length_of("\0\0\0\0\0\0\0\0", 8, 8, &h), K3_BAD_INPUT);
  assert_int_equal(length_of("\1\0\0\0\0\0\0\0", 8, 9, &h), K3_BAD_INPUT);
  assert_int_equal(length_of("\2\0\0\0\0\0\0\0", 8, 10, &h), K3_OK);
  assert_int_equal(h, 2);
  assert_int_equal(length_of("\2\0\0\0\0\0\0\0", 8, 9, &h), K3_BAD_INPUT);
  assert_non_null(strstr(last.found, "1 are missing"));
  // 1,290,000 tensors in one file: the found length and the limit are said.
  assert_int_equal(length_of("\x40\x9D\xDF\x07\0\0\0\0", 8, 10, &h), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT02);
  assert_non_null(strstr(last.found, "132095296"));
  assert_non_null(strstr(last.found, "100000000"));
  assert_int_equal(length_of("\x00\xE1\xF5\x05\0\0\0\0", 8, 200000000, &h), K3_OK);
  assert_int_equal(h, 100000000);
  assert_int_equal(length_of("\x01\xE1\xF5\x05\0\0\0\0", 8, 200000000, &h), K3_BAD_INPUT);
  assert_int_equal(length_of("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 8, UINT64_MAX, &h), K3_BAD_INPUT);
}

static void other_files_are_recognised(void **state) {
  (void)state;
  static const char pointer[] =
      "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nsize 4976698672\n";
  uint64_t h;
  assert_int_equal(length_of(pointer, sizeof pointer - 1, sizeof pointer - 1, &h), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT01);
  assert_non_null(strstr(last.found, "4976698672"));
  assert_int_equal(length_of(pointer, 8, sizeof pointer - 1, &h), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT01);
  assert_int_equal(length_of("version 2 of this file", 22, 22, &h), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT02);
  assert_int_equal(length_of("<!DOCTYPE html><html>", 8, 100, &h), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT02);
  assert_non_null(strstr(last.found, "an HTML page"));
  assert_int_equal(length_of("PK\3\4zip!", 8, 100, &h), K3_BAD_INPUT);
  assert_null(strstr(last.found, "text"));
}

static void the_header_must_fit_the_file(void **state) {
  (void)state;
  struct k3_error err = {0};
  assert_int_equal(k3_st_parse("{}", 2, 9, "f", &header, &err), K3_BAD_INPUT);
  assert_int_equal(err.rule, K3_CNT02);
  assert_int_equal(k3_st_parse("{}", 2, 7, "f", &header, NULL), K3_BAD_INPUT);
  assert_int_equal(k3_st_parse("{}", 100000001, UINT64_MAX, "f", &header, NULL), K3_BAD_INPUT);
  assert_int_equal(k3_st_parse("{}", 2, 10, "f", &header, NULL), K3_OK);
  k3_st_header_free(&header);
}

// ---- JSON ----

// Trailing space, tab, LF and CR are fine; leading white space and a byte-order mark are not; nothing may follow the object.
static void white_space_around_the_header(void **state) {
  (void)state;
  accept_and_free("{" F32_AT("a", 0, 4) "} ", 4);
  accept_and_free("{" F32_AT("a", 0, 4) "}\t", 4);
  accept_and_free("{" F32_AT("a", 0, 4) "}\n", 4);
  accept_and_free("{" F32_AT("a", 0, 4) "}\r \r\n", 4);
  accept_and_free("{ \n" F32_AT("a", 0, 4) "\t}", 4);
  refuse_saying(" {" F32_AT("a", 0, 4) "}", 4, K3_CNT02, "", "at byte 0");
  refuse("\n{" F32_AT("a", 0, 4) "}", 4, K3_CNT02);
  refuse_saying("\xEF\xBB\xBF{" F32_AT("a", 0, 4) "}", 4, K3_CNT02, "", "byte-order mark");
  refuse("{" F32_AT("a", 0, 4) "}{}", 4, K3_CNT02);
  refuse("{" F32_AT("a", 0, 4) "}x", 4, K3_CNT02);
  assert_int_equal(parse_n("{}\0", 3, 0), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT02);
}

static void bad_json_names_the_byte(void **state) {
  (void)state;
  refuse_saying("{\"a\xFF\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT02, "", "at byte 3");
  refuse_saying("[]", 0, K3_CNT02, "", "at byte 0");
  refuse_saying("{}{}", 0, K3_CNT02, "", "at byte 2");
  refuse("{" F32_AT("a", 0, 4), 4, K3_CNT02);
  refuse("{" F32_AT("a", 0, 4) ",}", 4, K3_CNT02);
  refuse("{\"\\uD800\":1}", 0, K3_CNT02);
  // Broken JSON behind a bad entry goes before the bad entry.
  refuse("{\"a\":{\"dtype\":\"F9\",\"shape\":[1],\"data_offsets\":[0,4]},", 4, K3_CNT02);
  refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}", 4, K3_CNT02);
}

// Metadata and no tensors: the good form is an empty file, the old writer's misplaced brace is no JSON.
static void no_tensors(void **state) {
  (void)state;
  accept("{\"__metadata__\":{\"a\":\"b\"}}", 0);
  assert_int_equal(header.n_tensors, 0);
  assert_int_equal(header.n_metadata, 1);
  k3_st_header_free(&header);
  accept_and_free("{}", 0);
  refuse("{},\"__metadata__\":{\"framework\":\"pt\"}}", 0, K3_CNT02);
  refuse_saying("{}", 3, K3_CNT04, "", "3 bytes after the last tensor");
}

// ---- keys ----

// A repeated key is refused in all five disguises, and named.
static void duplicate_keys(void **state) {
  (void)state;
  refuse_saying("{" F32_AT("abc", 0, 4) "," F32_AT("abc", 0, 4) "}", 4, K3_CNT07, "abc", "twice");
  refuse_saying("{" F32_AT("abc", 0, 4) "," F32_AT("abc", 4, 8) "}", 8, K3_CNT07, "abc", "twice");
  refuse_saying("{" F32_AT("abc", 0, 4) "," F32_AT("\\u0061bc", 4, 8) "}", 8, K3_CNT07, "abc", "twice");
  refuse_saying("{" F32_AT("\\u0061bc", 0, 4) "," F32_AT("abc", 4, 8) "}", 8, K3_CNT07, "abc", "twice");
  refuse_saying("{\"__metadata__\":{}," F32_AT("a", 0, 4) ",\"__metadata__\":{}}", 4, K3_CNT07, "__metadata__", "twice");
  refuse_saying("{\"__metadata__\":null,\"\\u005f_metadata__\":null}", 0, K3_CNT07, "__metadata__", "twice");
  refuse_saying("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT07, "a", "dtype occurs twice");
  refuse_saying("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"sh\\u0061pe\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT07, "a", "shape occurs twice");
  refuse_saying("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"data_offsets\":[0,4]}}", 4, K3_CNT07, "a", "data_offsets");
  refuse_saying("{\"__metadata__\":{\"k\":\"1\",\"\\u006b\":\"2\"}}", 0, K3_CNT07, "__metadata__", "\"k\" occurs twice");
  refuse_saying("{\"__metadata__\":{\"k\":1,\"k\":\"2\"}}", 0, K3_CNT07, "__metadata__", "\"k\" occurs twice");
}

static void metadata_forms(void **state) {
  (void)state;
  accept("{\"__metadata__\":null," F32_AT("a", 0, 4) "}", 4);
  assert_false(header.metadata_odd);
  k3_st_header_free(&header);
  accept("{\"__metadata__\":{}," F32_AT("a", 0, 4) "}", 4);
  assert_false(header.metadata_odd);
  k3_st_header_free(&header);
  static const char *const odd[] = {"{\"__metadata__\":{\"a\":1,\"b\":\"c\"}}",
                                    "{\"__metadata__\":{\"b\":\"c\",\"a\":null}}",
                                    "{\"__metadata__\":[]}",
                                    "{\"__metadata__\":\"x\"}",
                                    "{\"__metadata__\":{\"a\":{\"b\":[1]}}}",
                                    "{\"__metadata__\":{\"a\\u0000b\":\"c\"}}",
                                    "{\"__metadata__\":{\"a\":\"b\\u0000c\"}}"};
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
    accept(odd[i], 0);
    assert_true(header.metadata_odd);
    assert_int_equal(header.n_metadata, i < 2);
    if (i < 2)
      assert_string_equal(k3_st_metadata(&header, "b"), "c");
    k3_st_header_free(&header);
  }
  // A tensor of that name is refused; one underscore more is a name like any other.
  refuse_saying("{" F32_AT("__metadata__", 0, 4) "}", 4, K3_CNT12, "__metadata__", "called __metadata__");
  accept_and_free("{" F32_AT("__metadata___", 0, 4) "}", 4);
}

static void names(void **state) {
  (void)state;
  refuse_saying("{" F32_AT("", 0, 4) "}", 4, K3_CNT12, "", "empty");
  refuse_saying("{" F32_AT("a\\u0000b", 0, 4) "}", 4, K3_CNT12, "a\\u0000b", "U+0000");
  refuse_saying("{" F32_AT("a\\nb", 0, 4) "}", 4, K3_CNT12, "a\\u000Ab", "U+000A");
  refuse_saying("{" F32_AT("\x7F", 0, 4) "}", 4, K3_CNT12, "\\u007F", "U+007F");
  refuse_saying("{" F32_AT("\xC2\x9B", 0, 4) "}", 4, K3_CNT12, "\\u009B", "U+009B");
  accept_and_free("{" F32_AT("\xC2\xA0\xC3\xA9", 0, 4) "}", 4);
  accept_and_free("{" F32_AT("a/b c", 0, 4) "}", 4);
  // Long names work everywhere and stay distinct in their last character.
  static const size_t lengths[] = {63, 64, 65, 200, 255, 256, 1000, 4096};
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    static char text[10000];
    char name[4097] = {0};
    memset(name, 'n', lengths[i]);
    int n = snprintf(text, sizeof text, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},", name);
    name[lengths[i] - 1] = 'm';
    snprintf(text + n, sizeof text - (size_t)n, "\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", name);
    accept(text, 2);
    assert_ptr_equal(k3_st_find(&header, name, lengths[i]), &header.tensors[1]);
    assert_string_equal(header.tensors[1].name, name);
    k3_st_header_free(&header);
  }
  static char text[5000] = "{\"";
  memset(text + 2, 'n', 4097);
  strcpy(text + 2 + 4097, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
  assert_int_equal(parse(text, 1), K3_BAD_INPUT);
  assert_int_equal(last.rule, K3_CNT12);
  assert_non_null(strstr(last.found, "4097 bytes"));
}

// ---- dtype, shape, span ----

static void dtypes(void **state) {
  (void)state;
  refuse_saying("{\"w\":{\"dtype\":\"F9\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT06, "w", "\"F9\"");
  refuse_saying("{\"w\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT06, "w", "\"f32\"");
  refuse_saying("{\"w\":{\"dtype\":\"F9\",\"shape\":[1],\"data_offsets\":[9223372036854775808,4]}}", 4, K3_CNT06, "w", "\"F9\"");
  refuse_saying("{\"w\":{\"data_offsets\":[9223372036854775808,4],\"shape\":[1],\"dtype\":\"F9\"}}", 4, K3_CNT06, "w", "\"F9\"");
  refuse_saying("{\"w\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT06, "w", "no text");
  refuse_saying("{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT06, "w", "dtype is missing");
  for (int i = 0; i < K3_DTYPE_COUNT; i++) {
    char text[128];
    unsigned bits = k3_dtype_bits((enum k3_dtype)i);
    snprintf(text, sizeof text, "{\"w\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%u]}}", k3_dtype_name((enum k3_dtype)i), bits / 2);
    accept(text, bits / 2);
    assert_int_equal(header.tensors[0].dtype, i);
    k3_st_header_free(&header);
  }
}

// F8_E8M0 [4] takes 4 bytes; F4 [2,8] counts 16 elements in 8 bytes; a packed type must fill whole bytes.
static void packed_dtypes_count_elements(void **state) {
  (void)state;
  accept(
      "{\"w\":{\"dtype\":\"F4\",\"shape\":[2,8],\"data_offsets\":[4,12]},\"s\":{\"dtype\":\"F8_E8M0\",\"shape\":[4],\"data_offsets\":[0,4]},"
      "\"t\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[12,15]}}",
      15);
  assert_int_equal(k3_st_n_elems(&header.tensors[0]), 16);
  k3_st_header_free(&header);
  refuse_saying("{\"w\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, K3_CNT05, "w", "12 bits");
  refuse_saying("{\"w\":{\"dtype\":\"F6_E3M2\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, K3_CNT05, "w", "12 bits");
}

static void shape_with(const char *dims, const char *offsets, uint64_t data_nbytes, enum k3_rule rule, const char *said) {
  char text[300];
  snprintf(text, sizeof text, "{\"w\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":%s}}", dims, offsets);
  if (rule == K3_RULE_NONE)
    accept_and_free(text, data_nbytes);
  else
    refuse_saying(text, data_nbytes, rule, rule == K3_CNT02 ? "" : "w", said);
}

// A product that wraps is refused, and a zero dimension decides nothing, in either order.
static void products_that_wrap(void **state) {
  (void)state;
  shape_with("[4294967296,4294967296]", "[0,0]", 0, K3_CNT05, "overflows");
  shape_with("[9223372036854775810,2]", "[0,16]", 16, K3_CNT05, "dimension 0 is 9223372036854775810");
  shape_with("[4611686018427387904]", "[0,0]", 0, K3_CNT05, "4611686018427387904");
  shape_with("[1099511627776,1099511627776,0]", "[0,0]", 0, K3_CNT05, "overflows");
  shape_with("[0,1099511627776,1099511627776]", "[0,0]", 0, K3_CNT05, "overflows");
  shape_with("[1099511627776,0,1099511627776]", "[0,0]", 0, K3_CNT05, "overflows");
  shape_with("[1099511627777,0]", "[0,0]", 0, K3_CNT05, "1099511627777");
  shape_with("[0,1099511627777]", "[0,0]", 0, K3_CNT05, "1099511627777");
  shape_with("[1099511627776,0]", "[0,0]", 0, K3_RULE_NONE, "");
  shape_with("[0,1099511627776]", "[0,0]", 0, K3_RULE_NONE, "");
  shape_with("[1099511627776,131072]", "[0,576460752303423488]", 0, K3_CNT03, "576460752303423488");  // 2^57 elements, 2^62 bits: fits
  shape_with("[1099511627776,524288]", "[0,0]", 0, K3_CNT05, "overflows");                            // 2^59 elements, 2^64 bits
}

static void numbers_that_are_no_plain_integers(void **state) {
  (void)state;
  shape_with("[1]", "[0,4]", 4, K3_RULE_NONE, "");
  shape_with("[-1]", "[0,4]", 4, K3_CNT05, "-1");
  shape_with("[-2,-2]", "[0,16]", 16, K3_CNT05, "-2");
  shape_with("[1.0]", "[0,4]", 4, K3_CNT05, "1.0");
  shape_with("[1e0]", "[0,4]", 4, K3_CNT05, "1e0");
  shape_with("[-0]", "[0,0]", 0, K3_CNT05, "-0");
  shape_with("[01]", "[0,4]", 4, K3_CNT02, "");
  shape_with("[\"1\"]", "[0,4]", 4, K3_CNT05, "\"1\"");
  shape_with("[null]", "[0,4]", 4, K3_CNT05, "null");
  shape_with("[[1]]", "[0,4]", 4, K3_CNT05, "[1]");
  shape_with("[9007199254740993]", "[0,4]", 4, K3_CNT05, "9007199254740993");
  shape_with("[18446744073709551616]", "[0,4]", 4, K3_CNT05, "18446744073709551616");
  shape_with("1", "[0,4]", 4, K3_CNT05, "no list");
  shape_with("null", "[0,4]", 4, K3_CNT05, "no list");
  shape_with("[1]", "[0,4,4]", 4, K3_CNT05, "more than two");
  shape_with("[1]", "[4]", 4, K3_CNT05, "fewer than two");
  shape_with("[1]", "[]", 4, K3_CNT05, "fewer than two");
  shape_with("[1]", "[4,0]", 4, K3_CNT05, "[4, 0]");
  shape_with("[1]", "[0,4.0]", 4, K3_CNT05, "4.0");
  shape_with("[1]", "{\"0\":4}", 4, K3_CNT05, "no list");
  shape_with("[1]", "[0,18446744073709551615]", 4, K3_CNT05, "18446744073709551615");
  shape_with("[1]", "[18446744073709551612,18446744073709551616]", 4, K3_CNT05, "18446744073709551616");
  shape_with("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]", 4, K3_RULE_NONE, "");
  shape_with("[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]", 4, K3_CNT05, "more than 16");
  shape_with("[2]", "[0,4]", 4, K3_CNT05, "4 bytes, shape [2] in F32 takes 8");
  shape_with("[1]", "[0,8]", 8, K3_CNT05, "8 bytes, shape [1] in F32 takes 4");
}

// Unknown fields are ignored, missing ones are errors.
static void fields_of_an_entry(void **state) {
  (void)state;
  accept_and_free("{\"w\":{\"dtype\":\"F32\",\"new\":{\"x\":[1,\"\\u00e9\"]},\"shape\":[1],\"data_offsets\":[0,4],\"new\":1}}", 4);
  refuse_saying("{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, K3_CNT05, "w", "shape is missing");
  refuse_saying("{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, K3_CNT05, "w", "data_offsets is missing");
  refuse_saying("{\"w\":[1]}", 0, K3_CNT05, "w", "no object");
  refuse_saying("{\"w\":null}", 0, K3_CNT05, "w", "no object");
  refuse("{\"w\":{\"dtype\":\"F32\",\"new\":01,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, K3_CNT02);
}

// ---- tiling ----

// A short file and trailing bytes are told apart.
static void the_file_ends_with_its_last_tensor(void **state) {
  (void)state;
  static const char text[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
  refuse_saying(text, 4, K3_CNT03, "w", "ends at byte 8 of the data, the file has 4: 4 bytes are missing");
  refuse_saying(text, 7, K3_CNT03, "w", "1 bytes are missing");
  refuse_saying(text, 0, K3_CNT03, "w", "8 bytes are missing");
  accept_and_free(text, 8);
  refuse_saying(text, 12, K3_CNT04, "", "4 bytes after the last tensor are not covered by any tensor");
  assert_null(strstr(last.found, "truncated"));
}

static void spans_tile_the_data(void **state) {
  (void)state;
  refuse_saying("{" F32_AT("a", 0, 4) "," F32_AT("b", 0, 4) "}", 4, K3_CNT04, "b", "overlap those of a, [0, 4]");
  refuse_saying("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
                12, K3_CNT04, "b", "[4, 12] overlap those of a, [0, 8]");
  refuse_saying("{" F32_AT("a", 0, 4) "," F32_AT("b", 8, 12) "}", 12, K3_CNT04, "b", "4 bytes between the end of a");
  refuse_saying("{" F32_AT("a", 4, 8) "}", 8, K3_CNT04, "a", "4 bytes between the begin of the data");
  refuse_saying("{" F32_AT("b", 8, 12) "," F32_AT("a", 4, 8) "}", 12, K3_CNT04, "a", "the begin of the data");
  // A tensor without bytes may lie on a border, not inside another.
  accept_and_free("{" F32_AT("a", 0, 4) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}," F32_AT("b", 4, 8) "}", 8);
  accept_and_free("{" F32_AT("b", 4, 8) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}," F32_AT("a", 0, 4) "}", 8);
  accept_and_free("{" F32_AT("a", 0, 4) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}", 4);
  accept_and_free("{" F32_AT("a", 0, 4) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]}}", 4);
  refuse_saying("{" F32_AT("a", 0, 4) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}}", 4, K3_CNT04, "e", "overlap");
  refuse_saying("{" F32_AT("a", 0, 4) ",\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[9,9]}}", 4, K3_CNT04, "e", "5 bytes");
}

// Header order, name order and offset order may all differ.
static void any_order_of_entries(void **state) {
  (void)state;
  static const char *const entries[] = {F32_AT("c", 4, 8), F32_AT("a", 8, 12), F32_AT("b", 0, 4)};
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (int i = 0; i < 6; i++) {
    char text[300];
    snprintf(text, sizeof text, "{%s,%s,%s}", entries[orders[i][0]], entries[orders[i][1]], entries[orders[i][2]]);
    accept(text, 12);
    assert_int_equal(k3_st_find(&header, "c", 1)->begin, 4);
    assert_int_equal(k3_st_find(&header, "a", 1)->begin, 8);
    assert_int_equal(k3_st_find(&header, "b", 1)->begin, 0);
    k3_st_header_free(&header);
  }
}

// Unaligned data is fine, and counted: the header's own length counts too.
static void misaligned_tensors_are_counted(void **state) {
  (void)state;
  static const char base[] =
      "{\"u\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"f\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[3,7]}";
  for (size_t pad = 0; pad < 8; pad++) {
    char text[300];
    snprintf(text, sizeof text, "%s%*s}", base, (int)pad, "");
    accept(text, 7);
    assert_int_equal(header.n_misaligned, (8 + strlen(text) + 3) % 4 != 0);
    assert_int_equal(header.tensors[1].begin, 3);
    k3_st_header_free(&header);
  }
}

// Headers that end on the border of some reader's buffer: any length works.
static void any_header_length(void **state) {
  (void)state;
  static char text[70000];
  static const size_t ends[] = {4095, 4096, 4097, 65535, 65536, 65537};
  for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
    memset(text, ' ', sizeof text);
    memcpy(text, "{" F32_AT("a", 0, 4) "}", sizeof("{" F32_AT("a", 0, 4) "}") - 1);
    assert_int_equal(parse_n(text, ends[i] - 8, 4), K3_OK);
    assert_int_equal(header.data_begin, ends[i]);
    k3_st_header_free(&header);
  }
}

// ---- memory and size ----

static void every_failing_allocation(void **state) {
  (void)state;
  static const char text[] = "{\"__metadata__\":{\"a\":\"b\\n\"}," F32_AT("a", 4, 8) "," F32_AT("\\u0062", 0, 4) "}";
  for (uint64_t n = 1;; n++) {
    struct k3_error err = {0};
    k3_alloc_fail_at(n);
    enum k3_status status = k3_st_parse(text, sizeof text - 1, 8 + sizeof text - 1 + 8, "f", &header, &err);
    k3_alloc_fail_at(0);
    if (status == K3_OK) {
      assert_true(n > 4);
      k3_st_header_free(&header);
      break;
    }
    assert_int_equal(status, K3_NO_MEMORY);
    assert_int_equal(err.status, K3_NO_MEMORY);
    assert_null(header.tensors);
  }
}

// No allocation per tensor: twice the tensors, hardly more allocations.
static void allocations_do_not_grow_with_the_tensors(void **state) {
  (void)state;
  uint64_t counts[2];
  for (int round = 0; round < 2; round++) {
    size_t n_tensors = round ? 20000 : 10000, n = 1;
    char *text = malloc(n_tensors * 100);
    text[0] = '{';
    for (size_t i = 0; i < n_tensors; i++)
      n += (size_t)sprintf(text + n, "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}", i ? "," : "", i, i, i + 1);
    text[n++] = '}';
    uint64_t before = k3_alloc_count();
    assert_int_equal(parse_n(text, n, n_tensors), K3_OK);
    counts[round] = k3_alloc_count() - before;
    assert_int_equal(header.n_tensors, n_tensors);
    for (size_t i = 0; i < n_tensors; i += 97) {
      char name[16];
      int n_name = snprintf(name, sizeof name, "t%zu", i);
      assert_ptr_equal(k3_st_find(&header, name, (size_t)n_name), &header.tensors[i]);
    }
    k3_st_header_free(&header);
    free(text);
  }
  assert_in_range(counts[1], 1, 20);
}

// What a hostile header can make the reader ask for is bounded by its length: braces in a name are no tensors.
static void braces_in_a_name_ask_for_nothing(void **state) {
  (void)state;
  static char text[5000] = "{\"";
  memset(text + 2, '{', 4096);
  strcpy(text + 2 + 4096, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
  accept_and_free(text, 1);
}

// ---- the writer ----

struct sunk {
  char text[40000];
  size_t n, n_calls, fail_at;
};

static enum k3_status sink(void *ctx, const void *bytes, size_t nbytes, struct k3_error *err) {
  struct sunk *sunk = ctx;
  if (++sunk->n_calls == sunk->fail_at)
    return k3_fail(err, K3_NO_SPACE, K3_OUT03, "out", NULL, NULL, "full");
  memcpy(sunk->text + sunk->n, bytes, nbytes);
  sunk->n += nbytes;
  return K3_OK;
}

static enum k3_status write_sample(struct k3_st_writer *writer, struct sunk *sunk, uint64_t padded, uint64_t *h, struct k3_error *err) {
  uint64_t shape[2] = {2, 3};
  k3_st_write_begin(writer, sunk ? sink : NULL, sunk);
  k3_st_write_metadata(writer, "format", "pt", err);
  k3_st_write_metadata(writer, "quote\"\\", "line\n\x1f\xC3\xA9", err);
  k3_st_write_tensor(writer, "a\"\\\t\xC3\xA9", K3_DTYPE_BF16, shape, 2, 0, 12, err);
  k3_st_write_tensor(writer, "s", K3_DTYPE_F32, NULL, 0, 12, 16, err);
  return k3_st_write_end(writer, padded, h, err);
}

static void the_writer_is_read_back(void **state) {
  (void)state;
  static struct sunk sunk;
  struct k3_st_writer writer;
  uint64_t h, counted;
  memset(&sunk, 0, sizeof sunk);
  assert_int_equal(write_sample(&writer, &sunk, 0, &h, NULL), K3_OK);
  assert_string_equal(sunk.text,
                      "{\"__metadata__\":{\"format\":\"pt\",\"quote\\\"\\\\\":\"line\\u000a\\u001f\xC3\xA9\"},"
                      "\"a\\\"\\\\\\u0009\xC3\xA9\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                      "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]}}");
  assert_int_equal(h, sunk.n);
  assert_int_equal(write_sample(&writer, NULL, 0, &counted, NULL), K3_OK);  // without a sink it counts
  assert_int_equal(counted, h);
  // Padding is spaces alone, up to exactly the size asked for.
  memset(&sunk, 0, sizeof sunk);
  assert_int_equal(write_sample(&writer, &sunk, 20000, &h, NULL), K3_OK);
  assert_int_equal(h, 20000);
  assert_int_equal(sunk.n, 20000);
  for (size_t i = counted; i < 20000; i++)
    assert_int_equal(sunk.text[i], ' ');
  memset(&sunk, 0, sizeof sunk);
  assert_int_equal(write_sample(&writer, &sunk, counted, &h, NULL), K3_OK);
  assert_int_equal(h, counted);
  struct k3_error err = {0};
  assert_int_equal(write_sample(&writer, NULL, counted - 1, &h, &err), K3_BAD_ARGUMENT);
}

static void empty_headers_are_written_and_read(void **state) {
  (void)state;
  static struct sunk sunk;
  struct k3_st_writer writer;
  uint64_t h;
  memset(&sunk, 0, sizeof sunk);
  k3_st_write_begin(&writer, sink, &sunk);
  assert_int_equal(k3_st_write_end(&writer, 0, &h, NULL), K3_OK);
  assert_string_equal(sunk.text, "{}");
  memset(&sunk, 0, sizeof sunk);
  k3_st_write_begin(&writer, sink, &sunk);
  assert_int_equal(k3_st_write_metadata(&writer, "k", "v", NULL), K3_OK);
  assert_int_equal(k3_st_write_end(&writer, 64, &h, NULL), K3_OK);
  assert_int_equal(parse_n(sunk.text, h, 0), K3_OK);
  assert_int_equal(header.n_tensors, 0);
  assert_string_equal(k3_st_metadata(&header, "k"), "v");
  k3_st_header_free(&header);
}

// B26: what its reader would refuse is not written.
static void the_writer_keeps_within_its_readers_cap(void **state) {
  (void)state;
  struct k3_st_writer writer;
  struct k3_error err = {0};
  uint64_t h;
  k3_st_write_begin(&writer, NULL, NULL);
  assert_int_equal(k3_st_write_end(&writer, K3_ST_MAX_HEADER_NBYTES, &h, &err), K3_OK);
  k3_st_write_begin(&writer, NULL, NULL);
  assert_int_equal(k3_st_write_end(&writer, K3_ST_MAX_HEADER_NBYTES + 1, &h, &err), K3_UNSUPPORTED);
  assert_non_null(strstr(err.found, "100000001"));
}

static void a_failing_sink_is_remembered(void **state) {
  (void)state;
  static struct sunk sunk;
  for (size_t fail_at = 1; fail_at <= 3; fail_at++) {
    struct k3_st_writer writer;
    struct k3_error err = {0};
    uint64_t h, dim = 1;
    memset(&sunk, 0, sizeof sunk);
    sunk.fail_at = fail_at;
    k3_st_write_begin(&writer, sink, &sunk);
    enum k3_status status = K3_OK;
    for (uint64_t i = 0; i < 400; i++) {
      enum k3_status now = k3_st_write_tensor(&writer, "tensor", K3_DTYPE_U8, &dim, 1, i, i + 1, &err);
      assert_true(status == K3_OK || now == status);
      status = now;
    }
    assert_int_equal(k3_st_write_end(&writer, 0, &h, &err), K3_NO_SPACE);
    assert_int_equal(err.rule, K3_OUT03);
    assert_int_equal(sunk.n_calls, fail_at);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_header_is_read),
      cmocka_unit_test(length_bounds),
      cmocka_unit_test(other_files_are_recognised),
      cmocka_unit_test(the_header_must_fit_the_file),
      cmocka_unit_test(white_space_around_the_header),
      cmocka_unit_test(bad_json_names_the_byte),
      cmocka_unit_test(no_tensors),
      cmocka_unit_test(duplicate_keys),
      cmocka_unit_test(metadata_forms),
      cmocka_unit_test(names),
      cmocka_unit_test(dtypes),
      cmocka_unit_test(packed_dtypes_count_elements),
      cmocka_unit_test(products_that_wrap),
      cmocka_unit_test(numbers_that_are_no_plain_integers),
      cmocka_unit_test(fields_of_an_entry),
      cmocka_unit_test(the_file_ends_with_its_last_tensor),
      cmocka_unit_test(spans_tile_the_data),
      cmocka_unit_test(any_order_of_entries),
      cmocka_unit_test(misaligned_tensors_are_counted),
      cmocka_unit_test(any_header_length),
      cmocka_unit_test(every_failing_allocation),
      cmocka_unit_test(allocations_do_not_grow_with_the_tensors),
      cmocka_unit_test(braces_in_a_name_ask_for_nothing),
      cmocka_unit_test(the_writer_is_read_back),
      cmocka_unit_test(empty_headers_are_written_and_read),
      cmocka_unit_test(the_writer_keeps_within_its_readers_cap),
      cmocka_unit_test(a_failing_sink_is_remembered),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
