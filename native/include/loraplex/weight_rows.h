/* Rows of a packed weight as numbers: the vectors of an embedding, and what norms are made of. */
#ifndef LORAPLEX_WEIGHT_ROWS_H
#define LORAPLEX_WEIGHT_ROWS_H

#include "loraplex/abi.h"
#include "loraplex/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y [num_rows, in_features] of `dtype`: row rows[i] of a weight that loraplex_pack_weight packed.
 * Numbers are made in float32, each operation rounded, then rounded to the dtype:
 * value * scale - offset, table[value] * scale, or
 * value * (factor * scale) - minimum * minimum_scale. Rows must be of the weight. */
LORAPLEX_API loraplex_status loraplex_weight_rows(loraplex_pool *pool, loraplex_weight_kind kind,
                                                  int64_t group_size, int64_t num_blocks,
                                                  const void *packed, int64_t out_features,
                                                  int64_t in_features, const int64_t *rows,
                                                  int64_t num_rows, loraplex_dtype dtype, void *y,
                                                  int64_t y_stride);

#ifdef __cplusplus
}
#endif

#endif
