// Marks what the shared library exports; everything else is hidden (-fvisibility=hidden).
#ifndef K3_BASE_API_H
#define K3_BASE_API_H

#define K3_API __attribute__((visibility("default")))

#endif
