// What the SIMD files of quant/ share: see quant/kernels.h for the meaning of the functions.
#ifndef K3_QUANT_KERNELS_SIMD_H
#define K3_QUANT_KERNELS_SIMD_H

#include "quant/kernels.h"

void k3_encode_e4m3_avx2(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                         uint8_t *dst);
void k3_encode_nvfp4_avx2(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales,
                          uint8_t *codes);
void k3_encode_mxfp4_avx2(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
void k3_encode_mxfp8_avx2(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);

void k3_encode_e4m3_avx512(enum k3_dtype dtype, const void *src, size_t n_rows, size_t stride, size_t n_cols, size_t region_cols, const float *scales,
                           uint8_t *dst);
void k3_encode_nvfp4_avx512(enum k3_nvfp4_mode mode, float second, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales,
                            uint8_t *codes);
void k3_encode_mxfp4_avx512(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);
void k3_encode_mxfp8_avx512(enum k3_mx_mode mode, enum k3_dtype dtype, const void *src, size_t n_blocks, uint8_t *scales, uint8_t *codes);

#endif
