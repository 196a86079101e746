#include "base/status.h"

struct status_row {
  enum k3_status status;
  int exit_code;
  const char *name, *text;
};

static const struct status_row STATUS_ROWS[] = {
#define K3_STATUS_ROW(name, value, exit_code, text) {name, exit_code, #name, text},
    K3_STATUS_MAP(K3_STATUS_ROW)
#undef K3_STATUS_ROW
};

static const struct status_row *find_row(enum k3_status status) {
  static const struct status_row unknown = {K3_OK, 3, "K3_?", "unknown status"};
  for (unsigned i = 0; i < sizeof STATUS_ROWS / sizeof STATUS_ROWS[0]; i++) {
    if (STATUS_ROWS[i].status == status)
      return &STATUS_ROWS[i];
  }
  return &unknown;
}

const char *k3_status_name(enum k3_status status) {
  return find_row(status)->name;
}

const char *k3_status_text(enum k3_status status) {
  return find_row(status)->text;
}

int k3_status_exit_code(enum k3_status status) {
  return find_row(status)->exit_code;
}
