/* Blocks of GGUF files, as they lie there, packed for loraplex_linear. */
#ifndef LORAPLEX_GGUF_H
#define LORAPLEX_GGUF_H

#include "loraplex/abi.h"
#include "loraplex/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers that files have for the types. K types have super-blocks, the others groups of 32. */
typedef int32_t loraplex_gguf_type;
enum {
    LORAPLEX_GGUF_Q4_0 = 2,
    LORAPLEX_GGUF_Q4_1 = 3,
    LORAPLEX_GGUF_Q5_0 = 6,
    LORAPLEX_GGUF_Q5_1 = 7,
    LORAPLEX_GGUF_Q8_0 = 8,
    LORAPLEX_GGUF_Q2_K = 10,
    LORAPLEX_GGUF_Q3_K = 11,
    LORAPLEX_GGUF_Q4_K = 12,
    LORAPLEX_GGUF_Q5_K = 13,
    LORAPLEX_GGUF_Q6_K = 14,
    LORAPLEX_GGUF_IQ4_NL = 20,
    LORAPLEX_GGUF_IQ4_XS = 23,
    LORAPLEX_GGUF_MXFP4 = 39,
};

/* The panels that loraplex_pack_weight makes of the same numbers. rows [out_features]: the first
 * block of each row; types likewise. all_finite: 0 if a scale is infinite or NaN.
 *
 * Kinds of super-blocks: without minima they take Q6_K only, SUPER4 types of up to 4 bits, and a
 * group_size of 32 Q4_K and Q5_K. The others take groups of 32, which divide the inputs of a block:
 * INT8 all of them, INT4 Q4_0 and Q4_1, TABLE4 types with one and the same table. Q4_1 and Q5_1 need
 * offsets. */
LORAPLEX_API loraplex_status loraplex_pack_gguf(loraplex_pool *pool, loraplex_weight_kind kind,
                                                int64_t group_size, int64_t num_blocks,
                                                const void *const *rows, const uint8_t *types,
                                                int64_t out_features, int64_t in_features,
                                                void *packed, int32_t *all_finite);

#ifdef __cplusplus
}
#endif

#endif
