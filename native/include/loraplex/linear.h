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
};

/* Bytes of a packed weight; 0 if an argument is invalid. */
LORAPLEX_API int64_t loraplex_packed_weight_bytes(loraplex_weight_kind kind, int64_t out_features,
                                                  int64_t in_features);

/* weight [out_features, in_features] of the kind's own type. */
LORAPLEX_API loraplex_status loraplex_pack_weight(loraplex_pool *pool, loraplex_weight_kind kind,
                                                  const void *weight, int64_t weight_stride,
                                                  int64_t out_features, int64_t in_features,
                                                  void *packed);

/* x [num_rows, in_features], bias [out_features] float32 or null, y [num_rows, out_features] of
 * x's type. Every sum runs over the inputs in their order, so its bits depend on nothing else. */
LORAPLEX_API loraplex_status loraplex_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                             loraplex_dtype dtype, const void *x, int64_t x_stride,
                                             int64_t num_rows, const void *packed,
                                             int64_t out_features, int64_t in_features,
                                             const float *bias, void *y, int64_t y_stride);

#ifdef __cplusplus
}
#endif

#endif
