// The version of k3pack. The manifest of every image carries it, so it changes with the bytes that an equal input gives.
#ifndef K3_BASE_VERSION_H
#define K3_BASE_VERSION_H

#define K3_VERSION "0.1.0"
#define K3_TOOL "k3pack " K3_VERSION

#endif
