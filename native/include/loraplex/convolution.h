/* Causal convolutions of each channel over the positions of a sequence. */
#ifndef LORAPLEX_CONVOLUTION_H
#define LORAPLEX_CONVOLUTION_H

#include "loraplex/abi.h"
#include "loraplex/elementwise.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LORAPLEX_MOST_TAPS = 32,
    LORAPLEX_NO_ACTIVATION = -1,
};

/* x [num_tokens, num_channels] -> output, contiguous: activation(bias + the sum over taps j of
 * weight[channel, j] * the input at its position - (num_taps - 1 - j)), in float32, j in its order
 * and the bias last; inputs before position 0 are 0. bias [num_channels] or null.
 *
 * Row r of num_rows has the tokens query_start_loc[r] up to query_start_loc[r + 1], at positions
 * that follow one another; it may have none. Tokens after those of the last row are padding, whose
 * output is 0. places [num_tokens]: where the inputs are stored, block * block_size + offset, or
 * -1: nowhere. Position p of row r lies in the block tables[table_starts[r] + p / block_size].
 *
 * stored [blocks, block_size, num_channels]: gets the inputs of all rows before any of it is read,
 * and has those of earlier positions. Element (channel, j) of the weight is
 * weight[channel * channel_stride + j * tap_stride]; with a channel_stride of 1 it is fastest. */
LORAPLEX_API loraplex_status loraplex_causal_conv(
    loraplex_pool *pool, int64_t num_rows, int64_t num_tokens, int64_t num_channels,
    int64_t block_size, const int64_t *query_start_loc, const int64_t *positions,
    const int64_t *places, const int64_t *table_starts, const int64_t *tables,
    loraplex_dtype dtype, const void *x, int64_t x_stride, const float *weight, int64_t num_taps,
    int64_t channel_stride, int64_t tap_stride, const float *bias, loraplex_activation activation,
    float *stored, void *output);

#ifdef __cplusplus
}
#endif

#endif
