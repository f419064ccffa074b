/* y = x W^T + bias, the sums in float32. The weight is packed once, when a model is loaded. */
#ifndef LORAPLEX_LINEAR_H
#define LORAPLEX_LINEAR_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a packed weight holds. The layout is the same for every instruction set (packed_weight.h). */
typedef int32_t loraplex_weight_kind;
enum {
    LORAPLEX_WEIGHT_FLOAT32 = 0,
    LORAPLEX_WEIGHT_BFLOAT16 = 1,
    LORAPLEX_WEIGHT_FLOAT16 = 2,
    /* The others have a scale per output and group of inputs, and w = value * scale. The groups
     * have 2^n inputs, from LORAPLEX_MIN_GROUP_SIZE to LORAPLEX_MAX_GROUP_SIZE. */
    LORAPLEX_WEIGHT_INT8 = 3, /* -128 .. 127 */
    LORAPLEX_WEIGHT_INT4 = 4, /* -8 .. 7 */
    /* An offset per output and group: w = value * scale - offset. */
    LORAPLEX_WEIGHT_INT8_OFFSETS = 5,
    LORAPLEX_WEIGHT_INT4_OFFSETS = 6,
    LORAPLEX_WEIGHT_TABLE4 = 7, /* 0 .. 15, w = table[value] * scale */
    /* As INT8 and INT4, but the inputs are rounded to 8 bits instead of 16. */
    LORAPLEX_WEIGHT_INT8_BY_INT8 = 8,
    LORAPLEX_WEIGHT_INT4_BY_INT8 = 9,
    /* Super-blocks of LORAPLEX_SUPER_BLOCK_INPUTS inputs, which divide those of a block, and in them
     * groups of 16 or 32: w = value * factor * scale - minimum * minimum_scale, the factor and the
     * minimum of a group int8, both scales of a super-block. */
    LORAPLEX_WEIGHT_SUPER4 = 10, /* 0 .. 15 */
    LORAPLEX_WEIGHT_SUPER6 = 11, /* -32 .. 31, no minima */
    LORAPLEX_WEIGHT_SUPER6_OFFSETS = 12, /* -32 .. 31 */
};

#define LORAPLEX_SUPER_BLOCK_INPUTS 256

#define LORAPLEX_MIN_GROUP_SIZE 16
/* 512 products of -128 and 32767 fit in 32 bits, and 512 inputs of 16 bits in a float32's 24. */
#define LORAPLEX_MAX_GROUP_SIZE 512

/* The inputs may be cut into so many equal blocks at most; their number is a power of two. */
#define LORAPLEX_MAX_BLOCKS 8

/* Bytes of a packed weight; 0 if an argument is invalid. group_size: inputs that share a scale, 0
 * where there are no scales. It divides the inputs of a block of 4-bit kinds. num_blocks, from 1 on,
 * divides the inputs; each block has groups of its own. */
LORAPLEX_API int64_t loraplex_packed_weight_bytes(loraplex_weight_kind kind, int64_t group_size,
                                                  int64_t num_blocks, int64_t out_features,
                                                  int64_t in_features);

/* weight [out_features, in_features] of the kind's own type; int8_t for kinds with scales.
 * scales [out_features, num_blocks * groups of a block] float32, offsets likewise and with the same
 * stride, table [16]: each null where the kind has none. No entry of the table is above
 * 65536 / group_size - 1 or below its negative, so that a group's sum fits in 32 bits.
 *
 * Of super-blocks, scales and offsets are those of a super-block and of its minima; factors
 * [out_features, groups] int8, and minima likewise and with the same stride. Null for other kinds. */
LORAPLEX_API loraplex_status loraplex_pack_weight(loraplex_pool *pool, loraplex_weight_kind kind,
                                                  int64_t group_size, int64_t num_blocks,
                                                  const void *weight, int64_t weight_stride,
                                                  const float *scales, int64_t scales_stride,
                                                  const float *offsets, const int8_t *factors,
                                                  const int8_t *minima, int64_t factors_stride,
                                                  const int16_t *table, int64_t out_features,
                                                  int64_t in_features, void *packed);

/* x [num_rows, in_features], bias [out_features] float32 or null, y [num_rows, out_features] of
 * x's type.
 *
 * Every block of inputs has a sum of its own. Neighbouring sums are added until one is left:
 * (b0 + b1) + (b2 + b3). With a channel, this rank's sums are added to those of the others alike, and
 * the ranks have the same rows; null: there is one rank. Then the bias is added.
 *
 * float32, bfloat16, float16: every sum runs over the block's inputs in their order. But where the
 * CPU has LORAPLEX_CPU_AMX_BF16, bfloat16 weights and inputs are added as its instruction does it:
 * of each 32 inputs of a block, those with even numbers are one chain, those with odd ones another;
 * both are added, then that to the sum; subnormal numbers count as 0. With LORAPLEX_CPU_AVX512_BF16
 * instead, of each pair of inputs the second one is added first; subnormal numbers count as 0, too.
 * With LORAPLEX_CPU_NEON_BF16 the sum of a pair's products is added; both sums are rounded towards 0,
 * or to the odd one of two neighbours where that loses bits; subnormal numbers count as 0, too.
 *
 * Kinds with scales: a block of a row of x is rounded to 16 bits, x = round(x / s) s with
 * s = max |x| / 32767. The products of a group are added as integers, exactly; the groups' sums times
 * their scales, less the exact sums of their inputs times their offsets, each rounded, are added in
 * float32 in their order; the block's s is multiplied last. Bits are the
 * same on every instruction set. A block whose max |x| is less than 2^-100 counts as zeros; one that
 * holds an infinity or a NaN makes the row's result NaN.
 *
 * INT8_BY_INT8 and INT4_BY_INT8: the same with groups instead of blocks and with s = max |x| / 127: a
 * group's sum times the weight's scale, rounded, times s, rounded, is added in float32.
 *
 * Super-blocks: the same with super-blocks instead of blocks and with s = max |x| / 127. The sum of a
 * super-block's products times their groups' factors is whole and exact, and so is that of its inputs
 * times the minima; the first times the scale, less the second times the minima's, times s, each
 * rounded, is added in float32. */
LORAPLEX_API loraplex_status loraplex_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                             int64_t group_size, int64_t num_blocks,
                                             loraplex_dtype dtype, const void *x, int64_t x_stride,
                                             int64_t num_rows, const void *packed,
                                             int64_t out_features, int64_t in_features,
                                             const float *bias, loraplex_channel *channel, void *y,
                                             int64_t y_stride);

#ifdef __cplusplus
}
#endif

#endif
