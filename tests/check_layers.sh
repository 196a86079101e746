#!/bin/sh
# Fails on an include that the folder table of the README does not allow. Run from the project's root.
set -u
bad=0

# allowed FOLDER HEADER-FOLDER: may a file of FOLDER include a header of HEADER-FOLDER?
allowed() {
  case "$1" in
    base) set -- "$2" base ;;
    formats) set -- "$2" base formats ;;
    quant) set -- "$2" base quant ;;
    loader) set -- "$2" base formats quant loader ;;
    runtime | runtime/cpu | runtime/cuda) set -- "$2" base formats quant "$1" runtime ;;
    cli) set -- "$2" base formats quant loader runtime cli ;;
    *) return 0 ;;
  esac
  wanted=$1
  shift
  for one; do [ "$wanted" = "$one" ] && return 0; done
  return 1
}

for file in $(git ls-files --cached --others --exclude-standard -- 'base/*' 'formats/*' 'loader/*' 'quant/*' 'runtime/*' 'cli/*' |
              grep -E '\.(c|h|cu|cuh)$'); do
  folder=$(dirname "$file")
  for header in $(sed -n 's/^#include "\([^"]*\)".*/\1/p' "$file"); do
    if ! allowed "$folder" "$(dirname "$header")"; then
      echo "check_layers: $file may not include \"$header\"" >&2
      bad=1
    fi
  done
  for library in $(sed -n 's/^#include <\([^>]*\)>.*/\1/p' "$file"); do
    case "$library" in
      openssl/*) [ "$file" = base/sha256.c ] ;;
      zlib.h) [ "$file" = base/crc32.c ] ;;
      jansson.h) [ "$folder" = formats ] ;;
      pcre2.h) [ "$folder" = formats ] ;;
      cuda* | cublas* | nccl*) [ "$folder" = runtime/cuda ] ;;
      *) : ;;
    esac || { echo "check_layers: $file may not name <$library>" >&2; bad=1; }
  done
done

# Only cli/ prints or exits.
for file in $(git ls-files --cached --others --exclude-standard -- 'base/*.c' 'formats/*.c' 'loader/*.c' 'quant/*.c' 'runtime/*.c'); do
  if grep -nE '(^|[^a-z_>.])(printf|puts|putchar|perror|exit|abort)\(' "$file" | grep -v '^ *//' >&2; then
    echo "check_layers: $file prints or exits; only cli/ may" >&2
    bad=1
  fi
done
[ "$bad" = 0 ] && echo "check_layers: every include is allowed"
exit "$bad"
