#!/bin/sh
# Prints the folder of CUDA's headers, from the project's root: CUDA_HOME, where toolkits usually stand, or build/venv, where setup.sh test puts those of
# the Python packages when there is no toolkit. Exit 1 when there are none.
for folder in "${CUDA_HOME:+$CUDA_HOME/include}" /usr/local/cuda/include /usr/lib/cuda/include /opt/cuda/include \
  build/venv/lib/python3*/site-packages/nvidia/cu13/include; do
  [ -n "$folder" ] && [ -e "$folder/cuda_runtime.h" ] && [ -e "$folder/cuda_fp4.h" ] && echo "$folder" && exit 0
done
exit 1
