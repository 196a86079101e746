#include <string.h>

#include "formats/safetensors.h"

void k3_st_write_begin(struct k3_st_writer *writer, k3_st_sink_fn sink, void *ctx) {
  *writer = (struct k3_st_writer){.sink = sink, .ctx = ctx, .n_bytes = 1, .n_buffered = 1, .buffer = "{"};
}

static void flush(struct k3_st_writer *writer, struct k3_error *err) {
  if (writer->status == K3_OK && writer->sink && writer->n_buffered > 0)
    writer->status = writer->sink(writer->ctx, writer->buffer, writer->n_buffered, err);
  writer->n_buffered = 0;
}

static void put(struct k3_st_writer *writer, const char *bytes, size_t nbytes, struct k3_error *err) {
  writer->n_bytes += nbytes;
  while (nbytes > 0) {
    if (writer->n_buffered == sizeof writer->buffer)
      flush(writer, err);
    size_t n = sizeof writer->buffer - writer->n_buffered;
    n = n < nbytes ? n : nbytes;
    memcpy(writer->buffer + writer->n_buffered, bytes, n);
    writer->n_buffered += n;
    bytes += n;
    nbytes -= n;
  }
}

static void put_text(struct k3_st_writer *writer, const char *text, struct k3_error *err) {
  put(writer, text, strlen(text), err);
}

static void put_u64(struct k3_st_writer *writer, uint64_t value, struct k3_error *err) {
  char digits[20];
  size_t at = sizeof digits;
  do {
    digits[--at] = (char)('0' + value % 10);
    value /= 10;
  } while (value > 0);
  put(writer, digits + at, sizeof digits - at, err);
}

// Only what JSON demands is escaped, as the reference writer does it.
static void put_quoted(struct k3_st_writer *writer, const char *text, struct k3_error *err) {
  static const char hex[] = "0123456789abcdef";
  put(writer, "\"", 1, err);
  for (const char *plain = text;; text++) {
    unsigned char byte = (unsigned char)*text;
    if (byte >= 0x20 && byte != '"' && byte != '\\')
      continue;
    put(writer, plain, (size_t)(text - plain), err);
    if (byte == 0)
      break;
    plain = text + 1;
    char escaped[6] = {'\\', 'u', '0', '0', hex[byte >> 4], hex[byte & 15]};
    if (byte < 0x20)
      put(writer, escaped, 6, err);
    else
      put(writer, (char[]){'\\', (char)byte}, 2, err);
  }
  put(writer, "\"", 1, err);
}

static void put_comma(struct k3_st_writer *writer, struct k3_error *err) {
  if (writer->any_entry)
    put(writer, ",", 1, err);
  writer->any_entry = true;
}

enum k3_status k3_st_write_metadata(struct k3_st_writer *writer, const char *key, const char *value, struct k3_error *err) {
  if (!writer->in_metadata) {
    put_comma(writer, err);
    put_text(writer, "\"__metadata__\":{", err);
    writer->in_metadata = true;
  } else {
    put(writer, ",", 1, err);
  }
  put_quoted(writer, key, err);
  put(writer, ":", 1, err);
  put_quoted(writer, value, err);
  return writer->status;
}

static void end_metadata(struct k3_st_writer *writer, struct k3_error *err) {
  if (writer->in_metadata)
    put(writer, "}", 1, err);
  writer->in_metadata = false;
}

enum k3_status k3_st_write_tensor(struct k3_st_writer *writer, const char *name, enum k3_dtype dtype, const uint64_t *shape, unsigned rank,
                                  uint64_t begin, uint64_t end, struct k3_error *err) {
  end_metadata(writer, err);
  put_comma(writer, err);
  put_quoted(writer, name, err);
  put_text(writer, ":{\"dtype\":\"", err);
  put_text(writer, k3_dtype_name(dtype), err);
  put_text(writer, "\",\"shape\":[", err);
  for (unsigned i = 0; i < rank; i++) {
    put(writer, ",", i > 0, err);
    put_u64(writer, shape[i], err);
  }
  put_text(writer, "],\"data_offsets\":[", err);
  put_u64(writer, begin, err);
  put(writer, ",", 1, err);
  put_u64(writer, end, err);
  put_text(writer, "]}", err);
  return writer->status;
}

enum k3_status k3_st_write_end(struct k3_st_writer *writer, uint64_t padded_nbytes, uint64_t *h, struct k3_error *err) {
  static const char spaces[] = "                                                                ";
  end_metadata(writer, err);
  put(writer, "}", 1, err);
  if (padded_nbytes > 0 && padded_nbytes < writer->n_bytes)
    return k3_fail(err, K3_BAD_ARGUMENT, K3_RULE_NONE, NULL, NULL, NULL, "a safetensors header of %llu bytes does not fit into %llu",
                   (unsigned long long)writer->n_bytes, (unsigned long long)padded_nbytes);
  uint64_t n_total = padded_nbytes > 0 ? padded_nbytes : writer->n_bytes;
  if (n_total > K3_ST_MAX_HEADER_NBYTES)
    return k3_fail(err, K3_UNSUPPORTED, K3_RULE_NONE, NULL, NULL, "a header of at most 100000000 bytes, which is what readers of safetensors accept",
                   "the header would have %llu bytes", (unsigned long long)n_total);
  while (writer->n_bytes < n_total) {
    uint64_t rest = n_total - writer->n_bytes;
    put(writer, spaces, rest < sizeof spaces - 1 ? (size_t)rest : sizeof spaces - 1, err);
  }
  flush(writer, err);
  *h = writer->n_bytes;
  return writer->status;
}
