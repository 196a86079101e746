// cmocka.h needs these four before it; a test includes this header instead of it, so that its includes can be sorted.
#ifndef K3_TESTS_UNIT_UNIT_H
#define K3_TESTS_UNIT_UNIT_H

// clang-format off
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

#endif
